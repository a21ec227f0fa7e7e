"""Runs configurations through providers: right or wrong, how far off, how fast; and its command line."""

from __future__ import annotations

import argparse
import csv
import itertools
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from benchmarks.providers import FLY, PROVIDERS, Call, Provider, named
from benchmarks.timing import measure
from benchmarks.workload import DTYPES, Workload
from tests.kernels.reference import Reference, check, reference

try:
    from tqdm import tqdm
except ImportError:  # everything works without a progress bar
    tqdm = None

# The default configurations: (num_heads, num_kv_heads): (batch, seq_len)s.
DEFAULT_SHAPES: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (64, 64): (
        *((8, s) for s in (128, 256, 512)),
        *((1, s) for s in (128, 256, 384, 512, 1024, 2048, 4096, 8192)),
        *((2, 1024), (4, 8192), (16, 8192)),
    ),
    (64, 8): ((16, 8192),),
    (32, 32): ((1, 2048), (1, 4096), (1, 8192), (8, 8192)),
    (16, 16): ((1, 2048), (1, 4096), (1, 8192), (16, 8192)),
    (8, 8): ((1, 2048), (1, 4096), (1, 8192), (32, 8192)),
}
OK, WRONG, FAILED, SKIPPED = "ok", "WRONG", "FAILED", "skipped"


def default_workloads(
    dtypes: Iterable[str] = tuple(DTYPES),
    causal: Iterable[bool] = (True, False),
    head_dims: Iterable[int] = (128,),
) -> list[Workload]:
    """The default shapes, each with every dtype, mask and head dimension, in that order."""
    shapes = [(*size, *heads) for heads, sizes in DEFAULT_SHAPES.items() for size in sizes]
    return [
        Workload(batch, seq_len, seq_len, heads, kv_heads, head_dim, dtype, is_causal)
        for (batch, seq_len, heads, kv_heads), dtype, is_causal, head_dim in itertools.product(
            shapes, dtypes, causal, head_dims
        )
    ]


@dataclass(frozen=True)
class Row:
    """What one provider did with one workload; the figures are None where it did not get that far."""

    workload: Workload
    provider: str
    status: str
    reason: str = ""
    max_error: float | None = None
    error_bound: float | None = None
    row_cosine: float | None = None
    milliseconds: float | None = None
    tflops: float | None = None

    def __str__(self) -> str:
        text = f"{self.workload!s:40} {self.provider:11} {self.status:7}"
        if self.max_error is not None:
            text += f" error {self.max_error:.2e} of {self.error_bound:.2e}  cosine {self.row_cosine:.6f}"
        if self.tflops is not None:
            text += f"  {self.milliseconds:9.4f} ms {self.tflops:8.1f} TFLOP/s"
        return f"{text} {self.reason}".rstrip()

    def as_dict(self) -> dict[str, object]:
        """One flat record, for a CSV file."""
        own = {name: value for name, value in vars(self).items() if name != "workload"}
        return asdict(self.workload) | own


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def _checked(
    provider: Provider, workload: Workload, tensors: tuple[torch.Tensor, ...], ref: Reference
) -> tuple[Row, Call | None]:
    """The provider's first call, held against the reference; the call, if it is worth timing."""
    try:
        call = provider.bind(workload, *tensors)
        report = check(call(), ref)
    except torch.OutOfMemoryError:
        raise
    except NotImplementedError as error:
        return Row(workload, provider.name, SKIPPED, _first_line(error)), None
    except Exception as error:  # a provider can fail in any way, and the others still have their turn
        # only our own failures fail the run: a peer's are its own business, but are shown
        status = FAILED if provider is FLY else SKIPPED
        return Row(workload, provider.name, status, _first_line(error)), None
    row = Row(
        workload,
        provider.name,
        OK if report.ok else WRONG,
        max_error=report.error,
        error_bound=report.bound,
        row_cosine=report.cosine,
    )
    return row, call if report.ok else None


def run_workload(
    workload: Workload,
    providers: Sequence[Provider],
    *,
    seed: int,
    device: str,
    iters: int,
    warmup: int,
) -> list[Row]:
    """Check every provider against one reference, then time those that are right, taking turns (unless iters
    is 0). A workload that does not fit in memory is skipped.
    """
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    try:
        tensors = workload.tensors(seed, device)
        ref = reference(*tensors, causal=workload.causal)
        for provider in providers:
            reason = provider.unsupported(workload)
            if reason is not None:
                rows.append(Row(workload, provider.name, SKIPPED, reason))
                continue
            row, call = _checked(provider, workload, tensors, ref)
            rows.append(row)
            if call is not None:
                calls[provider.name] = call
        del ref
        timings = measure(calls, device=device, iters=iters, warmup=warmup) if calls and iters else {}
    except torch.OutOfMemoryError as error:
        return [Row(workload, provider.name, SKIPPED, _first_line(error)) for provider in providers]
    return [_timed(row, timings[row.provider].median) if row.provider in timings else row for row in rows]


def _timed(row: Row, milliseconds: float) -> Row:
    figures = {"milliseconds": milliseconds, "tflops": row.workload.flops / milliseconds / 1e9}
    return replace(row, **figures)


def _progress(workloads: list[Workload]) -> Iterator[Workload]:
    """The workloads, under a progress bar on a terminal when there are several."""
    if tqdm is None or len(workloads) == 1:
        yield from workloads
        return
    with tqdm(workloads, unit="config", disable=None, file=sys.stderr) as bar:
        for workload in bar:
            bar.set_postfix_str(str(workload))
            yield workload


def _say(text: str) -> None:
    if tqdm is None:
        print(text, flush=True)
    else:
        tqdm.write(text, file=sys.stdout)


def run(
    workloads: list[Workload],
    providers: Sequence[Provider],
    *,
    seed: int,
    device: str,
    iters: int,
    warmup: int,
    csv_path: Path | None = None,
) -> int:
    """Run every workload through every provider that is there; print the rows and write them to `csv_path`.

    Returns:
        An exit code: 0; 1 when a result is wrong or fly fails; 2 when nothing was checked at all.
    """
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    _say(f"seed {seed}, {name}, torch {torch.__version__}, {len(workloads)} configurations")
    present = []
    for provider in providers:
        reason = provider.missing(device)
        if reason is None:
            present.append(provider)
        else:
            _say(f"{provider.name}: {reason}")
    counts = Counter[str]()
    with nullcontext() if csv_path is None else csv_path.open("w", newline="") as file:
        columns = [field.name for field in fields(Workload)]
        columns += [field.name for field in fields(Row) if field.name != "workload"]
        writer = None if file is None else csv.DictWriter(file, [*columns, "seed", "device"])
        if writer is not None:
            writer.writeheader()
        for workload in _progress(workloads) if present else ():
            for row in run_workload(workload, present, seed=seed, device=device, iters=iters, warmup=warmup):
                counts[row.status] += 1
                _say(str(row))
                if writer is not None:
                    writer.writerow(row.as_dict() | {"seed": seed, "device": name})
    _say(", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing could run")
    if counts[WRONG] or counts[FAILED]:
        return 1
    return 0 if counts[OK] else 2


SHAPE_FLAGS = {
    "batch": "sequences",
    "seq_len": "queries of a sequence",
    "seq_len_kv": "keys of a sequence; seq_len by default",
    "num_heads": "query heads",
    "num_kv_heads": "key heads; num_heads by default",
}
SHAPE_DEFAULTS = {"batch": 1, "seq_len": 1024, "num_heads": 16}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Check flash attention against a float32 reference and time it. Without a shape flag, "
        "the 27 default shapes run with both dtypes, causal and full.",
    )
    for flag, meaning in SHAPE_FLAGS.items():
        default = f" ({SHAPE_DEFAULTS[flag]})" if flag in SHAPE_DEFAULTS else ""
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=meaning + default)
    parser.add_argument("--head_dim", type=int, metavar="N", default=128, help="size of a head (128)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="both by default")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="both by default")
    parser.add_argument("--iters", type=int, metavar="N", default=30, help="timed calls, 0 for none (30)")
    parser.add_argument("--warmup", type=int, metavar="N", default=5, help="calls before those (5)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the inputs; a fresh one by default")
    parser.add_argument("--compare", action="store_true", help="also run every other provider")
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="run this one only (may be repeated): " + ", ".join(p.name for p in PROVIDERS),
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="the GPU if there is one; cpu runs fly in its emulator"
    )
    return parser


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """The configurations that the parsed flags ask for.

    Raises:
        ValueError: sizes that make no workload.
    """
    dtypes = tuple(DTYPES) if args.dtype is None else (args.dtype,)
    causal = (True, False) if args.causal is None else (args.causal,)
    shape = {flag: getattr(args, flag) for flag in SHAPE_FLAGS if getattr(args, flag) is not None}
    if not shape:
        return default_workloads(dtypes, causal, (args.head_dim,))
    shape = SHAPE_DEFAULTS | shape
    shape = {"seq_len_kv": shape["seq_len"], "num_kv_heads": shape["num_heads"]} | shape
    return [
        Workload(**shape, head_dim=args.head_dim, dtype=dtype, causal=is_causal)
        for dtype, is_causal in itertools.product(dtypes, causal)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns an exit code (see `run`)."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        workloads = workloads_of(args)
        providers = named(args.provider) if args.provider else PROVIDERS if args.compare else (FLY,)
    except ValueError as error:
        parser.error(str(error))
    if args.iters < 0 or args.warmup < 0:
        parser.error("--iters and --warmup must not be negative")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if device == "cpu" and all(getattr(args, flag) is None for flag in SHAPE_FLAGS):
        parser.error("the default shapes need a GPU; on the CPU choose a small one, e.g. --seq_len 64 --num_heads 2")
    with torch.no_grad():
        return run(
            workloads,
            providers,
            seed=secrets.randbits(31) if args.seed is None else args.seed,
            device=device,
            iters=args.iters,
            warmup=args.warmup,
            csv_path=args.csv,
        )
