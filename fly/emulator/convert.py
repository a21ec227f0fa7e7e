"""Conversions of the vector ALU (CDNA3 ISA, section 16; OCP 8-bit formats on gfx950, FNUZ on gfx942)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.native import fp8_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def to_int(bits: int, signed: bool) -> Any:
    """Float to integer, towards zero, saturating, NaN to 0."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    kind = np.dtype(f"{'i' if signed else 'u'}{bits // 8}").type

    def run(x: Any) -> np.ndarray:
        wide = np.trunc(np.asarray(x).astype(np.float64))
        inside = np.clip(np.where(np.isnan(wide), 0.0, wide), low, high)
        return inside.astype(np.int64).astype(kind)

    return run


def rounded_int(rounding: Any) -> Any:
    """Float to int32 after `rounding` (V_CVT_FLR, V_CVT_RPI)."""
    convert = to_int(32, True)
    return lambda x: convert(rounding(np.asarray(x).astype(np.float64)))


def to_bf16(x: Any) -> np.ndarray:
    """float32 to bfloat16 bits (uint32 holding 16), nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(x)
    if np.any(nan):
        return np.where(nan, bits >> np.uint32(16) | np.uint32(0x40), rounded)
    return rounded


def from_bf16(bits: Any) -> np.ndarray:
    """bfloat16 bits in the low half of uint32 (other bits ignored) to float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16_rtz(x: ArrayLike) -> np.ndarray:
    """float32 to float16 towards zero."""
    x = np.asarray(x)
    half = x.astype(np.float16)
    too_far = np.abs(half.astype(np.float32)) > np.abs(x)
    return np.where(too_far, (half.view(np.uint16) - np.uint16(1)), half.view(np.uint16)).view(np.float16)


def pack16(low: Any, high: Any) -> np.ndarray:
    """Two 16-bit values (any 16-bit type, or uint32 holding 16 bits) in one uint32."""
    low, high = (
        x.view(np.uint16).astype(np.uint32) if x.dtype.itemsize == 2 else x & np.uint32(0xFFFF)
        for x in (np.asarray(low), np.asarray(high))
    )
    packed: np.ndarray = low | high << np.uint32(16)
    return packed


def fp8_kind(name: str, arch: str) -> str:
    """Format of an instruction's `fp8` or `bf8` on an architecture."""
    return name + ("z" if arch == "gfx942" else "")


def _neighbours(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Non-negative finite values of a format, ascending, and their codes."""
    codes = np.arange(128, dtype=np.uint32)
    values = fp8_table(kind)[:128].astype(np.float64)
    keep = np.isfinite(values)
    return values[keep], codes[keep]


def to_fp8(x: Any, kind: str) -> np.ndarray:
    """float32 to an 8-bit float's code, uint32, nearest even.

    Beyond the largest value: infinity for OCP e5m2, NaN for the formats without infinities (MODE.FP16_OVFL = 0).
    """
    x = np.asarray(x)
    values, codes = _neighbours(kind)
    size = np.abs(x).astype(np.float64)
    above = np.searchsorted(values, np.where(np.isnan(size), 0, size))
    above = np.minimum(above, len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    pick = np.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), codes[above], codes[below])
    pick = np.where(size >= values[-1], codes[-1], pick)
    limit = values[-1] + (values[-1] - values[-2]) / 2
    # a tie at the top rounds to even: up and out when the largest code is odd
    beyond = (size > limit) | ((size == limit) & (codes[-1] % 2 == 1))
    sign = np.where(np.signbit(x), np.uint32(128), np.uint32(0))
    fnuz = kind.endswith("z")
    nan = np.uint32(128 if fnuz else 127)
    top = np.uint32(0x7C) if kind == "bf8" else nan
    code = np.where(np.isnan(x), nan, np.where(beyond, top, pick)).astype(np.uint32)
    if fnuz:
        return np.where((code == 0) | (code == 128), code, code | sign)
    return code | sign


def from_fp8(bits: Any, kind: str) -> np.ndarray:
    """8-bit float codes (low 8 bits) to float32."""
    values: np.ndarray = fp8_table(kind)[np.asarray(bits) & np.uint32(255)]
    return values


def perm(s0: Any, s1: Any, s2: Any) -> np.ndarray:
    """V_PERM_B32: each selector byte of s2 picks a byte of {s0, s1}, a sign fill (8..11), 0 (12) or 0xff."""
    data = np.asarray(s0).astype(np.uint64) << np.uint64(32) | np.asarray(s1).astype(np.uint64)
    selectors = np.asarray(s2)
    constant = selectors.ndim == 0 or np.all(selectors == selectors.flat[0])
    out = np.zeros(np.broadcast_shapes(data.shape, selectors.shape), np.uint32)
    for i in range(4):
        if constant:
            piece = _perm_byte(data, int(selectors.flat[0]) >> 8 * i & 255)
        else:
            select = (selectors >> np.uint32(8 * i) & np.uint32(255)).astype(np.uint64)
            picked = (data >> np.minimum(select, np.uint64(7)) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
            special = np.select(
                [select == s for s in (8, 9, 10, 11, 12)], [_perm_byte(data, s) for s in (8, 9, 10, 11, 12)], 255
            )
            piece = np.where(select < 8, picked, special).astype(np.uint32)
        out |= piece << np.uint32(8 * i)
    return out


def _perm_byte(data: np.ndarray, select: int) -> np.ndarray:
    if select < 8:
        return (data >> np.uint64(8 * select)).astype(np.uint32) & np.uint32(255)
    if select < 12:
        sign = data >> np.uint64(16 * (select - 8) + 15) & np.uint64(1)
        return (sign * np.uint64(255)).astype(np.uint32)
    return np.zeros(data.shape, np.uint32) if select == 12 else np.full(data.shape, 255, np.uint32)
