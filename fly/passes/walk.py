"""Small helpers that passes share: finding operations, and building others before them."""

from __future__ import annotations

from mlir import ir


def operations(block: ir.Block) -> list[ir.Operation]:
    """All operations under a block, outer before inner, in program order, as they are now: each may be erased in
    turn, and operations that are added are not among them."""
    found: list[ir.Operation] = []

    def add(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    for op in block.operations:
        op.operation.walk(add, ir.WalkOrder.PRE_ORDER)
    return found


def kernel_function(module: ir.Module) -> ir.Operation:
    """The function that the module is about."""
    for op in module.body.operations:
        if op.operation.name in ("func.func", "llvm.func") and "fly.block" in op.operation.attributes:
            return op.operation
    raise ValueError("the module has no kernel function")


def integer(op: ir.Operation, name: str) -> int:
    """The value of an integer attribute."""
    value: int = ir.IntegerAttr(op.attributes[name]).value
    return value


def string(op: ir.Operation, name: str) -> str:
    """The value of a string attribute."""
    value: str = ir.StringAttr(op.attributes[name]).value
    return value


def build(
    before: ir.Operation,
    name: str,
    operands: list[ir.Value],
    results: list[ir.Type],
    attributes: dict[str, ir.Attribute] | None = None,
    regions: int = 0,
) -> ir.Operation:
    """One operation before another, at its location."""
    return ir.Operation.create(
        name,
        results=results,
        operands=operands,
        attributes=attributes,
        regions=regions,
        loc=before.location,
        ip=ir.InsertionPoint(before),
    )
