"""dS of the other block of a cluster: blocks of neighbouring keys make half of dQ's columns each, over all keys."""

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
    """Tiles of dS on their way to the `other` block, and as many that come from there, in slots behind the own ones.

    `arrived`: the other one's tile is here; `read`: the one that was sent, by all warps of the other one's consumers.
    """

    slots: fly.Pointer
    stages: int
    nbytes: int
    arrived: Mbarriers
    read: Mbarriers
    other: Any

    @staticmethod
    def allocate(slots: fly.Pointer, rank: Any, options: Sm90BackwardOptions) -> Exchange:
        """`slots`: of dS, the block's own and the other one's."""
        stages, warps = options.stages, CONSUMERS * WARPGROUP // 32
        arrived = Mbarriers.allocate("ds_arrived", stages, 1)
        read = Mbarriers.allocate("ds_read", stages, warps)
        return Exchange(slots, stages, options.ds_tile.bytes, arrived, read, rank ^ 1)

    @property
    def barriers(self) -> tuple[Mbarriers, Mbarriers]:
        """To be initialised."""
        return self.arrived, self.read

    def claim(self, at: Position) -> None:
        """Until the last tile of an own slot has been sent and read, and may be overwritten."""
        self.read.wait(at.index, at.phase ^ 1)

    def send(self, at: Position) -> None:
        """By one thread, when an own slot's tile is in shared memory; it was claimed before."""
        sent = self.slots.offset(at.index * self.nbytes)
        cluster.arrive_expecting(self.arrived, at.index, self.nbytes, self.other)
        cluster.copy(sent.offset(self.stages * self.nbytes), sent, self.nbytes, self.arrived, at.index, self.other)

    def wait(self, at: Position) -> Any:
        """The number of the slot where the other block's tile is, when it is there."""
        self.arrived.wait(at.index, at.phase)
        return at.index + self.stages

    def release(self, at: Position) -> None:
        """This warp has read it; called by all of its threads, one of them arrives."""
        with fly.when(fly.thread_id.x % 32 == 0):
            cluster.arrive(self.read, at.index, self.other)
