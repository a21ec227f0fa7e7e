"""What the launcher needs of a device, and the one device object per GPU (or emulated architecture)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fly import config
from fly.backends.artefact import Artefact
from fly.backends.target import targets
from fly.errors import DeviceError, MissingPackageError

if TYPE_CHECKING:
    from fly.runtime.log import LogMemory  # these need this module
    from fly.runtime.packing import ArgumentSlot

DeviceKey = tuple[str, int]
"""("cuda", ordinal) for a GPU of either vendor, as torch names them; ("cpu", 0) for host memory."""

_TRACED, _PLANNED = ":traced", ":planned"
CPU: DeviceKey = ("cpu", 0)
Dim3 = tuple[int, int, int]
_EMULATOR = ("tinygrad", "tqdm")  # what it imports that is not always installed


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that a kernel may touch through one tensor argument: `nbytes` bytes from `address`."""

    name: str
    address: int
    nbytes: int


class LoadedKernel(Protocol):
    """A kernel that is loaded on one device."""

    def launch(
        self, grid: Dim3, block: Dim3, arguments: ArgumentSlot, stream: int, allocations: Sequence[Allocation]
    ) -> None:
        """Start the kernel; returns without waiting where the device allows that.

        `grid` counts blocks, `arguments` holds the flat arguments at natural alignment (and may be written again when
        this has returned), `stream` is the driver's handle (0: the default stream).

        Raises:
            LaunchError: a grid, block or shared memory size that the device does not take.
            DeviceError: the driver reported a failure.
        """
        ...


class Device(Protocol):
    """A GPU, or an emulated one."""

    target: str
    """The architecture to compile for, such as "gfx950" or "sm_90a"."""

    compute_units: int
    """Compute units (AMD) or multiprocessors (NVIDIA): how many blocks run side by side, at least."""

    needs_allocations: bool
    """Whether launches must be told which memory each tensor spans."""

    build: str
    """What kernels are built for: `target`, `traced(target)` where a device runs what they are traced to, or
    `planned(target)` where they are never launched."""

    def load(self, artefact: Artefact) -> LoadedKernel:
        """Load a kernel compiled for this device's target; it stays loaded for the life of the process.

        Raises:
            CompileError: the driver rejected the code; the message holds its log.
            DeviceError: the driver reported another failure.
        """
        ...

    def is_capturing(self, stream: int) -> bool:
        """Whether launches on this stream are recorded into a graph instead of run.

        Raises:
            DeviceError: the driver reported a failure.
        """
        ...

    def log_memory(self, nbytes: int) -> LogMemory:
        """Memory that kernels write and the host reads, aligned to 8 bytes.

        Raises:
            DeviceError: there is none.
        """
        ...


def traced(arch: str) -> str:
    """What kernels are built for to be run as they are traced for an architecture."""
    return arch + _TRACED


def is_traced(build: str) -> tuple[str, bool]:
    """(architecture, whether kernels are only traced) of a device's `build`."""
    return build.removesuffix(_TRACED), build.endswith(_TRACED)


def planned(arch: str) -> str:
    """What kernels are built for whose launches are bound and never made: there is no code of them."""
    return arch + _PLANNED


def is_planned(build: str) -> str | None:
    """The architecture, where launches are never made; else None."""
    return build.removesuffix(_PLANNED) if build.endswith(_PLANNED) else None


_instead_of_host: ContextVar[Device | None] = ContextVar("instead_of_host", default=None)


@contextmanager
def instead_of_host(device: Device) -> Iterator[None]:
    """In this thread, host memory belongs to `device` for a while."""
    token = _instead_of_host.set(device)
    try:
        yield
    finally:
        _instead_of_host.reset(token)


def is_planning() -> bool:
    """Whether host memory belongs to another device in this thread for a while (`instead_of_host`)."""
    return _instead_of_host.get() is not None


_devices: dict[tuple[object, ...], Device] = {}
_lock = threading.Lock()


def device_for(key: DeviceKey) -> Device:
    """The device that tensors with this device key live on; host memory belongs to the `FLY_ARCH` that is emulated
    (AMD) or simulated (NVIDIA).

    Raises:
        DeviceError: the device, its driver, or the emulator is missing.
    """
    kind, ordinal = key
    if kind == "cpu" and (instead := _instead_of_host.get()) is not None:
        return instead
    name = (kind, config.ARCH.get()) if kind == "cpu" else (kind, ordinal)
    device = _devices.get(name)
    if device is None:
        with _lock:
            device = _devices.get(name)
            if device is None:
                device = _devices[name] = _open(kind, ordinal)
    return device


class Place(Protocol):
    """A `torch.device`, as far as it tells where tensors are."""

    type: str
    index: int


def device_of(place: Place) -> Device:
    """What runs kernels on tensors that are on a `torch.device`; raises as `device_for` does."""
    return device_for((place.type, place.index or 0))


def _open(kind: str, ordinal: int) -> Device:
    device: Device
    if kind == "cpu":
        arch, known = config.ARCH.get(), {t.arch: t.backend for t in targets()}
        if arch not in known:
            raise DeviceError(f"FLY_ARCH={arch!r}; CPU tensors run on one of {', '.join(known)}")
        if known[arch] == "nvvm":
            device = importlib.import_module(".simulated", __package__).SimulatedDevice(arch)
            return device
        for module in _EMULATOR:
            if importlib.util.find_spec(module) is None:
                raise MissingPackageError("emulating a GPU for CPU tensors", module, "; or pass tensors on a GPU")
        device = importlib.import_module(".emulated", __package__).EmulatedDevice(arch)
        return device
    if kind != "cuda":
        raise DeviceError(f"device {kind}:{ordinal}: kernels run on 'cuda' (NVIDIA or AMD) and 'cpu' tensors")
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.hip:
        device = importlib.import_module(".hip", __package__).HipDevice(ordinal)
        return device
    device = importlib.import_module(".cuda", __package__).CudaDevice(ordinal)
    return device
