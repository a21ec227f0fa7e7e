"""Dropout on weights of 16 bits, two in a register: a mask of each pair, and an "and".

One instruction makes a mask, a permutation of bytes that can repeat the sign of some of two words' bytes: of each on
NVIDIA, of every second one on AMD. So words of decisions (`problem/dropout_tile.py`) are shifted until those of a
lane are at such bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm import intrinsics as nvvm
from fly.backends.rocdl import intrinsics as rocdl

from ..problem.dropout_tile import DecidedTile, as_word

Place = tuple[fly.Value, int]  # a word, and which of the bits that can be repeated


@dataclass(frozen=True)
class Signs:
    """The permutation of a target, `of` (low word, high word, selector).

    It repeats every `every`th bit, the first of the low word by number `first` of the selector; a number takes
    `digit` bits there.
    """

    every: int
    first: int
    digit: int
    of: Callable[[fly.Value, fly.Value, Any], fly.Value]

    def mask(self, low: Place, high: Place) -> fly.Value:
        """A word whose halves are all of two bits."""
        numbers = self.first + low[1], self.first + 32 // self.every + high[1]
        selector = sum(number << self.digit * i for i, number in enumerate((numbers[0],) * 2 + (numbers[1],) * 2))
        return self.of(low[0], high[0], selector)


SIGNS = {"nvvm": Signs(8, 8, 4, nvvm.permute_bytes), "rocdl": Signs(16, 8, 8, rocdl.permute_bytes)}


@dataclass(frozen=True)
class KeptPairs:
    """Which weights of a tile dropout keeps: bits of words at `places`, those of the accumulators in their order.

    `decided`: the words that these are shifted from, each once; `bits`: which of them each weight's is in, and its
    number there.
    """

    places: tuple[Place, ...]
    signs: Signs
    decided: tuple[fly.Value, ...]
    bits: tuple[tuple[int, int], ...]

    @staticmethod
    def of(tile: DecidedTile, layout: fly.AccumulatorLayout, row: int = 0, column: int = 0) -> KeptPairs:
        """Those of one accumulator of a fragment, which begins at a row and column of the fragment."""
        signs = SIGNS[fly.target().backend]
        found: dict[Any, fly.Value] = {}
        places, numbers = [], []
        for i, j in zip(layout.value_rows, layout.value_columns, strict=True):
            index, number = tile.place(row + i, column + j)
            numbers.append((index, number))
            at, bit = divmod(number, signs.every)
            if (index, bit) not in found:
                found[index, bit] = tile.words[index] << (signs.every - 1 - bit)
            places.append((found[index, bit], at))
        indices = list(dict.fromkeys(index for index, _ in numbers))
        bits = tuple((indices.index(index), number) for index, number in numbers)
        return KeptPairs(tuple(places), signs, tuple(tile.words[index] for index in indices), bits)

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
        return self._chosen(lambda i: values[i], lambda i: fly.f32(0.0))

    def add_f32(self, sums: fly.Value, weights: fly.Value, values: fly.Value) -> fly.Value:
        """f32 of the weights times `values` on top of `sums`, which are what is left where they are not kept.

        All in the accumulators' order. An addition under a predicate is one instruction.
        """
        return self._chosen(lambda i: fly.fma(weights[i], values[i], sums[i]), lambda i: sums[i])

    def _chosen(self, kept: Callable[[int], fly.Value], dropped: Callable[[int], fly.Value]) -> fly.Value:
        """Of each weight one of two numbers.

        Not by masks: ptxas makes those before it waits for the values, a register each. In the order of the bits:
        it then moves seven of a byte to predicates at a time.
        """
        found = {}
        for i in sorted(range(len(self.bits)), key=self.bits.__getitem__):
            word, number = self.bits[i]
            found[i] = fly.select((self.decided[word] & as_word(1 << number)) != 0, kept(i), dropped(i))
        return fly.from_elements([found[i] for i in range(len(found))])

    def _masks(self) -> Iterator[fly.Value]:
        """Of each two neighbours."""
        return map(self.signs.mask, self.places[::2], self.places[1::2])
