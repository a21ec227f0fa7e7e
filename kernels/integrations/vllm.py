"""`flash_attn_varlen_func` and `merge_attn_states` as vLLM calls them: its own argument order and keywords.

Arguments: https://github.com/vllm-project/flash-attention, vllm_flash_attn/flash_attn_interface.py. What vLLM's
attention backend passes is there: packed queries, pages of keys with `block_table` and `seqused_k`, results into
`out`. Whatever `fa_version` says, the result is the one that docs/compatibility.md describes. Those of
`merge_attn_states` are in https://github.com/vllm-project/vllm, vllm/v1/attention/ops/merge_attn_states.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError

from ..api.conversions import check_dense
from ..api.options import PACKED, add_packing, attend, options_of, refuse
from ..arguments.callers import VLLM
from ..arguments.checks import Checks
from ..merging import merge_states
from ..problem.catalogue import NO_WINDOW

FUNCTION = VLLM.function
CHECKS = Checks(FUNCTION)
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
        scheduler_metadata: a tensor or None; a hint that changes nothing.
        The others are as in `fly_attention.flash_attn_api`.

    Returns:
        out, or with `return_softmax_lse` (out, softmax_lse (H, total_q)).

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: what is not available (a NotImplementedError).
    """
    _check_lengths(cu_seqlens_k, seqused_k, block_table, fa_version)
    refuse(FUNCTION, "qv", q_v, "q_v")
    if return_attn_probs is not False:
        CHECKS.flag("return_attn_probs", return_attn_probs)
        raise UnsupportedError(f"{FUNCTION}: probabilities are not available: pass return_softmax_lse for the LSE")
    one_rank = isinstance(cp_world_size, int) and isinstance(cp_rank, int) and cp_world_size == 1 and cp_rank == 0
    if not one_rank or cp_tot_seqused_k is not None:
        _refuse_ranks(cp_world_size, cp_rank, cp_tot_seqused_k)
    window = NO_WINDOW if window_size is None else window_size
    extras: dict[str, Any] = {"seqused_k": seqused_k, "learnable_sink": s_aux}
    if scheduler_metadata is not None:
        extras["scheduler_metadata"] = scheduler_metadata
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if isinstance(q, torch.Tensor) and q.element_size() == 1:
        extras |= scales
    else:
        for name, scale in scales.items():
            if scale is not None:
                check_dense(FUNCTION, name, scale)
                if scale.dtype is not torch.float32:
                    CHECKS.fail(f"{name} has dtype {scale.dtype}; accepted: torch.float32", ArgumentTypeError)
    options = options_of(
        VLLM,
        PACKED,
        dropout_p,
        softmax_scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        deterministic,
        extras,
        num_splits,
    )
    add_packing(VLLM, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    out, lse = attend(VLLM, q, k, v, causal, options, out=out, return_lse=return_softmax_lse)
    return out if lse is None else (out, lse)


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Write attention to prefix and suffix keys to `output`, and its log-sum-exp to `output_lse`.

    Args:
        output, prefix_output, suffix_output: (tokens, heads, head size). lses: (heads, tokens) float32, natural.
        prefill_tokens_with_context: how many tokens, the first ones, have a prefix; all by default.

    Raises:
        UnsupportedError: `output_scale`.
        Others as `fly_attention.merge_states`.
    """
    if output_scale is not None:
        raise UnsupportedError("vllm.merge_attn_states: output_scale is not available: quantise output afterwards")
    tokens = len(output)
    first = tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    checks = Checks("vllm.merge_attn_states")
    checks.whole("prefill_tokens_with_context", checks.integer("prefill_tokens_with_context", first), 0, tokens)
    both = [prefix_output, suffix_output], [prefix_lse, suffix_lse]
    for part, (outs, lses) in ((slice(first), both), (slice(first, None), ([suffix_output], [suffix_lse]))):
        if len(range(tokens)[part]):
            merge_states(
                [x[part] for x in outs],
                [x[:, part] for x in lses],
                out=output[part],
                lse=None if output_lse is None else output_lse[:, part],
                return_lse=False,
            )


def _refuse_ranks(cp_world_size: Any, cp_rank: Any, cp_tot_seqused_k: Any) -> None:
    given = {"cp_world_size": (cp_world_size, 1), "cp_rank": (cp_rank, 0)}
    wrong = [name for name, (value, alone) in given.items() if CHECKS.integer(name, value) != alone]
    if cp_tot_seqused_k is not None:
        wrong.append("cp_tot_seqused_k")
    if wrong:
        raise UnsupportedError(
            f"{FUNCTION}: {wrong[0]} is not available, as context parallelism is not: combine the parts of the ranks "
            "by their softmax_lse"
        )


def _check_lengths(cu_seqlens_k: Any, seqused_k: Any, block_table: Any, fa_version: Any) -> None:
    if (block_table is None) != (seqused_k is None):
        raise ArgumentError(f"{FUNCTION}: block_table and seqused_k go together")
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ArgumentError(f"{FUNCTION}: pass either cu_seqlens_k, for packed keys, or seqused_k, for pages")
    if CHECKS.integer("fa_version", fa_version) not in FA_VERSIONS:
        raise ArgumentError(f"{FUNCTION}: fa_version must be one of {FA_VERSIONS}, got {fa_version!r}")
