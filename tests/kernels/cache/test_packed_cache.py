"""Packed queries of a cache, as FlashAttention-3's `flash_attn_with_kvcache` takes them, in the emulator."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from fly.lang.signature import TensorSpec
from fly.runtime.compile import compile_kernel
from kernels.flash_attn_api import flash_attn_func, flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.flash_attn_sm90 import flash_attn_sm90
from kernels.problem.features import Features
from kernels.sm90.builds import decode_options, options_of
from kernels.sm90.tiles import TILES
from tests.backends.builds import needs_ptxas
from tests.kernels.api.test_flash_attn_kvcache_api import rotated
from tests.kernels.emulated_kernels import TUNED, emulated, every_kernel, int32, random  # noqa: F401
from tests.kernels.packed import offsets
from tests.kernels.reference import check, reference
from tests.kernels.sm90.test_flash_attn_sm90_isa import accept, specs

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 64, 90
QUERIES = [20, 0, 1, 3]


def call(q, k_cache, v_cache, queries=QUERIES, **options):
    given = {"cu_seqlens_q": offsets(queries), "max_seqlen_q": max(queries), "return_softmax_lse": True}
    return flash_attn_with_kvcache(q, k_cache, v_cache, **given, **options)


def failure(result, q, k, v, queries, spans, entries, causal=True):
    """What is wrong with results where sequence b has keys first to last of entry entries[b], spans[b] of them."""
    packed = [torch.cat([x[e, first:last] for e, (first, last) in zip(entries, spans)]) for x in (k, v)]
    lengths = [(n, last - first) for n, (first, last) in zip(queries, spans)]
    report = check(result[0], reference(q, *packed, causal=causal, lengths=lengths), result[1])
    return None if report.ok else str(report)


@every_kernel
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_entries_and_left_padding(arch, splits, seed):
    q, k, v = random(sum(QUERIES), HEADS, DIM), random(5, LENGTH, KV_HEADS, DIM), random(5, LENGTH, KV_HEADS, DIM)
    entries, lengths, skipped = [3, 0, 4, 1], [70, 9, 0, 90], [7, 0, 0, 64]
    result = call(
        q,
        k,
        v,
        cache_seqlens=int32(*lengths),
        cache_batch_idx=int32(*entries),
        cache_leftpad=int32(*skipped),
        causal=True,
        num_splits=splits,
    )
    assert failure(result, q, k, v, QUERIES, list(zip(skipped, lengths)), entries) is None, f"seed {seed}"


@every_kernel
@pytest.mark.parametrize("lengths", [None, 33])
def test_one_length_and_a_larger_cache(arch, lengths, seed):
    """As with dense queries, the first entries are the sequences'."""
    q, k, v = random(sum(QUERIES), HEADS, DIM), random(6, LENGTH, KV_HEADS, DIM), random(6, LENGTH, KV_HEADS, DIM)
    result = call(q, k, v, cache_seqlens=lengths)
    spans = [(0, lengths or LENGTH)] * 4
    assert failure(result, q, k, v, QUERIES, spans, range(4), causal=False) is None, f"seed {seed}"


def test_one_query_a_sequence(seed):
    q, k, v = random(3, HEADS, DIM), random(3, LENGTH, KV_HEADS, DIM), random(3, LENGTH, KV_HEADS, DIM)
    result = call(q, k, v, [1, 1, 1], cache_seqlens=int32(90, 1, 40), causal=True, window_size=(300, -1))
    assert failure(result, q, k, v, [1, 1, 1], [(0, 90), (0, 1), (0, 40)], range(3)) is None, f"seed {seed}"


NEW = [5, 0, 1, 12]


def appended(cache, new, counts, lengths, entries):
    """The cache with packed `new` keys, `counts` of each sequence, behind what is there."""
    result = cache.clone()
    for own, length, entry in zip(new.split(counts), lengths, entries, strict=True):
        result[entry, length : length + len(own)] = own
    return result


@pytest.mark.parametrize("packed_keys", [False, True], ids=["dense keys", "packed keys"])
@pytest.mark.parametrize("page_size", [None, 16, 6])
def test_new_keys_and_rotation(packed_keys, page_size, seed):
    lengths, entries, counts = [40, 3, 0, 29], [2, 4, 0, 1], NEW if packed_keys else [4] * 4
    q, k, v = random(sum(QUERIES), HEADS, DIM), random(5, 48, KV_HEADS, DIM), random(5, 48, KV_HEADS, DIM)
    new_k, new_v = random(sum(counts), KV_HEADS, DIM), random(sum(counts), KV_HEADS, DIM)
    angles = torch.rand(60, 8) * 6.3
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def turned(x, sizes):
        places = torch.cat([length + torch.arange(n) for length, n in zip(lengths, sizes)])
        return rotated(x[None], cos, sin, places[None], True)[0]

    k_after = appended(k, turned(new_k, counts), counts, lengths, entries)
    v_after = appended(v, new_v, counts, lengths, entries)
    options = {"cu_seqlens_k_new": offsets(counts)} if packed_keys else {}
    given = [new_k, new_v] if packed_keys else [x.view(4, 4, KV_HEADS, DIM) for x in (new_k, new_v)]
    pools, table = [k.clone(), v.clone()], None
    if page_size:
        each = 48 // page_size
        order = torch.randperm(5 * each)
        table = order.view(5, each).int()
        for i, cache in enumerate((k, v)):
            pools[i] = torch.empty(5 * each, page_size, KV_HEADS, DIM, dtype=torch.bfloat16)
            pools[i][order] = cache.reshape(5 * each, page_size, KV_HEADS, DIM)
    result = call(
        q,
        *pools,
        k=given[0],
        v=given[1],
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=int32(*lengths),
        cache_batch_idx=int32(*entries),
        block_table=table,
        causal=True,
        **options,
    )
    found = pools if table is None else [pool[table.long()].flatten(1, 2) for pool in pools]
    torch.testing.assert_close(found[0], k_after, rtol=2**-7, atol=1e-6, msg=lambda text: f"seed {seed}: {text}")
    assert torch.equal(found[1], v_after), f"seed {seed}"
    spans = [(0, length + n) for length, n in zip(lengths, counts)]
    wrong = failure(result, turned(q, QUERIES), k_after, v_after, QUERIES, spans, entries)
    assert wrong is None, f"seed {seed}: {wrong}"


def test_new_keys_of_dense_queries_may_be_packed(seed):
    q, k, v = random(4, 2, HEADS, DIM), random(4, 48, KV_HEADS, DIM), random(4, 48, KV_HEADS, DIM)
    new_k, new_v, lengths = random(sum(NEW), KV_HEADS, DIM), random(sum(NEW), KV_HEADS, DIM), [40, 3, 0, 29]
    k_after, v_after = (appended(x, new, NEW, lengths, range(4)) for x, new in ((k, new_k), (v, new_v)))
    options = {"cache_seqlens": int32(*lengths), "cu_seqlens_k_new": offsets(NEW), "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, k, v, new_k, new_v, causal=True, **options)
    assert torch.equal(k, k_after) and torch.equal(v, v_after), f"seed {seed}"
    spans = [(0, length + n) for length, n in zip(lengths, NEW)]
    result = (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
    assert failure(result, q.flatten(0, 1), k, v, [2] * 4, spans, range(4)) is None, f"seed {seed}"


def test_offsets_are_not_read_on_the_host(seed):
    """The same plan serves other sequences."""
    k, v = random(3, LENGTH, KV_HEADS, DIM), random(3, LENGTH, KV_HEADS, DIM)
    for queries in ([5, 1, 2], [0, 8, 0]):
        q = random(8, HEADS, DIM)
        given = {"cu_seqlens_q": offsets(queries), "max_seqlen_q": 8, "return_lse": True}
        result = flydsl_flash_attn_func(q, k, v, seqused_kv=int32(10, 90, 40), **given)
        assert failure(result, q, k, v, queries, [(0, 10), (0, 90), (0, 40)], range(3)) is None, f"seed {seed}"


@needs_ptxas
@pytest.mark.parametrize("queries", [1, 4000])
def test_hopper_builds_are_accepted_by_ptxas(queries, tmp_path):
    """Packed queries without offsets of keys: those are in entries of a dense cache."""
    names = ("seqused_kv", "cache_leftpad", "kv_batch_idx")
    options = (
        decode_options(128, 128, False) if queries == 1 else options_of(next(row for row in TILES if row[0] == 128))
    )
    options = replace(options, features=Features(names))
    arguments = specs(options, "packed", "bf16")
    parameters = [p.name for p in flash_attn_sm90.signature.parameters][: len(arguments)]
    arguments[parameters.index("cu_seqlens_kv")] = None
    arguments += [TensorSpec("i32", 1, 4, True)] * len(names)
    block = (options.threads, 1, 1)
    artefact = compile_kernel(flash_attn_sm90, tuple(arguments), {"options": options}, "sm_90a", block)
    accept(artefact, options, tmp_path, stack=8 if options.consumers > 1 else 0)


Q, CACHE, NEW_KEYS = random(6, HEADS, DIM), random(2, 9, KV_HEADS, DIM), random(2, 1, KV_HEADS, DIM)
TWO = {"cu_seqlens_q": offsets([2, 4]), "max_seqlen_q": 4}
MISTAKES = {
    "no offsets": ({}, ArgumentError, "q must have 4 dimensions, got shape (6, 4, 64); packed queries also need"),
    "dense queries": (TWO | {"q": Q[None]}, ArgumentError, "q must have 3 dimensions, got shape (1, 6, 4, 64)"),
    "no bound": (TWO | {"max_seqlen_q": None}, ArgumentError, "packed sequences need max_seqlen_q"),
    "int64 offsets": (
        TWO | {"cu_seqlens_q": offsets([2, 4]).long()},
        ArgumentError,
        "cu_seqlens_q must hold batch + 1",
    ),
    "a list": (TWO | {"cu_seqlens_q": [0, 2, 6]}, ArgumentTypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    "few entries": (
        TWO | {"cu_seqlens_q": offsets([2, 2, 2])},
        ArgumentError,
        "flash_attn_with_kvcache: k_cache must have a batch entry for each of 3 sequences",
    ),
    "other new offsets": (
        TWO | {"k": NEW_KEYS[0], "v": NEW_KEYS[0], "cache_seqlens": 1, "cu_seqlens_k_new": offsets([1])},
        ArgumentError,
        "cu_seqlens_k_new must have 3 offsets, as q's batch, got 2",
    ),
    "packed new keys without offsets": (
        TWO | {"k": NEW_KEYS[0], "v": NEW_KEYS[0], "cache_seqlens": 1},
        ArgumentError,
        "k must have 4 dimensions",
    ),
    "k without v": (TWO | {"k": NEW_KEYS, "cache_seqlens": 1}, ArgumentError, "k and v go together"),
    "no lengths": (TWO | {"k": NEW_KEYS, "v": NEW_KEYS}, ArgumentError, "k and v need cache_seqlens"),
    "other lengths": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": int32(1)},
        ArgumentError,
        "cache_seqlens must have shape (2,) and int32, got (1,)",
    ),
    "sparse lengths": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": int32(1, 1).to_sparse()},
        ArgumentTypeError,
        "cache_seqlens is of layout torch.sparse_coo",
    ),
    "lengths on meta": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": int32(1, 1).to("meta")},
        ArgumentError,
        "cache_seqlens is on device 'meta'",
    ),
    "a list of entries": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": 1, "cache_batch_idx": [0, 1]},
        ArgumentTypeError,
        "cache_batch_idx must be a torch.Tensor, got list",
    ),
    "new keys of another batch": (
        TWO | {"k": NEW_KEYS[:1], "v": NEW_KEYS[:1], "cache_seqlens": 1},
        ArgumentError,
        "k must have a batch of 2, got shape (1, 1, 2, 64)",
    ),
    "too few rows of pages for new keys": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": 1, "block_table": int32(0)[None]},
        ArgumentError,
        "block_table must have a row for each of 2 sequences, got shape (1, 1)",
    ),
    "too few rows of scales for new keys": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": 1, "k_descale": torch.ones(1, 2)},
        ArgumentError,
        "k_descale must have a row for each of 2 sequences, got shape (1, 2)",
    ),
    "sparse scales of new keys": (
        TWO | {"k": NEW_KEYS, "v": NEW_KEYS, "cache_seqlens": 1, "k_descale": torch.ones(2, 2).to_sparse()},
        ArgumentError,
        "k_descale is",
    ),
    "nested queries": (
        TWO | {"q": torch.nested.nested_tensor([torch.zeros(2, 4, 64), torch.zeros(3, 4, 64)], layout=torch.jagged)},
        ArgumentTypeError,
        "q is a NestedTensor",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    changes, error, message = MISTAKES[case]
    with pytest.raises(error, match=re.escape(message)):
        flash_attn_with_kvcache(**({"q": Q, "k_cache": CACHE, "v_cache": CACHE} | changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_scales_of_a_cache_of_more_entries_than_sequences():
    """torch has no shape of them."""
    scales = torch.nested.nested_tensor([torch.zeros(2, 3)])
    with pytest.raises(ArgumentTypeError, match="k_descale is a nested tensor"):
        flash_attn_with_kvcache(Q[None], CACHE, CACHE, k_descale=scales)


def test_other_functions_say_whose_they_are():
    with pytest.raises(UnsupportedError, match="it is for packed queries of flash_attn_with_kvcache"):
        flash_attn_func(CACHE, CACHE, CACHE, cu_seqlens_q=offsets([2, 4]))
