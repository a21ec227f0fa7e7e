"""Which of a block's key tiles need a mask, and the limit that leads there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import fly

from ..problem.lazy_softmax import LazySoftmax
from ..work.tile_scheduler import BlockWork


@dataclass(frozen=True)
class PartialTiles:
    """Tiles count from `work.tiles.first`; where they are steps of a list, `listed` is the key tile's number.

    `branches`: the limit is set behind a branch and not by a selection, where one of both does.
    """

    work: BlockWork
    windowed: bool
    branches: bool = True

    def key_tile(self, tile: fly.PipelineTile, listed: fly.Value | None = None) -> fly.Value:
        """The number of a tile among all of the keys'."""
        number: fly.Value = self.work.tiles.first + tile.number if listed is None else listed
        return number

    def partial(self, tile: fly.Value | int, listed: fly.Value | None = None) -> fly.Value:
        """Whether some row does not see all keys of a tile."""
        if listed is not None:
            assert self.work.seen is not None
            found: fly.Value = self.ends(tile) | ~self.work.seen.sees_whole(listed)
            return found
        return self.ends(tile) | self.begins(tile) if self.windowed else self.ends(tile)

    def begins(self, tile: fly.Value | int) -> fly.Value:
        """Whether a tile is among the first ones, of which some row does not see all keys for its window."""
        found: fly.Value = self.work.tiles.first + tile < self.work.tiles.whole_from
        return found

    def ends(self, tile: fly.Value | int) -> fly.Value:
        """Whether a tile is among the last ones, of which some row does not see all keys.

        Of a list, those of blocks that the mask has in part.
        """
        found: fly.Value = self.work.tiles.whole_end <= self.work.tiles.first + tile
        return found

    def watch(self, tile: fly.PipelineTile, softmax: LazySoftmax, listed: fly.Value | None = None) -> LazySoftmax:
        """Where a tile needs a mask, every score is above the limit: no test of its own for that.

        Partial tiles are the last ones, and the limit stays where it is from the first of them on. Those of a list
        may be anywhere, and a window's first ones are partial too: the limit is set for every tile, or for a turn of
        two.
        """
        low = fly.f32(-math.inf)
        if listed is not None:
            partial = self.partial(tile.number, listed)
            limit = fly.cond(partial, lambda: low, lambda: softmax.unmasked_limit)
        elif not self.windowed:
            # `early` says where: LLVM makes no selection of it
            lowest = (lambda: fly.early(low)) if self.branches else (lambda: low)
            limit = fly.cond(self.ends(tile.number), lowest, lambda: softmax.limit)
        elif isinstance(tile.number, int) or tile.place == 0:
            last = 0 if isinstance(tile.number, int) else tile.number + 1
            partial = self.ends(last) | self.begins(tile.number)
            limit = fly.cond(partial, lambda: low, lambda: softmax.unmasked_limit)
        else:
            return softmax
        return replace(softmax, limit=limit)
