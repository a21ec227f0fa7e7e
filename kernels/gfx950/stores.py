"""The output of the gfx950 kernels on its way to memory."""

from __future__ import annotations

from typing import Any

import fly
from fly.lang.sync import swap_lanes

_HALF = 32  # lanes of a wave that have the same rows as the others


def store_wide(view: fly.RowView, output: fly.Fragment, first_row: Any, count: int) -> None:
    """As `fragments.store_output` of 32x32 accumulators whose lanes hold runs of 4 columns, 16 bytes a lane.

    Two lanes have a row's neighbouring runs of 4. They swap one of each two, so that each has 8 columns of 16 bits
    in a row: half of the stores. Runs of 32 bits have 16 bytes as they are.
    """
    window = view.window(first_row, count)
    runs = list(output.map(lambda tile, r, c: tile.to(view.dtype)).runs(view.columns))
    # a last run without a neighbour is stored as it is
    paired = len(runs) // 2 * 2 if view.dtype.bytes == 2 else 0
    for row, column, values in runs[paired:]:
        window.store(values, row, column)
    further = (fly.lane_id() // _HALF) * 4
    for (row, column, first), (_, _, second) in zip(runs[:paired:2], runs[1:paired:2], strict=True):
        pairs = zip(first.bitcast(fly.i32), second.bitcast(fly.i32), strict=True)
        words = [swap_lanes(a, b, _HALF) for a, b in pairs]
        values = fly.concat([fly.from_elements(list(half)).bitcast(view.dtype) for half in zip(*words, strict=True)])
        window.store(values, row, column + further)


def add_counts(counts: fly.Tensor, *numbers: fly.Value) -> None:
    """Add a wave's i32 numbers to the f32 elements of `counts`."""
    with fly.when(fly.lane_id() == 0):
        for i, number in enumerate(numbers):
            fly.atomic_add_bounded(number.to(fly.f32), counts.at(i), 0, 4)
