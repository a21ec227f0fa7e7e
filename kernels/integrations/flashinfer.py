"""Merging of attention states as FlashInfer calls it: log-sum-exps of base 2, tokens before heads.

Arguments and results: https://github.com/flashinfer-ai/flashinfer, flashinfer/cascade.py.
"""

from __future__ import annotations

import torch

from fly.errors import UnsupportedError

from ..merging import merge_states as merged

State = tuple[torch.Tensor, torch.Tensor]


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> State:
    """(v, s) of two: v (seq_len, heads, head_dim), s (seq_len, heads) float32, log-sum-exps of base 2.

    Raises as `fly_attention.merge_states` does.
    """
    v, s = merged([v_a, v_b], [s_a.transpose(0, 1), s_b.transpose(0, 1)], log2=True, lse=_of(s_a).transpose(0, 1))
    assert s is not None
    return v, s.transpose(0, 1)


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """`merge_state` of (v, s) and (v_other, s_other), written to v and s.

    Raises:
        UnsupportedError: a `mask`.
        Others as `fly_attention.merge_states`.
    """
    if mask is not None:
        raise UnsupportedError("merge_state_in_place: mask is not available: set s_other to -inf where it is False")
    lses = [s.transpose(0, 1), s_other.transpose(0, 1)]
    _, result = merged([v, v_other], lses, out=v, lse=_of(s).transpose(0, 1), log2=True)
    assert result is not None
    s.copy_(result.transpose(0, 1))


def merge_states(v: torch.Tensor, s: torch.Tensor) -> State:
    """(v, s) of all states in v (seq_len, states, heads, head_dim) and s (seq_len, states, heads).

    Raises as `fly_attention.merge_states` does.
    """
    lse = _of(s[:, 0]).transpose(0, 1)
    result, _ = merged(v.transpose(0, 1), s.permute(1, 2, 0), lse=lse, log2=True)
    return result, lse.transpose(0, 1)


def _of(s: torch.Tensor) -> torch.Tensor:
    """Memory for a result like s."""
    return s.new_empty(s.shape)
