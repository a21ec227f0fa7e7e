"""Rows that kernels take: elements side by side, and a head dimension that they have, by way of copies."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments.checks import is_dense
from ..problem.contract import HEAD_DIMS


def with_rows(tensor: Any) -> Any:
    """A tensor whose last stride is 1, copied where it is not; anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or not is_dense(tensor) or not tensor.dim():
        return tensor
    return tensor.contiguous() if tensor.stride(-1) != 1 else tensor


def padded_dim(head_dim: int) -> int:
    """The next one that kernels have."""
    return -(-head_dim // HEAD_DIMS.step) * HEAD_DIMS.step


def ready(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """With elements of a row side by side and `head_dim` of them, zeros last: copied where it is not so."""
    missing = head_dim - tensor.size(-1)
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    rows: torch.Tensor = with_rows(tensor)
    return rows
