"""`flex_attention` with the signature and the results of `torch.nn.attention.flex_attention.flex_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fly.errors import ArgumentTypeError, FlyError, UnsupportedError

from ..api.rows import padded_dim, ready
from ..arguments.callers import FLEX
from ..arguments.checks import Checks
from ..flash_attn_interface import flydsl_flash_attn_func
from ..problem.block_mask import BlockMask
from .translation import translated

CHECKS = Checks(FLEX.function)
DTYPES = (torch.bfloat16, torch.float16)
# how torch's own kernels compute, and not what
HINTS = (
    *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
    *("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION"),
    *("USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu"),
)
BACKENDS = ("AUTO",)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with scores and masks that are functions written with torch, forward and backward.

    Args:
        query: (B, H, Sq, D), bfloat16 or float16, of any D up to 256.
        key, value: (B, Hkv, Skv, D) and (B, Hkv, Skv, Dv) of the same dtype; B may be 1 with a block_mask of query's
            batch. Hkv is H, or with `enable_gqa` divides it.
        score_mod: function (score, batch, head, query, key) of tensors without dimensions, float32 and int32, that
            gives the score to take instead of the scaled one. It may use operators, `torch.where`, the common
            functions of numbers, and elements `table[head, key - query]` of tensors that it captures, which may
            require gradients. It is traced into the kernels: what is not translated is refused by name. Of a number
            and NaN, `torch.maximum` and `torch.minimum` give the number.
        block_mask: torch's BlockMask; its mask_mod is a function like that, of (batch, head, query, key).
        scale: positive factor of the scores, D**-0.5 by default.
        return_lse: also return the natural log of the sum of exponentials of the scores, float32 (B, H, Sq), -inf
            where a query sees no key.
        kernel_options: options of torch's Triton kernels, which change no result, and nothing here; "BACKEND" may be
            "AUTO".
        return_aux: torch's AuxRequest, of the lse; the second result is its AuxOutput then.

    Returns:
        out (B, H, Sq, Dv), or (out, lse) with `return_lse`, or (out, AuxOutput) with `return_aux`. A query that sees
        no key gives zeros.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: what is not available or not translated (a NotImplementedError); max_scores; a call while
            torch compiles.
    """
    if torch.compiler.is_compiling():
        CHECKS.fail(
            "it is compiled here already, and not for torch.compile: call it outside, or from a function under "
            "torch.compiler.disable",
            UnsupportedError,
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        CHECKS.tensor(name, tensor, DTYPES, 4, "(B, H, S, D)")
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        CHECKS.flag(name, flag)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        CHECKS.fail(f"query has {heads} heads and key {kv_heads}: pass enable_gqa=True where they share them")
    _check_options(kernel_options)
    wants_lse = _wants_lse(return_lse, return_aux)
    options: dict[str, Any] = {"num_kv_splits": 0}
    aux: tuple[torch.Tensor, ...] = ()
    if score_mod is not None:
        own = translated(score_mod, False, "score_mod", query.device)
        options["score_mod"], aux = own.program, own.aux_tensors("score_mod", query.device)
    if block_mask is not None:
        mask = _mask(block_mask)
        own = translated(mask.mask_mod, True, "block_mask's mask_mod", query.device)
        options["block_mask"] = dataclasses.replace(mask, mask_mod=own.behind(len(aux)))
        aux += own.aux_tensors("block_mask's mask_mod", query.device)
        if key.shape[0] == value.shape[0] == 1:
            key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    head_dim, value_dim = query.shape[3], value.shape[3]
    if scale is not None or head_dim % 8:
        options["softmax_scale"] = head_dim**-0.5 if scale is None else scale
    dims = (padded_dim(head_dim), padded_dim(key.shape[3]), padded_dim(value_dim))
    q, k, v = (ready(x, dim).transpose(1, 2) for x, dim in zip((query, key, value), dims))
    try:
        result = flydsl_flash_attn_func(q, k, v, False, return_lse=wants_lse, aux_tensors=aux, **options)
    except FlyError as error:
        FLEX.tell(error)
        raise
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out[..., :value_dim].transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse)
    return out if lse is None else (out, lse)


def _mask(block_mask: Any) -> BlockMask:
    try:
        return BlockMask.of(block_mask)
    except ArgumentTypeError:
        wanted = "torch.nn.attention.flex_attention.BlockMask"
        return CHECKS.fail(f"block_mask must be a {wanted}, got {type(block_mask).__name__}", ArgumentTypeError)


def _wants_lse(return_lse: bool, return_aux: Any) -> bool:
    if return_aux is None:
        return return_lse
    if return_lse:
        CHECKS.fail("return_lse and return_aux are two ways to ask for one thing: pass return_aux alone")
    if getattr(return_aux, "max_scores", False):
        CHECKS.fail("max_scores of return_aux are not available: pass AuxRequest(lse=True)", UnsupportedError)
    if not hasattr(return_aux, "lse"):
        CHECKS.fail(f"return_aux must be an AuxRequest, got {type(return_aux).__name__}", ArgumentTypeError)
    return bool(return_aux.lse)


def _check_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        CHECKS.fail(f"kernel_options must be a dict, got {type(options).__name__}", ArgumentTypeError)
    for name, value in options.items():
        backend = name == "BACKEND" and value in BACKENDS
        if not backend and name.removeprefix("fwd_").removeprefix("bwd_") not in HINTS:
            told = f"kernel_options {name!r}: {value!r} is not available"
            CHECKS.fail(f"{told}; accepted: {', '.join(HINTS)}, BACKEND: 'AUTO'", UnsupportedError)
