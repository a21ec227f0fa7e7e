"""`narrow-splats`: what a vector has with one number, two elements at a time."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.passes.walk import build, kernel_function, operations

WIDTH = 2  # what packed instructions take
ATTRIBUTE = "fly.narrow_splats"
_ELEMENTWISE = (
    *(f"arith.{kind}{of}" for kind in ("add", "sub", "mul") for of in "fi"),
    *(f"arith.{kind}" for kind in ("maxnumf", "minnumf", "maximumf", "minimumf", "cmpf")),
    *(f"arith.{kind}" for kind in ("maxsi", "minsi", "maxui", "minui", "andi", "ori", "xori", "cmpi", "select")),
    "math.fma",
)


@dataclass(frozen=True)
class NarrowSplats:
    """Cut elementwise operations on vectors that have a scalar for every element into operations on pairs.

    Of a splat that a loop does not change, AMD's code generator keeps an element in a register each, and scalar
    registers are a hundred. Only in kernels that ask for it (`fly.narrow_splats`). Postcondition: the same values.
    """

    name: str = "narrow-splats"

    def run(self, module: ir.Module) -> None:
        function = kernel_function(module)
        if ATTRIBUTE not in function.attributes:
            return
        for op in operations(function.regions[0].blocks[0]):
            if op.name in _ELEMENTWISE and any(_scalar(operand) is not None for operand in op.operands):
                _cut(op)


def _scalar(operand: ir.Value) -> ir.Value | None:
    """What a wide vector has in every element, None where it is no splat of a computed number."""
    owner = operand.owner
    if isinstance(owner, ir.Block) or owner.name != "vector.broadcast" or _length(operand.type) <= WIDTH:
        return None
    source = owner.operands[0]
    return None if isinstance(source.type, ir.VectorType) else source


def _length(type_: ir.Type) -> int:
    length: int = ir.VectorType(type_).shape[0]
    return length


def _cut(op: ir.Operation) -> None:
    whole = ir.VectorType(op.results[0].type)
    if whole.shape[0] % WIDTH:
        return
    part = ir.VectorType.get([WIDTH], whole.element_type)
    splats: dict[ir.Value, ir.Value] = {}

    def piece(operand: ir.Value, start: int) -> ir.Value:
        if not isinstance(operand.type, ir.VectorType):
            return operand  # the condition of a selection
        type_ = ir.VectorType.get([WIDTH], ir.VectorType(operand.type).element_type)
        if (scalar := _scalar(operand)) is not None:
            if operand not in splats:
                splats[operand] = build(op, "vector.broadcast", [scalar], [type_]).results[0]
            return splats[operand]
        return build(op, "vector.extract_strided_slice", [operand], [type_], _place(start, WIDTH)).results[0]

    attributes = {name: op.attributes[name] for name in op.attributes}
    joined: ir.Value | None = None
    for start in range(0, whole.shape[0], WIDTH):
        operands = [piece(operand, start) for operand in op.operands]
        made = build(op, op.name, operands, [part], attributes).results[0]
        if joined is None:
            zero = ir.DenseElementsAttr.get_splat(whole, _zero(whole.element_type))
            joined = build(op, "arith.constant", [], [whole], {"value": zero}).results[0]
        joined = build(op, "vector.insert_strided_slice", [made, joined], [whole], _place(start)).results[0]
    assert joined is not None
    op.results[0].replace_all_uses_with(joined)
    op.erase()


def _zero(type_: ir.Type) -> ir.Attribute:
    return ir.FloatAttr.get(type_, 0.0) if not isinstance(type_, ir.IntegerType) else ir.IntegerAttr.get(type_, 0)


def _place(start: int, size: int | None = None) -> dict[str, ir.Attribute]:
    """Attributes of a slice that begins at an element."""

    def numbers(value: int) -> ir.Attribute:
        return ir.ArrayAttr.get([ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)])

    sizes = {} if size is None else {"sizes": numbers(size)}
    return {"offsets": numbers(start), "strides": numbers(1), **sizes}
