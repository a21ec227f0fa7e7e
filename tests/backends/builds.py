"""Small kernels, and compiling them for a target without a device or a cache."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

import fly
from fly.backends.artefact import Artefact
from fly.backends.compile import compile_module
from fly.backends.target import target
from fly.lang.signature import ScalarSpec, TensorSpec

needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
VECTOR = TensorSpec("f32", 1, 16, True)


@fly.kernel
def scaled(a: fly.Tensor, out: fly.Tensor, factor: fly.f32, *, waves=None, registers=None, blocks=None, options=()):
    """out = a * factor, four elements a thread."""
    fly.occupancy(waves_per_eu=waves, max_registers=registers, min_blocks=blocks)
    if options:
        fly.compiler_options(*options)
    layout = fly.Layout((256, 4), (4, 1))
    thread = fly.thread_id.x
    source, result = (x.tile(1024, fly.block_id.x).share(layout, thread) for x in (a, out))
    result.store(source.load() * factor)


@fly.kernel
def reversed_block(a: fly.Tensor, out: fly.Tensor, factor: fly.f32, *, elements=256, flush=False):
    """Every block's 256 elements of `a` backwards, through a shared buffer of at least as many `elements`."""
    if flush:
        fly.flush_denormals()
    buffer = fly.SharedMemory("line", fly.f32, elements)
    thread = fly.thread_id.x
    first = fly.block_id.x * 256
    buffer.store(a.load(first + thread), thread)
    fly.barrier()
    out.store(buffer.load(255 - thread) * factor, first + thread)


@fly.kernel
def several_buffers(a: fly.Tensor, out: fly.Tensor, factor: fly.f32, *, elements):
    """The sum of a block's element and its mirror image, once for each shared buffer."""
    thread = fly.thread_id.x
    buffers = [fly.SharedMemory(f"line{i}", fly.f32, count, align=4) for i, count in enumerate(elements)]
    total = a.load(thread) * factor
    for buffer in buffers:
        buffer.store(total, thread)
    fly.barrier()
    for buffer in buffers:
        total = total + buffer.load(255 - thread)
    out.store(total, thread)


def build(kernel: fly.Kernel, arch: str, *, specs=None, block=256, observe=None, **statics) -> Artefact:
    """The artefact of a kernel with the signature of the ones above (or other `specs`)."""
    specs = specs or (VECTOR, VECTOR, ScalarSpec("f32"))
    description, block = target(arch), (block, 1, 1)
    module = kernel.trace(specs, statics, description, block)
    return compile_module(module, kernel.name, description, kernel.signature.flatten(specs), block, observe=observe)


@functools.cache
def cached(kernel: fly.Kernel, arch: str) -> Artefact:
    """`build` with nothing special, once in a process."""
    return build(kernel, arch)


def run_ptxas(ptx: str, arch: str, directory: Path) -> str:
    """ptxas's report on `ptx`; the test fails if it is rejected."""
    source = directory / "kernel.ptx"
    source.write_text(ptx)
    command = ["ptxas", f"-arch={arch}", "-v", "-o", str(directory / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
