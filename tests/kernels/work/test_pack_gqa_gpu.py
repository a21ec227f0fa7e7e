"""Query heads that share a key head as rows of one tile: the Hopper kernel on a GPU, against float32."""

from __future__ import annotations

import pytest
import torch

from fly import config
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets, sequences
from tests.kernels.reference import check, reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
DIMS = [(64, 64), (128, 128), (192, 128)]


@pytest.fixture(autouse=True)
def sm90(monkeypatch):
    """The kernel that packs heads, or an error."""
    monkeypatch.setenv(config.KERNEL.name, "sm90")


def inputs(seed, queries, keys, group, dims, kv_heads=2, dtype=torch.bfloat16):
    """q, k and v, uniform in [-1, 1]; `queries` and `keys` are their leading sizes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((*queries, kv_heads * group, dims[0]), (*keys, kv_heads, dims[0]), (*keys, kv_heads, dims[1]))
    return [torch.empty(*s, dtype=dtype, device="cuda").uniform_(-1, 1, generator=generator) for s in sizes]


def wrong(q, k, v, causal, splits) -> str | None:
    """What is wrong with a call's results; what is not written stays NaN."""
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype, device="cuda")
    _, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out, num_kv_splits=splits)
    report = check(out, reference(q, k, v, causal=causal), lse)
    return None if report.ok else str(report)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [2, 4, 8, 16])
def test_few_queries(dims, causal, group, seed):
    for i, queries in enumerate((1, 3, 17, 64, 200)):
        for keys in (1, 65, 513, 2000):
            splits = (i + keys) % 6  # 0 is automatic
            q, k, v = inputs(seed, (2, queries), (2, keys), group, dims)
            assert wrong(q, k, v, causal, splits) is None, f"seed {seed}, {queries} x {keys}, {splits} splits"


@pytest.mark.parametrize("splits", [2, 3, 7, 16, 64])
def test_split_keys_of_decoding_are_combined_alike_every_time(splits, seed):
    """By whichever block comes last: calls on two streams at once, and three launches of a graph, replayed."""
    q, k, v = inputs(seed, (3, 1), (3, 2100), 8, (128, 128))
    assert wrong(q, k, v, False, splits) is None, f"seed {seed}"

    def call():
        return flydsl_flash_attn_func(q, k, v, return_lse=True, num_kv_splits=splits)

    results = [call()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for stream in streams * 20:
        with torch.cuda.stream(stream):
            results.append(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for _ in range(3)]
    for _ in range(5):
        for tensor in (x for pair in captured for x in pair):
            tensor.fill_(torch.nan)
        graph.replay()
        results += [tuple(t.clone() for t in pair) for pair in captured]
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_more_tiles_than_have_counters_are_combined_after_the_launch(seed):
    q, k, v = inputs(seed, (130, 1), (130, 150), 8, (64, 64))
    assert wrong(q, k, v, False, 2) is None, f"seed {seed}"


@pytest.mark.parametrize("group", [1, 5, 6, 24, 64, 128])
def test_groups_that_are_packed_in_part_or_not_at_all(group, seed):
    for queries in (1, 5):
        q, k, v = inputs(seed, (3, queries), (3, 700), group, (128, 128), dtype=torch.float16)
        assert wrong(q, k, v, True, 2) is None, f"seed {seed}, {queries} queries"


@pytest.mark.parametrize("dims", [(96, 96), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_other_head_dimensions(dims, splits, seed):
    for queries in (1, 33):
        q, k, v = inputs(seed, (2, queries), (2, 1000), 8, dims)
        assert wrong(q, k, v, True, splits) is None, f"seed {seed}, {queries} queries"


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[1, 1, 0, 1, 1, 0], [17, 0, 3, 64, 130, 1]], ids=str)
def test_packed_sequences(dims, causal, splits, lengths, seed):
    keys = [300, 40, 3, 0, 1025, 64]
    q, k, v = inputs(seed, (sum(lengths),), (sum(keys),), 8, dims)
    at_q, at_kv = offsets(lengths, "cuda"), offsets(keys, "cuda")
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype, device="cuda")
    call = {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(keys)}
    _, lse = flydsl_flash_attn_func(q, k, v, causal, out=out, return_lse=True, num_kv_splits=splits, **call)
    parts = zip(*(sequences(x, at_q) for x in (q, out)), *(sequences(x, at_kv) for x in (k, v)))
    for b, (query, result, key, value) in enumerate(parts):
        if query.shape[1]:
            report = check(result, reference(query, key, value, causal=causal), lse[None, :, at_q[b] : at_q[b + 1]])
            assert report.ok, f"seed {seed}, sequence {b}: {report}"


def test_strides_of_heads_and_queries_are_free(seed):
    """Heads before queries in memory, and a batch that is a part of a larger one."""
    q, k, v = inputs(seed, (4, 8), (4, 300), 8, (128, 128))
    memory = torch.empty(4, 16, 8, 128, dtype=q.dtype, device="cuda").transpose(1, 2)
    memory.copy_(q)
    for query in (memory[::2], q[::2]):
        assert wrong(query, k[::2], v[::2], True, 1) is None, f"seed {seed}"


def test_results_do_not_depend_on_what_is_beside_them(seed):
    """One NaN head makes its own rows NaN, and no others."""
    q, k, v = inputs(seed, (2, 5), (2, 300), 8, (128, 128))
    q[0, 2, 3] = torch.nan
    out = flydsl_flash_attn_func(q, k, v, True)
    bad = out.isnan().any(-1)
    assert bad[0, 2, 3] and bad.sum() == 1, f"seed {seed}"
