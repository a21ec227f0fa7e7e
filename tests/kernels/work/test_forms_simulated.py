"""Packed sequences and split keys as they are traced for every target, run in numpy against exact attention."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from fly.backends.target import target
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic
from kernels.work.split_combine import THREADS, rows_of_block, split_combine
from kernels.work.tile_scheduler import grid
from tests.kernels.generic.test_generic_simulated import DTYPES, exact
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

HEADS, HEAD_DIM = 2, 64
OFFSETS = (matrix("i32"), matrix("i32"))


@functools.cache
def forward(arch: str, dtype: str, options: GenericOptions, packed: bool, split: bool) -> Program:
    rank = 3 if packed else 4
    results = matrix("f32" if split else dtype, rank + split), matrix("f32", rank - 1 + split)
    specs = (*[matrix(dtype, rank)] * 3, *results, "f32", *(OFFSETS if packed else (None, None)))
    block = options.waves * target(arch).wave_size
    return Program.of(trace(flash_attn_generic, *specs, arch=arch, block=block, options=options), target(arch))


@functools.cache
def combination(arch: str, dtype: str, packed: bool, head_dim: int) -> Program:
    rank = 3 if packed else 4
    results = matrix(dtype, rank), matrix("f32", rank - 1)
    specs = matrix("f32", rank + 1), matrix("f32", rank), *results, OFFSETS[0] if packed else None
    return Program.of(trace(split_combine, *specs, arch=arch, block=THREADS, head_dim=head_dim), target(arch))


def combined(arch, dtype, partial, partial_lse, out, lse, offsets=None):
    """Run the combination over all of `out`."""
    batch, seq_len = (out.shape[0], out.shape[1]) if offsets is None else (len(offsets) - 1, len(out))
    blocks = grid(batch, out.shape[-2], seq_len, rows_of_block(out.shape[-1]))
    program = combination(arch, dtype, offsets is not None, out.shape[-1])
    Machine(program)(flat(partial, partial_lse, out, lse, offsets), blocks)


# sm_80 keeps tiles in flight across the branch that skips empty blocks; the others go through registers
@pytest.mark.sample(2)
@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 2), ("sm_90a", 3), ("gfx942", 1), ("gfx950", 1)])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences(arch, stages, splits, causal):
    dtype, queries, keys = "f16", [40, 0, 3, 66, 1], [70, 9, 0, 66, 130]
    options = GenericOptions(HEAD_DIM, causal, 64, 64, 2, stages)
    random = np.random.default_rng(splits)
    q = random.standard_normal((sum(queries), HEADS, HEAD_DIM)).astype(DTYPES[dtype])
    k, v = (random.standard_normal((sum(keys), 1, HEAD_DIM)).astype(DTYPES[dtype]) for _ in range(2))
    out, lse = np.full_like(q, np.nan), np.full((HEADS, len(q)), np.nan, np.float32)
    at_q, at_kv = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (queries, keys))
    scale = 1 / math.sqrt(HEAD_DIM)
    results = (out, lse)
    if splits > 1:
        results = tuple(np.full((splits, *x.shape), np.nan, np.float32) for x in results)
    blocks = grid(len(queries), HEADS, max(queries), options.block_m, splits)
    run = Machine(forward(arch, dtype, options, True, splits > 1), late_copies=stages > 1)
    run(flat(q, k, v, *results, scale * math.log2(math.e), at_q, at_kv), blocks)
    if splits > 1:
        combined(arch, dtype, *results, out, lse, at_q)
    for b in range(len(queries)):
        rows, columns = slice(at_q[b], at_q[b + 1]), slice(at_kv[b], at_kv[b + 1])
        wanted, wanted_lse = exact(q[None, rows], k[None, columns], v[None, columns], scale, causal)
        assert np.abs(out[rows].astype(np.float64) - wanted[0]).max(initial=0) <= 3e-3
        np.testing.assert_allclose(lse[:, rows], wanted_lse[0], atol=1e-4)


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 2), ("gfx942", 1)])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "splits", "causal"),
    [(1, 70, 270, 3, True), (2, 33, 100, 5, False), (1, 33, 100, 5, True), (1, 65, 20, 2, False)],
)
def test_split_keys(arch, stages, batch, queries, keys, splits, causal):
    dtype, options = "bf16", GenericOptions(HEAD_DIM, causal, 64, 64, 2, stages)
    random = np.random.default_rng(keys)
    q = random.standard_normal((batch, queries, HEADS, HEAD_DIM)).astype(DTYPES[dtype])
    k, v = (random.standard_normal((batch, keys, 1, HEAD_DIM)).astype(DTYPES[dtype]) for _ in range(2))
    out, lse = np.full_like(q, np.nan), np.full((batch, HEADS, queries), np.nan, np.float32)
    partial, partial_lse = (np.full((splits, *x.shape), np.nan, np.float32) for x in (out, lse))
    scale = 1 / math.sqrt(HEAD_DIM)
    run = Machine(forward(arch, dtype, options, False, True))
    arguments = flat(q, k, v, partial, partial_lse, scale * math.log2(math.e))
    run(arguments, grid(batch, HEADS, queries, options.block_m, splits))
    combined(arch, dtype, partial, partial_lse, out, lse)
    wanted, wanted_lse = exact(q, k, v, scale, causal)
    assert np.abs(out.astype(np.float64) - wanted).max() <= 2e-2
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize("arch", ["sm_80", "gfx950"])
@pytest.mark.parametrize(("head_dim", "rows"), [(64, 33), (128, 16), (128, 17), (96, 22), (96, 1)])
def test_combination_alone(arch, head_dim, rows):
    """Every tail of rows; splits and whole rows without keys; sums that would overflow if not measured from the
    largest."""
    splits, random = 4, np.random.default_rng(rows)
    partial = random.standard_normal((splits, 1, rows, HEADS, head_dim)).astype(np.float32)
    partial_lse = (random.standard_normal((splits, 1, HEADS, rows)) * 200).astype(np.float32)
    partial_lse[1:3, :, :, ::2] = -np.inf
    partial_lse[:, :, :, -1] = -np.inf
    partial[np.isneginf(partial_lse).swapaxes(-1, -2)] = 0
    out, lse = np.full((1, rows, HEADS, head_dim), np.nan, np.float16), np.full((1, HEADS, rows), np.nan, np.float32)
    combined(arch, "f16", partial, partial_lse, out, lse)
    with np.errstate(invalid="ignore"):
        wanted_lse = np.logaddexp.reduce(partial_lse.astype(np.float64), axis=0)
        weights = np.nan_to_num(np.exp(partial_lse - wanted_lse))
    wanted = (partial * weights.swapaxes(-1, -2)[..., None]).sum(0)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(out, wanted, atol=2e-3)
    assert (out[:, -1] == 0).all()
