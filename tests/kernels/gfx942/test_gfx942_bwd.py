"""The gfx942 backward kernel in the emulator: gradients of calls against autograd through the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fly.emulator.banks import BankCounter
from fly.errors import EmulatorError, UnsupportedError
from fly.runtime.device import device_for
from fly.runtime.launch import Launcher
from kernels import flash_attn_gfx942_bwd as bwd
from kernels import flash_attn_interface
from kernels.call import gradients as calls
from kernels.dispatch import BACKWARD, choose
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx942.backward_builds import BUILDS
from kernels.gfx950.backward import BLOCK_M, WAVES
from kernels.gfx950.dq_sums import round_dq
from kernels.problem.contract import DQ_SUMS
from tests.kernels.backward.builds import bindings_of, compiled
from tests.kernels.backward.fused_calls import AMD_CASES, PARTS_CASES, wrong, wrong_in_parts
from tests.kernels.call.test_dispatch import REQUEST
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def gfx942(emulate, monkeypatch):
    emulate("gfx942", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "gfx942")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", AMD_CASES)
def test_gradients_are_the_references(name, seed):
    sizes, causal, options_of = AMD_CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    assert not wrong(inputs, causal, **options_of(inputs)), f"seed {seed}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", AMD_CASES)
def test_gradients_added_up_in_16_bits_are_the_references(name, seed):
    sizes, causal, options_of = AMD_CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    assert not wrong(inputs, causal, dq_accumulate="16bit", **options_of(inputs)), f"seed {seed}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PARTS_CASES)
def test_gradients_of_heads_in_parts_are_the_references(name, monkeypatch, seed):
    for sums in DQ_SUMS:
        assert not wrong_in_parts(name, monkeypatch, seed, dq_accumulate=sums), f"{sums}, seed {seed}"


KERNELS = (bwd.flash_attn_gfx942_bwd, round_dq)
BUGS = (
    Bug(
        "dS is read before all have written it",
        bwd._Block,
        "take_in",
        "Fence(fly.barrier, early=options.late) => Fence(idle, early=options.late)",
        "two tiles",
        "report",
    ),
    Bug(
        "a tile is read transposed before it is whole",
        bwd._Block,
        "take_in",
        "Fence(fly.barrier, may=across - early) => Fence(idle, may=across - early)",
        "two tiles",
        "report",
    ),
    Bug(
        "the last tile's dQ is added elsewhere",
        bwd._Block,
        "take_in",
        "place.head, end - 1 => place.head, first",
        "two tiles",
        "wrong",
    ),
)


def not_the_last(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Hides the last of 40 keys, and none of those past the end."""
    return key != 39


def of_few_keys(seed: int, last: int = -1, **options: Any) -> bool:
    """Whether gradients are wrong in a block of few keys, whose scores are far below zero (`last` 1: but its)."""
    inputs = Inputs([60], [40], 1, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    q, k = q.abs() * 12, -k.abs() * 12
    k[:, -1] *= -last
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    found = by_autograd(q, k, v, False, dout, None, **options)
    return bool(gradients(q, k, v, False, dout, **options).wrong(found))


CALLS: dict[str, Callable[[int], bool]] = {
    "few keys": of_few_keys,
    "the last key hidden": lambda seed: of_few_keys(seed, 1, mask_mod=not_the_last),
    "two tiles": lambda seed: bool(wrong(Inputs([60], [40], 1, 1, 64, seed=seed), False)),
}


def test_keys_that_there_are_not_add_nothing(seed):
    """Zeros in their place would have infinite weights: the rows' log-sum-exp is far below."""
    assert not of_few_keys(seed), f"seed {seed}"
    assert not CALLS["the last key hidden"](seed), f"seed {seed}"


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


@pytest.mark.parametrize("dim", BUILDS)
def test_no_bank_conflicts_in_the_loop(dim, monkeypatch):
    """A tile of queries more has none, for any LDS access; before the loop a block's keys are read with some."""
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    device, found = device_for(("cpu", 0)), []
    for queries in (40, 70):
        inputs = Inputs([queries], [WAVES * BUILDS[dim].wave_keys], 1, 1, dim)
        leaves = [x.requires_grad_() for x in inputs.tensors()]
        out = flydsl_flash_attn_func(*leaves, False)
        device.lds_observer = counter = BankCounter("gfx942")
        try:
            out.sum().backward()
        finally:
            device.lds_observer = None
        found.append(counter)
    more = found[1].accesses - found[0].accesses
    assert more["ds_read_b128"] and more["ds_write_b16"]
    assert +found[0].extra == +found[1].extra


@pytest.mark.parametrize(("dim", "causal"), [(64, True), (128, False), (128, True)])
def test_registers_hold_everything(dim, causal):
    inputs = Inputs([256], [256], head_dim=dim)
    (binding,) = (
        b for b in bindings_of("gfx942", inputs, causal, module=bwd) if b.kernel.name == "flash_attn_gfx942_bwd"
    )
    artefact = compiled("gfx942", binding)
    found = artefact.resources
    assert found.scratch_bytes == 0
    assert found.spills == 0
    assert found.registers + found.accum_registers <= 512
    assert found.shared_bytes <= 65536
    options = binding.statics["options"]
    # per tile: S, dP, dV, dK of the wave's keys on 32x32x8, and a quarter of dQ on 16x16x16; loops of masked tiles
    # before and behind that of whole ones, and S before them
    wide, narrow = (
        options.wave_keys * BLOCK_M * 4 * dim // (32 * 32 * 8),
        options.block_n * BLOCK_M * dim // WAVES // 16**3,
    )
    assert artefact.isa.count("v_mfma_f32_32x32x8") == 3 * wide + wide // 4
    assert artefact.isa.count("v_mfma_f32_16x16x16") == 3 * narrow


def test_what_is_another_kernels(monkeypatch):
    requests = {
        "adds parts of q's gradient up in an order": replace(REQUEST, deterministic=True),
        "makes no gradients of bias": replace(REQUEST, operand_gradients=True),
        r"takes head_dim 64, 128, not 96": replace(REQUEST, head_dim=96),
        r"does not do block-sparse masks \(block_mask\) yet": replace(REQUEST, features=("block_mask",)),
    }
    for why, request in requests.items():
        with pytest.raises(UnsupportedError, match=f"FLY_BACKWARD_KERNEL=gfx942: the gfx942 kernel {why}"):
            choose("gfx942", request, BACKWARD)
    monkeypatch.delenv("FLY_BACKWARD_KERNEL")
    assert {choose("gfx942", request, BACKWARD).name for request in requests.values()} == {"generic"}
    assert choose("gfx942", replace(REQUEST, head_dim=128), BACKWARD).name == "gfx942"
