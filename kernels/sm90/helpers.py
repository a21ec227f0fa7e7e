"""What warps beside the producer and the consumers of a Hopper kernel may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .producer import Buffers
from .schedule import Schedule


class Helper(Protocol):
    """The role of a warpgroup that makes K or V as consumers read them of what the producer loads."""

    @property
    def registers(self) -> int:
        """A thread's."""

    def run(self) -> None:
        """All of the block's tiles."""


HelperOf = Callable[[Schedule, Buffers, Any, int, int], Helper]
"""Of a block: its schedule, its buffers, its options, a named barrier, and the number of the helper."""
