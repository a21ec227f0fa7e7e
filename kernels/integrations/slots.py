"""New keys and values at slots of a cache in pages, as serving engines number them: page · page size + row."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.kv_cache import append_to_cache
from ..problem.catalogue import VECTOR_LAYOUTS


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    entries: torch.Tensor,
    pages: torch.Tensor,
    layout: str = "linear",
) -> None:
    """key and value (tokens, Hkv, D) to their slots of k_cache and v_cache (pages, page size, Hkv, D), any strides.

    `layout`: of pages that are others, see `cache.layouts`.

    Each token is a sequence of its own, and all pages are one's: `slots` (tokens,) int32, negative ones of tokens
    that are not written; `entries`: as many zeros; `pages` (1, pages) int32: all of them, in order.
    """
    k, v = key.unsqueeze(1), value.unsqueeze(1)
    places: dict[str, Any] = {"cache_batch_idx": entries, "block_table": pages, "kv_cache_layout": layout}
    append_to_cache(k, k_cache, v_cache, k, v, cache_seqlens=slots, **places)


def layout_of(key_cache: Any, value_cache: Any) -> str:
    """The layout of a cache in pages, whose dimensions tell it; ROCm's are those whose K has five."""
    if not all(isinstance(cache, torch.Tensor) for cache in (key_cache, value_cache)) or key_cache.dim() != 5:
        return "linear"
    return VECTOR_LAYOUTS[1 if value_cache.dim() == 4 else 0]
