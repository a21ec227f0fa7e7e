"""Traced scalars and vectors compute what Python does: lowered as every backend does, and run on the CPU."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import fly
from tests.host import NUMPY, Evaluator

EXAMPLES = settings(max_examples=60, deadline=None)
BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}


@functools.cache
def compiled(function, inputs: tuple[str, ...], length: int | None = None) -> Evaluator:
    return Evaluator(function, inputs, length)


def wrap(number: int, bits: int) -> int:
    return (number + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def ints(bits: int) -> st.SearchStrategy[int]:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    near = st.sampled_from([low, low + 1, -1, 0, 1, high - 1, high])
    return st.one_of(near, st.integers(-9, 9), st.integers(low, high))


def pairs(bits: int):
    return st.tuples(ints(bits), ints(bits))


WRAPPING = (operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor)


def all_wrapping(a, b):
    return (*(f(a, b) for f in WRAPPING), -a, ~a)


@pytest.mark.parametrize("dtype", BITS)
def test_integer_arithmetic_wraps(dtype):
    bits = BITS[dtype]

    @EXAMPLES
    @given(pairs(bits))
    def check(pair):
        a, b = pair
        wanted = [wrap(int(x), bits) for x in all_wrapping(a, b)]
        assert [int(x) for x in compiled(all_wrapping, (dtype, dtype))(a, b)] == wanted

    check()


def division(a, b):
    return a // b, a % b


@pytest.mark.parametrize("dtype", BITS)
def test_division_rounds_towards_minus_infinity(dtype):
    bits = BITS[dtype]

    @EXAMPLES
    @given(pairs(bits))
    @example((-7, 2))
    @example((7, -2))
    @example((-8, 2))
    def check(pair):
        a, b = pair
        assume(b != 0 and not (a == -(1 << (bits - 1)) and b == -1))
        assert compiled(division, (dtype, dtype))(a, b) == (a // b, a % b)

    check()


DIVISORS = (1, 2, 3, 7, 8, 64, 100, -1, -2, -3, -8, 1 << 20)


def literal_division(a):
    return tuple(x for d in DIVISORS for x in (a // d, a % d))


def literal_numerators(b):
    return tuple(x for n in (100, -100, 0) for x in (n // b, n % b))


@EXAMPLES
@given(ints(32))
def test_division_by_literals(a):
    assume(a != -(2**31))
    assert [int(x) for x in compiled(literal_division, ("i32",))(a)] == list(literal_division(a))


@EXAMPLES
@given(ints(32))
def test_division_of_literals(b):
    assume(b != 0)
    assert [int(x) for x in compiled(literal_numerators, ("i32",))(b)] == list(literal_numerators(b))


COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def comparisons(a, b):
    return tuple(f(a, b) for f in COMPARISONS)


def literal_comparisons(a):
    return (a < 5, a <= 5, a > 5, a >= 5, a == 5, a != 5)


@pytest.mark.parametrize("dtype", ["i8", "i32", "i64"])
def test_integer_comparisons(dtype):
    @EXAMPLES
    @given(pairs(BITS[dtype]))
    def check(pair):
        a, b = pair
        assert compiled(comparisons, (dtype, dtype))(a, b) == comparisons(a, b)
        assert compiled(literal_comparisons, (dtype,))(a) == literal_comparisons(a)

    check()


@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [False, True])
def test_bools_compare_and_combine_as_in_python(a, b):
    def logic(a, b):
        return (a & b, a | b, a ^ b)

    run = compiled(comparisons, ("i1", "i1"))
    assert run(a, b) == comparisons(a, b)
    assert Evaluator(logic, ("i1", "i1"))(a, b) == (a & b, a | b, a ^ b)
    assert Evaluator(lambda a: ~a, ("i1",))(a) == (not a)
    assert Evaluator(lambda a: a.to(fly.i32) + a.to(fly.i64) + a.to(fly.f32).to(fly.i32), ("i1",))(a) == 3 * a


floats = st.floats(width=32)


@EXAMPLES
@given(floats, floats)
@example(math.nan, 1.0)
@example(math.nan, math.nan)
@example(-0.0, 0.0)
@example(math.inf, -math.inf)
def test_float_comparisons_treat_nan_as_python_does(a, b):
    assert compiled(comparisons, ("f32", "f32"))(a, b) == comparisons(a, b)


def float_arithmetic(a, b):
    return a + b, a - b, a * b, a / b, -a


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_float_arithmetic_is_ieee(dtype):
    @EXAMPLES
    @given(floats, floats)
    def check(a, b):
        number = NUMPY[dtype].type
        with np.errstate(all="ignore"):
            wanted = float_arithmetic(number(a), number(b))
        np.testing.assert_array_equal(compiled(float_arithmetic, (dtype, dtype))(a, b), wanted)

    check()


def extrema(a, b):
    return fly.maximum(a, b), fly.minimum(a, b)


@EXAMPLES
@given(floats, floats)
@example(math.nan, 1.0)
@example(1.0, math.nan)
def test_extrema_prefer_the_number_to_nan(a, b):
    assume(a != b)  # which of -0.0 and 0.0 is the larger is not said
    number = np.float32
    wanted = np.fmax(number(a), number(b)), np.fmin(number(a), number(b))
    np.testing.assert_array_equal(compiled(extrema, ("f32", "f32"))(a, b), wanted)


@EXAMPLES
@given(pairs(32))
def test_integer_extrema_absolute_and_ceil_div(pair):
    a, b = pair
    assert compiled(extrema, ("i32", "i32"))(a, b) == (max(a, b), min(a, b))
    assert compiled(fly.absolute, ("i32",))(a) == wrap(abs(a), 32)
    number = abs(a) // 2
    assert compiled(ceil_div_by_7, ("i32",))(number) == -(-number // 7)


@EXAMPLES
@given(pairs(32))
def test_division_without_a_sign(pair):
    a, b = (number & 0xFFFFFFFF for number in pair)
    assume(b != 0)
    assert compiled(fly.divide_unsigned, ("i32", "i32"))(*pair) == wrap(a // b, 32)


def ceil_div_by_7(a):
    return fly.ceil_div(a, 7)


SHIFTS = (0, 1, 5, 31)


def literal_shifts(a):
    return tuple(x for s in SHIFTS for x in (a << s, a >> s))


def shifts(a, count):
    return a << count, a >> count, 1 << count, -1 >> count


@EXAMPLES
@given(ints(32), st.integers(0, 31))
def test_shifts(a, count):
    assert list(compiled(literal_shifts, ("i32",))(a)) == [wrap(x, 32) for x in literal_shifts(a)]
    assert list(compiled(shifts, ("i32", "i32"))(a, count)) == [wrap(x, 32) for x in shifts(a, count)]


def unsigned(a, b):
    return tuple(fly.compare(p, a, b) for p in ("ult", "ule", "ugt", "uge"))


@EXAMPLES
@given(pairs(32))
def test_unsigned_comparisons(pair):
    a, b = (x % 2**32 for x in pair)
    assert compiled(unsigned, ("i32", "i32"))(*pair) == (a < b, a <= b, a > b, a >= b)


def selections(c, a, b):
    return fly.select(c, a, b), fly.select(c, a, 7), fly.select(c, -1, b), fly.select(~c, a, b), fly.select(c, 1, 2)


@EXAMPLES
@given(st.booleans(), pairs(32))
def test_select(c, pair):
    a, b = pair
    wanted = (a if c else b, a if c else 7, -1 if c else b, b if c else a, 1 if c else 2)
    assert compiled(selections, ("i1", "i32", "i32"))(c, a, b) == wanted


def widenings(a, b):
    return a + b, a < b, a * 2 + b


@EXAMPLES
@given(ints(32), ints(64))
def test_a_narrow_integer_widens_with_its_sign(a, b):
    wanted = (wrap(a + b, 64), a < b, wrap(wrap(a * 2, 32) + b, 64))
    assert compiled(widenings, ("i32", "i64"))(a, b) == wanted


def conversions(a):
    return tuple(a.to(d) for d in (fly.i1, fly.i8, fly.i16, fly.i32, fly.i64, fly.f32, fly.f64))


@EXAMPLES
@given(ints(64))
def test_integer_conversions(a):
    with np.errstate(all="ignore"):
        wanted = (a != 0, wrap(a, 8), wrap(a, 16), wrap(a, 32), a, np.float32(a), np.float64(a))
    assert compiled(conversions, ("i64",))(a) == wanted


def float_conversions(a):
    return a.to(fly.f32), a.to(fly.f64), a.to(fly.i1)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])  # rounding to 16 bits is the GPU's, not this CPU's
def test_float_conversions(dtype):
    @EXAMPLES
    @given(floats)
    @example(math.nan)
    @example(1e-40)
    @example(-0.0)
    def check(number):
        with np.errstate(all="ignore"):
            a = NUMPY[dtype].type(number)
            wanted = np.float32(a), np.float64(a), bool(a != 0)
        np.testing.assert_array_equal(compiled(float_conversions, (dtype,))(a), wanted)

    check()


def to_i32(a):
    return a.to(fly.i32)


@EXAMPLES
@given(st.floats(-(2.0**31), 2.0**31 - 128, width=32))
def test_float_to_integer_truncates(a):
    assert compiled(to_i32, ("f32",))(a) == math.trunc(a)


def test_bits_are_reinterpreted():
    got = Evaluator(
        lambda a: (a.bitcast(fly.i32), a.bitcast(fly.i16), a.bitcast(fly.i32).bitcast(fly.f32)), ("f32",)
    )(1.5)
    assert got[0] == 0x3FC00000
    assert list(got[1]) == [0, 0x3FC0]
    assert got[2] == np.float32(1.5)


def test_fma_rounds_once():
    a = np.float32(1 + 2**-12)
    got = Evaluator(lambda a, b, c: (fly.fma(a, b, c), a * b + c), ("f32",) * 3)(a, a, -1.0)
    exact = np.float64(a) * np.float64(a) - 1
    assert got[0] == np.float32(exact) and got[1] != got[0]
