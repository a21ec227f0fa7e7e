"""What features do to a tile of scores, as functions over fragments.

Scores are modified in the order of `catalogue.FEATURES`, in the units of softmax_scale * q k^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import fly
from fly.errors import DTypeError

from .mask import KeyRange
from .mods import Aux, Batch, Mod, score_of
from .score_bias import BiasTile, add

LOG2_E = math.log2(math.e)
LARGEST_INVERSE = 2.0**126  # of a softcap, or of the scale: infinity times 0 would be NaN
TANH_SMALL = 0.35
TANH_SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)  # of tanh(x) / x, in x squared


class Place(Protocol):
    """Which sequence and query head a block's scores belong to, i32 values, and which keys its rows see.

    `head` is a vector where rows differ in it. `split`: the block takes a part of the keys.
    """

    @property
    def batch(self) -> fly.Value: ...

    @property
    def head(self) -> fly.Value | fly.RowVector: ...

    @property
    def keys(self) -> KeyRange: ...

    @property
    def split(self) -> bool: ...


@dataclass(frozen=True)
class ScoreTile:
    """Where a tile of scores is: query indices `rows`, columns from `first_key` on, a multiple of their number.

    `softmax_scale`: of raw scores; `bias`: that of the tile, where it was loaded before.
    """

    rows: fly.RowVector
    first_key: Any
    place: Place
    softmax_scale: fly.Value
    bias: fly.Fragment | None = None


def cap(scores: fly.Fragment, cap: fly.Value, tile: ScoreTile, *, wide: bool) -> fly.Fragment:
    """cap * tanh(score / cap) of raw scores; `wide`: see `Features.wide_softcap`."""
    inverse = _of_cap(cap, tile)
    if wide:
        return scores.map(lambda x, r, c: _capped(x * tile.softmax_scale, x * inverse, cap))
    return scores.map(lambda x, r, c: fly.tanh(x * inverse) * cap)


def cap_steepness(scores: fly.Fragment, cap: fly.Value, tile: ScoreTile, *, wide: bool) -> fly.Fragment:
    """The derivative of the same with respect to scores: 1 - tanh(score / cap) ** 2."""
    inverse, tangent = _of_cap(cap, tile), tanh if wide else fly.tanh

    def of(x: fly.Value, r: int, c: int) -> fly.Value:
        of_cap = tangent(x * inverse)
        return 1.0 - of_cap * of_cap

    return scores.map(of)


def _of_cap(cap: fly.Value, tile: ScoreTile) -> fly.Value:
    """What raw scores are times to be parts of the cap."""
    return fly.minimum(tile.softmax_scale * fly.rcp(cap), LARGEST_INVERSE)


def _capped(score: fly.Value, ratio: fly.Value, cap: fly.Value) -> fly.Value:
    """cap * tanh(score / cap) to about 2**-20 of itself, for any cap; `ratio` is score / cap.

    Small ratios take tanh's series, whose error is below 2**-26 there, times the score: what is left of it then does
    not depend on how exact the ratio is, or on whether it is 0.
    """
    square = ratio * ratio
    series = fly.fma(square, TANH_SERIES[-1], TANH_SERIES[-2])
    for coefficient in TANH_SERIES[-3::-1]:
        series = fly.fma(series, square, coefficient)
    large = cap * (1.0 - 2.0 * fly.rcp(fly.exp2(ratio * (2 * LOG2_E)) + 1.0))
    return fly.select(fly.absolute(ratio) < TANH_SMALL, score * series, large)


def tanh(x: fly.Value) -> fly.Value:
    """Hyperbolic tangent of an f32 to about 2**-20 of itself, on every target; `fly.tanh` is the faster one."""
    return _capped(x, x, fly.f32(1.0))


def of_head(place: Place, load: Callable[[fly.Value], fly.Value]) -> fly.Value | fly.RowVector:
    """What is loaded for the head, or for each row's."""
    return place.head.map(load) if isinstance(place.head, fly.RowVector) else load(place.head)


def add_distances(scores: fly.Fragment, slope: fly.Value | fly.RowVector, tile: ScoreTile) -> fly.Fragment:
    """ALiBi: less slope * |key - position of the query|; Press et al., "Train Short, Test Long" (2021)."""
    rows, keys = tile.rows, tile.place.keys
    if isinstance(slope, fly.Value):
        of_head = slope
        slope = rows.map(lambda _: of_head)
    positions = rows.map(lambda row: row + (keys.keys - keys.queries) - tile.first_key)
    return scores.add_distances(positions, slope.map(lambda s: -s))


def add_bias(scores: fly.Fragment, tensor: fly.Tensor, tile: ScoreTile, *, alone: bool) -> fly.Fragment:
    """Plus the bias; `alone`: it is all that scores get."""
    if tile.bias is not None:
        return add(scores, tile.bias)
    columns = len(scores.tiles[0]) * scores.layout.columns
    together = tensor.dtype is fly.f32 and alone
    return BiasTile(tensor, tile.rows, tile.first_key, columns, tile.place).add_to(scores, together)


def apply_mod(scores: fly.Fragment, mod: Mod, tile: ScoreTile, aux: tuple[fly.Tensor, ...]) -> fly.Fragment:
    """score_mod(score, batch, head, query, key, *aux) of every score."""

    def call(score: Any, head: Any, query: Any, key: Any) -> Any:
        return score_of(mod.function(score, tile.place.batch, head, query, key, *map(Aux, aux)), mod)

    return _each(scores, tile.rows, tile.first_key, tile.place, call)


def pull_mod(
    gradients: fly.Fragment, scores: fly.Fragment, mod: Mod, tile: ScoreTile, aux: tuple[fly.Tensor, ...]
) -> fly.Fragment:
    """score_mod_bwd(gradient, score, batch, head, query, key, *aux) of every score that a `score_mod` got."""

    def call(gradient: Any, score: Any, head: Any, query: Any, key: Any) -> Any:
        found = mod.function(gradient, score, tile.place.batch, head, query, key, *map(Aux, aux))
        return score_of(found, mod, "score_mod_bwd")

    return _each(gradients, tile.rows, tile.first_key, tile.place, call, others=(scores,))


def hide(
    scores: fly.Fragment,
    mod: Mod,
    rows: fly.RowVector,
    first_key: Any,
    place: Place,
    aux: tuple[fly.Tensor, ...],
    one_by_one: bool,
) -> fly.Fragment:
    """-inf where mask_mod(batch, head, query, key, *aux) says that a key is not seen; `one_by_one`: see `_each`."""

    def seen(score: Any, head: Any, query: Any, key: Any) -> Any:
        keep = mod.function(Batch(place.batch.ir, place.batch.dtype), head, query, key, *map(Aux, aux))
        if isinstance(keep, bool):
            return score if keep else fly.f32(-math.inf)
        if not isinstance(keep, fly.Value) or keep.dtype is not fly.i1:
            raise DTypeError(f"mask_mod {mod.function!r} returned {keep!r}; expected a comparison's result")
        return fly.select(keep, score, -math.inf)

    return _each(scores, rows, first_key, place, seen, one_by_one)


def _each(
    scores: fly.Fragment,
    rows: fly.RowVector,
    first_key: Any,
    place: Place,
    function: Callable[..., Any],
    one_by_one: bool = False,
    others: tuple[fly.Fragment, ...] = (),
) -> fly.Fragment:
    """`function(score, *others, head, query, key)` of every score alone, and of what others have in its place.

    Queries and keys are cut to those that exist: what is computed for others is not used, but may load. `one_by_one`:
    without a vector of limits, which LLVM would keep in a scalar register an element where a loop goes on to what is
    rare.
    """
    keys = place.keys
    last_row, last_key = fly.maximum(keys.queries - 1, 0), fly.maximum(keys.keys - 1, 0)
    queries = rows.map(lambda row: fly.minimum(row, last_row))

    one = place.head
    by_row = (one,) if isinstance(one, fly.RowVector) else ()

    def elements(tile: fly.Value, query: fly.Value, column: fly.Value, *more: fly.Value) -> fly.Value:
        count, beside = len(tile), more[len(by_row) :]
        # one head stays one value, so that who differentiates sees that it is
        head = more[0] if by_row else [one] * count
        if one_by_one:
            keys = [fly.minimum(column[i], last_key) for i in range(count)]
        else:
            cut = fly.minimum(column, last_key)
            keys = [cut[i] for i in range(count)]
        return fly.from_elements(
            [function(tile[i], *(other[i] for other in beside), head[i], query[i], keys[i]) for i in range(count)]
        )

    return scores.map_places(queries, elements, *by_row, first_column=first_key, others=others)
