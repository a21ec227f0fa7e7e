"""Runs configurations through providers: right or wrong, how far off, how fast; and its command line."""

from __future__ import annotations

import argparse
import csv
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import progress, say
from benchmarks.providers import FLY, FORCED, PEERS, PROVIDERS, Call, Provider, named
from benchmarks.shapes import SETS, Kind, kinds, workloads_of_sets
from benchmarks.timing import measure
from benchmarks.workload import COLUMNS, DTYPES, Workload
from tests.kernels.reference import Reference, check, reference

OK, WRONG, FAILED, SKIPPED = "ok", "WRONG", "FAILED", "skipped"


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
        text = f"{self.workload!s:40} {self.provider:12} {self.status:7}"
        if self.max_error is not None:
            text += f" error {self.max_error:.2e} of {self.error_bound:.2e}  cosine {self.row_cosine:.6f}"
        if self.tflops is not None:
            text += f"  {self.milliseconds:9.4f} ms {self.tflops:8.1f} TFLOP/s"
        return f"{text} {self.reason}".rstrip()

    def as_dict(self) -> dict[str, object]:
        """One flat record, for a CSV file."""
        own = {name: value for name, value in vars(self).items() if name != "workload"}
        return self.workload.record() | own


# of a CSV file; the figures are empty where there are none
CSV_COLUMNS = (
    *COLUMNS,
    *(field.name for field in fields(Row) if field.name != "workload"),
    "seed",
    "device",
    "torch",
)


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
        ref = reference(*tensors, causal=workload.causal, lengths=workload.lengths)
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
    run_of = {"seed": seed, "device": name, "torch": torch.__version__}
    say(f"seed {seed}, {name}, torch {torch.__version__}, {len(workloads)} configurations")
    present = []
    for provider in providers:
        reason = provider.missing(device)
        if reason is None:
            present.append(provider)
        else:
            say(f"{provider.name}: {reason}")
    counts = Counter[str]()
    with nullcontext() if csv_path is None else csv_path.open("w", newline="") as file:
        writer = None if file is None else csv.DictWriter(file, CSV_COLUMNS)
        if writer is not None:
            writer.writeheader()
        for workload in progress(workloads, "config") if present else ():
            for row in run_workload(workload, present, seed=seed, device=device, iters=iters, warmup=warmup):
                counts[row.status] += 1
                say(str(row))
                if writer is not None:
                    writer.writerow(row.as_dict() | run_of)
    say(", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing could run")
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
HEAD_FLAGS = ("num_heads", "num_kv_heads")
PACKED_FLAGS = {
    "seqlens": "packed sequences: the queries of each",
    "seqlens_kv": "and the keys of each; seqlens by default",
}
REDUCED_LENGTH = 256
TIMED_CALLS = {"cuda": 30, "cpu": 0}  # unless --iters says so


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected lengths such as 1024,8192,3, got {text!r}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Check flash attention against a float32 reference and time it. Configurations are one shape, "
        "packed sequences (--seqlens), or named sets; without any of these, the 27 default shapes. Each runs with "
        "both dtypes, causal and full.",
    )
    shape = parser.add_argument_group("one shape")
    for flag, meaning in SHAPE_FLAGS.items():
        default = f" ({SHAPE_DEFAULTS[flag]})" if flag in SHAPE_DEFAULTS else ""
        shape.add_argument(f"--{flag}", type=int, metavar="N", help=meaning + default)
    for flag, meaning in PACKED_FLAGS.items():
        shape.add_argument(f"--{flag}", type=_lengths, metavar="N,N", help=meaning)
    named_sets = parser.add_argument_group("sets (several may be given)")
    for name, (meaning, _) in SETS.items():
        named_sets.add_argument(f"--{name}", dest="sets", action="append_const", const=name, help=meaning)
    named_sets.add_argument("--all", dest="sets", action="store_const", const=list(SETS), help="all sets")
    named_sets.add_argument(
        "--reduced",
        action="store_true",
        help=f"cut lengths to {REDUCED_LENGTH}, and batch and heads: small enough for the emulator",
    )
    parser.add_argument(
        "--num_kv_splits", type=int, metavar="N", help="split keys; 0 leaves the number to the kernel"
    )
    parser.add_argument("--head_dim", type=int, metavar="N", default=128, help="size of a head (128)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="both by default")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="both by default")
    parser.add_argument(
        "--iters",
        type=int,
        metavar="N",
        help="timed calls, 0 for none (30 on a GPU; none in the emulator, whose times say nothing about a GPU)",
    )
    parser.add_argument("--warmup", type=int, metavar="N", default=5, help="calls before those (5)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the inputs; a fresh one by default")
    parser.add_argument("--compare", action="store_true", help="also run every other provider")
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="run this one only (may be repeated): " + ", ".join(p.name for p in (FLY, *FORCED, *PEERS)),
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="the GPU if there is one; cpu runs fly in its emulator"
    )
    return parser


def _shape_of(args: argparse.Namespace) -> dict[str, Any]:
    flags = (*SHAPE_FLAGS, *PACKED_FLAGS)
    return {flag: getattr(args, flag) for flag in flags if getattr(args, flag) is not None}


def _one_shape(shape: dict[str, Any], of: Sequence[Kind]) -> list[Workload]:
    if "seqlens" in shape:
        dense = [flag for flag in shape if flag not in (*HEAD_FLAGS, *PACKED_FLAGS)]
        if dense:
            raise ValueError(f"--seqlens packs sequences: leave --{' and --'.join(dense)} out")
        queries, keys = shape["seqlens"], shape.get("seqlens_kv", shape["seqlens"])
        if len(keys) != len(queries):
            raise ValueError(f"--seqlens has {len(queries)} lengths and --seqlens_kv {len(keys)}")
        heads = shape.get("num_heads", SHAPE_DEFAULTS["num_heads"])
        return [kind.packed(tuple(zip(queries, keys)), heads, shape.get("num_kv_heads", heads)) for kind in of]
    if "seqlens_kv" in shape:
        raise ValueError("--seqlens_kv needs --seqlens")
    shape = SHAPE_DEFAULTS | shape
    shape = {"seq_len_kv": shape["seq_len"], "num_kv_heads": shape["num_heads"]} | shape
    return [Workload(**shape, **vars(kind)) for kind in of]


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """The configurations that the parsed flags ask for, each once.

    Raises:
        ValueError: sizes that make no workload, or flags that do not go together.
    """
    causal = (True, False) if args.causal is None else (args.causal,)
    of = kinds(tuple(DTYPES) if args.dtype is None else (args.dtype,), causal, (args.head_dim,))
    shape = _shape_of(args)
    if args.sets and shape:
        raise ValueError("one shape or sets, not both: leave the shape's flags or the sets out")
    selected = _one_shape(shape, of) if shape else workloads_of_sets(args.sets or ["default"], of)
    if args.num_kv_splits is not None:
        selected = [replace(workload, num_kv_splits=args.num_kv_splits) for workload in selected]
    if args.reduced:
        selected = [workload.reduced(REDUCED_LENGTH) for workload in selected]
    return list(dict.fromkeys(selected))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns an exit code (see `run`)."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        selected = workloads_of(args)
        providers = named(args.provider) if args.provider else PROVIDERS if args.compare else (FLY,)
    except ValueError as error:
        parser.error(str(error))
    if (args.iters or 0) < 0 or args.warmup < 0:
        parser.error("--iters and --warmup must not be negative")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if device == "cpu" and not args.reduced and not _shape_of(args):
        parser.error("the default shapes and sets need a GPU; on the CPU choose a small shape or --reduced")
    iters = TIMED_CALLS[device] if args.iters is None else args.iters
    with torch.no_grad():
        return run(
            selected,
            providers,
            seed=secrets.randbits(31) if args.seed is None else args.seed,
            device=device,
            iters=iters,
            warmup=args.warmup,
            csv_path=args.csv,
        )
