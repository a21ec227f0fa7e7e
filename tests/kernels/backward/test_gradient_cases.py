"""Gradients in situations that other implementations got wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fly.runtime.device import CPU, device_for
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.simulated import SEEDS


@pytest.fixture
def device(request, emulate, monkeypatch) -> str:
    """Where tensors are, with the generic kernels: on the simulated Hopper GPU, if nothing else is asked for."""
    arch = getattr(request, "param", "sm_90a")
    if arch:
        emulate(arch, "generic")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setenv("FLY_KERNEL", "generic")
    return "cuda"


def dense(seed: int, **sizes: Any) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout."""
    inputs = Inputs(
        **{"queries": [40], "keys": [40], "heads": 2, "kv_heads": 2, "head_dim": 64, "seed": seed, **sizes}
    )
    q, k, v = inputs.tensors()
    return q, k, v, inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


def among_nan(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """The same in memory whose other elements are NaN: 8 behind each head's, and so many tokens behind the last."""
    total, heads, dim = x.shape
    memory = torch.full((total + tokens, heads, dim + 8), torch.nan, dtype=x.dtype, device=x.device)
    memory[:total, :, :dim] = x
    return memory[..., :dim]


def place(arch: str, *values: Any, exhaustive: bool = False) -> Any:
    """Values of parameters, the first one a `device`: an emulated one, or "" for a GPU."""
    marks = pytest.mark.exhaustive if exhaustive else () if arch else pytest.mark.gpu
    return pytest.param(arch, *values, marks=marks, id="-".join(map(str, (arch or "gpu", *values))))


@pytest.mark.parametrize(
    ("device", "head_dim"),
    [
        place("sm_90a", 104),
        place("sm_90a", 72, exhaustive=True),
        place("gfx950", 72),
        place("gfx942", 72, exhaustive=True),
        place("", 72),
        place("", 104),
    ],
    indirect=["device"],
)
def test_what_is_around_a_sequence_does_not_matter(device, head_dim, seed):
    """NaN in columns behind the head dimension, in the sequence between, and in tokens outside of all sequences."""
    lengths = [20, 30, 9]
    inputs = Inputs(lengths, lengths, 2, 1, head_dim, packed=True, seed=seed, device=device)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    apart = [x.index_select(0, torch.tensor([*range(20), *range(50, 59)], device=device)) for x in (q, k, v, dout)]
    for x in (q, k, v, dout):
        x[20:50] = torch.nan
    longest = {"max_seqlen_q": 30, "max_seqlen_kv": 30}
    found = by_autograd(
        *(among_nan(x, 11) for x in (q, k, v)), True, among_nan(dout, 11), None, **inputs.form(), **longest
    )
    assert not any(x[59:].any() for x in found)
    two = Inputs([20, 9], [20, 9], packed=True, device=device).form()
    kept = [torch.cat([x[:20], x[50:59]]) for x in found]
    assert not gradients(*apart[:3], True, apart[3], **two).wrong(kept), f"seed {seed}"


@pytest.mark.parametrize(
    "device", [place("sm_90a"), place("gfx950"), place("gfx942", exhaustive=True), place("")], indirect=True
)
def test_the_largest_head_dimension_with_sequences_without_queries_or_keys(device, seed):
    """Also rows without keys, and sequences of one token."""
    queries, keys = [0, 3, 40, 1], [5, 0, 9, 1]
    inputs = Inputs(queries, keys, 2, 1, 256, packed=True, seed=seed, device=device)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    found = by_autograd(q, k, v, True, dout, None, **inputs.form(), max_seqlen_q=40, max_seqlen_kv=9)
    assert not gradients(q, k, v, True, dout, **inputs.form()).wrong(found), f"seed {seed}"
    assert not any(x.any() for x in (found[0][:3], found[1][:5], found[2][:5]))  # of nothing, exactly 0


@pytest.mark.parametrize(
    "device",
    [place("sm_90a"), place("gfx950", exhaustive=True), place("gfx942", exhaustive=True), place("")],
    indirect=True,
)
def test_values_wider_than_keys_that_heads_share(device, seed):
    q, k, v, dout = dense(seed, keys=[70], heads=4, head_dim=96, head_dim_v=160, device=device)
    found = by_autograd(q, k, v, True, dout, None)
    assert not gradients(q, k, v, True, dout).wrong(found), f"seed {seed}"


def test_results_are_the_same_bits_in_every_schedule(device, seed):
    q, k, v, dout = dense(seed, queries=[40], keys=[40], heads=2, kv_heads=1)
    simulated, results = device_for(CPU), []
    try:
        for simulated.seed in SEEDS:
            results.append(by_autograd(q, k, v, True, dout, None))
    finally:
        simulated.seed = None
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_results_that_were_put_together(device, seed):
    """The gradient of what `torch.cat` took is a part of a larger tensor."""
    q, k, v, dout = dense(seed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flydsl_flash_attn_func(*leaves)
    for dim, other in ((-1, torch.zeros_like(out)), (2, torch.zeros_like(out[:, :, :1])), (1, torch.zeros_like(out))):
        together = torch.cat([other, out], dim)
        weights = torch.cat([other, dout], dim)
        found = torch.autograd.grad(together, leaves, weights, retain_graph=True)
        assert not gradients(q, k, v, True, dout).wrong(found), f"seed {seed}, dim {dim}"


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_are_made_again_for_their_gradients(device, reentrant, seed):
    q, k, v, dout = dense(seed)
    plain = by_autograd(q, k, v, True, dout, None)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    checkpoint(flydsl_flash_attn_func, *leaves, use_reentrant=reentrant).backward(dout)
    assert all(torch.equal(x.grad, g) for x, g in zip(leaves, plain, strict=True))


def test_calls_between_a_call_and_its_gradients(device, seed):
    """Nothing that the backward pass needs is kept where another call writes."""
    some = [dense(seed + i) for i in range(2)]
    alone = [by_autograd(q, k, v, True, dout, None) for q, k, v, dout in some]
    leaves = [[x.clone().requires_grad_() for x in inputs[:3]] for inputs in some]
    outs = [flydsl_flash_attn_func(*of) for of in leaves]
    for i in (1, 0):
        found = torch.autograd.grad(outs[i], leaves[i], some[i][3])
        assert all(torch.equal(a, b) for a, b in zip(found, alone[i], strict=True))


@pytest.mark.parametrize(("device", "batch"), [place("sm_90a", 4), place("", 10_000)], indirect=["device"])
def test_many_sequences_of_one_token(device, batch, seed):
    """A weight is 1: dv is dout, and a score has no gradient."""
    q, k, v, dout = dense(seed, queries=[1] * batch, keys=[1] * batch, device=device)
    dq, dk, dv = by_autograd(q, k, v, True, dout, None)
    assert torch.equal(dv, dout) and max(dq.abs().max(), dk.abs().max()) < 1e-4, f"seed {seed}"
