"""What the backward pass has to know of queries, in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import fly
from fly.backends.nvvm.mbarrier import Position

from .backward import SLOT_ALIGNMENT, slot_bytes


@dataclass(frozen=True)
class Statistics:
    """A number for each query of a tile, beside the tile's slot."""

    memory: fly.Pointer
    numbers: int

    @staticmethod
    def allocate(name: str, numbers: int, stages: int) -> Statistics:
        return Statistics(fly.alloc_shared(name, slot_bytes(numbers) * stages, SLOT_ALIGNMENT), numbers)

    @property
    def bytes(self) -> int:
        """That a copy brings."""
        return 4 * self.numbers

    def at(self, at: Position) -> fly.Pointer:
        """A slot."""
        return self.memory.offset(at.index * slot_bytes(self.numbers))
