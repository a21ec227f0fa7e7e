"""What dropout costs, and gradients of the same bits in every run: attention with it against the same call without.

    python benchmarks/dropout.py                            # on a GPU, under a minute
    python benchmarks/dropout.py --head_dim 128 --kernel sm90 --seq_len 4096 16384
    python benchmarks/dropout.py --device cpu               # one small shape, in the emulator

A line is one kernel and shape of 16384 tokens and 2048 columns: milliseconds without and with dropout, medians with a
cold L2 cache where calls take turns, and how many times as long the latter take. `rng_state` is given, so that no
draw is timed. "backward" is the gradients of q, k and v alone, in turn (`deterministic`) too. That results are right
is for the tests to say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.timing import measure
from fly import config
from kernels.flash_attn_interface import flydsl_flash_attn_func

TOKENS, COLUMNS = 16384, 2048
KERNELS = ("sm90", "generic")  # of forward passes
PROBABILITY = 0.1


def calls(kernel: str, head_dim: int, seq_len: int, causal: bool, device: str) -> dict[str, Callable[[], object]]:
    """Forward or backward (kernel "backward") calls of a shape, "plain" and "dropout", and "in turn"."""
    tokens, columns = (TOKENS, COLUMNS) if device == "cuda" else (seq_len, 2 * head_dim)
    shape = max(1, tokens // seq_len), seq_len, columns // head_dim, head_dim
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    state = torch.tensor([1, 2], device=device)
    options: dict[str, dict[str, Any]] = {"plain": {}, "dropout": {"dropout_p": PROBABILITY, "rng_state": state}}
    if kernel != "backward":
        return {
            name: lambda given=given: flydsl_flash_attn_func(q, k, v, causal, **given)
            for name, given in options.items()
        }
    options["in turn"] = {"deterministic": True}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = {name: flydsl_flash_attn_func(*leaves, causal, **given) for name, given in options.items()}
    return {
        name: lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True) for name, out in outs.items()
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", nargs="+", choices=(*KERNELS, "gfx950", "backward"))
    parser.add_argument("--head_dim", type=int, nargs="+")
    parser.add_argument("--seq_len", type=int, nargs="+")
    parser.add_argument("--iters", type=int, default=30)
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    print(torch.cuda.get_device_name() if gpu else "emulated", "torch", torch.__version__)
    print(f"{'kernel':>8} {'dim':>4} {'length':>6} {'':6}  {'plain ms':>10}{'with dropout':>18}{'in turn':>18}")
    kernels = options.kernel or ((*KERNELS, "backward") if gpu else ("generic", "backward"))
    for kernel in kernels:
        for head_dim in options.head_dim or ((64, 128, 256) if gpu else (64,)):
            for seq_len in options.seq_len or ((1024, 4096, 16384) if gpu else (64,)):
                for causal in (False, True):
                    with config.KERNEL.set_to("" if kernel == "backward" else kernel):
                        timed = calls(kernel, head_dim, seq_len, causal, options.device)
                        iters, warmup = (options.iters, 3) if gpu else (1, 1)
                        times = measure(timed, device=options.device, iters=iters, warmup=warmup)
                    plain, *others = (timing.median for timing in times.values())
                    text = f"{kernel:>8} {head_dim:4} {seq_len:6} {'causal' if causal else 'full':6}  {plain:10.4f}"
                    print(text + "".join(f"{other:10.4f} {other / plain:7.3f}" for other in others), flush=True)


if __name__ == "__main__":
    main()
