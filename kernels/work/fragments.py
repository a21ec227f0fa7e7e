"""Pieces that the flash-attention kernels share: operands in, results out."""

from __future__ import annotations

from typing import Any, Protocol

import fly


def group_size(q: fly.Tensor, k: fly.Tensor) -> fly.Value:
    """Query heads per key head; the same in every thread, so the division is cheap scalar work once."""
    group: fly.Value = q.shape[-2] // k.shape[-2]
    return group


def load_queries(
    link: fly.Chain, window: fly.Window, first: Any, row_tiles: int, steps: int
) -> list[list[fly.Value]]:
    """Row operands [row tile][step] straight from global memory, from row `first` of the block's window on.

    Rows past the tensor's end repeat its last one: the block has at least one row, but a wave may have none.
    Columns past the view's are zero.
    """
    atom, operand = link.atom, link.row_operand
    want = fly.operand_coordinates(atom, operand, transposed=False)
    values = atom.values(operand)
    runs = [v for v in range(values) if v == 0 or want(0, v) != (want(0, v - 1)[0], want(0, v - 1)[1] + 1)]
    length = values // len(runs)
    lane = fly.lane_id()
    row0 = first + fly.lane_map([want(i, 0)[0] for i in range(atom.lanes)], lane)
    column0 = fly.lane_map([want(i, 0)[1] for i in range(atom.lanes)], lane)
    extent = link.layout.rows
    last = window.rows_left - 1
    columns = window.view.columns
    result = []
    for r in range(row_tiles):
        steps_of_tile = []
        for t in range(steps):
            pieces = []
            for run in runs:
                row = fly.minimum(row0 + (r * extent + want(0, run)[0]), last)
                column = column0 + (t * atom.k + want(0, run)[1])
                if (t + 1) * atom.k <= columns:
                    pieces.append(window.load_inside(row, column, length))
                else:
                    piece = window.load_inside(row, fly.minimum(column, columns - length), length)
                    pieces.append(fly.select(column < columns, piece, 0.0))
            steps_of_tile.append(fly.concat(pieces))
        result.append(steps_of_tile)
    return result


def row_numbers(layout: fly.AccumulatorLayout, row_tiles: int, first: Any) -> fly.RowVector:
    """The number of each row that a lane holds, of `row_tiles` accumulator tiles from row `first` on."""
    return fly.RowVector.full(layout, row_tiles, 0.0).rows().map(lambda row: row + first)


def product(
    link: fly.Chain,
    rows: list[fly.Value],
    loader: fly.OperandLoader,
    tile: fly.SharedTile,
    place: Any,
    accumulator: fly.Fragment,
) -> fly.Fragment:
    """accumulator += rows (one operand per row tile) times the column operands of one step.

    `place(n)` is where in the tile column tile n's operand is; each is loaded once for all row tiles.
    """
    tiles = [list(row) for row in accumulator.tiles]
    for n in range(0, len(tiles[0]), loader.plan.tiles):
        for i, columns in enumerate(loader.load(tile, *place(n))):
            for r, row in enumerate(tiles):
                row[n + i] = link.mma(rows[r], columns, row[n + i])
    return fly.Fragment(accumulator.layout, tuple(tuple(row) for row in tiles))


def store_output(view: fly.RowView, output: fly.Fragment, first_row: Any, count: int) -> None:
    """Round to the output's dtype and store; rows and columns past the end are dropped."""
    window = view.window(first_row, count)
    for row, column, values in output.map(lambda tile, r, c: tile.to(view.dtype)).runs(view.columns):
        window.store(values, row, column)


class Vector(Protocol):
    """Numbers in global memory, one a row."""

    def store(self, value: fly.Value, row: fly.Value, /) -> None:
        """Store one row's number."""


def store_lse(lse: Vector, values: fly.RowVector, rows: fly.RowVector, count: Any) -> None:
    """One lane of those that share a row stores its log-sum-exp."""
    owner = fly.evaluate(values.layout.column_lane, fly.lane_of(values.layout.atom.lanes)) == 0
    for value_tile, row_tile in zip(values.values, rows.values, strict=True):
        for value, row in zip(value_tile, row_tile, strict=True):
            with fly.when(owner & (row < count)):
                lse.store(value, row)
