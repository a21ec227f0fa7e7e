"""AMDGPU code objects: kernel descriptors, metadata and the loaded image, read from the linked ELF file.

The descriptor's fields are those of the AMDGPU backend's "Kernel Descriptor" table (code object V3 and later).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.errors import EmulatorError

_EM_AMDGPU = 224
_MACHINES = {0x04C: "gfx942", 0x04F: "gfx950"}
_NOTE_METADATA = 32
_R_AMDGPU_RELATIVE64 = 13


@dataclass(frozen=True)
class KernelDescriptor:
    """What the command processor reads before it starts a wave."""

    name: str
    entry: int  # virtual address of the first instruction
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int
    args: tuple[dict[str, Any], ...] = ()

    @property
    def explicit(self) -> list[dict[str, Any]]:
        """Metadata of the arguments that a launch gives, without those that the runtime fills in."""
        return [a for a in self.args if not a[".value_kind"].startswith("hidden_")]

    @property
    def vgprs(self) -> int:
        """Registers of the unified file, architectural and accumulation together."""
        return ((self.rsrc1 & 63) + 1) * 8

    @property
    def accum_offset(self) -> int:
        """Index in the unified file of the first accumulation register."""
        return ((self.rsrc3 & 63) + 1) * 4

    @property
    def float_mode(self) -> int:
        """MODE[7:0]: round f32, round f16/f64, denormals f32, denormals f16/f64, two bits each."""
        return (self.rsrc1 >> 12) & 0xFF

    @property
    def user_sgprs(self) -> int:
        """Number of user SGPRs, kernel-argument preload included."""
        return (self.rsrc2 >> 1) & 31


@dataclass
class CodeObject:
    """A linked code object: its loaded image and the kernels in it.

    `image` is the memory image of the loadable segments; a virtual address is an offset in it.
    """

    arch: str
    image: np.ndarray
    kernels: dict[str, KernelDescriptor]
    code_end: dict[str, int] = field(default_factory=dict)
    sections: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # name -> (offset, size, address)
    data: bytes = b""
    _lines: Any = None

    @property
    def base(self) -> int:
        """Host address of the image."""
        return int(self.image.ctypes.data)

    def source_line(self, address: int) -> str:
        """`file:line` of an instruction's virtual address from the debug information, empty without any."""
        if self._lines is None:
            from fly.emulator.debug_line import read_lines

            self._lines = read_lines(self)
        line: str = self._lines.find(address)
        return line


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
    raise EmulatorError(f"code object metadata: msgpack tag {tag:#x} is not used by AMDGPU metadata")


def _length(data: bytes, at: int, tag: int, short: int | None, sizes: dict[int, int]) -> tuple[int, int]:
    if short is not None:
        return short, at
    size = sizes[tag]
    return int.from_bytes(data[at : at + size], "big"), at + size


def _metadata(data: bytes, sections: list[tuple[int, ...]]) -> dict[str, Any]:
    for section in sections:
        kind, offset, size = section[1], section[4], section[5]
        at, end = offset, offset + size
        while kind == 7 and at + 12 <= end:
            name_size, desc_size, note = struct.unpack_from("<III", data, at)
            desc = at + 12 + (name_size + 3 & ~3)
            if note == _NOTE_METADATA and data[at + 12 : at + 18] == b"AMDGPU":
                metadata: dict[str, Any] = _msgpack(data[desc : desc + desc_size], 0)[0]
                return metadata
            at = desc + (desc_size + 3 & ~3)
    return {}


def _name(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def read_code_object(data: bytes) -> CodeObject:
    """Parse and load a linked AMDGPU code object (relative relocations applied).

    Raises:
        EmulatorError: not a linked ELF64 AMDGPU object for an emulated architecture.
    """
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise EmulatorError("not a code object: expected an ELF64 file")
    header = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
    kind, machine, phoff, shoff, flags = header[0], header[1], header[4], header[5], header[6]
    phnum, shnum, shstr = header[9], header[11], header[12]
    arch = _MACHINES.get(flags & 0xFF)
    if machine != _EM_AMDGPU or arch is None:
        raise EmulatorError(
            f"code object for machine {machine}, flags {flags:#x}; the emulator executes gfx942 and gfx950"
        )
    if kind != 3:
        raise EmulatorError("code object is not linked: link it with `ld.lld -shared` first")
    segments = [struct.unpack_from("<IIQQQQQQ", data, phoff + 56 * i) for i in range(phnum)]
    size = max((s[3] + s[6] for s in segments if s[0] == 1), default=0)
    # page-aligned with a guard behind it, so that the image's own addresses keep their alignment
    backing = np.zeros(size + 8192, np.uint8)
    start = -backing.ctypes.data % 4096
    image = backing[start : start + size]
    for segment in segments:
        if segment[0] == 1:
            offset, address, filesz = segment[2], segment[3], segment[5]
            image[address : address + filesz] = np.frombuffer(data, np.uint8, filesz, offset)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + 64 * i) for i in range(shnum)]
    strings = data[sections[shstr][4] : sections[shstr][4] + sections[shstr][5]]
    named = {_name(strings, s[0]): (s[4], s[5], s[3]) for s in sections}
    _relocate(data, sections, image)
    args = {k[".name"]: tuple(k.get(".args", ())) for k in _metadata(data, sections).get("amdhsa.kernels", ())}
    kernels, ends = {}, {}
    for name, value, symbol_size in _symbols(data, sections):
        if not name.endswith(".kd"):
            ends[name] = value + symbol_size
            continue
        raw = image[value : value + 64].tobytes()
        lds, scratch, kernarg = struct.unpack_from("<III", raw, 0)
        (entry,) = struct.unpack_from("<q", raw, 16)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
        base = name[:-3]
        kernels[base] = KernelDescriptor(
            base, value + entry, lds, scratch, kernarg, rsrc1, rsrc2, rsrc3, properties, preload, args.get(base, ())
        )
    return CodeObject(arch, image, kernels, ends, named, data)


def _symbols(data: bytes, sections: list[tuple[int, ...]]) -> list[tuple[str, int, int]]:
    found: dict[str, tuple[str, int, int]] = {}
    for section in sections:
        if section[1] not in (2, 11):
            continue
        table = sections[section[6]]
        strings = data[table[4] : table[4] + table[5]]
        for at in range(section[4], section[4] + section[5], 24):
            name, _info, _other, _shndx, value, size = struct.unpack_from("<IBBHQQ", data, at)
            text = _name(strings, name)
            if text:
                found[text] = (text, value, size)
    return list(found.values())


def _relocate(data: bytes, sections: list[tuple[int, ...]], image: np.ndarray) -> None:
    base = int(image.ctypes.data)
    for section in sections:
        if section[1] != 4:
            continue
        for at in range(section[4], section[4] + section[5], 24):
            offset, info, addend = struct.unpack_from("<QQq", data, at)
            if info & 0xFFFFFFFF != _R_AMDGPU_RELATIVE64:
                raise EmulatorError(f"code object relocation of type {info & 0xFFFFFFFF} is not supported")
            image[offset : offset + 8] = np.frombuffer(struct.pack("<Q", base + addend), np.uint8)
