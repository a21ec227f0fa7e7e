"""Warpgroup products: operands found in shared memory by their descriptors, as the hardware does.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": matrix descriptors and register layouts. Sums are in
float32, in an order that is not the hardware's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.backends.nvvm.wgmma import K_BYTES, M, WarpgroupAtom
from fly.int_tuple import leaves
from fly.layout import Layout
from fly.simulator.arithmetic import FLOAT8
from fly.simulator.report import Finding
from fly.simulator.shared import CHUNK
from fly.simulator.tensor_map import swizzled

if TYPE_CHECKING:
    import numpy.typing as npt

_LINES = {1: 128, 2: 64, 3: 32}  # a descriptor's layout type -> bytes of a swizzled line
# rows of B times k: up to here OpenBLAS uses one thread, and small products by several take 100 times as long on
# processors that have other work
_ROWS_AT_ONCE = (1 << 18) // M
_PERIOD = 1024  # bytes after which swizzles repeat


class InFlight:
    """Accumulators of a product that has not been waited for: nothing but a wait, or a product, may touch them."""

    def __init__(self, values: np.ndarray, group: int):
        self.values, self.group = values, group

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise Finding("in-flight", "uses accumulators of a product that has not been waited for")

    def __getattr__(self, name: str) -> Any:
        self.__array__()

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __array__
    __neg__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = __array__


@dataclass(frozen=True)
class Descriptor:
    """A matrix descriptor's fields, in bytes."""

    start: int
    leading: int
    stride: int
    line: int

    @staticmethod
    def of(bits: int) -> Descriptor:
        """Decode 64 bits.

        Raises:
            Finding: a layout without a swizzle, or a base offset: nothing here makes them.
        """
        bits &= (1 << 64) - 1
        mode, base_offset = bits >> 62, bits >> 49 & 7
        if mode not in _LINES or base_offset:
            raise Finding("descriptor", f"matrix descriptor {bits:#018x}: layout {mode}, base offset {base_offset}")
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return Descriptor(start, leading, stride, _LINES[mode])


@dataclass(frozen=True)
class Matrix:
    """Where an operand lies: chunks (extent, k) in `CHUNK`s, or (k, extent) where it is turned; the same as runs of
    chunks. Relative to the descriptor's address without its part of a `_PERIOD`."""

    chunks: np.ndarray
    runs: tuple[tuple[int, int], ...]


@functools.lru_cache(512)
def _matrix(
    leading: int, stride: int, line: int, phase: int, steps: tuple[int, ...], extent: int, turned: bool, size: int
) -> Matrix:
    """`phase`: start address in its period; `steps`: 16 bytes each; `size`: bytes of an element."""
    blocks = []
    for step in steps:
        start = phase + (step << 4)
        if turned:
            k = np.arange(K_BYTES // size)[:, None]
            across = np.arange(0, extent * size, CHUNK)
            place = start + k // 8 * stride + k % 8 * line + across // line * leading + across % line
        else:
            row = np.arange(extent)[:, None]
            place = start + row // 8 * stride + row % 8 * line + np.arange(0, K_BYTES, CHUNK)
        blocks.append(swizzled(place, line) // CHUNK)
    chunks = np.concatenate(blocks, axis=0 if turned else 1)
    used = np.unique(chunks)
    breaks = np.flatnonzero(np.diff(used) > 1)
    firsts, lasts = used[np.r_[0, breaks + 1]], used[np.r_[breaks, len(used) - 1]]
    return Matrix(chunks, tuple((int(a), int(b) + 1) for a, b in zip(firsts, lasts)))


@dataclass(frozen=True)
class Located:
    """An operand at its place: chunk numbers, and (first, last + 1) of the chunks that are used."""

    chunks: np.ndarray
    runs: tuple[tuple[int, int], ...]
    turned: bool

    @staticmethod
    def of(bits: int, steps: tuple[int, ...], extent: int, turned: bool, size: int) -> Located:
        """By a descriptor, for `extent` rows (columns of B) and all steps of k."""
        d = Descriptor.of(bits)
        matrix = _matrix(d.leading, d.stride, d.line, d.start % _PERIOD, steps, extent, turned, size)
        base = d.start // _PERIOD * _PERIOD // CHUNK
        return Located(matrix.chunks + base, tuple((a + base, b + base) for a, b in matrix.runs), turned)

    def load(self, chunks: np.ndarray, dtype: str) -> np.ndarray:
        """(extent, k) elements in float32."""
        elements = widened(chunks[self.chunks].view(np.uint8), dtype)
        return elements.T if self.turned else elements


@functools.cache
def _float8_values(dtype: str) -> npt.NDArray[np.float32]:
    return np.arange(256, dtype=np.uint8).view(FLOAT8[dtype]).astype(np.float32)


def widened(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Bytes, in the last dimension, as elements in float32."""
    if dtype in FLOAT8:
        return _float8_values(dtype)[data]
    if dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16).astype(np.float32)


@functools.cache
def places(layout: Layout) -> npt.NDArray[np.int64]:
    """A (lane, value) layout as an array."""
    lanes, values = (_offsets(mode) for mode in layout)
    return lanes[:, None] + values


def _offsets(layout: Layout) -> npt.NDArray[np.int64]:
    offsets = np.zeros(1, np.int64)
    for extent, stride in zip(leaves(layout.shape), leaves(layout.stride), strict=True):
        offsets = ((np.arange(extent) * stride)[:, None] + offsets).ravel()
    return offsets


@functools.cache
def _from_registers(atom: WarpgroupAtom) -> np.ndarray:
    """The place in (lane, value) of each element of A, (row, column)."""
    numbers = places(atom.a)
    inverse = np.empty(numbers.size, np.int64)
    inverse[numbers.ravel()] = np.arange(numbers.size)
    return inverse.reshape(atom.k, M).T


def registers_as_rows(atom: WarpgroupAtom, steps: list[np.ndarray]) -> np.ndarray:
    """A from registers, a vector of every lane a step: (64, k) in float32."""
    dtype = atom.dtype
    found = _from_registers(atom)
    parts = []
    for values in steps:
        data = np.ascontiguousarray(np.broadcast_to(values, (atom.lanes, values.shape[1])))
        parts.append(widened(data.view(np.uint8), dtype).ravel()[found])
    return np.concatenate(parts, axis=1)


def multiply(atom: WarpgroupAtom, a: np.ndarray, b: np.ndarray, accumulator: np.ndarray | None) -> np.ndarray:
    """(lanes, n / 2) accumulators with a (64, k) times b (n, k) added."""
    rows = _ROWS_AT_ONCE // a.shape[1] or 8
    rows = max(n for n in range(8, atom.n + 1, 8) if atom.n % n == 0 and n <= max(8, rows))
    product = b.reshape(-1, rows, b.shape[1]) @ a.T  # (n, 64): element row + 64 * column, as the atom numbers them
    result = np.take(product, places(atom.c))
    return result if accumulator is None else accumulator + result
