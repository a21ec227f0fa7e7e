"""Operands that wait in LDS for the lane that stored them, where registers are short: no barrier is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import fly
from fly.ir import memory

BYTES = 16  # of an operand, in each lane


@dataclass(frozen=True)
class OwnOperands:
    """Operands of a block's lanes: `threads` lanes side by side have one, then the next; `first`: the lane's own."""

    first: fly.Pointer
    threads: int
    dtype: fly.DType

    @staticmethod
    def store(name: str, operands: Sequence[fly.Value], threads: int) -> OwnOperands:
        """Put them there, each of `BYTES`."""
        buffer = memory.alloc_shared(name, len(operands) * threads * BYTES)
        made = OwnOperands(buffer.offset(fly.thread_id.x * BYTES), threads, operands[0].dtype)
        for number, operand in enumerate(operands):
            memory.store(operand, made._place(number), align=BYTES)
        return made

    def load(self, number: int) -> fly.Value:
        """One of them, by its place among those that were stored."""
        return memory.load(self._place(number), self.dtype, BYTES // self.dtype.bytes, align=BYTES)

    def _place(self, number: int) -> fly.Pointer:
        return self.first.offset(number * self.threads * BYTES)
