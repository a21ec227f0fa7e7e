"""Attention with a prefix that is read once, against attention to all keys, on any kernel."""

from __future__ import annotations

import random
import re

import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from fly_attention import shared_prefix_attention
from tests.kernels.acceptance import EMULATED
from tests.kernels.feature_reference import feature_reference
from tests.kernels.packed import offsets
from tests.kernels.reference import check

HEADS, KV_HEADS, D, PAGE = 2, 1, 64, 16


def pages(draw: random.Random, lengths: list[int], prefix: int) -> tuple[torch.Tensor, ...]:
    """k and v pages, and a table whose rows begin with the same ones."""
    count = -(-max(lengths) // PAGE)
    own = torch.tensor(draw.sample(range(40), 3 * count), dtype=torch.int32).view(3, count)[: len(lengths)]
    own[:, : prefix // PAGE] = own[0, : prefix // PAGE].clone()
    k, v = (torch.randn(40, PAGE, KV_HEADS, D).bfloat16() for _ in range(2))
    return k, v, own, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("packed", [True, False])
def test_it_is_attention_to_all_keys(monkeypatch, seed, packed):
    """Some queries a sequence, up to all keys behind the prefix; sinks count once."""
    draw = random.Random(seed)
    draw.choice(EMULATED).start(monkeypatch)
    torch.manual_seed(seed)
    lengths, prefix = [60, 33, 77], 32
    k, v, table, used = pages(draw, lengths, prefix)
    counts = [5, 1, 20] if packed else [1, 1, 1]
    q = torch.randn(sum(counts), HEADS, D).bfloat16()
    given = {"cu_seqlens_q": offsets(counts), "max_seqlen_q": max(counts)} if packed else {}
    q = q if packed else q.unflatten(0, (3, 1))
    options = {"sink": torch.tensor([0.5, -1.0]), "softcap": 4.0}
    where = {"block_table": table, "seqused_kv": used}
    out, lse = shared_prefix_attention(q, k, v, prefix, return_lse=True, **options, **given, **where)
    at = {"cu_seqlens_q": given["cu_seqlens_q"]} if packed else {}
    expected = feature_reference(q, k, v, **options, **at, **where)
    assert check(out, expected, lse).ok, f"seed {seed}"


K, TABLE, USED = torch.zeros(4, PAGE, 1, D).bfloat16(), torch.zeros(1, 3, dtype=torch.int32), torch.tensor([40]).int()


@pytest.mark.parametrize(
    ("prefix", "options", "error", "message"),
    [
        (20, {}, ArgumentError, "prefix_keys must be whole pages of 16 keys, at most 3 of them, got 20"),
        (64, {}, ArgumentError, "prefix_keys must be whole pages of 16 keys, at most 3 of them, got 64"),
        (0, {}, ArgumentError, "prefix_keys must be from 1 to"),
        (16, {"window_size": (3, 0)}, UnsupportedError, "window_size is not available; accepted: softmax_scale"),
    ],
)
def test_what_is_wrong_is_named(prefix, options, error, message):
    with pytest.raises(error, match=re.escape(f"shared_prefix_attention: {message}")):
        shared_prefix_attention(K[:1], K, K, prefix, block_table=TABLE, seqused_kv=USED, **options)
