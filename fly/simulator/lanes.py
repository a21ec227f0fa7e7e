"""What operations of a warp mean: shuffles, votes, matrix loads and stores, and products of a warp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fly.simulator.arithmetic import is_array
from fly.simulator.products import places
from fly.simulator.report import Finding

_WARP = 32


def _same(value: np.ndarray) -> Any:
    """One value for all lanes where they have the same: what follows is faster then."""
    return value[0] if value.ndim == 1 and (value == value[0]).all() else value


def shuffle(value: Any, lane: Any, mode: str, lanes: int) -> Any:
    """The value of another lane, by index or by xor.

    Raises:
        Finding: a lane outside of the warp.
    """
    if not is_array(value):
        return value
    own = np.arange(lanes)
    other = np.broadcast_to(lane, lanes) if mode == "idx" else own % _WARP ^ lane
    if ((other < 0) | (other >= _WARP)).any():
        raise Finding("divergence", "a shuffle from a lane outside of the warp")
    result = value[own // _WARP * _WARP + other]
    return _same(result) if mode == "idx" else result


def pair(value: Any, mask: int, lanes: int) -> tuple[Any, Any]:
    """Of a lane and its xor partner, the lower lane's first."""
    if not is_array(value):
        return value, value
    lane = np.arange(lanes)
    return value[np.minimum(lane, lane ^ mask)], value[np.maximum(lane, lane ^ mask)]


def any_lane(condition: Any, m: np.ndarray | None, lanes: int) -> Any:
    """Whether it holds in an active lane of the warp."""
    if not is_array(condition):
        return condition
    held = condition if m is None else condition & m
    return _same(held.reshape(-1, _WARP).any(axis=1).repeat(_WARP))


def permute_bytes(low: Any, high: Any, selector: Any) -> Any:
    """PTX ISA, "prmt": byte i of the result is the one of the eight that hex digit i of the selector names."""
    low, high, selector = np.broadcast_arrays(*(np.atleast_1d(v) for v in (low, high, selector)))
    both = np.stack([low, high], axis=1).view(np.uint8)
    which = selector[:, None] >> (4 * np.arange(4)) & 7
    words = np.take_along_axis(both, which, axis=1).copy().view(np.int32)[:, 0]
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


def load_matrix(load: Any, runs: np.ndarray) -> np.ndarray:
    """An operand's elements, from the run at each lane's address."""
    warps = runs.reshape(-1, load.lanes * load.run)
    return warps[:, places(load.table)].reshape(len(runs), load.values)


def mma(atom: Any, a: Any, b: Any, c: Any, lanes: int) -> np.ndarray:
    """A warp's product; the index of C is row + m * column."""
    ia, ib, ic = places(atom.a), places(atom.b), places(atom.c)
    a, b, c = (np.broadcast_to(v, (lanes, v.shape[1])) for v in (a, b, c))
    result = np.empty(c.shape, np.float32)
    for first in range(0, lanes, _WARP):
        warp = slice(first, first + _WARP)
        left, right = np.zeros((atom.k, atom.m), np.float32), np.zeros((atom.k, atom.n), np.float32)
        left.flat[ia], right.flat[ib] = a[warp], b[warp]
        result[warp] = c[warp] + (right.T @ left).ravel()[ic]
    return result
