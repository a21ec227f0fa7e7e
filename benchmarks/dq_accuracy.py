"""Errors of dq against float64, added up in float32 and in 16 bits, by the number of keys, in the emulator.

    python benchmarks/dq_accuracy.py gfx950
    python benchmarks/dq_accuracy.py gfx942 --dtype f16 --head-dim 64

Inputs are standard normal numbers, keys also those plus one: parts of dq that blocks of keys add are larger then, and
cancel. Errors are root mean squares over the gradient's own. Blocks add in the emulator's order; that of a GPU
changes from run to run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fly import config
from kernels.flash_attn_backward import flydsl_flash_attn_backward
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.contract import DQ_SUMS

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
KEYS = (512, 2048, 8192, 32768)
SHIFTS = (0.0, 1.0)
QUERIES = 32


def exact_dq(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """dq of one head, (1, S, 1, D), in float64."""
    q64, k64, v64, dout64 = (x[0, :, 0].double() for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    weights = (q64 @ k64.T * scale).softmax(-1)
    dp = dout64 @ v64.T
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
    return (ds @ k64 * scale)[None, :, None]


def errors(keys: int, shift: float, head_dim: int, dtype: torch.dtype) -> list[float]:
    """The error of dq for each of `DQ_SUMS`."""
    generator = torch.Generator().manual_seed(keys)

    def inputs(tokens: int, plus: float = 0.0) -> torch.Tensor:
        return (torch.randn(1, tokens, 1, head_dim, generator=generator) + plus).to(dtype)

    q, k, v, dout = inputs(QUERIES), inputs(keys, shift), inputs(keys), inputs(QUERIES)
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True)
    wanted, found = exact_dq(q, k, v, dout), []
    for sums in DQ_SUMS:
        dq, *_ = flydsl_flash_attn_backward(dout, q, k, v, out, lse, False, dq_accumulate=sums)
        found.append(((dq.double() - wanted).square().mean() / wanted.square().mean()).sqrt().item())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=("gfx942", "gfx950"))
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS, metavar="N")
    options = parser.parse_args(arguments)
    forced = config.ARCH.set_to(options.arch), config.BACKWARD_KERNEL.set_to(options.arch)
    with forced[0], forced[1], config.EMULATOR_CHECKS.set_to("0"):
        for shift in SHIFTS:
            for keys in options.keys:
                found = errors(keys, shift, options.head_dim, DTYPES[options.dtype])
                shown = ", ".join(f"{sums} {error:.2e}" for sums, error in zip(DQ_SUMS, found, strict=True))
                print(f"{keys:6} keys with mean {shift:g}: {shown}, {found[1] / found[0]:.2f} times", flush=True)


if __name__ == "__main__":
    main()
