"""Host memory as device memory: a table of allocations and gathers, scatters and atomics on 64-bit addresses."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fly.errors import EmulatorError

_BASE = 4096
_TOP = 1 << 47


@dataclass(frozen=True)
class Region:
    """A range of host memory that a kernel may touch; the checks follow which bytes of one that is not
    `initialised` have been written.
    """

    address: int
    nbytes: int
    name: str = ""
    initialised: bool = True

    @property
    def end(self) -> int:
        """First address behind the region."""
        return self.address + self.nbytes


class AccessError(EmulatorError):
    """An access outside every region: `.lanes` is a bool mask of the bad lanes, `.address` the first bad address."""

    def __init__(self, message: str, lanes: np.ndarray, address: int):
        super().__init__(message)
        self.lanes, self.address = lanes, address


class _Everything:
    """The process's address space as an array; every index is checked against the regions before it is used."""

    def __init__(self, typestr: str, size: int):
        self.__array_interface__ = {
            "data": (_BASE, False), "shape": ((_TOP - _BASE) // size,), "typestr": typestr, "version": 3,
        }  # fmt: skip


class Memory:
    """Gather and scatter within a table of regions (sorted, not overlapping)."""

    def __init__(self, regions: list[Region]):
        merged = sorted((r for r in regions if r.nbytes), key=lambda r: r.address)
        self.regions = merged
        self.starts = [r.address for r in merged]
        self._starts = np.array(self.starts, np.uint64)
        ends: list[int] = []
        for r in merged:  # overlapping views of one storage: a region reaches as far as any that starts before it
            ends.append(max(r.end, ends[-1]) if ends and ends[-1] >= r.address else r.end)
        self._ends = np.array(ends, np.uint64)
        self.ends = ends
        self.views = {s: np.asarray(_Everything(f"<u{s}", s)) for s in (1, 2, 4, 8)}
        # what the checks ask for behind an access: an unaligned address, an address never written
        self.unaligned: int | None = None
        self.unwritten: int | None = None
        self.shadows = [(r.address, np.zeros(r.nbytes, bool)) for r in merged if not r.initialised]
        # told of (address, size, mask) of every access; the timing model listens here
        self.observer: Callable[[np.ndarray, int, np.ndarray | None], None] | None = None
        self._safe = np.zeros(64, np.uint8)
        self.safe_address = int(self._safe.ctypes.data)

    def describe(self, address: int) -> str:
        """The allocation at or nearest below an address."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0:
            return "below every allocation"
        region = self.regions[at]
        where = f"{region.name or 'allocation'} ({region.address:#x}, {region.nbytes} bytes)"
        offset = address - region.address
        return (
            f"byte {offset} of {where}"
            if offset < region.nbytes
            else f"{offset - region.nbytes} bytes behind {where}"
        )

    def check(self, address: np.ndarray, size: int, mask: np.ndarray | None) -> None:
        """Raise AccessError unless every active lane's [address, address + size) lies in one region.

        Args:
            address: uint64, any shape. mask: bool of the same shape, None for all lanes.
        """
        if self.observer is not None:
            self.observer(address, size, mask)
        active = address if mask is None else address[mask]
        if not active.size:
            return
        low, high = int(active.min()), int(active.max()) + size
        at = bisect.bisect_right(self.starts, low) - 1
        if at >= 0 and high <= self.ends[at]:
            return
        index = np.searchsorted(self._starts, address, side="right").astype(np.int64) - 1
        inside = (
            (index >= 0) & (address + np.uint64(size) <= self._ends[np.maximum(index, 0)])
            if self.starts
            else (np.zeros(address.shape, bool))
        )
        bad = ~inside if mask is None else ~inside & mask
        if bad.any():
            first = int(address[bad][0])
            raise AccessError(f"address {first:#x} ({size} bytes) is {self.describe(first)}", bad, first)

    def _follow(self, address: np.ndarray, size: int, mask: np.ndarray | None, write: bool) -> None:
        """Mark or test the bytes of regions that are not initialised."""
        active = address if mask is None else address[mask]
        for start, written in self.shadows:
            offset = active.astype(np.int64) - start
            offset = offset[(offset >= 0) & (offset + size <= len(written))]
            for i in range(size):
                if write:
                    written[offset + i] = True
                elif not (seen := written[offset + i]).all():
                    self.unwritten = start + int(offset[~seen][0]) + i
                    break

    def load(self, address: np.ndarray, size: int, mask: np.ndarray | None) -> list[np.ndarray]:
        """32-bit words loaded from checked addresses: `size` bytes each, 1 or 2 or a multiple of 4."""
        self.check(address, size, mask)
        if self.shadows:
            self._follow(address, size, mask, False)
        if mask is not None:
            address = np.where(mask, address, np.uint64(self.safe_address))
        if size < 4:
            if size == 2 and self._is_unaligned(address, 2):
                low, high = (self._bytes(address + np.uint64(i)).astype(np.uint32) for i in (0, 1))
                return [low | high << np.uint32(8)]
            return [self._at(address, size).astype(np.uint32)]
        if self._is_unaligned(address, 4):
            return [self._unaligned(address + np.uint64(i)) for i in range(0, size, 4)]
        index = (address - np.uint64(_BASE)) >> np.uint64(2)
        index = index.astype(np.int64)
        words = self.views[4]
        return [words[index + i if i else index] for i in range(size // 4)]

    def _is_unaligned(self, address: np.ndarray, unit: int) -> bool:
        low = (address & np.uint64(unit - 1)) != 0
        if not low.any():
            return False
        self.unaligned = int(address[low][0])
        return True

    def _at(self, address: np.ndarray, size: int) -> np.ndarray:
        shift = np.uint64(size.bit_length() - 1)
        return self.views[size][((address - np.uint64(_BASE)) >> shift).astype(np.int64)]

    def _bytes(self, address: np.ndarray) -> np.ndarray:
        return self.views[1][(address - np.uint64(_BASE)).astype(np.int64)]

    def _unaligned(self, address: np.ndarray) -> np.ndarray:
        word = np.zeros(address.shape, np.uint32)
        for i in range(4):
            word |= self._bytes(address + np.uint64(i)).astype(np.uint32) << np.uint32(8 * i)
        return word

    def store(self, address: np.ndarray, words: list[np.ndarray], size: int, mask: np.ndarray | None) -> None:
        """Store `size` bytes a lane from 32-bit words; lanes outside the mask store nothing."""
        self.check(address, size, mask)
        if self.shadows:
            self._follow(address, size, mask, True)
        if mask is not None:
            address, words = address[mask], [np.broadcast_to(w, mask.shape)[mask] for w in words]
        if not address.size:
            return
        unit = min(size, 4)
        if self._is_unaligned(address, unit):
            for i in range(size):
                byte = (words[i // 4] >> np.uint32(8 * (i % 4))).astype(np.uint8)
                self.views[1][(address + np.uint64(i) - np.uint64(_BASE)).astype(np.int64)] = byte
            return
        index = ((address - np.uint64(_BASE)) >> np.uint64(unit.bit_length() - 1)).astype(np.int64)
        view = self.views[unit]
        for i, word in enumerate(words):
            view[index + i if i else index] = word if unit == 4 else word.astype(view.dtype)

    def atomic(
        self,
        address: np.ndarray,
        operands: list[np.ndarray],
        dtype: type[np.generic],
        function: Callable[..., Any],
        mask: np.ndarray,
    ) -> np.ndarray:
        """Read-modify-write, lane after lane where addresses repeat; returns the old values (0 outside the mask).

        CDNA3 and CDNA4 ISA, "Memory Atomic Operations": of f32, and of pairs of 16-bit floats (PK), each rounded to
        the nearest even. The order of lanes and waves is not documented; here it is theirs.


        Args:
            function: (old, *operands) -> new, on arrays of `dtype`.
        """
        size = np.dtype(dtype).itemsize
        self.check(address, size, mask)
        if self.shadows:
            self._follow(address, size, mask, False)
            self._follow(address, size, mask, True)
        self._is_unaligned(address[mask], size)
        view = self.views[size].view(dtype)
        index = ((address - np.uint64(_BASE)) >> np.uint64(size.bit_length() - 1)).astype(np.int64)
        return rounds(view, index, operands, function, mask)


def rounds(
    view: np.ndarray,
    index: np.ndarray,
    operands: list[np.ndarray],
    function: Callable[..., Any],
    mask: np.ndarray,
) -> np.ndarray:
    """Read-modify-write of `view[index]` in lane order: each round takes the first pending lane of every location."""
    old = np.zeros(index.shape, view.dtype)
    flat_old = old.reshape(-1)
    where = np.flatnonzero(mask)
    slots, values = index.reshape(-1), [np.broadcast_to(x, index.shape).reshape(-1) for x in operands]
    while where.size:
        _, first = np.unique(slots[where], return_index=True)
        lanes = where[first]
        before = view[slots[lanes]]
        flat_old[lanes] = before
        view[slots[lanes]] = function(before, *(v[lanes] for v in values))
        where = np.delete(where, first)
    return old


ATOMICS: dict[str, Callable[..., Any]] = {
    "swap": lambda old, x: x,
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "rsub": lambda old, x: x - old,
    "smin": np.minimum,
    "umin": np.minimum,
    "smax": np.maximum,
    "umax": np.maximum,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, x: np.where(old >= x, 0, old + 1).astype(old.dtype),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - 1).astype(old.dtype),
    "cmpswap": lambda old, new, compare: np.where(old == compare, new, old),
}


def packed_add(kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Addition of two packed 16-bit floats in a uint32, `f16` or `bf16`."""
    from fly.emulator.convert import from_bf16, pack16, to_bf16

    def run(old: np.ndarray, x: np.ndarray) -> np.ndarray:
        halves = []
        for shift in (np.uint32(0), np.uint32(16)):
            a, b = old >> shift & np.uint32(0xFFFF), x >> shift & np.uint32(0xFFFF)
            if kind == "f16":
                halves.append(a.astype(np.uint16).view(np.float16) + b.astype(np.uint16).view(np.float16))
            else:
                halves.append(to_bf16(from_bf16(a) + from_bf16(b)))
        return pack16(*halves)

    return run
