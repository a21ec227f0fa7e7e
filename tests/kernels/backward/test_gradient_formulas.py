"""The backward pass's formulas, written down in float64 as the kernels have them, against differences of attention.

`torch.autograd.gradcheck` holds them, and autograd through the reference that kernels are held against, to numerical
derivatives. What kernels round is rounded nowhere here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.feature_reference import feature_attention, key_heads

LOG2_E = math.log2(math.e)
QUERIES, KEYS, HEADS, KV_HEADS, DIM, DIM_V = 6, 5, 2, 1, 3, 2


@dataclass(frozen=True)
class Case:
    """What changes attention; `mod` with its derivative, functions of a score and of its key's index."""

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    cap: float = 0.0
    mod: Callable[..., Any] | None = None
    slope_of_mod: Callable[..., Any] | None = None
    bias: bool = False
    sink: bool = False
    dropout: float = 0.0


CASES = {
    "plain": Case(causal=False),
    "rows without keys": Case(),
    "window": Case(window=(1, 0)),
    "softcap": Case(cap=1.3),
    "bias": Case(bias=True),
    "sink": Case(sink=True),
    "score_mod": Case(
        mod=lambda s, b, h, q, k: s + 0.3 * s * s * (k + 1), slope_of_mod=lambda s, k: 1 + 0.6 * s * (k + 1)
    ),
    "dropout": Case(dropout=0.25),
    "everything": Case(
        window=(2, -1),
        cap=2.0,
        mod=lambda s, b, h, q, k: s * s * (k + 1) / 4,
        slope_of_mod=lambda s, k: s * (k + 1) / 2,
        bias=True,
        sink=True,
        dropout=0.5,
    ),
}
SCALE = 0.7
Tensors = tuple[torch.Tensor, ...]


def inputs(seed: int) -> Tensors:
    """q, k, v, bias and sink."""
    made = torch.Generator().manual_seed(seed)
    shapes = (
        *((1, QUERIES, HEADS, DIM), (1, KEYS, KV_HEADS, DIM), (1, KEYS, KV_HEADS, DIM_V)),
        *((1, HEADS, QUERIES, KEYS), (HEADS,)),
    )
    return tuple(torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_() for shape in shapes)


def kept(case: Case) -> torch.Tensor:
    """Which weights dropout keeps, always the same ones."""
    made = torch.Generator().manual_seed(7)
    return (torch.rand(HEADS, QUERIES, KEYS, generator=made) >= case.dropout).double()


def reference(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> Tensors:
    """out and lse of the tests' reference; out of weights that dropout leaves."""
    bias, sink = others
    options: dict[str, Any] = {"window_size": case.window, "softcap": case.cap, "score_mod": case.mod}
    options |= {"bias": bias if case.bias else None, "sink": sink if case.sink else None}
    out, lse, _ = feature_attention(q, k, v, case.causal, dtype=torch.float64, softmax_scale=SCALE, **options)
    if case.dropout:
        # weights are what attention to values of one key each gives
        one_by_one = torch.eye(KEYS, dtype=torch.float64)[None, :, None].expand(-1, -1, KV_HEADS, -1)
        weights, *_ = feature_attention(
            q, k, one_by_one, case.causal, dtype=torch.float64, softmax_scale=SCALE, **options
        )
        dropped = weights[0].transpose(0, 1) * kept(case) / (1 - case.dropout)
        out = (dropped @ key_heads(v[0], HEADS, slice(0, HEADS))).transpose(0, 1)[None]
    return out, lse


def finite(out: torch.Tensor, lse: torch.Tensor) -> Tensors:
    """The same with 0 for the log-sum-exp of no key, which has no differences."""
    return out, lse.masked_fill(lse == -math.inf, 0.0)


class Formulas(torch.autograd.Function):
    """The reference's attention with the kernels' way back, all heads and keys at once."""

    @staticmethod
    def forward(ctx: Any, case: Case, *tensors: torch.Tensor) -> Tensors:
        out, lse = reference(case, *tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.case = case
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        case: Case = ctx.case
        q, k, v, bias, sink, out, lse = ctx.saved_tensors
        everything = slice(0, HEADS)
        query, of_out, result = (x[0].transpose(0, 1) for x in (q, dout, out))
        key, value = (key_heads(x[0], HEADS, everything) for x in (k, v))
        keep, remaining = kept(case), 1 - case.dropout

        # weights again; raw scores are without the scale
        raw = query @ key.mT
        position = torch.arange(QUERIES)[:, None] + (KEYS - QUERIES)
        number = torch.arange(KEYS)[None]
        left, right = case.window
        hidden = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
        if case.causal or right >= 0:
            hidden |= number > position + (0 if case.causal else right)
        if left >= 0:
            hidden |= number < position - left
        scores, of_cap, of_mod = raw * SCALE, 1.0, 1.0
        if case.cap:
            scores = case.cap * torch.tanh(scores / case.cap)
            of_cap = 1 - (scores / case.cap) ** 2
        if case.bias:
            scores = scores + bias[0]
        if case.mod is not None and case.slope_of_mod is not None:
            of_mod = case.slope_of_mod(scores, number)
            scores = case.mod(scores, 0, 0, 0, number)
        empty = lse[0] == -math.inf
        lse2 = (lse[0] * LOG2_E).masked_fill(empty, math.inf)
        weights = torch.exp2(scores.masked_fill(hidden, -math.inf) * LOG2_E - lse2[..., None])

        # delta is less dlse, and of rows without keys 0; what dropout multiplies by is in the results
        delta = remaining * ((of_out * result).sum(-1) - dlse[0]).masked_fill(empty, 0.0)
        excess = keep * (of_out @ value.mT) - delta[..., None]
        dscores = weights * excess
        dvalue = (weights * keep).mT @ of_out / remaining
        dbias = dscores * of_mod / remaining
        draw = dscores * of_mod * of_cap
        dquery, dkey = SCALE / remaining * (draw @ key), SCALE / remaining * (draw.mT @ query)
        dsink = -(torch.exp2(sink[:, None] * LOG2_E - lse2) * delta / remaining).sum(-1)
        return (
            None,
            dquery.transpose(0, 1)[None],
            *(x.view(KV_HEADS, HEADS // KV_HEADS, KEYS, -1).sum(1).transpose(0, 1)[None] for x in (dkey, dvalue)),
            dbias[None] if case.bias else None,
            dsink if case.sink else None,
        )


@pytest.mark.parametrize("name", CASES)
def test_formulas(name, seed):
    case = CASES[name]
    assert torch.autograd.gradcheck(lambda *x: finite(*Formulas.apply(case, *x)), inputs(seed)), f"seed {seed}"


@pytest.mark.parametrize("name", CASES)
def test_autograd_through_the_reference(name, seed):
    case = CASES[name]
    assert torch.autograd.gradcheck(lambda *x: finite(*reference(case, *x)), inputs(seed)), f"seed {seed}"
