"""AMDGPU code objects: kernel descriptors, metadata and the loaded image, read from the linked ELF file.

The descriptor's fields are those of the AMDGPU backend's "Kernel Descriptor" table (code object V3 and later).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.backends.rocdl.code_object import Section, metadata_of, sections_of, symbols_of
from fly.errors import EmulatorError

_EM_AMDGPU = 224
_MACHINES = {0x04C: "gfx942", 0x04F: "gfx950"}
_SHT_RELA = 4
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


def read_code_object(data: bytes) -> CodeObject:
    """Parse and load a linked AMDGPU code object (relative relocations applied).

    Raises:
        EmulatorError: not a linked ELF64 AMDGPU object for an emulated architecture.
    """
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise EmulatorError("not a code object: expected an ELF64 file")
    header = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
    kind, machine, phoff, flags, phnum = header[0], header[1], header[4], header[6], header[9]
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
    sections = sections_of(data)
    named = {s.name: (s.offset, s.size, s.address) for s in sections}
    _relocate(data, sections, image)
    try:
        described = metadata_of(data, sections).get("amdhsa.kernels", ())
    except ValueError as error:
        raise EmulatorError(f"code object metadata: {error}") from None
    args = {k[".name"]: tuple(k.get(".args", ())) for k in described}
    kernels, ends = {}, {}
    for name, (value, symbol_size) in symbols_of(data, sections).items():
        if not name.endswith(".kd"):
            ends[name] = value + symbol_size if symbol_size else _section_end(value, sections)
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


def _section_end(address: int, sections: list[Section]) -> int:
    """Where the code of a symbol without a size ends at the latest: assembly need not say it."""
    return next((s.address + s.size for s in sections if s.address <= address < s.address + s.size), address)


def _relocate(data: bytes, sections: list[Section], image: np.ndarray) -> None:
    base = int(image.ctypes.data)
    for section in sections:
        if section.kind != _SHT_RELA:
            continue
        for at in range(section.offset, section.offset + section.size, 24):
            offset, info, addend = struct.unpack_from("<QQq", data, at)
            if info & 0xFFFFFFFF != _R_AMDGPU_RELATIVE64:
                raise EmulatorError(f"code object relocation of type {info & 0xFFFFFFFF} is not supported")
            image[offset : offset + 8] = np.frombuffer(struct.pack("<Q", base + addend), np.uint8)
