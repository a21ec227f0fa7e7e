"""Matrix instructions (CDNA3 ISA, section 7; CDNA4 ISA, section 7; AMD matrix instruction calculator for layouts)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fly.emulator.decode import VGPR, Instruction
from fly.emulator.native import ELEMENT_BITS, MatrixShape, matrix_product
from fly.emulator.operands import reader, unknown, vector_row
from fly.emulator.state import Group

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

_NAME = re.compile(r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_(?:(\d+)b_)?([a-z0-9]+)(?:_([a-z0-9]+))?$")


MIXED = "f8f6f4"


def matrix_shape(name: str, arch: str) -> MatrixShape | None:
    """Shape of `v_mfma_…`, or None for a name that is not one of the dense non-f64 forms.

    f8f6f4 is taken for e4m3, which are its operands without cbsz and blgp. Its lanes hold runs of k as those of the
    other 8-bit forms do; without block scales only A and B need the same order of k.
    """
    match = _NAME.match(name)
    if match is None or match[1] == "f64" or match[6] == "xf32":
        return None
    a = match[6]
    b = match[7] or a
    if a == MIXED:
        a = b = "fp8"
    if arch == "gfx942":
        a, b = (x + "z" if x in ("fp8", "bf8") else x for x in (a, b))
    return MatrixShape(int(match[2]), int(match[3]), int(match[4]), int(match[5] or 1), a, b)


def register_counts(shape: MatrixShape) -> tuple[int, int, int]:
    """32-bit registers of A, B, and C or D."""
    a = shape.m * shape.k * shape.blocks * ELEMENT_BITS[shape.a] // (64 * 32)
    b = shape.n * shape.k * shape.blocks * ELEMENT_BITS[shape.b] // (64 * 32)
    return max(a, 1), max(b, 1), shape.m * shape.n * shape.blocks // 64


def compile_mfma(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """Dense matrix instructions; EXEC is ignored, as on hardware.

    Raises:
        EmulatorError: sparse, f64, xf32 and scaled forms, and the cbsz / abid / blgp modifiers, of f8f6f4 the types
            of operands that are not e4m3.
    """
    shape = matrix_shape(inst.name, machine.arch)
    if shape is None:
        raise unknown(inst, machine)
    if inst.get("cbsz") or inst.get("abid") or inst.get("blgp"):
        raise unknown(inst, machine, "with cbsz, abid or blgp is not modelled")
    if shape.b[:2] == "xx":
        raise unknown(inst, machine)
    acc, acc_cd = inst.get("acc"), bool(inst.get("acc_cd"))
    counts = register_counts(shape)
    a = vector_row(machine, inst.get("src0") - VGPR, bool(acc & 1), counts[0])
    b = vector_row(machine, inst.get("src1") - VGPR, bool(acc & 2), counts[1])
    d = vector_row(machine, inst.get("vdst"), acc_cd, counts[2])
    code, product = inst.get("src2"), matrix_product(shape)
    kind = "i32" if shape.integer else "f32"
    constant = None if code >= VGPR else reader(machine, code, kind)
    c = vector_row(machine, code - VGPR, acc_cd, counts[2]) if code >= VGPR else None
    # an instruction may name C and D that overlap in part; only equal or disjoint ones are safe in place
    partial = c is not None and c != d and abs(c - d) < counts[2]

    def run(g: Group) -> None:
        base, stride = g.address, g.stride
        if c is not None and not partial:
            c_address = base + c * stride
        elif c is None and not np.any(np.asarray(value := constant(g)).view(np.uint32)):  # type: ignore[misc]
            c_address = 0
        else:
            # the product reads C with the stride of the register file, so a copy needs the same
            held = np.empty((counts[2], stride // 4), np.uint32)
            view = held[:, : g.waves * 64].reshape(counts[2], g.waves, 64)
            view[...] = g.v[c : c + counts[2]] if c is not None else np.asarray(value).view(np.uint32)
            c_address = held.ctypes.data
        product(base + a * stride, base + b * stride, c_address, base + d * stride, stride, g.waves)

    return run
