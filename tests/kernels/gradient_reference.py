"""Gradients of attention with features, by autograd through the reference, and the tolerance rule for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_reference import feature_attention
from tests.kernels.reference import exact_products, max_difference

NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Gradients:
    """Those of q, k, v and more, by `names`, in float64, and by plain attention in the inputs' dtype."""

    exact: tuple[torch.Tensor, ...]
    plain: tuple[torch.Tensor, ...]
    slack: float
    names: tuple[str, ...] = NAMES

    def errors(self, found: Sequence[torch.Tensor]) -> Iterator[tuple[str, float, float]]:
        """(name, largest error, what is allowed): 2 |plain - exact| + slack * a rounding of the exact ones near 0.3.

        The second term is FlashAttention's: plain attention's own error may be 0.
        """
        for name, g, exact, plain in zip(self.names, found, self.exact, self.plain, strict=True):
            narrow = exact.to(plain.dtype)
            rounding = ((narrow + 0.3 - 0.3) - narrow).abs().max().item() if narrow.numel() else 0.0
            yield f"d{name}", max_difference(g, exact), 2 * max_difference(plain, exact) + self.slack * rounding

    def wrong(self, found: Sequence[torch.Tensor]) -> list[str]:
        """What has a larger error than is allowed. NaN is wrong."""
        every = self.errors(found)
        return [f"{name}: error {error:.3g}, bound {bound:.3g}" for name, error, bound in every if not error <= bound]


def with_leaves(
    options: dict[str, Any], of: Sequence[str], dtype: torch.dtype | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """`options` with leaves in the place of those named in `of`, and these; `dtype`: theirs, None for their own."""
    options, leaves = dict(options), []
    for name in of:
        tensors = options[name] if name == "aux_tensors" else (options[name],)
        made = tuple(x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors)
        options[name] = made if name == "aux_tensors" else made[0]
        leaves += made
    return options, leaves


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    of: Sequence[str] = (),
    **options: Any,
) -> Gradients:
    """Of sum(out * dout) + sum(lse * dlse), in float64 and in the inputs' dtype.

    `of`: whose are wanted beside those of q, k and v: options that are tensors, or "aux_tensors", for all of them.
    """

    def by_autograd(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        used_options, more = with_leaves(options, of, dtype)
        out, lse, used = feature_attention(*leaves, causal, dtype=dtype, **used_options)
        leaves += more
        loss = (out * dout.to(dtype).masked_fill(~used[..., None, None], 0.0)).sum()
        if dlse is not None:
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(dtype)).sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))

    with exact_products():
        exact = by_autograd(torch.float64)
    more = [name for x in of for name in ([x] * len(options[x]) if x == "aux_tensors" else [x])]
    return Gradients(exact, by_autograd(q.dtype), 3.0 * 2 if options.get("softcap") else 2.0, (*NAMES, *more))


def gradients_by_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    lengths: Sequence[tuple[int, int]] = (),
    max_scores: int = 1 << 26,
) -> Gradients:
    """`gradients` of a call without features, of one key head and some queries at a time: for long sequences.

    The sums are the same, added up in another order. `lengths`: (queries, keys) of packed sequences. `max_scores`
    at a time, or those of one query.
    """
    exact, plain = ([torch.zeros_like(x, dtype=t) for x in (q, k, v)] for t in (torch.float64, torch.float32))
    group = q.shape[-2] // k.shape[-2]
    for of_q, of_kv in _places(q, k, lengths):
        queries, keys = q[of_q].shape[0], k[of_kv].shape[0]
        rows = max(1, max_scores // max(1, group * keys))
        for kv_head in range(k.shape[-2]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for first in range(0, queries, rows):
                some = slice(first, min(first + rows, queries))
                # without the keys that the last of these queries does not see: the mask stays where it is
                seen = slice(0, max(0, some.stop + keys - queries) if causal else keys)
                of_part = (q[of_q][None, some, heads], *(x[of_kv][None, seen, kv_head, None] for x in (k, v)))
                of_lse = dlse[(*of_q[:-1], heads, of_q[-1])][None, :, some]
                part = gradients(*of_part, causal, dout[of_q][None, some, heads], of_lse)
                for (dq, *others), (found, *of_keys) in ((exact, part.exact), (plain, part.plain)):
                    dq[of_q][some, heads] += found[0]
                    for x, g in zip(others, of_keys, strict=True):
                        x[of_kv][seen, kv_head] += g[0, :, 0]
    return Gradients(tuple(exact), tuple(x.to(q.dtype) for x in plain), slack=2.0)


def _places(q: torch.Tensor, k: torch.Tensor, lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[Any, Any]]:
    """Where each sequence's queries and keys lie: indices that end with the tokens."""
    if not lengths:
        yield from (((b, slice(0, q.shape[1])), (b, slice(0, k.shape[1]))) for b in range(q.shape[0]))
        return
    at_q = at_kv = 0
    for queries, keys in lengths:
        yield (slice(at_q, at_q + queries),), (slice(at_kv, at_kv + keys),)
        at_q, at_kv = at_q + queries, at_kv + keys


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch allocates holds NaN, or the bits of one, until something is written there.

    That is one of torch's deterministic algorithms; who asks whether they are wanted is told what was so before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        with patch.object(torch, "are_deterministic_algorithms_enabled", lambda: before):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def by_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of a call, whose results and workspaces begin as NaN."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with poisoned_memory():
        results = flydsl_flash_attn_func(*leaves, causal, return_lse=True, **options)
        used = [(x, g) for x, g in zip(results, (dout, dlse), strict=True) if g is not None]
        return torch.autograd.grad([x for x, _ in used], leaves, [g for _, g in used])
