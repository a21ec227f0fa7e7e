"""New keys and values at slots of a cache in pages, as serving engines number them: page · page size + row."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fly.errors import UnsupportedError

from ..arguments.checks import Checks
from ..cache.kv_cache import append_to_cache


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    entries: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """key and value (tokens, Hkv, D) to their slots of k_cache and v_cache (pages, page size, Hkv, D), any strides.

    Each token is a sequence of its own, and all pages are one's: `slots` (tokens,) int32, negative ones of tokens
    that are not written; `entries`: as many zeros; `pages` (1, pages) int32: all of them, in order.
    """
    k, v = key.unsqueeze(1), value.unsqueeze(1)
    places: dict[str, Any] = {"cache_batch_idx": entries, "block_table": pages}
    append_to_cache(k, k_cache, v_cache, k, v, cache_seqlens=slots, **places)


def refuse_vectorised(checks: Checks, name: str, cache: torch.Tensor) -> NoReturn:
    """Say what to do with a cache in ROCm's SHUFFLE layout."""
    checks.fail(
        f"{name} of shape {tuple(cache.shape)} is in ROCm's SHUFFLE layout, K (pages, Hkv, D / x, page size, x) and "
        "V (pages, Hkv, page size / x, D, x), which has no row of a token in one piece, as the kernels load them: "
        "pass (pages, page size, Hkv, D), such as key_cache.permute(0, 3, 1, 2, 4).flatten(3) and "
        "value_cache.permute(0, 2, 4, 1, 3).flatten(1, 2)",
        UnsupportedError,
    )
