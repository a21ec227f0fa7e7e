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
from fly.backends.nvvm.intrinsics import WARPGROUP, sync_warp
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring

from ..problem.contract import Request
from ..problem.mask import QueryRange, TileRange
from ..work.tile_scheduler import MAX_GRID_YZ
from .backward import BLOCK_M, BLOCK_N, CONSUMERS, Sm90BackwardOptions

AHEAD = 2
_NEVER = 2**31 - 1


def counts_needed(tiles: int, heads: int, sequences: int) -> int:
    """How many numbers there are, zeros before a launch: for all tiles of queries, and tickets of key heads."""
    return tiles + heads * sequences


def count_of(counts: fly.Tensor, sums: fly.Tensor, entry: Any, head: Any, tile: Any) -> fly.Pointer:
    """The place of a tile's count, 0 as long as nobody added; `sums`: see `dq_sums.place_of`."""
    return counts.at((entry * sums.shape[1] + head) * (sums.shape[2] // BLOCK_M) + tile)


def grid(blocks: int, heads: int, sequences: int, units: int) -> tuple[int, int, int]:
    """(key heads side by side, blocks of keys, sections of so many heads) for a device with `units` multiprocessors.

    Blocks of one head are a step apart, however many multiprocessors are free: so those start blocks of several
    heads, `AHEAD` times as many as are in work at a time. Sections are not larger, as what a head reads and adds to
    stays in the level-2 cache as long as it is in work.
    """
    slices = heads * sequences
    beside = max(-(-units // blocks) * AHEAD, -(-slices // MAX_GRID_YZ))
    sections = -(-slices // beside)
    return -(-slices // sections), blocks, sections


def head_of_block(heads: Any, sequences: Any) -> tuple[fly.Value, fly.Value, fly.Value]:
    """(key head, sequence, whether the block has any) in such a grid."""
    place, slices = fly.block_id.z * fly.grid_dim.x + fly.block_id.x, heads * sequences
    slice_ = fly.minimum(place, slices - 1)
    sequence = slice_ // heads
    return slice_ - sequence * heads, sequence, place < slices


def taken(counts: fly.Tensor, sums: fly.Tensor, slice_: Any, exists: fly.Value) -> fly.Value:
    """The number of a block's keys, by its ticket, for all of its threads.

    `slice_`: the key head's number among those of all sequences; `exists`: whether the block has any.
    """
    ticket = fly.SharedMemory("ticket", "i32", 1)
    place = count_of(counts, sums, sums.shape[0], 0, slice_)
    with fly.when(fly.thread_id.x == 0):
        take: Callable[[], fly.Value] = lambda: fly.fetch_add(1, place)  # noqa: E731  # as a function
        ticket.store(fly.cond(exists, take, lambda: fly.i32(0)), 0)
    fly.barrier()
    return fly.first_lane(ticket.load(0))


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
    def of(number: fly.Value, keys: fly.Value, inverse: QueryRange) -> Neighbours:
        """Of a block that exists, of so many keys."""

        def tiles(block: fly.Value) -> TileRange:
            return inverse.tiles(block * BLOCK_N, BLOCK_N, BLOCK_M)

        after = number + 1
        return Neighbours(
            number,
            fly.select(number > 0, tiles(number - 1).end, 0),
            fly.select(after * BLOCK_N < keys, tiles(after).first, _NEVER),
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

    `counts`: how many blocks have been at a tile, or had no part in it, see `count_of`. `ring`: tiles whose turn it
    is, for consumers, with whether the block is their `first`; and `added`: which they have added to.
    """

    counts: fly.Tensor
    ring: Ring
    first: fly.SharedMemory
    added: Mbarriers

    @staticmethod
    def allocate(counts: fly.Tensor, options: Sm90BackwardOptions) -> Turns:
        """As many are ahead as tiles of Q are, whose positions are those of turns too."""
        warps = CONSUMERS * WARPGROUP // 32
        return Turns(
            counts,
            Ring.allocate("turns", options.stages, 1),
            fly.SharedMemory("first", "i32", options.stages),
            Mbarriers.allocate("added", options.stages, warps),
        )

    @property
    def barriers(self) -> tuple[Ring, Mbarriers]:
        """To be initialised."""
        return self.ring, self.added

    def take(self, at: Position, tile: fly.Value, count: fly.Pointer, block: Neighbours) -> None:
        """By one thread: wait for the block's turn, and let the consumers know."""
        self.ring.claim(at)
        with fly.when(tile < block.end_before):
            look: Callable[[], fly.Value] = lambda: fly.load_acquire(count)  # noqa: E731  # twice the same
            for _ in (spin := fly.while_((look(),), lambda seen: seen[0] != block.number)):
                spin.next(look())
        self.first.store(fly.select(block.is_first(tile), 1, 0), at.index)
        self.ring.full.arrive(at.index)

    def wait(self, at: Position) -> fly.Value:
        """By consumers, until it is the block's turn: whether it is the tile's first block."""
        self.ring.wait(at)
        # not compared again: that would take registers of who has few
        is_first: fly.Value = fly.first_lane(self.first.load(at.index)) != 0
        return is_first

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
