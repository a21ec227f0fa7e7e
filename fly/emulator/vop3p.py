"""Packed operations (CDNA3 ISA 16.11): two 16-bit halves, packed f32 pairs, dot products, mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fly.emulator import floats
from fly.emulator.decode import VGPR, Instruction
from fly.emulator.native import fma
from fly.emulator.operands import KINDS, Reader, modified, reader, store, unknown, vector_row
from fly.emulator.state import Group
from fly.emulator.valu_table import bf16_half, dot_int, f16_half

if TYPE_CHECKING:
    from fly.emulator.executing import Executing


def _mad(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def _shift(function: np.ufunc) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a & a.dtype.type(15))


_PACKED16: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "v_pk_mad_i16": ("i16", 3, _mad), "v_pk_mad_u16": ("u16", 3, _mad),
    "v_pk_mul_lo_u16": ("u16", 2, np.multiply),
    "v_pk_add_i16": ("i16", 2, np.add), "v_pk_add_u16": ("u16", 2, np.add),
    "v_pk_sub_i16": ("i16", 2, np.subtract), "v_pk_sub_u16": ("u16", 2, np.subtract),
    "v_pk_lshlrev_b16": ("u16", 2, _shift(np.left_shift)), "v_pk_lshrrev_b16": ("u16", 2, _shift(np.right_shift)),
    "v_pk_ashrrev_i16": ("i16", 2, _shift(np.right_shift)),
    "v_pk_max_i16": ("i16", 2, np.maximum), "v_pk_min_i16": ("i16", 2, np.minimum),
    "v_pk_max_u16": ("u16", 2, np.maximum), "v_pk_min_u16": ("u16", 2, np.minimum),
    "v_pk_fma_f16": ("f16", 3, floats.fma16), "v_pk_add_f16": ("f16", 2, np.add),
    "v_pk_mul_f16": ("f16", 2, np.multiply),
    "v_pk_min_f16": ("f16", 2, floats.minimum), "v_pk_max_f16": ("f16", 2, floats.maximum),
    "v_pk_minimum3_f16": ("f16", 3, lambda a, b, c: floats.ieee_minimum(floats.ieee_minimum(a, b), c)),
    "v_pk_maximum3_f16": ("f16", 3, lambda a, b, c: floats.ieee_maximum(floats.ieee_maximum(a, b), c)),
}  # fmt: skip
_PACKED32: dict[str, tuple[int, Callable[..., Any]]] = {
    "v_pk_fma_f32": (3, fma), "v_pk_mul_f32": (2, np.multiply), "v_pk_add_f32": (2, np.add),
}  # fmt: skip
_DOTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "v_dot2_i32_i16": ("u32", dot_int(16, True)), "v_dot2_u32_u16": ("u32", dot_int(16, False)),
    "v_dot4_i32_i8": ("u32", dot_int(8, True)), "v_dot4_u32_u8": ("u32", dot_int(8, False)),
    "v_dot8_i32_i4": ("u32", dot_int(4, True)), "v_dot8_u32_u4": ("u32", dot_int(4, False)),
}  # fmt: skip


def _op_sel_hi(inst: Instruction, i: int) -> int:
    return inst.get("opsel_hi") >> i & 1 if i < 2 else inst.get("opsel_hi2")


def _half_reader(inst: Instruction, machine: Executing, i: int, code: int, kind: str, upper: bool) -> Reader:
    """Source i of the lower or upper result, with op_sel / op_sel_hi and neg / neg_hi.

    An inline constant lies in the low half only, except that 16-bit floats repeat it where op_sel_hi says low.
    """
    select = _op_sel_hi(inst, i) if upper else inst.get("opsel") >> i & 1
    read = reader(machine, code, kind, None, False, select)
    negate = (inst.get("neg_hi") if upper else inst.get("neg")) >> i & 1
    return modified(read, kind, negate, 0) if kind[0] == "f" else read


def _packed16(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    kind, count, function = _PACKED16[inst.name]
    codes = [inst.get(f"src{i}") for i in range(count)]
    lower = [_half_reader(inst, machine, i, c, kind, False) for i, c in enumerate(codes)]
    upper = [_half_reader(inst, machine, i, c, kind, True) for i, c in enumerate(codes)]
    row, clamp, dtype = vector_row(machine, inst.get("vdst"), False), inst.get("clmp"), KINDS[kind]
    if clamp and kind[0] != "f" and inst.name.split("_")[2] not in ("add", "sub"):
        raise unknown(inst, machine, "with integer clamp is not modelled")
    integer = cast("type[np.integer[Any]]", dtype)  # where `kind` is one

    def evaluate(reads: list[Reader], g: Group) -> Any:
        values = [np.asarray(r(g)) for r in reads]
        if clamp and kind[0] != "f":
            limits = np.iinfo(integer)
            return np.clip(function(*(v.astype(np.int32) for v in values)), limits.min, limits.max).astype(dtype)
        value = function(*values)
        if clamp:
            value = np.where(np.isnan(value), dtype(0), np.clip(value, dtype(0), dtype(1)))
        return value

    def run(g: Group) -> None:
        low, high = (evaluate(r, g).view(np.uint16).astype(np.uint32) for r in (lower, upper))
        store(g, row, low | high << np.uint32(16))

    return run


def _pair_reader(inst: Instruction, machine: Executing, i: int, upper: bool) -> Reader:
    """f32 source i of a packed f32 operation: op_sel picks one register of the pair."""
    code = inst.get(f"src{i}")
    select = _op_sel_hi(inst, i) if upper else inst.get("opsel") >> i & 1
    if code >= 128 and code < VGPR:
        read = reader(machine, code, "f32")
        if select:
            return lambda g: np.float32(0)
    else:
        read = reader(machine, code + select, "f32")
    return modified(read, "f32", (inst.get("neg_hi") if upper else inst.get("neg")) >> i & 1, 0)


def _packed32(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    count, function = _PACKED32[inst.name]
    lower = [_pair_reader(inst, machine, i, False) for i in range(count)]
    upper = [_pair_reader(inst, machine, i, True) for i in range(count)]
    row, clamp = vector_row(machine, inst.get("vdst"), False, 2), inst.get("clmp")
    # the lower result may be written before the upper sources are read when they do not overlap
    aliased = any(inst.get(f"src{i}") == VGPR + row and not _op_sel_hi(inst, i) for i in range(count))

    def general(g: Group) -> None:
        values = [[np.asarray(r(g)) for r in reads] for reads in (lower, upper)]
        if g.flush32:
            values = [[floats.flush(v) for v in vs] for vs in values]
        results = [function(*vs) for vs in values]
        for i, value in enumerate(results):
            if g.flush32:
                value = floats.flush(value)
            if clamp:
                value = np.where(np.isnan(value), np.float32(0), np.clip(value, np.float32(0), np.float32(1)))
            np.copyto(g.vf[row + i], value, where=g.mask)

    if clamp or aliased:
        return general

    def run(g: Group) -> None:
        if g.full and not g.flush32:
            function(*[r(g) for r in lower], out=g.vf[row])
            function(*[r(g) for r in upper], out=g.vf[row + 1])
        else:
            general(g)

    return run


def _pk_mov(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    reads = []
    for i in range(2):
        code, select = inst.get(f"src{i}"), inst.get("opsel") >> i & 1
        reads.append(reader(machine, code if 128 <= code < VGPR else code + select, "u32"))
    row = vector_row(machine, inst.get("vdst"), False, 2)

    def run(g: Group) -> None:
        low, high = (np.array(np.broadcast_to(r(g), g.mask.shape)) for r in reads)
        store(g, row, low)
        store(g, row + 1, high)

    return run


def _widened(read: Reader) -> Reader:
    return lambda g: np.asarray(read(g)).astype(np.float32)


def _mix(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_mad_mix*: each source is f32, or a float16 half where op_sel_hi says so; fused on gfx940."""
    reads = []
    for i in range(3):
        code = inst.get(f"src{i}")
        if _op_sel_hi(inst, i):
            read = _widened(reader(machine, code, "f16", None, False, inst.get("opsel") >> i & 1))
        else:
            read = reader(machine, code, "f32")
        # neg_hi is the absolute-value modifier of these operations
        reads.append(modified(read, "f32", inst.get("neg") >> i & 1, inst.get("neg_hi") >> i & 1))
    row, clamp = vector_row(machine, inst.get("vdst"), False), inst.get("clmp")
    half = {"v_mad_mixlo_f16": 0, "v_mad_mixhi_f16": 1}.get(inst.name)

    def run(g: Group) -> None:
        value = fma(*[r(g) for r in reads])
        if clamp:
            value = np.clip(value, np.float32(0), np.float32(1))
        if half is None:
            np.copyto(g.vf[row], value, where=g.mask)
        else:
            np.copyto(g.half(row, half), value.astype(np.float16).view(np.uint16), where=g.mask)

    return run


def _dot_float(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    half = bf16_half if inst.name.endswith("bf16") else f16_half
    a, b = (reader(machine, inst.get(f"src{i}"), "u32") for i in (0, 1))
    c, row = reader(machine, inst.get("src2"), "f32"), vector_row(machine, inst.get("vdst"), False)
    negate = modified(c, "f32", inst.get("neg") >> 2 & 1, 0)

    def run(g: Group) -> None:
        x, y = np.asarray(a(g)), np.asarray(b(g))
        value = fma(half(x, 1), half(y, 1), fma(half(x, 0), half(y, 0), negate(g)))
        np.copyto(g.vf[row], value, where=g.mask)

    return run


def _dot_int(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    function = _DOTS[inst.name][1]
    if inst.get("clmp"):
        raise unknown(inst, machine, "with integer clamp is not modelled")
    reads = [reader(machine, inst.get(f"src{i}"), "u32") for i in range(3)]
    row = vector_row(machine, inst.get("vdst"), False)
    return lambda g: store(g, row, function(*[np.asarray(r(g)) for r in reads]))


def _accvgpr(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    reading = inst.name == "v_accvgpr_read"
    code = inst.get("src0")
    read = reader(machine, code, "u32", None, reading and code >= VGPR)
    row = vector_row(machine, inst.get("vdst"), not reading)
    return lambda g: store(g, row, read(g))


def compile_vop3p(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """VOP3P other than matrix instructions."""
    name = inst.name
    if name in _PACKED16:
        return _packed16(inst, machine)
    if name in _PACKED32:
        return _packed32(inst, machine)
    if name in _DOTS:
        return _dot_int(inst, machine)
    table = {
        "v_pk_mov_b32": _pk_mov, "v_mad_mix_f32": _mix, "v_mad_mixlo_f16": _mix, "v_mad_mixhi_f16": _mix,
        "v_dot2_f32_f16": _dot_float, "v_dot2_f32_bf16": _dot_float,
        "v_accvgpr_read": _accvgpr, "v_accvgpr_write": _accvgpr,
    }  # fmt: skip
    if name not in table:
        raise unknown(inst, machine)
    return table[name](inst, machine)
