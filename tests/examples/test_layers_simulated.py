"""RMS norm, the linear layer and rotary embedding as traced for NVIDIA, run in numpy without a GPU."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fly.backends.target import target
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

nvidia = pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    return importlib.import_module


def rounded_like(got: np.ndarray, exact: np.ndarray, seed: int) -> None:
    """Assert that 16-bit results are f32's, rounded: no farther off than half a unit, and a little."""
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2.0**-8 * 1.01, atol=1e-6, err_msg=f"seed {seed}")


@nvidia
@pytest.mark.parametrize("columns", [100, 2500])
def test_rms_norm(arch, columns, example):
    module = example("04_rms_norm")
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    x, weight = random.standard_normal((3, columns)).astype(BF16), random.random(columns).astype(BF16)
    y = np.full_like(x, np.nan)
    pieces = -(-columns // (module.THREADS * module.VECTOR))
    specs = matrix("bf16", 2, alignment=8), matrix("bf16"), matrix("bf16", 2, alignment=8)  # rows of 8 n bytes
    traced = trace(module.rms_norm, *specs, arch=arch, block=module.THREADS, pieces=pieces, epsilon=1e-6)
    Machine(Program.of(traced, target(arch)))(flat(x, weight, y), (3, 1, 1))
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    rounded_like(y, exact, seed)


@nvidia
def test_linear_layer_with_gelu(arch, example):
    module, tiling = example("05_gemm_bias_gelu"), example("03_matmul").Tiling()
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    x, w = (random.standard_normal((rows, 64)).astype(BF16) for rows in (70, 40))
    bias = random.standard_normal(40).astype(BF16)
    y = np.full((70, 40), np.nan, BF16)
    specs = matrix("bf16", 2), matrix("bf16", 2), matrix("bf16"), matrix("bf16", 2)
    traced = trace(module.linear_gelu, *specs, arch=arch, block=module.THREADS, tiling=tiling)
    Machine(Program.of(traced, target(arch)), True)(flat(x, w, bias, y), (1, 1, 1))
    v = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
    exact = v / 2 * (1 + np.vectorize(math.erf)(v * math.sqrt(0.5)))
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=2.0**-8 * 1.01, atol=1e-5, err_msg=f"seed {seed}")


@nvidia
def test_rotary_embedding(arch, example):
    module = example("06_rotary")
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    tokens, heads, head_dim = 3, 5, 64
    x = random.standard_normal((tokens, heads, head_dim)).astype(np.float32)
    y = np.full_like(x, np.nan)
    positions = random.integers(0, 100_000, tokens).astype(np.int32)
    frequencies = (10000.0 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    specs = matrix("f32", 3), matrix("i32"), matrix("f32"), matrix("f32", 3)
    traced = trace(module.rotary, *specs, arch=arch, block=module.THREADS, head_dim=head_dim)
    Machine(Program.of(traced, target(arch)))(flat(x, positions, frequencies, y), (tokens, 1, 1))
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    exact = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-6, err_msg=f"seed {seed}")
