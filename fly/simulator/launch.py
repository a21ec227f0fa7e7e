"""One launch: which blocks are resident, and who of their roles and copies goes on next."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.errors import LaunchError
from fly.simulator.block import Block, Cluster, Components, Copy
from fly.simulator.memory import GlobalMemory, Region
from fly.simulator.program import Program
from fly.simulator.report import Finding, Together, error
from fly.simulator.role import Role
from fly.simulator.shared import SharedAccess

RESIDENT = 4  # blocks that run at a time


class Policy:
    """Who goes on next, by a seed: in order, copies at once (0), copies as late as can be (1), or by chance.

    Those by chance differ in how often roles are interrupted, how long copies take, and when products read.
    `late_copies`: asynchronous copies of a thread's own land when they are waited for, else when they are issued.
    """

    def __init__(self, seed: int):
        self.seed, self.random = seed, random.Random(seed)
        self.interrupts = 0.0 if seed < 2 else self.random.choice((0.0, 0.1, 0.5))
        self.copies = {0: 1.0, 1: 0.0}.get(seed, self.random.choice((0.02, 0.2, 0.5)))
        self.late_products = seed == 1 or (seed > 1 and self.random.random() < 0.5)
        self.late_copies = seed == 1 or (seed > 1 and self.random.random() < 0.5)

    def interrupt(self) -> bool:
        """Whether a role that could go on lets others go first."""
        return self.interrupts > 0 and self.random.random() < self.interrupts

    def copy_first(self) -> bool:
        """Whether a copy lands before any role goes on."""
        return self.copies == 1.0 or (self.copies > 0 and self.random.random() < self.copies)

    def choose(self, among: Sequence[Any]) -> Any:
        """One of those that may go on."""
        return among[0] if self.seed < 2 else self.random.choice(among)


class _Apart(Exception):
    """Warpgroups of which some warps wait for what others of them have not come to: they have to run apart."""

    def __init__(self, warpgroups: frozenset[int]):
        super().__init__()
        self.warpgroups = warpgroups


@dataclass
class Launch:
    """A grid of blocks of a program, over flat arguments: addresses, numbers, and `TensorMap`s.

    `seed` chooses the schedule; results of a right kernel do not depend on it. `progress` is told of finished blocks.
    `counts`: blocks, bulk copies and their bytes, products and their multiply-adds that were executed.
    `shared_accesses`: what warps did to shared memory, if `observe_shared`.
    """

    program: Program
    grid: tuple[int, int, int]
    regions: Sequence[Region]
    arguments: Sequence[Any]
    seed: int = 0
    progress: Callable[[int], None] = lambda blocks: None
    observe_shared: bool = False
    counts: Counter[str] = field(default_factory=Counter, init=False)
    shared_accesses: list[SharedAccess] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.apart: frozenset[int] = frozenset()  # warpgroups whose warps go on each for itself
        self.deadlock: Exception | None = None  # of when they did not
        self.told = 0  # blocks that `progress` knows of

    def run(self) -> None:
        """Until all blocks have ended. A launch that fails leaves memory as it was.

        Raises:
            SimulatorReportError: the checks found something.
            SimulatorError: an operation that the simulator does not know.
        """
        while True:
            self.policy, self.memory = Policy(self.seed), GlobalMemory(self.regions)
            try:
                return self._run()
            except _Apart as apart:
                self.memory.restore()
                self.apart |= apart.warpgroups
            except BaseException:
                self.memory.restore()
                raise

    def _run(self) -> None:
        self.atomics: dict[int, np.ndarray] = {}
        self.values = self._values()
        self.counts.clear()
        self.shared_accesses.clear()
        waiting = ((x, y, z) for z, y, x in itertools.product(*(range(n) for n in reversed(self.grid))))
        blocks = self.program.cluster
        if self.grid[0] % blocks:
            raise LaunchError(f"{self.program.name}: {self.grid[0]} blocks along x in clusters of {blocks}")
        clusters = zip(*[waiting] * blocks, strict=True)
        free = list(range(max(RESIDENT, blocks)))
        live: list[Block] = []
        try:
            with np.errstate(all="ignore"):
                while True:
                    for cluster in itertools.islice(clusters, len(free) // self.program.cluster):
                        together = Cluster()
                        live += [self._start(index, free.pop(0), together) for index in cluster]
                    if not live:
                        return
                    self._step(live)
                    for block in [b for b in live if all(role.ended for role in b.roles) and not b.copies]:
                        self._end(block)
                        live.remove(block)
                        free.append((block.components.first - 1) // self._per_block)
                        block.close()
        finally:
            for block in live:
                block.close()

    @property
    def _per_block(self) -> int:
        return Components.count(self.program.warps, self.program.roles)

    def _values(self) -> list[Any]:
        """Arguments as the kernel's values."""
        values = []
        for value, type_ in zip(self.arguments, self.program.argument_types, strict=True):
            if type_.dtype is not None:
                values.append(type_.dtype.type(value))
            else:
                values.append(np.int64(value) if isinstance(value, int) else value)
        return values

    def _start(self, index: tuple[int, int, int], place: int, cluster: Cluster) -> Block:
        time = 1 + max(RESIDENT, self.program.cluster) * self._per_block
        components = Components(1 + place * self._per_block, self.program.warps, self.program.roles)
        shared = self.memory, self.policy, components, time, self.atomics, self.counts
        accesses = self.shared_accesses if self.observe_shared else None
        block = Block(self.program, index, self.grid, *shared, accesses, self.apart, cluster=cluster)
        for role in block.roles:
            role.start(self.program.translated.run(role, *self.values))
        return block

    def _step(self, live: list[Block]) -> None:
        """Let one role go on, or one copy land."""
        copies = [copy for block in live for copy in block.copies]
        if copies and self.policy.copy_first():
            self._land(self.policy.choose(copies))
            return
        ready = [role for block in live for role in block.roles if role.ready()]
        if ready:
            self._advance(self.policy.choose(ready))
        elif copies:
            self._land(self.policy.choose(copies))
        else:
            raise self._deadlock(live)

    def _advance(self, role: Role) -> None:
        try:
            role.advance()
        except Finding as finding:
            location = self.program.translated.raised_at(finding)
            raise self._error(finding, role, location) from None
        except Together:
            assert self.deadlock is not None
            raise self.deadlock from None  # which is one, then

    def _land(self, copy: Copy) -> None:
        copy.block.copies.remove(copy)
        try:
            copy.land()
        except Finding as finding:
            raise self._error(finding, copy.role, copy.location) from None

    def _end(self, block: Block) -> None:
        try:
            block.check_end()
            for role in block.roles:
                role.check_end()
        except Finding as finding:
            raise self._error(finding, block.roles[0], "") from None
        self.counts["blocks"] += 1
        if self.counts["blocks"] > self.told:
            self.told += 1
            self.progress(1)

    def _error(self, finding: Finding, role: Role, location: str) -> Exception:
        warp = role.first_warp + (finding.warp or 0)
        message = f"{finding.message} (schedule {self.seed})"
        return error(finding.kind, self.program.name, finding.location or location, role.block.index, warp, message)

    def _deadlock(self, live: list[Block]) -> Exception:
        """Nobody can go on: who waits for what; or an `_Apart`, where warps of a warpgroup wait for one another."""
        roles = [role for block in live for role in block.roles if not role.ended]
        first = roles[0]
        message = f"nobody can go on; {'; '.join(role.waits_for() for role in roles)} (schedule {self.seed})"
        where = first.place, first.block.index, first.first_warp
        found = error("deadlock", self.program.name, *where, message)
        apart = frozenset(role.number for role in roles if role.apart)
        if not apart:
            return found
        self.deadlock = self.deadlock or found
        return _Apart(apart)
