"""Mathematical functions and integer helpers on traced values; elementwise on vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, overload

from fly.errors import DTypeError, ShapeError
from fly.ir.context import current, emit
from fly.ir.dtypes import DType, bf16, f32, f64, i1, i32, i64
from fly.ir.tape import primitive
from fly.ir.value import Number, Value, as_value, binary, concat, constant, select, unify


def as_float(value: Any, function: str) -> Value:
    """A traced float; a Python number becomes an f32.

    Raises:
        DTypeError: an integer value, or an 8-bit float, which has no arithmetic.
    """
    if isinstance(value, Number):
        return constant(value, f32)
    operand = as_value(value, f"the argument of {function}")
    if not operand.dtype.is_float:
        raise DTypeError(f"{function} takes floats, not {operand!r}; convert with .to(fly.f32)")
    return operand


def as_f32(value: Any, function: str) -> Value:
    """A float of at most 32 bits as an f32, which is exact.

    Raises:
        DTypeError: any other type.
    """
    operand = as_float(value, function)
    if operand.dtype is f64:
        raise DTypeError(f"{function} takes f16, bf16 and f32, not {operand!r}; convert with .to(fly.f32)")
    return operand.to(f32)


def _unary(name: str, value: Value) -> Value:
    return Value(emit(name, [value.ir], [value.type]).results[0], value.dtype, value.length)


def through_f32(function: Callable[[Value], Value]) -> Callable[[Any], Value]:
    """A function of f32 for 16-bit floats too: widened, computed, and rounded once more."""

    @functools.wraps(function)
    def apply(x: Any) -> Value:
        x = as_float(x, function.__name__)
        return function(as_f32(x, function.__name__)).to(x.dtype)

    return apply


def exp2(x: Any) -> Value:
    """2**x of any float.

    f32: the hardware's instruction, to 2 ulp; results below 2**-126 may be zero. 16-bit floats go through it. f64: in
    software, to 1 ulp, denormal results to an ulp of those.
    """
    x = as_float(x, "exp2")
    if x.dtype is f64:
        from fly.ir.elementary import exp2_of_f64

        return exp2_of_f64(x)
    return _unary("math.exp2", x.to(f32)).to(x.dtype)


@through_f32
def log2(x: Value) -> Value:
    """Base-2 logarithm of a float of at most 32 bits: the hardware's approximate instruction; log2(0) is -inf.

    To 2**-22 absolutely where x is from 0.5 to 2, to 2 ulp elsewhere; denormal numbers may count as zero.
    """
    return _unary("math.log2", x)


@through_f32
def rcp(x: Value) -> Value:
    """1/x of a float of at most 32 bits, to about 1 ulp: the hardware's approximate instruction."""
    return _unary("fly.rcp", x)


def sqrt(x: Any) -> Value:
    """Square root of a float, correctly rounded in f32 and f64."""
    return _unary("math.sqrt", as_float(x, "sqrt"))


@primitive
def rsqrt(x: Any) -> Value:
    """1 / sqrt(x) of a float, to 2 ulp: the hardware's instruction (f64: a root and a division); 1 / sqrt(0) is inf.

    Denormal numbers are not zero: on AMD they are scaled first.
    """
    x = as_float(x, "rsqrt")
    if x.dtype is f64:
        return 1.0 / sqrt(x)
    wide = x.to(f32)
    if current().target.backend == "nvvm":
        return _unary("math.rsqrt", wide).to(x.dtype)
    denormal = wide < 2.0**-126
    root = _unary("math.rsqrt", select(denormal, wide * 2.0**24, wide))
    return select(denormal, root * 2.0**12, root).to(x.dtype)


def exp(x: Any) -> Value:
    """e**x of a float of at most 32 bits, through `exp2`: to 2 + abs(x) ulp, as the exponent is rounded first."""
    return exp2(as_f32(x, "exp") * math.log2(math.e)).to(as_float(x, "exp").dtype)


@primitive
@through_f32
def tanh(x: Value) -> Value:
    """Hyperbolic tangent of a float of at most 32 bits, the fast way of the target.

    NVIDIA: the hardware's instruction, to 2**-11 of the result (PTX ISA, `tanh.approx.f32`). Others:
    1 - 2 / (exp(2 x) + 1), to about 2**-22 absolutely, exact at both ends.
    """
    if current().target.backend == "nvvm":
        return _unary("math.tanh", x)
    return 1.0 - 2.0 * rcp(exp2(x * (2 * math.log2(math.e))) + 1.0)


def _to_integer(name: str, function: str, x: Any) -> Value:
    x = as_float(x, function)
    if x.dtype is bf16:  # whose integers are exact in both
        return _unary(name, x.to(f32)).to(bf16)
    return _unary(name, x)


def floor(x: Any) -> Value:
    """The largest integer not above a float, as a float; `.to(fly.i32)` makes an integer of it."""
    return _to_integer("math.floor", "floor", x)


def ceil(x: Any) -> Value:
    """The smallest integer not below a float, as a float."""
    return _to_integer("math.ceil", "ceil", x)


def trunc(x: Any) -> Value:
    """A float without its fraction."""
    return _to_integer("math.trunc", "trunc", x)


def round(x: Any) -> Value:
    """The nearest integer of a float, as a float; of two, the even one, as in Python."""
    return _to_integer("math.roundeven", "round", x)


def fma(a: Any, b: Any, c: Any) -> Value:
    """a * b + c of floats with one rounding."""
    if isinstance(a, Number) and isinstance(b, Number):
        a = unify(a, c)[0] if isinstance(c, Value) else constant(a, f32)
    a, b = unify(a, b)
    a, c = unify(a, c)
    b, c = unify(b, c)
    if not a.dtype.is_float:
        raise DTypeError(f"fma takes floats, not {a!r}")
    return Value(emit("math.fma", [a.ir, b.ir, c.ir], [a.type]).results[0], a.dtype, a.length)


def mul_wide(a: Any, b: Any) -> tuple[Value, Value]:
    """(high, low): the i32 halves of the 64-bit product of two i32 as unsigned numbers; elementwise on vectors.

    One instruction on NVIDIA (`mul.wide.u32`), one or two on AMD (`v_mad_u64_u32`, or `v_mul_hi_u32` and
    `v_mul_lo_u32`; the same of scalars).

    Raises:
        DTypeError: an operand is no i32 and no number that fits one.
    """
    if isinstance(a, Number) and isinstance(b, Number):
        a = constant(a, i32)
    a, b = unify(a, b)
    if a.dtype is not i32:
        raise DTypeError(f"mul_wide takes i32, not {a!r}")
    product = _zero_extended(a, i64) * _zero_extended(b, i64)
    return (product >> 32).to(i32), product.to(i32)


def _zero_extended(value: Value, target: DType) -> Value:
    """A narrower integer as an unsigned number."""
    type_ = target.mlir if value.length is None else target.vector(value.length)
    return Value(emit("arith.extui", [value.ir], [type_]).results[0], target, value.length)


def _extremum(floats: str, integers: str, a: Any, b: Any) -> Value:
    if isinstance(a, Number) and isinstance(b, Number):
        a = as_value(a)
    a, b = unify(a, b)
    if a.dtype is i1:
        raise DTypeError(f"a maximum or minimum takes numbers, not {a!r}; use | or &")
    return binary(floats if a.dtype.is_float else integers, a, b)


def maximum(a: Any, b: Any) -> Value:
    """The larger value; of a number and NaN, the number. Integers compare as signed."""
    return _extremum("arith.maxnumf", "arith.maxsi", a, b)


def minimum(a: Any, b: Any) -> Value:
    """The smaller value; of a number and NaN, the number. Integers compare as signed."""
    return _extremum("arith.minnumf", "arith.minsi", a, b)


def absolute(x: Any) -> Value:
    """|x|."""
    x = as_value(x)
    return _unary("math.absf", x) if x.dtype.is_float else select(x < 0, -x, x)


def divide_unsigned(a: Any, b: Any) -> Value:
    """a // b of integers whose bits are numbers without a sign. On AMD the fewer bits the compiler knows them to
    have, the fewer instructions: least below 2**22.

    Raises:
        DTypeError: not integers of one type.
    """
    a, b = unify(a, b)
    if not a.dtype.is_int:
        raise DTypeError(f"divide_unsigned takes integers, not {a!r}")
    return binary("arith.divui", a, b)


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Value, b: int) -> Value: ...
def ceil_div(a: Any, b: int) -> Any:
    """ceil(a / b) for a non-negative `a` (static or traced) and a static positive `b`."""
    if not isinstance(b, int) or b <= 0:
        raise DTypeError(f"ceil_div needs a static positive divisor, not {b!r}")
    return (a + (b - 1)) // b


def _reduce(combine: Any, value: Value) -> Value:
    """Pairwise over halves, so that vector instructions do most of the work."""
    if not isinstance(value, Value) or value.length is None:
        raise ShapeError(f"a reduction takes a vector, not {value!r}")
    while value.length > 1:
        half = value.length // 2
        rest = value[2 * half :] if value.length % 2 else None
        value = combine(value[:half], value[half : 2 * half])
        if rest is not None:
            value = concat([value, rest])
    return value[0]


def reduce_max(value: Value) -> Value:
    """The largest element of a vector."""
    if not isinstance(value, Value) or value.length is None:
        raise ShapeError(f"a reduction takes a vector, not {value!r}")
    parts = list(value)
    while len(parts) > 1:
        # chains of odd length: where a target has a maximum of three, two more elements are one instruction
        parts = [functools.reduce(maximum, parts[i : i + 9]) for i in range(0, len(parts), 9)]
    return parts[0]


def reduce_sum(value: Value) -> Value:
    """The sum of a vector's elements, added pairwise."""
    return _reduce(lambda a, b: a + b, value)
