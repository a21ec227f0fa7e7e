"""A module like `cuda.bindings.driver` for two imaginary GPUs; it records what is called."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import struct
import threading
from collections.abc import Sequence


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_PTX = 218
    CUDA_ERROR_LAUNCH_FAILED = 719


class CUdevice_attribute(enum.IntEnum):
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


class CUfunction_attribute(enum.IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUjit_option(enum.IntEnum):
    CU_JIT_ERROR_LOG_BUFFER = 5
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6


class CUtensorMapDataType(enum.IntEnum):
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0
    CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1
    CU_TENSOR_MAP_DATA_TYPE_INT32 = 3
    CU_TENSOR_MAP_DATA_TYPE_INT64 = 5
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64 = 8
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9


class CUtensorMapInterleave(enum.IntEnum):
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0


class CUtensorMapSwizzle(enum.IntEnum):
    CU_TENSOR_MAP_SWIZZLE_NONE = 0
    CU_TENSOR_MAP_SWIZZLE_32B = 1
    CU_TENSOR_MAP_SWIZZLE_64B = 2
    CU_TENSOR_MAP_SWIZZLE_128B = 3


class CUtensorMapL2promotion(enum.IntEnum):
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2


class CUtensorMapFloatOOBfill(enum.IntEnum):
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUDA_KERNEL_NODE_PARAMS:
    """What the bindings' structure has."""

    func = kernelParams = extra = 0
    gridDimX = gridDimY = gridDimZ = blockDimX = blockDimY = blockDimZ = sharedMemBytes = 0


class TensorMap:
    """The bindings' CUtensorMap: bytes at an address."""

    def __init__(self, data: bytes):
        self._memory = ctypes.create_string_buffer(data, len(data))

    def getPtr(self) -> int:
        return ctypes.addressof(self._memory)


_DEVICE = {1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 16: 132, 75: 9, 76: 0, 97: 232448}
OK = CUresult.CUDA_SUCCESS


class FakeDriver:
    """The functions that the CUDA device uses. `results` makes a function fail with a status."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUfunction_attribute = CUfunction_attribute
    CUjit_option = CUjit_option
    CUstreamCaptureMode = CUstreamCaptureMode
    CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS
    CUtensorMapDataType = CUtensorMapDataType
    CUtensorMapInterleave = CUtensorMapInterleave
    CUtensorMapSwizzle = CUtensorMapSwizzle
    CUtensorMapL2promotion = CUtensorMapL2promotion
    CUtensorMapFloatOOBfill = CUtensorMapFloatOOBfill
    cuuint32_t = ctypes.c_uint32
    cuuint64_t = ctypes.c_uint64

    def __init__(self, parameters: Sequence[int] = (8, 4, 8)):
        self.parameters = parameters  # bytes of each parameter of the kernel: what a driver reads from its code
        self.device = dict(_DEVICE)
        self.function = {0: 1024, 1: 0, 3: 16, 4: 96}
        self.results: dict[str, CUresult] = {}
        self.log = b""  # what the JIT compiler says
        self.images: list[bytes] = []
        self.attributes_set: list[tuple] = []
        self.launches: list[dict] = []
        self.maps: list[tuple] = []
        self.map_layout = "<Q120s"  # of an encoded map: its address, and the rest
        self.host_memory: list = []
        self.capturing = 0
        self.waits: list[int] = []
        self.priorities: dict[int, int] = {}  # of streams
        self.graphs: dict[str, list[CUDA_KERNEL_NODE_PARAMS]] = {}  # those that are not destroyed
        self.executables: dict[str, list[dict]] = {}  # the same, as the launches that they are
        self.graph_launches = 0
        self._capture_modes = threading.local()
        self._contexts = threading.local()  # every thread has its own stack

    @property
    def contexts(self) -> list[int]:
        if not hasattr(self._contexts, "stack"):
            self._contexts.stack = []
        return self._contexts.stack

    def cuInit(self, flags):
        return (self.results.get("cuInit", OK),)

    def cuDeviceGetCount(self):
        return OK, 2

    def cuDeviceGet(self, ordinal):
        return OK, ordinal

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, 1000 + device

    def cuDeviceGetAttribute(self, attribute, device):
        return OK, self.device[attribute]

    def cuCtxGetCurrent(self):
        return OK, self.contexts[-1] if self.contexts else 0

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self):
        return OK, self.contexts.pop()

    def cuModuleLoadDataEx(self, image, count, options, values):
        assert self.contexts
        assert count == len(options) == len(values)
        given = dict(zip(options, values))
        size = given[CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        assert len(self.log) < size
        log = given[CUjit_option.CU_JIT_ERROR_LOG_BUFFER]
        assert isinstance(log, bytes)  # the bindings refuse anything else
        ctypes.memmove(log, self.log, len(self.log))
        self.images.append(image)
        status = self.results.get("cuModuleLoadDataEx", OK)
        return status, None if status else "module"

    def cuModuleGetFunction(self, module, name):
        return OK, name.decode()

    def cuFuncGetAttribute(self, attribute, function):
        return OK, self.function[attribute]

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes_set.append((function, attribute, value))
        return (OK,)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        assert extra == 0
        self.launches.append(self._launch(function, (gx, gy, gz), (bx, by, bz), shared, parameters, stream))
        return (self.results.get("cuLaunchKernel", OK),)

    def _launch(self, function, grid, block, shared, parameters, stream=None) -> dict:
        places = (ctypes.c_void_p * len(self.parameters)).from_address(parameters)
        return {
            "function": function,
            "grid": grid,
            "block": block,
            "shared": shared,
            "stream": stream,
            "arguments": [ctypes.string_at(place, size) for place, size in zip(places, self.parameters)],
            "context": self.contexts[-1],
        }

    def _described(self, node: CUDA_KERNEL_NODE_PARAMS) -> dict:
        grid, block = (tuple(getattr(node, f"{of}Dim{axis}") for axis in "XYZ") for of in ("grid", "block"))
        assert node.extra == 0
        return self._launch(node.func, grid, block, node.sharedMemBytes, node.kernelParams)

    def cuStreamGetPriority(self, stream):
        return OK, self.priorities.get(stream, 0)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before = getattr(self._capture_modes, "mode", CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self._capture_modes.mode = mode
        return OK, before

    def cuGraphCreate(self, flags):
        name = f"graph {len(self.graphs)} of {threading.get_ident()}"
        self.graphs[name] = []
        return OK, name

    def cuGraphAddKernelNode(self, graph, dependencies, count, node):
        nodes = self.graphs[graph]
        assert count == len(dependencies) and dependencies == [len(nodes) - 1][: len(nodes)]
        nodes.append(node)
        return OK, len(nodes) - 1

    def cuGraphInstantiate(self, graph, flags):
        assert self._capture_modes.mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.executables[graph] = [self._described(node) for node in self.graphs[graph]]
        return self.results.get("cuGraphInstantiate", OK), graph

    def cuGraphExecKernelNodeSetParams(self, executable, number, node):
        self.executables[executable][number] = self._described(node)
        return (self.results.get("cuGraphExecKernelNodeSetParams", OK),)

    def cuGraphLaunch(self, executable, stream):
        self.graph_launches += 1
        self.launches += [{**launch, "stream": stream} for launch in self.executables[executable]]
        return (self.results.get("cuGraphLaunch", OK),)

    def cuGraphExecDestroy(self, executable):
        del self.executables[executable]
        return (OK,)

    def cuGraphDestroy(self, graph):
        del self.graphs[graph]
        return (OK,)

    def cuMemHostAlloc(self, nbytes, flags):
        assert self.contexts and flags == 3  # portable and mapped
        self.host_memory.append(ctypes.create_string_buffer(nbytes))
        return OK, ctypes.addressof(self.host_memory[-1])

    def cuStreamIsCapturing(self, stream):
        assert self.contexts
        return OK, self.capturing

    def cuStreamSynchronize(self, stream):
        assert self.contexts
        self.waits.append(stream)
        return (self.results.get("cuStreamSynchronize", OK),)

    def cuTensorMapEncodeTiled(
        self, dtype, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill
    ):
        assert self.contexts
        # the driver refuses a null pointer to strides, which an empty list would become
        assert len(sizes) == len(box) == len(steps) == rank
        assert len(strides) == max(rank - 1, 1)
        assert all(type(n) is ctypes.c_uint64 for n in [*sizes, *strides])
        assert all(type(n) is ctypes.c_uint32 for n in [*box, *steps])
        numbers = [tuple(n.value for n in part) for part in (sizes, strides, box, steps)]
        entry = (dtype.name, address, *numbers, interleave.name, swizzle.name, promotion.name, fill.name)
        self.maps.append(tuple(e.split("MAP_")[-1] if isinstance(e, str) else e for e in entry))
        status = self.results.get("cuTensorMapEncodeTiled", OK)
        rest = hashlib.sha256(repr((dtype, numbers, swizzle)).encode()).digest() * 4
        parts = {"Q": address, "s": rest[:120]}
        data = struct.pack(self.map_layout, *(parts[code] for code in self.map_layout if code in parts))
        return status, None if status else TensorMap(data)

    def cuGetErrorName(self, status):
        return OK, CUresult(status).name.encode()

    def cuGetErrorString(self, status):
        return OK, b"text of " + str(int(status)).encode()
