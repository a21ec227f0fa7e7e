"""The matrix product as it is traced for every target, run in numpy: for NVIDIA too, and without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fly.backends.target import target
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8, 64), (70, 136, 320), (129, 40, 192)], ids=str)
def test_every_target_gives_the_product(arch, dtype, shape, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    example = importlib.import_module("03_matmul")
    m, n, k = shape
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal((rows, k)).astype(DTYPES[dtype]) for rows in (m, n))
    c = np.full((m, n), np.nan, DTYPES[dtype])
    tiling = example.Tiling()
    traced = trace(example.matmul, *[matrix(dtype, 2)] * 3, arch=arch, block=example.THREADS, tiling=tiling)
    # copies land as late as the waits allow
    Machine(Program.of(traced, target(arch)), True)(flat(a, b, c), (-(-n // tiling.n), -(-m // tiling.m), 1))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c.astype(np.float64), exact, rtol=2**-8, atol=1e-3, err_msg=f"seed {seed}")
