"""A compiled kernel as data: what the backends produce, the cache stores, and the runtime loads.

File format: magic, version, header length, JSON header, the binary, the assembly text, SHA-256 of all before.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fly.backends import records
from fly.errors import ArgumentError, ArtefactError
from fly.lang.signature import Field

MAGIC = b"flyartf\0"
VERSION = 2
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32
MAX_BYTES = 1 << 30  # of a file: more than any kernel's code
_MAX_FIELDS = 4096  # more bytes of arguments than any device takes
_MAX_BLOCK = 1024
_MAX_COUNT = 2**31 - 1
_HEADER = (
    "kernel",
    "target",
    "fields",
    "block",
    "written",
    "dynamic_shared",
    "resources",
    "metadata",
    "binary_bytes",
    "isa_bytes",
)


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

    `binary` is a linked code object, a cubin, or PTX text in UTF-8; `isa` the assembly for people to read,
    empty in what was compiled to be launched on AMD;
    `fields` the flat arguments, packed in order at natural alignment; `written` the names of the tensors among them
    that the kernel may write, None where nobody looked; `dynamic_shared` bytes of shared memory that the launch must
    ask for.
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
    written: tuple[str, ...] | None = None

    def to_bytes(self) -> bytes:
        """The artefact in its file format; the same artefact gives the same bytes."""
        isa = self.isa.encode()
        header = {
            "kernel": self.kernel,
            "target": self.target,
            "fields": [[f.name, f.kind] for f in self.fields],
            "block": list(self.block),
            "written": None if self.written is None else list(self.written),
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
        except ValueError as error:
            raise ArtefactError(f"{source}: malformed artefact header: {error}") from error

    @classmethod
    def _from_body(cls, body: bytes, header_bytes: int) -> Artefact:
        start = _PREFIX.size + header_bytes
        if start > len(body):
            raise ArgumentError(f"{header_bytes} bytes of header, the file has {len(body)}")
        header = records.record("the header", records.parse(body[_PREFIX.size : start]), _HEADER)
        binary_bytes, isa_bytes = (records.whole(n, header[n], 0, MAX_BYTES) for n in ("binary_bytes", "isa_bytes"))
        middle = start + binary_bytes
        end = middle + isa_bytes
        if end != len(body):
            raise ArgumentError(f"the header describes {end} bytes, the file has {len(body)}")
        block = records.array("block", header["block"], 3, 3)
        metadata = records.record("metadata", header["metadata"])
        return cls(
            kernel=records.text("kernel", header["kernel"]),
            target=records.text("target", header["target"]),
            binary=body[start:middle],
            isa=body[middle:end].decode(),
            fields=tuple(map(_read_field, records.array("fields", header["fields"], 0, _MAX_FIELDS))),
            block=_read_block(block),
            dynamic_shared=records.whole("dynamic_shared", header["dynamic_shared"], 0, _MAX_COUNT),
            resources=_read_resources(header["resources"]),
            metadata={records.text("metadata", k): records.text(k, v) for k, v in metadata.items()},
            written=_read_written(header["written"]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artefact to `path`."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Artefact:
        """Read an artefact from `path`.

        Raises:
            ArtefactError: the file cannot be read, is no regular file, or holds no intact artefact of this version.
        """
        source = os.fspath(path)
        try:
            data = records.read_regular(path, MAX_BYTES)
        except OSError as error:
            raise ArtefactError(f"{source}: cannot be read: {error.strerror}") from error
        except ArgumentError as error:
            raise ArtefactError(f"{source}: {error}") from None
        return cls.from_bytes(data, source)


def _read_field(value: Any) -> Field:
    name, kind = records.array("field", value, 2, 2)
    return Field(records.text("field", name), records.text("field", kind))


def _read_block(threads: Sequence[Any]) -> tuple[int, int, int]:
    x, y, z = (records.whole("block", count, 1, _MAX_BLOCK) for count in threads)
    return x, y, z


def _read_written(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(records.text("written", name) for name in records.array("written", value, 0, _MAX_FIELDS))


def _read_resources(value: Any) -> Resources:
    """Figures that this version does not know are left out."""
    given = records.record("resources", value)
    known = [f.name for f in fields(Resources) if given.get(f.name) is not None]
    return Resources(**{name: records.whole(name, given[name], 0, _MAX_COUNT) for name in known})
