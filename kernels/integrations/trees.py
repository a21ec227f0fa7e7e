"""Trees of draft tokens, as serving engines describe them, as numbers of `tree_mask`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch

from fly.errors import ArgumentError

from ..problem.tree_mask import tree_bits, tree_mask

MOST = 64  # drafts, the root among them: bits of a number


def seen_by(paths: str) -> torch.Tensor:
    """(n, n) bool: which draft sees which, of a tree as vLLM writes it, such as "[(0,), (1,), (0, 0)]".

    A path says which child each token on the way from the root is; the root, the token before the drafts, has none
    and comes first, and then paths by length and by number.

    Raises:
        ArgumentError: no such text, a path without its parent, or more than 64 tokens.
    """
    try:
        found = {tuple(int(child) for child in path) for path in ast.literal_eval(paths)}
    except (ValueError, SyntaxError, TypeError):
        raise ArgumentError(
            f"speculative_token_tree {paths!r}; accepted: a list of paths, as [(0,), (0, 0)]"
        ) from None
    ordered = [(), *sorted(found - {()}, key=lambda path: (len(path), path))]
    place = {path: i for i, path in enumerate(ordered)}
    if len(ordered) > MOST:
        raise ArgumentError(f"speculative_token_tree has {len(ordered)} tokens with its root; accepted: up to {MOST}")
    seen = torch.zeros(len(ordered), len(ordered), dtype=torch.bool)
    for path, i in place.items():
        for length in range(len(path) + 1):
            if path[:length] not in place:
                raise ArgumentError(f"speculative_token_tree has {path} without {path[:length]}, its parent")
            seen[i, place[path[:length]]] = True
    return seen


@dataclass(frozen=True)
class Trees:
    """One tree for all requests of an engine: `bits` (n,) int64, and memory of a step's numbers, which stays.

    `of_tokens` (tokens,) int64, `context` (requests,) int32: what `tree_mask` takes.
    """

    bits: torch.Tensor
    of_tokens: torch.Tensor
    context: torch.Tensor

    @staticmethod
    def of(paths: str | None, vllm_config: Any, device: torch.device) -> Trees | None:
        """None where there is no tree, or where it is a chain, whose mask causality is."""
        if paths is None:
            return None
        seen = seen_by(paths)
        if torch.equal(seen, torch.ones_like(seen).tril()):
            return None
        scheduler = vllm_config.scheduler_config
        tokens = torch.zeros(scheduler.max_num_batched_tokens, dtype=torch.int64, device=device)
        context = torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device)
        return Trees(tree_bits(seen).to(device), tokens, context)

    def mask(self, offsets: torch.Tensor, lengths: torch.Tensor, tokens: int) -> dict[str, Any]:
        """`tree_mask` of a step: requests with as many queries as the tree has tokens are trees, others are not.

        offsets: (B + 1,) int32 of the packed queries; lengths: (B,) int32, keys with those of the queries. It is all
        computed on the device.
        """
        size, requests = len(self.bits), len(lengths)
        drafts = offsets.diff() == size
        self.context[:requests].copy_(lengths - drafts * size)
        token = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
        request = torch.searchsorted(offsets[1:], token, right=True).clamp_(max=requests - 1)
        place = (token - offsets[request]).clamp_(max=size - 1)
        self.of_tokens[:tokens].copy_(torch.where(drafts[request], self.bits[place], 0))
        return tree_mask(self.of_tokens[:tokens], self.context[:requests], offsets)
