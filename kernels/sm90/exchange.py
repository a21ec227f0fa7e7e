"""dS of the other block of a cluster: blocks of neighbouring keys make half of dQ each, over all keys.

That is half of its columns (`flash_attn_sm90_bwd_wide`), or all of every other tile (`sm90.paired`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm import cluster
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.mbarrier import Mbarriers, Position

from .backward import CONSUMERS, Sm90BackwardOptions


@dataclass(frozen=True)
class Exchange:
    """Tiles of dS on their way to the `other` block, and as many that come from there.

    `slots`: of dS: `own` ones, `stages` of what is sent, as many of what arrives. So many `senders` send a part of a
    tile each. `arrived`: the other one's tile is here; `read`: the one that was sent, by all warps of the other one's
    consumers.
    """

    slots: fly.Pointer
    own: int
    stages: int
    nbytes: int
    senders: int
    arrived: Mbarriers
    read: Mbarriers
    other: Any

    @staticmethod
    def allocate(slots: fly.Pointer, rank: Any, options: Sm90BackwardOptions) -> Exchange:
        own, stages, warps = options.ds_own, options.ds_sent, CONSUMERS * WARPGROUP // 32
        senders = CONSUMERS if options.paired else 1
        arrived = Mbarriers.allocate("ds_arrived", stages, senders)
        read = Mbarriers.allocate("ds_read", stages, warps)
        return Exchange(slots, own, stages, options.ds_tile.bytes, senders, arrived, read, rank ^ 1)

    @property
    def barriers(self) -> tuple[Mbarriers, Mbarriers]:
        """To be initialised."""
        return self.arrived, self.read

    def claim(self, at: Position) -> None:
        """Until the last tile of a slot has been sent and read, and may be overwritten."""
        self.read.wait(at.index, at.phase ^ 1)

    def sent(self, at: Position) -> Any:
        """The number of the slot of a tile that is sent."""
        return at.index + self.own if self.own else at.index

    def send(self, at: Position, sender: Any = 0) -> None:
        """By one thread of a sender, when its part of the tile is in shared memory; the slot was claimed before."""
        nbytes = self.nbytes // self.senders
        sent = self.slots.offset(self.sent(at) * self.nbytes + sender * nbytes)
        cluster.arrive_expecting(self.arrived, at.index, nbytes, self.other)
        cluster.copy(sent.offset(self.stages * self.nbytes), sent, nbytes, self.arrived, at.index, self.other)

    def wait(self, at: Position) -> Any:
        """The number of the slot where the other block's tile is, when it is there."""
        self.arrived.wait(at.index, at.phase)
        return self.sent(at) + self.stages

    def release(self, at: Position) -> None:
        """This warp has read it; called by all of its threads, one of them arrives."""
        with fly.when(fly.thread_id.x % 32 == 0):
            cluster.arrive(self.read, at.index, self.other)
