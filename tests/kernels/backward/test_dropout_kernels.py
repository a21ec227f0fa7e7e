"""Dropout of the kernels: their masks bit for bit, their gradients, and what repeats a call, in emulators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, ShapeError, UnsupportedError
from kernels import flash_attn_interface
from kernels.flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels.generic.tiles import TILES
from kernels.problem.block_mask import create_block_mask
from kernels.problem.catalogue import BY_NAME
from kernels.problem.features import Features
from kernels.sm90.builds import decode_options
from tests.kernels.backward.test_generic_bwd import by_autograd, lengths
from tests.kernels.dropout_masks import dense, packed
from tests.kernels.feature_cases import Inputs, compare
from tests.kernels.feature_reference import check_used, feature_reference
from tests.kernels.gradient_reference import gradients

ARCHS = pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90a"])
FORMS = {"dense": dense, "packed": packed}


def state_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator)


@pytest.mark.sample(4)
@ARCHS
@pytest.mark.parametrize("which", ["forward", "dv", "dk", "dq"])
@pytest.mark.parametrize(("form", "causal"), [("dense", True), ("packed", False)])
def test_masks_of_the_generic_kernels_are_the_mask(which, form, causal, arch, emulate, seed):
    emulate(arch, "generic")
    problem = FORMS[form](state_of(seed), causal=causal)
    assert not problem.wrong(which), f"seed {seed}"


# of several tiles each way, and for sm90, rows that are the heads of a group elsewhere
OF_CHIPS = {
    "dense": lambda state: dense(state, queries=(70,), keys=(200,), kv_heads=1, causal=True),
    "packed": lambda state: packed(state, queries=(21, 0, 70, 5), keys=(40, 3, 150, 0)),
    "a group's heads": lambda state: dense(state, queries=(3,), keys=(200,), kv_heads=1, group=8),
    "split": lambda state: dense(state, queries=(9,), keys=(200,), splits=3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", ["sm90", "gfx950"])
@pytest.mark.parametrize("form", OF_CHIPS)
def test_masks_of_the_chips_kernels_are_the_mask(form, kernel, emulate, seed):
    emulate({"sm90": "sm_90a", "gfx950": "gfx950"}[kernel], kernel)
    assert not OF_CHIPS[form](state_of(seed)).wrong("forward"), f"seed {seed}"


@pytest.mark.parametrize("which", ["forward", "dv", "dk", "dq"])
def test_masks_of_the_hopper_kernels_are_the_mask_at_any_probability(which, emulate, monkeypatch, seed):
    emulate("sm_90a", "sm90")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")
    for p in (1 / 512, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.99):
        problem = dense(state_of(seed), queries=(40,), keys=(64,), kv_heads=1, group=1, dropout_p=p)
        assert not problem.wrong(which), f"seed {seed}, p {p}"


@pytest.mark.parametrize("kernel", ["sm90", "gfx950"])
def test_results_of_the_chips_kernels_are_the_references(kernel, emulate, seed):
    emulate({"sm90": "sm_90a", "gfx950": "gfx950"}[kernel], kernel)
    q, k, v = Inputs([70], [150], 2, 1, 128, seed=seed).tensors()
    report = compare(q, k, v, True, dropout_p=0.2, rng_state=state_of(seed), window_size=(100, 0))
    assert report.ok, f"seed {seed}: {report}"


def beside_the_middle(b, h, q, k):
    return (k < 60) | (k > 200)


@pytest.mark.parametrize("kernel", ["sm90", "gfx950"])
def test_dropout_goes_by_the_key_tiles_that_a_block_mask_lists(kernel, emulate, seed):
    emulate({"sm90": "sm_90a", "gfx950": "gfx950"}[kernel], kernel)
    q, k, v = Inputs([130], [330], 1, 1, 64, seed=seed).tensors()
    options = {"causal": False, "dropout_p": 0.4, "rng_state": state_of(seed)}
    mask = create_block_mask(beside_the_middle, None, None, 130, 330, "cpu", (128, 64))
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=mask, return_lse=True, **options)
    report = check_used(out, feature_reference(q, k, v, mask_mod=beside_the_middle, **options), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_scores_of_a_tile_ahead_have_their_own_mask(emulate, monkeypatch, seed):
    emulate("sm_90a", "generic")
    monkeypatch.setitem(TILES, ("nvvm", 64), {"block_m": 64, "block_n": 32, "waves": 4, "stages": 2, "overlap": True})
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    for keys in (20, 130):
        problem = dense(state_of(seed), queries=(30,), keys=(keys,), kv_heads=1, group=1, causal=True)
        assert not problem.wrong("forward"), f"seed {seed}"


@ARCHS
def test_split_keys_have_the_mask_of_whole_ones(arch, emulate, seed):
    emulate(arch, "generic")
    assert not dense(state_of(seed), splits=3, queries=(9, 9)).wrong("forward"), f"seed {seed}"


def test_packed_sequences_have_the_bits_of_dense_ones(gfx950, seed):
    """One sequence after the other and as a batch."""
    inputs = Inputs([20] * 2, [40] * 2, 2, 1, 32, seed=seed)
    tensors, flat = inputs.tensors(), replace(inputs, packed=True)
    options = {"dropout_p": 0.2, "rng_state": state_of(seed)}
    dense_out = flydsl_flash_attn_func(*tensors, True, **options)
    packed_tensors = [x.flatten(0, 1) for x in tensors]
    packed_out = flydsl_flash_attn_func(*packed_tensors, True, **options, **flat.form(), **lengths(flat))
    assert torch.equal(dense_out.flatten(0, 1), packed_out), f"seed {seed}"


CASES = {
    "causal, heads share keys": (
        {"queries": [40, 40], "keys": [40, 40], "heads": 4, "kv_heads": 2, "head_dim": 64},
        True,
        lambda i: {},
    ),
    "packed, window, softcap, sinks": (
        {"queries": [33, 0, 50], "keys": [40, 3, 50], "head_dim": 72, "packed": True, "dtype": "f16"},
        False,
        lambda i: {"window_size": (30, 4), "softcap": 3.0, "sink": i.floats(2)},
    ),
    "wide heads": ({"queries": [20], "keys": [40], "head_dim": 160}, False, lambda i: {}),
}


@pytest.mark.sample(3)
@ARCHS
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_with_dropout_are_the_references(name, arch, emulate, seed):
    emulate(arch, "generic")
    sizes, causal, options_of = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    q, k, v = inputs.tensors()
    options = {**inputs.form(), **options_of(inputs), "dropout_p": 0.25, "rng_state": state_of(seed)}
    report = compare(q, k, v, causal, **options)
    assert report.ok, f"seed {seed}: {report}"
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    dlse = inputs.floats(*q.shape[:-3], q.shape[-2], q.shape[-3])
    found = by_autograd(q, k, v, causal, dout, dlse, **options, **lengths(inputs))
    assert not gradients(q, k, v, causal, dout, dlse, **options).wrong(found), f"seed {seed}"


@pytest.fixture
def gfx950(emulate):
    emulate("gfx950", "generic")


@pytest.fixture
def small(gfx950, seed):
    return Inputs([20], [20], 2, 2, 32, seed=seed).tensors()


def test_the_log_sum_exp_does_not_change(small):
    plain, dropped = (flydsl_flash_attn_func(*small, return_lse=True, dropout_p=p) for p in (0.0, 0.5))
    assert torch.equal(plain[1], dropped[1]) and not torch.equal(plain[0], dropped[0])


def test_a_seed_repeats_a_call_and_its_gradients(small, seed):
    dout = torch.randn_like(small[0])

    def run(s: int) -> list[torch.Tensor]:
        torch.manual_seed(s)
        leaves = [x.clone().requires_grad_() for x in small]
        results = []
        for _ in range(2):  # two calls draw two masks
            out = flydsl_flash_attn_func(*leaves, dropout_p=0.5)
            results += [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        return results

    first, again, other = run(seed), run(seed), run(seed + 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[4]) and not torch.equal(first[0], other[0])


def test_a_call_without_dropout_draws_nothing(small, seed):
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    state = state_of(seed)
    plain = flydsl_flash_attn_func(*small)
    assert torch.equal(plain, flydsl_flash_attn_func(*small, dropout_p=0.0, rng_state=state))
    flydsl_flash_attn_func(*small, dropout_p=0.5, rng_state=state)
    assert flydsl_flash_attn_workspace(*small, dropout_p=0.5) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoints_recompute_the_same_mask(small, seed):
    dout, found = torch.randn_like(small[0]), []
    for checkpointed in (False, True):
        torch.manual_seed(seed)
        leaves = [x.clone().requires_grad_() for x in small]

        def call(*x: torch.Tensor) -> torch.Tensor:
            return flydsl_flash_attn_func(*x, dropout_p=0.5)

        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False)
        else:
            out = call(*leaves)
        found.append(torch.autograd.grad(out, leaves, dout))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


STATE = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"dropout_p": "x"}, ArgumentTypeError, r"dropout_p must be a Python number, got 'x'"),
        ({"dropout_p": 1.0}, ArgumentError, r"dropout_p must be a probability from 0 up to 1, got 1\.0"),
        ({"dropout_p": -0.1}, ArgumentError, r"dropout_p must be a probability from 0 up to 1, got -0\.1"),
        ({"dropout_p": 0.001}, ArgumentError, r"dropout_p must be 0 or from 1/512 up to 511/512.*, got 0\.001"),
        ({"dropout_p": 0.999}, ArgumentError, r"dropout_p must be 0 or from 1/512 up to 511/512.*, got 0\.999"),
        ({"dropout_p": 0.5, "rng_state": 3}, ArgumentTypeError, r"rng_state must be a torch\.Tensor, got int"),
        ({"rng_state": STATE.int()}, ArgumentError, r"rng_state must hold 2 contiguous int64 .* \(seed, offset\)"),
        ({"dropout_p": 0.5, "rng_state": STATE[:1]}, ArgumentError, r"rng_state must hold 2 contiguous int64"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options, kind, message, small):
    with pytest.raises(kind, match=message):
        flydsl_flash_attn_func(*small, **options)


def test_heads_are_not_packed_where_there_is_dropout():
    options, asked = decode_options(128, 128, False), Features(BY_NAME["dropout"].operands)
    with pytest.raises(ShapeError, match="pack_gqa is 8; expected 1 with dropout, whose masks are by head"):
        replace(options, pack_gqa=8, features=asked)


def test_8_bit_kernels_refuse_dropout_by_name(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    q, k, v = (torch.zeros(1, 20, 2, 128, dtype=torch.float8_e4m3fn) for _ in range(3))
    with pytest.raises(UnsupportedError, match=r"the gfx950_fp8 kernel does not do dropout \(dropout_p\) yet"):
        flydsl_flash_attn_func(q, k, v, dropout_p=0.5)


def test_keys_in_pages_have_the_mask_of_contiguous_ones(gfx950, seed):
    inputs = Inputs([9], [64], 2, 2, 64, seed=seed)
    q, k, v = inputs.tensors()
    options = {"dropout_p": 0.5, "rng_state": state_of(seed)}
    table, used = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    pages = [x.view(4, 16, 2, 64)[[1, 3, 0, 2]].contiguous() for x in (k, v)]
    in_pages = flydsl_flash_attn_func(q, *pages, False, block_table=table, seqused_kv=used, **options)
    assert torch.equal(in_pages, flydsl_flash_attn_func(q, k, v, False, **options))
