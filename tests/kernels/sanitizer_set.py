"""A small set of calls for compute-sanitizer, on an NVIDIA GPU:

compute-sanitizer --tool memcheck --report-api-errors no python tests/kernels/sanitizer_set.py
compute-sanitizer --tool racecheck python tests/kernels/sanitizer_set.py

(API errors are left out because cuda-bindings asks older drivers for functions that they do not have.)
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func

SHAPES = ((130, 130, 2, 2), (65, 257, 7, 1), (129, 31, 8, 1), (1, 1, 1, 1))  # Sq, Skv, H, Hkv
PADDINGS = (4, 1)  # elements a row is longer than head_dim: 8- and 2-byte alignment


def main() -> None:
    for dtype, dim, causal in itertools.product((torch.bfloat16, torch.float16), (64, 128), (True, False)):
        for queries, keys, heads, kv_heads in SHAPES:
            q = torch.rand(1, queries, heads, dim, device="cuda", dtype=dtype)
            k, v = (torch.rand(1, keys, kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2))
            flydsl_flash_attn_func(q, k, v, causal, return_lse=True)
        for padding in PADDINGS:
            x = torch.rand(1, 70, 2, dim + padding, device="cuda", dtype=dtype)[..., :dim]
            flydsl_flash_attn_func(x, x, x, causal)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
