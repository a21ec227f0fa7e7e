"""A block's queries on their way to the registers of its waves, through LDS.

Straight from memory, 16 bytes a lane come from the rows of 32 lanes: 32 lines for an instruction of 1024 bytes, and
the address unit takes a cycle for each. Copies to LDS take whole lines, 8 (or 16) of them, as those of K do.
"""

from __future__ import annotations

import functools
from typing import Any

import fly


class StagedQueries:
    """Buffers for a block's queries in tiles as K's, each with the rows of two waves.

    Args:
        view: of the queries. layout: of a tile of K. wave_rows: of a wave; half of a tile's.
    """

    def __init__(self, view: fly.RowView, layout: fly.PaddedTile, block_rows: int, wave_rows: int):
        tiles = block_rows // layout.rows
        self.wave_rows, self.block_rows = wave_rows, block_rows
        self.copy = fly.DirectCopy(view, layout, group=tiles)
        self.tiles = [fly.SharedTile.ring(f"q{i}", layout, view.dtype, 1)[0] for i in range(tiles)]

    def start(self, first_row: fly.Value) -> fly.Token:
        """Start the block's rows, from number `first_row` on; rows that do not exist become zeros."""
        at = self.copy.start(first_row, most=self.block_rows)
        return fly.join([self.copy.issue(at, i, tile) for i, tile in enumerate(self.tiles)])

    def read(self, loader: fly.OperandLoader, steps: int, depth: int) -> list[fly.Value]:
        """The wave's operands, `depth` columns in each of `steps`."""
        layout, wave = self.copy.layout, fly.wave_id()
        at, *others = (tile.pointer for tile in self.tiles)
        for i, other in enumerate(others, 1):
            at = fly.cond(wave // 2 == i, functools.partial(_same, other), functools.partial(_same, at))
        at = at.offset(wave % 2 * (layout(self.wave_rows, 0) * layout.element_bytes))
        mine = fly.SharedTile(at, layout, self.tiles[0].dtype)
        return [loader.load(mine, 0, t * depth)[0] for t in range(steps)]


def _same(pointer: Any) -> Any:
    return pointer
