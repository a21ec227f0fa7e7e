"""The generic kernel as it is traced for every target, run in numpy against exact attention.

No code generator takes part: what fails here is the kernel, the language, or a layout of the target.
"""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.backends.target import target
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic
from tests.simulator import Machine, Program, flat
from tests.tracing import matrix, trace

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# arch, stages, elements of one copy
BUILDS = [("gfx942", 1, 8), ("gfx950", 1, 8), ("sm_80", 1, 8), ("sm_80", 2, 8), ("sm_90a", 3, 8), ("sm_80", 2, 4)]


@functools.cache
def program(arch: str, dtype: str, options: GenericOptions) -> Program:
    tensor = matrix(dtype, 4)
    block = options.waves * target(arch).wave_size
    specs = (tensor, tensor, tensor, tensor, matrix("f32", 3), "f32", None, None)
    return Program(trace(flash_attn_generic, *specs, arch=arch, block=block, options=options), target(arch))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(out, log-sum-exp) in double precision; 0 and -inf in rows that see no key."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(np.float64) for x in (q, np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    queries, keys = scores.shape[2:]
    if causal:
        seen = np.arange(keys) <= np.arange(queries)[:, None] + keys - queries
        scores = np.where(seen, scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = scores.max(axis=-1, keepdims=True, initial=-1e30)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        out = np.einsum("bhqk,bkhd->bqhd", np.where(total > 0, weights / total, 0), v)
        return out, (np.log(total) + largest)[..., 0]


def check(arch: str, dtype: str, options: GenericOptions, shape: tuple[int, ...], late: bool, seed: int) -> None:
    batch, queries, keys, heads, key_heads = shape
    random = np.random.default_rng(seed)

    def tensor(length: int, count: int) -> np.ndarray:
        return random.standard_normal((batch, length, count, options.head_dim)).astype(DTYPES[dtype])

    q, k, v = tensor(queries, heads), tensor(keys, key_heads), tensor(keys, key_heads)
    out = np.full_like(q, np.nan)
    lse = np.full((batch, heads, queries), np.nan, np.float32)
    scale = 1 / math.sqrt(options.head_dim)
    grid = (-(-queries // options.block_m), heads, batch)
    Machine(program(arch, dtype, options), late)(flat(q, k, v, out, lse, scale * math.log2(math.e)), grid)
    wanted, wanted_lse = exact(q, k, v, scale, options.causal)
    error = np.abs(out.astype(np.float64) - wanted)
    assert np.nanmax(error) <= {"bf16": 2e-2, "f16": 3e-3}[dtype] and not np.isnan(error).any()
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize(("arch", "stages", "vector"), BUILDS)
@pytest.mark.parametrize(("causal", "dtype"), [(True, "bf16"), (False, "f16")])
def test_any_lengths(arch, stages, vector, causal, dtype):
    @settings(max_examples=2, deadline=None)
    @given(
        st.tuples(st.just(1), st.integers(1, 100), st.integers(1, 140)),
        st.sampled_from([(1, 1), (2, 1), (2, 2)]),
        st.booleans(),
        st.integers(0, 2**16),
    )
    def any_lengths(sizes, heads, late, seed):
        options = GenericOptions(64, causal, 64, 64, 2, stages, vector)
        check(arch, dtype, options, (*sizes, *heads), late, seed)

    any_lengths()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80"])
@pytest.mark.parametrize(("head_dim", "block_n", "waves"), [(64, 64, 4), (128, 64, 4), (128, 32, 2), (64, 128, 2)])
def test_other_tiles(arch, head_dim, block_n, waves):
    stages = 1 if arch.startswith("gfx") else 2
    options = GenericOptions(head_dim, True, 32 * waves, block_n, waves, stages)
    check(arch, "f16", options, (2, 40, 150, 1, 1), stages > 1, seed=1)
