"""Which of a kernel's arguments it may write through, by following their addresses in the traced module."""

from __future__ import annotations

from collections.abc import Iterator

from mlir import ir

from fly.passes.walk import kernel_function

_ANY = -1
# what only reads through an address: the operation, and which operand the address is
_READS = {
    "llvm.load": _ANY,
    "fly.load_bounded": _ANY,
    "fly.load_acquire": _ANY,
    "fly.copy_async": 1,
    "fly.copy_direct": 1,
    "arith.cmpi": _ANY,
    "llvm.icmp": _ANY,
}
# results are the address, or are computed from it
_CASTS = ("llvm.addrspacecast", "llvm.bitcast", "llvm.ptrtoint", "llvm.inttoptr")
_DERIVES = ("llvm.getelementptr", "fly.reread", *_CASTS, "arith.")
_CLOSES = ("scf.yield", "scf.condition")  # what they are given comes out of the operation around them


def written_arguments(module: ir.Module) -> tuple[int, ...]:
    """Positions of the arguments that are addresses and that the traced kernel may write through.

    An address that goes where it cannot be followed (an intrinsic, assembly, memory) counts as written through.
    """
    block = kernel_function(module).regions[0].blocks[0]
    return tuple(
        i
        for i, argument in enumerate(block.arguments)
        if str(argument.type).startswith("!llvm.ptr") and _is_written(argument)
    )


def _is_written(address: ir.Value) -> bool:
    seen, left = {address}, [address]
    while left:
        for use in left.pop().uses:
            owner = use.owner.operation
            if _READS.get(owner.name) in (_ANY, use.operand_number):
                continue
            if not owner.name.startswith(("scf.", *_DERIVES)):
                return True
            for value in _reached(owner, use.operand_number):
                if value not in seen:
                    seen.add(value)
                    left.append(value)
    return False


def _reached(owner: ir.Operation, operand: int) -> Iterator[ir.Value]:
    """Values that may be, or be computed from, this operand of an operation."""
    type_ = owner.operands[operand].type
    if not owner.name.startswith("scf."):
        yield from owner.results
        return
    flow = owner.parent if owner.name in _CLOSES else owner
    flow = flow.operation
    inner = [argument for region in flow.regions for block in region.blocks for argument in block.arguments]
    yield from (value for value in (*flow.results, *inner) if value.type == type_)
