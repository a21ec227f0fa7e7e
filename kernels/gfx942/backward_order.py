"""The order of reads, products and barriers in the gfx942 backward kernel: `gfx950.operand_queue` with fences.

Operands are read ahead of their products as there, but not across a fence, except those that a fence names: what it
waits for is hidden by the products whose operands are in registers by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..gfx950.operand_queue import Compute, Multiply


@dataclass(frozen=True)
class Fence:
    """A barrier: operands of the next `early` products are read before it, those of the next `may` perhaps.

    Those of none behind them are.
    """

    run: Callable[[], None]
    early: int = 0
    may: int = 0


Step = Multiply | Compute | Fence


def in_order(
    steps: Iterable[Step], registers: int, given: Sequence[Any] = (), following: Sequence[Multiply] = ()
) -> list[Any]:
    """Trace the steps, reads as far ahead of their products as so many registers hold what is read.

    `given`: what was read for the first products before. What is read for the `following` ones, which are another
    turn's, is returned.
    """
    every = list(steps)
    products = [step for step in every if isinstance(step, Multiply)]
    read = deque((value, step.registers) for value, step in zip(given, products, strict=False))
    coming = deque((*enumerate(products), *enumerate(following, len(products))))
    for _ in given:
        coming.popleft()
    fences = deque(_limits(every))
    end = len(products) + len(following)

    def fetch(room: int | None) -> None:
        """Read what there is room for; None: all that must be read before the next fence."""
        early, may = fences[0] if fences else (end, end)
        while coming and coming[0][0] < (early if room is None else max(early, may)):
            step = coming[0][1]
            if room is not None and read and sum(size for _, size in read) + step.registers > room:
                return
            read.append((step.read(), step.registers))
            coming.popleft()

    for step in every:
        if isinstance(step, Multiply):
            if not read:
                fetch(0)
            step.use(read.popleft()[0])
            fetch(registers)
        elif isinstance(step, Fence):
            fetch(None)
            step.run()
            fences.popleft()
        else:
            step.run()
    fetch(None)
    return [value for value, _ in read]


def _limits(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """For each fence, the numbers of products whose operands must and may be read before it."""
    limits, count = list[tuple[int, int]](), 0
    for step in steps:
        if isinstance(step, Multiply):
            count += 1
        elif isinstance(step, Fence):
            limits.append((count + step.early, count + step.may))
    return limits


@dataclass(frozen=True)
class Beside:
    """What is done between products: `each` of the `steps` behind every one from number `first` on."""

    steps: Sequence[Callable[[], None]]
    first: int = 0
    each: int = 1


def beside(products: Iterable[Multiply], *others: Beside) -> list[Step]:
    """The products and what is done between them; what is left over comes behind the last."""
    found, left = list[Step](), [list(other.steps) for other in others]
    for number, product in enumerate(products):
        found.append(product)
        for other, steps in zip(others, left, strict=True):
            if number >= other.first:
                found.extend(map(Compute, steps[: other.each]))
                del steps[: other.each]
    for steps in left:
        found.extend(map(Compute, steps))
    return found


def paced(steps: Sequence[Callable[[], None]], every: int, of: int) -> list[Callable[[], None]]:
    """`every` of the steps behind each `of` products, as evenly as can be: what is done behind one, in order."""
    count = -(-len(steps) * of // every)
    parts = [steps[-(-i * every // of) : -(-(i + 1) * every // of)] for i in range(count)]
    return [lambda part=part: _all(part) for part in parts]  # type: ignore[misc]


def _all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()


def idle() -> None:
    """A place between products where there is nothing to do."""
