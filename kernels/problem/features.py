"""What a call asks of attention beyond softmax(scale * Q K^T) V: score modifiers, masks and how sequences lie.

A kernel takes the operands of these features, tensors and numbers, after its own parameters (`*operands`), and its
static `Features` say what they are. A kernel that is built without a feature has none of its code.

Scores are modified in this order, each where it is asked for, in the units of softmax_scale * q k^T:

    s = softcap * tanh(s / softcap)
    s = s - slope * |key - position of the query|                 ALiBi, Press et al., "Train Short, Test Long" (2021)
    s = s + bias[batch, head, query, key]
    s = score_mod(s, batch, head, query, key, *aux_tensors)
    s = -inf where a window or mask_mod(batch, head, query, key, *aux_tensors) says that the key is not seen
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

import fly
from fly.errors import DTypeError

from .mask import KeyRange
from .score_bias import BiasTile, add

LOG2_E = math.log2(math.e)
LARGEST_INVERSE = 2.0**126  # of a softcap, times the scale: infinity times a score of 0 would be NaN
TANH_SMALL = 0.35
TANH_SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)  # of tanh(x) / x, in x squared

# The operands that kernels know, in the order in which they take them. Auxiliary tensors come last.
OPERANDS = (
    "seqused_q",
    "seqused_kv",
    "cache_leftpad",
    "kv_batch_idx",
    "block_table",
    "window_left",
    "window_right",
    "attention_chunk",
    "softcap",
    "alibi_slopes",
    "bias",
    "sink",
    "block_counts",
    "block_indices",
    "whole_block_counts",
    "whole_block_indices",
    "q_descale",
    "k_descale",
    "v_descale",
)
NUMBERS = ("window_left", "window_right", "attention_chunk", "softcap")
SCORE_OPERANDS = ("softcap", "alibi_slopes", "bias")


@dataclass(frozen=True)
class Mod:
    """A Python function that is traced into a kernel.

    Two are equal when they have the same code, captured and global values and defaults, so that a function made anew
    for every call is compiled once.
    """

    function: Callable[..., Any] = field(compare=False)
    identity: Hashable

    @staticmethod
    def of(function: Callable[..., Any]) -> Mod:
        """Of a function; one that depends on what cannot be hashed, such as a list, is equal to itself only."""
        identity = _identity(function, ())
        try:
            hash(identity)
        except TypeError:
            return Mod(function, function)
        return Mod(function, identity)


def _identity(value: Any, inside: tuple[Any, ...]) -> Hashable:
    """What a function that depends on `value` depends on; `inside`: the functions that are being looked at."""
    if isinstance(value, MethodType):
        return _identity(value.__func__, inside), value.__self__
    if isinstance(value, partial):
        return _identity(value.func, inside), value.args, tuple(sorted(value.keywords.items()))
    if not isinstance(value, FunctionType) or value in inside:
        # the type too, as 1 equals 1.0 and True
        return type(value), value
    inside = (*inside, value)
    code, names = value.__code__, value.__globals__
    used = tuple((name, _identity(names[name], inside)) for name in _global_names(code) if name in names)
    captured = tuple(_identity(cell.cell_contents, inside) for cell in value.__closure__ or ())
    defaults = (value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items())))
    return code, used, captured, defaults


def dependencies(function: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function captures or finds in its module, functions that it calls included."""
    if not isinstance(function, FunctionType) or function in inside:
        return
    names = function.__globals__
    captured = zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))
    for name, value in (*captured, *((n, names[n]) for n in _global_names(function.__code__) if n in names)):
        for part in value if isinstance(value, tuple) else (value,):
            yield name, part
            yield from dependencies(part, (*inside, function))


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Names that a function may look up among its module's, functions inside of it too."""
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _global_names(part))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@dataclass(frozen=True)
class Features:
    """The static side: which operands a kernel gets, in order, and the functions traced into it.

    `block_size`: (queries, keys) of the blocks of a block-sparse mask; `mask_mod` is for its partial blocks then.
    `one_query`: rows are heads of one query (`work.launch.heads_as_rows`), and `sink` is (Hkv, rows).
    `wide_softcap`: the softcap is so large that `fly.tanh`'s error would show, which is a part of the cap.
    """

    operands: tuple[str, ...] = ()
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    block_size: tuple[int, int] | None = None
    one_query: bool = False
    wide_softcap: bool = False

    def place(self, name: str) -> int:
        """Where operand `name` is among those of a call's operands that are tensors."""
        return [n for n in self.operands if n not in NUMBERS].index(name)

    def tensor(self, operands: Iterable[Any], name: str) -> Any:
        """The tensor of operand `name` among a call's `operands`, from which numbers may be left out."""
        return [value for value in operands if not isinstance(value, int | float)][self.place(name)]

    def only(self, names: Iterable[str]) -> Features:
        """These operands alone, and no function."""
        return Features(tuple(name for name in self.operands if name in names), one_query=self.one_query)

    @property
    def modifies(self) -> bool:
        """Whether scores are changed before the softmax."""
        return self.score_mod is not None or any(name in self.operands for name in SCORE_OPERANDS)

    @property
    def only_bias(self) -> bool:
        """Whether a bias is all that scores get."""
        return [n for n in SCORE_OPERANDS if n in self.operands] == ["bias"] and not (self.score_mod or self.mask_mod)

    @property
    def elementwise(self) -> bool:
        """Whether there is code for every score of every tile alone."""
        return self.score_mod is not None or self.masks_every_tile or "bias" in self.operands

    @property
    def alone(self) -> str | None:
        """What has code for every score alone, a "bias" or a "function", where that is all that a call asks for."""
        functions = (self.score_mod is not None) + (self.mask_mod is not None)
        return {(("bias",), 0): "bias", ((), 1): "function"}.get((self.operands, functions))

    @property
    def masks_every_tile(self) -> bool:
        """Whether there is a `mask_mod` that is not for partial blocks alone."""
        return self.mask_mod is not None and self.block_size is None

    @property
    def per_score(self) -> bool:
        """Whether every tile of scores takes code of its own."""
        return self.modifies or self.masks_every_tile

    @property
    def windowed(self) -> bool:
        """Whether rows do not see the first keys."""
        return "window_left" in self.operands or "attention_chunk" in self.operands

    @property
    def ends_early(self) -> bool:
        """Whether rows do not see the last keys, beside causality."""
        return "window_right" in self.operands or "attention_chunk" in self.operands

    @property
    def may_hide(self) -> bool:
        """Whether scores may be -inf in tiles that need no mask, or right after ones that do."""
        return self.score_mod is not None or self.windowed or self.block_size is not None or "bias" in self.operands

    def bind(self, values: tuple[Any, ...]) -> Given:
        """The traced side, with the values of the operands."""
        count = len(self.operands)
        return Given(self, dict(zip(self.operands, values[:count], strict=True)), tuple(values[count:]))


class Place(Protocol):
    """Which sequence and query head a block's scores belong to, i32 values, and which keys its rows see.

    `head` is a vector where rows differ in it. `split`: the block takes a part of the keys.
    """

    batch: fly.Value
    head: fly.Value | fly.RowVector
    keys: KeyRange
    split: bool


@dataclass(frozen=True)
class Given:
    """Operands of `features` in a kernel, by name, and the auxiliary tensors of its functions."""

    features: Features
    operands: Mapping[str, Any]
    aux: tuple[fly.Tensor, ...]

    def get(self, name: str) -> Any:
        """An operand, or None."""
        return self.operands.get(name)

    def key_range(self, queries: Any, keys: Any, causal: bool) -> KeyRange:
        """Which of `keys` keys each of a sequence's `queries` sees, but for `mask_mod`."""
        left, right, chunk = map(self.get, ("window_left", "window_right", "attention_chunk"))
        one = self.features.one_query
        return KeyRange(queries, keys, causal, left=left, right=right, one_query=one, chunk=chunk)

    def scale(self, scale_log2: fly.Value) -> fly.Value:
        """What the softmax multiplies scores by: modified ones are scaled already."""
        return fly.f32(LOG2_E) if self.features.modifies else scale_log2

    def sink(self, place: Place, rows: fly.RowVector | None = None) -> fly.Value | fly.RowVector | None:
        """The head's sink; None also for a part of the keys, as the combination takes it in.

        `rows`: their numbers, for which the sinks are where they are heads.
        """
        if place.split or self.get("sink") is None:
            return None
        if self.features.one_query:
            return rows.map(lambda row: self.sink_of(place.head, row))
        return _of_head(place, self.sink_of)

    def sink_of(self, head: fly.Value, row: fly.Value | None = None) -> fly.Value | None:
        """A head's sink, or None; where rows are heads of a key head `head`, a row's, the last one's past the end."""
        sink = self.get("sink")
        if sink is None:
            return None
        place = (head, fly.minimum(row, sink.shape[1] - 1)) if self.features.one_query else (head,)
        return sink.load(*place).to(fly.f32)

    def at(self, place: Place) -> Given:
        """With what is one number for the head loaded: for before a loop in which `modify` is."""
        slopes = self.get("alibi_slopes")
        if not isinstance(slopes, fly.Tensor):
            return self
        slope = _of_head(place, lambda head: slopes.load(place.batch, head).to(fly.f32))
        return replace(self, operands={**self.operands, "alibi_slopes": slope})

    def load_bias(self, columns: int, at: Callable[[], tuple[fly.RowVector, Any, Place]]) -> fly.Fragment | None:
        """The bias of a tile of scores, if there is one: for before the products that make them; see `BiasTile`.

        `columns`: keys of the tile; `at`: (rows, first_key, place) of it, not called where there is no bias.
        """
        bias = self.get("bias")
        if bias is None:
            return None
        rows, first_key, place = at()
        return BiasTile(bias, rows, first_key, columns, place).load()

    def modify(
        self,
        scores: fly.Fragment,
        scale_log2: fly.Value,
        rows: fly.RowVector,
        first_key: Any,
        place: Place,
        bias: fly.Fragment | None = None,
    ) -> fly.Fragment:
        """Raw scores as the softmax takes them (see `scale`), not masked.

        `rows`: query indices; columns start at `first_key`, a multiple of their number. What `at(place)` loads, and
        the `bias` that `load_bias` does, is loaded here if it is not yet.
        """
        if not self.features.modifies:
            return scores
        softmax_scale = scale_log2 * (1 / LOG2_E)
        if (cap := self.get("softcap")) is not None:
            inverse = fly.minimum(softmax_scale * fly.rcp(cap), LARGEST_INVERSE)
            if self.features.wide_softcap:
                scores = scores.map(lambda tile, r, c: _capped(tile * softmax_scale, tile * inverse, cap))
            else:
                scores = scores.map(lambda tile, r, c: fly.tanh(tile * inverse) * cap)
        else:
            scores = scores.map(lambda tile, r, c: tile * softmax_scale)
        if self.get("alibi_slopes") is not None:
            scores = _alibi(scores, self.at(place).get("alibi_slopes"), rows, first_key, place.keys)
        if bias is not None:
            scores = add(scores, bias)
        elif (tensor := self.get("bias")) is not None:
            columns = len(scores.tiles[0]) * scores.layout.columns
            together = tensor.dtype is fly.f32 and self.features.only_bias
            scores = BiasTile(tensor, rows, first_key, columns, place).add_to(scores, together)
        if (mod := self.features.score_mod) is not None:

            def call(score: Any, head: Any, query: Any, key: Any) -> Any:
                return _f32(mod.function(score, place.batch, head, query, key, *map(Aux, self.aux)), mod)

            scores = _each(scores, rows, first_key, place, call)
        return scores

    def mask(
        self, scores: fly.Fragment, rows: fly.RowVector, first_key: Any, place: Place, one_by_one: bool = False
    ) -> fly.Fragment:
        """Scores with -inf where `mask_mod` says that a key is not seen; `one_by_one`: see `_each`."""
        mod = self.features.mask_mod
        if mod is None:
            return scores

        def seen(score: Any, head: Any, query: Any, key: Any) -> Any:
            keep = mod.function(_Batch(place.batch.ir, place.batch.dtype), head, query, key, *map(Aux, self.aux))
            if isinstance(keep, bool):
                return score if keep else fly.f32(-math.inf)
            if not isinstance(keep, fly.Value) or keep.dtype is not fly.i1:
                raise DTypeError(f"mask_mod {mod.function!r} returned {keep!r}; expected a comparison's result")
            return fly.select(keep, score, -math.inf)

        return _each(scores, rows, first_key, place, seen, one_by_one)


NO_FEATURES = Features()
NOTHING = NO_FEATURES.bind(())


@dataclass(frozen=True)
class Aux:
    """An auxiliary tensor in a `score_mod` or `mask_mod`: `aux[i, j]` loads an element."""

    tensor: fly.Tensor

    def __getitem__(self, index: Any) -> fly.Value:
        value = self.tensor.load(*(index if isinstance(index, tuple) else (index,)))
        return value.to(fly.f32) if value.dtype.is_float else value


class _Batch(fly.Value):
    """A sequence's number, with what FlexAttention's `and_masks` and `or_masks` ask of it."""

    __slots__ = ()

    def new_ones(self, *size: Any, **options: Any) -> fly.Value:
        """True, to be combined with masks."""
        return fly.i1(True)

    def new_zeros(self, *size: Any, **options: Any) -> fly.Value:
        """False, to be combined with masks."""
        return fly.i1(False)


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


def _of_head(place: Place, load: Callable[[fly.Value], fly.Value]) -> fly.Value | fly.RowVector:
    """What is loaded for the head, or for each row's."""
    return place.head.map(load) if isinstance(place.head, fly.RowVector) else load(place.head)


def _alibi(
    scores: fly.Fragment, slope: fly.Value | fly.RowVector, rows: fly.RowVector, first_key: Any, keys: KeyRange
) -> fly.Fragment:
    if isinstance(slope, fly.Value):
        slope = rows.map(lambda _: slope)
    positions = rows.map(lambda row: row + (keys.keys - keys.queries) - first_key)
    return scores.add_distances(positions, slope.map(lambda s: -s))


def _each(
    scores: fly.Fragment,
    rows: fly.RowVector,
    first_key: Any,
    place: Place,
    function: Callable[..., Any],
    one_by_one: bool = False,
) -> fly.Fragment:
    """`function(score, head, query, key)` of every score alone.

    Queries and keys are cut to those that exist: what is computed for others is not used, but may load. `one_by_one`:
    without a vector of limits, which LLVM would keep in a scalar register an element where a loop goes on to what is
    rare.
    """
    keys = place.keys
    last_row, last_key = fly.maximum(keys.queries - 1, 0), fly.maximum(keys.keys - 1, 0)
    queries = rows.map(lambda row: fly.minimum(row, last_row))

    heads = place.head if isinstance(place.head, fly.RowVector) else rows.map(lambda _: place.head)

    def elements(tile: fly.Value, query: fly.Value, column: fly.Value, head: fly.Value) -> fly.Value:
        if one_by_one:
            keys = [fly.minimum(column[i], last_key) for i in range(tile.length)]
        else:
            cut = fly.minimum(column, last_key)
            keys = [cut[i] for i in range(tile.length)]
        return fly.from_elements([function(tile[i], head[i], query[i], keys[i]) for i in range(tile.length)])

    return scores.map_places(queries, elements, heads, first_column=first_key)


def _f32(value: Any, mod: Mod) -> fly.Value:
    if isinstance(value, int | float):
        return fly.f32(float(value))
    if not isinstance(value, fly.Value) or not value.dtype.is_float or value.length is not None:
        raise DTypeError(f"score_mod {mod.function!r} returned {value!r}; expected a float")
    return value.to(fly.f32)
