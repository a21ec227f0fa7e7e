import dataclasses
import threading

import pytest

from fly.backends.artefact import Artefact
from fly.errors import CompileError, DeviceError, LaunchError, TargetError
from fly.lang.signature import Field
from fly.runtime.cuda import CudaDevice
from fly.runtime.packing import ArgumentSlot, offsets, packer

from .fake_cuda import CUfunction_attribute, CUresult, FakeDriver

FIELDS = (Field("a", "ptr"), Field("n", "i32"), Field("scale", "f64"))
ARTEFACT = Artefact("add", "sm_90a", b".version 8.3", "", FIELDS, (128, 1, 1))
ARGUMENTS = ArgumentSlot(offsets(FIELDS), bytes(range(24)))


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def kernel(driver):
    return CudaDevice(0, driver).load(ARTEFACT)


def with_shared(size):
    return dataclasses.replace(ARTEFACT, dynamic_shared=size)


def test_a_launch_passes_the_packed_arguments(driver, kernel):
    kernel.launch((2, 3, 4), (128, 1, 1), ARGUMENTS, 77, ())
    assert driver.launches == [
        {
            "function": "add",
            "grid": (2, 3, 4),
            "block": (128, 1, 1),
            "shared": 0,
            "stream": 77,
            "arguments": [bytes(range(8)), bytes(range(8, 12)), bytes(range(16, 24))],
            "context": 1000,
        }
    ]


def test_arguments_of_wide_alignment_are_handed_over_one_by_one():
    fields = (Field("n", "i32"), Field("map", "map"), Field("m", "i32"))
    driver = FakeDriver(parameters=(4, 128, 4))
    kernel = CudaDevice(0, driver).load(dataclasses.replace(ARTEFACT, fields=fields))
    arguments = ArgumentSlot(offsets(fields), packer(fields).pack(1, bytes(range(128)), 2))
    kernel.launch((1, 1, 1), (128, 1, 1), arguments, 0, ())
    assert driver.launches[0]["arguments"] == [b"\1\0\0\0", bytes(range(128)), b"\2\0\0\0"]


def test_the_image_ends_with_a_zero(driver, kernel):
    assert driver.images == [b".version 8.3\0"]


@pytest.mark.parametrize(
    ("capability", "target"), [((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((8, 9), "sm_89"), ((12, 0), "sm_80")]
)
def test_the_target_follows_the_compute_capability(driver, capability, target):
    driver.device[75], driver.device[76] = capability
    assert CudaDevice(0, driver).target == target


def test_compute_units_are_the_drivers(driver):
    assert CudaDevice(0, driver).compute_units == 132


def test_old_devices_are_refused(driver):
    driver.device[75] = 7
    with pytest.raises(TargetError, match=r"compute capability 7\.0"):
        CudaDevice(0, driver)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_missing_devices_are_named(driver, ordinal):
    with pytest.raises(DeviceError, match=f"cuda:{ordinal}: there are 2 devices"):
        CudaDevice(ordinal, driver)


def test_a_context_that_is_current_is_left_alone(driver, kernel):
    driver.contexts.append(1000)
    driver.cuCtxPushCurrent = None
    kernel.launch((1, 1, 1), (128, 1, 1), ARGUMENTS, 0, ())
    assert driver.launches[0]["context"] == 1000
    assert driver.contexts == [1000]


def test_the_second_device_is_used_while_the_first_is_current(driver):
    driver.contexts.append(1000)
    kernel = CudaDevice(1, driver).load(ARTEFACT)
    kernel.launch((1, 1, 1), (128, 1, 1), ARGUMENTS, 0, ())
    assert driver.launches[0]["context"] == 1001
    assert driver.contexts == [1000]


def test_a_new_thread_has_the_context_for_the_launch(driver, kernel):
    left = []

    def work():
        kernel.launch((1, 1, 1), (128, 1, 1), ARGUMENTS, 0, ())
        left.append(list(driver.contexts))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert driver.launches[0]["context"] == 1000
    assert left == [[]]


def test_a_failed_launch_is_reported_and_the_context_restored(driver, kernel):
    driver.results["cuLaunchKernel"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match="add: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED: text of 719"):
        kernel.launch((1, 1, 1), (128, 1, 1), ARGUMENTS, 0, ())
    assert driver.contexts == []


def test_the_compilers_log_is_in_the_error(driver):
    driver.results["cuModuleLoadDataEx"] = CUresult.CUDA_ERROR_INVALID_PTX
    driver.log = b"ptxas application ptx input, line 9; fatal: unknown symbol\n"
    with pytest.raises(CompileError, match=r"add \(sm_90a\): CUDA_ERROR_INVALID_PTX: .*\n.*line 9; fatal"):
        CudaDevice(0, driver).load(ARTEFACT)
    assert driver.contexts == []


def test_rejected_code_without_a_log(driver):
    driver.results["cuModuleLoadDataEx"] = CUresult.CUDA_ERROR_INVALID_PTX
    with pytest.raises(CompileError, match="CUDA_ERROR_INVALID_PTX"):
        CudaDevice(0, driver).load(ARTEFACT)


def test_other_failures_to_load_are_no_compile_errors(driver):
    driver.results["cuModuleLoadDataEx"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaDevice(0, driver).load(ARTEFACT)


@pytest.mark.parametrize(
    ("static", "dynamic", "asked"),
    [(0, 48 << 10, []), (1, 48 << 10, [48 << 10]), (0, 227 << 10, [227 << 10])],
)
def test_shared_memory_beyond_48_kib_is_asked_for(driver, static, dynamic, asked):
    driver.function[1] = static
    kernel = CudaDevice(0, driver).load(with_shared(dynamic))
    what = CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.attributes_set == [("add", what, size) for size in asked]
    kernel.launch((1, 1, 1), (128, 1, 1), ARGUMENTS, 0, ())
    assert driver.launches[0]["shared"] == dynamic


def test_more_shared_memory_than_there_is(driver):
    with pytest.raises(
        LaunchError, match=r"add: shared memory bytes: 233472; cuda:0 \(sm_90a\) takes at most 232448"
    ):
        CudaDevice(0, driver).load(with_shared(228 << 10))


@pytest.mark.parametrize(
    ("grid", "block", "text"),
    [
        ((2**31, 1, 1), (1, 1, 1), "grid x is 2147483648; .* at most 2147483647"),
        ((1, 65536, 1), (1, 1, 1), "grid y is 65536; .* at most 65535"),
        ((1, 1, 1), (1, 1, 65), "block z is 65; .* at most 64"),
        ((1, 1, 1), (512, 2, 1), r"block is \(512, 2, 1\), threads: 1024; .* at most 256"),
    ],
)
def test_sizes_above_the_limits_are_named(driver, grid, block, text):
    driver.function[0] = 256  # the kernel's registers allow no more threads
    kernel = CudaDevice(0, driver).load(ARTEFACT)
    for _ in range(2):
        with pytest.raises(LaunchError, match=f"add: {text}"):
            kernel.launch(grid, block, ARGUMENTS, 0, ())
    assert not driver.launches


def test_what_the_driver_says_a_kernel_uses(driver):
    driver.function[1] = 100
    resources = CudaDevice(0, driver).load(with_shared(28)).resources
    assert (resources.registers, resources.scratch_bytes, resources.shared_bytes) == (96, 16, 128)


def test_launches_of_many_threads_do_not_mix(driver, kernel):
    arguments = ArgumentSlot(offsets(FIELDS))

    def work(n):
        for _ in range(100):
            arguments.view[:] = bytes([n] * 24)
            kernel.launch((n + 1, 1, 1), (128, 1, 1), arguments, 0, ())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 800
    assert all(set(b"".join(done["arguments"])) == {done["grid"][0] - 1} for done in driver.launches)


def test_a_missing_driver_is_reported(driver):
    def missing(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver.cuInit = missing
    with pytest.raises(DeviceError, match=r"NVIDIA driver cannot be loaded: Failed to dlopen"):
        CudaDevice(0, driver)
