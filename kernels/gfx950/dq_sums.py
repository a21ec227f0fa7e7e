"""Sums of dQ in float32, to which blocks of keys add tile by tile, in the order in which waves hold them.

Those in 16 bits are `dq_in_place`.

A tile of 32 queries is a section of 32 rows of `sums`, (B, H, rows, D) f32; of packed sequences (1, H, rows, D),
where `work.query_tiles` says which tiles a sequence has. Of its columns, wave w makes 16 of every 64, from 16 w on,
in accumulators of 16 x 16. Each register of each accumulator is 64 numbers side by side, one a lane, so that an
atomic instruction adds two whole lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import fly
from fly.ir import memory

from ..problem.scores import LOG2_E
from ..work.query_tiles import queries_of_block, tile_of_all
from ..work.sequences import Sequence as Tokens
from .backward import BLOCK_M, WAVES, Gfx950BackwardOptions
from .panels import Sums as Parts

LANES = 64
ACROSS = 16  # columns of an accumulator tile
APART = WAVES * ACROSS  # from one of a wave's tiles to its next


def atom(dtype: fly.DType) -> fly.MmaAtom:
    """The matrix instruction that makes dQ."""
    return fly.target().mma(dtype.name, (ACROSS, ACROSS, 32))


def layout(dtype: fly.DType) -> fly.AccumulatorLayout:
    """Of its accumulators: queries by columns, of which a lane has four side by side."""
    return fly.AccumulatorLayout(atom(dtype), "n")


Step = Callable[[], None]


@dataclass(frozen=True)
class Sums:
    """Where a sequence's parts of dQ go."""

    sums: fly.Tensor
    queries: Tokens
    batch: Any

    def of_lane(self, head: Any, tile: Any) -> Any:
        """Where a lane's first number of a tile is."""
        entry, number = tile_of_all(self.queries, self.batch, tile, BLOCK_M)
        values = BLOCK_M * self.sums.shape[-1] // WAVES
        at = self.sums.at(entry, head, number * BLOCK_M, 0)
        return at.offset((fly.wave_id() * values) * 4).offset(fly.lane_id() * 4)

    def round(self, part: Parts) -> list[Step]:
        """Steps that bring a wave's accumulators of a tile into the form that is added; none where they have it."""
        return []

    def rounded(self, part: Parts) -> fly.Fragment:
        """The same at once."""
        for step in self.round(part):
            step()
        return part.fragment

    def add(self, part: Parts, at: Callable[[], Any]) -> list[Step]:
        """Steps that add a wave's part of a tile as `round` leaves it, an atomic instruction each.

        `at`: the place of the lane (`of_lane`), when a step is run.
        """
        rows, columns, count = len(part.tiles), len(part.tiles[0]), part.layout.values

        def add(number: int, r: int, c: int, register: int) -> None:
            fly.atomic_add(part.tiles[r][c][register], at().offset(number * LANES * 4))

        every = product(range(rows), range(columns), range(count))
        return [partial(add, number, *of) for number, of in enumerate(every)]

    def load(self, kind: fly.AccumulatorLayout, columns: int, head: Any, tile: Any) -> fly.Fragment:
        """What was added up of a tile."""
        at, across, rows = self.of_lane(head, tile), columns // APART, range(BLOCK_M // kind.rows)
        tiles = tuple(tuple(self._accumulator(at, kind, r * across + c) for c in range(across)) for r in rows)
        return fly.Fragment(kind, tiles)

    def _accumulator(self, at: Any, kind: fly.AccumulatorLayout, index: int) -> fly.Value:
        """What was added up of a tile's accumulator `index`; `at`: the place of the lane."""
        places = range(index * kind.values, (index + 1) * kind.values)
        return fly.from_elements([memory.load(at.offset(i * LANES * 4), fly.f32) for i in places])


@fly.kernel
def round_dq(
    dq_sums: fly.Tensor,
    dq: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    scale_log2: fly.f32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Gfx950BackwardOptions,
    folded: bool = False,
) -> None:
    """dq = softmax_scale * the sums, in dq's dtype. Grid: (query tiles, H, B), or `folded`."""
    given = options.features.bind(operands)
    head, batch, queries, count = queries_of_block(dq, cu_seqlens_q, sequences, given, folded=folded)
    tile = fly.block_id.x
    with fly.when(tile * BLOCK_M < count):
        softmax_scale: Any = scale_log2 * (1 / LOG2_E)
        factor: Any = given.scale_kept(softmax_scale)
        sums = Sums(dq_sums, queries, batch).load(layout(dq.dtype), options.head_dim, head, tile)
        window = queries.rows(dq, head, options.head_dim).tile(tile, BLOCK_M)
        first = fly.wave_id() * ACROSS
        for c in range(len(sums.tiles[0])):
            part = fly.Fragment(sums.layout, tuple((row[c],) for row in sums.tiles))
            for row, column, values in part.map(lambda x, r, c: (x * factor).to(dq.dtype)).runs():
                window.store(values, row, column + (first + c * APART))
