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
from fly.errors import ShapeError
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# arch, stages, elements of one copy
BUILDS = [("gfx942", 1, 8), ("gfx950", 1, 8), ("sm_80", 1, 8), ("sm_80", 2, 8), ("sm_90a", 3, 8), ("sm_80", 2, 4)]


@functools.cache
def program(arch: str, dtype: str, options: GenericOptions) -> Program:
    tensor = matrix(dtype, 4)
    block = options.waves * target(arch).wave_size
    specs = (tensor, tensor, tensor, tensor, matrix("f32", 3), "f32", None, None)
    return Program.of(trace(flash_attn_generic, *specs, arch=arch, block=block, options=options), target(arch))


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

    def tensor(length: int, count: int, head_dim: int) -> np.ndarray:
        return random.standard_normal((batch, length, count, head_dim)).astype(DTYPES[dtype])

    q, k = tensor(queries, heads, options.head_dim), tensor(keys, key_heads, options.head_dim)
    v = tensor(keys, key_heads, options.value_dim)
    out = np.full((*q.shape[:3], options.value_dim), np.nan, q.dtype)
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


NVIDIA_BUILDS = [
    {"queries": "shared"},
    {"stages": 3, "queries": "shared", "lazy": True},
    {"lazy": True, "late": True},
    {"stages": 1, "alternate": True},
    {"stages": 1, "alternate": True, "queries": "shared", "block_n": 32},
    {"stages": 1, "alternate": True, "queries": "shared", "lazy": True, "block_n": 48},
    {"overlap": True},
    {"overlap": True, "stages": 3, "lazy": True, "block_n": 32},
]


@pytest.mark.parametrize("build", NVIDIA_BUILDS, ids=lambda build: "-".join(f"{k}={v}" for k, v in build.items()))
@pytest.mark.parametrize("shape", [(1, 100, 200, 2, 1), (1, 70, 30, 1, 1), (1, 5, 64, 1, 1)])
def test_every_way_to_feed_a_tile(build, shape):
    """Also where blocks see no tile, one, or only whole ones."""
    for causal in (False, True):
        options = GenericOptions(64, causal, **{"block_m": 64, "block_n": 64, "waves": 2, "stages": 2} | build)
        check("sm_80", "f16", options, shape, True, seed=2)


@pytest.mark.parametrize("head_dims", [(32, 32), (40, 40), (96, 96), (72, 104), (192, 128), (248, 64)], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80"])
def test_head_dims(arch, head_dims):
    stages = 1 if arch.startswith("gfx") else 2
    options = GenericOptions(head_dims[0], True, 64, 64, 2, stages, head_dim_v=head_dims[1])
    check(arch, "bf16", options, (1, 40, 100, 2, 1), stages > 1, seed=3)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_lazy_rescale_when_maxima_grow(late):
    """Scores that grow by 3 to 30 log2 units from tile to tile: some rescales happen, some do not."""
    options = GenericOptions(64, False, 64, 32, 2, 2, lazy=True, late=late)
    ramp = np.repeat(np.array([0.0, 3.0, 5.0, 30.0, 31.0], np.float16), 32)
    q = np.ones((1, 20, 1, 64), np.float16)
    k = (ramp[None, :, None, None] / 64 * np.ones((1, 160, 1, 64))).astype(np.float16)
    v = np.random.default_rng(4).standard_normal(k.shape).astype(np.float16)
    out, lse = np.full_like(q, np.nan), np.full((1, 1, 20), np.nan, np.float32)
    Machine(program("sm_80", "f16", options), True)(flat(q, k, v, out, lse, math.log2(math.e)), (1, 1, 1))
    wanted, wanted_lse = exact(q, k, v, 1.0, False)
    assert np.abs(out - wanted).max() <= 3e-3
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_dim": 4}, r"head_dim is 4; expected a multiple of 8 from 8 to 256"),
        ({"head_dim_v": 257}, r"head_dim_v is 257; expected a multiple of 8 from 8 to 256"),
        ({"late": True}, r"late is True; expected False without lazy"),
        ({"vector": 3}, r"vector is 3; expected 1, 2, 4 or 8 elements"),
        ({"waves": 3}, r"block_m 64 does not divide into 3 waves"),
        ({"queries": "global"}, r"queries is 'global'; expected 'registers' or 'shared'"),
        ({"alternate": True}, r"tiles that alternate have one stage, not 2"),
        ({"overlap": True, "stages": 1}, r"overlap needs two stages or more, not 1"),
        ({"queries": "shared", "stages": 1}, r"queries in shared memory need asynchronous copies"),
    ],
)
def test_builds_that_do_not_exist(given, message):
    base = {"head_dim": 64, "causal": True, "block_m": 64, "block_n": 64, "waves": 2, "stages": 2}
    with pytest.raises(ShapeError, match=message):
        GenericOptions(**base | given)
