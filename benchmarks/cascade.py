"""Decoding behind a shared prefix: one call of `cascade_attention` next to one call over every sequence's whole keys.

    python benchmarks/cascade.py
    python benchmarks/cascade.py --batch 256 --prefix 1024 --own 128

Keys lie in pages of 64, those of the prefix once: "pages" reads them for every sequence, as tables say, and "copies"
has them in every sequence's own memory. Calls take turns, as graphs, and ratios are medians of each turn's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import samples
from fly_attention import cascade_attention, flydsl_flash_attn_func

PAGE, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 8, 128
SHAPES = ((8, 32768, 1024), (32, 8192, 512), (128, 2048, 256))  # (sequences, keys of the prefix, their own)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A call as a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def calls(batch: int, prefix: int, own: int) -> dict[str, Callable[[], object]]:
    """The same attention in three forms."""
    sizes = {"dtype": torch.bfloat16, "device": "cuda"}
    numbers = {"dtype": torch.int32, "device": "cuda"}
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, **sizes)
    shared, theirs = prefix // PAGE, own // PAGE
    pages = torch.randn(2, shared + batch * theirs, PAGE, KV_HEADS, HEAD_DIM, **sizes)
    k, v = pages
    first = torch.arange(shared, **numbers)
    rest = (shared + torch.arange(batch * theirs, **numbers)).view(batch, theirs)
    table = torch.cat([first.expand(batch, -1), rest], 1)
    lengths, own_lengths = torch.full((batch,), prefix + own, **numbers), torch.full((batch,), own, **numbers)
    length = torch.full((1,), prefix, **numbers)
    copies = [x[table.long()].flatten(1, 2) for x in (k, v)]
    split = {"prefix_block_table": first, "prefix_seqlen": length, "block_table": rest, "seqused_kv": own_lengths}
    whole = {"block_table": table, "seqused_kv": lengths, "num_kv_splits": 0}
    return {
        "cascade": captured(lambda: cascade_attention(q, k, v, k, v, **split)),
        "pages": captured(lambda: flydsl_flash_attn_func(q, k, v, **whole)),
        "copies": captured(lambda: flydsl_flash_attn_func(q, *copies, num_kv_splits=0)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("batch", "prefix", "own"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--rounds", type=int, default=21)
    return parser


def main() -> None:
    """Time every shape."""
    given = _parser().parse_args()
    asked = (given.batch, given.prefix, given.own)
    for shape in (asked,) if all(asked) else SHAPES:
        found = samples(calls(*shape), device="cuda", iters=given.rounds, warmup=3)
        batch, prefix, own = shape
        line = f"{batch:4} sequences, {prefix:6} keys shared, {own:5} own:"
        for name, times in found.items():
            ratio = statistics.median(t / mine for t, mine in zip(times, found["cascade"]))
            line += f"  {name} {statistics.median(times) * 1000:7.1f} us ({ratio:.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
