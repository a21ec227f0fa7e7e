"""The softmax's way back, as functions over a tile of scores: weights again, and the scores' gradients.

With t = q k^T, s = modify(t) in log2 units of `scale`, lse2 the row's log-sum-exp in log2 units and
delta = rowsum(dO * O) - dLSE:

    P = exp2(s * scale - lse2)        dS = P * (dP - delta), dP = dO V^T        dT = dS * ds/dt

With dropout, what of O, dV and dP comes of kept weights alone is 1 / share times as large, share being that of the
weights that are kept, and

    dS = P * (keep * dO V^T - share * delta) / share

dS is without the factor 1 / share too.

dT is without the factor softmax_scale, which is for the results, in f32: 16-bit operands stay in their range. Rows
are queries and columns keys; where a kernel has them the other way round, `turned` is the same registers so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import fly

from .dropout_tile import only
from .features import BoundFeatures
from .scores import LOG2_E, Place


def turned_layout(layout: fly.AccumulatorLayout) -> fly.AccumulatorLayout:
    """The same registers with rows as columns."""
    return fly.AccumulatorLayout(layout.atom, "n" if layout.rows_on == "m" else "m")


def turned(fragment: fly.Fragment) -> fly.Fragment:
    """The transpose of a fragment, in the same registers."""
    return fly.Fragment(turned_layout(fragment.layout), tuple(zip(*fragment.tiles, strict=True)))


@dataclass(frozen=True)
class Weights:
    """A tile's P, and `pull`: of the scores' gradients, those of the raw scores (but for softmax_scale).

    `kept`: with dropout, which weights are.
    """

    weights: fly.Fragment
    pull: Callable[[fly.Fragment], fly.Fragment]
    kept: fly.Fragment | None = None

    @property
    def of_values(self) -> fly.Fragment:
        """P as values were added up with it, without dropout's scale."""
        return self.weights if self.kept is None else only(self.kept, self.weights)

    @property
    def signed(self) -> fly.Fragment:
        """P, or -P where it is dropped."""
        if (kept := self.kept) is None:
            return self.weights
        return self.weights.map(lambda x, r, c: fly.select(kept.tiles[r][c], x, -x))

    def score_gradients(self, excess: fly.Fragment, less: fly.Fragment) -> fly.Fragment:
        """dT, of dP - delta and of -delta, which it is where a weight is dropped."""
        if (kept := self.kept) is not None:
            excess = excess.map(lambda x, r, c: fly.select(kept.tiles[r][c], x, less.tiles[r][c]))
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
    first_query: fly.Value,
) -> Weights:
    """P of raw scores of queries `rows` with keys from `first_key` on, a multiple of their number.

    `first_query`: the first of `rows`, a multiple of their number. `lse2`: +inf for rows without keys, whose weights
    are 0. `hide`: -inf where a query does not see a key, None for tiles that all rows see whole.
    """
    scores, pull = _modified(raw, given, place, rows, first_key, scale_log2)
    if hide is not None:
        scores = given.mask(hide(scores), rows, first_key, place)
    minus = lse2.map(lambda x: -x)
    exponentials = scores.fma_rows(given.scale(scale_log2), minus).map(lambda x, r, c: fly.exp2(x))
    dropout = given.dropout(place)
    return Weights(exponentials, pull, None if dropout is None else dropout.kept(raw, first_query, first_key))


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
    inverse = fly.rcp(scale_log2 * (1 / LOG2_E))
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
            (found,) = tapes[c].gradients(parts[c][r], [raw.tiles[r][c]], x * inverse).inputs
            return found

        return gradients.map(one)

    return fly.Fragment(raw.layout, tuple(zip(*parts, strict=True))), pull
