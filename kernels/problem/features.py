"""The features of a call inside a kernel: which ones it is built with, and their operands, traced.

A kernel takes the operands of features, tensors and numbers, after its own parameters (`*operands`), and its static
`Features` say what they are. A kernel that is built without a feature has none of its code. What features there are,
and what they do to scores, is in `catalogue.FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import fly

from . import scores
from .catalogue import BY_NAME, MODIFIERS, Feature
from .dropout import RandomHead
from .dropout_tile import Dropout, kept_share
from .mask import KeyRange
from .mods import Mod
from .score_bias import BiasTile
from .scores import LOG2_E, Place, ScoreTile


@dataclass(frozen=True)
class Features:
    """The static side: which operands a kernel gets, in order, and the functions traced into it.

    `block_size`: (queries, keys) of the blocks of a block-sparse mask; `mask_mod` is for its partial blocks then.
    `one_query`: rows are heads of one query (`work.launch.heads_as_rows`), and `sink` is (Hkv, rows).
    `wide_softcap`: the softcap is so large that `fly.tanh`'s error would show, which is a part of the cap.
    `fp8_accumulate`: how products of 8-bit inputs add up, None for the default. `kv_cache_layout`: of pages, None for
    (pages, page_size, Hkv, D), else see `work.vectorized`.
    """

    operands: tuple[str, ...] = ()
    score_mod: Mod | None = None
    score_mod_bwd: Mod | None = None
    mask_mod: Mod | None = None
    block_size: tuple[int, int] | None = None
    one_query: bool = False
    wide_softcap: bool = False
    fp8_accumulate: str | None = None
    kv_cache_layout: str | None = None

    def only(self, names: Iterable[str]) -> Features:
        """These operands alone, and no function."""
        return Features(tuple(name for name in self.operands if name in names), one_query=self.one_query)

    @property
    def modifies(self) -> bool:
        """Whether scores are changed before the softmax."""
        return self.score_mod is not None or bool(self.modifiers)

    @property
    def modifiers(self) -> tuple[Feature, ...]:
        """Those that change scores by an operand, in their order."""
        return tuple(feature for feature in MODIFIERS if feature.operands[0] in self.operands)

    @property
    def only_bias(self) -> bool:
        """Whether a bias is all that scores get."""
        return [f.name for f in self.modifiers] == ["bias"] and not (self.score_mod or self.mask_mod)

    @property
    def elementwise(self) -> bool:
        """Whether there is code for every score of every tile alone."""
        return self.score_mod is not None or self.masks_every_tile or self.drops or "bias" in self.operands

    @property
    def alone(self) -> str | None:
        """What has code for every score alone, where that is all that a call asks for.

        A "bias", "dropout" or a "function".
        """
        functions = (self.score_mod is not None) + (self.mask_mod is not None)
        known = {(("bias",), 0): "bias", (BY_NAME["dropout"].operands, 0): "dropout", ((), 1): "function"}
        return known.get((self.operands, functions))

    @property
    def invariant(self) -> bool:
        """Whether a row's result may depend on nothing but its query and its keys (`split_keys`)."""
        return "split_keys" in self.operands

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return "rng_state" in self.operands

    @property
    def masks_every_tile(self) -> bool:
        """Whether there is a `mask_mod` that is not for partial blocks alone."""
        return self.mask_mod is not None and self.block_size is None

    @property
    def per_score(self) -> bool:
        """Whether every tile of scores takes code of its own."""
        return self.modifies or self.masks_every_tile

    @property
    def weighs_whole(self) -> bool:
        """Whether scores are changed, or weights dropped: AMD's fused backward kernels make a tile's at once then."""
        return self.modifies or self.drops

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

    def bind(self, values: tuple[Any, ...]) -> BoundFeatures:
        """The traced side, with the values of the operands."""
        count = len(self.operands)
        return BoundFeatures(self, dict(zip(self.operands, values[:count], strict=True)), tuple(values[count:]))


@dataclass(frozen=True)
class BoundFeatures:
    """Operands of `features` in a kernel, by name, and the auxiliary tensors of its functions."""

    features: Features
    operands: Mapping[str, Any]
    aux: tuple[fly.Tensor, ...]

    def reread(self) -> BoundFeatures:
        """The same, of parameters read anew (`fly.reread`)."""
        operands = {name: fly.reread(value) for name, value in self.operands.items()}
        return replace(self, operands=operands, aux=tuple(map(fly.reread, self.aux)))

    def reread_from(self, parameters: BoundFeatures, names: Iterable[str]) -> BoundFeatures:
        """The same with operands of these names, as the kernel got them (`parameters`), read anew."""
        anew = {name: fly.reread(parameters.operands[name]) for name in names if name in parameters.operands}
        return replace(self, operands={**self.operands, **anew}) if anew else self

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
            head = place.head
            assert rows is not None and not isinstance(head, fly.RowVector)
            return rows.map(lambda row: self._sink(head, row))
        return scores.of_head(place, self._sink)

    def sink_of(self, head: fly.Value, row: fly.Value | None = None) -> fly.Value | None:
        """A head's sink, or None; where rows are heads of a key head `head`, a row's, the last one's past the end."""
        return None if self.get("sink") is None else self._sink(head, row)

    def _sink(self, head: fly.Value, row: fly.Value | None = None) -> fly.Value:
        """The same where there are sinks."""
        sink = self.get("sink")
        place = (head, fly.minimum(row, sink.shape[1] - 1)) if self.features.one_query else (head,)
        loaded: fly.Value = sink.load(*place).to(fly.f32)
        return loaded

    def at(self, place: Place) -> BoundFeatures:
        """With what is one number for the head loaded: for before a loop in which `modify` is."""
        loaded = {
            feature.operands[0]: self._value(feature, place)
            for feature in self.features.modifiers
            if feature.load is not None
        }
        if self.features.drops:
            loaded["rng_state"] = self._random(place)
        return replace(self, operands={**self.operands, **loaded}) if loaded else self

    def _random(self, place: Place) -> RandomHead:
        """The random numbers of the head, loaded if they are not yet."""
        state, head = self.operands["rng_state"], place.head
        if isinstance(state, RandomHead):
            return state
        assert not isinstance(head, fly.RowVector), "rows are of one head where there is dropout"
        return RandomHead.load(state, place.batch * self.operands["query_heads"] + head)

    def dropout(self, place: Place, remade: bool = False) -> Dropout | None:
        """What dropout does to the weights of the head, where there is any.

        `remade`: for tiles that have no scalar registers for what is made of the random state, and of the threshold.
        """
        if not self.features.drops:
            return None
        dropout = Dropout(self._random(place), self.operands["dropped"])
        return dropout.made_by(fly.remade) if remade else dropout

    def of_kept(self, delta: fly.Value) -> fly.Value:
        """A number times the share of the weights that dropout keeps."""
        return delta * kept_share(self.operands["dropped"]) if self.features.drops else delta

    def scale_kept(self, factor: fly.Value | fly.RowVector) -> Any:
        """A factor of what was added up with kept weights, or of each row: times 1 / the share that is kept."""
        if not self.features.drops:
            return factor
        scale = fly.rcp(kept_share(self.operands["dropped"]))
        return factor.map(lambda x: x * scale) if isinstance(factor, fly.RowVector) else factor * scale

    def _value(self, feature: Feature, place: Place) -> Any:
        """A modifier's operand, loaded if it is one number for the head."""
        value, load = self.operands[feature.operands[0]], feature.load
        return load(value, place) if load is not None and isinstance(value, fly.Tensor) else value

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
        tile: fly.Fragment,
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
            return tile
        at = ScoreTile(rows, first_key, place, scale_log2 * (1 / LOG2_E), bias)
        return self.apply_mod(self.add_operands(tile, at), at)

    def add_operands(self, tile: fly.Fragment, at: ScoreTile) -> fly.Fragment:
        """Raw scores, scaled and with what operands do to them: what a `score_mod` gets."""
        return self.add_offsets(self.scaled(tile, at), at)

    def scaled(self, tile: fly.Fragment, at: ScoreTile) -> fly.Fragment:
        """Raw scores, scaled, and changed by what takes them raw."""
        raw = [feature for feature in self.features.modifiers if feature.raw]
        return self._changed(tile, raw, at) if raw else tile.map(lambda x, r, c: x * at.softmax_scale)

    def steepness(self, tile: fly.Fragment, at: ScoreTile) -> fly.Fragment | None:
        """Of raw scores: derivatives of `scaled` with respect to them times the scale, None where all are 1."""
        found = None
        for feature in self.features.modifiers:
            if feature.steepness is not None:
                assert found is None, "one feature at most takes raw scores"
                found = feature.steepness(self, tile, self._value(feature, at.place), at)
        return found

    def add_offsets(self, tile: fly.Fragment, at: ScoreTile) -> fly.Fragment:
        """`scaled` scores with what other operands do to them."""
        return self._changed(tile, [feature for feature in self.features.modifiers if not feature.raw], at)

    def _changed(self, tile: fly.Fragment, by: Iterable[Feature], at: ScoreTile) -> fly.Fragment:
        for feature in by:
            assert feature.modify is not None
            tile = feature.modify(self, tile, self._value(feature, at.place), at)
        return tile

    def apply_mod(self, tile: fly.Fragment, at: ScoreTile) -> fly.Fragment:
        """The same behind the `score_mod`, where there is one."""
        mod = self.features.score_mod
        return tile if mod is None else scores.apply_mod(tile, mod, at, self.aux)

    def pull_mod(self, gradients: fly.Fragment, tile: fly.Fragment, at: ScoreTile) -> fly.Fragment:
        """Gradients of what `score_mod_bwd` is for, from those of what `apply_mod` made of the tile."""
        assert self.features.score_mod_bwd is not None
        return scores.pull_mod(gradients, tile, self.features.score_mod_bwd, at, self.aux)

    def mask(
        self, tile: fly.Fragment, rows: fly.RowVector, first_key: Any, place: Place, one_by_one: bool = False
    ) -> fly.Fragment:
        """Scores with -inf where `mask_mod` says that a key is not seen; `one_by_one`: without vectors of limits."""
        mod = self.features.mask_mod
        return tile if mod is None else scores.hide(tile, mod, rows, first_key, place, self.aux, one_by_one)


NO_FEATURES = Features()
NOTHING = NO_FEATURES.bind(())
