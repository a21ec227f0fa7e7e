"""Loads, stores, pointers and shared buffers."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.errors import DTypeError, ShapeError, StaticValueError
from fly.ir import memory
from tests.filecheck import filecheck
from tests.host import HostFunction
from tests.tracing import matrix, trace


def test_accesses_in_mlir():
    def kernel(x: fly.Tensor, i: fly.i32):
        p = x.pointer
        a = memory.load(p, fly.f32)
        b = memory.load(p.offset(16), fly.f32, 4, align=16)
        memory.store(b, p.offset(i))
        memory.store(a, p.offset(i.to(fly.i64) * 4))
        c = memory.load_bounded(p, i, 64, fly.bf16, 8, align=16)
        memory.store_bounded(c, p, i, 64, align=4)

    filecheck(
        trace(kernel, matrix(), "i32"),
        """
        CHECK: func.func @kernel([[P:%.+]]: !llvm.ptr<1>, {{%.+}}: i32, [[I:%.+]]: i32)
        CHECK-NEXT: llvm.load [[P]] {alignment = 4 : i64} : !llvm.ptr<1> -> f32
        CHECK-NEXT: [[C16:%.+]] = arith.constant 16 : i32
        CHECK-NEXT: [[Q:%.+]] = llvm.getelementptr [[P]][[[C16]]] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
        CHECK-NEXT: llvm.load [[Q]] {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
        CHECK-NEXT: llvm.getelementptr [[P]][[[I]]] : (!llvm.ptr<1>, i32)
        CHECK-NEXT: llvm.store {{.+}} {alignment = 4 : i64} : vector<4xf32>, !llvm.ptr<1>
        CHECK: llvm.getelementptr [[P]][%{{.+}}] : (!llvm.ptr<1>, i64)
        CHECK: fly.load_bounded"([[P]], [[I]], {{.+}}) {align = 16 : i64} : (!llvm.ptr<1>, i32, i32) -> vector<8xbf16>
        CHECK: fly.store_bounded"({{.+}}, [[P]], [[I]], {{.+}}) {align = 4 : i64}
        """,
    )


def test_static_offsets_past_32_bits_are_wide():
    def kernel(x: fly.Tensor):
        assert x.pointer.offset(0) is x.pointer
        x.pointer.offset(2**31 - 1)
        x.pointer.offset(2**31)
        x.pointer.offset(-(2**31) - 1)

    filecheck(
        trace(kernel, matrix()),
        """
        CHECK: arith.constant 2147483647 : i32
        CHECK: arith.constant 2147483648 : i64
        CHECK: arith.constant -2147483649 : i64
        """,
    )


def copy_bools(flags: fly.Tensor, out: fly.Tensor, picked: fly.Tensor):
    """Bools are bytes in memory, one by one and as vectors; a bool as an offset is 0 or 1."""
    vector = flags.load(0, length=8)
    out.store(~vector, 0)
    out.store(flags.load(8), 8)
    value = memory.load(picked.pointer.offset(flags.load(1)), fly.i8)
    picked.store(value, 2)


def test_bools_are_bytes():
    run = HostFunction(trace(copy_bools, matrix("i1"), matrix("i1"), matrix("i8")), "copy_bools")
    flags = np.array([1, 1, 0, 1, 0, 0, 0, 1, 1], np.bool_)
    out, picked = np.zeros(9, np.bool_), np.array([5, 6, 0], np.int8)
    run(flags, out, picked)
    np.testing.assert_array_equal(out, [*~flags[:8], flags[8]])
    assert picked[2] == 6


def either(a: fly.Tensor, b: fly.Tensor, numbers: fly.Tensor):
    """The first element of a where the first of three numbers is less than the second, else that of b."""
    first = a.pointer.where(numbers.load(0) < numbers.load(1), b.pointer)
    numbers.store(memory.load(first, fly.i32), 2)


@pytest.mark.parametrize(("second", "expected"), [(2, 10), (1, 20)])
def test_one_of_two_addresses(second, expected):
    run = HostFunction(trace(either, matrix("i32"), matrix("i32"), matrix("i32")), "either")
    numbers = np.array([1, second, 0], np.int32)
    run(np.array([10], np.int32), np.array([20], np.int32), numbers)
    assert numbers[2] == expected


def test_shared_buffers():
    def kernel(i: fly.i32):
        buffer = fly.SharedMemory("scores", "bf16", 64)
        buffer.store(fly.bf16(1.0), 63)
        buffer.load(i, 8, align=16)
        with pytest.raises(ShapeError, match=r"index 64 is out of range for a shared buffer of 64 elements"):
            buffer.at(64)
        with pytest.raises(ShapeError, match=r"cannot store <f32> into a shared buffer of bf16"):
            buffer.store(fly.f32(1.0), 0)
        with pytest.raises(ShapeError, match=r"cannot store '1' into a shared buffer of bf16"):
            buffer.store("1", 0)

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: fly.alloc_shared"() {align = 16 : i64, bytes = 128 : i64, name = "scores"} : () -> !llvm.ptr<3>
        CHECK: llvm.store {{.+}} {alignment = 2 : i64} : bf16, !llvm.ptr<3>
        CHECK: llvm.load {{.+}} {alignment = 16 : i64} : !llvm.ptr<3> -> vector<8xbf16>
        """,
    )


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda p, i: p.offset(1.5), DTypeError, r"pointer offset 1.5 is no scalar integer"),
        (lambda p, i: p.offset(fly.f32(1.0)), DTypeError, r"pointer offset <f32> is no scalar integer"),
        (lambda p, i: p.where(i, p), DTypeError, r"a pointer's condition is <i32>; expected a scalar i1"),
        (lambda p, i: p.where(i < 1, i), DTypeError, r"<global pointer> or <i32>; expected another global pointer"),
        (
            lambda p, i: p.where(i < 1, fly.SharedMemory("s", "f32", 4).pointer),
            DTypeError,
            r"or <shared pointer>; expected another global pointer",
        ),
        (lambda p, i: memory.load(i, fly.f32), DTypeError, r"<i32> is no pointer"),
        (lambda p, i: memory.load(p, fly.f32, 0), ShapeError, r"cannot load 0 elements"),
        (lambda p, i: memory.load(p, fly.f32, align=3), ShapeError, r"alignment 3 is no power of two"),
        (lambda p, i: memory.store(1.0, p), DTypeError, r"can only store traced values, not 1.0"),
        (lambda p, i: memory.store_bounded(1.0, p, i, 4), DTypeError, r"can only store traced values, not 1.0"),
        (
            lambda p, i: memory.load_bounded(p, i.to(fly.i64), 4, fly.f32),
            DTypeError,
            r"offset of a bounded access must",
        ),
        (lambda p, i: memory.load_bounded(p, i, 4.0, fly.f32), DTypeError, r"bound of a bounded access must be"),
        (
            lambda p, i: memory.load_bounded(fly.SharedMemory("s", "f32", 4).pointer, i, 4, fly.f32),
            DTypeError,
            r"bounded accesses are to global memory, not through <shared pointer>",
        ),
        (lambda p, i: memory.alloc_shared("s", i), StaticValueError, r"'s' has size <i32>; expected a static number"),
        (lambda p, i: memory.alloc_shared("s", 0), ShapeError, r"'s' has size 0; expected a positive number"),
        (lambda p, i: memory.alloc_shared("s", 4, 3), ShapeError, r"'s' has alignment 3; expected a power of two"),
        (
            lambda p, i: [memory.alloc_shared("s", 4), memory.alloc_shared("s", 4)],
            ShapeError,
            r"a shared buffer named 's' exists already",
        ),
    ],
)
def test_mistakes(use, error, message):
    def kernel(x: fly.Tensor, i: fly.i32):
        with pytest.raises(error, match=message):
            use(x.pointer, i)

    trace(kernel, matrix(), "i32")
