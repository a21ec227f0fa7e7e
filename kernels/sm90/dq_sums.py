"""Sums of dQ in float32, to which blocks of keys add tile by tile, in the order in which a warpgroup holds them."""

from __future__ import annotations

from typing import Any

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, warpgroup_id
from fly.ir import memory
from fly.ir.dtypes import dtype as dtype_of

from ..problem.scores import LOG2_E
from ..work.sequences import Sequence, tokens_of
from ..work.tile_scheduler import head_of_block
from .backward import BLOCK_M, Sm90BackwardOptions
from .stores import store_runs

PIECE = 4  # values of a thread that lie side by side


def place_of(
    sums: fly.Tensor, batch: Any, head: Any, tile: Any, index: Any, options: Sm90BackwardOptions
) -> fly.Pointer:
    """Where this thread's first values of a tile are, of the `index`-th consumer's piece.

    `sums`: (B, H, rows, columns) f32, `rows` a multiple of `BLOCK_M` and `columns` those of a tile of K; of packed
    sequences (1, H, rows, columns), where `slot_of` says which tiles a sequence has. A piece is its threads' first
    `PIECE` values, thread after thread, then the next ones.
    """
    values = options.dq_columns * 64
    at = sums.at(batch, head, tile * BLOCK_M, 0)
    return at.offset((index * values + fly.thread_id.x % WARPGROUP * PIECE) * 4)


def slot_of(queries: Sequence, batch: Any) -> fly.Value | None:
    """The number of a packed sequence's first tile; those up to the next one's are its own, and are enough."""
    return None if queries.index is not None else queries.start // BLOCK_M + batch


def add(values: fly.Value, place: fly.Pointer) -> None:
    """Add a thread's accumulators to the sums."""
    for i in range(0, len(values), PIECE):
        fly.atomic_add(values[i : i + PIECE], place.offset(i * WARPGROUP * 4), align=4 * PIECE)


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
    """dq = softmax_scale * the sums, in dq's dtype. Grid: (query tiles, H, B), or `folded`."""
    given = options.features.bind(operands)
    head, batch, exists = head_of_block(dq.shape[-2], sequences, folded=folded)
    queries = Sequence.of(tokens_of(dq, cu_seqlens_q), cu_seqlens_q, batch, given.get("seqused_q"))
    tile, index = fly.block_id.x, warpgroup_id()
    first, column = tile * BLOCK_M, index * options.dq_columns
    count = queries.length if exists is None else fly.select(exists, queries.length, 0)
    with fly.when(first < count):
        slot = slot_of(queries, batch)
        entry, at = (batch, tile) if slot is None else (0, slot + tile)
        place, values = place_of(dq_sums, entry, head, at, index, options), options.dq_columns // 2
        pieces = [
            memory.load(place.offset(i * WARPGROUP * 4), fly.f32, PIECE, align=4 * PIECE)
            for i in range(0, values, PIECE)
        ]
        factor: Any = scale_log2 * (1 / LOG2_E)
        scaled = fly.concat(pieces) * given.scale_kept(factor)
        runs = wgmma.runs(scaled.to(dtype_of(dq.dtype.name)))
        view, width = queries.matrix(dq, head), options.dq_columns
        if options.head_dim == options.pieces * width:
            store_runs(view, first, count, runs, width, column)
        else:
            for i in range(-(-options.head_dim // width)):
                with fly.when(index == i):
                    store_runs(view, first, count, runs, min(width, options.head_dim - i * width), i * width)
