"""Where gradients lie in memory: small ones share a piece, and nobody can tell but by their storage."""

from __future__ import annotations

import pytest
import torch

from kernels import flash_attn_api, flash_attn_interface
from kernels.call import gradients
from kernels.flash_attn_interface import flydsl_flash_attn_func


@pytest.fixture(autouse=True)
def emulated(emulate, monkeypatch):
    emulate("gfx950", "generic")
    monkeypatch.setattr(flash_attn_interface, "_plans", {})  # what was decided with another limit


def leaves(seed: int, kv_heads: int = 2) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = ((1, 16, heads, 64) for heads in (2, kv_heads, kv_heads))
    return [torch.randn(shape, generator=drawn, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def storages(tensors) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors]


def found(given: list[torch.Tensor], **options) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(flydsl_flash_attn_func(*given, **options).float().square().sum(), given)


@pytest.mark.parametrize("kv_heads", [2, 1], ids=["one shape", "dk and dv have another shape than dq"])
def test_small_gradients_share_memory_and_large_ones_do_not(kv_heads, monkeypatch, seed):
    given = leaves(seed, kv_heads)
    small = found(given)
    q, k, v = storages(small)
    assert k == v and (q == k) == (kv_heads == 2), f"seed {seed}"
    monkeypatch.setattr(gradients, "MOST_SHARED", 0)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    large = found(given)
    assert [x.untyped_storage().nbytes() for x in large] == [x.nbytes for x in given]
    assert len({*storages(large)}) == 3
    assert all(map(torch.equal, small, large)), f"seed {seed}"
    assert all(x.is_contiguous() and not x._is_view() for x in (*small, *large))


def test_changing_a_gradient_in_place_is_no_change_of_another(seed):
    """As it would be if they were views of one tensor: of what autograd keeps of dq, dk must say nothing."""
    dq, dk, dv = found(leaves(seed))
    kept, factor = dv.clone(), torch.ones(dq.shape, dtype=dq.dtype, requires_grad=True)
    loss = (dq * factor).sum()
    dk.zero_()
    dk.add_(factor)  # with a history, which views that were made without one refuse
    loss.backward()
    assert torch.equal(factor.grad, dq) and torch.equal(dv, kept), f"seed {seed}"


def test_gradients_of_several_passes_are_summed_in_place(seed):
    given = leaves(seed)
    for _ in range(2):
        flydsl_flash_attn_func(*given).float().square().sum().backward()
    for x, once in zip(given, found(given), strict=True):
        assert torch.equal(x.grad, once + once), f"seed {seed}"


def test_results_of_the_operation_share_nothing(seed):
    given = leaves(seed)
    assert flash_attn_api  # which defines it
    out, _ = torch.ops.fly.flash_attn(*given, True, return_lse=True)
    assert len({*storages(torch.autograd.grad(out.float().sum(), given))}) == 3


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed, and tokens of no sequence"])
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["one shape", "dk and dv have another shape than dq"])
def test_a_repeated_pass_is_a_shorter_way_to_the_same_gradients(kv_heads, packed, monkeypatch, seed):
    first, second = (leaves(n, kv_heads) for n in (seed, seed + 1))
    options = {}
    if packed:
        first, second = ([x.detach().squeeze(0).requires_grad_() for x in given] for given in (first, second))
        offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    found(first, **options)
    with monkeypatch.context() as patched:
        patched.setattr(gradients, "_again", lambda *_: None)
        expected = found(second, **options)
    monkeypatch.setattr(gradients, "run", None)  # the longer way
    results = found(second, **options)
    assert all(map(torch.equal, results, expected)), f"seed {seed}"
    assert all(x.is_contiguous() and not x._is_view() for x in results)
    if packed:
        assert not any(x[12:].any() for x in results)
