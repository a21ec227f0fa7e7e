"""Decoding on 8 bits from caches on a Hopper GPU: pages, lengths, packed sequences; what is past a length is NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.flash_attn_api import flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.integrations import vllm
from kernels.problem.catalogue import DESCALES
from tests.kernels.fp8_reference import reference, references
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
E4M3 = torch.float8_e4m3fn
KEYS = [700, 0, 2049, 1, 129, 64]
dims = pytest.mark.parametrize("dim", [64, 128, 256])
ROWS = [(8, 1), (2, 9), (1, 40)]  # query heads a key head, queries


def random(generator, *shape):
    """e4m3 numbers around zero."""
    return torch.randn(shape, device="cuda", generator=generator).to(E4M3)


def scales_of(generator, batch, kv_heads=2):
    """By sequence and key head."""
    return {name: torch.rand(batch, kv_heads, device="cuda", generator=generator) + 0.25 for name in DESCALES}


def pages(generator, keys, size, dim) -> Paged:
    """Sequences in shuffled pages, whose unused rows are NaN."""
    seed = int(torch.randint(2**31, (), device="cuda", generator=generator))
    wide = Paged.of(keys, size, 2, (dim, dim), torch.float32, seed, device="cuda")
    return replace(wide, **{name: getattr(wide, name).to(E4M3) for name in ("k", "v", "packed_k", "packed_v")})


def wrong(generator, out, lse, queries, keys, values, causal, **scales) -> str | None:
    """What is wrong with packed results; `queries`, `keys`, `values`: (S, H, D) of each sequence."""
    parts = (tuple(x[None] for x in part) for part in zip(queries, keys, values, strict=True))
    report = check(out, references(parts, causal=causal, **scales), lse)
    return None if report.ok else f"seed {generator.initial_seed()}: {report}"


def flattened(out, lse):
    """Results of (B, S, H, D) queries as those of packed ones."""
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


@dims
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("splits", [1, 3, 0])
def test_pages(dim, size, splits, generator):
    paged = pages(generator, KEYS, size, dim)
    parts = paged.packed_k.split(KEYS), paged.packed_v.split(KEYS)
    for group, queries in ROWS:
        q = random(generator, len(KEYS), queries, 2 * group, dim)
        scales = scales_of(generator, len(KEYS))
        options = {"return_lse": True, "num_kv_splits": splits} | paged.options | scales
        out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, **options)
        assert wrong(generator, *flattened(out, lse), q, *parts, True, **scales) is None


@dims
@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("most", [1, 8])
def test_packed_queries_of_pages_as_vllm_calls(dim, size, most, generator):
    queries = [min(most, n) for n in (1, 5, 8, 0, 2, 1)]
    paged = pages(generator, KEYS, size, dim)
    parts = paged.packed_k.split(KEYS), paged.packed_v.split(KEYS)
    q, scales = random(generator, sum(queries), 16, dim), scales_of(generator, len(KEYS))
    lengths = {"cu_seqlens_q": offsets(queries, "cuda"), "seqused_k": paged.lengths, "block_table": paged.table}
    lengths |= {"max_seqlen_q": most, "max_seqlen_k": max(KEYS)}
    for splits in (0, 1, 2):
        out, lse = vllm.flash_attn_varlen_func(
            q, paged.k, paged.v, **lengths, causal=True, return_softmax_lse=True, num_splits=splits, **scales
        )
        assert wrong(generator, out, lse, q.split(queries), *parts, True, **scales) is None


@dims
@pytest.mark.parametrize("splits", [1, 3])
def test_packed_sequences(dim, splits, generator):
    """The next sequence's keys follow, NaN in every other one."""
    queries, keys = [1, 5, 8, 0, 2, 1], [700, 33, 129, 64, 1, 300]
    q, k, v = (random(generator, sum(n), heads, dim) for n, heads in ((queries, 8), (keys, 2), (keys, 2)))
    lengths = {"cu_seqlens_q": offsets(queries, "cuda"), "cu_seqlens_kv": offsets(keys, "cuda")}
    lengths |= {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}
    for spoiled in (0, 1):
        good = [i for i in range(len(keys)) if i % 2 != spoiled]
        for part in v.split(keys)[spoiled::2]:
            part.view(torch.uint8).fill_(0x7F)
        out, lse = flydsl_flash_attn_func(q, k, v, True, return_lse=True, num_kv_splits=splits, **lengths)
        outs, lses, mine = out.split(queries), lse.split(queries, -1), q.split(queries)
        kept = ([tensor.split(keys)[i] for i in good] for tensor in (k, v))
        result = torch.cat([outs[i] for i in good]), torch.cat([lses[i] for i in good], -1)
        assert wrong(generator, *result, [mine[i] for i in good], *kept, True) is None
        v = random(generator, sum(keys), 2, dim)


@dims
@pytest.mark.parametrize("splits", [1, 2, 0])
def test_packed_queries_of_a_cache(dim, splits, generator):
    queries, lengths, skipped, entries = [1, 8, 0, 3], [700, 1, 129, 900], [0, 0, 100, 513], [5, 0, 3, 2]
    q, k, v = random(generator, sum(queries), 16, dim), *(random(generator, 6, 900, 2, dim) for _ in range(2))
    parts = [[x[e, a:b] for e, a, b in zip(entries, skipped, lengths)] for x in (k, v)]
    numbers = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, entries, skipped))
    options = dict(zip(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), numbers)) | scales_of(generator, 4)
    scales = {name: options[name] for name in DESCALES}
    options |= {"cu_seqlens_q": offsets(queries, "cuda"), "max_seqlen_q": 8, "num_splits": splits}
    out, lse = flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True, **options)
    assert wrong(generator, out, lse, q.split(queries), *parts, True, **scales) is None


@dims
@pytest.mark.parametrize("splits", [1, 2, 0])
def test_caches(dim, splits, generator):
    """Lengths, padding at the left and entries of a cache, as FlashAttention's function takes them."""
    lengths, skipped, entries = [700, 1, 129, 900], [0, 0, 100, 513], [5, 0, 3, 2]
    k, v = (random(generator, 6, 900, 2, dim) for _ in range(2))
    q = random(generator, 4, 3, 16, dim)
    seen = [slice(first, length) for first, length in zip(skipped, lengths)]
    parts = [[tensor[entry, some].clone() for entry, some in zip(entries, seen)] for tensor in (k, v)]
    for tensor in (k, v):
        bytes_ = tensor.view(torch.uint8)
        unused = torch.ones(6, 900, dtype=torch.bool)
        for entry, some in zip(entries, seen):
            unused[entry, some] = False
        bytes_[unused.cuda()] = 0x7F
    scales = scales_of(generator, 4)
    numbers = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, entries, skipped))
    options = dict(zip(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), numbers)) | scales
    out, lse = flash_attn_with_kvcache(q, k, v, causal=True, num_splits=splits, return_softmax_lse=True, **options)
    assert wrong(generator, *flattened(out, lse), q, *parts, True, **scales) is None


@pytest.mark.parametrize("splits", [1, 3])
def test_queries_in_use(splits, generator):
    q, k, v = (random(generator, 3, n, heads, 128) for n, heads in ((8, 8), (300, 2), (300, 2)))
    used = [8, 0, 3]
    lengths = {"seqused_q": torch.tensor(used, dtype=torch.int32, device="cuda")}
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, num_kv_splits=splits, **lengths)
    outs, lses = torch.cat([x[:n] for x, n in zip(out, used)]), torch.cat([x[:, :n] for x, n in zip(lse, used)], -1)
    assert wrong(generator, outs, lses, [x[:n] for x, n in zip(q, used)], k, v, False) is None


def test_a_captured_graph_follows_lengths_and_tables(generator):
    first, second = (pages(generator, keys, 64, 128) for keys in ([300, 1000], [1000, 200]))
    pool = [torch.zeros(64, 64, 2, 128, device="cuda").to(E4M3) for _ in range(2)]
    table, lengths = torch.zeros(2, 20, dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int32).cuda()
    q = random(generator, 2, 1, 16, 128)

    def fill(paged):
        for mine, theirs in zip(pool, (paged.k, paged.v)):
            mine[: len(theirs)] = theirs
        table[:, : paged.table.shape[1]] = paged.table
        lengths.copy_(paged.lengths)

    def call():
        options = {"block_table": table, "seqused_kv": lengths, "return_lse": True, "num_kv_splits": 0}
        return flydsl_flash_attn_func(q, *pool, True, **options)

    fill(first)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for paged in (first, second):
        fill(paged)
        graph.replay()
        keys = paged.lengths.tolist()
        parts = paged.packed_k.split(keys), paged.packed_v.split(keys)
        assert wrong(generator, *flattened(out, lse), q, *parts, True) is None


def test_many_queries_of_a_cache(generator):
    """More than are decoding: each tile of V is transposed for each tile of queries."""
    q, k, v = (random(generator, 2, n, heads, 128) for n, heads in ((200, 16), (300, 2), (300, 2)))
    lengths = torch.tensor([300, 20], dtype=torch.int32, device="cuda")
    out, lse = flydsl_flash_attn_func(q, k, v, True, return_lse=True, seqused_kv=lengths)
    for b, length in enumerate(lengths.tolist()):
        own = q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length]
        report = check(out[b : b + 1], reference(*own, causal=True), lse[b : b + 1])
        assert report.ok, f"seed {generator.initial_seed()}: {report}"
