"""Query heads of a key head in parts, each with blocks of its own, where there are few blocks.

A block of the Hopper backward kernel has all query heads of its key head, so that it sums up dK and dV by itself.
Launches with few key heads leave multiprocessors idle then, and under a causal mask most of them. With several parts
a block stores its sums in float32, and `round_keys` adds up a key's parts, in their order.
"""

from __future__ import annotations

from typing import Any

import torch

import fly
from fly.backends.nvvm import wgmma
from fly.ir.dtypes import dtype as dtype_of

from ..problem.contract import Request
from ..work.group_parts import time_in_parts
from ..work.query_tiles import tile_of_all, tiles_of_all
from ..work.sequences import Sequence, tokens_of
from ..work.tile_scheduler import head_of_block
from .backward import BLOCK_M, Sm90BackwardOptions
from .dq_sums import load, of_thread
from .sections import heads_of_wave
from .stores import store_runs

# In the time of one tile of queries: what a block costs beside its tiles, what adding up costs at all and for each
# block; fitted to times of 22 calls on an H100 (notebook, "Query heads of a key head in parts").
_START, _ADD, _ADD_BLOCK = 4, 4, 0.04
_GAIN = 1.05  # that is worth another launch
_CACHE = 50 << 20  # bytes of the second-level cache
_THRASH = 0.11  # what a call takes longer for each time that it reads and adds to as many bytes more at a time
_SPARE = 64 << 20  # bytes of parts' sums that are always there; more only if they are few beside dQ's


def parts_of(request: Request, options: Sm90BackwardOptions, blocks: int, units: int) -> int:
    """In how many parts the query heads of each key head are, whose keys are in so many `blocks`.

    `units`: multiprocessors. The fewest that are predicted to be fastest (`time_in_parts`; causal blocks start from
    the longest on by `sm90.sections`). Causal blocks of a key head are soon at different query heads, all of which
    the second-level cache has to hold.
    """
    group, tiles = request.num_heads // request.num_kv_heads, -(-request.seq_len // BLOCK_M)
    slices, dims = request.batch * request.num_kv_heads, request.head_dim + request.value_dim
    uneven = request.causal and not options.features.windowed
    of_head = request.seq_len * (2 * dims + 4 * request.head_dim)  # bytes of Q and dO, and of sums of dQ
    sums = 4 * request.batch * request.num_heads * request.seq_len * request.head_dim

    def fits(parts: int) -> bool:
        nbytes = 4 * slices * parts * request.seq_len_kv * dims
        return group % parts == 0 and (parts == 1 or nbytes <= max(_SPARE, sums // 2))

    sizes = {"group": group, "tiles": tiles, "blocks": slices * blocks, "units": units}

    def cost(parts: int) -> float:
        added = _ADD + _ADD_BLOCK * slices * blocks * parts if parts > 1 else 0
        beside = min(slices * parts, heads_of_wave(blocks, units))
        more = max(0, beside * group // parts * of_head - _CACHE) / _CACHE if uneven else 0
        return time_in_parts(parts, **sizes, start=_START, uneven=uneven) * (1 + _THRASH * more) + added

    best = min(filter(fits, range(1, group + 1)), key=cost)
    return best if cost(1) > _GAIN * cost(best) else 1


def sums_of(k: torch.Tensor, request: Request, parts: int, packed: bool) -> dict[str, torch.Tensor]:
    """The sums of parts by name, as `place_of` says; `k`: (B, Skv, Hkv, D), of packed keys with B = 1."""
    entries, keys = k.shape[:2]
    shape = entries, request.num_kv_heads * parts, tiles_of_all(keys, request.batch, packed, BLOCK_M) * BLOCK_M
    columns = {"dk_sums": request.head_dim, "dv_sums": request.value_dim}
    return {name: torch.empty((*shape, n), dtype=torch.float32, device=k.device) for name, n in columns.items()}


def place_of(sums: fly.Tensor, keys: Sequence, batch: Any, head: Any, first: Any) -> fly.Pointer:
    """Where this thread's first values of a tile of 64 keys are, which begins at the sequence's key `first`.

    `sums`: (B, heads, rows, D) f32, packed (1, heads, rows, D), in the order in which a warpgroup holds a tile;
    `head`: a part of a key head, those of one lie side by side.
    """
    entry, tile = tile_of_all(keys, batch, first // BLOCK_M, BLOCK_M)
    return of_thread(sums.at(entry, head, tile * BLOCK_M, 0))


@fly.kernel
def round_keys(
    dk_sums: fly.Tensor,
    dv_sums: fly.Tensor,
    dk: fly.Tensor,
    dv: fly.Tensor,
    cu_seqlens_kv: fly.Tensor | None,
    sequences: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
    folded: bool = False,
) -> None:
    """dk = the sum of a key head's parts of `dk_sums`, dv that of `dv_sums`, in their dtype.

    Sums: see `place_of`. Grid: (tiles of 64 keys, key heads, sequences), or `folded`; blocks of a warpgroup.
    """
    given = options.features.bind(operands)
    head, batch, exists = head_of_block(dk.shape[-2], sequences, folded=folded)
    keys = Sequence.of(tokens_of(dk, cu_seqlens_kv), cu_seqlens_kv, batch, given.get("seqused_kv"))
    first = fly.block_id.x * BLOCK_M
    results = (dk_sums, dk, options.head_dim), (dv_sums, dv, options.head_dim_v)
    with fly.when(first < keys.length if exists is None else (first < keys.length) & exists):
        for sums, result, dim in results:
            place = place_of(sums, keys, batch, head * options.parts, first)
            total = load(dim // 2, place)
            for part in range(1, options.parts):
                total = total + load(dim // 2, place.offset(part * (sums.shape[2] * dim * 4)))
            runs = wgmma.runs(total.to(dtype_of(result.dtype.name)))
            store_runs(keys.matrix(result, head), first, keys.length, runs, dim)
