"""Counting instructions in assembly text; loops come from `fly.runtime.inspect`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fly.runtime.inspect import instructions


def opcodes(isa: str) -> tuple[str, ...]:
    """Every opcode of an AMD or PTX kernel, in order."""
    return tuple(opcode for _, opcode in instructions(isa) if opcode)


def count(code: Sequence[str], pattern: str) -> int:
    """How many opcodes match `pattern` as a whole."""
    return sum(re.fullmatch(pattern, opcode) is not None for opcode in code)


def kinds(code: Sequence[str], pattern: str) -> set[str]:
    """The different opcodes that match `pattern` as a whole."""
    return {opcode for opcode in code if re.fullmatch(pattern, opcode)}
