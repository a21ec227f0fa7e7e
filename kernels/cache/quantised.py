"""New rows of a cache of 8 bits: scales that a caller gives, or those of each row, which are written beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly

from ..work.key_scales import by_key
from ..work.vectorized import VectorPages

LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-126  # a row of zeros has one too, and no value is divided by 0


@dataclass(frozen=True)
class Quantised:
    """How a block's threads store rows to `cache`, (entries, rows, Hkv, D) e4m3; a thread has `vector` elements.

    `scales`: (B, Hkv) f32, None for 1, or (entries, rows, Hkv), which get each row's largest magnitude over
    `LARGEST`. `lanes` threads next to each other have a row. `pages`: where the cache's elements are, if its rows are
    not in one piece.
    """

    cache: fly.Tensor
    scales: fly.Tensor | None
    lanes: int
    vector: int
    maxima: fly.SharedMemory | None
    pages: VectorPages | None = None

    @staticmethod
    def room(scales: tuple[fly.Tensor | None, ...], threads: int) -> fly.SharedMemory | None:
        """`maxima` of a block whose rows have any of these scales: what its threads tell each other of their rows."""
        return fly.SharedMemory("maxima", "f32", threads) if any(map(by_key, scales)) else None

    def store(
        self,
        piece: Callable[[], fly.Value],
        exists: fly.Value,
        head: tuple[Any, Any],
        target: Callable[[], tuple[fly.Value, fly.Value, fly.Value]],
        column: fly.Value,
    ) -> None:
        """The thread's part of a row, which begins at `column`, if it `exists`; called by all threads of the block.

        `head`: the sequence and key head that the row is of; `target()`: (entry, row, whether the cache has it).
        """
        zeros = fly.broadcast(fly.f32(0.0), self.vector)
        values = fly.cond(exists, lambda: piece().to(fly.f32), lambda: zeros)
        own = by_key(self.scales)
        largest = self._row_maximum(values) if own else None
        with fly.when(exists):
            entry, row, writable = target()
            with fly.when(writable):
                if largest is not None:
                    scale = largest * (1 / LARGEST)
                else:
                    scale = fly.f32(1.0) if self.scales is None else self.scales.load(*head)
                scale = fly.maximum(scale, LEAST_SCALE)
                narrow = (values / scale).to(self.cache.dtype)
                if self.pages is not None:
                    self.pages.store(narrow, (entry, row, head[1]), column)
                else:
                    place = self.cache.at(entry, row, head[1], column)
                    fly.store(narrow, place, align=min(self.vector, self.cache.alignment))
                if own:
                    assert self.scales is not None
                    with fly.when(column == 0):
                        self.scales.store(scale, entry, row, head[1])

    def _row_maximum(self, values: fly.Value) -> fly.Value:
        """The largest magnitude of each row, in all of its threads."""
        thread, maxima = fly.thread_id.x, self.maxima
        assert maxima is not None
        maxima.store(fly.reduce_max(fly.absolute(values)), thread)
        fly.barrier()
        first = thread - thread % self.lanes
        found = [maxima.load(fly.minimum(first + i, maxima.count - 1)) for i in range(self.lanes)]
        while len(found) > 1:
            found = [
                fly.maximum(*found[i : i + 2]) if i + 1 < len(found) else found[i] for i in range(0, len(found), 2)
            ]
        return found[0]
