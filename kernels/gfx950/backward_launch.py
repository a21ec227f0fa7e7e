"""Binding the fused backward kernels of AMD's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import fly
from fly.backends.target import target
from fly.runtime.device import device_of

from ..problem.contract import Launch, Request, Tensors
from ..work.query_tiles import tiles_of_all
from ..work.row_statistics import THREADS, lanes_of_row, row_statistics
from ..work.sink_gradients import sink_gradients
from ..work.steps import BoundKernel, Steps, aligned, bind_kernel
from ..work.tile_scheduler import fold_grid
from .backward import BLOCK_M, WAVES, Gfx950BackwardOptions
from .dq_sums import round_dq


def prepare_backward(
    kernel: fly.Kernel, options: Gfx950BackwardOptions, tensors: Tensors, request: Request, spare_tiles: int = 0
) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    `spare_tiles`: that the kernel may add to behind the last one of all. See `flash_attn_generic_bwd.prepare`.
    """
    packed = tensors.get("cu_seqlens_q") is not None
    wave = target(device_of(tensors["q"].device).target).wave_size
    sequences, heads = request.batch, request.num_heads
    tokens, lse = tensors["out"].shape[-3], tensors["lse"]
    entries = 1 if packed else sequences
    lines = THREADS // lanes_of_row(request.value_dim)
    tiles = tiles_of_all(tokens, sequences, packed, BLOCK_M) + spare_tiles
    padded = -(-tiles * BLOCK_M // lines) * lines  # blocks of `row_statistics` clear as many rows as they have
    sums = torch.empty((entries, heads, padded, request.head_dim), dtype=torch.float32, device=lse.device)
    sizes = {"lse2": lse.numel(), "delta": lse.numel(), "dq_sums": sums.numel()}
    if tensors.get("delta") is not None:
        del sizes["delta"]
    given = {
        **tensors,
        "scale_log2": request.scale_log2,
        "group": heads // request.num_kv_heads,
        "sequences": sequences,
        # only sizes and strides matter here
        **dict.fromkeys(sizes, torch.empty(lse.shape, dtype=torch.float32, device=lse.device)),
        "dq_sums": sums,
    }
    steps: list[BoundKernel] = []

    def add(
        of_step: Any, grid: tuple[int, int, int], threads: int, operands: Sequence[str] = (), **statics: Any
    ) -> None:
        grid, fold = fold_grid(grid)
        steps.append(bind_kernel(of_step, grid, threads, given, {**statics, **fold}, operands=operands))

    add(row_statistics, (padded // lines, heads, entries), THREADS, head_dim=request.value_dim)
    if (dsink := tensors.get("dsink")) is not None:
        add(sink_gradients, (dsink.shape[0], heads, sequences), wave)
    threads = WAVES * wave
    blocks = -(-request.seq_len_kv // options.block_n), request.num_kv_heads, sequences
    add(kernel, blocks, threads, request.operands, options=options)
    blocks = -(-request.seq_len // BLOCK_M), heads, sequences
    add(round_dq, blocks, threads, request.operands, options=options)
    parts, nbytes = {}, 0
    for name, size in sizes.items():
        parts[name] = nbytes
        nbytes += aligned(4 * size)
    return Steps(tuple(steps), parts, nbytes).launch()
