import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from fly.backends.artefact import Artefact
from fly.errors import ArgumentError, ArgumentTypeError, ArtefactError, LaunchError
from fly.lang.signature import Parameter, ScalarSpec, Signature, TensorSpec
from fly.runtime.exported import Launchable, export_metadata, load

from .fakes import unpack

SIGNATURE = Signature(
    (
        Parameter("x", "tensor"),
        Parameter("mask", "tensor", optional=True),
        Parameter("s", "scalar", dtype="f32"),
    ),
    {"causal": True},
)


X = TensorSpec("f32", 2, 8, True)


def exported(x=X, target="gfx950", **changes):
    specs = (x, None, ScalarSpec("f32"))
    metadata = export_metadata(SIGNATURE, specs)
    fields = SIGNATURE.flatten(specs)
    artefact = Artefact("scale", target, b"code", "", fields, (64, 1, 1), metadata=metadata)
    return dataclasses.replace(artefact, **changes)


def test_an_exported_kernel_launches(tmp_path, device):
    exported().save(tmp_path / "scale.fly")
    scale = load(tmp_path / "scale.fly")
    x = torch.zeros(3, 4)
    for _ in range(2):
        scale[5, 64](x, None, 0.5)
        scale[5, (64, 1)](x, s=0.5)
    assert len(device.loaded) == 1
    assert len(device.launches) == 4
    for done in device.launches:
        assert (done.grid, done.block) == ((5, 1, 1), (64, 1, 1))
        assert unpack(done.packed, "Piiqf") == (x.data_ptr(), 3, 4, 4, 0.5)


def test_a_kernel_that_assumes_less_takes_more(device):
    scale = Launchable(exported(TensorSpec("f32", 2, 4, False)))
    x = torch.zeros(3, 4)
    for view in (x, x.T, x[:, 1:]):
        scale[1, 64](view, None, 0.5)
        expected = (view.data_ptr(), *view.shape, *view.stride(), 0.5)
        assert unpack(device.launches[-1].packed, "Piiqqf") == expected


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(3, 4, dtype=torch.int32), "dtype='i32'.*; compiled for .*dtype='f32'"),
        (torch.zeros(4), "rank=1"),
        (torch.zeros(3, 5), "alignment=4.*; compiled for .*alignment=8"),
        (torch.zeros(4, 4).T, "unit_stride=False"),
    ],
)
def test_arguments_must_meet_what_the_kernel_assumes(device, x, text):
    with pytest.raises(ArgumentTypeError, match=f"scale: argument 'x' is .*{text}"):
        Launchable(exported())[1, 64](x, None, 0.5)
    assert not device.loaded


def test_other_bad_launches_are_named(device):
    scale, x = Launchable(exported()), torch.zeros(3, 4)
    with pytest.raises(ArgumentTypeError, match=r"argument 'mask' is TensorSpec.*; compiled for None"):
        scale[1, 64](x, x, 0.5)
    with pytest.raises(LaunchError, match=r"block is \(32, 1, 1\), compiled for \(64, 1, 1\)"):
        scale[1, 32](x, None, 0.5)
    with pytest.raises(LaunchError, match=r"scale\[5\]; accepted: scale\[grid, block\]"):
        scale[5]
    with pytest.raises(ArgumentError, match="unexpected argument 'causal'; static parameters: none"):
        scale[1, 64](x, None, 0.5, causal=True)
    with pytest.raises(LaunchError, match="compiled for sm_90a, the tensors are on gfx950"):
        Launchable(exported(target="sm_90a"))[1, 64](x, None, 0.5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"metadata": {}}, "does not describe its arguments"),
        ({"metadata": {"arguments": "junk"}}, "malformed"),
        ({"metadata": {"arguments": '[[{"name": "x", "kind": "array"}, null]]'}}, "malformed .*'array'"),
        ({"fields": ()}, "does not match"),
    ],
)
def test_artefacts_that_cannot_be_launched_alone_are_refused(changes, text):
    with pytest.raises(ArtefactError, match=f"scale: .*{text}"):
        Launchable(exported(**changes))


PROGRAM = """
import sys
import numpy as np
from fly.runtime import launch, load

class Device:
    target, build, needs_allocations = "gfx950", "gfx950", False
    def load(self, artefact):
        return self
    def launch(self, grid, block, arguments, stream, allocations):
        print("launched", grid, len(arguments.view))

launch.device_for = lambda key: Device()
load(sys.argv[1])[2, 64](np.zeros((3, 4), np.float32), None, 0.5)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"mlir", "llvmlite", "torch", "cuda"}))
"""


def test_no_compiler_is_loaded(tmp_path):
    exported().save(tmp_path / "scale.fly")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "scale.fly")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["launched (2, 1, 1) 28", "[]"], done.stderr


def test_the_runtime_imports_no_driver_compiler_or_tensor_library():
    program = "import sys, fly.runtime, fly.runtime.cuda, fly.runtime.hip, fly.runtime.cache; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fly" in loaded
    assert not loaded & {"mlir", "llvmlite", "torch", "numpy", "cuda"}


def test_numpy_arrays_launch_too(device):
    Launchable(exported())[1, 64](np.zeros((3, 4), np.float32), None, 0.5)
    assert len(device.launches) == 1
