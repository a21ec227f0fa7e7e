"""Kernels written in AMDGPU assembly, as linked code objects."""

from __future__ import annotations

import functools

from fly.backends.rocdl import assemble as assembler


@functools.cache
def assemble(body: str, arch: str, lds: int = 0, registers: int = 64, axes: int = 1, scratch: int = 0) -> bytes:
    """A code object whose kernel `k` is `body`; see `kernel_source` for what it finds in its registers."""
    return assembler.assemble(assembler.kernel_source(body, lds, registers, axes, scratch), arch)
