"""The gfx950 backward kernel in the emulator: gradients of calls against autograd through the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fly.emulator.banks import BankCounter
from fly.errors import EmulatorError, ShapeError, UnsupportedError
from fly.runtime.device import device_for
from fly.runtime.launch import Launcher
from kernels import flash_attn_gfx950_bwd as bwd
from kernels import flash_attn_interface
from kernels.call import gradients as calls
from kernels.dispatch import BACKWARD, choose
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950 import backward_launch
from kernels.gfx950.backward import BLOCK_M, BUILDS, WAVES, Gfx950BackwardOptions
from kernels.gfx950.dq_sums import round_dq
from kernels.gfx950.group_parts import add_parts, parts_of_group
from kernels.problem.contract import DQ_SUMS
from kernels.problem.mask import QueryRange
from tests.kernels.backward.builds import bindings_of, compiled
from tests.kernels.backward.fused_calls import AMD_CASES, PARTS_CASES, halved, wrong, wrong_in_parts
from tests.kernels.backward.test_dropout_kernels import state_of
from tests.kernels.call.test_dispatch import REQUEST
from tests.kernels.feature_cases import Inputs, stripes
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def gfx950(emulate, monkeypatch):
    emulate("gfx950", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "gfx950")


CASES = {
    **AMD_CASES,
    "values of other dimensions": (
        {"queries": [70], "keys": [140], "head_dim": 192, "head_dim_v": 128},
        True,
        lambda i: {},
    ),
    "the same of all keys": (
        {"queries": [70], "keys": [140], "head_dim": 192, "head_dim_v": 128},
        False,
        lambda i: {},
    ),
    "the same packed, dropout": (
        {"queries": [70, 40], "keys": [140, 30], "packed": True, "head_dim": 192, "head_dim_v": 128},
        False,
        lambda i: {"dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "two functions": (
        {"queries": [70], "keys": [140], "head_dim": 64},
        False,
        lambda i: {"score_mod": halved, "mask_mod": stripes},
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_references(name, seed):
    sizes, causal, options_of = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    assert not wrong(inputs, causal, **options_of(inputs)), f"seed {seed}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_added_up_in_16_bits_are_the_references(name, seed):
    sizes, causal, options_of = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    assert not wrong(inputs, causal, dq_accumulate="16bit", **options_of(inputs)), f"seed {seed}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PARTS_CASES)
def test_gradients_of_heads_in_parts_are_the_references(name, monkeypatch, seed):
    for sums in DQ_SUMS:
        assert not wrong_in_parts(name, monkeypatch, seed, dq_accumulate=sums), f"{sums}, seed {seed}"


@pytest.mark.parametrize(
    ("blocks", "group", "tiles", "causal", "parts"),
    [
        (256, 8, 256, False, 1),  # each compute unit has a block
        (256, 8, 256, True, 2),
        (64, 8, 256, False, 4),
        (2048, 1, 256, True, 1),
        (4096, 4, 128, True, 1),  # enough of them to even out
        (8, 8, 256, False, 8),
        (8, 2, 3, False, 1),  # too little to be worth adding up
    ],
)
def test_parts_of_a_group(blocks, group, tiles, causal, parts):
    assert parts_of_group(blocks, group, tiles, 256, causal=causal) == parts


KERNELS = (bwd.flash_attn_gfx950_bwd, round_dq, add_parts)
BUGS = (
    Bug(
        "dS is read before all have written it",
        bwd._Block,
        "take_in",
        "fly.wait(now.flight)\n            fly.barrier() => fly.wait(now.flight)",
        "two tiles",
        "report",
    ),
    Bug(
        "the last tile's dQ is added elsewhere",
        bwd._Block,
        "take_in",
        "first + pairs * 2 - 1 => first",
        "two tiles",
        "wrong",
    ),
    Bug(
        "keys past the end have weights",
        QueryRange,
        "apply",
        '< count, x, float("-inf") => < count, x, x',
        "few keys",
        "wrong",
    ),
)


def of_few_keys(seed: int) -> bool:
    """Whether gradients are wrong where a block has fewer keys, whose scores are far below zero."""
    inputs = Inputs([60], [40], 1, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    q, k = q.abs() * 12, -k.abs() * 12
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    found = by_autograd(q, k, v, False, dout, None)
    return bool(gradients(q, k, v, False, dout).wrong(found))


CALLS: dict[str, Callable[[int], bool]] = {
    "few keys": of_few_keys,
    "two tiles": lambda seed: bool(wrong(Inputs([60], [40], 1, 1, 64, seed=seed), False)),
}


def test_keys_that_there_are_not_add_nothing(seed):
    """Their scores are zero, and the rows' log-sum-exp is far below: their weights would be infinite."""
    assert not of_few_keys(seed), f"seed {seed}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_show(bug, monkeypatch, seed):
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(calls, "_kinds", {})
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "launcher", Launcher(kernel), raising=False)
    bug.plant(monkeypatch)
    try:
        shown = "wrong" if CALLS[bug.case](seed) else "nothing"
    except EmulatorError:
        shown = "report"
    assert shown == bug.found, f"{bug}: {shown}, seed {seed}"


@pytest.mark.parametrize("dims", BUILDS, ids=str)
def test_no_bank_conflicts(dims, monkeypatch):
    """Every LDS access of a launch."""
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    inputs = Inputs([70], [WAVES * BUILDS[dims].wave_keys], 1, 1, dims[0], head_dim_v=dims[1])
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    out = flydsl_flash_attn_func(*leaves, False)
    device = device_for(("cpu", 0))
    device.lds_observer = counter = BankCounter("gfx950")
    try:
        out.sum().backward()
    finally:
        device.lds_observer = None
    assert {"ds_read_b128", "ds_read_b64_tr_b16"} < set(counter.accesses)
    assert +counter.extra == {}, counter.accesses


@pytest.mark.parametrize(
    ("dims", "causal", "parts"),
    [
        ((64, 64), True, 1),
        ((64, 64), True, 2),
        ((128, 128), False, 1),
        ((128, 128), False, 2),
        ((128, 128), True, 1),
        ((128, 128), True, 2),
        ((192, 128), False, 1),
        ((192, 128), False, 2),
    ],
    ids=str,
)
def test_registers_hold_everything(dims, causal, parts, monkeypatch):
    monkeypatch.setattr(backward_launch, "parts_of_group", lambda *args, **named: parts)
    inputs = Inputs([256], [256], 2, 1, dims[0], head_dim_v=dims[1])
    (binding,) = (
        b for b in bindings_of("gfx950", inputs, causal, module=bwd) if b.kernel.name == "flash_attn_gfx950_bwd"
    )
    artefact = compiled("gfx950", binding)
    found = artefact.resources
    assert (found.spills, found.scratch_bytes) == (0, 0)
    assert found.registers + found.accum_registers <= 512
    options = binding.statics["options"]
    dim, dim_v, keys = *dims, options.wave_keys
    # per tile: S, dP, dV, dK of the wave's keys on 32x32x16, and a quarter of dQ on 16x16x32; two tiles a turn of the
    # loop, and S before it
    wide = keys * BLOCK_M * (2 * dim + 2 * dim_v) // (32 * 32 * 16)
    narrow = options.block_n * BLOCK_M * dim // WAVES // (16 * 16 * 32)
    before = keys * BLOCK_M * dim // (32 * 32 * 16)
    assert artefact.isa.count("v_mfma_f32_32x32x16") == 2 * wide + before
    assert artefact.isa.count("v_mfma_f32_16x16x32") == 2 * narrow


def test_what_is_another_kernels(monkeypatch):
    requests = {
        "adds parts of q's gradient up in an order": replace(REQUEST, deterministic=True),
        "makes no gradients of bias": replace(REQUEST, operand_gradients=True),
        r"takes head_dim 64, 128, 192, not 96": replace(REQUEST, head_dim=96),
        r"takes \(head_dim, head_dim_v\) \(64, 64\), \(128, 128\), \(192, 128\), not \(128, 64\)": replace(
            REQUEST, head_dim=128, head_dim_v=64
        ),
        r"does not do block-sparse masks \(block_mask\) yet": replace(REQUEST, features=("block_mask",)),
    }
    for why, request in requests.items():
        with pytest.raises(UnsupportedError, match=f"FLY_BACKWARD_KERNEL=gfx950: the gfx950 kernel {why}"):
            choose("gfx950", request, BACKWARD)
    monkeypatch.delenv("FLY_BACKWARD_KERNEL")
    assert {choose("gfx950", request, BACKWARD).name for request in requests.values()} == {"generic"}
    assert choose("gfx950", replace(REQUEST, head_dim=128), BACKWARD).name == "gfx950"


@pytest.mark.parametrize(
    ("dims", "keys", "message"),
    [((96, 64), 64, r"is \(96, 64\); expected multiples of 64"), ((64, 64), 48, "wave_keys is 48; expected")],
)
def test_builds_that_there_are_not(dims, keys, message):
    with pytest.raises(ShapeError, match=message):
        Gfx950BackwardOptions(*dims, False, keys, 32)
