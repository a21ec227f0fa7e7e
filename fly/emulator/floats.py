"""Floating-point functions of the vector ALU (CDNA3 ISA, sections 6.4 and 16.7 to 16.10).

Transcendentals: the hardware documents 1 ULP (2^-24 relative) for exp, log, rcp, rsq and sqrt of f32 and flushes
subnormal inputs and results; here they are the correctly rounded or C-library value with the same flushing. sin and
cos take revolutions; hardware is accurate to 2^-20 absolute or so, here it is the rounded float64 value.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from fly.emulator.native import fma

_SIGN = np.uint32(0x80000000)
_TINY = np.float32(np.finfo(np.float32).tiny)


def flush(x: Any) -> np.ndarray:
    """Subnormal float32 values replaced by zeros of the same sign."""
    values: np.ndarray = np.asarray(x)
    small = np.abs(values) < _TINY
    if small.any():
        values = np.where(small, np.copysign(np.float32(0), values), values)
    return values


def _ordered(function: Any, combine: Any, a: Any, b: Any) -> np.ndarray:
    """fmin or fmax with -0 < +0, which the x86 instructions behind numpy do not order."""
    result: np.ndarray = function(a, b)
    zero = result == 0
    if zero.any():
        unsigned = np.uint32 if result.dtype == np.float32 else np.uint16 if result.itemsize == 2 else np.uint64
        x, y = np.broadcast_arrays(a, b)
        both = zero & (x == 0) & (y == 0)
        bits = combine(np.ascontiguousarray(x).view(unsigned), np.ascontiguousarray(y).view(unsigned))
        result = np.where(both, bits.view(result.dtype), result)
    return result


def maximum(a: Any, b: Any) -> np.ndarray:
    """maxNum: the other operand for a NaN, +0 above -0."""
    return _ordered(np.fmax, np.bitwise_and, a, b)


def minimum(a: Any, b: Any) -> np.ndarray:
    """minNum: the other operand for a NaN, -0 below +0."""
    return _ordered(np.fmin, np.bitwise_or, a, b)


def ieee_maximum(a: Any, b: Any) -> np.ndarray:
    """IEEE 754-2019 maximum: NaN when either is."""
    return _ordered(np.maximum, np.bitwise_and, a, b)


def ieee_minimum(a: Any, b: Any) -> np.ndarray:
    """IEEE 754-2019 minimum: NaN when either is."""
    return _ordered(np.minimum, np.bitwise_or, a, b)


def med3(a: Any, b: Any, c: Any) -> np.ndarray:
    """Median; the smallest of the three when one is NaN."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    if np.any(nan):
        return np.where(nan, minimum(minimum(a, b), c), middle)
    return middle


def exp2(x: Any) -> np.ndarray:
    """V_EXP_F32."""
    return flush(np.exp2(x))


def log2(x: Any) -> np.ndarray:
    """V_LOG_F32."""
    return positive_nan(np.log2(flush(x)), x)


def rcp(x: Any) -> np.ndarray:
    """V_RCP_F32."""
    return flush(np.float32(1) / flush(x))


def rsq(x: Any) -> np.ndarray:
    """V_RSQ_F32."""
    return positive_nan((1.0 / np.sqrt(flush(x).astype(np.float64))).astype(np.float32), x)


def positive_nan(result: np.ndarray, x: Any) -> np.ndarray:
    """The hardware's NaN for an invalid operation is positive; x86 makes a negative one."""
    made = np.isnan(result) & ~np.isnan(x)
    if np.any(made):
        return np.where(made, np.abs(result), result)
    return result


def root(x: Any) -> np.ndarray:
    """Square root of any width, correctly rounded."""
    return positive_nan(np.sqrt(x), x)


def sqrt(x: Any) -> np.ndarray:
    """V_SQRT_F32."""
    return root(flush(x))


def turns(function: Any) -> Any:
    """V_SIN_F32, V_COS_F32: the argument is in revolutions."""
    return lambda x: function(np.asarray(x).astype(np.float64) * (2 * np.pi)).astype(np.asarray(x).dtype)


def fract(x: Any) -> np.ndarray:
    """x - floor(x), kept below 1."""
    x = np.asarray(x)
    below_one = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    part: np.ndarray = np.minimum(x - np.floor(x), below_one)
    return part


def ldexp(x: Any, e: Any) -> np.ndarray:
    """x·2^e, one rounding."""
    x = np.asarray(x)
    scaled: np.ndarray = np.ldexp(x, np.clip(np.asarray(e).astype(np.int32), -4200, 4200))
    return scaled


def frexp_exponent(x: Any) -> np.ndarray:
    """Exponent of x = m·2^e with 0.5 <= |m| < 1; 0 for 0, infinity and NaN. int32."""
    x = np.asarray(x)
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32)


def frexp_mantissa(x: Any) -> np.ndarray:
    """m of x = m·2^e; infinity and NaN pass through."""
    values: np.ndarray = np.asarray(x)
    return np.where(np.isfinite(values), np.frexp(values)[0], values)


def _exponent(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.float16:
        return (np.ascontiguousarray(x).view(np.uint16) >> np.uint16(10) & np.uint16(31)).astype(np.int32)
    if x.dtype == np.float32:
        return (np.ascontiguousarray(x).view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(np.int32)
    return (np.ascontiguousarray(x).view(np.uint64) >> np.uint64(52) & np.uint64(2047)).astype(np.int32)


def div_scale(s0: Any, s1: Any, s2: Any) -> tuple[np.ndarray, np.ndarray]:
    """V_DIV_SCALE: (s0 scaled so that s2/s1 can be refined without loss, whether V_DIV_FMAS must scale back).

    s1 is the denominator, s2 the numerator, s0 one of them.
    """
    s0, s1, s2 = (np.ascontiguousarray(x) for x in np.broadcast_arrays(s0, s1, s2))
    single = s0.dtype == np.float32
    shift, far, tiny = (64, 96, 23) if single else (128, 768, 53)
    least = np.finfo(s0.dtype).tiny
    quotient = np.abs(s2 / s1)
    q_small = (quotient < least) & np.isfinite(s1) & np.isfinite(s2)
    r_small = (np.abs(s0.dtype.type(1) / s1) < least) & np.isfinite(s1)
    d_small = (np.abs(s1) < least) & (s1 != 0)
    up, down = np.ldexp(s0, shift), np.ldexp(s0, -shift)
    is_den, is_num = s0 == s1, s0 == s2
    cases = [
        (s1 == 0) | (s2 == 0),
        _exponent(s2) - _exponent(s1) >= far,
        d_small,
        r_small & q_small,
        r_small,
        q_small,
        _exponent(s2) <= tiny,
    ]
    values = [
        np.full_like(s0, np.nan),
        np.where(is_den, up, s0),
        up,
        np.where(is_den, down, s0),
        down,
        np.where(is_num, up, s0),
        up,
    ]
    flags = [False, True, False, True, False, True, False]
    return np.select(cases, values, s0), np.select(cases, flags, False)


def div_fmas(s0: Any, s1: Any, s2: Any, scale: Any, kind: str) -> np.ndarray:
    """V_DIV_FMAS: fma, scaled back in the lanes that V_DIV_SCALE marked."""
    result = fma(s0, s1, s2, kind)
    if not np.any(scale):
        return result
    bias, shift = (127, 64) if kind == "f32" else (1023, 128)
    a, b, c = (np.broadcast_to(x, result.shape) for x in (s0, s1, s2))
    power = np.where(_exponent(c) > bias, shift, -shift)
    # the scaled sum is rounded once, also where it is subnormal
    small = scale & (np.abs(np.ldexp(result, power)) < 2 * np.finfo(result.dtype).tiny)
    scaled = np.ldexp(result, power)
    for at in np.argwhere(small & np.isfinite(result)):
        i = tuple(at)
        scaled[i] = _exact_scaled_sum(float(a[i]), float(b[i]), float(c[i]), int(power[i]), result.dtype)
    return np.where(scale, scaled, result)


def _exact_scaled_sum(a: float, b: float, c: float, power: int, dtype: np.dtype) -> float:
    """(a·b + c)·2^power rounded once to float32 or float64, by integer arithmetic."""
    exact = (Fraction(a) * Fraction(b) + Fraction(c)) * Fraction(2) ** power
    info = np.finfo(dtype)
    lowest = info.minexp - info.nmant
    units = exact / Fraction(2) ** lowest
    if abs(units) < 2 ** (info.nmant + 1):  # subnormal or just above: the spacing is the smallest one
        return math.copysign(float(abs(round(units))) * 2.0**lowest, exact if exact else 1.0)
    return float(dtype.type(float(exact)))


def div_fixup(s0: Any, s1: Any, s2: Any) -> np.ndarray:
    """V_DIV_FIXUP: the special cases of s2 / s1, whose refined quotient is s0."""
    s0, s1, s2 = np.broadcast_arrays(s0, s1, s2)
    sign = np.signbit(s1) ^ np.signbit(s2)
    kind = s0.dtype.type
    negative_nan = -np.abs(kind(np.nan))
    far = _exponent(s2) - _exponent(s1) < {2: -26, 4: -150, 8: -1075}[s0.dtype.itemsize]
    cases = [
        np.isnan(s2),
        np.isnan(s1),
        ((s1 == 0) & (s2 == 0)) | (np.isinf(s1) & np.isinf(s2)),
        (s1 == 0) | np.isinf(s2),
        np.isinf(s1) | (s2 == 0) | far,
        np.isnan(s0),  # the refinement overflowed
    ]
    infinite, zero = np.full_like(s0, np.inf), np.zeros_like(s0)
    values = [s2, s1, np.full_like(s0, negative_nan), infinite, zero, infinite]
    magnitude = np.select(cases[2:], values[2:], np.abs(s0))
    signed = np.where(sign & ~cases[2], -np.abs(magnitude), magnitude)
    return np.select(cases[:2], values[:2], signed)


def fma16(a: Any, b: Any, c: Any) -> np.ndarray:
    """Fused multiply-add of float16: product and sum are exact in float64."""
    total: np.ndarray = (a.astype(np.float64) * b + c).astype(np.float16)
    return total
