"""Operands of the backward kernels: rows that stay with a wave, and tiles of rows that pass by.

Two tensors stay and two pass by: queries pass keys that stay (dK, dV), or keys pass queries that stay (dQ). What
passes by is an operand in two ways: across its columns, as K is of the scores, and along its rows, as V is of the
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fly

from ..work.fragments import load_queries, product
from .operands import Queries, padded, transposed_plan, turned_copy


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows` rows and how they travel: `stages` slots, one of them through registers; `vector` elements a
    copy."""

    rows: int
    stages: int
    vector: int


def straight_plan(link: fly.Chain, operand: str) -> fly.OperandPlan:
    """How an operand is read from a tile that has its rows."""
    want = fly.operand_coordinates(link.atom, operand, transposed=False)
    return fly.require_plan(
        fly.plan_operand(fly.target().matrix_loads, want, link.atom.values(operand)), link.atom, operand
    )


def column_tiles(link: fly.Chain, columns: int) -> int:
    """Accumulator tiles across `columns` columns of a product along a stream."""
    together = (transposed_plan(link) or straight_plan(link, link.column_operand)).tiles
    return -(-columns // (link.layout.columns * together)) * together


class Stream:
    """Tiles of a matrix on their way to shared memory, and the products with them.

    `copies` are for a `fly.TileRing`, which gives the tiles of every step in the same order: one, or two where no
    load of the target turns what another load takes as it is.
    """

    def __init__(
        self, name: str, link: fly.Chain, rows: fly.RowView, tiling: Tiling, *, across: bool, along: bool
    ) -> None:
        self.link = link
        self.copies: list[tuple[Any, fly.SharedTile]] = []
        atom, operand, columns = link.atom, link.column_operand, link.layout.columns
        self.steps = -(-rows.columns // atom.k)
        self.row_steps = tiling.rows // atom.k
        self.row_tiles = tiling.rows // columns
        plan, turning = straight_plan(link, operand), transposed_plan(link)
        asynchronous = tiling.stages > 1
        if across or turning is not None:
            granule = max(p.load.granule for p in (plan if across else None, turning if along else None) if p)
            layout = fly.SwizzledTile(tiling.rows, padded(rows.columns), granule)
            copy = fly.RowCopy(rows, layout, vector=tiling.vector, asynchronous=asynchronous)
            self.copies.append((copy, fly.SharedTile.ring(name, layout, rows.dtype, tiling.stages)[0]))
        if across:
            self._across = fly.OperandLoader(plan, layout)
            for t in range(self.steps):
                self._across.prepare(0, t * atom.k)
        if not along:
            return
        self._turned = turning is None
        if turning is None:
            # no load turns it: it is stored turned as well, rows in the order in which registers hold them
            layout, turned = turned_copy(link, rows, tiling.rows, tiling.vector, plan)
            self.copies.append((turned, fly.SharedTile.ring(f"{name} turned", layout, rows.dtype, tiling.stages)[0]))
        self._along = fly.OperandLoader(turning or plan, layout)
        for n in range(0, column_tiles(link, rows.columns), self._along.plan.tiles):
            for t in range(self.row_steps):
                self._along.prepare(*self._place(n, t))

    def _place(self, n: int, t: int) -> tuple[int, int]:
        row, column = t * self.link.atom.k, n * self.link.layout.columns
        return (column, row) if self._turned else (row, column)

    def across(self, sums: fly.Fragment, rows: Queries, tiles: Sequence[fly.SharedTile]) -> fly.Fragment:
        """sums + rows · tileᵀ: a column for each row of the tile. `tiles`: of `copies`."""
        result = sums
        for t in range(self.steps):
            place = lambda n, t=t: (n * self.link.layout.columns, t * self.link.atom.k)  # noqa: E731
            result = product(self.link, rows(t), self._across, tiles[0], place, result)
        return result

    def along(self, sums: fly.Fragment, weights: fly.Fragment, tiles: Sequence[fly.SharedTile]) -> fly.Fragment:
        """sums + weights · tile; the weights' registers, rounded to 16 bits, are operands as they are."""
        tile = tiles[-1]
        narrow = weights.map(lambda x, r, c: x.to(tile.dtype, rounding="nearest_any"))
        operands = [self.link.operands(row) for row in narrow.tiles]
        for t in range(self.row_steps):
            place = lambda n, t=t: self._place(n, t)  # noqa: E731
            sums = product(self.link, [row[t] for row in operands], self._along, tile, place, sums)
        return sums


class Resident:
    """A wave's rows of a block's window of `count` rows, as row operands for the whole kernel.

    `shared`: they go to shared memory by asynchronous copies, and every use loads them from there; otherwise they
    come straight from global memory into registers.
    """

    def __init__(self, name: str, link: fly.Chain, window: fly.Window, count: int, vector: int, shared: bool) -> None:
        self.link, self.window, self.shared = link, window, shared
        self.steps = -(-window.view.columns // link.atom.k)
        if not shared:
            return
        plan = straight_plan(link, link.row_operand)
        layout = fly.SwizzledTile(count, padded(window.view.columns), plan.load.granule)
        self.tile = fly.SharedTile.ring(name, layout, window.view.dtype, 1)[0]
        self.loader = fly.OperandLoader(plan, layout)
        copy = fly.RowCopy(window.view, layout, vector=vector, asynchronous=True)
        self.flight = copy.issue_window(window, self.tile)

    def arrive(self, offset: Any, count: int) -> Queries:
        """Operands of `count` rows from the wave's `offset` on; shared ones are there behind the next barrier."""
        link = self.link
        if not self.shared:
            operands = load_queries(link, self.window, offset, count // link.layout.rows, self.steps)
            return lambda t: [tile[t] for tile in operands]
        fly.wait(self.flight)
        tile = self.tile.rows_from(offset)
        places = range(0, count, link.layout.rows)
        for t in range(self.steps):
            self.loader.prepare(0, t * link.atom.k)
        return lambda t: [self.loader.load(tile, row, t * link.atom.k)[0] for row in places]
