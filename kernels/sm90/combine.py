"""Split keys put together by the Hopper kernel itself: by whichever block finishes a tile's last part.

A second kernel costs a launch and a wait for the first one's last block: much of a short decoding step. Instead every
tile has a counter of the parts that are there. Who stores the last one reads them all, in their order, so results do
not depend on who that is. The formula is `split_combine`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import fly
from fly.backends.nvvm.intrinsics import WARPGROUP, barrier_any, barrier_sync
from fly.ir import memory

from ..problem.features import BoundFeatures
from ..work.split_combine import VECTOR, combined
from ..work.tile_scheduler import Work, part
from .counters import FIRST_ARRIVAL
from .schedule import Schedule

AT_A_TIME = 8  # splits: one warpgroup alone waits for their loads


@dataclass(frozen=True)
class Combination:
    """Where parts and results are: `parts` and `results` are (out, lse), results' lse may be None.

    Tiles are one for each sequence and head, or packed set of `pack` heads, with `head_dim` columns. `barrier`: a
    named one of the warpgroup that calls.
    """

    schedule: Schedule
    given: BoundFeatures
    parts: tuple[fly.Tensor, fly.Tensor]
    results: tuple[fly.Tensor, fly.Tensor | None]
    pack: int
    head_dim: int
    barrier: int

    def run(self, work: Work, rows: fly.Value) -> None:
        """By a warpgroup that has stored its part of a tile with `rows` rows: if it is the last one, the rest."""
        schedule = self.schedule
        thread = fly.thread_id.x % WARPGROUP
        barrier_sync(self.barrier, WARPGROUP)  # all stores come before the count
        tile = work.batch * schedule.heads + work.head
        last = schedule.splits - 1

        def count() -> fly.Value:
            is_last: fly.Value = fly.fetch_wrap(last, schedule.counters.at(FIRST_ARRIVAL + tile)) == last
            return is_last

        with fly.when(barrier_any(self.barrier, WARPGROUP, fly.cond(thread == 0, count, lambda: fly.i1(False)))):
            lanes = self.head_dim // VECTOR
            at_once = WARPGROUP // lanes
            row, column = thread // lanes, thread % lanes * VECTOR
            with fly.when(row < at_once):
                for first in fly.range(row, rows, at_once):
                    self._row(work, first, column)

    def _row(self, work: Work, row: fly.Value, column: fly.Value) -> None:
        """`VECTOR` columns of a row."""
        schedule, pack = self.schedule, self.pack
        (parts, part_lses), (out, lse) = self.parts, self.results

        def values(split: fly.Value) -> fly.Value:
            view = schedule.rows_of(work, part(parts, split), pack)
            return memory.load(view.at(row, column), fly.f32, VECTOR, align=16)

        def split_lse(split: fly.Value) -> fly.Value:
            return schedule.vector_of(work, part(part_lses, split), pack).load(row)

        sink = self.given.sink_of(work.head * pack + (row & (pack - 1)))
        output, row_lse = combined(schedule.splits, split_lse, values, sink, AT_A_TIME)
        fly.store(output.to(out.dtype), schedule.rows_of(work, out, pack).at(row, column), align=16)
        if lse is not None:
            with fly.when(column == 0):
                schedule.vector_of(work, lse, pack).store(row_lse, row)
