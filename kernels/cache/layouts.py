"""What pages of a KV cache look like: from a caller's tensors to those that kernels take.

Layouts: `flydsl_flash_attn_func`'s kv_cache_layout. Names and meanings of the first three are those of FlyDSL
(https://github.com/ROCm/FlyDSL, kernels/attention/flash_attn_interface.py); "vectorized" is vLLM's SHUFFLE
(https://github.com/vllm-project/vllm, vllm/v1/attention/backends/rocm_aiter_fa.py), "paged_attention" the cache of
vllm/v1/attention/ops/paged_attn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..arguments.callers import arg, written
from ..arguments.checks import Checks
from ..problem.catalogue import PLAIN_LAYOUTS, VECTOR_LAYOUTS
from ..work.vectorized import VECTOR_BYTES

LAYOUTS = (*PLAIN_LAYOUTS, *VECTOR_LAYOUTS)
MAX_PAGE_BYTES = 2**31  # offsets inside of a page have 32 bits


def is_linear(layout: Any) -> bool:
    """Whether tensors are as they are without the keyword; an array is compared with nothing."""
    return isinstance(layout, str) and layout == "linear"


def in_pages(checks: Checks, layout: Any, caches: Mapping[str, Any], block_table: Any) -> tuple[Any, Any]:
    """Caches of K and V, by what they are called, as (pages, page_size, Hkv, D) of the same memory.

    Of `VECTOR_LAYOUTS`, only the shape and the distance between pages say something then.

    Raises:
        ArgumentError, ArgumentTypeError: no such layout, or tensors that are not in it.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        checks.fail(f"kv_cache_layout must be one of {', '.join(LAYOUTS)}, got {written(layout)}")
    if layout == "linear":
        keys, values = caches.values()
        return keys, values
    for name, cache in caches.items():
        checks.plain(name, cache)
    if layout == "linear3d":
        return _of_one_key(checks, caches, block_table)
    if block_table is None:
        checks.fail(f"kv_cache_layout={layout!r} is for keys in pages: pass a {arg.block_table}")
    return _of_vectors(checks, layout, caches)


def vectors(layout: str) -> str | None:
    """One of `VECTOR_LAYOUTS`, or None for another layout."""
    return layout if layout in VECTOR_LAYOUTS else None


def _of_one_key(checks: Checks, caches: Mapping[str, torch.Tensor], block_table: Any) -> tuple[Any, Any]:
    for name, cache in caches.items():
        if cache.dim() != 3 or block_table is None:
            checks.fail(
                f'kv_cache_layout="linear3d" is for pages of one key, (pages, Hkv, D) with a '
                f"{arg.block_table}, got {arg(name)} of shape {tuple(cache.shape)}"
            )
    keys, values = (cache.unsqueeze(1) for cache in caches.values())
    return keys, values


def _of_vectors(checks: Checks, layout: str, caches: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    (k_name, keys), (v_name, values) = caches.items()
    x = VECTOR_BYTES // keys.element_size()
    runs = layout == VECTOR_LAYOUTS[0]
    shapes = "(pages, Hkv, D/x, page_size, x)", f"(pages, Hkv, {'page_size/x, Dv, x' if runs else 'Dv, page_size'})"

    def wrong(name: str) -> None:
        checks.fail(
            f"pages in the layout {layout!r} are {arg(k_name)} {shapes[0]} and {arg(v_name)} {shapes[1]}, "
            f"with x = {x} of {keys.dtype} and page_size a multiple of x, got {arg(name)} of shape "
            f"{tuple(caches[name].shape)}"
        )

    if keys.dim() != 5 or keys.shape[-1] != x or not keys.shape[3] or keys.shape[3] % x:
        wrong(k_name)
    pages, heads, pieces, size, _ = keys.shape
    if values.dim() != (5 if runs else 4):
        wrong(v_name)
    head_dim_v = values.shape[3 if runs else 2]
    if values.shape != ((pages, heads, size // x, head_dim_v, x) if runs else (pages, heads, head_dim_v, size)):
        wrong(v_name)
    k, v = (
        _nominal(checks, name, cache, (size, heads, head_dim))
        for (name, cache), head_dim in zip(caches.items(), (pieces * x, head_dim_v))
    )
    return k, v


def _nominal(checks: Checks, name: str, cache: torch.Tensor, page: tuple[int, int, int]) -> torch.Tensor:
    """A cache whose pages, each of them contiguous, are of the nominal shape `page`."""
    size, heads, head_dim = page
    if len(cache) and not cache[0].is_contiguous():
        checks.fail(
            f"{arg(name)} must have contiguous pages, got shape {tuple(cache.shape)} with strides {cache.stride()}"
        )
    elements = size * heads * head_dim
    if elements * cache.element_size() >= MAX_PAGE_BYTES:
        checks.fail(
            f"a page of {arg(name)} must have less than {MAX_PAGE_BYTES} bytes, got shape {tuple(cache.shape)}"
        )
    return cache.as_strided((len(cache), *page), (cache.stride(0), heads * head_dim, head_dim, 1))
