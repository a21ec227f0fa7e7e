"""Bringing runs of a vector from global to shared memory, beside tiles of matrices in one `TileRing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fly.errors import ShapeError
from fly.ir import memory
from fly.ir.dtypes import DType, i32
from fly.ir.math import maximum
from fly.ir.memory import Pointer
from fly.ir.value import Value
from fly.lang.copy import Located, block_threads, copy_async
from fly.lang.fragment import AccumulatorLayout, ColumnVector
from fly.lang.ids import linear_thread
from fly.lang.sync import Token, join, wait
from fly.lang.tensor import Tensor


def _apart(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class SharedVector:
    """A run of `count` elements of a vector in shared memory, as often as the block has so many threads.

    Runs are apart by the next power of two, and so many threads, one after the other, have a run of their own: each
    thread brings one element, and none has to be told that there is nothing for it.
    """

    pointer: Pointer
    count: int
    dtype: DType

    @staticmethod
    def ring(name: str, count: int, dtype: DType, stages: int) -> SharedVector:
        """The first of `stages` slots in one buffer.

        Raises:
            ShapeError: `count` is not positive, or the block's threads are no power of two.
        """
        threads = block_threads()
        if count <= 0 or threads & (threads - 1):
            raise ShapeError(f"a run of {count} elements for {threads} threads; expected a power of two of threads")
        size = SharedVector.bytes_for(count, threads, dtype)
        return SharedVector(memory.alloc_shared(name, size * stages, align=16), count, dtype)

    @staticmethod
    def bytes_for(count: int, threads: int, dtype: DType) -> int:
        """Of a slot."""
        return max(threads, _apart(count)) * dtype.bytes

    @property
    def apart(self) -> int:
        """Elements from one run to the next."""
        return _apart(self.count)

    @property
    def bytes(self) -> int:
        """Of a slot."""
        return self.bytes_for(self.count, block_threads(), self.dtype)

    def slot(self, index: Value) -> SharedVector:
        """What is `index` (traced i32) places further on in its ring."""
        return SharedVector(self.pointer.offset(index * i32(self.bytes)), self.count, self.dtype)

    def columns(self, layout: AccumulatorLayout, column_tiles: int) -> ColumnVector:
        """The element of each column that the lane holds of `column_tiles` tiles side by side."""
        run_of_thread = linear_thread() // self.apart * self.apart if self.apart < block_threads() else 0
        mine = self.pointer.offset(run_of_thread * self.dtype.bytes)
        return ColumnVector.load_shared(layout, column_tiles, mine, self.dtype)


class VectorCopy:
    """Runs of a vector of 32-bit elements, `SharedVector.count` each; zeros where it has none any more.

    Raises:
        ShapeError: the source is no vector of 32-bit elements with unit stride.
    """

    def __init__(self, source: Tensor, *, asynchronous: bool):
        if source.rank != 1 or source.stride[0] != 1 or source.dtype.bytes != 4:
            raise ShapeError(f"runs are copied of a vector of 32-bit elements with unit stride, not {source!r}")
        self.source = source
        self.asynchronous = asynchronous

    def locate(self, tile: Any) -> Located:
        """Nothing has to be known of a run before it starts."""
        del tile
        return ()

    def issue(self, tile: Any, destination: SharedVector, located: Located | None = None) -> Any:
        """Start run number `tile`; asynchronous copies write `destination` from now on."""
        del located
        first = tile * destination.count
        left, base, size = self.source.shape[0] - first, self.source.at(first), self.source.dtype.bytes
        places = self._places(destination)
        if not self.asynchronous:
            bound = maximum(left, 0) * size
            return tuple(memory.load_bounded(base, at * size, bound, self.source.dtype) for at, _ in places)
        return join([copy_async(target, base.offset(at * size), at < left, size) for at, target in places])

    def land(self, in_flight: Any, destination: SharedVector) -> None:
        """Complete a run in shared memory; other threads need a barrier to see it."""
        if isinstance(in_flight, Token):
            wait(in_flight)
            return
        for value, (_, target) in zip(in_flight, self._places(destination), strict=True):
            memory.store(value, target)

    @staticmethod
    def _places(destination: SharedVector) -> list[tuple[Value, Pointer]]:
        """Of each element that this thread brings: its number in the run, and where it goes."""
        thread, threads, size = linear_thread(), block_threads(), destination.dtype.bytes
        target = destination.pointer.offset(thread * size)
        if destination.apart < threads:
            return [(thread % destination.apart, target)]
        return [(thread + p, target.offset(p * size)) for p in range(0, destination.apart, threads)]
