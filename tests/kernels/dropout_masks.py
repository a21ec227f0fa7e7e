"""Which weights a kernel kept, read from its results: inputs under which each result element is one weight's.

Queries of zero make all weights of a row alike. With values that are one-hot, out[i, j] is the weight of key j, or 0;
with gradients that are one-hot, dv[j, i] is. With dO and V that are even, the gradient of a score is above zero where
its weight is kept and below zero where it is not, unless the row's are all kept or all dropped: one-hot keys make dq
that, and one-hot queries dk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fly_attention.problem.dropout_mask import dropout_mask
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets


@dataclass(frozen=True)
class Problem:
    """Sequences with `queries` and `keys` each, dense ones all alike; query heads of a key head are `group`."""

    queries: Sequence[int]
    keys: Sequence[int]
    kv_heads: int
    group: int
    head_dim: int
    causal: bool
    packed: bool
    dropout_p: float
    rng_state: torch.Tensor
    dtype: torch.dtype = torch.bfloat16
    splits: int = 1

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def options(self) -> dict[str, Any]:
        """Of the call."""
        device = self.rng_state.device
        form = {
            "cu_seqlens_q": offsets(list(self.queries), device),
            "cu_seqlens_kv": offsets(list(self.keys), device),
            "max_seqlen_q": max(self.queries),
            "max_seqlen_kv": max(self.keys),
        }
        options: dict[str, Any] = {"dropout_p": self.dropout_p, "rng_state": self.rng_state}
        return options | (form if self.packed else {}) | {"num_kv_splits": self.splits}

    def tokens(self, side: str, heads: int, fill: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """(B, S, heads, D) or packed of `fill(length)`, (length, D) or (length, heads, D), for each sequence."""
        parts = []
        for length in getattr(self, side):
            part = fill(length).to(self.rng_state.device, self.dtype)
            parts.append(part if part.dim() == 3 else part[:, None].expand(length, heads, self.head_dim))
        return torch.cat(parts) if self.packed else torch.stack(parts)

    def zeros(self, side: str, heads: int) -> torch.Tensor:
        return self.tokens(side, heads, lambda length: torch.zeros(length, self.head_dim))

    def apart(self, tensor: torch.Tensor, side: str) -> list[torch.Tensor]:
        """(length, heads, D) of each sequence."""
        return list(tensor.split(list(getattr(self, side)))) if self.packed else list(tensor)

    def windows(self, side: str, room: int) -> Iterator[int]:
        """Where `room` tokens of the longest sequence begin, one after the other."""
        return iter(range(0, max(getattr(self, side)), room))

    def one_hot(self, length: int, start: int) -> torch.Tensor:
        """(length, D): token start + c has a one in column c."""
        return (
            torch.eye(max(length, start + self.head_dim), self.head_dim).roll(start, 0)[:length]
            * ((torch.arange(length) >= start)[:, None])
        )

    def one_hot_by_head(self, length: int, start: int) -> torch.Tensor:
        """(length, heads, D): of every head of a group, as many tokens from `start` on, in columns of its own."""
        room = self.head_dim // self.group
        found = torch.zeros(length, self.heads, self.head_dim)
        for head in range(self.heads):
            for token in range(start, min(start + room, length)):
                found[token, head, head % self.group * room + token - start] = 1
        return found

    def wanted(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(kept, seen) of each sequence, (heads, queries, keys)."""
        shape = (len(self.queries), self.heads, max(self.queries), max(self.keys))
        mask = dropout_mask(self.rng_state, shape, self.dropout_p)
        for b, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            seen = torch.ones(queries, keys, dtype=torch.bool, device=mask.device)
            seen = seen.tril(keys - queries) if self.causal else seen
            yield mask[b, :, :queries, :keys], seen.expand(self.heads, -1, -1)

    def forward_mask(self) -> list[torch.Tensor]:
        """What the forward kernel kept and is seen, of each sequence, (heads, queries, keys)."""
        q, k = self.zeros("queries", self.heads), self.zeros("keys", self.kv_heads)
        found: list[list[torch.Tensor]] = [[] for _ in self.keys]
        for start in self.windows("keys", self.head_dim):
            v = self.tokens("keys", self.kv_heads, lambda length, start=start: self.one_hot(length, start))
            out = flydsl_flash_attn_func(q, k, v, self.causal, **self.options)
            for b, part in enumerate(self.apart(out, "queries")):
                keys = min(max(self.keys[b] - start, 0), self.head_dim)
                found[b].append(part.transpose(0, 1)[..., :keys] != 0)
        return [torch.cat(parts, -1) for parts in found]

    def gradients(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = flydsl_flash_attn_func(*leaves, self.causal, **self.options)
        return torch.autograd.grad(out, leaves, dout)

    def mask_of_dv(self) -> list[torch.Tensor]:
        """What the kernel of dV kept and is seen."""
        fixed = (
            self.zeros("queries", self.heads),
            self.zeros("keys", self.kv_heads),
            self.zeros("keys", self.kv_heads),
        )

        def run(start: int) -> torch.Tensor:
            dout = self.tokens("queries", self.heads, lambda length: self.one_hot_by_head(length, start))
            return self.gradients(*fixed, dout)[2] != 0

        return self._by_query(run)

    def mask_of_dk(self) -> list[torch.Tensor]:
        """What the kernel of dK kept and is seen."""
        k, even = self.zeros("keys", self.kv_heads), torch.full((1, self.head_dim), self.head_dim**-0.5)
        v = self.tokens("keys", self.kv_heads, lambda length: even.expand(length, -1))
        dout = self.tokens("queries", self.heads, lambda length: even.expand(length, -1))

        def run(start: int) -> torch.Tensor:
            q = self.tokens("queries", self.heads, lambda length: self.one_hot_by_head(length, start))
            return self.gradients(q, k, v, dout)[1] > 0

        return self._by_query(run)

    def mask_of_dq(self) -> list[torch.Tensor]:
        """What the kernel of dQ kept and is seen."""
        q, even = self.zeros("queries", self.heads), torch.full((1, self.head_dim), self.head_dim**-0.5)
        v = self.tokens("keys", self.kv_heads, lambda length: even.expand(length, -1))
        dout = self.tokens("queries", self.heads, lambda length: even.expand(length, -1))
        found: list[list[torch.Tensor]] = [[] for _ in self.keys]
        for start in self.windows("keys", self.head_dim):
            k = self.tokens("keys", self.kv_heads, lambda length, start=start: self.one_hot(length, start))
            dq = self.gradients(q, k, v, dout)[0]
            for b, part in enumerate(self.apart(dq, "queries")):
                keys = min(max(self.keys[b] - start, 0), self.head_dim)
                found[b].append(part.transpose(0, 1)[..., :keys] > 0)
        return [torch.cat(parts, -1) for parts in found]

    def _by_query(self, run: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """(heads, queries, keys) of what `run(start)` gives for keys, (keys, key heads, columns of queries)."""
        room = self.head_dim // self.group
        found: list[list[torch.Tensor]] = [[] for _ in self.keys]
        for start in self.windows("queries", room):
            for b, part in enumerate(self.apart(run(start), "keys")):
                columns = part[..., : room * self.group].unflatten(-1, (self.group, room)).permute(1, 2, 3, 0)
                queries = min(max(self.queries[b] - start, 0), room)
                found[b].append(columns.flatten(0, 1)[:, :queries])
        return [torch.cat(parts, 1) for parts in found]

    def wrong(self, which: str) -> list[str]:
        """Where the mask of a kernel is not `dropout_mask`: "forward", "dv", "dk" or "dq"."""
        found = self.forward_mask() if which == "forward" else getattr(self, f"mask_of_{which}")()
        result = []
        for b, (mine, (kept, seen)) in enumerate(zip(found, self.wanted(), strict=True)):
            if which in ("dk", "dq"):  # those of rows that keep all or nothing are zero
                counts = (kept & seen).sum(-1, keepdim=True)
                seen = seen & (counts > 0) & (counts < seen.sum(-1, keepdim=True))
                mine = mine & seen
            if not torch.equal(mine, kept & seen):
                result.append(f"{which} of sequence {b}: {(mine != (kept & seen)).nonzero()[:4].tolist()}")
        return result


def dense(rng_state: torch.Tensor, **sizes: Any) -> Problem:
    """Two sequences of some tiles, two key heads of two query heads each."""
    base = {"queries": (70, 70), "keys": (90, 90), "kv_heads": 2, "group": 2, "head_dim": 64, "causal": False}
    return Problem(**{**base, "packed": False, "dropout_p": 0.3, "rng_state": rng_state, **sizes})


def packed(rng_state: torch.Tensor, **sizes: Any) -> Problem:
    """Sequences that begin anywhere, one of them empty."""
    return dense(rng_state, **{"queries": (21, 0, 70, 5), "keys": (40, 3, 90, 0), "packed": True, **sizes})
