"""The running softmax of flash attention: maximum and sum per row, in base 2 (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass

import fly

LAZY_LOG2 = 8.0


@dataclass(frozen=True)
class OnlineSoftmax:
    """Per row: `maximum` of the raw scores so far, and `total`, the lane's own part of sum(exp2(scaled - max))."""

    maximum: fly.RowVector
    total: fly.RowVector

    @staticmethod
    def start(layout: fly.AccumulatorLayout, row_tiles: int) -> OnlineSoftmax:
        """No scores yet: maximum -inf, sum 0."""
        return OnlineSoftmax(
            fly.RowVector.full(layout, row_tiles, -math.inf), fly.RowVector.full(layout, row_tiles, 0.0)
        )

    def update(
        self, scores: fly.Fragment, scale_log2: fly.Value, *, masked: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        """Take in a tile of raw scores: (next state, probabilities, factor for what was accumulated so far).

        `masked` tiles may hold -inf, even in whole rows: such a row's probabilities are 0, not NaN.
        """
        state, probabilities, factor, _ = self.advance(scores, scale_log2, masked=masked, lazy=False)
        return state, probabilities, factor

    def advance(
        self, scores: fly.Fragment, scale_log2: fly.Value, *, masked: bool, lazy: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector, fly.Value | None]:
        """Like `update`, for output that is still being accumulated: (..., factor, whether it must be applied).

        `lazy` keeps the old maxima until a row of the wave has grown past its own by `LAZY_LOG2`; the last result,
        None unless lazy, is the same in every lane of the wave.
        """
        tile_max = scores.row_max().reduce_lanes(fly.maximum)
        maximum = self.maximum.map(fly.maximum, tile_max)
        needed = None
        if lazy:
            # -inf - -inf, of a row without any key yet, is NaN and has not grown
            grown = self.maximum.map(lambda old, new: (new - old) * scale_log2 > LAZY_LOG2, maximum)
            needed = fly.any_lane(functools.reduce(operator.or_, itertools.chain.from_iterable(grown.values)))
            maximum = self.maximum.map(lambda old, new: fly.select(needed, new, old), maximum)
        # -inf - -inf is NaN: a row without any key yet is measured from 0 instead
        pivot = maximum.map(lambda m: fly.select(m == -math.inf, 0.0, m)) if masked else maximum
        scaled = pivot.map(lambda m: m * scale_log2)
        # exp2(score * scale - max * scale): the scale is applied once, in f32, inside one FMA per score
        exponents = scores.fma_rows(scale_log2, scaled.map(lambda s: -s))
        probabilities = exponents.map(lambda tile, r, c: fly.exp2(tile))
        factor = self.maximum.map(lambda old, new: fly.exp2(old * scale_log2 - new), scaled)
        total = self.total.map(lambda t, f, p: t * f + p, factor, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, factor, needed

    def finish(self, scale_log2: fly.Value) -> tuple[fly.RowVector, fly.RowVector]:
        """(1 / sum, log-sum-exp): 0 and -inf for rows without keys. The latter is the natural logarithm."""
        total = self.total.reduce_lanes(lambda a, b: a + b)
        inverse = total.map(lambda t: fly.select(t == 0.0, 0.0, fly.rcp(t)))
        lse = self.maximum.map(
            lambda m, t: fly.select(t == 0.0, -math.inf, (m * scale_log2 + fly.log2(t)) * math.log(2)), total
        )
        return inverse, lse
