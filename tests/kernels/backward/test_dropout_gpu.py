"""Dropout on a GPU: masks bit for bit of every kernel that runs there, gradients, kept shares, graphs."""

from __future__ import annotations

import math

import pytest
import torch

from fly import config
from fly_attention.problem.dropout import threshold
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.backward.test_generic_bwd import by_autograd, lengths
from tests.kernels.dropout_masks import Problem
from tests.kernels.feature_cases import Inputs, compare
from tests.kernels.gradient_reference import gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(params=["sm90", "generic"])
def kernel(request, monkeypatch):
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    monkeypatch.setenv(config.KERNEL.name, request.param)


def state_of(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device="cuda")


def problem(seed: int, packed: bool, causal: bool, head_dim: int, splits: int = 1) -> Problem:
    queries, keys = ((333, 0, 64, 129), (500, 3, 64, 0)) if packed else ((333, 333), (500, 500))
    return Problem(queries, keys, 2, 3, head_dim, causal, packed, 0.3, state_of(seed), splits=splits)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_masks_of_forward_kernels_are_the_mask(head_dim, causal, packed, kernel, seed):
    assert not problem(seed, packed, causal, head_dim).wrong("forward"), f"seed {seed}"


def test_split_keys_have_the_mask_of_whole_ones(kernel, seed):
    assert not problem(seed, False, True, 128, splits=3).wrong("forward"), f"seed {seed}"


@pytest.mark.parametrize("which", ["dv", "dk", "dq"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_of_backward_kernels_are_the_mask(head_dim, packed, which, seed):
    assert not problem(seed, packed, not packed, head_dim).wrong(which), f"seed {seed}"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_results_and_gradients_are_the_references(head_dim, packed, seed):
    sizes = ([700, 0, 900], [800, 5, 900]) if packed else ([700] * 2, [900] * 2)
    inputs = Inputs(*sizes, 4, 2, head_dim, packed=packed, seed=seed, device="cuda")
    q, k, v = inputs.tensors()
    options = {**inputs.form(), "dropout_p": 0.17, "rng_state": state_of(seed)}
    report = compare(q, k, v, True, **options)
    assert report.ok, f"seed {seed}: {report}"
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    found = by_autograd(q, k, v, True, dout, None, **options, **lengths(inputs))
    assert not gradients(q, k, v, True, dout, **options).wrong(found), f"seed {seed}"


@pytest.mark.parametrize("p", [1 / 512, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.99])
def test_kept_shares_are_right_within_four_sigma(p, kernel, seed):
    """Of equal weights, out is the kept share over what it should be."""
    shape, share = (1, 4096, 4, 64), 1 - threshold(p) / 256
    q, ones = torch.zeros(shape, dtype=torch.float16, device="cuda"), torch.ones(shape, dtype=torch.float16)
    out = flydsl_flash_attn_func(q, q, ones.cuda(), False, dropout_p=p, rng_state=state_of(seed))
    sigma = math.sqrt((1 - share) / (share * 4096 * 4096 * 4))
    assert abs(out[..., 0].double().mean().item() - 1) <= 4 * sigma + 2.0**-12 * 0.05, f"seed {seed}"


def test_replays_of_a_graph_draw_fresh_masks(seed):
    inputs = Inputs([300], [300], 2, 2, 64, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    dout = torch.randn_like(leaves[0])

    def step() -> tuple[torch.Tensor, ...]:
        out = flydsl_flash_attn_func(*leaves, dropout_p=0.5)
        return out, *torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    runs = []
    for _ in range(2):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            runs.append([x.detach().clone() for x in captured])
    assert all(torch.equal(a, b) for first, again in ((0, 2), (1, 3)) for a, b in zip(runs[first], runs[again]))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
