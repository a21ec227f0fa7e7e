"""Packed sequences for tests: offsets from lengths, and attention over each sequence on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from tests.kernels.reference import attention


def offsets(lengths: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """(len(lengths) + 1,) int32: where each sequence starts, and the last one ends."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def sequences(tensor: torch.Tensor, cu_seqlens: torch.Tensor) -> Iterator[torch.Tensor]:
    """(1, S, H, D) of each sequence of a packed (total, H, D) tensor."""
    for first, end in pairwise(cu_seqlens.tolist()):
        yield tensor[None, first:end]


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (total_q, H, D) and lse (H, total_q) of `tests.kernels.reference.attention` over each sequence."""
    parts = zip(sequences(q, cu_seqlens_q), *(sequences(x, cu_seqlens_kv) for x in (k, v)))
    outs, lses = zip(*(attention(*part, **options) for part in parts))
    return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], dim=-1)
