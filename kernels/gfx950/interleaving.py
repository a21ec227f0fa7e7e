"""What is done between a cluster's matrix instructions: rows for `sched_groups`, and what is read before."""

from __future__ import annotations

from collections.abc import Iterator

from fly.backends.rocdl.intrinsics import Group

from .options import DualWaveOptions

REGISTERS = 224  # of a lane's 256, for what tiles are made of; the others are addresses, sums and limits
PAIRS = 8  # of a lane's scores in half of a tile: two exponentials, a packed addition and a conversion each
MAXIMA = 20  # of a lane's scores of a tile, and the comparison with the limit, at most
MFMA, TRANS, VALU = Group.MFMA, Group.TRANS, Group.VALU
Groups = list[tuple[Group, int]]


def reads_ahead(dim_steps: int, dim_tiles: int, key_steps: int, options: DualWaveOptions) -> tuple[int, int]:
    """Steps of K and of V whose operands are read in the memory clusters, all if there are registers for them.

    A step of K has two operands, one of V `dim_tiles`, of 4 registers each. Beside those of K there are queries,
    output and two tiles of scores, beside those of V one and its probabilities. A wave that has a SIMD to itself
    reads most operands beside the matrix instructions, since no other wave computes meanwhile. As many steps
    less are read as `later` says, whose registers are needed.
    """
    if options.alone:
        return min(4, dim_steps), 1
    left = REGISTERS - 4 * dim_steps - 16 * dim_tiles
    k, v = (left - 64) // 8, (left - 56) // (4 * dim_tiles)
    k, v = (
        min(x, most) - later for x, most, later in zip((k, v), (dim_steps, key_steps), options.later, strict=True)
    )
    return max(1, k), max(1, v)


def among_scores(products: int, reads: int) -> Iterator[tuple[Group, int]]:
    """Behind each of the scores' matrix instructions the exponentials of a pair, then its sum and conversion.

    They are spread evenly over the pairs; where there are several to a pair, its second exponential is behind the
    second one. `reads`: of operands that are not read before.
    """
    placed: Groups = []
    for pair, count in enumerate(spread(products, PAIRS)):
        first, second, others = min(count, 1), int(count > 1), max(count - 2, 0)
        exponentials = [(TRANS, 1), (MFMA, second), (TRANS, 1)] if second else [(TRANS, 2)]
        if pair == PAIRS:
            exponentials = [(MFMA, second)]
        placed += [(MFMA, first), (VALU, 2 if pair else 0), *exponentials, (MFMA, others)]
    return _with_reads(placed, reads, 1)


def among_output(products: int, maxima: int | None, operands: int) -> Iterator[tuple[Group, int]]:
    """The same behind the first half of the output's, whose second half needs it; behind the others the maximum.

    `maxima`: behind each of those, or None for an even share. `operands`: those that are not read before.
    """
    steps = products // 2
    each = [2 * (PAIRS * (i + 1) // steps - PAIRS * i // steps) for i in range(steps)]
    placed: Groups = []
    for before, now in zip((0, *each), each):
        placed += [(MFMA, 1), (VALU, before), (TRANS, now)]
    placed += [(MFMA, 1), (VALU, maxima or max(MAXIMA // steps, 2))] * steps
    pieces = 2  # loads of an operand of V
    return _with_reads(placed, operands * pieces, pieces)


def most_among_scores(products: int, pairs: int) -> Groups:
    """`among_scores` with most of a tile's pairs, evenly; nothing is behind the last one: groups meet at once."""
    return [*_evenly(products - 2, pairs), (MFMA, 1), (VALU, 3), (MFMA, 1)]


def rest_among_output(products: int, pairs: int, owed: bool) -> Groups:
    """`among_output` with the others, evenly behind the first half of its matrix instructions.

    `owed`: most of them are only converted (`gfx950/sums.py`).
    """
    return [*_evenly(products // 2, pairs, 1 if owed else 3), *[(MFMA, 1), (VALU, 3)] * (products // 2)]


def _evenly(products: int, pairs: int, others: int = 3) -> Groups:
    """Exponentials of so many pairs; behind the product after a pair's `others`: two additions, a conversion."""
    placed: Groups = []
    made, used = 0, 0
    for i in range(1, products + 1):
        ready, now = made // 2, -(-2 * pairs * i // products)
        placed += [(MFMA, 1), (VALU, others * (ready - used)), (TRANS, now - made)]
        made, used = now, ready
    return [(kind, count) for kind, count in placed if count]


def spread(products: int, pairs: int) -> list[int]:
    """How many of `products` come before each of `pairs` and behind the last one."""
    before = [min(products, ((2 * i + 1) * products + pairs) // (2 * pairs)) for i in range(pairs + 1)]
    return [b - a for a, b in zip((0, *before), before)]


def _with_reads(placed: Groups, reads: int, each: int) -> Iterator[tuple[Group, int]]:
    """Those of `placed` that are any, with `each` LDS reads behind every matrix instruction as long as there are."""
    for kind, count in placed:
        if kind is not MFMA:
            if count:
                yield kind, count
            continue
        for _ in range(count):
            yield MFMA, 1
            if reads:
                yield Group.DS_READ, each
                reads -= each
