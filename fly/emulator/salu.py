"""Scalar ALU: SOP1, SOP2, SOPC, SOPK (CDNA3 ISA, section 5 "Scalar ALU Operations" and section 16.1 to 16.4).

Each table row is `name: (source kinds, destination kind, function, SCC rule)`. The SCC rule is a function of the
result, None to leave SCC, or `_PAIR` when the function returns (result, scc).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fly.emulator.bits import bit_count, bit_reverse, count_leading, count_trailing
from fly.emulator.decode import EXEC, Instruction
from fly.emulator.operands import Reader, Writer, reader, unknown, write_scalar
from fly.emulator.state import Group

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

_PAIR = object()
_U64 = np.uint64
_LOW = np.uint64(0xFFFFFFFF)
_Unary = Callable[[Any], Any]
_Binary = Callable[[Any, Any], Any]
_Row = tuple[str, str, Callable[..., Any], Any]


def _nonzero(value: Any) -> Any:
    return value != 0


def _add_u32(a: Any, b: Any) -> tuple[Any, Any]:
    r = a + b
    return r, r < a


def _sub_u32(a: Any, b: Any) -> tuple[Any, Any]:
    return a - b, a < b


def _add_i32(a: Any, b: Any) -> tuple[Any, Any]:
    r = a + b
    return r, ((a ^ r) & (b ^ r)) < 0


def _sub_i32(a: Any, b: Any) -> tuple[Any, Any]:
    r = a - b
    return r, ((a ^ b) & (a ^ r)) < 0


def _wide(a: Any, shift: int) -> _Binary:
    def run(x: Any, y: Any) -> tuple[Any, Any]:
        r = (x.astype(_U64) << _U64(shift)) + y.astype(_U64)
        return r.astype(np.uint32), r > _LOW

    return run


def _bfe_u(a: Any, b: Any) -> Any:
    bits = a.dtype.itemsize * 8
    kind = a.dtype.type
    offset, width = (b & (bits - 1)).astype(kind), (b >> 16 & 127).astype(kind)
    # a shift by the full width is undefined in numpy, so clamp it and select
    mask = np.where(width >= bits, ~kind(0), (kind(1) << np.minimum(width, kind(bits - 1))) - kind(1))
    return (a >> offset) & mask


def _bfe_i(a: Any, b: Any) -> Any:
    bits = a.dtype.itemsize * 8
    kind = a.dtype.type
    offset, width = (b & (bits - 1)).astype(np.int64), (b >> 16 & 127).astype(np.int64)
    up = np.maximum(bits - offset - width, 0)
    moved = a.view(np.uint32 if bits == 32 else np.uint64) << np.minimum(up, bits - 1).astype(np.uint64).astype(
        np.uint32 if bits == 32 else np.uint64
    )
    shifted = moved.view(kind) >> np.minimum(up + offset, bits - 1).astype(kind)
    return np.where(width == 0, kind(0), shifted)


def _bfm(a: Any, b: Any, kind: type, bits: int) -> Any:
    return ((kind(1) << (a & (bits - 1)).astype(kind)) - kind(1)) << (b & (bits - 1)).astype(kind)


def _absdiff(a: Any, b: Any) -> Any:
    return np.abs((a - b).astype(np.int32))


def _shift(function: _Binary, bits: int, kind: type) -> _Binary:
    return lambda a, b: function(a, (b & np.uint32(bits - 1)).astype(kind))


_SOP2: dict[str, _Row] = {
    "s_add_u32": ("u32 u32", "u32", _add_u32, _PAIR),
    "s_sub_u32": ("u32 u32", "u32", _sub_u32, _PAIR),
    "s_add_i32": ("i32 i32", "u32", _add_i32, _PAIR),
    "s_sub_i32": ("i32 i32", "u32", _sub_i32, _PAIR),
    "s_mul_i32": ("u32 u32", "u32", lambda a, b: a * b, None),
    "s_mul_hi_u32": ("u32 u32", "u32", lambda a, b: (a.astype(_U64) * b >> _U64(32)).astype(np.uint32), None),
    "s_mul_hi_i32": ("i32 i32", "u32", lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32), None),
    "s_lshl_b32": ("u32 u32", "u32", _shift(np.left_shift, 32, np.uint32), _nonzero),
    "s_lshr_b32": ("u32 u32", "u32", _shift(np.right_shift, 32, np.uint32), _nonzero),
    "s_ashr_i32": ("i32 u32", "u32", _shift(np.right_shift, 32, np.int32), _nonzero),
    "s_lshl_b64": ("u64 u32", "u64", _shift(np.left_shift, 64, np.uint64), _nonzero),
    "s_lshr_b64": ("u64 u32", "u64", _shift(np.right_shift, 64, np.uint64), _nonzero),
    "s_ashr_i64": ("i64 u32", "u64", _shift(np.right_shift, 64, np.int64), _nonzero),
    "s_bfe_u32": ("u32 u32", "u32", _bfe_u, _nonzero),
    "s_bfe_i32": ("i32 u32", "u32", _bfe_i, _nonzero),
    "s_bfe_u64": ("u64 u32", "u64", _bfe_u, _nonzero),
    "s_bfe_i64": ("i64 u32", "u64", _bfe_i, _nonzero),
    "s_bfm_b32": ("u32 u32", "u32", lambda a, b: _bfm(a, b, np.uint32, 32), None),
    "s_bfm_b64": ("u32 u32", "u64", lambda a, b: _bfm(a, b, np.uint64, 64), None),
    "s_absdiff_i32": ("i32 i32", "u32", _absdiff, _nonzero),
    "s_pack_ll_b32_b16": ("u32 u32", "u32", lambda a, b: (a & 0xFFFF) | b << 16, None),
    "s_pack_lh_b32_b16": ("u32 u32", "u32", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000), None),
    "s_pack_hh_b32_b16": ("u32 u32", "u32", lambda a, b: a >> 16 | (b & 0xFFFF0000), None),
    "s_min_i32": ("i32 i32", "u32", lambda a, b: (np.minimum(a, b), a < b), _PAIR),
    "s_min_u32": ("u32 u32", "u32", lambda a, b: (np.minimum(a, b), a < b), _PAIR),
    "s_max_i32": ("i32 i32", "u32", lambda a, b: (np.maximum(a, b), a > b), _PAIR),
    "s_max_u32": ("u32 u32", "u32", lambda a, b: (np.maximum(a, b), a > b), _PAIR),
} | {f"s_lshl{i}_add_u32": ("u32 u32", "u32", _wide(None, i), _PAIR) for i in (1, 2, 3, 4)}

_LOGIC: dict[str, _Binary] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b), "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b,
}  # fmt: skip
_SOP2 |= {f"s_{n}_b{w}": (f"u{w} u{w}", f"u{w}", f, _nonzero) for n, f in _LOGIC.items() for w in (32, 64)}


def _flbit_i(a: Any) -> Any:
    bits = a.dtype.itemsize * 8
    unsigned = a.view(np.uint32 if bits == 32 else np.uint64)
    flipped = np.where(a < 0, ~unsigned, unsigned)
    count = count_leading(flipped)
    return np.where(flipped == 0, -1, count).astype(np.int32)


def _or_minus_one(count: _Unary, flip: bool) -> _Unary:
    def run(a: Any) -> Any:
        value = ~a if flip else a
        return np.where(value == 0, -1, count(value)).astype(np.int32)

    return run


def _quads(a: Any) -> Any:
    """Bit i set when any bit of the i-th group of four is."""
    out = np.zeros_like(a)
    one = a.dtype.type
    for i in range(a.dtype.itemsize * 2):
        out |= ((a >> one(4 * i)) & one(15) != 0).astype(a.dtype) << one(i)
    return out


def _wqm(a: Any) -> Any:
    one = a.dtype.type
    any_of_four = a | a >> one(1) | a >> one(2) | a >> one(3)
    firsts = any_of_four & one(0x1111111111111111 & (2 ** (a.dtype.itemsize * 8) - 1))
    return firsts * one(15)


def _bitreplicate(a: Any) -> Any:
    out = np.zeros(a.shape, _U64)
    for i in range(32):
        out |= (a >> np.uint32(i) & np.uint32(1)).astype(_U64) * _U64(3) << _U64(2 * i)
    return out


_SOP1: dict[str, _Row] = {
    "s_mov_b32": ("u32", "u32", lambda a: a, None),
    "s_mov_b64": ("u64", "u64", lambda a: a, None),
    "s_sext_i32_i8": ("u32", "u32", lambda a: a.astype(np.int8).astype(np.int32), None),
    "s_sext_i32_i16": ("u32", "u32", lambda a: a.astype(np.int16).astype(np.int32), None),
    "s_abs_i32": ("i32", "u32", np.abs, _nonzero),
    "s_flbit_i32": ("i32", "u32", _flbit_i, None),
    "s_flbit_i32_i64": ("i64", "u32", _flbit_i, None),
    "s_bitreplicate_b64_b32": ("u32", "u64", _bitreplicate, None),
}
for _w in (32, 64):
    _k = f"u{_w}"
    _SOP1 |= {
        f"s_not_b{_w}": (_k, _k, lambda a: ~a, _nonzero),
        f"s_brev_b{_w}": (_k, _k, bit_reverse, None),
        f"s_bcnt0_i32_b{_w}": (_k, "u32", lambda a: bit_count(~a), _nonzero),
        f"s_bcnt1_i32_b{_w}": (_k, "u32", bit_count, _nonzero),
        f"s_ff0_i32_b{_w}": (_k, "u32", _or_minus_one(count_trailing, True), None),
        f"s_ff1_i32_b{_w}": (_k, "u32", _or_minus_one(count_trailing, False), None),
        f"s_flbit_i32_b{_w}": (_k, "u32", _or_minus_one(count_leading, False), None),
        f"s_quadmask_b{_w}": (_k, _k, _quads, _nonzero),
        f"s_wqm_b{_w}": (_k, _k, _wqm, _nonzero),
    }

_COMPARE = {"eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
            "le": np.less_equal}  # fmt: skip


def _set_bit(wide: bool, value: int) -> _Binary:
    kind, bits = (np.uint64, 63) if wide else (np.uint32, 31)

    def run(old: Any, index: Any) -> Any:
        bit = kind(1) << (index & np.uint32(bits)).astype(kind)
        return old | bit if value else old & ~bit

    return run


def _finish(
    inst: Instruction, dest: Writer, function: Callable[..., Any], reads: list[Reader], rule: Any, kind: str
) -> Callable[[Group], None]:
    cast = np.uint64 if kind == "u64" else np.uint32

    def run(g: Group) -> None:
        result = function(*[np.asarray(r(g)) for r in reads])
        if rule is _PAIR:
            result, scc = result
            g.scc = np.broadcast_to(scc, g.scc.shape)
        elif rule is not None:
            g.scc = np.broadcast_to(rule(result), g.scc.shape)
        dest(g, result.astype(cast) if result.dtype.kind == "b" else result.view(cast))

    return run


def compile_sop2(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """SOP2: two scalar sources."""
    name, codes = inst.name, (inst.get("ssrc0"), inst.get("ssrc1"))
    if name in ("s_addc_u32", "s_subb_u32"):
        return _carry(inst, machine)
    if name.startswith("s_cselect"):
        kind = "u64" if name.endswith("64") else "u32"
        a, b = (reader(machine, c, kind, inst.literal) for c in codes)
        dest = write_scalar(inst.get("sdst"), kind == "u64")
        return lambda g: dest(g, np.where(g.scc, a(g), b(g)))
    if name not in _SOP2:
        raise unknown(inst, machine)
    kinds, out, function, rule = _SOP2[name]
    reads = [reader(machine, c, k, inst.literal) for c, k in zip(codes, kinds.split())]
    return _finish(inst, write_scalar(inst.get("sdst"), out == "u64"), function, reads, rule, out)


def _carry(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    a, b = (reader(machine, inst.get(n), "u32", inst.literal) for n in ("ssrc0", "ssrc1"))
    dest, subtract = write_scalar(inst.get("sdst"), False), inst.name == "s_subb_u32"

    def run(g: Group) -> None:
        x, y, carry = np.asarray(a(g)).astype(_U64), np.asarray(b(g)).astype(_U64), g.scc.astype(_U64)
        wide = x - y - carry if subtract else x + y + carry
        g.scc = np.broadcast_to(wide > _LOW, g.scc.shape)
        dest(g, wide.astype(np.uint32))

    return run


def compile_sop1(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """SOP1: one scalar source; the *_saveexec and *_wrexec forms, bit set and clear, s_getpc."""
    name, source, target = inst.name, inst.get("ssrc0"), inst.get("sdst")
    if "exec_b64" in name or "wrexec" in name:
        return _saveexec(inst, machine)
    if name == "s_getpc_b64":
        dest, value = write_scalar(target, True), np.uint64(machine.code.base + inst.next)
        return lambda g: dest(g, value)
    if name.startswith("s_bitset"):
        wide = name.endswith("64")
        kind = "u64" if wide else "u32"
        old, index = reader(machine, target, kind), reader(machine, source, "u32", inst.literal)
        dest, change = write_scalar(target, wide), _set_bit(wide, int(name[8]))
        return lambda g: dest(g, change(old(g), np.asarray(index(g))))
    if name.startswith("s_cmov"):
        kind = "u64" if name.endswith("64") else "u32"
        old, new = reader(machine, target, kind), reader(machine, source, kind, inst.literal)
        dest = write_scalar(target, kind == "u64")
        return lambda g: dest(g, np.where(g.scc, new(g), old(g)))
    if name not in _SOP1:
        raise unknown(inst, machine)
    kind, out, function, rule = _SOP1[name]
    reads = [reader(machine, source, kind, inst.literal)]
    return _finish(inst, write_scalar(target, out == "u64"), function, reads, rule, out)


def _saveexec(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """`s_OP_saveexec`: dst = EXEC, EXEC = OP(src, EXEC); `s_OP_wrexec` also writes the result to dst."""
    operation = inst.name.split("_")[1]
    source, dest = reader(machine, inst.get("ssrc0"), "u64"), write_scalar(inst.get("sdst"), True)
    function, keep_old = _LOGIC[operation], "saveexec" in inst.name
    write_exec = write_scalar(EXEC, True)

    def run(g: Group) -> None:
        old = g.s64[EXEC >> 1].copy()
        result = function(np.asarray(source(g)), old)
        dest(g, old if keep_old else result)
        write_exec(g, result)
        g.scc = np.broadcast_to(result != 0, g.scc.shape)

    return run


def compile_sopc(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """SOPC: compare, result in SCC."""
    parts = inst.name.split("_")
    if parts[1].startswith("bitcmp"):
        wide, want = parts[-1] == "b64", int(parts[1][-1])
        value = reader(machine, inst.get("ssrc0"), "u64" if wide else "u32", inst.literal)
        index = reader(machine, inst.get("ssrc1"), "u32", inst.literal)
        kind, bits = (np.uint64, 63) if wide else (np.uint32, 31)

        def test(g: Group) -> None:
            bit = np.asarray(value(g)) >> (np.asarray(index(g)) & np.uint32(bits)).astype(kind) & kind(1)
            g.scc = np.broadcast_to(bit == want, g.scc.shape)

        return test
    if parts[1] != "cmp" or parts[2] not in _COMPARE:
        raise unknown(inst, machine)
    compare = _COMPARE[parts[2]]
    a, b = (reader(machine, inst.get(n), parts[3], inst.literal) for n in ("ssrc0", "ssrc1"))

    def run(g: Group) -> None:
        g.scc = np.broadcast_to(compare(a(g), b(g)), g.scc.shape)

    return run


def compile_sopk(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """SOPK: 16-bit immediate; also the MODE register through s_setreg and s_getreg."""
    name, target = inst.name, inst.get("sdst")
    raw = inst.get("simm16")
    signed = raw - 0x10000 if raw & 0x8000 else raw
    old, dest = reader(machine, target, "i32"), write_scalar(target, False)
    if name == "s_movk_i32":
        value = np.uint32(signed & 0xFFFFFFFF)
        return lambda g: dest(g, value)
    if name == "s_cmovk_i32":
        return lambda g: dest(g, np.where(g.scc, np.int32(signed), old(g)).view(np.uint32))
    if name.startswith("s_cmpk"):
        _, _, relation, kind = name.split("_")
        right = np.int32(signed) if kind == "i32" else np.uint32(raw)
        left, compare = reader(machine, target, kind), _COMPARE[relation]

        def run(g: Group) -> None:
            g.scc = np.broadcast_to(compare(left(g), right), g.scc.shape)

        return run
    if name == "s_addk_i32":

        def addk(g: Group) -> None:
            result, scc = _add_i32(old(g), np.int32(signed))
            g.scc = np.broadcast_to(scc, g.scc.shape)
            dest(g, result.view(np.uint32))

        return addk
    if name == "s_mulk_i32":
        return lambda g: dest(g, (old(g) * np.int32(signed)).view(np.uint32))
    if name in ("s_setreg_b32", "s_setreg_imm32_b32", "s_getreg_b32"):
        return _hwreg(inst, machine)
    raise unknown(inst, machine)


_HW_MODE = 1


def _hwreg(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    raw = inst.get("simm16")
    register, offset, size = raw & 63, raw >> 6 & 31, (raw >> 11) + 1
    mask = (1 << size) - 1
    if inst.name == "s_getreg_b32":
        dest = write_scalar(inst.get("sdst"), False)
        if register == _HW_MODE:
            return lambda g: dest(g, np.uint32(g.mode >> offset & mask))
        value = np.uint32(machine.hardware_register(register, inst) >> offset & mask)
        return lambda g: dest(g, value)
    if register != _HW_MODE:
        raise unknown(inst, machine, f"writes hardware register {register}, which is not modelled")
    source = reader(machine, inst.get("sdst"), "u32")
    literal = cast("int", inst.literal)  # of the immediate form, which alone reads it

    def run(g: Group) -> None:
        value = literal if inst.name == "s_setreg_imm32_b32" else int(np.asarray(source(g)).flat[0])
        g.set_mode((g.mode & ~(mask << offset)) | (value & mask) << offset)
        if g.mode & 0xF:
            raise unknown(inst, machine, "sets a rounding mode other than nearest even, which is not modelled")

    return run
