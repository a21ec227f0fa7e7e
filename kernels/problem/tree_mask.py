"""Masks of trees of draft tokens, as speculative decoding checks them: a `mask_mod` and what it loads from.

A sequence's last keys are its drafts, and its queries are the same tokens. A draft sees the context, all keys before
the drafts, and of the drafts those on the way from the root to it, itself included: `bits` says which, one bit each.
The kernel loads a row's bits once for a tile of keys, and a score takes a shift and two comparisons.
"""

from __future__ import annotations

from typing import Any

import torch

import fly

from ..arguments.checks import Checks

CHECKS = Checks("tree_mask")
DTYPES = (torch.int32, torch.int64)


def tree_bits(seen: torch.Tensor) -> torch.Tensor:
    """(..., n) int64 of (..., n, n) bool, n up to 64: bit j of entry i says whether draft i sees draft j.

    Raises:
        ArgumentError, ArgumentTypeError: another dtype or shape.
    """
    checks = Checks("tree_bits")
    checks.plain("seen", seen)
    checks.dtype("seen", seen, (torch.bool,))
    if seen.dim() < 2 or seen.shape[-1] != seen.shape[-2] or seen.shape[-1] > 64:
        checks.fail(f"seen must have shape (..., n, n) with n up to 64, got {tuple(seen.shape)}")
    place = torch.arange(seen.shape[-1], device=seen.device)
    return (seen.long() << place).sum(-1)  # bit 63 is the sign, and no sum carries


def tree_mask(
    bits: torch.Tensor, context_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None
) -> dict[str, Any]:
    """Keyword arguments of `flydsl_flash_attn_func` by which draft tokens see their ancestors: mask_mod, aux_tensors.

    Args:
        bits: bit j of a draft's number says whether it sees draft j of its sequence, int32 for up to 32 drafts or
            int64 for up to 64: (n,) where all sequences have the same tree, (B, n), or with `cu_seqlens_q`
            (total_q,). `tree_bits` makes them of a mask.
        context_lens: (B,) int32, a sequence's keys before its drafts, which all of its queries see. Where that is as
            many as it has keys, nothing is hidden: so batches may hold prompts too, with causal=True.
        cu_seqlens_q: that of a call with packed queries.

    Drafts come in an order in which ancestors precede those that see them, so that causal=True, the default, hides
    nothing more and saves what it can. All other features apply as well; numbers are read on the device.

    Raises:
        ArgumentError, ArgumentTypeError: another dtype, shape or device.
    """
    CHECKS.tensor("context_lens", context_lens, (torch.int32,), 1, "(B,)")
    CHECKS.plain("bits", bits)
    CHECKS.dtype("bits", bits, DTYPES)
    batch, most = len(context_lens), 8 * bits.element_size()
    others = {"context_lens": context_lens, "cu_seqlens_q": cu_seqlens_q}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != bits.device:
            CHECKS.fail(f"{name} must be on the device of bits, {bits.device}, got {tensor.device}")
    if cu_seqlens_q is not None:
        CHECKS.vector("cu_seqlens_q", cu_seqlens_q, torch.int32, bits.device, f"{batch + 1} int32 numbers", batch + 1)
        if bits.dim() != 1:
            CHECKS.fail(f"bits must have shape (total_q,) with cu_seqlens_q, got {tuple(bits.shape)}")
        return {"mask_mod": _packed, "aux_tensors": (bits, context_lens, cu_seqlens_q)}
    if bits.dim() not in (1, 2) or (bits.dim() == 2 and bits.shape[0] != batch) or bits.shape[-1] > most:
        CHECKS.fail(
            f"bits must have shape (n,) or ({batch}, n), n up to {most} in {bits.dtype}, got {tuple(bits.shape)}"
        )
    return {"mask_mod": _dense, "aux_tensors": (bits.expand(batch, -1), context_lens)}


def _dense(batch: Any, head: Any, query: Any, key: Any, bits: Any, context_lens: Any) -> fly.Value:
    return _sees(bits[batch, query], key - context_lens[batch])


def _packed(batch: Any, head: Any, query: Any, key: Any, bits: Any, context_lens: Any, first: Any) -> fly.Value:
    return _sees(bits[first[batch] + query], key - context_lens[batch])


def _sees(bits: fly.Value, draft: fly.Value) -> fly.Value:
    """Whether a draft with these bits sees key `draft` of the drafts; below 0, it is one of the context."""
    place = (draft & (8 * bits.dtype.bytes - 1)).to(bits.dtype)
    return (draft < 0) | ((bits >> place & 1) != 0)
