"""mbarriers in shared memory, and rings of buffers whose phases they track.

PTX ISA, "mbarrier": a barrier has a phase bit; a wait for parity p returns once the phase with bit p has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fly.backends.nvvm.emit import as_i32, operation, shared_address
from fly.backends.nvvm.intrinsics import fence_async_shared, fence_mbarrier_init, sync_warp
from fly.errors import ShapeError
from fly.ir import memory
from fly.ir.control import when
from fly.ir.dtypes import i32
from fly.ir.memory import Pointer
from fly.ir.value import Value, select
from fly.lang.ids import linear_thread
from fly.lang.sync import barrier

BYTES = 8


@dataclass(frozen=True)
class Mbarriers:
    """`count` mbarriers in a row, each completed by `arrivals` arrivals (and the bytes that were announced)."""

    pointer: Pointer
    count: int
    arrivals: int

    @staticmethod
    def allocate(name: str, count: int, arrivals: int) -> Mbarriers:
        """Space for them; `init` makes them usable.

        Raises:
            ShapeError: no barrier, or no arrival.
        """
        if count <= 0 or arrivals <= 0:
            raise ShapeError(f"{count} mbarriers of {arrivals} arrivals; expected positive numbers")
        return Mbarriers(memory.alloc_shared(name, count * BYTES, align=BYTES), count, arrivals)

    def init(self) -> None:
        """To be run by one thread, before a `fence_mbarrier_init` and a barrier of the block."""
        for i in range(self.count):
            operation("mbarrier_init", [self.at(i), i32(self.arrivals)])

    def at(self, index: Any) -> Value:
        """The shared-memory address (i32) of one barrier, by static or traced i32 index.

        Raises:
            ShapeError: a static index that is out of range.
        """
        if isinstance(index, int) and not 0 <= index < self.count:
            raise ShapeError(f"mbarrier {index} is out of range; expected 0 to {self.count - 1}")
        return shared_address(self.pointer) + as_i32(index, "mbarrier index") * BYTES

    def arrive(self, index: Any) -> None:
        """This thread's arrival."""
        operation("mbarrier_arrive", [self.at(index)])

    def arrive_at(self, index: Any, rank: Any) -> None:
        """This thread's arrival in block `rank` of the cluster; see `cluster.arrive`."""
        operation("mbarrier_arrive_at", [self.at(index), as_i32(rank, "rank")])

    def arrive_expecting(self, index: Any, count: Any) -> None:
        """This thread's arrival, and `count` more bytes (static or traced i32) that the phase waits for."""
        count = as_i32(count, "byte count")
        operation("mbarrier_arrive_expect", [self.at(index), count])

    def wait(self, index: Any, parity: Any) -> None:
        """Until the phase with this parity bit (i32, 0 or 1) has completed."""
        operation("mbarrier_wait", [self.at(index), as_i32(parity, "parity")])


@dataclass(frozen=True)
class Position:
    """Where a producer or consumer is in a ring: the slot, and the parity of its round. Loops carry it."""

    index: Value
    phase: Value

    @staticmethod
    def start() -> Position:
        """Slot 0 of the first round."""
        return Position(i32(0), i32(0))

    def before(self, stages: int) -> Position:
        """One slot back."""
        if stages == 2:
            return Position(self.index ^ 1, self.phase ^ self.index ^ 1)
        wraps = self.index == 0
        return Position(select(wraps, stages - 1, self.index - 1), select(wraps, self.phase ^ 1, self.phase))

    def next(self, stages: int) -> Position:
        """One slot on."""
        if stages == 1:
            return Position(self.index, self.phase ^ 1)
        if stages == 2:
            return Position(self.index ^ 1, self.phase ^ self.index)
        wraps = self.index == stages - 1
        return Position(select(wraps, 0, self.index + 1), select(wraps, self.phase ^ 1, self.phase))


@dataclass(frozen=True)
class Ring:
    """`stages` buffers that one producer thread fills through TMA, or producing warps by stores, and warps empty.

    `full` completes when a slot's bytes have landed, or every producing warp has stored its part; `empty` when every
    consuming warp has released it. `blocks`: of a cluster, each of which fills a part of the slot for all of them: it
    is empty when consuming warps of all have released it.
    """

    full: Mbarriers
    empty: Mbarriers
    blocks: int = 1

    @staticmethod
    def allocate(name: str, stages: int, consumer_warps: int, producer_warps: int = 0, blocks: int = 1) -> Ring:
        """Space for the barriers of a ring; `producer_warps` fill its slots, 0: one thread does, through TMA."""
        return Ring(
            Mbarriers.allocate(f"{name}_full", stages, max(1, producer_warps)),
            Mbarriers.allocate(f"{name}_empty", stages, consumer_warps * blocks),
            blocks,
        )

    @property
    def stages(self) -> int:
        return self.full.count

    def init(self) -> None:
        """See `Mbarriers.init`."""
        self.full.init()
        self.empty.init()

    def acquire(self, at: Position, count: Any, note: Callable[[], None] | None = None) -> Value:
        """Producer: wait until the slot is free and announce `count` bytes; the barrier that copies complete on.

        A ring starts out empty, so the first round does not wait. What `note` stores, consumers see with the slot.
        """
        self.empty.wait(at.index, at.phase ^ 1)
        if note is not None:
            note()
        self.full.arrive_expecting(at.index, count)
        return self.full.at(at.index)

    def claim(self, at: Position) -> None:
        """Producing warp: until the slot is free to be stored to."""
        self.empty.wait(at.index, at.phase ^ 1)

    def publish(self, at: Position) -> None:
        """Producing warp: it has stored its part of a slot that TMA or WGMMA read; called by all of its threads."""
        fence_async_shared()
        sync_warp()
        with when(linear_thread() % 32 == 0):
            self.full.arrive(at.index)

    def wait(self, at: Position) -> None:
        """Consumer: until the slot's bytes are there."""
        self.full.wait(at.index, at.phase)

    def release(self, at: Position) -> None:
        """Consumer: this warp has read the slot; called by all of its threads, one of them arrives in each block."""
        lane = linear_thread() % 32
        if self.blocks == 1:
            with when(lane == 0):
                self.empty.arrive(at.index)
            return
        with when(lane < self.blocks):
            self.empty.arrive_at(at.index, lane)

    def next(self, at: Position) -> Position:
        """The position one slot on."""
        return at.next(self.stages)


def init_all(parts: Sequence[Mbarriers | Ring]) -> None:
    """Initialise barriers in one thread of the block; a fence and `fly.barrier` make them visible to all."""
    with when(linear_thread() == 0):
        for part in parts:
            part.init()
        fence_mbarrier_init()
    barrier()
