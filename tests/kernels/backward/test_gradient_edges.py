"""Gradients where numbers are at the ends of their ranges: finite, and those of float64.

On the simulated Hopper GPU, whose builds compile fastest; with --exhaustive on an emulated gfx950, and on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.feature_reference import Scores, Span
from tests.kernels.gradient_reference import NAMES, by_autograd, gradients

ROUNDINGS = 4.0  # of 16 bits: weights, their gradients, and the result
HALF = 2.0**-11  # a rounding of float16
SMALLEST = 2.0**-24  # of float16
F32 = 2.0**-21  # rounding of a score: a sum of products, and a few operations
DEVICES = [
    pytest.param(("cpu", "sm_90a"), id="sm_90a"),
    pytest.param(("cpu", "gfx950"), id="gfx950", marks=pytest.mark.exhaustive),
    pytest.param(("cuda", ""), id="gpu", marks=pytest.mark.gpu),
]
LARGEST = 2**31 - 1


@pytest.fixture(params=DEVICES)
def device(request, emulate, monkeypatch) -> str:
    """Where a test runs, with the generic kernels."""
    where, arch = request.param
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if arch:
        emulate(arch, "generic")
    else:
        monkeypatch.setenv("FLY_KERNEL", "generic")
    return where


def tensors(seed: int, queries: int, keys: int, size: float = 1.0) -> list[torch.Tensor]:
    """Random q, k, v, dout and dlse of one head in float16, q and k `size` times as large."""
    made = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, n, 1, 64, generator=made) for n in (queries, keys, keys, queries))
    dlse = torch.randn(1, 1, queries, generator=made)
    return [*(x.half() for x in (q * size, k * size, v, dout)), dlse]


def bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """How far each element of dq, dk and dv may be from the exact one.

    Sums of magnitudes, times the roundings of 16 bits, and of scores in float32: the rule of plain attention in the
    inputs' dtype says nothing where that overflows, or is right by luck.
    """
    of_scores = {name: x for name, x in options.items() if name not in ("sink", "softmax_scale")}
    scale, cap = options.get("softmax_scale", q.shape[-1] ** -0.5), options.get("softcap", 0.0)
    query, key, value, of_out = (x[0].transpose(0, 1).double() for x in (q, k, v, dout))
    span, everything = Span(0, (), k[0], v[0]), (slice(0, q.shape[2]), slice(0, q.shape[1]))
    plain = Scores(False, scale).of(query, span, *everything)
    scores = Scores(causal, scale, **of_scores).of(query, span, *everything)
    total = torch.logsumexp(scores, -1, keepdim=True)
    if "sink" in options:
        total = torch.logaddexp(total, options["sink"].double()[:, None, None])
    weights = torch.exp(scores - total).nan_to_num(0.0)
    size = Scores(False, scale).of(query.abs(), Span(0, (), k[0].abs(), v[0]), *everything)
    doubt = ROUNDINGS * HALF + 2 * (F32 * size).masked_fill(weights == 0, 0.0).amax(-1, keepdim=True)
    excess = (of_out @ value.mT).abs() + (of_out * (weights @ value)).abs().sum(-1, keepdim=True)
    excess = excess + dlse[0].double().abs()[..., None]
    slope = 1 - torch.tanh(plain / cap) ** 2 + HALF if cap else 1.0
    of_weights = doubt * weights + SMALLEST
    of_scores_bound = (doubt * weights + SMALLEST) * excess * slope + SMALLEST
    found = (
        scale * (of_scores_bound @ key.abs()),
        scale * (of_scores_bound.mT @ query.abs()),
        of_weights.mT @ of_out.abs(),
    )
    return [(x + SMALLEST).transpose(0, 1)[None] for x in found]


def hold(seed: int, device: str, inputs: list[torch.Tensor], causal: bool = False, **options: Any) -> None:
    """A call's gradients are those of float64, within what 16-bit operands and float32 scores leave open."""
    placed = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k, v, dout, dlse = (x.to(device) for x in inputs)
    found = by_autograd(q, k, v, causal, dout, dlse, **placed)
    exact = gradients(*inputs[:3], causal, *inputs[3:], **options).exact
    for name, g, wanted, bound in zip(NAMES, found, exact, bounds(*inputs, causal, options), strict=True):
        wanted = wanted.half().double()
        excess = ((g.cpu().double() - wanted).abs() / (bound + HALF * wanted.abs())).max().item()
        assert excess <= 1, f"seed {seed}: {name} is {excess:.3g} of what is allowed"


@pytest.mark.parametrize("scale", [1e-46, 1e-30, 4.0], ids=str)
def test_any_softmax_scale(device, scale, seed):
    hold(seed, device, tensors(seed, 40, 70), softmax_scale=scale)


@pytest.mark.parametrize("size", [1e-4, 30.0], ids=str)
def test_tiny_and_large_scores(device, size, seed):
    hold(seed, device, tensors(seed, 40, 70, size))


def test_scores_of_a_million(device, seed):
    """Float32 holds them, and with them their log-sum-exp, to sixteenths."""
    made = torch.Generator().manual_seed(seed)
    q, k, *others = tensors(seed, 40, 70)
    q, k = (torch.randint(0, 2, x.shape, generator=made).mul(2.0).sub(1.0).mul(300.0).half() for x in (q, k))
    hold(seed, device, [q, k, *others])


@pytest.mark.parametrize("cap", [1e-45, 50.0, 1e300], ids=str)
def test_any_softcap(device, cap, seed):
    hold(seed, device, tensors(seed, 40, 70, 3.0), True, softcap=cap)


@pytest.mark.parametrize("scale", [1e-40], ids=str)
def test_a_softcap_of_scores_that_are_next_to_nothing(device, scale, seed):
    """The inverse of such a scale is infinite."""
    hold(seed, device, tensors(seed, 40, 70), True, softcap=1.0, softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e-40, 4.0], ids=str)
def test_a_bias_that_hides_keys_and_whole_rows(device, scale, seed):
    bias = torch.randn(1, 1, 40, 70, generator=torch.Generator().manual_seed(seed))
    bias[..., :33], bias[:, :, 7], bias[:, :, 8, 69] = -math.inf, -math.inf, 1e4
    hold(seed, device, tensors(seed, 40, 70), bias=bias, softmax_scale=scale)


@pytest.mark.parametrize("hidden", [-1e9, -1e12, -3e38, 3e38], ids=str)
def test_biases_that_float32_does_not_tell_from_scores(device, hidden, seed):
    """As of padding that nobody looks at: such rows' weights are unknown, but not infinite; those of others stay."""
    q, k, v, dout, dlse = tensors(seed, 40, 70)
    bias = torch.zeros(1, 1, 40, 70)
    bias[:, :, 7] = hidden
    dout[:, 7], dlse[..., 7] = 0.0, 0.0
    hold(seed, device, [q, k, v, dout, dlse], bias=bias)


@pytest.mark.parametrize("sink", [-3e38, 60.0, 3e38], ids=str)
def test_sinks_far_from_the_scores(device, sink, seed):
    hold(seed, device, tensors(seed, 40, 30), True, sink=torch.tensor([sink]))


@pytest.mark.parametrize(
    ("window", "queries", "keys"),
    [
        ((-1, LARGEST), 90, 40),
        ((LARGEST, -1), 40, 90),
        ((LARGEST, 7), 90, 40),
        ((5, LARGEST - 40), 20, 160),  # a block of keys that no query sees
        ((0, 0), 90, 40),
    ],
    ids=str,
)
def test_any_window(device, window, queries, keys, seed):
    hold(seed, device, tensors(seed, queries, keys), window_size=window)


def test_a_softcap_with_a_window_and_rows_without_keys(device, seed):
    """Modified scores are -inf where they are hidden, and their derivatives are of the scores before."""
    hold(seed, device, tensors(seed, 90, 40, 5.0), window_size=(11, 3), softcap=2.0)


def test_keys_that_no_query_may_see_yet_are_as_large_as_they_like(device, seed):
    """What is masked is masked before the exponential, which would be infinite."""
    q, k, v, dout, dlse = tensors(seed, 80, 80)
    q[:, 40:] = 0.0
    k[:, 40:], v[:, 40:] = 6e4, 100.0
    dout[:, 40:], dlse[..., 40:] = 0.0, 0.0
    hold(seed, device, [q, k, v, dout, dlse], True)


@pytest.mark.parametrize(("queries", "keys"), [(2, 400), (400, 2)], ids=str)
def test_few_against_many(device, queries, keys, seed):
    """Rows of 400 keys, and keys of 400 rows, nearly all of them without keys."""
    hold(seed, device, tensors(seed, queries, keys), True)
