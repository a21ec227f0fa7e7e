"""What launches of the Hopper kernel are expected to take: the model by which builds and key splits are chosen.

Three questions, each with a formula and numbers fitted to times on an H200:

- Which row of `tiles.TILES` serves a call that fills the device: the one with the least `cost` * `rounds`. `cost`, a
  field of a row, is the time of one of its tiles against that of the shape's largest.
- How many parts the keys of a launch are split into that memory bounds: `decode_splits`.
- How many keys a tile has where there is code for every score alone: `KEYS_ALONE`.

The measured times are in `benchmarks/costs`. `python -m benchmarks.fit_costs` fits the numbers to them again and says
where the result is another one than here; it also measures such times. Numbers change only when choices made with
others lose less time, by the margin that it names: what no choice depends on, times do not determine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..work.tile_scheduler import MAX_SPLITS

_COUNTED = 32  # rounds whose tiles are dealt out one by one


def rounds(
    seq_len: int, seq_len_kv: int, tile: tuple[int, int], slices: int, units: int, causal: bool, late: bool = False
) -> float:
    """The time of a launch over that of a tile with all keys.

    `slices` (heads, or packed sets of them, of sequences, times splits) of `seq_len` queries, at the end of their
    keys, in a `tile` of so many queries and keys, on `units` multiprocessors. Where all tiles are as long, whole
    rounds: a last one in which few multiprocessors work takes as long as a full one. Under a causal mask tiles take
    as long as they have key tiles. The longest are taken first, each by a block that begins with one, or, if blocks
    take them `late`, is done with one.
    """
    queries, keys = tile
    tiles = -(-seq_len // queries) * slices
    if not causal or tiles <= units:
        return -(-tiles // units)
    ends = range(seq_len_kv, seq_len_kv - seq_len, -queries)
    lengths = [max(1, -(-end // keys)) * keys for end in ends]
    if tiles > _COUNTED * units:
        return sum(lengths) * slices / (units * max(1, seq_len_kv))
    taken = itertools.chain.from_iterable(itertools.repeat(length, slices) for length in lengths)
    # of each block: when it is done with what it has begun, and the length of what else it has taken
    blocks = [(length, 0) for length in itertools.islice(taken, units)]
    if not late:
        blocks = [(end, next(taken, 0)) for end, _ in blocks]
    heapq.heapify(blocks)
    for length in taken:
        end, held = blocks[0]
        heapq.heapreplace(blocks, (end + length, 0) if late else (end + held, length))
    return max(end + held for end, held in blocks) / max(1, seq_len_kv)


@dataclass(frozen=True)
class DecodeTimes:
    """Times of a launch that memory bounds, in the time that `UNIT_BYTES` of K and V take when all units load.

    `alone`: what a round takes at least, however few multiprocessors load; `part`: the start and end of a part of the
    keys; `combine` and `combine_split`: putting parts together, at all and for each split.
    """

    alone: float
    part: float
    combine: float
    combine_split: float

    def of(self, splits: int, blocks: int, key_tiles: int, tile_bytes: int, units: int) -> float:
        """The time of `blocks` of `key_tiles`, each of `tile_bytes`, with their keys in `splits` parts.

        Unlike where arithmetic decides, a last round in which many of the multiprocessors work is as fast for each
        tile as a full one; one in which few work is not.
        """
        full, last = divmod(blocks * splits, units)
        taken = full + (max(last / units, self.alone) if last else 0.0)
        combination = self.combine + self.combine_split * splits if splits > 1 else 0.0
        return taken * (-(-key_tiles // splits) * (tile_bytes / UNIT_BYTES) + self.part) + combination


UNIT_BYTES = 64 << 10
DECODE_TIMES = DecodeTimes(alone=0.95, part=1.3, combine=4.0, combine_split=0.02)
_ENOUGH = 1.02  # of the least time: fewer parts are worth it


def decode_splits(
    blocks: int,
    key_tiles: int,
    tile_bytes: int,
    units: int,
    times: DecodeTimes = DECODE_TIMES,
    choices: Iterable[int] | None = None,
) -> int:
    """How many parts the keys of a launch that memory bounds are best split into: the fewest that are fast enough.

    `blocks` of `key_tiles`, each of `tile_bytes` of K and V, on `units` multiprocessors; `choices` in ascending
    order, every number that leaves each part a tile by default.
    """
    numbers = range(1, max(1, min(MAX_SPLITS, key_tiles)) + 1) if choices is None else tuple(choices)
    taken = {splits: times.of(splits, blocks, key_tiles, tile_bytes, units) for splits in numbers}
    best = min(taken.values())
    return next(splits for splits, time in taken.items() if time <= _ENOUGH * best)


# Keys of a tile where there is code for every score alone and that is all that a call asks for: `Features.alone`,
# then the key of a row as in TILES. What is not here has `NARROW` keys: wider tiles spill, or were not faster by the
# rule of `benchmarks/fit_costs.py`.
NARROW = 64
KEYS_ALONE: dict[str, dict[tuple[Any, ...], int]] = {
    "bias": {
        (64, 64, False, 1, None): 128,
        (64, 64, True, 1, None): 128,
        (96, 96, False, 2, None): 128,
        (96, 96, True, 2, None): 128,
        (128, 128, False, 2, 1024): 64,
        (128, 128, False, 2, None): 112,
        (128, 128, False, 1, None): 128,
        (128, 128, True, 2, 2048): 64,
        (128, 128, True, 2, None): 112,
        (128, 128, True, 1, None): 128,
    },
    "function": {
        (64, 64, False, 3, 2048): 64,
        (64, 64, False, 3, None): 80,
        (96, 96, False, 3, None): 112,
        (96, 96, False, 2, None): 128,
        (96, 96, True, 2, None): 128,
        (128, 128, False, 2, None): 128,
        (128, 128, True, 2, None): 128,
        (192, 128, False, 2, None): 128,
        (192, 128, True, 2, None): 128,
    },
}
