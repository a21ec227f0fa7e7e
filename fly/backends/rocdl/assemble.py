"""AMDGPU assembly text to a loadable code object: for hand-edited kernels."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from fly.backends.rocdl.codegen import link, zig
from fly.errors import CompileError, MissingPackageError

_TARGET = re.compile(r'\.amdgcn_target\s+"amdgcn-amd-amdhsa-[^"]*-(gfx\w+)')


def kernel_source(body: str, lds: int = 0, registers: int = 64, axes: int = 1, scratch: int = 0) -> str:
    """Assembly of a kernel `k`: kernel arguments' address in s[0:1], workgroup from s2 on, work-item in v0.

    Args:
        body: its instructions. lds: bytes. registers: vector registers a lane. axes: of the grid, for the workgroup.
        scratch: bytes a lane.
    """
    places = "\n".join(f"  .amdhsa_system_sgpr_workgroup_id_{axis} {int(i < axes)}" for i, axis in enumerate("xyz"))
    return f"""
.text
.globl k
.p2align 8
.type k,@function
k:
{body}
.Lend:
.size k, .Lend-k
.rodata
.p2align 6
.amdhsa_kernel k
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_kernarg_size 64
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
{places}
  .amdhsa_next_free_vgpr {registers}
  .amdhsa_next_free_sgpr 64
  .amdhsa_accum_offset {registers}
.end_amdhsa_kernel
"""


def assemble(text: str, arch: str | None = None) -> bytes:
    """Assemble and link; llvmlite has no assembler for AMDGPU, the clang of the ziglang wheel has one.

    Args:
        text: assembly with its `.amdhsa_kernel` directives, such as `--stage isa` shows.
        arch: the architecture; by default what an `.amdgcn_target` directive names.

    Raises:
        CompileError: no architecture, or the assembler or linker rejected the text.
        MissingPackageError: ziglang is not installed.
    """
    named = _TARGET.search(text)
    arch = arch or (named and named[1])
    if arch is None:
        raise CompileError("the assembly has no .amdgcn_target directive: name the architecture")
    tools = zig()
    if not tools:
        raise MissingPackageError("assembling for AMD GPUs", "ziglang")
    with tempfile.TemporaryDirectory(prefix="fly-assemble-") as directory:
        source, target = Path(directory, "kernel.s"), Path(directory, "kernel.o")
        source.write_text(text)
        command = [*tools, "clang", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"]
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CompileError(f"assembling for {arch} failed: {done.stderr.strip()}")
        return link(target.read_bytes())
