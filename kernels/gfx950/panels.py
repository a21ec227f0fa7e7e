"""Matrices of the gfx950 backward kernel in LDS: tiles of 32 rows, in panels of 128 and 64 columns.

A tile is read as it is and transposed, for products across its columns and along its rows. Of both panels' lines, the
16-byte reads of one kind and the transposing reads of the other are free of bank conflicts, for 32x32x16 products and
for 16x16x32 ones; and a wave's direct copies take whole rows of a panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fly

from .operand_queue import Multiply

LINE = 512  # elements that a wave's direct copy fills
ROWS = 32

# Rows, then columns: bit by bit of a number, what it adds to the place of an element. Found by trying all orders that
# keep 64 bytes of a row together, with the banks of `fly.emulator.banks`.
_ORDERS = {
    128: fly.Layout(((2, 2, 4, 2), (64, 2)), ((2048, 64, 512, 256), (1, 128))),
    64: fly.Layout(((2, 2, 2, 2, 2), (32, 2)), ((64, 32, 256, 1024, 512), (1, 128))),
}


def panel_tile(columns: int) -> fly.PaddedTile:
    """A panel of so many columns in LDS."""
    return fly.PaddedTile(_ORDERS[columns], LINE, 8)


@dataclass(frozen=True)
class Panel:
    """Columns of a matrix from `first` on: tiles in LDS, slot after slot."""

    first: int
    slots: fly.SharedTile

    @property
    def columns(self) -> int:
        layout = self.slots.layout
        assert isinstance(layout, fly.PaddedTile)
        return layout.columns

    def of(self, rows: fly.RowView) -> fly.RowView:
        """These columns of the matrix."""
        view = replace(rows, columns=self.columns)
        return view.beside(self.first // self.columns) if self.first else view


@dataclass(frozen=True)
class Panels:
    """Tiles of `ROWS` rows of a matrix in LDS."""

    panels: tuple[Panel, ...]

    @staticmethod
    def allocate(name: str, columns: int, dtype: fly.DType, slots: int) -> Panels:
        """Of a matrix of so many columns, a multiple of 64."""
        panels, first = [], 0
        while first < columns:
            width = 128 if columns - first >= 128 else 64
            layout = panel_tile(width)
            panels.append(Panel(first, fly.SharedTile.ring(f"{name}{first}", layout, dtype, slots)[0]))
            first += width
        return Panels(tuple(panels))

    def slot(self, index: Any) -> Panels:
        """The tile in a slot."""
        return Panels(tuple(replace(panel, slots=panel.slots.slot(index)) for panel in self.panels))

    def at(self, column: int) -> tuple[Panel, int]:
        """The panel that has a column, and which one it is there."""
        panel = next(p for p in reversed(self.panels) if p.first <= column)
        return panel, column - panel.first


class Copies:
    """Direct copies of tiles of a matrix; `sparing`: see `fly.DirectCopy`."""

    def __init__(self, panels: Panels, rows: fly.RowView, sparing: bool = False):
        self.copies = [
            fly.DirectCopy(p.of(rows), p.slots.layout, sparing=sparing)  # type: ignore[arg-type]
            for p in panels.panels
        ]

    def locate(self, first_row: Any) -> list[Any]:
        """Where rows from `first_row` on are."""
        return [copy.alone(first_row) for copy in self.copies]

    def issue(self, located: Sequence[Any], tile: Panels) -> fly.Token:
        """Start the rows there; those past the end become zeros."""
        parts = zip(self.copies, located, tile.panels, strict=True)
        return fly.join([copy.issue(at, 0, panel.slots) for copy, at, panel in parts])


class Loads:
    """How an operand is read from tiles of a matrix: one loader for each width of its panels.

    `first`: a traced (row, column) that is added to all places.
    """

    def __init__(self, panels: Panels, plan: fly.OperandPlan, first: tuple[Any, Any] | None = None):
        layouts = {panel.columns: panel.slots.layout for panel in panels.panels}
        self.loaders = {width: fly.OperandLoader(plan, layout, first) for width, layout in layouts.items()}

    def load(self, tile: Panels, row: int, column: int) -> fly.Value:
        """The operand whose first element is at (row, column)."""
        panel, inside = tile.at(column)
        (operand,) = self.loaders[panel.columns].load(panel.slots, row, inside)
        return operand


class Sums:
    """A fragment that products are added to."""

    def __init__(self, fragment: fly.Fragment):
        self.layout, self.tiles = fragment.layout, [list(row) for row in fragment.tiles]

    @property
    def fragment(self) -> fly.Fragment:
        """As it is now."""
        return fly.Fragment(self.layout, tuple(map(tuple, self.tiles)))


class Products:
    """The two products of a chain with tiles that pass by, as steps of `operand_queue`."""

    def __init__(self, link: fly.Chain, panels: Panels):
        self.link, self.columns = link, sum(panel.columns for panel in panels.panels)
        self.straight = Loads(panels, plan(link.atom, link.column_operand, transposed=False))
        turned = plan(link.atom, link.column_operand, transposed=True, slot_of=lambda k: link.columns[k])
        self.turned = Loads(panels, turned)

    def across(
        self,
        sums: Sums,
        rows: Callable[[int], Sequence[fly.Value]],
        tile: Panels,
        *,
        kept: bool,
        given: Sequence[fly.Value] = (),
    ) -> Iterator[Multiply]:
        """sums += rows · tileᵀ; `rows`: operands of a step over the columns, one a row tile.

        `given`: the tile's first operands (`first`).
        """
        for step, column in enumerate(range(0, self.columns, self.link.atom.k)):
            of_columns: list[fly.Value] = list(given[step : step + 1])
            of_rows: list[fly.Value] = []

            def read(
                at: int = column, columns: list[fly.Value] = of_columns, operands: list[fly.Value] = of_rows
            ) -> None:
                if not columns:
                    columns.append(self.straight.load(tile, 0, at))
                operands.extend(rows(at // self.link.atom.k))

            for r in range(len(sums.tiles)):

                def use(
                    _: None, r: int = r, columns: list[fly.Value] = of_columns, operands: list[fly.Value] = of_rows
                ) -> None:
                    sums.tiles[r][0] = self.link.mma(operands[r], columns[0], sums.tiles[r][0])

                # of a tile's operand and, where they are not kept, of the rows'
                registers = 4 * (step >= len(given)) + (0 if kept else 4 * len(sums.tiles))
                yield Multiply(read, use, registers) if r == 0 else Multiply(_nothing, use, 0)

    def first(self, tile: Panels, count: int) -> list[fly.Value]:
        """The first operands of a tile for `across`."""
        return [self.straight.load(tile, 0, step * self.link.atom.k) for step in range(count)]

    def along(self, sums: Sums, weights: Callable[[int], Sequence[fly.Value]], tile: Panels) -> Iterator[Multiply]:
        """sums += weights · tile, all of its rows for columns after columns.

        `weights`: operands of the wave's row tiles, of a step over the tile's rows; there when it is traced.
        """
        extent, depth = self.link.layout.columns, self.link.atom.k
        operands: dict[int, Sequence[fly.Value]] = {}
        for n in range(self.columns // extent):
            for t in range(ROWS // depth):
                columns: list[fly.Value] = []

                def read(t: int = t, n: int = n, columns: list[fly.Value] = columns) -> None:
                    columns.append(self.turned.load(tile, t * depth, n * extent))

                for r in range(len(sums.tiles)):

                    def use(
                        _: None,
                        r: int = r,
                        t: int = t,
                        n: int = n,
                        columns: list[fly.Value] = columns,
                    ) -> None:
                        if t not in operands:
                            operands[t] = weights(t)
                        sums.tiles[r][n] = self.link.mma(operands[t][r], columns[0], sums.tiles[r][n])

                    yield Multiply(read, use) if r == 0 else Multiply(_nothing, use, 0)


def _nothing() -> None:
    """An operand that is there already."""


def plan(atom: fly.MmaAtom, operand: str, **places: Any) -> fly.OperandPlan:
    want = fly.operand_coordinates(atom, operand, **places)
    return fly.require_plan(fly.plan_operand(fly.target().matrix_loads, want, atom.values(operand)), atom, operand)
