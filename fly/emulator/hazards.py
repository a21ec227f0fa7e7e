"""Wait states that software leaves behind matrix and vector instructions (CDNA3 ISA 4.5; LLVM's hazard rules).

A result of an instruction of n passes may be read by the vector ALU or memory, overwritten, or used as A or B of
another matrix instruction after n + 3 wait states on gfx940-family parts and n + 4 on gfx950 (n + 3 for 2 passes;
f32 matrix instructions: n + 2); as a C that is not exactly the result after two fewer. A C that is the whole result
of the same size is forwarded. Every instruction counts one wait state, `s_nop k` counts k + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fly.emulator.decode import SGPR_BIT, VGPR, Instruction
from fly.emulator.footprint import Footprint, vector_bits
from fly.emulator.mfma import MIXED, matrix_shape, register_counts

if TYPE_CHECKING:
    from fly.emulator.checks import Checker
    from fly.emulator.state import Group

# (rows, blocks) -> (passes of f32 and of f8f6f4 with 8-bit types, passes of other 8- and 16-bit types)
_PASSES = {(32, 1): (16, 8), (16, 1): (8, 4), (32, 2): (16, 16), (16, 4): (8, 8), (4, 16): (2, 2)}


def passes(name: str, arch: str) -> int:
    """Passes of 4 cycles of a dense matrix instruction; 0 for a name that is none."""
    shape = matrix_shape(name, arch)
    if shape is None:
        return 0
    # of 4 and 6 bits half as many
    return _PASSES[shape.m, shape.blocks][0 if shape.a == "f32" or name.endswith(MIXED) else 1]


def wait_states(name: str, arch: str) -> tuple[int, int]:
    """(wait states before vector, memory or A/B use; before use as an overlapping C)."""
    count = passes(name, arch)
    shape = matrix_shape(name, arch)
    if shape is not None and shape.a == "f32":
        return count + 2, count
    extra = int(arch == "gfx950" and count != 2)
    return count + 3 + extra, count + 1 + extra


TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_SWAPS = ("v_permlane16_swap_b32", "v_permlane32_swap_b32")
_LANE_READS = ("v_readlane_b32", "v_readfirstlane_b32")
_VECTOR = (1 << SGPR_BIT) - 1


def spacing(inst: Instruction, checker: Checker, touched: Footprint) -> Callable[[Group], None] | None:
    """Wait states between two vector ALU instructions that gfx940-family parts leave to software, or None.

    A scalar register or VCC written by the vector ALU and read by it: 2; a register that a permlane swap takes: 2;
    one that a lane read takes: 1; a transcendental's result in any other vector instruction: 1.
    """
    if not inst.form.startswith("V"):
        return None
    far = touched.reads & ~_VECTOR
    if inst.name in _SWAPS:
        far |= touched.reads & _VECTOR
    near = touched.reads & _VECTOR if inst.name in _LANE_READS else 0
    plain = 0 if inst.name.startswith(TRANSCENDENTAL) else touched.reads & _VECTOR
    if not (far or near or plain):
        return None

    def test(g: Group) -> None:
        now = g.ticks - 1
        for tick, bits, transcendental in (g.last, g.previous):
            gap = now - tick
            if gap >= 2:
                return
            late = 2 - gap if bits & far else 0
            if not late and gap < 1 and (bits & near or (transcendental and bits & plain)):
                late = 1
            if late:
                checker.report(
                    g, inst, "vector-hazard", None,
                    f"needs {late} more wait state(s) behind the vector instruction whose result it reads",
                )  # fmt: skip

    return test


@dataclass(frozen=True)
class InFlight:
    """A matrix result that is not ready: its registers, and the ticks from which uses are safe."""

    inst: Instruction
    registers: int
    ready: int
    ready_c: int

    def shifted(self, ticks: int) -> InFlight:
        """The same, on a clock that differs by `ticks`."""
        return replace(self, ready=self.ready + ticks, ready_c=self.ready_c + ticks)


def before(inst: Instruction, checker: Checker, touched: Footprint) -> Callable[[Group], None]:
    """Test of an instruction against the matrix results in flight; also drops the finished ones."""
    bits = touched.reads | touched.writes
    machine, is_matrix = checker.machine, inst.form == "VOP3P_MFMA" and passes(inst.name, checker.machine.arch) > 0
    inputs = c_bits = 0
    if is_matrix:
        shape = matrix_shape(inst.name, machine.arch)
        assert shape is not None
        a, b, d = register_counts(shape)
        acc = inst.get("acc")
        inputs = vector_bits(machine, inst.get("src0") - VGPR, a, bool(acc & 1)) | vector_bits(
            machine, inst.get("src1") - VGPR, b, bool(acc & 2)
        )
        if inst.get("src2") >= VGPR:
            c_bits = vector_bits(machine, inst.get("src2") - VGPR, d, bool(inst.get("acc_cd")))

    def test(g: Group) -> None:
        # the instruction itself has been counted already
        now = g.ticks - 1
        live = [m for m in g.mfma if m.ready > now]
        if len(live) != len(g.mfma):
            g.mfma = live
            g.hazard = 0
            for m in live:
                g.hazard |= m.registers
        if not g.hazard & bits:
            return
        for m in live:
            if not m.registers & bits:
                continue
            if is_matrix:
                late = m.ready - now if m.registers & inputs else 0
                if m.registers & c_bits and m.registers != c_bits:
                    late = max(late, m.ready_c - now)
            else:
                late = m.ready - now
            if late > 0:
                checker.report(
                    g, inst, "matrix-hazard", None,
                    f"needs {late} more wait state(s) behind `{m.inst.text}` at {m.inst.address:#x}",
                )  # fmt: skip

    return test


def after(inst: Instruction, checker: Checker, touched: Footprint) -> Callable[[Group], None] | None:
    """Note of a matrix result in flight, or None for other instructions."""
    arch = checker.machine.arch
    if inst.form != "VOP3P_MFMA" or not passes(inst.name, arch):
        return None
    use, use_c = wait_states(inst.name, arch)
    writes = touched.writes

    def note(g: Group) -> None:
        g.mfma = [m for m in g.mfma if m.registers & ~writes]
        g.mfma.append(InFlight(inst, writes, g.ticks + use, g.ticks + use_c))
        g.hazard |= writes

    return note
