"""The gfx950 kernel run in numpy against exact attention, with copies that land early and late.

Waves go in lock-step, so what staggers them is not tested here; what every lane reads, computes and writes is.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from fly.backends.target import target
from kernels.flash_attn_gfx950 import BLOCK_M, WAVES, DualWaveOptions, flash_attn_gfx950
from tests.kernels.test_generic_simulated import DTYPES, exact
from tests.simulator import Machine, Program, flat
from tests.tracing import matrix, trace


@functools.cache
def program(dtype: str, options: DualWaveOptions) -> Program:
    tensor, gfx950 = matrix(dtype, 4), target("gfx950")
    specs = (tensor, tensor, tensor, tensor, matrix("f32", 3), "f32", None, None, None)
    block = WAVES * gfx950.wave_size
    return Program(trace(flash_attn_gfx950, *specs, arch=gfx950.arch, block=block, options=options), gfx950)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(300, 333), (100, 70), (70, 200)])
@pytest.mark.parametrize(
    ("head_dim", "causal", "dtype"), [(64, True, "f16"), (128, True, "bf16"), (128, False, "f16")]
)
def test_any_lengths(head_dim, causal, dtype, queries, keys, late):
    random = np.random.default_rng(queries)
    q, k, v = (random.standard_normal((1, n, 1, head_dim)).astype(DTYPES[dtype]) for n in (queries, keys, keys))
    out, lse = np.full_like(q, np.nan), np.full((1, 1, queries), np.nan, np.float32)
    scale = 1 / math.sqrt(head_dim)
    run = Machine(program(dtype, DualWaveOptions(head_dim, causal)), late)
    run(flat(q, k, v, out, lse, scale * math.log2(math.e)), (-(-queries // BLOCK_M), 1, 1))
    wanted, wanted_lse = exact(q, k, v, scale, causal)
    assert np.abs(out.astype(np.float64) - wanted).max() <= {"bf16": 2e-2, "f16": 3e-3}[dtype]
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)
