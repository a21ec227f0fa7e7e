"""Arguments of `python -m fly emulate`: text becomes the bytes of kernel arguments, and the memory they point to."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fly.errors import ArgumentError

SCALARS = {
    "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "f16": "e", "f32": "f", "f64": "d", "ptr": "Q",
}  # fmt: skip
# 16- and 8-bit floats that numpy lacks are kept as their bits
DTYPES = {
    "i8": "<i1", "u8": "<u1", "i16": "<i2", "u16": "<u2", "i32": "<i4", "u32": "<u4", "i64": "<i8", "u64": "<u8",
    "f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8", "f8": "<u1",
}  # fmt: skip
HELP = """\
arguments, one for each of the kernel's, in its order:
  i32:5  f32:0.5  u64:0x10     a number: i8 u8 i16 u16 i32 u32 i64 u64 f16 f32 f64
  null                         a null pointer
  in:FILE.npy (or FILE.npy)    a pointer to a copy of an array; what the kernel writes there is dropped
  inout:FILE.npy               the same, written back to FILE.npy when the kernel has ended
  inout:FILE.npy:RESULT.npy    the same, written to RESULT.npy
  out:FILE.npy:f32[64,128]     a pointer to a new array that nothing has written, saved to FILE.npy afterwards;
                               - in place of FILE.npy prints it; zeros:FILE.npy:f32[64,128] starts with zeros
  random:f32[64,128]           a pointer to a new array of random numbers: -1 to 1, or 0 to 99 for integers
types of new arrays: those above, bf16 and f8 (both kept as the bits, u2 and u1 in the .npy file)"""
_SIZE = re.compile(r"[0-9]{1,19}")
_MAX_BYTES, _MAX_RANK = 2**40, 64
_FILL = 0xA5  # of memory that nothing has written: a wild address, and visible in a result


@dataclass
class Argument:
    """One parsed argument: its bytes, and the array that it points to if it is a pointer.

    `save` is where the array goes afterwards: a path, "-" to print it, empty to drop it.
    """

    text: str
    data: bytes
    pointer: bool = False
    array: np.ndarray | None = None
    save: str = ""
    defined: bool = True
    keep: list[Any] = field(default_factory=list)


def parse(text: str) -> Argument:
    """An argument of the command line.

    Raises:
        ArgumentError: none of the accepted forms, or a file that is no array.
    """
    kind, _, rest = text.partition(":")
    if text == "null":
        return Argument(text, bytes(8), True)
    if kind in SCALARS and rest:
        return Argument(text, _scalar(text, kind, rest), kind == "ptr")
    if kind in ("in", "inout") and rest:
        source, _, result = rest.partition(":")
        return _pointer(text, _load(text, source), "" if kind == "in" else result or source)
    if kind in ("out", "zeros") and rest:
        path, _, shape = rest.rpartition(":")
        if not path:
            raise ArgumentError(f"argument {text!r}; expected {kind}:FILE.npy:TYPE[SIZES], such as {kind}:-:f32[16]")
        return _pointer(text, _new(text, shape, 0 if kind == "zeros" else _FILL), path, kind == "zeros")
    if kind == "random" and rest:
        return _pointer(text, _random(text, rest), "")
    if text.endswith(".npy"):
        return _pointer(text, _load(text, text), "")
    raise ArgumentError(f"argument {text!r}; accepted:\n{HELP}")


def _scalar(text: str, kind: str, value: str) -> bytes:
    try:
        number = float(value) if kind[0] == "f" else int(value, 0)
        return struct.pack("<" + SCALARS[kind], number)
    except (ValueError, struct.error, OverflowError) as error:
        raise ArgumentError(f"argument {text!r}: {error}") from None


def _load(text: str, path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise ArgumentError(f"argument {text!r}: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"argument {text!r}: {path} holds several arrays; expected one, in a .npy file")
    return np.ascontiguousarray(array)


def _new(text: str, description: str, fill: int) -> np.ndarray:
    name, bracket, sizes = description.partition("[")
    parts = sizes.removesuffix("]").split(",")
    if (
        name not in DTYPES
        or not bracket
        or not sizes.endswith("]")
        or not all(_SIZE.fullmatch(p.strip()) for p in parts)
    ):
        raise ArgumentError(
            f"argument {text!r}: array {description!r}; expected TYPE[SIZES], TYPE one of {' '.join(DTYPES)}"
        )
    shape = tuple(int(p) for p in parts)
    dtype = np.dtype(DTYPES[name])
    size = math.prod(shape) * dtype.itemsize
    if size > _MAX_BYTES or len(shape) > _MAX_RANK:
        raise ArgumentError(f"argument {text!r}: {size} bytes in {len(shape)} dimensions; accepted: 2^40 in 64")
    try:
        raw = np.full(size, fill, np.uint8)
    except MemoryError:
        raise ArgumentError(f"argument {text!r}: no memory for {size} bytes") from None
    return raw.view(dtype).reshape(shape)


def _random(text: str, description: str) -> np.ndarray:
    array, rng = _new(text, description, 0), np.random.default_rng()
    kind = description.partition("[")[0]
    if kind in ("bf16", "f8"):  # finite, of both signs: the top bits of floats in -1 to 1
        bits = rng.uniform(-1, 1, array.shape).astype(np.float32 if kind == "bf16" else np.float16)
        return (bits.view(f"u{bits.itemsize}") >> (16 if kind == "bf16" else 8)).astype(array.dtype)
    if array.dtype.kind == "f":
        return rng.uniform(-1, 1, array.shape).astype(array.dtype)
    return rng.integers(0, 100, array.shape).astype(array.dtype)


def _pointer(text: str, array: np.ndarray, save: str, defined: bool = True) -> Argument:
    # 256-byte aligned, as device allocations are
    backing = np.zeros(array.nbytes + 256, np.uint8)
    start = -backing.ctypes.data % 256
    memory = backing[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    memory[...] = array
    return Argument(text, struct.pack("<Q", memory.ctypes.data), True, memory, save, defined, [backing])


def pack(arguments: Sequence[Argument], expected: Sequence[dict[str, Any]], size: int, kernel: str) -> bytes:
    """The bytes of the explicit kernel arguments.

    Args:
        expected: the kernel's explicit arguments by its metadata; empty when it has none, natural alignment is used.
        size: of the kernel-argument segment, bytes.

    Raises:
        ArgumentError: too many or too few, or one that does not fit its place.
    """
    if not expected:
        packed = b""
        for argument in arguments:
            packed += bytes(-len(packed) % len(argument.data)) + argument.data
        if len(packed) > size:
            raise ArgumentError(f"{kernel} takes {size} bytes of arguments, these are {len(packed)}")
        return packed
    if len(arguments) != len(expected):
        wanted = ", ".join(describe(e) for e in expected)
        raise ArgumentError(
            f"{kernel} takes {len(expected)} arguments, --args gives {len(arguments)}; it takes: {wanted}"
        )
    packed_array = bytearray(size)
    for i, (argument, place) in enumerate(zip(arguments, expected)):
        if len(argument.data) != place[".size"] or (argument.pointer and place[".value_kind"] == "by_value"):
            raise ArgumentError(f"argument {i}, {argument.text!r}: {kernel} takes {describe(place)} there")
        packed_array[place[".offset"] : place[".offset"] + place[".size"]] = argument.data
    return bytes(packed_array)


def describe(place: dict[str, Any]) -> str:
    """An argument of a kernel by its metadata, in words."""
    kind = place[".value_kind"]
    what = (
        "a pointer" if kind == "global_buffer" else f"{place['.size']} bytes by value" if kind == "by_value" else kind
    )
    name = place.get(".name", "")
    return f"{name}: {what}" if name else what


def save(argument: Argument) -> str:
    """Save or print an array after the run; returns a line that tells so, or nothing.

    Raises:
        ArgumentError: the file cannot be written.
    """
    if argument.array is None or not argument.save:
        return ""
    if argument.save == "-":
        return f"{argument.text}\n{argument.array}"
    try:
        with Path(argument.save).open("wb") as file:
            np.save(file, argument.array, allow_pickle=False)
    except OSError as error:
        raise ArgumentError(f"argument {argument.text!r}: {error}") from None
    return f"wrote {argument.save}: {argument.array.dtype}{list(argument.array.shape)}"
