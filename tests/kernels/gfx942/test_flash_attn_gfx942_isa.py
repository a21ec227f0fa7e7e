"""The gfx942 kernel's instructions: what a wave executes for a tile, and what its builds need of registers.

Counts of a tile are differences of emulated runs that differ in their number of tiles, so prologue, epilogue, masks
and rescales drop out of them.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from benchmarks import registers
from fly.emulator.banks import BankCounter
from fly.runtime.device import device_for
from kernels.flash_attn_gfx942 import flash_attn_gfx942
from kernels.gfx950.options import WAVES, DualWaveOptions

BLOCK = WAVES * 64


@pytest.fixture
def emulated(monkeypatch):
    """The emulated gfx942, without checks: those are for the tests of results."""
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    return device_for(("cpu", 0))


def run(tiles: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """One block against so many key tiles; equal scores, so that one rescale is all there is."""
    q, out = (torch.zeros(1, 256, 1, head_dim, dtype=dtype) for _ in range(2))
    k = v = torch.zeros(1, 64 * tiles, 1, head_dim, dtype=dtype)
    arguments = (q, k, v, out, torch.empty(1, 1, 256), head_dim**-0.5, None, None, None)
    flash_attn_gfx942[(1, 1, 1), BLOCK](*arguments, options=DualWaveOptions(head_dim, False))


def executed(device, head_dim: int) -> dict[str, float]:
    """Instructions of a wave for one key tile that nothing is masked in, by opcode."""
    few, many, mix = 5, 9, Counter()
    for tiles, sign in ((many, 1), (few, -1)):
        run(tiles, head_dim)
        for opcode, count in device.last.mix.items():
            mix[opcode] += sign * count
    return {opcode: count / ((many - few) * WAVES) for opcode, count in mix.items() if count}


def total(mix: dict[str, float], pattern: str) -> float:
    return sum(count for opcode, count in mix.items() if re.fullmatch(pattern, opcode))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_instructions_of_a_tile(head_dim, emulated):
    """No packed instruction: they wait until no wave's matrix instruction is in flight."""
    mix = executed(emulated, head_dim)
    assert {
        "matrix": total(mix, "v_mfma.*"),
        "exponentials": total(mix, "v_exp_f32"),
        "maxima": total(mix, "v_max3?_f32"),
        "FMAs": total(mix, "v_fma_f32"),
        "additions": total(mix, "v_add_f32"),
        "packed": total(mix, "v_pk_.*"),
        "rounding and turning V": total(mix, "v_perm_b32"),
        "reads": total(mix, "ds_read_b128"),
        "stores": total(mix, "ds_write.*"),
        "copies": total(mix, "buffer_load.*"),
        "barriers": mix["s_barrier"],
        "accumulator moves": total(mix, "v_accvgpr.*"),
        "scratch": total(mix, "(scratch|flat|global)_.*"),
    } == {
        "matrix": head_dim // 2,
        "exponentials": 32,
        "maxima": 16,
        "FMAs": 32,
        "additions": 32,
        "packed": 0,
        "rounding and turning V": 16 + head_dim // 16,
        "reads": head_dim // 4,
        "stores": head_dim // 64 + head_dim // 32,
        "copies": 4 + head_dim // 64,
        "barriers": 4,
        "accumulator moves": 0,
        "scratch": 0,
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bank_conflicts(head_dim, emulated):
    """Reads have none. Stores of V, a fraction of all accesses, take twice their time: two lanes share a bank."""
    emulated.lds_observer = counter = BankCounter("gfx942")
    try:
        run(3, head_dim)
    finally:
        emulated.lds_observer = None
    assert set(counter.accesses) == {"ds_read_b128", "ds_write_b128", "ds_write_b64"}
    tiles, phases = 3, 4
    assert +counter.extra == {"ds_write_b64": tiles * WAVES * (head_dim // 32) * phases}


@pytest.mark.parametrize("form", ["plain", "split", "alibi", "bias of keys", "softcap, window"])
def test_no_spills(form):
    """D=128, two waves a SIMD."""
    for build in registers.count(registers.Case("gfx942", "forward", "gfx942", 128, True, form)):
        assert registers.is_clean(build), registers.line(build)
