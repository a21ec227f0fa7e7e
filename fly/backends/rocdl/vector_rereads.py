"""`vector-rereads`: numbers made by vector instructions that are made again (`fly.remade`, `fly.early`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlir import ir

from fly.passes.walk import build, kernel_function, operations, string

_CLOSES = ("scf.yield", "scf.condition")
# the scalar unit divides by constants alone, as a product
_DIVISIONS = tuple(f"arith.{kind}" for kind in ("divui", "divsi", "remui", "remsi", "floordivsi", "ceildivsi"))
# what scalar instructions make of what is in scalar registers
_FOLLOWED = ("arith.", "vector.", "math.", "llvm.getelementptr", "llvm.ptrtoint", "llvm.inttoptr", "llvm.bitcast")
_SCALAR = ("arith.constant", "fly.any_lane", "fly.reread", "fly.alloc_shared")


@dataclass(frozen=True)
class VectorRereads:
    """Read numbers that vector instructions make from the wave's first lane where they are made again.

    A number that is made again is the same in every lane of a wave, and in a scalar register from there on. Where
    LLVM knows that it is the same but has vector instructions for it (divisions, floats, plain loads, a thread's
    number), it has no copy from there and ends the process. Where scalar instructions make the number, nothing is
    read: that would be an instruction, and keep a register.

    Postcondition: the operand of every `fly.reread` that is left is a parameter or a float, or scalar instructions
    make it.
    """

    name: str = "vector-rereads"

    def run(self, module: ir.Module) -> None:
        for op in operations(kernel_function(module).regions[0].blocks[0]):
            if op.name == "fly.reread" and not _has_floats(op.operands[0]) and _in_vector_registers(op.operands[0]):
                op.results[0].replace_all_uses_with(_read_first_lane(op, op.operands[0]))
                op.erase()


def _read_first_lane(before: ir.Operation, value: ir.Value) -> ir.Value:
    """What LLVM takes for different in every lane, or it would not read it, as the wave's first lane has it."""
    vector = {
        "asm_string": ir.StringAttr.get(""),
        "constraints": ir.StringAttr.get("=v,0"),
        "has_side_effects": ir.UnitAttr.get(),
    }
    anew = build(before, "llvm.inline_asm", [value], [value.type], vector).results[0]
    call = {
        "intrin": ir.StringAttr.get("llvm.amdgcn.readfirstlane"),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0]),
        "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
    }
    return build(before, "llvm.call_intrinsic", [anew], [value.type], call).results[0]


def _has_floats(value: ir.Value) -> bool:
    type_ = value.type
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    return isinstance(element, ir.FloatType)


def _in_vector_registers(value: ir.Value) -> bool:
    """Whether a vector instruction has a part in making a number."""
    seen, left = {value}, [value]
    while left:
        parts = _made_of(left.pop())
        if parts is None:
            return True
        new = [part for part in parts if part not in seen]
        seen.update(new)
        left += new
    return False


def _made_of(value: ir.Value) -> list[ir.Value] | None:
    """What scalar instructions make a value of; None if vector instructions make it."""
    if _has_floats(value):
        return None
    if isinstance(value.owner, ir.Block):
        return list(_entering(ir.BlockArgument(value)))
    op = value.owner
    if op.name.startswith("scf."):
        return list(_leaving(op, ir.OpResult(value).result_number))
    if _is_scalar(op):
        return []
    divided = op.name in _DIVISIONS and not _is_constant(op.operands[1])
    return list(op.operands) if op.name.startswith(_FOLLOWED) and not divided else None


def _is_scalar(op: ir.Operation) -> bool:
    """Whether a result is in a scalar register whatever the operands are."""
    if op.name == "fly.id":
        return not string(op, "name").startswith(("thread_id", "lane_id"))
    if op.name == "fly.shuffle":
        return _is_constant(op.operands[1], 0)
    return op.name in _SCALAR or (op.name == "llvm.load" and "invariant" in op.attributes)


def _is_constant(value: ir.Value, number: int | None = None) -> bool:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return False
    return number is None or ir.IntegerAttr(owner.attributes["value"]).value == number


def _yields(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region.blocks:
            last = block.operations[len(block.operations) - 1].operation
            if last.name in _CLOSES:
                yield last


def _leaving(op: ir.Operation, index: int) -> Iterator[ir.Value]:
    """What a result of a loop or branch may be."""
    first = {"scf.for": 3, "scf.while": 0}.get(op.name)
    if first is not None:
        yield op.operands[first + index]
    for last in _yields(op):
        yield last.operands[index + (last.name == "scf.condition")]


def _entering(argument: ir.BlockArgument) -> Iterator[ir.Value]:
    """What a block's argument may be; a kernel's parameters are in scalar registers."""
    op = argument.owner.owner.operation
    if op.name == "scf.for":
        if argument.arg_number == 0:
            yield from list(op.operands)[:3]
            return
        yield op.operands[2 + argument.arg_number]
        yield from (last.operands[argument.arg_number - 1] for last in _yields(op))
    elif op.name == "scf.while":
        if len(op.operands) > argument.arg_number:
            yield op.operands[argument.arg_number]
        for last in _yields(op):
            at = argument.arg_number + (last.name == "scf.condition")
            if at < len(last.operands):
                yield last.operands[at]
