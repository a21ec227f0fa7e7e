"""The running softmax of a kernel that takes a maximum in only where it has grown a lot; see `OnlineSoftmax`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import fly

from .online_softmax import finish_with_sink


@dataclass(frozen=True)
class LazySoftmax:
    """The running softmax of the lane's row.

    `total`: the lane's part of sum(exp2(scale * score + shift)), as two sums. `maximum` of the raw scores, when it
    was last taken in; `shift` is -scale * maximum, rounded, and a score above `limit` calls for a new one, above
    `unmasked_limit` where tiles need no mask. Factors are differences of shifts, so that their rounding cancels.
    `rescales` counts those of the wave.

    Where the rounding may be more than a quarter (from `online_softmax.EXACT_BELOW` on), scores are measured from the
    maximum before they are scaled: `shift` is a kernel's `measured_shift` then, and the limit calls for it in every
    tile.
    """

    maximum: fly.Value
    shift: fly.Value
    limit: fly.Value
    unmasked_limit: fly.Value
    total: fly.Value
    rescales: fly.Value

    def finish(
        self, layout: fly.AccumulatorLayout, origin: fly.Value, sink: fly.Value | fly.RowVector | None
    ) -> tuple[fly.RowVector, fly.RowVector]:
        """(1 / sum, log-sum-exp) of scores that were measured from `origin`; see `OnlineSoftmax.finish`."""
        total = fly.RowVector(layout, ((fly.reduce_sum(self.total),),)).reduce_lanes(lambda a, b: a + b)
        pivot = origin - self.shift
        if sink is not None:
            # the shift of a row without any key is 0
            maximum = total.map(lambda t: fly.select(t == 0.0, -math.inf, pivot))
            sinks = sink if isinstance(sink, fly.RowVector) else total.map(lambda _: sink)
            return finish_with_sink(maximum, total, sinks)
        inverse = total.map(lambda t: fly.select(t == 0.0, 0.0, fly.rcp(t)))
        lse = total.map(lambda t: fly.select(t == 0.0, -math.inf, (fly.log2(t) + pivot) * math.log(2)))
        return inverse, lse
