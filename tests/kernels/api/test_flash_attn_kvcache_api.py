"""`flash_attn_with_kvcache`: what attention sees of a cache, and what a call leaves in it."""

from __future__ import annotations

import secrets

import pytest
import torch

from kernels.flash_attn_api import flash_attn_with_kvcache
from tests.kernels.api.api_reference import dense
from tests.kernels.reference import check

ENTRIES, LENGTH, KV_HEADS, HEADS, DIM = 3, 24, 2, 4, 32


@pytest.fixture(autouse=True)
def inference(record_property):
    seed = secrets.randbits(31)
    record_property("seed", seed)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    with torch.no_grad():
        yield


@pytest.fixture
def caches():
    """(q (2, 3, H, D), k_cache, v_cache) of random numbers."""
    return random(2, 3, HEADS, DIM), *(random(ENTRIES, LENGTH, KV_HEADS, DIM) for _ in range(2))


def random(*shape):
    return torch.randn(*shape).bfloat16()


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def right(result, reference):
    out, lse = result if isinstance(result, tuple) else (result, None)
    report = check(out, reference, lse)
    assert report.ok, str(report)


def appended(cache, new, lengths, entries=None):
    """The cache with `new` (B, S_new, H, D) behind what is there."""
    result = cache.clone()
    for b, length in enumerate(lengths):
        result[b if entries is None else entries[b], length : length + new.shape[1]] = new[b]
    return result


def rotated(x, cos, sin, positions, interleaved):
    """x (B, S, H, D) with its first dimensions turned; `positions` (B, S)."""
    half = cos.shape[1]
    c, s = (table.float()[positions][:, :, None] for table in (cos, sin))
    turned = x.float().clone()
    places = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    first, second = (x.float()[..., place] for place in places)
    turned[..., places[0]], turned[..., places[1]] = first * c - second * s, first * s + second * c
    return turned.to(x.dtype)


@pytest.mark.parametrize("lengths", [7, (5, 17), None], ids=["one length", "lengths", "all"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_the_cache(caches, lengths, causal):
    q, k, v = caches
    given = int32(*lengths) if isinstance(lengths, tuple) else lengths
    result = flash_attn_with_kvcache(q, k, v, cache_seqlens=given, causal=causal, return_softmax_lse=True)
    each = lengths if isinstance(lengths, tuple) else (lengths or LENGTH,) * 2
    right(result, dense(q, k[:2], v[:2], causal=causal, keys=[(0, n) for n in each]))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_split_keys(caches, num_splits):
    q, k, v = caches
    result = flash_attn_with_kvcache(
        q[:, :1], k, v, cache_seqlens=int32(24, 9), num_splits=num_splits, return_softmax_lse=True
    )
    right(result, dense(q[:, :1], k[:2], v[:2], keys=[(0, 24), (0, 9)]))


@pytest.mark.parametrize("causal, window_size", [(True, (-1, -1)), (False, (6, 1)), (True, (4, 0))])
def test_left_padding_and_windows(caches, causal, window_size):
    q, k, v = caches
    result = flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=int32(12, 20),
        cache_leftpad=int32(5, 0),
        causal=causal,
        window_size=window_size,
        return_softmax_lse=True,
    )
    right(result, dense(q, k[:2], v[:2], causal=causal, window_size=window_size, keys=[(5, 12), (0, 20)]))


def test_entries_of_the_cache(caches):
    q, k, v = caches
    result = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(8, 24), cache_batch_idx=int32(2, 0), causal=True)
    right(result, dense(q, k, v, causal=True, keys=[(0, 8), (0, 24)], entries=[2, 0]))


def test_a_sink_and_slopes(caches):
    q, k, v = caches
    slopes, sink = torch.rand(HEADS), torch.randn(HEADS)
    options = {"softcap": 20.0, "softmax_scale": 0.2, "causal": True, "alibi_slopes": slopes}
    result = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(2, 24), learnable_sink=sink, return_softmax_lse=True, **options
    )
    right(result, dense(q, k[:2], v[:2], keys=[(0, 2), (0, 24)], sink=sink, **options))


@pytest.mark.parametrize("entries", [None, (2, 0)], ids=["in order", "cache_batch_idx"])
@pytest.mark.parametrize("lengths", [6, (5, 17)], ids=["one length", "lengths"])
def test_new_keys_are_written_and_seen(caches, entries, lengths):
    q, k, v = caches
    new_k, new_v = random(2, 3, KV_HEADS, DIM), random(2, 3, KV_HEADS, DIM)
    each = lengths if isinstance(lengths, tuple) else (lengths,) * 2
    k_after, v_after = appended(k, new_k, each, entries), appended(v, new_v, each, entries)
    given = int32(*lengths) if isinstance(lengths, tuple) else lengths
    result = flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cache_seqlens=given, cache_batch_idx=entries and int32(*entries), causal=True
    )
    assert torch.equal(k, k_after) and torch.equal(v, v_after)
    right(result, dense(q, k, v, causal=True, keys=[(0, n + 3) for n in each], entries=entries or [0, 1]))
    if isinstance(given, torch.Tensor):
        assert given.tolist() == list(lengths)  # the caller's own stay as they are


@pytest.mark.parametrize("dims", [(59, 59), (16, 12), (1, 100)], ids=str)
@pytest.mark.parametrize("size", [None, 6], ids=["dense", "pages"])
def test_new_keys_of_any_head_dimension(dims, size):
    """They are written in place into the caller's own cache, and seen."""
    dim, value_dim = dims
    q, k, v = random(2, 3, HEADS, dim), random(2, LENGTH, KV_HEADS, dim), random(2, LENGTH, KV_HEADS, value_dim)
    new_k, new_v = random(2, 3, KV_HEADS, dim), random(2, 3, KV_HEADS, value_dim)
    k_after, v_after = appended(k, new_k, (5, 17)), appended(v, new_v, (5, 17))
    order = torch.randperm(8).tolist()
    (k_given, table), (v_given, _) = (
        ((k, None), (v, None)) if size is None else (paged(x, size, order) for x in (k, v))
    )
    result = flash_attn_with_kvcache(
        q, k_given, v_given, new_k, new_v, cache_seqlens=int32(5, 17), block_table=table, causal=True
    )
    for given, after in ((k_given, k_after), (v_given, v_after)):
        assert torch.equal(given if size is None else given[table.long()].flatten(1, 2), after)
    right(result, dense(q, k_after, v_after, causal=True, keys=[(0, 8), (0, 20)]))


def test_new_rows_that_are_not_contiguous(caches):
    q, k, v = caches
    new_k, new_v, q = (random(2, DIM, heads, 3).permute(0, 3, 2, 1) for heads in (KV_HEADS, KV_HEADS, HEADS))
    k_after, v_after = appended(k, new_k, (5, 17)), appended(v, new_v, (5, 17))
    result = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=int32(5, 17), causal=True)
    assert torch.equal(k, k_after) and torch.equal(v, v_after)
    right(result, dense(q, k, v, causal=True, keys=[(0, 8), (0, 20)]))


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("causal, window_size", [(True, (-1, -1)), (False, (-1, -1)), (False, (9, 3))])
def test_queries_and_new_keys_are_rotated(caches, interleaved, causal, window_size):
    q, k, v = caches
    new_k, new_v = random(2, 3, KV_HEADS, DIM), random(2, 3, KV_HEADS, DIM)
    angles = torch.rand(LENGTH, 8) * 6.3
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    lengths, before = int32(5, 17), q.clone()
    positions = lengths.long()[:, None] + torch.arange(3)
    # without causal and window every query stands at the end of the cache
    places = positions if causal or window_size != (-1, -1) else positions[:, :1].expand(2, 3)
    turned_q = rotated(q, cos, sin, places, interleaved)
    k_after = appended(k, rotated(new_k, cos, sin, positions, interleaved), lengths.tolist())
    result = flash_attn_with_kvcache(
        q,
        k,
        v,
        new_k,
        new_v,
        cos,
        sin,
        lengths,
        causal=causal,
        window_size=window_size,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
    )
    assert torch.equal(q, before)
    torch.testing.assert_close(k, k_after, rtol=2**-7, atol=1e-6)
    options = {"causal": causal, "window_size": window_size, "keys": [(0, 8), (0, 20)]}
    right(result, dense(turned_q, k[:2], v[:2], **options))


def paged(cache, size, order):
    """(pages, block_table) of the first two entries of a cache, and pages that are not theirs; `order` of pages."""
    each = cache.shape[1] // size
    pages = torch.randn(len(order) + 2, size, *cache.shape[2:]).bfloat16()
    table = torch.tensor(order, dtype=torch.int32).view(2, each)
    pages[table.long().flatten()] = cache[:2].unflatten(1, (each, size)).flatten(0, 1)
    return pages, table


@pytest.mark.parametrize("lengths", [(32, 17), None], ids=["lengths", "all"])
@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_pages(lengths, name):
    q, k, v = random(2, 3, HEADS, DIM), random(2, 32, KV_HEADS, DIM), random(2, 32, KV_HEADS, DIM)
    (k_pages, table), (v_pages, _) = (paged(cache, 16, [4, 1, 0, 5]) for cache in (k, v))
    given = lengths and int32(*lengths)
    result = flash_attn_with_kvcache(
        q, k_pages, v_pages, cache_seqlens=given, causal=True, return_softmax_lse=True, **{name: table}
    )
    right(result, dense(q, k, v, causal=True, keys=[(0, n) for n in lengths or (32, 32)]))


def test_new_keys_are_written_into_pages():
    q, k, v = random(2, 3, HEADS, DIM), random(2, 32, KV_HEADS, DIM), random(2, 32, KV_HEADS, DIM)
    new_k, new_v = random(2, 3, KV_HEADS, DIM), random(2, 3, KV_HEADS, DIM)
    (k_pages, table), (v_pages, _) = (paged(cache, 16, [4, 1, 0, 5]) for cache in (k, v))
    k_after, v_after = appended(k, new_k, (14, 0)), appended(v, new_v, (14, 0))  # one goes over a page's end
    result = flash_attn_with_kvcache(
        q, k_pages, v_pages, new_k, new_v, cache_seqlens=int32(14, 0), block_table=table, causal=True
    )
    for pages, after in ((k_pages, k_after), (v_pages, v_after)):
        assert torch.equal(pages[table.long()].flatten(1, 2), after)
    right(result, dense(q, k_after, v_after, causal=True, keys=[(0, 17), (0, 3)]))


@pytest.mark.parametrize("size", [16, 24, 1])
def test_pages_with_entries_and_left_padding(size):
    """`cache_batch_idx` names rows of the table, and padding moves where a sequence's keys begin in its pages."""
    q, k, v = random(2, 3, HEADS, DIM), random(2, 48, KV_HEADS, DIM), random(2, 48, KV_HEADS, DIM)
    new_k, new_v = random(2, 3, KV_HEADS, DIM), random(2, 3, KV_HEADS, DIM)
    order = torch.randperm(96 // size).tolist()
    (k_pages, table), (v_pages, _) = (paged(cache, size, order) for cache in (k, v))
    k_after, v_after = appended(k, new_k, (23, 9)), appended(v, new_v, (23, 9))
    result = flash_attn_with_kvcache(
        q,
        k_pages,
        v_pages,
        new_k,
        new_v,
        cache_seqlens=int32(23, 9),
        cache_leftpad=int32(17, 2),
        cache_batch_idx=int32(2, 0),
        block_table=torch.stack([table[1], torch.full_like(table[0], -1), table[0]]),
        causal=True,
        return_softmax_lse=True,
    )
    for pages, after in ((k_pages, k_after), (v_pages, v_after)):
        assert torch.equal(pages[table.long()].flatten(1, 2), after)
    right(result, dense(q, k_after, v_after, causal=True, keys=[(17, 26), (2, 12)]))
