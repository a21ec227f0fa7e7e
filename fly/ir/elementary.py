"""Elementary functions in software: no target has instructions that are accurate enough, and none has a library.

Polynomials are minimax ones, fitted for these ranges. Where more than 24 bits are needed on the way (reduced
arguments, exponents of powers), the way is in f64. `ulp`: units in the last place of an f32 result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from fly.errors import DTypeError
from fly.ir.dtypes import f32, f64, i32, i64
from fly.ir.math import absolute, as_f32, as_float, exp2, fma, maximum, minimum, rcp, through_f32
from fly.ir.math import round as round_even
from fly.ir.tape import primitive
from fly.ir.value import Number, Value, constant, select, unify

_LEAST_NORMAL = 2.0**-126
_ROOT_HALF = 0x3F3504F3  # sqrt(1/2) as an f32


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """The sum of coefficients[i] * x**i, by Horner's rule."""
    result: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = fma(result, x, coefficient)
    return cast("Value", result)


# 2**r = 1 + r * polynomial, r from -0.5 to 0.5; to 2**-58
_EXP2 = (
    0.6931471805599453,
    0.24022650695910133,
    0.05550410866482174,
    0.009618129107593333,
    0.0013333558146379077,
    0.0001540353045807831,
    1.5252733867497948e-05,
    1.3215434817513502e-06,
    1.0178046479942715e-07,
    7.073860081915369e-09,
    4.4573843876991856e-10,
)


def _power_of_two(n: Value) -> Value:
    """2**n as an f64 for an i32 from -1022 to 1023."""
    return ((n.to(i64) + 1023) << 52).bitcast(f64)


@primitive
def exp2_of_f64(x: Value) -> Value:
    """2**x, f64: 2**(its nearest integer) times a polynomial of the rest."""
    near = minimum(maximum(x, -1100.0), 1100.0)
    whole = round_even(near)
    rest = near - whole
    n = whole.to(i32)
    half = n >> 1  # two factors: the result may be denormal
    result = fma(rest, polynomial(rest, _EXP2), 1.0) * _power_of_two(half) * _power_of_two(n - half)
    return select(x == x, result, x)


def _split(x: Value) -> tuple[Value, Value]:
    """(exponent i32, mantissa f32 from sqrt(1/2) to sqrt(2)) of a positive finite f32; anything of what is not."""
    denormal = x < _LEAST_NORMAL
    bits = select(denormal, x * 2.0**24, x).bitcast(i32)
    exponent = (bits - _ROOT_HALF) >> 23
    return exponent - select(denormal, 24, 0), (bits - (exponent << 23)).bitcast(f32)


# log(1 + f) = f - f**2 / 2 + f**3 * polynomial, f from sqrt(1/2) - 1 to sqrt(2) - 1; to 2**-30
_LOG = (
    0.3333331048488617,
    -0.24999986588954926,
    0.20002226531505585,
    -0.16669252514839172,
    0.14218664169311523,
    -0.12384331971406937,
    0.11872915923595428,
    -0.11789879202842712,
    0.06915581226348877,
)
_LN2_HIGH = 0.693359375  # nine bits: times an exponent it is exact
_LN2_LOW = math.log(2) - _LN2_HIGH


@primitive
@through_f32
def log(x: Value) -> Value:
    """Natural logarithm of a float of at most 32 bits, to 1 ulp, of denormal numbers too; NaN below zero.

    About 25 instructions; `fly.log2(x) * math.log(2)` is the fast way.
    """
    exponent, mantissa = _split(x)
    f = mantissa - 1.0
    n, square = exponent.to(f32), f * f
    correction = fma(f * square, polynomial(f, _LOG), fma(square, -0.5, n * _LN2_LOW))
    result = fma(n, _LN2_HIGH, f + correction)
    result = select(x < math.inf, result, x)  # infinity and NaN
    result = select(x == 0.0, -math.inf, result)
    return select(x < 0.0, math.nan, result)


# pi / 2 as the sum of two f64
_HALF_PI_HIGH, _HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
_TO_INTEGER = 1.5 * 2.0**52  # added to an f64 below 2**51, its last bits are those of the nearest integer
_LARGEST_ANGLE = 2.0**48
# sin r = r + r**3 * polynomial of r**2, cos r = 1 - r**2 / 2 + r**4 * polynomial, r from -pi / 4 to pi / 4
_SIN = (-0.1666666716337204, 0.008333329111337662, -0.0001983933470910415, 2.7183041311218403e-06)
_COS = (0.0416666679084301, -0.0013888883404433727, 2.4799519451335073e-05, -2.7210168696001347e-07)


def _sine(x: Value, quarters: int) -> Value:
    """sin(x + quarters * pi / 2) of an f32."""
    wide = x.to(f64)
    shifted = fma(wide, 2.0 / math.pi, _TO_INTEGER)
    turns = shifted - _TO_INTEGER
    rest = fma(turns, -_HALF_PI_LOW, fma(turns, -_HALF_PI_HIGH, wide)).to(f32)
    quadrant = shifted.bitcast(i64).to(i32) + quarters
    square = rest * rest
    sine = fma(rest * square, polynomial(square, _SIN), rest)
    cosine = fma(square * square, polynomial(square, _COS), fma(square, -0.5, 1.0))
    result = select((quadrant & 1) == 0, sine, cosine)
    result = select((quadrant & 2) == 0, result, -result)
    return select(absolute(x) <= _LARGEST_ANGLE, result, math.nan)


@primitive
@through_f32
def sin(x: Value) -> Value:
    """Sine of an angle in radians, a float of at most 32 bits, to 2 ulp up to abs(x) = 2**48; NaN beyond.

    The angle is reduced in f64, five instructions: slow on sm_86 and sm_89, which have few units for them.
    """
    return _sine(x, 0)


@primitive
@through_f32
def cos(x: Value) -> Value:
    """Cosine of an angle in radians, a float of at most 32 bits; accuracy and range as `sin`'s."""
    return _sine(x, 1)


# erf x = x + x * polynomial of x**2 up to 1; from there to 4 it is 1 - 2**-polynomial, and above 4 one
_ERF = (
    0.12837916612625122,
    -0.3761262595653534,
    0.11283600330352783,
    -0.026854444295167923,
    0.005189535673707724,
    -0.0008020842797122896,
    7.889124390203506e-05,
)
_ERFC = (
    0.0005103399744257331,
    1.6259748935699463,
    0.920765221118927,
    0.1486513316631317,
    -0.03145834431052208,
    0.004240937530994415,
    -0.0002677247684914619,
)


@primitive
@through_f32
def erf(x: Value) -> Value:
    """Error function of a float of at most 32 bits, to 2 ulp."""
    size = absolute(x)
    small = fma(x, polynomial(x * x, _ERF), x)
    large = 1.0 - exp2(-polynomial(minimum(size, 4.0), _ERFC))
    return select(size >= 1.0, select(x < 0.0, -large, large), small)


# log2((1 + s) / (1 - s)) = s * polynomial of s**2, s from -0.1716 to 0.1716; to 2**-45
_LOG2 = (
    2.8853900817778495,
    0.9617966941142609,
    0.5770779420744573,
    0.41220928389439726,
    0.31990432176780925,
    0.2829209073625923,
)


def _log2_in_f64(x: Value) -> Value:
    """Base-2 logarithm of a non-negative f32, to 2**-44 of the result."""
    exponent, mantissa = _split(x)
    f = mantissa.to(f64) - 1.0
    divisor = f + 2.0
    inverse = rcp(divisor.to(f32)).to(f64)
    inverse = inverse * fma(-divisor, inverse, 2.0)  # Newton's step doubles the digits
    s = f * inverse * fma(-divisor, inverse, 2.0)
    result = fma(s, polynomial(s * s, _LOG2), exponent.to(f64))
    result = select(x == 0.0, -math.inf, result)
    return select(x < math.inf, result, x.to(f64))


@primitive
def pow(x: Any, y: Any) -> Value:
    """x**y of floats of at most 32 bits, as IEEE 754's `pow`, to 1 ulp; about 60 instructions, half of them f64.

    A negative x has powers with integers only, others are NaN. `exp2(y * log2(x))` is the fast way; `x ** n` with a
    static integer multiplies.

    Raises:
        DTypeError: an operand is no float of at most 32 bits, or bf16 meets f16.
    """
    if isinstance(x, Number) and isinstance(y, Number):
        x = constant(x, f32)
    x, y = unify(x, y)
    dtype, x, y = as_float(x, "pow").dtype, as_f32(x, "pow"), as_f32(y, "pow")
    size = absolute(x)
    exponent = y.to(f64) * _log2_in_f64(size)
    near = minimum(maximum(exponent, -300.0), 300.0)
    whole = round_even(near)
    rest = near - whole
    result = (fma(rest, polynomial(rest, _EXP2), 1.0) * _power_of_two(whole.to(i32))).to(f32)
    result = select(exponent == exponent, result, math.nan)

    fits = absolute(y) < 2.0**24  # what does not is an even integer
    integer = select(fits, y, 0.0).to(i32)
    odd = (integer & 1) == 1
    result = select(odd & (x.bitcast(i32) < 0), -result, result)
    fraction = fits & (integer.to(f32) != y)
    result = select(fraction & (x < 0.0) & (size < math.inf), math.nan, result)
    one = (y == 0.0) | (x == 1.0) | ((size == 1.0) & (absolute(y) == math.inf))
    return select(one, 1.0, result).to(dtype)


_MOST_PRODUCTS = 4


def power(x: Any, y: Any) -> Value:
    """`x ** y`: products for small static integers, `pow` otherwise.

    Integers have static exponents from 0 on, and wrap. Floats to the power of 0 to 4 are multiplied (f32: to 2 ulp),
    as are f64 to any static integer; all other powers of floats are `pow`'s.

    Raises:
        DTypeError: an integer to a power that is traced, negative or no integer; a float that `pow` does not take.
    """
    if isinstance(y, Value) and y.dtype.is_int:
        if (isinstance(x, Value) and x.dtype.is_int) or isinstance(x, int):
            raise DTypeError(
                f"{x!r} ** {y!r}: an integer's exponent is a static integer from 0 on; convert with .to(fly.f32), or "
                "shift 1 for powers of two"
            )
        y = y.to(f32)
    if not isinstance(x, Value):
        return pow(x, y)
    if x.dtype.is_int and (type(y) is not int or y < 0):
        raise DTypeError(
            f"{x!r} ** {y!r}: an integer's exponent is a static integer from 0 on; convert with .to(fly.f32)"
        )
    if type(y) is int and (x.dtype.is_int or x.dtype is f64 or 0 <= y <= _MOST_PRODUCTS):
        return _products(x, y) if y >= 0 else 1.0 / _products(x, -y)
    return pow(x, y)


def _products(x: Value, n: int) -> Value:
    """x**n of a static n by squaring."""
    if n == 0:
        return constant(1, x.dtype, x.length)
    result: Value | None = None
    while n:
        if n & 1:
            result = x if result is None else result * x
        n >>= 1
        x = x * x if n else x
    assert result is not None
    return result
