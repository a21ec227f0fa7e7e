"""What the checks find, and the text that places a finding in the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fly.emulator.decode import Instruction

if TYPE_CHECKING:
    from fly.emulator.executing import Executing
    from fly.emulator.state import Group


@dataclass(frozen=True)
class Report:
    """One finding: `kind` is the name of the check, `text` the full message."""

    kind: str
    kernel: str
    instruction: str
    address: int
    workgroup: tuple[int, int, int]
    wave: int
    lane: int
    text: str

    def __str__(self) -> str:
        return self.text


def place(machine: Executing, g: Group, lanes: np.ndarray | None) -> tuple[tuple[int, int, int], int, int]:
    """(workgroup, wave, lane) of the first lane of a mask (W, 64), or of the group's first wave."""
    wave, lane = 0, 0
    if lanes is not None:
        lanes = np.atleast_2d(lanes)
        wave, lane = (int(x) for x in np.argwhere(lanes)[0]) if lanes.any() else (0, 0)
        wave, lane = min(wave, g.waves - 1), lane if lanes.shape[-1] == 64 else 0
    linear = int(g.wg[wave]) + machine.first_group
    gx, gy = machine.grid[0], machine.grid[1]
    return (linear % gx, linear // gx % gy, linear // (gx * gy)), int(g.wave[wave]), lane


def describe(
    machine: Executing, g: Group, inst: Instruction, kind: str, lanes: np.ndarray | None, message: str
) -> str:
    """One line: the check, the kernel, the instruction with its address and source line, wave and lane, and
    details.
    """
    workgroup, wave, lane = place(machine, g, lanes)
    line = machine.code.source_line(inst.address)
    where = f" [{line}]" if line else ""
    return (
        f"{kind}: {machine.kernel.name}: `{inst.text}` at {inst.address:#x}{where}, "
        f"workgroup {workgroup}, wave {wave}, lane {lane}: {message}"
    )
