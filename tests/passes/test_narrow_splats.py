"""`narrow-splats`: operations with a number for all elements become operations on pairs or on single elements."""

from __future__ import annotations

from fly.passes.narrow_splats import ATTRIBUTE, NarrowSplats
from tests.filecheck import filecheck
from tests.passes.modules import apply, parse

BODY = """
    %x = arith.constant 2.0 : f32
    %y = arith.addf %x, %x : f32
    %v = arith.constant dense<1.0> : vector<4xf32>
    %w = arith.constant dense<3> : vector<4xi32>
    %s = vector.broadcast %y : f32 to vector<4xf32>
    %t = vector.broadcast %i : i32 to vector<4xi32>
    %1 = math.fma %v, %s, %v : vector<4xf32>
    %2 = arith.cmpi slt, %w, %t : vector<4xi32>
    %3 = arith.select %2, %1, %s : vector<4xi1>, vector<4xf32>
    %4 = arith.mulf %3, %v : vector<4xf32>
"""


def narrowed(asked: bool) -> str:
    """`BODY` behind the pass, in a kernel that asks for it or not."""
    return apply(NarrowSplats(), parse(BODY, f", {ATTRIBUTE}" if asked else ""))


def test_packed_operations_are_of_pairs_and_others_of_single_elements():
    text = narrowed(True)
    assert [text.count(part) for part in ("math.fma", "arith.cmpi slt", "arith.select", "arith.mulf")] == [2, 4, 4, 1]
    filecheck(
        text,
        """
        CHECK: math.fma {{.*}} : vector<2xf32>
        CHECK: arith.cmpi slt, {{.*}} : i32
        CHECK: arith.select {{.*}} : f32
        CHECK: arith.mulf {{.*}} : vector<4xf32>
        """,
    )


def test_kernels_that_do_not_ask_stay_as_they_are():
    filecheck(
        narrowed(False), "CHECK: math.fma {{.*}} : vector<4xf32>\nCHECK: arith.cmpi slt, {{.*}} : vector<4xi32>"
    )
