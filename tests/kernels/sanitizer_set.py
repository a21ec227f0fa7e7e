"""A small set of calls for compute-sanitizer, on an NVIDIA GPU:

compute-sanitizer --tool memcheck --report-api-errors no python tests/kernels/sanitizer_set.py
compute-sanitizer --tool racecheck python tests/kernels/sanitizer_set.py
compute-sanitizer --tool synccheck python tests/kernels/sanitizer_set.py

(API errors are left out because cuda-bindings asks older drivers for functions that they do not have.)
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fly import config
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.kv_cache_cases import Case, Problem

SHAPES = ((130, 130, 2, 2), (65, 257, 7, 1), (129, 31, 8, 1), (1, 1, 1, 1))  # Sq, Skv, H, Hkv
PADDINGS = (4, 1)  # elements a row is longer than head_dim: 8- and 2-byte alignment
# with lengths that reach past the cache, and before it
APPENDS = (
    (Case(rotary_dim=16, page=16, new=5), [0, 38, -3]),
    (Case(head_dim=40, rotary_dim=32, interleaved=True, batch_idx=True, shift=1), [39, 2**31 - 1, 7]),
    (Case(head_dim=128, head_dim_v=64, new=33, layout="apart"), [20, 0, -40]),
)

KERNELS = {"generic": (64, 128, 72), "sm90": (64, 128, 256)}  # head dims


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    """(B + 1,) of packed sequences."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def main() -> None:
    """Run every kernel that this GPU has."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for kernel in KERNELS if hopper else ("generic",):
        os.environ[config.KERNEL.name] = kernel
        calls(kernel)
    for case, lengths in APPENDS:
        Problem(case, 0, "cuda", lengths).call()
    torch.cuda.synchronize()


def calls(kernel: str) -> None:
    """Every form of a kernel, small."""
    for dtype, dim, causal in itertools.product((torch.bfloat16, torch.float16), KERNELS[kernel], (True, False)):

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.rand(*shape, device="cuda", dtype=dtype)

        for queries, keys, heads, kv_heads in SHAPES:
            q, k, v = (random(1, n, h, dim) for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads)))
            for splits in (1, 2):
                flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=splits)
        q, k = random(200, 2, dim), random(150, 1, dim)
        cu_q, cu_k = offsets((130, 0, 70)), offsets((33, 17, 100))
        packed = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k, "max_seqlen_q": 130, "max_seqlen_kv": 100}
        flydsl_flash_attn_func(q, k, k, causal, **packed)
        for padding in PADDINGS if kernel == "generic" else ():
            x = random(1, 70, 2, dim + padding)[..., :dim]
            flydsl_flash_attn_func(x, x, x, causal)


if __name__ == "__main__":
    main()
