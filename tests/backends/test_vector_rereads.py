"""`vector-rereads`: what a number that is made again may be made by."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.rocdl.vector_rereads import VectorRereads
from tests.passes.modules import apply, parse

READ = "llvm.amdgcn.readfirstlane"
AGAIN = '"fly.reread"(%x) : (i32) -> i32'
VECTOR = {
    "a quotient": "%x = arith.divui %i, %b : i32",
    "a sum with one": "%d = arith.remsi %i, %b : i32\n%x = arith.addi %d, %b : i32",
    "a float": "%f = arith.sitofp %i : i32 to f32\n%x = arith.fptosi %f : f32 to i32",
    "a comparison of floats": "%f = arith.sitofp %i : i32 to f32\n%t = arith.cmpf olt, %f, %f : f32\n"
    "%x = arith.select %t, %i, %b : i32",
    "a plain load": "%x = llvm.load %src : !llvm.ptr<1> -> i32",
    "a thread's number": '%t = "fly.id"() {name = "thread_id.x"} : () -> i32\n%x = arith.shrui %t, %b : i32',
    "a branch's result": "%x = scf.if %c -> i32 {\n%d = arith.divui %i, %b : i32\nscf.yield %d : i32\n"
    "} else {\nscf.yield %i : i32\n}",
    "a loop's result": "%x = scf.for %j = %c0 to %n step %c1 iter_args(%s = %i) -> i32 {\n"
    "%d = arith.divui %s, %b : i32\nscf.yield %d : i32\n}",
}
SCALAR = {
    "a parameter's product": "%x = arith.muli %i, %i : i32",
    "a quotient by a constant": "%k = arith.constant 24 : i32\n%x = arith.divui %i, %k : i32",
    "a block's number": '%x = "fly.id"() {name = "block_id.x"} : () -> i32',
    "a load of what does not change": "%x = llvm.load %src invariant : !llvm.ptr<1> -> i32",
    "a wave's number": '%t = "fly.id"() {name = "thread_id.x"} : () -> i32\n%k = arith.constant 0 : i32\n'
    '%x = "fly.shuffle"(%t, %k) {mode = "idx"} : (i32, i32) -> i32',
    "a loop's result": "%x = scf.for %j = %c0 to %n step %c1 iter_args(%s = %i) -> i32 {\n"
    "%d = arith.addi %s, %i : i32\nscf.yield %d : i32\n}",
}


def after(made: str) -> str:
    return apply(VectorRereads(), parse(f"%b = arith.addi %i, %i : i32\n{made}\n%y = {AGAIN}"))


@pytest.mark.parametrize("made", VECTOR.values(), ids=VECTOR.keys())
def test_what_vector_instructions_make_is_read_from_the_first_lane(made):
    text = after(made)
    assert READ in text and '"=v,0"' in text and "fly.reread" not in text


@pytest.mark.parametrize("made", SCALAR.values(), ids=SCALAR.keys())
def test_what_scalar_instructions_make_stays_where_it_is(made):
    text = after(made)
    assert READ not in text and "fly.reread" in text


@fly.kernel
def quotients(out: fly.Tensor, a: fly.i32, b: fly.i32):
    """a // b + a made again, and the sum of that with a float's integer, over a loop."""
    quotient = fly.divide_unsigned(a & 0xFFFFF, b & 0xFFFFF)
    sum_ = fly.remade(quotient + a)
    scaled = fly.early((a.to(fly.f32) * 1.5).to(fly.i32))
    for _, total in (loop := fly.range(b, carry=quotient)):
        loop.next(fly.early(total + scaled))
    with fly.when(fly.lane_id() == 0):
        out.store(sum_, 0)
        out.store(loop.results, 1)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_numbers_of_vector_instructions_can_be_made_again(arch, monkeypatch):
    """LLVM ended the process here."""
    monkeypatch.setenv("FLY_ARCH", arch)
    out = np.zeros(2, np.int32)
    quotients[(1, 1, 1), 64](out, 47, 5)
    assert out.tolist() == [9 + 47, 9 + 5 * 70]
