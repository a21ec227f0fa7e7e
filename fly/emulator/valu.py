"""Vector ALU execution: VOP1, VOP2, VOP3 in their plain, SDWA and DPP forms (CDNA3 ISA, sections 6 and 12.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fly.emulator import convert, floats
from fly.emulator.bits import bit_count
from fly.emulator.decode import VCC, VGPR, Instruction
from fly.emulator.lanes import dpp_reader
from fly.emulator.operands import (
    KINDS,
    Reader,
    Writer,
    modified,
    pair,
    reader,
    store,
    unknown,
    vector_row,
    write_scalar,
    writer,
)  # fmt: skip
from fly.emulator.state import Group, pack, unpack
from fly.emulator.valu_table import OPS, Op

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

_OMOD = {1: 2.0, 2: 4.0, 3: 0.5}


# 16-bit operations new in GFX9, with op_sel: they write one half, where older ones clear the upper half (LLVM:
# GCNSubtarget::zeroesHigh16BitsOfDest)
_KEEPS_OTHER_HALF = frozenset(
    ["v_mad_f16", "v_mad_u16", "v_mad_i16", "v_fma_f16", "v_div_fixup_f16", "v_add_i16", "v_sub_i16"]
    + [f"v_{name}_{kind}" for name in ("min3", "max3", "med3") for kind in ("f16", "i16", "u16")]
)


def source_codes(inst: Instruction) -> list[int]:
    """Source operand codes in order, of any VOP encoding."""
    form = inst.form
    if "SDWA" in form:
        first = inst.get("vsrc0") + (0 if inst.get("s0") else VGPR)
        second = inst.fields.get("vsrc1")
        return [first] + ([] if second is None else [second + (0 if inst.get("s1") else VGPR)])
    first = inst.get("vsrc0") + VGPR if "DPP" in form else inst.get("src0")
    if form.startswith(("VOP2", "VOPC")) and form != "VOPC":
        return [first, inst.get("vsrc1") + VGPR]
    if form in ("VOP2", "VOPC"):
        return [first, inst.get("vsrc1") + VGPR]
    if form.startswith("VOP1"):
        return [first]
    return [inst.get("src0"), inst.get("src1"), inst.get("src2")]


def _sdwa(read: Reader, select: int, extend: int, kind: str) -> Reader:
    """SDWA source: byte 0..3, word 4..5 or dword 6 of 32 bits, zero- or sign-extended, then as `kind`."""
    dtype, width = KINDS[kind], int(kind[1:])

    def run(g: Group) -> Any:
        bits = np.asarray(read(g))
        if select < 4:
            bits = (bits >> np.uint32(8 * select)).astype(np.uint8)
            bits = bits.view(np.int8).astype(np.int32).view(np.uint32) if extend else bits.astype(np.uint32)
        elif select < 6:
            bits = (bits >> np.uint32(16 * (select - 4))).astype(np.uint16)
            bits = bits.view(np.int16).astype(np.int32).view(np.uint32) if extend else bits.astype(np.uint32)
        return bits.astype(np.uint16).view(dtype) if width == 16 else bits.view(dtype)

    return run


def sources(inst: Instruction, machine: Executing, kinds: tuple[str, ...]) -> list[Reader]:
    """Readers of an instruction's sources with their modifiers (neg, abs, op_sel, SDWA selects, DPP)."""
    codes, form, reads = source_codes(inst), inst.form, []
    for i, kind in enumerate(kinds[: len(codes)]):
        if "SDWA" in form:
            raw = reader(machine, codes[i], "u32", inst.literal)
            read = _sdwa(raw, inst.get(f"src{i}_sel"), inst.get(f"src{i}_sext"), kind)
        elif "DPP" in form and i == 0:
            read = dpp_reader(inst, vector_row(machine, codes[0] - VGPR, False), kind)
        else:
            high = inst.get("opsel") >> i & 1 if form.startswith("VOP3") else 0
            acc = inst.name == "v_accvgpr_mov_b32"
            read = reader(machine, codes[i], kind, inst.literal, acc, high)
        negate = inst.get("neg") >> i & 1 or inst.get(f"src{i}_neg")
        absolute = inst.get("abs") >> i & 1 or inst.get(f"src{i}_abs")
        reads.append(modified(read, kind, negate, absolute) if kind[0] == "f" else read)
    return reads


def _dpp_writer(inst: Instruction, row: int) -> Callable[[Group, Any], None]:
    """Lanes whose DPP source is invalid or whose row or bank is masked keep the old destination."""
    from fly.emulator.lanes import dpp_write_mask

    enabled = dpp_write_mask(inst)

    def write(g: Group, value: Any) -> None:
        np.copyto(g.vu[row], np.asarray(value).view(np.uint32), where=enabled(g))

    return write


def _sdwa_writer(inst: Instruction, row: int) -> Callable[[Group, Any], None]:
    """SDWA destination: byte, word or dword; the rest zero (0), sign (1) or kept (2)."""
    select, unused = inst.get("dst_sel"), inst.get("dst_unused")
    width, at = (8, 8 * select) if select < 4 else (16, 16 * (select - 4)) if select < 6 else (32, 0)
    field = np.uint32(((1 << width) - 1) << at) if width < 32 else np.uint32(0xFFFFFFFF)

    def write(g: Group, value: Any) -> None:
        bits = np.asarray(value)
        bits = bits.view(np.uint32) if bits.dtype.itemsize == 4 else bits.view(np.uint16).astype(np.uint32)
        if width == 32:
            store(g, row, bits)
            return
        placed = (bits << np.uint32(at)) & field
        if unused == 2:
            placed = placed | (g.vu[row] & ~field)
        elif unused == 1:
            signed = (bits << np.uint32(32 - width)).view(np.int32) >> np.int32(32 - width)
            placed = placed | (signed.view(np.uint32) << np.uint32(at)) & ~np.uint32((1 << at) - 1)
        store(g, row, placed)

    return write


def destination(inst: Instruction, machine: Executing, kind: str) -> Writer:
    """Writer of the vector destination in the instruction's form."""
    index, form = inst.get("vdst"), inst.form
    acc = inst.name == "v_accvgpr_mov_b32"
    if "SDWA" in form:
        return _sdwa_writer(inst, vector_row(machine, index, False))
    if "DPP" in form:
        if kind.endswith("64"):
            raise unknown(inst, machine, "with DPP on 64-bit data is not modelled")
        write = _dpp_writer(inst, vector_row(machine, index, False))
        if kind.endswith("16"):
            return lambda g, v: write(g, np.asarray(v).view(np.uint16).astype(np.uint32))
        return write
    if kind.endswith("16") and inst.form == "VOP3" and (inst.get("opsel") or inst.name in _KEEPS_OTHER_HALF):
        row, high = vector_row(machine, index, False), inst.get("opsel") >> 3 & 1
        return lambda g, v: np.copyto(g.half(row, high), np.asarray(v).view(np.uint16), where=g.mask)
    return writer(machine, index, kind, acc)


def _output(inst: Instruction, op: Op, machine: Executing) -> Callable[[Any], Any] | None:
    """Output modifiers: OMOD then CLAMP."""
    omod, clamp = inst.get("omod"), inst.get("clmp")
    if op.result[0] != "f":
        if clamp:
            raise unknown(inst, machine, "with integer clamp is not modelled")
        return None
    if not (omod or clamp):
        return None
    dtype = cast("type[np.floating[Any]]", KINDS[op.result])

    def run(value: Any) -> Any:
        if omod:
            value = value * dtype(_OMOD[omod])
        if clamp:
            value = np.where(np.isnan(value), dtype(0), np.clip(value, dtype(0), dtype(1)))
        return value

    return run


def _saturated(op: Op) -> Callable[[Any, Any], Any]:
    """Integer add or subtract with CLAMP: computed wide, then limited to the result's range."""
    wide, limits = KINDS[op.saturates], np.iinfo(cast("type[np.integer[Any]]", KINDS[op.result]))

    def run(a: Any, b: Any) -> Any:
        value = op.function(np.asarray(a).astype(wide), np.asarray(b).astype(wide))
        return np.clip(value, limits.min, limits.max).astype(KINDS[op.result])

    return run


def compile_vop(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """VOP1, VOP2, VOP3 in every form.

    Raises:
        EmulatorError: the operation or the combination of modifiers is not implemented.
    """
    special = _SPECIAL.get(inst.name)
    if special is not None:
        return special(inst, machine)
    op = OPS.get(inst.name)
    if op is None:
        raise unknown(inst, machine)
    reads = sources(inst, machine, op.sources)
    if op.accumulates:
        reads = reads[: len(op.sources) - 1]
        acc_high = inst.get("opsel") >> 3 & 1 if inst.form == "VOP3" else 0
        reads.append(reader(machine, inst.get("vdst") + VGPR, op.sources[-1], None, False, acc_high))
    function = op.function
    if inst.get("clmp") and op.saturates:
        return _general(_saturated(op), reads, destination(inst, machine, op.result), None, False)
    after = _output(inst, op, machine)
    plain = after is None and "SDWA" not in inst.form and "DPP" not in inst.form
    if plain and op.native and len(reads) == len(op.sources):
        return _direct(op, reads, vector_row(machine, inst.get("vdst"), inst.name == "v_accvgpr_mov_b32"))
    return _general(function, reads, destination(inst, machine, op.result), after, op.flushes)


def _direct(op: Op, reads: list[Reader], row: int) -> Callable[[Group], None]:
    """A numpy ufunc that writes straight into the destination register."""
    function, rows, flushes = op.function, f"v{op.result[0]}", op.flushes
    if len(reads) == 1:
        (a,) = reads

        def one(g: Group) -> None:
            out = getattr(g, rows)[row]
            if g.full:
                function(a(g), out=out)
            else:
                np.copyto(out, a(g) if function is np.positive else function(a(g)), where=g.mask)

        return one
    a, b = reads

    def two(g: Group) -> None:
        out = getattr(g, rows)[row]
        if flushes and g.flush32:
            np.copyto(out, floats.flush(function(floats.flush(a(g)), floats.flush(b(g)))), where=g.mask)
        elif g.full:
            function(a(g), b(g), out=out)
        else:
            np.copyto(out, function(a(g), b(g)), where=g.mask)

    return two


def _general(
    function: Callable[..., Any],
    reads: list[Reader],
    write: Writer,
    after: Callable[[Any], Any] | None,
    flushes: bool,
) -> Callable[[Group], None]:
    if after is None and not flushes:
        if len(reads) == 1:
            (a,) = reads
            return lambda g: write(g, function(a(g)))
        if len(reads) == 2:
            a, b = reads
            return lambda g: write(g, function(a(g), b(g)))
        a, b, c = reads
        return lambda g: write(g, function(a(g), b(g), c(g)))

    def run(g: Group) -> None:
        values = [r(g) for r in reads]
        if flushes and g.flush32:
            values = [floats.flush(v) if np.asarray(v).dtype == np.float32 else v for v in values]
            value = function(*values)
            if value.dtype == np.float32:
                value = floats.flush(value)
        else:
            value = function(*values)
        write(g, value if after is None else after(value))

    return run


# ---- operations with a scalar or mask operand, or other shapes ----


def _cndmask(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    a, b = sources(inst, machine, ("u32", "u32"))[:2]
    code = inst.get("src2") if inst.form == "VOP3" else VCC
    negate, absolute = inst.get("neg") or inst.get("src0_neg"), inst.get("abs") or inst.get("src0_abs")
    if negate or absolute or inst.get("src1_neg") or inst.get("src1_abs"):
        a, b = (lambda g, r=r: np.asarray(r(g)).view(np.uint32) for r in sources(inst, machine, ("f32", "f32"))[:2])
    write, condition = destination(inst, machine, "u32"), reader(machine, code, "u64")
    if code < 128:
        return lambda g: write(g, np.where(unpack(condition(g)), b(g), a(g)))
    return lambda g: write(g, np.where(unpack(np.full((g.waves, 1), condition(g), np.uint64)), b(g), a(g)))


def _carry_codes(inst: Instruction) -> tuple[int, int]:
    """SGPR pairs of carry out and carry in."""
    if inst.form == "VOP3SD":
        return inst.get("sdst"), inst.get("src2")
    if inst.form.endswith("SDWA_SDST"):
        return (inst.get("sdst") if inst.get("sd") else VCC), VCC
    return VCC, VCC


def _carry(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    out_code, in_code = _carry_codes(inst)
    a, b = sources(inst, machine, ("u32", "u32"))[:2]
    with_in = inst.name.split("_")[1] in ("addc", "subb", "subbrev")
    write, carry_out = destination(inst, machine, "u32"), write_scalar(out_code, True)
    carry_in = reader(machine, in_code, "u64") if with_in else None
    subtract, reverse = "sub" in inst.name, "rev" in inst.name

    def run(g: Group) -> None:
        x, y = np.asarray(a(g)).astype(np.int64), np.asarray(b(g)).astype(np.int64)
        if reverse:
            x, y = y, x
        wide = x - y if subtract else x + y
        if carry_in is not None:
            carry = unpack(carry_in(g))
            wide = wide - carry if subtract else wide + carry
        overflow = (wide < 0) if subtract else (wide > 0xFFFFFFFF)
        overflow = np.broadcast_to(overflow, g.mask.shape) & g.mask
        write(g, wide.astype(np.uint32))
        carry_out(g, pack(overflow))

    return run


def _mad64(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    signed = inst.name == "v_mad_i64_i32"
    narrow, wide = ("i32", np.int64) if signed else ("u32", np.uint64)
    a, b = sources(inst, machine, (narrow, narrow))[:2]
    c = reader(machine, inst.get("src2"), "i64" if signed else "u64")
    write, carry_out = destination(inst, machine, "u64"), write_scalar(inst.get("sdst"), True)

    def run(g: Group) -> None:
        product, addend = np.asarray(a(g)).astype(wide) * np.asarray(b(g)).astype(wide), np.asarray(c(g))
        value = product + addend
        if signed:
            overflow = ((product ^ value) & (addend ^ value)) < 0
        else:
            overflow = value < product
        write(g, np.broadcast_to(value, g.mask.shape))
        carry_out(g, pack(np.broadcast_to(overflow, g.mask.shape) & g.mask))

    return run


def _div_scale(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    kind = inst.name[-3:]
    reads = sources(inst, machine, (kind,) * 3)
    write, flag = destination(inst, machine, kind), write_scalar(inst.get("sdst"), True)

    def run(g: Group) -> None:
        value, scaled = floats.div_scale(*(r(g) for r in reads))
        write(g, value)
        flag(g, pack(np.broadcast_to(scaled, g.mask.shape) & g.mask))

    return run


def _div_fmas(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    kind = inst.name[-3:]
    a, b, c = sources(inst, machine, (kind,) * 3)
    write, after = destination(inst, machine, kind), _output(inst, OPS["v_fma_" + kind], machine)

    def run(g: Group) -> None:
        value = floats.div_fmas(a(g), b(g), c(g), unpack(g.s64[VCC >> 1]), kind)
        write(g, value if after is None else after(value))

    return run


def _literal_fma(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """fmamk: S0·K + S1; fmaak: S0·S1 + K; the f16 forms are madmk and madak."""
    kind = inst.name[-3:]
    a = reader(machine, inst.get("src0"), kind, inst.literal)
    b = reader(machine, inst.get("vsrc1") + VGPR, kind)
    k = reader(machine, 255, kind, inst.literal)
    op = OPS["v_fma_f32" if kind == "f32" else "v_mad_f16"]
    reads = [a, k, b] if "mk" in inst.name else [a, b, k]
    return _general(op.function, reads, destination(inst, machine, kind), None, op.flushes)


def _mbcnt(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    a, b = sources(inst, machine, ("u32", "u32"))[:2]
    lanes = range(64)
    low = np.array([(1 << min(lane, 32)) - 1 for lane in lanes], np.uint32)
    high = np.array([(1 << max(lane - 32, 0)) - 1 for lane in lanes], np.uint32)
    below, write = low if "_lo_" in inst.name else high, destination(inst, machine, "u32")
    return lambda g: write(g, bit_count(a(g) & below) + b(g))


def _fp8_to_f32(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_cvt_f32_fp8 (byte by SDWA select or op_sel) and v_cvt_pk_f32_fp8 (word by select)."""
    kind = convert.fp8_kind(inst.name[-3:], machine.arch)
    read = reader(machine, source_codes(inst)[0], "u32", inst.literal)
    packed = "_pk_" in inst.name
    if "SDWA" in inst.form:
        select = inst.get("src0_sel")
        shift = (16 if select == 5 else 0) if packed else 8 * select if select < 4 else 0
    elif packed:
        shift = 16 * (inst.get("opsel") & 1)
    else:
        opsel = inst.get("opsel") & 3
        shift = 8 * (opsel >> 1 | (opsel & 1) << 1)
    s = np.uint32(shift)
    if not packed:
        write = writer(machine, inst.get("vdst"), "f32")
        return lambda g: write(g, convert.from_fp8(read(g) >> s, kind))
    low, high = (writer(machine, inst.get("vdst") + i, "f32") for i in (0, 1))

    def run(g: Group) -> None:
        bits = np.asarray(read(g)) >> s
        low(g, convert.from_fp8(bits, kind))
        high(g, convert.from_fp8(bits >> np.uint32(8), kind))

    return run


def _f32_to_fp8(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_cvt_pk_fp8_f32: two values into the half that op_sel[3] names; the other half is kept."""
    kind = convert.fp8_kind(inst.name.split("_")[3], machine.arch)
    a, b = sources(inst, machine, ("f32", "f32"))[:2]
    row, high = vector_row(machine, inst.get("vdst"), False), inst.get("opsel") >> 3 & 1

    def run(g: Group) -> None:
        value = convert.to_fp8(a(g), kind) | convert.to_fp8(b(g), kind) << np.uint32(8)
        np.copyto(g.half(row, high), value.astype(np.uint16), where=g.mask)

    return run


def _bitop3(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_bitop3: any function of three bits; the truth table lies in the omod, abs and neg fields."""
    kind = "u32" if inst.name.endswith("32") else "u16"
    reads = [
        reader(machine, c, kind, None, False, inst.get("opsel") >> i & 1 if kind == "u16" else 0)
        for i, c in enumerate(source_codes(inst))
    ]
    table = inst.get("omod") << 6 | inst.get("abs") << 3 | inst.get("neg")
    write = destination(inst, machine, kind)

    def run(g: Group) -> None:
        a, b, c = (np.asarray(r(g)) for r in reads)
        value = a.dtype.type(0)
        for i in range(8):
            if table >> i & 1:
                value = value | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        write(g, value)

    return run


def _swap(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    first = vector_row(machine, inst.get("vdst"), False)
    second = vector_row(machine, inst.get("src0") - VGPR, False)

    def run(g: Group) -> None:
        old = g.vu[first].copy()
        store(g, first, g.vu[second])
        store(g, second, old)

    return run


def _nothing(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    return lambda g: None


_SPECIAL: dict[str, Callable[[Instruction, Any], Callable[[Group], None]]] = {
    "v_nop": _nothing, "v_clrexcp": _nothing, "v_cndmask_b32": _cndmask,
    "v_div_scale_f32": _div_scale, "v_div_scale_f64": _div_scale,
    "v_div_fmas_f32": _div_fmas, "v_div_fmas_f64": _div_fmas,
    "v_mad_u64_u32": _mad64, "v_mad_i64_i32": _mad64,
    "v_fmamk_f32": _literal_fma, "v_fmaak_f32": _literal_fma,
    "v_madmk_f16": _literal_fma, "v_madak_f16": _literal_fma,
    "v_mbcnt_lo_u32_b32": _mbcnt, "v_mbcnt_hi_u32_b32": _mbcnt,
    "v_cvt_f32_fp8": _fp8_to_f32, "v_cvt_f32_bf8": _fp8_to_f32,
    "v_cvt_pk_f32_fp8": _fp8_to_f32, "v_cvt_pk_f32_bf8": _fp8_to_f32,
    "v_cvt_pk_fp8_f32": _f32_to_fp8, "v_cvt_pk_bf8_f32": _f32_to_fp8,
    "v_bitop3_b32": _bitop3, "v_bitop3_b16": _bitop3, "v_swap_b32": _swap,
}  # fmt: skip
_SPECIAL |= {f"v_{n}_co_u32": _carry for n in ("add", "sub", "subrev", "addc", "subb", "subbrev")}

__all__ = ["compile_vop", "destination", "pair", "source_codes", "sources"]
