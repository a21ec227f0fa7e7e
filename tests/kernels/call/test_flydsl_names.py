"""Later versions of FlyDSL: their keywords and their import path."""

from __future__ import annotations

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from fly_attention import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels.attention import flash_attn_interface


@pytest.fixture(autouse=True)
def emulated(emulate, seed):
    torch.manual_seed(seed)
    emulate("gfx950", "generic")


@pytest.fixture
def pages():
    """q, pages of one key, and what says whose they are."""
    q = torch.randn(2, 1, 2, 32).bfloat16()
    k, v = (torch.randn(7, 1, 2, 32).bfloat16() for _ in range(2))
    table = torch.tensor([[4, 2, 0], [1, 6, 0]], dtype=torch.int32)
    return (q, k, v), {"block_table": table}, torch.tensor([3, 2], dtype=torch.int32)


def test_the_import_path():
    assert flash_attn_interface.flydsl_flash_attn_func is flydsl_flash_attn_func


def test_lengths_and_pages_of_one_key(pages):
    (q, k, v), table, lengths = pages
    own = flydsl_flash_attn_func(q, k, v, causal=True, seqused_kv=lengths, **table)
    theirs = {"causal": True, "seqlen_k": lengths, **table}
    assert torch.equal(flydsl_flash_attn_func(q, k, v, **theirs, kv_cache_layout="linear"), own)
    flat = {**theirs, "kv_cache_layout": "linear3d", "dualwave_swp_xcd_swizzle": True}
    for swizzle in (None, True):
        flat["dualwave_swp_xcd_swizzle"] = swizzle
        assert torch.equal(flydsl_flash_attn_func(q, k[:, 0], v[:, 0], **flat), own)
    assert flydsl_flash_attn_workspace(q, k[:, 0], v[:, 0], **flat) == 0


def test_packed_queries_of_pages_may_have_offsets_of_keys_too(pages):
    (q, k, v), table, lengths = pages
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "max_seqlen_q": 1, "max_seqlen_kv": 3, **table}
    own = flydsl_flash_attn_func(q[:, 0], k, v, seqused_kv=lengths, **packed)
    keys = torch.tensor([0, 3, 5], dtype=torch.int32)
    assert torch.equal(flydsl_flash_attn_func(q[:, 0], k, v, seqlen_k=lengths, cu_seqlens_kv=keys, **packed), own)


MISTAKES = {
    "two names": ({"seqlen_k": True, "seqused_kv": True}, ArgumentError, "seqlen_k and seqused_kv are two names of"),
    "layout": (
        {"kv_cache_layout": "tiled"},
        ArgumentError,
        "must be one of linear, linear3d, vectorized, paged_attention, got 'tiled'",
    ),
    "vectorized": (
        {"kv_cache_layout": "vectorized"},
        ArgumentError,
        r"page_size a multiple of x, got k of shape \(7, 1, 2, 32\)",
    ),
    "ranks": ({"kv_cache_layout": "linear3d"}, ArgumentError, r"got k of shape \(7, 1, 2, 32\)"),
    "swizzle": ({"dualwave_swp_xcd_swizzle": False}, UnsupportedError, "False is not available: query blocks of a"),
    "no bool": ({"dualwave_swp_xcd_swizzle": 1}, ArgumentTypeError, "must be True or False, got 1"),
    "unknown": ({"page_size": 16}, ArgumentTypeError, "unexpected keyword argument 'page_size'"),
}


@pytest.mark.parametrize("function", [flydsl_flash_attn_func, flydsl_flash_attn_workspace])
@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_refused(pages, name, function):
    options, error, message = MISTAKES[name]
    inputs, table, lengths = pages
    options = {key: lengths if key.startswith("seq") else value for key, value in options.items()}
    with pytest.raises(error, match=f"flydsl_flash_attn_func: .*{message}"):
        function(*inputs, **table, **options)
