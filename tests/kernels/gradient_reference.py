"""Gradients of attention with features, by autograd through the reference, and the tolerance rule for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.feature_reference import feature_attention
from tests.kernels.reference import exact_products, max_difference

NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Gradients:
    """Those of q, k, v and more, by `names`, in float64, and by plain attention in the inputs' dtype."""

    names: tuple[str, ...]
    exact: tuple[torch.Tensor, ...]
    plain: tuple[torch.Tensor, ...]
    slack: float

    def wrong(self, found: Sequence[torch.Tensor]) -> list[str]:
        """What does not hold |g - exact| <= 2 |plain - exact| + slack * a rounding of the exact ones near 0.3.

        The second term is FlashAttention's: plain attention's own error may be 0. NaN is wrong.
        """
        result = []
        for name, g, exact, plain in zip(self.names, found, self.exact, self.plain, strict=True):
            narrow = exact.to(plain.dtype)
            rounding = ((narrow + 0.3 - 0.3) - narrow).abs().max().item() if narrow.numel() else 0.0
            error, bound = max_difference(g, exact), 2 * max_difference(plain, exact) + self.slack * rounding
            if not error <= bound:
                result.append(f"d{name}: error {error:.3g}, bound {bound:.3g}")
        return result


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
    return Gradients((*NAMES, *more), exact, by_autograd(q.dtype), slack=3.0 * 2 if options.get("softcap") else 2.0)
