"""SOPP and program control (CDNA3 ISA, sections 4 and 16.5).

Control instructions set `g.pc` themselves; the scheduler tells them apart by `CONTROL`. A branch whose condition
differs between the waves of a group returns the waves that take it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.decode import VCC, Instruction
from fly.emulator.operands import reader, unknown, write_scalar
from fly.emulator.state import EXEC_PAIR, Group
from fly.errors import EmulatorError

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

_U64 = np.uint64
_CONDITIONS: dict[str, Callable[[Group], Any]] = {
    "s_cbranch_scc0": lambda g: ~g.scc,
    "s_cbranch_scc1": lambda g: g.scc,
    "s_cbranch_vccz": lambda g: g.s64[VCC >> 1] == 0,
    "s_cbranch_vccnz": lambda g: g.s64[VCC >> 1] != 0,
    "s_cbranch_execz": lambda g: g.s64[EXEC_PAIR] == 0,
    "s_cbranch_execnz": lambda g: g.s64[EXEC_PAIR] != 0,
}
BRANCHES = frozenset([*_CONDITIONS, "s_branch"])
JUMPS = frozenset(["s_setpc_b64", "s_swappc_b64", "s_call_b64"])
_NOTHING = frozenset([
    "s_nop", "s_waitcnt", "s_setprio", "s_sleep", "s_sethalt", "s_icache_inv", "s_incperflevel", "s_decperflevel",
    "s_ttracedata", "s_wakeup", "s_set_valu_coexec_mode",
])  # fmt: skip
CONTROL = BRANCHES | JUMPS | _NOTHING | {"s_endpgm", "s_barrier", "s_trap"}
# what ends a straight run of instructions
BREAKS = BRANCHES | JUMPS | {"s_endpgm", "s_barrier"}


def branch_target(inst: Instruction) -> int:
    """Address that a SOPP branch goes to."""
    raw = inst.get("simm16")
    return inst.next + 4 * (raw - 0x10000 if raw & 0x8000 else raw)


def branch_condition(inst: Instruction) -> Callable[[Group], np.ndarray] | None:
    """bool (W, 1) per wave, or None for an unconditional branch."""
    return _CONDITIONS.get(inst.name)


def compile_control(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """Control instructions other than branches, barriers and the end, which the scheduler executes."""
    if inst.name in _NOTHING:
        return lambda g: None
    if inst.name in JUMPS:
        return _jump(inst, machine)
    raise unknown(inst, machine)


def _jump(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    save = write_scalar(inst.get("sdst"), True) if inst.name != "s_setpc_b64" else None
    back = _U64(machine.code.base + inst.next)
    if inst.name == "s_call_b64":
        raw = inst.get("simm16")
        fixed = _U64(machine.code.base + inst.next + 4 * (raw - 0x10000 if raw & 0x8000 else raw))
        target: Callable[[Group], Any] = lambda g: np.full((g.waves, 1), fixed, np.uint64)  # noqa: E731
    else:
        target = reader(machine, inst.get("ssrc0"), "u64")

    def run(g: Group) -> None:
        where = np.array(target(g))
        if save is not None:
            save(g, back)
        if (where != where[0]).any():
            raise EmulatorError(f"{machine.kernel.name}: `{inst.text}`: waves jump to different addresses")
        address = int(where[0, 0]) - machine.code.base
        if address not in machine.index:
            raise EmulatorError(
                f"{machine.kernel.name}: `{inst.text}` at {inst.address:#x} jumps to {address:#x}, outside the kernel"
            )
        g.pc = machine.index[address]

    return run
