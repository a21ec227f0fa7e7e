"""Atomic additions to global memory, and the order that counters give to everything else.

All are for the whole device. A `relaxed` one orders nothing but itself. What a thread did before a `release`, and
what others did that it knows of, is there for whoever acquires the counter afterwards.

| function | NVIDIA (PTX ISA) | AMD (LLVM's AMDGPU memory model, "agent" scope) |
|---|---|---|
| `atomic_add` | `red.global.add`, from sm_90 on to 16 bytes | `global_atomic_add_f32`, `_pk_add_*`, `buffer_*` |
| `fetch_add`, `fetch_wrap` | `atom.global.add`, `atom.global.inc` | `global_atomic_add`, `global_atomic_inc` |
| `load_acquire` | `ld.acquire.gpu` | `global_load` past the caches of other dies, a wait, `buffer_inv` |
"""

from __future__ import annotations

from typing import Any

from fly.errors import DTypeError, ShapeError, StaticValueError
from fly.ir.context import emit
from fly.ir.dtypes import bf16, f16, f32, i32
from fly.ir.memory import Pointer, bounded_operands, i64_attribute, string_attribute
from fly.ir.value import Value

ORDERS = ("relaxed", "release", "acquire", "acq_rel")


def _require_global(pointer: Any, what: str) -> None:
    if not isinstance(pointer, Pointer) or pointer.space != "global":
        raise DTypeError(f"{what} of {pointer!r}; expected a pointer to global memory")


def _addable(value: Any) -> int:
    """Bytes that are added at once.

    Raises:
        DTypeError: a value that atomics do not add.
    """
    if isinstance(value, Value):
        if value.dtype is f32 or (value.dtype is i32 and value.length is None):
            return 4
        if value.dtype in (f16, bf16) and value.length is not None and value.length % 2 == 0:
            return 4
    raise DTypeError(
        f"atomic_add of {value!r}; expected f32 (also vectors), an even number of f16 or bf16, or a scalar i32"
    )


def _alignment(value: Value, align: int | None) -> int:
    unit = _addable(value)
    align = align or unit
    if align & (align - 1) or align < unit:
        raise ShapeError(f"alignment {align} of an atomic_add; expected a power of two, at least {unit}")
    return align


def atomic_add(value: Value, pointer: Pointer, *, order: str = "relaxed", align: int | None = None) -> None:
    """Add to what is at each lane's address in global memory.

    An f32, a vector of f32, a vector of an even number of f16 or bf16, or an i32. Elements of 32 bits and pairs of 16
    are added one by one, each rounded to the nearest even: a vector is not one access, and the sum of several depends
    on their order. Denormal f32 may count as zero. `align`: bytes that divide the address, by default 4, also for
    pairs; with 8 or 16, vectors go out in pieces of as many bytes where the target has such an instruction (sm_90).
    `order`: "relaxed", or of an i32 "release".

    Raises:
        DTypeError: another value, or no pointer to global memory.
        ShapeError: an alignment that is no power of two from 4 on.
        StaticValueError: another order.
    """
    align = _alignment(value, align)
    _require_global(pointer, "atomic_add")
    accepted = ("relaxed", "release") if value.dtype is i32 else ("relaxed",)
    if order not in accepted:
        raise StaticValueError(f"order {order!r} of an atomic_add of {value!r}; expected {' or '.join(accepted)}")
    attributes = {"align": i64_attribute(align), "order": string_attribute(order)}
    emit("fly.atomic_add", [value.ir, pointer.ir], [], attributes)


def atomic_add_bounded(value: Value, base: Pointer, offset: Any, bound: Any, *, align: int | None = None) -> None:
    """`atomic_add` at `base + offset` where `offset < bound` (unsigned bytes); see `load_bounded`.

    Raises:
        DTypeError, ShapeError: as `atomic_add` and `store_bounded`.
    """
    attributes = {"align": i64_attribute(_alignment(value, align))}
    emit("fly.atomic_add_bounded", [value.ir, *bounded_operands(base, offset, bound)], [], attributes)


def fetch_add(value: Any, pointer: Pointer, *, order: str = "relaxed") -> Value:
    """Add to an i32 in global memory; what it was before.

    Raises:
        DTypeError: no i32, or no pointer to global memory.
        StaticValueError: an order that is none of `ORDERS`.
    """
    return _fetch("add", value, pointer, order)


def fetch_wrap(last: Any, pointer: Pointer, *, order: str = "acq_rel") -> Value:
    """Count an i32 in global memory up from 0 to `last` and then to 0 again; what it was before.

    Raises:
        DTypeError, StaticValueError: as `fetch_add`.
    """
    return _fetch("inc", last, pointer, order)


def _fetch(kind: str, operand: Any, pointer: Pointer, order: str) -> Value:
    _require_global(pointer, "atomic")
    if isinstance(operand, int) and not isinstance(operand, bool):
        operand = i32(operand)
    if not isinstance(operand, Value) or operand.dtype is not i32 or operand.length is not None:
        raise DTypeError(f"operand of an atomic is {operand!r}; expected an integer or a traced i32")
    if order not in ORDERS:
        raise StaticValueError(f"order {order!r} of an atomic; expected one of {', '.join(ORDERS)}")
    attributes = {"order": string_attribute(order), "operation": string_attribute(kind)}
    op = emit("fly.atomic_fetch", [pointer.ir, operand.ir], [i32.mlir], attributes)
    return Value(op.results[0], i32)


def load_acquire(pointer: Pointer) -> Value:
    """An i32 in global memory, and with it what was done before the release that made it: to be seen by loads after.

    Raises:
        DTypeError: no pointer to global memory.
    """
    _require_global(pointer, "load_acquire")
    return Value(emit("fly.load_acquire", [pointer.ir], [i32.mlir]).results[0], i32)
