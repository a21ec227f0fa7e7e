"""Dropout of a tile of the Hopper kernels, on weights as WGMMA takes them: pairs of 16 bits in a register.

Decisions are made, and swapped by lanes, in the forward kernel right behind the start of the tile's products. What is
left for the time after the softmax is a mask of each pair and an "and". A permutation of bytes makes the mask of two
bytes whose highest bits are the decisions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import anew, permute_bytes

from ..problem.dropout import RandomHead
from ..problem.dropout_tile import Dropout, Side, as_word

HIGH_BITS = as_word(0x80808080)
Place = tuple[fly.Value, int]  # a word, and the number of its byte


@dataclass(frozen=True)
class KeptWeights:
    """Which weights of a tile dropout keeps: bit 7 of bytes at `places`, those of the accumulators in their order."""

    places: tuple[Place, ...]

    @staticmethod
    def of(
        dropout: Dropout, layout: fly.AccumulatorLayout, first_row: Any, first_column: Any, queries: Side = "rows"
    ) -> KeptWeights:
        """Those of a tile whose corner has these positions, multiples of 16; for all lanes of a warp together.

        `queries`: whether they are the rows, or the columns.
        """
        tile = dropout.decided(layout, first_row, first_column, queries)
        found: dict[Any, fly.Value] = {}
        places = []
        for at in zip(layout.value_rows, layout.value_columns, strict=True):
            index, number = tile.place(*at)
            byte, bit = divmod(number, 8)
            if (index, bit) not in found:
                found[index, bit] = tile.words[index] << (7 - bit - tile.first)
            places.append((found[index, bit], byte))
        return KeptWeights(tuple(places))

    @property
    def made(self) -> list[fly.Value]:
        """For `wgmma.wait`, so that all words are made before it: f32 that is next to zero."""
        words = {id(word): word for word, _ in self.places}
        return [(functools.reduce(operator.or_, words.values()) & HIGH_BITS).bitcast(fly.f32)]

    def only(self, weights: Sequence[fly.Value]) -> tuple[fly.Value, ...]:
        """Weights of 16 bits, any number a piece, and 0 for those that are not kept."""
        left, found = self._masks(), []
        for piece in weights:
            words = piece.bitcast(fly.i32)
            masks = fly.from_elements([next(left) for _ in range(len(words))])
            found.append((words & masks).bitcast(piece.dtype))
        return tuple(found)

    def only_f32(self, values: fly.Value) -> fly.Value:
        """f32 of the weights, in the accumulators' order, and 0 for those that are not kept.

        Not by masks: ptxas makes those before it waits for the values, a register each.
        """
        return fly.from_elements(
            [
                fly.select((word & as_word(0x80 << 8 * byte)) != 0, value, 0.0)
                for value, (word, byte) in zip(values, self.places, strict=True)
            ]
        )

    def _masks(self) -> Iterator[fly.Value]:
        """Of each two neighbours: all bits of the halves whose weight is kept."""
        return map(_mask, self.places[::2], self.places[1::2])


def remade(dropout: Dropout, step: fly.Value) -> Dropout:
    """The same, made again where `step` is: what Philox adds to the seed alone takes 13 registers over a loop."""
    random = dropout.random
    low, high, head, offset = (anew(word, step) for word in (*random.key, random.head, random.offset))
    return Dropout(RandomHead((low, high), head, offset), anew(dropout.dropped, step))


def _mask(low: Place, high: Place) -> fly.Value:
    """Two bytes twice each, and of them the highest bit in all bits."""
    # byte 4 and so on is of the second word
    return permute_bytes(low[0], high[0], 0x8888 + 0x11 * low[1] + 0x1100 * (4 + high[1]))
