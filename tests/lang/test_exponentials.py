"""`fly.exp` and `fly.tanh` on emulated GPUs, whose approximate instructions they are made of."""

from __future__ import annotations

import numpy as np
import pytest

import fly


@fly.kernel
def both(x: fly.Tensor, exponentials: fly.Tensor, tangents: fly.Tensor):
    """One element a thread."""
    i = fly.block_id.x * 64 + fly.thread_id.x
    exponentials.store(fly.exp(x.load(i)), i)
    tangents.store(fly.tanh(x.load(i)), i)


@pytest.fixture(params=["gfx942", "gfx950"])
def run(request, monkeypatch):
    """exp and tanh of float32 numbers, a multiple of 64."""
    monkeypatch.setenv("FLY_ARCH", request.param)

    def results(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        exponentials, tangents = np.zeros_like(x), np.zeros_like(x)
        both[x.size // 64, 64](x, exponentials, tangents)
        return exponentials, tangents

    return results


def test_they_are_close_everywhere(run):
    rng = np.random.default_rng(0)
    near, far = rng.uniform(-3, 3, 1024), rng.uniform(-80, 80, 1024)
    tiny = 10.0 ** rng.uniform(-30, -1, 256)
    x = np.concatenate([near, far, tiny, -tiny]).astype(np.float32)
    exponentials, tangents = run(x)
    exact = np.exp(x.astype(np.float64))
    # the exponent is rounded twice, log2(e) and the product, each to 2**-24 of itself
    assert (np.abs(exponentials - exact) <= exact * (np.abs(x) * 2.0**-23 + 2.0**-22)).all()
    assert np.abs(tangents - np.tanh(x.astype(np.float64))).max() <= 2.0**-22


def test_both_ends_are_exact(run):
    x = np.zeros(64, np.float32)
    x[:8] = [np.inf, -np.inf, np.nan, 0.0, 200.0, -200.0, 50.0, -50.0]
    exponentials, tangents = run(x)
    np.testing.assert_array_equal(exponentials[:6], [np.inf, 0, np.nan, 1, np.inf, 0])
    np.testing.assert_array_equal(tangents[:8], [1, -1, np.nan, 0, 1, -1, 1, -1])
