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
        return _text(self)


def _operand(code: int, count: int, literal: int | None, acc: bool = False) -> str:
    if code >= VGPR:
        bank, index = ("a" if acc else "v"), code - VGPR
        return f"{bank}{index}" if count == 1 else f"{bank}[{index}:{index + count - 1}]"
    if code < 102:
        return f"s{code}" if count == 1 else f"s[{code}:{code + count - 1}]"
    if code == LITERAL:
        return f"{literal or 0:#x}"
    names = {106: "vcc", 107: "vcc_hi", 124: "m0", 126: "exec", 127: "exec_hi", 253: "scc", 251: "vccz", 252: "execz"}
    floats = {240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0"}
    if 128 <= code <= 192:
        return str(code - 128)
    if 193 <= code <= 208:
        return str(192 - code)
    return names.get(code) or floats.get(code) or f"src{code}"


def _shown(name: str, field: str) -> bool:
    """Whether a field of a memory instruction means anything for the instruction."""
    if not name.startswith(("ds_", "global_", "flat_", "scratch_")):
        return True
    stores = "_store_" in name or "write" in name
    if field == "vdst":
        return not stores and "_lds_" not in name and ("read" in name or "_load_" in name or "_rtn_" in name
                                                       or "permute" in name or "swizzle" in name)  # fmt: skip
    if field == "data1":
        return name.startswith(("ds_write2", "ds_cmpst", "ds_mskor", "ds_wrxchg2"))
    if field in ("data", "data0"):
        return not name.startswith(("ds_read", "ds_swizzle")) and "_load_" not in name
    return True


def _text(inst: Instruction) -> str:
    get, parts = inst.get, []
    acc = bool(get("acc")) if not inst.form.startswith("VOP3P") else False
    for name in ("vdst", "sdst", "sdata", "vdata", "data0", "data1", "data", "addr", "vaddr", "srsrc", "sbase"):
        if name not in inst.fields or not _shown(inst.name, name):
            continue
        code = inst.fields[name] * {"srsrc": 4, "sbase": 2}.get(name, 1)
        vector = name in ("vdata", "data0", "data1", "data", "addr", "vaddr") or (
            name == "vdst" and inst.form != "VOP3_SDST"
        )
        is_acc = (acc and name in ("vdata", "data0", "data1", "data", "vdst")) or (
            name == "vdst" and inst.form == "VOP3P_MFMA" and bool(get("acc_cd"))
        )
        parts.append(_operand(code + (VGPR if vector else 0), inst.sizes.get(name, 1), None, is_acc))
    for i, name in enumerate(("src0", "src1", "src2", "ssrc0", "ssrc1")):
        if name in inst.fields and (name in inst.sizes or name.startswith("ssrc")):
            code = inst.fields[name]
            if code in (249, 250):
                code = inst.fields["vsrc0"] + VGPR
            is_acc = inst.form == "VOP3P_MFMA" and (bool(get("acc") >> i & 1) if i < 2 else bool(get("acc_cd")))
            parts.append(_operand(code, inst.sizes.get(name, 1), inst.literal, is_acc))
    if "vsrc1" in inst.fields:
        parts.append(_operand(inst.fields["vsrc1"] + VGPR, inst.sizes.get("vsrc1", 1), None))
    for name in ("saddr", "soffset"):
        if name in inst.fields and inst.fields[name] != SADDR_OFF:
            if name == "soffset" and inst.form == "SMEM" and not inst.get("soffset_en"):
                continue
            parts.append(_operand(inst.fields[name], 2 if name == "saddr" else 1, inst.literal))
    if "simm16" in inst.fields:
        parts.append(wait_text(inst.fields["simm16"]) if inst.name == "s_waitcnt" else f"{inst.fields['simm16']:#x}")
    for name in ("offset", "offset0", "offset1"):
        if inst.fields.get(name):
            parts.append(f"{name}:{inst.fields[name]}")
    return f"{inst.name} " + ", ".join(parts)


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
