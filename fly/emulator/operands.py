"""Readers and writers of instruction operands, resolved once when an instruction is compiled.

A reader is a callable `group -> array` of shape (W, 64), (W, 1) or a scalar, of the operand's kind: one of u32 i32
f32 u16 i16 f16 u64 i64 f64. Constants follow "Scalar ALU operands" of the CDNA3 ISA: inline integers are integer
bits in every kind, inline floats take the kind's format, a literal is the high half of a 64-bit float.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fly.emulator.decode import EXEC, LITERAL, SCC, VCC, VGPR, Instruction
from fly.emulator.state import Group
from fly.errors import EmulatorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fly.emulator.executing import Executing

Reader = Callable[[Group], Any]
Writer = Callable[[Group, Any], None]

KINDS: dict[str, type[np.number[Any]]] = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
FLOATS = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
    248: 0.15915494309189532,
}
_FLOAT_FORMAT = {"16": "<e", "32": "<f", "64": "<d"}
_U32 = np.dtype(np.uint32)


def constant_bits(code: int, kind: str, literal: int | None) -> int:
    """Bits of an inline constant or literal, in the width of `kind`."""
    width = int(kind[1:])
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & ((1 << width) - 1)
    if code in FLOATS:
        # integer operands take the bits of the float of their width, 16-bit ones those of the 32-bit float
        form = kind[1:] if kind != "u16" and kind != "i16" else "32"
        return int.from_bytes(struct.pack(_FLOAT_FORMAT[form], FLOATS[code]), "little") & ((1 << width) - 1)
    if code == LITERAL and literal is not None:
        if kind == "f64":
            return literal << 32
        if kind == "i64" and literal >> 31:
            return literal | 0xFFFFFFFF00000000
        return literal & ((1 << width) - 1)
    raise EmulatorError(f"operand code {code} is not a constant")


def constant(bits: int, kind: str) -> np.generic:
    """A numpy scalar of `kind` with these bits."""
    # for numpy's types, `()` is an index array
    return cast("np.generic", np.array(bits, KINDS["u" + kind[1:]]).view(KINDS[kind])[()])


def pair(low: NDArray[np.uint32], high: np.ndarray) -> np.ndarray:
    """uint64 from two uint32 arrays."""
    return low | (high.astype(np.uint64) << np.uint64(32))


def vector_row(machine: Executing, index: int, acc: bool, count: int = 1) -> int:
    """Row of the register file of VGPR or AGPR `index`.

    Raises:
        EmulatorError: outside what the kernel descriptor allocates.
    """
    limit = machine.rows - machine.accum_offset if acc else machine.accum_offset
    if index + count > limit:
        bank = "a" if acc else "v"
        raise EmulatorError(f"register {bank}{index + count - 1} is outside the kernel's {limit} {bank}-registers")
    return index + machine.accum_offset if acc else index


def reader(
    machine: Executing, code: int, kind: str, literal: int | None = None, acc: bool = False, high: int = 0
) -> Reader:
    """Reader of source operand `code` (SRC encoding space) as `kind`; `high` picks a half for 16-bit kinds."""
    width, dtype = int(kind[1:]), KINDS[kind]
    if code >= VGPR:
        return _vector_reader(vector_row(machine, code - VGPR, acc, width // 32 or 1), kind, high)
    if code < 128:
        return _scalar_reader(code, kind, high)
    if code == SCC:
        return lambda g: g.scc.astype(dtype)
    if code == 251:
        return lambda g: (g.s64[VCC >> 1] == 0).astype(dtype)
    if code == 252:
        return lambda g: (g.s64[EXEC >> 1] == 0).astype(dtype)
    if code in (235, 236, 237, 238):  # shared/private base and limit apertures
        value = constant(machine.apertures[code] & ((1 << width) - 1) if width == 64 else 0, kind)
        return lambda g: value
    # a constant of a 16-bit operation fills 32 bits, of which op_sel picks a half; a float16 one lies in the low half
    as_kind = "u32" if width == 16 and not (kind == "f16" and code in FLOATS) else kind
    bits = constant_bits(code, as_kind, literal)
    if width == 16 and high:
        bits >>= 16
    value = constant(bits & ((1 << width) - 1), kind)
    return lambda g: value


def _vector_reader(row: int, kind: str, high: int) -> Reader:
    if kind == "u32":
        return lambda g: g.vu[row]
    if kind == "i32":
        return lambda g: g.vi[row]
    if kind == "f32":
        return lambda g: g.vf[row]
    dtype = KINDS[kind]
    if kind.endswith("16"):
        return lambda g: g.half(row, high).view(dtype)
    return lambda g: pair(g.vu[row], g.vu[row + 1]).view(dtype)


def _scalar_reader(code: int, kind: str, high: int) -> Reader:
    dtype = KINDS[kind]
    if kind == "u32":
        return lambda g: g.su[code]
    if kind == "i32":
        return lambda g: g.si[code]
    if kind == "f32":
        return lambda g: g.sf[code]
    if kind.endswith("16"):
        return lambda g: g.su[code].view(np.uint16)[:, high : high + 1].view(dtype)
    if code & 1:
        return lambda g: pair(g.su[code], g.su[code + 1]).view(dtype)
    return lambda g: g.s64[code >> 1].view(dtype)


def modified(read: Reader, kind: str, negate: int, absolute: int) -> Reader:
    """Reader with the |x| and -x input modifiers, which act on the sign bit alone (NaN included)."""
    if not (negate or absolute):
        return read
    unsigned, dtype = cast("type[np.unsignedinteger[Any]]", KINDS["u" + kind[1:]]), KINDS[kind]
    sign = unsigned(1 << (int(kind[1:]) - 1))

    def run(g: Group) -> Any:
        bits = np.asarray(read(g)).view(unsigned)
        if absolute:
            bits = bits & ~sign
        if negate:
            bits = bits ^ sign
        return bits.view(dtype)

    return run


def writer(machine: Executing, index: int, kind: str, acc: bool = False) -> Writer:
    """Writer of a vector destination under EXEC; 16-bit kinds clear the high half (GFX9 legacy 16-bit operations)."""
    width = int(kind[1:])
    row = vector_row(machine, index, acc, width // 32 or 1)
    if width == 64:

        def write64(g: Group, value: Any) -> None:
            bits = np.asarray(value).view(np.uint64)
            store(g, row, bits.astype(np.uint32))
            store(g, row + 1, (bits >> np.uint64(32)).astype(np.uint32))

        return write64
    if width == 16:
        return lambda g, value: store(g, row, np.asarray(value).view(np.uint16).astype(np.uint32))
    if kind == "f32":

        def write_f32(g: Group, value: Any) -> None:
            if g.full:
                g.vf[row][...] = value
            else:
                np.copyto(g.vf[row], value, where=g.mask)

        return write_f32
    return lambda g, value: store(g, row, value)


def store(g: Group, row: int, value: Any) -> None:
    """Write 32-bit values to a vector register under EXEC."""
    value = np.asarray(value)
    if value.dtype != _U32:
        value = value.view(np.uint32) if value.dtype.itemsize == 4 else value.astype(np.uint32)
    if g.full:
        g.vu[row][...] = value
    else:
        np.copyto(g.vu[row], value, where=g.mask)


def write_scalar(code: int, wide: bool) -> Writer:
    """Writer of a scalar destination: uint32 (W, 1), or uint64 (W, 1) for `wide`."""
    touches_exec = code in (EXEC, EXEC + 1)
    if wide:
        if code & 1:
            raise EmulatorError(f"64-bit scalar destination s{code} is not aligned")

        def write64(g: Group, value: Any) -> None:
            g.s64[code >> 1][...] = value
            if touches_exec:
                g.refresh_exec()

        return write64

    def write32(g: Group, value: Any) -> None:
        g.su[code][...] = value
        if touches_exec:
            g.refresh_exec()

    return write32


def unknown(inst: Instruction, machine: Executing, why: str = "is not implemented") -> EmulatorError:
    """The error for an instruction that cannot be executed."""
    return EmulatorError(
        f"{machine.kernel.name}: instruction `{inst.text}` ({inst.form}) at {inst.address:#x} {why} on {machine.arch}"
    )
