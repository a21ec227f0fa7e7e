"""Which registers an instruction reads and writes, as bit masks: what the checks reason about.

Bits 0..511 are rows of the vector register file (architectural, then accumulation), 512 + code the scalar
registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fly.emulator.decode import EXEC, M0, SADDR_OFF, SGPR_BIT, VCC, VGPR, Instruction
from fly.emulator.mfma import matrix_shape, register_counts

if TYPE_CHECKING:
    from fly.emulator.executing import Executing


@dataclass(frozen=True)
class Footprint:
    """Register bits read and written.

    `parts`: of a move of two words, one of which may hold nothing, the (read, written) bits of each word.
    `spills`: those read only to be stored to scratch, which also keeps what holds nothing.
    """

    reads: int
    writes: int
    parts: tuple[tuple[int, int], ...] = ()
    spills: int = 0


def scalar_bits(code: int, count: int) -> int:
    """Bits of scalar registers; constants and EXEC (always defined) have none."""
    if code >= 128 or code in (EXEC, EXEC + 1):
        return 0
    return ((1 << count) - 1) << (SGPR_BIT + code)


def vector_bits(machine: Executing, index: int, count: int, acc: bool = False) -> int:
    """Bits of vector registers."""
    return ((1 << count) - 1) << (index + (machine.accum_offset if acc else 0))


def _source(machine: Executing, code: int, count: int, acc: bool = False) -> int:
    if code >= VGPR:
        return vector_bits(machine, code - VGPR, count, acc)
    return scalar_bits(code, count)


_READS_VCC = frozenset([
    "v_div_fmas_f32", "v_div_fmas_f64",
])  # fmt: skip
_CARRY_IN = frozenset(f"v_{n}_co_u32" for n in ("addc", "subb", "subbrev"))
_CARRY = _CARRY_IN | frozenset(f"v_{n}_co_u32" for n in ("add", "sub", "subrev"))
_ACCUMULATES = ("v_fmac", "v_mac_", "v_dot2c", "v_dot4c", "v_dot8c", "v_pk_fmac")


def footprint(inst: Instruction, machine: Executing) -> Footprint:
    """The registers of any of the machine's instructions, found once."""
    found = machine.footprints.get(inst.address)
    if found is None:
        found = machine.footprints[inst.address] = _footprint(inst, machine)
    return found


def _footprint(inst: Instruction, machine: Executing) -> Footprint:
    form = inst.form
    if form.startswith("S"):
        return (
            _scalar(inst, machine)
            if form not in ("SMEM", "SCRATCH")
            else (_smem(inst) if form == "SMEM" else _flat(inst, machine))
        )
    if form == "VOP3P_MFMA" and not inst.name.startswith("v_accvgpr"):
        return _matrix(inst, machine)
    if form == "DS":
        return _lds(inst, machine)
    if form in ("FLAT", "GLOBAL"):
        return _flat(inst, machine)
    if form == "MUBUF":
        return _buffer(inst, machine)
    return _vector(inst, machine)


def _scalar(inst: Instruction, machine: Executing) -> Footprint:
    reads = writes = 0
    for name in ("ssrc0", "ssrc1"):
        if name in inst.fields:
            reads |= scalar_bits(inst.fields[name], inst.sizes.get(name, 1))
    if "sdst" in inst.fields and inst.form != "SOPC":
        bits = scalar_bits(inst.fields["sdst"], inst.sizes.get("sdst", 1))
        if inst.name.startswith(("s_cmpk", "s_setreg")):
            reads |= bits
        else:
            writes |= bits
        if inst.name.startswith(("s_addk", "s_mulk", "s_bitset", "s_cmov")):
            reads |= bits
    return Footprint(reads, writes, _halves(reads, writes) if inst.name == "s_mov_b64" else ())


def _halves(reads: int, writes: int) -> tuple[tuple[int, int], ...]:
    """A move's `Footprint.parts`; none where it is of a constant."""
    low_read, low_write = reads & -reads, writes & -writes
    return ((low_read, low_write), (reads ^ low_read, writes ^ low_write)) if reads else ()


def _smem(inst: Instruction) -> Footprint:
    suffix = inst.name.rsplit("dword", 1)[1] if "dword" in inst.name else "x2"
    count = int(suffix[1:]) if suffix else 1
    if inst.name.startswith("s_dcache"):
        return Footprint(0, 0)
    writes = scalar_bits(inst.get("sdata"), count)
    if not inst.name.startswith(("s_load", "s_buffer_load")):
        return Footprint(0, writes)
    reads = scalar_bits(inst.get("sbase") * 2, 4 if "buffer" in inst.name else 2)
    if not inst.get("imm"):
        reads |= scalar_bits(inst.get("offset") & 127, 1)
    if inst.get("soffset_en"):
        reads |= scalar_bits(inst.get("soffset"), 1)
    return Footprint(reads, writes)


def _matrix(inst: Instruction, machine: Executing) -> Footprint:
    shape = matrix_shape(inst.name, machine.arch)
    if shape is None:
        return Footprint(0, 0)
    a, b, d = register_counts(shape)
    acc, acc_cd = inst.get("acc"), bool(inst.get("acc_cd"))
    reads = _source(machine, inst.get("src0"), a, bool(acc & 1))
    reads |= _source(machine, inst.get("src1"), b, bool(acc & 2))
    reads |= _source(machine, inst.get("src2"), d, acc_cd)
    return Footprint(reads, vector_bits(machine, inst.get("vdst"), d, acc_cd))


def _packed_pair(inst: Instruction, machine: Executing, i: int) -> tuple[int, int]:
    """Registers that a packed f32 source reads for the lower and for the upper result."""
    code = inst.get(f"src{i}")
    low = inst.get("opsel") >> i & 1
    high = inst.get("opsel_hi") >> i & 1 if i < 2 else inst.get("opsel_hi2")
    if 128 <= code < VGPR:
        return 0, 0
    if inst.name == "v_pk_mov_b32":
        # the lower result is of source 0, the upper one of source 1
        read = _source(machine, code + low, 1)
        return (read, 0) if i == 0 else (0, read)
    return _source(machine, code + low, 1), _source(machine, code + high, 1)


def _packed(inst: Instruction) -> bool:
    return inst.form == "VOP3P" and inst.name.startswith("v_pk_") and inst.name.endswith(("_f32", "mov_b32"))


def _vector(inst: Instruction, machine: Executing) -> Footprint:
    from fly.emulator.valu import source_codes

    name, form, reads, halves = inst.name, inst.form, 0, (0, 0)
    acc = name in ("v_accvgpr_mov_b32", "v_accvgpr_read")
    for i, code in enumerate(source_codes(inst)):
        field = f"src{i}" if f"src{i}" in inst.sizes else f"vsrc{i}"
        if field not in inst.sizes and not (name == "v_cndmask_b32" and i == 2):
            continue
        if _packed(inst):
            lower, upper = _packed_pair(inst, machine, i)
            reads, halves = reads | lower | upper, (halves[0] | lower, halves[1] | upper)
        elif name == "v_cndmask_b32" and i == 2:
            reads |= scalar_bits(code, 2)
        elif name in ("v_mad_u64_u32", "v_mad_i64_i32") and i == 2:
            # LLVM computes 32-bit products so, with anything in the high half of the addend
            reads |= _source(machine, code, 1)
        else:
            reads |= _source(machine, code, inst.sizes.get(field, 1), acc)
    if (name == "v_cndmask_b32" and form != "VOP3") or name in _READS_VCC:
        reads |= scalar_bits(VCC, 2)
    if name in _CARRY_IN:
        reads |= scalar_bits(inst.get("src2") if form == "VOP3SD" else VCC, 2)
    if name.startswith(_ACCUMULATES) or name == "v_writelane_b32":
        reads |= vector_bits(machine, inst.get("vdst"), inst.sizes.get("vdst", 1))
    writes = _vector_writes(inst, machine)
    if name in ("v_swap_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32"):
        both = vector_bits(machine, inst.get("vdst"), 1) | _source(machine, inst.get("src0"), 1)
        return Footprint(both, both)
    if name == "v_writelane_b32":
        # a spill writes lane after lane into a register that nobody initialised, also halves of pairs that nobody
        # reads again: one undefined lane would make the other 63 undefined
        reads = 0
    if _packed(inst):
        low = writes & -writes
        return Footprint(reads, writes, ((halves[0], low), (halves[1], writes ^ low)))
    return Footprint(reads, writes, _halves(reads, writes) if name == "v_mov_b64" else ())


def _vector_writes(inst: Instruction, machine: Executing) -> int:
    name, form = inst.name, inst.form
    if name.startswith("v_cmp"):
        if form == "VOP3_SDST":
            return scalar_bits(inst.get("vdst"), 2)
        if "SDWA" in form and inst.get("sd"):
            return scalar_bits(inst.get("sdst"), 2)
        return scalar_bits(VCC, 2)
    if name in ("v_readlane_b32", "v_readfirstlane_b32"):
        return scalar_bits(inst.get("vdst"), 1)
    if "vdst" not in inst.fields or name in ("v_nop", "v_clrexcp"):
        return 0
    acc = name in ("v_accvgpr_mov_b32", "v_accvgpr_write")
    writes = vector_bits(machine, inst.get("vdst"), inst.sizes.get("vdst", 1), acc)
    if form == "VOP3SD":
        writes |= scalar_bits(inst.get("sdst"), 2)
    elif name in _CARRY:
        writes |= scalar_bits(VCC, 2)
    return writes


def _lds(inst: Instruction, machine: Executing) -> Footprint:
    name, acc, sizes = inst.name, bool(inst.get("acc")), inst.sizes
    reads = 0 if "addtid" in name or name == "ds_nop" else vector_bits(machine, inst.get("addr"), 1)
    stores = not name.startswith(("ds_read", "ds_swizzle", "ds_nop"))
    permutes = name in ("ds_bpermute_b32", "ds_permute_b32")
    if stores:
        reads |= vector_bits(machine, inst.get("data0"), sizes.get("data0", 1), acc and not permutes)
        if "data1" in sizes and name.startswith(("ds_write2", "ds_cmpst", "ds_mskor", "ds_wrxchg2")):
            reads |= vector_bits(machine, inst.get("data1"), sizes["data1"], acc)
    writes = 0
    if permutes or "_rtn_" in name or name.startswith(("ds_read", "ds_swizzle")):
        writes = vector_bits(machine, inst.get("vdst"), sizes.get("vdst", 1), acc and not permutes)
    if "addtid" in name:
        reads |= scalar_bits(M0, 1)
    return Footprint(reads, writes)


def _transfer(inst: Instruction, machine: Executing, data: int, target: int) -> tuple[int, int]:
    """(reads, writes) of the data registers of a load, store or atomic."""
    acc, suffix = bool(inst.get("acc")), inst.name
    words = next((n for text, n in (("dwordx4", 4), ("dwordx3", 3), ("dwordx2", 2)) if text in suffix), 1)
    if "_atomic_" in suffix:
        wide = 2 if suffix.endswith(("_x2", "_f64")) else 1
        count = wide * (2 if "cmpswap" in suffix else 1)
        returned = vector_bits(machine, target, wide, acc) if inst.get("sc0") else 0
        return vector_bits(machine, data, count, acc), returned
    if "_store_" in suffix:
        return vector_bits(machine, data, words, acc), 0
    if "_load_" in suffix and "_lds_" not in suffix and not inst.get("lds"):
        return 0, vector_bits(machine, target, words, acc)
    return 0, 0


def _flat(inst: Instruction, machine: Executing) -> Footprint:
    data, writes = _transfer(inst, machine, inst.get("data"), inst.get("vdst"))
    reads = 0
    scalar_base = inst.get("saddr") != SADDR_OFF
    if inst.form == "SCRATCH":
        if inst.get("sve"):
            reads |= vector_bits(machine, inst.get("addr"), 1)
    else:
        wide = inst.form == "FLAT" or not scalar_base
        reads |= vector_bits(machine, inst.get("addr"), 2 if wide else 1)
    if scalar_base and inst.form != "FLAT":
        reads |= scalar_bits(inst.get("saddr"), 1 if inst.form == "SCRATCH" else 2)
    if "_lds_" in inst.name:
        reads |= scalar_bits(M0, 1)
    spilled = inst.name.startswith("scratch_store_dword") and not data & reads
    return Footprint(reads | data, writes, spills=data if spilled else 0)


def _buffer(inst: Instruction, machine: Executing) -> Footprint:
    if inst.name in ("buffer_inv", "buffer_wbl2"):
        return Footprint(0, 0)
    reads, writes = _transfer(inst, machine, inst.get("vdata"), inst.get("vdata"))
    count = inst.get("offen") + inst.get("idxen")
    if count:
        reads |= vector_bits(machine, inst.get("vaddr"), count)
    reads |= scalar_bits(inst.get("srsrc") * 4, 4) | scalar_bits(inst.get("soffset"), 1)
    if inst.get("lds"):
        reads |= scalar_bits(M0, 1)
    return Footprint(reads, writes)
