"""A block of keys of the Hopper backward kernel: its shared memory, and the thread that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly
from fly.backends.nvvm import tma
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.mbarrier import Mbarriers, Position
from fly.backends.nvvm.wgmma import PanelTile

from ..problem.features import BoundFeatures
from ..work.sequences import Sequence as Tokens
from ..work.sequences import alone
from .backward import ALONG, BLOCK_M, CONSUMERS, Sm90BackwardOptions
from .producer import Slots, copy_tile, entry_of
from .statistics import Statistics
from .walk import Walk


@dataclass(frozen=True)
class Block:
    """What a block works on: keys of a key head from `first_key` on, and which tokens are the sequence's."""

    batch: fly.Value
    kv_head: fly.Value
    first_key: fly.Value
    keys: Tokens
    queries: Tokens

    @property
    def shift(self) -> fly.Value | None:
        """How far behind a multiple of `ALONG` packed queries start: copies of their statistics start there."""
        return None if self.queries.index is not None else self.queries.start % ALONG


@dataclass(frozen=True)
class Buffers:
    """Shared memory of one block; `arrived`: barriers of K and V; `tiles`: with lists, which one a slot of Q has."""

    k: fly.Pointer
    v: fly.Pointer
    q: Slots
    dout: Slots
    lse2: Statistics
    delta: Statistics
    ds: fly.Pointer
    arrived: Mbarriers
    tiles: fly.SharedMemory | None

    @staticmethod
    def allocate(options: Sm90BackwardOptions) -> Buffers:
        warps = CONSUMERS * WARPGROUP // 32
        return Buffers(
            fly.alloc_shared("k", options.tiles["k"].bytes, 1024),
            fly.alloc_shared("v", options.tiles["v"].bytes, 1024),
            Slots.allocate("q", options.tiles["q"], options.stages, warps),
            Slots.allocate("dout", options.tiles["dout"], options.dout_stages, warps),
            Statistics.allocate("lse2", options.numbers, options.stages),
            Statistics.allocate("delta", options.numbers, options.dout_stages),
            fly.alloc_shared("ds", options.ds_tile.bytes * options.ds_stages, 1024),
            Mbarriers.allocate("arrived", 2, 1),
            fly.SharedMemory("tiles", "i32", options.stages) if options.features.block_size is not None else None,
        )


def produce(
    maps: tuple[fly.TensorMap, ...],
    buffers: Buffers,
    options: Sm90BackwardOptions,
    walk: Walk,
    block: Block,
    given: BoundFeatures,
    heads: tuple[Any, Any],
) -> None:
    """The one thread that fills shared memory."""
    q, k, v, dout, lse2, delta = maps
    first = block.queries.start

    kept = entry_of(block.keys), block.keys.start + block.first_key, block.kv_head

    def keep(index: int, tensor_map: fly.TensorMap, tile: PanelTile, memory: fly.Pointer) -> None:
        buffers.arrived.arrive_expecting(index, tile.bytes)
        copy_tile(tensor_map, tile, memory, [kept], buffers.arrived.at(index))

    def load(
        slots: Slots,
        tensor_map: fly.TensorMap,
        numbers: Statistics,
        of: fly.TensorMap,
        at: Position,
        j: Any,
        head: Any,
        note: Callable[[], None] | None = None,
    ) -> Position:
        row, entry = first + j * BLOCK_M, entry_of(block.queries)
        start = row if block.shift is None else row - block.shift
        barrier = slots.ring.acquire(at, slots.tile.bytes + numbers.bytes, note)
        copy_tile(tensor_map, slots.tile, slots.at(at), [(entry, row, head)], barrier)
        tma.load(of, numbers.at(at), (entry, head, start), barrier)
        return slots.ring.next(at)

    with fly.when(walk.exists):
        keep(0, k, options.tiles["k"], buffers.k)
        keep(1, v, options.tiles["v"], buffers.v)
        start = Position.start(), Position.start()
        for head, places in (all_heads := fly.range(*heads, carry=start)):
            here = walk.of_head(given, (block.batch, head), block.first_key, block.queries.length, alone)
            for step, (q_at, dout_at) in (passing := fly.range(here.tiles.first, here.tiles.end, carry=places)):
                j = here.tile(step)
                note = None if buffers.tiles is None else partial(buffers.tiles.store, j, q_at.index)
                passing.next(
                    load(buffers.q, q, buffers.lse2, lse2, q_at, j, head, note),
                    load(buffers.dout, dout, buffers.delta, delta, dout_at, j, head),
                )
            all_heads.next(*passing.results)
