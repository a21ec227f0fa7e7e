"""Sums of later heads are cleared beside the products, by the warps of the producer's warpgroup that copy nothing.

Blocks add to sums of dQ, which have to be zeros first. A launch that clears them all takes as long as memory does,
which products leave idle. So each block clears a part of the sums of the head that is `distance` heads behind its
own, and the launch before those of the first heads alone. Parts are claimed by counting, and a block clears parts of
its own head that nobody claimed: it waits only for what running threads do, in whatever order blocks start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import WARPGROUP, barrier_sync
from fly.backends.nvvm.mbarrier import Mbarriers

from ..problem.contract import Request
from ..problem.features import NO_FEATURES
from ..work.row_statistics import clear
from ..work.spin import spin
from .backward import LATER, Sm90BackwardOptions

FIRST = 32  # the first of the workers, the threads that clear: those before copy
WORKERS = WARPGROUP - FIRST
MET = 6  # named barrier of theirs
SHORT, LONG = 2048, 8192  # queries
COUNTS = 2  # of each key head: parts that are claimed, parts that are cleared


def distance_of(
    request: Request, options: Sm90BackwardOptions, slices: int, blocks: int, beside: int, units: int
) -> int:
    """How many key heads ahead sums are cleared by `blocks` of each of all `slices`; 0: by no block.

    `units`: multiprocessors. `beside`: heads that are side by side, whose blocks start together.

    As measured on an H100: nothing is gained where blocks have little to do, or so much that a launch for all does
    not count.
    """
    plain = options.features == NO_FEATURES and not (options.packed or options.ordered)
    long_enough = SHORT if request.causal and options.blocks == 1 else 0
    lengths = long_enough <= request.seq_len <= min(LONG, 2 * request.seq_len_kv)
    distance = max(-(-units // blocks), beside)
    wide = max(request.head_dim, request.value_dim) > LATER
    return distance if plain and wide and lengths and 2 * distance <= slices else 0


@dataclass(frozen=True)
class Ahead:
    """What a block clears; `sums`: see `dq_sums.place_of`.

    `counts`: `COUNTS` numbers of each key head of each sequence, zeros before the launch. `heads`: of all sequences;
    `kv_heads`: of one; `group`: query heads of a key head; `distance`: see `distance_of`; `parts`: of each key head's
    sums, one for each of its blocks. `claimed`: a number for all workers; `cleared`: the sums of the block's own head
    are. Where query heads of a key head are in parts, each of these is a key head here.
    """

    sums: fly.Tensor
    counts: fly.Tensor
    heads: Any
    kv_heads: Any
    group: Any
    distance: Any
    parts: Any
    claimed: fly.SharedMemory
    cleared: Mbarriers

    @staticmethod
    def allocate(
        sums: fly.Tensor, counts: fly.Tensor, heads: Any, kv_heads: Any, group: Any, distance: Any, parts: Any
    ) -> Ahead:
        claimed, cleared = fly.SharedMemory("claimed", "i32", 1), Mbarriers.allocate("cleared", 1, 1)
        return Ahead(sums, counts, heads, kv_heads, group, distance, parts, claimed, cleared)

    @property
    def barriers(self) -> tuple[Mbarriers]:
        """To be initialised."""
        return (self.cleared,)

    def wait(self) -> None:
        """By consumers, before they add to the sums."""
        self.cleared.wait(0, 0)

    def work(self, head: Any) -> None:
        """By the workers of a block of this `head`, a number among those of all sequences."""
        parts, later, thread = self.parts, head + self.distance, fly.thread_id.x - FIRST
        ready = self._told(lambda: self._is_ready(head), thread)
        with fly.when((ready != 0) & (thread == 0)):
            self.cleared.arrive(0)
        # of its own head a block clears all that nobody has claimed, of the later one a part
        start = fly.select(ready != 0, later, head)
        for (at,) in (turn := fly.while_((start,), lambda carried: carried[0] < self.heads)):
            part = self._told(lambda at=at: fly.fetch_add(1, self._claimed(at)), thread)
            with fly.when(part < parts):
                self._clear(at, part, thread)
            barrier_sync(MET, WORKERS)
            with fly.when((part < parts) & (thread == 0)):
                fly.atomic_add(fly.i32(1), self._ready(at), order="release")
            turn.next(fly.select(at == later, self.heads, fly.select(part < parts, at, later)))
        with fly.when((ready == 0) & (thread == 0)):
            spin(lambda: self._is_ready(head), 1)
            self.cleared.arrive(0)

    def _is_ready(self, head: Any) -> fly.Value:
        """Whether all of a head's sums are cleared, 0 or 1; the launch before cleared those of the first heads."""
        cleared = fly.load_acquire(self._ready(head)) == self.parts
        ready: fly.Value = fly.select((head < self.distance) | cleared, 1, 0)
        return ready

    def _told(self, find: Any, thread: Any) -> fly.Value:
        """What one of the workers finds, for all of them."""
        with fly.when(thread == 0):
            self.claimed.store(find(), 0)
        barrier_sync(MET, WORKERS)
        found = fly.first_lane(self.claimed.load(0))
        barrier_sync(MET, WORKERS)
        return found

    def _claimed(self, head: Any) -> fly.Pointer:
        return self.counts.at(head)

    def _ready(self, head: Any) -> fly.Pointer:
        return self.counts.at(self.heads + head)

    def _clear(self, head: Any, part: Any, thread: Any) -> None:
        """One part of a key head's sums, whose query heads lie side by side."""
        rows, columns = self.group * self.sums.shape[2], self.sums.shape[3]
        each = (rows + self.parts - 1) // self.parts
        first = fly.minimum(part * each, rows)
        batch = head // self.kv_heads
        begin = self.sums.at(batch, (head - batch * self.kv_heads) * self.group, first, 0)
        clear(begin, (fly.minimum(first + each, rows) - first) * columns, thread, WORKERS)
