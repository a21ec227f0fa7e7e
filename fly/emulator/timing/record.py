"""What the waves of a launch execute, in order, with the addresses that matter for time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fly.emulator.banks import MODELS
from fly.emulator.timing.figures import Parameters

if TYPE_CHECKING:
    from fly.emulator.decode import Instruction
    from fly.emulator.machine import Machine
    from fly.emulator.state import Group

LINE = 128  # bytes of a cache line, of L1 and L2


@dataclass(frozen=True)
class WaveTrace:
    """One wave: instruction indices in the order of execution, and for each an operand of its cost: cycles in the
    banks for LDS, an index into `Trace.lines` for memory, else 0.
    """

    code: list[int]
    extra: list[int]


@dataclass
class Trace:
    """Some workgroups of a launch.

    Attributes:
        machine: the kernel, prepared for the launch.
        workgroups: linear number of a workgroup -> its waves.
        lines: cache lines that memory instructions touch, each as line numbers.
    """

    machine: Machine
    workgroups: dict[int, list[WaveTrace]] = field(default_factory=dict)
    lines: list[tuple[int, ...]] = field(default_factory=lambda: [()])

    @property
    def executed(self) -> int:
        """Wave-instructions in all workgroups."""
        return sum(len(wave.code) for waves in self.workgroups.values() for wave in waves)


class Recorder:
    """Follows the scheduler: called before each instruction, and told of its addresses while it executes.

    Bank cycles depend on the chip, so `parameters` must be those that the trace is replayed with.
    """

    def __init__(self, machine: Machine, parameters: Parameters):
        self.machine = machine
        self.banks = replace(
            MODELS[parameters.arch], read_banks=parameters.read_banks, write_banks=parameters.write_banks
        )
        self.trace = Trace(machine)
        self._steps: list[tuple[int, np.ndarray, np.ndarray, list[int] | np.ndarray | None]] = []
        self._conflicts: dict[tuple[int, bool, bytes, bytes | None], np.ndarray] = {}
        self._known: dict[tuple[int, ...], int] = {(): 0}
        self._lanes: list[tuple[np.ndarray, int, np.ndarray | None]] = []
        self._cycles: np.ndarray | None = None
        # lines are numbered within each allocation, as if it started on a line: independent of the host's addresses
        regions = machine.memory.regions
        self._starts = np.array([r.address for r in regions], np.uint64)
        ranks = {name: i for i, name in enumerate(sorted({r.name for r in regions}))}
        self._bases = np.array([ranks[r.name] << 34 for r in regions], np.int64)

    def __call__(self, g: Group, inst: Instruction) -> None:
        """Note that a group is about to execute an instruction."""
        self._close()
        self._steps.append((self.machine.index[inst.address], g.wg, g.wave, None))

    def lds(self, inst: Instruction, address: np.ndarray, size: int, mask: np.ndarray | None, write: bool) -> None:
        """LDS byte addresses uint32 (W, 64) of the instruction that is executing."""
        if inst.form != "DS":  # a load straight to LDS writes rows of banks, when its data arrives
            return
        # a pattern shifted by whole rows of banks conflicts alike
        shift = address.min() >> np.uint32(8) << np.uint32(8)
        key = (size, write, (address - shift).tobytes(), None if mask is None else mask.tobytes())
        cycles = self._conflicts.get(key)
        if cycles is None:
            phases = self.banks.cycles(address - shift, size, write=write, active=mask)
            cycles = self._conflicts[key] = phases.sum(axis=1)
        self._cycles = cycles if self._cycles is None else self._cycles + cycles

    def memory(self, address: np.ndarray, size: int, mask: np.ndarray | None) -> None:
        """Addresses uint64 (W, 64) of the memory instruction that is executing."""
        if address.ndim == 2 and address.shape[1] == 64:  # scalar loads have one column a dword
            self._lanes.append((address, size, mask))

    def _close(self) -> None:
        """Attach the addresses to the instruction before."""
        if self._cycles is not None:
            self._extend(self._cycles)
            self._cycles = None
        elif self._lanes:
            self._extend(self._line_sets())
        self._lanes.clear()

    def _extend(self, extra: list[int] | np.ndarray) -> None:
        self._steps[-1] = (*self._steps[-1][:3], extra)

    def _line_sets(self) -> list[int]:
        found: list[int] = []
        for wave in range(len(self._lanes[0][0])):
            lines: set[int] = set()
            for address, size, mask in self._lanes:
                lanes = address[wave] if mask is None else address[wave][mask[wave]]
                region = np.searchsorted(self._starts, lanes, side="right") - 1
                offset = (lanes - self._starts[region]).astype(np.int64)
                for reached in (offset, offset + (size - 1)):
                    lines.update(np.unique(reached // LINE + self._bases[region]).tolist())
            key = tuple(sorted(lines))
            index = self._known.get(key)
            if index is None:
                index = self._known[key] = len(self.trace.lines)
                self.trace.lines.append(key)
            found.append(index)
        return found

    def finish(self, first: int, count: int) -> None:
        """Sort what a batch of workgroups [first, first + count) has executed by wave."""
        self._close()
        waves = self.machine.waves_per_group
        lengths = np.array([len(wg) for _, wg, _, _ in self._steps])
        owner = np.concatenate([wg * waves + wave for _, wg, wave, _ in self._steps])
        code = np.repeat([i for i, _, _, _ in self._steps], lengths)
        nothing = {n: np.zeros(n, np.int64) for n in set(lengths.tolist())}
        extra = np.concatenate([
            nothing[len(wg)] if e is None else np.asarray(e, np.int64) for _, wg, _, e in self._steps
        ])  # fmt: skip
        order = np.argsort(owner, kind="stable")
        ends = np.cumsum(np.bincount(owner, minlength=count * waves))
        code, extra = code[order], extra[order]
        for group in range(count):
            found = []
            for wave in range(group * waves, (group + 1) * waves):
                part = slice(ends[wave - 1] if wave else 0, ends[wave])
                found.append(WaveTrace(code[part].tolist(), extra[part].tolist()))
            self.trace.workgroups[first + group] = found
        self._steps.clear()


def record(
    machine: Machine, workgroups: Sequence[int], parameters: Parameters, progress: Callable[[int], None] | None = None
) -> Trace:
    """Execute some workgroups of a prepared launch and note what they do.

    Raises:
        EmulatorError: a fault or an unknown instruction.
    """
    from fly.emulator.scheduler import Scheduler

    recorder = Recorder(machine, parameters)
    machine.checker = None
    machine.lds_observer, machine.memory.observer = recorder.lds, recorder.memory
    scheduler = Scheduler(machine, None, recorder)
    try:
        with np.errstate(all="ignore"):
            for workgroup in workgroups:
                scheduler.run_batch(workgroup, 1)
                recorder.finish(workgroup, 1)
                if progress is not None:
                    progress(1)
    finally:
        machine.lds_observer, machine.memory.observer = None, None
    return recorder.trace
