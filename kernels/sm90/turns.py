"""Blocks of keys that add to the sums of a tile of queries in turn: sums are the same bits in every run.

Blocks take their keys by tickets, in order, and add to a tile in that order: who waits, waits for the holder of a
smaller ticket, which runs or has ended, and the smallest of those that run waits for nobody. So no launch hangs, in
whatever order a device starts its blocks. All of them see tiles from the last one down, since that is where the next
block of keys begins too: it follows a step behind, and does not wait where it has begun later.

| who | what |
|---|---|
| warp 1 of the producer's warpgroup, one thread | waits for a tile's count to be the block's turn |
| consumers | wait for that thread, add |
| warp 2, one thread | waits for the consumers, counts on |

The first block of a tile stores instead of adding, so that nobody clears the sums before, and the last one rounds
them, so that nobody has to read them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import WARPGROUP, sync_warp
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring

from ..problem.mask import QueryRange, TileRange
from ..work.tile_scheduler import head_of_slice
from .backward import BLOCK_M, BLOCK_N, CONSUMERS, Sm90BackwardOptions

TICKET = 0  # among the counts; then come those of tiles
_NEVER = 2**31 - 1


def taken(counts: fly.Tensor, heads: Any, sequences: Any) -> tuple[fly.Value, fly.Value, fly.Value, fly.Value]:
    """(block of keys, head, sequence, whether there is one) of the next ticket, for all threads of a block.

    The grid: (key blocks, heads, sequences), or folded.
    """
    ticket = fly.SharedMemory("ticket", "i32", 1)
    with fly.when(fly.thread_id.x == 0):
        ticket.store(fly.fetch_add(1, counts.at(TICKET)), 0)
    fly.barrier()
    place = fly.first_lane(ticket.load(0))
    slice_ = place // fly.grid_dim.x
    return place - slice_ * fly.grid_dim.x, *head_of_slice(slice_, heads, sequences)


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

    def is_last(self, tile: fly.Value) -> fly.Value:
        """Whether nobody adds to a tile behind."""
        return tile < self.first_after


@dataclass(frozen=True)
class Turns:
    """A block's turns, tile by tile.

    `counts`: how many blocks have been at a tile, or had no part in it, see `count_of`. `ring`: tiles whose turn it
    is, for consumers, and `added`: which they have added to.
    """

    counts: fly.Tensor
    block: Neighbours
    ring: Ring
    added: Mbarriers

    @staticmethod
    def allocate(counts: fly.Tensor, block: Neighbours, options: Sm90BackwardOptions) -> Turns:
        """As many are ahead as tiles of Q are, whose positions are those of turns too."""
        warps = CONSUMERS * WARPGROUP // 32
        added = Mbarriers.allocate("added", options.stages, warps)
        return Turns(counts, block, Ring.allocate("turns", options.stages, 1), added)

    @property
    def barriers(self) -> tuple[Ring, Mbarriers]:
        """To be initialised."""
        return self.ring, self.added

    def take(self, at: Position, tile: fly.Value, count: fly.Pointer) -> None:
        """By one thread: wait for the block's turn, and let the consumers know."""
        self.ring.claim(at)
        with fly.when(tile < self.block.end_before):
            look: Callable[[], fly.Value] = lambda: fly.load_acquire(count)  # noqa: E731  # twice the same
            for _ in (spin := fly.while_((look(),), lambda seen: seen[0] != self.block.number)):
                spin.next(look())
        self.ring.full.arrive(at.index)

    def wait(self, at: Position) -> None:
        """By consumers, until it is the block's turn."""
        self.ring.wait(at)

    def done(self, at: Position) -> None:
        """By consumers, which have added."""
        sync_warp()
        with fly.when(fly.thread_id.x % 32 == 0):
            self.added.arrive(at.index)

    def hand_on(self, at: Position, tile: fly.Value, count: fly.Pointer) -> None:
        """By one thread: when all have added, it is the next block's turn."""
        self.added.wait(at.index, at.phase)
        self.ring.empty.arrive(at.index)
        # blocks before the first one had no part
        counted = fly.select(self.block.is_first(tile), self.block.number + 1, 1)
        fly.atomic_add(counted, count, order="release")


def count_of(counts: fly.Tensor, sums: fly.Tensor, entry: Any, head: Any, tile: Any) -> fly.Pointer:
    """The place of a tile's count, 0 as long as nobody added; `sums`: see `dq_sums.place_of`."""
    tiles = sums.shape[2] // BLOCK_M
    return counts.at((entry * sums.shape[1] + head) * tiles + tile + (TICKET + 1))
