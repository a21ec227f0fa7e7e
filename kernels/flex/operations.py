"""What torch's operations on numbers are in a kernel: one row an operation of ATen.

A row says to which type its operands are brought before, and computes with traced values. Floats of every width are
computed in f32, as torch's compiler does, and int8 and int16 in i32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import fly

from ..problem.scores import tanh

# what numbers of torch's types are in a kernel
DTYPES: Mapping[torch.dtype, fly.DType] = {
    torch.bool: fly.i1,
    **dict.fromkeys((torch.int8, torch.int16, torch.int32), fly.i32),
    torch.int64: fly.i64,
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), fly.f32),
}
LOG_2 = math.log(2.0)

RESULT, MET, GIVEN = "result", "met", "given"


@dataclass(frozen=True)
class Operation:
    """One operation.

    `compute(result, *operands)`: with the result's type and traced values or Python numbers. `operands`: whether
    they are brought to the `RESULT`'s type before, to the one in which they have `MET`, or stay as `GIVEN`.
    """

    compute: Callable[..., Any]
    operands: str = RESULT


def as_type(value: Any, dtype: fly.DType) -> fly.Value:
    """A traced value or a number as one of `dtype`."""
    if isinstance(value, fly.Value):
        return value.to(dtype)
    if dtype.is_int and dtype is not fly.i1:
        value = int(value)
    constant: fly.Value = dtype(bool(value) if dtype is fly.i1 else value)
    return constant


def _of(function: Callable[..., Any]) -> Operation:
    return Operation(lambda result, *operands: function(*operands))


def _compared(function: Callable[..., Any]) -> Operation:
    return Operation(lambda result, *operands: function(*operands), MET)


def _scaled(function: Callable[[Any, Any], Any]) -> Operation:
    """a + alpha · b, or a - alpha · b."""

    def compute(result: fly.DType, a: Any, b: Any, alpha: Any = 1) -> Any:
        return function(a, b if alpha == 1 else b * as_type(alpha, result))

    return Operation(compute)


def _add(a: Any, b: Any) -> Any:
    return a | b if a.dtype is fly.i1 else a + b


def _multiply(a: Any, b: Any) -> Any:
    return a & b if a.dtype is fly.i1 else a * b


def _floored(a: Any, b: Any) -> Any:
    return fly.floor(a / b) if a.dtype.is_float else a // b


def _truncated(a: Any, b: Any) -> Any:
    if a.dtype.is_float:
        return fly.trunc(a / b)
    quotient, exact = a // b, (a % b) == 0
    return fly.select(~exact & (quotient < 0), quotient + 1, quotient)


def _divide(result: fly.DType, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    return {None: operator.truediv, "floor": _floored, "trunc": _truncated}[rounding_mode](a, b)


def _remainder(a: Any, b: Any) -> Any:
    return a - fly.floor(a / b) * b if a.dtype.is_float else a % b


def _power(result: fly.DType, base: Any, exponent: Any) -> Any:
    whole = isinstance(exponent, int | float) and not isinstance(exponent, bool) and exponent == int(exponent)
    base = as_type(base, result)
    return base ** (int(exponent) if whole else as_type(exponent, result))


def _clamp(result: fly.DType, x: Any, least: Any = None, most: Any = None) -> Any:
    if least is not None:
        x = fly.maximum(x, as_type(least, result))
    return x if most is None else fly.minimum(x, as_type(most, result))


def _select(result: fly.DType, condition: Any, a: Any, b: Any) -> Any:
    return fly.select(as_type(condition, fly.i1), as_type(a, result), as_type(b, result))


def _sign(x: Any) -> Any:
    above, below = ((x > 0).to(x.dtype), (x < 0).to(x.dtype))
    return above - below


def _sigmoid(x: Any) -> Any:
    return fly.rcp(1.0 + fly.exp(-x))


def _log1p(x: Any) -> Any:
    return fly.select(fly.absolute(x) < 1e-4, x - x * x * 0.5, fly.log(1.0 + x))


def _expm1(x: Any) -> Any:
    return fly.select(fly.absolute(x) < 1e-3, x + x * x * 0.5, fly.exp(x) - 1.0)


def _rows(operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
    """With a row for each overload."""
    return {f"aten.{name}": row for names, row in operations.items() for name in names.split()}


_COMPARISONS = {name: _compared(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_SAME = Operation(lambda result, x, *_: as_type(x, result), GIVEN)
_LOGICAL = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}

OPERATIONS: Mapping[str, Operation] = _rows(
    {
        "add.Tensor add.Scalar": _scaled(_add),
        "sub.Tensor sub.Scalar": _scaled(operator.sub),
        "rsub.Scalar rsub.Tensor": _scaled(lambda a, b: b - a),
        "mul.Tensor mul.Scalar": _of(_multiply),
        "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode": Operation(_divide),
        "floor_divide.default floor_divide.Scalar": _of(_floored),
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": _of(_remainder),
        "fmod.Tensor fmod.Scalar": _of(lambda a, b: a - _truncated(a, b) * b),
        "pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor": Operation(_power, GIVEN),
        "neg.default": _of(operator.neg),
        "abs.default": _of(fly.absolute),
        "sign.default sgn.default": _of(_sign),
        "reciprocal.default": _of(lambda x: 1.0 / x),
        "sqrt.default": _of(fly.sqrt),
        "rsqrt.default": _of(fly.rsqrt),
        "exp.default": _of(fly.exp),
        "exp2.default": _of(fly.exp2),
        "expm1.default": _of(_expm1),
        "log.default": _of(fly.log),
        "log2.default": _of(lambda x: fly.log(x) * (1 / LOG_2)),
        "log10.default": _of(lambda x: fly.log(x) * math.log10(math.e)),
        "log1p.default": _of(_log1p),
        "sin.default": _of(fly.sin),
        "cos.default": _of(fly.cos),
        "erf.default": _of(fly.erf),
        "tanh.default": _of(tanh),
        "sigmoid.default": _of(_sigmoid),
        "relu.default": _of(lambda x: fly.maximum(x, as_type(0, x.dtype))),
        "floor.default": _of(lambda x: fly.floor(x) if x.dtype.is_float else x),
        "ceil.default": _of(lambda x: fly.ceil(x) if x.dtype.is_float else x),
        "trunc.default": _of(lambda x: fly.trunc(x) if x.dtype.is_float else x),
        "round.default": _of(lambda x: fly.round(x) if x.dtype.is_float else x),
        "maximum.default fmax.default": _of(fly.maximum),
        "minimum.default fmin.default": _of(fly.minimum),
        "clamp.default clamp.Tensor": Operation(_clamp),
        "clamp_min.default clamp_min.Tensor": Operation(_clamp),
        "clamp_max.default clamp_max.Tensor": Operation(lambda result, x, most: _clamp(result, x, None, most)),
        "where.self where.ScalarOther where.ScalarSelf where.Scalar": Operation(_select, GIVEN),
        **{f"{name}.Tensor {name}.Scalar": row for name, row in _COMPARISONS.items()},
        **{
            f"logical_{name}.default": Operation(
                lambda result, a, b, function=function: function(as_type(a, fly.i1), as_type(b, fly.i1)), GIVEN
            )
            for name, function in _LOGICAL.items()
        },
        "logical_not.default": Operation(lambda result, x: ~as_type(x, fly.i1), GIVEN),
        **{
            f"bitwise_{name}.Tensor bitwise_{name}.Scalar bitwise_{name}.Scalar_Tensor __{name}__.Tensor "
            f"__{name}__.Scalar": _of(function)
            for name, function in _LOGICAL.items()
        },
        "bitwise_not.default": _of(operator.invert),
        "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar __lshift__.Tensor __lshift__.Scalar": _of(
            operator.lshift
        ),
        "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __rshift__.Tensor __rshift__.Scalar": _of(
            operator.rshift
        ),
        "isnan.default": _compared(lambda x: x != x),  # what a NaN is
        "isinf.default": _compared(lambda x: fly.absolute(x) == math.inf),
        "_to_copy.default to.dtype": _SAME,
        "clone.default alias.default detach.default lift_fresh_copy.default contiguous.default": _SAME,
        "view.default _unsafe_view.default reshape.default expand.default squeeze.default": _SAME,
    }
)
# operations that make a number, and which of their arguments it is
CONSTANTS: Mapping[str, Callable[..., Any]] = {
    "aten.scalar_tensor.default": lambda value: value,
    "aten.full.default": lambda size, value: value,
    "aten.full_like.default": lambda like, value: value,
    "aten.new_full.default": lambda like, size, value: value,
    **dict.fromkeys(("aten.zeros.default", "aten.zeros_like.default"), lambda *_: 0),
    **dict.fromkeys(("aten.ones.default", "aten.ones_like.default"), lambda *_: 1),
    "aten.new_zeros.default": lambda *_: 0,
    "aten.new_ones.default": lambda *_: 1,
}


def listed() -> str:
    """The operations that are translated, as a message lists them."""
    names = {name.split(".")[1] for name in (*OPERATIONS, *CONSTANTS)}
    return ", ".join(sorted(name for name in names if not name.startswith("_")))
