"""Binding the fused backward kernels of AMD's GPUs."""

from __future__ import annotations

from typing import Any

import torch

import fly
from fly.backends.target import target
from fly.runtime.device import device_of

from ..problem.contract import Launch, Request, Tensors
from ..work.gradient_steps import GradientSteps
from ..work.query_tiles import tiles_of_all
from ..work.row_statistics import THREADS, row_statistics, rows_of_block
from .backward import BLOCK_M, WAVES, Gfx950BackwardOptions
from .dq_in_place import clear_dq, order_dq
from .dq_sums import round_dq
from .group_parts import ROWS, add_parts, parts_of_group
from .group_parts import THREADS as ADDING_THREADS


def parts_of_call(tensors: Tensors, request: Request, block_n: int) -> int:
    """In how many parts the query heads of a key head are taken, by blocks of so many keys."""
    blocks = -(-request.seq_len_kv // block_n) * request.num_kv_heads * request.batch
    group, tiles = request.num_heads // request.num_kv_heads, -(-request.seq_len // BLOCK_M)
    units = device_of(tensors["q"].device).compute_units
    return parts_of_group(blocks, group, tiles, units, causal=request.causal)


def prepare_backward(
    kernel: fly.Kernel,
    options: Gfx950BackwardOptions,
    tensors: Tensors,
    request: Request,
    parts: int,
    spare_tiles: int = 0,
) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    Sums of dQ in 16 bits are dQ itself (`dq_in_place`), where rows outside of all sequences keep what they have:
    a kernel of its own clears the others.
    With `parts` of a key head's query heads (`parts_of_call`), dK and dV are added up from theirs behind that.
    `spare_tiles`: that the kernel may add to behind the last one of all. See `flash_attn_generic_bwd.prepare`.
    """
    packed = tensors.get("cu_seqlens_q") is not None
    wave = target(device_of(tensors["q"].device).target).wave_size
    sequences, heads = request.batch, request.num_heads
    tokens, lse = tensors["out"].shape[-3], tensors["lse"]
    entries = 1 if packed else sequences
    lines = rows_of_block(request.value_dim)
    tiles = tiles_of_all(tokens, sequences, packed, BLOCK_M) + spare_tiles
    padded = -(-tiles * BLOCK_M // lines) * lines  # blocks of `row_statistics` clear as many rows as they have
    in_place = request.dq_accumulate == "16bit"
    group, key_blocks = heads // request.num_kv_heads, -(-request.seq_len_kv // options.block_n)

    def memory(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=lse.device)

    made = {"lse2": memory(*lse.shape)}
    if tensors.get("delta") is None:  # else the caller's
        made["delta"] = memory(*lse.shape)
    if in_place:
        made["dq_tails"] = memory(sequences, heads, BLOCK_M, request.head_dim, dtype=tensors["dq"].dtype)
    else:
        made["dq_sums"] = memory(entries, heads, padded, request.head_dim)
    if parts > 1:
        for name in ("dk", "dv"):
            *rows, kv_heads, dim = tensors[name].shape
            made[f"{name}_parts"] = memory(*rows, kv_heads * parts, dim)
    steps = GradientSteps(tensors, request, made, group=group // parts, sequences=sequences)
    steps.add(row_statistics, (padded // lines, heads, entries), THREADS, head_dim=request.value_dim)
    steps.add_sinks()
    threads = WAVES * wave
    of_queries = -(-request.seq_len // BLOCK_M), heads, sequences
    if in_place:
        steps.add(clear_dq, of_queries, threads, request.operands, options=options)
    blocks = key_blocks, request.num_kv_heads * parts, sequences
    called = {name: f"{name}_parts" for name in ("dk", "dv")} if parts > 1 else {}
    called |= {"dq_sums": "dq"} if in_place else {}
    divided: dict[str, Any] = {"parts": parts} if parts > 1 else {}
    steps.add(kernel, blocks, threads, request.operands, called=called, options=options, **divided)
    if parts > 1:
        blocks = -(-request.seq_len_kv // ROWS), request.num_kv_heads, sequences
        steps.add(add_parts, blocks, ADDING_THREADS, request.operands, options=options, parts=parts)
    steps.add(order_dq if in_place else round_dq, of_queries, threads, request.operands, options=options)
    return steps.launch()
