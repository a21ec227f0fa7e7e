"""Dropout of a tile of the Hopper kernels, on weights as WGMMA takes them: pairs of 16 bits in a register.

Random bytes are compared four at a time, before lanes swap them, in the forward kernel right behind the start of the
tile's products. What is left for the time after the softmax is a mask of each pair and an "and". A permutation of
bytes makes the mask, and chooses between a word that was made and one that was sent.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import permute_bytes

from ..problem.dropout_tile import HIGH_BITS, Dropout, Either, RandomTile, Side, settled

Place = tuple[fly.Value | Either, int]  # a word, and the number of its byte


@dataclass(frozen=True)
class KeptWeights:
    """Which weights of a tile dropout keeps: bit 7 of their bytes in `tile`; `layout`: of the scores."""

    tile: RandomTile
    layout: fly.AccumulatorLayout

    @staticmethod
    def of(
        dropout: Dropout, layout: fly.AccumulatorLayout, first_row: Any, first_column: Any, queries: Side = "rows"
    ) -> KeptWeights:
        """Those of a tile whose corner has these positions, multiples of 16; for all lanes of a warp together.

        `queries`: whether they are the rows, or the columns.
        """
        return KeptWeights(dropout.kept_bytes(layout, first_row, first_column, queries), layout)

    @property
    def made(self) -> list[fly.Value]:
        """For `wgmma.wait`, so that all words are made before it: f32 that is next to zero."""
        # the words of an `Either` were sent by another lane: every lane made all of its own before
        words = {id(word): word for either in self.tile.words for word in _sent(either)}
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
        """f32 of the weights, in the accumulators' order, and 0 for those that are not kept."""
        masks = [_mask((place, place)) for place in self._places()]
        return (values.bitcast(fly.i32) & fly.from_elements(masks)).bitcast(fly.f32)

    def _places(self) -> list[Place]:
        """In the accumulators' order, the word and the number of each weight's byte."""
        return [self.tile.byte(*at) for at in zip(self.layout.value_rows, self.layout.value_columns, strict=True)]

    def _masks(self) -> Iterator[fly.Value]:
        """Of each two neighbours: all bits of the halves whose weight is kept."""
        places = self._places()
        return map(_mask, zip(places[::2], places[1::2], strict=True))


def _sent(word: fly.Value | Either) -> tuple[fly.Value, ...]:
    return (word.sent,) if isinstance(word, Either) else (word,)


def _mask(places: tuple[Place, Place]) -> fly.Value:
    """Two bytes twice each, and of them the highest bit in all bits."""
    (low_word, low), (high_word, high) = places
    if low_word is high_word:
        selector = 0x8888 + 0x11 * low + 0x1100 * high
        if not isinstance(low_word, Either):
            return permute_bytes(low_word, low_word, selector)
        # byte 4 and so on is of the second word
        return permute_bytes(low_word.zero, low_word.one, fly.select(low_word.bit, selector + 0x4444, selector))
    return permute_bytes(settled(low_word), settled(high_word), 0x8888 + 0x11 * low + 0x1100 * (4 + high))
