"""The CUDA driver's functions through ctypes, named and called as those of `cuda.bindings.driver`.

What `fly.runtime.cuda` takes where `cuda-bindings` is not installed: a function returns a tuple of its status and its
results, handles are ints. Functions are those of CUDA 12.0, which every driver that loads our kernels has.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

from fly.errors import DeviceError

_LIBRARY = "libcuda.so.1"
_VERSION = 12000
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64

# by name: what a function takes, in order, and the one thing that it gives, by reference
_IN, _OUT = "in", "out"
_FUNCTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "cuInit": ((_IN, c_uint),),
    "cuDriverGetVersion": ((_OUT, c_int),),
    "cuDeviceGetCount": ((_OUT, c_int),),
    "cuDeviceGet": ((_OUT, c_int), (_IN, c_int)),
    "cuDeviceGetAttribute": ((_OUT, c_int), (_IN, c_int), (_IN, c_int)),
    "cuDevicePrimaryCtxRetain": ((_OUT, c_void_p), (_IN, c_int)),
    "cuCtxGetCurrent": ((_OUT, c_void_p),),
    "cuCtxPushCurrent": ((_IN, c_void_p),),
    "cuCtxPopCurrent": ((_OUT, c_void_p),),
    "cuModuleGetFunction": ((_OUT, c_void_p), (_IN, c_void_p), (_IN, c_char_p)),
    "cuFuncGetAttribute": ((_OUT, c_int), (_IN, c_int), (_IN, c_void_p)),
    "cuFuncSetAttribute": ((_IN, c_void_p), (_IN, c_int), (_IN, c_int)),
    "cuMemHostAlloc": ((_OUT, c_void_p), (_IN, c_size_t), (_IN, c_uint)),
    "cuStreamIsCapturing": ((_IN, c_void_p), (_OUT, c_int)),
    "cuStreamGetPriority": ((_IN, c_void_p), (_OUT, c_int)),
    "cuStreamSynchronize": ((_IN, c_void_p),),
    "cuGraphCreate": ((_OUT, c_void_p), (_IN, c_uint)),
    "cuGraphInstantiateWithFlags": ((_OUT, c_void_p), (_IN, c_void_p), (_IN, c_uint64)),
    "cuGraphLaunch": ((_IN, c_void_p), (_IN, c_void_p)),
    "cuGraphDestroy": ((_IN, c_void_p),),
    "cuGraphExecDestroy": ((_IN, c_void_p),),
    "cuGetErrorName": ((_IN, c_int), (_OUT, c_char_p)),
    "cuGetErrorString": ((_IN, c_int), (_OUT, c_char_p)),
}

cuuint32_t = int
cuuint64_t = int
CUstreamCaptureMode = int


class CUdevice_attribute(IntEnum):
    """Numbers of the driver's API."""

    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X = 2
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y = 3
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z = 4
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X = 5
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y = 6
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z = 7
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class CUfunction_attribute(IntEnum):
    """Numbers of the driver's API."""

    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUjit_option(IntEnum):
    """Numbers of the driver's API."""

    CU_JIT_ERROR_LOG_BUFFER = 5
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6


class CUtensorMapDataType(IntEnum):
    """Numbers of the driver's API."""

    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0
    CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1
    CU_TENSOR_MAP_DATA_TYPE_INT32 = 3
    CU_TENSOR_MAP_DATA_TYPE_INT64 = 5
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64 = 8
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9


class CUtensorMapInterleave(IntEnum):
    """Numbers of the driver's API."""

    CU_TENSOR_MAP_INTERLEAVE_NONE = 0


class CUtensorMapSwizzle(IntEnum):
    """Numbers of the driver's API."""

    CU_TENSOR_MAP_SWIZZLE_NONE = 0
    CU_TENSOR_MAP_SWIZZLE_32B = 1
    CU_TENSOR_MAP_SWIZZLE_64B = 2
    CU_TENSOR_MAP_SWIZZLE_128B = 3


class CUtensorMapL2promotion(IntEnum):
    """Numbers of the driver's API."""

    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2


class CUtensorMapFloatOOBfill(IntEnum):
    """Numbers of the driver's API."""

    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0


class CUDA_KERNEL_NODE_PARAMS(ctypes.Structure):
    """A kernel of a graph."""

    _fields_ = (
        ("func", c_void_p),
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class _TensorMap:
    """128 bytes, aligned as the driver wants them."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = ctypes.addressof(self._buffer)
        self._address = start + -start % _MAP_ALIGNMENT

    def getPtr(self) -> int:
        """Their address."""
        return self._address


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DeviceError(f"the NVIDIA driver cannot be loaded: {error}") from error


def _entry(name: str, *types: Any) -> Any:
    """The driver's function `name`, as it was in CUDA 12.0."""
    library, address = _library(), c_void_p()
    try:
        find = library.cuGetProcAddress_v2
    except AttributeError:
        raise DeviceError(f"{_LIBRARY} is older than CUDA 12.0: update the NVIDIA driver") from None
    status = find(name.encode(), ctypes.byref(address), c_int(_VERSION), c_uint64(0), None)
    if status or not address.value:
        raise DeviceError(f"{_LIBRARY} has no {name} (error {status}): update the NVIDIA driver")
    return ctypes.CFUNCTYPE(c_int, *types)(address.value)


def _function(name: str, parameters: Sequence[tuple[str, Any]]) -> Callable[..., tuple[Any, ...]]:
    """Takes a function's inputs in order, and gives its status and outputs, a null pointer as 0."""
    entry = _entry(name, *(POINTER(kind) if way == _OUT else kind for way, kind in parameters))
    outputs = [(place, kind) for place, (way, kind) in enumerate(parameters) if way == _OUT]
    if not outputs:
        return lambda *given: (entry(*given),)
    ((place, kind),) = outputs
    empty = b"" if kind is c_char_p else 0

    def call(*given: Any) -> tuple[Any, ...]:
        result = kind()
        status = entry(*given[:place], ctypes.byref(result), *given[place:])
        return status, result.value or empty

    def call_first(*given: Any) -> tuple[Any, ...]:  # without slices: every launch asks for the context
        result = kind()
        status = entry(ctypes.byref(result), *given)
        return status, result.value or empty

    return call if place else call_first


def cuModuleLoadDataEx(image: bytes, count: int, options: Sequence[int], values: Sequence[Any]) -> tuple[int, int]:
    """(status, module); a value is a number, or bytes that the driver writes into."""
    entry = _entry("cuModuleLoadDataEx", POINTER(c_void_p), c_char_p, c_uint, POINTER(c_int), POINTER(c_void_p))
    module = c_void_p()
    given = [ctypes.cast(c_char_p(v), c_void_p).value if isinstance(v, bytes) else v for v in values]
    status = entry(ctypes.byref(module), image, count, (c_int * count)(*options), (c_void_p * count)(*given))
    return status, module.value or 0


def cuThreadExchangeStreamCaptureMode(mode: int) -> tuple[int, int]:
    """(status, the mode before)."""
    exchanged = c_int(mode)
    status = _entry("cuThreadExchangeStreamCaptureMode", POINTER(c_int))(ctypes.byref(exchanged))
    return status, exchanged.value


def cuGraphInstantiate(graph: int, flags: int) -> tuple[Any, ...]:
    """(status, executable graph)."""
    found: tuple[Any, ...] = __getattr__("cuGraphInstantiateWithFlags")(graph, flags)
    return found


def cuGraphAddKernelNode(
    graph: int, dependencies: Sequence[int], count: int, described: CUDA_KERNEL_NODE_PARAMS
) -> tuple[int, int]:
    """(status, node)."""
    entry = _entry("cuGraphAddKernelNode", POINTER(c_void_p), c_void_p, c_void_p, c_size_t, c_void_p)
    node, before = c_void_p(), (c_void_p * max(count, 1))(*dependencies)
    status = entry(ctypes.byref(node), graph, before if count else None, count, ctypes.addressof(described))
    return status, node.value or 0


def cuTensorMapEncodeTiled(
    kind: int,
    rank: int,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
    *modes: int,
) -> tuple[int, _TensorMap]:
    """(status, tensor map); `modes`: interleave, swizzle, promotion, fill."""
    entry = _entry("cuTensorMapEncodeTiled", c_void_p, c_int, c_uint32, *[c_void_p] * 5, *[c_int] * 4)
    arrays = [
        (kind * len(v))(*v) for kind, v in zip((c_uint64, c_uint64, c_uint32, c_uint32), (sizes, strides, box, steps))
    ]
    made = _TensorMap()
    return entry(made.getPtr(), kind, rank, address, *map(ctypes.addressof, arrays), *modes), made


def _cuLaunchKernel() -> Callable[..., tuple[int]]:
    entry = _entry("cuLaunchKernel", c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
    return lambda *given: (entry(*given),)


def _cuGraphExecKernelNodeSetParams() -> Callable[..., tuple[int]]:
    entry = _entry("cuGraphExecKernelNodeSetParams", c_void_p, c_void_p, c_void_p)
    return lambda executable, node, described: (entry(executable, node, ctypes.addressof(described)),)


_MADE = {"cuLaunchKernel": _cuLaunchKernel, "cuGraphExecKernelNodeSetParams": _cuGraphExecKernelNodeSetParams}


def __getattr__(name: str) -> Any:
    """The functions of `_FUNCTIONS` and `_MADE`, looked up in the library when they are first asked for.

    Raises:
        DeviceError: the driver cannot be loaded, or is too old.
    """
    if name in _MADE:
        found = _MADE[name]()
    elif name in _FUNCTIONS:
        found = _function(name, _FUNCTIONS[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
