"""Copies from global to shared tiles, alone and in rings, and the shapes that they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import LayoutError, ShapeError, TraceError
from fly.ir import memory
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

TILES = 3


def stream(
    source: fly.Tensor,
    out: fly.Tensor,
    *,
    tile: fly.SwizzledTile,
    vector: int,
    stages: int,
    turned: bool,
    tiles: int,
    columns: int,
):
    """out[j] = the j-th tile of source, row by row as it lies in shared memory (without the swizzle)."""
    rows = source.rows(columns)
    if turned:
        copy = fly.TransposedCopy(rows, tile, vector=vector, slot_of_piece=(0, 2, 1, 3))
    else:
        copy = fly.RowCopy(rows, tile, vector=vector, asynchronous=stages > 1)
    ring = fly.TileRing([(copy, fly.SharedTile.ring("tile", tile, source.dtype, stages)[0])], stages)
    thread, threads = fly.thread_id.x, fly.block_dim()[0]
    for j, flight in (loop := fly.range(tiles, carry=ring.start(fly.i32(0)))):
        (shared,), flight = ring.advance(j, flight)
        for i in fly.range(tile.rows * tile.columns // threads):
            index = i * threads + thread
            row, column = index // tile.columns, index % tile.columns
            value = memory.load(shared.pointer.offset(tile.base(row, column)), source.dtype)
            out.store(value, j * tile.rows + row, column)
        loop.next(flight)


def run(arch: str, block: int, source: np.ndarray, tile: fly.SwizzledTile, late: bool, **statics) -> np.ndarray:
    out = np.full((TILES * tile.rows, tile.columns), 77, np.float16)
    spec = matrix("f16", 2)
    columns = source.shape[1]
    module = trace(stream, spec, spec, arch=arch, block=block, tile=tile, tiles=TILES, columns=columns, **statics)
    Machine(Program.of(module, target(arch)), late)(flat(source, out))
    return out


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("arch", "block", "tile", "vector", "stages"),
    [
        ("sm_80", 64, fly.SwizzledTile(32, 64), 8, 2),
        ("sm_80", 64, fly.SwizzledTile(32, 64), 8, 3),
        ("sm_80", 128, fly.SwizzledTile(64, 64), 4, 4),
        ("sm_80", 128, fly.SwizzledTile(64, 32), 2, 2),
        ("gfx950", 64, fly.SwizzledTile(32, 64), 8, 1),
        ("gfx950", 256, fly.SwizzledTile(64, 128, 16), 8, 1),
        ("gfx942", 64, fly.SwizzledTile(64, 64, fold=True), 4, 1),
    ],
)
def test_rows_arrive_in_order_and_missing_ones_are_zero(arch, block, tile, vector, stages, late):
    count = TILES * tile.rows - tile.rows // 2 - 3  # the last tile is not full
    source = np.random.default_rng(0).standard_normal((count, tile.columns)).astype(np.float16)
    out = run(arch, block, source, tile, late, vector=vector, stages=stages, turned=False)
    np.testing.assert_array_equal(out[:count], source)
    assert (out[count:] == 0).all()


@pytest.mark.parametrize("columns", [72, 88, 96])
@pytest.mark.parametrize(("arch", "block", "vector", "stages"), [("sm_80", 128, 8, 2), ("gfx950", 256, 4, 1)])
def test_columns_that_are_no_power_of_two_arrive_and_missing_ones_are_zero(arch, block, vector, stages, columns):
    tile = fly.SwizzledTile(64, 96)
    count = TILES * tile.rows - 7
    source = np.random.default_rng(0).standard_normal((count, columns)).astype(np.float16)
    out = run(arch, block, source, tile, True, vector=vector, stages=stages, turned=False)
    np.testing.assert_array_equal(out[:count, :columns], source)
    assert (out[:, columns:] == 0).all() and (out[count:] == 0).all()


@pytest.mark.parametrize("missing", [0, 24])
def test_turned_tiles_whose_rows_are_no_power_of_two(missing):
    tile = fly.SwizzledTile(96, 64, fold=True)
    source = np.random.default_rng(0).standard_normal((TILES * 64, 96 - missing)).astype(np.float16)
    out = run("gfx942", 256, source, tile, False, vector=2, stages=1, turned=True).reshape(TILES, 96, 16, 4)
    wanted = source.reshape(TILES, 64, -1).transpose(0, 2, 1).reshape(TILES, 96 - missing, 4, 4, 4)
    pieces = wanted[:, :, :, [0, 2, 1, 3]].reshape(TILES, 96 - missing, 16, 4)
    np.testing.assert_array_equal(out[:, : 96 - missing], pieces)
    assert (out[:, 96 - missing :] == 0).all()


@pytest.mark.parametrize("vector", [2, 4])
@pytest.mark.parametrize(("rows", "columns", "block"), [(64, 64, 128), (128, 64, 256), (64, 128, 256)])
def test_turned_tiles_have_rows_as_columns_in_slot_order(rows, columns, block, vector):
    tile = fly.SwizzledTile(rows, columns, fold=True)
    count = TILES * columns - 5
    source = np.random.default_rng(0).standard_normal((count, rows)).astype(np.float16)
    out = run("gfx942", block, source, tile, False, vector=vector, stages=1, turned=True)
    padded = np.concatenate([source, np.zeros((5, rows), np.float16)])
    wanted = padded.reshape(TILES, columns, rows).transpose(0, 2, 1)  # tile, column of source, row of source
    # pieces of 4 rows go to slots 0, 2, 1, 3 within groups of 16
    pieces = wanted.reshape(TILES, rows, columns // 16, 4, 4)[:, :, :, [0, 2, 1, 3]]
    np.testing.assert_array_equal(out.reshape(TILES, rows, columns), pieces.reshape(TILES, rows, columns))


def two_streams(a: fly.Tensor, b: fly.Tensor, out: fly.Tensor, *, tile: fly.SwizzledTile, feed: str, tiles: int):
    """out[j] = tile j of a plus tile j (j - 1 if b lags, with zeros before the first) of b, row by row."""
    places = [fly.SharedTile.ring(name, tile, a.dtype, 1 if feed == "alternate" else 2)[0] for name in "ab"]
    copies = [fly.RowCopy(x.rows(tile.columns), tile, vector=8, asynchronous=True) for x in (a, b)]
    pairs = list(zip(copies, places, strict=True))
    if feed == "alternate":
        source = fly.AlternatingTiles(*pairs)
    else:
        source = fly.TileRing(pairs, 2, lags=(0, 1 if feed == "lag" else 0))
    thread, threads = fly.thread_id.x, fly.block_dim()[0]

    def element(shared: fly.SharedTile, index: fly.Value) -> fly.Value:
        at = tile.base(index // tile.columns, index % tile.columns)
        return memory.load(shared.pointer.offset(at), a.dtype).to(fly.f32)

    def add(j, values, index):
        place = (j * tile.rows + index // tile.columns, index % tile.columns)
        out.store(out.load(*place) + values, *place)

    for j, flight in (loop := fly.range(tiles, carry=source.start(fly.i32(0)))):
        (first, second), flight = source.advance(j, flight)
        for i in fly.range(tile.rows * tile.columns // threads):
            add(j, element(first, i * threads + thread), i * threads + thread)
        flight = source.halfway(j, flight)
        with fly.when(j > 0 if feed == "lag" else j >= 0):
            for i in fly.range(tile.rows * tile.columns // threads):
                add(j, element(second, i * threads + thread), i * threads + thread)
        loop.next(flight)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("feed", ["ring", "lag", "alternate"])
def test_two_copies_each_in_its_turn(feed, late):
    tile = fly.SwizzledTile(32, 64)
    random = np.random.default_rng(0)
    a, b = (random.integers(-99, 99, (TILES * tile.rows, tile.columns)).astype(np.float16) for _ in range(2))
    out = np.zeros(a.shape, np.float32)
    specs = (matrix("f16", 2), matrix("f16", 2), matrix("f32", 2))
    module = trace(two_streams, *specs, arch="sm_80", block=64, tile=tile, feed=feed, tiles=TILES)
    Machine(Program.of(module, target("sm_80")), late)(flat(a, b, out))
    late_b = np.concatenate([np.zeros((tile.rows, tile.columns)), b[: -tile.rows]])
    np.testing.assert_array_equal(out, a.astype(np.float32) + (late_b if feed == "lag" else b))


def rows_of(x: fly.Tensor, columns: int = 64) -> fly.RowView:
    return x.rows(columns)


def row_copy(x: fly.Tensor, *, columns: int = 64, tile=(64, 64), vector: int = 8, asynchronous: bool = False):
    return fly.RowCopy(x.rows(columns), fly.SwizzledTile(*tile), vector=vector, asynchronous=asynchronous)


def turned_copy(x: fly.Tensor, *, columns: int = 64, tile=(64, 64), slots=(0, 1, 2, 3)):
    return fly.TransposedCopy(x.rows(columns), fly.SwizzledTile(*tile), vector=4, slot_of_piece=slots)


@pytest.mark.parametrize(
    ("block", "use", "error", "message"),
    [
        (64, lambda x: row_copy(x, columns=128), ShapeError, r"64 columns in runs of 8 does not take rows of 128"),
        (64, lambda x: row_copy(x, vector=16), ShapeError, r"in runs of 8 does not take rows of 64 in vectors of 16"),
        (64, lambda x: row_copy(x, vector=3), ShapeError, r"rows of 64 elements do not divide into vectors of 3"),
        (60, lambda x: row_copy(x), ShapeError, r"60 threads do not divide into rows of 8 vectors"),
        (1024, lambda x: row_copy(x, tile=(16, 64)), ShapeError, r"a tile of 16 x 64 is too small for 1024 threads"),
        (192, lambda x: row_copy(x), ShapeError, r"64 rows do not divide into passes of 24 rows"),
        (64, lambda x: row_copy(x, asynchronous=True), ShapeError, r"gfx950 has no asynchronous copy of 16 bytes"),
        (
            64,
            lambda x: turned_copy(x, tile=(32, 64)),
            ShapeError,
            r"of 64 columns needs at least as many rows, not 32",
        ),
        (64, lambda x: turned_copy(x, slots=(0, 1, 3, 2)), LayoutError, r"lane 3 maps to 2, which is not linear"),
        (64, lambda x: turned_copy(x, slots=(0, 1, 2)), LayoutError, r"power-of-two length, not 3"),
        (
            64,
            lambda x: fly.TileRing([(row_copy(x), None)], 2),
            ShapeError,
            r"2 stages do not suit copies in registers",
        ),
        (
            64,
            lambda x: fly.TileRing([(row_copy(x), None)], 1, lags=(1,)),
            ShapeError,
            r"lags \(1,\) of 1 copies; expected 0, or 1 if asynchronous",
        ),
        (
            64,
            lambda x: fly.AlternatingTiles((row_copy(x), None), (row_copy(x), None)),
            ShapeError,
            r"alternating tiles need asynchronous copies",
        ),
        ((32, 2, 1), lambda x: row_copy(x), TraceError, r"need a one-dimensional block, not \(32, 2, 1\)"),
    ],
)
def test_shapes_that_do_not_fit(block, use, error, message):
    def kernel(x: fly.Tensor):
        with pytest.raises(error, match=message):
            use(x)

    trace(kernel, matrix("f16", 2), block=block)


def test_asynchronous_rings_need_two_slots():
    def kernel(x: fly.Tensor):
        with pytest.raises(ShapeError, match="1 stages do not suit asynchronous copies"):
            fly.TileRing([(row_copy(x, asynchronous=True), None)], 1)

    trace(kernel, matrix("f16", 2), arch="sm_80")
