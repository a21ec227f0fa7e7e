"""Random calls of `append_to_cache`, what they must do written down in torch, and whether they did.

Tensors lie in larger memory whose content is random too; whatever the reference does not write must keep its bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from kernels.cache.kv_cache import append_to_cache

CANARY = 64  # elements of other memory on both sides of a cache


@dataclass(frozen=True)
class Case:
    """One kind of call. `page`: tokens of a page, 0 without pages. `layout`: of the caches in memory."""

    head_dim: int = 64
    rotary_dim: int = 0
    interleaved: bool = False
    each_query: bool = True
    dtype: torch.dtype = torch.bfloat16
    batch: int = 3
    queries: int = 2
    new: int = 2
    heads: int = 4
    kv_heads: int = 2
    length: int = 40
    page: int = 0
    batch_idx: bool = False
    one_length: bool = False
    head_dim_v: int = 0
    layout: str = "apart"
    shift: int = 0  # elements from an aligned address

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return "-".join(f"{name}={value}".replace("torch.", "") for name, value in changed.items()) or "default"


class Problem:
    """Random tensors of a case. `lengths`, if given, are those of the sequences."""

    def __init__(self, case: Case, seed: int, device: str = "cpu", lengths: list[int] | None = None):
        self.case = case
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        value_dim = case.head_dim_v or case.head_dim
        self.q = self.random(case.batch, case.queries, case.heads, case.head_dim)
        self.k = self.random(case.batch, case.new, case.kv_heads, case.head_dim)
        self.v = self.random(case.batch, case.new, case.kv_heads, value_dim)
        self.block_table = self.batch_idx = self.cos = self.sin = None
        entries = case.batch + 2
        shape = (entries, case.length, case.kv_heads)
        if case.page:
            each = -(-case.length // case.page)
            entries = case.batch * each + 2
            pages = torch.randperm(entries, generator=self.generator)[: case.batch * each]
            self.block_table = pages.reshape(case.batch, each).to(torch.int32).to(device)
            shape = (entries, case.page, case.kv_heads)
        if case.batch_idx:
            order = torch.randperm(case.batch + 2, generator=self.generator)[: case.batch]
            self.batch_idx = order.to(torch.int32).to(device)
            if self.block_table is not None:
                rows = torch.full(
                    (case.batch + 2, self.block_table.shape[1]), 2**30, dtype=torch.int32, device=device
                )
                rows[order] = self.block_table
                self.block_table = rows
        self.memory, self.k_cache, self.v_cache = self.caches(shape, case.head_dim, value_dim)
        most = max(case.length - max(case.new, case.queries), 0)
        self.lengths = torch.randint(0, most + 1, (case.batch,), generator=self.generator).tolist()
        if lengths is not None:
            self.lengths = lengths
        elif case.one_length:
            self.lengths = self.lengths[:1] * case.batch
        self.seqlens = (
            self.lengths[0] if case.one_length else torch.tensor(self.lengths, dtype=torch.int32).to(device)
        )
        if case.rotary_dim:
            angles = torch.rand(case.length, case.rotary_dim // 2, generator=self.generator) * 6.3
            self.cos, self.sin = (self.shifted(x.to(case.dtype)).to(device) for x in (angles.cos(), angles.sin()))

    def random(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self.generator).to(self.case.dtype)
        return self.shifted(numbers.to(self.device))

    def shifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, so many elements from an aligned address as the case says."""
        memory = tensor.new_empty(tensor.numel() + self.case.shift)
        place = memory[self.case.shift :].view(tensor.shape)
        place.copy_(tensor)
        return place

    def caches(self, shape: tuple[int, ...], dim: int, value_dim: int) -> tuple[torch.Tensor, ...]:
        """(all memory, k_cache, v_cache): apart, or as one tensor with K and V next to each other."""
        entries, tokens, heads = shape
        sizes = {
            "apart": (entries * tokens * heads * (dim + value_dim),),
            "by token": (entries, tokens, heads, 2, dim),
            "by entry": (entries, 2, tokens, heads, dim),
            "by head": (entries, heads, tokens, 2, dim),
        }[self.case.layout]
        count = torch.Size(sizes).numel()
        first = CANARY + self.case.shift
        memory = torch.randn(first + count + CANARY, generator=self.generator).to(self.case.dtype).to(self.device)
        inner = memory[first : first + count].view(sizes)
        if self.case.layout == "apart":
            k_cache, v_cache = inner.split([entries * tokens * heads * d for d in (dim, value_dim)])
            return memory, k_cache.view(*shape, dim), v_cache.view(*shape, value_dim)
        if self.case.layout == "by entry":
            return memory, *inner.unbind(1)
        parts = inner.unbind(3)
        return memory, *(p.transpose(1, 2) if self.case.layout == "by head" else p for p in parts)

    def call(self) -> torch.Tensor:
        """Run `append_to_cache`."""
        return append_to_cache(
            self.q,
            self.k_cache,
            self.v_cache,
            self.k,
            self.v,
            self.cos,
            self.sin,
            self.seqlens,
            cache_batch_idx=self.batch_idx,
            block_table=self.block_table,
            rotary_interleaved=self.case.interleaved,
            rotate_each_query=self.case.each_query,
        )

    def place(self, sequence: int, position: int) -> tuple[int, int] | None:
        """(entry, row) of a position in the cache; None when it has none or the tables lack it."""
        entries, rows = self.k_cache.shape[:2]
        if position < 0 or (self.cos is not None and position >= len(self.cos)):
            return None
        entry = sequence if self.batch_idx is None else int(self.batch_idx[sequence])
        if self.block_table is not None:
            page, position = divmod(position, rows)
            if page >= self.block_table.shape[1] or not 0 <= entry < len(self.block_table):
                return None
            entry = int(self.block_table[entry, page])
        return (entry, position) if 0 <= entry < entries and position < rows else None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, ...]:
    """(exact, bound on the error of f32 mathematics rounded once) of a (H, D) head at one position, in float64."""
    half = len(cos)
    dim = 2 * half
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, half), slice(half, dim))
    exact, size = x.double(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    a, b = exact[..., first], exact[..., second]
    cos, sin = cos.double(), sin.double()
    exact = exact.clone()
    exact[..., first], exact[..., second] = a * cos - b * sin, a * sin + b * cos
    size[..., first] = (a * cos).abs() + (b * sin).abs()
    size[..., second] = (a * sin).abs() + (b * cos).abs()
    return exact, size


def wrong(result: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> int:
    """How many elements are not the exact ones rounded once, up to the errors of f32; untouched ones bit for bit."""
    info = torch.finfo(result.dtype)
    rounding = (exact.abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)
    good = (result.double() - exact).abs() <= rounding + size * 2.0**-22
    return int((~torch.where(size == 0, result.double() == exact, good)).sum())


def failures(problem: Problem) -> list[str]:
    """Run the call; what it did wrong."""
    case = problem.case
    inputs = [x.clone() for x in (problem.q, problem.k, problem.v)]
    expected = Problem.__new__(Problem)
    expected.__dict__.update(vars(problem))
    expected.memory = problem.memory.clone()
    expected.k_cache, expected.v_cache = (
        torch.as_strided(expected.memory, x.shape, x.stride(), x.storage_offset())
        for x in (problem.k_cache, problem.v_cache)
    )
    result = problem.call()
    found = [] if all(map(torch.equal, inputs, (problem.q, problem.k, problem.v))) else ["an input was changed"]
    for b, i in itertools.product(range(case.batch), range(case.new)):
        place = problem.place(b, problem.lengths[b] + i)
        if place is None:
            continue
        expected.v_cache[place] = problem.v[b, i]
        if problem.cos is None:
            expected.k_cache[place] = problem.k[b, i]
            continue
        at = problem.lengths[b] + i
        exact = rotated(problem.k[b, i], problem.cos[at], problem.sin[at], case.interleaved)
        if count := wrong(problem.k_cache[place], *exact):
            found.append(f"{count} elements of k of token {i} of sequence {b}")
        expected.k_cache[place] = problem.k_cache[place]
    if not torch.equal(problem.memory.view(torch.int16), expected.memory.view(torch.int16)):
        found.append("the caches, or memory around them, are not as they should be")
    if problem.cos is None:
        return found if result is problem.q else [*found, "q is not the result"]
    for b, i in itertools.product(range(case.batch), range(case.queries)):
        at = problem.lengths[b] + (i if case.each_query else 0)
        if 0 <= at < len(problem.cos):
            exact = rotated(problem.q[b, i], problem.cos[at], problem.sin[at], case.interleaved)
            if count := wrong(result[b, i], *exact):
                found.append(f"{count} elements of q of token {i} of sequence {b}")
            continue
        rest = slice(case.rotary_dim, None)
        if not result[b, i, :, : case.rotary_dim].isnan().all():
            found.append(f"query {i} of sequence {b} is past the tables and no NaN")
        if not torch.equal(result[b, i, :, rest], problem.q[b, i, :, rest]):
            found.append(f"what is not rotated of query {i} of sequence {b}")
    return found
