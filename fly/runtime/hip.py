"""AMD devices, through the HIP runtime library (`libamdhip64`) and ctypes.

Only functions whose arguments are integers, pointers and strings are called: `hipGetDeviceProperties` fills a
struct that differs between ROCm versions, and the numbers of device attributes have changed too. The
architecture comes from torch when it is a ROCm build, and else from the kernel driver's topology files,
matched by PCI address.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from fly.backends.artefact import Artefact, Resources
from fly.backends.target import targets
from fly.errors import CompileError, DeviceError
from fly.runtime.device import Allocation, Dim3
from fly.runtime.limits import CheckedSizes, amd_limits
from fly.runtime.packing import ArgumentSlot

_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
# invalid source, invalid image, no binary for this GPU, invalid kernel file, shared object init failed
_REJECTIONS = (200, 209, 218, 300, 303)
_MAPPED, _COHERENT = 0x2, 0x40000000  # hipHostMallocMapped, hipHostMallocCoherent

_SIGNATURES = {
    "hipInit": [c_uint],
    "hipGetDeviceCount": [POINTER(c_int)],
    "hipGetDevice": [POINTER(c_int)],
    "hipSetDevice": [c_int],
    "hipGetLastError": [],
    "hipDeviceGetPCIBusId": [c_char_p, c_int, c_int],
    "hipModuleLoadData": [POINTER(c_void_p), c_char_p],
    "hipModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "hipHostMalloc": [POINTER(c_void_p), c_size_t, c_uint],
    "hipStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "hipStreamSynchronize": [c_void_p],
    "hipModuleLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
}


def library_names() -> list[str]:
    """The names that the HIP library is looked for under, in order.

    torch's own copy comes first: two copies in one process do not share streams or memory.
    """
    folders = []
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.hip:
        folders.append(os.path.join(os.path.dirname(torch.__file__), "lib"))
    for variable in ("HIP_PATH", "ROCM_PATH"):
        if os.environ.get(variable):
            folders.append(os.path.join(os.environ[variable], "lib"))
    names = [os.path.join(folder, "libamdhip64.so") for folder in folders]
    return [*names, "libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so"]


@functools.cache
def _open_library(path: str | None = None) -> ctypes.CDLL:
    names = library_names() if path is None else [path]
    for name in names:
        with contextlib.suppress(OSError):
            return _declare(ctypes.CDLL(name))
    raise DeviceError(f"the HIP library cannot be loaded; tried {', '.join(names)}; set ROCM_PATH")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = c_int
    library.hipGetErrorString.argtypes = [c_int]
    library.hipGetErrorString.restype = c_char_p
    return library


def arch_of_version(version: int) -> str:
    """The architecture's name for the kernel driver's number: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def arch_from_topology(bus_id: str, nodes: Path = _TOPOLOGY) -> str:
    """The architecture of the GPU at a PCI address such as "0000:c1:00.0", from the kernel driver's files.

    Raises:
        DeviceError: no file describes that GPU.
    """
    domain, bus, rest = bus_id.split(":")
    place = (int(domain, 16), int(bus, 16) << 5 | int(rest.partition(".")[0], 16))
    for path in sorted(nodes.glob("*/properties")):
        with contextlib.suppress(OSError):
            lines = (line.split() for line in path.read_text().splitlines())
            node = {words[0]: int(words[1]) for words in lines if len(words) == 2}
            # a GPU split into partitions has one node for each, told apart by the PCI function
            here = (node.get("domain", 0), node.get("location_id", 0) >> 3)
            if here == place and node.get("gfx_target_version"):
                return arch_of_version(node["gfx_target_version"])
    raise DeviceError(f"the architecture of the GPU at {bus_id} is in none of {nodes}/*/properties")


class HipDevice:
    """The AMD GPU `ordinal`, in HIP's count of visible devices. `library` overrides the HIP library's path.

    Raises:
        DeviceError: no HIP library, no such device, or an architecture that cannot be found out.
    """

    needs_allocations = False

    def __init__(self, ordinal: int, library: str | None = None, topology: Path = _TOPOLOGY):
        self.library = _open_library(library)
        self.ordinal = ordinal
        self.call("hipInit", 0)
        count = c_int()
        self.call("hipGetDeviceCount", count)
        if not 0 <= ordinal < count.value:
            raise DeviceError(f"cuda:{ordinal}: there are {count.value} HIP devices")
        self.target, self.compute_units = self._properties(topology)
        self.build = self.target
        self.limits = amd_limits(f"cuda:{ordinal}", self.target)

    def _properties(self, topology: Path) -> tuple[str, int]:
        """(architecture, compute units); without torch, the units of a whole chip of that architecture."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.version.hip:
            found = torch.cuda.get_device_properties(self.ordinal)
            return found.gcnArchName.partition(":")[0], found.multi_processor_count
        bus_id = ctypes.create_string_buffer(64)
        self.call("hipDeviceGetPCIBusId", bus_id, len(bus_id), self.ordinal)
        arch = arch_from_topology(bus_id.value.decode(), topology)
        return arch, next((t.compute_units for t in targets() if t.arch == arch), 1)

    def call(self, function: str, *arguments: object) -> None:
        """Call a HIP function that returns a status.

        Raises:
            DeviceError: it failed; the message holds HIP's text for the status.
        """
        status = getattr(self.library, function)(*arguments)
        if status != 0:
            raise DeviceError(f"{function}: {self.text(status)}")

    def text(self, status: int) -> str:
        """HIP's text for a failure's status, with its number; clears HIP's record of the failure."""
        self.library.hipGetLastError()  # or the next check of another user, such as torch, would find it
        return f"{self.library.hipGetErrorString(status).decode()} ({status})"

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the thread's current device, if it is not, for the body's duration."""
        before = c_int()
        self.call("hipGetDevice", before)
        if before.value == self.ordinal:
            yield
            return
        self.call("hipSetDevice", self.ordinal)
        try:
            yield
        finally:
            self.call("hipSetDevice", before)

    def load(self, artefact: Artefact) -> HipKernel:
        """Load a kernel from a linked code object; it is never unloaded.

        Raises:
            CompileError: HIP rejected the code object.
            LaunchError: more shared memory than a block can have.
            DeviceError: HIP reported another failure.
        """
        module, function = c_void_p(), c_void_p()
        with self.current():
            status = self.library.hipModuleLoadData(module, artefact.binary)
            if status != 0:
                kind = CompileError if status in _REJECTIONS else DeviceError
                raise kind(f"{artefact.kernel} ({artefact.target}): hipModuleLoadData: {self.text(status)}")
            self.call("hipModuleGetFunction", function, module, artefact.kernel.encode())
        return HipKernel(self, artefact, function)

    def is_capturing(self, stream: int) -> bool:
        """See `fly.runtime.device.Device`."""
        status = c_int()
        with self.current():
            self.call("hipStreamIsCapturing", stream, status)
        return status.value != 0

    def log_memory(self, nbytes: int) -> HipLog:
        """See `fly.runtime.device.Device`."""
        return HipLog(self, nbytes)


class HipLog:
    """Pinned, coherent host memory with one address on both sides, never freed; see `fly.runtime.log.LogMemory`."""

    def __init__(self, device: HipDevice, nbytes: int):
        pointer = c_void_p()
        with device.current():
            device.call("hipHostMalloc", pointer, nbytes, _MAPPED | _COHERENT)
        self._device, self.nbytes, self.address = device, nbytes, pointer.value

    def finish(self, stream: int) -> None:
        """See `LogMemory`."""
        with self._device.current():
            self._device.call("hipStreamSynchronize", stream)


class HipKernel:
    """A kernel that is loaded on one AMD GPU; made by `HipDevice.load`."""

    def __init__(self, device: HipDevice, artefact: Artefact, function: c_void_p):
        self._device = device
        self._artefact = artefact  # HIP may read the code object after loading it
        self._name = artefact.kernel
        self._function = function
        self._shared = artefact.dynamic_shared
        self._checked = CheckedSizes(device.limits)
        self.resources: Resources = artefact.resources
        device.limits.check_shared(self._name, max(self._shared, self.resources.shared_bytes or 0))

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: ArgumentSlot,
        stream: int,
        allocations: Sequence[Allocation] = (),
    ) -> None:
        """See `fly.runtime.device.LoadedKernel`; `allocations` is not needed here."""
        if (grid, block) not in self._checked:
            self._checked.check(self._name, grid, block)
        with self._device.current():
            status = self._device.library.hipModuleLaunchKernel(
                self._function, *grid, *block, self._shared, stream, None, arguments.extra
            )
        if status != 0:
            raise DeviceError(f"{self._name}: hipModuleLaunchKernel: {self._device.text(status)}")
