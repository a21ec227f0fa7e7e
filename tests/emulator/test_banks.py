"""The count of bank conflicts: known patterns, phases, lanes that are off, and what an observed launch gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

import fly
from fly.emulator.banks import GFX942, GFX950, MODELS, BankCounter, BankModel
from fly.errors import EmulatorError
from fly.runtime.device import device_for

every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
kinds = pytest.mark.parametrize(("size", "write"), [(s, w) for s in (2, 4, 8, 12, 16) for w in (False, True)])


@every_model
@kinds
def test_phases_part_the_lanes(model, size, write):
    phases = model.phases(size, write)
    assert sorted(lane for phase in phases for lane in phase) == list(range(64))
    # no phase could ask for more than all banks give
    assert max(map(len, phases)) * size <= max(model.banks(write) * 4, 64 * size // len(phases))


@every_model
@kinds
def test_neighbours_are_free_of_conflicts(model, size, write):
    if size != 12:  # whose phases do not fill the banks
        assert model.extra_cycles([lane * size for lane in range(64)], size, write=write) == 0


@every_model
def test_one_word_for_all_is_free_and_one_bank_for_all_is_worst(model):
    assert model.extra_cycles([64] * 64, 4) == 0
    lanes = len(model.phases(4, False)[0])
    stride = model.read_banks * 4
    assert model.extra_cycles([lane * stride for lane in range(64)], 4) == 64 // lanes * (lanes - 1)
    alone = [lane == 5 for lane in range(64)]
    assert model.extra_cycles([lane * stride for lane in range(64)], 4, active=alone) == 0


@pytest.mark.parametrize(("model", "partner"), [(GFX942, 20), (GFX942, 4), (GFX950, 12), (GFX950, 4)])
def test_lanes_conflict_in_their_phase_alone(model, partner):
    """Lane 0 and another want different words of a bank, and nobody else anything."""
    address = [0] * 64
    address[partner] = model.read_banks * 4
    active = [lane in (0, partner) for lane in range(64)]
    together = any(0 in phase and partner in phase for phase in model.phases(16, False))
    assert model.extra_cycles(address, 16, active=active) == together
    assert together == (partner != 4)


def test_agrees_with_a_count_by_bank():
    generator = random.Random(7)
    model = BankModel("some", 32, 32)
    for _ in range(50):
        addresses = [generator.randrange(256) * 4 for _ in range(64)]
        wanted = 0
        for first in (0, 32):
            words = {a // 4 for a in addresses[first : first + 32]}
            wanted += max(sum(word % 32 == bank for word in words) for bank in range(32)) - 1
        assert model.extra_cycles(addresses, 4) == wanted


def test_unknown_model():
    with pytest.raises(EmulatorError, match="no model of banks is named 'gfx90a'; expected one of gfx942, gfx950"):
        BankCounter("gfx90a")


@fly.kernel
def strided(out: fly.Tensor, *, stride: int):
    """Every lane stores its number `stride` words from its neighbour's, and reads it back."""
    shared = fly.SharedMemory("words", fly.i32, 64 * stride)
    lane = fly.lane_id()
    shared.store(lane, lane * stride)
    fly.barrier()
    out.store(shared.load((63 - lane) * stride), lane)


@pytest.mark.parametrize("stride", [1, 2, 32])
def test_observed_launches(stride, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    device = device_for(("cpu", 0))
    device.lds_observer = counter = BankCounter("gfx942")
    try:
        out = np.zeros(64, np.int32)
        strided[1, 64](out, stride=stride)
    finally:
        device.lds_observer = None
    assert out.tolist() == list(range(63, -1, -1))
    assert counter.accesses == {"ds_write_b32": 1, "ds_read_b32": 1}
    extra = 2 * (min(stride, 32) - 1)  # two phases of 32 lanes
    assert +counter.extra == ({"ds_write_b32": extra, "ds_read_b32": extra} if extra else {})
