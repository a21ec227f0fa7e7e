"""Tensor maps: what the bulk copy engine of Hopper needs to know about a tensor, encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from fly.backends.target import target
from fly.errors import ArgumentError, DeviceError
from fly.lang.signature import Parameter, TensorMapSpec, TensorSpec
from fly.runtime.arguments import EncodedMap, describe
from fly.runtime.cuda import status_text
from fly.runtime.device import CPU, device_for

if TYPE_CHECKING:
    from fly.runtime.simulated import SimulatedDevice

BYTES = 128
_ALIGNMENT = 16
# the driver's name and the bytes of an element: copies move bits, so that signs and 8-bit formats do not matter
_TYPES = {
    "f16": ("FLOAT16", 2),
    "bf16": ("BFLOAT16", 2),
    "f32": ("FLOAT32", 4),
    "f64": ("FLOAT64", 8),
    "i8": ("UINT8", 1),
    "i16": ("UINT16", 2),
    "i32": ("INT32", 4),
    "i64": ("INT64", 8),
    "f8e4m3": ("UINT8", 1),
    "f8e5m2": ("UINT8", 1),
    "f8e4m3fnuz": ("UINT8", 1),
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def tensor_map(tensor: Any, box: Sequence[int], *, swizzle: int = 0) -> EncodedMap:
    """A tensor map of a GPU tensor, to be passed for a `fly.TensorMap` parameter.

    `box` is what one copy moves: one extent per dimension, in the tensor's order. Elements outside of the tensor
    read as zero and are not written. `swizzle`: 0, 32, 64 or 128 bytes (see `fly.TensorMapSpec`). The map does not
    keep the tensor alive.

    Raises:
        ArgumentTypeError: no tensor, or one of a dtype that tensor maps do not have.
        ArgumentError: an address or stride that is no multiple of 16 bytes, a last stride other than 1, a
            dimension of size 0, or a box that does not fit the tensor's rank, 16-byte pieces or the swizzle.
        DeviceError: a tensor on a device that has no tensor maps, or the driver refused.
    """
    argument = describe(Parameter("tensor", "tensor"), tensor)
    assert isinstance(argument.spec, TensorSpec)
    spec = TensorMapSpec(argument.spec.dtype, tuple(box), swizzle)
    rank = argument.spec.rank
    if len(spec.box) != rank:
        raise ArgumentError(f"tensor map box is {spec.box} for a tensor of rank {rank}; accepted: {rank} extents")
    if not argument.spec.unit_stride:
        raise ArgumentError("tensor map of a tensor whose last stride is not 1; pass tensor.contiguous()")
    values = cast("tuple[int, ...]", argument.values)  # a tensor's
    address, shape = values[0], values[1 : 1 + rank]
    _, size = _TYPES[spec.dtype]
    strides = [stride * size for stride in values[1 + rank :]]
    if 0 in shape:
        raise ArgumentError(f"tensor map of a tensor of shape {shape}; accepted: no dimension of size 0")
    # the stride of a dimension with one element is never used, and may be anything in the tensor
    strides = [stride if extent > 1 else _ALIGNMENT for stride, extent in zip(strides, shape[:-1])]
    for what, value in [("address", address), *((f"stride {i}", s) for i, s in enumerate(strides))]:
        if value % _ALIGNMENT or value < 0:
            raise ArgumentError(f"tensor map {what} is {value} bytes; accepted: multiples of {_ALIGNMENT}")
    line = spec.box[-1] * size
    if line % _ALIGNMENT:
        raise ArgumentError(
            f"tensor map box has {line} bytes in its last dimension; accepted: multiples of {_ALIGNMENT}"
        )
    if swizzle and line != swizzle:
        raise ArgumentError(
            f"tensor map box has {line} bytes in its last dimension; accepted: the swizzle, {swizzle}"
        )
    assert argument.device is not None and argument.allocation is not None
    device = device_for(argument.device)
    simulated = device.build != device.target
    if argument.device == CPU and not simulated:
        raise DeviceError(
            "tensor map of a CPU tensor; only NVIDIA GPUs of compute capability 9.0 copy through them, and "
            "simulated ones (FLY_ARCH=sm_90a)"
        )
    if not target(device.target).hopper:
        raise DeviceError(f"tensor map of a tensor on {device.target}, which cannot copy through them; sm_90a can")
    if simulated:
        data = cast("SimulatedDevice", device).encode_tensor_map(spec, size, address, shape, strides)
    else:
        data = encode(device, spec, address, shape, strides)
    return EncodedMap(spec, data, argument.device, argument.allocation.address, argument.allocation.nbytes)


def encode(device: Any, spec: TensorMapSpec, address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """The 128 bytes; sizes in elements and strides (of all dimensions but the last) in bytes, in tensor order.

    Raises:
        DeviceError: the driver refused, or encodes addresses in a way that is not known here.
    """
    encoded = _encode(device, spec, address, shape, strides)
    # Launches that are bound once put in new addresses themselves. Where they go is not documented, so it is
    # checked: maps of two addresses differ in their first eight bytes alone, which are the address.
    other = _encode(device, spec, address + 4096, shape, strides)
    if encoded[8:] != other[8:] or [int.from_bytes(m[:8], "little") for m in (encoded, other)] != [
        address,
        address + 4096,
    ]:
        raise DeviceError("the driver's tensor maps do not start with the address: this driver is not supported")
    return encoded


def _encode(device: Any, spec: TensorMapSpec, address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    driver = device.driver

    def enum(name: str, member: str) -> Any:
        return getattr(getattr(driver, f"CUtensorMap{name}"), f"CU_TENSOR_MAP_{member}")

    rank = len(shape)
    with device.current():
        status, result = driver.cuTensorMapEncodeTiled(
            enum("DataType", f"DATA_TYPE_{_TYPES[spec.dtype][0]}"),
            rank,
            address,
            [driver.cuuint64_t(n) for n in reversed(shape)],
            [driver.cuuint64_t(n) for n in reversed(strides)] or [driver.cuuint64_t(_ALIGNMENT)],  # never none
            [driver.cuuint32_t(n) for n in reversed(spec.box)],
            [driver.cuuint32_t(1)] * rank,
            enum("Interleave", "INTERLEAVE_NONE"),
            enum("Swizzle", f"SWIZZLE_{_SWIZZLES[spec.swizzle]}"),
            # on an H200 fetching 256 bytes where 128 are asked for costs a stream of cold keys 6 % of its speed
            enum("L2promotion", "L2_PROMOTION_L2_128B"),
            enum("FloatOOBfill", "FLOAT_OOB_FILL_NONE"),
        )
    if int(status):
        raise DeviceError(
            f"cuTensorMapEncodeTiled: {status_text(driver, status)} (sizes {tuple(shape)}, strides {tuple(strides)} "
            f"bytes, box {spec.box}, swizzle {spec.swizzle})"
        )
    return ctypes.string_at(result.getPtr(), BYTES)
