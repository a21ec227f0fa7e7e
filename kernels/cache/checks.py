"""Checks of what a caller hands to `append_to_cache`, most of them made once per kind of call.

Every check names the argument, the value and what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fly.errors import ArgumentTypeError, UnsupportedError

from ..arguments.callers import arg
from ..arguments.checks import Checks, overlaps_itself, shares_memory
from .rotary import DIM_STEP, VECTOR

CHECKS = Checks("append_to_cache")
DTYPES = (torch.bfloat16, torch.float16)
QUANTISED = torch.float8_e4m3fn
EIGHT_BITS = (QUANTISED, torch.float8_e5m2)
MAX_HEAD_DIM = 1024
MAX_ROWS = 2**31 - 2**16  # tokens times heads of a sequence: rows are counted in 32 bits
HEAD_TENSORS = ("q", "k_cache", "v_cache", "k", "v")
TABLES = ("rotary_cos", "rotary_sin")
INDICES = ("cache_batch_idx", "cache_leftpad")
CACHES = ("k_cache", "v_cache")
SCALES = ("k_descale", "v_descale")

Arguments = Mapping[str, Any]
"""The arguments of `append_to_cache` that hold tensors, all of them, by name."""


def check_append(given: Arguments, interleaved: object, each_query: object) -> None:
    """Check everything that the kind of call decides.

    Raises:
        ArgumentError, ArgumentTypeError: a mistake of the caller.
    """
    CHECKS.flag("rotary_interleaved", interleaved)
    CHECKS.flag("rotate_each_query", each_query)
    _check_pairs(given)
    paged = given["block_table"] is not None
    cache = "(num_pages, page_size, Hkv, D)" if paged else "(B_cache, S_cache, Hkv, D)"
    shapes = dict.fromkeys(("k_cache", "v_cache"), cache) | {"q": "(B, Sq, H, D)"}
    if isinstance(given["q"], torch.Tensor) and given["q"].dtype in EIGHT_BITS:
        CHECKS.fail(
            f"q has dtype {given['q'].dtype}, and only 16-bit keys are appended, to caches of 16 or 8 bits: write "
            "8-bit ones into k_cache and v_cache",
            UnsupportedError,
        )
    for name in HEAD_TENSORS:
        if given[name] is not None or name not in ("k", "v"):
            dtypes = (*DTYPES, QUANTISED) if name in CACHES else DTYPES
            CHECKS.tensor(name, given[name], dtypes, 4, shapes.get(name, "(B, S_new, Hkv, D)"))
            CHECKS.unit_last_stride(name, given[name])
    for name in TABLES:
        if given[name] is not None:
            CHECKS.tensor(name, given[name], DTYPES, 2, "(positions, rotary_dim / 2)")
            CHECKS.unit_last_stride(name, given[name])
    quantised = all(given[name].dtype is QUANTISED for name in CACHES)
    for name in (*HEAD_TENSORS, *TABLES):
        if quantised and name in CACHES:
            continue
        if given[name] is not None and given[name].dtype != given["q"].dtype:
            CHECKS.fail(f"{name} must have q's dtype {given['q'].dtype}, got {given[name].dtype}", ArgumentTypeError)
    _check_per_sequence(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.device != given["q"].device:
            CHECKS.fail(f"{name} must be on q's device {given['q'].device}, got {value.device}")
    _check_shapes(given, paged)
    _check_scales(given, quantised)
    if given["rotary_cos"] is not None and given["rotary_sin"] is not None:
        _check_tables(given["rotary_cos"], given["rotary_sin"], given["q"].shape[-1])


def _check_pairs(given: Arguments) -> None:
    """What goes together, or does not."""
    for pair in (("k", "v"), TABLES):
        present = [name for name in pair if given[name] is not None]
        if len(present) == 1:
            CHECKS.fail(f"{pair[0]} and {pair[1]} go together, got only {present[0]}")
    if given["rotary_cos"] is not None and given["k"] is None:
        CHECKS.fail("rotary_cos and rotary_sin need k and v: without new tokens, where queries are is not told")
    if given["k"] is not None and given["cache_seqlens"] is None:
        CHECKS.fail("k and v need cache_seqlens, the tokens that sequences have so far: (B,) int32 or an int")


def _check_per_sequence(given: Arguments) -> None:
    """Lengths, indices and pages: int32, one entry or one row a sequence."""
    batch = given["q"].shape[0]
    names = [name for name in INDICES if given[name] is not None]
    if isinstance(given["cache_seqlens"], int):
        check_length(given["cache_seqlens"])
    elif given["cache_seqlens"] is not None:
        names.append("cache_seqlens")
    for name in names:
        CHECKS.tensor(name, given[name], (torch.int32,), 1, "(B,)")
        if len(given[name]) != batch:
            CHECKS.fail(f"{name} must have q's batch of {batch} entries, got {len(given[name])}")
    if given["block_table"] is not None:
        CHECKS.tensor("block_table", given["block_table"], (torch.int32,), 2, "(B, pages of a sequence)")
        if given["cache_batch_idx"] is None and given["block_table"].shape[0] != batch:
            CHECKS.fail(f"{arg.block_table} must have q's batch of {batch} rows, got {given['block_table'].shape[0]}")


def _check_shapes(given: Arguments, paged: bool) -> None:
    q, k_cache, v_cache, k, v = (given[name] for name in HEAD_TENSORS)
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        CHECKS.fail(
            "k_cache and v_cache must have the same shape up to head_dim, got k_cache "
            f"{tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}"
        )
    for name, tensor in (("q", q), ("v_cache", v_cache)):
        head_dim = tensor.shape[-1]
        if not 0 < head_dim <= MAX_HEAD_DIM:
            CHECKS.fail(f"{name}'s head_dim must be from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if k_cache.shape[-1] != q.shape[-1]:
        CHECKS.fail(f"k_cache must have q's head_dim {q.shape[-1]}, got {k_cache.shape[-1]}")
    if paged and not k_cache.shape[1]:
        CHECKS.fail(f"pages need at least one token, got k_cache {tuple(k_cache.shape)}")
    if q.shape[1] * q.shape[2] > MAX_ROWS:
        CHECKS.fail(f"q may have {MAX_ROWS} tokens times heads in a sequence, got {q.shape[1]} * {q.shape[2]}")
    if k is None or v is None:
        return
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tensor.shape != wanted:
            where = "q's batch, k's tokens and the cache's heads and head_dim"
            CHECKS.fail(f"{name} must have shape {wanted} ({where}), got {tuple(tensor.shape)}")
    if k.shape[1] * k.shape[2] > MAX_ROWS:
        CHECKS.fail(f"k may have {MAX_ROWS} tokens times heads in a sequence, got {k.shape[1]} * {k.shape[2]}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.numel() and overlaps_itself(cache):
            CHECKS.fail(
                f"{name} must not overlap itself, got shape {tuple(cache.shape)} with strides {cache.stride()}"
            )


def _check_scales(given: Arguments, quantised: bool) -> None:
    """Caches of 8 bits, and their scales."""
    for name, cache in zip(SCALES, (given[name] for name in CACHES)):
        if quantised and cache.shape[-1] % VECTOR:
            what = f"{cache_of(name)} of 8 bits must have a head_dim in steps of {VECTOR}"
            CHECKS.fail(f"{what}, got {cache.shape[-1]}")
        scales = given[name]
        if scales is None:
            continue
        if not quantised:
            CHECKS.fail(f"{name} is for caches of 8 bits, got {cache_of(name)} of {cache.dtype}: leave it out")
        CHECKS.plain(name, scales)
        CHECKS.dtype(name, scales, (torch.float32,))
        of_heads, of_keys = (len(given["q"]), cache.shape[2]), tuple(cache.shape[:-1])
        if scales.shape not in ((), (1,), (cache.shape[2],), of_heads, of_keys):
            CHECKS.fail(
                f"{name} must have shape (), (1,), (Hkv,) or (B, Hkv) = {of_heads}, or be written by key and head, "
                f"{cache_of(name)}'s {of_keys}; got {tuple(scales.shape)}"
            )
        if scales.dim() == 3 and scales.numel() and overlaps_itself(scales):
            CHECKS.fail(f"{name} must not overlap itself, got shape {of_keys} with strides {scales.stride()}")


def cache_of(scales: str) -> str:
    """The cache that scales are of, by name."""
    return CACHES[SCALES.index(scales)]


def written_scales(given: Arguments) -> list[str]:
    """The names of scales by key, which an append writes."""
    return [name for name in SCALES if given[name] is not None and given[name].dim() == 3]


def _check_tables(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> None:
    if cos.shape != sin.shape:
        CHECKS.fail(f"rotary_cos and rotary_sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    dim = 2 * cos.shape[1]
    if dim % DIM_STEP or not 0 < dim <= head_dim:
        CHECKS.fail(
            f"rotary_dim, twice the columns of rotary_cos, must be a multiple of {DIM_STEP} from {DIM_STEP} to q's "
            f"head_dim {head_dim}, got {dim}"
        )


def check_length(length: int) -> None:
    """One length for all sequences; it is no part of a kind of call."""
    CHECKS.whole("cache_seqlens", length, 0, 2**31 - 1)


def check_gradients(given: Arguments) -> None:
    """Raise `UnsupportedError` when a tensor requires a gradient (call it only in grad mode)."""
    CHECKS.no_gradients(given)


def check_memory(given: Arguments, scales: Sequence[str]) -> None:
    """What is written, `scales` among it, shares no memory with anything else; interleaved views are fine."""
    named = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for name in (*CACHES, *scales):
        cache = named.pop(name)
        for other, tensor in named.items():
            if shares_memory(cache, tensor):
                CHECKS.fail(f"{name} must not share memory with {other}; pass a copy of {other} (.clone())")
