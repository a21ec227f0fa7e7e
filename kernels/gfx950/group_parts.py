"""Query heads of a key head in several blocks: how many, and dK and dV added up from these parts.

A block of keys takes the query heads of its key head in one after the other, so that with few key heads there are few
blocks, and under a causal mask the first keys' have most of the work. Blocks of parts of the heads leave dK and dV in
float32, (.., Skv, Hkv * parts, D), and `add_parts` adds them up, always in the same order.
"""

from __future__ import annotations

from typing import Any

import fly

from ..work.group_parts import time_in_parts
from ..work.sequences import Sequence, tokens_of
from ..work.tile_scheduler import head_of_block
from .backward import Gfx950BackwardOptions

THREADS = 256
VECTOR, LANES = 8, 8  # elements of a lane, and lanes of a row: 64 columns at a time
ROWS = THREADS // LANES  # of a block

# In the time of a tile of queries: what a block costs beside its tiles, and what writing and reading its part takes
# of a compute unit's share of the memory. The first is the timing model's at head dimension 128 on gfx950, the second
# of 5 TB/s.
_START, _PART = 7, 11


def parts_of_group(blocks: int, group: int, tiles: int, compute_units: int, *, causal: bool) -> int:
    """In how many parts the `group` query heads of a key head are best taken: the fewest of those predicted fastest.

    `blocks` of keys of all key heads and sequences, with `tiles` of queries for each query head: see `time_in_parts`.
    """
    sizes = {"group": group, "tiles": tiles, "blocks": blocks, "units": compute_units}

    def cost(parts: int) -> float:
        added = _PART * -(-blocks * parts // compute_units) if parts > 1 else 0
        return time_in_parts(parts, **sizes, start=_START, uneven=causal) + added

    return min((n for n in range(1, group + 1) if group % n == 0), key=cost)


@fly.kernel
def add_parts(
    dk_parts: fly.Tensor,
    dv_parts: fly.Tensor,
    dk: fly.Tensor,
    dv: fly.Tensor,
    cu_seqlens_kv: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    *operands: fly.Operand,
    options: Gfx950BackwardOptions,
    parts: int,
    folded: bool = False,
) -> None:
    """dk and dv, (B, Skv, Hkv, D) or packed, of their parts, (.., Hkv * parts, D) f32.

    Grid: (blocks of rows, Hkv, sequences), or `folded`.
    """
    given = options.features.bind(operands)
    head, batch, exists = head_of_block(dk.shape[-2], sequences, folded=folded)
    keys = Sequence.of(tokens_of(dk, cu_seqlens_kv), cu_seqlens_kv, batch, given.get("seqused_kv"))
    first = fly.block_id.x * ROWS
    row, lane = fly.thread_id.x // LANES, fly.thread_id.x % LANES
    count = keys.length if exists is None else fly.select(exists, keys.length, 0)
    with fly.when(first + row < count):
        for source, to, dim in ((dk_parts, dk, options.head_dim), (dv_parts, dv, options.head_dim_v)):
            views = [keys.rows(source, head * parts + i, dim).window(first, ROWS) for i in range(parts)]
            window = keys.rows(to, head, dim).window(first, ROWS)
            for column in range(0, dim, LANES * VECTOR):
                at = column + lane * VECTOR
                total: Any = views[0].load(row, at, VECTOR)
                for view in views[1:]:
                    total = total + view.load(row, at, VECTOR)
                window.store(total.to(to.dtype), row, at)
