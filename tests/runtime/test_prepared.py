import gc
import threading

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, DeviceError, LaunchError
from fly.lang.signature import Parameter
from fly.runtime.cuda import LAUNCHES_WITHOUT_GRAPH, CudaDevice
from fly.runtime.device import Allocation
from fly.runtime.launch import launch
from fly.runtime.prepared import bind, together

from .fake_cuda import CUresult, FakeDriver
from .fakes import CudaArray, Kernel, tensors

KERNEL = (
    *tensors("q", "k"),
    Parameter("mask", "tensor", optional=True),
    Parameter("scale", "scalar", dtype="f32"),
    Parameter("lse", "tensor"),
    Parameter("n", "scalar", dtype="i64"),
)


def arguments():
    q, k = (torch.empty(2, 3, 64, dtype=torch.float16) for _ in range(2))
    return q, k, None, 0.25, torch.empty(7), -5


def addresses(args):
    return [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]


def test_a_prepared_launch_is_the_launch_it_was_bound_to(device, compiler):
    kernel, first, second = Kernel(*KERNEL, causal=True), arguments(), arguments()
    prepared = bind(kernel, (4, 5), 64, first, {"causal": False}, compiler)
    assert not device.launches
    prepared(*addresses(second))
    launch(kernel, (4, 5), 64, second, {"causal": False}, None, compiler)
    assert device.launches[0] == device.launches[1]
    assert len(compiler.calls) == 1


def test_an_unchecked_launch_is_the_same(device, compiler):
    args = arguments()
    prepared = bind(Kernel(*KERNEL), 3, 64, args, {}, compiler)
    prepared(*addresses(args), stream=0)
    prepared.launch(addresses(args), 0)
    assert device.launches[0] == device.launches[1]
    with pytest.raises(ArgumentError, match="2 addresses; accepted: 3"):
        prepared.launch(addresses(args)[:2], 0)
    assert len(device.launches) == 2


def test_a_scalar_may_come_first_and_a_tensor_last(device, compiler):
    kernel = Kernel(KERNEL[3], Parameter("x", "tensor"), Parameter("y", "tensor"))
    scalars = [torch.zeros(()) for _ in range(4)]
    prepared = bind(kernel, 1, 64, (0.5, *scalars[:2]), {}, compiler)
    prepared(*addresses(scalars[2:]))
    launch(kernel, 1, 64, (0.5, *scalars[2:]), {}, None, compiler)
    assert device.launches[0] == device.launches[1]


def test_devices_that_need_it_are_told_the_new_memory(device, compiler):
    device.needs_allocations = True
    x = np.zeros((4, 6), np.float32)
    prepared = bind(Kernel(*tensors("x")), 1, 64, (x[::-1],), {}, compiler)
    prepared(4096)
    assert device.launches[0].allocations == (Allocation("x", 4096 - 3 * 24, 96),)


def test_addresses_are_checked(device, compiler):
    args = arguments()
    prepared = bind(Kernel(*KERNEL), 1, 64, args, {}, compiler)
    good = addresses(args)
    for bad, text in [
        (good[:2], "2 addresses; accepted: one each for q, k, lse"),
        ([*good, 16], "4 addresses"),
        ([*good[:2], good[2] + 8], "'lse' has address .*; accepted: multiples of 16"),
        ([*good[:2], 2**64], "accepted: ints from 0"),
        ([*good[:2], -16], "accepted: ints from 0"),
        ([*good[:2], args[4]], "accepted: ints from 0"),
        ([*good[:2], torch.tensor(good[2])], "accepted: ints from 0"),
        ([*good[:2], 16.0], "accepted: ints from 0"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            prepared(*bad)
    assert not device.launches


def test_less_alignment_is_enough_for_a_kernel_compiled_for_less(device, compiler):
    odd = torch.zeros(65, dtype=torch.float16)[1:]
    prepared = bind(Kernel(*tensors("x")), 1, 64, (odd,), {}, compiler)
    prepared(4098)
    with pytest.raises(ArgumentError, match="multiples of 2"):
        prepared(4097)


def test_streams(monkeypatch, devices, compiler):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {1: 18}.__getitem__, raising=False)
    prepared = bind(Kernel(*tensors("x")), 1, 64, (CudaArray(device=1),), {}, compiler)
    prepared(256)
    prepared(256, stream=33)
    assert [done.stream for done in devices["cuda", 1].launches] == [18, 33]
    with pytest.raises(ArgumentTypeError, match="'stream' is 'x'"):
        prepared(256, stream="x")


def test_what_is_bound_is_checked(device, compiler):
    with pytest.raises(ArgumentError, match="'lse' is missing"):
        bind(Kernel(*KERNEL), 1, 64, arguments()[:4], {}, compiler)
    with pytest.raises(LaunchError, match="grid is 0"):
        bind(Kernel(*KERNEL), 0, 64, arguments(), {}, compiler)


def test_launches_of_many_threads_do_not_mix(device, compiler):
    prepared = bind(Kernel(*tensors("x", "y")), 1, 64, (torch.zeros(4), torch.zeros(4)), {}, compiler)

    def work(address):
        for _ in range(200):
            prepared(address, address)

    threads = [threading.Thread(target=work, args=(n << 20,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = [(done.packed[:8], done.packed[16:24]) for done in device.launches]
    assert len(pairs) == 1600
    assert all(x == y for x, y in pairs)


PAIR = (*tensors("x"), Parameter("n", "scalar", dtype="i32"), *tensors("y"))
SIZES = {"ptr": 8, "i32": 4}  # bytes


def pair(compiler, x, y, n, grid=(1, 1, 1)):
    return bind(Kernel(*PAIR, name=f"kernel{n}"), grid, 64, (x, n, y), {}, compiler)


@pytest.fixture
def driver(devices, compiler):
    """Of a fake NVIDIA GPU that host memory is on, which runs kernels of `PAIR`."""
    driver = FakeDriver()
    devices["cpu", 0] = CudaDevice(0, driver)
    fields = pair(compiler, torch.zeros(4), torch.zeros(4), 0).entry.fields
    driver.parameters = [SIZES[field.kind] for field in fields]
    return driver


def both(compiler):
    """Two launches, and where they find their addresses among three."""
    grids = {7: (2, 3, 4), 8: (5, 1, 1)}
    launches = [pair(compiler, torch.zeros(4), torch.zeros(6), n, grid) for n, grid in grids.items()]
    return launches, [[0, 1], [2, 0]]


def test_several_launches_take_what_is_theirs_of_their_addresses(device, compiler):
    launches, takes = both(compiler)
    together(launches, takes, 3)([4096, 8192, 12288], 77)
    launches[0].launch([4096, 8192], 77)
    launches[1].launch([12288, 4096], 77)
    assert device.launches[:2] == device.launches[2:]


@pytest.mark.parametrize("pushed", [False, True], ids=["of another context", "of its context"])
def test_one_launch_on_an_nvidia_gpu_is_what_it_is_by_itself(pushed, driver, compiler):
    (one, _), _ = both(compiler)
    run = together([one], [[0, 1]], 2)
    if pushed:
        driver.cuCtxPushCurrent(1000)
    before = [*driver.contexts]
    for given in ([4096, 8192], [12288, 4096]):
        run(given, 77)
        one.launch(given, 77)
    first, again, second, once_more = driver.launches
    assert first == again != second == once_more
    assert driver.contexts == before
    driver.results["cuLaunchKernel"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match="kernel7: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"):
        run([4096, 8192], 77)
    assert driver.contexts == before


def test_one_launch_has_sizes_that_the_device_takes(driver, compiler):
    with pytest.raises(LaunchError, match="131072"):
        together([pair(compiler, torch.zeros(4), torch.zeros(6), 9, (1, 1 << 17, 1))], [[0, 1]], 2)


def test_several_launches_on_an_nvidia_gpu_are_what_each_of_them_is(driver, compiler):
    launches, takes = both(compiler)
    run = together(launches, takes, 3)
    for i in range(2 * LAUNCHES_WITHOUT_GRAPH):
        addresses = [4096 << i, 8192 + i * 16, 12288]
        driver.launches.clear()
        run(addresses, 77)
        for one, taken in zip(launches, takes):
            one.launch([addresses[i] for i in taken], 77)
        assert len(driver.launches) == 4
        assert driver.launches[:2] == driver.launches[2:]
        assert {done["context"] for done in driver.launches} == {1000}
    assert driver.contexts == []
    assert driver.graph_launches == LAUNCHES_WITHOUT_GRAPH


def test_several_launches_are_a_graph_of_each_stream_that_lives_as_long_as_their_function(driver, compiler):
    run = together(*both(compiler), 3)
    for stream in [77, 78] * LAUNCHES_WITHOUT_GRAPH:
        run([4096, 8192, 12288], stream)
    assert driver.graph_launches == 0 and len(driver.graphs) == len(driver.executables) == 2
    run([4096, 8192, 12288], 78)
    assert driver.graph_launches == 1 and driver.launches[-1]["stream"] == 78
    assert driver.cuThreadExchangeStreamCaptureMode(0)[1] == 0  # as it was
    del run
    gc.collect()
    assert not driver.graphs and not driver.executables


def test_several_launches_are_no_graph_while_one_is_captured_or_on_streams_with_a_priority(driver, compiler):
    run = together(*both(compiler), 3)
    driver.capturing = 1
    driver.priorities[78] = -5
    for stream in [77, 78] * (LAUNCHES_WITHOUT_GRAPH + 2):
        run([4096, 8192, 12288], stream)
    driver.capturing = 0
    for _ in range(LAUNCHES_WITHOUT_GRAPH + 2):
        run([4096, 8192, 12288], 78)
    assert driver.graph_launches == 0 and not driver.graphs
    for _ in range(LAUNCHES_WITHOUT_GRAPH):
        run([4096, 8192, 12288], 77)
    driver.capturing = 1
    run([4096, 8192, 12288], 77)
    assert driver.graph_launches == 0 and len(driver.graphs) == 1


@pytest.mark.parametrize("function", ["cuGraphInstantiate", "cuGraphExecKernelNodeSetParams", "cuGraphLaunch"])
def test_a_graph_that_fails_is_an_error(function, driver, compiler):
    run = together(*both(compiler), 3)
    driver.results[function] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY"):
        for _ in range(LAUNCHES_WITHOUT_GRAPH + 1):
            run([4096, 8192, 12288], 77)
    assert driver.contexts == [] and driver.cuThreadExchangeStreamCaptureMode(0)[1] == 0


def test_several_launches_of_many_threads_do_not_mix(driver, compiler):
    launches, takes = both(compiler)
    run = together(launches, takes, 3)

    def work(n):
        for _ in range(100):
            run([n, n, n], n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 1600
    for done in driver.launches:
        assert {x for x in done["arguments"] if len(x) == 8} == {done["stream"].to_bytes(8, "little")}


def test_the_first_of_several_launches_that_fails_is_named_and_is_the_last(driver, compiler):
    launches, takes = both(compiler)
    run = together(launches, takes, 3)
    driver.results["cuLaunchKernel"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match="kernel7: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"):
        run([4096, 8192, 12288], 0)
    assert len(driver.launches) == 1
    assert driver.contexts == []


def test_several_launches_have_sizes_that_the_device_takes(driver, compiler):
    launches, takes = both(compiler)
    launches.append(pair(compiler, torch.zeros(4), torch.zeros(6), 9, (1, 1 << 17, 1)))
    with pytest.raises(LaunchError, match="131072"):
        together(launches, [*takes, [0, 1]], 3)
