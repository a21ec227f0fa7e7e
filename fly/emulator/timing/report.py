"""A replay as text, and as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fly.emulator.machine import Machine
from fly.emulator.timing.analysis import hot_instructions, idle_matrix, matrix_flop, regions
from fly.emulator.timing.compute_unit import REASONS, SIMDS, Event, Result
from fly.emulator.timing.instructions import Operation
from fly.errors import ArgumentError

Operations = Sequence[Operation]
_SHOWN = 0.003  # of the time, below which a row is left out


def summary(machine: Machine, operations: Operations, result: Result) -> str:
    """Cycles, units, and what each wave waited for."""
    p, cycles = result.parameters, result.cycles
    flop = matrix_flop(machine, result.events)
    rate = flop / cycles * p.clock * p.compute_units / 1e3
    groups = f"{len(result.workgroups)} workgroup(s) of {machine.waves_per_group} waves"
    lines = [
        f"{machine.kernel.name} on {p.arch}: {groups}, "
        f"{result.issued:,} wave-instructions in {cycles:,} cycles of one compute unit",
        f"  matrix pipe {_share(sum(result.matrix), SIMDS * cycles)}, vector port "
        f"{_share(sum(result.port), SIMDS * cycles)}, LDS banks {_share(result.lds, cycles)} busy; "
        f"all {p.compute_units} compute units so at {p.clock} GHz: {rate:,.0f} TFLOP/s on the matrix pipes",
        "  cache lines loaded: " + ", ".join(f"{count:,} from {name}" for name, count in result.lines.items()),
        "",
        "waits, share of each wave's time:",
    ]
    total = sum(result.lifetimes)
    waits = [sum(stalls) for stalls in zip(*result.stalls)]
    shown = [i for i, n in enumerate(waits) if n > _SHOWN * total]
    lines.append("  wave SIMD  issues " + " ".join(f"{REASONS[i]:>13}" for i in shown))
    for wave, (stalls, life) in enumerate(zip(result.stalls, result.lifetimes)):
        if wave == 16:
            lines.append(f"  … {len(result.stalls) - wave} more")
            break
        rest = _share(life - sum(stalls), life)
        columns = " ".join(f"{_share(stalls[i], life):>13}" for i in shown)
        lines.append(f"  {wave:>4} {result.simd_of[wave]:>4} {rest:>7} {columns}")
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def region_table(machine: Machine, operations: Operations, result: Result) -> str:
    """What happens between barriers, for stretches that take at least one percent of the time."""
    found = regions(machine, operations, result.events, result.parameters.turn)
    total = sum(r.cycles + r.at_barrier for r in found)
    lines = [
        "between barriers, a wave's average cycles at each pass (all but the wait at the closing barrier; that):"
    ]
    for r in found:
        if r.cycles + r.at_barrier < total / 100:
            continue
        issued = ", ".join(f"{n / r.passes:.0f} {kind}" for kind, n in r.issued.most_common() if n >= r.passes)
        waited = ", ".join(
            f"{reason} {n / r.passes:.0f}" for reason, n in r.waited.most_common(4) if n > _SHOWN * total
        )
        first, last = machine.instructions[r.first].address, machine.instructions[r.last].address
        lines.append(
            f"  {first:#07x}-{last:#07x} {r.passes:>6} passes {r.cycles / r.passes:>6.0f} + "
            f"{r.at_barrier / r.passes:.0f}  {issued}\n{'':>10}waits: {waited or 'none'}"
        )
    return "\n".join(lines)


def hot_table(machine: Machine, result: Result, most: int = 12) -> str:
    """The instructions that waves waited at longest."""
    total = sum(result.lifetimes)
    lines = ["instructions waited at longest:"]
    for hot in hot_instructions(result.events, most):
        inst = machine.instructions[hot.index]
        lines.append(
            f"  {inst.address:#07x} {_share(hot.waited, total):>6} {hot.waited / hot.count:>6.0f} each  "
            f"{hot.reason:<13} {inst.text}"
        )
    return "\n".join(lines)


def idle_table(result: Result, operations: Operations, most: int = 10) -> str:
    """What the waves of a SIMD did while its matrix pipe was idle."""
    found = idle_matrix(result, operations)
    lines = [
        f"matrix pipe idle {_share(sum(found.values()), SIMDS * result.cycles)}; the waves of its SIMD meanwhile:"
    ]
    for states, cycles in found.most_common(most):
        lines.append(f"  {_share(cycles, SIMDS * result.cycles):>6}  {' | '.join(states)}")
    return "\n".join(lines)


def report(machine: Machine, operations: Operations, result: Result) -> str:
    """All tables; `result` must have its events."""
    tables = (
        summary(machine, operations, result),
        region_table(machine, operations, result),
        idle_table(result, operations),
        hot_table(machine, result),
    )
    return "\n\n".join(tables)


def duration(op: Operation, turn: int) -> int:
    """Cycles for which an instruction is drawn: its hold on its unit."""
    return max(turn, op.port)


def window(result: Result, cycles: tuple[int, int] | None) -> tuple[int, int]:
    """The cycles to draw: those asked for, or about 12,000 in the middle.

    Raises:
        ArgumentError: an empty range.
    """
    if cycles is None:
        middle = result.cycles // 2
        return max(0, middle - 6000), min(result.cycles, middle + 6000)
    if not 0 <= cycles[0] < cycles[1]:
        raise ArgumentError(f"cycles {cycles[0]}:{cycles[1]}; expected FROM:TO with 0 <= FROM < TO")
    return cycles


def within(events: Sequence[Event], cycles: tuple[int, int]) -> Iterator[Event]:
    """Events that issue in a range of cycles."""
    return (event for event in events if cycles[0] <= event.cycle < cycles[1])


_COLOURS = {
    "mfma": "thread_state_running", "exp": "rail_animation", "packed": "rail_response", "valu": "rail_idle",
    "lds": "thread_state_iowait", "memory": "thread_state_runnable",
}  # fmt: skip


def chrome_trace(
    machine: Machine, operations: Operations, result: Result, cycles: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Trace-event JSON: a process for each SIMD, with its matrix pipe and its waves; one µs is one cycle."""
    turn, chosen = result.parameters.turn, window(result, cycles)
    events: list[dict[str, Any]] = []
    for simd in range(SIMDS):
        events.append({"ph": "M", "pid": simd, "name": "process_name", "args": {"name": f"SIMD {simd}"}})
        events.append({"ph": "M", "pid": simd, "tid": 0, "name": "thread_name", "args": {"name": "matrix pipe"}})
    for wave, simd in enumerate(result.simd_of):
        name = {"name": f"wave {wave}"}
        events.append({"ph": "M", "pid": simd, "tid": wave + 1, "name": "thread_name", "args": name})
    for event in within(result.events, chosen):
        inst, op = machine.instructions[event.index], operations[event.index]
        row = {"ph": "X", "pid": result.simd_of[event.wave], "tid": event.wave + 1}
        if event.waited:
            why = {"name": f"wait: {REASONS[event.reason]}", "cat": "wait", "cname": "grey"}
            events.append({**row, **why, "ts": event.cycle - event.waited, "dur": event.waited})
        args = {"address": f"{inst.address:#x}", "text": inst.text}
        slice_ = {"name": inst.name, "cat": op.kind, "ts": event.cycle, "dur": turn, "args": args}
        if op.kind in _COLOURS:
            slice_["cname"] = _COLOURS[op.kind]
        events.append({**row, **slice_})
        if op.matrix:
            matrix = {"name": f"wave {event.wave}", "cat": "mfma", "args": args}
            events.append({**row, **matrix, "tid": 0, "ts": event.cycle, "dur": op.matrix})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": "1 us = 1 cycle"}}


def write_trace(path: str, trace: dict[str, Any]) -> str:
    """Save a trace; returns a line that tells so.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(trace))
    except OSError as error:
        raise ArgumentError(f"--trace {path!r}: {error.strerror}") from None
    kinds = Counter(event["ph"] for event in trace["traceEvents"])
    return f"wrote {path}: {kinds['X']:,} slices; open it in ui.perfetto.dev or chrome://tracing"
