"""The running softmax of a kernel that takes a maximum in only where it has grown a lot; see `OnlineSoftmax`."""

from __future__ import annotations

from dataclasses import dataclass

import fly


@dataclass(frozen=True)
class LazySoftmax:
    """The running softmax of the lane's row.

    `total`: the lane's part of sum(exp2(scale * score + shift)), as two sums, or as these and weights that are to be
    added to them (`gfx950/sums.py`). `maximum` of the raw scores, when it was last taken in; `shift` is
    -scale * maximum, rounded, and a score above `limit` calls for a new one, above `unmasked_limit` where tiles need
    no mask. Factors are differences of shifts, so that their rounding cancels. `rescales` counts those of the wave.

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
