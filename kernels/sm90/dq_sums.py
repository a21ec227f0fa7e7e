"""Sums of dQ in float32, to which blocks of keys add tile by tile, in the order in which a warpgroup holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, anew, warpgroup_id
from fly.backends.nvvm.mbarrier import Position
from fly.ir import memory
from fly.ir.dtypes import dtype as dtype_of

from ..problem.scores import LOG2_E
from ..work.query_tiles import queries_of_block, tile_of_all
from ..work.sequences import Sequence
from .backward import BLOCK_M, Sm90BackwardOptions
from .key_work import KeyWork
from .stores import store_runs
from .turns import Act, Neighbours, Turns, count_of
from .walk import Walk

PIECE = 4  # values of a thread that lie side by side
AT_A_TIME = 2  # tiles whose loads are on their way together


def place_of(
    sums: fly.Tensor, batch: Any, head: Any, tile: Any, index: Any, options: Sm90BackwardOptions
) -> fly.Pointer:
    """Where this thread's first values of a tile are, of the `index`-th consumer's piece.

    `sums`: (B, H, rows, D) f32, `rows` a multiple of `BLOCK_M`; of packed sequences (1, H, rows, D), where
    `numbered` says which tiles a sequence has. A piece is its threads' first `PIECE` values,
    thread after thread, then the next ones.
    """
    values = options.dq_columns * 64
    at = sums.at(batch, head, tile * BLOCK_M, 0)
    thread = fly.thread_id.x % WARPGROUP
    if options.crowded:
        thread = anew(thread, fly.i32(0) + tile)
    return at.offset((index * values + thread * PIECE) * 4)


def numbered(queries: Sequence, batch: Any, tile: Any) -> tuple[Any, Any]:
    """(entry, tile) of a sequence's tile among the sums."""
    return tile_of_all(queries, batch, tile, BLOCK_M)


def add(values: fly.Value, place: fly.Pointer) -> None:
    """Add a thread's accumulators to the sums."""
    for i in range(0, len(values), PIECE):
        fly.atomic_add(values[i : i + PIECE], place.offset(i * WARPGROUP * 4), align=4 * PIECE)


@dataclass(frozen=True)
class Sums:
    """Where parts of a sequence's dQ go: to `sums`, tile by tile, where there are `turns` in these.

    `rank`: of the block in its cluster, whose turns it has.
    """

    sums: fly.Tensor
    queries: Sequence
    batch: Any
    options: Sm90BackwardOptions
    turns: Turns | None
    rank: Any

    @staticmethod
    def of(sums: fly.Tensor, work: KeyWork, in_turn: Turns | None) -> Sums:
        """Of what a block works on."""
        block = work.block
        return Sums(sums, block.queries, block.batch, work.options, in_turn, block.rank)

    def _of_thread(self, head: Any, tile: Any, index: Any) -> fly.Pointer:
        entry, number = numbered(self.queries, self.batch, tile)
        return place_of(self.sums, entry, head, number, index, self.options)

    def count(self, head: Any, tile: Any) -> fly.Pointer:
        """The count of a tile; see `sm90.turns`."""
        assert self.turns is not None
        entry, number = numbered(self.queries, self.batch, tile)
        return count_of(self.turns.counts, self.sums, entry, head, number, self.options.blocks, self.rank)

    def take_in(self, part: fly.Value, head: Any, tile: Any, index: Any, at: Position) -> None:
        """By a consumer, the `index`-th: its accumulators of a tile; `at`: where the ring of turns is."""
        if self.turns is None:
            add(part, self._of_thread(head, tile, index))
        else:
            is_first = self.turns.is_first(tile)
            place = self._of_thread(head, tile, index)
            self.turns.wait(at)
            with fly.when(is_first):
                put(part, place)
            with fly.when(~is_first):
                add(part, place)
            self.turns.done(at)

    def each_turn(self, act: Act, block: Neighbours, walk: Walk, heads: tuple[Any, Any]) -> None:
        """By one thread: what `sm90.turns` does about every tile that passes by."""
        for head, place in (all_heads := fly.range(*heads, carry=Position.start())):
            for step, at in (passing := fly.range(walk.tiles.first, walk.tiles.end, carry=place)):
                tile = walk.tile(step)
                act(at, tile, self.count(head, tile), block)
                passing.next(at.next(self.options.stages))
            all_heads.next(passing.results)

    def round(self, dq: fly.Tensor, factor: Any, heads: tuple[Any, Any], tiles: tuple[Any, Any], index: Any) -> None:
        """By a consumer, behind all of its parts: dq = `factor` times the sums of `tiles`, which nobody adds to."""
        first, end = tiles
        for head in fly.range(*heads):
            for at in fly.range(first, end, AT_A_TIME):
                # of tiles past the last one, the last one again
                some = [fly.minimum(at + i, end - 1) for i in range(AT_A_TIME)]
                values = [load(self.options.dq_columns // 2, self._of_thread(head, tile, index)) for tile in some]
                for tile, value in zip(some, values, strict=True):
                    store_rounded(value * factor, dq, self.queries, head, tile, index, self.options)


def of_thread(piece: fly.Pointer) -> fly.Pointer:
    """Where this thread's first values of a piece are, which `load` and `put` take."""
    return piece.offset(fly.thread_id.x % WARPGROUP * (4 * PIECE))


def load(count: int, place: fly.Pointer) -> fly.Value:
    """So many of a thread's accumulators."""
    pieces = [
        memory.load(place.offset(i * WARPGROUP * 4), fly.f32, PIECE, align=4 * PIECE) for i in range(0, count, PIECE)
    ]
    return fly.concat(pieces)


def put(values: fly.Value, place: fly.Pointer) -> None:
    """Store a thread's accumulators, in place of what was there."""
    for i in range(0, len(values), PIECE):
        fly.store(values[i : i + PIECE], place.offset(i * WARPGROUP * 4), align=4 * PIECE)


def store_rounded(
    sums: fly.Value, dq: fly.Tensor, queries: Sequence, head: Any, tile: Any, index: Any, options: Sm90BackwardOptions
) -> None:
    """What dQ's sums of a tile, scaled, are in dq's dtype; `index`: as of `place_of`."""
    runs = wgmma.runs(sums.to(dtype_of(dq.dtype.name)))
    view, first, width = queries.matrix(dq, head), tile * BLOCK_M, options.dq_columns
    if options.head_dim == options.pieces * width:
        store_runs(view, first, queries.length, runs, width, index * width)
    else:
        for i in range(-(-options.head_dim // width)):
            with fly.when(index == i):
                left = options.head_dim - i * width
                store_runs(view, first, queries.length, runs, min(width, left), i * width)


@fly.kernel
def round_dq(
    dq_sums: fly.Tensor,
    dq: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    scale_log2: fly.f32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
    folded: bool = False,
) -> None:
    """dq = softmax_scale * the sums, in dq's dtype. Grid: (query tiles, H, B), or `folded`.

    Of the last heads first, whose sums are in the second-level cache.
    """
    given = options.features.bind(operands)
    head, batch, queries, count = queries_of_block(dq, cu_seqlens_q, sequences, given, folded=folded, last_first=True)
    tile, index = fly.block_id.x, warpgroup_id()
    first = tile * BLOCK_M
    with fly.when(first < count):
        entry, at = numbered(queries, batch, tile)
        place = place_of(dq_sums, entry, head, at, index, options)
        factor: Any = scale_log2 * (1 / LOG2_E)
        scaled = load(options.dq_columns // 2, place) * given.scale_kept(factor)
        store_rounded(scaled, dq, queries, head, tile, index, options)


@fly.kernel
def clear_unseen(
    dq_sums: fly.Tensor,
    counts: fly.Tensor,
    dq: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
    folded: bool = False,
) -> None:
    """dq = 0 in tiles that no block of keys had a part in (`sm90.turns`). Grid: (query tiles, H, B), or `folded`."""
    given = options.features.bind(operands)
    head, batch, queries, count = queries_of_block(dq, cu_seqlens_q, sequences, given, folded=folded)
    tile = fly.block_id.x
    entry, at = numbered(queries, batch, tile)
    with fly.when(tile * BLOCK_M < count):
        seen = memory.load(count_of(counts, dq_sums, entry, head, at, options.blocks), fly.i32)
        with fly.when(seen == 0):
            zeros = fly.broadcast(fly.f32(0.0), options.dq_columns // 2)
            store_rounded(zeros, dq, queries, head, tile, warpgroup_id(), options)
