"""What the backward pass has to know of queries, in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import fly
from fly.backends.nvvm.mbarrier import Position

from .backward import SLOT_ALIGNMENT, slot_bytes


@dataclass(frozen=True)
class Statistics:
    """A number for each query of a tile, beside the tile's slot, or its first of `every` so many."""

    memory: fly.Pointer
    numbers: int
    every: int = 1

    @staticmethod
    def allocate(name: str, numbers: int, stages: int, every: int = 1) -> Statistics:
        return Statistics(fly.alloc_shared(name, slot_bytes(numbers) * stages, SLOT_ALIGNMENT), numbers, every)

    @property
    def bytes(self) -> int:
        """That a copy brings."""
        return 4 * self.numbers

    def at(self, at: Position) -> fly.Pointer:
        """A slot."""
        index = at.index if self.every == 1 else at.index // self.every
        return self.memory.offset(index * slot_bytes(self.numbers))
