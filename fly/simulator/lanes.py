"""What operations of a warp mean: shuffles, votes, matrix loads and stores, and products of a warp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.backends.target import target
from fly.simulator.arithmetic import is_array
from fly.simulator.products import places, widened
from fly.simulator.report import Finding

if TYPE_CHECKING:
    import numpy.typing as npt


def _same(value: np.ndarray) -> Any:
    """One value for all lanes where they have the same: what follows is faster then."""
    return value[0] if value.ndim == 1 and (value == value[0]).all() else value


def shuffle(value: Any, lane: Any, mode: str, size: int) -> Any:
    """The value of another lane of a warp of `size`, by index or by xor.

    Raises:
        Finding: a lane outside of the warp.
    """
    if not is_array(value):
        return value
    if mode != "idx" and not is_array(lane):
        return value[_partners(len(value), int(lane), size)]
    own = np.arange(len(value))
    other = np.broadcast_to(lane, len(value)) if mode == "idx" else own % size ^ lane
    result = value[_inside(own, other, size)]
    return _same(result) if mode == "idx" else result


@functools.cache
def _partners(lanes: int, mask: int, size: int) -> np.ndarray:
    own = np.arange(lanes)
    return _inside(own, own % size ^ mask, size)


def _inside(own: np.ndarray, other: np.ndarray, size: int) -> np.ndarray:
    """The lanes `other`, counted in the warps of lanes `own`."""
    if ((other < 0) | (other >= size)).any():
        raise Finding("divergence", "a shuffle from a lane outside of the warp")
    lanes: np.ndarray = own // size * size + other
    return lanes


def pair(value: Any, mask: int) -> tuple[Any, Any]:
    """Of a lane and its xor partner, the lower lane's first."""
    if not is_array(value):
        return value, value
    lane = np.arange(len(value))
    return value[np.minimum(lane, lane ^ mask)], value[np.maximum(lane, lane ^ mask)]


def swap(first: np.ndarray, second: np.ndarray, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """(first, the partner's first) in lanes without the bit `mask`, (the partner's second, second) in the others."""
    lane = np.arange(len(first))
    low = lane & mask == 0
    return np.where(low, first, second[lane ^ mask]), np.where(low, first[lane ^ mask], second)


def any_lane(condition: Any, m: np.ndarray | None, size: int) -> Any:
    """Whether it holds in an active lane of the warp of `size`."""
    if not is_array(condition):
        return condition
    held = condition if m is None else condition & m
    return _same(held.reshape(-1, size).any(axis=1).repeat(size))


def permute_bytes(low: Any, high: Any, selector: Any) -> Any:
    """PTX ISA, "prmt": byte i of the result is the one of the eight that hex digit i of the selector names.

    Where bit 3 of the digit is set, all bits are that byte's highest.
    """
    low, high, selector = np.broadcast_arrays(*(np.atleast_1d(v) for v in (low, high, selector)))
    both = np.stack([low, high], axis=1).view(np.uint8)
    which = selector[:, None] >> (4 * np.arange(4))
    taken = np.take_along_axis(both, which & 7, axis=1)
    spread = (taken.view(np.int8) >> 7).view(np.uint8)
    words = np.where(which & 8, spread, taken).astype(np.uint8).view(np.int32)[:, 0]
    return words if len(words) > 1 else words[0]


def turned_matrices(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of four matrices of 8 rows of 16 bytes, a row a lane: lane 4 c + t has column c of rows 2 t and 2 t + 1."""
    pairs = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 4, 4, 2, 8)  # warp, matrix, t, half, c
    words = np.ascontiguousarray(pairs.transpose(1, 0, 4, 2, 3)).view(np.int32)
    return tuple(word.reshape(len(rows)) for word in words)


def matrix_rows(words: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of four matrices, 16 bytes a lane, of which lane 4 r + t has bytes 4 t to 4 t + 3 of row r of each."""
    lanes = len(words[0])
    rows = np.stack([word.reshape(-1, 8, 4) for word in words], axis=1).reshape(lanes, 4)
    return np.ascontiguousarray(rows).view(np.uint8)


@dataclass(frozen=True)
class WarpLoad:
    """A matrix load of a warp: each lane gives the address of a run, and gets the values at `table` of all runs."""

    name: str
    run: int  # elements
    table: np.ndarray  # (lanes, values)

    @staticmethod
    @functools.cache
    def of(arch: str, name: str) -> WarpLoad:
        """An architecture's load by name."""
        load = target(arch).matrix_load(name)
        return WarpLoad(name, load.run, places(load.table))

    def __call__(self, runs: np.ndarray) -> np.ndarray:
        """(lanes of all warps, values), from the run at each lane's address."""
        warps = runs.reshape(-1, len(self.table) * self.run)
        return warps.take(self.table, axis=1).reshape(len(runs), -1)


@dataclass(frozen=True)
class WarpProduct:
    """A product of a warp: of each element of A (k, m) and B (k, n), which of the warp's values it is, lane by lane,
    and of each lane's values of C which element of (n, m) it is."""

    m: int
    n: int
    k: int
    dtype: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    @staticmethod
    @functools.cache
    def of(arch: str, name: str) -> WarpProduct:
        """An architecture's matrix instruction by name."""
        atom = target(arch).atom(name)
        a, b = (np.argsort(places(layout), axis=None) for layout in (atom.a, atom.b))
        return WarpProduct(atom.m, atom.n, atom.k, atom.dtype, a, b, places(atom.c))

    def __call__(
        self, a: np.ndarray, b: np.ndarray, c: npt.NDArray[np.float32], lanes: int
    ) -> npt.NDArray[np.float32]:
        """(lanes, values) of A times B and C, of all warps in `lanes`."""
        warps = lanes // len(self.c)
        left = self._operand(a, self.a, lanes, warps).reshape(warps, self.k, self.m)
        right = self._operand(b, self.b, lanes, warps).reshape(warps, self.k, self.n)
        product = (right.transpose(0, 2, 1) @ left).reshape(warps, -1)
        return c + product.take(self.c, axis=1).reshape(lanes, -1)

    def _operand(self, values: np.ndarray, which: np.ndarray, lanes: int, warps: int) -> npt.NDArray[np.float32]:
        """(warps, elements) of a matrix, in f32."""
        whole = values if len(values) == lanes else np.broadcast_to(values, (lanes, values.shape[1]))
        return widened(whole.reshape(warps, -1).take(which, axis=1).view(np.uint8), self.dtype)
