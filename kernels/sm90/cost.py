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

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..work.tile_scheduler import MAX_SPLITS


@dataclass(frozen=True)
class CausalRounds:
    """Rounds that a causal launch of more than one round takes: (rounds + `start`) / `overlap`, at least 1.

    Its tiles differ in length. Short ones fill most of the gaps that long ones leave, but not all of the last round.
    """

    start: float
    overlap: float

    def of(self, rounds: float) -> float:
        """What `rounds`, tiles over multiprocessors, count."""
        return max(1.0, (rounds + self.start) / self.overlap)


CAUSAL_ROUNDS = CausalRounds(start=0.4, overlap=1.2)


def rounds(
    seq_len: int,
    block_m: int,
    slices: int,
    units: int,
    causal: bool,
    pack: int = 1,
    share: float = 1.0,
    model: CausalRounds = CAUSAL_ROUNDS,
) -> float:
    """Rounds of tiles that a launch counts.

    `slices` (sequences x heads x splits) of `seq_len` queries in tiles of `block_m` rows, on `units` multiprocessors;
    `pack` query heads are rows of one tile, which leaves a `share` of the key tiles to visit. Where all tiles are as
    long, whole rounds: a last one in which few multiprocessors work takes as long as a full one.
    """
    whole = math.ceil(-(-seq_len * pack // block_m) * slices / pack / units)
    if not causal or whole <= 1:
        return whole
    return model.of(-(-seq_len // block_m) * slices / units * share)


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
