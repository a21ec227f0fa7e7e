"""From a launch to its time: what a caller of the timing model needs, in the order of use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fly.emulator.machine import Machine
from fly.emulator.memory import Region
from fly.emulator.program import Program
from fly.emulator.timing.compute_unit import Result, replay
from fly.emulator.timing.figures import Parameters
from fly.emulator.timing.instructions import Operation, operations
from fly.emulator.timing.launch import (
    Cost,
    LaunchTime,
    Places,
    costs,
    interpolated,
    residency,
    sample_points,
    schedule,
)
from fly.emulator.timing.record import Trace, record
from fly.errors import ArgumentError, UnsupportedError

MOST_WORKGROUPS = 256  # that are all executed for the time of a launch
_ALIKE = 0.05  # by how much equal work may differ in instructions: branches that depend on data


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that a launch needs; arguments as in `Program.launch`.

    `keep` holds what owns the memory of `regions`. `places` tells which workgroups do equal work; None: those at one
    place along the grid's first axis.
    """

    program: Program
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: bytes
    regions: list[Region]
    dynamic_lds: int = 0
    keep: tuple[object, ...] = field(default=(), repr=False)
    places: Places | None = None

    @property
    def workgroups(self) -> int:
        """Size of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def place(self, workgroup: int) -> int:
        """Of a workgroup, by its linear number."""
        return self.places.of(workgroup) if self.places else workgroup % self.grid[0]


class Session:
    """A launch that some workgroups of are recorded, and then replayed as often as wanted.

    Args:
        parameters: of the chip; LDS conflicts are counted with its banks.
        workgroups: linear numbers of those to execute in the emulator.
        cold: see `MemoryPath`; by default the workgroups along the grid's first axis are taken to read the same data,
            those on one die to share it in L2, unless `Launch.places` knows better.

    Raises:
        ArgumentError: a workgroup outside the grid. EmulatorError: a fault or an unknown instruction.
    """

    def __init__(
        self,
        launch: Launch,
        parameters: Parameters,
        workgroups: Sequence[int],
        cold: int | None = None,
        progress: Callable[[int], None] | None = None,
    ):
        for number in workgroups:
            if not 0 <= number < launch.workgroups:
                raise ArgumentError(f"workgroup {number}; the grid {launch.grid} has 0 to {launch.workgroups - 1}")
        self.launch, self.parameters = launch, parameters
        self.machine: Machine = launch.program.machine(launch.kernel)
        self.machine.prepare(launch.grid, launch.block, launch.kernarg, launch.regions, launch.dynamic_lds)
        self.resident = residency(self.machine, parameters)
        if cold is None:
            together = parameters.compute_units // parameters.dies * self.resident
            sharing = launch.places.sharing if launch.places else launch.grid[0] // parameters.dies
            cold = max(1, min(sharing, together))
        self.cold = cold
        self.trace: Trace = record(self.machine, workgroups, parameters, progress)

    def operations(self, parameters: Parameters | None = None) -> list[Operation]:
        """The kernel's instructions with their costs."""
        return operations(self.machine, parameters or self.parameters)

    def replay(self, parameters: Parameters | None = None, resident: int | None = None, keep: bool = True) -> Result:
        """The first recorded workgroup on a compute unit, as many times as fit there at once."""
        chosen = parameters or self.parameters
        count = self.resident if resident is None else resident
        first = next(iter(self.trace.workgroups))
        return replay(self.trace, self.operations(chosen), chosen, [first] * count, count, self.cold, keep)

    def row(self, parameters: Parameters | None = None, resident: int | None = None) -> list[Cost]:
        """Costs at every place; those of places without a recorded workgroup are interpolated."""
        chosen = parameters or self.parameters
        count = self.resident if resident is None else resident
        places = self.launch.places.count if self.launch.places else self.launch.grid[0]
        numbers = {self.launch.place(n): n for n in reversed(self.trace.workgroups)}
        found = costs(self.trace, self.operations(chosen), chosen, count, self.cold, list(numbers.values()))
        return interpolated({place: found[n] for place, n in numbers.items()}, places)

    def time(self, parameters: Parameters | None = None) -> LaunchTime:
        """The whole launch, workgroups in the order of the grid; needs a session that `whole_launch` made."""
        chosen = parameters or self.parameters
        if len(self.trace.workgroups) == self.launch.workgroups:
            numbers = sorted(self.trace.workgroups)
            found = costs(self.trace, self.operations(chosen), chosen, self.resident, self.cold, numbers)
            return schedule(list(found.values()), self.resident, chosen)
        row = self.row(chosen)
        return schedule([row[self.launch.place(n)] for n in range(self.launch.workgroups)], self.resident, chosen)


def whole_launch(launch: Launch, parameters: Parameters, cold: int | None = None) -> Session:
    """A session with the workgroups from which `Session.time` can tell the time of the whole launch.

    Some at different places, where all workgroups of a place do the same; else all, if they are few.

    Raises:
        UnsupportedError: workgroups of a place differ, and there are too many workgroups to execute them all.
    """
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for number in range(launch.workgroups):
        place = launch.place(number)
        firsts.setdefault(place, number)
        lasts[place] = number
    points = [sorted(firsts)[i] for i in sample_points(len(firsts))]
    again = [place for place in (points[0], points[len(points) // 2]) if firsts[place] != lasts[place]]
    numbers = [firsts[place] for place in points] + [lasts[place] for place in again]
    session = Session(launch, parameters, sorted(set(numbers)), cold)
    done = {number: sum(len(wave.code) for wave in waves) for number, waves in session.trace.workgroups.items()}
    if all(abs(done[firsts[place]] - done[lasts[place]]) <= _ALIKE * done[firsts[place]] for place in again):
        return session
    if launch.workgroups > MOST_WORKGROUPS:
        raise UnsupportedError(
            f"{launch.kernel}: workgroups at one place of the grid's first axis do different work, so none can be "
            f"interpolated, and {launch.workgroups} are too many to execute; take a grid of at most {MOST_WORKGROUPS}"
        )
    return Session(launch, parameters, range(launch.workgroups), cold)
