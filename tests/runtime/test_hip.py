"""The HIP device over a stub of its library, compiled here: what arrives in C is what was meant."""

import dataclasses
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from fly.backends.artefact import Artefact, Resources
from fly.errors import CompileError, DeviceError, LaunchError
from fly.lang.signature import Field
from fly.runtime import device as device_module
from fly.runtime import hip
from fly.runtime.device import device_for
from fly.runtime.hip import HipDevice, arch_from_topology, arch_of_version, library_names
from fly.runtime.packing import ArgumentSlot, offsets

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

FIELDS = (Field("a", "ptr"), Field("n", "i32"), Field("scale", "f32"))
ARTEFACT = Artefact("add", "gfx950", b"code object", "", FIELDS, (256, 1, 1), 4096)
ARGUMENTS = ArgumentSlot(offsets(FIELDS), bytes(range(16)))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("hip") / "libamdhip64.so"
    source = Path(__file__).with_name("stub_hip.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


@pytest.fixture
def topology(tmp_path) -> Path:
    """Two GPUs and a CPU, as the kernel driver describes them."""
    for node, (version, bus) in enumerate([(0, 0), (90500, 0xC1), (90402, 0xC2)]):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        lines = f"simd_count 1024\ngfx_target_version {version}\nlocation_id {bus << 8}\ndomain 0\n"
        (folder / "properties").write_text(lines)
    return tmp_path / "nodes"


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Reads, and forgets, what the stub was called with."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("STUB_HIP_LOG", str(path))

    def read() -> list[str]:
        lines = path.read_text().splitlines()
        path.write_text("")
        return lines

    return read


@pytest.fixture
def make(library, topology, log):
    """Makes devices on the stub."""
    return lambda ordinal=0: HipDevice(ordinal, library, topology)


@needs_compiler
def test_a_launch_passes_blocks_threads_and_packed_arguments(make, log):
    kernel = make().load(ARTEFACT)
    assert log() == ["load code object on 0", "function add of 1234567890"]
    kernel.launch((7, 2, 3), (256, 1, 1), ARGUMENTS, 0x7F0000001234, ())
    assert log() == [
        "launch abcdef0123 grid 7 2 3 block 256 1 1 shared 4096 stream 7f0000001234 device 0: "
        + " ".join(f"{n:02x}" for n in range(16))
    ]


@needs_compiler
def test_the_second_device_is_used_and_the_first_restored(make, log):
    device = make(1)
    assert device.target == "gfx942"
    kernel = device.load(ARTEFACT)
    assert log()[:2] == ["set device 1", "load code object on 1"]
    kernel.launch((1, 1, 1), (256, 1, 1), ARGUMENTS, 0, ())
    lines = log()
    assert (lines[0], lines[2]) == ("set device 1", "set device 0")
    assert "device 1:" in lines[1]


@needs_compiler
def test_a_new_thread_launches_on_the_device(make, log):
    kernel = make(1).load(ARTEFACT)
    log()
    thread = threading.Thread(target=kernel.launch, args=((1, 1, 1), (256, 1, 1), ARGUMENTS, 0, ()))
    thread.start()
    thread.join()
    assert "device 1:" in log()[1]


@needs_compiler
@pytest.mark.parametrize(
    ("fail", "error", "text"),
    [
        ("hipInit 100", DeviceError, r"hipInit: text of the stub \(100\)"),
        (
            "hipModuleLoadData 209",
            CompileError,
            r"add \(gfx950\): hipModuleLoadData: no binary for this GPU \(209\)",
        ),
        ("hipModuleLoadData 2", DeviceError, r"hipModuleLoadData: text of the stub \(2\)"),
        ("hipModuleGetFunction 500", DeviceError, r"hipModuleGetFunction: text of the stub \(500\)"),
        ("hipModuleLaunchKernel 719", DeviceError, r"add: hipModuleLaunchKernel: text of the stub \(719\)"),
    ],
)
def test_failures_are_told_and_cleared(make, log, monkeypatch, fail, error, text):
    monkeypatch.setenv("STUB_HIP_FAIL", fail)
    with pytest.raises(error, match=text):
        make().load(ARTEFACT).launch((1, 1, 1), (1, 1, 1), ARGUMENTS, 0, ())
    assert log()[-1] == "clear error"


@needs_compiler
@pytest.mark.parametrize("ordinal", [-1, 2])
def test_missing_devices_are_named(make, ordinal):
    with pytest.raises(DeviceError, match=f"cuda:{ordinal}: there are 2 HIP devices"):
        make(ordinal)


@needs_compiler
@pytest.mark.parametrize(
    ("grid", "block", "text"),
    [
        ((2**31, 1, 1), (1, 1, 1), "grid x is 2147483648; .* at most 2147483647"),
        ((1, 65537, 1), (1, 1, 1), "grid y is 65537; .* at most 65536"),
        ((2**22, 1, 1), (1024, 1, 1), "grid times block along x is 4294967296; .* at most 4294967295"),
        ((1, 1, 1), (1024, 2, 1), "block is .*, threads: 2048; .* at most 1024"),
    ],
)
def test_sizes_above_the_limits_are_named(make, grid, block, text):
    with pytest.raises(LaunchError, match=f"add: {text}"):
        make().load(ARTEFACT).launch(grid, block, ARGUMENTS, 0, ())


@needs_compiler
def test_each_architecture_has_its_shared_memory(make):
    large = dataclasses.replace(ARTEFACT, resources=Resources(shared_bytes=160 * 1024))
    make(0).load(large)
    with pytest.raises(LaunchError, match=r"shared memory bytes: 163840; cuda:1 \(gfx942\) takes at most 65536"):
        make(1).load(large)


@needs_compiler
def test_compute_units_are_a_whole_chips_without_torch(make, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert [make(i).compute_units for i in (0, 1)] == [256, 304]


@needs_compiler
def test_torch_tells_the_architecture_when_it_is_a_rocm_build(library, log, tmp_path, monkeypatch):
    properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=80)
    torch = types.SimpleNamespace(
        version=types.SimpleNamespace(hip="7.0"),
        cuda=types.SimpleNamespace(get_device_properties=lambda ordinal: properties),
        __file__="/python/torch/__init__.py",
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = HipDevice(0, library, tmp_path)
    assert (device.target, device.compute_units) == ("gfx942", 80)  # a partition of a chip
    assert library_names()[0] == "/python/torch/lib/libamdhip64.so"


def test_tensors_of_a_rocm_torch_are_on_a_hip_device(monkeypatch):
    torch = types.SimpleNamespace(version=types.SimpleNamespace(hip="7.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(device_module, "_devices", {})
    monkeypatch.setattr(hip, "HipDevice", lambda ordinal: ("hip", ordinal))
    assert device_for(("cuda", 1)) == ("hip", 1)


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setattr(hip, "library_names", lambda: [str(tmp_path / "absent.so")])
    with pytest.raises(DeviceError, match=r"tried .*absent\.so; set ROCM_PATH"):
        hip._open_library.__wrapped__()


def test_where_the_library_is_looked_for(monkeypatch):
    monkeypatch.setenv("ROCM_PATH", "/rocm")
    monkeypatch.setenv("HIP_PATH", "/hip")
    assert library_names()[:2] == ["/hip/lib/libamdhip64.so", "/rocm/lib/libamdhip64.so"]
    assert "libamdhip64.so" in library_names()


@pytest.mark.parametrize(
    ("version", "arch"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110001, "gfx1101")]
)
def test_architectures_by_number(version, arch):
    assert arch_of_version(version) == arch


def test_gpus_are_found_by_pci_address(topology):
    assert arch_from_topology("0000:c1:00.0", topology) == "gfx950"
    assert arch_from_topology("0000:C2:00.3", topology) == "gfx942"  # a partition
    for absent in ("0001:c1:00.0", "0000:c1:01.0", "0000:00:00.0"):
        with pytest.raises(DeviceError, match=f"the GPU at {absent}"):
            arch_from_topology(absent, topology)
