"""Dropout of a tile of the Hopper kernel, on weights as WGMMA takes them: pairs of 16 bits in a register.

Random bytes are compared four at a time, right behind the start of the tile's products; what is left for the time
after the softmax is a mask of each pair, which a permutation of bytes makes, and an "and".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import permute_bytes

from ..problem.dropout_tile import HIGH_BITS, Dropout, RandomTile


@dataclass(frozen=True)
class KeptWeights:
    """Which weights of a tile dropout keeps: bit 7 of their bytes in `tile`; `layout`: of the scores."""

    tile: RandomTile
    layout: fly.AccumulatorLayout

    @staticmethod
    def of(dropout: Dropout, layout: fly.AccumulatorLayout, first_query: Any, first_key: Any) -> KeptWeights:
        """Those of a tile whose corner has these positions, multiples of 16; for all lanes of a warp together."""
        return KeptWeights(dropout.kept_bytes(layout, first_query, first_key), layout)

    @property
    def made(self) -> list[fly.Value]:
        """For `wgmma.wait`, so that all words are made before it: f32 that is next to zero."""
        return [(functools.reduce(operator.or_, self.tile.words) & HIGH_BITS).bitcast(fly.f32)]

    def only(self, weights: Sequence[fly.Value]) -> tuple[fly.Value, ...]:
        """Weights of 16 bits, any number a piece, and 0 for those that are not kept."""
        left, found = self._masks(), []
        for piece in weights:
            words = piece.bitcast(fly.i32)
            masks = fly.from_elements([next(left) for _ in range(len(words))])
            found.append((words & masks).bitcast(piece.dtype))
        return tuple(found)

    def _masks(self) -> Iterator[fly.Value]:
        """Of each two neighbours, in the accumulators' order: all bits of the halves whose weight is kept."""
        places = [self.tile.byte(*at) for at in zip(self.layout.value_rows, self.layout.value_columns, strict=True)]
        for (word, low), (_, high) in zip(places[::2], places[1::2], strict=True):
            # bytes `low` and `high` twice each, and of them the highest bit in all bits
            yield permute_bytes(word, word, 0x8888 + 0x11 * low + 0x1100 * high)
