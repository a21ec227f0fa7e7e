"""Chooses tiles and stages of a flash-attention kernel by timing builds against each other on this GPU.

    python benchmarks/tune.py generic --head_dim 64 128 --budget 540
    python benchmarks/tune.py sm90 --write

Every trial is a process of its own with a time limit: a candidate that hangs or crashes costs that trial. Both
builds run in one process and take turns; a candidate replaces the incumbent when it is at least 2 % faster over the
key's cells, twice. --write puts the table into the kernel's table module.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.progress import say
from benchmarks.shapes import sweep
from benchmarks.timing import samples
from benchmarks.tuning import (
    OK,
    WRONG,
    Adapter,
    Gpu,
    Key,
    Outcome,
    Search,
    Tiles,
    Trial,
    format_table,
    run_trial,
)
from benchmarks.workload import DTYPES, Workload
from fly.backends.target import target
from fly.runtime.paired import paired_ratio
from kernels.sm90.builds import RESCALES, key_for, options_of

SEQ_LENS = (512, 2048, 8192)
ROUNDS = 30


def _tiles(names: str, *values: tuple[Any, ...]) -> tuple[Tiles, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in values)


def _generic_key(workload: Workload, gpu: Gpu) -> Key:
    return gpu.backend, -(-workload.head_dim // 32) * 32


def _sm90_key(workload: Workload, gpu: Gpu) -> Key:
    dims, lengths = (workload.head_dim,) * 2, (workload.seq_len, workload.seq_len_kv)
    return key_for(*dims, workload.causal, *lengths, workload.batch * workload.num_heads, gpu.units)


def _sm90_fits(key: Key, tiles: Tiles) -> bool:
    return options_of(key, tiles).tile_bytes < target("sm_90a").shared_bytes


# None leaves a field out, so that the options' default holds
ADAPTERS: Mapping[str, Adapter] = {
    adapter.kernel: adapter
    for adapter in (
        Adapter(
            kernel="generic",
            table="kernels.generic.tiles",
            keys="(backend, head dimension, a multiple of 32)",
            key=_generic_key,
            choices={
                "rows": _tiles(
                    "block_m waves", (64, 4), (128, 4), (128, 8), (64, 2), (192, 4), (256, 8), (256, 4), (128, 2)
                ),
                "keys": _tiles("block_n", (32,), (64,), (96,), (128,)),
                "copies": _tiles("stages alternate", (2, None), (3, None), (4, None), (1, True)),
                "queries": _tiles("queries", (None,), ("shared",)),
                "scores": _tiles("overlap", (None,), (True,)),
                "rescale": _tiles("lazy late", (None, None), (True, None), (True, True)),
                "occupancy": _tiles("min_blocks", (None,), (1,), (2,), (3,), (4,)),
            },
        ),
        Adapter(
            kernel="sm90",
            table="kernels.sm90.tiles",
            keys="(head_dim, head_dim_v, causal, consumers, most keys or None), see `kernels/sm90/builds.py`",
            key=_sm90_key,
            choices={
                "keys": _tiles("block_n", *((n,) for n in range(48, 257, 16))),
                "stages": _tiles("stages", (2,), (3,)),
                "queries": _tiles("q_stages", (1,), (2,)),
                "rescale": _tiles("rescale", *((name,) for name in RESCALES)),
                "hold": _tiles("hold", (None,), (True,)),
            },
            fits=_sm90_fits,
        ),
    )
}


@contextmanager
def _used(table: dict[Key, Tiles], key: Key, tiles: Tiles) -> Iterator[None]:
    before = table[key]
    table[key] = tiles
    try:
        yield
    finally:
        table[key] = before


def _bound(
    table: dict[Key, Tiles], trial: Trial, workload: Workload
) -> tuple[dict[str, Callable[[], torch.Tensor]], bool]:
    """Both builds' calls on one workload, compiled, and whether they agree."""
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    q, k, v = workload.tensors(trial.seed, trial.device)
    # the same scale, said and left to the default, so that each build keeps its own prepared call
    scales = {"incumbent": None, "candidate": workload.head_dim**-0.5}
    calls, outs = {}, {}
    for name, scale in scales.items():
        options = workload.keywords(trial.device) | {"softmax_scale": scale}

        def call(options: Mapping[str, Any] = options) -> torch.Tensor:
            return flydsl_flash_attn_func(q, k, v, workload.causal, **options)

        with _used(table, trial.key, getattr(trial, name)):
            outs[name] = call().float()
        calls[name] = call
    # both are within rounding of exact results, whose size falls with the length
    bound = 0.05 * outs["incumbent"].abs().max().item()
    return calls, (outs["incumbent"] - outs["candidate"]).abs().max().item() <= bound


def work(trial: Trial, adapter: Adapter) -> Outcome:
    """Do a trial in this process."""
    table = adapter.tiles()
    ratios = []
    with torch.no_grad():
        for workload in trial.workloads:
            calls, agree = _bound(table, trial, workload)
            if not agree:
                return Outcome(WRONG, reason=f"another result than the incumbent's on {workload}")
            taken = samples(calls, device=trial.device, iters=trial.iters, warmup=3, seed=trial.seed)
            ratios.append(paired_ratio(taken["incumbent"], taken["candidate"]))
    return Outcome(OK, tuple(ratios))


def _worker() -> int:
    trial = Trial.from_json(sys.stdin.read())
    outcome = work(trial, ADAPTERS[trial.kernel])
    print(json.dumps(vars(outcome)))
    return 0


def cells_by_key(adapter: Adapter, workloads: Sequence[Workload], gpu: Gpu) -> dict[Key, tuple[Workload, ...]]:
    """The workloads that each key of the table serves.

    Raises:
        LookupError: the table has no key for a workload.
    """
    cells: dict[Key, list[Workload]] = {}
    for workload in workloads:
        key = adapter.key(workload, gpu)
        if key not in adapter.tiles():
            raise LookupError(f"the {adapter.kernel} kernel's table has no {key}")
        cells.setdefault(key, []).append(workload)
    return {key: tuple(of) for key, of in cells.items()}


def tune(
    adapter: Adapter,
    cells: Mapping[Key, tuple[Workload, ...]],
    *,
    reach: int,
    attempt: Callable[[Trial], Outcome],
    budget: float,
    iters: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[Search]:
    """Search every key in turn; `attempt` does a trial.

    The keys share `budget` seconds by `clock`: what one leaves, the next ones have. Prints a line for each trial.
    """
    table = adapter.tiles()
    searches: list[Search] = []
    end = clock() + budget
    for key, workloads in cells.items():
        search = Search(key, table[key], adapter.fits)
        now = clock()
        share_ends = now + (end - now) / (len(cells) - len(searches))

        def trial(
            incumbent: Tiles,
            candidate: Tiles,
            seed: int,
            key: Key = key,
            workloads: tuple[Workload, ...] = workloads,
        ) -> Outcome:
            outcome = attempt(Trial(adapter.kernel, key, incumbent, candidate, workloads, iters, seed))
            figure = f"{outcome.gain:.3f} (worst {min(outcome.ratios):.3f})" if outcome.ratios else outcome.reason
            changes = {name: candidate.get(name) for name in {*incumbent, *candidate}}
            changed = {name: value for name, value in sorted(changes.items()) if value != incumbent.get(name)}
            say(f"{key} {changed}: {outcome.status} {figure}")
            return outcome

        search.run(adapter.choices, reach, trial, lambda ends=share_ends: clock() < ends)
        searches.append(search)
    return searches


def summary(searches: Sequence[Search], cells: Mapping[Key, tuple[Workload, ...]]) -> list[str]:
    """Lines: each key's winner, its gain over the table's tiles, how much was tried, and the best of the others."""
    lines = []
    for search in searches:
        state = "" if search.finished else " (time ran out)"
        lines.append(f"{search.key}: {search.gain:.3f} with {dict(search.incumbent)}")
        lines.append(f"  {len(search.trials)} trials on {len(cells[search.key])} cells{state}")
        runners = sorted((o.gain, str(dict(c))) for c, o in search.trials if o.ratios and c != search.incumbent)
        lines += [f"  next {gain:.3f} {candidate}" for gain, candidate in reversed(runners[-3:])]
    return lines


def write_table(adapter: Adapter, searches: Sequence[Search], device: str) -> Path:
    """Put the winners into the kernel's table module; returns its path.

    Raises:
        LookupError: the table stands in a module that holds something else too.
    """
    module = importlib.import_module(adapter.table)
    if not hasattr(module, "NOTES"):
        raise LookupError(
            f"{adapter.table} is not a table module (TILES and NOTES, nothing else): copy the tiles by hand"
        )
    table, notes = dict(adapter.tiles()), dict(module.NOTES)
    for search in searches:
        if search.gain > 1:
            table[search.key] = search.incumbent
            notes[search.key] = f"{device}: {search.gain:.3f} of the speed before, {time.strftime('%Y-%m-%d')}"
    path = Path(module.__file__)
    path.write_text(format_table(adapter, table, notes))
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Choose a kernel's tiles by paired timings.")
    parser.add_argument("kernel", choices=tuple(ADAPTERS))
    parser.add_argument("--head_dim", type=int, nargs="+", metavar="N", default=[64, 128], help="(64 128)")
    parser.add_argument("--seq_len", type=int, nargs="+", metavar="N", default=list(SEQ_LENS), help="(512 2048 8192)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="both by default")
    parser.add_argument("--reach", type=int, metavar="N", default=1, help="choices changed at a time (1)")
    parser.add_argument("--iters", type=int, metavar="N", default=ROUNDS, help=f"rounds of a trial ({ROUNDS})")
    parser.add_argument("--timeout", type=float, metavar="S", default=60, help="seconds for a trial (60)")
    parser.add_argument(
        "--budget", type=float, metavar="S", default=540, help="no trial starts after S seconds (540)"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="append every trial to FILE, a JSON record a line")
    parser.add_argument("--write", action="store_true", help="put what won into the kernel's table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 without a GPU."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--worker"]:
        return _worker()
    parser = _parser()
    args = parser.parse_args(argv)
    for flag in ("reach", "iters", "timeout", "budget"):
        if getattr(args, flag) <= 0:
            parser.error(f"--{flag} must be positive, got {getattr(args, flag)}")
    adapter = ADAPTERS[args.kernel]
    causal = (True, False) if args.causal is None else (args.causal,)
    try:
        workloads = sweep(args.dtype, causal, args.seq_len, args.head_dim)
    except (ValueError, ZeroDivisionError) as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to time", file=sys.stderr)
        return 2
    device, units = torch.cuda.get_device_name(), torch.cuda.get_device_properties().multi_processor_count
    try:
        cells = cells_by_key(adapter, workloads, Gpu("rocdl" if torch.version.hip else "nvvm", units))
    except LookupError as error:
        parser.error(str(error))

    def attempt(trial: Trial) -> Outcome:
        outcome = run_trial(trial, args.timeout)
        if args.log is not None:
            with args.log.open("a") as file:
                file.write(json.dumps(json.loads(trial.to_json()) | vars(outcome) | {"on": device}) + "\n")
        return outcome

    searches = tune(adapter, cells, reach=args.reach, attempt=attempt, budget=args.budget, iters=args.iters)
    print("\n".join(summary(searches, cells)))
    if args.write:
        print(f"wrote {write_table(adapter, searches, device)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
