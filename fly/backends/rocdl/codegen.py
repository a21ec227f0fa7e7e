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
from pathlib import Path

from fly import config
from fly.backends.artefact import Resources
from fly.backends.llvm import Emitted, Machine, emit
from fly.errors import CompileError, DeviceError

TRIPLE = "amdgcn-amd-amdhsa"


def generate(text: str, arch: str, options: tuple[str, ...]) -> tuple[Emitted, bytes]:
    """Compile LLVM IR for `arch`; returns what LLVM emitted and the linked code object."""
    emitted = emit(text, Machine(TRIPLE, arch, options=options), want_object=True)
    return emitted, link(emitted.object)


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
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "ld.lld")
    raise DeviceError("no ld.lld found: install the ziglang package, or set FLY_LLD to the path of one")


def link(object_code: bytes) -> bytes:
    """Link one relocatable object to a loadable code object.

    Raises:
        DeviceError: no LLD is installed.
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


def resources(assembly: str) -> Resources:
    """Registers, spills and memory from the metadata that LLVM writes into the assembly."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise CompileError(f"LLVM's assembly has no .{key} metadata")
        return int(found.group(1))

    accum = number("agpr_count")
    total = re.search(r"^; TotalNumVgprs: (\d+)", assembly, re.M)
    occupancy = re.search(r"^; Occupancy: (\d+)", assembly, re.M)
    return Resources(
        registers=int(total.group(1)) - accum if total else number("vgpr_count"),
        accum_registers=accum,
        scalar_registers=number("sgpr_count"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        scratch_bytes=number("private_segment_fixed_size"),
        shared_bytes=number("group_segment_fixed_size"),
        occupancy=int(occupancy.group(1)) if occupancy else None,
    )
