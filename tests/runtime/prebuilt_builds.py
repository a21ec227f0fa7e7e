"""A kernel, builds of it, and what stands for their code: for processes that load neither torch nor a compiler."""

from __future__ import annotations

from dataclasses import dataclass, field

import fly
from fly.backends.artefact import Artefact
from fly.runtime.exported import export_metadata
from fly.runtime.prebuilt import Build

VECTOR = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)


@fly.kernel
def fill_with(x: fly.Tensor, *, value: float = 1.0):
    """x = value."""
    x.store(fly.f32(value), fly.thread_id.x)


def build(value: float = 1.0, spec=VECTOR, arch: str = "gfx950") -> Build:
    return Build(fill_with, (spec,), {"value": value}, arch, (64, 1, 1))


def code(made: Build, binary: bytes = b"code") -> Artefact:
    """What a compiler would give for it."""
    fields = made.kernel.signature.flatten(made.specs)
    metadata = export_metadata(made.kernel.signature, made.specs)
    return Artefact(made.kernel.name, made.target, binary, "", fields, made.block, metadata=metadata, written=("x",))


@dataclass(frozen=True)
class Options:
    tile: tuple[int, ...] = (1, 2)
    made: object = field(default=object(), compare=False)


def shifted(by):
    return lambda score: score + by
