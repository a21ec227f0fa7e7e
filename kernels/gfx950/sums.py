"""Sums of a lane's weights where a tile's last ones are added a tile later.

`LazySoftmax.total` is two sums, and behind a tile's last weights also these, in pairs: one packed instruction adds
a pair where the matrix pipe stands still for the packed FMAs anyway, and beside products two would. A rescale
multiplies them all.
"""

from __future__ import annotations

from dataclasses import replace

import fly

from ..problem.lazy_softmax import LazySoftmax


def with_weights(total: fly.Value, weights: fly.Value, owed: int) -> fly.Value:
    """Two sums, f32, with all of some weights but the last `owed` pairs, and these.

    One addition after the other: LLVM packs those of vectors, and takes them apart into 8 bytes each, not 4.
    """
    even, odd = total[0], total[1]
    added = len(weights) - 2 * owed
    for i in range(0, added, 2):
        even, odd = even + weights[i], odd + weights[i + 1]
    sums = fly.from_elements([even, odd])
    return fly.concat([sums, weights[added:]]) if owed else sums


def add_owed(tile: fly.PipelineTile, softmax: LazySoftmax) -> LazySoftmax:
    """The stage that adds the pairs of the tile before: in vectors, which stay packed."""
    pairs = [softmax.total[i : i + 2] for i in range(0, len(softmax.total), 2)]
    while len(pairs) > 1:
        halves = [a + b for a, b in zip(pairs[::2], pairs[1::2])]
        pairs = halves + pairs[2 * len(halves) :]
    return replace(softmax, total=pairs[0])
