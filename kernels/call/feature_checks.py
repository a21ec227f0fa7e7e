"""Checks of the features that a caller asks of flash attention, made once per kind of call.

From keyword arguments to `Features` and the operands that a kernel takes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fly.errors import ArgumentTypeError

from ..arguments.callers import arg
from ..arguments.checks import ATTENTION, check_last_stride, check_tensor, fail, whole, written
from ..problem.block_mask import BlockMask
from ..problem.features import OPERANDS, Features, Mod, dependencies

NO_WINDOW = (-1, -1)
SOFTCAPS = (2.0**-100, 2.0**127)  # what kernels are given
WIDE_SOFTCAP = 256.0  # from here on, see `Features.wide_softcap`
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DESCALES = ("q_descale", "k_descale", "v_descale")
AUX_DTYPES = (*FLOATS, torch.int32, torch.int64, torch.int16, torch.int8)
# keyword arguments by the name under which `dispatch.FEATURES` has them
NAMES = {
    "seqused": ("seqused_q", "seqused_kv"),
    "cache_leftpad": ("cache_leftpad",),
    "kv_batch_idx": ("kv_batch_idx",),
    "paged": ("block_table",),
    "window": ("window_left", "window_right"),
    "attention_chunk": ("attention_chunk",),
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "bias": ("bias",),
    "sink": ("sink",),
    "block_mask": ("block_counts",),
    "descale": DESCALES,
}
BLOCKS = ("block_counts", "block_indices", "whole_block_counts", "whole_block_indices")


def window_of(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) limits of a window, None where it has none; a causal call's right side is closed anyway."""
    good = isinstance(window_size, Sequence) and len(window_size) == 2
    if not good or any(isinstance(side, bool) or not isinstance(side, int) for side in window_size):
        fail(f"{arg.window_size} must be two ints (left, right), got {written(window_size)}", ArgumentTypeError)
    for side in window_size:
        if not -1 <= side < 2**31:
            sides = "sides from 0 to 2**31 - 1, or -1 for no limit"
            fail(f"{arg.window_size} must have {sides}, got {written(tuple(window_size))}")
    left, right = (None if side < 0 else side for side in window_size)
    return left, None if causal else right


def softcap_of(softcap: Any) -> float | None:
    """The cap of the scores, None for none."""
    accepted = "a finite positive number, or 0 for none"
    cap = ATTENTION.number("softcap", softcap, accepted, lambda cap: cap >= 0)
    # of float32 scores, larger caps leave all as they are, and smaller ones none
    return min(max(cap, SOFTCAPS[0]), SOFTCAPS[1]) if cap else None


def _check_counts(name: str, value: Any, batch: int, device: torch.device) -> None:
    check_tensor(name, value)
    good = value.shape == (batch,) and value.dtype == torch.int32 and value.is_contiguous()
    if not good or value.device != device:
        fail(
            f"{arg(name)} must hold {batch} contiguous int32 numbers on {device}, got shape {tuple(value.shape)}, "
            f"dtype {value.dtype} on {value.device}"
        )


def _check_block_table(table: Any, k: torch.Tensor, batch: int, options: Mapping[str, Any]) -> None:
    if options["kv_batch_idx"] is None and table.shape[0] != batch:
        fail(f"{arg.block_table} must have a row for each of {batch} sequences, got shape {tuple(table.shape)}")
    if options["seqused_kv"] is None and options["cu_seqlens_kv"] is None:
        fail(f"{arg.block_table} needs the sequences' lengths: pass {arg.seqused_kv}, (B,) int32")
    if options["cu_seqlens_kv"] is not None and options["cu_seqlens_q"] is None:
        fail(
            f"{arg.cu_seqlens_kv} with {arg.block_table} is for packed queries ({arg.cu_seqlens_q}); pass "
            f"{arg.seqused_kv}, (B,) int32"
        )
    if not k.shape[1]:
        fail(f"pages of {arg.k} and {arg.v} must have at least one key, got shape {tuple(k.shape)}")


def check_table(table: Any, device: torch.device) -> None:
    """It is a table of pages: (B, pages of a sequence) int32, each row contiguous."""
    check_tensor("block_table", table)
    if table.dim() != 2 or table.dtype != torch.int32 or table.device != device:
        fail(
            f"{arg.block_table} must be (B, pages of a sequence) int32 on {device}, got shape {tuple(table.shape)}, "
            f"dtype {table.dtype} on {table.device}"
        )
    check_last_stride("block_table", table)


def _check_floats(name: str, value: Any, device: torch.device) -> None:
    check_tensor(name, value)
    if value.dtype not in FLOATS:
        fail(f"{arg(name)} has dtype {value.dtype}; accepted: {', '.join(map(str, FLOATS))}", ArgumentTypeError)
    if value.device != device:
        fail(f"{arg(name)} must be on {arg.q}'s device {device}, got {value.device}")


def _slopes(slopes: Any, batch: int, heads: int, device: torch.device) -> torch.Tensor:
    check_tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        fail(f"{arg.alibi_slopes} has dtype {slopes.dtype}; accepted: torch.float32", ArgumentTypeError)
    if slopes.device != device:
        fail(f"{arg.alibi_slopes} must be on {arg.q}'s device {device}, got {slopes.device}")
    if slopes.shape not in ((heads,), (batch, heads)):
        fail(f"{arg.alibi_slopes} must have shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}")
    check_last_stride("alibi_slopes", slopes)
    return slopes.expand(batch, heads)


def _bias(bias: Any, shape: tuple[int, ...], packed: bool, device: torch.device) -> torch.Tensor:
    """(B, H, Sq, Skv), or (B, H, Skv) where it is not by query."""
    _check_floats("bias", bias, device)
    if packed:
        fail(f"{arg.bias} is for (B, S, H, D) tensors; for packed sequences pass a score_mod with aux_tensors")
    if bias.dim() > 4 or any(n not in (1, m) for n, m in zip(reversed(bias.shape), reversed(shape))):
        fail(f"{arg.bias} must broadcast to (B, H, Sq, Skv) = {shape}, got shape {tuple(bias.shape)}")
    if bias.dim() < 2 or bias.shape[-2] == 1:
        # the kernels load what is not by query once for all rows
        batch, heads, _, keys = shape
        return (bias if bias.dim() < 2 else bias.squeeze(-2)).expand(batch, heads, keys)
    return bias.expand(shape)


def _sink(sink: Any, heads: int, device: torch.device) -> torch.Tensor:
    _check_floats("sink", sink, device)
    if sink.shape != (heads,):
        fail(f"{arg.sink} must have one entry a query head, shape ({heads},), got {tuple(sink.shape)}")
    check_last_stride("sink", sink)
    return sink


def _descale(name: str, scales: Any, batch: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    check_tensor(name, scales)
    if scales.dtype != torch.float32:
        fail(f"{arg(name)} has dtype {scales.dtype}; accepted: torch.float32", ArgumentTypeError)
    if scales.device != device:
        fail(f"{arg(name)} must be on {arg.q}'s device {device}, got {scales.device}")
    if scales.shape not in ((), (1,), (batch, kv_heads)):
        fail(f"{arg(name)} must have shape (), (1,) or (B, Hkv) = ({batch}, {kv_heads}), got {tuple(scales.shape)}")
    return scales.expand(batch, kv_heads)


def _function(name: str, function: Any) -> Mod | None:
    if function is None:
        return None
    if not isinstance(function, Callable):
        fail(f"{name} must be a function, got {function!r} ({type(function).__name__})", ArgumentTypeError)
    for captured, value in dependencies(function):
        if isinstance(value, torch.Tensor):
            fail(
                f"{name} captures the tensor {captured!r}: pass it in aux_tensors, and it is an argument after key",
                ArgumentTypeError,
            )
    return Mod.of(function)


def _aux(tensors: Any, used: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    if not isinstance(tensors, Sequence):
        fail(f"aux_tensors must be a sequence of tensors, got {type(tensors).__name__}", ArgumentTypeError)
    for i, tensor in enumerate(tensors):
        check_tensor(f"aux_tensors[{i}]", tensor)
        if tensor.dtype not in AUX_DTYPES:
            accepted = ", ".join(map(str, AUX_DTYPES))
            fail(f"aux_tensors[{i}] has dtype {tensor.dtype}; accepted: {accepted}", ArgumentTypeError)
        if tensor.device != device:
            fail(f"aux_tensors[{i}] must be on q's device {device}, got {tensor.device}")
    if tensors and not used:
        fail("aux_tensors are for score_mod and mask_mod, and neither is given: leave them out")
    return tuple(tensors)


def _block_lists(
    mask: Any,
    mask_mod: Mod | None,
    batch_heads: tuple[int, int],
    lengths: tuple[int, int],
    packed: bool,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    if not isinstance(mask, BlockMask):
        hint = "; pass fly_attention.BlockMask.of(it)" if type(mask).__name__ == "BlockMask" else ""
        fail(f"block_mask must be a fly_attention.BlockMask, got {type(mask).__name__}{hint}", ArgumentTypeError)
    if packed:
        fail("block_mask is for (B, S, H, D) tensors; for packed sequences pass its mask_mod as mask_mod")
    if mask_mod is not None:
        fail("block_mask has a mask_mod of its own: leave mask_mod out, or build a block mask of both")
    return mask.check(*batch_heads, lengths, device)


def check_features(
    q: torch.Tensor, k: torch.Tensor, causal: bool, batch: int, packed: bool, options: Mapping[str, Any]
) -> tuple[Features, tuple[Any, ...], tuple[str, ...]]:
    """(static features, operands, names in `dispatch.FEATURES`) of a call's keyword arguments.

    Raises:
        ArgumentError, ArgumentTypeError: a mistake of the caller.
    """
    device, heads = q.device, q.shape[-2]
    left, right = window_of(options["window_size"], causal)
    found: dict[str, Any] = {"window_left": left, "window_right": right, "softcap": softcap_of(options["softcap"])}
    whole("attention_chunk", options["attention_chunk"], 0, 2**31 - 1)
    found["attention_chunk"] = options["attention_chunk"] or None
    for name in ("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx"):
        if options[name] is not None:
            _check_counts(name, options[name], batch, device)
            found[name] = options[name]
    keys = k.shape[-3]
    if (table := options["block_table"]) is not None:
        _check_block_table(table, k, batch, options)
        found["block_table"] = table
        keys = k.shape[1] * table.shape[1]
    # no further than there are keys to the left and queries to the right: positions plus a side stay below 2**31
    for side, most in (("window_left", keys), ("window_right", q.shape[-3])):
        if found[side] is not None:
            found[side] = min(found[side], most)
    for name in ("cache_leftpad", "kv_batch_idx"):
        if name in found and options["cu_seqlens_kv"] is not None and table is None:
            fail(f"{arg(name)} is for (B, S, Hkv, D) keys; packed ones have {arg.cu_seqlens_kv} and {arg.seqused_kv}")
    if options["alibi_slopes"] is not None:
        found["alibi_slopes"] = _slopes(options["alibi_slopes"], batch, heads, device)
    if options["bias"] is not None:
        found["bias"] = _bias(options["bias"], (batch, heads, q.shape[-3], keys), packed, device)
    if options["sink"] is not None:
        found["sink"] = _sink(options["sink"], heads, device)
    for name in DESCALES:
        if options[name] is not None:
            found[name] = _descale(name, options[name], batch, k.shape[-2], device)
    score_mod, mask_mod = (_function(name, options[name]) for name in ("score_mod", "mask_mod"))
    block_mask, block_size = options["block_mask"], None
    if block_mask is not None:
        if options["block_table"] is not None:
            fail("block_mask is for k and v without block_table: for keys in pages pass its mask_mod as mask_mod")
        lists = _block_lists(block_mask, mask_mod, (batch, heads), (q.shape[-3], k.shape[-3]), packed, device)
        found |= dict(zip(BLOCKS, lists))
        mask_mod = _function("block_mask.mask_mod", block_mask.mask_mod)
        block_size = tuple(block_mask.BLOCK_SIZE)
    aux = _aux(options["aux_tensors"], bool(score_mod or mask_mod), device)
    names = tuple(name for name in OPERANDS if found.get(name) is not None)
    wide = found["softcap"] is not None and found["softcap"] >= WIDE_SOFTCAP
    asked = Features(names, score_mod, mask_mod, block_size, wide_softcap=wide)
    told = [name for name in names if name != "seqused_kv" or "block_table" not in found]  # pages imply lengths
    wanted = [feature for feature, operands in NAMES.items() if any(name in told for name in operands)]
    wanted += [name for name in ("score_mod", "mask_mod") if getattr(asked, name) is not None]
    return asked, (*(found[name] for name in names), *aux), tuple(wanted)
