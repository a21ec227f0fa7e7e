"""What `python -m fly inspect` shows: any stage of a kernel, its resources, and what its loops are made of."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from fly.backends.artefact import Artefact

_LABEL = re.compile(r"^(\.?[$\w.]+):")
_BRANCH = re.compile(r"^(?:@!?%\w+\s+)?(?:s_c?branch\w*|bra(?:\.uni)?)\s+(?:\w+,\s*)?([.$\w]+)")
_OPCODE = re.compile(r"^(?:@!?%\w+\s+)?([a-z][\w.:]*)")

# class of an instruction by its opcode: the first pattern that matches
_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("matrix", r"v_mfma|v_smfmac|mma\.|wgmma"),
        ("exp/log/rcp", r"v_(exp|log|rcp|rsq|sqrt)|ex2|lg2|rcp|sqrt"),
        ("LDS/shared load", r"ds_read|ldmatrix|ld\.shared"),
        ("LDS/shared store", r"ds_write|st\.shared|stmatrix"),
        ("LDS lane exchange", r"ds_(swizzle|bpermute|permute)|shfl"),
        ("asynchronous copy", r"cp\.async|.*_load_lds|buffer_load.*lds"),
        ("global load", r"(buffer|global|flat|scratch)_load|ld\.(global|local)"),
        ("global store", r"(buffer|global|flat|scratch)_store|st\.(global|local)"),
        ("wait", r"s_waitcnt|s_nop"),
        ("barrier", r"s_barrier|bar\.|barrier"),
        ("branch", r"s_c?branch|bra|ret|s_endpgm"),
        ("scalar", r"s_"),
        ("vector ALU", r"v_"),
        ("ALU", r"."),
    )
)


@dataclass(frozen=True)
class Loop:
    """One innermost loop: its label and the opcodes of its body in order."""

    label: str
    opcodes: tuple[str, ...]

    @property
    def mix(self) -> dict[str, int]:
        """Instructions per class, most frequent first."""
        return dict(Counter(classify(op) for op in self.opcodes).most_common())


def classify(opcode: str) -> str:
    """The class of an AMD or PTX opcode."""
    return next(name for name, pattern in _CLASSES if pattern.match(opcode))


def instructions(isa: str) -> list[tuple[str, str]]:
    """(label or "", opcode) of every instruction line; a label line has an empty opcode."""
    result: list[tuple[str, str]] = []
    for raw in isa.splitlines():
        line = re.sub(r"(//|;).*$", "", raw).strip() if not raw.strip().startswith("@") else raw.strip()
        if not line or line.startswith(("{", "}")):
            continue
        if result and line.startswith(".section"):
            break  # metadata follows
        if label := _LABEL.match(line):
            result.append((label.group(1), ""))
        elif not line.startswith(".") and (opcode := _OPCODE.match(line)):
            branch = _BRANCH.match(line)
            result.append((f"->{branch.group(1)}" if branch else "", opcode.group(1)))
    return result


def loops(isa: str) -> list[Loop]:
    """The innermost loops of an assembly text, in program order."""
    code = instructions(isa)
    position: dict[str, int] = {}
    ends: dict[str, int] = {}  # the last branch back to a label closes its loop
    for i, (label, opcode) in enumerate(code):
        if opcode == "":
            position[label] = i
        elif label.startswith("->") and label[2:] in position:
            ends[label[2:]] = i
    found = [(position[label], end, label) for label, end in ends.items()]
    inner = [
        (a, b, name) for a, b, name in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d, _ in found)
    ]
    return [Loop(name, tuple(op for _, op in code[a : b + 1] if op)) for a, b, name in sorted(inner)]


def resources_report(artefact: Artefact) -> str:
    """Registers, memory, occupancy, and the instruction mix of each innermost loop, for people."""
    r = artefact.resources
    rows = {
        "kernel": artefact.kernel,
        "target": artefact.target,
        "block": " x ".join(map(str, artefact.block)),
        "registers": r.registers,
        "accumulator registers": r.accum_registers,
        "scalar registers": r.scalar_registers,
        "spills": r.spills,
        "scratch bytes": r.scratch_bytes,
        "shared bytes": r.shared_bytes,
        "waves per SIMD": r.occupancy,
        "code bytes": len(artefact.binary),
    }
    lines = [f"{name:<22} {'unknown' if value is None else value}" for name, value in rows.items()]
    for loop in loops(artefact.isa):
        lines.append(f"\nloop {loop.label}: {len(loop.opcodes)} instructions")
        lines += [f"  {count:>5}  {name}" for name, count in loop.mix.items()]
    seconds = {k.removeprefix("seconds: "): v for k, v in artefact.metadata.items() if k.startswith("seconds: ")}
    if seconds:
        lines.append("\nseconds of compiling")
        lines += [f"  {value:>8}  {stage}" for stage, value in seconds.items()]
    return "\n".join(lines)
