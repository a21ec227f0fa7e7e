"""What really reaches the CUDA driver: `cuda-bindings` and ctypes over a stub of the driver's library."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from fly.runtime.cuda import LAUNCHES_WITHOUT_GRAPH

COMPILER = shutil.which("cc")
needs_bindings = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="no cuda-bindings")

# ends the search for the bindings
WITHOUT_BINDINGS = "import sys; sys.modules['cuda'] = None\n"
PROGRAM = """
from fly.backends.artefact import Artefact
from fly.errors import CompileError, DeviceError
from fly.lang.signature import Field, TensorMapSpec
from fly.runtime.cuda import LAUNCHES_WITHOUT_GRAPH, CudaDevice, launches, ordinal_of
from fly.runtime.packing import ArgumentSlot, SharedArguments, offsets, packer
from fly.runtime.tensor_map import encode
fields = (Field("n", "i32"), Field("map", "map"), Field("a", "ptr"))
arguments = ArgumentSlot(offsets(fields), packer(fields).pack(77, bytes(range(128)), 1 << 33))
artefact = Artefact("add", "sm_90a", b"some PTX", "", fields, (64, 2, 1), 60000)
device = CudaDevice(1)
kernel = device.load(artefact)
kernel.launch((5, 6, 7), (64, 2, 1), arguments, 77, ())
data = encode(device, TensorMapSpec("bf16", (1, 8, 64), 128), 4096, (3, 4, 160), (1280, 320))
print(len(data), int.from_bytes(data[:8], "little"), set(data[8:]), flush=True)
known = (kernel.resources.registers, ordinal_of((3 << 40) + 8), device.limits.shared_bytes, device.compute_units)
print(*known, flush=True)
log = device.log_memory(4096)
print(log.address % 8, log.nbytes, device.is_capturing(77), device.is_capturing(78), flush=True)
log.finish(77)
packed = packer(fields).pack(77, bytes(range(128)), 0)
shared = SharedArguments(1, [(offsets(fields), packed, [(2, 0)], [])] * 2)
run = launches([kernel, kernel], [((5, 6, 7), (64, 2, 1)), ((8, 1, 1), (64, 2, 1))], shared)
for _ in range(LAUNCHES_WITHOUT_GRAPH):
    run([1 << 33], 79)
for address in (1 << 33, 1 << 34, 1 << 34):
    print("and now", flush=True)
    run([address], 79)
del run
for act in (
    lambda: device.load(Artefact("add", "sm_90a", b"bad", "", (), (1, 1, 1))),
    lambda: kernel.launch((999, 1, 1), (1, 1, 1), arguments, 0, ()),
    lambda: encode(device, TensorMapSpec("f32", (1, 8)), 4096, (3, 8), (32,)),
):
    try:
        act()
    except (CompileError, DeviceError) as error:
        print(type(error).__name__, error)
"""


def digest(data: Iterable[int]) -> str:
    """Of an argument's bytes, as the stub prints them."""
    total = 0
    for byte in data:
        total = (total * 31 + byte) % 2**32
    return f"{total:08x}"


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("way", [pytest.param("bindings", marks=needs_bindings), "ctypes"])
def test_the_driver_gets_what_was_asked_for(tmp_path, way):
    source = Path(__file__).with_name("stub_cuda.c")
    library = tmp_path / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = PROGRAM if way == "bindings" else WITHOUT_BINDINGS + PROGRAM
    command = ["stdbuf", "-o0", sys.executable, "-u", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    sizes = [f"22 grid {grid} block 64 2 1 shared 60000" for grid in ("5 6 7", "8 1 1")]
    values = (77).to_bytes(4, "little"), range(128), (1 << 33).to_bytes(8, "little")
    arguments = " ".join(map(digest, values))
    assert done.stdout.splitlines() == [
        "log bytes 16384",
        "image some PTX",
        "function add of 11",
        "attribute 8 of 22 is 60000",
        f"launch {sizes[0]} stream 77 context 4097: {arguments}",
        *(f"map of type 9 at {at}: 160/64/1 4/8/1 3/1/1 320 1280 modes 0 3 2 0" for at in (4096, 8192)),
        "128 4096 {7}",
        "96 3 232448 132",
        "host memory 4096 flags 3 context 4097",
        "0 4096 False True",
        "wait 77 context 4097",
        *[f"launch {size} stream 79 context 4097: {arguments}" for size in sizes] * LAUNCHES_WITHOUT_GRAPH,
        f"after 0 in 33: node {sizes[0]} n 77",
        f"after 44 in 33: node {sizes[1]} n 77",
        *["and now", f"44 of 55: set {sizes[0]} n 77", f"45 of 55: set {sizes[1]} n 77", "graph 55 on 79"] * 2,
        *["and now", "graph 55 on 79"],
        "destroy 55",
        "destroy 33",
        "CompileError add (sm_90a): CUDA_ERROR_STUB: text of the stub",
        "line 1; fatal",
        "DeviceError add: cuLaunchKernel: CUDA_ERROR_STUB: text of the stub",
        "DeviceError cuTensorMapEncodeTiled: CUDA_ERROR_STUB: text of the stub (sizes (3, 8), strides (32,) bytes, "
        "box (1, 8), swizzle 0)",
    ], done.stderr


def test_a_missing_driver_is_named():
    program = (
        WITHOUT_BINDINGS
        + """
from fly.runtime import cuda, cuda_driver
from fly.errors import DeviceError
cuda_driver._LIBRARY = "libnothing.so.1"
try:
    cuda.CudaDevice(0)
except DeviceError as error:
    print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "the NVIDIA driver cannot be loaded: libnothing.so.1" in done.stdout, done.stderr
