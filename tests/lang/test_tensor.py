"""Tensors in global memory: 64-bit addresses, fixing coordinates, tiles and shares with tails, windows of rows."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.target import target
from fly.errors import DTypeError, ShapeError, StaticValueError
from tests.filecheck import filecheck
from tests.host import HostFunction
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace


def test_addresses_are_64_bit_from_the_first_product_on():
    def kernel(x: fly.Tensor, i: fly.i32, j: fly.i32):
        x.load(i, j)

    filecheck(
        trace(kernel, matrix("bf16", 2), "i32", "i32"),
        """
        CHECK: func.func @kernel([[P:%arg[0-9]+]]: !llvm.ptr<1>, {{%arg[0-9]+}}: i32, {{%arg[0-9]+}}: i32,
        CHECK-SAME: [[S:%arg[0-9]+]]: i64, [[I:%arg[0-9]+]]: i32, [[J:%arg[0-9]+]]: i32)
        CHECK-NEXT: [[I64:%.+]] = arith.extsi [[I]] : i32 to i64
        CHECK-NEXT: [[ROW:%.+]] = arith.muli [[I64]], [[S]] : i64
        CHECK-NEXT: [[J64:%.+]] = arith.extsi [[J]] : i32 to i64
        CHECK-NEXT: [[SUM:%.+]] = arith.addi [[ROW]], [[J64]] : i64
        CHECK-NEXT: [[TWO:%.+]] = arith.constant 2 : i64
        CHECK-NEXT: [[BYTES:%.+]] = arith.muli [[SUM]], [[TWO]] : i64
        CHECK-NEXT: [[Q:%.+]] = llvm.getelementptr [[P]][[[BYTES]]] : (!llvm.ptr<1>, i64)
        CHECK-NEXT: llvm.load [[Q]] {alignment = 2 : i64}
        """,
    )


def addresses(x: fly.Tensor, index: fly.Tensor, out: fly.Tensor):
    """out[0] = the byte distance of x[a, b, c] from x, computed where no memory is."""
    a, b, c = (index.load(i) for i in range(3))
    view = x[a, :, c]
    assert view.rank == 1 and view.shape[0] is x.shape[1] and view.stride[0] is x.stride[1]
    out.store(x._offset((a, b, c)), 0)


@functools.cache
def offsets_function() -> tuple[HostFunction, Any]:
    """The compiled kernel and a way to call it; `HostFunction` itself passes vectors alone."""
    specs = matrix("f32", 3, unit_stride=False), matrix("i32"), matrix("i64")
    compiled = HostFunction(trace(addresses, *specs), "addresses")
    p, i, l = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    return compiled, ctypes.CFUNCTYPE(None, p, i, i, i, l, l, l, p, i, p, i)(compiled.address)


def three(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=3, max_size=3)


@settings(max_examples=40, deadline=None)
@given(three(0, 2**31 - 1), three(-(2**15), 2**29))
def test_offsets_past_32_bits(index, strides):
    _, run = offsets_function()
    place, out = np.array(index, np.int32), np.zeros(1, np.int64)
    run(0, 1, 1, 1, *strides, place.ctypes.data, 3, out.ctypes.data, 1)
    assert out[0] == 4 * sum(i * s for i, s in zip(index, strides, strict=True))


def copy_tile(source: fly.Tensor, out: fly.Tensor, *, size: int, vector: int):
    """Every thread moves its share of a tile; out is as long as source."""
    layout = fly.Layout((size // vector, vector), (vector, 1))
    a, b = (x.tile(size, fly.block_id.x).share(layout, fly.thread_id.x) for x in (source, out))
    b.store(a.load() + 1.0)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 600), st.sampled_from([1, 2, 4]))
def test_tiles_and_their_tails(length, vector):
    size = 64 * vector
    source = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    out = np.zeros_like(source)
    module = trace(copy_tile, matrix(), matrix(), size=size, vector=vector)
    # the simulator checks that nothing past the end is touched, and alignments
    Machine(Program.of(module, target("gfx950")))(flat(source, out), (-(-length // size), 1, 1))
    np.testing.assert_array_equal(out, source + 1)


def test_a_share_reads_zeros_past_the_end():
    def kernel(source: fly.Tensor, out: fly.Tensor):
        share = source.tile(256, 0).share(fly.Layout((64, 4), (4, 1)), fly.thread_id.x)
        for i, element in enumerate(share.load()):
            out.store(element, fly.thread_id.x, i)

    source, out = np.ones(99, np.float32), np.full((64, 4), 7, np.float32)
    Machine(Program.of(trace(kernel, matrix(), matrix("f32", 2)), target("gfx950")))(flat(source, out))
    np.testing.assert_array_equal(out.ravel(), [1] * 99 + [0] * 157)


def copy_rows(source: fly.Tensor, out: fly.Tensor, *, rows: int):
    """Every lane moves one row of a window that starts at row 5."""
    read, write = (x.rows(8).window(5, rows) for x in (source, out))
    row = fly.thread_id.x
    write.store(read.load(row, 0, 8) * 2.0, row, 0)


@pytest.mark.parametrize("arch", ["gfx950", "sm_80"])
@pytest.mark.parametrize("count", [3, 5, 6, 20, 37, 100])
def test_windows_end_with_the_matrix(arch, count):
    rows = target(arch).wave_size
    source = np.random.default_rng(0).standard_normal((count, 8)).astype(np.float32)
    out = np.zeros_like(source)
    module = trace(copy_rows, matrix("f32", 2), matrix("f32", 2), arch=arch, rows=rows)
    Machine(Program.of(module, target(arch)))(flat(source, out))
    wanted = np.zeros_like(source)
    wanted[5 : 5 + rows] = 2 * source[5 : 5 + rows]
    np.testing.assert_array_equal(out, wanted)


MISTAKES = [
    (lambda x, m, i: x.at(), ShapeError, r"<tensor of rank 1, f32> takes 1 coordinates, not 0"),
    (lambda x, m, i: m.load(i), ShapeError, r"<tensor of rank 2, f32> takes 2 coordinates, not 1"),
    (lambda x, m, i: x.at(1.5), DTypeError, r"tensor coordinate 1.5 is no scalar integer"),
    (lambda x, m, i: x.at(i.to(fly.f32)), DTypeError, r"tensor coordinate <f32> is no scalar integer"),
    (lambda x, m, i: m[i], ShapeError, r"takes 2 indices, not 1"),
    (lambda x, m, i: m[0, 1:3], ShapeError, r"only the full slice ':' is supported on tensors"),
    (lambda x, m, i: x.store("1", 0), DTypeError, r"cannot store '1' into <tensor of rank 1, f32>; convert with"),
    (lambda x, m, i: x.store(i, 0), DTypeError, r"cannot store <i32> into .*; convert with \.to\(fly\.f32\)"),
    (
        lambda x, m, i: m.load(0, 0, length=4),
        ShapeError,
        r"<tensor of rank 2, f32> has a run-time last stride, and vectors need elements next to each other: pass "
        r"x\.contiguous\(\) \(to fly\.compile, a TensorSpec with unit_stride=True\), or load single elements$",
    ),
    (lambda x, m, i: m.rows(8), ShapeError, r"run-time last stride"),
    (lambda x, m, i: x[0].load(length=2), ShapeError, r"is one element, which has no neighbours"),
    (lambda x, m, i: x.__setitem__(i, 1), DTypeError, r"write x\.store\(value, <i32>\) for x\[<i32>\] = value$"),
    (lambda x, m, i: m.__setitem__((0, 1), 1), DTypeError, r"write x\.store\(value, 0, 1\) for x\[0, 1\] = value$"),
    (lambda x, m, i: len(x), StaticValueError, r"len\(\) of <tensor of rank 1, f32>, .* use x\.shape\[0\]$"),
    (lambda x, m, i: list(x), StaticValueError, r"not iterated over at compile time; use `for i in fly\.range\("),
    (
        lambda x, m, i: x + 1,
        DTypeError,
        r"add of <tensor of rank 1, f32>, which is memory; load values first: x\.load",
    ),
    (lambda x, m, i: 2.0 * x[i], DTypeError, r"mul of <tensor of rank 0, f32>, which is memory"),
    (lambda x, m, i: x[i] > 0, DTypeError, r"gt of <tensor of rank 0, f32>, which is memory"),
    (
        lambda x, m, i: fly.f32(1) + x[i],
        DTypeError,
        r"is no traced value or number; load from it first: x\.load\(i\)$",
    ),
    (lambda x, m, i: fly.SharedMemory("s", "f32", 4)[i], ShapeError, r"write s\.load\(<i32>\) for s\[<i32>\]$"),
    (
        lambda x, m, i: fly.SharedMemory("t", "f32", 4).__setitem__(0, 1.0),
        ShapeError,
        r"elements of a shared buffer are not assigned; write s\.store\(value, 0\)$",
    ),
    (
        lambda x, m, i: x.load(0, length=2).__setitem__(0, 1.0),
        DTypeError,
        r"elements of <2 x f32> are not assigned; make another with fly\.from_elements or fly\.select$",
    ),
    (lambda x, m, i: m.tile(8, 0), ShapeError, r"tile\(\) takes a vector, not <tensor of rank 2, f32>"),
    (lambda x, m, i: x.tile(0, i), ShapeError, r"tile size 0 is no static positive integer"),
    (lambda x, m, i: x.tile(i, 0), ShapeError, r"tile size <i32> is no static positive integer"),
    (lambda x, m, i: x.rows(8), ShapeError, r"rows\(\) takes a matrix, not <tensor of rank 1, f32>"),
    (
        lambda x, m, i: x.tile(16, 0).share(fly.Layout((4, 4), (1, 4)), i),
        ShapeError,
        r"values of layout \(4,4\):\(1,4\) are not contiguous",
    ),
    (
        lambda x, m, i: x.tile(16, 0).share(fly.Layout((4, 2), (2, 1)), i),
        ShapeError,
        r"layout \(4,2\):\(2,1\) does not cover a tile of 16 elements",
    ),
    (
        lambda x, m, i: x.tile(16, 0).share(fly.Layout((4, 4), (3, 1)), i),
        ShapeError,
        r"layout \(4,4\):\(3,1\) does not cover a tile of 16 elements",
    ),
    (
        lambda x, m, i: x.tile(16, 0).share(fly.Layout((4, 4), (4, 1)), i).store(i),
        ShapeError,
        r"cannot store <i32> into a share of 4 x f32",
    ),
]


@pytest.mark.parametrize(("use", "error", "message"), MISTAKES)
def test_mistakes(use, error, message):
    def kernel(x: fly.Tensor, m: fly.Tensor, i: fly.i32):
        with pytest.raises(error, match=message):
            use(x, m, i)

    trace(kernel, matrix(), matrix("f32", 2, unit_stride=False), "i32")


def sections(x: fly.Tensor, v: fly.Tensor, out: fly.Tensor, first: fly.i32):
    """out[:, i] = row i of the two rows of x from `first` on, and the two entries of v from there."""
    rows, entries = x.section(first, 2), v.section(first, 2)
    assert (rows.shape[0], entries.shape[0], rows.alignment, entries.alignment) == (2, 2, x.alignment, 4)
    i = fly.block_id.x
    out.store(rows.load(i, 1), i, 0)
    out.store(entries.load(i), i, 1)


def test_sections_start_further_on():
    module = trace(sections, matrix("f32", 2), matrix("f32"), matrix("f32", 2), "i32")
    x, v, out = (
        np.arange(40, dtype=np.float32).reshape(10, 4),
        np.arange(10, dtype=np.float32),
        np.zeros((2, 2), "f4"),
    )
    Machine(Program.of(module, target("gfx950")))(flat(x, v, out, 3), (2, 1, 1))
    assert out.tolist() == [[13, 3], [17, 4]]


def test_a_section_of_a_number():
    def kernel(x: fly.Tensor):
        x.section(0, 1)

    with pytest.raises(ShapeError, match="rank 0, f32> has no dimension to take a section of"):
        trace(kernel, matrix("f32", 0, unit_stride=False))


@fly.kernel
def literals(floats: fly.Tensor, ints: fly.Tensor, part: fly.Tensor):
    floats.store(3, 0)
    floats.store(0.5, 1)
    floats.store(fly.from_elements([1, floats.load(0), -2.5]), 2)
    ints.store(7, 0)
    part.tile(256, 0).share(fly.Layout((64, 4), (4, 1)), fly.thread_id.x).store(2)


def test_literals_take_the_type_of_where_they_go():
    floats, ints, part = np.zeros(5, np.float32), np.zeros(1, np.int64), np.zeros(10, np.float16)
    literals[1, 64](floats, ints, part)
    assert floats.tolist() == [3, 0.5, 1, 3, -2.5] and ints.tolist() == [7] and (part == 2).all()


@fly.kernel
def foreign(x: fly.Tensor, y: fly.Tensor):
    value = x.load(fly.thread_id.x)
    y.store(round(abs(value * np.float32(2.0)) + np.int64(1)), fly.thread_id.x)


def test_numpy_numbers_and_python_functions_of_numbers():
    x = np.linspace(-20, 20, 64, dtype=np.float32)
    y = np.zeros_like(x)
    foreign[1, 64](x, y)
    np.testing.assert_array_equal(y, np.rint(np.abs(x * np.float32(2)) + np.float32(1)))
