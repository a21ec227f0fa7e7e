"""Matrix products whose operands are read from LDS some products ahead, in the order in which they are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


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


def between(steps: Iterable[Multiply | Compute], others: Iterable[Compute]) -> Iterator[Multiply | Compute]:
    """The steps with one of the others behind each multiplication, as long as there are any."""
    left = iter(others)
    for step in steps:
        yield step
        if isinstance(step, Multiply) and (other := next(left, None)) is not None:
            yield other
    yield from left


def in_order(steps: Iterable[Multiply | Compute], registers: int) -> None:
    """Trace the steps, reads as far ahead of their multiplications as so many registers hold what is read."""
    every = list(steps)
    coming = deque(step for step in every if isinstance(step, Multiply))
    read: deque[tuple[Any, int]] = deque()

    def fetch(room: int) -> None:
        room -= sum(size for _, size in read)
        while coming and (not read or coming[0].registers <= room):
            step = coming.popleft()
            read.append((step.read(), step.registers))
            room -= step.registers

    for step in every:
        if isinstance(step, Compute):
            step.run()
            continue
        fetch(registers)
        step.use(read.popleft()[0])
