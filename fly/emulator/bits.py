"""Bit-counting functions on unsigned numpy arrays of 16, 32 or 64 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_REVERSED = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)


def bit_count(a: ArrayLike) -> np.ndarray:
    """Number of set bits, uint32."""
    count: np.ndarray = np.bitwise_count(np.asarray(a)).astype(np.uint32)
    return count


def bit_reverse(a: ArrayLike) -> np.ndarray:
    """Bits in the opposite order, same type."""
    a = np.ascontiguousarray(a)
    size = a.dtype.itemsize
    raw = _REVERSED[a.view(np.uint8).reshape(*a.shape, size)][..., ::-1]
    return np.ascontiguousarray(raw).view(a.dtype).reshape(a.shape)


def _smear(a: np.ndarray) -> np.ndarray:
    """All bits below the highest set bit set."""
    a = np.asarray(a)
    kind, shift = a.dtype.type, 1
    while shift < a.dtype.itemsize * 8:
        a = a | a >> kind(shift)
        shift *= 2
    return a


def count_leading(a: ArrayLike) -> np.ndarray:
    """Number of zero bits above the highest set bit, int32; the width for 0."""
    a = np.asarray(a)
    count: np.ndarray = (a.dtype.itemsize * 8 - np.bitwise_count(_smear(a)).astype(np.int32)).astype(np.int32)
    return count


def count_trailing(a: ArrayLike) -> np.ndarray:
    """Number of zero bits below the lowest set bit, int32; the width for 0."""
    a = np.asarray(a)
    one = a.dtype.type(1)
    count: np.ndarray = np.bitwise_count(~a & (a - one)).astype(np.int32)
    return count
