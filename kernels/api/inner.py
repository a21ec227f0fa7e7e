"""FlashAttention-2's inner functions, forward and backward pass apart, for callers who merge parts of attention.

Context-parallel training computes attention to a part of the keys at a time, merges out and log-sum-exp of the parts,
and has the backward pass of each part made from the merged ones (ring-flash-attention, Transformer Engine). Names,
order, defaults and results are those of `flash_attn.flash_attn_interface` in FlashAttention 2.7 and 2.8.

What holds for all of them:

    Tensors are as in `fly_attention.flash_attn_api`. window_size_left, window_size_right: from 0, or -1 for no limit.
    The forward functions return (out, softmax_lse, S_dmask, rng_state): softmax_lse (B, H, Sq) float32, packed
    (H, total_q); S_dmask is empty; rng_state is (2,) int64, which weights dropout has dropped, empty without dropout.
    The backward functions write dq, dk and dv, which may have any strides and share no memory with another argument,
    and return softmax_d, float32 like softmax_lse: the sum of dout times out over a row, 0 where it sees no key. Rows
    outside of all sequences are not written. rng_state is what the forward function gave, and needed with dropout.
    return_softmax and zero_tensors raise `UnsupportedError`.
"""

from __future__ import annotations

from typing import Any

import torch

from fly.errors import UnsupportedError

from ..arguments.callers import (
    INNER_BACKWARD,
    INNER_FORWARD,
    INNER_VARLEN_BACKWARD,
    INNER_VARLEN_FORWARD,
    Caller,
    arg,
)
from ..arguments.checks import Checks
from ..problem.dropout_mask import random_state
from .conversions import MOST, check_dense
from .options import add_packing, attend, options_of
from .torch_ops import gradients

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _options(
    caller: Caller,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[Any, Any],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool = False,
    **refused: bool,
) -> dict[str, Any]:
    """Keywords for `flydsl_flash_attn_func`; `refused`: flags that have to be False."""
    checks = Checks(caller.function)
    for name, side in zip(("window_size_left", "window_size_right"), window, strict=True):
        checks.whole(name, checks.integer(name, side), -1, MOST)
    for name, flag in refused.items():
        checks.flag(name, flag)
        if flag:
            checks.fail(f"{arg(name)} is not available: pass False", UnsupportedError)
    return options_of(
        caller, (), dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, extras={}
    )


def _forward(
    caller: Caller, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: dict[str, Any]
) -> Results:
    if options.get("dropout_p") and isinstance(q, torch.Tensor):
        options["rng_state"] = random_state(q.device)
    out, lse = attend(caller, q, k, v, causal, options, return_lse=True)
    assert lse is not None
    return out, lse, q.new_empty(0), options.get("rng_state", q.new_empty(0, dtype=torch.int64))


def _backward(
    caller: Caller,
    given: dict[str, Any],
    results: dict[str, Any],
    causal: bool,
    options: dict[str, Any],
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    for name, tensor in (given | results | ({} if rng_state is None else {"rng_state": rng_state})).items():
        check_dense(caller.function, caller.name(name), tensor)
    if options.get("dropout_p"):
        if rng_state is None:
            Checks(caller.function).fail(f"{arg.rng_state} is None with dropout: pass what the forward function gave")
        options["rng_state"] = rng_state
    return gradients(caller, given, results, causal, options)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Results:
    """Attention of q (B, Sq, H, D), k (B, Skv, Hkv, D) and v (B, Skv, Hkv, Dv). The rest: see the module."""
    window = window_size_left, window_size_right
    options = _options(
        *(INNER_FORWARD, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes),
        return_softmax=return_softmax,
    )
    return _forward(INNER_FORWARD, q, k, v, causal, options)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> Results:
    """Attention of packed q (total_q, H, D), k (total_k, Hkv, D) and v (total_k, Hkv, Dv), or pages with block_table.

    leftpad_k, seqused_k: (B,) int32, where each sequence's keys begin, and how many there are. The rest: see the
    module and `flash_attn_varlen_func`.
    """
    caller, window = INNER_VARLEN_FORWARD, (window_size_left, window_size_right)
    options = _options(
        *(caller, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes),
        return_softmax=return_softmax,
        zero_tensors=zero_tensors,
    )
    named = {"cache_leftpad": leftpad_k, "seqused_kv": seqused_k}
    options |= {name: tensor for name, tensor in named.items() if tensor is not None}
    add_packing(caller, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return _forward(caller, q, k, v, causal, options)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradients of `_flash_attn_forward`, written to dq, dk and dv; out and softmax_lse may be of more keys."""
    caller, window = INNER_BACKWARD, (window_size_left, window_size_right)
    options = _options(caller, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    given = {"dout": dout, "out": out, "lse": softmax_lse, "q": q, "k": k, "v": v}
    return _backward(caller, given, {"dq": dq, "dk": dk, "dv": dv}, causal, options, rng_state)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Gradients of `_flash_attn_varlen_forward`, written to dq, dk, dv; out and softmax_lse may be of more keys."""
    caller, window = INNER_VARLEN_BACKWARD, (window_size_left, window_size_right)
    options = _options(
        *(caller, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic),
        zero_tensors=zero_tensors,
    )
    add_packing(caller, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None)
    given = {"dout": dout, "out": out, "lse": softmax_lse, "q": q, "k": k, "v": v}
    return _backward(caller, given, {"dq": dq, "dk": dk, "dv": dv}, causal, options, rng_state)
