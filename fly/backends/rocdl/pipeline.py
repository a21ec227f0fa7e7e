"""The passes from a traced module to the llvm dialect for AMD, in order."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.backends.lowering import denormals, passthrough, to_llvm
from fly.backends.rocdl.lower import lower
from fly.backends.rocdl.vector_rereads import VectorRereads
from fly.backends.target import Target
from fly.passes.fast_math import FastMath
from fly.passes.insert_waits import InsertWaits
from fly.passes.narrow_splats import NarrowSplats
from fly.passes.pipeline import Pass
from fly.passes.plan_shared import PlanSharedMemory
from fly.passes.upstream import Upstream
from fly.passes.walk import kernel_function


@dataclass(frozen=True)
class KernelAttributes:
    """Mark the function as a kernel and pass on what the author said about occupancy.

    Precondition: an `llvm.func`. Postcondition: no `fly.*` attribute is left on it.
    """

    name: str = "rocdl-kernel-attributes"

    def run(self, module: ir.Module) -> None:
        function = kernel_function(module)
        attributes = function.attributes
        i32 = ir.IntegerType.get_signless(32)
        block = list(ir.DenseI32ArrayAttr(attributes["fly.block"]))
        threads = block[0] * block[1] * block[2]
        attributes["rocdl.kernel"] = ir.UnitAttr.get()
        attributes["rocdl.reqd_work_group_size"] = ir.DenseI32ArrayAttr.get(block)
        attributes["rocdl.flat_work_group_size"] = ir.StringAttr.get(f"{threads},{threads}")
        if "fly.waves_per_eu" in attributes:
            waves = ir.IntegerAttr(attributes["fly.waves_per_eu"]).value
            attributes["rocdl.waves_per_eu"] = ir.IntegerAttr.get(i32, waves)
        # without IEEE mode a maximum need not quiet signalling NaNs first
        flags = {"amdgpu-ieee": "false", "uniform-work-group-size": "true"}
        if "fly.float_atomics" in attributes:
            # memory is the device's own: the instructions do, and denormals may count as zero
            flags["amdgpu-unsafe-fp-atomics"] = "true"
        attributes["passthrough"] = passthrough({**flags, **denormals(function)})
        for name in [name for name in attributes if name.startswith("fly.")]:
            del attributes[name]


def passes(target: Target) -> list[Pass]:
    """The pipeline for a target."""
    return [
        PlanSharedMemory(target.shared_bytes, target.arch, dynamic=False),
        InsertWaits(groups=False),
        FastMath(),
        NarrowSplats(),
        VectorRereads(),
        lower(target),
        Upstream("to-llvm", to_llvm()),
        KernelAttributes(),
    ]
