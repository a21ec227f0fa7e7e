"""What a replay means for the kernel's author: where waves waited, by instruction and between barriers, and what they
did while the matrix pipe was idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fly.emulator.machine import Machine
from fly.emulator.mfma import matrix_shape
from fly.emulator.timing.compute_unit import BARRIER, LOST, REASONS, SIMDS, Event, Result
from fly.emulator.timing.instructions import Operation

Operations = Sequence[Operation]


def matrix_flop(machine: Machine, events: Sequence[Event]) -> int:
    """Floating-point operations of the matrix instructions among some events."""
    total = 0
    for index, count in Counter(event.index for event in events).items():
        shape = matrix_shape(machine.instructions[index].name, machine.arch)
        if shape is not None:
            total += 2 * shape.m * shape.n * shape.k * shape.blocks * count
    return total


@dataclass
class Region:
    """A stretch of code between two barriers of the program text.

    Attributes:
        first, last: instruction indices, the closing barrier included.
        passes: how often a wave went through. cycles: from a wave's first to its last instruction there, in sum,
            without the wait at the closing barrier. at_barrier: that wait, in sum.
        waited: cycles by reason, that at the closing barrier left out. issued: instructions by kind.
    """

    first: int
    last: int
    passes: int = 0
    cycles: int = 0
    at_barrier: int = 0
    waited: Counter[str] = field(default_factory=Counter)
    issued: Counter[str] = field(default_factory=Counter)


def regions(machine: Machine, operations: Operations, events: Sequence[Event], turn: int) -> list[Region]:
    """The stretches between barriers that were executed, in program order."""
    barriers = [i for i, op in enumerate(operations) if op.kind == "barrier"]
    edges = np.searchsorted(barriers, np.arange(len(operations)), side="left").tolist()
    found: dict[int, Region] = {}
    open_: dict[int, tuple[int, int]] = {}  # wave -> region it is in, and when it entered
    for event in events:
        number = edges[event.index]
        region = found.get(number)
        if region is None:
            first = barriers[number - 1] + 1 if number else 0
            last = barriers[number] if number < len(barriers) else len(operations) - 1
            region = found[number] = Region(first, last)
        inside = open_.get(event.wave)
        waited, begin = event.waited, event.cycle - event.waited
        if event.reason == BARRIER and waited:
            # this wait belongs to the region that the barrier closes
            if inside is not None:
                found[inside[0]].at_barrier += waited
            waited, begin = 0, event.cycle
        if inside is None or inside[0] != number:
            region.passes += 1
            open_[event.wave] = (number, begin)
        op = operations[event.index]
        region.issued[op.kind] += 1
        region.cycles += waited + turn
        if waited:
            region.waited[REASONS[event.reason]] += waited
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class Hot:
    """An instruction that waves waited at: cycles in sum, over `count` executions, and the main reason."""

    index: int
    waited: int
    count: int
    reason: str


def hot_instructions(events: Sequence[Event], most: int = 12) -> list[Hot]:
    """Where waves waited longest, barriers left out."""
    waited: Counter[int] = Counter()
    count: Counter[int] = Counter()
    why: dict[int, Counter[int]] = {}
    for event in events:
        count[event.index] += 1
        if event.waited and event.reason != BARRIER:
            waited[event.index] += event.waited
            why.setdefault(event.index, Counter())[event.reason] += event.waited
    return [
        Hot(index, cycles, count[index], REASONS[why[index].most_common(1)[0][0]])
        for index, cycles in waited.most_common(most)
    ]


def idle_matrix(result: Result, operations: Operations) -> Counter[tuple[str, ...]]:
    """What the waves of a SIMD did while its matrix pipe was idle: cycles by the states of its waves.

    A state is what the wave waited for, or the kind of the instruction it had just issued.
    """
    turn = result.parameters.turn
    slots = result.cycles // turn + 1
    names = [*REASONS, "ended"]
    number = {name: i for i, name in enumerate(names)}
    states = {wave: np.full(slots, number["ended"], np.int16) for wave in range(len(result.simd_of))}
    busy = np.zeros((SIMDS, slots), bool)
    for event in result.events:
        op = operations[event.index]
        at, row = event.cycle // turn, states[event.wave]
        if event.waited:
            reason = event.reason
            row[(event.cycle - event.waited) // turn : at] = LOST if reason < 0 else reason
        if op.kind not in number:
            number[op.kind] = len(names)
            names.append(op.kind)
        row[at] = number[op.kind]
        if op.matrix:
            busy[result.simd_of[event.wave], at : at + op.matrix // turn] = True
    found: Counter[tuple[str, ...]] = Counter()
    for simd in range(SIMDS):
        rows = np.array([states[w] for w, s in enumerate(result.simd_of) if s == simd])
        if not len(rows):
            continue
        idle = rows[:, ~busy[simd]]
        kinds, counts = np.unique(np.sort(idle, axis=0), axis=1, return_counts=True)
        for kind, count in zip(kinds.T, counts):
            if set(kind.tolist()) != {number["ended"]}:
                found[tuple(sorted(names[k] for k in kind))] += int(count) * turn
    return found
