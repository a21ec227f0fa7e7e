"""Kernels written in AMDGPU assembly, as linked code objects."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.emulator.toolchain import link

TRIPLE = "amdgcn-amd-amdhsa"


@functools.cache
def assemble(body: str, arch: str, lds: int = 0, registers: int = 64) -> bytes:
    """A code object whose kernel `k` is `body`: kernel arguments' address in s[0:1], workgroup in s2.

    llvmlite has no assembler for AMDGPU, the clang inside the ziglang wheel has one.
    """
    text = f"""
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
  .amdhsa_kernarg_size 64
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr {registers}
  .amdhsa_next_free_sgpr 64
  .amdhsa_accum_offset {registers}
.end_amdhsa_kernel
"""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "a.s"), Path(directory, "a.o")
        source.write_text(text)
        command = [sys.executable, "-m", "ziglang", "clang", "-target", TRIPLE, f"-mcpu={arch}", "-c", str(source)]
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return link(target.read_bytes())
