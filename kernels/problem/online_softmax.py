"""The running softmax of flash attention: maximum and sum per row, in base 2 (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fly

LAZY_LOG2 = 8.0  # how far a row's maximum may grow before a lazy rescale, in log2 units
# Of maxima in log2 units: rounding a smaller one moves exponents by at most 0.25. From twice as much on, scores are
# multiples of 1 in float32.
EXACT_BELOW = 2.0**23
# Moves them by at most 2, and the sum of a maximum and a margin by 2.25: f16 has room for both beside a lazy maximum.
LARGE = 4 * EXACT_BELOW
# Bits of a float32 without its sign. Without the lowest ones LLVM leaves the complement alone, one instruction; with
# them it makes a subtraction, which is two.
MAGNITUDE = 0x7FFFFF00
LARGEST = 2.0**128 * (1 - 2.0**-20)  # of what is not a score, in log2 units: infinities would make NaN


@dataclass(frozen=True)
class OnlineSoftmax:
    """Per row: `maximum` of the raw scores so far, `total`, the lane's part of sum(exp2((score - maximum) * scale)).

    A tile's probabilities are measured from one number, the maximum times the scale, rounded. Rescales come from the
    difference of two maxima: a factor is exactly 1 where a maximum stays, so that no rounding adds up over tiles.
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
        self,
        scores: fly.Fragment,
        output: fly.Fragment,
        scale_log2: fly.Value,
        *,
        masked: bool,
        lazy: bool,
        late: bool = False,
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.Fragment]:
        """Take in a tile of raw scores: (next state, probabilities, `output` rescaled to the same maximum).

        `masked` tiles may hold -inf, even in whole rows: such a row's probabilities are 0, not NaN. `lazy` keeps
        the old maxima, and with them `output` and the sums, until a row of the wave has grown past its own by
        `LAZY_LOG2`; probabilities are below 2 ** LAZY_LOG2 instead of 1, which f32 and 16-bit operands hold as
        well. That branch comes before the probabilities, or `late` behind them.
        """
        if late:
            probabilities, growth = self.advance_lazily(scores, scale_log2, masked=masked, wave=True)
            softmax, output = growth.apply(output, output.scale_rows)
            return softmax, probabilities, output
        lane_max = scores.row_max()
        maximum = self.maximum.map(fly.maximum, lane_max.reduce_lanes(fly.maximum))

        def rescaled() -> tuple[fly.RowVector, fly.RowVector, fly.Fragment]:
            factor = self.factor_to(_pivot(maximum, masked), scale_log2)
            return maximum, self.total.map(lambda t, f: t * f, factor), output.scale_rows(factor)

        if lazy:
            # -inf - -inf, of a row without any key yet, is NaN and has not grown
            grown = self.maximum.map(lambda old, new: (new - old) * scale_log2 > LAZY_LOG2, maximum)
            maximum, total, output = fly.cond(
                _in_any_lane(grown), rescaled, lambda: (self.maximum, self.total, output)
            )
        else:
            maximum, total, output = rescaled()
        probabilities = _probabilities(scores, lane_max, _pivot(maximum, masked), scale_log2)
        total = total.map(lambda t, p: t + p, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, output

    def advance(
        self, scores: fly.Fragment, scale_log2: fly.Value, *, masked: bool, offset: float = 0.0
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        """Like `update`, for output that is still being accumulated: (..., the factor that is to be applied to it).

        Probabilities and sums are 2 ** offset times what they are.
        """
        lane_max = scores.row_max()
        maximum = self.maximum.map(fly.maximum, lane_max.reduce_lanes(fly.maximum))
        pivot = _pivot(maximum, masked)
        factor = self.factor_to(pivot, scale_log2)
        probabilities = _probabilities(scores, lane_max, pivot, scale_log2, offset)
        total = self.total.map(lambda t, f, p: t * f + p, factor, probabilities.row_sum())
        return OnlineSoftmax(maximum, total), probabilities, factor

    def advance_lazily(
        self,
        scores: fly.Fragment,
        scale_log2: fly.Value,
        margin: fly.Value | None = None,
        *,
        masked: bool,
        wave: bool = False,
        offset: float = 0.0,
        most: float = LAZY_LOG2,
    ) -> tuple[fly.Fragment, Growth]:
        """A step that keeps maxima until a row has grown past its own by `LAZY_LOG2`: (probabilities, `Growth`).

        `Growth.apply` gives the next state. Growth is compared with `margin`, that of the scale, or without one in
        log2 units; with `wave`, a wave keeps all of its rows' maxima or none.
        """
        lane_max = scores.row_max()
        tile_max = lane_max.reduce_lanes(fly.maximum)
        # a row without any key yet is at -inf: NaN, its distance to a tile that is masked, is no growth
        if margin is None:
            grown = self.maximum.map(lambda old, new: (new - old) * scale_log2 > most, tile_max)
        else:
            grown = self.maximum.map(lambda old, new: new > old + margin, tile_max)
        needed = _in_any_lane(grown)
        if wave:
            maximum = self.maximum.map(lambda old, new: fly.select(needed, fly.maximum(old, new), old), tile_max)
        else:
            maximum = self.maximum.map(lambda old, new, g: fly.select(g, new, old), tile_max, grown)
        pivot = _pivot(maximum, masked)
        probabilities = _probabilities(scores, lane_max, pivot, scale_log2, offset)
        return probabilities, Growth(self, maximum, pivot, probabilities.row_sum(), scale_log2, needed)

    def factor_to(self, pivot: fly.RowVector, scale_log2: fly.Value) -> fly.RowVector:
        """What sums and output so far are to be multiplied by; exactly 1 where a maximum stays."""
        return self.maximum.map(lambda old, new: fly.exp2((old - new) * scale_log2), pivot)

    def finish(
        self,
        scale_log2: fly.Value,
        sink: fly.Value | fly.RowVector | None = None,
        offset: float = 0.0,
        total: fly.RowVector | None = None,
    ) -> tuple[fly.RowVector, fly.RowVector]:
        """(1 / sum, log-sum-exp): 0 and -inf for rows without keys. The latter is the natural logarithm.

        `scale_log2`, `offset`: those of the steps. `total`: sums of whole rows that take the place of the own ones.
        `sink`: one more score of every row, or each row's own, in natural units, whose value is zero; rows without
        keys have it too.
        """
        total = self.total.reduce_lanes(lambda a, b: a + b) if total is None else total
        empty = self.maximum.map(lambda m: m == -math.inf)
        if sink is not None:
            scaled = self.maximum.map(lambda m: fly.minimum(m * scale_log2 - offset, LARGEST))
            return finish_with_sink(scaled, total, sink)

        def lse(total: fly.Value, maximum: fly.Value) -> fly.Value:
            return fly.fma(maximum, scale_log2 * math.log(2), (fly.log2(total) - offset) * math.log(2))

        return finish_rows(total, empty, lse, self.maximum)


@dataclass(frozen=True)
class Growth:
    """What `OnlineSoftmax.advance_lazily` leaves for when the output is there: whether anything has to be rescaled.

    `needed` is the same in every lane of the wave; `sums` are the row sums of the tile's probabilities.
    """

    before: OnlineSoftmax
    maximum: fly.RowVector
    pivot: fly.RowVector
    sums: fly.RowVector
    scale_log2: fly.Value
    needed: fly.Value

    def apply(self, output: Any, scaled: Callable[[fly.RowVector], Any]) -> tuple[OnlineSoftmax, Any]:
        """(the next state, `output`), and where a row has grown `scaled(factor)` in place of the output."""

        def rescaled() -> tuple[fly.RowVector, Any]:
            factor = self.before.factor_to(self.pivot, self.scale_log2)
            return self.before.total.map(lambda t, f: t * f, factor), scaled(factor)

        total, output = fly.cond(self.needed, rescaled, lambda: (self.before.total, output))
        return OnlineSoftmax(self.maximum, total.map(lambda t, s: t + s, self.sums)), output


def margin_of(scale_log2: fly.Value, most: float = LAZY_LOG2) -> fly.Value:
    """How far raw scores of this scale may grow before a lazy rescale; finite, so that -inf stays below any score."""
    # one lane's number for all of them: ptxas would make it anew in every tile otherwise
    return fly.first_lane(fly.minimum(fly.rcp(scale_log2) * most, LARGEST))


def _in_any_lane(flags: fly.RowVector) -> fly.Value:
    """Whether a flag is set in any lane of the wave."""
    return fly.any_lane(functools.reduce(operator.or_, itertools.chain.from_iterable(flags.values)))


def finish_rows(
    total: fly.RowVector, empty: fly.RowVector, lse_of: Callable[..., fly.Value], *others: fly.RowVector
) -> tuple[fly.RowVector, fly.RowVector]:
    """`OnlineSoftmax.finish` of reduced `total`s: `lse_of(total, *others)` of each row that is not `empty`."""
    inverse = total.map(lambda t, e: fly.select(e, 0.0, fly.rcp(t)), empty)
    lse = total.map(lambda t, e, *o: fly.select(e, -math.inf, lse_of(t, *o)), empty, *others)
    return inverse, lse


def finish_with_sink(
    maximum: fly.RowVector, total: fly.RowVector, sink: fly.Value | fly.RowVector
) -> tuple[fly.RowVector, fly.RowVector]:
    """`OnlineSoftmax.finish` with one of reduced `total`s, which are sums of exp2(score - maximum).

    `maximum` is in log2 units, -inf in rows without keys; `sink` in natural ones.
    """
    sink = sink if isinstance(sink, fly.RowVector) else total.map(lambda _, s=sink: s)
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
    scores: fly.Fragment, lane_max: fly.RowVector, pivot: fly.RowVector, scale_log2: fly.Value, offset: float = 0.0
) -> fly.Fragment:
    """exp2((score - pivot) * scale + offset): the scale is applied once, in f32, inside one FMA per score.

    The FMA does not round the product, and the pivot's was rounded: from 2**31 on, the largest score's own exponent
    might overflow. So a lane whose scores are that large measures them with a smaller scale: equal scores stay equal,
    and others stay as far below as float32 can tell them apart.
    """
    scale = _bounded_scale(scale_log2, lane_max, EXACT_BELOW if offset else LARGE)
    addend = pivot.map(lambda p, s: fly.fma(p, -s, offset) if offset else -(p * s), scale)
    return scores.fma_rows(scale, addend).map(lambda tile, r, c: fly.exp2(tile))


def _bounded_scale(scale_log2: fly.Value, lane_max: fly.RowVector, large: float) -> fly.RowVector:
    """The scale for each row, or less, so that `lane_max` times it is at most 1.125 * large; `large`: a power of two.

    The bits of a float32 are its logarithm but for a piecewise linear error (Mitchell, 1962), so that a difference of
    bits is a quotient; of large / lane_max here, in [1, 1.125] times what it should be. It comes from the lane's own
    maximum, which is there before the row's is. Where the row's is another lane's, this lane's exponents are measured
    from one that is larger, and are far below zero whatever the scale is.
    """
    scale = scale_log2.bitcast(fly.i32)
    bits = _bits(large) + _bits(1.0) - MAGNITUDE

    def bounded(m: fly.Value) -> fly.Value:
        most = (~m.bitcast(fly.i32) & MAGNITUDE) + bits
        return fly.select(fly.compare("ult", most, scale), most, scale).bitcast(fly.f32)

    return lane_max.map(bounded)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _pivot(maximum: fly.RowVector, masked: bool) -> fly.RowVector:
    """What exponents are measured from: -inf - -inf is NaN, so a row without any key yet is measured from 0."""
    return maximum.map(lambda m: fly.select(m == -math.inf, 0.0, m)) if masked else maximum
