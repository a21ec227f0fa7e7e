"""Errors of attention on 8-bit inputs against float64, by the number of keys, and a picture of them.

    python benchmarks/fp8_accuracy.py --measure errors.json         # on a Hopper GPU
    python benchmarks/fp8_accuracy.py --model model.json            # what cut products lead to, on the CPU
    python benchmarks/fp8_accuracy.py --plot errors.json model.json # docs/images/fp8_accuracy_h200.png

Inputs are standard normal numbers rounded to e4m3, values also those plus one: as sums of values that share a sign
grow, what products cut off shows. FlashAttention-3 is measured beside where `fa3_fwd_interface` can be imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "fp8_accuracy_h200.png"
KEYS = (256, 512, 1024, 2048, 4096, 8192, 16384)
SHIFTS = (0.0, 1.0)
QUERIES, HEADS, HEAD_DIM = 256, 4, 128
OFFSET = 8  # of probabilities, in log2
E4M3 = torch.float8_e4m3fn


def functions() -> dict[str, Callable[..., torch.Tensor]]:
    """What is compared, by name: functions of q, k and v."""
    found: dict[str, Callable[..., torch.Tensor]] = {
        "fly": lambda q, k, v: flydsl_flash_attn_func(q, k, v, False),
        "fly, fast": lambda q, k, v: flydsl_flash_attn_func(q, k, v, False, fp8_accumulate="fast"),
    }
    try:
        theirs: Any = importlib.import_module("fa3_fwd_interface")
    except ImportError:
        return found

    def flash_attention_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(q), k.shape[2], device=q.device)
        out = theirs.flash_attn_func(q, k, v, q_descale=ones, k_descale=ones, v_descale=ones)
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return {**found, "FlashAttention-3": flash_attention_3}


def measure() -> list[dict[str, Any]]:
    """The root mean square of errors of each function, for each number of keys and shift of values."""
    rows = []
    for shift in SHIFTS:
        for keys in KEYS:
            generator = torch.Generator("cuda").manual_seed(keys)

            def inputs(tokens: int, plus: float = 0.0, generator: torch.Generator = generator) -> torch.Tensor:
                numbers = torch.randn(1, tokens, HEADS, HEAD_DIM, device="cuda", generator=generator)
                return (numbers + plus).to(E4M3)

            q, k, v = inputs(QUERIES), inputs(keys), inputs(keys, shift)
            exact = [x.double().transpose(1, 2) for x in (q, k, v)]
            weights = (exact[0] @ exact[1].transpose(-1, -2) * HEAD_DIM**-0.5).softmax(-1)
            wanted = (weights @ exact[2]).transpose(1, 2)
            for name, function in functions().items():
                error = (function(q, k, v).double() - wanted).square().mean().sqrt().item()
                rows.append({"name": name, "keys": keys, "shift": shift, "rms": error})
    return rows


def chained(weights: torch.Tensor, values: torch.Tensor, chain: int) -> torch.Tensor:
    """weights (rows, keys) times values (keys, D), of their dtype, as Hopper's tensor cores add e4m3 products up.

    Each of an instruction's 32 products, and the sum so far, is cut at 2^-13 of the largest one's power of two; sums
    of `chain` keys are added exactly.
    """
    total = weights.new_zeros(len(weights), values.shape[1])
    for first in range(0, len(values), chain):
        sums = torch.zeros_like(total)
        for key in range(first, min(first + chain, len(values)), 32):
            products = weights[:, key : key + 32, None] * values[key : key + 32]
            largest = torch.maximum(products.abs().amax(1), sums.abs()).clamp_min(2.0**-60)
            unit = torch.exp2(largest.log2().floor() - 13)
            sums = (torch.trunc(products / unit[:, None]).sum(1) + torch.trunc(sums / unit)) * unit
        total += sums
    return total


def model() -> list[dict[str, Any]]:
    """The same errors of P V alone, of chains of one tile and of one chain, before out is rounded."""
    rows = []
    for shift in SHIFTS:
        for keys in KEYS:
            generator = torch.Generator().manual_seed(keys)
            scores = torch.randn(16, keys, generator=generator, dtype=torch.float64)
            values = (torch.randn(keys, 32, generator=generator) + shift).to(E4M3).double()
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            sums = weights.sum(-1, keepdim=True)
            rounded = (weights * 2**OFFSET).to(E4M3).double()
            for name, chain in (("model: chains of 128 keys", 128), ("model: one chain", keys)):
                out = chained(rounded, values, chain) / (sums * 2**OFFSET)
                error = (out - weights @ values / sums).square().mean().sqrt().item()
                rows.append({"name": name, "keys": keys, "shift": shift, "rms": error})
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each shift; a line for each model, and marks of what was measured."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(SHIFTS), figsize=(9, 3.8), sharey=True)
    for panel, shift in zip(panels, SHIFTS, strict=True):
        for name in dict.fromkeys(row["name"] for row in rows):
            mine = [row for row in rows if row["name"] == name and row["shift"] == shift]
            drawn = {"linestyle": "--"} if name.startswith("model") else {"marker": "o"}
            panel.plot([row["keys"] for row in mine], [row["rms"] for row in mine], label=name, **drawn)
        panel.set(xscale="log", yscale="log", xlabel="keys", title=f"values with mean {shift:g}")
        panel.set_xticks(KEYS, [str(keys) for keys in KEYS], rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("rms error of out")
    panels[1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, model, or draw what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="where to write what is measured")
    parser.add_argument("--model", type=Path, help="where to write what the model says")
    parser.add_argument("--plot", type=Path, nargs="+", help="what to draw")
    given = parser.parse_args()
    if given.plot is not None:
        plot([row for path in given.plot for row in json.loads(path.read_text())], PICTURE)
        return
    for path, find in ((given.measure, measure), (given.model, model)):
        if path is not None:
            rows = find()
            for row in rows:
                print(f"{row['name']:26} {row['keys']:6} keys, shift {row['shift']:g}: {row['rms']:.2e}")
            path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
