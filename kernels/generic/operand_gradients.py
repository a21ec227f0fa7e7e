"""Gradients of what modifies scores on their way to memory: of a bias, and of what a `score_mod` loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import fly
from fly.ir.atomics import atomic_add_bounded
from fly.ir.memory import store_bounded

from ..problem.scores import Place

BOUND = 2**31 - 1  # bytes from a wave's first row on; an offset of -1 is past it
OUTSIDE = -1
Put = Callable[..., None]  # (values, base, offset, bound, align=)


def put_bias_gradients(
    dbias: fly.Tensor, gradients: fly.Fragment, first_row: Any, first_key: Any, place: Place, *, adds: bool
) -> None:
    """Those of a tile of scores into `dbias`, stored, or added in f32 where several blocks have the same element.

    dbias: (B, H, Sq, Skv) with strides of 0 where it is broadcast, or (B, H, Skv), for the sum over a head's rows,
    which is always added. `gradients`: 0 in rows past the end; their first row and column are `first_row` and
    `first_key`, the same in every lane of a wave. A wave's rows span less than 2**31 bytes of dbias.
    """
    if dbias.rank == 3:
        _add_column_sums(dbias[place.batch, place.head, :], gradients, first_key)
        return
    layout, size = gradients.layout, dbias.dtype.bytes
    rows_left, keys_left = place.keys.queries - first_row, dbias.shape[-1] - first_key
    base = dbias.at(place.batch, place.head, first_row, first_key)
    pitch, step = (_bytes(stride, size) for stride in dbias.stride[-2:])
    # rows' keys are then a multiple of a run, which is inside or outside as a whole
    run = math.gcd(layout.run, max(1, dbias.alignment // size)) if _is_one(dbias.stride[-1]) else 1
    put: Put = atomic_add_bounded if adds else store_bounded
    for row, column, values in gradients.runs():
        for v in range(0, len(values), run):
            inside = (row < rows_left) & (column + v < keys_left)
            offset = fly.select(inside, row * pitch + (column + v) * step, OUTSIDE)
            piece = values[v : v + run] if run > 1 else values[v]
            put(piece.to(dbias.dtype), base, offset, BOUND, align=run * size)


def _add_column_sums(dbias: fly.Tensor, gradients: fly.Fragment, first_key: Any) -> None:
    """Sums over the wave's rows to (Skv,) elements; of the lanes that share a column one adds."""
    layout, size = gradients.layout, dbias.dtype.bytes
    sums = gradients.column_sum().reduce_lanes(lambda a, b: a + b)
    owner = fly.evaluate(layout.row_lane, fly.lane_of(layout.atom.lanes)) == 0
    base, keys_left, step = dbias.at(first_key), dbias.shape[0] - first_key, _bytes(dbias.stride[0], size)
    for values, columns in zip(sums.values, sums.columns().values, strict=True):
        for value, column in zip(values, columns, strict=True):
            offset = fly.select(owner & (column < keys_left), column * step, OUTSIDE)
            atomic_add_bounded(value, base, offset, BOUND)


def add_load_gradients(
    loads: Sequence[fly.LoadGradient], targets: Sequence[tuple[fly.Tensor, Any]], place: Place
) -> None:
    """Add those of what was loaded from a tensor to the one beside it in `targets`, f32, at the same coordinates.

    Those that are 0, as of hidden scores and of rows past the end, are left out. What all scores of the tile load, by
    sequence and head, is summed before, so that a wave has one addition.
    """
    block = {x.ir for x in (place.batch, place.head) if isinstance(x, fly.Value)}
    for source, target in targets:
        sums: dict[tuple[Any, ...], tuple[fly.Value, tuple[Any, ...]]] = {}
        for load in loads:
            if load.source is not source:
                continue
            at = tuple(x.ir if isinstance(x, fly.Value) else x for x in load.coordinates)
            if all(isinstance(x, int) or x in block for x in at):
                before = sums[at][0] + load.cotangent if at in sums else load.cotangent
                sums[at] = before, load.coordinates
                continue
            with fly.when(load.cotangent != 0.0):
                target.atomic_add(load.cotangent, *load.coordinates)
        for total, coordinates in sums.values():
            total = fly.lane_sum(total)
            with fly.when(fly.lane_id() == 0):
                target.atomic_add(total, *coordinates)


def _is_one(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 1


def _bytes(stride: Any, size: int) -> Any:
    """A stride that is known to be small."""
    return stride * size if isinstance(stride, int) else (stride * size).to(fly.i32)
