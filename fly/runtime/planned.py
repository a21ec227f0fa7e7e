"""Launches that are bound for a target and never made: which builds a call takes, without a device or a compiler.

`planning(arch)` makes CPU tensors stand for a GPU's; what is bound and launched meanwhile is collected by
`fly.runtime.launch.bindings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fly import config
from fly.backends.artefact import Artefact
from fly.backends.target import target
from fly.errors import DeviceError
from fly.lang.signature import TensorMapSpec
from fly.runtime import device
from fly.runtime.device import Allocation, Dim3
from fly.runtime.log import HostMemory
from fly.runtime.packing import ArgumentSlot
from fly.runtime.tensor_map import BYTES


class PlannedDevice:
    """A GPU that is not there, of `compute_units`, by default those of the target's largest part.

    Raises:
        TargetError: an architecture that there is not.
    """

    needs_allocations = True  # so that every launch is bound, and collected

    def __init__(self, arch: str, compute_units: int | None = None):
        self.target, self.build = arch, device.planned(arch)
        self.compute_units = compute_units or target(arch).compute_units

    def load(self, artefact: Artefact) -> PlannedKernel:
        """See `fly.runtime.device.Device`."""
        return PlannedKernel(artefact.kernel)

    def is_capturing(self, stream: int) -> bool:
        """See `fly.runtime.device.Device`: there are no graphs."""
        return False

    def log_memory(self, nbytes: int) -> HostMemory:
        """See `fly.runtime.device.Device`."""
        return HostMemory(nbytes)

    def encode_tensor_map(
        self, spec: TensorMapSpec, size: int, address: int, shape: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        """A tensor map of which only the address is known; see `fly.runtime.tensor_map.tensor_map`."""
        return address.to_bytes(BYTES, "little")


class PlannedKernel:
    """A kernel of a `PlannedDevice`; see `fly.runtime.device.LoadedKernel`."""

    def __init__(self, name: str):
        self._name = name

    def launch(
        self, grid: Dim3, block: Dim3, arguments: ArgumentSlot, stream: int, allocations: Sequence[Allocation] = ()
    ) -> None:
        """Nothing is launched, and results are left as they are, while launches are planned.

        Raises:
            DeviceError: they are not any more.
        """
        if not device.is_planning():
            raise DeviceError(f"{self._name}: its launch was planned for a device that is not there; bind it on one")


@contextmanager
def planning(arch: str, compute_units: int | None = None) -> Iterator[None]:
    """In this thread, CPU tensors are on a `PlannedDevice` meanwhile, and `FLY_ARCH` is its architecture.

    Raises:
        TargetError: an architecture that there is not.
    """
    with config.ARCH.set_to(arch), device.instead_of_host(PlannedDevice(arch, compute_units)):
        yield
