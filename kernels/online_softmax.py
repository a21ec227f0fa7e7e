"""The running softmax of flash attention: maximum and sum per row, in base 2 (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass

import numpy as np

import fly

LAZY_LOG2 = 8.0  # how far a row's maximum may grow before a lazy rescale, in log2 units
# Of maxima in log2 units: rounding a smaller one moves exponents by at most 0.25. From twice as much on, scores are
# multiples of 1 in float32.
EXACT_BELOW = 2.0**23
LARGE = 8 * EXACT_BELOW  # moves them by at most 4, for which 16 bits have room beside a lazy maximum
EXPONENT = 0x7F800000  # the bits of a float32's exponent
LARGEST = 2.0**128 * (1 - 2.0**-20)  # of what is not a score, in log2 units: infinities would make NaN


@dataclass(frozen=True)
class OnlineSoftmax:
    """Per row: `maximum` of the scaled scores so far, `total`, the lane's own part of sum(exp2(scaled - maximum)).

    `maximum` is in log2 units and rounded, less the `offset` of probabilities. Every exponent, rescale and
    log-sum-exp is measured from that same number, so that its rounding cancels: a factor is exactly 1 where a maximum
    stays, and nothing adds up over tiles.
    """

    maximum: fly.RowVector
    total: fly.RowVector

    @staticmethod
    def start(layout: fly.AccumulatorLayout, row_tiles: int) -> OnlineSoftmax:
        """No scores yet: maximum -inf, sum 0."""
        return OnlineSoftmax(
            fly.RowVector.full(layout, row_tiles, -math.inf), fly.RowVector.full(layout, row_tiles, 0.0)
        )

    def update(
        self, scores: fly.Fragment, output: fly.Fragment, scale_log2: fly.Value, *, masked: bool, lazy: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.Fragment]:
        """Take in a tile of raw scores: (next state, probabilities, `output` rescaled to the same maximum).

        `masked` tiles may hold -inf, even in whole rows: such a row's probabilities are 0, not NaN. `lazy` keeps
        the old maxima, and with them `output` and the sums, until a row of the wave has grown past its own by
        `LAZY_LOG2`; probabilities are below 2 ** LAZY_LOG2 instead of 1, which f32 and 16-bit operands hold as
        well.
        """
        tile_max = scores.row_max().reduce_lanes(fly.maximum)
        maximum = self._raised(tile_max, scale_log2)

        def rescaled() -> tuple[fly.RowVector, fly.RowVector, fly.Fragment]:
            factor = self._factor(_pivot(maximum, masked))
            return maximum, self.total.map(lambda t, f: t * f, factor), output.scale_rows(factor)

        if lazy:
            maximum, total, output = fly.cond(
                self._grown(maximum), rescaled, lambda: (self.maximum, self.total, output)
            )
        else:
            maximum, total, output = rescaled()
        probabilities = _probabilities(scores, scale_log2, tile_max, _pivot(maximum, masked), LARGE)
        total = total.map(lambda t, p: t + p, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, output

    def advance(
        self, scores: fly.Fragment, scale_log2: fly.Value, *, masked: bool, lazy: bool, offset: float = 0.0
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector, fly.Value | None]:
        """Like `update`, for output that is still being accumulated: (..., factor, whether it must be applied).

        `lazy` keeps the old maxima until a row of the wave has grown past its own by `LAZY_LOG2`; the last result,
        None unless lazy, is the same in every lane of the wave. Probabilities and sums are 2 ** offset times what
        they are, the maxima less by `offset`.
        """
        tile_max = scores.row_max().reduce_lanes(fly.maximum)
        maximum = self._raised(tile_max, scale_log2, offset)
        needed = None
        if lazy:
            needed = self._grown(maximum)
            maximum = self.maximum.map(lambda old, new: fly.select(needed, new, old), maximum)
        pivot = _pivot(maximum, masked)
        probabilities = _probabilities(scores, scale_log2, tile_max, pivot, EXACT_BELOW if offset else LARGE)
        factor = self._factor(pivot)
        total = self.total.map(lambda t, f, p: t * f + p, factor, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, factor, needed

    def _raised(self, tile_max: fly.RowVector, scale_log2: fly.Value, offset: float = 0.0) -> fly.RowVector:
        """The maxima with those of a tile's raw scores: rounding keeps their order."""
        return self.maximum.map(
            fly.maximum, tile_max.map(lambda m: m * scale_log2 - offset if offset else m * scale_log2)
        )

    def _factor(self, pivot: fly.RowVector) -> fly.RowVector:
        """What sums and output so far are to be multiplied by."""
        return self.maximum.map(lambda old, new: fly.exp2(old - new), pivot)

    def _grown(self, maximum: fly.RowVector) -> fly.Value:
        """Whether a row of the wave has grown past its maximum by `LAZY_LOG2`, the same in every lane."""
        # -inf - -inf, of a row without any key yet, is NaN and has not grown
        grown = self.maximum.map(lambda old, new: new - old > LAZY_LOG2, maximum)
        return fly.any_lane(functools.reduce(operator.or_, itertools.chain.from_iterable(grown.values)))

    def finish(self, sink: fly.Value | fly.RowVector | None = None) -> tuple[fly.RowVector, fly.RowVector]:
        """(1 / sum, log-sum-exp): 0 and -inf for rows without keys. The latter is the natural logarithm.

        `sink`: one more score of every row, or each row's own, in natural units, whose value is zero; rows without
        keys have it too.
        """
        total = self.total.reduce_lanes(lambda a, b: a + b)
        if sink is not None:
            sinks = sink if isinstance(sink, fly.RowVector) else total.map(lambda _: sink)
            return finish_with_sink(self.maximum, total, sinks)
        # not those whose sum is 0: next to a maximum that overflowed, it is, and that is to be NaN
        empty = self.maximum.map(lambda m: m == -math.inf)
        inverse = total.map(lambda t, e: fly.select(e, 0.0, fly.rcp(t)), empty)
        lse = self.maximum.map(
            lambda m, t, e: fly.select(e, -math.inf, (m + fly.log2(t)) * math.log(2)), total, empty
        )
        return inverse, lse


def finish_with_sink(
    maximum: fly.RowVector, total: fly.RowVector, sink: fly.RowVector
) -> tuple[fly.RowVector, fly.RowVector]:
    """`OnlineSoftmax.finish` of reduced `total`s, which are sums of exp2(score - maximum).

    `maximum` is in log2 units, -inf in rows without keys; `sink` in natural ones.
    """
    scaled = sink.map(lambda s: fly.minimum(s * math.log2(math.e), LARGEST))
    highest = maximum.map(fly.maximum, scaled)
    # a sink of -inf leaves rows without keys as they are without one
    pivot = _pivot(highest, True)
    weight = maximum.map(lambda m, p: fly.exp2(m - p), pivot)
    whole = total.map(lambda t, w, p, s: fly.fma(t, w, fly.exp2(s - p)), weight, pivot, scaled)
    inverse = weight.map(lambda w, t: fly.select(t == 0.0, 0.0, w * fly.rcp(t)), whole)
    # at least the sink, also where that is out of range in log2 units
    lse = whole.map(
        lambda t, p, s: fly.maximum(s, fly.select(t == 0.0, -math.inf, (p + fly.log2(t)) * math.log(2))), pivot, sink
    )
    return inverse, lse


def _probabilities(
    scores: fly.Fragment, scale_log2: fly.Value, tile_max: fly.RowVector, pivot: fly.RowVector, large: float
) -> fly.Fragment:
    """exp2(score * scale - pivot): the scale is applied once, in f32, inside one FMA per score.

    The FMA does not round the product, and the pivot was rounded. Where a tile's maximum is `large`, exponents of the
    row are divided by a power of two, so that the largest one is small and not one that overflows: equal scores stay
    equal, and others stay as far below as float32 can tell them apart.
    """
    negated = _negated_divisors(scale_log2, tile_max, large)
    addend = pivot.map(lambda p, n: p * n, negated)
    # A scale that is divided stays far above what is subnormal. As integers, the product takes fewer registers.
    start = scale_log2.bitcast(fly.i32) - _bits(-1.0)
    scale = negated.map(lambda n: (start + n.bitcast(fly.i32)).bitcast(fly.f32))
    return scores.fma_rows(scale, addend).map(lambda tile, r, c: fly.exp2(tile))


def _negated_divisors(scale_log2: fly.Value, tile_max: fly.RowVector, large: float) -> fly.RowVector:
    """-2**-n for each row: with the least n >= 0 for which the exponents of `tile_max` and of the scale are together
    below that of `large`, so that their product over 2**n is below 2 * large.

    From the tile's raw maximum, which is there before the pivot is. A pivot of that size is divided enough. Beside a
    larger one, and beside any where the tile's maximum is far below zero, the tile's exponents are far below zero
    whatever divides them. A small pivot may underflow then, which is why nothing is subtracted from its bits. For
    -inf, the maximum of a row that is masked, it is not zero either.
    """
    bound = _bits(-large / 4) - (scale_log2.bitcast(fly.i32) & EXPONENT)
    bound = fly.select(bound == _bits(-0.0), bound - _bits(2.0**-126), bound)
    # Numbers below 1, negated, have the lowest integers for their bits: what does not fit, of products that overflow
    # anyway and of -inf with scales from large / 4 on, wraps to the highest ones.
    return tile_max.map(lambda m: fly.minimum((~m.bitcast(fly.i32) & EXPONENT) + bound, _bits(-1.0)).bitcast(fly.f32))


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _pivot(maximum: fly.RowVector, masked: bool) -> fly.RowVector:
    """What exponents are measured from: -inf - -inf is NaN, so a row without any key yet is measured from 0."""
    return maximum.map(lambda m: fly.select(m == -math.inf, 0.0, m)) if masked else maximum
