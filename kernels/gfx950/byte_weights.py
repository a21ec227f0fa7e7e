"""What forward kernels of 8-bit floats on AMD have in common: scales, and weights that are rounded to few bits.

Weights are 2**`offset` times what they are, and 2**`threshold` times more before a rescale, which the format's largest
number is above. They are divided by their sum as they were rounded, so that they add up to 1.
"""

from __future__ import annotations

from dataclasses import replace

import fly

from ..problem.catalogue import DESCALES
from ..problem.features import BoundFeatures
from ..work.tile_scheduler import BlockWork

RESCALE_THRESHOLD = 1.75
LEAST_SCALE = 1e-30  # a margin is divided by the scale


def descaled(
    work: BlockWork, given: BoundFeatures, scale_log2: fly.Value, group: fly.Value
) -> tuple[fly.Value, BoundFeatures]:
    """The scale of scores with those of queries and keys, and `given` with the scales, (B, Hkv), as numbers.

    `group`: query heads of a key head.
    """
    head = work.head // group
    asked = given.features.operands
    scales = {n: fly.first_lane(given.get(n).load(work.batch, head)) for n in DESCALES if n in asked}
    scale_log2 = scale_log2 * scales.get("q_descale", 1.0) * scales.get("k_descale", 1.0)
    return fly.maximum(scale_log2, LEAST_SCALE), replace(given, operands={**given.operands, **scales})


def one_by_one(scores: fly.Value, scale: fly.Value, shift: fly.Value) -> fly.Value:
    """scale * score + shift; packed instructions would wait for other waves' products."""
    exponents: fly.Value = fly.from_elements([fly.fma(scores[i], scale, shift) for i in range(len(scores))])
    return exponents
