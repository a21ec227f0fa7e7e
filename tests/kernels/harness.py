"""Runs configurations through providers: right or wrong, how far off, how fast; and its command line."""

from __future__ import annotations

import argparse
import csv
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import progress, say
from benchmarks.providers import BACKWARD, FORWARD, Call, Pass, Provider
from benchmarks.shapes import SETS, Kind, kinds, workloads_of_sets
from benchmarks.timing import Timing, measure
from benchmarks.workload import COLUMNS, DTYPES, Workload
from tests.kernels.gradient_reference import Gradients, gradients_by_parts
from tests.kernels.reference import Report, check, reference

OK, WRONG, FAILED, SKIPPED = "ok", "WRONG", "FAILED", "skipped"


@dataclass(frozen=True)
class Suite:
    """A pass of attention, and how its results are checked.

    `reference(workload, tensors)`: what all providers' results are held against, by `check(result, reference)`;
    `against` says what that is. `reduced_length`: what --reduced cuts lengths to.
    """

    of: Pass
    reference: Callable[[Workload, Sequence[torch.Tensor]], Any]
    check: Callable[[Any, Any], Report]
    against: str
    reduced_length: int

    @property
    def name(self) -> str:
        """The pass's."""
        return self.of.name


def _reference(workload: Workload, tensors: Sequence[torch.Tensor]) -> Any:
    return reference(*tensors, causal=workload.causal, lengths=workload.lengths)


def _gradients(workload: Workload, tensors: Sequence[torch.Tensor]) -> Gradients:
    q, k, v, dout = tensors
    dlse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], device=q.device)  # no loss of the log-sum-exp
    with torch.enable_grad():
        return gradients_by_parts(q, k, v, workload.causal, dout, dlse, workload.lengths)


def check_gradients(found: Sequence[torch.Tensor], expected: Gradients) -> Report:
    """The worst of dq, dk and dv: the one whose error is nearest to what is allowed, or the furthest from it.

    Its `cosine` is of whole gradients, the smallest: rows whose gradient is 0 but for rounding have no direction.

    Raises:
        ValueError: a shape that is not the reference's.
    """
    for g, exact in zip(found, expected.exact, strict=True):
        if g.shape != exact.shape:
            raise ValueError(f"a gradient has shape {tuple(g.shape)}, the reference {tuple(exact.shape)}")
    # NaN is the worst; no error at all is allowed where there is nothing
    worst = max(expected.errors(found), key=lambda of: math.inf if math.isnan(of[1]) else of[1] / max(of[2], 1e-300))
    cosines = [_cosine(g, exact) for g, exact in zip(found, expected.exact, strict=True)]
    return Report(worst[1], worst[2], min(cosines), None)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 where both are zero."""
    a, b = a.to(b.dtype).flatten(), b.flatten()
    if not a.any() and not b.any():
        return 1.0
    return torch.nn.functional.cosine_similarity(a, b, dim=0, eps=1e-300).item()


FORWARD_SUITE = Suite(FORWARD, _reference, check, "a float32 reference", 256)
BACKWARD_SUITE = Suite(BACKWARD, _gradients, check_gradients, "gradients of a float64 reference", 64)


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
    fly_ratio: float | None = None

    def __str__(self) -> str:
        text = f"{self.workload!s:40} {self.provider:12} {self.status:7}"
        if self.max_error is not None:
            text += f" error {self.max_error:.2e} of {self.error_bound:.2e}  cosine {self.row_cosine:.6f}"
        if self.tflops is not None:
            text += f"  {self.milliseconds:9.4f} ms {self.tflops:8.1f} TFLOP/s"
        if self.fly_ratio is not None:
            text += f"  fly is {self.fly_ratio:.3f} of it"
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
    provider: Provider, workload: Workload, tensors: Sequence[torch.Tensor], ref: Any, suite: Suite
) -> tuple[Row, Call | None]:
    """The provider's first call, held against the reference; the call, if it is worth timing."""
    try:
        call = provider.bind(workload, *tensors)
        report = suite.check(call(), ref)
    except torch.OutOfMemoryError:
        raise
    except NotImplementedError as error:
        return Row(workload, provider.name, SKIPPED, _first_line(error)), None
    except Exception as error:  # a provider can fail in any way, and the others still have their turn
        # only our own failures fail the run: a peer's are its own business, but are shown
        status = FAILED if provider is suite.of.fly else SKIPPED
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
    suite: Suite = FORWARD_SUITE,
) -> list[Row]:
    """Check every provider against one reference, then time those that are right, taking turns (unless iters
    is 0). A workload that does not fit in memory is skipped.
    """
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    try:
        tensors = suite.of.tensors(workload, seed, device)
        ref = suite.reference(workload, tensors)
        for provider in providers:
            reason = provider.refuses(workload)
            if reason is not None:
                rows.append(Row(workload, provider.name, SKIPPED, reason))
                continue
            row, call = _checked(provider, workload, tensors, ref, suite)
            rows.append(row)
            if call is not None:
                calls[provider.name] = call
        del ref
        timed = {"device": device, "iters": iters, "warmup": warmup, "flushes": suite.of.flushes}
        timings = measure(calls, **timed) if calls and iters else {}
    except torch.OutOfMemoryError as error:
        return [Row(workload, provider.name, SKIPPED, _first_line(error)) for provider in providers]
    return [_timed(row, timings, suite.of) if row.provider in timings else row for row in rows]


def _timed(row: Row, timings: Mapping[str, Timing], of: Pass) -> Row:
    """With its speed, and of a peer's row, ours over it."""
    milliseconds = timings[row.provider].median
    ours = timings.get(of.fly.name)
    ratio = None if ours is None or row.provider == of.fly.name else milliseconds / ours.median
    figures = {"milliseconds": milliseconds, "tflops": of.work * row.workload.flops / milliseconds / 1e9}
    return replace(row, **figures, fly_ratio=ratio)


def run(
    workloads: list[Workload],
    providers: Sequence[Provider],
    *,
    seed: int,
    device: str,
    iters: int,
    warmup: int,
    csv_path: Path | None = None,
    suite: Suite = FORWARD_SUITE,
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
            given = {"seed": seed, "device": device, "iters": iters, "warmup": warmup, "suite": suite}
            for row in run_workload(workload, present, **given):
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
TIMED_CALLS = {"cuda": 30, "cpu": 0}  # unless --iters says so


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected lengths such as 1024,8192,3, got {text!r}") from None


def _parser(suite: Suite = FORWARD_SUITE) -> argparse.ArgumentParser:
    everyone = (suite.of.fly, *suite.of.forced, *suite.of.peers)
    parser = argparse.ArgumentParser(
        description=f"Check flash attention's {suite.name} pass against {suite.against} and time it. "
        "Configurations are one shape, packed sequences (--seqlens), or named sets; without any of these, the 27 "
        "default shapes. Each runs with both dtypes, causal and full.",
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
        help=f"cut lengths to {suite.reduced_length}, and batch and heads: small enough for the emulator",
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
        help="run this one only (may be repeated): " + ", ".join(p.name for p in everyone),
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


def workloads_of(args: argparse.Namespace, suite: Suite = FORWARD_SUITE) -> list[Workload]:
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
        selected = [workload.reduced(suite.reduced_length) for workload in selected]
    return list(dict.fromkeys(selected))


def main(argv: Sequence[str] | None = None, suite: Suite = FORWARD_SUITE) -> int:
    """The command line; returns an exit code (see `run`)."""
    parser = _parser(suite)
    args = parser.parse_args(argv)
    try:
        selected = workloads_of(args, suite)
        of = suite.of
        providers = of.named(args.provider) if args.provider else of.providers if args.compare else (of.fly,)
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
            suite=suite,
        )
