"""Packed queries and new keys of a KV cache: appended and rotated token by token.

To `append_to_cache` each packed token is a sequence of one token, at its own position in its sequence's entry or row
of the table. Which sequence that is, is found on the device: nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fly.errors import ArgumentError

from ..arguments.checks import Checks, is_dense
from ..call import device_values
from .checks import SCALES

NOWHERE = -1  # an entry, and a position, that no cache has


def batch_of(function: str, q: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k_new: Any) -> int:
    """How many sequences there are; the offsets, which may be None, are (B + 1,) contiguous int32 on q's device.

    Raises:
        ArgumentTypeError, ArgumentError: they are not.
    """
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
    Checks(function).plain("q", q)
    batch = q.shape[0]
    for name, value in offsets.items():
        if value is None:
            continue
        Checks(function).vector(name, value, torch.int32, q.device, "batch + 1 contiguous int32 offsets")
        if name == "cu_seqlens_q":
            batch = len(value) - 1
        elif len(value) != batch + 1:
            raise ArgumentError(f"{function}: {name} must have {batch + 1} offsets, as q's batch, got {len(value)}")
    return batch


@dataclass(frozen=True)
class Tokens:
    """Of each token of a packed (total, H, D) tensor: the `sequence` that has it, and its number `inside` of it.

    Both (total,) int32; tokens outside of all sequences have sequence 0 and are not `used`.
    """

    sequence: torch.Tensor
    inside: torch.Tensor
    used: torch.Tensor

    @staticmethod
    def of(total: int, offsets: torch.Tensor) -> Tokens:
        """Of `total` tokens in sequences with (B + 1,) `offsets`."""
        token = torch.arange(total, dtype=torch.int32, device=offsets.device)
        sequence = torch.searchsorted(offsets, token, right=True, out_int32=True) - 1
        used = (sequence >= 0) & (sequence < len(offsets) - 1)
        sequence = torch.where(used, sequence, 0)
        return Tokens(sequence, token - offsets[sequence.long()], used)

    @staticmethod
    def dense(batch: int, length: int, device: torch.device) -> Tokens:
        """Of (B, S, H, D), all of whose tokens are side by side."""
        token = torch.arange(batch * length, dtype=torch.int32, device=device)
        return Tokens(token // max(length, 1), token % max(length, 1), torch.ones_like(token, dtype=torch.bool))


def _is_plain(value: Any) -> bool:
    """Whether it is a dense tensor, whose shape torch tells and whose elements can be read."""
    return isinstance(value, torch.Tensor) and is_dense(value)


def append_packed(
    function: str,
    append: Callable[[bool, Mapping[str, Any]], torch.Tensor],
    rotate_each_query: bool,
    given: Mapping[str, Any],
    offsets: Mapping[str, torch.Tensor | None],
) -> torch.Tensor:
    """`append(rotate_each_query, given)`, an append to a cache, where q or k and v are packed; the result is as q.

    `given`: the arguments of `kv_cache.append_to_cache` that hold tensors. q: (total_q, H, D) if `offsets` have
    cu_seqlens_q, else (B, Sq, H, D); k, v: (total_new, Hkv, D) with cu_seqlens_k_new, else (B, S_new, Hkv, D);
    cache_seqlens: (B,) int32; cache_leftpad changes nothing.

    Raises:
        ArgumentError, ArgumentTypeError: what `function` was given is not that.
    """
    q: torch.Tensor = given["q"]
    k, v, cache_seqlens = (given[name] for name in ("k", "v", "cache_seqlens"))
    cache_batch_idx, block_table, rotary_cos = (given[n] for n in ("cache_batch_idx", "block_table", "rotary_cos"))
    cu_seqlens_q, cu_seqlens_k_new = offsets["cu_seqlens_q"], offsets["cu_seqlens_k_new"]
    rank = 4 if cu_seqlens_k_new is None else 3
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            got = f"got {name} of type {type(tensor).__name__}"
            raise ArgumentError(f"{function}: k and v go together, and rotary tables need both, {got}")
        Checks(function).plain(name, tensor)
        if tensor.dim() != rank:
            raise ArgumentError(f"{function}: {name} must have {rank} dimensions, got shape {tuple(tensor.shape)}")
    if not isinstance(cache_seqlens, torch.Tensor):
        raise ArgumentError(f"{function}: k and v need cache_seqlens, (B,) int32 or an int")
    for name, value in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx)):
        batch = (len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1,)
        if value is None:
            continue
        Checks(function).plain(name, value)
        if value.shape != batch or value.dtype != torch.int32:
            raise ArgumentError(
                f"{function}: {name} must have shape {batch} and int32, got {tuple(value.shape)}, {value.dtype}"
            )
    if cu_seqlens_k_new is None and len(k) != len(cache_seqlens):
        raise ArgumentError(f"{function}: k must have a batch of {len(cache_seqlens)}, got shape {tuple(k.shape)}")
    pages = block_table if block_table is not None and _is_plain(block_table) and block_table.dim() == 2 else None
    if pages is not None and cache_batch_idx is None and len(pages) != len(cache_seqlens):
        raise ArgumentError(
            f"{function}: block_table must have a row for each of {len(cache_seqlens)} sequences, got shape "
            f"{tuple(pages.shape)}"
        )
    by_sequence = [name for name in SCALES if _is_plain(given[name]) and given[name].dim() == 2]
    for name in by_sequence:
        if len(given[name]) != len(cache_seqlens):
            raise ArgumentError(
                f"{function}: {name} must have a row for each of {len(cache_seqlens)} sequences, got shape "
                f"{tuple(given[name].shape)}"
            )
    device = q.device
    if not torch.compiler.is_compiling() and device_values.on(device):
        count = len(cache_seqlens)
        on_device = {name: {**given, **offsets}[name] for name in device_values.OF_APPEND}
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(on_device, (count,))
        shapes |= {"cu_seqlens_q": (count + 1,), "cu_seqlens_k_new": (count + 1,), "block_table": None}
        if pages is not None:
            shapes["block_table"] = (count if cache_batch_idx is None else len(pages), pages.shape[1])
        # `append` says what is wrong with a tensor itself
        good = all(
            x is None or (_is_plain(x) and x.shape == shapes[name] and x.dtype == torch.int32 and x.device == device)
            for name, x in on_device.items()
        )
        if good and (rotary_cos is None or (_is_plain(rotary_cos) and rotary_cos.dim() == 2)):
            device_values.check_append(
                Checks(function), q, given["k_cache"], k, rotary_cos, on_device, rotate_each_query
            )

    def tokens(tensor: torch.Tensor, offsets: torch.Tensor | None) -> Tokens:
        if offsets is None:
            batch, length = tensor.shape[:2]
            return Tokens.dense(batch, length, device)
        return Tokens.of(len(tensor), offsets)

    def alone(tensor: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """Every token as a sequence of its own."""
        return (tensor.flatten(0, 1) if offsets is None else tensor).unsqueeze(1)

    def run(of: Tokens, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        entries = of.sequence if cache_batch_idx is None else cache_batch_idx[of.sequence.long()]
        entries = torch.where(of.used, entries, NOWHERE)
        positions = torch.where(of.used, positions, NOWHERE)
        places = {"cache_seqlens": positions, "cache_batch_idx": entries, "cache_leftpad": None}
        places |= {name: given[name][of.sequence.long()] for name in by_sequence}
        return append(True, {**given, "q": q, "k": k, "v": v, **places})

    new = tokens(k, cu_seqlens_k_new)
    key, value = alone(k, cu_seqlens_k_new), alone(v, cu_seqlens_k_new)
    # as many sequences as new keys, none of which has a query
    none = q.new_empty((len(key), 0, *q.shape[-2:]))
    run(new, cache_seqlens[new.sequence.long()] + new.inside, none, key, value)
    if rotary_cos is None:
        return q
    asked = tokens(q, cu_seqlens_q)
    query = alone(q, cu_seqlens_q)
    no_keys = [x.new_empty((len(query), 0, *x.shape[-2:])) for x in (k, v)]
    positions = cache_seqlens[asked.sequence.long()]
    positions = positions + asked.inside if rotate_each_query else positions
    return run(asked, positions, query, *no_keys).view(q.shape)
