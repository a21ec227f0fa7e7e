"""LDS bank conflicts against their definition: in each phase a bank delivers one dword a cycle, to any lanes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from fly.emulator.banks import MODELS

# The first phase, lane by lane, as it was measured; the others are the same lanes moved.
FIRST_PHASE = {
    ("gfx942", 4): range(32),
    ("gfx942", 8): range(16),
    ("gfx942", 12): (0, 1, 2, 3, 20, 21, 22, 23),
    ("gfx942", 16): (0, 1, 2, 3, 20, 21, 22, 23),
    ("gfx950", 4): range(64),
    ("gfx950", 8): range(32),
    ("gfx950", 12): (0, 1, 2, 3, 20, 21, 22, 23),
    ("gfx950", 16): (0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27),
}


def cycles(arch: str, address, size: int, write: bool = False, mask=None) -> int:
    rows = np.asarray(address, np.uint32).reshape(1, 64)
    lanes = None if mask is None else np.asarray(mask, bool).reshape(1, 64)
    return int(MODELS[arch].cycles(rows, size, write=write, active=lanes).sum())


def phase_cycles(arch: str, address, lanes, size: int, banks: int) -> int:
    """By the definition, of one phase."""
    wanted = defaultdict(set)
    for lane in lanes:
        for word in range(size // 4):
            dword = int(address[lane]) // 4 + word
            wanted[dword % banks].add(dword)
    return max(map(len, wanted.values()))


@pytest.mark.parametrize("arch, size", FIRST_PHASE)
def test_lanes_of_the_first_phase(arch, size):
    """Two lanes that want different banks are served in one cycle when they are in one phase, else in two."""
    phase = set(FIRST_PHASE[arch, size])
    for lane in range(1, 64):
        address = np.where(np.arange(64) == lane, 64, 0)
        taken = cycles(arch, address, size, mask=[i in (0, lane) for i in range(64)])
        assert taken == (1 if lane in phase else 2), lane
    assert cycles(arch, np.zeros(64), size) == 64 // len(phase)  # all read the same


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_random_reads(arch, size):
    rng = np.random.default_rng(7)
    first, banks = list(FIRST_PHASE[arch, size]), {"gfx942": 32, "gfx950": 64}[arch]
    for _ in range(20):
        address = rng.integers(0, 256, 64) * size
        mask = [lane in first for lane in range(64)]
        assert cycles(arch, address, size, mask=mask) == phase_cycles(arch, address, first, size, banks)


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("size, phases", [(4, 2), (8, 4), (16, 8)])
def test_writes_go_in_runs_of_lanes_over_32_banks(arch, size, phases):
    lanes = np.arange(64)
    assert cycles(arch, lanes * size, size, write=True) == phases
    assert cycles(arch, lanes * 128, size, write=True) == 64


@pytest.mark.parametrize(
    "arch, size, stride, expected",
    [
        ("gfx942", 4, 4, 2),
        ("gfx942", 4, 32, 16),
        ("gfx942", 4, 128, 64),
        ("gfx942", 16, 16, 8),
        ("gfx942", 16, 256, 64),
        ("gfx950", 16, 16, 4),
        ("gfx950", 16, 256, 64),
        ("gfx950", 16, 1040, 4),  # rows of 512 16-bit elements, padded by 16 bytes
        ("gfx950", 8, 8, 2),
    ],
)
def test_strides(arch, size, stride, expected):
    assert cycles(arch, np.arange(64) * stride, size) == expected


def test_inactive_lanes_cost_nothing():
    assert cycles("gfx950", np.arange(64) * 256, 16, mask=[lane < 4 for lane in range(64)]) == 4
    assert cycles("gfx950", np.arange(64) * 256, 16, mask=[False] * 64) == 0


def test_bytes_and_shorts_share_a_dword():
    assert cycles("gfx950", np.arange(64), 1) == 1
    assert cycles("gfx942", np.arange(64) * 2, 2) == 2


def test_what_straddles_a_dword_takes_both():
    alone = [lane == 0 for lane in range(64)]
    for offset, words in ((0, 1), (1, 2), (3, 2)):
        # the other lane wants the next dword's bank, one row of banks further
        address = np.where(np.arange(64) == 1, 33 * 4, offset)
        assert cycles("gfx942", address, 4, mask=[lane < 2 for lane in range(64)]) == words
        assert cycles("gfx942", address, 4, mask=alone) == 1


def test_waves_are_counted_one_by_one():
    address = np.arange(64) * np.array([[4], [128]])
    assert MODELS["gfx942"].cycles(address, 4).tolist() == [[1, 1], [32, 32]]
    active = np.arange(64) < np.array([[40], [8]])
    assert MODELS["gfx942"].cycles(address, 4, active=active).tolist() == [[1, 1], [8, 0]]
