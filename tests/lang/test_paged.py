"""Rows in pages: which page a row is asked for, what a window of one holds, and what makes none."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import ShapeError
from fly.ir import memory
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

PAGE, COLUMNS = 16, 8


def rows(pages: fly.Tensor, table: fly.Tensor, count: fly.Value) -> fly.PagedRows:
    return fly.PagedRows(pages, table, count, PAGE, COLUMNS)


@pytest.mark.parametrize("arch", ["gfx950", "sm_80"])
@pytest.mark.parametrize("count", [0, 1, 16, 37, 64])
@pytest.mark.parametrize("height", [8, 16])
def test_windows_are_the_rows(arch, count, height):
    """Every window of so many rows, those past the end too; the table's last entry names no page."""

    def kernel(pages: fly.Tensor, table: fly.Tensor, result: fly.Tensor, count: fly.i32):
        source, first = rows(pages, table, count), fly.block_id.x * height
        window = source.window(source.page(first), first, height)
        lane = fly.lane_id()
        with fly.when(lane < height):
            result.store(window.load(lane, 0, COLUMNS), first + lane, 0)

    program = Program.of(
        trace(kernel, matrix("f32", 3), matrix("i32"), matrix("f32", 2), "i32", arch=arch), target(arch)
    )
    pages = np.random.default_rng(count).standard_normal((6, PAGE, COLUMNS)).astype(np.float32)
    table = np.array([3, 0, 5, 99], np.int32)
    blocks = 96 // height
    result = np.full((96, COLUMNS), np.nan, np.float32)
    Machine(program)(flat(pages, table, result, count), (blocks, 1, 1))
    every = pages[np.minimum(table, 5)].reshape(-1, COLUMNS)[:count]
    np.testing.assert_array_equal(result[:count], every)
    assert (result[count:] == 0).all()


@pytest.mark.parametrize("arch", ["gfx950", "sm_80"])
@pytest.mark.parametrize(("page_size", "first"), [(16, 5), (1, None), (7, None), (24, 30)])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_scattered_rows_are_found_one_by_one(arch, page_size, first, count):
    """Addresses are rows of pages for every lane, past the end and with a table's entry of no page too."""

    def kernel(pages: fly.Tensor, table: fly.Tensor, result: fly.Tensor, exists: fly.Tensor, count: fly.i32):
        source = fly.PagedRows(pages, table, count, page_size, COLUMNS, None if first is None else fly.i32(first))
        assert source.scattered
        lane = fly.lane_id()
        row, there = source.row(lane, source.page_of(lane))
        with fly.when(lane < 16):
            result.store(memory.load(row, fly.f32, COLUMNS), lane, 0)
            exists.store(there.to(fly.i32), lane)

    program = Program.of(
        trace(kernel, matrix("f32", 3), matrix("i32"), matrix("f32", 2), matrix("i32"), "i32", arch=arch),
        target(arch),
    )
    pages = np.random.default_rng(count).standard_normal((6, page_size, COLUMNS)).astype(np.float32)
    table = np.array([3, 0, 5, 2, 1, 0, 4, 2, 99], np.int32)
    result, exists = np.full((16, COLUMNS), np.nan, np.float32), np.full(16, -1, np.int32)
    Machine(program)(flat(pages, table, result, exists, count), (1, 1, 1))
    every = pages[np.minimum(table, 5)].reshape(-1, COLUMNS)[first or 0 :]
    np.testing.assert_array_equal(result[:count], every[:count])
    assert exists.tolist() == [int(row < count) for row in range(16)]
    assert np.isfinite(result).all()


@pytest.mark.parametrize(
    ("page_size", "ranks", "message"),
    [
        (-1, (3, 1), "page_size is -1; expected 1 or more"),
        (0, (3, 1), "page_size is 0; expected 1 or more"),
        (16, (2, 1), "pages need a tensor of rank 3 and a table of rank 1"),
        (16, (3, 2), "pages need a tensor of rank 3 and a table of rank 1"),
    ],
)
def test_what_makes_no_pages(page_size, ranks, message):
    def kernel(pages: fly.Tensor, table: fly.Tensor, count: fly.i32):
        fly.PagedRows(pages, table, count, page_size, COLUMNS)

    with pytest.raises(ShapeError, match=message):
        trace(kernel, matrix("f32", ranks[0]), matrix("i32", ranks[1]), "i32")
