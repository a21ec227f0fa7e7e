"""A compiled kernel as data: what the backends produce, the cache stores, and the runtime loads.

File format: magic, version, header length, JSON header, the binary, the assembly text, SHA-256 of all before.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from fly.errors import ArgumentError, ArtefactError
from fly.lang.signature import Field

MAGIC = b"flyartf\0"
VERSION = 1
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Resources:
    """What one kernel uses of its processor; None where the backend does not know.

    Registers are per lane (`scalar_registers`: per wave), `spills` are registers spilled, `occupancy` is the
    waves (warps) resident per SIMD (scheduler), the rest are bytes: scratch per lane, shared per block.
    """

    registers: int | None = None
    accum_registers: int | None = None
    scalar_registers: int | None = None
    spills: int | None = None
    scratch_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy: int | None = None


@dataclass(frozen=True)
class Artefact:
    """One kernel compiled for one target and block size.

    `binary` is a linked code object, a cubin, or PTX text in UTF-8; `isa` the assembly for people to read;
    `fields` the flat arguments, packed in order at natural alignment; `dynamic_shared` bytes of shared memory
    that the launch must ask for.
    """

    kernel: str
    target: str
    binary: bytes
    isa: str
    fields: tuple[Field, ...]
    block: tuple[int, int, int]
    dynamic_shared: int = 0
    resources: Resources = Resources()
    metadata: dict[str, str] = field(default_factory=dict, hash=False)

    def to_bytes(self) -> bytes:
        """The artefact in its file format; the same artefact gives the same bytes."""
        isa = self.isa.encode()
        header = {
            "kernel": self.kernel,
            "target": self.target,
            "fields": [[f.name, f.kind] for f in self.fields],
            "block": list(self.block),
            "dynamic_shared": self.dynamic_shared,
            "resources": asdict(self.resources),
            "metadata": self.metadata,
            "binary_bytes": len(self.binary),
            "isa_bytes": len(isa),
        }
        text = json.dumps(header, sort_keys=True).encode()
        body = _PREFIX.pack(MAGIC, VERSION, len(text)) + text + self.binary + isa
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "data") -> Artefact:
        """The artefact stored in `data`; `source` names it in errors.

        Raises:
            ArtefactError: not an artefact, of another version, cut short, or altered.
        """
        if data[: len(MAGIC)] != MAGIC or len(data) < _PREFIX.size + _DIGEST_BYTES:
            raise ArtefactError(f"{source}: not a fly artefact ({len(data)} bytes, first {data[:8]!r})")
        _, version, header_bytes = _PREFIX.unpack_from(data)
        if version != VERSION:
            raise ArtefactError(f"{source}: artefact version {version}; this fly reads version {VERSION}")
        body = memoryview(data)[:-_DIGEST_BYTES]
        if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
            raise ArtefactError(f"{source}: checksum differs: the artefact was cut short or altered")
        try:
            return cls._from_body(bytes(body), header_bytes)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"{source}: malformed artefact header: {error!r}") from error

    @classmethod
    def _from_body(cls, body: bytes, header_bytes: int) -> Artefact:
        start = _PREFIX.size + header_bytes
        header = json.loads(body[_PREFIX.size : start])
        middle = start + header["binary_bytes"]
        end = middle + header["isa_bytes"]
        if end != len(body):
            raise ArgumentError(f"the header describes {end} bytes, the file has {len(body)}")
        known = {f.name for f in fields(Resources)}
        return cls(
            kernel=header["kernel"],
            target=header["target"],
            binary=body[start:middle],
            isa=body[middle:end].decode(),
            fields=tuple(Field(name, kind) for name, kind in header["fields"]),
            block=tuple(header["block"]),
            dynamic_shared=header["dynamic_shared"],
            resources=Resources(**{k: v for k, v in header["resources"].items() if k in known}),
            metadata=header["metadata"],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artefact to `path`."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Artefact:
        """Read an artefact from `path`.

        Raises:
            ArtefactError: the file cannot be read, or holds no intact artefact of this version.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ArtefactError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
        return cls.from_bytes(data, os.fspath(path))
