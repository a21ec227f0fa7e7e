"""Calls that `python -m fly profile benchmarks.timed_kernels:NAME` times: kernels that no interface reaches."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernels.flash_attn_gfx950 import BLOCK_M, WAVES, DualWaveOptions, flash_attn_gfx950


def dual_wave(
    batch: int = 1, seq: int = 2048, heads: int = 1, head_dim: int = 128, causal: bool = False, **options: Any
) -> Any:
    """The gfx950 dual-wave kernel on (batch, seq, heads, head_dim) bf16 tensors; returns what owns their memory."""
    generator = torch.Generator().manual_seed(0)
    one = (torch.rand(1, seq, 1, head_dim, generator=generator) * 2 - 1).to(torch.bfloat16)
    q = one.expand(batch, -1, heads, -1)  # heads and batches share one head's memory: few workgroups are executed
    out = torch.empty(batch, seq, heads, head_dim, dtype=torch.bfloat16)
    grid = (-(-seq // BLOCK_M), heads, batch)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    flash_attn_gfx950[grid, WAVES * 64](
        q, q, q, out, None, scale, options=DualWaveOptions(head_dim, causal, **options)
    )
    return q, out
