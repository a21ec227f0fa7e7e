"""Dropout of a tile of the Hopper kernels: decided, in the forward kernel, right behind the start of its products.

What is left for the time after the softmax is a mask of each pair of weights and an "and" (`work/kept_pairs.py`).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import anew

from ..problem.dropout_tile import DecidedTile, Dropout, Side, as_word
from ..work.kept_pairs import KeptPairs

_SIGNS = as_word(0x80808080)


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
