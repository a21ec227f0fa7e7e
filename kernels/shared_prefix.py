"""Attention of sequences that begin with the same keys, which are read once for all: `shared_prefix_attention`.

Queries of all sequences are those of one where the prefix is concerned, so that they fill tiles; what each sequence
has behind it is attended to as ever, and the two are merged. Hydragen (Juravsky et al., 2024) has the idea.
"""

from __future__ import annotations

from typing import Any

import torch

from fly.errors import UnsupportedError

from .arguments.checks import Checks
from .flash_attn_interface import flydsl_flash_attn_func
from .merging import merge_states

CHECKS = Checks("shared_prefix_attention")
# keywords of `flydsl_flash_attn_func` that mean the same for both parts
BOTH = ("softmax_scale", "softcap", "num_kv_splits", "split_keys", "max_seqlen_q")
OF_SUFFIX = ("cu_seqlens_q", "sink", "causal", "max_seqlen_kv")


def shared_prefix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_keys: int,
    *,
    block_table: torch.Tensor,
    seqused_kv: torch.Tensor,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flydsl_flash_attn_func` of sequences in pages that have their first `prefix_keys` keys in common.

    Args:
        q: (B, Sq, H, D), or packed (total_q, H, D) with `cu_seqlens_q` and `max_seqlen_q`.
        k, v: pages (pages, page_size, Hkv, D).
        prefix_keys: from 1 on, whole pages; those of `block_table`'s first row are everybody's.
        block_table: (B, pages of a sequence) int32, the prefix' pages among them. seqused_kv: (B,) int32, a
            sequence's keys, the prefix' among them. Its queries are the last ones of those behind the prefix.
        options: softmax_scale, softcap, sink, num_kv_splits, split_keys, causal, cu_seqlens_q, max_seqlen_q and
            max_seqlen_kv of `flydsl_flash_attn_func`, with its defaults, but num_kv_splits is 0.

    Returns:
        out, or (out, lse), as `flydsl_flash_attn_func`'s but for rounding: the parts' outs have q's dtype.

    Raises:
        ArgumentError, ArgumentTypeError, UnsupportedError: a bad argument; one that would mean another thing for a
            part of the keys, such as a window.
    """
    for name in options:
        if name not in (*BOTH, *OF_SUFFIX):
            accepted = ", ".join((*BOTH, *OF_SUFFIX))
            CHECKS.fail(f"{name} is not available; accepted: {accepted}", UnsupportedError)
    CHECKS.tensor("block_table", block_table, (torch.int32,), 2, "(B, pages of a sequence)")
    CHECKS.tensor("seqused_kv", seqused_kv, (torch.int32,), 1, "(B,)")
    CHECKS.tensor("k", k, (torch.bfloat16, torch.float16), 4, "(pages, page_size, Hkv, D)")
    CHECKS.whole("prefix_keys", prefix_keys, 1, 2**31 - 1)
    pages, rest = divmod(prefix_keys, k.shape[1])
    if rest or pages > block_table.shape[1]:
        wanted = f"whole pages of {k.shape[1]} keys, at most {block_table.shape[1]} of them"
        CHECKS.fail(f"prefix_keys must be {wanted}, got {prefix_keys}")
    both: dict[str, Any] = {"num_kv_splits": 0} | {n: x for n, x in options.items() if n in BOTH}
    suffix = {n: x for n, x in options.items() if n in OF_SUFFIX}
    if "max_seqlen_kv" in suffix:
        suffix["max_seqlen_kv"] = max(0, suffix["max_seqlen_kv"] - prefix_keys)
    lengths = seqused_kv - prefix_keys
    tables: dict[str, Any] = {"block_table": block_table[:, pages:], "seqused_kv": lengths}
    outs = [flydsl_flash_attn_func(q, k, v, return_lse=True, **both, **suffix, **tables)]
    both.pop("max_seqlen_q", None)
    table, used = block_table[:1, :pages], lengths.new_full((1,), prefix_keys)
    outs.append(
        flydsl_flash_attn_func(
            q.flatten(0, -3)[None], k, v, False, return_lse=True, block_table=table, seqused_kv=used, **both
        )
    )
    values, lses = zip(*outs)
    # the prefix' rows are those of one sequence: (1, B Sq, H, D) and (1, H, B Sq)
    of_prefix = lses[1][0] if q.dim() == 3 else lses[1][0].unflatten(1, q.shape[:2]).transpose(0, 1)
    out, lse = merge_states([values[0], values[1].view(values[0].shape)], [lses[0], of_prefix], return_lse=return_lse)
    return out if lse is None else (out, lse)
