"""Feeding one matrix product's accumulators to the next as an operand, without moving data between lanes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fly.errors import AtomError
from fly.ir.dtypes import dtype
from fly.ir.value import Value, concat
from fly.lang.atoms import MmaAtom
from fly.lang.fragment import AccumulatorLayout
from fly.lang.operand import mma


@dataclass(frozen=True)
class Chain:
    """The orientation of an atom in which accumulator registers already are operand registers.

    Rows of both products stay in the lane that owns them. Register t * J + j of a lane's accumulators (J values
    per operand) is value j of the t-th operand, whose k-th element is column t * atom.k + `columns[k]`.
    """

    atom: MmaAtom
    rows_on: str
    columns: tuple[int, ...]
    is_static: ClassVar[bool] = True

    @property
    def layout(self) -> AccumulatorLayout:
        """Where accumulator registers are, in terms of rows and columns."""
        return AccumulatorLayout(self.atom, self.rows_on)

    @property
    def row_operand(self) -> str:
        """The operand ("a" or "b") that carries the rows; the other one carries the columns."""
        return "a" if self.rows_on == "m" else "b"

    @property
    def column_operand(self) -> str:
        return "b" if self.rows_on == "m" else "a"

    def mma(self, rows: Value, columns: Value, accumulator: Value) -> Value:
        """accumulator[row, column] += sum over k of rows[row, k] * columns[column, k]."""
        a, b = (rows, columns) if self.rows_on == "m" else (columns, rows)
        return mma(self.atom, a, b, accumulator)

    def operands(self, tiles: Sequence[Value]) -> list[Value]:
        """The row operands of the next product, from one row tile's accumulators (already 16 bit)."""
        values = self.atom.values(self.row_operand)
        for tile in tiles:
            if tile.dtype is not dtype(self.atom.dtype):
                raise AtomError(f"{self.atom.name} takes {self.atom.dtype} operands, not {tile!r}")
        per_tile = len(tiles[0])
        if values >= per_tile:
            step = values // per_tile
            return [concat(tiles[i : i + step]) for i in range(0, len(tiles), step)]
        return [tile[i : i + values] for tile in tiles for i in range(0, per_tile, values)]


@functools.cache
def chain(atom: MmaAtom) -> Chain:
    """The chained orientation of an atom.

    Raises:
        AtomError: in neither orientation do its accumulators form an operand.
    """
    for rows_on in ("m", "n"):
        columns = _columns(atom, rows_on)
        if columns is not None:
            return Chain(atom, rows_on, columns)
    raise AtomError(f"accumulators of {atom.name} do not form an operand in either orientation")


def _columns(atom: MmaAtom, rows_on: str) -> tuple[int, ...] | None:
    accumulators = AccumulatorLayout(atom, rows_on)
    operand, extent, layout = ("a", atom.m, atom.a) if rows_on == "m" else ("b", atom.n, atom.b)
    values, per_tile = atom.values(operand), accumulators.values
    columns: dict[int, int] = {}
    for t in range(max(1, per_tile // values)):
        for lane in range(atom.lanes):
            for j in range(values):
                tile, register = divmod(t * values + j, per_tile)
                row, column = accumulators.coordinate(lane, register)
                column += tile * accumulators.columns - t * atom.k
                k, operand_row = divmod(layout((lane, j)), extent)
                if row != operand_row or columns.setdefault(k, column) != column:
                    return None
    if sorted(columns.values()) != list(range(atom.k)):
        return None
    return tuple(columns[k] for k in range(atom.k))
