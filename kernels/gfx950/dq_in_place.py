"""Sums of dQ in 16 bits, to which blocks of keys add in dQ's own memory: half as many bytes, and no workspace.

dQ is cleared, all blocks add to it, and then its elements are put in order. Until then a tile of 32 queries has what
the waves hold in the order that suits additions: rows 8 w to 8 w + 7 are wave w's, and an instruction adds two
neighbouring columns a lane to two whole lines of 128 bytes, 64 columns of two rows. In dQ's own order it would touch
16 lines.

A tile that its sequence does not fill has no memory for all of that in dQ, and is added up in `tails`, (B, H, 32, D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import fly
from fly.ir import memory

from ..problem.scores import LOG2_E
from ..work.query_tiles import queries_of_block
from ..work.sequences import Sequence as Tokens
from .backward import BLOCK_M, WAVES, Gfx950BackwardOptions
from .dq_sums import ACROSS, APART, LANES, Step, Sums, layout
from .panels import Sums as Parts

TOGETHER = 2  # neighbouring columns that a lane adds at once
PIECE = 64  # columns of a row, to which half of a wave adds at once
ROWS = BLOCK_M // WAVES  # of a wave
VECTOR = 8  # elements that a lane clears or stores at once
PAD = 8  # elements between rows in LDS, which begin on different banks then


@dataclass(frozen=True)
class Place:
    """Where a lane adds to a tile: its first element, and the bytes from there to the next two rows."""

    first: fly.Pointer
    apart: Any


@dataclass(frozen=True)
class SumsInPlace(Sums):
    """Where a sequence's parts of dQ go: `sums` is dQ, (B, Sq, H, D) or (total_q, H, D) of 16 bits, D `columns`."""

    tails: fly.Tensor
    columns: int

    def rows(self, head: Any, tile: Any) -> tuple[fly.Pointer, Any]:
        """(a tile's first row, bytes from one row to the next): in dQ, or in `tails`."""
        view, first = self.queries.rows(self.sums, head, self.columns), tile * BLOCK_M
        whole = first + BLOCK_M <= self.queries.length
        start = view.row(first).where(whole, self.tails.at(self.batch, head, 0, 0))
        return start, fly.select(whole, view.pitch, self.columns * view.dtype.bytes)

    def of_lane(self, head: Any, tile: Any) -> Place:
        """Where a lane's first numbers of a tile are."""
        start, pitch = self.rows(head, tile)
        half, lane = fly.lane_id() // (LANES // 2), fly.lane_id() % (LANES // 2)
        return Place(start.offset((fly.wave_id() * ROWS + half) * pitch).offset(lane * 4), pitch * 2)

    def round(self, part: Parts) -> list[Step]:
        def narrow(r: int, c: int) -> None:
            part.tiles[r][c] = part.tiles[r][c].to(self.sums.dtype, rounding="nearest_any")

        return [partial(narrow, r, c) for r, row in enumerate(part.tiles) for c in range(len(row))]

    def add(self, part: Parts, at: Callable[[], Place]) -> list[Step]:
        rows, columns, pairs = len(part.tiles), len(part.tiles[0]), part.layout.values // TOGETHER

        def add(number: int, r: int, c: int, pair: int) -> None:
            pairs = part.tiles[r][c].bitcast(fly.i32)  # words, or LLVM takes them apart
            fly.atomic_add(fly.from_elements([pairs[pair]]).bitcast(self.sums.dtype), self._address(number, at()))

        every = product(range(rows), range(columns), range(pairs))
        return [partial(add, number, *of) for number, of in enumerate(every)]

    def _address(self, number: int, at: Place) -> fly.Pointer:
        """Where addition `number` goes."""
        pair, piece = divmod(number, self.columns // PIECE)
        return at.first.offset(at.apart * pair).offset(piece * PIECE * self.sums.dtype.bytes)

    def _accumulator(self, at: Place, kind: fly.AccumulatorLayout, index: int) -> fly.Value:
        count = kind.values // TOGETHER
        places = (self._address(number, at) for number in range(index * count, (index + 1) * count))
        return fly.concat([memory.load(place, self.sums.dtype, TOGETHER, align=4) for place in places])


def sums_of_dq(sums: fly.Tensor, tails: fly.Tensor | None, queries: Tokens, batch: Any, columns: int) -> Sums:
    """Those in float32, or with `tails` those in 16 bits; tensors are the kernel's parameters."""
    if tails is None:
        return Sums(fly.reread(sums), queries, batch)
    return SumsInPlace(fly.reread(sums), queries, batch, fly.reread(tails), columns)


def _shares(columns: int) -> Iterator[tuple[fly.Value, fly.Value]]:
    """(row, column) of each vector that a thread has of a tile."""
    across, threads = columns // VECTOR, WAVES * LANES
    for first in range(0, BLOCK_M * across, threads):
        number = first + fly.thread_id.x
        yield number // across, number % across * VECTOR


@fly.kernel
def clear_dq(
    dq: fly.Tensor,
    dq_tails: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    *operands: fly.Operand,
    options: Gfx950BackwardOptions,
    folded: bool = False,
) -> None:
    """dq, or the tail of a sequence, becomes zeros. Grid: (query tiles, H, B), or `folded`."""
    given = options.features.bind(operands)
    head, batch, queries, count = queries_of_block(dq, cu_seqlens_q, sequences, given, folded=folded)
    tile = fly.block_id.x
    with fly.when(tile * BLOCK_M < count):
        _clear(SumsInPlace(dq, queries, batch, dq_tails, options.head_dim), head, tile)


def _clear(sums: SumsInPlace, head: Any, tile: Any) -> None:
    dtype = sums.sums.dtype
    start, pitch = sums.rows(head, tile)
    zeros = fly.broadcast(dtype(0.0), VECTOR)
    for row, column in _shares(sums.columns):
        fly.store(zeros, start.offset(row * pitch + column * dtype.bytes), align=VECTOR * dtype.bytes)


@fly.kernel
def order_dq(
    dq: fly.Tensor,
    dq_tails: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    scale_log2: fly.f32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Gfx950BackwardOptions,
    folded: bool = False,
) -> None:
    """dq = softmax_scale * the sums that are in it, each where it belongs. Grid: (query tiles, H, B), or `folded`."""
    given = options.features.bind(operands)
    head, batch, queries, count = queries_of_block(dq, cu_seqlens_q, sequences, given, folded=folded)
    tile = fly.block_id.x
    with fly.when(tile * BLOCK_M < count):
        softmax_scale: Any = scale_log2 * (1 / LOG2_E)
        factor: Any = given.scale_kept(softmax_scale)
        _order(SumsInPlace(dq, queries, batch, dq_tails, options.head_dim), head, tile, factor)


def _order(sums: SumsInPlace, head: Any, tile: Any, factor: Any) -> None:
    """By way of LDS, so that the block stores nothing before it has read all of the tile."""
    dtype, columns = sums.sums.dtype, sums.columns
    pitch, size = (columns + PAD) * dtype.bytes, dtype.bytes
    rows = fly.alloc_shared("rows", BLOCK_M * pitch)
    part = sums.load(layout(dtype), columns, head, tile)
    first = fly.wave_id() * ACROSS
    for c in range(columns // APART):
        of_column = fly.Fragment(part.layout, tuple((row[c],) for row in part.tiles))
        for row, column, values in of_column.map(lambda x, r, c: (x.to(fly.f32) * factor).to(dtype)).runs():
            place = rows.offset(row * pitch + (column + (first + c * APART)) * size)
            fly.store(values, place, align=(values.length or 1) * size)
    fly.barrier()
    window = sums.queries.rows(sums.sums, head, columns).tile(tile, BLOCK_M)
    for row, column in _shares(columns):
        place = rows.offset(row * pitch + column * size)
        window.store(memory.load(place, dtype, VECTOR, align=VECTOR * size), row, column)
