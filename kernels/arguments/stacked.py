"""q, k and v that lie in one tensor, or k and v: stacked in its third last dimension.

They are handed down as they are, (q, k, v), (q, kv) or (qkv,), so that a backward pass can write into one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_stacked(q: Any, k: Any) -> bool:
    """Whether those are q and kv, or qkv and None, of a call without v."""
    together, count = (q, 3) if k is None else (k, 2)
    return isinstance(together, torch.Tensor) and together.dim() > 3 and together.shape[-3] == count


def leaves_of(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """What a call was given, without what stands for a part of it."""
    if v is not None:
        return q, k, v  # type: ignore[return-value]  # without k: what checks it says so
    return (q,) if k is None else (q, k)


def unstacked(leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """(q, k, v) of (q, k, v), (q, kv) or (qkv,), as views."""
    if len(leaves) == 3:
        return leaves
    *alone, together = leaves
    return (*alone, *together.unbind(-3))
