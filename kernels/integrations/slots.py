"""New keys and values at slots of a cache in pages, as serving engines number them: page · page size + row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..cache.kv_cache import append_to_cache
from ..problem.catalogue import VECTOR_LAYOUTS

FLOAT8 = torch.float8_e4m3fn
WIDE = ("auto", "float16", "bfloat16")  # vLLM's names of caches of the model's dtype
CACHE_DTYPES = (*WIDE, "fp8", "fp8_e4m3")

Scales = Mapping[str, Any]
NO_SCALES: Scales = MappingProxyType({})


def scales_of(cache: torch.Tensor, k_scale: Any, v_scale: Any) -> Scales:
    """`k_descale` and `v_descale` of a cache with elements of 8 bits, which others have none of.

    k_scale, v_scale: float32 tensors of one element, or numbers, or None for 1.
    """
    if cache.element_size() != 1:
        return NO_SCALES
    found = {"k_descale": k_scale, "v_descale": v_scale}
    return {name: _number(scale, cache.device) for name, scale in found.items() if scale is not None}


def _number(scale: Any, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.reshape(1)
    return torch.full((1,), float(scale), dtype=torch.float32, device=device)


def as_float8(cache: torch.Tensor) -> torch.Tensor:
    """A cache whose 8-bit elements have no dtype of their own, as vLLM allocates it, as float8_e4m3fn."""
    return cache.view(FLOAT8) if cache.dtype is torch.uint8 else cache


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    entries: torch.Tensor,
    pages: torch.Tensor,
    layout: str = "linear",
    scales: Scales = NO_SCALES,
) -> None:
    """key and value (tokens, Hkv, D) to their slots of k_cache and v_cache (pages, page size, Hkv, D), any strides.

    `layout`: of pages that are others, see `cache.layouts`. `scales`: of 8-bit caches, see `scales_of`.

    Each token is a sequence of its own, and all pages are one's: `slots` (tokens,) int32, negative ones of tokens
    that are not written; `entries`: as many zeros; `pages` (1, pages) int32: all of them, in order.
    """
    k, v = key.unsqueeze(1), value.unsqueeze(1)
    places: dict[str, Any] = {"cache_batch_idx": entries, "block_table": pages, "kv_cache_layout": layout, **scales}
    append_to_cache(k, k_cache, v_cache, k, v, cache_seqlens=slots, **places)


def layout_of(key_cache: Any, value_cache: Any) -> str:
    """The layout of a cache in pages, whose dimensions tell it; ROCm's are those whose K has five."""
    if not all(isinstance(cache, torch.Tensor) for cache in (key_cache, value_cache)) or key_cache.dim() != 5:
        return "linear"
    return VECTOR_LAYOUTS[1 if value_cache.dim() == 4 else 0]
