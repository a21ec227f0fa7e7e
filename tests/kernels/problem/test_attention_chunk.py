"""Attention in chunks of keys, as FlashAttention-3's `attention_chunk` defines it, in the emulator."""

from __future__ import annotations

import re

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError
from kernels.flash_attn_api import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.kernels.api.api_reference import dense, packed
from tests.kernels.emulated_kernels import TUNED, emulated, every_kernel, int32, random  # noqa: F401
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check


def right(result, reference, seed):
    out, lse, *_ = result
    report = check(out, reference, lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(
    ("arch", "lengths", "chunk", "options"),
    [
        ("gfx942", (150, 150), 40, {"causal": True}),
        ("gfx942", (90, 200), 64, {}),
        ("gfx942", (200, 90), 33, {}),  # early queries stand before the first key, and see none
        ("gfx950", (70, 130), 1, {"causal": True}),
        ("gfx950", (20, 300), 2**31 - 1, {"causal": True}),
        ("gfx950", (60, 190), 50, {"window_size": (30, 7), "num_splits": 3}),
        (TUNED, (300, 300), 100, {"causal": True}),
        (TUNED, (70, 300), 70, {}),
        (TUNED, (150, 270), 130, {"window_size": (40, -1), "num_splits": 2}),
    ],
    ids=str,
)
def test_dense(arch, lengths, chunk, options, seed):
    q, k, v = random(1, lengths[0], 4, 64), random(1, lengths[1], 2, 64), random(1, lengths[1], 2, 64)
    result = flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
    shown = {name: value for name, value in options.items() if name != "num_splits"}
    right(result, dense(q, k, v, attention_chunk=chunk, **shown), seed)


@every_kernel
def test_a_random_chunk(arch, seed):
    """The same build serves every chunk."""
    q, k, v = random(1, 40, 2, 64), random(1, 170, 2, 64), random(1, 170, 2, 64)
    for chunk in torch.randint(1, 200, (2,)).tolist():
        result = flash_attn_func(q, k, v, causal=True, attention_chunk=chunk, return_attn_probs=True)
        right(result, dense(q, k, v, causal=True, attention_chunk=chunk), f"{seed}, chunk {chunk}")


@every_kernel
def test_packed_sequences(arch, seed):
    queries, keys = [40, 0, 1, 70], [100, 20, 33, 70]
    q, k, v = random(sum(queries), 4, 64), random(sum(keys), 2, 64), random(sum(keys), 2, 64)
    given = (offsets(queries), offsets(keys), 70, 100)
    result = flash_attn_varlen_func(q, k, v, *given, causal=True, attention_chunk=30, return_attn_probs=True)
    right(result, packed(q, k, v, queries, keys, causal=True, attention_chunk=30), seed)


@pytest.mark.parametrize(("arch", "queries"), [("gfx942", 1), (TUNED, 1), (TUNED, 5)])
def test_a_cache(arch, queries, seed):
    """One query of several heads is as many rows of a tile, which all stand where the query does."""
    q, k, v = random(2, queries, 4, 64), random(2, 150, 2, 64), random(2, 150, 2, 64)
    options = {"causal": True, "attention_chunk": 32, "softcap": 9.0}
    result = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(100, 64), return_softmax_lse=True, **options)
    right(result, dense(q, k, v, keys=[(0, 100), (0, 64)], **options), seed)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_padding_at_the_left_and_pages(arch, seed):
    """Chunks count from the first key that is not left out."""
    q = random(2, 7, 4, 64)
    paged = Paged.of([150, 60], 16, 2, (64, 64), torch.bfloat16, seed)
    options = {"causal": True, "attention_chunk": 20}
    result = flash_attn_with_kvcache(
        q,
        paged.k,
        paged.v,
        cache_seqlens=paged.lengths,
        cache_leftpad=int32(13, 3),
        block_table=paged.table,
        return_softmax_lse=True,
        **options,
    )
    right(result, dense(q, *paged.padded(), keys=[(13, 150), (3, 60)], **options), seed)


def test_new_keys_and_queries_are_rotated_where_they_are(seed):
    """As with a window, query i stands at cache_seqlens + i."""
    q, k, v = random(1, 3, 2, 32), random(1, 30, 2, 32), random(1, 30, 2, 32)
    new_k, new_v, angles = random(1, 3, 2, 32), random(1, 3, 2, 32), torch.rand(40, 16) * 6.3
    tables = (angles.cos().bfloat16(), angles.sin().bfloat16())
    wide = {"window_size": (40, 40)}  # hides nothing
    found, wanted = (
        flash_attn_with_kvcache(q, k.clone(), v.clone(), new_k, new_v, *tables, int32(9), **options)
        for options in (wide | {"attention_chunk": 40}, wide)
    )
    alone = flash_attn_with_kvcache(q, k.clone(), v.clone(), new_k, new_v, *tables, int32(9), attention_chunk=40)
    assert torch.equal(found, wanted) and torch.equal(alone, wanted), f"seed {seed}"


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (-1, ArgumentError, "attention_chunk must be from 0 to 2147483647, got -1"),
        (2**31, ArgumentError, "attention_chunk must be from 0 to 2147483647, got 2147483648"),
        (1.5, ArgumentTypeError, "attention_chunk must be an int, got 1.5"),
    ],
)
def test_mistakes(chunk, error, message):
    q = random(1, 3, 2, 64)
    with pytest.raises(error, match=re.escape(message)):
        flash_attn_func(q, q, q, attention_chunk=chunk)
