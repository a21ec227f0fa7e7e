"""`narrow-splats`: what a vector has with one number, an element or a pair of elements at a time."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.passes.walk import build, kernel_function, operations

ATTRIBUTE = "fly.narrow_splats"
# what has instructions for two elements
_PACKED = ("arith.addf", "arith.subf", "arith.mulf", "math.fma")
_SINGLE = (
    *(f"arith.{kind}" for kind in ("maxnumf", "minnumf", "maximumf", "minimumf", "cmpf", "cmpi", "select")),
    *(
        f"arith.{kind}"
        for kind in ("addi", "subi", "muli", "maxsi", "minsi", "maxui", "minui", "andi", "ori", "xori")
    ),
)


@dataclass(frozen=True)
class NarrowSplats:
    """Cut elementwise operations on vectors that have a computed number for every element.

    Of such a splat that a loop does not change, AMD's code generator keeps every element in a register, and of scalar
    registers there are a hundred. Only in kernels that ask for it. Postcondition: the same values.
    """

    name: str = "narrow-splats"

    def run(self, module: ir.Module) -> None:
        function = kernel_function(module)
        if ATTRIBUTE not in function.attributes:
            return
        for op in operations(function.regions[0].blocks[0]):
            scalars = [scalar for operand in op.operands if (scalar := _scalar(operand)) is not None]
            if scalars and op.name in (*_PACKED, *_SINGLE):
                _cut(
                    op, 1 if op.name in _SINGLE or (op.name != "math.fma" and any(map(_is_parameter, scalars))) else 2
                )


def _scalar(operand: ir.Value) -> ir.Value | None:
    """What a vector has in every element; None where it is no splat of a computed number."""
    owner = operand.owner
    if isinstance(owner, ir.Block) or owner.name != "vector.broadcast":
        return None
    source = owner.operands[0]
    return None if isinstance(source.type, ir.VectorType) else source


def _is_parameter(number: ir.Value) -> bool:
    """Whether it is in a scalar register for sure: LLVM puts pairs of sums and products with it together again."""
    return isinstance(number.owner, ir.Block) or number.owner.name == "fly.reread"


def _cut(op: ir.Operation, width: int) -> None:
    whole = ir.VectorType(op.results[0].type)
    length: int = whole.shape[0]
    if length <= width or length % width:
        return
    attributes = {name: op.attributes[name] for name in op.attributes}
    pieces = []
    for start in range(0, length, width):
        operands = [_piece(op, operand, start, width) for operand in op.operands]
        result = ir.VectorType.get([width], whole.element_type) if width > 1 else whole.element_type
        pieces.append(build(op, op.name, operands, [result], attributes).results[0])
    if width > 1:
        pieces = [_element(op, piece, i) for piece in pieces for i in range(width)]
    op.results[0].replace_all_uses_with(build(op, "vector.from_elements", pieces, [whole]).results[0])
    op.erase()


def _piece(before: ir.Operation, operand: ir.Value, start: int, width: int) -> ir.Value:
    """`width` elements of an operand; the condition of a selection may be no vector."""
    if not isinstance(operand.type, ir.VectorType):
        return operand
    if (scalar := _scalar(operand)) is not None:
        elements = [scalar] * width
    else:
        elements = [_element(before, operand, start + i) for i in range(width)]
    if width == 1:
        return elements[0]
    part = ir.VectorType.get([width], ir.VectorType(operand.type).element_type)
    return build(before, "vector.from_elements", elements, [part]).results[0]


def _element(before: ir.Operation, vector: ir.Value, index: int) -> ir.Value:
    type_ = ir.VectorType(vector.type).element_type
    place = {"static_position": ir.DenseI64ArrayAttr.get([index])}
    return build(before, "vector.extract", [vector], [type_], place).results[0]
