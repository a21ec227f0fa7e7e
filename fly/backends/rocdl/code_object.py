"""Reading AMDGPU objects, linked or not: sections, symbols and the metadata that describes their kernels.

ELF64, little-endian; the metadata is a msgpack document in a note (LLVM, "User Guide for AMDGPU Backend", Code Object
V3 and later).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_SHT_SYMTAB, _SHT_NOTE, _SHT_DYNSYM = 2, 7, 11
_NOTE_METADATA = 32


@dataclass(frozen=True)
class Section:
    """A section header: `kind` and `link` as ELF numbers them, `offset` and `size` in the file, and its `address`."""

    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


def sections_of(data: bytes) -> list[Section]:
    """The sections of an ELF64 file."""
    header = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
    start, count, names = header[5], header[11], header[12]
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * i) for i in range(count)]
    strings = raw[names][4]
    return [
        Section(_text(data, strings + name), kind, address, offset, size, link)
        for name, kind, _, address, offset, size, link, *_ in raw
    ]


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def symbols_of(data: bytes, sections: list[Section]) -> dict[str, tuple[int, int]]:
    """(value, size) of each symbol with a name."""
    found: dict[str, tuple[int, int]] = {}
    for section in sections:
        if section.kind not in (_SHT_SYMTAB, _SHT_DYNSYM):
            continue
        strings = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, _info, _other, _section, value, size = struct.unpack_from("<IBBHQQ", data, at)
            text = _text(data, strings + name)
            if text:
                found[text] = (value, size)
    return found


def metadata_of(data: bytes, sections: list[Section]) -> dict[str, Any]:
    """The code object's metadata; empty where it has none.

    Raises:
        ValueError: msgpack that no such metadata has.
    """
    for section in sections:
        at, end = section.offset, section.offset + section.size
        while section.kind == _SHT_NOTE and at + 12 <= end:
            name_size, desc_size, note = struct.unpack_from("<III", data, at)
            desc = at + 12 + (name_size + 3 & ~3)
            if note == _NOTE_METADATA and data[at + 12 : at + 18] == b"AMDGPU":
                metadata: dict[str, Any] = _msgpack(data[desc : desc + desc_size], 0)[0]
                return metadata
            at = desc + (desc_size + 3 & ~3)
    return {}


def _msgpack(data: bytes, at: int) -> tuple[Any, int]:
    """One msgpack value; the metadata note uses maps, arrays, strings, integers, booleans and nil."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag < 0x90 or tag in (0xDE, 0xDF):
        count, at = _length(data, at, tag, tag & 15 if tag < 0x90 else None, {0xDE: 2, 0xDF: 4})
        result: dict[Any, Any] = {}
        for _ in range(count):
            key, at = _msgpack(data, at)
            result[key], at = _msgpack(data, at)
        return result, at
    if tag < 0xA0 or tag in (0xDC, 0xDD):
        count, at = _length(data, at, tag, tag & 15 if tag < 0xA0 else None, {0xDC: 2, 0xDD: 4})
        items = []
        for _ in range(count):
            item, at = _msgpack(data, at)
            items.append(item)
        return items, at
    if tag < 0xC0 or tag in (0xD9, 0xDA, 0xDB):
        count, at = _length(data, at, tag, tag & 31 if tag < 0xC0 else None, {0xD9: 1, 0xDA: 2, 0xDB: 4})
        return data[at : at + count].decode(), at + count
    fixed = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
    if tag in fixed:
        size = struct.calcsize(fixed[tag])
        return struct.unpack_from(">" + fixed[tag], data, at)[0], at + size
    constants = {0xC0: None, 0xC2: False, 0xC3: True}
    if tag in constants:
        return constants[tag], at
    raise ValueError(f"msgpack tag {tag:#x} is not used by AMDGPU metadata")


def _length(data: bytes, at: int, tag: int, short: int | None, sizes: dict[int, int]) -> tuple[int, int]:
    if short is not None:
        return short, at
    size = sizes[tag]
    return int.from_bytes(data[at : at + size], "big"), at + size
