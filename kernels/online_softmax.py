"""The running softmax of flash attention: maximum and sum per row, in base 2 (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass

import fly

LAZY_LOG2 = 8.0  # how far a row's maximum may grow before a lazy rescale, in log2 units


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
        self, scores: fly.Fragment, output: fly.Fragment, scale_log2: fly.Value, *, masked: bool, lazy: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.Fragment]:
        """Take in a tile of raw scores: (next state, probabilities, `output` rescaled to the same maximum).

        `masked` tiles may hold -inf, even in whole rows: such a row's probabilities are 0, not NaN. `lazy` keeps
        the old maxima, and with them `output` and the sums, until a row of the wave has grown past its own by
        `LAZY_LOG2`; probabilities are below 2 ** LAZY_LOG2 instead of 1, which f32 and 16-bit operands hold as
        well.
        """
        tile_max = scores.row_max().reduce_lanes(fly.maximum)
        maximum = self.maximum.map(fly.maximum, tile_max)

        def rescaled() -> tuple[fly.RowVector, fly.RowVector, fly.Fragment]:
            pivot = _pivot(maximum, masked).map(lambda m: m * scale_log2)
            factor = self.maximum.map(lambda old, new: fly.exp2(old * scale_log2 - new), pivot)
            return maximum, self.total.map(lambda t, f: t * f, factor), output.scale_rows(factor)

        if lazy:
            maximum, total, output = fly.cond(
                self._grown(maximum, scale_log2), rescaled, lambda: (self.maximum, self.total, output)
            )
        else:
            maximum, total, output = rescaled()
        negated = _pivot(maximum, masked).map(lambda m: -(m * scale_log2))
        # exp2(score * scale - max * scale): the scale is applied once, in f32, inside one FMA per score
        probabilities = scores.fma_rows(scale_log2, negated).map(lambda tile, r, c: fly.exp2(tile))
        total = total.map(lambda t, p: t + p, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, output

    def advance(
        self, scores: fly.Fragment, scale_log2: fly.Value, *, masked: bool, lazy: bool, offset: float = 0.0
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector, fly.Value | None]:
        """Like `update`, for output that is still being accumulated: (..., factor, whether it must be applied).

        `lazy` keeps the old maxima until a row of the wave has grown past its own by `LAZY_LOG2`; the last result,
        None unless lazy, is the same in every lane of the wave. Probabilities and sums are 2 ** offset times what
        they are.
        """
        tile_max = scores.row_max().reduce_lanes(fly.maximum)
        maximum = self.maximum.map(fly.maximum, tile_max)
        needed = None
        if lazy:
            needed = self._grown(maximum, scale_log2)
            maximum = self.maximum.map(lambda old, new: fly.select(needed, new, old), maximum)
        scaled = _pivot(maximum, masked).map(lambda m: m * scale_log2)
        exponents = scores.fma_rows(scale_log2, scaled.map(lambda s: offset - s if offset else -s))
        probabilities = exponents.map(lambda tile, r, c: fly.exp2(tile))
        factor = self.maximum.map(lambda old, new: fly.exp2(old * scale_log2 - new), scaled)
        total = self.total.map(lambda t, f, p: t * f + p, factor, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, factor, needed

    def _grown(self, maximum: fly.RowVector, scale_log2: fly.Value) -> fly.Value:
        """Whether a row of the wave has grown past its maximum by `LAZY_LOG2`, the same in every lane."""
        # -inf - -inf, of a row without any key yet, is NaN and has not grown
        grown = self.maximum.map(lambda old, new: (new - old) * scale_log2 > LAZY_LOG2, maximum)
        return fly.any_lane(functools.reduce(operator.or_, itertools.chain.from_iterable(grown.values)))

    def finish(
        self, scale_log2: fly.Value, sink: fly.Value | fly.RowVector | None = None
    ) -> tuple[fly.RowVector, fly.RowVector]:
        """(1 / sum, log-sum-exp): 0 and -inf for rows without keys. The latter is the natural logarithm.

        `sink`: one more score of every row, or each row's own, in natural units, whose value is zero; rows without
        keys have it too.
        """
        total = self.total.reduce_lanes(lambda a, b: a + b)
        if sink is not None:
            sinks = sink if isinstance(sink, fly.RowVector) else total.map(lambda _: sink)
            return finish_with_sink(self.maximum.map(lambda m: m * scale_log2), total, sinks)
        inverse = total.map(lambda t: fly.select(t == 0.0, 0.0, fly.rcp(t)))
        lse = self.maximum.map(
            lambda m, t: fly.select(t == 0.0, -math.inf, (m * scale_log2 + fly.log2(t)) * math.log(2)), total
        )
        return inverse, lse


def finish_with_sink(
    maximum: fly.RowVector, total: fly.RowVector, sink: fly.RowVector
) -> tuple[fly.RowVector, fly.RowVector]:
    """`OnlineSoftmax.finish` of reduced `total`s, which are sums of exp2(score - maximum).

    `maximum` is in log2 units, -inf in rows without keys; `sink` in natural ones.
    """
    sink = sink.map(lambda s: s * math.log2(math.e))
    highest = maximum.map(fly.maximum, sink)
    # a sink of -inf leaves rows without keys as they are without one
    pivot = _pivot(highest, True)
    weight = maximum.map(lambda m, p: fly.exp2(m - p), pivot)
    whole = total.map(lambda t, w, p, s: fly.fma(t, w, fly.exp2(s - p)), weight, pivot, sink)
    inverse = weight.map(lambda w, t: fly.select(t == 0.0, 0.0, w * fly.rcp(t)), whole)
    lse = whole.map(
        lambda t, p: fly.select(t == 0.0, -math.inf, (p + fly.log2(t)) * math.log(2)),
        pivot,
    )
    return inverse, lse


def _pivot(maximum: fly.RowVector, masked: bool) -> fly.RowVector:
    """What exponents are measured from: -inf - -inf is NaN, so a row without any key yet is measured from 0."""
    return maximum.map(lambda m: fly.select(m == -math.inf, 0.0, m)) if masked else maximum
