"""A whole launch: how many workgroups a compute unit holds, and when the last one of the grid ends."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
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
class LaunchTime:
    """When a launch ends.

    Attributes:
        cycles: from the first workgroup's start to the last one's end.
        microseconds: the same at the sustained clock, with the time that any launch takes.
        occupied: share of all workgroup slots' cycles in which a workgroup ran; the rest is imbalance and tail.
    """

    cycles: float
    microseconds: float
    occupied: float


def schedule(durations: Sequence[float], resident: int, parameters: Parameters) -> LaunchTime:
    """Distribute workgroups in the order of the grid: to the dies in turn, on a die to the slot that is free first.

    Args:
        durations: cycles of each workgroup, with `resident` of them on a compute unit.
    """
    dies = parameters.dies
    slots = parameters.compute_units // dies * resident
    last = 0.0
    for die in range(dies):
        free = [0.0] * slots
        for duration in durations[die::dies]:
            last = max(last, heapq.heappushpop(free, free[0] + duration) + duration)
        last = max(last, *free)
    total = float(np.sum(durations))
    return LaunchTime(
        last,
        last / (parameters.sustained_clock * 1e3) + parameters.launch_microseconds,
        total / (last * slots * dies) if last else 0.0,
    )


def sample_points(count: int, most: int = 5) -> list[int]:
    """Which workgroups of a row of `count` to replay: the ends and some between."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def interpolated(cycles: Mapping[int, float], count: int) -> list[float]:
    """Cycles of workgroups 0 to `count` - 1, given those of some."""
    points = sorted(cycles)
    return np.interp(np.arange(count), points, [cycles[x] for x in points]).tolist()


def durations(
    trace: Trace,
    operations: Sequence[Operation],
    parameters: Parameters,
    resident: int,
    cold: int,
    workgroups: Sequence[int],
) -> dict[int, float]:
    """Cycles that each of some recorded workgroups takes with `resident` equal ones on the compute unit.

    With one resident workgroup that is its time alone; otherwise two rounds of `resident` run, and each is given its
    share of the time.
    """
    cycles = {}
    for number in workgroups:
        rounds = 1 if resident == 1 else 2
        result = replay(trace, operations, parameters, [number] * (resident * rounds), resident, cold)
        cycles[number] = result.cycles / rounds + parameters.workgroup_start
    return cycles
