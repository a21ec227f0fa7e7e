"""Masks as torch's `scaled_dot_product_attention` and its callers have them, in the terms of fly's functions."""

from __future__ import annotations

import torch


def bias_of(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What a mask adds to scores: one of bools says True where a query sees a key, one of numbers is that already.

    Masks of fewer dimensions than (B, H, Sq, Skv) lack the first ones.
    """
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)


def top_left(queries: int, keys: int) -> tuple[int, tuple[int, int]]:
    """(keys that count, window_size) with which query i of all queries sees the keys up to i.

    fly's causal masks are bottom-right: query i sees keys up to i + keys - queries.
    """
    keys = min(keys, queries)
    return keys, (-1, queries - keys)
