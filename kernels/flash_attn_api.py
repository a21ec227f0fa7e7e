"""FlashAttention-2's functions: the same names, arguments, defaults and results, on fly's kernels.

`from fly_attention import flash_attn_func` takes the place of `from flash_attn import flash_attn_func`. Tensors are
on a GPU, or on the CPU, where the kernel runs in the emulator. Where FlashAttention-2, -3 and -4 behave differently,
docs/compatibility.md says which one is followed.

What holds for all functions here:

    Integers (window sides, max_seqlen_*, cache_seqlens, num_splits) may be Python's, numpy's or tensors without
        dimensions on the CPU. On a device only cache_seqlens may be: reading others would synchronise.
    dropout_p: probability with which weights are dropped, for training; rounded to 256ths, 0 or from 1/512 up to
        511/512. Which ones is drawn from torch's generator of the device (torch.manual_seed).
    deterministic: gradients are the same bits in every run; see `flydsl_flash_attn_func`. Results always are.
    softmax_scale: factor of the scores, D**-0.5 by default.
    causal: query i of Sq sees the keys j ≤ i + Skv − Sq (bottom-right). A query that sees none gives zeros.
    window_size: (left, right); query i sees keys from i + Skv − Sq − left to i + Skv − Sq + right, both included.
        -1 or None: no limit; a side below -1 raises, for it is none in FlashAttention-2 and a bound in -4. With
        causal, right is 0.
    softcap: scores become softcap·tanh(score/softcap); 0 for none.
    alibi_slopes: (H,) or (B, H) float32; −slope·|i + Skv − Sq − j| is added to the scores.
    extras: keywords of FlashAttention-3 and -4, see `api.options.Extras`.

    Returns out, or with `return_attn_probs` (out, softmax_lse, S_dmask): softmax_lse (B, H, Sq) float32, packed
    (H, total_q), the natural log of the sum of exponentials of the scaled scores, −inf where a query sees no key;
    S_dmask with dropout is (B, H, longest Sq, longest Skv) of q's dtype, softmax weights before dropout's scale,
    below zero where they are dropped and 0 where a query does not see a key. Without dropout it is empty.

    Errors name the function that was called and its arguments.
    Raises ArgumentError and ArgumentTypeError (a ValueError, the second a TypeError too) for bad arguments, and
    UnsupportedError (a NotImplementedError) for what is not available: gradients of caches and 8-bit inputs, and what
    kernels of these do not do, such as packed sequences.

q, k and v have gradients, or what they are packed in (docs/training.md). Under torch.compile and torch.export a call
becomes the operation `torch.ops.fly.flash_attn`, whose gradient is one too.
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

import torch

from .api.conversions import check_cache, lengths_of
from .api.inner import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from .api.options import (
    CACHE,
    DENSE,
    PACKED,
    Extras,
    add_packing,
    attend,
    check_stacked,
    needs_copies,
    one_of,
    options_of,
    padded,
)
from .api.probabilities import refuse_while_compiling, signed_probabilities
from .api.rows import with_rows
from .api.torch_ops import append, eager, is_seen
from .arguments.callers import (
    APPEND,
    FUNC,
    KVCACHE,
    KVPACKED,
    QKVPACKED,
    VARLEN,
    VARLEN_KVPACKED,
    VARLEN_QKVPACKED,
    Caller,
)
from .arguments.checks import Checks, is_dense
from .arguments.stacked import leaves_of, unstacked
from .cache.packed import append_packed, batch_of
from .flash_attn_interface import repeated
from .problem.catalogue import NO_WINDOW
from .problem.dropout_mask import random_state

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_OF_REPEATED = {"softmax_scale", "num_kv_splits"}


def _attend(
    caller: Caller,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    causal: bool,
    options: dict[str, Any],
    return_attn_probs: bool,
) -> Result:
    if return_attn_probs is not False:
        Checks(caller.function).flag("return_attn_probs", return_attn_probs)
    elif not is_seen():  # as below, with fewer calls of Python's
        result: Result
        if options.keys() <= _OF_REPEATED:
            known = repeated(q, k, v, causal, **options)
            if known is not None:
                result = known  # type: ignore[assignment]  # out alone
                return result
        if not needs_copies(q, k, v):
            result = eager(caller, q, k, v, causal, options)  # type: ignore[assignment]  # the same
            return result
    dropped = return_attn_probs and bool(options.get("dropout_p"))
    if dropped and isinstance(q, torch.Tensor):
        refuse_while_compiling(caller)
        options["rng_state"] = random_state(q.device)
    out, lse = attend(caller, q, k, v, causal, options, return_lse=return_attn_probs)
    if lse is None:
        return out
    if not dropped:
        return out, lse, q.new_empty(0)
    queries, keys, _ = unstacked(leaves_of(q, k, v))
    return out, lse, signed_probabilities(caller, padded(queries), padded(keys), lse, causal, options)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """Attention of q (B, Sq, H, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv); out (B, Sq, H, Dv).

    H is a multiple of Hkv; head h reads head h·Hkv//H. The other arguments, and what is raised: see the module.
    """
    # what `_attend` comes to in most calls, with fewer calls of Python's
    if (
        (alibi_slopes is None and deterministic is return_attn_probs is False and not extras and not is_seen())
        and (window_size is NO_WINDOW and causal.__class__ is bool)
        and (dropout_p.__class__ is softcap.__class__ is float and dropout_p == softcap == 0.0)
    ):
        known = repeated(q, k, v, causal, softmax_scale, 0)
        if known is not None:
            return known  # type: ignore[return-value]  # out alone
    options = options_of(
        FUNC, DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, extras
    )
    return _attend(FUNC, q, k, v, causal, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_func` of q (B, Sq, H, D) and k, v stacked in kv (B, Skv, 2, Hkv, D), which is not copied."""
    check_stacked("flash_attn_kvpacked_func", "kv", kv, 2, 2, "(B, S, 2, Hkv, D)")
    options = options_of(
        KVPACKED, DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, extras
    )
    return _attend(KVPACKED, q, kv, None, causal, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_func` of q, k, v stacked in qkv (B, S, 3, H, D), which is not copied."""
    check_stacked("flash_attn_qkvpacked_func", "qkv", qkv, 3, 2, "(B, S, 3, H, D)")
    options = options_of(
        QKVPACKED, DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, extras
    )
    return _attend(QKVPACKED, qkv, None, None, causal, options, return_attn_probs)


def flash_attn_varlen_func(  # type: ignore[misc]  # keywords of FlashAttention-3 are parameters here
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    **extras: Unpack[Extras],
) -> Result:
    """Attention of packed sequences: q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv).

    cu_seqlens_q, cu_seqlens_k: (B + 1,) int32; sequence b has the tokens from cu_seqlens[b] to cu_seqlens[b + 1].
    max_seqlen_q, max_seqlen_k: at least the longest sequence's length. out is (total_q, H, Dv).

    block_table: (B, max pages) int32; k and v are pages then, (pages, page size, Hkv, D), and sequence b has
    cu_seqlens_k[b + 1] - cu_seqlens_k[b] keys, or seqused_k[b].
    """
    caller = VARLEN.given(extras)
    options = options_of(
        caller, PACKED, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, extras
    )
    add_packing(caller, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return _attend(caller, q, k, v, causal, options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(  # type: ignore[misc]  # the same
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_varlen_func` of q (total_q, H, D) and k, v stacked in kv (total_k, 2, Hkv, D), not copied."""
    check_stacked("flash_attn_varlen_kvpacked_func", "kv", kv, 2, 1, "(total, 2, Hkv, D)")
    caller = VARLEN_KVPACKED.given(extras)
    options = options_of(
        caller, PACKED, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, extras
    )
    add_packing(caller, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None)
    return _attend(caller, q, kv, None, causal, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_varlen_func` of q, k, v stacked in qkv (total, 3, H, D), which is not copied."""
    check_stacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, 1, "(total, 3, H, D)")
    caller = VARLEN_QKVPACKED.given(extras)
    options = options_of(
        caller, PACKED, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, extras
    )
    add_packing(caller, options, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None)
    return _attend(caller, qkv, None, None, causal, options, return_attn_probs)


def flash_attn_with_kvcache(  # type: ignore[misc]  # the same
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **extras: Unpack[Extras],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (B, Sq, H, D) with a cache of keys and values, to which new ones may be added first, in place.

    q may also be packed: (total_q, H, D) with cu_seqlens_q (B + 1,) int32 and max_seqlen_q, as may new keys: k, v
    (total_new, Hkv, D) with cu_seqlens_k_new (B + 1,) int32.

    k_cache, v_cache: (cache entries, S, Hkv, D); with block_table, (B, max pages) int32, (pages, page size, Hkv, D).
    cache_seqlens: keys in the cache, an int (or a tensor without dimensions) for all sequences or (B,) int32; by
        default all of S. Positions from the start of the cache entry, cache_leftpad's included.
    k, v: (B, S_new, Hkv, D), written behind the keys that are there. cache_seqlens itself is not changed.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2): k is rotated at its positions before it is written, and a
        copy of q likewise; without causal, window and chunk all of q is at position cache_seqlens.
        rotary_interleaved: pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2).
    cache_batch_idx: (B,) int32, the cache entry of each sequence. cache_leftpad: (B,) int32, where each begins.
    num_splits: parts that keys are split into; 0 takes what suits the device.
    k_descale, v_descale: of float8_e4m3fn caches, see `flydsl_flash_attn_func`. New keys have q's dtype; they are
        divided by these, or where scales are by key, by a scale of their own, which is written (`append_to_cache`).

    Returns out of q's shape, with `return_softmax_lse` (out, softmax_lse (B, H, Sq), packed (H, total_q)). The other
    arguments, and what is raised: see the module.
    """
    name, caller = KVCACHE.function, KVCACHE.given(extras)
    cu_seqlens_q = extras.get("cu_seqlens_q")
    check_cache(name, q, k_cache, v_cache, cu_seqlens_q is not None)
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        Checks(name).no_gradients({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    if rotary_interleaved is not True:
        Checks(name).flag("rotary_interleaved", rotary_interleaved)
    options = options_of(
        caller, CACHE, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, extras, num_splits
    )
    cu_seqlens_k_new = options.pop("cu_seqlens_k_new", None)
    packed = not (cu_seqlens_q is None and cu_seqlens_k_new is None)
    batch = batch_of(name, q, cu_seqlens_q, cu_seqlens_k_new) if packed else q.shape[0]
    if (pages := one_of(name, "block_table", block_table, options)) is not None:
        options["block_table"] = pages
        if cache_seqlens is k is None and isinstance(pages, torch.Tensor) and pages.dim() == 2:
            cache_seqlens = pages.shape[1] * k_cache.shape[1]
    elif cache_batch_idx is None and k_cache.shape[0] > batch:  # the first entries are the sequences' own
        for descale, cache in (("k_descale", k_cache), ("v_descale", v_cache)):
            scales = options.get(descale)
            if isinstance(scales, torch.Tensor) and is_dense(scales) and scales.shape == cache.shape[:-1]:
                options[descale] = scales[:batch]
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if cache_seqlens is not None and (cache_seqlens.__class__ is not torch.Tensor or not cache_seqlens.dim()):
        cache_seqlens = lengths_of(name, cache_seqlens, batch, q.device)
    if any(tensor is not None for tensor in (k, v, rotary_cos, rotary_sin)):
        rotate_each_query = causal or "window_size" in options or "attention_chunk" in options
        # fmt: off
        given = {
            "q": with_rows(q), "k_cache": k_cache, "v_cache": v_cache, "k": with_rows(k), "v": with_rows(v),
            "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens,
            "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "block_table": pages,
            "k_descale": options.get("k_descale"), "v_descale": options.get("v_descale"),
        }
        # fmt: on
        appended = functools.partial(append, APPEND.given(extras), rotary_interleaved)
        if packed:
            offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
            q = append_packed(name, appended, rotate_each_query, given, offsets)
        else:
            q = appended(rotate_each_query, given)
        cache_seqlens = cache_seqlens + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())  # type: ignore[operator, union-attr]  # `append` has checked both
    placed = {"seqused_kv": cache_seqlens, "kv_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    options |= {key: value for key, value in placed.items() if value is not None}
    out, lse = attend(caller, q, k_cache, v_cache, causal, options, return_lse=return_softmax_lse)
    return out if lse is None else (out, lse)
