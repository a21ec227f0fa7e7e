"""What operations of the `hopper` dialect mean in `tests.simulator`: those that its tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Block(Protocol):
    """What the rules need of the simulator's block."""

    threads: int

    def matrix_rows(self, name: str, address: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray | None:
        """16 bytes of shared memory at each thread's address, loaded or stored."""


def _ldmatrix(block: Block, address: np.ndarray) -> list[np.ndarray]:
    """Four matrices of 8 rows of 16 bytes; lane 4 c + t has column c of rows 2 t and 2 t + 1 of each."""
    pairs = block.matrix_rows("ldmatrix", address).view(np.uint16).reshape(-1, 4, 4, 2, 8)  # wave, matrix, t, half, c
    words = np.ascontiguousarray(pairs.transpose(1, 0, 4, 2, 3)).view(np.int32)
    return [word.reshape(block.threads) for word in words]


def _stmatrix(block: Block, address: np.ndarray, *words: np.ndarray) -> None:
    """The same not turned: lane 4 r + t has bytes 4 t to 4 t + 3 of row r of each."""
    rows = np.stack([word.reshape(-1, 8, 4) for word in words], axis=1).reshape(block.threads, 4)
    block.matrix_rows("stmatrix", address, rows)


def _prmt(block: Block, low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    bytes_ = np.stack([low, high], axis=1).view(np.uint8)
    which = selector[:, None] >> (4 * np.arange(4)) & 7
    return np.take_along_axis(bytes_, which, axis=1).copy().view(np.int32).reshape(block.threads)


RULES: dict[str, Callable[..., Any]] = {
    "hopper.ldmatrix_turned": _ldmatrix,
    "hopper.stmatrix": _stmatrix,
    "hopper.prmt": _prmt,
    "hopper.fence_async_shared": lambda block: None,
}
