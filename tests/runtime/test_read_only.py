"""Arrays that must not be written: a kernel that writes them is refused by the argument's name, reading is fine."""

import dataclasses

import numpy as np
import pytest
import torch

import fly
from fly.backends.target import target
from fly.errors import ArgumentError
from fly.lang.signature import Parameter, TensorSpec
from fly.passes.written import written_arguments
from fly.runtime.launch import launch

from .fakes import CudaArray, Kernel, tensors

F32 = TensorSpec("f32", 1, 4, True)


@fly.kernel
def scale(x: fly.Tensor, out: fly.Tensor):
    """out = 2 x"""
    i = fly.thread_id.x
    out.store(x.load(i) * 2.0, i)


@fly.kernel
def through_control_flow(x: fly.Tensor, y: fly.Tensor, z: fly.Tensor, n: fly.i32):
    """Addresses go through a loop and a branch; y is written there, the others are read."""
    for i, total in (loop := fly.range(n, carry=x.load(0))):
        with fly.when(i > 3):
            y.store(total, i)
        loop.next(total + z.load(i))


@fly.kernel
def rows(x: fly.Tensor, out: fly.Tensor):
    """Bounded accesses."""
    i = fly.thread_id.x
    value = x.rows(4).window(0, 1).load_inside(0, i, 1)
    out.rows(4).window(0, 1).store(value, 0, i)


def names_of_written(module, fields):
    return tuple(fields[i].name for i in written_arguments(module))


def read_only(array):
    array.flags.writeable = False
    return array


def test_a_kernel_does_not_write_a_read_only_array():
    x, out = read_only(np.arange(64, dtype=np.float32)), np.zeros(64, np.float32)
    for _ in range(2):
        scale[1, 64](x, out)
    assert (out == 2 * x).all()
    read_only(out)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"argument 'out' is a read-only array, and the kernel writes it"):
            scale[1, 64](-x, out)
    assert (out == 2 * x).all()


def test_a_view_of_a_read_only_buffer_is_refused_too():
    out = np.frombuffer(bytes(256), np.float32)
    with pytest.raises(ArgumentError, match="'out' is a read-only array"):
        scale[1, 64](np.ones(64, np.float32), out)


def test_an_exported_kernel_knows_what_it_writes(tmp_path):
    path = tmp_path / "scale.fly"
    fly.compile(scale, F32, F32, block=64, target="gfx950").save(path)
    exported = fly.load(path)
    assert exported.artefact.written == ("out",)
    x = read_only(np.ones(64, np.float32))
    exported[1, 64](x, np.zeros(64, np.float32))
    with pytest.raises(ArgumentError, match="'out' is a read-only array"):
        exported[1, 64](np.ones(64, np.float32), x)


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
@pytest.mark.parametrize(
    ("kernel", "specs", "wanted"),
    [
        (scale, (F32, F32), ("out",)),
        (through_control_flow, (F32, F32, F32, fly.ScalarSpec("i32")), ("y",)),
        (rows, (TensorSpec("f32", 2, 16, True),) * 2, ("out",)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_kernel_may_write(arch, kernel, specs, wanted):
    module = kernel.trace(specs, {}, target(arch), (64, 1, 1))
    assert names_of_written(module, kernel.signature.flatten(specs)) == wanted


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90a"])
def test_what_flash_attention_may_write(arch):
    from kernels.commands import flash_attn

    kernel, specs, statics, block = flash_attn(arch, {"split": True, "packed": True})
    module = kernel.trace(specs, statics, target(arch), (block, 1, 1))
    assert names_of_written(module, kernel.signature.flatten(specs)) == ("out", "lse")


def test_a_gpu_array_that_is_read_only_is_not_mistaken_for_one_that_is_not(devices, compiler):
    """Launches on a GPU are found by a key, which says which arrays may be written."""

    def compiled(*arguments):
        return dataclasses.replace(compiler(*arguments), written=("out",))

    kernel = Kernel(*tensors("x", "out"))
    array, constant = CudaArray(), CudaArray(data=(256, True))
    launch(kernel, 1, 64, (array, array), {}, None, compiled)
    launch(kernel, 1, 64, (constant, array), {}, None, compiled)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="argument 'out' is a read-only array"):
            launch(kernel, 1, 64, (array, constant), {}, None, compiled)
    assert len(devices["cuda", 0].launches) == 2


def test_where_nobody_looked_what_a_kernel_writes_no_read_only_array_is_taken(device, compiler):
    with pytest.raises(ArgumentError, match="'x' is a read-only array"):
        launch(Kernel(Parameter("x", "tensor")), 1, 64, (read_only(np.zeros(4)),), {}, None, compiler)
    launch(Kernel(Parameter("x", "tensor")), 1, 64, (torch.zeros(4),), {}, None, compiler)
    assert len(device.launches) == 1
