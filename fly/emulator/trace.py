"""A trace of one wave: every instruction that it executes, with the values of its operands before and after."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.control import BRANCHES
from fly.emulator.decode import EXEC, VCC
from fly.emulator.state import EXEC_PAIR
from fly.emulator.text import Operand, operands

if TYPE_CHECKING:
    from fly.emulator.decode import Instruction
    from fly.emulator.machine import Machine
    from fly.emulator.state import Group

_TYPE = re.compile(r"_(f64|f32|i32|i64|u64|u32|u16|i16|f16|bf16|b32|b64)(?=_|$)")
_SHOWN = 4  # registers of a tuple that are shown
_VIEWS = {"f32": np.float32, "i32": np.int32, "f64": np.float64, "i64": np.int64, "u32": np.uint32, "u64": np.uint64}


@dataclass(frozen=True)
class Place:
    """The wave that is followed: workgroup by axis, wave in the workgroup, and the lanes whose values are shown."""

    workgroup: tuple[int, int, int] = (0, 0, 0)
    wave: int = 0
    lanes: tuple[int, ...] = (0, 1, 2, 3)

    @classmethod
    def parse(cls, text: str, lanes: Sequence[int] = (0, 1, 2, 3)) -> Place:
        """`X[,Y,Z][:WAVE]`.

        Raises:
            ValueError: not of that form, or lanes outside 0 to 63.
        """
        group, _, wave = text.partition(":")
        parts = [*group.split(","), wave or "0"]
        if not 2 <= len(parts) <= 4 or not all(part.strip().isdigit() for part in parts):
            raise ValueError(f"wave {text!r}; expected X[,Y,Z]:WAVE")
        if not lanes or not all(0 <= lane < 64 for lane in lanes):
            raise ValueError(f"lanes {','.join(map(str, lanes))}; expected some of 0 to 63")
        x, y, z = (*map(int, parts[:-1]), 0, 0)[:3]
        return cls((x, y, z), int(parts[-1]), tuple(lanes))

    def inside(self, grid: Sequence[int], block: Sequence[int]) -> bool:
        """Whether a launch has this wave."""
        waves = (block[0] * block[1] * block[2] + 63) // 64
        return self.wave < waves and all(at < size for at, size in zip(self.workgroup, grid))


class Tracer:
    """Called by the scheduler before every instruction; writes a line when the followed wave goes on.

    Args:
        machine: the kernel.
        place: which wave.
        write: takes each line.
    """

    def __init__(self, machine: Machine, place: Place, write: Callable[[str], None]):
        self.machine, self.place, self.write = machine, place, write
        self.steps = 0
        self._open: tuple[Instruction, str, bool] | None = None

    def __call__(self, g: Group, inst: Instruction) -> None:
        """Note that a group is about to execute an instruction."""
        grid, (x, y, z) = self.machine.grid, self.place.workgroup
        workgroup = x + grid[0] * (y + grid[1] * z) - self.machine.first_group
        rows = np.flatnonzero((g.wg == workgroup) & (g.wave == self.place.wave))
        if not rows.size:
            return
        row = int(rows[0])
        self._close(g, row, inst)
        self.steps += 1
        every = operands(inst)
        sources, target = _kinds(inst)
        values = [_show(g, row, o, sources, self.place.lanes) for o in every if not o.target]
        values += [_show(g, row, o, target, self.place.lanes) for o in every if o.target and _accumulates(inst)]
        if inst.name.startswith(("s_cselect", "s_addc", "s_subb", "s_cbranch_scc", "s_cmov")):
            values.append(f"scc={int(g.scc[row, 0])}")
        if not g.mask[row].all() and not inst.form.startswith("S"):
            values.append(f"exec={int(g.s64[EXEC_PAIR][row, 0]):#x}")
        head = f"{self.steps:>6} {inst.address:#07x}  {inst.text:<48} {' '.join(v for v in values if v)}".rstrip()
        self._open = inst, head, bool(g.scc[row, 0])

    def _close(self, g: Group, row: int, following: Instruction) -> None:
        """Write the instruction before, with what it has left in its targets."""
        if self._open is None:
            return
        inst, head, scc = self._open
        kind = _kinds(inst)[1]
        results = [_show(g, row, o, kind, self.place.lanes) for o in operands(inst) if o.target]
        if inst.form == "SOPC" or g.scc[row, 0] != scc:
            results.append(f"scc={int(g.scc[row, 0])}")
        if inst.name in BRANCHES and inst.name != "s_branch":
            results.append("not taken" if following.address == inst.next else "taken")
        self._line(inst, f"{head} -> {' '.join(results)}" if results else head)

    def _line(self, inst: Instruction, text: str) -> None:
        source = self.machine.code.source_line(inst.address)
        self.write(f"{text}  [{source}]" if source else text)
        self._open = None

    def finish(self) -> None:
        """Write the last instruction, which ended the wave or faulted."""
        if self._open is not None:
            self._line(*self._open[:2])


def _accumulates(inst: Instruction) -> bool:
    return inst.name.startswith(("v_fmac", "v_mac_", "v_dot2c", "v_pk_fmac")) or "swap" in inst.name


def _kinds(inst: Instruction) -> tuple[str, str]:
    """(type of the sources, type of the targets) by the name: `v_cvt_f32_i32` has i32 and f32."""
    found = _TYPE.findall(inst.name)
    if inst.form == "VOP3P_MFMA":
        return "b32", found[0] if found else "f32"
    if not found:
        return "b32", "b32"
    return found[-1], "b64" if inst.name.startswith("v_cmp") else found[0]


def _number(value: np.generic, kind: str) -> str:
    if kind[0] == "f":
        return f"{value:.6g}"
    return str(int(value)) if kind[0] == "i" else f"{int(value):#x}"


def _pick(values: np.ndarray, kind: str, lanes: Sequence[int]) -> str:
    """Values of 64 lanes: one when they are equal, those of `lanes` otherwise."""
    bits = values.view(np.uint32 if values.itemsize == 4 else np.uint64)
    if (bits == bits[0]).all():
        return _number(values[0], kind)
    return "[" + " ".join(_number(values[lane], kind) for lane in lanes) + " …]"


def _show(g: Group, row: int, operand: Operand, kind: str, lanes: Sequence[int]) -> str:
    """`name=value`; an empty string for constants."""
    if not operand.bank:
        return ""
    if operand.bank == "s":
        return _scalar(g, row, operand, kind)
    start = operand.index + (g.machine.accum_offset if operand.bank == "a" else 0)
    words = [np.ascontiguousarray(g.vu[start + i][row]) for i in range(operand.count)]
    if operand.count == 2 and (kind.endswith("64") or (kind == "b32" and not operand.target)):
        pair = words[0] | words[1].astype(np.uint64) << np.uint64(32)
        view = _VIEWS.get(kind, np.uint64)
        view = view if np.dtype(view).itemsize == 8 else np.uint64
        return f"{operand.bank}[{operand.index}:{operand.index + 1}]={_pick(pair.view(view), kind, lanes)}"
    shown = []
    for i, word in enumerate(words[:_SHOWN]):
        view = _VIEWS.get(kind, np.uint32)
        as_word = kind if np.dtype(view).itemsize == 4 else "b32"
        view = view if np.dtype(view).itemsize == 4 else np.uint32
        name = f"{operand.bank}{operand.index + i}"
        shown.append(f"{name}={_pick(word.view(view), as_word, lanes)}")
    return " ".join(shown) + (" …" if operand.count > _SHOWN else "")


def _scalar(g: Group, row: int, operand: Operand, kind: str) -> str:
    words = [int(g.su[operand.index + i][row, 0]) for i in range(operand.count)]
    name = operand.text.strip("-|")
    if operand.count == 1:
        view = _VIEWS.get(kind, np.uint32)
        view = view if np.dtype(view).itemsize == 4 else np.uint32
        value: Any = np.array(words[0], np.uint32).view(view)[()]  # a scalar, of which numpy's types make an array
        return f"{name}={_number(value, kind if kind[1:] == '32' else 'b32')}"
    pairs = [words[i] | words[i + 1] << 32 for i in range(0, len(words), 2)]
    if operand.index in (VCC, EXEC) or len(pairs) == 1:
        return f"{name}={pairs[0]:#x}"
    return f"{name}=[{' '.join(f'{p:#x}' for p in pairs)}]"
