"""New keys and values of a call with a cache: where they go, how they are rotated, and whether they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.cache.kv_cache_cases import rotated, wrong
from tests.kernels.fuzz.fuzz_draws import Placed, bits
from tests.kernels.packed import offsets


@dataclass(frozen=True)
class Tokens:
    """How many tokens sequences have, and whether they are packed."""

    counts: list[int]
    packed: bool

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        """(sequence, token, its index in a tensor)."""
        first = 0
        for b, count in enumerate(self.counts):
            for i in range(count):
                yield b, i, (first + i,) if self.packed else (b, i)
            first += count

    @property
    def offsets(self) -> torch.Tensor:
        return offsets(self.counts)


@dataclass
class Appended:
    """New keys and values, where they go, and the tables that rotate them; `lengths` before the call.

    `queries`, `keys`: those of the call, and the new ones.
    """

    k: torch.Tensor
    v: torch.Tensor
    queries: Tokens
    keys: Tokens
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    lengths: list[int]
    interleaved: bool
    each_query: bool
    seqlens: int | torch.Tensor
    entry: Callable[[int, int], tuple[int, int]]

    def arguments(self) -> dict[str, Any]:
        rotary = {"rotary_cos": self.cos, "rotary_sin": self.sin, "rotary_interleaved": self.interleaved}
        given = {"k": self.k, "v": self.v, "cache_seqlens": self.seqlens, **(rotary if self.cos is not None else {})}
        if self.keys.packed:
            given["cu_seqlens_k_new"] = self.keys.offsets.to(self.k.device)
        return given

    def rotated_queries(self, q: torch.Tensor) -> torch.Tensor:
        """q as attention sees it."""
        if self.cos is None:
            return q
        result = q.clone()
        for b, i, place in self.queries:
            at = self.lengths[b] + (i if self.each_query else 0)
            exact, _ = rotated(q[place], self.cos[at], self.sin[at], self.interleaved)
            result[place] = exact.to(q.dtype)
        return result

    def failures(self, caches: tuple[torch.Tensor, ...], memory: Sequence[Placed]) -> list[str]:
        """Whether the caches, of K and of V, hold the new rows, and nothing else in their memory changed."""
        found = []
        for name, cache, new, placed in zip("kv", caches, (self.k, self.v), memory):
            expected = placed.before.clone()
            rows = torch.as_strided(expected, cache.shape, cache.stride(), cache.storage_offset())
            for b, i, place in self.keys:
                at = self.lengths[b] + i
                where = self.entry(b, at)
                if name == "k" and self.cos is not None:
                    exact = rotated(new[place], self.cos[at], self.sin[at], self.interleaved)
                    if count := wrong(cache[where], *exact):
                        found.append(f"{count} elements of new key {i} of sequence {b}")
                elif not torch.equal(bits(cache[where].contiguous()), bits(new[place].contiguous())):
                    found.append(f"new {name} {i} of sequence {b} is not in the cache")
                rows[where] = cache[where]
            if not torch.equal(bits(placed.memory), bits(expected)):
                found.append(f"other memory of {name}_cache was changed")
        return found
