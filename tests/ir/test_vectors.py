"""Vectors: elements, slices, joins, reductions, elementwise operations on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.errors import DTypeError, ShapeError
from fly.ir.value import shuffle
from tests.filecheck import filecheck
from tests.host import Evaluator
from tests.tracing import trace

SLICES = (slice(None), slice(2, 5), slice(None, None, -1), slice(1, None, 2), slice(-3, None))


def slices(v):
    return tuple(v[s] for s in SLICES)


def elements(v):
    return v[0], v[3], v[-1]


def joins(v):
    return fly.concat([v[:3], v[3:4], v[4:]]), fly.concat([v, v, v]), shuffle(v, v[::-1], [0, 8, 7, 15])


def reductions(v):
    return fly.reduce_sum(v), fly.reduce_max(v), fly.reduce_sum(v[:7]), fly.reduce_max(v[:1])


def long_maxima(v):
    """Of lengths at and around the chains that a maximum is made of."""
    many = fly.concat([v, v * 3, v - 7, v * -2])
    return tuple(fly.reduce_max(many[:n]) for n in LENGTHS)


LENGTHS = (2, 3, 9, 10, 11, 18, 19, 27, 32)


def rebuilt(v):
    return fly.from_elements(list(v)), fly.from_elements([v[i] for i in (5, 5, 0)])


@functools.cache
def compiled(function, dtype: str = "i32") -> Evaluator:
    return Evaluator(function, (dtype,), length=8)


vectors = st.lists(st.integers(-(2**20), 2**20), min_size=8, max_size=8).map(np.array)


def assert_same(got, wanted):
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(g, w)


@settings(max_examples=30, deadline=None)
@given(vectors)
def test_picking_and_joining_elements(v):
    assert_same(compiled(slices)(v), [v[s] for s in SLICES])
    assert_same(compiled(elements)(v), [v[0], v[3], v[-1]])
    assert_same(compiled(joins)(v), [v, np.tile(v, 3), [v[0], v[7], v[7], v[0]]])
    assert_same(compiled(rebuilt)(v), [v, v[[5, 5, 0]]])


@settings(max_examples=30, deadline=None)
@given(vectors)
def test_reductions(v):
    wanted = [v.sum(), v.max(), v[:7].sum(), v[0]]
    assert_same(compiled(reductions)(v), wanted)
    assert_same(compiled(reductions, "f64")(v), wanted)
    many = np.concatenate([v, v * 3, v - 7, v * -2])
    assert_same(compiled(long_maxima)(v), [many[:n].max() for n in LENGTHS])


def masked(v):
    return fly.select(v > 3, v, 0), fly.select(v[0] > 3, v, -v), fly.select(v > 3, 1, 2)


@settings(max_examples=30, deadline=None)
@given(vectors)
def test_select_per_element_and_as_a_whole(v):
    wanted = [np.where(v > 3, v, 0), v if v[0] > 3 else -v, np.where(v > 3, 1, 2)]
    assert_same(compiled(masked)(v), wanted)


def test_reductions_work_on_halves():
    def kernel(x: fly.f32):
        fly.reduce_sum(fly.broadcast(x, 8))

    filecheck(
        trace(kernel, "f32"),
        """
        CHECK: arith.addf {{.*}} : vector<4xf32>
        CHECK: arith.addf {{.*}} : vector<2xf32>
        CHECK: arith.addf {{.*}} : vector<1xf32>
        CHECK-NOT: arith.addf
        CHECK: vector.extract
        """,
    )


def test_bitcasts_keep_the_bits():
    def kernel(x: fly.i32):
        halves = x.bitcast(fly.bf16)
        assert (halves.dtype, halves.length) == (fly.bf16, 2)
        words = fly.broadcast(fly.i16(1), 8).bitcast(fly.i32)
        assert (words.dtype, words.length) == (fly.i32, 4)
        assert words.bitcast(fly.i64).length == 2
        assert x.bitcast(fly.f32).length is None
        with pytest.raises(ShapeError, match="32 bits are not a multiple"):
            x.bitcast(fly.i64)

    trace(kernel, "i32")


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda v: v[8], ShapeError, r"index 8 is out of range for <8 x f32>"),
        (lambda v: v[-9], ShapeError, r"index -9 is out of range"),
        (lambda v: v[1.5], ShapeError, r"indexed with 1.5; expected an integer or a slice"),
        (lambda v: v[8:], ShapeError, r"is empty"),
        (lambda v: v[0][0], ShapeError, r"<f32> is a scalar and cannot be indexed"),
        (lambda v: len(v[0]), ShapeError, r"<f32> is a scalar and has no len\(\)"),
        (lambda v: list(v[0]), ShapeError, r"<f32> is a scalar"),
        (lambda v: v + v[:4], ShapeError, r"<8 x f32> and <4 x f32> have different lengths"),
        (lambda v: fly.select(v[:4] > 0.0, v, v), ShapeError, r"condition <4 x i1> and values <8 x f32>"),
        (lambda v: fly.broadcast(v, 2), ShapeError, r"it is a vector already"),
        (lambda v: fly.broadcast(v[0], 0), ShapeError, r"cannot broadcast to 0 elements"),
        (lambda v: fly.concat([]), ShapeError, r"nothing to join"),
        (lambda v: fly.concat([v, v[0]]), ShapeError, r"cannot join <f32>: it is a scalar"),
        (lambda v: fly.concat([v, v.to(fly.f64)]), DTypeError, r"dtypes differ"),
        (lambda v: fly.concat([v, 1.0]), DTypeError, r"cannot join 1.0: it is no traced value"),
        (lambda v: fly.from_elements([]), ShapeError, r"at least one element"),
        (lambda v: fly.from_elements([v[0], fly.i32(1)]), DTypeError, r"scalars of one dtype"),
        (lambda v: fly.from_elements([1.0, 2.0]), DTypeError, r"vector element 1.0 is no traced value"),
        (lambda v: fly.from_elements([v[0], "1"]), DTypeError, r"vector element '1' is no traced value"),
        (lambda v: fly.reduce_sum(v[0]), ShapeError, r"a reduction takes a vector, not <f32>"),
        (lambda v: fly.maximum(v > 0.0, v < 0.0), DTypeError, r"takes numbers, not <8 x i1>; use \| or &"),
    ],
)
def test_mistakes(use, error, message):
    def kernel(x: fly.f32):
        with pytest.raises(error, match=message):
            use(fly.broadcast(x, 8))

    trace(kernel, "f32")
