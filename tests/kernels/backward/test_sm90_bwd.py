"""The Hopper backward kernel in the simulator: gradients of calls against autograd through the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from fly.errors import ShapeError, UnsupportedError
from kernels.call.gradients import backward
from kernels.dispatch import BACKWARD, as_backward, choose
from kernels.flash_attn_interface import OPTION_DEFAULTS, checked, flydsl_flash_attn_func
from kernels.problem.block_mask import create_block_mask
from kernels.problem.mask import KeyRange, QueryRange
from kernels.sm90.backward import BLOCK_M, BLOCK_N, Sm90BackwardOptions
from kernels.work import gradient_steps
from tests.kernels.backward.fused_calls import Options, wrong
from tests.kernels.backward.test_block_mask_gradients import uneven
from tests.kernels.backward.test_block_mask_gradients import wrong as wrong_with_mask
from tests.kernels.backward.test_dropout_kernels import state_of
from tests.kernels.call.test_dispatch import REQUEST
from tests.kernels.dropout_masks import dense, packed
from tests.kernels.feature_cases import FEATURES, Inputs, stripes
from tests.kernels.gradient_reference import by_autograd, gradients


@pytest.fixture(autouse=True)
def sm90(emulate, monkeypatch):
    emulate("sm_90a", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")


CASES: dict[str, tuple[dict[str, Any], bool, Options]] = {
    "several tiles, different lengths": ({"queries": [140], "keys": [150], "head_dim": 128}, False, lambda i: {}),
    "causal, rows without keys": ({"queries": [150], "keys": [70], "head_dim": 64}, True, lambda i: {}),
    "heads share keys, softcap": (
        {"queries": [150], "keys": [150], "heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": "f16"},
        True,
        lambda i: {"softcap": 3.0},
    ),
    "packed, empty sequences": (
        {"queries": [0, 133, 1, 60], "keys": [20, 133, 0, 90], "packed": True, "head_dim": 64, "dtype": "f16"},
        True,
        lambda i: {},
    ),
    "lengths in use": (
        {"queries": [140] * 3, "keys": [180] * 3, "head_dim": 128},
        False,
        lambda i: {
            "seqused_q": torch.tensor([140, 7, 70], dtype=torch.int32),
            "seqused_kv": torch.tensor([0, 135, 20], dtype=torch.int32),
        },
    ),
    "windows and slopes": (
        {"queries": [150], "keys": [170], "heads": 2, "kv_heads": 2, "head_dim": 64},
        False,
        lambda i: {"window_size": (60, 5), "alibi_slopes": i.floats(2).abs()},
    ),
    "sinks": ({"queries": [150], "keys": [60], "head_dim": 128}, False, lambda i: {"sink": i.floats(2)}),
    "a mask's function": ({"queries": [150], "keys": [160], "head_dim": 64}, False, lambda i: {"mask_mod": stripes}),
    "a bias of keys, functions": (
        {"queries": [100], "keys": [140], "head_dim": 128},
        True,
        lambda i: {**FEATURES["bias of keys"](i), **FEATURES["score_mod aux"](i)},
    ),
    "dropout": (
        {"queries": [140], "keys": [150], "head_dim": 128},
        True,
        lambda i: {"dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "a bias of every score": (
        {"queries": [100], "keys": [140], "head_dim": 64},
        False,
        lambda i: {"bias": i.floats(1, 2, 100, 140)},
    ),
    "many tiles, heads share keys": (
        {"queries": [390], "keys": [150], "heads": 2, "kv_heads": 1, "head_dim": 64},
        True,
        lambda i: {},
    ),
    "one query": ({"queries": [1], "keys": [290], "head_dim": 64}, False, lambda i: {}),
    "chunks": ({"queries": [100], "keys": [140], "head_dim": 128}, True, lambda i: {"attention_chunk": 60}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "case",
    [(kernel, name, flag) for kernel in ("sm90", "sm90_wide") for flag in (False, True) for name in CASES],
    ids=str,
)
def test_gradients_are_the_references(case, monkeypatch, seed):
    kernel, name, deterministic = case
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", kernel)
    sizes, causal, options_of = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    assert not wrong(inputs, causal, deterministic, **options_of(inputs)), f"seed {seed}"


@pytest.mark.parametrize(("window", "causal"), [((-1, -1), True), ((150, 40), False)], ids=["causal", "window"])
def test_gradients_in_turn_are_the_same_bits_in_every_schedule(window, causal, monkeypatch, seed):
    inputs = Inputs([100], [290], 2, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)

    def step(schedule: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setenv("FLY_SIMULATOR_SEED", str(schedule))
        return by_autograd(q, k, v, causal, dout, None, deterministic=True, window_size=window)

    first = step(0)
    assert not gradients(q, k, v, causal, dout, window_size=window).wrong(first), f"seed {seed}"
    schedule = 2 + seed % 1000
    assert all(torch.equal(a, b) for a, b in zip(first, step(schedule), strict=True)), f"{seed}, {schedule}"


LISTS: dict[str, tuple[dict[str, Any], bool, int | tuple[int, int]]] = {
    "several tiles": ({"queries": [150], "keys": [300], "head_dim": 64}, False, 128),
    "causal, one tile": ({"queries": [250], "keys": [250], "head_dim": 128}, True, (64, 128)),
    "heads share keys, blocks that no tile divides": (
        {"queries": [90], "keys": [200], "heads": 2, "kv_heads": 1, "head_dim": 64},
        False,
        (50, 40),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LISTS)
def test_gradients_with_a_block_mask_are_the_references(name, seed):
    sizes, causal, block = LISTS[name]
    inputs = Inputs(**sizes, seed=seed)
    mask = create_block_mask(uneven, None, 2, inputs.queries[0], inputs.keys[0], "cpu", block)
    assert not wrong_with_mask(inputs, causal, mask), f"seed {seed}"


@pytest.mark.parametrize("case", ["gradients of a bias", "a deterministic block mask", "small blocks of keys"])
def test_what_only_the_generic_kernel_does(case, monkeypatch, seed):
    inputs = Inputs([40], [70], 2, 2, 64, seed=seed)
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    mask = create_block_mask(uneven, None, None, 40, 70, "cpu", 64)
    options, message = {
        "gradients of a bias": ({"bias": inputs.floats(1, 2, 40, 70).requires_grad_()}, "makes no gradients of bias"),
        "a deterministic block mask": (
            {"block_mask": create_block_mask(uneven, None, None, 40, 70, "cpu"), "deterministic": True},
            "where there is a block_mask: call without deterministic",
        ),
        "small blocks of keys": ({"block_mask": mask}, r"BLOCK_SIZE is a multiple of \(64, 128\), not \(64, 64\)"),
    }[case]

    def step() -> None:
        flydsl_flash_attn_func(*leaves, False, **options).sum().backward()

    with pytest.raises(UnsupportedError, match=message):
        step()
    if case == "gradients of a bias":  # what is refused with the call is not even asked of a kernel
        monkeypatch.delenv("FLY_BACKWARD_KERNEL")
        step()
        assert options["bias"].grad.any()


@pytest.mark.parametrize(
    ("kernel", "dims", "packed"),
    [
        ("sm90", (8, 8), False),
        ("sm90", (24, 128), True),
        ("sm90", (72, 96), False),
        ("sm90", (104, 56), True),
        ("sm90_wide", (256, 256), False),
        ("sm90_wide", (192, 128), True),
        ("sm90_wide", (136, 200), False),
        ("sm90_wide", (256, 160), True),
        ("sm90_wide", (208, 40), False),
    ],
)
def test_head_dimensions_are_filled_up(kernel, dims, packed, monkeypatch, seed):
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", kernel)
    queries, keys = ([0, 70, 1], [20, 66, 5]) if packed else ([70], [66])
    inputs = Inputs(queries, keys, 2, 1, dims[0], "f16" if packed else "bf16", packed, dims[1], seed)
    assert not wrong(inputs, True), f"seed {seed}"


def test_the_widest_heads_have_the_same_bits_in_every_schedule(monkeypatch, seed):
    """Tiles of dO come in chunks there; narrower heads in clusters are among the cases above."""
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90_wide")
    inputs = Inputs([70], [130], 1, 1, 256, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    first = by_autograd(q, k, v, True, dout, None, deterministic=True)
    assert not gradients(q, k, v, True, dout).wrong(first), f"seed {seed}"
    monkeypatch.setenv("FLY_SIMULATOR_SEED", str(2 + seed % 1000))
    again = by_autograd(q, k, v, True, dout, None, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"seed {seed}"


def test_neighbours_of_a_packed_sequence_may_be_nan(seed):
    inputs = Inputs([50, 70, 30], [60, 70, 45], 2, 1, 64, packed=True, seed=seed)
    q, k, v = inputs.tensors()
    form = {**inputs.form(), "max_seqlen_q": 70, "max_seqlen_kv": 70}
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    expected = by_autograd(q, k, v, False, dout, None, **form)
    for x, (start, end) in ((q, (50, 120)), (k, (60, 130)), (v, (60, 130)), (dout, (50, 120))):
        x.detach()[start:end] = torch.nan
    found = by_autograd(q, k, v, False, dout, None, **form)
    for mine, theirs, (start, end) in zip(found, expected, ((50, 120), (60, 130), (60, 130)), strict=True):
        assert torch.equal(mine[:start], theirs[:start]) and torch.equal(mine[end:], theirs[end:])


@pytest.mark.sample(1)
@pytest.mark.parametrize("which", ["dv", "dk", "dq"])
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_masks_of_dropout_are_the_mask(form, which, seed):
    if form == "dense":
        problem = dense(state_of(seed), queries=(70,), keys=(200,), kv_heads=1, causal=True)
    else:
        problem = packed(state_of(seed), queries=(21, 0, 70, 5), keys=(40, 3, 150, 0))
    assert not problem.wrong(which), f"seed {seed}"


def test_blocks_have_the_shared_memory_that_there_is():
    with pytest.raises(ShapeError, match="a block of 295936 bytes of shared memory; expected 232448 at most"):
        Sm90BackwardOptions(256, 256, False)


def test_ends_of_what_blocks_of_keys_see_do_not_come_down(seed):
    """So that it is enough to know the blocks next to one: see `turns.Neighbours`."""
    random = Random(seed)
    for _ in range(300):
        queries, keys = random.randint(0, 900), random.randint(1, 900)
        causal, left, right, chunk = random.choices((0, 1), k=4)
        seen = KeyRange(
            queries,
            keys,
            bool(causal),
            left=random.randint(0, 400) if left else None,
            right=random.randint(0, 400) if right and not causal else None,
            chunk=random.randint(1, 400) if chunk else None,
        )
        for open_end in (False, True):
            blocks = range(0, keys, BLOCK_N)
            tiles = [QueryRange.of(seen, open_end=open_end).tiles(first, BLOCK_N, BLOCK_M) for first in blocks]
            for before, after in pairwise(tiles):
                assert before.first <= after.first and before.end <= after.end, f"seed {seed}: {seen}"


@pytest.mark.parametrize("asked", ["deterministic", "torch.use_deterministic_algorithms", "neither"])
def test_who_asks_for_the_same_bits_gets_sums_in_turn(asked, monkeypatch, seed):
    inputs = Inputs([40], [40], 2, 2, 64, seed=seed)
    builds: list[bool] = []
    bound = gradient_steps.bind_kernel

    def bind(*arguments: Any, **named: Any) -> Any:
        builds.extend(x["options"].ordered for x in arguments if isinstance(x, dict) and "options" in x)
        return bound(*arguments, **named)

    monkeypatch.setattr(gradient_steps, "bind_kernel", bind)
    out = flydsl_flash_attn_func(
        *(x.requires_grad_() for x in inputs.tensors()), deterministic=asked == "deterministic"
    )
    flag = asked == "torch.use_deterministic_algorithms"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: flag)
    out.sum().backward()
    assert builds and set(builds) == {asked != "neither"}


def test_delta_is_written_for_the_caller(seed):
    inputs = Inputs([43], [40], 2, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    out, lse = flydsl_flash_attn_func(q, k, v, True, return_lse=True)
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    delta = torch.empty_like(lse)
    options = {**OPTION_DEFAULTS}
    found = backward((q, k, v), out, lse, dout, None, True, options, [torch.empty_like(x) for x in (q, k, v)], delta)
    torch.testing.assert_close(delta, (out.float() * dout.float()).sum(-1).mT, rtol=1e-4, atol=1e-4)
    assert not gradients(q, k, v, True, dout).wrong(found), f"seed {seed}"


def test_sinks_have_their_gradient(monkeypatch, seed):
    inputs = Inputs([50], [60], 2, 1, 64, seed=seed)
    leaves = [x.requires_grad_() for x in (*inputs.tensors(), inputs.floats(2))]
    dout = inputs.floats(*leaves[0].shape, dtype=leaves[0].dtype)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flydsl_flash_attn_func(*leaves[:3], False, sink=leaves[3]), leaves, dout)

    found = step()
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "generic")
    torch.testing.assert_close(found[3], step()[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dims", [(136, 136), (64, 136), (136, 64)])
def test_wide_heads_are_another_kernels(dims, monkeypatch):
    request = replace(REQUEST, head_dim=dims[0], head_dim_v=dims[1])
    with pytest.raises(UnsupportedError, match=r"8 to 128 in steps of 8, not (136|\(64, 136\))"):
        choose("sm_90a", request, BACKWARD)
    monkeypatch.delenv("FLY_BACKWARD_KERNEL")
    assert choose("sm_90a", request, BACKWARD).name == "sm90_wide"


@pytest.mark.parametrize(
    ("shape", "dims", "deterministic", "chosen"),
    [
        ((1, 2, 70, 66), (128, 128), False, "sm90_wide"),
        ((70, 66), (104, 120), False, "sm90_wide"),
        ((1, 66), (128, 128), False, "sm90"),
        ((66,), (128, 128), False, "sm90"),
        ((70, 66), (96, 128), False, "sm90"),
        ((70, 66), (128, 96), False, "sm90"),
        ((70, 66), (128, 128), True, "sm90"),
    ],
)
def test_a_bias_of_every_score_is_left_to_the_wide_form(shape, dims, deterministic, chosen, monkeypatch, seed):
    inputs = Inputs([70], [66], 2, 1, dims[0], head_dim_v=dims[1], seed=seed)
    bias = inputs.floats(*shape, dtype=torch.bfloat16)
    request = checked(*inputs.tensors(), False, bias=bias, deterministic=deterministic).request
    assert choose("sm_90a", as_backward(request), BACKWARD).name == "sm90"  # it is forced
    monkeypatch.delenv("FLY_BACKWARD_KERNEL")
    assert choose("sm_90a", as_backward(request), BACKWARD).name == chosen
    if chosen == "sm90_wide":
        assert not wrong(inputs, False, bias=bias), f"seed {seed}"
