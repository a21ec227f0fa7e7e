"""Binding a build of the Hopper kernel, or of one like it, to the tensors of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import fly
from fly.runtime.device import device_of

from ..problem.contract import Request, Tensors
from ..work.launch import forward_steps, unflattened
from ..work.steps import BoundKernel, Steps, bind_kernel
from .builds import Sm90Options, section_for
from .counters import MANY_ARRIVALS, MAX_ARRIVALS, counters_of
from .fp8_builds import Fp8Options


def typical_lengths(tensors: Tensors, request: Request) -> tuple[int, int] | None:
    """(queries, keys) of packed sequences on average, as far as the host knows; None of others."""
    if tensors.get("cu_seqlens_q") is None:
        return None
    q, k = tensors["q"], tensors["k"]
    keys = len(k) if k.dim() == 3 else request.seq_len_kv * request.batch
    return -(-len(q) // request.batch), -(-keys // request.batch)


def bind_build(kernel: Any, tensors: Tensors, request: Request, options: Sm90Options, splits: int) -> Steps:
    """One build of `kernel`, which takes what `flash_attn_sm90.flash_attn_sm90` does, and what runs after it.

    It has a map of `transposed` instead of v, where `tensors` have that.
    """
    values = "transposed" if "transposed" in tensors else "v"
    q, k, v = (t if t.dim() == 4 else t.unsqueeze(0) for t in (tensors["q"], tensors["k"], tensors[values]))
    device = q.device
    units = device_of(device).compute_units
    packed = tensors.get("cu_seqlens_q") is not None
    pack, queries = options.pack_gqa, options.queries
    sets = request.num_heads // pack
    ahead = isinstance(options, Fp8Options) and options.ahead
    arrivals = MANY_ARRIVALS if ahead else MAX_ARRIVALS if options.combines else 0
    counters = counters_of(device, arrivals)
    blocks = q.shape[1] // queries + request.batch if packed else -(-q.shape[1] // queries) * len(q)
    grid = min(units, blocks * sets * splits)
    if options.blocks > 1:
        rows = queries * options.blocks
        grid = min(units // options.blocks, -(-q.shape[1] // rows) * len(q) * sets * splits) * options.blocks
    copied = (q if pack == 1 else unflattened(q, 2, (sets, pack)), k, v)
    own: dict[str, Any] = {
        name: fly.tensor_map(tensor, box, swizzle=tile.swizzle)
        for name, tensor, box, tile in zip(("q", "k", values), copied, options.boxes, options.copied, strict=True)
    }
    if isinstance(options, Fp8Options) and ahead:
        raw, _ = options.ahead_tiles
        own["v"] = fly.tensor_map(tensors["v"], (1, raw.rows, 1, raw.panel_columns), swizzle=raw.swizzle)
    own |= {
        "counters": counters.example,
        "seq_len_kv": k.shape[1],
        "group": sets // request.num_kv_heads,
        "section": section_for(request, options) * splits,
        "scale_log2": request.scale_log2,
    }

    def bound(tensors: Tensors, called: Mapping[str, str]) -> BoundKernel:
        called, statics = {"v": values, **called}, {"options": options}
        called |= {"raw_v": "v"} if ahead else {}
        arguments = {**tensors, **own}
        return bind_kernel(
            kernel, grid, options.threads, arguments, statics, called=called, operands=request.operands
        )

    steps = forward_steps(bound, tensors, request, splits, options.combines)
    return replace(steps, of_stream={"counters": counters.address})
