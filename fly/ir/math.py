"""Mathematical functions and integer helpers on traced values; elementwise on vectors."""

from __future__ import annotations

import functools
import math
from typing import Any

from fly.errors import DTypeError, ShapeError
from fly.ir.context import current, emit
from fly.ir.dtypes import f32, i1
from fly.ir.value import Value, as_value, binary, concat, select, unify


def _unary(name: str, function: str, value: Any, f32_only: bool = False) -> Value:
    value = as_value(value, function)
    if not value.dtype.is_float or (f32_only and value.dtype is not f32):
        raise DTypeError(f"{function} takes {'f32' if f32_only else 'floats'}, not {value!r}")
    return Value(emit(name, [value.ir], [value.type]).results[0], value.dtype, value.length)


def exp2(x: Any) -> Value:
    """2**x, f32: the hardware's approximate instruction; results below 2**-126 may flush to zero."""
    return _unary("math.exp2", "exp2", x, f32_only=True)


def log2(x: Any) -> Value:
    """Base-2 logarithm, f32: the hardware's approximate instruction; log2(0) is -inf."""
    return _unary("math.log2", "log2", x, f32_only=True)


def rcp(x: Any) -> Value:
    """1/x, f32, to about 1 ulp: the hardware's approximate instruction."""
    return _unary("fly.rcp", "rcp", x, f32_only=True)


def sqrt(x: Any) -> Value:
    """Square root of a float."""
    return _unary("math.sqrt", "sqrt", x)


def exp(x: Any) -> Value:
    """e**x, f32, through `exp2`."""
    return exp2(x * math.log2(math.e))


def tanh(x: Any) -> Value:
    """Hyperbolic tangent, f32, the fast way of the target.

    NVIDIA: the hardware's instruction, to 2**-11 of the result (PTX ISA, `tanh.approx.f32`). Others:
    1 - 2 / (exp(2 x) + 1), to about 2**-22 absolutely, exact at both ends.
    """
    if current().target.backend == "nvvm":
        return _unary("math.tanh", "tanh", x, f32_only=True)
    return 1.0 - 2.0 * rcp(exp2(x * (2 * math.log2(math.e))) + 1.0)


def fma(a: Any, b: Any, c: Any) -> Value:
    """a * b + c of floats with one rounding."""
    a, b = unify(a, b)
    a, c = unify(a, c)
    b, c = unify(b, c)
    if not a.dtype.is_float:
        raise DTypeError(f"fma takes floats, not {a!r}")
    return Value(emit("math.fma", [a.ir, b.ir, c.ir], [a.type]).results[0], a.dtype, a.length)


def _extremum(floats: str, integers: str, a: Any, b: Any) -> Value:
    if isinstance(a, int | float) and isinstance(b, int | float):
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
    return _unary("math.absf", "absolute", x) if x.dtype.is_float else select(x < 0, -x, x)


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
