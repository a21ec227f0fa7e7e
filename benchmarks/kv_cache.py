"""Appending to a KV cache with rotary embeddings: our kernel next to the same in torch, and to a plain copy.

    python benchmarks/kv_cache.py                   # on a GPU, some seconds
    python benchmarks/kv_cache.py --device cpu      # one small shape, in the emulator

A line is one shape: whether ours agrees with torch (how many elements differ, and by how much), then microseconds
with a cold L2 cache (medians; calls take turns), and the bytes that must move, over that time. `copy` is one torch
copy that moves as many bytes. The last line is the host's time for a warm call. What is right is decided by
`tests/kernels/cache/test_kv_cache.py`; this shows a GPU's results and times in one run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.timing import host_microseconds, measure
from kernels.cache.kv_cache import append_to_cache


@dataclass(frozen=True)
class Shape:
    """One kind of call; `page` tokens of a page, 0 without pages."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    page: int
    length: int = 4096

    def __str__(self) -> str:
        pairs = "-" if not self.rotary_dim else f"{self.rotary_dim} {'pairs' if self.interleaved else 'halves'}"
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{self.batch:5} {self.new:5} {heads:>6} {self.head_dim:5}  {pairs:10} {self.page or '-':>5}"

    @property
    def bytes(self) -> int:
        """Read and written at least, without the tables."""
        queries = self.heads if self.rotary_dim else 0
        return 2 * 2 * self.batch * self.new * self.head_dim * (queries + 2 * self.kv_heads)


HEADINGS = f"{'batch':>5} {'new':>5} {'heads':>6} {'dim':>5}  {'rotary':10} {'page':>5}"
GPU_SHAPES = (
    Shape(1, 1, 32, 8, 128, 128, False, 0),
    Shape(64, 1, 32, 8, 128, 128, False, 0),
    Shape(64, 1, 32, 8, 128, 128, True, 0),
    Shape(64, 1, 32, 8, 128, 128, False, 16),
    Shape(64, 1, 32, 8, 128, 0, False, 16),
    Shape(256, 4, 32, 8, 128, 64, False, 256, length=1024),
    Shape(4, 2048, 32, 8, 128, 128, False, 0),
    Shape(4, 2048, 32, 8, 128, 128, True, 0),
    Shape(4, 2048, 32, 8, 128, 128, False, 16),
    Shape(4, 2048, 32, 8, 128, 0, False, 16),
    Shape(4, 2048, 32, 32, 64, 64, False, 0),
)
CPU_SHAPES = (Shape(2, 1, 4, 2, 64, 32, False, 16, length=64),)


class Tensors:
    """Random tensors of a shape, in bfloat16."""

    def __init__(self, shape: Shape, device: str):
        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device)

        self.shape = shape
        self.q = random(shape.batch, shape.new, shape.heads, shape.head_dim)
        self.k, self.v = (random(shape.batch, shape.new, shape.kv_heads, shape.head_dim) for _ in range(2))
        pages = shape.length // shape.page if shape.page else 1
        entries, rows = shape.batch * pages, shape.page or shape.length
        self.caches = [random(entries, rows, shape.kv_heads, shape.head_dim) for _ in range(2)]
        self.table = None
        if shape.page:
            order = torch.randperm(entries, dtype=torch.int32, device=device)
            self.table = order.view(shape.batch, pages)
        most = shape.length - shape.new
        self.seqlens = torch.randint(0, most + 1, (shape.batch,), dtype=torch.int32, device=device)
        self.tables: list[torch.Tensor | None] = [None, None]
        if shape.rotary_dim:
            angles = torch.rand(shape.length, shape.rotary_dim // 2, device=device) * 6.3
            self.tables = [x.to(torch.bfloat16) for x in (angles.cos(), angles.sin())]

    def ours(self) -> torch.Tensor:
        """`append_to_cache`."""
        return append_to_cache(
            self.q,
            *self.caches,
            self.k,
            self.v,
            *self.tables,
            self.seqlens,
            block_table=self.table,
            rotary_interleaved=self.shape.interleaved,
        )

    def in_torch(self) -> torch.Tensor:
        """The same, as a user of torch writes it."""
        positions = self.seqlens[:, None] + torch.arange(self.shape.new, device=self.q.device)
        q, k = self.q, self.k
        if self.shape.rotary_dim:
            cos, sin = (table[positions][:, :, None].float() for table in self.tables)
            q, k = (self._rotated(x, cos, sin) for x in (q, k))
        if self.table is None:
            place = torch.arange(self.shape.batch, device=q.device)[:, None], positions
        else:
            pages = self.table.gather(1, (positions // self.shape.page).long())
            place = pages, positions % self.shape.page
        for cache, new in zip(self.caches, (k, self.v)):
            cache[place] = new
        return q

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x.split([self.shape.rotary_dim, self.shape.head_dim - self.shape.rotary_dim], -1)
        if self.shape.interleaved:
            first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = turned.float().chunk(2, -1)
        parts = first * cos - second * sin, first * sin + second * cos
        joined = torch.stack(parts, -1).flatten(-2) if self.shape.interleaved else torch.cat(parts, -1)
        return torch.cat([joined.to(x.dtype), rest], -1)


def difference(tensors: Tensors) -> tuple[int, float]:
    """(elements of the result and the caches that differ from torch's, the largest difference)."""
    before = [cache.clone() for cache in tensors.caches]
    results = [(tensors.in_torch(), *map(torch.clone, tensors.caches))]
    for cache, old in zip(tensors.caches, before):
        cache.copy_(old)
    results.append((tensors.ours(), *tensors.caches))
    pairs = list(zip(*results))
    count = sum(int((a != b).sum()) for a, b in pairs)
    return count, max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iters", type=int, default=50)
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    print(torch.cuda.get_device_name() if gpu else "emulated", "torch", torch.__version__)
    print(f"{HEADINGS}  {'differ':>8} {'by':>8}  {'fly us':>8} {'torch us':>8} {'copy us':>8}  {'fly GB/s':>8}")
    for shape in GPU_SHAPES if gpu else CPU_SHAPES:
        tensors = Tensors(shape, options.device)
        count, largest = difference(tensors)
        source = torch.empty(shape.bytes // 2, dtype=torch.uint8, device=options.device)
        target = torch.empty_like(source)
        calls = {
            "fly": tensors.ours,
            "torch": tensors.in_torch,
            "copy": lambda source=source, target=target: target.copy_(source),
        }
        timings = measure(calls, device=options.device, iters=options.iters if gpu else 1, warmup=3 if gpu else 0)
        times = [timings[name].median * 1e3 for name in calls]
        rate = shape.bytes / times[0] / 1e3
        print(f"{shape}  {count:8} {largest:8.1e}  " + " ".join(f"{t:8.1f}" for t in times) + f"  {rate:8.0f}")
    if gpu:
        tensors = Tensors(GPU_SHAPES[1], options.device)
        print(f"host: {host_microseconds(tensors.ours, device='cuda'):.1f} us a warm call")


if __name__ == "__main__":
    main()
