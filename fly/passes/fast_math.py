"""`fast-math`: permits the floating-point rewrites that the numerics of this project allow."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.passes.walk import kernel_function, operations

_FLAGGED = (
    "arith.addf",
    "arith.subf",
    "arith.mulf",
    "arith.negf",
    "math.fma",
    "arith.maxnumf",
    "arith.minnumf",
)


@dataclass(frozen=True)
class FastMath:
    """Set `contract` and `nsz` on float arithmetic.

    A multiply and an add may become one FMA, and the sign of zero is not kept. Nothing else is allowed:
    infinities mark masked scores and NaN inputs must show, sums keep their order so that results do not depend
    on the compiler, and divisions stay exact (`fly.rcp` is the fast one). Postcondition: same operations.
    """

    name: str = "fast-math"

    def run(self, module: ir.Module) -> None:
        flags = ir.Attribute.parse("#arith.fastmath<nsz,contract>")
        for op in operations(kernel_function(module).regions[0].blocks[0]):
            if op.name in _FLAGGED:
                op.attributes["fastmath"] = flags
