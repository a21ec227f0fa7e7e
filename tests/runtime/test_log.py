"""Launches of kernels with messages on the drivers: whom they wait for, where the log is, what they refuse."""

import ctypes
import struct

import pytest

from fly.backends.artefact import Artefact
from fly.errors import CheckError, DeviceError, UnsupportedError
from fly.lang.messages import LOG_FIELD, METADATA_KEY, Logged, Message, to_text
from fly.lang.signature import Field
from fly.runtime.cuda import CudaDevice
from fly.runtime.log import load
from fly.runtime.packing import ArgumentSlot, offsets

from .fake_cuda import CUresult, FakeDriver
from .test_hip import library, log, make, needs_compiler, topology  # noqa: F401

FIELDS = (Field("n", "i32"), LOG_FIELD)
MESSAGES = (Message("print", "a.py:1", "n is {}", (Logged("i32"),)), Message("check", "a.py:2", "bad", ()))
METADATA = {METADATA_KEY: to_text(MESSAGES)}
ARTEFACT = Artefact("loud", "sm_90a", b".version 8.3", "", FIELDS, (128, 1, 1), metadata=METADATA)


class Driver(FakeDriver):
    """Writes records into the log as a kernel would; `records` are (message, block, thread, values)."""

    def __init__(self):
        super().__init__(parameters=(4, 8))
        self.records, self.failed = [], 0

    def cuLaunchKernel(self, *arguments):
        result = super().cuLaunchKernel(*arguments)
        (address,) = struct.unpack("<Q", self.launches[-1]["arguments"][1])
        words = b"".join(struct.pack(f"<{5 + len(v)}i", m, b, 0, 0, t, *v) for m, b, t, v in self.records)
        ctypes.memmove(address + 32, words, len(words))
        ctypes.memmove(address + 16, struct.pack("<q", self.failed), 8)
        return result


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def launch(driver):
    kernel = load(CudaDevice(0, driver), ARTEFACT)
    return lambda: kernel.launch((4, 1, 1), (128, 1, 1), ArgumentSlot(offsets(FIELDS)), 77, ())


def test_the_launch_waits_for_its_stream_and_prints_in_order(driver, launch, capsys):
    driver.records = [(1, 2, 5, [30]), (1, 0, 9, [10]), (1, 2, 5, [40])]
    launch()
    assert driver.waits == [77]
    wanted = "block 0, thread 9: n is 10\nblock 2, thread 5: n is 30\nblock 2, thread 5: n is 40\n"
    assert capsys.readouterr().out == wanted
    driver.records = []
    launch()  # what the last launch wrote is gone
    assert capsys.readouterr().out == ""
    assert len(driver.host_memory) == 1


def test_a_capture_is_refused_before_anything_is_launched(driver, launch):
    driver.capturing = 1
    with pytest.raises(UnsupportedError) as caught:
        launch()
    assert str(caught.value) == (
        "loud: a kernel with fly.print or fly.check is waited for, which a graph capture does not allow; accepted: "
        "launches outside of a capture, or the kernel without them"
    )
    assert not driver.launches and not driver.host_memory


def test_a_failed_check_comes_before_the_fault_that_follows_it(driver, launch):
    driver.records, driver.failed = [(2, 0, 3, [])], 1
    driver.results["cuStreamSynchronize"] = next(status for status in CUresult if status)
    with pytest.raises(CheckError, match=r"^a.py:2: fly.check failed in loud, block 0, thread 3: bad$") as caught:
        launch()
    assert isinstance(caught.value.__cause__, DeviceError)
    driver.records, driver.failed = [], 0
    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        launch()


def test_failed_checks_without_a_record_are_counted(driver, launch):
    driver.failed = 12
    with pytest.raises(CheckError, match=r"loud: fly.check failed 12 times, of which the log had room for none"):
        launch()


def test_another_size_of_the_log_takes_new_memory(driver, launch, monkeypatch):
    launch()
    monkeypatch.setenv("FLY_PRINT_SIZE_MB", "1")
    launch()
    assert [len(memory) for memory in driver.host_memory] == [4 << 20, 1 << 20]


@needs_compiler
def test_hip_waits_and_refuses_captures_too(make, log, monkeypatch):  # noqa: F811
    device = make()
    kernel = load(device, Artefact("loud", "gfx950", b"code", "", FIELDS, (64, 1, 1), metadata=METADATA))
    arguments = ArgumentSlot(offsets(FIELDS))
    log()
    kernel.launch((1, 1, 1), (64, 1, 1), arguments, 0x55, ())
    lines = [line for line in log() if not line.startswith("set device")]
    assert lines[0] == "capturing 55 on 0"
    assert lines[1] == f"host memory {4 << 20} bytes flags 40000002 on 0"
    assert lines[2].startswith("launch abcdef0123 grid 1 1 1 block 64 1 1")
    assert lines[3] == "wait 55 on 0"
    monkeypatch.setenv("STUB_HIP_CAPTURING", "1")
    with pytest.raises(UnsupportedError, match=r"loud: a kernel with fly.print"):
        kernel.launch((1, 1, 1), (64, 1, 1), arguments, 0x55, ())
    monkeypatch.delenv("STUB_HIP_CAPTURING")
    monkeypatch.setenv("STUB_HIP_FAIL", "hipStreamSynchronize 1")
    with pytest.raises(DeviceError, match="hipStreamSynchronize"):
        kernel.launch((1, 1, 1), (64, 1, 1), arguments, 0x55, ())
