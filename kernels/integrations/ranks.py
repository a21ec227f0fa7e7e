"""Decode context parallelism: attention of all queries to the keys that one rank has of every sequence.

Of a sequence's keys, rank r of W has those at the positions r, r + W, r + 2 W and so on, one behind the other.
Results of all ranks, with their log-sum-exps, merge to attention to all keys (`fly_attention.merge_states`).
"""

from __future__ import annotations

from typing import Any

import torch

from fly.errors import UnsupportedError

from ..arguments.checks import Checks
from ..problem.catalogue import NO_WINDOW


def add_ranks(
    checks: Checks,
    options: dict[str, Any],
    causal: bool,
    world_size: int,
    rank: int,
    total_lengths: torch.Tensor | None,
) -> bool:
    """Add to `options` what a rank's keys see of causality and of the window; whether the call itself is causal.

    `total_lengths`: (B,) int32, the keys of each sequence on all ranks.

    Raises:
        ArgumentError, ArgumentTypeError: no such rank, no lengths.
        UnsupportedError: what cannot be said of a part of the keys; a call while torch compiles.
    """
    checks.whole("cp_world_size", world_size, 1)
    checks.whole("cp_rank", rank, 0, world_size - 1)
    used = options.get("seqused_kv")
    if used is None or total_lengths is None:
        given = "cp_world_size" if total_lengths is None else "cp_tot_seqused_k"
        together = "cp_world_size, cp_rank, cp_tot_seqused_k and seqused_k"
        checks.fail(f"{given} is for a rank's keys in pages: pass {together} together")
    checks.vector("cp_tot_seqused_k", total_lengths, torch.int32, used.device, f"{len(used)} int32", len(used))
    if options.get("alibi_slopes") is not None:
        checks.fail("alibi_slopes are for neighbouring keys, not for a rank's (cp_world_size)", UnsupportedError)
    if options.get("sink") is not None and rank:
        checks.fail(
            "s_aux counts once for all ranks: pass it where cp_rank is 0, and None elsewhere", UnsupportedError
        )
    left, right = options.pop("window_size", NO_WINDOW)
    right = 0 if causal else right
    if left < 0 and right <= 0 and (right < 0 or options["max_seqlen_q"] == 1):
        return False  # a sequence's only query is behind all keys
    if torch.compiler.is_compiling():
        checks.fail("cp_world_size with several queries is for eager calls", UnsupportedError)

    def sees(batch: Any, head: Any, query: Any, key: Any, lengths: Any, offsets: Any) -> Any:
        distance = query + lengths[batch] - (offsets[batch + 1] - offsets[batch]) - (key * world_size + rank)
        seen = distance >= -right if right >= 0 else distance <= left
        return seen & (distance <= left) if left >= 0 <= right else seen

    options["mask_mod"], options["aux_tensors"] = sees, (total_lengths, options["cu_seqlens_q"])
    return False
