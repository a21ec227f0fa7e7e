"""One compute unit, cycle by cycle: waves of recorded instructions on four SIMDs that share LDS and memory.

A SIMD has a turn every 4 cycles. In a turn each issue class takes at most one instruction, of the wave with the
highest priority whose next instruction is ready, the oldest where priorities are equal; a wave issues one, and all of
its own in order. A turn in which nothing can happen is skipped, so time advances from event to event.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fly.emulator.timing.figures import Parameters
from fly.emulator.timing.instructions import MEMORY, VALU, Operation
from fly.emulator.timing.record import Trace, WaveTrace
from fly.emulator.timing.units import Lds, MemoryPath

_NEVER = 1 << 62
SIMDS = 4

# Why a wave did not issue. The first ones are its own doing, the others wait for a unit that a wave uses.
REASONS = (
    "branch", "dependency", "vmcnt", "lgkmcnt", "barrier", "counter full", "nop", "matrix pipe", "vector port",
    "packed f32", "memory queue", "arbitration",
)  # fmt: skip
(BRANCHED, DEPENDENCY, VMCNT, LGKMCNT, BARRIER, COUNTER, NOP, MATRIX, PORT, PACKED, QUEUE, LOST) = range(len(REASONS))


@dataclass(slots=True)
class Event:
    """An instruction's issue: which wave, which instruction, when; and the cycles it had waited, and why."""

    wave: int
    index: int
    cycle: int
    waited: int
    reason: int


class Wave:
    """A resident wave: where it is in its trace, and what its next instruction waits for."""

    __slots__ = (
        "age", "at", "base", "blocked", "code", "extra", "group", "last", "lgkm", "number", "op", "pending",
        "priority", "ready", "reason", "simd", "stalls", "started", "vm",
    )  # fmt: skip
    op: Operation

    def __init__(self, trace: WaveTrace, number: int, group: Workgroup, simd: int, start: int):
        self.code, self.extra = trace.code, trace.extra
        self.number, self.group, self.simd, self.started = number, group, simd, start
        self.at, self.priority, self.age = 0, 0, number
        self.ready = self.base = start
        self.reason = BRANCHED
        self.blocked: int | None = None  # the unit that last refused its next instruction
        self.last = -1  # when it issued its last one
        self.pending: list[tuple[int, int, int]] = []  # registers, ready, ready for forwarding
        self.vm: deque[int] = deque()  # completion of outstanding operations, ascending
        self.lgkm: deque[int] = deque()
        self.stalls = [0] * len(REASONS)


@dataclass
class Workgroup:
    """Waves that share barriers."""

    number: int
    start: int
    live: int
    arrived: list[Wave] = field(default_factory=list)
    end: int = 0


@dataclass
class Result:
    """What a replay found.

    Attributes:
        cycles: from the start of the first workgroup to the end of the last.
        workgroups: (start, end) of each, in cycles.
        matrix: cycles that the matrix pipe of each SIMD was busy. port: the same of the vector ports.
        lds: cycles that the banks were busy.
        lines: cache lines loaded, by where they came from.
        stalls: of each wave, cycles by reason. lifetimes: of each wave, cycles from start to end.
        simd_of: the SIMD of each wave.
        events: every issue in order, where they were asked for.
        issued: wave-instructions.
    """

    parameters: Parameters
    cycles: int
    workgroups: list[tuple[int, int]]
    matrix: list[int]
    port: list[int]
    lds: int
    lines: dict[str, int]
    stalls: list[list[int]]
    lifetimes: list[int]
    simd_of: list[int]
    events: list[Event]
    issued: int

    @property
    def matrix_utilisation(self) -> float:
        """Share of all SIMD cycles in which a matrix instruction executed."""
        return sum(self.matrix) / (SIMDS * self.cycles) if self.cycles else 0.0


class ComputeUnit:
    """Replays workgroups.

    Args:
        operations: of the kernel, by instruction index.
        resident: workgroups that are on the CU at once; the next one starts when one ends.
        cold: see `MemoryPath`.
        keep: whether every issue is noted in `Result.events`.
    """

    def __init__(
        self,
        parameters: Parameters,
        operations: Sequence[Operation],
        lines: Sequence[tuple[int, ...]],
        resident: int = 1,
        cold: int = 16,
        keep: bool = False,
    ):
        self.parameters, self.operations, self.line_sets = parameters, operations, lines
        self.resident, self.keep = resident, keep
        self.lds, self.memory = Lds(parameters), MemoryPath(parameters, cold)
        self.simds: list[list[Wave]] = [[] for _ in range(SIMDS)]
        self.port_free, self.matrix_free = [0] * SIMDS, [0] * SIMDS
        self.drained = [-_NEVER] * SIMDS  # from when packed arithmetic may start
        self.matrix, self.port = [0] * SIMDS, [0] * SIMDS
        self.waves: list[Wave] = []
        self.groups: list[Workgroup] = []
        self.ends: list[int] = []
        self.events: list[Event] = []
        self.issued = 0
        self.turns: list[tuple[int, int]] = []
        self.next_turn = [_NEVER] * SIMDS

    # ---- workgroups ----

    def run(self, workgroups: Sequence[Sequence[WaveTrace]]) -> Result:
        """Replay workgroups, `resident` at a time, to their end."""
        self.waiting = deque(workgroups)
        for _ in range(min(self.resident, len(workgroups))):
            self._admit(0)
        turns, due = self.turns, self.next_turn
        while turns:
            now, simd = heapq.heappop(turns)
            if due[simd] == now:
                due[simd] = _NEVER
                self._turn(now, simd)
        return Result(
            self.parameters, max(g.end for g in self.groups), [(g.start, g.end) for g in self.groups], self.matrix,
            self.port, self.lds.busy, dict(self.memory.lines), [w.stalls for w in self.waves],
            [end - w.started for w, end in zip(self.waves, self.ends)], [w.simd for w in self.waves],
            self.events, self.issued,
        )  # fmt: skip

    def _admit(self, now: int) -> None:
        traces = self.waiting.popleft()
        start = now + (self.parameters.workgroup_start if now else 0)
        group = Workgroup(len(self.groups), start, len(traces))
        self.groups.append(group)
        for i, trace in enumerate(traces):
            # wave i goes to SIMD i % 4; a group that does not fill all four starts behind the one before
            simd = min(range(SIMDS), key=lambda s: (len(self.simds[s]), (s - i) % SIMDS))
            wave = Wave(trace, len(self.waves), group, simd, start)
            self.waves.append(wave)
            self.ends.append(start)
            self.simds[simd].append(wave)
            wave.op = self.operations[trace.code[0]]
            self._wake(simd, start)

    def _wake(self, simd: int, cycle: int) -> None:
        """Give a SIMD a turn at `cycle`, or as soon afterwards as it has one."""
        turn = self.parameters.turn
        cycle += (simd - cycle) % turn
        if cycle < self.next_turn[simd]:
            self.next_turn[simd] = cycle
            heapq.heappush(self.turns, (cycle, simd))

    # ---- a turn ----

    def _turn(self, now: int, simd: int) -> None:
        used, soonest = 0, _NEVER
        for wave in tuple(self.simds[simd]):
            ready = wave.ready
            if ready <= now:
                op = wave.op
                ready = self._unit_free(op, now, simd, wave)
                if ready <= now:
                    if used & op.issue:
                        wave.blocked = LOST
                        ready = now + 1
                    else:
                        used |= op.issue
                        self._issue(wave, op, now, simd)
                        ready = wave.ready
            if ready < soonest:
                soonest = ready
        if soonest < _NEVER:
            self._wake(simd, max(soonest, now + 1))

    def _unit_free(self, op: Operation, now: int, simd: int, wave: Wave) -> int:
        """From when the unit that an instruction needs takes it."""
        if op.issue == VALU:
            free = self.port_free[simd]
            if free > now:
                wave.blocked = PORT
                return free
            if op.matrix:
                if (free := self.matrix_free[simd]) > now:
                    wave.blocked = MATRIX
                return free
            if op.kind == "packed":
                if (free := self.drained[simd]) > now:
                    wave.blocked = PACKED
                return free
            return 0
        if op.issue == MEMORY:
            free = self.memory.blocked_until(now)
            if free > now:
                wave.blocked = QUEUE
            return free
        return 0

    def _issue(self, wave: Wave, op: Operation, now: int, simd: int) -> None:
        p = self.parameters
        at = wave.at
        waited, reason = now - wave.base, wave.reason
        if waited > 0:
            # its own doing up to `ready`, then a unit's; without one, the rest is the way to the next turn
            unit = wave.blocked
            if unit is None:
                wave.stalls[reason] += waited
            else:
                blocked = now - wave.ready
                wave.stalls[reason] += waited - blocked
                wave.stalls[unit] += blocked
                if 2 * blocked > waited:
                    reason = unit
        if self.keep:
            self.events.append(Event(wave.number, wave.code[at], now, waited, reason))
        self.issued += 1
        wave.at = at + 1
        base = now + p.turn
        kind = op.kind
        if op.issue == VALU:
            self._vector(wave, op, now, simd)
        elif kind == "lds":
            done = self.lds.access(now + p.turn, simd, wave.extra[at], op.argument, op.store)
            wave.lgkm.append(max(done, wave.lgkm[-1]) if wave.lgkm else done)
        elif kind == "memory":
            self._memory(wave, op, now, self.line_sets[wave.extra[at]])
        elif kind == "smem":
            done = now + p.scalar_latency
            wave.lgkm.append(max(done, wave.lgkm[-1]) if wave.lgkm else done)
        elif kind == "priority":
            wave.priority = op.argument
            self.simds[simd].sort(key=lambda w: (-w.priority, w.age))
        elif kind == "barrier":
            self._arrive(wave, base)
            return
        elif kind == "end":
            self._end(wave, base)
            return
        self._next(wave, op, at, base)

    def _vector(self, wave: Wave, op: Operation, now: int, simd: int) -> None:
        p = self.parameters
        self.port_free[simd] = now + op.port
        self.port[simd] += op.port
        if op.matrix:
            end = now + op.matrix
            self.matrix_free[simd] = end
            self.matrix[simd] += op.matrix
            self.drained[simd] = end + p.packed_drain
        if op.latency > p.turn:
            wave.pending.append((op.writes, now + op.latency, now + op.forward))

    def _memory(self, wave: Wave, op: Operation, now: int, lines: tuple[int, ...]) -> None:
        if op.atomic:
            done = self.memory.atomic(now, lines, op.argument)
        elif op.store:
            done = self.memory.store(now, lines, op.argument)
        else:
            done = self.memory.load(now, lines, op.argument)
            if op.direct:
                done = self.lds.deposit(now, done, 64 * op.argument)
        wave.vm.append(max(done, wave.vm[-1]) if wave.vm else done)

    # ---- what a wave's next instruction waits for ----

    def _next(self, wave: Wave, done: Operation, at: int, base: int) -> None:
        """Make the following instruction the wave's next; `base` is when it could issue without waiting."""
        p = self.parameters
        op = wave.op = self.operations[wave.code[at + 1]]
        wave.base = base
        ready, reason = base, LOST
        if done.kind == "branch":
            taken = wave.code[at + 1] != wave.code[at] + 1
            ready, reason = base - p.turn + (p.branch_taken if taken else p.branch_not_taken), BRANCHED
        elif done.kind == "nop":
            ready, reason = base + p.turn * done.argument, NOP
        elif op.straddles and done.long and wave.last == base - p.turn - p.turn:
            # an unbroken stream of long instructions: the rest of this one is not there yet
            ready, reason = base + p.straddle, BRANCHED
        wave.last = base - p.turn
        if wave.pending:
            ready, reason = self._dependencies(wave, op, base, ready, reason)
        if op.kind == "wait":
            vm, lgkm = op.waits
            for queue, limit, why in ((wave.vm, vm, VMCNT), (wave.lgkm, lgkm, LGKMCNT)):
                if len(queue) > limit and queue[-1 - limit] > ready:
                    ready, reason = queue[-1 - limit], why
                while queue and queue[0] <= ready:
                    queue.popleft()
        elif op.kind in ("lds", "smem", "memory"):
            queue, limit = (wave.vm, p.vm_limit) if op.kind == "memory" else (wave.lgkm, p.lgkm_limit)
            while queue and queue[0] <= ready:
                queue.popleft()
            if len(queue) >= limit:
                ready, reason = max(ready, queue[-limit]), COUNTER
        wave.ready, wave.reason, wave.blocked = ready, reason, None

    @staticmethod
    def _dependencies(wave: Wave, op: Operation, base: int, ready: int, reason: int) -> tuple[int, int]:
        live = [entry for entry in wave.pending if entry[1] > base]
        wave.pending = live
        # matrix instructions end in the order of issue, so one may overwrite another's result
        touched = op.reads if op.matrix else op.reads | op.writes
        for registers, when, forwarded in live:
            if registers & touched:
                if registers == op.accumulator:
                    when = forwarded
                if when > ready:
                    ready, reason = when, DEPENDENCY
        return ready, reason

    # ---- barriers and ends ----

    def _arrive(self, wave: Wave, base: int) -> None:
        wave.base, wave.ready = base, _NEVER
        wave.group.arrived.append(wave)
        self._release(wave.group, base)

    def _release(self, group: Workgroup, base: int) -> None:
        if not group.live or len(group.arrived) < group.live:
            return
        release = base - self.parameters.turn + max(self.parameters.barrier_release, self.parameters.turn)
        waves, group.arrived = group.arrived, []
        for wave in waves:
            self._next(wave, self.operations[wave.code[wave.at - 1]], wave.at - 1, wave.base)
            if release > wave.ready:
                wave.ready, wave.reason = release, BARRIER
            self._wake(wave.simd, wave.ready)

    def _end(self, wave: Wave, base: int) -> None:
        self.simds[wave.simd].remove(wave)
        self.ends[wave.number] = base
        wave.ready = _NEVER
        group = wave.group
        group.live -= 1
        self._release(group, base)
        if not group.live:
            group.end = base
            if self.waiting:
                self._admit(base)


def replay(
    trace: Trace,
    operations: Sequence[Operation],
    parameters: Parameters,
    workgroups: Sequence[int] | None = None,
    resident: int = 1,
    cold: int = 16,
    keep: bool = False,
) -> Result:
    """Run recorded workgroups (all of the trace by default) on one compute unit; see `ComputeUnit`."""
    chosen = [trace.workgroups[n] for n in (trace.workgroups if workgroups is None else workgroups)]
    unit = ComputeUnit(parameters, operations, trace.lines, resident, cold, keep)
    return unit.run(chosen)
