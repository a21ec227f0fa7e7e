"""What the semantics of instructions may know of the machine that executes them.

`fly.emulator.machine` makes a machine of the semantics; they see no more of it than this.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from fly.emulator.decode import Instruction
    from fly.emulator.elf import CodeObject, KernelDescriptor
    from fly.emulator.memory import AccessError, Memory
    from fly.errors import EmulatorError


class Executing(Protocol):
    """A kernel of a code object in a launch; see `fly.emulator.machine.Machine`."""

    code: CodeObject
    kernel: KernelDescriptor
    arch: str
    rows: int  # vector registers of a wave, of which accumulators begin at `accum_offset`
    accum_offset: int
    executed: int
    memory: Memory
    first_group: int
    waves_per_group: int
    lds_bytes: int
    lds_stride: int
    lds_address: int
    scratch_bytes: int
    checker: Any  # of `fly.emulator.checks`, which knows the semantics; None without checks
    lds_observer: Any

    @property
    def apertures(self) -> Mapping[int, int]:
        """Of flat addressing, by operand code."""

    @property
    def index(self) -> Mapping[int, int]:
        """Of instructions, by address."""

    @property
    def grid(self) -> Sequence[int]:
        """Workgroups along each axis."""

    @property
    def lds_views(self) -> Mapping[int, np.ndarray]:
        """By bytes of an element."""

    @property
    def scratch_views(self) -> Mapping[int, np.ndarray]:
        """By bytes of an element."""

    @property
    def footprints(self) -> MutableMapping[int, Any]:
        """What `fly.emulator.footprint` has found, by address."""

    def hardware_register(self, register: int, inst: Instruction) -> int:
        """Value of a hardware register other than MODE."""

    def access_fault(self, g: Any, inst: Instruction, error: AccessError) -> EmulatorError:
        """A global access out of bounds."""

    def fault(self, g: Any, inst: Instruction, kind: str, lanes: np.ndarray | None, message: str) -> EmulatorError:
        """What an instruction of some lanes did wrong."""

    def report_lds_bounds(self, g: Any, inst: Instruction, address: np.ndarray, bad: np.ndarray, size: int) -> None:
        """An access past the end of LDS."""
