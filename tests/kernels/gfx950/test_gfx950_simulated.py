"""The gfx950 kernel run in numpy against exact attention, with copies that land early and late.

Waves go in lock-step, so what staggers them is not tested here; what every lane reads, computes and writes is.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from fly.backends.target import target
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.gfx950.options import BLOCK_M, WAVES, DualWaveOptions
from kernels.problem.features import Features
from tests.kernels.generic.test_generic_simulated import DTYPES, exact
from tests.kernels.paged import Paged
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace


@functools.cache
def program(dtype: str, options: DualWaveOptions) -> Program:
    tensor, gfx950 = matrix(dtype, 4), target("gfx950")
    operands = () if options.page_size is None else (matrix("i32"), matrix("i32", 2))
    specs = (tensor, tensor, tensor, tensor, matrix("f32", 3), "f32", None, None, None, *operands)
    block = WAVES * gfx950.wave_size
    return Program.of(trace(flash_attn_gfx950, *specs, arch=gfx950.arch, block=block, options=options), gfx950)


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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (64, 64), (128, 16), (128, 32), (128, 128)])
def test_keys_in_pages(head_dim, page_size, late):
    keys = [150, 0, 64, 7]
    features = Features(("seqused_kv", "block_table"))
    options = DualWaveOptions(head_dim, True, features=features, page_size=page_size)
    paged = Paged.of(keys, page_size, 1, (head_dim, head_dim), torch.float16, seed=5)
    k, v, table, lengths = (x.numpy() for x in (paged.k, paged.v, paged.table, paged.lengths))
    q = np.random.default_rng(6).standard_normal((len(keys), 20, 2, head_dim)).astype(np.float16)
    out, lse = np.full_like(q, np.nan), np.full((len(keys), 2, 20), np.nan, np.float32)
    scale = 1 / math.sqrt(head_dim)
    arguments = flat(q, k, v, out, lse, scale * math.log2(math.e), None, None, None, lengths, table)
    Machine(program("f16", options), late)(arguments, (1, 2, len(keys)))
    first = 0
    for b, count in enumerate(keys):
        own = (x[None, first : first + count].numpy() for x in (paged.packed_k, paged.packed_v))
        wanted, wanted_lse = exact(q[b : b + 1], *own, scale, True)
        assert np.abs(out[b].astype(np.float64) - wanted[0]).max() <= 3e-3
        np.testing.assert_allclose(lse[b], wanted_lse[0], atol=1e-4)
        first += count
