"""`fast-math`: which operations may be rewritten, and how far."""

from __future__ import annotations

from fly.passes.fast_math import FastMath
from tests.filecheck import filecheck
from tests.passes.modules import apply, parse


def test_arithmetic_may_be_contracted_and_lose_the_sign_of_zero():
    body = """
    %x = arith.constant 2.0 : f32
    %v = arith.constant dense<1.0> : vector<4xf32>
    %1 = arith.addf %x, %x : f32
    %2 = arith.subf %v, %v : vector<4xf32>
    %3 = arith.mulf %x, %x : f32
    %4 = arith.negf %x : f32
    %5 = math.fma %x, %x, %x : f32
    %6 = arith.maxnumf %x, %x : f32
    %7 = arith.minnumf %x, %x : f32
    """
    filecheck(
        apply(FastMath(), parse(body)),
        """
        CHECK: arith.addf {{.*}} fastmath<nsz,contract> : f32
        CHECK: arith.subf {{.*}} fastmath<nsz,contract> : vector<4xf32>
        CHECK: arith.mulf {{.*}} fastmath<nsz,contract> : f32
        CHECK: arith.negf {{.*}} fastmath<nsz,contract> : f32
        CHECK: math.fma {{.*}} fastmath<nsz,contract> : f32
        CHECK: arith.maxnumf {{.*}} fastmath<nsz,contract> : f32
        CHECK: arith.minnumf {{.*}} fastmath<nsz,contract> : f32
        """,
    )


def test_operations_in_regions_are_reached():
    body = """
    %x = arith.constant 2.0 : f32
    scf.for %j = %c0 to %n step %c1 {
      scf.if %c {
        %y = arith.addf %x, %x : f32
      }
    }
    """
    filecheck(apply(FastMath(), parse(body)), "CHECK: scf.if\nCHECK: arith.addf {{.*}} fastmath<nsz,contract>")


def test_divisions_comparisons_and_conversions_stay_exact():
    body = """
    %x = arith.constant 2.0 : f32
    %1 = arith.divf %x, %x : f32
    %2 = arith.cmpf oeq, %x, %x : f32
    %3 = arith.truncf %x : f32 to bf16
    %4 = math.exp2 %x : f32
    """
    text = apply(FastMath(), parse(body))
    assert text.count("arith.") == 6
    assert "fastmath" not in text
