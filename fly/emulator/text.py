"""Instructions as text, in the order and with the modifiers of AMD's assembler, and their operands as records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fly.emulator.decode import EXEC, LITERAL, M0, SADDR_OFF, VCC, VGPR, wait_text

if TYPE_CHECKING:
    from fly.emulator.decode import Instruction

_SPECIAL = {VCC: "vcc", EXEC: "exec"}
_NAMED = {
    VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi", 102: "flat_scratch_lo",
    103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi",
}  # fmt: skip
_CONSTANTS = {
    235: "src_shared_base", 236: "src_shared_limit", 237: "src_private_base", 238: "src_private_limit",
    240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0",
    248: "0.15915494", 251: "vccz", 252: "execz", 253: "scc",
}  # fmt: skip
_SDWA_SELECT = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_SDWA_REST = ("PAD", "SEXT", "PRESERVE")


@dataclass(frozen=True)
class Operand:
    """An operand of an instruction: `count` registers of a bank from `index`.

    `bank` is "v", "a" or "s" ("s" counts SGPR codes: VCC, M0 and EXEC included), or "" for a constant; `target` tells
    whether it is written; `text` is what the assembler prints.
    """

    bank: str
    index: int
    count: int
    target: bool
    text: str


def _register(bank: str, index: int, count: int) -> str:
    if bank == "s" and index >= 102:
        return _SPECIAL.get(index, "") if count == 2 and index in _SPECIAL else _NAMED.get(index, f"s{index}")
    return f"{bank}{index}" if count == 1 else f"{bank}[{index}:{index + count - 1}]"


def _constant(code: int, literal: int | None) -> str:
    if code == LITERAL:
        return f"{literal or 0:#x}"
    if 128 <= code <= 192:
        return str(code - 128)
    if 193 <= code <= 208:
        return str(192 - code)
    return _CONSTANTS.get(code, f"src{code}")


def _make(bank: str, index: int, count: int, target: bool = False, form: str = "{}") -> Operand:
    return Operand(bank, index, count, target, form.format(_register(bank, index, count)))


def _source(inst: Instruction, code: int, count: int, acc: bool = False, form: str = "{}") -> Operand:
    if code >= VGPR:
        return _make("a" if acc else "v", code - VGPR, count, form=form)
    if code < 128:
        return _make("s", code, count, form=form)
    return Operand("", code, count, False, form.format(_constant(code, inst.literal)))


def operands(inst: Instruction) -> tuple[Operand, ...]:
    """The operands of an instruction that are registers or constants, in the assembler's order."""
    for prefix, build in _BUILDERS:
        if inst.form.startswith(prefix):
            return tuple(build(inst))
    return ()


def _scalar(inst: Instruction) -> list[Operand]:
    found = []
    if "sdst" in inst.fields and inst.form != "SOPC" and "sdst" in inst.sizes:
        compares = inst.name.startswith(("s_cmpk", "s_setreg"))
        found.append(_make("s", inst.fields["sdst"], inst.sizes["sdst"], not compares))
    for name in ("ssrc0", "ssrc1"):
        if name in inst.fields and name in inst.sizes:
            found.append(_source(inst, inst.fields[name], inst.sizes[name]))
    return found


def _scalar_memory(inst: Instruction) -> list[Operand]:
    if "sbase" not in inst.sizes:
        return []
    found = [
        _make("s", inst.get("sdata"), inst.sizes.get("sdata", 1), inst.name.startswith(("s_load", "s_buffer_l")))
    ]
    found.append(_make("s", 2 * inst.get("sbase"), 4 if "buffer" in inst.name else 2))
    if inst.get("soffset_en"):
        found.append(_make("s", inst.get("soffset"), 1))
    elif not inst.get("imm"):
        found.append(_make("s", inst.get("offset") & 127, 1))
    return found


def _modified(inst: Instruction, i: int) -> str:
    """Format of source i with its `-` and `|…|`."""
    if "SDWA" in inst.form or "DPP" in inst.form:
        neg, magnitude = inst.get(f"src{i}_neg"), inst.get(f"src{i}_abs")
    else:
        neg = inst.get("neg") >> i & 1 if inst.form != "VOP3P" and inst.name != "v_bitop3_b32" else 0
        magnitude = inst.get("abs") >> i & 1 if inst.name != "v_bitop3_b32" else 0
    return ("-" if neg else "") + ("|{}|" if magnitude else "{}")


def _vector(inst: Instruction) -> list[Operand]:
    sizes, name, form, found = inst.sizes, inst.name, inst.form, []
    matrix = form == "VOP3P_MFMA"
    acc_cd = bool(inst.get("acc_cd")) or name in ("v_accvgpr_mov_b32", "v_accvgpr_write")
    if form.startswith("VOPC"):
        found.append(_make("s", inst.get("sdst") if inst.get("sd") else VCC, 2, True))
    elif form == "VOP3_SDST" or name in ("v_readlane_b32", "v_readfirstlane_b32"):
        found.append(_make("s", inst.get("vdst"), sizes.get("vdst", 1), True))
    elif "vdst" in sizes:
        found.append(_make("a" if acc_cd else "v", inst.get("vdst"), sizes["vdst"], True))
    carry = "_co_" in name and not form.startswith("VOPC")
    if form == "VOP3SD":
        found.append(_make("s", inst.get("sdst"), 2, True))
    elif carry:
        found.append(_make("s", VCC, 2, True))
    reads_acc = name in ("v_accvgpr_mov_b32", "v_accvgpr_read")
    for i in range(3):
        field = f"src{i}" if f"src{i}" in sizes else f"vsrc{i}"
        if field not in sizes:
            continue
        code = inst.fields.get(field, 0) + (VGPR if field[0] == "v" else 0)
        if field == "src0" and "vsrc0" in inst.fields:  # SDWA and DPP keep the register elsewhere
            code = inst.get("vsrc0") + (0 if inst.get("s0") else VGPR)
        acc = (acc_cd if i == 2 else bool(inst.get("acc") >> i & 1)) if matrix else reads_acc
        found.append(_source(inst, code, sizes[field], acc, _modified(inst, i)))
    takes_carry = carry and name.startswith(("v_addc", "v_subb")) and form != "VOP3SD"
    if (name == "v_cndmask_b32" and form != "VOP3") or takes_carry:
        found.append(_make("s", VCC, 2))
    return found


def _lds(inst: Instruction) -> list[Operand]:
    sizes, acc, name = inst.sizes, bool(inst.get("acc")) and "permute" not in inst.name, inst.name
    bank, found = "a" if acc else "v", []
    if "vdst" in sizes and not name.startswith("ds_write"):
        found.append(_make(bank, inst.get("vdst"), sizes["vdst"], True))
    if "addr" in sizes:
        found.append(_make("v", inst.get("addr"), 1))
    return found + [_make(bank, inst.get(field), sizes[field]) for field in ("data0", "data1") if field in sizes]


def _words(name: str) -> int:
    return next((n for text, n in (("dwordx4", 4), ("dwordx3", 3), ("dwordx2", 2)) if text in name), 1)


def _memory(inst: Instruction) -> list[Operand]:
    """FLAT, GLOBAL, SCRATCH and MUBUF."""
    name, bank, found = inst.name, "a" if inst.get("acc") else "v", []
    buffer, scratch = inst.form == "MUBUF", inst.form == "SCRATCH"
    to_lds = "_lds_" in name or inst.get("lds")
    data = "vdata" if buffer else "data"
    if "_load_" in name and not to_lds:
        found.append(_make(bank, inst.get("vdata" if buffer else "vdst"), _words(name), True))
    elif "_atomic_" in name and inst.get("sc0") and not buffer:
        found.append(_make(bank, inst.get("vdst"), inst.sizes.get("vdst", 1), True))
    stored = [_make(bank, inst.get(data), inst.sizes.get(data, 1))] if "_load_" not in name else []
    if buffer:
        count = inst.get("offen") + inst.get("idxen")
        found += stored + ([_make("v", inst.get("vaddr"), count)] if count else [])
        return [*found, _make("s", 4 * inst.get("srsrc"), 4), _source(inst, inst.get("soffset"), 1)]
    base = (
        [] if inst.get("saddr") == SADDR_OFF or inst.form == "FLAT" else [_make("s", inst.get("saddr"), 2 - scratch)]
    )
    if not scratch or inst.get("sve"):
        found.append(_make("v", inst.get("addr"), 1 if base or scratch else 2))
    return found + stored + base


_BUILDERS: tuple[tuple[str, Callable[[Instruction], list[Operand]]], ...] = (
    ("SOPP", lambda inst: []), ("SMEM", _scalar_memory), ("SCRATCH", _memory), ("S", _scalar), ("DS", _lds),
    ("FLAT", _memory), ("GLOBAL", _memory), ("MUBUF", _memory), ("V", _vector),
)  # fmt: skip


def _bits(value: int, count: int) -> str:
    return "[" + ",".join(str(value >> i & 1) for i in range(count)) + "]"


def _suffixes(inst: Instruction) -> list[str]:
    """Offsets and modifiers, as the assembler prints them behind the operands."""
    get, form, found = inst.get, inst.form, []
    if form == "DS":
        if re.match(r"ds_(read2|write2|wrxchg2)", inst.name):
            found += [f"offset{i}:{get(f'offset{i}')}" for i in (0, 1) if get(f"offset{i}")]
        elif get("offset0") or get("offset1"):
            found.append(f"offset:{get('offset1') << 8 | get('offset0')}")
    elif form in ("FLAT", "GLOBAL", "SCRATCH") and get("offset"):
        found.append(f"offset:{get('offset') - (8192 if get('offset') & 4096 and form != 'FLAT' else 0)}")
    elif form == "MUBUF":
        found += [name for name in ("idxen", "offen") if get(name)]
        found += [f"offset:{get('offset')}"] if get("offset") else []
    found += [name for name in ("sc0", "sc1", "nt", "lds") if get(name) and name in inst.fields]
    if form.startswith("VOP3"):
        if inst.name == "v_bitop3_b32":
            return [f"bitop3:{get('omod') << 6 | get('abs') << 3 | get('neg'):#x}"]
        sources = sum(f"src{i}" in inst.sizes for i in range(3))
        if form == "VOP3P" and "_pk_" in inst.name:
            high = get("opsel_hi") | get("opsel_hi2") << 2
            found += [f"op_sel:{_bits(get('opsel'), sources)}"] if get("opsel") else []
            found += [f"op_sel_hi:{_bits(high, sources)}"] if ~high & (1 << sources) - 1 else []
            found += [f"{n}:{_bits(get(f), sources)}" for n, f in (("neg_lo", "neg"), ("neg_hi", "neg_hi")) if get(f)]
        elif get("opsel"):
            # bit 3 selects the half that is written
            found.append(f"op_sel:{_bits(get('opsel') & 7 | get('opsel') >> 3 << sources, sources + 1)}")
        found += [f"{name}:{get(name)}" for name in ("cbsz", "abid", "blgp") if get(name)]
    found += ["clamp"] if get("clmp") else []
    found += [("", "mul:2", "mul:4", "div:2")[get("omod")]] if get("omod") else []
    if "SDWA" in form:
        found += [f"dst_sel:{_SDWA_SELECT[get('dst_sel')]}"] if "dst_sel" in inst.fields else []
        found += [f"dst_unused:UNUSED_{_SDWA_REST[get('dst_unused')]}"] if "dst_unused" in inst.fields else []
        found += [f"{n}:{_SDWA_SELECT[get(n)]}" for n in ("src0_sel", "src1_sel") if n in inst.fields]
    if "DPP" in form:
        found.append(f"dpp:{get('dpp'):#x} row_mask:{get('row_mask'):#x} bank_mask:{get('bank_mask'):#x}")
    return found


def _immediate(inst: Instruction) -> list[str]:
    if inst.form == "SMEM":
        return [f"{inst.get('offset'):#x}"] if inst.get("imm") and "sbase" in inst.sizes else []
    if "simm16" not in inst.fields or not inst.sizes.get("simm16"):
        return []
    value = inst.fields["simm16"]
    if inst.name == "s_waitcnt":
        return [wait_text(value)]
    if "branch" in inst.name or inst.name == "s_call_b64":
        return [f"{inst.next + 4 * (value - 0x10000 if value & 0x8000 else value):#x}"]
    return [f"{value:#x}" if inst.form == "SOPK" else str(value)]


def text(inst: Instruction) -> str:
    """An instruction as one line of assembly; a branch names the address of its target."""
    parts = [operand.text for operand in operands(inst)] + _immediate(inst)
    if inst.form in ("GLOBAL", "SCRATCH") and inst.get("saddr") == SADDR_OFF:
        parts.append("off")
    name = inst.name + ("_b32" if inst.name in ("v_accvgpr_read", "v_accvgpr_write") else "")
    return " ".join([f"{name} {', '.join(parts)}".rstrip(), *_suffixes(inst)])
