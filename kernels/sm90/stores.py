"""A warpgroup's accumulators to global memory, 16 bytes a lane."""

from __future__ import annotations

from typing import Any

import fly

from .schedule import PackedRows

RUN = 32  # columns that four lanes store together
Runs = tuple[list[fly.Value], fly.Value, list[list[fly.Value]]]


def store_runs(
    view: fly.Tensor | PackedRows, first: Any, count: Any, runs: Runs, columns: int, first_column: Any = 0
) -> None:
    """What `wgmma.runs` makes of 64 rows, the first of them number `first`; rows from `count` on are dropped.

    `columns`, a multiple of 8, are stored, from `first_column` of `view` on.
    """
    rows, column, pieces = runs
    whole, rest = divmod(columns, RUN)
    for row, row_pieces in zip(rows, pieces, strict=True):
        with fly.when(first + row < count):
            for i, piece in enumerate(row_pieces[:whole]):
                fly.store(piece, view.at(first + row, column + first_column + RUN * i), align=16)
        if rest:
            with fly.when((first + row < count) & (column < rest)):
                fly.store(row_pieces[whole], view.at(first + row, column + first_column + RUN * whole), align=16)
