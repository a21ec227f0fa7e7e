"""Scales of 8-bit keys and values in a kernel: one a head, or one for each key of a head.

A scale of a head is (B, Hkv) f32. Scales by key are f32 of three dimensions, a number where k and v have a row: (B,
Skv, Hkv), (1, total_kv, Hkv) of packed sequences, or (pages, page_size, Hkv).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly

from ..problem.features import BoundFeatures
from .sequences import PagedSequence, Sequence, existing
from .tile_scheduler import Work

# of what scores are multiplied by, in log2 units: with a scale of 0, masked scores would be NaN
LEAST_SCALE = 2.0**-126


def by_key(scales: fly.Tensor | None) -> bool:
    """Whether scales are by key, of the two kinds that there are; False where there are none."""
    return scales is not None and scales.rank == 3


def scaled(scale_log2: fly.Value, factor: fly.Value | None) -> fly.Value:
    """What scores are multiplied by, with a scale of their keys' head, or None."""
    return scale_log2 if factor is None else fly.maximum(scale_log2 * factor, LEAST_SCALE)


def of_head(scales: fly.Tensor | None, batch: Any, head: Any, heads: Any) -> fly.Value | None:
    """The scale of a sequence's query head, one of `heads`; None where there is none, or where scales are by key."""
    if scales is None or by_key(scales):
        return None
    loaded: fly.Value = scales.load(batch, head // (heads // scales.shape[1]))
    return loaded


@dataclass(frozen=True)
class ScalesByKey:
    """The scales of a sequence's keys of one key head: `tensor` has one where k and v have a row."""

    tensor: fly.Tensor
    kv: Sequence | PagedSequence
    kv_head: Any

    @staticmethod
    def of(scales: fly.Tensor, kv: Sequence | PagedSequence, head: Any, heads: Any) -> ScalesByKey:
        """Of query head `head`, one of `heads`."""
        return ScalesByKey(scales, kv, head // (heads // scales.shape[2]))

    def load(self, key: fly.Value) -> fly.Value:
        """Of a key, the last one's past the end; lanes may have different keys."""
        kv, tensor = self.kv, self.tensor
        row = fly.maximum(fly.minimum(key, kv.length - 1), 0) + kv.start
        if isinstance(kv, PagedSequence):
            place = fly.minimum(row // kv.page_size, fly.maximum(kv.table.shape[1] - 1, 0))
            entry, row = kv.table.load(kv.index, place), row % kv.page_size
        else:
            entry = fly.i32(0) if kv.index is None else kv.index
        found: fly.Value = tensor.load(existing(entry, tensor.shape[0]), existing(row, tensor.shape[1]), self.kv_head)
        return found

    def of_columns(self, layout: fly.AccumulatorLayout, tiles: int, first_key: Any) -> fly.ColumnVector:
        """Of the keys of a tile of scores, from `first_key` on."""
        columns = fly.ColumnVector.full(layout, tiles, 0.0).columns()
        return columns.map(lambda column: self.load(column + first_key))


@dataclass(frozen=True)
class KeyScales:
    """All scales of a block's keys and values: those of its head as numbers, those by key to be loaded, or None."""

    k_head: fly.Value | None
    v_head: fly.Value | None
    k_keys: ScalesByKey | None
    v_keys: ScalesByKey | None

    @staticmethod
    def of(given: BoundFeatures, work: Work, heads: Any) -> KeyScales:
        """Of the work's query head, one of `heads`."""
        k, v = (given.get(name) for name in ("k_descale", "v_descale"))
        k_head, v_head = (of_head(scales, work.batch, work.head, heads) for scales in (k, v))
        k_keys, v_keys = (ScalesByKey.of(x, work.kv, work.head, heads) if by_key(x) else None for x in (k, v))
        return KeyScales(k_head, v_head, k_keys, v_keys)

    def times_head(self, scale_log2: fly.Value) -> fly.Value:
        """What raw scores are multiplied by, with the head's scale."""
        return scaled(scale_log2, self.k_head)

    def times_values(self, rows: fly.RowVector) -> fly.RowVector:
        """What rows of the output are multiplied by, with the head's scale."""
        factor = self.v_head
        return rows if factor is None else rows.map(lambda x: x * factor)


def times_columns(scores: fly.Fragment, factors: fly.ColumnVector) -> fly.Fragment:
    """Every column times its factor."""
    return scores.map_columns(lambda tile, factor: tile * factor, factors)


def times_keys(scores: fly.Fragment, scales: ScalesByKey | None, first_key: Any) -> fly.Fragment:
    """Every column times the scale of its key, if there are such; the first one is `first_key`."""
    if scales is None:
        return scores
    return times_columns(scores, scales.of_columns(scores.layout, len(scores.tiles[0]), first_key))
