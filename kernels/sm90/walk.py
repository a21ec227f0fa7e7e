"""The steps of a block of keys over tiles of queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import fly

from ..problem.features import BoundFeatures
from ..problem.mask import TileRange
from ..work.sequences import Uniform
from ..work.tile_list import TileList
from .backward import BLOCK_M


@dataclass(frozen=True)
class Walk:
    """A block's steps over tiles of queries, those of `tiles`; `downwards`: from the last tile on (`sm90.turns`).

    `listed`: the list of a block mask, whose steps `tiles` counts then; `here`: with lists, whether the block has any
    keys. `swapped`: of steps in pairs, what the number of a pair's step is xored with.
    """

    tiles: TileRange
    downwards: bool = False
    here: Any = None
    listed: TileList | None = None
    swapped: Any = None

    @property
    def exists(self) -> Any:
        """Whether the block has any step."""
        return self.tiles.first < self.tiles.end if self.here is None else self.here

    def tile(self, step: Any) -> Any:
        """Which tile."""
        if self.listed is not None:
            return self.listed.tile(step)
        if self.swapped is not None:
            return self.tiles.first + ((step - self.tiles.first) ^ self.swapped)
        return self.tiles.first + self.tiles.end - 1 - step if self.downwards else step

    def in_pairs(self, rank: Any) -> Walk:
        """The same in pairs of tiles, the second of which is a block's of rank 1; a block's own one comes last.

        Behind an odd number of tiles there is one more, without queries.
        """
        tiles = self.tiles
        end = tiles.first + (tiles.end - tiles.first + 1) // 2 * 2
        return replace(self, tiles=replace(tiles, end=end), swapped=rank ^ 1)

    def of_head(
        self, given: BoundFeatures, place: tuple[Any, Any], first_key: Any, queries: Any, uniform: Uniform
    ) -> Walk:
        """The steps of one (sequence, query head) of so many queries: with a block mask, its list's, at least one."""
        if given.features.block_size is None:
            return self
        listed = TileList.of(given, *place, first_key, BLOCK_M, queries, uniform)
        tiles = TileRange(fly.i32(0), fly.i32(0), listed.whole_steps, fly.maximum(listed.steps, 1))
        return replace(self, tiles=tiles, listed=listed)
