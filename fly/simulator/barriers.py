"""What roles of a block wait for: mbarriers, named barriers, bulk stores, and registers that warpgroups give up.

PTX ISA, "mbarrier", "barrier", "cp.async.bulk.wait_group", "setmaxnreg". Barriers hand on what those who arrive know
to those who wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.simulator.report import Finding

_MOST_BYTES = (1 << 20) - 1  # of a phase
REGISTERS = 65536  # of a multiprocessor


@dataclass
class Mbarrier:
    """One mbarrier: a phase is complete when `pending` arrivals and `bytes` are there.

    `component`: whose time its phases are; `made`: the warp that initialised it, and when; `fenced`: the same of the
    `fence.mbarrier_init` after that. `clocks`: what those know
    who arrive in this phase; `done`: what those learn who wait for the last one.
    """

    name: str
    arrivals: int
    component: int
    made: tuple[int, int]
    clocks: np.ndarray
    done: np.ndarray
    phase: int = 0
    pending: int = 0
    bytes: int = 0
    place: str = ""  # where bytes were announced last
    fenced: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def passed(self, parity: int) -> bool:
        """Whether the phase with this parity has completed, as a wait sees it."""
        return (self.phase & 1) != parity

    def check_visible(self, clocks: np.ndarray) -> None:
        """Raises a Finding where bulk copies of who has these clocks, (2, components), may not see it initialised."""
        by_fence = self.fenced is not None and clocks[0, self.fenced[0]] >= self.fenced[1]
        if not by_fence and clocks[1, self.made[0]] < self.made[1]:
            what = f"uses {self.name}, whose initialisation no fence made visible to bulk copies"
            raise Finding("mbarrier-init", what)

    def arrive(self, count: int, clocks: np.ndarray) -> None:
        """Raises a Finding for more arrivals than the phase has."""
        if count > self.pending:
            raise Finding(
                "mbarrier-count",
                f"arrives at {self.name}, where phase {self.phase} has all of its {self.arrivals} arrivals",
            )
        self.pending -= count
        np.maximum(self.clocks, clocks, out=self.clocks)

    def expect(self, count: int) -> None:
        """Raises a Finding for more bytes than the counter holds."""
        if not 0 <= count <= _MOST_BYTES - self.bytes:
            raise Finding("mbarrier-bytes", f"{self.name} expects {count} more bytes; it holds up to {_MOST_BYTES}")
        self.bytes += count

    def landed(self, count: int, clocks: np.ndarray, early: bool = False) -> None:
        """Bytes of a copy are there. Raises a Finding for more than were announced.

        `early`: they may be announced later in the phase, which lacks the arrival of who does so.
        """
        if count > self.bytes and not (early and self.pending):
            raise Finding(
                "mbarrier-bytes",
                f"a copy of {count} bytes completes on {self.name}, whose phase {self.phase} expects {self.bytes}",
            )
        self.bytes -= count
        np.maximum(self.clocks, clocks, out=self.clocks)

    def advance(self) -> None:
        """Complete the phase if all is there."""
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.arrivals
        self.clocks[0, self.component] = self.phase
        np.maximum(self.done, self.clocks, out=self.done)

    def __str__(self) -> str:
        missing = [f"{self.pending} of {self.arrivals} arrivals"] if self.pending else []
        missing += [f"{self.bytes} bytes"] if self.bytes else []
        return f"{self.name}, phase {self.phase}, which lacks {' and '.join(missing) or 'nothing'}"


@dataclass
class NamedBarrier:
    """One named barrier: a generation is complete when `threads` have arrived."""

    number: int
    threads: int = 0
    arrived: int = 0  # threads; a warp may come several times
    generation: int = 0
    any: bool = False
    held: bool = False  # what the last generation's threads said, in any of them
    clocks: np.ndarray | None = None
    done: np.ndarray | Any = None  # Any: it is there once a generation is complete

    def arrive(self, count: int, threads: int, clocks: np.ndarray, condition: bool = False) -> None:
        """Count threads; `clocks` is what they know together.

        Raises:
            Finding: threads that do not agree about how many there are to be, or are too many.
        """
        if self.arrived and threads != self.threads:
            raise Finding("named-barrier", f"barrier {self.number} of {threads} threads, others said {self.threads}")
        self.threads = threads
        self.arrived += count
        if self.arrived > threads:
            raise Finding(
                "named-barrier", f"{self.arrived} threads come to barrier {self.number}, which is of {threads}"
            )
        self.any = self.any or condition
        self.clocks = clocks if self.clocks is None else np.maximum(self.clocks, clocks)
        if self.arrived == threads:
            self.done, self.held = self.clocks, self.any
            self.clocks, self.any = None, False
            self.arrived = 0
            self.generation += 1

    def __str__(self) -> str:
        return f"barrier {self.number}, where {self.arrived} of {self.threads} threads are"


@dataclass
class Stores:
    """Bulk stores of one warp, numbered from 1 on. Groups are a thread's own, and so are waits for them.

    `open`: of each thread, the stores that are in no group yet; `groups`: its groups that it has not waited for;
    `places`: where each store was started that nobody has waited for.
    """

    issued: int = 0
    open: dict[int, list[int]] = field(default_factory=dict)
    groups: dict[int, list[list[int]]] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)

    def number(self) -> int:
        """Of what no group has: a copy to another block, whose end its mbarrier tells."""
        self.issued += 1
        return self.issued

    def issue(self, thread: int, place: str) -> int:
        """The number of a new store."""
        self.issued += 1
        self.open.setdefault(thread, []).append(self.issued)
        self.places[self.issued] = place
        return self.issued

    def commit(self, thread: int) -> None:
        """Close a thread's group; it may be empty."""
        self.groups.setdefault(thread, []).append(self.open.pop(thread, []))

    def wait(self, thread: int, newer: int) -> list[int]:
        """The stores of a thread's groups but the `newer` last ones; nobody has to wait for them again."""
        groups = self.groups.get(thread, [])
        over = max(0, len(groups) - newer)
        self.groups[thread] = groups[over:]
        return [number for group in groups[:over] for number in group]

    @property
    def over(self) -> int:
        """All stores up to this number have been waited for."""
        return min(self.places, default=self.issued + 1) - 1


@dataclass
class Registers:
    """Registers of a block's warpgroups, each a number a thread."""

    held: list[int]

    @staticmethod
    def of(threads: int, warpgroups: int) -> Registers:
        """What a launch gives all threads alike."""
        return Registers([min(255, REGISTERS // threads) // 8 * 8] * warpgroups)

    def free(self) -> int:
        """Registers a thread of one warpgroup more that there are."""
        return REGISTERS // 128 - sum(self.held)
