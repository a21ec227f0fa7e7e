"""A whole launch: how many workgroups a compute unit holds, and when the last one of the grid ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fly.emulator.machine import Machine
from fly.emulator.timing.compute_unit import SIMDS, replay
from fly.emulator.timing.figures import Parameters
from fly.emulator.timing.instructions import Operation
from fly.emulator.timing.record import Trace
from fly.errors import LaunchError


def residency(machine: Machine, parameters: Parameters) -> int:
    """Workgroups of a prepared launch that one compute unit holds at once: registers, LDS and wave slots.

    Raises:
        LaunchError: a compute unit cannot hold even one.
    """
    per_simd = min(parameters.wave_slots, parameters.registers // machine.rows)
    by_waves = per_simd * SIMDS // machine.waves_per_group
    granule = parameters.lds_granule
    used = -(-machine.lds_bytes // granule) * granule
    count = min(by_waves, parameters.lds_bytes // used) if used else by_waves
    if count < 1:
        raise LaunchError(
            f"{machine.kernel.name}: a workgroup of {machine.waves_per_group} waves with {machine.rows} registers "
            f"and {machine.lds_bytes} bytes of LDS does not fit a compute unit of {parameters.arch}"
        )
    return count


@dataclass(frozen=True)
class Places:
    """Which work the workgroups of a launch do, where that is not told by their places along the grid's first axis.

    Attributes:
        count: of places; workgroups at one place do equal work, which changes evenly from place to place.
        of: a workgroup's place, from its linear number.
        sharing: workgroups that a die starts one after another and that read the same data.
    """

    count: int
    of: Callable[[int], int]
    sharing: int


@dataclass(frozen=True)
class Cost:
    """Of one workgroup: the cycles that it takes, and the cycles of matrix pipes that it uses, the SIMDs' in sum."""

    cycles: float
    matrix: float


@dataclass(frozen=True)
class LaunchTime:
    """When a launch ends.

    Attributes:
        cycles: from the first workgroup's start to the last one's end.
        microseconds: the same at the sustained clock, with the time that any launch takes.
        occupied: share of all workgroup slots' cycles in which a workgroup ran; the rest is imbalance and tail.
        matrix: share of all SIMDs' cycles in which a matrix instruction executed.
    """

    cycles: float
    microseconds: float
    occupied: float
    matrix: float


def schedule(costs: Sequence[Cost], resident: int, parameters: Parameters) -> LaunchTime:
    """Distribute workgroups in the order of the grid: to the dies in turn, on a die to the slot that is free first.

    Args:
        costs: of each workgroup, with `resident` of them on a compute unit.
    """
    durations = [cost.cycles for cost in costs]
    dies = parameters.dies
    slots = parameters.compute_units // dies * resident
    last = 0.0
    for die in range(dies):
        free = [0.0] * slots
        for duration in durations[die::dies]:
            last = max(last, heapq.heappushpop(free, free[0] + duration) + duration)
        last = max(last, *free)
    units = last * (slots // resident) * dies
    return LaunchTime(
        last,
        last / (parameters.sustained_clock * 1e3) + parameters.launch_microseconds,
        sum(durations) / (units * resident) if last else 0.0,
        sum(cost.matrix for cost in costs) / (units * SIMDS) if last else 0.0,
    )


def sample_points(count: int, most: int = 5) -> list[int]:
    """Which workgroups of a row of `count` to replay: the ends and some between."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def interpolated(costs: Mapping[int, Cost], count: int) -> list[Cost]:
    """Costs at places 0 to `count` - 1, given those at some."""
    points, every = sorted(costs), np.arange(count)
    cycles, matrix = (
        np.interp(every, points, [getattr(costs[x], name) for x in points]).tolist() for name in ("cycles", "matrix")
    )
    return [Cost(*both) for both in zip(cycles, matrix)]


def costs(
    trace: Trace,
    operations: Sequence[Operation],
    parameters: Parameters,
    resident: int,
    cold: int,
    workgroups: Sequence[int],
) -> dict[int, Cost]:
    """What each of some recorded workgroups costs with `resident` equal ones on the compute unit.

    With one resident workgroup that is its time alone; otherwise two rounds of `resident` run, and each is given its
    share of the time.
    """
    found = {}
    for number in workgroups:
        rounds = 1 if resident == 1 else 2
        result = replay(trace, operations, parameters, [number] * (resident * rounds), resident, cold)
        found[number] = Cost(
            result.cycles / rounds + parameters.workgroup_start, sum(result.matrix) / (resident * rounds)
        )
    return found
