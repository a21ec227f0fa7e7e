"""The softmax's way back, as functions over a tile of scores: weights again, and the scores' gradients.

With t = q k^T, s = modify(t) in log2 units of `scale`, lse2 the row's log-sum-exp in log2 units and
delta = rowsum(dO * O) - dLSE:

    P = exp2(s * scale - lse2)        dS = P * (dP - delta), dP = dO V^T        dT = dS * ds/dt

dT is without the factor softmax_scale, which is for the results, in f32: 16-bit operands stay in their range. Rows
are queries and columns keys; where a kernel has them the other way round, `turned` is the same registers so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import fly

from .features import BoundFeatures
from .scores import LARGEST_INVERSE, LOG2_E, Place


def turned_layout(layout: fly.AccumulatorLayout) -> fly.AccumulatorLayout:
    """The same registers with rows as columns."""
    return fly.AccumulatorLayout(layout.atom, "n" if layout.rows_on == "m" else "m")


def turned(fragment: fly.Fragment) -> fly.Fragment:
    """The transpose of a fragment, in the same registers."""
    return fly.Fragment(turned_layout(fragment.layout), tuple(zip(*fragment.tiles, strict=True)))


@dataclass(frozen=True)
class Weights:
    """A tile's P, and `pull`: of the scores' gradients, those of the raw scores (but for softmax_scale)."""

    weights: fly.Fragment
    pull: Callable[[fly.Fragment], fly.Fragment]

    def score_gradients(self, excess: fly.Fragment) -> fly.Fragment:
        """dT, of dP - delta."""
        return self.pull(excess.map(lambda x, r, c: self.weights.tiles[r][c] * x))


def weights(
    raw: fly.Fragment,
    given: BoundFeatures,
    place: Place,
    rows: fly.RowVector,
    first_key: fly.Value,
    scale_log2: fly.Value,
    lse2: fly.RowVector,
    hide: Callable[[fly.Fragment], fly.Fragment] | None,
) -> Weights:
    """P of raw scores of queries `rows` with keys from `first_key` on, a multiple of their number.

    `lse2`: +inf for rows without keys, whose weights are 0. `hide`: -inf where a query does not see a key, None for
    tiles that all rows see whole.
    """
    scores, pull = _modified(raw, given, place, rows, first_key, scale_log2)
    if hide is not None:
        scores = given.mask(hide(scores), rows, first_key, place)
    exponents = scores.fma_rows(given.scale(scale_log2), lse2.map(lambda x: -x))
    if given.features.modifies:
        # scores of -1e9 and the like: their log-sum-exp is rounded to hundreds, and infinity times 0 would be NaN
        exponents = exponents.map(lambda x, r, c: fly.select(x > 0.0, 0.0, x))
    return Weights(exponents.map(lambda x, r, c: fly.exp2(x)), pull)


def _modified(
    raw: fly.Fragment,
    given: BoundFeatures,
    place: Place,
    rows: fly.RowVector,
    first_key: fly.Value,
    scale_log2: fly.Value,
) -> tuple[fly.Fragment, Callable[[fly.Fragment], fly.Fragment]]:
    """(modified scores, the way of their gradients back), column tile by column tile: each has a tape of its own."""
    if not given.features.modifies:
        return raw, lambda gradients: gradients
    # the factor that results get is part of the modification too
    inverse = fly.minimum(fly.rcp(scale_log2 * (1 / LOG2_E)), LARGEST_INVERSE)
    columns = raw.layout.columns
    parts, tapes = [], []
    for c, column in enumerate(zip(*raw.tiles, strict=True)):
        part = fly.Fragment(raw.layout, tuple((tile,) for tile in column))
        bias = given.load_bias(columns, lambda c=c: (rows, first_key + c * columns, place))  # type: ignore[misc]
        with fly.Tape() as tape:
            part = given.modify(part, scale_log2, rows, first_key + c * columns, place, bias)
        parts.append([row[0] for row in part.tiles])
        tapes.append(tape)

    def pull(gradients: fly.Fragment) -> fly.Fragment:
        def one(x: fly.Value, r: int, c: int) -> fly.Value:
            (found,) = tapes[c].gradients(parts[c][r], [raw.tiles[r][c]], x).inputs
            return found * inverse

        return gradients.map(one)

    return fly.Fragment(raw.layout, tuple(zip(*parts, strict=True))), pull
