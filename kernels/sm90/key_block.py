"""A block of keys of the Hopper backward kernel: its shared memory, and the thread that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly
from fly.backends.nvvm import tma
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring
from fly.backends.nvvm.wgmma import PanelTile

from ..problem.features import BoundFeatures
from ..work.sequences import Sequence as Tokens
from ..work.sequences import alone
from .backward import ALONG, BLOCK_M, CONSUMERS, Sm90BackwardOptions
from .dropout import Stored
from .producer import Slots, copy_tile, entry_of
from .statistics import Statistics
from .walk import Walk


@dataclass(frozen=True)
class Block:
    """What a block works on: keys of a key head from `first_key` on, and which tokens are the sequence's.

    `part`: the number of the key head, or where its query heads are in several `parts` that part's. `rank`: the
    block's in its cluster.
    """

    batch: fly.Value
    part: fly.Value
    first_key: fly.Value
    keys: Tokens
    queries: Tokens
    rank: Any = 0
    parts: int = 1

    @property
    def kv_head(self) -> Any:
        """The key head."""
        return self.part if self.parts == 1 else self.part // self.parts

    @property
    def shift(self) -> fly.Value | None:
        """How far behind a multiple of `ALONG` packed queries start: copies of their statistics start there."""
        return None if self.queries.index is not None else self.queries.start % ALONG


@dataclass(frozen=True)
class Chunks(Slots):
    """Slots of tiles that come in `chunks` of columns, if in more than one: a tile is where its first one is."""

    chunks: int = 1

    def places(self, at: Position) -> list[Position]:
        """Where a tile's chunks are."""
        found = [at]
        while len(found) < self.chunks:
            found.append(self.ring.next(found[-1]))
        return found

    def after(self, at: Position) -> Position:
        """Where the tile behind is."""
        return self.ring.next(self.places(at)[-1])

    def release(self, at: Position) -> None:
        """This warp has read a tile."""
        for place in self.places(at):
            self.ring.release(place)

    def first_column(self, chunk: int) -> int:
        """Of a head's columns."""
        return chunk * self.tile.columns

    def columns(self, chunk: int, dim: int) -> int:
        """How many of a head's `dim` columns are in a chunk."""
        return dim if self.chunks == 1 else min(dim - self.first_column(chunk), self.tile.columns)


@dataclass(frozen=True)
class Buffers:
    """Shared memory of one block; `delta`: -delta; `arrived`: barriers of K and V.

    `tiles`: with lists, which one a slot of Q has; `beside`: in a cluster, columns of the other block's K, which have
    a barrier too; `written`: where consumers are `unmet`, whether a slot of dS has all of the block's keys; `random`:
    where they alternate.
    """

    k: fly.Pointer
    v: fly.Pointer
    q: Chunks
    dout: Chunks
    lse2: Statistics
    delta: Statistics
    ds: fly.Pointer
    arrived: Mbarriers
    tiles: fly.SharedMemory | None
    beside: fly.Pointer | None
    written: Mbarriers | None
    random: Stored | None

    @property
    def barriers(self) -> list[Ring | Mbarriers]:
        """To be initialised."""
        return [self.q.ring, self.dout.ring, self.arrived, *([] if self.written is None else [self.written])]

    @staticmethod
    def allocate(options: Sm90BackwardOptions) -> Buffers:
        warps, others = CONSUMERS * WARPGROUP // 32, options.blocks - 1
        counts = {"q": options.stages, "dout": options.dout_slots}
        tiles = {**options.tiles, "ds": options.ds_tile, "beside": options.beside_tile}
        # large alignments first, so that small buffers leave no gaps between them
        sizes = {"k": 1, "v": 1, "ds": options.ds_slots, **counts} | ({"beside": 1} if others else {})
        found = {name: fly.alloc_shared(name, tiles[name].bytes * count, 1024) for name, count in sizes.items()}
        q_ring, dout_ring = (Ring.allocate(name, count, warps) for name, count in counts.items())
        numbers, slots = options.numbers, options.delta_slots
        return Buffers(
            found["k"],
            found["v"],
            beside=found.get("beside"),
            ds=found["ds"],
            q=Chunks(found["q"], tiles["q"], q_ring),
            dout=Chunks(found["dout"], tiles["dout"], dout_ring, options.chunks),
            lse2=Statistics.allocate("lse2", numbers, options.stages),
            delta=Statistics.allocate("delta", numbers, slots, options.dout_slots // slots),
            arrived=Mbarriers.allocate("arrived", 2 + others, 1),
            tiles=fly.SharedMemory("tiles", "i32", options.stages)
            if options.features.block_size is not None
            else None,
            written=Mbarriers.allocate("written", options.ds_own, warps) if options.unmet else None,
            random=Stored.allocate(CONSUMERS) if options.alternates else None,
        )

    def kept(self, options: Sm90BackwardOptions, block: Block) -> list[tuple[fly.Pointer, PanelTile, Any]]:
        """What stays, in the order of `arrived`: where it is, its tile and the first of its keys."""
        found = [(self.k, options.tiles["k"], block.first_key), (self.v, options.tiles["v"], block.first_key)]
        if self.beside is not None:
            found.append((self.beside, options.beside_tile, block.first_key ^ options.block_n))
        return found


def produce(
    maps: tuple[fly.TensorMap, ...],
    buffers: Buffers,
    options: Sm90BackwardOptions,
    walk: Walk,
    block: Block,
    given: BoundFeatures,
    heads: tuple[Any, Any],
    again: Callable[[], tuple[Walk, Block, tuple[Any, Any]]] | None = None,
) -> None:
    """The one thread that fills shared memory; `again`: `walk`, `block` and `heads` for what follows K and V."""
    q, k, v, dout, lse2, delta = maps
    first = block.queries.start

    def keep(index: int, memory: fly.Pointer, tile: PanelTile, first_key: Any) -> None:
        place = entry_of(block.keys), block.keys.start + first_key, block.kv_head
        # of the other block's keys, the columns that this one makes
        column = block.rank * tile.columns if index == 2 and options.apart else 0
        buffers.arrived.arrive_expecting(index, tile.bytes)
        copy_tile(v if index == 1 else k, tile, memory, [place], buffers.arrived.at(index), column)

    def load(
        slots: Chunks,
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
        corner = entry, row, head
        for chunk, place in enumerate(slots.places(at)):
            nbytes = slots.tile.bytes + (numbers.bytes if chunk == 0 else 0)
            barrier = slots.ring.acquire(place, nbytes, note if chunk == 0 else None)
            copy_tile(tensor_map, slots.tile, slots.at(place), [corner], barrier, slots.first_column(chunk))
            if chunk == 0:
                tma.load(of, numbers.at(at), (entry, head, start), barrier)
        return slots.after(at)

    with fly.when(walk.exists):
        for index, kept in enumerate(buffers.kept(options, block)):
            keep(index, *kept)
        if again is not None:
            walk, block, heads = again()
            first = block.queries.start
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
