"""Wait states behind 8-bit products, counted in assembly: also of builds that no test executes with checks."""

from __future__ import annotations

import re

NEEDED = 20  # behind 16 passes on gfx950, before vector instructions and memory
READERS = ("v_", "ds_", "buffer_", "global_")


def registers(operands: str) -> set[tuple[str, int]]:
    """Vector registers that a line names."""
    found = set()
    for kind, first, last, one in re.findall(r"\b([va])(?:\[(\d+):(\d+)\]|(\d+))", operands):
        found |= {(kind, n) for n in (range(int(first), int(last) + 1) if first else (int(one),))}
    return found


def too_early(isa: str) -> list[str]:
    """What names a product's result before it is there, along lines as they follow each other."""
    code = [line.strip() for line in isa.splitlines()]
    code = [line for line in code if re.match(r"[a-z]+_\w", line)]
    found = []
    for i, line in enumerate(code):
        if "f8f6f4" not in line:
            continue
        result = registers(line.split(",")[0])
        states = 0
        for later in code[i + 1 :]:
            name, _, operands = later.partition(" ")
            if states >= NEEDED:
                break
            if "mfma" not in name and name.startswith(READERS) and registers(operands) & result:
                found.append(f"{later} {states} wait states behind {line}")
                break
            states += int(operands) + 1 if name == "s_nop" else 1
    return found
