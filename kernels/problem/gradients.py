"""The softmax's way back, as functions over a tile of scores: weights again, and the scores' gradients.

With t = q k^T, s = modify(t) in log2 units of `scale`, lse2 the row's log-sum-exp in log2 units and
delta = rowsum(dO * O) - dLSE:

    P = exp2(s * scale - lse2)        dS = P * (dP - delta), dP = dO V^T        dT = dS * ds/dt

With dropout, what of O, dV and dP comes of kept weights alone is 1 / share times as large, share being that of the
weights that are kept, and

    dS = P * (keep * dO V^T - share * delta) / share

dS is without the factor 1 / share too.

dT is without the factor softmax_scale, which is for the results, in f32: 16-bit operands stay in their range. What
modifies scores is differentiated where its operands ask for it (`Inputs`): their gradients are whole. A `score_mod`
is differentiated as it was traced, unless the call has a `score_mod_bwd`. Rows are
queries and columns keys; where a kernel has them the other way round, `transposed` is the same registers so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import fly

from .dropout_tile import KeptTile
from .features import BoundFeatures
from .mask import KeyRange
from .scores import LOG2_E, Place, ScoreTile


def transposed_layout(layout: fly.AccumulatorLayout) -> fly.AccumulatorLayout:
    """The same registers with rows as columns."""
    return fly.AccumulatorLayout(layout.atom, "n" if layout.rows_on == "m" else "m")


def transposed(fragment: fly.Fragment) -> fly.Fragment:
    """The transpose of a fragment, in the same registers."""
    return fly.Fragment(transposed_layout(fragment.layout), tuple(zip(*fragment.tiles, strict=True)))


def tile_by_tile(scores: fly.Fragment, hide: Callable[[fly.Fragment, int], fly.Fragment]) -> fly.Fragment:
    """`hide` of column tile after column tile, with its first column: LLVM makes one selection of several of an
    element, behind all their comparisons, each of which takes two scalar registers on AMD.
    """
    parts = []
    for c, column in enumerate(zip(*scores.tiles, strict=True)):
        part = fly.Fragment(scores.layout, tuple((tile,) for tile in column))
        parts.append(hide(part, c * scores.layout.columns).tiles)
        if len(scores.tiles[0]) > 1:
            fly.sched_barrier()
    return fly.Fragment(scores.layout, tuple(sum(row, ()) for row in zip(*parts, strict=True)))


@dataclass(frozen=True)
class HeadOfKeys:
    """One query head of a block of keys: a `Place`."""

    batch: fly.Value
    head: fly.Value
    keys: KeyRange
    split: bool = False


@dataclass(frozen=True)
class ScoreGradients:
    """Of a tile: `raw`, dT, and what modifiers' operands have of it, where it was asked for.

    `bias`: of its bias. `loads`: of the elements that a `score_mod` loaded, one by one; an element's gradient is the
    sum of all of them.
    """

    raw: fly.Fragment
    bias: fly.Fragment | None = None
    loads: tuple[fly.LoadGradient, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """What beside raw scores gets gradients: the `bias`, what a `score_mod` `loads`."""

    bias: bool = False
    loads: bool = False


SCORES_ALONE = Inputs()


@dataclass(frozen=True)
class Weights:
    """A tile's P, and `pull`: the gradients of raw scores, and of other inputs, from those of scores.

    `kept`: with dropout, which weights are. `steep`: P * ds/dt, where it was made before
    dP: it takes the place of P and of what the derivative is made of. Nothing but raw scores gets gradients then.
    """

    weights: fly.Fragment
    pull: Callable[[fly.Fragment], ScoreGradients]
    kept: KeptTile | None = None
    steep: fly.Fragment | None = None

    @property
    def of_values(self) -> fly.Fragment:
        """P as values were added up with it, without dropout's scale."""
        return self.weights if self.kept is None else self.kept.only(self.weights)

    @property
    def signed(self) -> fly.Fragment:
        """P, or -P where it is dropped."""
        return self.weights if self.kept is None else self.kept.signed(self.weights)

    def score_gradients(self, excess: fly.Fragment, less: fly.Fragment | None = None) -> ScoreGradients:
        """Of dP - delta, and of -delta, which it is where a weight is dropped."""
        if self.kept is not None:
            assert less is not None
            excess = self.kept.either(excess, less)
        if (steep := self.steep) is not None:
            return ScoreGradients(excess.map(lambda x, r, c: steep.tiles[r][c] * x))
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
    inputs: Inputs = SCORES_ALONE,
    early: bool = False,
    drops: bool = True,
    scarce: bool = False,
) -> Weights:
    """P of raw scores of queries `rows` with keys from `first_key` on, a multiple of their number.

    `first_query`: the first of `rows`, a multiple of their number. `lse2`: +inf for rows without keys, whose weights
    are 0. `hide`: -inf where a query does not see a key, None for tiles that all rows see whole. `early`: P is wanted
    for nothing else, so that scores' derivatives are put into it at once (`Weights.steep`). `drops`: with dropout, if
    there is any; else that is the caller's.
    """
    dropout = given.dropout(place, remade=True) if drops else None
    kept = None if dropout is None else dropout.kept(raw, first_query, first_key, scarce)
    if kept is not None:
        fly.sched_barrier()  # what random numbers take is free before scores take more
    scores, pull = _modified(raw, given, place, rows, first_key, scale_log2, inputs)
    if hide is not None:
        scores = hide(scores)
    exponents = scores.fma_rows(given.scale(scale_log2), lse2.map(lambda x: -x))
    if given.features.modifies:
        # scores of -1e9 and the like: their log-sum-exp is rounded to hundreds, and infinity times 0 would be NaN
        exponents = exponents.map(lambda x, r, c: fly.select(x > 0.0, 0.0, x))
    found = exponents.map(lambda x, r, c: fly.exp2(x))
    steep = pull(found).raw if early and given.features.modifies and inputs == SCORES_ALONE else None
    return Weights(found, pull, kept, steep)


def _modified(
    raw: fly.Fragment,
    given: BoundFeatures,
    place: Place,
    rows: fly.RowVector,
    first_key: fly.Value,
    scale_log2: fly.Value,
    inputs: Inputs,
) -> tuple[fly.Fragment, Callable[[fly.Fragment], ScoreGradients]]:
    """(modified scores, the way of their gradients back), column tile by column tile: each has a tape of its own."""
    if not given.features.modifies:
        return raw, ScoreGradients
    columns, by_hand = raw.layout.columns, given.features.score_mod_bwd is not None
    parts, taped, tapes, biases, places = [], [], [], [], []
    scaled: list[fly.Fragment] = []
    steepness: list[fly.Fragment | None] = []
    for c, column in enumerate(zip(*raw.tiles, strict=True)):
        part = fly.Fragment(raw.layout, tuple((tile,) for tile in column))
        first = first_key + c * columns
        bias = given.load_bias(columns, lambda first=first: (rows, first, place))  # type: ignore[misc]
        at = ScoreTile(rows, first, place, scale_log2 * (1 / LOG2_E), bias)
        # of raw scores themselves as derivatives are wanted without the scale, which results get
        steepness.append(given.steepness(part, at))
        part = given.scaled(part, at)
        scaled.append(part)
        with fly.Tape() as tape:
            part = given.add_offsets(part, at)
            if not by_hand:
                part = given.apply_mod(part, at)
        taped.append(part)
        parts.append([row[0] for row in (given.apply_mod(part, at) if by_hand else part).tiles])
        tapes.append(tape)
        biases.append(bias)
        places.append(at)

    def by_function(gradients: fly.Fragment) -> fly.Fragment:
        """What `score_mod_bwd` makes of them."""
        found = []
        for c, column in enumerate(zip(*gradients.tiles, strict=True)):
            part = fly.Fragment(raw.layout, tuple((tile,) for tile in column))
            found.append([row[0] for row in given.pull_mod(part, taped[c], places[c]).tiles])
        return fly.Fragment(raw.layout, tuple(zip(*found, strict=True)))

    def pull(gradients: fly.Fragment) -> ScoreGradients:
        loads: list[fly.LoadGradient] = []
        of_bias: dict[tuple[int, int], fly.Value] = {}
        if by_hand:
            gradients = by_function(gradients)

        def one(x: fly.Value, r: int, c: int) -> fly.Value:
            asked, bias, steep = [scaled[c].tiles[r][0]], biases[c], steepness[c]
            if inputs.bias and bias is not None:
                asked.append(bias.tiles[r][0])
            found = tapes[c].gradients(taped[c].tiles[r][0], asked, x, loads=inputs.loads)
            # raw scores' gradients get dropout's scale with the results
            loads.extend(replace(load, cotangent=given.scale_kept(load.cotangent)) for load in found.loads)
            for gradient in found.inputs[1:]:
                of_bias[r, c] = given.scale_kept(gradient)
            return found.inputs[0] if steep is None else found.inputs[0] * steep.tiles[r][0]

        of_raw = gradients.map(one)
        bias = gradients.map(lambda x, r, c: of_bias[r, c]) if of_bias else None
        return ScoreGradients(of_raw, bias, tuple(loads))

    return fly.Fragment(raw.layout, tuple(zip(*parts, strict=True))), pull
