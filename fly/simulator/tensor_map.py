"""Tensor maps of simulated GPUs: what a bulk copy needs to know, in 128 bytes of our own.

The first eight bytes are the address, as in the driver's, which launches that are bound once rely on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fly.errors import SimulatorError
from fly.simulator.clocks import Party
from fly.simulator.memory import GlobalMemory
from fly.simulator.report import Finding
from fly.simulator.shared import CHUNK

if TYPE_CHECKING:
    import builtins

BYTES = 128
MAX_RANK = 5
_FORMAT = struct.Struct(f"<Q4sHBB{MAX_RANK}I{MAX_RANK}Q{MAX_RANK}H")
_MAGIC = b"flyT"


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, and the box of it that one copy moves; all in the tensor's order.

    `strides` are bytes, of all dimensions but the last; `swizzle` bytes of a line whose 16-byte pieces are swapped.
    """

    address: int
    element_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def line_bytes(self) -> int:
        return self.box[-1] * self.element_bytes

    @property
    def bytes(self) -> int:
        return math.prod(self.box) * self.element_bytes

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        inner = self.shape[-1] * self.element_bytes
        return inner + sum((n - 1) * stride for n, stride in zip(self.shape[:-1], self.strides, strict=True))

    def pack(self) -> builtins.bytes:
        """The 128 bytes."""
        fill = (0,) * (MAX_RANK - self.rank)
        strides = (*self.strides, self.element_bytes)
        head = (self.address, _MAGIC, self.rank, self.element_bytes, self.swizzle)
        return _FORMAT.pack(*head, *self.shape, *fill, *strides, *fill, *self.box, *fill).ljust(BYTES, b"\0")

    @staticmethod
    def unpack(data: builtins.bytes) -> TensorMap:
        """Of 128 bytes.

        Raises:
            SimulatorError: they are no map that `pack` made.
        """
        address, magic, rank, element_bytes, swizzle, *rest = _FORMAT.unpack_from(data)
        if magic != _MAGIC or not 0 < rank <= MAX_RANK:
            raise SimulatorError("a tensor map that was not made for the simulator; make it of CPU tensors")
        shape, strides, box = (rest[i * MAX_RANK : i * MAX_RANK + rank] for i in range(3))
        return TensorMap(address, element_bytes, tuple(shape), tuple(strides[:-1]), tuple(box), swizzle)

    def check(self, corner: Sequence[int]) -> None:
        """Raises a Finding for a corner at which the engine ends the kernel."""
        if corner[-1] * self.element_bytes % CHUNK:
            raise Finding("tensor-map", f"a copy from column {corner[-1]}; expected a multiple of 16 bytes")

    def lines(self, corner: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Of a box at a corner: (offset of each line's first element, whether the line is in the tensor, first and
        last + 1 byte of a line that are)."""
        offsets, inside = np.zeros((), np.int64), np.ones((), bool)
        for first, n, extent, stride in zip(corner, self.box, self.shape, self.strides):
            place = first + np.arange(n, dtype=np.int64)
            offsets = offsets[..., None] + place * stride
            inside = inside[..., None] & (place >= 0) & (place < extent)
        size = self.element_bytes
        low = max(0, -corner[-1]) * size
        high = max(low, min(self.box[-1], self.shape[-1] - corner[-1]) * size)
        return offsets.ravel() + corner[-1] * size, inside.ravel(), low, high

    def fetch(
        self, memory: GlobalMemory, corner: Sequence[int], clocks: np.ndarray, fenced: np.ndarray
    ) -> np.ndarray:
        """(lines, line_bytes) of a box, zeros where the tensor has nothing; read by who has these `clocks`.

        `fenced`: those of its last `fence_async_global`.

        Raises:
            Finding: the tensor is not in the memory of the launch, or what the launch stored is not known, or not
                fenced.
        """
        span = memory.span(self.address, self.address + self.extent)
        data = np.zeros((math.prod(self.box[:-1]), self.line_bytes), np.uint8)
        offsets, inside, low, high = self.lines(corner)
        if high > low and inside.any():
            starts = offsets[inside] + (self.address - span.start) + low
            memory.check_fetch(span, starts, high - low, clocks, fenced)
            data[inside, low:high] = _runs(span.bytes, starts, high - low)
        return data

    def put(self, memory: GlobalMemory, corner: Sequence[int], data: np.ndarray, by: Party) -> None:
        """Store a box; what lies outside of the tensor is dropped.

        Raises:
            Finding: the tensor is not in the memory of the launch, or nothing orders another store before this one.
        """
        span = memory.span(self.address, self.address + self.extent)
        offsets, inside, low, high = self.lines(corner)
        if high > low and inside.any():
            starts = offsets[inside] + (self.address - span.start) + low
            memory.put(span, starts, data[inside, low:high], by)

    def chunks(self, destination: int) -> np.ndarray:
        """The 16-byte chunks of shared memory, by number, that a box's bytes go to, in its order."""
        address = destination + np.arange(0, self.bytes, CHUNK)
        return swizzled(address, self.swizzle) // CHUNK


def swizzled(address: np.ndarray, line: int) -> np.ndarray:
    """Addresses in shared memory after the swap of 16-byte pieces of lines of 32, 64 or 128 bytes; 0: none."""
    return address ^ ((address >> 7 & (line // CHUNK - 1)) << 4) if line else address


def _runs(memory: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """(len(starts), length) bytes of memory."""
    if length % CHUNK == 0 and not (starts % CHUNK).any():
        chunks = memory[: len(memory) // CHUNK * CHUNK].view(np.complex128)
        return chunks[starts[:, None] // CHUNK + np.arange(length // CHUNK)].view(np.uint8)
    return memory[starts[:, None] + np.arange(length)]
