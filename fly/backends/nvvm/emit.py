"""Emitting the `hopper` dialect's operations from a trace, and what they take as operands."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fly.backends.nvvm import dialect
from fly.errors import DTypeError, TargetError
from fly.ir.context import context, current, emit
from fly.ir.dtypes import i32
from fly.ir.memory import Pointer
from fly.ir.mlir import ir
from fly.ir.value import Traced, Value

Attribute = int | str | tuple[int, ...]


def require_hopper() -> None:
    """Refuse to go on where the instructions are not there.

    Raises:
        TargetError: the kernel is traced for a target without Hopper's instructions.
    """
    target = current().target
    if not target.hopper:
        raise TargetError(f"{target.arch} has no TMA, mbarriers, WGMMA or named barriers of fly's; sm_90a has")


def operation(
    name: str,
    operands: Sequence[Traced] = (),
    results: Sequence[ir.Type] = (),
    attributes: Mapping[str, Attribute] | None = None,
    *,
    operand_groups: Sequence[int] = (),
    result_groups: Sequence[int] = (),
) -> list[ir.Value]:
    """Emit `hopper.<name>`; the results.

    Integers become i64 attributes, tuples arrays of i64. `operand_groups`, `result_groups`: how many are in each
    group, of operations that declare more than one without a fixed length.

    Raises:
        TargetError: the kernel is traced for a target without Hopper's instructions.
    """
    require_hopper()
    dialect.load()
    given = {key: _attribute(value) for key, value in (attributes or {}).items()}
    for key, groups in (("operandSegmentSizes", operand_groups), ("resultSegmentSizes", result_groups)):
        if groups:
            given[key] = _groups(tuple(groups))
    return list(emit(f"{dialect.NAME}.{name}", [o.ir for o in operands], list(results), given).results)


@functools.lru_cache(maxsize=1024)
def _attribute(value: Attribute) -> ir.Attribute:
    if isinstance(value, str):
        return ir.StringAttr.get(value, context())
    if isinstance(value, tuple):
        return ir.DenseI64ArrayAttr.get(list(value), context())
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context()), value)


@functools.cache
def _groups(sizes: tuple[int, ...]) -> ir.Attribute:
    return ir.DenseI32ArrayAttr.get(list(sizes), context())


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
        number: Value = i32(value)
        return number
    if not isinstance(value, Value) or value.dtype is not i32 or value.length is not None:
        raise DTypeError(f"{what} is {value!r}; expected an integer or a traced i32")
    return value
