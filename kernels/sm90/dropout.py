"""Dropout of a tile of the Hopper kernels: decided, in the forward kernel, right behind the start of its products.

What is left for the time after the softmax is a mask of each pair of weights and an "and" (`work/kept_pairs.py`).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import WARPGROUP, anew, sync_warp

from ..problem.dropout import ROUNDS, RandomHead, one_will_do, round_key, seed_words
from ..problem.dropout_tile import DecidedTile, Dropout, Side, as_word
from ..work.kept_pairs import KeptPairs

_SIGNS = as_word(0x80808080)
_KEYS, _BITS = 2 * ROUNDS, 8  # words
_WARP, _AT_ONCE = 32, 4


def kept_weights(
    dropout: Dropout, layout: fly.AccumulatorLayout, first_row: Any, first_column: Any, queries: Side = "rows"
) -> KeptPairs:
    """Those of a tile whose corner has these positions, multiples of 16; for all lanes of a warp together.

    `queries`: whether they are the rows, or the columns.
    """
    return KeptPairs.of(dropout.decided(layout, first_row, first_column, queries), layout)


def made(kept: KeptPairs | None) -> list[fly.Value]:
    """For `wgmma.wait` and `wgmma.computed`, so that what is decided is before: f32 that is next to zero."""
    return [] if kept is None else [(functools.reduce(operator.or_, kept.decided) & _SIGNS).bitcast(fly.f32)]


def remade(dropout: Dropout, step: fly.Value) -> Dropout:
    """The same, made again where `step` is: what Philox adds to the seed alone takes 13 registers over a loop."""
    return dropout.made_by(lambda word: anew(word, step))


def made_again(decided: DecidedTile, step: fly.Value) -> DecidedTile:
    """The same decisions; what follows from them is not made before `step` is."""
    return replace(decided, words={index: anew(word, step) for index, word in decided.words.items()})


@dataclass(frozen=True)
class Stored:
    """In shared memory: what the rounds of Philox add for the seed, and `one_will_do` for each bit of the threshold.

    For each consumer warp what its own lanes have put there, a word each. Every tile loads it anew, which is fewer
    instructions than making it; and as loads stay behind the start of the products in front of them, so does what is
    made of them, among the exponentials and not in front of those products.
    """

    words: fly.SharedMemory

    @staticmethod
    def allocate(consumers: int) -> Stored:
        """For so many consumer warpgroups."""
        return Stored(fly.SharedMemory("random", "i32", consumers * WARPGROUP))

    @property
    def _first(self) -> fly.Value:
        """The warp's first word; not the same for all lanes to the compiler, which would move it for each load."""
        return (fly.thread_id.x // _WARP - WARPGROUP // _WARP) * _WARP

    def put(self, rng_state: fly.Tensor, dropped: fly.Value) -> None:
        """By all lanes of a consumer warp: those of a launch's state and threshold."""
        lane, words = fly.lane_of(_WARP), seed_words(rng_state.load(0))
        key = fly.select(lane % 2 == 0, *(round_key(words, lane // 2, which) for which in (0, 1)))
        bit = one_will_do(dropped, (lane - _KEYS) & (_WARP - 1))
        self.words.store(fly.select(lane < _KEYS, key, bit), self._first + lane)
        sync_warp()

    def load(self, head: RandomHead, step: fly.Value) -> tuple[RandomHead, tuple[fly.Value, ...]]:
        """A head's random numbers with the key that is here, made again where `step` is, and the threshold's bits."""
        places = range(0, _KEYS + _BITS, _AT_ONCE)
        loaded = [self.words.load(self._first + place, _AT_ONCE, align=4 * _AT_ONCE) for place in places]
        words = tuple(vector[i] for vector in loaded for i in range(_AT_ONCE))
        head = RandomHead(words[:_KEYS], anew(head.head, step), anew(head.offset, step))
        return head, words[_KEYS : _KEYS + _BITS]
