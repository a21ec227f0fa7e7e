"""How fast flash attention is next to its peers, all taking turns in one run.

    python benchmarks/flash_attn_fwd.py --csv forward.csv
    python benchmarks/flash_attn_fwd.py --host

16384 tokens and 2048 channels whatever the length and the head dimension. Figures are medians, TFLOP/s;
ratios are fly's speed over the peer's. Whether results are right is for tests/kernels/test_flash_attn_fwd.py.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.providers import FLY, PROVIDERS, Call, Provider, named
from benchmarks.timing import host_microseconds, measure
from benchmarks.workload import DTYPES, Workload

TOKENS, CHANNELS = 16384, 2048
SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
SMALL = Workload(1, 128, 128, 2, 2, 64, "bf16", True)  # shorter on the GPU than its launch


@dataclass(frozen=True)
class Figure:
    """One provider's speed on one workload; `fly_ratio` is fly's speed over it, None without fly."""

    workload: Workload
    provider: str
    milliseconds: float
    tflops: float
    fly_ratio: float | None


def sweep(seq_lens: Sequence[int], head_dims: Sequence[int], dtype: str, causal: Sequence[bool]) -> list[Workload]:
    """Workloads of the same number of tokens (at least one sequence) and channels."""
    return [
        Workload(
            max(1, TOKENS // seq_len),
            seq_len,
            seq_len,
            heads := CHANNELS // dim,
            heads,
            dim,
            dtype,
            is_causal,
        )
        for dim in head_dims
        for is_causal in causal
        for seq_len in seq_lens
    ]


def _bind(
    workload: Workload, providers: Sequence[Provider], device: str
) -> Iterator[tuple[Provider, Call | None, str]]:
    """Every provider's call, warmed up, or the reason why there is none."""
    tensors = workload.tensors(0, device)
    for provider in providers:
        reason = provider.unsupported(workload)
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
    workload: Workload, providers: Sequence[Provider], *, device: str, iters: int, flush: bool = True
) -> tuple[list[Figure], dict[str, str]]:
    """Time the providers on one workload, taking turns: figures, and the reasons of those that have none."""
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for provider, call, reason in _bind(workload, providers, device):
        if call is None:
            reasons[provider.name] = reason
        else:
            calls[provider.name] = call
    timings = measure(calls, device=device, iters=iters, warmup=3, flush=flush)
    ours = timings[FLY.name].median if FLY.name in timings else None
    figures = [
        Figure(
            workload,
            name,
            timing.median,
            workload.flops / timing.median / 1e9,
            None if ours is None else timing.median / ours,
        )
        for name, timing in timings.items()
    ]
    return figures, reasons


def _table_row(workload: Workload, figures: Sequence[Figure], names: Sequence[str]) -> str:
    speeds = {figure.provider: figure for figure in figures}
    cells = [f"{speeds[name].tflops:12.1f}" if name in speeds else f"{'-':>12}" for name in names]
    ratios = [
        f"{speeds[name].fly_ratio:16.2f}" if name in speeds and speeds[name].fly_ratio else f"{'-':>16}"
        for name in names
        if name != FLY.name
    ]
    return f"{workload!s:34}" + "".join(cells) + " |" + "".join(ratios)


def _header(names: Sequence[str]) -> str:
    ratios = "".join(f"{f'fly/{name}':>16}" for name in names if name != FLY.name)
    return f"{'TFLOP/s':34}" + "".join(f"{name:>12}" for name in names) + " |" + ratios


def print_host_times(providers: Sequence[Provider], device: str) -> None:
    """Print the host time of a warm call of every provider."""
    print(f"host time of a warm call, {SMALL}")
    for provider, call, reason in _bind(SMALL, providers, device):
        figure = reason if call is None else f"{host_microseconds(call, device=device):8.1f} µs"
        print(f"{provider.name:12} {figure}", flush=True)


def run(
    workloads: Sequence[Workload],
    providers: Sequence[Provider],
    *,
    device: str,
    iters: int,
    flush: bool = True,
    csv_path: Path | None = None,
) -> None:
    """Print a table of speeds and ratios, one line per workload, and write every figure to `csv_path`."""
    names = [provider.name for provider in providers]
    print(_header(names))
    rows: list[dict[str, object]] = []
    told: set[tuple[str, str]] = set()
    for workload in workloads:
        figures, reasons = compare(workload, providers, device=device, iters=iters, flush=flush)
        print(_table_row(workload, figures, names), flush=True)
        for reason in reasons.items():
            if reason not in told:
                print(f"  {reason[0]}: {reason[1]}")
                told.add(reason)
        rows += [
            asdict(f.workload) | {key: value for key, value in vars(f).items() if key != "workload"} for f in figures
        ]
    if csv_path is not None:
        columns = [f.name for f in (*fields(Workload), *fields(Figure)) if f.name != "workload"]
        with csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time flash attention next to its peers, taking turns.")
    parser.add_argument("--seq_len", type=int, nargs="+", metavar="N", default=list(SEQ_LENS))
    parser.add_argument("--head_dim", type=int, nargs="+", metavar="N", default=list(HEAD_DIMS))
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="both by default")
    parser.add_argument("--iters", type=int, metavar="N", default=30, help="timed calls of each (30)")
    parser.add_argument("--no-flush", action="store_true", help="keep the L2 cache between calls")
    parser.add_argument("--provider", action="append", default=[], metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--host", action="store_true", help="host time of a warm call instead")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 where there is no GPU or nothing to time."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.iters < 1:
        parser.error(f"--iters must be at least 1, got {args.iters}")
    try:
        providers = named(args.provider) if args.provider else PROVIDERS
        causal = (True, False) if args.causal is None else (args.causal,)
        workloads = sweep(args.seq_len, args.head_dim, args.dtype, causal)
    except (ValueError, ZeroDivisionError) as error:
        parser.error(str(error))
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
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.no_grad():
        if args.host:
            print_host_times(present, "cuda")
        else:
            run(
                workloads,
                present,
                device="cuda",
                iters=args.iters,
                flush=not args.no_flush,
                csv_path=args.csv,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
