"""Fits the numbers of kernels/sm90/cost.py to measured times, and measures such times.

    python -m benchmarks.fit_costs                                  # fits to benchmarks/costs/*.csv, and compares
    python -m benchmarks.fit_costs --measure splits --csv new.csv   # on an H200; also: rounds

A model's numbers are judged by the choices made with them: the loss of a shape is the time of the chosen build or
number of splits over the best measured one. The committed numbers stay unless others lose `MARGIN` less on average,
so that numbers on which no choice depends do not move. The keys of a tile follow from a rule, see `keys_alone`. The
exit code is 1 where a fit gives something else than is committed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.progress import progress
from benchmarks.report import geomean
from benchmarks.run_record import RUN_COLUMNS, run_record
from benchmarks.timing import measure
from kernels.sm90 import cost
from kernels.sm90.builds import Key, decode_options, options_of, packed_heads
from kernels.sm90.cost import DecodeTimes, decode_splits, rounds
from kernels.sm90.tiles import TILES

FOLDER = Path(__file__).resolve().parent / "costs"
MARGIN = 0.005  # of the time
# numbers that are tried, for each field of the model
GRID: Mapping[str, Sequence[float]] = {
    "alone": [n / 20 for n in range(8, 21)],
    "part": [n / 10 for n in range(41)],
    "combine": [n / 2 for n in range(21)],
    "combine_split": [0.0, 0.01, 0.02, 0.05, 0.1, 0.2],
}
# of a wider tile's time over that of NARROW keys: no kind of call is slower, and all together are this much faster
SLOWEST, FASTER = 1.0, 0.97

COST_COLUMNS = RUN_COLUMNS[1:]  # of these files, which have no preset
Row = Mapping[str, str]
Chosen = tuple[float, float]  # the time of what a model chooses, and the least


def read(name: str, folder: Path = FOLDER) -> list[Row]:
    """The rows of one file of measured times."""
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _groups(rows: Iterable[Row], columns: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns), []).append(row)
    return found


# a causal launch, and a launch of decoding
LAUNCH = ("head_dim", "head_dim_v", "batch", "seq_len", "seq_len_kv", "num_heads", "num_kv_heads", "units")
DECODING = ("blocks", "key_tiles", "tile_bytes", "units")


def _predicted(
    head_dim: int,
    head_dim_v: int,
    batch: int,
    seq_len: int,
    seq_len_kv: int,
    heads: int,
    kv_heads: int,
    units: int,
    consumers: int,
) -> float:
    """The time of the causal row with so many consumers that serves so many keys."""
    key = _rows_for(head_dim, head_dim_v, seq_len_kv)[consumers]
    options = options_of(key)
    pack = packed_heads(heads // kv_heads, seq_len, seq_len_kv, True, options)
    tile = options.block_m // pack, options.block_n
    cost: float = TILES[key].get("cost", 1.0)
    return cost * rounds(seq_len, seq_len_kv, tile, batch * heads // pack, units, True)


def causal_choices(rows: Iterable[Row]) -> list[Chosen]:
    """What is chosen of the rows that were timed for each causal launch: by their costs and `rounds`."""
    chosen = []
    for launch, of in _groups(rows, LAUNCH).items():
        predicted = partial(_predicted, *map(int, launch))
        taken = float(min(of, key=lambda row, time=predicted: time(int(row["consumers"])))["time"])
        chosen.append((taken, min(float(row["time"]) for row in of)))
    return chosen


def split_choices(rows: Iterable[Row], model: DecodeTimes) -> list[Chosen]:
    """What `model` chooses of the numbers of splits that were timed for each launch."""
    chosen = []
    for launch, of in _groups(rows, DECODING).items():
        times = {int(row["splits"]): float(row["microseconds"]) for row in of}
        splits = decode_splits(*map(int, launch), times=model, choices=sorted(times))
        chosen.append((times[splits], min(times.values())))
    return chosen


def loss(chosen: Iterable[Chosen]) -> float:
    """How much longer the choices take than the best ones, on average (geometric); 0 where all are the best."""
    return geomean([taken / best for taken, best in chosen]) - 1


def fit(committed: DecodeTimes, losses: Callable[[DecodeTimes], float]) -> DecodeTimes:
    """The model with the least loss near the committed one, which stays where that gains less than `MARGIN`.

    One number is changed at a time, as long as the loss falls.
    """
    best, least = committed, losses(committed)
    while True:
        others = [replace(best, **{name: value}) for name, values in GRID.items() for value in values]
        found = min(others, key=losses)
        if losses(found) >= least:
            break
        best, least = found, losses(found)
    return best if least < losses(committed) - MARGIN else committed


TILE = ("kind", "head_dim", "head_dim_v", "causal", "consumers")


@dataclass(frozen=True)
class Wider:
    """A wider tile that is taken above `beyond` keys, None: for any number; `mean` of its times over those of 64."""

    block_n: int
    beyond: int | None
    mean: float


def _wider(block_n: int, rows: Sequence[Row]) -> Wider | None:
    """Above how many keys a wider tile is taken, or None.

    It must be faster at the longest sequences that were timed and at all shorter ones down to its limit. A limit is
    set only between two lengths of which one is twice the other: further apart nobody knows where it is.
    """
    if any(int(row["spilled_words"]) for row in rows):
        return None
    by_length = {
        int(length): [float(row["ratio"]) for row in of] for (length,), of in _groups(rows, ("seq_len",)).items()
    }
    lengths = sorted(by_length, reverse=True)
    good = list(itertools.takewhile(lambda n: _faster(by_length[n]), lengths))
    if not good:
        return None
    mean = geomean([ratio for length in good for ratio in by_length[length]])
    if len(good) == len(lengths):
        return Wider(block_n, None, mean)
    beyond = lengths[len(good)]
    return Wider(block_n, beyond, mean) if good[-1] == 2 * beyond else None


def _faster(ratios: Sequence[float]) -> bool:
    return max(ratios) <= SLOWEST and geomean(ratios) <= FASTER


def keys_alone(rows: Iterable[Row]) -> dict[str, dict[tuple[Any, ...], int]]:
    """`cost.KEYS_ALONE` by the rule: the wider tile of each build that is `_faster`, where one is."""
    table: dict[str, dict[tuple[Any, ...], int]] = {}
    for (kind, *build), of in _groups(rows, TILE).items():
        candidates = [_wider(int(n), timed) for (n,), timed in _groups(of, ("block_n",)).items()]
        best = min(filter(None, candidates), key=lambda wider: wider.mean, default=None)
        if best is None:
            continue
        head_dim, head_dim_v, causal, consumers = build
        key = (int(head_dim), int(head_dim_v), causal == "True", int(consumers))
        if best.beyond is not None:
            table.setdefault(kind, {})[*key, best.beyond] = cost.NARROW
        table.setdefault(kind, {})[*key, None] = best.block_n
    return table


def compare(folder: Path = FOLDER) -> Iterator[tuple[str, bool]]:
    """A line for each file of times, and whether what is committed follows from it."""
    of = causal_choices(read("causal_rounds", folder))
    yield f"causal_rounds: {_lost(of)} with the costs of the rows", loss(of) < MARGIN
    rows, committed = read("decode_splits", folder), cost.DECODE_TIMES

    def losses(model: DecodeTimes) -> float:
        return loss(split_choices(rows, model))

    fitted = fit(committed, losses)
    text = f"decode_splits: {_lost(split_choices(rows, committed))} with the committed {_shown(committed)}"
    if fitted != committed:
        text += f"; fitted {_shown(fitted)} loses {losses(fitted):.2%}"
    yield text, fitted == committed
    rows = read("keys_alone", folder)
    table = keys_alone(rows)
    text = f"keys_alone: {len(rows)} ratios; {sum(map(len, table.values()))} rows of the table follow from them"
    if table != cost.KEYS_ALONE:
        text += f", and they are {table}"
    yield text, table == cost.KEYS_ALONE


def _lost(chosen: Sequence[Chosen]) -> str:
    most = max(taken / best for taken, best in chosen) - 1
    return f"{len(chosen)} launches lose {loss(chosen):.2%}, at most {most:.2%},"


def _shown(model: DecodeTimes) -> str:
    return ", ".join(f"{field.name}={getattr(model, field.name):g}" for field in fields(model))


# measuring: causal launches of one to a few rounds, (batch, queries, keys) of 16 heads, and of 32 heads on 8
LENGTHS = (
    *((1, n, n) for n in (768, 1024, 1152, 1536, 2048, 3072, 4096)),
    *((2, 512, 512), (4, 2048, 2048), (2, 4096, 4096), (4, 4096, 4096)),
    *((16, 1024, 1024), (8, 2048, 2048), (5, 3072, 3072), (2, 8192, 8192)),
    *((2, 2048, 4096), (2, 2048, 8192)),
)
SHARED_LENGTHS = (
    *((1, 1024, 1024), (1, 2048, 2048), (1, 4096, 4096)),
    *((32, 512, 512), (16, 1024, 1024), (10, 1536, 1536), (8, 2048, 2048), (5, 3072, 3072), (4, 4096, 4096)),
    *((2, 8192, 8192), (8, 512, 4096), (4, 1024, 3000), (1, 2048, 8192)),
)
LAUNCHES = tuple(
    (*dims, *of, *heads)
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128))
    for lengths, heads in ((LENGTHS, (16, 16)), (SHARED_LENGTHS, (32, 8)))
    for of in lengths
)
# decoding, (head_dim, batch, keys) of 64 query heads on 8, and the numbers of splits
DECODES = tuple(
    (head_dim, batch, keys)
    for head_dim in (64, 128, 256)
    for batch, keys in ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (3, 32768), (4, 4096), (4, 16384), (12, 4096))
)
HEADS, KV_HEADS = 64, 8
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 48, 64)
ITERS = 30


@contextmanager
def only(key: Key) -> Iterator[None]:
    """Have a row of TILES serve every call of its head dimensions and causality, and no wider one."""
    before = dict(TILES)
    for other in before:
        if other != key and other[2] == key[2] and other[0] >= key[0] and other[1] >= key[1]:
            del TILES[other]
    try:
        yield
    finally:
        TILES.clear()
        TILES.update(before)


def _rows_for(head_dim: int, head_dim_v: int, keys: int) -> dict[int, Key]:
    """The causal row for so many keys with each number of consumers."""
    found: dict[int, Key] = {}
    for key in TILES:
        if key[:3] == (head_dim, head_dim_v, True) and (key[-1] is None or keys <= key[-1]):
            found.setdefault(key[3], key)
    return found


def measure_rounds(units: int) -> list[dict[str, object]]:
    """Milliseconds of every row of each of `LAUNCHES`, taking turns."""
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    records = []
    for head_dim, head_dim_v, batch, queries, keys, heads, kv_heads in progress(LAUNCHES, "launch"):
        q, k, v = (
            torch.randn(batch, length, count, dim, dtype=torch.bfloat16, device="cuda")
            for length, count, dim in (
                (queries, heads, head_dim),
                (keys, kv_heads, head_dim),
                (keys, kv_heads, head_dim_v),
            )
        )
        calls = {}
        for consumers, key in _rows_for(head_dim, head_dim_v, keys).items():
            # scales that hardly differ, so that each row keeps its own prepared call
            scale = head_dim**-0.5 * (1 + consumers * 2**-20)
            calls[str(consumers)] = partial(flydsl_flash_attn_func, q, k, v, True, softmax_scale=scale)
            with only(key):
                calls[str(consumers)]()
        same = dict(zip(LAUNCH, (head_dim, head_dim_v, batch, queries, keys, heads, kv_heads, units)))
        for consumers, timing in measure(calls, device="cuda", iters=ITERS, warmup=3).items():
            records.append(same | {"consumers": consumers, "time": timing.median})
    return records


def measure_splits(units: int) -> list[dict[str, object]]:
    """Microseconds of `SPLITS` for each of `DECODES`, taking turns."""
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    records = []
    for head_dim, batch, keys in progress(DECODES, "launch"):
        k, v = torch.randn(2, batch, keys, KV_HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
        q = torch.randn(batch, 1, HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
        group = HEADS // KV_HEADS
        build = decode_options(head_dim, head_dim, False, group, keys=keys)
        key_tiles = -(-keys // build.block_n)
        calls = {
            str(splits): partial(flydsl_flash_attn_func, q, k, v, True, num_kv_splits=splits)
            for splits in SPLITS
            if splits <= key_tiles
        }
        sizes = {"head_dim": head_dim, "batch": batch, "seq_len_kv": keys, "num_heads": HEADS}
        launch = dict(zip(DECODING, (batch * KV_HEADS, key_tiles, build.key_bytes, units)))
        for splits, timing in measure(calls, device="cuda", iters=ITERS, warmup=3).items():
            own = {"splits": splits, "microseconds": timing.median * 1e3}
            records.append(sizes | {"num_kv_heads": KV_HEADS} | launch | own)
    return records


MEASURED = {"rounds": measure_rounds, "splits": measure_splits}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fit the cost model of the Hopper kernel to measured times, or measure them."
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the measured times (benchmarks/costs)")
    parser.add_argument("--measure", choices=tuple(MEASURED), help="measure these times on this GPU instead")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="where measured times go")
    parser.add_argument("--commit", metavar="REV", help="what FILE says was measured, where there is no git")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 where a fit gives something else than is committed, 2 without a GPU."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.measure is None:
        agreed = True
        for text, agrees in compare(args.folder):
            print(text)
            agreed &= agrees
        return 0 if agreed else 1
    if args.csv is None:
        parser.error("--measure needs --csv FILE")
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to measure", file=sys.stderr)
        return 2
    with torch.no_grad():
        records = MEASURED[args.measure](torch.cuda.get_device_properties(0).multi_processor_count)
    of_run = {name: value for name, value in run_record("costs", args.commit).items() if name in COST_COLUMNS}
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*records[0], *COST_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(record | of_run for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
