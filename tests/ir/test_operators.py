"""The operations that Python's operators emit."""
# an expression in a kernel is an operation
# ruff: noqa: B015, B018

from __future__ import annotations

import fly
from tests.filecheck import filecheck
from tests.tracing import trace


def test_integers():
    def kernel(a: fly.i32, b: fly.i32):
        a + b
        a - b
        a * b
        a & b
        a | b
        a ^ b
        a << b
        a >> b
        -a
        ~a

    filecheck(
        trace(kernel, "i32", "i32"),
        """
        CHECK: func.func @kernel([[A:%.+]]: i32, [[B:%.+]]: i32)
        CHECK-SAME: fly.block = array<i32: 64, 1, 1>
        CHECK-NEXT: arith.addi [[A]], [[B]] : i32
        CHECK-NEXT: arith.subi [[A]], [[B]] : i32
        CHECK-NEXT: arith.muli [[A]], [[B]] : i32
        CHECK-NEXT: arith.andi [[A]], [[B]] : i32
        CHECK-NEXT: arith.ori [[A]], [[B]] : i32
        CHECK-NEXT: arith.xori [[A]], [[B]] : i32
        CHECK-NEXT: arith.shli [[A]], [[B]] : i32
        CHECK-NEXT: arith.shrsi [[A]], [[B]] : i32
        CHECK-NEXT: [[ZERO:%.+]] = arith.constant 0 : i32
        CHECK-NEXT: arith.subi [[ZERO]], [[A]] : i32
        CHECK-NEXT: [[ONES:%.+]] = arith.constant -1 : i32
        CHECK-NEXT: arith.xori [[A]], [[ONES]] : i32
        CHECK-NEXT: return
        """,
    )


def test_floats():
    def kernel(a: fly.f32, b: fly.f32):
        a + b
        a - b
        a * b
        a / b
        -a
        1.0 / a

    filecheck(
        trace(kernel, "f32", "f32"),
        """
        CHECK: func.func @kernel([[A:%.+]]: f32, [[B:%.+]]: f32)
        CHECK-NEXT: arith.addf [[A]], [[B]] : f32
        CHECK-NEXT: arith.subf [[A]], [[B]] : f32
        CHECK-NEXT: arith.mulf [[A]], [[B]] : f32
        CHECK-NEXT: arith.divf [[A]], [[B]] : f32
        CHECK-NEXT: arith.negf [[A]] : f32
        CHECK-NEXT: [[ONE:%.+]] = arith.constant 1.000000e+00 : f32
        CHECK-NEXT: arith.divf [[ONE]], [[A]] : f32
        CHECK-NEXT: return
        """,
    )


def test_comparisons():
    def kernel(a: fly.i32, b: fly.i32, x: fly.f32, y: fly.f32):
        a < b
        a <= b
        a > b
        a >= b
        a == b
        a != b
        fly.compare("ult", a, b)
        x < y
        x <= y
        x > y
        x >= y
        x == y
        x != y

    filecheck(
        trace(kernel, "i32", "i32", "f32", "f32"),
        """
        CHECK: func.func @kernel(
        CHECK-NEXT: arith.cmpi slt
        CHECK-NEXT: arith.cmpi sle
        CHECK-NEXT: arith.cmpi sgt
        CHECK-NEXT: arith.cmpi sge
        CHECK-NEXT: arith.cmpi eq
        CHECK-NEXT: arith.cmpi ne
        CHECK-NEXT: arith.cmpi ult
        CHECK-NEXT: arith.cmpf olt
        CHECK-NEXT: arith.cmpf ole
        CHECK-NEXT: arith.cmpf ogt
        CHECK-NEXT: arith.cmpf oge
        CHECK-NEXT: arith.cmpf oeq
        CHECK-NEXT: arith.cmpf une
        CHECK-NEXT: return
        """,
    )


def test_division_by_powers_of_two_costs_one_operation():
    def kernel(a: fly.i32):
        a // 8
        a % 8
        fly.ceil_div(a, 4)

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: func.func @kernel([[A:%.+]]: i32)
        CHECK-NEXT: [[THREE:%.+]] = arith.constant 3 : i32
        CHECK-NEXT: arith.shrsi [[A]], [[THREE]] : i32
        CHECK-NEXT: [[SEVEN:%.+]] = arith.constant 7 : i32
        CHECK-NEXT: arith.andi [[A]], [[SEVEN]] : i32
        CHECK-NOT: divsi
        CHECK: return
        """,
    )


def test_neutral_literals_cost_nothing_on_integers():
    def kernel(a: fly.i32, x: fly.f32):
        assert (a + 0) is a and (0 + a) is a and (a - 0) is a and (a * 1) is a and (1 * a) is a
        x + 0  # -0.0 + 0 is 0.0: an operation

    filecheck(
        trace(kernel, "i32", "f32"),
        """
        CHECK: func.func @kernel
        CHECK-NEXT: arith.constant 0.0
        CHECK-NEXT: arith.addf
        CHECK-NEXT: return
        """,
    )


def test_scalars_broadcast_and_narrow_values_widen():
    def kernel(a: fly.i32, b: fly.i64, x: fly.f32):
        a + b
        fly.broadcast(x, 4) * x
        fly.broadcast(x, 4) + 2

    filecheck(
        trace(kernel, "i32", "i64", "f32"),
        """
        CHECK: func.func @kernel([[A:%.+]]: i32, [[B:%.+]]: i64, [[X:%.+]]: f32)
        CHECK-NEXT: [[WIDE:%.+]] = arith.extsi [[A]] : i32 to i64
        CHECK-NEXT: arith.addi [[WIDE]], [[B]] : i64
        CHECK-NEXT: [[V:%.+]] = vector.broadcast [[X]] : f32 to vector<4xf32>
        CHECK-NEXT: [[W:%.+]] = vector.broadcast [[X]] : f32 to vector<4xf32>
        CHECK-NEXT: arith.mulf [[V]], [[W]] : vector<4xf32>
        CHECK-NEXT: [[U:%.+]] = vector.broadcast [[X]] : f32 to vector<4xf32>
        CHECK-NEXT: [[TWO:%.+]] = arith.constant dense<2.000000e+00> : vector<4xf32>
        CHECK-NEXT: arith.addf [[U]], [[TWO]] : vector<4xf32>
        """,
    )


def test_select_and_functions():
    def kernel(c: fly.i32, x: fly.f32, y: fly.f32):
        fly.select(c == 0, x, y)
        assert fly.select(True, x, y) is x
        fly.exp2(x)
        fly.log2(x)
        fly.rcp(x)
        fly.sqrt(x)
        fly.fma(x, y, 1.0)
        fly.maximum(x, y)
        fly.minimum(c, 3)
        fly.absolute(x)

    filecheck(
        trace(kernel, "i32", "f32", "f32"),
        """
        CHECK: arith.cmpi eq
        CHECK-NEXT: arith.select {{.+}} : f32
        CHECK-NEXT: math.exp2
        CHECK-NEXT: math.log2
        CHECK-NEXT: fly.rcp
        CHECK-NEXT: math.sqrt
        CHECK-NEXT: arith.constant 1.0
        CHECK-NEXT: math.fma
        CHECK-NEXT: arith.maxnumf
        CHECK-NEXT: arith.constant 3
        CHECK-NEXT: arith.minsi
        CHECK-NEXT: math.absf
        """,
    )
