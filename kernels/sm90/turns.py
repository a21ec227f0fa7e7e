"""Blocks of keys that add to the sums of a tile of queries in turn: sums are the same bits in every run.

Blocks of a key head take their keys by tickets, in order, and add to a tile in that order: who waits, waits for the
holder of a smaller ticket, which runs or has ended, and the smallest of those that run waits for nobody. So no launch
hangs, in whatever order a device starts its blocks. All of them see tiles from the last one down, since that is where
the next block of keys begins too: it follows a step behind, and does not wait where it has begun later.

| who | what |
|---|---|
| warp 1 of the producer's warpgroup, one thread | waits for a tile's count to be the block's turn |
| consumers | wait for that thread, add |
| warp 2, one thread | waits for the consumers, counts on |

The first block of a tile stores instead of adding, so that nobody clears the sums before, and the last one rounds
them when it is through with all of its tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm import cluster
from fly.backends.nvvm.intrinsics import WARPGROUP, fence_async_shared, sync_warp
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring, init_all

from ..problem.contract import Request
from ..problem.mask import QueryRange, TileRange
from ..work.sequences import Uniform
from ..work.spin import spin
from .backward import BLOCK_M, CONSUMERS, Sm90BackwardOptions

_TICKET_BYTES = 16  # that a copy to another block takes at least
_NEVER = 2**31 - 1


def counts_needed(tiles: int, slices: int, blocks: int) -> int:
    """How many numbers there are, zeros before a launch: of tiles of queries and ranks of blocks, and tickets."""
    return tiles * blocks + slices


def count_of(
    counts: fly.Tensor, sums: fly.Tensor, entry: Any, head: Any, tile: Any, blocks: int, rank: Any = 0
) -> fly.Pointer:
    """The place of a tile's count, 0 as long as nobody added; `sums`: see `dq_sums.place_of`.

    Each of the `blocks` of a cluster has counts of its own, as it has columns.
    """
    return counts.at(_tiles_before(sums, entry, head) * blocks + tile * blocks + rank)


def _tiles_before(sums: fly.Tensor, entry: Any, head: Any) -> Any:
    return (entry * sums.shape[1] + head) * (sums.shape[2] // BLOCK_M)


def taken(
    counts: fly.Tensor, sums: fly.Tensor, slice_: Any, exists: fly.Value, blocks: int, rank: Any
) -> fly.SharedMemory:
    """A cluster's ticket, in the shared memory of each of its blocks: the number of its keys, see `number_of`.

    `slice_`: the key head's number among those of all sequences; `exists`: whether the block has any. The first block
    of a cluster takes the ticket, and tells the other one.
    """
    ticket = fly.SharedMemory("ticket", "i32", _TICKET_BYTES // 4, align=_TICKET_BYTES)
    place = counts.at(_tiles_before(sums, sums.shape[0], 0) * blocks + slice_)

    def take() -> None:
        number = fly.cond(exists, lambda: fly.fetch_add(1, place), lambda: fly.i32(0))
        for word in range(_TICKET_BYTES // 4):
            ticket.store(number, word)

    if blocks == 1:
        with fly.when(fly.thread_id.x == 0):
            take()
        fly.barrier()
        return ticket
    told = Mbarriers.allocate("told", 1, 1)
    init_all([told])
    cluster.sync()
    with fly.when((rank == 0) & (fly.thread_id.x == 0)):
        take()
        fence_async_shared()
        for other in range(1, blocks):
            cluster.arrive_expecting(told, 0, _TICKET_BYTES, other)
            cluster.copy(ticket.pointer, ticket.pointer, _TICKET_BYTES, told, 0, other)
    fly.barrier()
    with fly.when(rank != 0):
        told.wait(0, 0)
    return ticket


def number_of(ticket: fly.SharedMemory, uniform: Uniform) -> fly.Value:
    """What a ticket says, by all threads of a warp or by one alone."""
    return uniform(ticket.load(0))


@dataclass(frozen=True)
class Neighbours:
    """A block's `number` among those of its sequence's keys, and what those next to it see.

    Neither the first nor the last tile that blocks see comes down from one block to the next. So where the block
    before does not see a tile, nobody before does, and where the one behind does not, nobody behind does.
    `end_before`: one past the last tile that the former sees; `first_after`: the first one that the latter does.
    """

    number: fly.Value
    end_before: fly.Value
    first_after: fly.Value

    @staticmethod
    def of(number: fly.Value, keys: fly.Value, inverse: QueryRange, span: int) -> Neighbours:
        """Of a block that exists, of `keys` in blocks, or clusters, of `span`."""

        def tiles(block: fly.Value) -> TileRange:
            return inverse.tiles(block * span, span, BLOCK_M)

        after = number + 1
        return Neighbours(
            number,
            fly.select(number > 0, tiles(number - 1).end, 0),
            fly.select(after * span < keys, tiles(after).first, _NEVER),
        )

    def is_first(self, tile: fly.Value) -> fly.Value:
        """Whether nobody adds to a tile before."""
        return tile >= self.end_before

    def last_of(self, tiles: TileRange) -> tuple[Any, fly.Value]:
        """(first, end) of those of the block's tiles to which nobody adds behind it."""
        return tiles.first, fly.minimum(tiles.end, self.first_after)


@dataclass(frozen=True)
class Turns:
    """A block's turns, tile by tile.

    `counts`: how many blocks of a rank have been at a tile, or had no part in it, see `count_of`. `ring`: tiles
    whose turn it is, for consumers; `added`: which they have added to. `end_before`: that of the block's
    `Neighbours`, for consumers, who have no register for it. `ends_differ`: not all blocks see their sequence's last
    tile; where they do, those before one saw all of its tiles or are none.
    """

    counts: fly.Tensor
    ring: Ring
    end_before: fly.SharedMemory
    ends_differ: bool
    added: Mbarriers

    @staticmethod
    def allocate(counts: fly.Tensor, options: Sm90BackwardOptions) -> Turns:
        """As many are ahead as tiles of Q are, whose positions are those of turns too."""
        additions = CONSUMERS * WARPGROUP // 32
        return Turns(
            counts,
            Ring.allocate("turns", options.stages, 1),
            fly.SharedMemory("end_before", "i32", 1),
            options.features.windowed or options.features.ends_early,
            Mbarriers.allocate("added", options.stages, additions),
        )

    @property
    def barriers(self) -> tuple[Ring, Mbarriers]:
        """To be initialised."""
        return self.ring, self.added

    def take(self, at: Position, tile: fly.Value, count: fly.Pointer, block: Neighbours) -> None:
        """By one thread: wait for the block's turn, and let the consumers know."""
        self.ring.claim(at)
        with fly.when(tile < block.end_before):
            spin(lambda: fly.load_acquire(count), block.number)
        self.ring.full.arrive(at.index)

    def note(self, block: Neighbours) -> None:
        """By all threads, before a barrier of the block."""
        with fly.when(fly.thread_id.x == 0):
            self.end_before.store(block.end_before, 0)

    def is_first(self, tile: fly.Value) -> fly.Value:
        """By consumers: whether the block is the tile's first one."""
        end = fly.first_lane(self.end_before.load(0))
        # compared with 0, consumers need not have the tile's number at hand
        first: fly.Value = tile >= end if self.ends_differ else end == 0
        return first

    def wait(self, at: Position) -> None:
        """By consumers, until it is the block's turn."""
        self.ring.wait(at)

    def done(self, at: Position) -> None:
        """By consumers, which have added."""
        sync_warp()
        with fly.when(fly.thread_id.x % 32 == 0):
            self.added.arrive(at.index)

    def hand_on(self, at: Position, tile: fly.Value, count: fly.Pointer, block: Neighbours) -> None:
        """By one thread: when all have added, it is the next block's turn."""
        self.added.wait(at.index, at.phase)
        self.ring.empty.arrive(at.index)
        # blocks before the first one had no part
        counted = fly.select(block.is_first(tile), block.number + 1, 1)
        fly.atomic_add(counted, count, order="release")


Act = Callable[[Position, Any, fly.Pointer, Neighbours], None]  # `Turns.take` or `Turns.hand_on`


def may_see_nothing(request: Request) -> bool:
    """Whether there may be queries without any key."""
    features = request.static_features
    few = request.causal and request.seq_len_kv < request.seq_len
    varying = "packed" in request.features or any(name in features.operands for name in ("seqused_q", "seqused_kv"))
    return few or varying or features.windowed or features.ends_early
