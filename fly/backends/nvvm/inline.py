"""Inline PTX from a trace: what the intrinsics of this backend are made of."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mlir import ir

from fly.ir.context import context, current, emit
from fly.ir.dtypes import i32
from fly.ir.memory import Pointer
from fly.ir.value import Traced, Value


@functools.cache
def _dialect() -> ir.Attribute:
    with context():
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)


def ptx(text: str, constraints: str, operands: Sequence[Traced], results: Sequence[ir.Type] = ()) -> list[ir.Value]:
    """Emit PTX with side effects; `constraints` as in LLVM's inline assembly, a memory clobber is added.

    Threads of a warp that execute it together stay together: code generation marks it convergent.
    """
    current()
    if not results:
        types = []
    elif len(results) == 1:
        types = list(results)
    else:
        types = [ir.Type.parse(f"!llvm.struct<({', '.join(str(t) for t in results)})>", context())]
    attributes = {
        "asm_string": ir.StringAttr.get(text, context()),
        "constraints": ir.StringAttr.get(",".join(filter(None, [constraints, "~{memory}"])), context()),
        "has_side_effects": ir.UnitAttr.get(context()),
        "asm_dialect": _dialect(),
    }
    op = emit("llvm.inline_asm", [o.ir for o in operands], types, attributes)
    if len(results) < 2:
        return list(op.results)
    return [
        emit(
            "llvm.extractvalue", [op.results[0]], [type_], {"position": ir.DenseI64ArrayAttr.get([i], context())}
        ).results[0]
        for i, type_ in enumerate(results)
    ]


def shared_address(pointer: Pointer) -> Value:
    """A shared-memory pointer as the 32-bit address that instructions take."""
    return Value(emit("llvm.ptrtoint", [pointer.ir], [i32.mlir]).results[0], i32)
