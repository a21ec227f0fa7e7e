"""NVIDIA devices, through the driver API: that of `cuda-bindings`, or where it is not installed, of ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from fly.backends.artefact import Artefact, Resources
from fly.backends.target import arch_for_capability
from fly.errors import CompileError, DeviceError
from fly.runtime.device import Allocation, Dim3
from fly.runtime.limits import CheckedSizes, Limits
from fly.runtime.packing import ArgumentSlot, SharedArguments

_JIT_LOG_BYTES = 16384
_DEFAULT_SHARED_BYTES = 48 * 1024  # more is opt-in, per function
_REJECTIONS = ("INVALID_PTX", "INVALID_IMAGE", "INVALID_SOURCE", "UNSUPPORTED_PTX", "NO_BINARY", "JIT_")
_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTALLOC_*
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
LAUNCHES_WITHOUT_GRAPH = 8  # by one thread on one stream, before several kernels become a graph
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


@functools.cache
def _driver() -> Any:
    """The bindings, whose launches take less of the host's time, or `fly.runtime.cuda_driver`."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return importlib.import_module(".cuda_driver", __package__)


def call(driver: Any, function: str, *arguments: Any) -> Any:
    """Call a driver function; its result without the status (None, one value, or a tuple).

    Raises:
        DeviceError: the driver reported a failure or is missing.
    """
    try:
        status, *results = getattr(driver, function)(*arguments)
    except DeviceError:
        raise
    except RuntimeError as error:  # how the bindings say that libcuda is missing
        raise DeviceError(f"{function}: the NVIDIA driver cannot be loaded: {error}") from error
    if status != 0:
        raise DeviceError(f"{function}: {status_text(driver, status)}")
    return results[0] if len(results) == 1 else tuple(results) or None


def status_text(driver: Any, status: Any) -> str:
    """What a status of the driver is called, and what it means."""
    texts = [getattr(driver, f)(status)[1] for f in ("cuGetErrorName", "cuGetErrorString")]
    return ": ".join(text.decode() for text in texts if text) or f"error {int(status)}"


def ordinal_of(address: int) -> int:
    """The ordinal of the device that an address of device memory belongs to.

    Raises:
        DeviceError: the driver does not know the address, or is missing.
    """
    call(_driver(), "cuInit", 0)
    ordinal = ctypes.c_int()
    # past the bindings: those of 13.3 return 0 here whatever the driver says
    query = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    status = query(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    if status != 0:
        raise DeviceError(f"address {address:#x} is no GPU memory that the CUDA driver knows (error {status})")
    return ordinal.value


class CudaDevice:
    """The NVIDIA GPU `ordinal`, in the driver's count of visible devices, through its primary context.

    `driver` is `cuda.bindings.driver` or `fly.runtime.cuda_driver` unless a module with its functions is given.

    Raises:
        DeviceError: no driver, or no such device.
        TargetError: a compute capability that is not supported.
    """

    needs_allocations = False

    def __init__(self, ordinal: int, driver: Any = None):
        self.driver = driver or _driver()
        self._call("cuInit", 0)
        count = self._call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise DeviceError(f"cuda:{ordinal}: there are {count} devices")
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.context_address = int(self._context)
        capability = [self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")]
        self.target = self.build = arch_for_capability(*capability)
        self.compute_units = self._attribute("MULTIPROCESSOR_COUNT")
        self.limits = Limits(
            device=f"cuda:{ordinal} ({self.target})",
            grid=cast("Dim3", tuple(self._attribute(f"MAX_GRID_DIM_{axis}") for axis in "XYZ")),
            block=cast("Dim3", tuple(self._attribute(f"MAX_BLOCK_DIM_{axis}") for axis in "XYZ")),
            block_threads=self._attribute("MAX_THREADS_PER_BLOCK"),
            shared_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )

    def _call(self, function: str, *arguments: Any) -> Any:
        return call(self.driver, function, *arguments)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        value: int = self._call("cuDeviceGetAttribute", attribute, self._device)
        return value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context current in this thread, if it is not, for the body's duration."""
        if int(self._call("cuCtxGetCurrent")) == self.context_address:
            yield
            return
        self.push()
        try:
            yield
        finally:
            self.pop()

    def push(self) -> None:
        """Make the device's primary context current in this thread until `pop`."""
        self._call("cuCtxPushCurrent", self._context)

    def pop(self) -> None:
        """Undo `push`."""
        self._call("cuCtxPopCurrent")

    def load(self, artefact: Artefact) -> CudaKernel:
        """Load a kernel from PTX, which the driver compiles, or from a cubin; it is never unloaded.

        Raises:
            CompileError: the driver rejected the code; the message holds its log.
            LaunchError: more shared memory than a block can have.
            DeviceError: the driver reported another failure.
        """
        with self.current():
            module = self._load_module(artefact)
            function = self._call("cuModuleGetFunction", module, artefact.kernel.encode())
            return CudaKernel(self, artefact, function)

    def is_capturing(self, stream: int) -> bool:
        """See `fly.runtime.device.Device`."""
        with self.current():
            return int(self._call("cuStreamIsCapturing", stream)) != 0

    def log_memory(self, nbytes: int) -> CudaLog:
        """See `fly.runtime.device.Device`: the host's memory, pinned, which outlives a kernel's fault."""
        with self.current():
            return CudaLog(self, nbytes, self._call("cuMemHostAlloc", nbytes, _MAPPED | _PORTABLE))

    def _load_module(self, artefact: Artefact) -> Any:
        option = self.driver.CUjit_option
        log = bytes(_JIT_LOG_BYTES)  # the bindings take the buffer as bytes, and the driver writes into it
        options = {
            option.CU_JIT_ERROR_LOG_BUFFER: log,
            option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: _JIT_LOG_BYTES,
        }
        image = artefact.binary + b"\0"  # PTX is a C string; a cubin knows its own length
        status, module = self.driver.cuModuleLoadDataEx(image, len(options), list(options), list(options.values()))
        if status == 0:
            return module
        failure = f"{artefact.kernel} ({artefact.target}): {status_text(self.driver, status)}"
        text = log.partition(b"\0")[0].decode(errors="replace").strip()
        rejected = text or any(word in failure for word in _REJECTIONS)
        raise (CompileError if rejected else DeviceError)("\n".join(filter(None, (failure, text))))


class CudaLog:
    """Pinned host memory, which has one address on both sides and is never freed; see `fly.runtime.log.LogMemory`."""

    def __init__(self, device: CudaDevice, nbytes: int, address: Any):
        self._device, self.nbytes, self.address = device, nbytes, int(address)

    def finish(self, stream: int) -> None:
        """See `LogMemory`."""
        with self._device.current():
            call(self._device.driver, "cuStreamSynchronize", stream)


class CudaKernel:
    """A kernel that is loaded on one NVIDIA GPU; `resources` is what the driver says it uses.

    Made by `CudaDevice.load`, with the device's context current.
    """

    def __init__(self, device: CudaDevice, artefact: Artefact, function: Any):
        self.device = device
        self._name = artefact.kernel
        self._function = function
        self._shared = artefact.dynamic_shared
        self._sized: tuple[Dim3 | None, Dim3 | None, tuple[Any, ...]] = (None, None, ())  # of the last launch
        self._launch = device.driver.cuLaunchKernel
        self._get_current = device.driver.cuCtxGetCurrent
        self._context_address = device.context_address
        attribute = functools.partial(self._attribute, device.driver.CUfunction_attribute)
        shared = attribute("SHARED_SIZE_BYTES") + self._shared
        self._checked = CheckedSizes(device.limits.for_kernel(attribute("MAX_THREADS_PER_BLOCK")))
        device.limits.check_shared(self._name, shared)
        if shared > _DEFAULT_SHARED_BYTES:
            what = device.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(device.driver, "cuFuncSetAttribute", function, what, self._shared)
        self.resources = Resources(
            registers=attribute("NUM_REGS"), scratch_bytes=attribute("LOCAL_SIZE_BYTES"), shared_bytes=shared
        )

    def _attribute(self, attributes: Any, name: str) -> int:
        what = getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}")
        value: int = call(self.device.driver, "cuFuncGetAttribute", what, self._function)
        return value

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: ArgumentSlot,
        stream: int,
        allocations: Sequence[Allocation] = (),
    ) -> None:
        """See `fly.runtime.device.LoadedKernel`; `allocations` is not needed here."""
        last_grid, last_block, given = self._sized
        if last_grid is not grid or last_block is not block:
            given = self.sized(grid, block)
            self._sized = (grid, block, given)
        if int(self._get_current()[1]) == self._context_address:
            (status,) = self._launch(*given, stream, arguments.parameters, 0)
        else:
            self.device.push()
            try:
                (status,) = self._launch(*given, stream, arguments.parameters, 0)
            finally:
                self.device.pop()
        if status != 0:
            raise self.failure(status)

    def sized(self, grid: Dim3, block: Dim3) -> tuple[Any, ...]:
        """What the driver is given first for a launch of these sizes.

        Raises:
            LaunchError: sizes that the device does not take.
        """
        if (grid, block) not in self._checked:
            self._checked.check(self._name, grid, block)
        return (self._function, *grid, *block, self._shared)

    def failure(self, status: Any, function: str = "cuLaunchKernel") -> DeviceError:
        """The error of a launch with this status of a function of the driver."""
        return DeviceError(f"{self._name}: {function}: {status_text(self.device.driver, status)}")


def launch_of(
    kernel: CudaKernel, grid: Dim3, block: Dim3, arguments: ArgumentSlot, places: Sequence[int]
) -> Callable[[Sequence[int], int], None]:
    """A launch as one function of its addresses and a stream; `places`: of addresses, among its arguments' words.

    `Prepared.launch` with fewer calls of Python's.

    Raises:
        LaunchError: as of `CudaKernel.launch`; the function raises DeviceError as that does.
    """
    device, given = kernel.device, kernel.sized(grid, block)
    launch, get_current, context = device.driver.cuLaunchKernel, device.driver.cuCtxGetCurrent, device.context_address

    def run(addresses: Sequence[int], stream: int) -> None:
        words = arguments.words
        for place, address in zip(places, addresses):
            words[place] = address
        if int(get_current()[1]) == context:
            (status,) = launch(*given, stream, arguments.parameters, 0)
        else:
            device.push()
            try:
                (status,) = launch(*given, stream, arguments.parameters, 0)
            finally:
                device.pop()
        if status != 0:
            raise kernel.failure(status)

    return run


_Begun = tuple[CudaKernel, tuple[Any, ...]]
"""A kernel, and what `CudaKernel.sized` says of its launch."""


def launches(
    kernels: Sequence[CudaKernel], sizes: Sequence[tuple[Dim3, Dim3]], arguments: SharedArguments
) -> Callable[[Sequence[int], int], None]:
    """Launches of kernels of one device, in order, as one function of the addresses that they share and a stream.

    `sizes`: of each, (grid, block). A thread that comes again and again on a stream has them as a graph of its own,
    which the driver queues at once; not while the stream is captured, whose graph gets the kernels themselves.

    Raises:
        LaunchError: as of `CudaKernel.launch`; the function raises DeviceError as that does.
    """
    device = kernels[0].device
    begun = [(kernel, kernel.sized(*of_kernel)) for kernel, of_kernel in zip(kernels, sizes, strict=True)]
    launch, get_current, context = device.driver.cuLaunchKernel, device.driver.cuCtxGetCurrent, device.context_address
    capture_status, of_thread = device.driver.cuStreamIsCapturing, _OfThread()

    def run(addresses: Sequence[int], stream: int) -> None:
        pushed = int(get_current()[1]) != context
        if pushed:
            device.push()
        try:
            graph = of_thread.graphs.get(stream)
            if graph is not None:
                status, capturing = capture_status(stream)
                if status == 0 == capturing:
                    if addresses != graph.addresses:
                        arguments.write(addresses)
                        graph.take(addresses)
                    graph.launch(stream)
                    return
            arguments.write(addresses)
            for (kernel, given), place in zip(begun, arguments.parameters):
                (status,) = launch(*given, stream, place, 0)
                if status != 0:
                    raise kernel.failure(status)
            of_thread.count(device.driver, begun, arguments.parameters, stream)
        finally:
            if pushed:
                device.pop()

    return run


class _OfThread(threading.local):
    """A thread's graphs of some launches, by stream, and how often it has come without one."""

    def __init__(self) -> None:
        self.graphs: dict[int, _Graph] = {}
        self._seen: dict[int, int] = {}

    def count(self, driver: Any, begun: Sequence[_Begun], parameters: Sequence[int], stream: int) -> None:
        """It has come once more; what comes often gets a graph."""
        seen = self._seen.get(stream, 0)
        if seen >= LAUNCHES_WITHOUT_GRAPH or int(call(driver, "cuStreamIsCapturing", stream)):
            return
        self._seen[stream] = seen + 1
        # nodes have a priority of their own, which is not the stream's
        if seen + 1 == LAUNCHES_WITHOUT_GRAPH and call(driver, "cuStreamGetPriority", stream) == 0:
            self.graphs[stream] = _Graph(driver, begun, parameters)


class _Graph:
    """Kernels as a graph that is launched again and again by one thread; `addresses`: what its launches take.

    Making it takes longer than many launches do; its memory is freed with it.
    """

    def __init__(self, driver: Any, begun: Sequence[_Begun], parameters: Sequence[int]):
        self.addresses: Sequence[int] = ()
        self._set, self._launch = driver.cuGraphExecKernelNodeSetParams, driver.cuGraphLaunch
        # someone else may be capturing, whom allocations would disturb
        before = call(driver, "cuThreadExchangeStreamCaptureMode", driver.CUstreamCaptureMode(_RELAXED))
        try:
            graph = call(driver, "cuGraphCreate", 0)
            weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
            self._nodes: list[tuple[CudaKernel, Any, Any]] = []
            for (kernel, given), place in zip(begun, parameters, strict=True):
                described = _node(driver, given, place)
                last = [node for _, node, _ in self._nodes[-1:]]
                node = call(driver, "cuGraphAddKernelNode", graph, last, len(last), described)
                self._nodes.append((kernel, node, described))
            self._executable = call(driver, "cuGraphInstantiate", graph, 0)
            weakref.finalize(self, driver.cuGraphExecDestroy, self._executable).atexit = False
        finally:
            call(driver, "cuThreadExchangeStreamCaptureMode", before)

    def take(self, addresses: Sequence[int]) -> None:
        """Have later launches take what the arguments' memory holds now, which are these."""
        self.addresses = ()
        for kernel, node, described in self._nodes:
            (status,) = self._set(self._executable, node, described)
            if status != 0:
                raise kernel.failure(status, "cuGraphExecKernelNodeSetParams")
        self.addresses = [*addresses]

    def launch(self, stream: int) -> None:
        """Queue the kernels."""
        (status,) = self._launch(self._executable, stream)
        if status != 0:
            raise self._nodes[-1][0].failure(status, "cuGraphLaunch")


def _node(driver: Any, given: tuple[Any, ...], parameters: int) -> Any:
    """What the driver is told of a kernel in a graph: the same as for a launch."""
    described = driver.CUDA_KERNEL_NODE_PARAMS()
    described.func, (described.gridDimX, described.gridDimY, described.gridDimZ) = given[0], given[1:4]
    (described.blockDimX, described.blockDimY, described.blockDimZ), described.sharedMemBytes = given[4:7], given[7]
    described.kernelParams = parameters
    return described
