import threading
import time
import types

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, ArtefactError, CompileError, DeviceError, LaunchError
from fly.lang.signature import REQUIRED, Field, Parameter, ScalarSpec, TensorSpec
from fly.runtime.device import CPU, Allocation, device_for, traced
from fly.runtime.launch import launch, static_key, stream_handle

from .fakes import CudaArray, Device, Kernel, tensors, unpack

F32, I32 = Parameter("s", "scalar", dtype="f32"), Parameter("n", "scalar", dtype="i32")
MASK = Parameter("mask", "tensor", optional=True)


def half(*shape):
    return torch.empty(shape, dtype=torch.float16)


def test_a_launch_packs_its_arguments(device, compiler):
    kernel = Kernel(*tensors("q", "out"), F32, I32)
    q, out = half(2, 3, 64), torch.zeros(5)
    launch(kernel, (7, 2), 64, (q, out, 0.5, -3), {}, None, compiler)
    (done,) = device.launches
    assert (done.grid, done.block, done.stream) == ((7, 2, 1), (64, 1, 1), 0)
    expected = (q.data_ptr(), 2, 3, 64, 192, 64, out.data_ptr(), 5, 0.5, -3)
    assert unpack(done.packed, "PiiiqqPifi") == expected


def test_numpy_arrays_go_to_the_device_of_host_memory(device, compiler):
    x = np.zeros(5, np.int32)
    launch(Kernel(*tensors("x")), 1, 64, (x,), {}, None, compiler)
    assert unpack(device.launches[0].packed, "Pi") == (x.ctypes.data, 5)


def test_a_kernel_is_compiled_once_for_what_it_is_specialised_on(device, compiler):
    kernel = Kernel(*tensors("q"), causal=True)
    for n in (1, 2, 3):
        launch(kernel, n, (64,), (half(n, 64),), {}, None, compiler)
    assert compiler.calls == [((TensorSpec("f16", 2, 16, True),), {"causal": True}, "gfx950", (64, 1, 1))]
    assert len(device.loaded) == 1
    assert len(device.launches) == 3
    for args, statics, block in [
        ((half(2, 64).T,), {}, 64),
        ((half(2, 65),), {}, 64),
        ((half(2, 64).bfloat16(),), {}, 64),
        ((half(2, 64),), {"causal": False}, 64),
        ((half(2, 64),), {"causal": 1}, 64),
        ((half(2, 64),), {}, 128),
    ]:
        before = len(compiler.calls)
        launch(kernel, 1, block, args, statics, None, compiler)
        launch(kernel, 1, block, args, statics, None, compiler)
        assert len(compiler.calls) == before + 1


def test_spelled_out_defaults_and_blocks_are_the_same_specialisation(device, compiler):
    kernel = Kernel(*tensors("q"), causal=True, tile=64)
    for statics in ({}, {"causal": True}, {"tile": 64, "causal": True}):
        for block in (64, (64, 1), [64, 1, 1]):
            launch(kernel, 1, block, (half(2, 64),), statics, None, compiler)
    assert len(compiler.calls) == 1
    assert len(device.loaded) == 1


def test_kernels_do_not_share_specialisations(device, compiler):
    for name in "ab":
        launch(Kernel(*tensors("q"), name=name), 1, 64, (half(2, 64),), {}, None, compiler)
    assert [artefact.kernel for artefact in device.loaded] == ["a", "b"]


def test_a_second_device_loads_what_the_first_compiled(devices, compiler):
    kernel = Kernel(*tensors("q"))
    for ordinal in (0, 1, 0, 1):
        launch(kernel, 1, 64, (CudaArray(device=ordinal),), {}, None, compiler)
    assert len(compiler.calls) == 1
    assert [len(devices["cuda", n].loaded) for n in (0, 1)] == [1, 1]
    assert [len(devices["cuda", n].launches) for n in (0, 1)] == [2, 2]


def test_a_simulated_gpu_and_a_real_one_of_its_architecture_have_builds_of_their_own(devices, compiler):
    """The simulator runs what was traced, which no driver loads."""
    kernel = Kernel(*tensors("q"))
    devices["cpu", 0] = Device("sm_90a", build=traced("sm_90a"))
    for q in (half(2, 64), CudaArray(shape=(2, 64)), half(2, 64)):
        launch(kernel, 1, 64, (q,), {}, None, compiler)
    assert [target for _, _, target, _ in compiler.calls] == [traced("sm_90a"), "sm_90a"]
    assert [len(devices[key].loaded) for key in (("cpu", 0), ("cuda", 0))] == [1, 1]


def test_named_and_left_out_arguments(device, compiler):
    kernel = Kernel(*tensors("q"), MASK, F32, causal=True)
    q, mask = half(2, 64), half(4)
    launch(kernel, 1, 64, (q,), {"s": 2.0, "mask": mask}, None, compiler)
    launch(kernel, 1, 64, (q,), {"s": 2.0, "causal": False}, None, compiler)
    launch(kernel, 1, 64, (q, None, 2.0), {"causal": False}, None, compiler)
    with_mask, without, positional = (done.packed for done in device.launches)
    assert unpack(with_mask, "PiiqPif") == (q.data_ptr(), 2, 64, 64, mask.data_ptr(), 4, 2.0)
    assert unpack(without, "Piiqf") == (q.data_ptr(), 2, 64, 64, 2.0)
    assert without == positional
    assert len(compiler.calls) == 2


@pytest.mark.parametrize(
    ("args", "named", "error", "text"),
    [
        ((1, 2, 3, 4), {}, ArgumentError, "4 positional arguments; accepted: q, mask, s"),
        ((), {"s": 1.0}, ArgumentError, "'q' is missing"),
        (("q",), {}, ArgumentError, "'s' is missing"),
        (("q", None, 1.0), {"q": "q"}, ArgumentError, "'q' is given twice"),
        (
            ("q", None, 1.0),
            {"tile": 1, "casual": True},
            ArgumentError,
            "unexpected argument 'casual'; .* causal, tile",
        ),
        (("q", None, 1.0), {}, ArgumentError, "static argument 'tile' is missing"),
        (
            ("q", None, 1.0),
            {"tile": [1]},
            ArgumentTypeError,
            r"static argument 'tile' is \[1\]; accepted: hashable",
        ),
        (("q", None, True), {"tile": 1}, ArgumentTypeError, "'s' is True"),
        ((None, None, 1.0), {"tile": 1}, ArgumentError, "'q' is None"),
        ((7, None, 1.0), {"tile": 1}, ArgumentTypeError, "'q' is 7"),
        (("q", 1.0, 1.0), {"tile": 1}, ArgumentTypeError, "'mask' is 1.0"),
        (("q", None, "q"), {"tile": 1}, ArgumentTypeError, "'s' is tensor"),
        (("sparse", None, 1.0), {"tile": 1}, ArgumentTypeError, "'q' is a torch.sparse_coo tensor"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_bad_arguments_are_named(device, compiler, args, named, error, text, warm):
    kernel = Kernel(*tensors("q"), MASK, F32, causal=True, tile=REQUIRED)
    if warm:
        launch(kernel, 1, 64, (half(2, 64), None, 1.0), {"tile": 1}, None, compiler)
    stand_ins = {"q": half(2, 64), "sparse": torch.eye(2).to_sparse()}
    args = [stand_ins.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
    before = len(device.launches)
    with pytest.raises(error, match=text):
        launch(kernel, 1, 64, args, named, None, compiler)
    assert len(device.launches) == before


@pytest.mark.parametrize(("value", "text"), [(2**31, "2147483648"), (-(2**31) - 1, "-2147483649")])
def test_a_scalar_out_of_range_is_named_when_the_kernel_is_warm_too(device, compiler, value, text):
    kernel = Kernel(*tensors("q"), I32)
    launch(kernel, 1, 64, (half(4), 2**31 - 1), {}, None, compiler)
    with pytest.raises(ArgumentError, match=f"'n' is {text}; accepted: a number that fits i32"):
        launch(kernel, 1, 64, (half(4), value), {}, None, compiler)


def test_a_size_out_of_range_is_named_when_the_kernel_is_warm_too(device, compiler):
    kernel = Kernel(*tensors("q"))
    byte = torch.zeros(1, dtype=torch.int8)
    launch(kernel, 1, 64, (byte.expand(2**31 - 1),), {}, None, compiler)
    with pytest.raises(ArgumentError, match="'q' has size 2147483648 in dimension 0"):
        launch(kernel, 1, 64, (byte.expand(2**31),), {}, None, compiler)


def test_tensors_on_two_devices_are_named(devices, compiler):
    kernel = Kernel(*tensors("q", "k"))
    with pytest.raises(ArgumentError, match="'q' is on cpu, argument 'k' on cuda:1"):
        launch(kernel, 1, 64, (half(4), CudaArray(device=1)), {}, None, compiler)


@pytest.mark.parametrize("grid", [0, (1, 2, 3, 4), 1.5, (2, -1)])
def test_bad_grids_are_named(device, compiler, grid):
    with pytest.raises(LaunchError, match=r"grid is .*; accepted: one to three positive ints"):
        launch(Kernel(*tensors("q")), grid, 64, (half(4),), {}, None, compiler)


@pytest.mark.parametrize("block", [0, (1, 2, 3, 4), 64.0, 1025, (1024, 2)])
def test_bad_blocks_are_named(device, compiler, block):
    with pytest.raises(LaunchError, match=r"block is .*; accepted: "):
        launch(Kernel(*tensors("q")), 1, block, (half(4),), {}, None, compiler)
    assert not compiler.calls


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"block": (32, 1, 1)}, LaunchError, r"block is \(64, 1, 1\), compiled for \(32, 1, 1\)"),
        ({"target": "gfx942"}, LaunchError, "compiled for gfx942, the tensors are on gfx950"),
        (
            {"fields": (Field("q", "ptr"),)},
            ArtefactError,
            r"takes \(q\), the arguments flatten to \(q, q.shape0\)",
        ),
    ],
)
def test_what_the_compiler_returns_is_checked(device, compiler, changes, error, text):
    import dataclasses

    def wrong(*arguments):
        return dataclasses.replace(compiler(*arguments), **changes)

    with pytest.raises(error, match=text):
        launch(Kernel(*tensors("q")), 1, 64, (half(4),), {}, None, wrong)
    assert not device.loaded


def test_a_failed_compilation_is_tried_again(device, compiler):
    kernel = Kernel(*tensors("q"))

    def fail(*arguments):
        raise CompileError("no")

    for _ in range(2):
        with pytest.raises(CompileError):
            launch(kernel, 1, 64, (half(4),), {}, None, fail)
    launch(kernel, 1, 64, (half(4),), {}, None, compiler)
    assert len(device.launches) == 1


def test_threads_compile_once(device, compiler):
    kernel = Kernel(*tensors("q"))

    def slow(*arguments):
        time.sleep(0.05)
        return compiler(*arguments)

    x = half(4)
    threads = [threading.Thread(target=launch, args=(kernel, 1, 64, (x,), {}, None, slow)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(compiler.calls), len(device.loaded), len(device.launches)) == (1, 1, 8)


def test_no_lock_is_taken_when_warm(device, compiler):
    kernel = Kernel(*tensors("q"))
    launch(kernel, 1, 64, (half(4),), {}, None, compiler)
    with kernel.launcher._lock:
        thread = threading.Thread(target=launch, args=(kernel, 1, 64, (half(4),), {}, None, None))
        thread.start()
        thread.join(60)  # forever, if it waits for the lock
        assert not thread.is_alive()
    assert len(device.launches) == 2


def test_devices_that_need_it_are_told_what_memory_tensors_span(device, compiler):
    device.needs_allocations = True
    kernel = Kernel(*tensors("q"), MASK, F32)
    q = half(4, 64)[:, :32]
    for _ in range(2):
        launch(kernel, 1, 64, (q, None, 1.0), {}, None, compiler)
    expected = (Allocation("q", q.data_ptr(), 2 * (3 * 64 + 32)),)
    assert [done.allocations for done in device.launches] == [expected] * 2
    assert len(compiler.calls) == 1


def test_another_emulated_architecture_is_another_target(monkeypatch, devices, compiler):
    from .fakes import Device

    made = {arch: Device(arch, needs_allocations=True) for arch in ("gfx942", "gfx950")}
    now = ["gfx942"]
    monkeypatch.setattr("fly.runtime.launch.device_for", lambda key: made[now[0]])
    kernel = Kernel(*tensors("q"))
    for arch in ("gfx942", "gfx950", "gfx942"):
        now[0] = arch
        launch(kernel, 1, 64, (half(4),), {}, None, compiler)
    assert [call[2] for call in compiler.calls] == ["gfx942", "gfx950"]
    assert [len(made[arch].launches) for arch in made] == [2, 1]


class Stream:
    def __init__(self, handle, device_index):
        self.cuda_stream = handle
        self.device_index = device_index


def test_the_current_stream_is_read_at_every_launch(monkeypatch, devices, compiler):
    current = {0: 17, 1: 18}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    kernel = Kernel(*tensors("q"))
    launch(kernel, 1, 64, (CudaArray(device=1),), {}, None, compiler)
    current[1] = 19
    launch(kernel, 1, 64, (CudaArray(device=1),), {}, None, compiler)
    launch(kernel, 1, 64, (CudaArray(device=1),), {}, 33, compiler)
    launch(kernel, 1, 64, (CudaArray(device=1),), {}, Stream(44, 1), compiler)
    assert [done.stream for done in devices["cuda", 1].launches] == [18, 19, 33, 44]


def test_without_torch_the_default_stream_is_used(monkeypatch, devices, compiler):
    import sys

    monkeypatch.delitem(sys.modules, "torch")
    launch(Kernel(*tensors("q")), 1, 64, (CudaArray(device=1),), {}, None, compiler)
    assert devices["cuda", 1].launches[0].stream == 0


@pytest.mark.parametrize("stream", ["1", 1.5, True, -1, types.SimpleNamespace(cuda_stream=None)])
def test_what_is_no_stream_is_named(stream):
    with pytest.raises(ArgumentTypeError, match=r"'stream' is .*; accepted: a handle, an object with .cuda_stream"):
        stream_handle(stream, ("cuda", 0))


def test_streams_belong_to_devices():
    with pytest.raises(LaunchError, match="stream is on cuda:1, the tensors on cuda:0"):
        stream_handle(Stream(5, 1), ("cuda", 0))
    with pytest.raises(LaunchError, match="the tensors are on cpu"):
        stream_handle(5, CPU)
    assert stream_handle(0, CPU) == 0


def test_static_values_that_are_equal_but_not_the_same_have_different_keys():
    values = [1, True, 1.0, 0, 0.0, -0.0, False, None, "1", (1,), (1.0,), (True,), ((0.0,),), ((-0.0,),), ()]
    assert len({static_key({"x": value}) for value in values}) == len(values)
    assert static_key({"x": (1, (2.5,))}) == static_key({"x": (1, (2.5,))})


def test_without_an_emulator_cpu_tensors_are_refused(monkeypatch):
    import importlib.util

    from fly.runtime import device as device_module

    monkeypatch.setattr(device_module, "_devices", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        DeviceError, match=r"for CPU tensors needs the package tinygrad: .*; or pass tensors on a GPU"
    ):
        device_for(CPU)


def test_the_emulator_runs_cpu_tensors_where_it_is_installed(monkeypatch):
    import importlib
    import sys

    from fly.runtime import device as device_module

    emulated = types.ModuleType("fly.runtime.emulated")
    emulated.EmulatedDevice = lambda arch: types.SimpleNamespace(target=arch)
    emulated.__spec__ = importlib.machinery.ModuleSpec("fly.runtime.emulated", None)
    monkeypatch.setitem(sys.modules, "fly.runtime.emulated", emulated)
    monkeypatch.setattr(device_module, "_devices", {})
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    assert device_for(CPU).target == "gfx942"
    assert device_for(CPU) is device_for(CPU)
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    assert device_for(CPU).target == "gfx950"


def test_other_devices_are_refused():
    with pytest.raises(DeviceError, match="device xpu:0: kernels run on 'cuda'"):
        device_for(("xpu", 0))


def test_scalars_of_all_kinds(device, compiler):
    parameters = [Parameter(dtype, "scalar", dtype=dtype) for dtype in ("i32", "f64", "f32", "i64")]
    launch(
        Kernel(*tensors("q"), *parameters),
        1,
        64,
        (half(4), np.int8(1), 2, np.float32(3), -4),
        {},
        None,
        compiler,
    )
    assert unpack(device.launches[0].packed, "Piidfq")[2:] == (1, 2.0, 3.0, -4)
    assert compiler.calls[0][0][1] == ScalarSpec("i32")
