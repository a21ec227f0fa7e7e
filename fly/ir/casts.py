"""Conversions between element types: what `Value.to` does."""

from __future__ import annotations

import math

import numpy as np

from fly.errors import DTypeError
from fly.ir.context import context, current, emit
from fly.ir.dtypes import DType, f8e4m3fnuz, f8e5m2, f16, f32, i1, i8, i16, i32
from fly.ir.math import maximum, minimum
from fly.ir.mlir import ir
from fly.ir.value import Value, compare, select

# of an 8-bit float: bits of its mantissa, bias of its exponent, the largest number
_FORMATS = {"f8e4m3": (3, 7, 448.0), "f8e5m2": (2, 15, 57344.0), "f8e4m3fnuz": (3, 8, 240.0)}


def _to_float8(value: Value, target: DType) -> Value:
    """To the nearest even 8-bit float; what is too large, to the largest. Instructions convert pairs."""
    length = value.length
    if length is None or length % 2:
        raise DTypeError(f"conversion of {value!r} to {target}; expected a vector of an even number of elements")
    if target.name not in current().target.float8:
        return _to_float8_bits(value, target)
    if target is f8e4m3fnuz:
        # gfx942's instruction makes NaN of what is too large
        largest = _FORMATS[target.name][2]
        value = select(compare("ne", value, value), value, maximum(minimum(value, largest), -largest))
    attributes = {"to": ir.StringAttr.get(target.name, context())}
    op = emit("fly.narrow_pairs", [value.ir], [target.vector(length)], attributes)
    return Value(op.results[0], target, length)


def _to_float8_bits(value: Value, target: DType) -> Value:
    """The same of f32's bits, where the target has no instruction."""
    mantissa, bias, largest = _FORMATS[target.name]
    drop = 23 - mantissa  # bits of f32's mantissa
    bits = value.bitcast(i32)
    size = bits & 0x7FFFFFFF
    magnitude = minimum(size.bitcast(f32), largest)
    cut = magnitude.bitcast(i32)
    even = cut + ((cut >> drop) & 1) + ((1 << drop - 1) - 1)
    normal = (even >> drop) - ((127 - bias) << mantissa)
    # multiples of the smallest number: f32 rounds to them where they are its last bit
    unit = 2.0 ** (23 + 1 - bias - mantissa)
    subnormal = (magnitude + unit).bitcast(i32) - int(np.float32(unit).view(np.int32))
    number = select(magnitude < 2.0 ** (1 - bias), subnormal, normal)
    sign, nan = (bits >> 24) & 0x80, size > 0x7F800000
    if target is f8e4m3fnuz:  # there is no -0: its byte is NaN
        number = select(nan, 0x80, select(number == 0, 0, number | sign))
    else:
        number = select(nan, 0x7F, number) | sign
    return number.to(i8).bitcast(target)


def _from_float8(value: Value) -> Value:
    """As f32, which is exact: by instructions for pairs where the target has them, else through f16's bits."""
    if value.dtype.name in current().target.float8_to_f32 and value.length is not None and value.length % 2 == 0:
        attributes = {"from": ir.StringAttr.get(value.dtype.name, context())}
        op = emit("fly.widen_pairs", [value.ir], [f32.vector(value.length)], attributes)
        return Value(op.results[0], f32, value.length)
    bits = Value(value.ir, i8, value.length).to(i16)
    if value.dtype is f8e5m2:  # the upper half of an f16
        return (bits << 8).bitcast(f16).to(f32)
    size = bits & 0x7F  # one exponent bit less than f16, whose bias is larger by 8, or by 7
    number = ((size << 7) | (bits & 0x80) << 8).bitcast(f16).to(f32)
    if value.dtype is f8e4m3fnuz:
        return select((bits & 0xFF) == 0x80, math.nan, number * 128.0)
    return select(size == 0x7F, math.nan, number * 256.0)  # there is no infinity


def cast(value: Value, target: DType, rounding: str) -> Value:
    """See `Value.to`."""
    source = value.dtype
    if rounding not in ("nearest", "nearest_any"):
        raise DTypeError(f"unknown rounding {rounding!r}; expected 'nearest' or 'nearest_any'")
    if source is target:
        return value
    if target.kind == "float8" and source.is_float:
        return _to_float8(value.to(f32), target)
    if source.kind == "float8":
        if not target.is_float:
            raise DTypeError(
                f"no conversion from {source} to {target}: 8-bit floats convert to floats; first .to(fly.f32)"
            )
        return _from_float8(value).to(target, rounding)
    if target.kind == "float8":
        raise DTypeError(
            f"no conversion from {source} to {target}: only floats narrow to 8-bit ones; first .to(fly.f32)"
        )
    result = target.mlir if value.length is None else target.vector(value.length)

    if target is i1:
        return compare("ne", value, 0)

    def done(name: str, operand: Value = value) -> Value:
        return Value(emit(name, [operand.ir], [result]).results[0], target, value.length)

    if source.is_int and target.is_int:
        if source.bits > target.bits:
            return done("arith.trunci")
        return done("arith.extui" if source is i1 else "arith.extsi")
    if source.is_int:
        return done("arith.uitofp" if source is i1 else "arith.sitofp")
    if target.is_int:
        return done("arith.fptosi")
    if source.bits < target.bits:
        return done("arith.extf")
    if source.bits == target.bits:
        return value.to(f32).to(target, rounding)
    if rounding == "nearest_any" and source is f32 and value.length is not None:
        return done("fly.narrow")
    return done("arith.truncf")
