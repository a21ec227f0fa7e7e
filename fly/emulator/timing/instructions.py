"""What an instruction costs as far as that is known without running it: its class, ports, latency and registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from fly.emulator.control import BRANCHES, JUMPS
from fly.emulator.decode import VGPR, Instruction, wait_counts
from fly.emulator.footprint import footprint, vector_bits
from fly.emulator.hazards import TRANSCENDENTAL, passes, wait_states
from fly.emulator.mfma import matrix_shape, register_counts
from fly.emulator.timing.figures import Parameters

if TYPE_CHECKING:
    from fly.emulator.machine import Machine

# Issue classes: of each, a SIMD takes one instruction a turn, from different waves. INTERNAL needs no unit.
VALU, SCALAR, MEMORY, LDS, BRANCH, INTERNAL = 1, 2, 4, 8, 16, 0

_PACKED = ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")
_QUARTER = ("v_mul_lo_", "v_mul_hi_", "v_mad_u64_u32", "v_mad_i64_i32")
_CODE_LINE = 32  # bytes of code that one fetch brings


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction of a program.

    Attributes:
        kind: what it is called in tables: mfma, exp, packed, valu, salu, smem, lds, memory, branch, wait, barrier,
            nop, priority, end.
        issue: its issue class.
        port: cycles it holds the vector port. matrix: cycles it holds the matrix pipe.
        latency: of a vector instruction, cycles from issue until another instruction may read its result.
        forward: the same for a matrix instruction that accumulates onto exactly this result.
        reads, writes: register bits as in `footprint`. accumulator: those of a matrix instruction's C.
        argument: of s_nop the extra turns, of s_setprio the level, of an LDS instruction the bytes it moves,
            of a memory instruction the bytes a lane.
        waits: vmcnt and lgkmcnt of an s_waitcnt.
        store: of a memory instruction. atomic: of one that L2 executes. direct: whether it loads to LDS.
        long: whether it has more than 4 bytes. straddles: whether it crosses a line of code that is fetched at once.
    """

    kind: str
    issue: int
    port: int = 0
    matrix: int = 0
    latency: int = 0
    forward: int = 0
    reads: int = 0
    writes: int = 0
    accumulator: int = 0
    argument: int = 0
    waits: tuple[int, int] = (63, 15)
    store: bool = False
    atomic: bool = False
    direct: bool = False
    long: bool = False
    straddles: bool = False


class _Common(TypedDict):
    """What an `Operation` has whatever its kind."""

    reads: int
    writes: int
    straddles: bool
    long: bool


def operation(inst: Instruction, machine: Machine, parameters: Parameters) -> Operation:
    """The costs of an instruction."""
    straddles = inst.address // _CODE_LINE != (inst.next - 1) // _CODE_LINE
    name, form = inst.name, inst.form
    if form == "SOPP" or name in JUMPS:
        return _control(inst, straddles)
    touched = footprint(inst, machine)
    common: _Common = {
        "reads": touched.reads, "writes": touched.writes, "straddles": straddles, "long": inst.size > 4,
    }  # fmt: skip
    if form == "SMEM":
        return Operation("smem", SCALAR, **common)
    if form == "DS":
        return Operation("lds", LDS, argument=64 * _lds_bytes(inst), store=not _returns(name), **common)
    if form in ("FLAT", "GLOBAL", "SCRATCH", "MUBUF"):
        direct = "_lds_" in name or bool(inst.get("lds"))
        store = "_load_" not in name
        atomic = "_atomic_" in name
        return Operation(
            "memory", MEMORY, argument=_lane_bytes(name), store=store, atomic=atomic, direct=direct, **common
        )
    if form.startswith("S"):
        return Operation("salu", SCALAR, **common)
    return _vector(inst, machine, parameters, common)


def _control(inst: Instruction, straddles: bool) -> Operation:
    name, value = inst.name, inst.get("simm16")
    if name == "s_waitcnt":
        return Operation("wait", INTERNAL, waits=wait_counts(value), straddles=straddles)
    if name == "s_nop":
        return Operation("nop", INTERNAL, argument=value & 15)
    if name == "s_sleep":
        return Operation("nop", INTERNAL, argument=16 * (value & 127))
    if name == "s_setprio":
        return Operation("priority", INTERNAL, argument=value & 3)
    if name == "s_barrier":
        return Operation("barrier", INTERNAL)
    if name == "s_endpgm":
        return Operation("end", INTERNAL)
    if name in BRANCHES or name in JUMPS:
        return Operation("branch", BRANCH)
    return Operation("salu", SCALAR)


def _vector(inst: Instruction, machine: Machine, parameters: Parameters, common: _Common) -> Operation:
    name = inst.name
    count = passes(name, machine.arch) if inst.form == "VOP3P_MFMA" else 0
    if count:
        shape = matrix_shape(name, machine.arch)
        c = 0
        if inst.get("src2") >= VGPR:
            size = register_counts(shape)[2]  # type: ignore[arg-type]  # what has passes has a shape
            c = vector_bits(machine, inst.get("src2") - VGPR, size, bool(inst.get("acc_cd")))
        turn = parameters.turn
        return Operation(
            "mfma", VALU, port=turn, matrix=turn * count, latency=turn * wait_states(name, machine.arch)[0],
            forward=turn * count, accumulator=c, **common,
        )  # fmt: skip
    port, kind = parameters.valu, "valu"
    if name.startswith(TRANSCENDENTAL):
        port, kind = parameters.transcendental, "exp"
    elif name.startswith(_QUARTER):
        port = parameters.quarter_rate
    elif name in _PACKED:
        kind = "packed"
    latency = max(port, parameters.valu_latency)
    return Operation(kind, VALU, port=port, latency=latency, forward=latency, **common)


_SUFFIXES = (("dwordx4", 16), ("dwordx3", 12), ("dwordx2", 8), ("_x2", 8), ("short", 2), ("byte", 1))


def _lane_bytes(name: str) -> int:
    return next((size for text, size in _SUFFIXES if text in name), 4)


def _returns(name: str) -> bool:
    return name.startswith(("ds_read", "ds_bpermute", "ds_permute", "ds_swizzle"))


def _lds_bytes(inst: Instruction) -> int:
    """Bytes a lane that an LDS instruction moves through its port."""
    words = inst.sizes.get("vdst", 0) if _returns(inst.name) else inst.sizes.get("data0", 0)
    if inst.name.startswith(("ds_write2", "ds_wrxchg2")):
        words += inst.sizes.get("data1", 0)
    return 4 * max(1, words)


def operations(machine: Machine, parameters: Parameters) -> list[Operation]:
    """Of every instruction of a kernel, by index."""
    return [operation(inst, machine, parameters) for inst in machine.instructions]
