"""Decoding of CDNA3 / CDNA4 machine code into plain records.

The bit layouts come from the `tinygrad` wheel's tables, which are generated from AMD's machine-readable ISA;
nothing outside this file knows about that package.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fly.errors import EmulatorError, needs_packages

if TYPE_CHECKING:
    from tinygrad.renderer.amd.dsl import Inst

# Operand codes of the SRC encoding space (CDNA3 ISA, section "Scalar ALU operands")
VCC, M0, EXEC, SCC, LITERAL, VGPR = 106, 124, 126, 253, 255, 256
SADDR_OFF = 0x7F

# The upper half of the first word of a matrix product with block scales; the tables leave it out, and would take any
# instruction in front of a product without them for its prefix
SCALED_PREFIX = 0xD3AC

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


# Source codes for which an encoding has a variant: SDWA, DPP and a literal
_VARIANTS = (249, 250, LITERAL)
# fields on which, besides the operation, the operands' widths depend
_WIDTHS = ("saddr", "offen", "idxen", "cbsz", "blgp", "neg", "neg_hi")


@dataclass(frozen=True)
class _Encoding:
    """One encoding of the tables, as masks of the little-endian number that an instruction is.

    `reach`: bytes that its fields take; `fixed`: (mask, value) of the bits that make it this encoding; `ops`: those
    that it has, at bit `op_at`; `deciding`: bits on which a `_Kind` depends, with the `sources` that name a variant.
    """

    table: type[Inst]
    reach: int
    fixed: tuple[int, int]
    op_at: int
    op_mask: int
    ops: frozenset[int]
    deciding: int
    sources: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Kind:
    """What instructions have in common that differ in registers and immediates only.

    `fields`: (name, first bit, mask); `literal`: whether 32 bits follow, which `size` counts.
    """

    name: str
    form: str
    size: int
    fields: tuple[tuple[str, int, int], ...]
    sizes: dict[str, int]
    literal: bool


def _together(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


@functools.cache
def _encodings() -> tuple[_Encoding, ...]:
    """In the order in which they are to be tried."""
    with needs_packages("the emulator"):
        from tinygrad.renderer.amd import _VARIANT_SRC0, _load_formats
        from tinygrad.renderer.amd.dsl import EnumBitField, FixedBitField, SrcField

    found = []
    for table in _load_formats()["cdna"]:
        fields = dict(table._fields)
        constants = [(f.mask << f.lo, f.default << f.lo) for f in fields.values() if isinstance(f, FixedBitField)]
        constants += [(f.mask << f.lo, SCALED_PREFIX << f.lo) for name, f in fields.items() if name == "x2encoding"]
        constants += [(0x1FF, code) for suffix, code in _VARIANT_SRC0.items() if table.__name__.endswith(suffix)]
        deciding = [f.mask << f.lo for name, f in fields.items() if name in ("op", *_WIDTHS)]
        op = fields["op"]
        assert isinstance(op, EnumBitField) and op.allowed is not None
        found.append(
            _Encoding(
                table,
                max(f.lo for f in fields.values()) // 32 * 4 + 4,
                (_together(mask for mask, _ in constants), _together(value for _, value in constants)),
                op.lo,
                op.mask,
                frozenset(code.value for code in op.allowed),
                _together(deciding),
                tuple((f.lo, f.mask) for f in fields.values() if isinstance(f, SrcField)),
            )
        )
    return tuple(found)


_kinds: dict[tuple[type[Inst] | int, ...], _Kind] = {}


def _kind(encoding: _Encoding, code: bytes) -> _Kind:
    """As the tables have it, which takes a tenth of a millisecond."""
    inst = encoding.table.from_bytes(code)
    form, size = type(inst).__name__, inst._base_size
    named = tuple((n, f.lo, f.mask) for n, f in inst._fields if n not in ("encoding", "op", "literal"))
    literal = "_LIT" in form
    if not literal and size == 4:
        values = {name: inst._raw >> low & mask for name, low, mask in named}
        literal = any(values.get(name) == LITERAL for name in ("src0", "ssrc0", "ssrc1"))
        size += 4 * literal
    lower = inst.op.name.lower()
    name = lower[:-4] if lower.endswith(("_e32", "_e64")) else lower
    return _Kind(name, form.replace("_LIT", ""), size, named, dict(inst.op_regs), literal)


def decode(code: bytes, address: int) -> Instruction:
    """Decode the instruction at the start of `code` (at least 16 bytes, or what is left of the program).

    Raises:
        EmulatorError: no CDNA encoding matches.
    """
    code = code[:16]
    word, length = int.from_bytes(code, "little"), len(code)
    for encoding in _encodings():
        mask, value = encoding.fixed
        fits = word & mask == value and length >= encoding.reach
        if fits and word >> encoding.op_at & encoding.op_mask in encoding.ops:
            break
    else:
        raise EmulatorError(f"no CDNA instruction at {address:#x}: {code[:8].hex()}")
    marks = [source if (source := word >> low & mask) in _VARIANTS else 0 for low, mask in encoding.sources]
    key: tuple[type[Inst] | int, ...] = (encoding.table, word & encoding.deciding, *marks)
    kind = _kinds.get(key)
    if kind is None:
        kind = _kinds[key] = _kind(encoding, code)
    raw = word & (1 << 8 * kind.size) - 1
    fields = {name: raw >> low & mask for name, low, mask in kind.fields}
    literal = raw >> 32 & 0xFFFFFFFF if kind.literal else None
    return Instruction(address, kind.size, kind.name, kind.form, fields, kind.sizes, literal, raw)


def decode_program(image: bytes, entry: int, end: int) -> list[Instruction]:
    """All instructions in [entry, end) of a loaded image.

    Bytes behind the last reachable instruction that decode as nothing (padding, data) end the list.
    """
    result: list[Instruction] = []
    at = entry
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
