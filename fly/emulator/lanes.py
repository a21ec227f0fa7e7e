"""Exchange between lanes: DPP, readlane, writelane, permlane swaps (CDNA3 ISA sections 6.6 and 12.14; CDNA4 16.8)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.decode import VGPR, Instruction
from fly.emulator.operands import KINDS, Reader, reader, unknown, vector_row, write_scalar
from fly.emulator.state import Group

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

_LANE = np.arange(64)


@functools.cache
def dpp_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """(source lane of each lane, whether it exists) of a DPP control word.

    Raises:
        KeyError: an undefined control word.
    """
    row, at, n = _LANE & ~15, _LANE & 15, control & 15
    if control < 0x100:
        quad = [control >> 2 * i & 3 for i in range(4)]
        return (_LANE & ~3) + np.array(quad)[_LANE & 3], np.ones(64, bool)
    if 0x101 <= control <= 0x10F:
        return row + (at + n & 15), at + n < 16
    if 0x111 <= control <= 0x11F:
        return row + (at - n & 15), at - n >= 0
    if 0x121 <= control <= 0x12F:
        return row + (at - n & 15), np.ones(64, bool)
    if 0x150 <= control <= 0x15F:
        return row + n, np.ones(64, bool)
    table = {
        0x130: ((_LANE + 1) & 63, _LANE < 63),  # wave_shl:1
        0x134: ((_LANE + 1) & 63, _LANE >= 0),  # wave_rol:1
        0x138: ((_LANE - 1) & 63, _LANE > 0),  # wave_shr:1
        0x13C: ((_LANE - 1) & 63, _LANE >= 0),  # wave_ror:1
        0x140: (row + 15 - at, _LANE >= 0),  # row_mirror
        0x141: ((_LANE & ~7) + 7 - (_LANE & 7), _LANE >= 0),  # row_half_mirror
        0x142: (np.maximum(row - 1, 0), row >= 16),  # row_bcast:15
        0x143: (np.full(64, 31), _LANE >= 32),  # row_bcast:31
    }
    return table[control]


def dpp_reader(inst: Instruction, row: int, kind: str) -> Reader:
    """Reader of a DPP source; lanes without a valid source read 0 (they are written only with bound_ctrl)."""
    index, exists = dpp_lanes(inst.get("dpp"))
    width, dtype = int(kind[1:]), KINDS[kind]

    def run(g: Group) -> Any:
        value = g.vu[row][:, index]
        valid = exists if g.full else exists & g.mask[:, index]
        if not valid.all():
            value = np.where(valid, value, np.uint32(0))
        return value.astype(np.uint16).view(dtype) if width == 16 else value.view(dtype)

    return run


def dpp_write_mask(inst: Instruction) -> Callable[[Group], np.ndarray]:
    """Lanes that a DPP instruction writes."""
    index, exists = dpp_lanes(inst.get("dpp"))
    rows, banks = inst.get("row_mask"), inst.get("bank_mask")
    enabled = ((rows >> (_LANE >> 4)) & (banks >> (_LANE >> 2 & 3)) & 1).astype(bool)
    if inst.get("bc"):
        return lambda g: g.mask & enabled
    enabled = enabled & exists
    return lambda g: g.mask & enabled if g.full else g.mask & enabled & g.mask[:, index]


def _lane_reader(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_readlane_b32: one lane to an SGPR."""
    code = inst.get("src0")
    lane, write = reader(machine, inst.get("src1"), "u32"), write_scalar(inst.get("vdst"), False)
    row = vector_row(machine, code - VGPR, False)

    def run(g: Group) -> None:
        index = np.broadcast_to(np.asarray(lane(g)) & np.uint32(63), (g.waves, 1)).astype(np.int64)
        write(g, np.take_along_axis(g.vu[row], index, 1))

    return run


def _first_lane(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_readfirstlane_b32: the lowest active lane, lane 0 when none is."""
    code, write = inst.get("src0"), write_scalar(inst.get("vdst"), False)
    if code < VGPR:
        read = reader(machine, code, "u32", inst.literal)
        return lambda g: write(g, read(g))
    row = vector_row(machine, code - VGPR, False)

    def run(g: Group) -> None:
        if g.full:
            write(g, g.vu[row][:, :1])
        else:
            write(g, np.take_along_axis(g.vu[row], g.mask.argmax(1)[:, None], 1))

    return run


def _write_lane(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_writelane_b32: one lane from an SGPR, regardless of EXEC."""
    value = reader(machine, inst.get("src0"), "u32", inst.literal)
    lane, row = reader(machine, inst.get("src1"), "u32"), vector_row(machine, inst.get("vdst"), False)

    def run(g: Group) -> None:
        index = np.broadcast_to(np.asarray(lane(g)) & np.uint32(63), (g.waves, 1)).astype(np.int64)
        np.put_along_axis(g.vu[row], index, np.broadcast_to(value(g), (g.waves, 1)), 1)

    return run


def _swap(distance: int) -> Callable[[Instruction, Any], Callable[[Group], None]]:
    """v_permlane16_swap and v_permlane32_swap: the upper half of vdst trades places with the lower half of src0.

    For 16 this happens in each half of the wave. Only lanes of EXEC are written.
    """
    upper = (_LANE & distance) != 0

    def build(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
        first = vector_row(machine, inst.get("vdst"), False)
        second = vector_row(machine, inst.get("src0") - VGPR, False)

        def run(g: Group) -> None:
            a, b = g.vu[first], g.vu[second]
            shape = (g.waves, 64 // (2 * distance), 2, distance)
            x, y = a.reshape(shape), b.reshape(shape)
            if g.full:
                held = x[:, :, 1].copy()
                x[:, :, 1] = y[:, :, 0]
                y[:, :, 0] = held
                return
            new_a, new_b = a.copy().reshape(shape), b.copy().reshape(shape)
            new_a[:, :, 1], new_b[:, :, 0] = y[:, :, 0], x[:, :, 1]
            np.copyto(a, new_a.reshape(a.shape), where=g.mask & upper)
            np.copyto(b, new_b.reshape(b.shape), where=g.mask & ~upper)

        return run

    return build


_TABLE: dict[str, Callable[[Instruction, Any], Callable[[Group], None]]] = {
    "v_readlane_b32": _lane_reader,
    "v_readfirstlane_b32": _first_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_swap_b32": _swap(16),
    "v_permlane32_swap_b32": _swap(32),
}
LANE_OPS = frozenset(_TABLE)


def compile_lane(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """An instruction of `LANE_OPS`."""
    if inst.name not in _TABLE:
        raise unknown(inst, machine)
    return _TABLE[inst.name](inst, machine)
