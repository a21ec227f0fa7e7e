"""Dropout of a tile of the Hopper kernel: masks of weights as WGMMA takes them, pairs of 16 bits in a register.

They are made while the tensor cores make the tile's scores, which the lanes would only wait for, and cost one
instruction a pair once the weights are there. Random bytes are compared four at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import permute_bytes

from ..problem.dropout_tile import Dropout


@dataclass(frozen=True)
class KeptPairs:
    """Which weights of a tile dropout keeps: a mask, i32, of each two neighbours, in the accumulators' order."""

    masks: tuple[fly.Value, ...]

    @staticmethod
    def of(dropout: Dropout, layout: fly.AccumulatorLayout, first_query: Any, first_key: Any) -> KeptPairs:
        """Those of a tile whose corner has these positions, multiples of 16; for all lanes of a warp together."""
        tile = dropout.kept_bytes(layout, first_query, first_key)
        places = [tile.byte(*place) for place in zip(layout.value_rows, layout.value_columns, strict=True)]
        pairs = zip(places[::2], places[1::2], strict=True)
        # of a word's bytes the ones that say whether the two are kept, bit 7 of each in all bits of a half
        return KeptPairs(
            tuple(permute_bytes(w, w, 0x8888 + 0x11 * low + 0x1100 * high) for (w, low), (_, high) in pairs)
        )

    @property
    def made(self) -> list[fly.Value]:
        """For `wgmma.wait`, so that all masks are made before it: f32 that is zero, next to zero, or NaN."""
        return [functools.reduce(operator.or_, self.masks).bitcast(fly.f32)]

    def only(self, weights: Sequence[fly.Value]) -> tuple[fly.Value, ...]:
        """Weights of 16 bits, any number a piece, and 0 for those that are not kept."""
        left, found = iter(self.masks), []
        for piece in weights:
            words = piece.bitcast(fly.i32)
            masks = fly.from_elements([next(left) for _ in range(len(words))])
            found.append((words & masks).bitcast(piece.dtype))
        return tuple(found)
