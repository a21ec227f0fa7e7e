"""Short ways to trace a function as a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlir import ir

import fly
from fly.backends.target import target
from fly.lang.signature import ScalarSpec, TensorSpec

ARCHS = ("gfx942", "gfx950", "sm_80", "sm_86", "sm_89", "sm_90a")


def matrix(dtype: str = "f32", rank: int = 1, alignment: int = 16, unit_stride: bool = True) -> TensorSpec:
    """The spec of a tensor argument."""
    return TensorSpec(dtype, rank, alignment, unit_stride)


def trace(
    kernel: fly.Kernel | Callable,
    *specs: TensorSpec | ScalarSpec | str | None,
    arch: str = "gfx950",
    block: tuple[int, int, int] | int | None = None,
    **statics: Any,
) -> ir.Module:
    """The traced module of a kernel (or a function that can be one); "i32" and so on are scalar specs.

    `block` is one wave by default. The result has been verified.
    """
    chosen = target(arch)
    block = chosen.wave_size if block is None else block
    shape = (block, 1, 1) if isinstance(block, int) else block
    kernel = kernel if isinstance(kernel, fly.Kernel) else fly.kernel(kernel)
    specs = tuple(ScalarSpec(spec) if isinstance(spec, str) else spec for spec in specs)
    return kernel.trace(specs, statics, chosen, shape)


def traced(function: Callable[[], Any], arch: str = "gfx950", block: int | None = None) -> Any:
    """What `function()` returns when it is called inside a kernel: for trace-time values and their types."""
    result = []

    def body():
        result.append(function())

    trace(body, arch=arch, block=block)
    return result[0]
