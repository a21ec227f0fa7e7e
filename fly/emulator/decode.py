"""Decoding of CDNA3 / CDNA4 machine code into plain records.

The bit layouts come from the `tinygrad` wheel's tables, which are generated from AMD's machine-readable ISA;
nothing outside this file knows about that package.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from fly.errors import EmulatorError

# Operand codes of the SRC encoding space (CDNA3 ISA, section "Scalar ALU operands")
VCC, M0, EXEC, SCC, LITERAL, VGPR = 106, 124, 126, 253, 255, 256
SADDR_OFF = 0x7F

# Register space of `reads` and `writes` bit masks: 0..255 VGPR, 256..511 AGPR, then SGPR codes, then SCC
SGPR_BIT = 512
SCC_BIT = 512 + 128


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction.

    `name` is lower case without the encoding suffix; `form` is the encoding (`VOP2`, `VOP3`, `VOP1_DPP16`, …);
    `fields` holds the raw bit fields; `sizes` the operand widths in 32-bit registers.
    """

    address: int
    size: int
    name: str
    form: str
    fields: dict[str, int] = field(hash=False)
    sizes: dict[str, int] = field(hash=False)
    literal: int | None = None
    raw: int = 0

    def get(self, name: str) -> int:
        """A bit field, 0 when the encoding lacks it."""
        return self.fields.get(name, 0)

    @property
    def next(self) -> int:
        """Address of the instruction behind this one."""
        return self.address + self.size

    @functools.cached_property
    def text(self) -> str:
        """Readable form for reports and traces: the name and its operands."""
        from fly.emulator.text import text

        return text(self)


def wait_counts(simm16: int) -> tuple[int, int]:
    """(vmcnt, lgkmcnt) of an `s_waitcnt` immediate (GFX9 layout: vmcnt in [3:0] and [15:14], lgkmcnt in [11:8])."""
    return (simm16 & 15) | (simm16 >> 14 & 3) << 4, simm16 >> 8 & 15


def wait_text(simm16: int) -> str:
    """An `s_waitcnt` immediate as the assembler prints it."""
    vm, lgkm = wait_counts(simm16)
    text = ([f"vmcnt({vm})"] if vm < 63 else []) + ([f"lgkmcnt({lgkm})"] if lgkm < 15 else [])
    return " ".join(text) or "none"


@functools.cache
def _formats() -> tuple:
    from tinygrad.renderer.amd import _load_formats, _matches

    return _load_formats()["cdna"], _matches


def _canonical(name: str) -> str:
    lower = name.lower()
    return lower[:-4] if lower.endswith(("_e32", "_e64")) else lower


def decode(code: bytes, address: int) -> Instruction:
    """Decode the instruction at the start of `code` (at least 16 bytes, or what is left of the program).

    Raises:
        EmulatorError: no CDNA encoding matches.
    """
    formats, matches = _formats()
    for cls in formats:
        if matches(code, cls):
            inst = cls.from_bytes(code)
            break
    else:
        raise EmulatorError(f"no CDNA instruction at {address:#x}: {code[:8].hex()}")
    form, raw = type(inst).__name__, inst._raw
    fields = {
        name: (raw >> bits.lo) & bits.mask for name, bits in inst._fields if name not in ("encoding", "op", "literal")
    }
    size, literal = inst._base_size, None
    if "_LIT" in form:
        literal = raw >> 32 & 0xFFFFFFFF
        form = form.replace("_LIT", "")
    elif size == 4 and any(fields.get(n) == LITERAL for n in ("src0", "ssrc0", "ssrc1")):
        literal, size = int.from_bytes(code[4:8], "little"), 8
        raw |= literal << 32
    return Instruction(address, size, _canonical(inst.op.name), form, fields, dict(inst.op_regs), literal, raw)


def decode_program(image: bytes, entry: int, end: int) -> list[Instruction]:
    """All instructions in [entry, end) of a loaded image.

    Bytes behind the last reachable instruction that decode as nothing (padding, data) end the list.
    """
    result, at = [], entry
    while at < end:
        try:
            inst = decode(image[at : at + 16], at)
        except EmulatorError:
            if result and result[-1].name in ("s_endpgm", "s_branch", "s_setpc_b64"):
                break
            raise
        result.append(inst)
        at += inst.size
    return result
