"""The emulator's front door: load a code object once, launch its kernels many times."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fly.emulator.decode import Instruction
from fly.emulator.elf import read_code_object
from fly.emulator.machine import LdsObserver, Machine
from fly.emulator.memory import Region
from fly.emulator.scheduler import BATCH_WAVES, BUDGET, Scheduler
from fly.emulator.state import Group
from fly.errors import EmulatorError


@dataclass(frozen=True)
class RunResult:
    """What a launch did: wave-instructions, seconds, and wave-instructions by name."""

    executed: int
    seconds: float
    mix: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Wave-instructions a second."""
        return self.executed / self.seconds if self.seconds else 0.0


class Program:
    """A loaded code object.

    Args:
        code: bytes of a linked AMDGPU code object.
        arch: required architecture, or None to take the object's.

    Raises:
        EmulatorError: not a code object for gfx942 or gfx950, or for another architecture than `arch`.
    """

    def __init__(self, code: bytes, arch: str | None = None):
        self.code = read_code_object(code)
        self.requested = arch
        self.machines: dict[str, Machine] = {}
        self._lock = threading.Lock()

    @property
    def arch(self) -> str:
        """Architecture of the code object."""
        return self.code.arch

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels."""
        return sorted(self.code.kernels)

    def machine(self, kernel: str) -> Machine:
        """The compiled kernel, made when first asked for."""
        if kernel not in self.machines:
            self.machines[kernel] = Machine(self.code, kernel, self.requested)
        return self.machines[kernel]

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        kernarg: bytes,
        regions: list[Region],
        *,
        dynamic_lds: int = 0,
        checks: bool = True,
        strict_alignment: bool = False,
        budget: int = BUDGET,
        batch_waves: int = BATCH_WAVES,
        progress: Callable[[int], None] | None = None,
        trace: Callable[[Group, Instruction], None] | None = None,
        lds_observer: LdsObserver | None = None,
    ) -> RunResult:
        """Run a kernel to its end.

        Args:
            grid: workgroups by axis. block: work-items a workgroup by axis.
            kernarg: packed explicit arguments; hidden ones are filled in.
            regions: host memory that the kernel may touch.
            strict_alignment: whether the checks also report global loads and stores off their natural alignment.
            lds_observer: called with every LDS access, such as a `fly.emulator.banks.BankCounter`.
            checks: whether to look for missing waits, races, uninitialised reads and hazards.

        Raises:
            EmulatorReportError: the checks found something; EmulatorError: a fault or an unknown instruction.
        """
        with self._lock:
            machine = self.machine(kernel)
            machine.prepare(grid, block, kernarg, regions, dynamic_lds)
            machine.checker, machine.lds_observer = None, lds_observer
            if checks:
                from fly.emulator.checks import Checker

                machine.checker = Checker(machine, strict_alignment)
            scheduler = Scheduler(machine, progress, trace, budget, batch_waves)
            begin = time.perf_counter()
            try:
                scheduler.run()
            except EmulatorError as error:
                if machine.checker is not None and machine.checker.reports:
                    raise machine.checker.fault(error) from None
                raise
            seconds = time.perf_counter() - begin
            if machine.checker is not None:
                machine.checker.finish()
            return RunResult(scheduler.executed(), seconds, scheduler.mix())
