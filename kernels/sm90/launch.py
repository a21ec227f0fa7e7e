"""Binding a build of the Hopper kernel, or of one like it, to the tensors of a call."""

from __future__ import annotations

from typing import Any

import fly
from fly.runtime.compile import compile_kernel
from fly.runtime.prepared import Prepared, bind

from ..problem.contract import Launch, Request, Tensors, device_of
from ..work.launch import launch_of, unflattened
from .builds import Sm90Options, section_for
from .counters import MAX_ARRIVALS, counters_of


def typical_lengths(tensors: Tensors, request: Request) -> tuple[int, int] | None:
    """(queries, keys) of packed sequences on average, as far as the host knows; None of others."""
    if tensors.cu_seqlens_q is None:
        return None
    keys = len(tensors.k) if tensors.k.dim() == 3 else request.seq_len_kv * request.batch
    return -(-len(tensors.q) // request.batch), -(-keys // request.batch)


def bind_build(kernel: Any, tensors: Tensors, request: Request, options: Sm90Options, splits: int) -> Launch:
    """A launch of one build of `kernel`, which takes what `flash_attn_sm90.flash_attn_sm90` does.

    `tensors.v` is what the kernel has a map of instead of V, if it is not V.
    """
    q, k, v = (t if t.dim() == 4 else t.unsqueeze(0) for t in tensors[:3])
    device = q.device
    units = device_of(device).compute_units
    packed = tensors.cu_seqlens_q is not None
    pack, queries = options.pack_gqa, options.queries
    sets = request.num_heads // pack
    counters = counters_of(device, MAX_ARRIVALS if options.combines else 0)
    blocks = q.shape[1] // queries + request.batch if packed else -(-q.shape[1] // queries) * len(q)
    grid = min(units, blocks * sets * splits)
    maps = tuple(
        fly.tensor_map(tensor, box, swizzle=tile.swizzle)
        for tensor, box, tile in zip(
            (q if pack == 1 else unflattened(q, 2, (sets, pack)), k, v), options.boxes, options.copied, strict=True
        )
    )
    scalars = (
        k.shape[1],
        sets // request.num_kv_heads,
        section_for(request, request.value_dim, pack) * splits,
        request.scale_log2,
    )

    def bound(out: Any, lse: Any) -> Prepared:
        whole = (tensors.out, tensors.lse) if options.combines else (None, None)
        arguments = (*maps, out, lse, *tensors[5:7], counters.example, *whole, *scalars, *tensors.operands)
        return bind(kernel, grid, options.threads, arguments, {"options": options}, compile_kernel)

    return launch_of(bound, tensors, request, splits, counters.address, options.combines)
