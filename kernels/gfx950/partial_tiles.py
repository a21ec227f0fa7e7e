"""Which of a block's key tiles need a mask."""

from __future__ import annotations

from dataclasses import dataclass

import fly

from ..work.tile_scheduler import BlockWork


@dataclass(frozen=True)
class PartialTiles:
    """Tiles count from `work.tiles.first`; where they are steps of a list, `listed` is the key tile's number."""

    work: BlockWork
    windowed: bool

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
