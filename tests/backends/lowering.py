"""Lowering operations for a target, without the rest of the pipeline."""

from __future__ import annotations

from mlir import ir

from fly.backends.compile import passes
from fly.backends.nvvm.lower import lower as lower_to_nvvm
from fly.backends.rocdl.lower import lower as lower_to_rocdl
from fly.backends.target import target
from fly.ir.context import LOCK, context
from tests.passes.modules import apply, parse


def lowered(body: str, arch: str) -> str:
    """The kernel `body` (in the notation of `tests.passes.modules`) after its backend's lowering pass."""
    description = target(arch)
    lower = {"rocdl": lower_to_rocdl, "nvvm": lower_to_nvvm}[description.backend]
    return apply(lower(description), parse(body))


def instructions(module: ir.Module, arch: str = "sm_90a") -> str:
    """A traced module (which changes) after its backend's own passes, as the last of them leaves it."""
    with LOCK, context(), ir.Location.unknown():
        for pass_ in passes(target(arch)):
            if pass_.name == "to-llvm":
                break
            pass_.run(module)
        module.operation.verify()
        return str(module)
