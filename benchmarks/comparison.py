"""Speeds of a pass of attention next to its peers' in one process: what the two benchmarks' command lines share.

Times are medians of CUDA events over rounds in which every provider has one turn, in random order. Ratios are fly's
speed over a peer's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import progress, say
from benchmarks.providers import FORWARD, Call, Pass, Provider
from benchmarks.report import Figure, plot, plot_missing, plottable, summary, table_header, table_row, write_csv
from benchmarks.run_record import run_record, versions
from benchmarks.shapes import PRESETS_OF, Preset
from benchmarks.timing import host_microseconds, measure
from benchmarks.workload import ALL_DTYPES, DTYPES, Workload
from fly.runtime.device import device_of
from kernels.commands import request_of
from kernels.dispatch import BACKWARD, as_backward, choose

SMALL = Workload(1, 128, 128, 2, 2, 64, "bf16", True)  # shorter on the GPU than its launch
CEILING_SIZE = 8192


def _bind(
    workload: Workload, providers: Sequence[Provider], device: str, of: Pass
) -> Iterator[tuple[Provider, Call | None, str]]:
    """Every provider's call, warmed up, or the reason why there is none."""
    tensors = of.tensors(workload, 0, device)
    for provider in providers:
        reason = provider.refuses(workload)
        if reason is None:
            try:
                call = provider.bind(workload, *tensors)
                call()
            except Exception as error:  # a provider can fail in any way, and the others still have their turn
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            else:
                yield provider, call, ""
                continue
        yield provider, None, reason


def compare(
    workload: Workload,
    providers: Sequence[Provider],
    *,
    device: str,
    iters: int,
    cold: bool = True,
    of: Pass = FORWARD,
) -> tuple[list[Figure], dict[str, str]]:
    """Time the providers on one workload, taking turns: figures, and the reasons of those that have none."""
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for provider, call, reason in _bind(workload, providers, device, of):
        if call is None:
            reasons[provider.name] = reason
        else:
            calls[provider.name] = call
    flushes = of.flushes if cold else 0
    timings = measure(calls, device=device, iters=iters, warmup=3, flushes=flushes) if calls else {}
    return [Figure(workload, name, timing, of.work) for name, timing in timings.items()], reasons


def ceiling(dtype: str, device: str, size: int = CEILING_SIZE, iters: int = 20) -> float:
    """TFLOP/s of a square matrix product of random numbers: what this device reaches where nothing else is done."""
    a, b = (torch.randn(size, size, device=device).to(ALL_DTYPES[dtype]) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        if dtype in DTYPES:
            return a @ b
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    timing = measure({"matmul": product}, device=device, iters=iters, warmup=3)["matmul"]
    return 2 * size**3 / timing.median / 1e9


def kernel_of(figure: Figure, arch: str, of: Pass = FORWARD) -> str:
    """The name of the kernel of ours that a figure is of, as dispatch chooses it on `arch`."""
    (provider,) = of.named([figure.provider])
    if provider in of.forced:
        return provider.name.removeprefix(f"{of.fly.name} ")
    sizes = {name: value for name, value in figure.workload.record().items() if not name.startswith("seqlens")}
    forms: dict[str, Any] = {"packed": True} if figure.workload.lengths else {}
    forms |= {"feature": ["paged"]} if figure.workload.page_size else {}
    request = request_of(argparse.Namespace(**sizes, **forms))
    assert request is not None
    return choose(arch, as_backward(request) if of.kernels is BACKWARD else request, of.kernels).name


def print_host_times(providers: Sequence[Provider], device: str, of: Pass = FORWARD) -> None:
    """Print the host time of a warm call of every provider."""
    print(f"host time of a warm call, {SMALL}")
    for provider, call, reason in _bind(SMALL, providers, device, of):
        figure = reason if call is None else f"{host_microseconds(call, device=device):8.1f} µs"
        print(f"{provider.name:12} {figure}", flush=True)


def run(
    workloads: Sequence[Workload],
    providers: Sequence[Provider],
    *,
    device: str,
    iters: int,
    cold: bool = True,
    of: Pass = FORWARD,
) -> list[Figure]:
    """Time every workload and print a table of speeds, one line per workload; what has no figure says why, once."""
    names = [provider.name for provider in providers]
    say(table_header(names))
    every: list[Figure] = []
    told: set[tuple[str, str]] = set()
    for workload in progress(workloads, "cell"):
        figures, reasons = compare(workload, providers, device=device, iters=iters, cold=cold, of=of)
        say(table_row(workload, figures, names))
        for reason in reasons.items():
            if reason not in told:
                say(f"  {reason[0]}: {reason[1]}")
                told.add(reason)
        every += figures
    return every


def _parser(of: Pass = FORWARD) -> argparse.ArgumentParser:
    presets = PRESETS_OF[of.name]
    first, *_ = presets
    parser = argparse.ArgumentParser(
        description=f"Time flash attention's {of.name} pass next to its peers, taking turns.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="presets:\n" + "\n".join(f"  {name:8} {preset.meaning}" for name, preset in presets.items()),
    )
    parser.add_argument("--preset", choices=tuple(presets), default=first, help="what is timed, and against what")
    parser.add_argument("--seq_len", type=int, nargs="+", metavar="N", help="lengths instead of the preset's")
    parser.add_argument(
        "--head_dim", type=int, nargs="+", metavar="N", help="head dimensions instead of the preset's"
    )
    parser.add_argument("--dtype", choices=tuple(ALL_DTYPES), help="instead of the preset's (bf16, of fp8 f8e4m3)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="both by default")
    parser.add_argument("--iters", type=int, metavar="N", default=30, help="rounds (30)")
    parser.add_argument(
        "--warm", action="store_true", help="keep the L2 cache: bursts of calls; it is emptied before each by default"
    )
    parser.add_argument("--provider", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument(
        "--peers", metavar="NAME,NAME", help="these instead of the preset's, next to ours: " + _names(of.peers)
    )
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        choices=[provider.name.removeprefix("fly ") for provider in of.forced],
        help="also time fly with this kernel forced (repeatable)",
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", default=1.0, help="list cells under X of the best (1)"
    )
    parser.add_argument("--host", action="store_true", help="host time of a warm call instead")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--commit", metavar="REV", help="what FILE says was measured, where there is no git")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed against length into FILE (.png, .svg)")
    return parser


def _names(providers: Sequence[Provider]) -> str:
    return ", ".join(provider.name for provider in providers)


def _chosen(args: argparse.Namespace, preset: Preset, of: Pass) -> tuple[Provider, ...]:
    """Who is timed.

    Raises:
        ValueError: a name that no provider has, or flags that do not go together.
    """
    names = args.provider or preset.providers
    if args.peers is not None:
        if args.provider:
            raise ValueError("--peers and --provider: name the peers with one of them")
        theirs = of.named(name.strip() for name in args.peers.split(","))
        ours = {provider.name for provider in of.ours}
        names = [*(name for name in preset.providers if name in ours), *(provider.name for provider in theirs)]
    return of.named(dict.fromkeys([*names, *(f"fly {kernel}" for kernel in args.kernel)]))


def main(argv: Sequence[str] | None = None, of: Pass = FORWARD) -> int:
    """The command line; exit code 2 where there is no GPU or nothing to time."""
    parser = _parser(of)
    args = parser.parse_args(argv)
    if args.iters < 1:
        parser.error(f"--iters must be at least 1, got {args.iters}")
    preset = PRESETS_OF[of.name][args.preset]
    chosen = {"seq_lens": args.seq_len, "head_dims": args.head_dim}
    chosen = {name: values for name, values in chosen.items() if values}
    try:
        providers = _chosen(args, preset, of)
        causal = (True, False) if args.causal is None else (args.causal,)
        dtype = args.dtype or preset.dtype
        workloads = preset.workloads(dtype, causal, **chosen)
    except (ValueError, ZeroDivisionError) as error:
        parser.error(str(error))
    if args.plot is not None and plot_missing():
        parser.error(f"--plot: {plot_missing()}")
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to time", file=sys.stderr)
        return 2
    present = []
    for provider in providers:
        reason = provider.missing("cuda")
        if reason is None:
            present.append(provider)
        else:
            print(f"{provider.name}: {reason}")
    if not present:
        return 2
    device = torch.cuda.get_device_name()
    print(f"{device}, {versions()}")
    with torch.no_grad():
        if args.host:
            print_host_times(present, "cuda", of)
            return 0
        before = ceiling(dtype, "cuda")
        figures = run(workloads, present, device="cuda", iters=args.iters, cold=not args.warm, of=of)
        top = max(before, after := ceiling(dtype, "cuda"))
    if args.csv is not None:
        same = {"ceiling_tflops": top, "l2": "warm" if args.warm else "cold", "rounds": args.iters}
        arch = device_of(torch.device("cuda")).target
        write_csv(
            args.csv, figures, same | run_record(args.preset, args.commit), partial(kernel_of, arch=arch, of=of)
        )
    if args.plot is not None and any(plottable(figure.workload) for figure in figures):
        plot(args.plot, figures, top, f"Flash attention {of.name}, {dtype}, {device}")
    print(f"matrix product {CEILING_SIZE}³ {dtype}: {before:.0f} TFLOP/s before, {after:.0f} after")
    print("\n".join(summary(figures, args.threshold)))
    return 0
