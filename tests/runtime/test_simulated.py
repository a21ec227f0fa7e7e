"""The simulated NVIDIA GPU as a device: what CPU tensors with `FLY_ARCH=sm_90a` get, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import fly
from fly import config
from fly.backends.nvvm import tma
from fly.backends.nvvm.mbarrier import Mbarriers, init_all
from fly.backends.target import target, targets
from fly.errors import ArgumentError, ConfigError, DeviceError, LaunchError, SimulatorError, SimulatorReportError
from fly.ir import memory
from fly.runtime.arguments import EncodedMap
from fly.runtime.device import CPU, device_for
from fly.runtime.simulated import SimulatedDevice
from fly.simulator import Launch, Program, Region
from fly.simulator.tensor_map import TensorMap
from tests.tracing import matrix, trace

NVIDIA = [t.arch for t in targets() if t.backend == "nvvm"]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv(config.ARCH.name, "sm_90a")
    monkeypatch.delenv(config.SIMULATOR_SEED.name, raising=False)


@fly.kernel
def doubled(x: fly.Tensor, out: fly.Tensor):
    """out = 2 x for blocks of 64."""
    i = fly.block_id.x * 64 + fly.thread_id.x
    out.store(x.load(i) * 2.0, i)


@fly.kernel
def first_row(source: fly.TensorMap, out: fly.Tensor):
    """out[i] = source[0, i] for 64 f32."""
    line, landed = fly.alloc_shared("line", 256, 128), Mbarriers.allocate("landed", 1, 1)
    init_all([landed])
    with fly.when(fly.thread_id.x == 0):
        landed.arrive_expecting(0, 256)
        tma.load(source, line, (0, 0), landed.at(0))
    landed.wait(0, 0)
    out.store(memory.load(line.offset(fly.thread_id.x * 4), fly.f32), fly.thread_id.x)


@fly.kernel
def stores_and_fails(x: fly.Tensor):
    """Every block stores; the last one is past the end."""
    i = fly.block_id.x * 64 + fly.thread_id.x
    x.store(-1.0, i)


# the device


@pytest.mark.parametrize("arch", NVIDIA)
def test_cpu_tensors_belong_to_the_architecture(arch, monkeypatch):
    monkeypatch.setenv(config.ARCH.name, arch)
    device = device_for(CPU)
    assert isinstance(device, SimulatedDevice) and device is device_for(CPU)
    assert (device.target, device.compute_units) == (arch, target(arch).compute_units)
    assert not device.is_capturing(0)
    out = torch.zeros(128)
    doubled[2, 64](torch.arange(128.0), out)
    assert torch.equal(out, 2 * torch.arange(128.0))


def test_arrays_of_numpy_run_too():
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    doubled[1, 64](x, out)
    np.testing.assert_array_equal(out, 2 * x)


@pytest.mark.parametrize("arch", ["sm_42", "", "gfx90a", "SM_90a"])
def test_an_unknown_architecture(arch, monkeypatch):
    monkeypatch.setenv(config.ARCH.name, arch)
    message = f"FLY_ARCH='{arch}'; CPU tensors run on one of gfx942, gfx950, sm_80, sm_86, sm_89, sm_90a"
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        doubled[1, 64](torch.zeros(64), torch.zeros(64))


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", ""])
def test_a_schedule_that_is_no_number(seed, monkeypatch):
    monkeypatch.setenv(config.SIMULATOR_SEED.name, seed)
    with pytest.raises(ConfigError, match=f"FLY_SIMULATOR_SEED='{seed}': expected a whole number from 0 on"):
        doubled[1, 64](torch.zeros(64), torch.zeros(64))


def test_a_devices_own_schedule_comes_first(monkeypatch):
    monkeypatch.setenv(config.SIMULATOR_SEED.name, "x")
    monkeypatch.setattr(device_for(CPU), "seed", 7)
    with pytest.raises(SimulatorReportError, match=r"\(schedule 7\)"):
        stores_and_fails[2, 64](torch.zeros(100))


GRIDS = {
    "grid y": ((1, 65536), 64, "doubled: grid y is 65536; the simulated GPU (sm_90a) takes at most 65535"),
    "grid z": ((1, 1, 65536), 64, "doubled: grid z is 65536; the simulated GPU (sm_90a) takes at most 65535"),
    "block z": (1, (1, 1, 65), "doubled: block z is 65; the simulated GPU (sm_90a) takes at most 64"),
}


@pytest.mark.parametrize(("grid", "block", "message"), GRIDS.values(), ids=GRIDS)
def test_sizes_that_no_gpu_takes(grid, block, message):
    out = torch.zeros(64)
    with pytest.raises(LaunchError, match=re.escape(message)):
        doubled[grid, block](torch.ones(64), out)
    assert not out.any()


# memory


@pytest.mark.parametrize("seed", range(5))
def test_a_launch_that_fails_leaves_memory_as_it_was(seed, monkeypatch):
    monkeypatch.setenv(config.SIMULATOR_SEED.name, str(seed))
    x = torch.arange(1000.0)
    with pytest.raises(SimulatorReportError) as error:
        stores_and_fails[16, 64](x)
    (report,) = error.value.reports
    assert (report.kind, report.kernel, report.block) == ("out-of-bounds", "stores_and_fails", (15, 0, 0))
    assert str(report) == report.text == str(error.value)
    assert torch.equal(x, torch.arange(1000.0))


def test_what_another_kind_of_error_stops_is_taken_back_too(monkeypatch):
    x, finished = torch.arange(640.0), []
    program = Program.of(trace(stores_and_fails, matrix(), arch="sm_90a", block=64), target("sm_90a"))

    def stop(blocks: int) -> None:
        finished.append(blocks)
        if len(finished) == 3:
            raise KeyboardInterrupt

    region = Region(x.data_ptr(), 4 * 640, "x")
    with pytest.raises(KeyboardInterrupt):
        Launch(program, (10, 1, 1), [region], [region.address, 640], 0, stop).run()
    assert torch.equal(x, torch.arange(640.0))


def test_an_array_that_must_not_be_written():
    x = np.ones(64, np.float32)
    x.flags.writeable = False
    out = np.zeros(64, np.float32)
    doubled[1, 64](x, out)  # read
    assert (out == 2).all()
    with pytest.raises(ArgumentError, match=r"'out'.*read-only"):
        doubled[1, 64](out, x)
    assert (x == 1).all()


# tensor maps


def test_a_tensor_map_is_read_as_it_was_made():
    for rank in range(1, 6):
        shape, strides = tuple(range(3, 3 + rank)), tuple(2**32 + 16 * i for i in range(rank - 1))
        given = TensorMap(2**47 + 16, 2, shape, strides, tuple(range(1, 1 + rank)), 64)
        data = given.pack()
        assert len(data) == 128 and data[:8] == given.address.to_bytes(8, "little")
        assert TensorMap.unpack(data) == given


def test_a_cpu_tensors_map_says_what_it_is():
    x = torch.zeros(7, 5, 72, dtype=torch.bfloat16)[:, 2, :66]
    made = fly.tensor_map(x, (4, 32), swizzle=64)
    assert TensorMap.unpack(made.data) == TensorMap(x.data_ptr(), 2, (7, 66), (720,), (4, 32), 64)


def test_a_map_of_somebody_else():
    x, out = torch.zeros(4, 64), torch.zeros(64)
    made = fly.tensor_map(x, (1, 64))
    foreign = EncodedMap(made.spec, bytes(range(128)), made.device, made.address, made.nbytes)
    with pytest.raises(SimulatorError, match="a tensor map that was not made for the simulator; make it of CPU tens"):
        first_row[1, 64](foreign, out)


@pytest.mark.parametrize("arch", ["sm_80", "gfx950"])
def test_maps_are_hoppers(arch, monkeypatch):
    monkeypatch.setenv(config.ARCH.name, arch)
    with pytest.raises(DeviceError, match=r"tensor map of a (CPU tensor|tensor on sm_80)"):
        fly.tensor_map(torch.zeros(4, 64), (1, 64))


def test_a_map_of_memory_that_the_launch_does_not_have():
    x, out = torch.zeros(4, 64), torch.zeros(64)
    made = fly.tensor_map(x, (1, 64))
    less = EncodedMap(made.spec, made.data, made.device, made.address, made.nbytes - 256)
    with pytest.raises(SimulatorReportError, match=r"out-of-bounds: .*1024 bytes of global memory.*has 768"):
        first_row[1, 64](less, out)


# artefacts


def test_compiling_for_cpu_tensors_gives_ptx():
    """Machine code of the architecture, as for a GPU: the simulator has no use for it, and says so."""
    x, out = torch.zeros(64), torch.zeros(64)
    artefact = fly.compile(doubled, x, out, block=64)
    assert artefact.target == "sm_90a" and ".target sm_90a" in artefact.isa
    with pytest.raises(DeviceError, match="doubled: compiled to machine code of sm_90a, and the simulator runs what"):
        device_for(CPU).load(artefact)


def test_a_saved_kernel_does_not_run_here(tmp_path):
    x, out = torch.zeros(64), torch.zeros(64)
    fly.compile(doubled, x, out, block=64).save(tmp_path / "doubled.fly")
    with pytest.raises(DeviceError, match="launch the kernel itself"):
        fly.load(tmp_path / "doubled.fly")[1, 64](x, out)


PROGRAM = """
import sys
import numpy as np
from doubled_kernel import doubled
x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
doubled[1, 64](x, out)
assert (out == 2 * x).all()
unwanted = {"llvmlite", "torch", "tinygrad", "fly.backends.compile", "fly.passes.pipeline", "fly.backends.nvvm.lower"}
print(*sorted(unwanted & set(sys.modules)))
"""


def test_a_simulated_launch_needs_no_compiler(tmp_path):
    """Neither LLVM nor a pass that lowers the kernel is loaded."""
    (tmp_path / "doubled_kernel.py").write_text(
        "import fly\n\n\n@fly.kernel\ndef doubled(x: fly.Tensor, out: fly.Tensor):\n"
        "    out.store(x.load(fly.thread_id.x) * 2.0, fly.thread_id.x)\n"
    )
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{[p for p in sys.path if p]!r}]\n"
    found = subprocess.run([sys.executable, "-c", paths + PROGRAM], capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr, found.returncode) == ("\n", "", 0)
