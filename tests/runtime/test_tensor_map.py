"""Tensor maps: what the driver is asked to encode, what is refused, and launches with them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, ArtefactError, DeviceError
from fly.lang.signature import Field, Parameter, TensorMapSpec
from fly.runtime import tensor_map as module
from fly.runtime.arguments import EncodedMap, describe
from fly.runtime.cuda import CudaDevice
from fly.runtime.device import CPU, Allocation
from fly.runtime.exported import Launchable, load
from fly.runtime.launch import launch
from fly.runtime.prepared import bind
from fly.runtime.tensor_map import encode, tensor_map

from .fake_cuda import CUresult, FakeDriver
from .fakes import CudaArray, Device, Kernel, tensors

SPEC = TensorMapSpec("f32", (1, 8, 16), 64)


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    """The driver behind every CUDA device key."""
    fake = FakeDriver()
    monkeypatch.setattr(module, "device_for", lambda key: CudaDevice(key[1], fake))
    return fake


def encoded(address: int = 1 << 20, spec: TensorMapSpec = SPEC, device: int = 0) -> EncodedMap:
    data = address.to_bytes(8, "little") + bytes(range(120))
    return EncodedMap(spec, data, ("cuda", device), address, 640)


# what the driver is asked for


def test_sizes_and_strides_go_innermost_first(driver):
    array = CudaArray((3, 50, 64), strides=(64 * 200, 512, 4), device=1)
    made = tensor_map(array, (1, 8, 16), swizzle=64)
    address = array.__cuda_array_interface__["data"][0]
    wanted = (
        "DATA_TYPE_FLOAT32",
        address,
        (64, 50, 3),
        (512, 12800),
        (16, 8, 1),
        (1, 1, 1),
        "INTERLEAVE_NONE",
        "SWIZZLE_64B",
        "L2_PROMOTION_L2_128B",
        "FLOAT_OOB_FILL_NONE",
    )
    assert driver.maps == [wanted, (wanted[0], address + 4096, *wanted[2:])]
    assert made.spec == SPEC
    assert made.device == ("cuda", 1)
    assert len(made.data) == 128
    assert made.data[:8] == address.to_bytes(8, "little")
    assert made.allocation("q") == Allocation("q", address, 2 * 12800 + 49 * 512 + 64 * 4)
    assert driver.contexts == []


@pytest.mark.parametrize(
    ("typestr", "dtype", "name"),
    [
        ("<f2", "f16", "FLOAT16"),
        ("<f4", "f32", "FLOAT32"),
        ("<f8", "f64", "FLOAT64"),
        ("|i1", "i8", "UINT8"),
        ("<i2", "i16", "UINT16"),
        ("<i4", "i32", "INT32"),
        ("<i8", "i64", "INT64"),
    ],
)
def test_element_types(driver, typestr, dtype, name):
    made = tensor_map(CudaArray((4, 64), typestr), (4, 16))
    assert made.spec == TensorMapSpec(dtype, (4, 16), 0)
    assert driver.maps[0][0] == f"DATA_TYPE_{name}"
    assert driver.maps[0][3] == (64 * int(typestr[2:]),)


@pytest.mark.parametrize(
    ("dtype", "name"), [("bf16", "BFLOAT16"), *((name, "UINT8") for name in ("f8e4m3", "f8e5m2", "f8e4m3fnuz"))]
)
def test_element_types_without_a_spelling_in_the_array_interface(driver, dtype, name):
    encode(CudaDevice(0, driver), TensorMapSpec(dtype, (8, 16)), 4096, (8, 16), (32,))
    assert driver.maps[0][0] == f"DATA_TYPE_{name}"


@pytest.mark.parametrize(("swizzle", "name"), [(0, "NONE"), (32, "32B"), (64, "64B"), (128, "128B")])
def test_swizzles(driver, swizzle, name):
    tensor_map(CudaArray((8, 32)), (8, swizzle // 4 or 8), swizzle=swizzle)
    assert driver.maps[0][7] == f"SWIZZLE_{name}"


def test_strides_of_dimensions_with_one_element_do_not_matter(driver):
    tensor_map(CudaArray((1, 5, 1, 8), strides=(4, 32, -4, 4)), (1, 1, 1, 8))
    assert driver.maps[0][3] == (16, 32, 16)


def test_one_dimension(driver):
    tensor_map(CudaArray((100,)), (64,))
    assert driver.maps[0][2:5] == ((100,), (16,), (64,))  # a stride that nothing uses


# what is refused

STRIDED = CudaArray((8, 8), strides=(32, 8))


@pytest.mark.parametrize(
    ("array", "box", "swizzle", "error", "text"),
    [
        (3, (1,), 0, ArgumentTypeError, "'tensor' is 3 of type int; accepted: a torch tensor"),
        (None, (1,), 0, ArgumentError, "'tensor' is None"),
        (CudaArray((8, 8)), (8,), 0, ArgumentError, r"box is \(8,\) for a tensor of rank 2; accepted: 2 extents"),
        (CudaArray((8, 8)), (8, 257), 0, ArgumentError, r"box is \(8, 257\); accepted: 1 to 5 ints from 1 to 256"),
        (CudaArray((8, 8)), (8, 8), 16, ArgumentError, "swizzle is 16; accepted: 0, 32, 64, 128"),
        (CudaArray((8, 8)), (8, 2), 0, ArgumentError, "box has 8 bytes in its last dimension; .* multiples of 16"),
        (CudaArray((8, 64)), (8, 16), 32, ArgumentError, "box has 64 bytes .*; accepted: the swizzle, 32"),
        (STRIDED, (8, 8), 0, ArgumentError, "last stride is not 1; pass tensor.contiguous"),
        (CudaArray((8, 10)), (8, 4), 0, ArgumentError, "stride 0 is 40 bytes; accepted: multiples of 16"),
        (CudaArray((8, 8), strides=(-32, 4)), (8, 8), 0, ArgumentError, "stride 0 is -32 bytes; .* multiples of 16"),
        (CudaArray((8, 8), data=(264, False)), (8, 8), 0, ArgumentError, "address is 264 bytes; .* multiples of 16"),
        (CudaArray((8, 0, 4)), (1, 1, 4), 0, ArgumentError, r"shape \(8, 0, 4\); accepted: no dimension of size 0"),
        (np.zeros((8, 8), np.float32), (8, 8), 0, DeviceError, "tensor map of a CPU tensor; only NVIDIA GPUs"),
        (torch.zeros(8, 8, dtype=torch.bool), (8, 8), 0, ArgumentTypeError, "dtype bool"),
    ],
)
def test_tensors_and_boxes_that_have_no_map(driver, array, box, swizzle, error, text):
    with pytest.raises(error, match=text):
        tensor_map(array, box, swizzle=swizzle)
    assert driver.maps == []


def test_a_cpu_address_is_checked_before_the_device(driver):
    array = np.zeros(72, np.float32)
    (start,) = (i for i in range(4) if (array.ctypes.data + 4 * i) % 16 == 4)
    with pytest.raises(ArgumentError, match="multiples of 16"):
        tensor_map(array[start : start + 64].reshape(8, 8), (8, 8))


def test_devices_without_tensor_maps(monkeypatch):
    monkeypatch.setattr(module, "device_for", lambda key: Device("sm_80"))
    with pytest.raises(DeviceError, match="tensor on sm_80, which cannot copy through them; sm_90a can"):
        tensor_map(CudaArray((8, 8)), (8, 8))


def test_what_the_driver_refuses_is_reported(driver):
    driver.results["cuTensorMapEncodeTiled"] = CUresult.CUDA_ERROR_INVALID_VALUE
    text = (
        r"cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE: text of 1 \(sizes \(8, 8\), strides \(32,\) bytes, "
        r"box \(8, 8\), swizzle 0\)"
    )
    with pytest.raises(DeviceError, match=text):
        tensor_map(CudaArray((8, 8)), (8, 8))
    assert driver.contexts == []


@pytest.mark.parametrize("layout", ["<120sQ", "<Q112sQ", "<128s"])
def test_drivers_that_put_the_address_elsewhere_are_refused(driver, layout):
    driver.map_layout = layout
    with pytest.raises(DeviceError, match="maps do not start with the address: this driver is not supported"):
        tensor_map(CudaArray((8, 8)), (8, 8))


# descriptions


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TensorMapSpec("u8", (8,)), ArgumentTypeError, "tensor map dtype is 'u8'"),
        (lambda: TensorMapSpec("i1", (8,)), ArgumentTypeError, "tensor map dtype is 'i1'"),
        (lambda: TensorMapSpec("f16", ()), ArgumentError, r"tensor map box is \(\); accepted: 1 to 5"),
        (lambda: TensorMapSpec("f16", (1,) * 6), ArgumentError, "accepted: 1 to 5 ints from 1 to 256"),
        (lambda: TensorMapSpec("f16", (0, 8)), ArgumentError, r"tensor map box is \(0, 8\)"),
        (lambda: TensorMapSpec("f16", (8.0,)), ArgumentError, r"tensor map box is \(8\.0,\)"),
        (lambda: TensorMapSpec("f16", (8,), 48), ArgumentError, "tensor map swizzle is 48"),
    ],
)
def test_wrong_descriptions_are_rejected(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_map_is_one_flat_argument():
    assert SPEC.fields("q") == (Field("q", "map"),)
    assert TensorMapSpec("f32", [1, 8, 16], 64) == SPEC  # as it is read back from a file
    assert hash(TensorMapSpec("f32", [1, 8, 16], 64)) == hash(SPEC)


# arguments

MAP = Parameter("q", "map")


@pytest.mark.parametrize(
    ("parameter", "value", "error", "text"),
    [
        (MAP, None, ArgumentError, "'q' is None; accepted: what fly.tensor_map gives"),
        (MAP, torch.zeros(4), ArgumentTypeError, r"'q' is tensor\(.*; accepted: what fly.tensor_map gives"),
        (MAP, 3, ArgumentTypeError, "'q' is 3 of type int; accepted: what fly.tensor_map gives"),
        (Parameter("x", "tensor"), encoded(), ArgumentTypeError, "'x' is EncodedMap.*; accepted: a torch tensor"),
        (
            Parameter("n", "scalar", dtype="i32"),
            encoded(),
            ArgumentTypeError,
            "'n' is .*; accepted: a number that fits",
        ),
    ],
)
def test_arguments_of_the_wrong_kind(parameter, value, error, text):
    with pytest.raises(error, match=text):
        describe(parameter, value)


def test_a_map_describes_itself():
    argument = describe(MAP, encoded(4096))
    assert (argument.spec, argument.device) == (SPEC, ("cuda", 0))
    assert argument.values == (encoded(4096).data,)
    assert argument.allocation == Allocation("q", 4096, 640)
    assert describe(dataclasses.replace(MAP, optional=True), None).spec is None


# launches

KERNEL = (
    Parameter("n", "scalar", dtype="i32"),
    MAP,
    *tensors("out"),
    Parameter("v", "map", optional=True),
)


def test_maps_are_launched_with(devices, compiler):
    kernel, out = Kernel(*KERNEL), CudaArray((4,))
    for address in (4096, 8192):  # a first launch, and one that is known
        launch(kernel, 1, 128, (7, encoded(address), out, encoded(64)), {}, 0, compiler)
        packed = devices["cuda", 0].launches[-1].packed
        assert packed[:4] == b"\7\0\0\0"
        assert packed[64:192] == encoded(address).data
        assert packed[256:] == encoded(64).data
        assert int.from_bytes(packed[192:200], "little") == out.__cuda_array_interface__["data"][0]
    assert len(compiler.calls) == 1
    specs = compiler.calls[0][0]
    assert specs[1] == specs[3] == SPEC


def test_another_box_is_another_kernel(devices, compiler):
    kernel = Kernel(MAP)
    for spec in (SPEC, TensorMapSpec("f32", (1, 8, 16), 128), TensorMapSpec("f32", (1, 16, 16), 64), SPEC):
        launch(kernel, 1, 128, (encoded(spec=spec),), {}, 0, compiler)
    assert len(compiler.calls) == 3


def test_maps_and_tensors_are_on_one_device(devices, compiler):
    kernel = Kernel(MAP, *tensors("out"))
    for out, place in ((CudaArray(device=0), "cuda:0"), (torch.zeros(4), "cpu")):
        with pytest.raises(ArgumentError, match=f"'q' is on cuda:1, argument 'out' on {place}"):
            launch(kernel, 1, 128, (encoded(device=1), out), {}, 0, compiler)
    assert CPU not in devices or not devices[CPU].launches


def test_a_map_alone_says_where_to_run(devices, compiler):
    launch(Kernel(MAP), 1, 128, (encoded(device=1),), {}, 0, compiler)
    assert len(devices["cuda", 1].launches) == 1


def test_a_prepared_launch_puts_new_addresses_into_maps(devices, compiler):
    kernel = Kernel(*KERNEL)
    old = (7, encoded(4096), CudaArray((4,)), encoded(8192))
    prepared = bind(kernel, 3, 128, old, {}, compiler)
    out = old[2].__cuda_array_interface__["data"][0] + 4096
    prepared(1 << 30, out, 1 << 33, stream=0)
    moved = CudaArray((4,), data=(out, False))
    launch(kernel, 3, 128, (7, encoded(1 << 30), moved, encoded(1 << 33)), {}, 0, compiler)
    first, second = devices["cuda", 0].launches
    assert first == second
    with pytest.raises(ArgumentError, match="'v' has address 0x8; accepted: multiples of 16"):
        prepared(1 << 30, out, 8, stream=0)
    with pytest.raises(ArgumentError, match="2 addresses; accepted: one each for q, out, v"):
        prepared(1 << 30, out, stream=0)


def test_devices_that_need_it_are_told_the_memory_behind_a_map(devices, compiler):
    devices["cuda", 0] = Device("sm_90a", needs_allocations=True)
    prepared = bind(Kernel(MAP), 1, 128, (encoded(4096),), {}, compiler)
    prepared(1 << 30, stream=0)
    assert devices["cuda", 0].launches[0].allocations == (Allocation("q", 1 << 30, 640),)


# export


def exported(compiler, spec: TensorMapSpec = SPEC):
    return compiler(Kernel(MAP, *tensors("out")), (spec, describe(*OUT).spec), {}, "sm_90a", (128, 1, 1))


OUT = (Parameter("out", "tensor"), torch.zeros(4))


def test_an_exported_kernel_takes_maps(devices, compiler, tmp_path):
    exported(compiler).save(tmp_path / "copy.fly")
    copy = load(tmp_path / "copy.fly")
    assert copy.specs[0] == SPEC
    assert copy.artefact.fields[0] == Field("q", "map")
    copy[2, 128](encoded(4096), CudaArray((4,)), stream=0)
    assert devices["cuda", 0].launches[0].packed[:128] == encoded(4096).data


@pytest.mark.parametrize(
    "other",
    [TensorMapSpec("f16", (1, 8, 16), 64), TensorMapSpec("f32", (1, 8, 8), 64), TensorMapSpec("f32", (1, 8, 16))],
)
def test_an_exported_kernel_takes_only_the_box_it_was_compiled_for(devices, compiler, other):
    with pytest.raises(ArgumentTypeError, match=r"argument 'q' is TensorMapSpec.*; compiled for TensorMapSpec"):
        Launchable(exported(compiler))[1, 128](encoded(spec=other), CudaArray((4,)))
    assert not devices["cuda", 0].loaded


def test_a_malformed_description_of_a_map_is_refused(compiler):
    artefact = exported(compiler)
    text = artefact.metadata["arguments"].replace('"swizzle": 64', '"swizzle": 65')
    with pytest.raises(ArtefactError, match="malformed argument description: tensor map swizzle is 65"):
        Launchable(dataclasses.replace(artefact, metadata={"arguments": text}))
