"""From a lowered module to a linked AMDGPU code object, its ISA text and its resources."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fly import config
from fly.backends.artefact import Resources
from fly.backends.llvm import Emitted, Machine, emit
from fly.backends.rocdl.code_object import metadata_of, sections_of, symbols_of
from fly.backends.target import Target
from fly.errors import CompileError, DeviceError, MissingPackageError

TRIPLE = "amdgcn-amd-amdhsa"
# of one SIMD, whatever they use
_MAX_WAVES = 8


def generate(text: str, arch: str, options: tuple[str, ...], assembly: bool = True) -> tuple[Emitted, bytes]:
    """Compile LLVM IR for `arch`; returns what LLVM emitted, with the `assembly` or without, and the linked code
    object."""
    emitted = emit(text, Machine(TRIPLE, arch, options=options), want_object=True, want_assembly=assembly)
    return emitted, link(emitted.object)


def zig() -> tuple[str, ...]:
    """The command that runs the tools of the ziglang wheel, empty without it.

    `python -m ziglang` does no more than to become that program, and starting Python takes four times as long as to
    link a kernel.
    """
    found = importlib.util.find_spec("ziglang")
    if found is None:
        return ()
    program = Path(found.origin or "").with_name("zig")
    return (str(program),) if os.access(program, os.X_OK) else (sys.executable, "-m", "ziglang")


@functools.lru_cache(maxsize=8)
def _find_lld(forced: str) -> tuple[str, ...]:
    """The command that runs ld.lld: FLY_LLD, ROCm's, the PATH's, or the ziglang wheel's."""
    if forced:
        if not shutil.which(forced):
            raise DeviceError(f"FLY_LLD={forced!r} is no program; expected the path of ld.lld")
        return (forced,)
    rocm = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm", "bin", "ld.lld")
    if os.access(rocm, os.X_OK):
        return (rocm,)
    names = sorted(
        (
            name.name
            for directory in os.environ.get("PATH", "").split(os.pathsep)
            if os.path.isdir(directory)
            for name in Path(directory).glob("ld.lld*")
        ),
        key=lambda n: [int(x) for x in re.findall(r"\d+", n)],
        reverse=True,
    )
    for name in names:
        if found := shutil.which(name):
            return (found,)
    if command := zig():
        return (*command, "ld.lld")
    raise MissingPackageError(
        "no ld.lld found: linking for AMD GPUs", "ziglang", ", or set FLY_LLD to the path of an ld.lld"
    )


def link(object_code: bytes) -> bytes:
    """Link one relocatable object to a loadable code object.

    Raises:
        MissingPackageError: no LLD is installed. DeviceError: FLY_LLD is no program.
        CompileError: the linker failed.
    """
    command = _find_lld(config.LLD.get())
    with tempfile.TemporaryDirectory(prefix="fly-link-") as directory:
        source, output = Path(directory, "kernel.o"), Path(directory, "kernel.hsaco")
        source.write_bytes(object_code)
        done = subprocess.run(
            [*command, "-shared", "--no-undefined", "-o", str(output), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise CompileError(f"linking with {' '.join(command)} failed: {done.stderr.strip()}")
        return output.read_bytes()


def counts(object_code: bytes) -> dict[str, int]:
    """What LLVM notes of a kernel in its object: numbers by the names that its metadata and its symbols have.

    Raises:
        CompileError: an object without the metadata of one kernel.
    """
    sections = sections_of(object_code)
    kernels = metadata_of(object_code, sections).get("amdhsa.kernels", ())
    if len(kernels) != 1:
        raise CompileError(f"LLVM's object describes {len(kernels)} kernels; expected one")
    (kernel,), symbols = kernels, symbols_of(object_code, sections)
    found = {key.removeprefix("."): value for key, value in kernel.items() if isinstance(value, int)}
    return found | {key: symbols[f"{kernel['.name']}.{key}"][0] for key in ("num_vgpr", "num_agpr")}


def resources(counts: Mapping[str, int], target: Target) -> Resources:
    """Registers, spills and memory of a kernel's `counts`, and what they let reside on a SIMD."""
    shared = counts["group_segment_fixed_size"]
    return Resources(
        registers=counts["num_vgpr"],
        accum_registers=counts["num_agpr"],
        scalar_registers=counts["sgpr_count"],
        spills=counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
        scratch_bytes=counts["private_segment_fixed_size"],
        shared_bytes=shared,
        occupancy=_occupancy(target, counts["vgpr_count"], shared, counts["max_flat_workgroup_size"]),
    )


def _occupancy(target: Target, registers: int, shared: int, threads: int) -> int:
    """Waves that a SIMD holds, at most: registers are handed out in eights, and 4 SIMDs share the memory."""
    by_registers = target.registers // max(8, -(-registers // 8) * 8)
    waves = -(-threads // target.wave_size)
    by_memory = -(-(target.shared_bytes // shared) * waves // 4) if shared else _MAX_WAVES
    return min(_MAX_WAVES, by_registers, by_memory)
