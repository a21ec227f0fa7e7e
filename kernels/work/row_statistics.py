"""What the backward pass has to know of every query row before it starts."""

from __future__ import annotations

import math
from typing import Any

import fly

from ..problem.dropout_tile import kept_share
from ..problem.scores import LOG2_E
from .sequences import Sequence
from .tile_scheduler import head_of_block

THREADS = 256
LARGEST = float(2**128 - 2**104)  # of float32
PAIRS = 4  # of vectors, which a thread has registers for


@fly.kernel
def row_statistics(
    out: fly.Tensor,
    dout: fly.Tensor,
    lse: fly.Tensor,
    dlse: fly.Tensor | None,
    lse2: fly.Tensor,
    delta: fly.Tensor,
    dq_sums: fly.Tensor | None,
    counts: fly.Tensor | None,
    *dropped: fly.Operand,
    head_dim: int,
    vector: int = 8,
    deep: int = 1,
    negated: bool = False,
    folded: bool = False,
    first_heads: bool = False,
    last_first: bool = False,
) -> None:
    """lse2 = log2(e) * lse, +inf where lse is -inf (no key); delta = rowsum(dout * out) - dlse, 0 there.

    out, dout: (B, S, H, D); lse, dlse, lse2, delta: (B, H, S) f32; packed, (total, H, D) and (H, total), whatever the
    sequences are. `dq_sums`, (B, H, rows, D) f32 with a multiple of a block's rows, becomes zeros, and so do
    `counts`, (N,) i32. With `first_heads`, dq_sums is (1, N, rows, D), of the first N of all heads of all sequences.
    `negated`: it is -delta that is written, for kernels whose dP starts from it. `dropped`: with dropout's threshold,
    i32, delta is times the share of the weights that is kept. Grid: (row blocks, H, B or 1), or `folded`,
    `last_first`: see `head_of_block`; lanes next to each other share `deep` rows, at most as many as they are,
    `vector` elements at a time. All of these are on their way before anything is stored.
    """
    lanes = lanes_of_row(head_dim, vector)
    rows = rows_of_block(head_dim, deep, vector)
    entries = out.shape[0] if out.rank == 4 else 1
    head, batch, exists = head_of_block(out.shape[-2], entries, folded=folded, last_first=last_first)
    first = fly.block_id.x * rows
    row, lane = fly.thread_id.x // lanes * deep, fly.thread_id.x % lanes
    everything = Sequence(batch if out.rank == 4 else None, None, out.shape[-3])
    sides = [everything.rows(x, head, head_dim).window(first, rows) for x in (out, dout)]
    columns = [fly.minimum(c + lane * vector, head_dim - vector) for c in range(0, head_dim, lanes * vector)]
    # past the end the last row again: a load under a condition is waited for before the next one's
    inside = [fly.minimum(row + i, everything.length - 1 - first) for i in range(deep)]
    loaded = [[[side.load_inside(i, column, vector) for side in sides] for column in columns] for i in inside]
    logs, lse2_of, delta_of = (everything.vector(x, head) for x in (lse, lse2, delta))
    number = first + row + lane
    log = logs.load(fly.minimum(number, everything.length - 1))
    if dq_sums is not None and first_heads:
        place = batch * out.shape[-2] + head
        with fly.when(place < dq_sums.shape[1]):
            _clear(dq_sums, 0, place, first, rows)
    elif dq_sums is not None:
        _clear(dq_sums, batch, head, first, rows)
    if counts is not None:
        _clear_counts(counts)
    totals = [_total(of_row, head_dim, lane, lanes, vector) for of_row in loaded]
    total = totals[0]
    for i in range(1, deep):
        total = fly.select(lane == i, totals[i], total)
    stores = (lane < deep) & (number < everything.length)
    with fly.when(stores if exists is None else stores & exists):
        empty = log == -math.inf
        if dlse is not None:
            total = total - everything.vector(dlse, head).load(number)
        log2 = log * LOG2_E
        # a sink or a bias near -3e38: hidden scores less -inf would be NaN
        log2 = fly.select(log2 < -LARGEST, -LARGEST, log2)
        lse2_of.store(fly.select(empty, math.inf, log2), number)
        for threshold in dropped:
            total = total * kept_share(threshold)  # type: ignore[arg-type]  # a Value in here
        delta_of.store(fly.select(empty, 0.0, -total if negated else total), number)


def _total(loaded: list[list[fly.Value]], head_dim: int, lane: fly.Value, lanes: int, vector: int) -> fly.Value:
    """The products of a row's two sides, added up over its lanes."""
    total = fly.f32(0.0)
    for column, (out, dout) in zip(range(0, head_dim, lanes * vector), loaded, strict=True):
        part = fly.reduce_sum(out.to(fly.f32) * dout.to(fly.f32))
        # the last columns are loaded again where there are none
        whole = column + lanes * vector <= head_dim
        total = total + (part if whole else fly.select(column + lane * vector < head_dim, part, 0.0))
    bits = [1 << bit for bit in range((lanes - 1).bit_length())]
    return fly.reduce_lanes(total, lambda a, b: a + b, bits)


def _clear(sums: fly.Tensor, batch: Any, head: fly.Value, first: fly.Value, rows: int) -> None:
    """A block's rows of (B, H, rows, D) f32, D columns side by side."""
    clear(sums.at(batch, head, first, 0), sums.shape[-1] * rows, fly.thread_id.x, THREADS)


def clear(begin: fly.Pointer, count: Any, thread: Any, threads: int) -> None:
    """Zeros for `count` f32, a multiple of 4, from `begin` on, which 16 divides; by the `thread`-th of `threads`."""
    zero = fly.broadcast(fly.f32(0.0), 4)
    for at in fly.range(thread * 4, count, threads * 4):
        fly.store(zero, begin.offset(at * 4), align=16)


def _clear_counts(counts: fly.Tensor) -> None:
    """By the first blocks of the grid, a number a thread."""
    block = fly.block_id.x + fly.grid_dim.x * (fly.block_id.y + fly.grid_dim.y * fly.block_id.z)
    number, at = counts.shape[0], block * THREADS + fly.thread_id.x
    with fly.when((block <= number // THREADS) & (at < number)):
        counts.store(0, at)


def lanes_of_row(head_dim: int, vector: int = 8) -> int:
    """Lanes that share a row of the preprocessing kernel: a power of two, 16 at most."""
    return min(16, 1 << (-(-head_dim // vector) - 1).bit_length())


def rows_of_block(head_dim: int, deep: int = 1, vector: int = 8) -> int:
    """Rows of a block of the preprocessing kernel, which clears as many of `dq_sums`."""
    return THREADS // lanes_of_row(head_dim, vector) * deep


def rows_of_thread(head_dim: int, vector: int = 8) -> int:
    """Rows that a thread of the preprocessing kernel has on their way where memory decides: four pairs of vectors."""
    lanes = lanes_of_row(head_dim, vector)
    return min(lanes, PAIRS // -(-head_dim // (lanes * vector)))
