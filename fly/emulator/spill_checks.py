"""Undefined values on their way through scratch: spilling one is no use of it, using what comes back is.

Compilers spill pairs and fours of registers of which some hold nothing. Every dword of scratch knows whether the
register that was stored to it was undefined. As with registers, what is defined in one lane is in all: a loaded
register is undefined in a wave where none of its active lanes has a defined value. Scratch that nothing has
been stored to counts as defined: lanes that were inactive at a spill are loaded at its reload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fly.emulator import defined
from fly.emulator.decode import Instruction
from fly.emulator.footprint import Footprint

if TYPE_CHECKING:
    from fly.emulator.checks import Checker
    from fly.emulator.state import Group


def single_bits(bits: int) -> list[int]:
    """The bits of a mask one by one, from the lowest."""
    found = []
    while bits:
        found.append(bits & -bits)
        bits &= bits - 1
    return found


class SpillShadow:
    """For each dword of a batch's scratch, the register bit that was undefined when it was stored, plus 1; or 0."""

    def __init__(self, checker: Checker):
        self.checker = checker
        self.registers: np.ndarray | None = None  # none yet where nothing undefined has been spilled
        self._loaded: tuple[tuple[int, np.ndarray], ...] = ()

    def start(self) -> None:
        """A new batch of workgroups."""
        self.registers = None

    def store(self, g: Group, touched: Footprint, index: np.ndarray, size: int, mask: np.ndarray) -> None:
        """`size` bytes a lane go to scratch at byte indices (W, 64); data that is no spill has been checked."""
        if self.registers is None:
            if not defined.undefined(g, touched.spills)[0]:
                return
            self.registers = np.zeros(len(g.machine.scratch_views[4]), np.uint16)
        for i, bit in enumerate(single_bits(touched.spills) or [0] * ((size + 3) // 4)):
            _, waves = defined.undefined(g, bit)
            mark = np.where(waves, np.uint16(bit.bit_length()), np.uint16(0))
            self.registers[((index >> 2) + i)[mask]] = np.broadcast_to(mark[:, None], mask.shape)[mask]

    def load(self, touched: Footprint, index: np.ndarray, mask: np.ndarray) -> None:
        """Scratch at byte indices (W, 64) comes to registers; `reloaded` completes it once they are written."""
        if self.registers is None:
            return
        loaded = []
        for i, bit in enumerate(single_bits(touched.writes)):
            marks = np.where(mask, self.registers[(index >> 2) + i], 0)
            loaded.append((bit, np.where(((marks != 0) == mask).all(-1), marks.max(-1), 0)))
        self._loaded = tuple(loaded)

    def reloaded(self, g: Group, inst: Instruction) -> None:
        """The registers that `load` found undefined are."""
        loaded, self._loaded = self._loaded, ()
        for bit, marks in loaded:
            if marks.any():
                defined.spread(g, bit, marks != 0)
                self.checker.made(bit, inst, 1 << int(marks.max()) - 1)
