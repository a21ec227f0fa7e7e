"""Inline PTX from a trace: what the intrinsics of this backend are made of."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mlir import ir

from fly.errors import DTypeError, TargetError
from fly.ir.context import context, current, emit
from fly.ir.dtypes import i32
from fly.ir.memory import Pointer
from fly.ir.value import Traced, Value


@functools.cache
def _att_syntax() -> ir.Attribute:
    with context():
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)


def ptx(text: str, constraints: str, operands: Sequence[Traced], results: Sequence[ir.Type] = ()) -> list[ir.Value]:
    """Emit PTX with side effects; `constraints` as in LLVM's inline assembly, a memory clobber is added.

    Operands are `$0`, `$1` and so on, results first. Threads of a warp that execute it together stay together: code
    generation marks it convergent.

    Raises:
        TargetError: the kernel is traced for a target without Hopper's instructions.
    """
    target = current().target
    if not target.hopper:
        raise TargetError(f"{target.arch} has no TMA, mbarriers, WGMMA or named barriers of fly's; sm_90a has")
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
        "asm_dialect": _att_syntax(),
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
    """A shared-memory pointer as the 32-bit address that instructions take.

    Raises:
        DTypeError: no pointer to shared memory.
    """
    if not isinstance(pointer, Pointer) or pointer.space != "shared":
        raise DTypeError(f"{pointer!r} is no pointer to shared memory")
    return Value(emit("llvm.ptrtoint", [pointer.ir], [i32.mlir]).results[0], i32)


def as_i32(value: Any, what: str) -> Value:
    """A number or a traced i32 as an operand; `what` names it in errors.

    Raises:
        DTypeError: anything else.
    """
    if isinstance(value, int):
        return i32(value)
    if not isinstance(value, Value) or value.dtype is not i32 or value.length is not None:
        raise DTypeError(f"{what} is {value!r}; expected an integer or a traced i32")
    return value
