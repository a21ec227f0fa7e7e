"""Host time of one warm call: how long the CPU is busy before the GPU has the work.

python benchmarks/host_overhead.py [--calls 2000]

A tiny problem, so that the queue never fills; `torch` is PyTorch's own flash attention in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.flash_attn_interface import flydsl_flash_attn_func


def microseconds(call: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Median over rounds of the mean host time of a call; the queue is emptied between rounds."""
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500, help="calls per round")
    calls = parser.parse_args().calls
    if not torch.cuda.is_available():
        print("host overhead needs a GPU: the emulated device has no queue")
        return 1
    q, k, v = (torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(qt, kt, vt, is_causal=True)

    rows = {
        "fly": lambda: flydsl_flash_attn_func(q, k, v),
        "fly, out given": lambda: flydsl_flash_attn_func(q, k, v, out=out),
        "fly, with LSE": lambda: flydsl_flash_attn_func(q, k, v, return_lse=True),
    }
    for name, call in rows.items():
        print(f"{name:<16} {microseconds(call, calls):6.1f} µs")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        print(f"{'torch flash':<16} {microseconds(sdpa, calls):6.1f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
