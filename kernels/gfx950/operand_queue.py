"""Matrix products whose operands are read from LDS some products ahead, in the order in which they are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fly.backends.rocdl.intrinsics import sched_barrier


@dataclass(frozen=True)
class Multiply:
    """A few matrix instructions: `use` gets what `read` gave, which takes so many `registers`."""

    read: Callable[[], Any]
    use: Callable[[Any], None]
    registers: int = 4


@dataclass(frozen=True)
class Compute:
    """What is done at a place among them."""

    run: Callable[[], None]


@dataclass(frozen=True)
class Meet:
    """A barrier: reads of the next `behind` multiplications come before it, those of all later ones behind it."""

    run: Callable[[], None]
    behind: int = 0


@dataclass(frozen=True)
class Room:
    """From here on so many registers hold what is read ahead."""

    registers: int


Step = Multiply | Compute | Meet | Room


def merged(first: Sequence[Compute], second: Sequence[Compute]) -> list[Compute]:
    """Both in their order, the second evenly among the first."""
    rows = [((i + 1) / len(x), n, step) for n, x in enumerate((first, second)) for i, step in enumerate(x)]
    return [step for *_, step in sorted(rows, key=lambda row: row[:2])]


def spread(steps: Iterable[Step], others: Iterable[Compute]) -> list[Step]:
    """The steps with the others evenly behind their multiplications."""
    steps, others, found = list(steps), list(others), []
    count, given, done = sum(isinstance(step, Multiply) for step in steps), 0, 0
    for step in steps:
        found.append(step)
        if isinstance(step, Multiply):
            given += 1
            until = len(others) * given // count
            found += others[done:until]
            done = until
    return found


def in_order(steps: Iterable[Step], registers: int = 0, *, fenced: bool = False) -> None:
    """Trace the steps, reads as far ahead of their multiplications as so many registers hold what is read.

    `fenced`: LLVM's scheduler moves nothing across the end of a step.
    """
    every = list(steps)
    coming = deque(_gates(every))
    read: deque[tuple[Any, int]] = deque()
    met = 0

    def fetch(room: int) -> None:
        room -= sum(size for _, size in read)
        while coming and coming[0][1] <= met and (not read or coming[0][0].registers <= room):
            step, _ = coming.popleft()
            read.append((step.read(), step.registers))
            room -= step.registers

    for step in every:
        if isinstance(step, Room):
            registers = step.registers
            continue
        if isinstance(step, Multiply):
            fetch(registers)
            step.use(read.popleft()[0])
        elif isinstance(step, Compute):
            step.run()
        else:
            fetch(sum(size for _, size in read) + sum(step.registers for step, gate in coming if gate <= met))
            step.run()
            met += 1
        if fenced:
            sched_barrier()


def _gates(steps: Iterable[Step]) -> Iterator[tuple[Multiply, int]]:
    """Multiplications, and how many barriers their reads come behind."""
    met = behind = 0
    for step in steps:
        if isinstance(step, Meet):
            met, behind = met + 1, step.behind
        elif isinstance(step, Multiply):
            yield step, met - (behind > 0)
            behind -= behind > 0
