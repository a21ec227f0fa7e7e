"""`flash_attn_varlen_func`, `merge_attn_states` and `reshape_and_cache_flash` as vLLM calls them.

Arguments: https://github.com/vllm-project/flash-attention, vllm_flash_attn/flash_attn_interface.py. What vLLM's
attention backend passes is there: packed queries, pages of keys with `block_table` and `seqused_k`, results into
`out`. Whatever `fa_version` says, the result is the one that docs/compatibility.md describes. Those of
`merge_attn_states` are in https://github.com/vllm-project/vllm, vllm/v1/attention/ops/merge_attn_states.py, and of
`reshape_and_cache_flash` in vllm/_custom_ops.py.
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
from ..cache.layouts import in_pages
from ..merging import merge_states
from ..problem.catalogue import NO_WINDOW
from .ranks import add_ranks
from .slots import CACHE_DTYPES, FLOAT8, WIDE, as_float8, layout_of, scales_of, write_slots

FUNCTION = VLLM.function
CHECKS = Checks(FUNCTION)
FA_VERSIONS = (2, 3, 4)
CACHE = Checks("vllm.reshape_and_cache_flash")


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
            (B, max pages) int32 and seqused_k (B,) int32, the keys of each sequence. On ROCm pages may also be, x
            being the elements of 16 bytes, k (pages, Hkv, D/x, page size, x) with v (pages, Hkv, page size/x, D, x),
            vLLM's SHUFFLE, or with v (pages, Hkv, D, page size), vLLM's `PagedAttention`.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length.
        out: (total_q, H, D), written and returned.
        s_aux: (H,) sinks. num_splits: parts that keys are split into, 0 takes what suits the device.
        q_descale, k_descale, v_descale: (B, Hkv) float32 scales of float8_e4m3fn tensors, those of k and v as
            `flydsl_flash_attn_func` has them. vLLM passes them with 16-bit tensors too, whose scale they are not.
        cp_world_size, cp_rank, cp_tot_seqused_k: decode context parallelism: k and v are the keys of one rank of so
            many, those at the positions cp_rank, cp_rank + cp_world_size and so on of each sequence; seqused_k counts
            these, and cp_tot_seqused_k (B,) int32 those of all ranks, by which queries are placed.
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
    world_size, rank = CHECKS.integer("cp_world_size", cp_world_size), CHECKS.integer("cp_rank", cp_rank)
    window = NO_WINDOW if window_size is None else window_size
    extras: dict[str, Any] = {"seqused_k": seqused_k, "learnable_sink": s_aux}
    if scheduler_metadata is not None:
        extras["scheduler_metadata"] = scheduler_metadata
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for (name, scale), tensor in zip(scales.items(), (q, k, v)):
        if isinstance(tensor, torch.Tensor) and tensor.element_size() == 1:
            extras[name] = scale
        elif scale is not None:
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
    if block_table is not None and (layout := layout_of(k, v)) != "linear":
        options["kv_cache_layout"] = layout
    if cp_tot_seqused_k is not None or (world_size, rank) != (1, 0):
        causal = add_ranks(CHECKS, options, causal, world_size, rank, cp_tot_seqused_k)
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


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write key and value, (tokens, Hkv, D), to their slots of a cache in pages.

    Args:
        key_cache, value_cache: (pages, page size, Hkv, D) of any strides, so that the memory may have heads before
            rows (vLLM's HND) and K and V beside each other; or ROCm's, see `flash_attn_varlen_func`.
        slot_mapping: (slots,) int64 or int32 on key's device, at most as many as tokens: page · page size + row of
            each token, negative for none. Tokens behind them are padding.
        kv_cache_dtype: "auto", "float16" or "bfloat16": the cache has key's dtype; "fp8" or "fp8_e4m3": it has
            float8_e4m3fn, or uint8 for it, and D is a multiple of 8.
        k_scale, v_scale: of 8-bit caches, float32 of one element: values are divided by them, 1 by default, and what
            is then above 448 becomes 448. Whatever they are for others.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: another kv_cache_dtype.
    """
    if kv_cache_dtype not in CACHE_DTYPES:
        CACHE.fail(
            f"kv_cache_dtype {kv_cache_dtype!r} is not available; accepted: {', '.join(CACHE_DTYPES)}",
            UnsupportedError,
        )
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, cache in caches.items():
        CACHE.plain(name, cache)
        if kv_cache_dtype not in WIDE:
            CACHE.dtype(name, cache, (FLOAT8, torch.uint8))
            caches[name] = as_float8(cache)
    key_cache, value_cache = caches.values()
    layout = layout_of(key_cache, value_cache)
    for name, cache in caches.items():
        if layout == "linear" and cache.dim() != 4:
            CACHE.fail(f"{name} must have shape (pages, page size, Hkv, D), got {tuple(cache.shape)}")
    for name, new in (("key", key), ("value", value)):
        CACHE.plain(name, new)
        if new.dim() != 3:
            CACHE.fail(f"{name} must have shape (tokens, Hkv, D), got {tuple(new.shape)}")
    CACHE.tensor("slot_mapping", slot_mapping, (torch.int64, torch.int32), 1, "(slots,)")
    count, device = len(slot_mapping), key.device
    if count > len(key):
        CACHE.fail(f"slot_mapping must have at most a slot for each of {len(key)} tokens, got {count}")
    if count:
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        pages = torch.arange(len(key_cache), **numbers)[None]
        slots, entries = slot_mapping.to(torch.int32), torch.zeros(count, **numbers)
        in_pages(CACHE, layout, caches, pages)  # its errors have this function's names
        scales = scales_of(key_cache, k_scale, v_scale)
        write_slots(key[:count], value[:count], key_cache, value_cache, slots, entries, pages, layout, scales)


def _check_lengths(cu_seqlens_k: Any, seqused_k: Any, block_table: Any, fa_version: Any) -> None:
    if (block_table is None) != (seqused_k is None):
        raise ArgumentError(f"{FUNCTION}: block_table and seqused_k go together")
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ArgumentError(f"{FUNCTION}: pass either cu_seqlens_k, for packed keys, or seqused_k, for pages")
    if CHECKS.integer("fa_version", fa_version) not in FA_VERSIONS:
        raise ArgumentError(f"{FUNCTION}: fa_version must be one of {FA_VERSIONS}, got {fa_version!r}")
