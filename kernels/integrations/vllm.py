"""`flash_attn_varlen_func` as vLLM calls it: its own fork's argument order and keywords.

Arguments: https://github.com/vllm-project/flash-attention, vllm_flash_attn/flash_attn_interface.py. What vLLM's
attention backend passes is there: packed queries, pages of keys with `block_table` and `seqused_k`, results into
`out`. Whatever `fa_version` says, the result is the one that docs/compatibility.md describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fly.errors import ArgumentError, UnsupportedError
from kernels.api_options import PACKED, add_packing, attend, options_of, refuse

FUNCTION = "vllm.flash_attn_varlen_func"
FA_VERSIONS = (2, 3, 4)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries (total_q, H, D) with packed keys or pages of a cache.

    Args:
        k, v: (total_k, Hkv, D) with cu_seqlens_k, or pages (pages, page size, Hkv, D) with block_table
            (B, max pages) int32 and seqused_k (B,) int32, the keys of each sequence.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length.
        out: (total_q, H, D), written and returned.
        s_aux: (H,) sinks. num_splits: parts that keys are split into, 0 takes what suits the device.
        q_descale, k_descale, v_descale: (B, Hkv) float32 scales of float8_e4m3fn tensors. vLLM passes them with
            16-bit tensors too, whose scale they are not.
        The others are as in `kernels.flash_attn_api`.

    Returns:
        out, or with `return_softmax_lse` (out, softmax_lse (H, total_q)).

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: what is not available (a NotImplementedError).
    """
    _check_lengths(cu_seqlens_k, seqused_k, block_table, fa_version)
    refuse(FUNCTION, {"qv": q_v, "scheduler_metadata": scheduler_metadata})
    if return_attn_probs:
        raise UnsupportedError(f"{FUNCTION}: probabilities are not available: pass return_softmax_lse for the LSE")
    if cp_world_size != 1 or cp_rank != 0 or cp_tot_seqused_k is not None:
        raise UnsupportedError(
            f"{FUNCTION}: context parallelism is not available, got cp_world_size={cp_world_size}: combine the parts "
            "of the ranks by their softmax_lse"
        )
    window = (-1, -1) if window_size is None else tuple(window_size)
    extras: dict[str, Any] = {"seqused_k": seqused_k, "learnable_sink": s_aux, "num_splits": num_splits}
    if isinstance(q, torch.Tensor) and q.element_size() == 1:
        extras |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = options_of(FUNCTION, PACKED, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, extras)
    add_packing(FUNCTION, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return attend(q, k, v, causal, options, out=out, return_lse=return_softmax_lse)


def _check_lengths(cu_seqlens_k: Any, seqused_k: Any, block_table: Any, fa_version: Any) -> None:
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ArgumentError(f"{FUNCTION}: pass either cu_seqlens_k, for packed keys, or seqused_k, for pages")
    if (block_table is None) != (seqused_k is None):
        raise ArgumentError(f"{FUNCTION}: block_table and seqused_k go together")
    if fa_version not in FA_VERSIONS:
        raise ArgumentError(f"{FUNCTION}: fa_version must be one of {FA_VERSIONS}, got {fa_version!r}")
