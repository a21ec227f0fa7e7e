"""Packed sequences, split keys and different lengths: the generic kernel's machine code, emulated with all checks on.

A finding of the checks raises, so that a test that passes has had none.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fly.errors import UnsupportedError
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets, packed_attention, sequences
from tests.kernels.reference import attention, check, reference

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
KINDS = list(itertools.product(("gfx942", "gfx950"), ("bf16", "f16"), (True, False)))
kinds = pytest.mark.parametrize("arch, dtype, causal", KINDS, ids=["-".join(map(str, k)) for k in KINDS])
archs = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
# a long one, small tails, no query, no key, neither
QUERIES = [200, 3, 0, 31, 65, 127, 5, 0]
KEYS = [330, 127, 40, 31, 3, 65, 0, 0]


@pytest.fixture(autouse=True)
def emulated(arch, emulate):
    """The emulated GPU of a test's `arch`, with checks, and the generic kernel."""
    emulate(arch, "generic")


def inputs(seed, dtype, queries, keys, heads=2, kv_heads=1, head_dim=64):
    """q, k and v, uniform in [-1, 1]; `queries` and `keys` are their leading sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((*queries, heads), (*keys, kv_heads), (*keys, kv_heads))
    return [(torch.rand(*s, head_dim, generator=generator) * 2 - 1).to(DTYPES[dtype]) for s in sizes]


def packed_failures(q, k, v, at_q, at_kv, out, lse, causal) -> list[str]:
    """What is wrong with the results, sequence by sequence."""
    found = []
    parts = zip(*(sequences(x, at_q) for x in (q, out)), *(sequences(x, at_kv) for x in (k, v)))
    for b, (query, result, key, value) in enumerate(parts):
        if query.shape[1]:
            result_lse = lse[None, :, at_q[b] : at_q[b + 1]]
            report = check(result, reference(query, key, value, causal=causal), result_lse)
            if not report.ok:
                found.append(f"sequence {b}: {report}")
    return found


def packed_call(q, k, v, queries, keys, causal, **options):
    """(offsets of q, offsets of k, out, lse) of a call on packed sequences of these lengths."""
    at_q, at_kv = offsets(queries), offsets(keys)
    lengths = {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}
    packed = {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "return_lse": True}
    return at_q, at_kv, *flydsl_flash_attn_func(q, k, v, causal, **lengths, **packed, **options)


@kinds
def test_packed_sequences(arch, dtype, causal, seed):
    q, k, v = inputs(seed, dtype, (sum(QUERIES),), (sum(KEYS),))
    at_q, at_kv, out, lse = packed_call(q, k, v, QUERIES, KEYS, causal)
    assert packed_failures(q, k, v, at_q, at_kv, out, lse, causal) == [], f"seed {seed}"
    # five queries without a key
    assert (out[at_q[6] : at_q[7]] == 0).all() and (lse[:, at_q[6] : at_q[7]] == -math.inf).all()


@kinds
def test_packed_sequences_with_split_keys(arch, dtype, causal, seed):
    splits = (2, 5, 3, 0)[KINDS.index((arch, dtype, causal)) % 4]
    q, k, v = inputs(seed, dtype, (sum(QUERIES),), (sum(KEYS),))
    at_q, at_kv, out, lse = packed_call(q, k, v, QUERIES, KEYS, causal, num_kv_splits=splits)
    assert packed_failures(q, k, v, at_q, at_kv, out, lse, causal) == [], f"seed {seed}"
    assert (out[at_q[6] : at_q[7]] == 0).all() and (lse[:, at_q[6] : at_q[7]] == -math.inf).all()


@pytest.mark.sample(2)
@archs
@pytest.mark.parametrize(
    "queries, keys, dtype, causal, splits",
    [
        (31, 65, "bf16", True, 2),
        (63, 33, "f16", True, 3),
        (129, 255, "bf16", False, 4),
        (257, 127, "f16", True, 5),
        (100, 800, "bf16", True, 5),
        (1, 700, "f16", False, 0),
    ],
)
def test_lengths_that_differ_with_split_keys(arch, queries, keys, dtype, causal, splits, seed):
    q, k, v = inputs(seed, dtype, (1, queries), (1, keys), head_dim=64 if queries > 128 else 128)
    ref = reference(q, k, v, causal=causal)
    for num_kv_splits in (1, splits):
        out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=num_kv_splits)
        report = check(out, ref, lse)
        assert report.ok, f"seed {seed}, {num_kv_splits} splits: {report}"


@archs
@pytest.mark.parametrize("heads, kv_heads", [(8, 1), (7, 1), (6, 3)])
def test_heads_share_keys(arch, heads, kv_heads, seed):
    q, k, v = inputs(seed, "bf16", (1, 40), (1, 150), heads, kv_heads)
    ref = reference(q, k, v, causal=True)
    for splits in (1, 2):
        out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True, num_kv_splits=splits)
        report = check(out, ref, lse)
        assert report.ok, f"seed {seed}: {report}"
    at_q, at_kv, out, lse = packed_call(q[0], k[0], v[0], [13, 27], [100, 50], True)
    assert packed_failures(q[0], k[0], v[0], at_q, at_kv, out, lse, True) == [], f"seed {seed}"


@archs
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.usefixtures("unchecked")
def test_neighbours_do_not_leak(arch, splits, seed):
    """NaN in one sequence, and around all of them, changes no other; and nothing else is written."""
    q, k, v = inputs(seed, "f16", (120,), (260,))
    at_q, at_kv = (torch.tensor(x, dtype=torch.int32) for x in ([7, 50, 71, 110], [5, 100, 130, 250]))
    for x, at in ((q, at_q), (k, at_kv), (v, at_kv)):
        x[: at[0]] = x[at[1] : at[2]] = x[at[-1] :] = math.nan
    out = torch.full_like(q, 7.0)
    options = {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "max_seqlen_q": 60, "max_seqlen_kv": 120}
    _, lse = flydsl_flash_attn_func(q, k, v, False, out=out, return_lse=True, num_kv_splits=splits, **options)
    wanted, wanted_lse = packed_attention(q, k, v, at_q, at_kv, causal=False)
    for rows, place in ((slice(7, 50), slice(0, 43)), (slice(71, 110), slice(64, 103))):
        torch.testing.assert_close(out[rows].float(), wanted[place], atol=2e-3, rtol=0)
        torch.testing.assert_close(lse[:, rows], wanted_lse[:, place], atol=1e-3, rtol=0)
    assert (out[:7] == 7).all() and (out[110:] == 7).all()


@archs
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.usefixtures("unchecked")
def test_offsets_that_are_wrong_stay_inside(arch, splits, seed):
    """The emulator faults on any access outside of the tensors."""
    q, k, v = inputs(seed, "bf16", (50,), (90,))
    wrong = torch.tensor([-3, 20, 10, 1000], dtype=torch.int32)
    options = {"cu_seqlens_q": wrong, "cu_seqlens_kv": wrong, "max_seqlen_q": 50, "max_seqlen_kv": 90}
    flydsl_flash_attn_func(q, k, v, num_kv_splits=splits, return_lse=True, **options)


@archs
@pytest.mark.usefixtures("unchecked")
def test_queries_past_the_longest_sequence_given_are_left_out(arch, seed):
    """What a wrong max_seqlen_q costs: whole blocks of queries, and nothing else."""
    q, k, v = inputs(seed, "bf16", (300,), (50,))
    at_q, at_kv = offsets([300]), offsets([50])
    out = torch.full_like(q, 7.0)
    options = {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "max_seqlen_q": 1, "max_seqlen_kv": 1}
    flydsl_flash_attn_func(q, k, v, False, out=out, **options)
    first = int((out == 7).all(-1).all(-1).nonzero()[0, 0])
    assert first % 64 == 0 and (out[first:] == 7).all()
    wanted, _ = attention(q[None], k[None], v[None], causal=False)
    torch.testing.assert_close(out[:first].float(), wanted[0, :first], atol=1e-2, rtol=0)


@archs
def test_strided_packed_tensors_and_a_workspace_of_the_callers(arch, seed):
    both = inputs(seed, "f16", (90,), (130,), heads=4, kv_heads=2)
    q = both[0].transpose(0, 1).contiguous().transpose(0, 1)[:, ::2]
    k, v = torch.stack(both[1:], dim=1).unbind(1)
    workspace = torch.full((1 << 20,), math.nan)
    at_q, at_kv, out, lse = packed_call(q, k, v, [60, 30], [100, 30], True, num_kv_splits=4, workspace=workspace)
    assert packed_failures(q, k, v, at_q, at_kv, out, lse, True) == [], f"seed {seed}"


def far_apart(tokens, step):
    """q, k, v and out, (tokens, 2, 64), tokens `step` elements apart in memory that is hardly touched."""
    memory = torch.empty(tokens * step + 2**17, dtype=torch.bfloat16)
    return [memory.as_strided((tokens, 2, 64), (step, 64, 1), 2**15 * i) for i in range(4)]


@archs
@pytest.mark.parametrize("splits", [1, 2])
def test_offsets_past_32_bits(arch, splits, seed):
    """The last tokens are past 2**31 elements and 4 GiB."""
    q, k, v, out = far_apart(300, 2**23 - 64)
    assert q.stride(0) * 299 > 2**31
    near = inputs(seed, "bf16", (300,), (300,), kv_heads=2)
    for target, source in zip((q, k, v), near):
        target.copy_(source)
    lengths = [200, 0, 100]
    at_q, at_kv, _, lse = packed_call(q, k, v, lengths, lengths, True, out=out, num_kv_splits=splits)
    assert packed_failures(*near, at_q, at_kv, out.contiguous(), lse, True) == [], f"seed {seed}"


@archs
def test_rows_too_far_apart_for_a_tile(arch):
    q, k, v, _ = far_apart(2, 2**24)
    with pytest.raises(
        UnsupportedError, match=r"rows of q, k, v or out are 33554432 bytes apart; flash_attn_generic takes less than"
    ):
        flydsl_flash_attn_func(q[None], k[None], v[None])
