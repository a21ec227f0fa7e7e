"""Flash attention forward on a GPU, in TFLOP/s: fly beside everything else that is installed.

python benchmarks/flash_attn_fwd.py --head_dim 64 128 --seq_len 1024 4096

Every row has 16384 tokens and 2048 channels in all, so rows differ only in how attention is cut up. Providers take
turns and the figure is the median. Results are not checked here: tests/kernels/test_flash_attn_fwd.py --compare does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.providers import PROVIDERS, Call, Provider
from benchmarks.timing import measure
from benchmarks.workload import DTYPES, Workload

TOKENS, CHANNELS = 16384, 2048


def workloads(head_dims: Sequence[int], seq_lens: Sequence[int], dtypes: Sequence[str]) -> Iterator[Workload]:
    """The sweep: every dtype and head dimension, full and causal, by length."""
    for dtype in dtypes:
        for head_dim in head_dims:
            heads = CHANNELS // head_dim
            for causal in (False, True):
                for seq_len in seq_lens:
                    batch = max(1, TOKENS // seq_len)
                    yield Workload(batch, seq_len, seq_len, heads, heads, head_dim, dtype, causal)


def tflops(workload: Workload, providers: Sequence[Provider], iters: int, warmup: int) -> dict[str, float | str]:
    """TFLOP/s by provider, or why there is no figure."""
    tensors = workload.tensors(seed=0, device="cuda")
    calls: dict[str, Call] = {}
    figures: dict[str, float | str] = {}
    for provider in providers:
        reason = provider.unsupported(workload)
        if reason is None:
            try:
                call = provider.bind(workload, *tensors)
                call()
            except (ImportError, RuntimeError, ValueError) as error:  # what a peer cannot do, it says in its own way
                reason = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else repr(error)
            else:
                calls[provider.name] = call
        if reason is not None:
            figures[provider.name] = reason
    timings = measure(calls, device="cuda", iters=iters, warmup=warmup)
    return figures | {name: workload.flops / timing.median / 1e9 for name, timing in timings.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns an exit code: 1 without a GPU."""
    parser = argparse.ArgumentParser(description="Time flash attention forward on a GPU.")
    parser.add_argument("--head_dim", type=int, nargs="+", default=[64, 128], metavar="N")
    parser.add_argument("--seq_len", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384], metavar="N")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=["bf16"])
    parser.add_argument("--iters", type=int, default=30, metavar="N", help="timed calls (30)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="calls before those (5)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "make bench needs a GPU, and torch sees none here. `make demo` shows what each kernel costs without one."
        )
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, TFLOP/s, median of {args.iters}\n")
    present = []
    for provider in PROVIDERS:
        if (reason := provider.missing("cuda")) is None:
            present.append(provider)
        else:
            print(f"{provider.name}: {reason}")
    print("\n| workload | " + " | ".join(p.name for p in present) + " |")
    print("|---" * (1 + len(present)) + "|")
    notes: set[str] = set()
    with torch.no_grad():
        for workload in workloads(args.head_dim, args.seq_len, args.dtype):
            figures = tflops(workload, present, args.iters, args.warmup)
            cells = [f"{f:.0f}" if isinstance(f := figures[p.name], float) else "–" for p in present]
            print(f"| {workload} | " + " | ".join(cells) + " |", flush=True)
            notes |= {f"{name}: {figure}" for name, figure in figures.items() if isinstance(figure, str)}
    print("\n" + "\n".join(sorted(notes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
