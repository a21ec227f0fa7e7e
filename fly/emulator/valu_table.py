"""The vector ALU's operations as data: `name: Op(source kinds, destination kind, function)`.

Section numbers and pseudocode: CDNA3 and CDNA4 ISA, sections 16.7 (VOP2), 16.8 (VOP1) and 16.10 (VOP3). Float rows
with `flushes` obey MODE's f32 denormal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fly.emulator import convert, floats
from fly.emulator.bits import bit_count, bit_reverse, count_leading, count_trailing
from fly.emulator.native import fma

_Unary = Callable[[Any], Any]
_Binary = Callable[[Any, Any], Any]
_Ternary = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Op:
    """One operation. `accumulates` appends the destination as last source; `native` marks a ufunc with `out=`."""

    sources: tuple[str, ...]
    result: str
    function: Callable[..., Any]
    flushes: bool = False
    accumulates: bool = False
    native: bool = False
    saturates: str = ""  # wide kind for CLAMP on integers


def _op(sources: str, result: str, function: Callable[..., Any], **flags: Any) -> Op:
    native = isinstance(function, np.ufunc) and result in ("u32", "i32", "f32") and set(sources.split()) == {result}
    return Op(tuple(sources.split()), result, function, native=native, **flags)


def _shift(function: _Binary, bits: int, kind: type) -> _Binary:
    mask = kind(bits - 1) if kind not in (np.int32, np.int16, np.int64) else None

    def run(a: Any, b: Any) -> Any:
        amount = a & mask if mask is not None else (a & a.dtype.type(bits - 1)).astype(kind)
        return function(b, amount)

    return run


def _shift64(function: _Binary, kind: type) -> _Binary:
    return lambda a, b: function(b, (a & np.uint32(63)).astype(kind))


def _i24(x: Any) -> Any:
    return (x << 8) >> 8


def _u24(x: Any) -> Any:
    return x & np.uint32(0xFFFFFF)


def _high(a: Any, b: Any, wide: type, narrow: type) -> Any:
    return (np.asarray(a).astype(wide) * np.asarray(b).astype(wide) >> wide(32)).astype(narrow)


def _bfe_u(a: Any, b: Any, c: Any) -> Any:
    width = c & np.uint32(31)
    return (a >> (b & np.uint32(31))) & ((np.uint32(1) << width) - np.uint32(1))


def _bfe_i(a: Any, b: Any, c: Any) -> Any:
    offset, width = (b & np.uint32(31)).astype(np.int32), (c & np.uint32(31)).astype(np.int32)
    up = np.maximum(np.int32(32) - offset - width, np.int32(0))
    moved = (np.asarray(a).view(np.uint32) << np.minimum(up, 31).astype(np.uint32)).view(np.int32)
    return np.where(width == 0, np.int32(0), moved >> np.minimum(up + offset, np.int32(31)))


def _align(unit: int) -> _Ternary:
    def run(a: Any, b: Any, c: Any) -> Any:
        data = np.asarray(a).astype(np.uint64) << np.uint64(32) | b
        return (data >> ((c & np.uint32(32 // unit - 1)) * np.uint32(unit)).astype(np.uint64)).astype(np.uint32)

    return run


def _sad(bits: int, shift: int = 0) -> _Ternary:
    def run(a: Any, b: Any, c: Any) -> Any:
        total = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
        mask = np.uint32((1 << bits) - 1) if bits < 32 else np.uint32(0xFFFFFFFF)
        for i in range(32 // bits):
            x, y = a >> np.uint32(i * bits) & mask, b >> np.uint32(i * bits) & mask
            total = total + (np.maximum(x, y) - np.minimum(x, y))
        return (total << np.uint32(shift)) + c

    return run


def _lerp(a: Any, b: Any, c: Any) -> Any:
    out = np.uint32(0)
    for i in (0, 8, 16, 24):
        s, byte = np.uint32(i), np.uint32(255)
        out = out | (((a >> s & byte) + (b >> s & byte) + (c >> s & np.uint32(1))) >> np.uint32(1)) << s
    return out


def _sat(low: int, high: int, kind: type) -> _Unary:
    return lambda x: np.clip(x, low, high).astype(kind)


def _ashr_pk(low: int, high: int) -> _Ternary:
    def run(a: Any, b: Any, c: Any) -> Any:
        s = (c & np.uint32(31)).astype(np.int32)
        x, y = (np.clip(v >> s, low, high).astype(np.uint32) & np.uint32(255) for v in (a, b))
        return x | y << np.uint32(8)

    return run


def _sat_pk_u8(a: Any) -> Any:
    low = np.clip((a & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16), 0, 255).astype(np.uint32)
    high = np.clip((a >> np.uint32(16)).astype(np.uint16).view(np.int16), 0, 255).astype(np.uint32)
    return low | high << np.uint32(8)


def _cvt_pk_u8(a: Any, b: Any, c: Any) -> Any:
    at = (b & np.uint32(3)) * np.uint32(8)
    value = np.clip(np.nan_to_num(np.rint(np.asarray(a).astype(np.float64))), 0, 255).astype(np.uint32)
    return (c & ~(np.uint32(255) << at)) | value << at


def _norm(scale: int, low: int, kind: type) -> _Binary:
    def run(a: Any, b: Any) -> Any:
        pair = [
            np.rint(np.clip(np.nan_to_num(np.asarray(x).astype(np.float64)), low, 1) * scale).astype(np.int32)
            for x in (a, b)
        ]
        return convert.pack16(*(p.astype(kind) for p in pair))

    return run


def _mul_legacy(a: Any, b: Any) -> Any:
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def _dot2(a: Any, b: Any, c: Any, half: Callable[[Any, int], Any]) -> Any:
    al, ah, bl, bh = half(a, 0), half(a, 1), half(b, 0), half(b, 1)
    return fma(ah, bh, fma(al, bl, c))


def bf16_half(x: Any, high: int) -> Any:
    """One bfloat16 half of packed uint32 as float32."""
    return (x & np.uint32(0xFFFF0000) if high else x << np.uint32(16)).view(np.float32)


def f16_half(x: Any, high: int) -> Any:
    """One float16 half of packed uint32 as float32."""
    bits = (x >> np.uint32(16) if high else x & np.uint32(0xFFFF)).astype(np.uint16)
    return bits.view(np.float16).astype(np.float32)


def dot_int(bits: int, signed: bool) -> _Ternary:
    """Sum of products of packed integers, plus a 32-bit accumulator."""

    def run(a: Any, b: Any, c: Any) -> Any:
        total = np.asarray(c).astype(np.int64)
        for i in range(32 // bits):
            left, right = np.uint32(32 - bits - i * bits), np.uint32(32 - bits)
            x, y = (
                ((v << left).view(np.int32) >> np.int32(right)).astype(np.int64)
                if signed
                else (v << left >> right).astype(np.int64)
                for v in (np.asarray(a), np.asarray(b))
            )
            total = total + x * y
        return total.astype(np.uint32)

    return run


def _f32_f16(a: Any) -> Any:
    return np.asarray(a).astype(np.float32)


def _ubyte(i: int) -> _Unary:
    return lambda a: (a >> np.uint32(8 * i) & np.uint32(255)).astype(np.float32)


VOP1: dict[str, Op] = {
    "v_mov_b32": _op("u32", "u32", np.positive),
    "v_mov_b64": _op("u64", "u64", np.positive),
    "v_accvgpr_mov_b32": _op("u32", "u32", np.positive),
    "v_not_b32": _op("u32", "u32", np.invert),
    "v_bfrev_b32": _op("u32", "u32", bit_reverse),
    "v_ffbh_u32": _op("u32", "u32", lambda a: np.where(a == 0, -1, count_leading(a)).astype(np.int32)),
    "v_ffbl_b32": _op("u32", "u32", lambda a: np.where(a == 0, -1, count_trailing(a)).astype(np.int32)),
    "v_ffbh_i32": _op(
        "i32", "u32",
        lambda a: np.where((a == 0) | (a == -1), -1, count_leading(np.where(a < 0, ~a, a).view(np.uint32))).astype(
            np.int32
        ),
    ),
    "v_sat_pk_u8_i16": _op("u32", "u32", _sat_pk_u8),
    "v_prng_b32": _op("u32", "u32", lambda a: a << np.uint32(1) ^ (a >> np.uint32(31)) * np.uint32(197)),
    "v_cvt_f32_i32": _op("i32", "f32", lambda a: np.asarray(a).astype(np.float32)),
    "v_cvt_f32_u32": _op("u32", "f32", lambda a: np.asarray(a).astype(np.float32)),
    "v_cvt_u32_f32": _op("f32", "u32", convert.to_int(32, False)),
    "v_cvt_i32_f32": _op("f32", "i32", convert.to_int(32, True)),
    "v_cvt_flr_i32_f32": _op("f32", "i32", convert.rounded_int(np.floor)),
    "v_cvt_rpi_i32_f32": _op("f32", "i32", convert.rounded_int(lambda x: np.floor(x + 0.5))),
    "v_cvt_f16_f32": _op("f32", "f16", lambda a: np.asarray(a).astype(np.float16), flushes=True),
    "v_cvt_f32_f16": _op("f16", "f32", _f32_f16),
    "v_cvt_f32_f64": _op("f64", "f32", lambda a: np.asarray(a).astype(np.float32), flushes=True),
    "v_cvt_f64_f32": _op("f32", "f64", lambda a: np.asarray(a).astype(np.float64), flushes=True),
    "v_cvt_f64_i32": _op("i32", "f64", lambda a: np.asarray(a).astype(np.float64)),
    "v_cvt_f64_u32": _op("u32", "f64", lambda a: np.asarray(a).astype(np.float64)),
    "v_cvt_i32_f64": _op("f64", "i32", convert.to_int(32, True)),
    "v_cvt_u32_f64": _op("f64", "u32", convert.to_int(32, False)),
    "v_cvt_f16_u16": _op("u16", "f16", lambda a: np.asarray(a).astype(np.float16)),
    "v_cvt_f16_i16": _op("i16", "f16", lambda a: np.asarray(a).astype(np.float16)),
    "v_cvt_u16_f16": _op("f16", "u16", convert.to_int(16, False)),
    "v_cvt_i16_f16": _op("f16", "i16", convert.to_int(16, True)),
    "v_cvt_f32_bf16": _op("u16", "f32", convert.from_bf16),
    "v_exp_f32": _op("f32", "f32", floats.exp2),
    "v_log_f32": _op("f32", "f32", floats.log2),
    "v_exp_legacy_f32": _op("f32", "f32", floats.exp2),
    "v_log_legacy_f32": _op("f32", "f32", floats.log2),
    "v_rcp_f32": _op("f32", "f32", floats.rcp),
    "v_rcp_iflag_f32": _op("f32", "f32", floats.rcp),
    "v_rsq_f32": _op("f32", "f32", floats.rsq),
    "v_sqrt_f32": _op("f32", "f32", floats.sqrt),
    "v_sin_f32": _op("f32", "f32", floats.turns(np.sin)),
    "v_cos_f32": _op("f32", "f32", floats.turns(np.cos)),
    "v_rcp_f64": _op("f64", "f64", np.reciprocal),
    "v_rsq_f64": _op("f64", "f64", lambda a: 1.0 / floats.root(a)),
    "v_sqrt_f64": _op("f64", "f64", floats.root),
    "v_exp_f16": _op("f16", "f16", lambda a: np.exp2(_f32_f16(a)).astype(np.float16)),
    "v_log_f16": _op("f16", "f16", lambda a: floats.positive_nan(np.log2(_f32_f16(a)), a).astype(np.float16)),
    "v_rcp_f16": _op("f16", "f16", lambda a: (np.float32(1) / _f32_f16(a)).astype(np.float16)),
    "v_rsq_f16": _op("f16", "f16", lambda a: (np.float32(1) / floats.root(_f32_f16(a))).astype(np.float16)),
    "v_sqrt_f16": _op("f16", "f16", floats.root),
    "v_sin_f16": _op("f16", "f16", floats.turns(np.sin)),
    "v_cos_f16": _op("f16", "f16", floats.turns(np.cos)),
    "v_frexp_exp_i16_f16": _op("f16", "i16", lambda a: floats.frexp_exponent(a).astype(np.int16)),
    "v_frexp_mant_f16": _op("f16", "f16", floats.frexp_mantissa),
} | {
    f"v_{name}_{kind}": _op(kind, kind, function)
    for kind in ("f16", "f32", "f64")
    for name, function in (
        ("trunc", np.trunc), ("ceil", np.ceil), ("rndne", np.rint), ("floor", np.floor), ("fract", floats.fract)
    )
} | {
    f"v_frexp_exp_i32_{k}": _op(k, "i32", floats.frexp_exponent) for k in ("f32", "f64")
} | {
    f"v_frexp_mant_{k}": _op(k, k, floats.frexp_mantissa) for k in ("f32", "f64")
} | {
    f"v_cvt_f32_ubyte{i}": _op("u32", "f32", _ubyte(i))
    for i in range(4)
}  # fmt: skip

_FLOAT3: dict[str, _Ternary] = {
    "min3": lambda a, b, c: floats.minimum(floats.minimum(a, b), c),
    "max3": lambda a, b, c: floats.maximum(floats.maximum(a, b), c),
    "med3": floats.med3,
}
_INT3: dict[str, _Ternary] = {
    "min3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "max3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "med3": lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
}

VOP2: dict[str, Op] = {
    "v_add_f32": _op("f32 f32", "f32", np.add, flushes=True),
    "v_sub_f32": _op("f32 f32", "f32", np.subtract, flushes=True),
    "v_subrev_f32": _op("f32 f32", "f32", lambda a, b: b - a, flushes=True),
    "v_mul_f32": _op("f32 f32", "f32", np.multiply, flushes=True),
    "v_mul_legacy_f32": _op("f32 f32", "f32", _mul_legacy, flushes=True),
    "v_min_f32": _op("f32 f32", "f32", floats.minimum, flushes=True),
    "v_max_f32": _op("f32 f32", "f32", floats.maximum, flushes=True),
    "v_fmac_f32": _op("f32 f32 f32", "f32", fma, flushes=True, accumulates=True),
    "v_fmac_f64": _op("f64 f64 f64", "f64", lambda a, b, c: fma(a, b, c, "f64"), accumulates=True),
    "v_add_u32": _op("u32 u32", "u32", np.add, saturates="u64"),
    "v_sub_u32": _op("u32 u32", "u32", np.subtract, saturates="i64"),
    "v_subrev_u32": _op("u32 u32", "u32", lambda a, b: b - a),
    "v_mul_i32_i24": _op("i32 i32", "i32", lambda a, b: _i24(a) * _i24(b)),
    "v_mul_u32_u24": _op("u32 u32", "u32", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_hi_i32_i24": _op("i32 i32", "i32", lambda a, b: _high(_i24(a), _i24(b), np.int64, np.int32)),
    "v_mul_hi_u32_u24": _op("u32 u32", "u32", lambda a, b: _high(_u24(a), _u24(b), np.uint64, np.uint32)),
    "v_min_i32": _op("i32 i32", "i32", np.minimum),
    "v_max_i32": _op("i32 i32", "i32", np.maximum),
    "v_min_u32": _op("u32 u32", "u32", np.minimum),
    "v_max_u32": _op("u32 u32", "u32", np.maximum),
    "v_lshlrev_b32": _op("u32 u32", "u32", _shift(np.left_shift, 32, np.uint32)),
    "v_lshrrev_b32": _op("u32 u32", "u32", _shift(np.right_shift, 32, np.uint32)),
    "v_ashrrev_i32": _op("u32 i32", "i32", _shift(np.right_shift, 32, np.int32)),
    "v_and_b32": _op("u32 u32", "u32", np.bitwise_and),
    "v_or_b32": _op("u32 u32", "u32", np.bitwise_or),
    "v_xor_b32": _op("u32 u32", "u32", np.bitwise_xor),
    "v_xnor_b32": _op("u32 u32", "u32", lambda a, b: ~(a ^ b)),
    "v_dot2c_f32_bf16": _op("u32 u32 f32", "f32", lambda a, b, c: _dot2(a, b, c, bf16_half), accumulates=True),
    "v_dot2c_f32_f16": _op("u32 u32 f32", "f32", lambda a, b, c: _dot2(a, b, c, f16_half), accumulates=True),
    "v_dot2c_i32_i16": _op("u32 u32 u32", "u32", dot_int(16, True), accumulates=True),
    "v_dot4c_i32_i8": _op("u32 u32 u32", "u32", dot_int(8, True), accumulates=True),
    "v_dot8c_i32_i4": _op("u32 u32 u32", "u32", dot_int(4, True), accumulates=True),
    "v_add_f16": _op("f16 f16", "f16", np.add),
    "v_sub_f16": _op("f16 f16", "f16", np.subtract),
    "v_subrev_f16": _op("f16 f16", "f16", lambda a, b: b - a),
    "v_mul_f16": _op("f16 f16", "f16", np.multiply),
    "v_mac_f16": _op("f16 f16 f16", "f16", lambda a, b, c: a * b + c, accumulates=True),
    "v_min_f16": _op("f16 f16", "f16", floats.minimum),
    "v_max_f16": _op("f16 f16", "f16", floats.maximum),
    "v_ldexp_f16": _op("f16 i16", "f16", floats.ldexp),
    "v_add_u16": _op("u16 u16", "u16", np.add, saturates="u32"),
    "v_sub_u16": _op("u16 u16", "u16", np.subtract, saturates="i32"),
    "v_subrev_u16": _op("u16 u16", "u16", lambda a, b: b - a),
    "v_mul_lo_u16": _op("u16 u16", "u16", np.multiply),
    "v_lshlrev_b16": _op("u16 u16", "u16", _shift(np.left_shift, 16, np.uint16)),
    "v_lshrrev_b16": _op("u16 u16", "u16", _shift(np.right_shift, 16, np.uint16)),
    "v_ashrrev_i16": _op("u16 i16", "i16", _shift(np.right_shift, 16, np.int16)),
    "v_min_u16": _op("u16 u16", "u16", np.minimum),
    "v_max_u16": _op("u16 u16", "u16", np.maximum),
    "v_min_i16": _op("i16 i16", "i16", np.minimum),
    "v_max_i16": _op("i16 i16", "i16", np.maximum),
}

VOP3: dict[str, Op] = {
    "v_fma_f32": _op("f32 f32 f32", "f32", fma, flushes=True),
    "v_fma_f64": _op("f64 f64 f64", "f64", lambda a, b, c: fma(a, b, c, "f64")),
    "v_fma_f16": _op("f16 f16 f16", "f16", floats.fma16),
    "v_fma_legacy_f16": _op("f16 f16 f16", "f16", floats.fma16),
    "v_mad_f16": _op("f16 f16 f16", "f16", lambda a, b, c: a * b + c),
    "v_mad_legacy_f16": _op("f16 f16 f16", "f16", lambda a, b, c: a * b + c),
    "v_mad_u16": _op("u16 u16 u16", "u16", lambda a, b, c: a * b + c),
    "v_mad_i16": _op("i16 i16 i16", "i16", lambda a, b, c: a * b + c),
    "v_mad_legacy_u16": _op("u16 u16 u16", "u16", lambda a, b, c: a * b + c),
    "v_mad_legacy_i16": _op("i16 i16 i16", "i16", lambda a, b, c: a * b + c),
    "v_add_f64": _op("f64 f64", "f64", np.add),
    "v_mul_f64": _op("f64 f64", "f64", np.multiply),
    "v_min_f64": _op("f64 f64", "f64", floats.minimum),
    "v_max_f64": _op("f64 f64", "f64", floats.maximum),
    "v_ldexp_f64": _op("f64 i32", "f64", floats.ldexp),
    "v_ldexp_f32": _op("f32 i32", "f32", floats.ldexp, flushes=True),
    "v_minimum3_f32": _op("f32 f32 f32", "f32", lambda a, b, c: floats.ieee_minimum(floats.ieee_minimum(a, b), c)),
    "v_maximum3_f32": _op("f32 f32 f32", "f32", lambda a, b, c: floats.ieee_maximum(floats.ieee_maximum(a, b), c)),
    "v_div_fixup_f32": _op("f32 f32 f32", "f32", floats.div_fixup),
    "v_div_fixup_f64": _op("f64 f64 f64", "f64", floats.div_fixup),
    "v_div_fixup_f16": _op("f16 f16 f16", "f16", floats.div_fixup),
    "v_div_fixup_legacy_f16": _op("f16 f16 f16", "f16", floats.div_fixup),
    "v_mul_lo_u32": _op("u32 u32", "u32", np.multiply),
    "v_mul_hi_u32": _op("u32 u32", "u32", lambda a, b: _high(a, b, np.uint64, np.uint32)),
    "v_mul_hi_i32": _op("i32 i32", "i32", lambda a, b: _high(a, b, np.int64, np.int32)),
    "v_mad_i32_i24": _op("i32 i32 i32", "i32", lambda a, b, c: _i24(a) * _i24(b) + c),
    "v_mad_u32_u24": _op("u32 u32 u32", "u32", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_mad_u32_u16": _op("u16 u16 u32", "u32", lambda a, b, c: a.astype(np.uint32) * b + c),
    "v_mad_i32_i16": _op("i16 i16 i32", "i32", lambda a, b, c: a.astype(np.int32) * b + c),
    "v_bfe_u32": _op("u32 u32 u32", "u32", _bfe_u),
    "v_bfe_i32": _op("i32 u32 u32", "i32", _bfe_i),
    "v_bfi_b32": _op("u32 u32 u32", "u32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfm_b32": _op(
        "u32 u32",
        "u32",
        lambda a, b: ((np.uint32(1) << (a & np.uint32(31))) - np.uint32(1)) << (b & np.uint32(31)),
    ),
    "v_alignbit_b32": _op("u32 u32 u32", "u32", _align(1)),
    "v_alignbyte_b32": _op("u32 u32 u32", "u32", _align(8)),
    "v_perm_b32": _op("u32 u32 u32", "u32", convert.perm),
    "v_xad_u32": _op("u32 u32 u32", "u32", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": _op("u32 u32 u32", "u32", lambda a, b, c: (a << (b & np.uint32(31))) + c),
    "v_add_lshl_u32": _op("u32 u32 u32", "u32", lambda a, b, c: (a + b) << (c & np.uint32(31))),
    "v_add3_u32": _op("u32 u32 u32", "u32", lambda a, b, c: a + b + c),
    "v_lshl_or_b32": _op("u32 u32 u32", "u32", lambda a, b, c: (a << (b & np.uint32(31))) | c),
    "v_and_or_b32": _op("u32 u32 u32", "u32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": _op("u32 u32 u32", "u32", lambda a, b, c: a | b | c),
    "v_lshl_add_u64": _op("u64 u32 u64", "u64", lambda a, b, c: (a << (b & np.uint32(7)).astype(np.uint64)) + c),
    "v_lshlrev_b64": _op("u32 u64", "u64", _shift64(np.left_shift, np.uint64)),
    "v_lshrrev_b64": _op("u32 u64", "u64", _shift64(np.right_shift, np.uint64)),
    "v_ashrrev_i64": _op("u32 i64", "i64", _shift64(np.right_shift, np.int64)),
    "v_add_i32": _op("i32 i32", "i32", np.add, saturates="i64"),
    "v_sub_i32": _op("i32 i32", "i32", np.subtract, saturates="i64"),
    "v_add_i16": _op("i16 i16", "i16", np.add, saturates="i32"),
    "v_sub_i16": _op("i16 i16", "i16", np.subtract, saturates="i32"),
    "v_bcnt_u32_b32": _op("u32 u32", "u32", lambda a, b: bit_count(a) + b),
    "v_sad_u8": _op("u32 u32 u32", "u32", _sad(8)),
    "v_sad_hi_u8": _op("u32 u32 u32", "u32", _sad(8, 16)),
    "v_sad_u16": _op("u32 u32 u32", "u32", _sad(16)),
    "v_sad_u32": _op("u32 u32 u32", "u32", _sad(32)),
    "v_lerp_u8": _op("u32 u32 u32", "u32", _lerp),
    "v_cvt_pk_u8_f32": _op("f32 u32 u32", "u32", _cvt_pk_u8),
    "v_cvt_pkrtz_f16_f32": _op(
        "f32 f32", "u32", lambda a, b: convert.pack16(convert.to_f16_rtz(a), convert.to_f16_rtz(b))
    ),
    "v_cvt_pk_f16_f32": _op(
        "f32 f32",
        "u32",
        lambda a, b: convert.pack16(np.asarray(a).astype(np.float16), np.asarray(b).astype(np.float16)),
    ),
    "v_cvt_pk_bf16_f32": _op("f32 f32", "u32", lambda a, b: convert.pack16(convert.to_bf16(a), convert.to_bf16(b))),
    "v_cvt_pk_u16_u32": _op(
        "u32 u32", "u32", lambda a, b: convert.pack16(*(_sat(0, 0xFFFF, np.uint16)(x) for x in (a, b)))
    ),
    "v_cvt_pk_i16_i32": _op(
        "i32 i32", "u32", lambda a, b: convert.pack16(*(_sat(-0x8000, 0x7FFF, np.int16)(x) for x in (a, b)))
    ),
    "v_cvt_pknorm_i16_f32": _op("f32 f32", "u32", _norm(0x7FFF, -1, np.int16)),
    "v_cvt_pknorm_u16_f32": _op("f32 f32", "u32", _norm(0xFFFF, 0, np.uint16)),
    "v_cvt_pknorm_i16_f16": _op("f16 f16", "u32", _norm(0x7FFF, -1, np.int16)),
    "v_cvt_pknorm_u16_f16": _op("f16 f16", "u32", _norm(0xFFFF, 0, np.uint16)),
    "v_pack_b32_f16": _op("f16 f16", "u32", convert.pack16),
    "v_ashr_pk_i8_i32": _op("i32 i32 u32", "u32", _ashr_pk(-128, 127)),
    "v_ashr_pk_u8_i32": _op("i32 i32 u32", "u32", _ashr_pk(0, 255)),
    **{f"v_{n}_f32": _op("f32 f32 f32", "f32", f, flushes=True) for n, f in _FLOAT3.items()},
    **{f"v_{n}_f16": _op("f16 f16 f16", "f16", f) for n, f in _FLOAT3.items()},
    **{f"v_{n}_{k}": _op(f"{k} {k} {k}", k, f) for n, f in _INT3.items() for k in ("i32", "u32", "i16", "u16")},
}

OPS: dict[str, Op] = VOP1 | VOP2 | VOP3
