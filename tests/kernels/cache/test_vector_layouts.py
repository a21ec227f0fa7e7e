"""Pages in ROCm's vectorised layouts: written and read as the same pages in rows are, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from fly_attention import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels.cache.kv_cache import append_to_cache
from kernels.integrations import vllm
from tests.kernels.paged import Paged

EIGHT_BITS = torch.float8_e4m3fn


def bytes_of(cache):
    """8-bit floats as integers, which torch moves."""
    return cache.view(torch.uint8) if cache.dtype is EIGHT_BITS else cache


def vectors(k, v, layout):
    """(pages, P, Hkv, D) in a layout; every page of either one is followed by one of the other's size."""
    x = 16 // k.element_size()
    split = bytes_of(k).unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4)
    turned = bytes_of(v).permute(0, 2, 3, 1)
    if layout == "vectorized":
        turned = turned.unflatten(-1, (-1, x)).permute(0, 1, 3, 2, 4)

    def apart(cache):
        return torch.stack((cache, torch.zeros_like(cache)), dim=1)[:, 0].view(k.dtype)

    return apart(split), apart(turned)


def rows(k, v, layout):
    """The way back."""
    turned = bytes_of(v)
    if layout == "vectorized":
        turned = turned.permute(0, 1, 3, 2, 4).flatten(3)
    return bytes_of(k).permute(0, 3, 1, 2, 4).flatten(3), turned.permute(0, 3, 1, 2)


def decoding(seed):
    """One query a sequence, whose heads are rows; 8-bit pages with scales by key and of a head."""
    pages = Paged.of([70, 1], 16, 2, (32, 32), torch.bfloat16, seed)
    k, v = (x.to(EIGHT_BITS) for x in (pages.k, pages.v))
    scales = {"k_descale": torch.rand(2) + 0.5, "v_descale": torch.rand(k.shape[:3]) + 0.5}
    return torch.randn(2, 1, 4, 32).bfloat16(), k, v, pages.options | scales


def mixed(seed):
    """Packed: a chunk of a prompt, decoding, no query; pages of no power of two and another dimension of V."""
    pages = Paged.of([41, 130, 7], 24, 1, (48, 40), torch.float16, seed)
    offsets = torch.tensor([0, 5, 6, 6], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "max_seqlen_q": 5, "window_size": (100, 0)}
    return torch.randn(6, 2, 48).half(), pages.k, pages.v, pages.options | packed


CASES = [
    ("gfx942", "vectorized", decoding),
    ("gfx942", "paged_attention", mixed),
    ("gfx950", "paged_attention", decoding),
    ("gfx950", "vectorized", mixed),
]


@pytest.mark.parametrize("arch, layout, case", CASES)
def test_pages_are_read_as_those_in_rows_are(emulate, seed, arch, layout, case):
    emulate(arch, "generic")
    torch.manual_seed(seed)
    q, k, v, options = case(seed)
    expected, lse = flydsl_flash_attn_func(q, k, v, return_lse=True, **options)
    found = flydsl_flash_attn_func(q, *vectors(k, v, layout), return_lse=True, kv_cache_layout=layout, **options)
    assert not expected.isnan().any()
    assert torch.equal(found[0], expected) and torch.equal(found[1], lse), f"seed {seed}"


def test_parts_of_the_keys(emulate, seed):
    emulate("gfx950", "generic")
    pages = Paged.of([200], 16, 1, (32, 32), torch.bfloat16, seed)
    q, split = torch.randn(1, 2, 1, 32).bfloat16(), {"num_kv_splits": 2, "kv_batch_idx": torch.tensor([0]).int()}
    expected = flydsl_flash_attn_func(q, pages.k, pages.v, **pages.options, **split)
    call = (q, *vectors(pages.k, pages.v, "vectorized"))
    split |= pages.options | {"kv_cache_layout": "vectorized"}
    assert torch.equal(flydsl_flash_attn_func(*call, **split), expected)
    assert flydsl_flash_attn_workspace(*call, **split)


@pytest.mark.parametrize("arch, layout", [("gfx942", "paged_attention"), ("gfx950", "vectorized")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, EIGHT_BITS])
def test_new_rows_are_written_as_to_pages_in_rows(emulate, seed, arch, layout, dtype):
    emulate(arch, "generic")
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 3, 4, 48), torch.randn(2, 3, 2, 48), torch.randn(2, 3, 2, 32)
    k_cache, v_cache = (torch.randn(4, 32, 2, dim).to(dtype) for dim in (48, 32))
    angles = torch.rand(64, 8)
    places = {"cache_seqlens": torch.tensor([30, 7]).int(), "block_table": torch.tensor([[1, 3], [0, 2]]).int()}
    new = [x.bfloat16() for x in (k, v, angles.cos(), angles.sin())]
    caches = vectors(k_cache, v_cache, layout)
    scales = [{} if dtype is torch.bfloat16 else {"k_descale": torch.ones(4, 32, 2)} for _ in range(2)]
    expected = append_to_cache(q.bfloat16(), k_cache, v_cache, *new, **places, **scales[0])
    found = append_to_cache(q.bfloat16(), *caches, *new, **places, **scales[1], kv_cache_layout=layout)
    assert torch.equal(found, expected)
    for written, wanted in zip(rows(*caches, layout), (k_cache, v_cache)):
        assert torch.equal(written, bytes_of(wanted)), f"seed {seed}"
    assert all(torch.equal(scales[0][name], scales[1][name]) for name in scales[0])


@pytest.mark.parametrize("layout", ["vectorized", "paged_attention"])
@pytest.mark.usefixtures("unchecked")  # where inputs are checked, slots of no token are reported
def test_vllms_functions_write_and_read_them(emulate, seed, layout):
    """Three tokens of two sequences at their slots, and one query each."""
    emulate("gfx950", "generic")
    torch.manual_seed(seed)
    key, value = torch.randn(2, 4, 2, 32).bfloat16()
    plain = torch.zeros(2, 3, 16, 2, 32).bfloat16().unbind(0)
    caches = vectors(*plain, layout)
    slots = torch.tensor([32, 33, 16, -1])
    results = []
    for k, v in (plain, caches):
        vllm.reshape_and_cache_flash(key, value, k, v, slots, "auto")
        lengths = {"seqused_k": torch.tensor([2, 1]).int(), "block_table": torch.tensor([[2], [1]]).int()}
        with torch.no_grad():
            results.append(vllm.flash_attn_varlen_func(key[:2], k, v, 1, torch.arange(3).int(), 2, **lengths))
    assert plain[0].count_nonzero() and all(map(torch.equal, rows(*caches, layout), plain))
    assert torch.equal(*results)


def test_an_operation_tells_the_shape_of_its_result():
    sizes = ((2, 1, 4, 64), (9, 2, 8, 16, 8), (9, 2, 2, 40, 8))
    q, k, v = (torch.empty(size, dtype=torch.float16, device="meta") for size in sizes)
    table = torch.empty(2, 3, dtype=torch.int32, device="meta")
    given = {"seqused_kv": table[:, 0], "block_table": table, "kv_cache_layout": "vectorized"}
    assert torch.ops.fly.flash_attn(q, k, v, True, **given)[0].shape == (2, 1, 4, 40)


K, V = torch.zeros(3, 2, 4, 16, 8).bfloat16(), torch.zeros(3, 2, 2, 32, 8).bfloat16()
SHAPES = r"k \(pages, Hkv, D/x, page_size, x\) and v \(pages, Hkv, page_size/x, Dv, x\), with x = 8 of torch.bfloat16"
MISTAKES = {
    "rows": (
        {"k": torch.zeros(3, 16, 2, 32).bfloat16()},
        rf"'vectorized' are {SHAPES} .*got k of .*\(3, 16, 2, 32\)",
    ),
    "other vectors": ({"k": torch.zeros(3, 2, 2, 16, 16).bfloat16()}, r"got k of shape \(3, 2, 2, 16, 16\)"),
    "odd pages": ({"k": torch.zeros(3, 2, 4, 12, 8).bfloat16()}, "page_size a multiple of x, got k of"),
    "no keys": ({"k": K[:, :, :, :0]}, r"got k of shape \(3, 2, 4, 0, 8\)"),
    "v in rows": ({"v": torch.zeros(3, 16, 2, 32).bfloat16()}, r"got v of shape \(3, 16, 2, 32\)"),
    "fewer pages of v": ({"v": V[:2]}, r"got v of shape \(2, 2, 2, 32, 8\)"),
    "v of the other": ({"kv_cache_layout": "paged_attention"}, r"v \(pages, Hkv, Dv, page_size\).*got v of shape"),
    "strides": (
        {"k": K.transpose(1, 3).contiguous().transpose(1, 3)},
        "k must have contiguous pages, got .*strides",
    ),
    "no table": ({"block_table": None}, "'vectorized' is for keys in pages: pass a block_table"),
    "padding": ({"cache_leftpad": torch.zeros(1).int()}, "cache_leftpad is not for kv_cache_layout='vectorized'"),
    "no tensor": ({"k": 1}, "k must be a torch.Tensor, got int"),
    "no name": ({"kv_cache_layout": 5}, "must be one of linear, linear3d, vectorized, paged_attention, got 5"),
    "numbers": (
        {"kv_cache_layout": np.zeros(2)},
        "must be one of linear, linear3d, vectorized, paged_attention, got",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_is_wrong(emulate, name):
    emulate("gfx950", "generic")
    change, message = MISTAKES[name]
    given = {"k": K, "v": V, "kv_cache_layout": "vectorized", "block_table": torch.zeros(1, 1).int()}
    given |= {"seqused_kv": torch.ones(1).int()} | change
    with pytest.raises(ArgumentError, match=f"^flydsl_flash_attn_func: .*{message}"):
        flydsl_flash_attn_func(torch.zeros(1, 1, 2, 32).bfloat16(), **given)


def test_a_kernel_that_has_no_such_pages_says_so(emulate):
    emulate("gfx950", "gfx950")
    given = {
        "kv_cache_layout": "vectorized",
        "block_table": torch.zeros(1, 1).int(),
        "seqused_kv": torch.ones(1).int(),
    }
    q, k, v = torch.zeros(1, 1, 2, 64).bfloat16(), K.repeat(1, 1, 2, 1, 1), V.repeat(1, 1, 1, 2, 1)
    with pytest.raises(
        UnsupportedError, match=r"pages in ROCm's vectorised layouts \(kv_cache_layout\) yet: allocate"
    ):
        flydsl_flash_attn_func(q, k, v, **given)
