"""Checks while a kernel runs: missing waits, uninitialised registers, barriers, matrix hazards; LDS in
`lds_checks`.

Values arrive at once, but every load stays on its counter's queue until an `s_waitcnt` (or the counter's width)
retires it, and touching a register of a queued load is reported. Waves of a group execute the same instructions, so
the queues are kept once for a group and cost one integer test an instruction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fly.emulator import defined, hazards
from fly.emulator.control import JUMPS
from fly.emulator.decode import M0, SGPR_BIT, VCC, Instruction, wait_counts
from fly.emulator.footprint import footprint, scalar_bits
from fly.emulator.lds_checks import LdsShadow
from fly.emulator.report import Report, describe, place
from fly.emulator.spill_checks import SpillShadow, single_bits
from fly.emulator.state import Group, Outstanding
from fly.errors import EmulatorError, EmulatorReportError

if TYPE_CHECKING:
    from fly.emulator.machine import Machine

Run = Callable[[Group], None]
_LIMIT = 64  # distinct findings kept
VM_MAX, LGKM_MAX = 63, 15  # what the counters can hold; issue stalls beyond


@dataclass(frozen=True, eq=False)
class Pending:
    """An operation on a counter's queue: the registers it will write, and the LDS bytes it reads or writes."""

    inst: Instruction
    registers: int
    kind: str  # "vm", "lds", "smem" or "flat"
    lds: tuple[Access, ...] = ()

    def take(self, index: np.ndarray) -> Pending:
        """The part of the waves at `index`."""
        return replace(self, lds=tuple(a.take(index) for a in self.lds)) if self.lds else self

    def join(self, other: Pending) -> Pending:
        """This operation in two groups that merge."""
        lds = tuple(a.join(b) for a, b in zip(self.lds, other.lds))
        return replace(self, registers=self.registers | other.registers, lds=lds)


@dataclass(frozen=True, eq=False)
class Access:
    """LDS bytes that an operation touches: indices int64 (W, 64), bytes a lane, active lanes, direction."""

    index: np.ndarray
    size: int
    mask: np.ndarray
    write: bool

    def take(self, index: np.ndarray) -> Access:
        """The waves at `index`."""
        return Access(self.index[index], self.size, self.mask[index], self.write)

    def join(self, other: Access) -> Access:
        """Concatenation along the waves."""
        return Access(
            np.concatenate([self.index, other.index]), self.size, np.concatenate([self.mask, other.mask]), self.write
        )


def register_names(machine: Machine, bits: int) -> str:
    """Names of the registers in a bit mask, the first few."""
    names: list[str] = []
    while bits and len(names) < 4:
        low = (bits & -bits).bit_length() - 1
        bits &= bits - 1
        if low >= SGPR_BIT:
            code = low - SGPR_BIT
            names.append({VCC: "vcc_lo", VCC + 1: "vcc_hi", 124: "m0"}.get(code, f"s{code}"))
        else:
            acc = low >= machine.accum_offset
            names.append(f"a{low - machine.accum_offset}" if acc else f"v{low}")
    return ", ".join(names) + (", …" if bits else "")


class Checker:
    """The checks of one launch. `finish` raises when anything was found."""

    def __init__(self, machine: Machine, strict_alignment: bool = False):
        self.machine, self.strict_alignment = machine, strict_alignment
        self.reports: list[Report] = []
        self._seen: set[tuple[str, int]] = set()
        self._undefined: dict[int, tuple[Instruction, int]] = {}  # register -> what computed it, from which registers
        self.shadow, self.spills = LdsShadow(self), SpillShadow(self)
        self._accesses: list[Access] = []

    # ---- findings ----

    def report(self, g: Group, inst: Instruction, kind: str, lanes: np.ndarray | None, message: str) -> None:
        """Note a finding; one for each kind and instruction."""
        key = (kind, inst.address)
        if key in self._seen or len(self.reports) >= _LIMIT:
            return
        self._seen.add(key)
        workgroup, wave, lane = place(self.machine, g, lanes)
        text = describe(self.machine, g, inst, kind, lanes, message)
        self.reports.append(
            Report(kind, self.machine.kernel.name, inst.text, inst.address, workgroup, wave, lane, text)
        )

    def finish(self) -> None:
        """Raise with all findings, if any."""
        if self.reports:
            head = f"{len(self.reports)} finding(s) in {self.machine.kernel.name} on {self.machine.arch}:\n"
            raise EmulatorReportError(head + "\n".join(r.text for r in self.reports), tuple(self.reports))

    def fault(self, error: EmulatorError) -> EmulatorReportError:
        """A fault that findings preceded: often what they report is why."""
        head = f"{error}\n{len(self.reports)} finding(s) before that:\n"
        return EmulatorReportError(head + "\n".join(r.text for r in self.reports), tuple(self.reports))

    # ---- hooks of the scheduler ----

    def start(self, workgroups: int) -> None:
        """A new batch of workgroups."""
        self.shadow.start(workgroups)
        self.spills.start()

    def control(self, g: Group, inst: Instruction | None) -> None:
        """A branch; VCC must be defined and not the target of an outstanding load."""
        g.ticks += 1
        if inst is not None and "vcc" in inst.name:
            vcc = scalar_bits(VCC, 2)
            self._defined(g, inst, vcc)
            if g.pending:
                self._check_pending(g, inst, vcc)

    def barrier(self, g: Group, inst: Instruction | None, live: np.ndarray) -> None:
        """Arrival at a barrier; `live` counts the waves of each workgroup that have not ended."""
        g.ticks += 1
        short = live[g.wg] < self.machine.waves_per_group
        if short.any() and inst is not None:
            self.report(
                g, inst, "barrier-divergence", short[:, None],
                "waits at a barrier after other waves of its workgroup have ended",
            )  # fmt: skip
        for entry in (*g.lgkm, *g.vm):
            for access in entry.lds:
                self.shadow.keep_open(g, access)

    def passed(self, g: Group) -> None:
        """A group leaves a barrier; nothing to note, phases live in the group."""

    def end(self, g: Group, inst: Instruction | None, arrived: np.ndarray) -> None:
        """Waves end while others of their workgroup wait at a barrier."""
        stuck = arrived[g.wg] > 0
        if stuck.any() and inst is not None:
            self.report(
                g, inst, "barrier-divergence", stuck[:, None],
                "a wave ends while other waves of its workgroup wait at a barrier",
            )  # fmt: skip

    # ---- instructions ----

    def wrap(self, inst: Instruction, run: Run) -> Run:
        """The instruction with its checks."""
        if inst.name == "s_waitcnt":
            return self._wait(inst)
        if inst.name == "s_nop":
            ticks = (inst.get("simm16") & 15) + 1

            def nop(g: Group) -> None:
                g.ticks += ticks

            return nop
        queue, scratch_load = _queue(inst), inst.name.startswith(("scratch_load", "flat_load"))
        touched = footprint(inst, self.machine)
        reads, writes, computes = touched.reads, touched.writes, _computes(inst)
        needs = reads & ~touched.spills
        parts = touched.parts or ((reads, writes),)
        # results of one queue return in order, so a newer load may name the register of an older one
        both = reads if queue else reads | writes
        before = hazards.before(inst, self, touched)
        after = hazards.after(inst, self, touched)
        spacing, trans = hazards.spacing(inst, self, touched), inst.name.startswith(hazards.TRANSCENDENTAL)
        vector = inst.form.startswith("V")

        def checked(g: Group) -> None:
            g.ticks += 1
            fresh = needs & ~g.written
            if fresh and not computes:
                self._defined(g, inst, fresh)
                fresh = 0
            if g.pending & both:
                self._check_pending(g, inst, both)
            if g.hazard:
                before(g)
            if vector:
                if spacing is not None:
                    spacing(g)
                g.previous, g.last = g.last, (g.ticks, writes, trans)
            run(g)
            if fresh:
                for read, written in parts:
                    self._compute(g, inst, fresh & read, written)
            else:
                g.written |= writes
            if scratch_load:
                self.spills.reloaded(g, inst)
            if after is not None:
                after(g)

        if not queue:
            return checked

        memory = self.machine.memory

        def queued(g: Group) -> None:
            checked(g)
            if memory.unaligned is not None or memory.unwritten is not None:
                self._memory_findings(g, inst)
            entry = Pending(inst, writes, queue, tuple(self._accesses))
            self._accesses = []
            self._issue(g, entry)

        return queued

    def _compute(self, g: Group, inst: Instruction, bits: int, writes: int) -> None:
        """Results of undefined operands are undefined too.

        Compilers compute from registers that one of the paths to here has not written, where no use of the result
        lies on that path; so only what leaves the registers is reported: addresses, stored data, control flow.
        """
        missing, waves = defined.undefined(g, bits)
        if not missing:
            g.written |= writes
            return
        defined.spread(g, writes, waves)
        self.made(writes, inst, missing)

    def made(self, writes: int, inst: Instruction, missing: int) -> None:
        """Remember that an instruction made undefined registers from undefined ones."""
        for bit in single_bits(writes):
            self._undefined[bit.bit_length() - 1] = inst, missing

    def _defined(self, g: Group, inst: Instruction, bits: int) -> None:
        """Report those of `bits` that some wave has not written."""
        bits, waves = defined.undefined(g, bits)
        if not bits:
            return
        text, source, maker = register_names(self.machine, bits), bits, None
        for _ in range(_LIMIT):  # a loop may feed an undefined register to itself
            made = self._undefined.get((source & -source).bit_length() - 1)
            if made is None:
                break
            maker, source = maker or made[0], made[1]
        if maker is not None:
            text += f", computed by `{maker.text}` at {maker.address:#x} from {register_names(self.machine, source)}"
        self.report(g, inst, "uninitialised-register", waves[:, None], f"reads {text}, which nothing has written")
        g.written |= bits

    def _memory_findings(self, g: Group, inst: Instruction) -> None:
        memory = self.machine.memory
        # global loads and stores may be unaligned on these targets, and LLVM emits such; atomics may not
        if memory.unaligned is not None and (self.strict_alignment or "atomic" in inst.name):
            where = memory.describe(memory.unaligned)
            self.report(g, inst, "unaligned", None, f"address {memory.unaligned:#x} is not aligned: {where}")
        if memory.unwritten is not None:
            where = memory.describe(memory.unwritten)
            self.report(g, inst, "uninitialised-memory", None, f"reads memory that nothing has written: {where}")
        memory.unaligned = memory.unwritten = None

    def _check_pending(self, g: Group, inst: Instruction, bits: int) -> None:
        for entry in (*g.vm, *g.lgkm):
            hit = entry.registers & bits
            if hit:
                counter = "lgkmcnt" if entry.kind in ("lds", "smem") else "vmcnt"
                self.report(
                    g, inst, "missing-wait", None,
                    f"uses {register_names(self.machine, hit)} while `{entry.inst.text}` at "
                    f"{entry.inst.address:#x} is outstanding ({counter})",
                )  # fmt: skip

    # ---- counters ----

    def _issue(self, g: Group, entry: Pending) -> None:
        g.pending |= entry.registers
        if entry.kind in ("vm", "flat"):
            g.vm.append(entry)
            if len(g.vm) > VM_MAX:
                self._retire(g, [g.vm.popleft()])
        if entry.kind in ("lds", "smem", "flat"):
            g.lgkm.append(entry)
            if len(g.lgkm) > LGKM_MAX and not any(e.kind != "lds" for e in g.lgkm):
                self._retire(g, [g.lgkm.popleft()])

    def _wait(self, inst: Instruction) -> Run:
        vm, lgkm = wait_counts(inst.get("simm16"))

        def run(g: Group) -> None:
            g.ticks += 1
            done: list[Outstanding] = []
            while len(g.vm) > vm:
                done.append(g.vm.popleft())
            if lgkm == 0:
                done += g.lgkm
                g.lgkm.clear()
            elif all(e.kind == "lds" for e in g.lgkm):
                # scalar loads return out of order: with one outstanding, only a count of zero says anything
                while len(g.lgkm) > lgkm:
                    done.append(g.lgkm.popleft())
            if done:
                self._retire(g, done)

        return run

    def _retire(self, g: Group, done: list[Outstanding]) -> None:
        left: deque[Outstanding] = deque([*g.vm, *g.lgkm])
        g.pending = 0
        for entry in left:
            g.pending |= entry.registers
        for entry in done:
            for access in entry.lds:
                self.shadow.close(g, access)

    # ---- scratch and LDS ----

    def scratch(self, g: Group, inst: Instruction, index: np.ndarray, size: int, mask: np.ndarray) -> None:
        """A scratch access, before it happens."""
        touched = footprint(inst, self.machine)
        if "_load_" in inst.name:
            self.spills.load(touched, index, mask)
        else:
            self.spills.store(g, touched, index, size, mask)

    def lds(
        self,
        g: Group,
        inst: Instruction,
        index: np.ndarray,
        size: int,
        mask: np.ndarray | None,
        write: bool,
        dma: bool,
    ) -> None:
        """An LDS access, before it happens."""
        active = np.ones((g.waves, 64), bool) if mask is None else np.broadcast_to(mask, (g.waves, 64))
        low = active & ((index & (min(size, 4) - 1)) != 0)
        if low.any():
            self.report(g, inst, "unaligned", low, f"LDS address is not a multiple of {min(size, 4)}")
        access = Access(np.broadcast_to(index, active.shape), size, active, write)
        self._accesses.append(access)
        self.shadow.access(g, inst, access, dma)


def _computes(inst: Instruction) -> bool:
    """Whether all that an instruction does is to compute registers other than EXEC, SCC and M0 from registers."""
    if inst.form.startswith("VOP"):
        return not inst.name.startswith("v_cmpx")
    if inst.form not in ("SOP1", "SOP2", "SOPK") or inst.name.startswith(("s_cmpk", "s_setreg", "s_cbranch")):
        return False
    return inst.get("sdst") < M0 and "saveexec" not in inst.name and inst.name not in JUMPS


def _queue(inst: Instruction) -> str:
    """The counter that an instruction is on: "vm", "lds", "smem", "flat" (both), or empty."""
    if inst.form == "SMEM":
        return "smem" if inst.name.startswith(("s_load", "s_buffer_load", "s_mem")) else ""
    if inst.form == "DS":
        return "lds" if inst.name != "ds_nop" else ""
    if inst.form == "FLAT":
        return "flat"
    if inst.form in ("GLOBAL", "SCRATCH", "MUBUF") and inst.name not in ("buffer_inv", "buffer_wbl2"):
        return "vm"
    return ""
