"""Warpgroup products of 8-bit floats: tiles, registers and conversions against what the PTX ISA says."""

from __future__ import annotations

import secrets

import ml_dtypes
import numpy as np
import pytest
import torch
from mlir import ir

import fly
from fly import config
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.wgmma import PAIRS, Operand, PanelTile, WarpgroupAtom
from fly.backends.target import target
from fly.errors import DTypeError, LayoutError, ShapeError
from fly.lang.fragment import AccumulatorLayout
from fly.lang.signature import TensorSpec
from fly.runtime.compile import compile_kernel
from tests.backends.lowering import instructions
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

E4M3 = ml_dtypes.float8_e4m3fn
TILES = [PanelTile(64, 128, 128, 1), PanelTile(64, 64, 64, 1), PanelTile(128, 96, 32, 1), PanelTile(80, 256, 128, 1)]
every_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}-{t.swizzle}")


def swapped(address: int, swizzle: int) -> int:
    """The shared-memory address that engines use for a plain one (CUDA driver API, CUtensorMapSwizzle)."""
    return address ^ (address >> 7 & (swizzle // 16 - 1)) << 4


@every_tile
def test_a_tile_is_what_tma_writes_and_holds_every_element_once(tile):
    places = set()
    for row in range(tile.rows):
        for column in range(tile.columns):
            panel, byte = divmod(column, tile.swizzle)
            plain = panel * tile.rows * tile.swizzle + row * tile.swizzle + byte
            assert tile(row, column) == swapped(plain, tile.swizzle)
            places.add(tile(row, column))
    assert places == set(range(tile.bytes))


@every_tile
def test_the_hardware_finds_the_elements(tile):
    start = 0x18400
    operand = Operand(None, tile)
    stride = (operand.layout.bits >> 32 & 0x3FFF) << 4
    for t, step in enumerate(operand.steps(tile.columns // 32, tile.rows)):
        first = start + (step << 4)
        for row in range(tile.rows):
            for k in range(32):
                plain = first + row // 8 * stride + row % 8 * tile.swizzle + k
                assert swapped(plain, tile.swizzle) == start + tile(row, 32 * t + k)


def test_tiles_that_do_not_exist():
    with pytest.raises(LayoutError, match="elements of a panel tile have 4 bytes; expected 1 or 2"):
        PanelTile(8, 32, 128, 4)
    with pytest.raises(LayoutError, match="columns of a panel tile is 48; expected a multiple of 32"):
        PanelTile.widest(8, 48, 1)
    with pytest.raises(LayoutError, match="8-bit operands with k along columns only; store the transposed matrix"):
        _ = PanelTile(64, 128, 128, 1).by_rows


def fragment_of_a(thread: int, i: int) -> tuple[int, int]:
    """(row, k) of element i of A (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32")."""
    warp, lane = divmod(thread, 32)
    row = 16 * warp + lane // 4 + (8 if 4 <= i < 8 or i >= 12 else 0)
    return row, lane % 4 * 4 + i % 4 + (16 if i >= 8 else 0)


def test_registers_of_a_are_where_the_isa_says():
    atom = WarpgroupAtom(64, "f8e4m3")
    assert (atom.k, atom.values("a")) == (32, 16)
    for thread in range(128):
        for i in range(16):
            row, k = fragment_of_a(thread, i)
            assert atom.a((thread, i)) == row + 64 * k
    sixteen = WarpgroupAtom(64, "bf16")
    assert {sixteen.a((thread, i)) for thread in range(128) for i in range(8)} == set(range(64 * 16))


def test_the_order_of_columns_is_a_permutation():
    assert sorted(PAIRS(i) for i in range(16)) == list(range(16))


@pytest.mark.parametrize("n", [32, 64, 96, 224])
def test_accumulators_become_registers_without_an_exchange(n):
    """A thread's own accumulators, in another order, are A's registers of the columns in the order `PAIRS`."""
    layout = AccumulatorLayout(WarpgroupAtom(n, "f8e4m3"), "m")

    def kernel(source: fly.Tensor, result: fly.Tensor):
        lane = fly.lane_of(128)
        row0, column0 = fly.evaluate(layout.row_lane, lane), fly.evaluate(layout.column_lane, lane)
        places = zip(layout.value_rows, layout.value_columns, strict=True)
        values = fly.from_elements([source.load(row0 + row, column0 + column) for row, column in places])
        for t, registers in enumerate(wgmma.by_pairs(values, fly.f8e4m3)):
            fly.store(registers.bitcast(fly.i32), result.at(lane, 4 * t), align=16)

    module = trace(kernel, TensorSpec("f32", 2, 16, True), TensorSpec("i32", 2, 16, True), arch="sm_90a", block=128)
    assert "shuffle" not in str(module).replace("vector.shuffle", "")
    source = np.random.default_rng(n).normal(size=(64, n)).astype(np.float32)
    result = np.zeros((128, n // 8), np.int32)
    Machine(Program.of(module, target("sm_90a")))(flat(source, result))
    registers = result.view(E4M3).reshape(128, n // 32, 16)
    a = np.zeros((64, n), E4M3)
    for thread in range(128):
        for i in range(16):
            row, k = fragment_of_a(thread, i)
            a[row, k::32] = registers[thread, :, i]
    order = [16 * (slot // 16) + PAIRS(slot % 16) for slot in range(n)]
    np.testing.assert_array_equal(a.view(np.uint8), source.astype(E4M3)[:, order].view(np.uint8))


def emitted(body) -> ir.Module:
    """The trace of a kernel with one warpgroup."""

    def kernel(x: fly.Tensor):
        body(x)

    return trace(kernel, matrix("f32", 2), arch="sm_90a", block=128)


def shared(rows: int, columns: int, element_bytes: int = 1) -> Operand:
    tile = PanelTile.widest(rows, columns, element_bytes)
    return Operand(fly.alloc_shared(f"tile of {rows}", tile.bytes, 1024), tile)


def test_products_have_no_way_to_lie():
    def body(x):
        b, atom = shared(8, 64), WarpgroupAtom(8, "f8e4m3")
        product = wgmma.issue(atom, shared(64, 64), b, 2)
        registers = fly.broadcast(fly.i32(0), 4).bitcast(fly.f8e4m3)
        wgmma.wait(0, wgmma.issue(atom, (registers, registers), b, 2, product))

    filecheck(
        instructions(emitted(body)),
        r"""
        CHECK: m64n8k32.f32.e4m3.e4m3 {$0, $1, $2, $3}, da, db, first, 1, 1;
        CHECK-SAME: add.s64 db, $4, 2;
        CHECK-SAME: m64n8k32.f32.e4m3.e4m3 {$0, $1, $2, $3}, da, db, 1, 1, 1;
        CHECK: m64n8k32.f32.e4m3.e4m3 {$0, $1, $2, $3}, {$9, $10, $11, $12}, db, first, 1, 1;
        CHECK-SAME: {$13, $14, $15, $16}, db, 1, 1, 1;
        """,
    )


def tile_of_16_bits(x):
    wgmma.issue(WarpgroupAtom(8, "f8e4m3"), shared(64, 32), shared(8, 32, 2), 1)


def registers_of_16_bits(x):
    wgmma.issue(WarpgroupAtom(8, "f8e4m3"), [fly.broadcast(fly.bf16(0.0), 8)], shared(8, 32), 1)


def a_narrow_product(x):
    wgmma.by_pairs(fly.broadcast(fly.f32(0.0), 24), fly.f8e4m3)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (tile_of_16_bits, "a tile of WGMMA of f8e4m3 has elements of 2 bytes"),
        (registers_of_16_bits, "a register operand of WGMMA is <8 x bf16>; expected 16 x f8e4m3"),
        (a_narrow_product, "A registers of <24 x f32>: 48 columns are no multiple of 32"),
    ],
)
def test_operands_that_do_not_fit(body, text):
    with pytest.raises(ShapeError, match=text):
        emitted(body)


# conversions


@fly.kernel
def narrowed(a: fly.Tensor, b: fly.Tensor):
    """b = a, 8 elements a thread."""
    first = fly.thread_id.x * 8
    fly.store(a.load(first, length=8).to(b.dtype), b.at(first), align=8)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize(("kind", "name"), [("f8e4m3", "e4m3x2"), ("f8e5m2", "e5m2x2")])
def test_pairs_are_converted_by_one_instruction(arch, kind, name):
    specs = (TensorSpec("f32", 1, 16, True), TensorSpec(kind, 1, 16, True))
    isa = compile_kernel(narrowed, specs, {}, arch, (32, 1, 1)).isa
    assert isa.count(f"cvt.rn.satfinite.{name}.f32") == 4


@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_conversions_round_to_the_nearest_even(arch, dtype, monkeypatch):
    """By f32's bits where there is no instruction: every number, what lies in the middle of two, and what is none."""
    seed = secrets.randbits(31)
    monkeypatch.setenv(config.ARCH.name, arch)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    largest = finite[-1].item()
    drawn = torch.randn(512, generator=torch.Generator().manual_seed(seed)) * 2.0 ** torch.arange(-18, 18, 36 / 512)
    numbers = [every, (finite[1:] + finite[:-1]) / 2, drawn, torch.tensor([1e-45, -1e30, 1e30, 2.0**-126])]
    x = torch.cat(numbers)
    x = torch.cat([x, torch.zeros(-len(x) % 512)])
    out = torch.zeros(512, dtype=dtype)
    for part in x.split(512):
        narrowed[1, 64](part.contiguous(), out)
        wanted = part.clamp(-largest, largest).to(dtype)
        same = (out.view(torch.uint8) == wanted.view(torch.uint8)) | (out.float().isnan() & wanted.float().isnan())
        assert same.all(), f"seed {seed}: {part[~same][:4]} became {out[~same][:4].float()}"


def test_conversions_that_do_not_exist():
    for value in (lambda x: x.load(0, 0), lambda x: fly.broadcast(x.load(0, 0), 3)):
        with pytest.raises(DTypeError, match="expected a vector of an even number of elements"):
            emitted(lambda x, value=value: value(x).to(fly.f8e4m3))
