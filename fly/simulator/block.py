"""One block: its shared memory, barriers and registers, what its warps know, and its copies that are on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.simulator.barriers import Mbarrier, NamedBarrier, Registers
from fly.simulator.clocks import Party
from fly.simulator.memory import GlobalMemory
from fly.simulator.program import ROLE_WARPS, Program
from fly.simulator.report import Finding
from fly.simulator.role import Role
from fly.simulator.shared import SharedAccess, SharedMemory

MAX_MBARRIERS = 128


@dataclass(frozen=True)
class Components:
    """Which components of the launch's clocks a block has: warps, warpgroups' products, warps' bulk stores,
    as far as they read and as far as they write, warps' asynchronous copies, and mbarriers."""

    first: int
    warps: int
    roles: int

    @staticmethod
    def count(warps: int, roles: int) -> int:
        return 4 * warps + roles + MAX_MBARRIERS

    def warp(self, number: int) -> int:
        return self.first + number

    def products(self, role: int) -> int:
        return self.first + self.warps + role

    def stores(self, warp: int) -> int:
        return self.first + self.warps + self.roles + warp

    def copies(self, warp: int) -> int:
        return self.first + self.readers + warp

    def written(self, warp: int) -> int:
        return self.first + self.readers + self.warps + warp

    def mbarrier(self, number: int) -> int:
        return self.first + self.readers + 2 * self.warps + number

    @property
    def readers(self) -> int:
        """How many, from the first, may read shared memory."""
        return 2 * self.warps + self.roles

    def described(self, component: int, mbarriers: Sequence[Mbarrier]) -> str:
        """For messages."""
        number = component - self.first
        if number < self.warps:
            return f"warp {number}"
        if number < self.warps + self.roles:
            return f"a product of warpgroup {number - self.warps}"
        if number < self.readers:
            return f"a bulk store of warp {number - self.warps - self.roles}"
        if number < self.readers + self.warps:
            return f"a copy of warp {number - self.readers} that is not waited for"
        if number < self.readers + 2 * self.warps:
            return f"a bulk store of warp {number - self.readers - self.warps}"
        return f"a bulk copy that completes on {mbarriers[number - self.readers - 2 * self.warps].name}"


@dataclass(frozen=True)
class Copy:
    """A bulk copy on its way; `land` does it. `store`: its warp in the role and its number, of a store."""

    block: Block
    role: Role
    location: str
    land: Callable[[], None]
    store: tuple[int, int] | None = None


@dataclass
class Cluster:
    """Blocks that reach into each other's shared memory, and where all of their threads meet."""

    blocks: list[Block] = field(default_factory=list)
    meeting: NamedBarrier = field(default_factory=lambda: NamedBarrier(0))

    def block(self, rank: int) -> Block:
        """The block of a rank.

        Raises:
            Finding: there is none, or it has ended.
        """
        if not 0 <= rank < len(self.blocks):
            raise Finding("out-of-bounds", f"block {rank} of a cluster of {len(self.blocks)}")
        if self.blocks[rank].ended:
            raise Finding("unfinished", f"reaches into block {rank} of the cluster, which has ended")
        return self.blocks[rank]


@dataclass(eq=False)
class Block:
    """One that runs: `components` are its own of the launch's clocks, which have `time` of them.

    `cluster`: its own, where it is alone or one of several; `reached`: of warps of the others, when each last reached
    into this block, and where in the kernel. All blocks share `atomics`, what those know who counted at an address,
    `counts` of what was executed, and `shared_accesses`. Warps of the warpgroups `apart` go on each for itself.
    """

    program: Program
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    memory: GlobalMemory
    policy: Any
    components: Components
    time: int
    atomics: dict[int, np.ndarray]
    counts: Counter[str]
    shared_accesses: list[SharedAccess] | None
    apart: frozenset[int]
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    cluster: Cluster = field(default_factory=lambda: Cluster())
    reached: dict[int, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster.blocks.append(self)
        self.ended = False
        parts = self.components
        limit, sizes = self.program.target.shared_bytes, self.program.allocations
        self.shared = SharedMemory(limit, sizes, parts.roles, parts.first, parts.readers)
        self.shared.who = lambda component: parts.described(component, list(self.mbarriers.values()))
        # of each warp: what it knows, and what the asynchronous proxy may see through it
        self.clocks = np.zeros((parts.warps, 2, self.time), np.int32)
        for warp in range(parts.warps):
            self.clocks[warp, 0, parts.warp(warp)] = 1
        self.registers = Registers.of(self.program.threads, parts.roles)
        self.roles = []
        for number in range(parts.roles):
            warps = range(ROLE_WARPS * number, min(ROLE_WARPS * (number + 1), parts.warps))
            self.roles += [Role(self, number, w) for w in warps] if number in self.apart else [Role(self, number)]

    def mbarrier(self, address: int, clocks: np.ndarray) -> Mbarrier:
        """The mbarrier at an address, used by who has these clocks.

        Raises:
            Finding: there is none, or it was initialised with nothing since that orders that before its use.
        """
        barrier = self.mbarriers.get(address)
        if barrier is None:
            raise Finding("mbarrier-init", f"{self.shared.named(address)} is no mbarrier that was initialised")
        component, when = barrier.made
        if clocks[component] < when:
            raise Finding("mbarrier-init", f"uses {barrier.name}, whose initialisation nothing orders before that")
        return barrier

    def make_mbarrier(self, address: int, arrivals: int, made: tuple[int, int]) -> None:
        """Raises a Finding for an address that is not in a buffer, or has one in use, or a count out of range."""
        buffer = self.shared.buffer(address, address + 8)
        if address % 8 or not 0 < arrivals < 1 << 20:
            raise Finding("mbarrier-init", f"{self.shared.named(address)} for {arrivals} arrivals")
        if address in self.mbarriers:
            raise Finding("mbarrier-init", f"{self.mbarriers[address].name} is initialised again")
        if len(self.mbarriers) == MAX_MBARRIERS:
            raise Finding("mbarrier-init", f"more than {MAX_MBARRIERS} mbarriers in a block")
        name = f"mbarrier {buffer.name}[{(address - buffer.start) // 8}]"
        component = self.components.mbarrier(len(self.mbarriers))
        clocks, done = (np.zeros((2, self.time), np.int32) for _ in range(2))
        self.mbarriers[address] = Mbarrier(name, arrivals, component, made, clocks, done)

    def named_barrier(self, number: int) -> NamedBarrier:
        """Raises a Finding for a number that there is not."""
        if not 0 <= number < 16:
            raise Finding("named-barrier", f"barrier {number}; there are 0 to 15")
        return self.named.setdefault(number, NamedBarrier(number))

    def reach(self, by: Party, place: str) -> None:
        """A warp of another block of the cluster does something to this one's shared memory."""
        self.reached[by.component] = by.now, place

    def check_end(self) -> None:
        """Raises a Finding where the block ends with something unfinished."""
        for component, (when, place) in self.reached.items():
            if self.clocks[:, 0, component].max() < when:
                what = f"reaches into block {self.index} of the cluster, which may have ended"
                raise Finding("unfinished", what, location=place)
        for barrier in self.mbarriers.values():
            if barrier.bytes:
                what = f"the block ends while {barrier.name} expects {barrier.bytes} bytes"
                raise Finding("unfinished", what, location=barrier.place)

    def close(self) -> None:
        """Let go of what is large: blocks and roles are circles, which wait for the garbage collector."""
        for role in self.roles:
            role.close()
        self.roles, self.copies, self.ended = [], [], True
        del self.shared, self.clocks
