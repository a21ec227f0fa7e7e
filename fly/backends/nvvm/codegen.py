"""From a lowered module to PTX, and to ptxas's report where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from fly.backends.artefact import Resources
from fly.backends.llvm import Emitted, Machine, emit
from fly.errors import CompileError, DeviceError

TRIPLE = "nvptx64-nvidia-cuda"
# PTX ISA version: the oldest driver that loads the kernels is one of CUDA 12.3
_PTX = "+ptx83"


def generate(text: str, arch: str, options: tuple[str, ...]) -> Emitted:
    """Compile LLVM IR to PTX for `arch`."""
    return emit(convergent(text), Machine(TRIPLE, arch, _PTX, options), want_object=False)


def convergent(text: str) -> str:
    """Mark inline assembly convergent, which MLIR's translation does not: warps meet in it (`.aligned`)."""
    return re.sub(r"^(.*\bcall .*\basm sideeffect .*\))((?: #\d+)?(?:, !.*)?)$", r"\1 convergent\2", text, flags=re.M)


def assemble(ptx: str, arch: str) -> bytes:
    """The cubin that ptxas makes of PTX, which drivers load without compiling.

    Raises:
        DeviceError: ptxas is not on the PATH.
        CompileError: ptxas rejected the PTX.
    """
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        raise DeviceError("a cubin is made by ptxas, which is not on the PATH: install the CUDA toolkit's")
    return _ptxas(ptxas, ptx, arch)[0]


def _ptxas(ptxas: str, ptx: str, arch: str) -> tuple[bytes, str]:
    """(the cubin, ptxas's report)."""
    with tempfile.TemporaryDirectory(prefix="fly-ptxas-") as directory:
        source, cubin = (Path(directory, f"kernel.{suffix}") for suffix in ("ptx", "cubin"))
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, f"-arch={arch}", "-v", "-o", str(cubin), str(source)], capture_output=True, text=True, check=False
        )
        report = done.stderr + done.stdout
        if done.returncode != 0:
            raise CompileError(f"ptxas rejected the kernel for {arch}: {report.strip()[-2000:]}")
        return cubin.read_bytes(), report


def resources(ptx: str, arch: str, shared_bytes: int) -> Resources:
    """Registers and spills as ptxas reports them; unknown (None) where ptxas is not installed.

    Raises:
        CompileError: ptxas rejected the PTX.
    """
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return Resources(shared_bytes=shared_bytes)
    _, report = _ptxas(ptxas, ptx, arch)

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        scratch_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=shared_bytes,
    )
