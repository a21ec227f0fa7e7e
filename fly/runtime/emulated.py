"""The emulated AMD GPU: what CPU tensors run on (`FLY_ARCH` names the architecture)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from fly import config
from fly.backends.artefact import Artefact
from fly.backends.target import target
from fly.emulator import Program, Region, RunResult
from fly.emulator.machine import LdsObserver
from fly.emulator.timing import Launch
from fly.emulator.trace import Place, Tracer
from fly.errors import ConfigError, DeviceError
from fly.runtime.device import Allocation, Dim3
from fly.runtime.limits import CheckedSizes, amd_limits
from fly.runtime.log import HostMemory
from fly.runtime.packing import ArgumentSlot

EMULATED = ("gfx942", "gfx950")
# a run that takes longer than this shows a progress bar
_QUIET_SECONDS = 5.0


class EmulatedDevice:
    """An emulated gfx942 or gfx950; kernels have finished when `launch` returns.

    `intercept`, where set, gets every launch in place of the emulator.

    Raises:
        DeviceError: an architecture that is not emulated.
    """

    needs_allocations = True

    def __init__(self, arch: str):
        if arch not in EMULATED:
            raise DeviceError(f"FLY_ARCH={arch!r} is not emulated; CPU tensors run on one of {', '.join(EMULATED)}")
        self.target = self.build = arch
        self.limits = amd_limits("the emulated GPU", arch)
        self.compute_units = target(arch).compute_units
        self.last: RunResult | None = None
        self.lds_observer: LdsObserver | None = None  # of every launch
        self.intercept: Callable[[Launch], None] | None = None

    def load(self, artefact: Artefact) -> EmulatedKernel:
        """Decode an artefact's code object.

        Raises:
            EmulatorError: the binary is not a code object for this architecture.
        """
        return EmulatedKernel(self, artefact)

    def is_capturing(self, stream: int) -> bool:
        """See `fly.runtime.device.Device`: there are no graphs."""
        return False

    def log_memory(self, nbytes: int) -> HostMemory:
        """See `fly.runtime.device.Device`."""
        return HostMemory(nbytes)


class EmulatedKernel:
    """A decoded kernel; see `fly.runtime.device.LoadedKernel`."""

    def __init__(self, device: EmulatedDevice, artefact: Artefact):
        self.device, self.artefact = device, artefact
        self.program = Program(artefact.binary, device.target)
        self._checked = CheckedSizes(device.limits)

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: ArgumentSlot,
        stream: int = 0,
        allocations: Sequence[Allocation] = (),
    ) -> None:
        """Run the kernel; `stream` has no meaning here.

        Raises:
            LaunchError: a grid or block that AMD GPUs do not take.
            EmulatorError: a fault, such as an access outside `allocations`, or an instruction without semantics.
            EmulatorReportError: the checks (`FLY_EMULATOR_CHECKS`) found something.
            ConfigError: `FLY_EMULATOR_TRACE` names no wave.
        """
        if (grid, block) not in self._checked:
            self._checked.check(self.artefact.kernel, grid, block)
        packed = bytes(arguments.view)
        regions = [Region(a.address, a.nbytes, a.name) for a in allocations]
        if self.device.intercept is not None:
            name, lds = self.artefact.kernel, self.artefact.dynamic_shared
            self.device.intercept(Launch(self.program, name, grid, block, packed, regions, lds))
            return
        tracer = self._tracer(grid, block)
        try:
            with Progress(grid[0] * grid[1] * grid[2], self.artefact.kernel) as progress:
                self.device.last = self.program.launch(
                    self.artefact.kernel,
                    grid,
                    block,
                    packed,
                    regions,
                    dynamic_lds=self.artefact.dynamic_shared,
                    checks=config.EMULATOR_CHECKS.get(),
                    progress=progress,
                    trace=tracer,
                    lds_observer=self.device.lds_observer,
                )
        finally:
            if tracer is not None:
                tracer.finish()

    def _tracer(self, grid: Dim3, block: Dim3) -> Tracer | None:
        wave = config.EMULATOR_TRACE.get()
        if not wave:
            return None
        try:
            place = Place.parse(wave)
        except ValueError as error:
            raise ConfigError(f"{config.EMULATOR_TRACE.name}: {error}") from None
        if not place.inside(grid, block):
            return None
        machine = self.program.machine(self.artefact.kernel)
        return Tracer(machine, place, lambda line: print(line, file=sys.stderr))


class Progress:
    """A tqdm bar over workgroups that appears when a run turns out to be long."""

    def __init__(self, total: int, title: str, doing: str = "emulating"):
        self.total, self.title, self.done, self.doing = total, title, 0, doing
        self.begin = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        return self.update

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, workgroups: int) -> None:
        """Count finished workgroups."""
        self.done += workgroups
        if self.bar is None and time.monotonic() - self.begin > _QUIET_SECONDS and self.done < self.total:
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, initial=self.done, desc=f"{self.doing} {self.title}", unit="workgroup")
        elif self.bar is not None:
            self.bar.update(workgroups)
