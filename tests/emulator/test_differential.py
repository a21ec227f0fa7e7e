"""The same random IR on x86 and on the emulated GPU must agree bit for bit."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from fly.emulator import Program, Region
from tests.emulator.host import HostModule
from tests.emulator.random_ir import INPUTS, OUTPUTS, module
from tests.emulator.toolchain import build

PER_MODULE = 50
MODULES = 20  # an architecture: 2 x 20 x 50 = 2000 programs
ITEMS = 128


def inputs(rng: np.random.Generator, items: int) -> np.ndarray:
    """64-bit words: random bits, small integers, and floats of every width with special values."""
    words = rng.integers(0, 2**64, (items, INPUTS), dtype=np.uint64)
    kind = rng.integers(0, 5, words.shape)
    small = rng.integers(-40, 40, words.shape).astype(np.int64).view(np.uint64)
    single = (rng.standard_normal((items, INPUTS, 2)) * 8).astype(np.float32).view(np.uint64)[..., 0]
    double = (rng.standard_normal(words.shape) * 8).view(np.uint64)
    half = (rng.standard_normal((items, INPUTS, 4)) * 8).astype(np.float16).view(np.uint64)[..., 0]
    words = np.select([kind == 1, kind == 2, kind == 3, kind == 4], [small, single, double, half], words)
    special = np.array([0, 1 << 63, 0x7FF0000000000000, 0x7FF8000000000000, 0x7F800000FF800000, 0x7C00FC0080000001,
                        0x0000000180000000, 0x00000001007FFFFF], np.uint64)  # fmt: skip
    return np.where(rng.random(words.shape) < 0.15, rng.choice(special, words.shape), words)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("index", range(MODULES))
def test_random_programs_agree_with_the_host(arch: str, index: int) -> None:
    base = int(os.environ.get("FLY_TEST_SEED", "0"))
    first = base + index * PER_MODULE + (0 if arch == "gfx942" else 1_000_000)
    seeds = list(range(first, first + PER_MODULE))
    rng = np.random.default_rng(first)
    host = HostModule(module(seeds, "host"))
    program = Program(build(module(seeds, "amdgpu"), arch), arch)
    wrong = []
    for seed in seeds:
        source = inputs(rng, ITEMS)
        expected, got = (np.zeros((ITEMS, OUTPUTS), np.uint64) for _ in range(2))
        host.call(f"k{seed}", source, expected, ITEMS)
        regions = [Region(x.ctypes.data, x.nbytes, n) for x, n in ((source, "in"), (got, "out"))]
        packed = struct.pack("<QQ", source.ctypes.data, got.ctypes.data)
        program.launch(f"k{seed}", (ITEMS // 64,), (64,), packed, regions)
        if not np.array_equal(expected, got):
            item = int(np.flatnonzero((expected != got).any(1))[0])
            wrong.append((seed, item, [hex(x) for x in source[item]], [hex(x) for x in expected[item]],
                          [hex(x) for x in got[item]]))  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(seeds)} programs differ on {arch}; first: {wrong[0]}"
