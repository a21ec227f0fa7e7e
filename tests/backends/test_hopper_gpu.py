"""Hopper's asynchronous units on the GPU, one small kernel each, against torch."""

from __future__ import annotations

import pytest
import torch

import fly
from fly.backends.nvvm.wgmma import PanelTile
from fly.runtime.compile import compile_kernel
from fly.runtime.prepared import bind
from tests.backends.hopper import (
    Product,
    asked,
    copy_box,
    counted,
    halved,
    handshake,
    passed_on,
    product,
    ring_sum,
    shifted,
)


def _is_hopper() -> bool:
    available = torch.cuda.is_available() and not torch.version.hip
    return available and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="no NVIDIA GPU of compute capability 9.0")]


def small_integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose products add up exactly."""
    return torch.randint(-4, 5, shape, device="cuda").to(dtype)


def box_of(source: torch.Tensor, row: int, column: int, rows: int, columns: int) -> torch.Tensor:
    """What a copy of that box gives: zeros outside of the tensor."""
    at_row = torch.arange(row, row + rows, device="cuda")[:, None]
    at_column = torch.arange(column, column + columns, device="cuda")
    (height, width) = source.shape
    inside = (at_row >= 0) & (at_row < height) & (at_column >= 0) & (at_column < width)
    return source[at_row.clamp(0, height - 1), at_column.clamp(0, width - 1)].where(inside, 0)


# TMA

PLACES = {
    "inside": (5, 24),
    "before the first": (-3, -8),
    "past the last row": (90, 0),
    "past the last column": (0, 184),
    "past both": (95, 192),
    "outside": (200, 0),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("swizzle", "columns"), [(0, 64), (0, 8), (32, 16), (64, 32), (128, 64)])
def test_a_box_is_copied_with_zeros_outside(swizzle, columns, place):
    row, column = PLACES[place]
    source = torch.randn(100, 200, device="cuda").to(torch.float16)
    result = torch.full((16, columns), 7.0, dtype=torch.float16, device="cuda")
    raw = torch.zeros(16 * columns // 2, dtype=torch.int32, device="cuda")
    maps = [fly.tensor_map(tensor, (16, columns), swizzle=swizzle) for tensor in (source, result)]
    copy_box[1, 128](*maps, raw, row, column)
    wanted = box_of(source, row, column, 16, columns)
    assert torch.equal(result, wanted)
    if 2 * columns == swizzle:
        tile = PanelTile(16, columns, swizzle)
        places = torch.tensor([[tile(r, c) // 2 for c in range(columns)] for r in range(16)], device="cuda")
        assert torch.equal(raw.view(torch.float16)[places], wanted)
    elif not swizzle:
        assert torch.equal(raw.view(torch.float16).view(16, columns), wanted)


def test_a_store_drops_what_lies_outside():
    source = torch.randn(16, 64, device="cuda").to(torch.float16)
    memory = torch.full((24, 64), 7.0, dtype=torch.float16, device="cuda")
    raw = torch.zeros(16 * 32, dtype=torch.int32, device="cuda")
    result = memory[:10]
    copy_box[1, 128](*(fly.tensor_map(t, (16, 64), swizzle=128) for t in (source, result)), raw, 0, 0)
    assert torch.equal(result, source[:10])
    assert torch.equal(memory[10:], torch.full_like(memory[10:], 7.0))


def test_strided_tensors():
    source = torch.randn(100, 3, 128, device="cuda").to(torch.float16)[:, 1, 64:]
    result = torch.zeros(16, 64, dtype=torch.float16, device="cuda")
    raw = torch.zeros(16 * 32, dtype=torch.int32, device="cuda")
    copy_box[1, 128](*(fly.tensor_map(t, (16, 64), swizzle=128) for t in (source, result)), raw, 7, 0)
    assert torch.equal(result, source[7:23])


def test_a_bound_launch_copies_from_new_addresses():
    def tensors() -> tuple[torch.Tensor, ...]:
        source = torch.randn(32, 64, device="cuda").to(torch.float16)
        return source, torch.zeros_like(source[:16]), torch.zeros(16 * 32, dtype=torch.int32, device="cuda")

    source, result, raw = tensors()
    maps = [fly.tensor_map(tensor, (16, 64), swizzle=128) for tensor in (source, result)]
    prepared = bind(copy_box, 1, 128, (*maps, raw, 4, 0), {}, compile_kernel)
    for source, result, raw in (tensors() for _ in range(3)):
        prepared(source.data_ptr(), result.data_ptr(), raw.data_ptr())
        assert torch.equal(result, source[4:20])


def test_an_exported_kernel_takes_tensor_maps(tmp_path):
    source = torch.randn(32, 64, device="cuda").to(torch.float16)
    result, raw = torch.zeros_like(source[:16]), torch.zeros(16 * 32, dtype=torch.int32, device="cuda")
    maps = [fly.tensor_map(tensor, (16, 64), swizzle=128) for tensor in (source, result)]
    fly.compile(copy_box, *maps, raw, 0, 0, block=128).save(tmp_path / "copy.fly")
    fly.load(tmp_path / "copy.fly")[1, 128](*maps, raw, 8, 0)
    assert torch.equal(result, source[8:24])


def test_stores_of_threads_are_copied_out():
    source = torch.randn(128, device="cuda")
    result = torch.zeros_like(source)
    shifted[1, 128](source, fly.tensor_map(result, (128,)), count=128)
    assert torch.equal(result, source + 1)


# WGMMA

PRODUCTS = [
    *(Product(n, 64) for n in (32, 64, 96, 128, 192, 256)),
    *(Product(n, 64, b="rows") for n in (32, 64, 96, 128, 192, 256)),
    *(Product(64, k, b=b) for k in (16, 32, 48, 128) for b in ("columns", "rows")),
    *(Product(n, 64, a="rows", b=b) for n in (32, 128) for b in ("columns", "rows")),
    *(Product(n, k, "f16", a="registers", b=b) for n, k in ((32, 16), (128, 80)) for b in ("columns", "rows")),
    Product(256, 128, "f16"),
    Product(64, 64, split=True),
    Product(128, 32, a="registers", b="rows", split=True),
]


@pytest.mark.parametrize("options", PRODUCTS, ids=lambda p: f"{p.n}x{p.k}-{p.dtype}-{p.a}-{p.b}-{p.split}")
def test_a_product_is_torchs(options):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[options.dtype]
    a = small_integers(64, options.k, dtype=dtype)
    b = small_integers(options.k, options.n, dtype=dtype)
    maps = []
    for matrix, tile, along_rows in (
        (a.T, options.a_tile, options.a == "rows"),
        (b, options.b_tile, options.b == "rows"),
    ):
        stored = (matrix if along_rows else matrix.T).contiguous()
        assert stored.shape == (tile.rows, tile.columns)
        maps.append((stored, fly.tensor_map(stored, (tile.rows, tile.panel_columns), swizzle=tile.swizzle)))
    narrow = torch.zeros(64, options.n, dtype=dtype, device="cuda")
    wide = torch.zeros(64, options.n, device="cuda")
    product[1, 128](maps[0][1], maps[1][1], a, narrow, wide, options=options)
    wanted = a.double() @ b.double() * (2 if options.split else 1)
    assert torch.equal(wide.double(), wanted)
    assert torch.equal(narrow, wanted.to(dtype))


# mbarriers, named barriers, election


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_a_ring_hands_every_box_over_once(stages, count):
    source = torch.randint(-99, 99, (count, 128), device="cuda").float()
    out = torch.zeros(128, device="cuda")
    ring_sum[1, 256](fly.tensor_map(source, (1, 128)), out, stages=stages, count=count)
    assert torch.equal(out, source.sum(0))


@pytest.mark.parametrize("number", [1, 7, 15])
def test_a_named_barrier_orders_two_warpgroups(number):
    for _ in range(20):
        out = torch.zeros(128, dtype=torch.int32, device="cuda")
        handshake[1, 256](out, number)
        assert torch.equal(out, 3 * torch.arange(128, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("number", [0, 77, 128, 255, 256])
def test_a_named_barrier_tells_all_threads_what_one_knows(number):
    out = torch.full((256,), -1, dtype=torch.int32, device="cuda")
    asked[1, 256](out, number)
    assert torch.equal(out, (torch.arange(256, device="cuda") // 128 == number // 128).int())


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_blocks_of_a_cluster_copy_to_each_other(blocks):
    x = torch.arange(300 * blocks * 128, dtype=torch.int32, device="cuda")
    out = torch.zeros_like(x)
    passed_on[300 * blocks, 128](x, out, blocks=blocks)
    assert torch.equal(out.view(300, blocks, 128), x.view(300, blocks, 128).roll(1, 1))


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_blocks_load_boxes_for_their_whole_cluster(blocks):
    x = torch.arange(blocks * 8 * 32, dtype=torch.int32, device="cuda").view(-1, 32)
    out = torch.zeros(100 * blocks, x.numel(), dtype=torch.int32, device="cuda")
    halved[100 * blocks, 128](fly.tensor_map(x, (8, 32)), out, blocks=blocks)
    assert torch.equal(out, x.flatten().expand_as(out))


def test_one_thread_of_each_warp_is_elected():
    counters = torch.tensor([100, 0], dtype=torch.int32, device="cuda")
    groups = torch.zeros(256, dtype=torch.int32, device="cuda")
    counted[10, 256](counters, groups, 6)
    assert counters.tolist() == [180, 80 % 7]
    assert torch.equal(groups, torch.arange(256, dtype=torch.int32, device="cuda") // 128)
