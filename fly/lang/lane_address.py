"""Addresses in a shared tile of which each lane has its own part, and every access a static one."""

from __future__ import annotations

import functools
import operator

from fly.errors import LayoutError
from fly.ir.memory import Pointer
from fly.ir.value import Value
from fly.lang.ids import lane_id
from fly.lang.lanes import evaluate
from fly.lang.shared import PaddedTile, SharedTile, SwizzledTile
from fly.layout import Layout


class LaneAddress:
    """(row(lane) + r, column(lane) + c) in tiles of one layout, for static r and c.

    The lane's part is computed when this is made. `first`: a traced (row, column) that is added to it, multiples of
    powers of two that no static part of an access reaches.
    """

    def __init__(
        self,
        layout: SwizzledTile | PaddedTile,
        row: Layout,
        column: Layout,
        first: tuple[Value, Value] | None = None,
    ):
        self.layout = layout
        self._row_bits, self._column_bits = (
            functools.reduce(operator.or_, map(bits, range(bits.size))) for bits in (row, column)
        )
        lane = lane_id()
        at_row, at_column = evaluate(row, lane), evaluate(column, lane)
        if first is not None:
            at_row, at_column = at_row + first[0], at_column + first[1]
        self._base = layout.base(at_row, at_column)
        self._displaced: dict[int, Value] = {}

    def prepare(self, row: int, column: int) -> None:
        """Compute what a later access at this static offset needs, here rather than there (outside a loop)."""
        self._displace(self._displacement(row, column)[0])

    def of(self, tile: SharedTile, row: int, column: int) -> Pointer:
        """The lane's address in a tile at a static offset.

        Raises:
            LayoutError: the offset has bits that the lanes' part has too.
        """
        xor, add = self._displacement(row, column)
        return tile.pointer.offset(self._displace(xor)).offset(add)

    def _displacement(self, row: int, column: int) -> tuple[int, int]:
        if column & self._column_bits:
            raise LayoutError(f"static column {column} overlaps the columns that the lanes' addresses span")
        if isinstance(self.layout, PaddedTile):
            if row & self._row_bits:
                raise LayoutError(f"static row {row} overlaps the rows that the lanes' addresses span")
            return self.layout.displace(row, column)
        inside = row % self.layout.row_period
        if inside and not inside & self._row_bits:
            # the static bits of the row lie inside the swizzle's period: they flip bits of the column field
            xor, add = self.layout.displace(row - inside, column)
            flipped = self.layout.phase(inside) * self.layout.granule * 2
            return xor ^ flipped, add + inside * self.layout.columns * 2
        return self.layout.displace(row, column)

    def _displace(self, xor: int) -> Value:
        if xor == 0:
            return self._base
        if xor not in self._displaced:
            self._displaced[xor] = self._base ^ xor
        return self._displaced[xor]
