"""Stand-ins for kernels, the compiler and devices."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from fly.backends.artefact import Artefact
from fly.lang.signature import Parameter, Signature
from fly.runtime.device import is_traced
from fly.runtime.exported import export_metadata
from fly.runtime.packing import ArgumentSlot


class Kernel:
    """A kernel that has a name and a signature, as `fly.kernel` makes them."""

    def __init__(self, *parameters: Parameter, name: str = "kernel", **statics):
        self.name = name
        self.signature = Signature(parameters, statics)


def tensors(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "tensor") for name in names)


@dataclass
class Compiler:
    """A `Compile` that records its calls and makes an artefact without code."""

    calls: list[tuple] = field(default_factory=list)

    def __call__(self, kernel, specs, statics, target, block) -> Artefact:
        self.calls.append((specs, statics, target, block))
        return Artefact(
            kernel=kernel.name,
            target=is_traced(target)[0],
            binary=b"code",
            isa="",
            fields=kernel.signature.flatten(specs),
            block=block,
            metadata=export_metadata(kernel.signature, specs),
        )


@dataclass
class Launch:
    grid: tuple
    block: tuple
    packed: bytes
    stream: int
    allocations: tuple


@dataclass
class Device:
    """A device that records what it is given; `launches` holds the launches of all its kernels."""

    target: str = "gfx950"
    compute_units: int = 256
    needs_allocations: bool = False
    loaded: list[Artefact] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    build: str = ""

    def __post_init__(self):
        self.build = self.build or self.target

    def load(self, artefact: Artefact) -> LoadedKernel:
        self.loaded.append(artefact)
        return LoadedKernel(self)


@dataclass
class LoadedKernel:
    device: Device

    def launch(self, grid, block, arguments, stream, allocations) -> None:
        assert isinstance(arguments, ArgumentSlot)
        self.device.launches.append(Launch(grid, block, bytes(arguments.view), stream, tuple(allocations)))


class CudaArray:
    """An array of the CUDA array interface; the address says which device it is on: device * 2^40."""

    def __init__(self, shape=(4,), typestr="<f4", device=0, **entries):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": ((device << 40) + 256, False),
            "version": 3,
            **entries,
        }


def unpack(packed: bytes, codes: str) -> tuple:
    """Flat arguments by hand-written struct codes, with the compiler's natural alignment."""
    return struct.unpack("@" + codes, packed)
