"""Grid and block sizes, and flat arguments as the bytes that a kernel reads."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Sequence

from fly.errors import LaunchError
from fly.lang.signature import Field
from fly.runtime.device import Dim3
from fly.runtime.shown import shown

MAX_BLOCK_THREADS = 1024
WORD = 8
_LAUNCH_PARAM_BUFFER, _LAUNCH_PARAM_SIZE, _LAUNCH_PARAM_END = 1, 2, 3  # HIP_LAUNCH_PARAM_*
_CODES = {"ptr": "Q", "i32": "i", "i64": "q", "f32": "f", "f64": "d", "map": "128s"}
_ALIGNMENTS = {"map": 64}  # of other kinds, their size


def offsets(fields: Sequence[Field]) -> list[int]:
    """The byte offset of every flat argument, in order at natural alignment; then the total size."""
    places, end = [], 0
    for field in fields:
        size = struct.calcsize("<" + _CODES[field.kind])
        places.append(end + -end % _ALIGNMENTS.get(field.kind, size))
        end = places[-1] + size
    return [*places, end]


def packer(fields: Sequence[Field]) -> struct.Struct:
    """Packs flat arguments, little endian, every pad byte explicit; no padding after the last."""
    codes, end = ["<"], 0
    for field, offset in zip(fields, offsets(fields)):
        code = _CODES[field.kind]
        codes.append("x" * (offset - end) + code)
        end = offset + struct.calcsize("<" + code)
    return struct.Struct("".join(codes))


def dim3(value: int | Sequence[int], what: str) -> Dim3:
    """One to three positive ints; missing ones are 1. `what` ("grid", "block") names them in errors.

    Raises:
        LaunchError: not ints, not positive, or not one to three of them.
    """
    if value.__class__ is tuple and len(value) == 3:
        x, y, z = value
        if x.__class__ is y.__class__ is z.__class__ is int and x > 0 and y > 0 and z > 0:
            return value
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    try:
        sizes = [-1 if isinstance(size, bool) else operator.index(size) for size in given]
    except Exception:  # an array with several elements, or a class of the caller's, may raise anything
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) <= 0:
        raise LaunchError(f"{what} is {shown(value)}; accepted: one to three positive ints")
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]  # mypy does not count what a slice of such a tuple has


def check_block(block: Dim3) -> None:
    """Check a block's size against what every target allows.

    Raises:
        LaunchError: more than 1024 threads.
    """
    threads = block[0] * block[1] * block[2]
    if threads > MAX_BLOCK_THREADS:
        raise LaunchError(f"block is {block}, {threads} threads; accepted: at most {MAX_BLOCK_THREADS}")


class ArgumentSlot(threading.local):
    """Each thread's copy of a kernel's argument buffer, and what points a driver to it.

    `places` are the arguments' `offsets`, `packed` is what the buffer holds at first. Drivers read the buffer before
    a launch returns, so one a thread is enough. `view` has its bytes, and `words` its whole 8-byte words, which
    addresses are. `parameters` is the address of an array of pointers, one an argument (`pointers`); `extra` that of
    an array that hands over the buffer as a whole (HIP's; CUDA misplaces it where an argument is aligned to more than
    16 bytes).
    """

    def __init__(self, places: Sequence[int], packed: bytes = b""):
        size = places[-1]
        self._buffer = ctypes.create_string_buffer(packed, max(size, 1) + -size % WORD)
        self._size = ctypes.c_size_t(size)
        address = ctypes.addressof
        self._extra = (ctypes.c_void_p * 5)(
            _LAUNCH_PARAM_BUFFER, address(self._buffer), _LAUNCH_PARAM_SIZE, address(self._size), _LAUNCH_PARAM_END
        )
        start = address(self._buffer)
        self.pointers = (ctypes.c_void_p * len(places))(*(start + place for place in places))
        self.parameters = address(self.pointers)
        self.extra = address(self._extra)
        whole = memoryview(self._buffer).cast("B")
        self.view, self.words = whole[:size], whole[: size // WORD * WORD].cast("Q")


class SharedArguments(threading.local):
    """Each thread's copy of the argument buffers of several kernels, which take their addresses from one table.

    `kernels`: of each, its arguments' `offsets`, what its buffer holds, and (argument, index in the table) of those
    that are addresses and no more; tensor maps, which begin with one, are (argument's word, index). `parameters`: as
    of `ArgumentSlot`, of each kernel.
    """

    def __init__(
        self,
        count: int,
        kernels: Sequence[tuple[Sequence[int], bytes, Sequence[tuple[int, int]], Sequence[tuple[int, int]]]],
    ):
        self._table = (ctypes.c_uint64 * count)()
        start = ctypes.addressof(self._table)
        self._slots = [ArgumentSlot(places, packed) for places, packed, _, _ in kernels]
        self._maps = []
        for slot, (_, _, addresses, maps) in zip(self._slots, kernels):
            for argument, index in addresses:
                slot.pointers[argument] = start + WORD * index
            self._maps += [(slot.words, word, index) for word, index in maps]
        self._pack = functools.partial(struct.Struct(f"{count}Q").pack_into, self._table, 0)
        self.parameters = tuple(slot.parameters for slot in self._slots)

    def write(self, addresses: Sequence[int]) -> None:
        """Have the kernels take these."""
        self._pack(*addresses)
        for words, word, index in self._maps:
            words[word] = addresses[index]
