"""Upstream MLIR pass pipelines as passes of ours."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.passmanager import PassManager


@dataclass(frozen=True)
class Upstream:
    """Run an upstream pipeline, given in MLIR's textual form, on the module."""

    name: str
    pipeline: str

    def run(self, module: ir.Module) -> None:
        passes = PassManager.parse(f"builtin.module({self.pipeline})")
        passes.enable_verifier(False)  # after each of them, half of their time: what comes out is verified
        passes.run(module.operation)
