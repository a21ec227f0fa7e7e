"""The passes from a traced module to the llvm dialect for NVIDIA, in order."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.backends.lowering import denormals, passthrough, to_llvm
from fly.backends.nvvm.lower import lower
from fly.backends.target import Target
from fly.passes.fast_math import FastMath
from fly.passes.insert_waits import InsertWaits
from fly.passes.pipeline import Pass
from fly.passes.plan_shared import PlanSharedMemory
from fly.passes.upstream import Upstream
from fly.passes.walk import kernel_function


@dataclass(frozen=True)
class KernelAttributes:
    """Mark the function as a kernel and pass on what the author said about occupancy.

    Precondition: an `llvm.func`. Postcondition: no `fly.*` attribute is left on it.
    """

    name: str = "nvvm-kernel-attributes"

    def run(self, module: ir.Module) -> None:
        function = kernel_function(module)
        attributes = function.attributes
        i32 = ir.IntegerType.get_signless(32)
        attributes["nvvm.kernel"] = ir.UnitAttr.get()
        attributes["nvvm.reqntid"] = ir.DenseI32ArrayAttr.get(list(ir.DenseI32ArrayAttr(attributes["fly.block"])))
        attributes["passthrough"] = passthrough(denormals(function))
        for ours, theirs in (("fly.max_registers", "nvvm.maxnreg"), ("fly.min_blocks", "nvvm.minctasm")):
            if ours in attributes:
                attributes[theirs] = ir.IntegerAttr.get(i32, ir.IntegerAttr(attributes[ours]).value)
        if "fly.cluster" in attributes:
            blocks = ir.IntegerAttr(attributes["fly.cluster"]).value
            attributes["nvvm.cluster_dim"] = ir.DenseI32ArrayAttr.get([blocks, 1, 1])
        if "arg_attrs" in attributes:
            attributes["arg_attrs"] = ir.ArrayAttr.get([_in_place(a) for a in ir.ArrayAttr(attributes["arg_attrs"])])
        for name in [name for name in attributes if name.startswith("fly.")]:
            del attributes[name]


def _in_place(attributes: ir.Attribute) -> ir.Attribute:
    """Arguments passed by value are read where the launch put them: a tensor map has no other place."""
    named = {a.name: a.attr for a in ir.DictAttr(attributes)}
    if "llvm.byval" in named:
        named["nvvm.grid_constant"] = ir.UnitAttr.get()
    return ir.DictAttr.get(named)


def passes(target: Target) -> list[Pass]:
    """The pipeline for a target."""
    return [
        PlanSharedMemory(target.shared_bytes, target.arch, dynamic=True),
        InsertWaits(groups=True),
        FastMath(),
        lower(target),
        Upstream("to-llvm", to_llvm()),
        KernelAttributes(),
    ]
