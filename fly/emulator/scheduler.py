"""Execution of a launch: batches of workgroups in lockstep, split where waves part and joined where they meet
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from fly.emulator.control import BRANCHES, BREAKS, JUMPS, branch_condition, branch_target
from fly.emulator.decode import Instruction
from fly.emulator.machine import Machine
from fly.emulator.memory import AccessError
from fly.emulator.state import Group
from fly.errors import EmulatorError

# waves that run in lockstep: enough to amortise Python, few enough for their registers to stay in the cache
BATCH_WAVES = 256
# instructions that one wave may execute before the run is taken for an endless loop
BUDGET = 20_000_000


class Block:
    """A straight run of instructions: the functions to call, then at most one control instruction."""

    __slots__ = ("acquires", "condition", "count", "end", "first", "inst", "kind", "runs", "target")

    def __init__(self, first: int, runs: list[Callable[[Group], None]], end: int, inst: Instruction | None):
        self.first, self.runs, self.end, self.inst = first, runs, end, inst
        self.kind = "fall" if inst is None else inst.name
        self.condition = branch_condition(inst) if inst is not None else None
        self.count = end - first
        self.target = -1
        self.acquires = False  # from other waves: perhaps a turn of a loop that waits for them


class Scheduler:
    """Runs a prepared `Machine`.

    Args:
        machine: prepared for a launch.
        progress: called with the number of finished workgroups after each batch.
        trace: called with (group, instruction) before every instruction, or None.
        budget: instructions a wave may execute.
    """

    def __init__(
        self,
        machine: Machine,
        progress: Callable[[int], None] | None = None,
        trace: Callable[[Group, Instruction], None] | None = None,
        budget: int = BUDGET,
        batch_waves: int = BATCH_WAVES,
    ):
        self.machine, self.progress, self.trace, self.budget = machine, progress, trace, budget
        self.batch_waves = batch_waves
        self.leaders = self._leaders()
        self.blocks: dict[int, Block] = {}
        self.counts: Counter[int] = Counter()  # block start -> wave executions

    def _leaders(self) -> set[int]:
        machine = self.machine
        leaders = set()
        for i, inst in enumerate(machine.instructions):
            if inst.name in BRANCHES:
                target = branch_target(inst)
                if target in machine.index:
                    leaders.add(machine.index[target])
            if inst.name in BREAKS:
                leaders.add(i + 1)
        return leaders

    def block(self, first: int) -> Block:
        """The block that starts at instruction `first`, compiled when first reached."""
        block = self.blocks.get(first)
        if block is not None:
            return block
        machine, runs, i = self.machine, [], first
        inst: Instruction | None = None
        acquires = False
        while True:
            if i >= len(machine.instructions):
                raise EmulatorError(f"{machine.kernel.name}: control runs past the end of the kernel")
            current = machine.instructions[i]
            if current.name in BREAKS:
                inst, i = current, i + 1
                break
            runs.append(self._wrap(i, current))
            acquires = acquires or current.name == "buffer_inv"
            i += 1
            if i in self.leaders:
                break
        block = Block(first, runs, i, inst)
        block.acquires = acquires
        if inst is not None and inst.name in BRANCHES:
            target = branch_target(inst)
            if target not in machine.index:
                raise EmulatorError(
                    f"{machine.kernel.name}: `{inst.text}` branches outside the kernel, to {target:#x}"
                )
            block.target = machine.index[target]
        self.blocks[first] = block
        return block

    def _wrap(self, i: int, inst: Instruction) -> Callable[[Group], None]:
        machine = self.machine
        run = machine.run_of(i)
        if machine.checker is not None:
            run = machine.checker.wrap(inst, run)
        if self.trace is None:
            return run
        trace = self.trace

        def traced(g: Group) -> None:
            trace(g, inst)
            run(g)

        return traced

    def run(self) -> None:
        """Execute the whole grid.

        Raises:
            EmulatorError: a fault, an unknown instruction or an endless loop.
        """
        machine = self.machine
        total = machine.grid[0] * machine.grid[1] * machine.grid[2]
        size = max(1, self.batch_waves // machine.waves_per_group)
        with np.errstate(all="ignore"):
            for first in range(0, total, size):
                count = min(size, total - first)
                self.run_batch(first, count)
                if self.progress is not None:
                    self.progress(count)

    def run_batch(self, first: int, count: int) -> None:
        """Execute workgroups [first, first + count) to their end."""
        machine = self.machine
        group = machine.start_batch(first, count)
        self.live = np.full(count, machine.waves_per_group, np.int64)
        self.arrived = np.zeros(count, np.int64)
        self.generation = np.zeros(count, np.int64)
        self.ready: list[Group] = [group]
        self.blocked: list[Group] = []
        if machine.checker is not None:
            machine.checker.start(count)
        while self.ready or self.blocked:
            if not self.ready:
                self._unblock(force=True)
                continue
            if all(g.acquired for g in self.ready):
                self._unblock(parts=True)
            self._step(self._pick())

    def _pick(self) -> Group:
        """The group that is furthest behind in the program, joined with others at the same place.

        Groups that have just acquired may wait for others, so these come first, and then they go on in turn.
        """
        ready = self.ready
        if len(ready) == 1:
            group = ready.pop()
            group.acquired = False
            return group
        best = min(range(len(ready)), key=lambda i: (ready[i].acquired, not ready[i].acquired and ready[i].pc))
        group = ready.pop(best)
        i = 0
        while i < len(ready):
            if ready[i].pc == group.pc and group.mergeable(ready[i]):
                group = Group.merge(group, ready.pop(i))
            else:
                i += 1
        group.acquired = False
        return group

    def _step(self, g: Group) -> None:
        """Run a group until it ends, blocks, splits, or another group falls behind it."""
        while True:
            block = self.block(g.pc)
            self._straight(g, block)
            self.counts[block.first] += g.waves
            g.clock += block.count
            g.acquired |= block.acquires
            if g.clock > self.budget:
                raise self._endless(g, block)
            kind = block.kind
            if self.trace is not None and block.inst is not None:
                self.trace(g, block.inst)
            if kind == "fall":
                g.pc = block.end
            elif kind == "s_branch":
                if self.machine.checker is not None:
                    self.machine.checker.control(g, block.inst)
                g.pc = block.target
            elif kind in BRANCHES:
                if not self._branch(g, block):
                    return
            elif kind == "s_barrier":
                self._barrier(g, block)
                return
            elif kind == "s_endpgm":
                self._end(g, block)
                return
            elif kind in JUMPS:
                self.machine.run_of(block.end - 1)(g)
            if self.ready or g.acquired:
                self.ready.append(g)
                return

    def _straight(self, g: Group, block: Block) -> None:
        at = 0
        try:
            for at, run in enumerate(block.runs):  # noqa: B007
                run(g)
        except AccessError as error:
            inst = self.machine.instructions[block.first + at]
            raise self.machine.access_fault(g, inst, error) from None

    def _branch(self, g: Group, block: Block) -> bool:
        """Set the program counter; False when the group was split."""
        checker = self.machine.checker
        if checker is not None:
            checker.control(g, block.inst)
        taken = np.asarray(block.condition(g)).reshape(-1)  # type: ignore[misc]
        count = int(np.count_nonzero(taken))
        if count == len(taken):
            g.pc = block.target
        elif count == 0:
            g.pc = block.end
        else:
            a, b = g.take(np.flatnonzero(taken)), g.take(np.flatnonzero(~taken))
            a.pc, b.pc = block.target, block.end
            self.ready += [a, b]
            return False
        return True

    def _barrier(self, g: Group, block: Block) -> None:
        if self.machine.checker is not None:
            self.machine.checker.barrier(g, block.inst, self.live)
        g.pc, g.barrier = block.end, True
        np.add.at(self.arrived, g.wg, 1)
        self.blocked.append(g)
        self._complete(g.wg)
        self._unblock(force=False)

    def _complete(self, workgroups: np.ndarray) -> None:
        done = np.unique(workgroups)
        done = done[(self.arrived[done] == self.live[done]) & (self.live[done] > 0)]
        self.generation[done] += 1
        self.arrived[done] = 0

    def _release(self, g: Group) -> None:
        g.phase += 1
        g.barrier = False
        if self.machine.checker is not None:
            self.machine.checker.passed(g)
        self.ready.append(g)

    def _unblock(self, force: bool = False, parts: bool = False) -> None:
        """Release the groups whose workgroups have all arrived; with `parts` also those waves of a group.

        `force`: with parts, and it is a fault if there is nothing to release.
        """
        parts = parts or force
        waiting, progressed = [], False
        for g in self.blocked:
            free = self.generation[g.wg] > g.phase
            if free.all():
                self._release(g)
                progressed = True
            elif parts and free.any():
                self._release(g.take(np.flatnonzero(free)))
                waiting.append(g.take(np.flatnonzero(~free)))
                progressed = True
            else:
                waiting.append(g)
        self.blocked = waiting
        if force and not progressed:
            g = self.blocked[0]
            raise self.machine.fault(
                g, self.machine.instructions[g.pc - 1], "barrier-divergence", None,
                "waves wait at a barrier that others of their workgroup never reach",
            )  # fmt: skip

    def _end(self, g: Group, block: Block) -> None:
        if self.machine.checker is not None:
            self.machine.checker.end(g, block.inst, self.arrived)
        np.subtract.at(self.live, g.wg, 1)
        self._complete(g.wg)
        self._unblock(force=False)

    def _endless(self, g: Group, block: Block) -> EmulatorError:
        inst = self.machine.instructions[block.first]
        return self.machine.fault(
            g, inst, "endless-loop", None, f"a wave executed more than {self.budget} instructions"
        )

    # ---- statistics ----

    def executed(self) -> int:
        """Wave-instructions executed."""
        return sum(self.blocks[first].count * waves for first, waves in self.counts.items())

    def mix(self) -> Counter[str]:
        """Wave-instructions by name."""
        mix: Counter[str] = Counter()
        for first, waves in self.counts.items():
            for i in range(first, self.blocks[first].end):
                mix[self.machine.instructions[i].name] += waves
        return mix


def describe_mix(mix: Counter[str]) -> dict[str, int]:
    """Counts by class: mfma, exp, valu, salu, lds, memory, wait, control."""
    classes: dict[str, Any] = Counter()
    for name, count in mix.items():
        classes[instruction_class(name)] += count
    return dict(classes)


def instruction_class(name: str) -> str:
    """Coarse class of an instruction name, for tables."""
    if name.startswith(("v_mfma", "v_smfmac")):
        return "mfma"
    if name.startswith("v_exp"):
        return "exp"
    if name.startswith("v_"):
        return "valu"
    if name.startswith("ds_"):
        return "lds"
    if name.startswith(("global_", "buffer_", "flat_", "scratch_", "s_load", "s_buffer_load")):
        return "memory"
    if name in ("s_waitcnt", "s_nop", "s_sleep"):
        return "wait"
    if name in BREAKS or name == "s_setprio":
        return "control"
    return "salu"
