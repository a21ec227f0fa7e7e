"""The Hopper kernel for 8-bit inputs on the simulated GPU: every build of its table, decoding and caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import flash_attn_interface, flash_attn_sm90_fp8
from kernels.flash_attn_api import flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.catalogue import DESCALES, FP8_SUMS
from kernels.sm90.builds import options_of
from kernels.sm90.fp8_builds import FAST_TILES, TILES, transposing
from tests.kernels.fp8_reference import reference, references
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check
from tests.kernels.simulated import in_every_schedule, simulated  # noqa: F401

KERNEL = "sm90_fp8"
E4M3 = torch.float8_e4m3fn
dims = pytest.mark.parametrize("dim", [64, 128, 256])
TABLES = dict(zip(FP8_SUMS, (TILES, FAST_TILES)))


def random(*shape: int) -> torch.Tensor:
    """e4m3 numbers around zero."""
    return torch.randn(shape).to(E4M3)


def scales_of(batch: int, kv_heads: int = 1) -> dict[str, torch.Tensor]:
    """By sequence and key head."""
    return {name: torch.rand(batch, kv_heads) + 0.25 for name in DESCALES}


def wrong(q, k, v, causal, **options) -> str | None:
    """What is wrong with a call's results, which are the same in every schedule; what is not written stays NaN."""

    def call():
        out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=torch.bfloat16)
        return flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out, **options)

    counts = {name: x for name, x in options.items() if name.endswith("descale") or name == "fp8_accumulate"}
    out, lse = in_every_schedule(call)
    report = check(out, reference(q, k, v, causal=causal, **counts), lse)
    return None if report.ok else str(report)


def wrong_parts(out, lse, *parts, causal, **scales) -> str | None:
    """What is wrong with packed results; `parts`: queries, keys, values (S, H, D) of each sequence."""
    sequences = (tuple(x[None] for x in part) for part in zip(*parts, strict=True))
    report = check(out, references(sequences, causal=causal, **scales), lse)
    return None if report.ok else str(report)


def flattened(out, lse):
    """Results of (B, S, H, D) queries as those of packed ones."""
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("scale", [0.0, 1e-45])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scales_of_tensors_that_are_zero(scale, causal):
    """Scores are all alike then, and masked ones are still masked."""
    q, k, v = (random(1, n, 2, 64) for n in (100, 150, 150))
    assert wrong(q, k, v, causal, q_descale=torch.tensor(scale)) is None
    assert wrong(q[:, :1], k, v, causal, k_descale=torch.tensor(scale), num_kv_splits=2) is None


BUILDS = [
    (how, *key, splits, transposes)
    for how in FP8_SUMS
    for key in TABLES[how]
    for splits, transposes in ((1, False), (1, True), (2, False), (2, True))
]


@pytest.mark.sample(7)  # no divisor of the ways in which rows are run
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_every_build(build, monkeypatch, seed):
    """Whatever the shape: more rows than a tile, more keys than two tiles."""
    how, *key, splits, transposes = build
    dim, _, causal, consumers, _ = key

    def chosen(request, units, typical, table, kind):
        pack = 1 if splits == 1 else 2
        options = replace(
            options_of(tuple(key), table[tuple(key)], kind), pack_gqa=pack, features=request.static_features
        )
        return transposing(options) if transposes else options, request.num_kv_splits

    monkeypatch.setattr(flash_attn_sm90_fp8, "build_for", chosen)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    q = random(1, 64 * consumers + 9, 2, dim)
    k, v = random(1, 261, 1, dim), random(1, 261, 1, dim)
    options = {"num_kv_splits": splits, "fp8_accumulate": how} | scales_of(1)
    assert wrong(q, k, v, causal, **options) is None, f"seed {seed}"


@dims
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (100, 16), (300, 77), (70, 400)])
def test_lengths(dim, queries, keys, seed):
    q, k, v = random(2, queries, 2, dim), random(2, keys, 1, dim), random(2, keys, 1, dim)
    assert wrong(q, k, v, queries % 4 == 0) is None, f"seed {seed}"


def before_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same tokens in memory where NaN follows."""
    keys = tensor.shape[1]
    whole = torch.full((len(tensor), keys + 150, *tensor.shape[2:]), torch.nan).to(E4M3)
    whole[:, :keys] = tensor
    return whole[:, :keys]


@pytest.mark.sample(2)
@dims
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "queries", "keys"), [(8, 1, 1), (8, 3, 129), (6, 7, 300), (1, 40, 16)])
def test_decoding(dim, splits, heads, queries, keys, seed):
    """V is turned in the kernel; what lies behind the last key does not matter."""
    q = random(2, queries, heads, dim)
    k, v = (before_nan(random(2, keys, 1, dim)) for _ in range(2))
    assert wrong(q, k, v, True, num_kv_splits=splits) is None, f"seed {seed}"


def test_each_key_has_its_own_values():
    """Scores so far apart that a query takes one key's values, exactly: where each byte of V goes."""
    keys, dim = 200, 64
    bits = (torch.arange(keys)[:, None] >> torch.arange(8) & 1) * 16.0 - 8
    q, k = torch.zeros(2, keys, dim).to(E4M3)
    q[:, :8] = k[:, :8] = bits.to(E4M3)
    v = random(1, keys, 1, dim)
    for queries in (slice(0, 200), slice(160, 200)):  # V turned by a kernel before, and in the kernel
        out = flydsl_flash_attn_func(q[None, queries, None], k[None, :, None], v, softmax_scale=1.0, causal=False)
        assert torch.equal(out[0, :, 0].float(), v[0, queries, 0].float())


@pytest.mark.sample(2)
@dims
@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_pages(dim, size, splits, seed):
    keys = [200, 0, 333, 1]
    wide = Paged.of(keys, size, 2, (dim, dim), torch.float32, seed)
    pages = replace(wide, **{name: getattr(wide, name).to(E4M3) for name in ("k", "v", "packed_k", "packed_v")})
    parts = pages.packed_k.split(keys), pages.packed_v.split(keys)
    q, scales = random(len(keys), 3, 8, dim), scales_of(len(keys), 2)
    options = {"return_lse": True, "num_kv_splits": splits} | pages.options | scales
    out, lse = flydsl_flash_attn_func(q, pages.k, pages.v, True, **options)
    assert wrong_parts(*flattened(out, lse), q, *parts, causal=True, **scales) is None, f"seed {seed}"


@dims
@pytest.mark.parametrize("splits", [1, 3])
def test_packed_sequences(dim, splits, seed):
    """The next sequence's keys follow, NaN in every other one."""
    queries, keys = [1, 5, 8, 0, 2, 1], [200, 33, 129, 64, 1, 100]
    q, k, v = (random(sum(n), heads, dim) for n, heads in ((queries, 4), (keys, 1), (keys, 1)))
    lengths = {"cu_seqlens_q": offsets(queries), "cu_seqlens_kv": offsets(keys)}
    lengths |= {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}
    for part in v.split(keys)[1::2]:
        part.view(torch.uint8).fill_(0x7F)
    out, lse = flydsl_flash_attn_func(q, k, v, True, return_lse=True, num_kv_splits=splits, **lengths)
    results = torch.cat(out.split(queries)[::2]), torch.cat(lse.split(queries, -1)[::2], -1)
    parts = (x.split(n)[::2] for x, n in ((q, queries), (k, keys), (v, keys)))
    assert wrong_parts(*results, *parts, causal=True) is None, f"seed {seed}"


@dims
@pytest.mark.parametrize("splits", [1, 2])
def test_caches(dim, splits, seed):
    """Lengths, padding at the left and entries of a cache; what is not in use is NaN."""
    lengths, skipped, entries = [200, 1, 129, 300], [0, 0, 100, 113], [5, 0, 3, 2]
    q, k, v = random(4, 3, 8, dim), random(6, 300, 1, dim), random(6, 300, 1, dim)
    seen = [slice(first, length) for first, length in zip(skipped, lengths)]
    parts = [[tensor[entry, some].clone() for entry, some in zip(entries, seen)] for tensor in (k, v)]
    unused = torch.ones(6, 300, dtype=torch.bool)
    for entry, some in zip(entries, seen):
        unused[entry, some] = False
    for tensor in (k, v):
        tensor.view(torch.uint8)[unused] = 0x7F
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (lengths, entries, skipped))
    options = dict(zip(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), numbers))
    scales = scales_of(4)
    out, lse = flash_attn_with_kvcache(
        q, k, v, causal=True, num_splits=splits, return_softmax_lse=True, **options, **scales
    )
    assert wrong_parts(*flattened(out, lse), q, *parts, causal=True, **scales) is None, f"seed {seed}"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_stride_that_nothing_takes_may_be_anything(axis):
    """Of a dimension with one element: alike to the kernels, which take strides of 16 bytes."""
    shape = [2, 21, 3, 64]
    shape[axis] = 1
    q, k, v = (random(*shape) for _ in range(3))
    strides = [1 if i == axis else stride for i, stride in enumerate(q.stride())]
    odd = q.as_strided(q.shape, strides)
    assert odd.is_contiguous() and (odd.view(torch.uint8) == q.view(torch.uint8)).all()
    expected = flydsl_flash_attn_func(q, k, v, False)
    out = torch.empty_like(expected)
    odd_out = out.as_strided(out.shape, strides)
    assert (flydsl_flash_attn_func(odd, k, v, False, out=odd_out) == expected).all() and (out == expected).all()
    assert (flydsl_flash_attn_func(q, *(x.as_strided(q.shape, strides) for x in (k, v)), False) == expected).all()
