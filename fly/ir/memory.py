"""Pointers, loads and stores. Offsets are in bytes; 32-bit ones are cheap, 64-bit ones reach everything."""

from __future__ import annotations

import functools
from typing import Any

from fly.errors import DTypeError, ShapeError, StaticValueError
from fly.ir.context import context, current, emit
from fly.ir.dtypes import DType, i1, i8, i32, i64
from fly.ir.mlir import ir
from fly.ir.value import Traced, Value

SPACES = {"global": 1, "shared": 3}


@functools.cache
def pointer_type(space: str) -> ir.Type:
    """The MLIR type of a pointer into `"global"` or `"shared"` memory."""
    return ir.Type.parse(f"!llvm.ptr<{SPACES[space]}>", context())


@functools.cache
def i64_attribute(value: int) -> ir.Attribute:
    """An i64 integer attribute."""
    with context():
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


@functools.cache
def string_attribute(value: str) -> ir.Attribute:
    """A string attribute."""
    return ir.StringAttr.get(value, context())


class Pointer(Traced):
    """A byte address in global or shared memory."""

    __slots__ = ("space",)

    def __init__(self, value: ir.Value, space: str):
        self.ir = value
        self.space = space

    def with_ir(self, value: ir.Value) -> Pointer:
        return Pointer(value, self.space)

    def __repr__(self) -> str:
        return f"<{self.space} pointer>"

    def offset(self, byte_offset: Any) -> Pointer:
        """The address `byte_offset` bytes on: a number or a traced i32 (signed) or i64.

        Raises:
            DTypeError: the offset is no scalar integer.
        """
        if isinstance(byte_offset, int):
            if byte_offset == 0:
                return self
            byte_offset = (i32 if -(2**31) <= byte_offset < 2**31 else i64)(byte_offset)
        if not isinstance(byte_offset, Value) or not byte_offset.dtype.is_int or byte_offset.length is not None:
            raise DTypeError(f"pointer offset {byte_offset!r} is no scalar integer")
        if byte_offset.dtype.bits < 32:
            byte_offset = byte_offset.to(i32)  # the address computation would take an i1 for 0 or -1
        op = emit("llvm.getelementptr", [self.ir, byte_offset.ir], [self.ir.type], _gep_attributes())
        return Pointer(op.results[0], self.space)

    def where(self, condition: Value, other: Pointer) -> Pointer:
        """This address where `condition`, a scalar i1, holds, else the `other` one.

        Raises:
            DTypeError: another condition, or no pointer into the same memory.
        """
        if not isinstance(condition, Value) or condition.dtype is not i1 or condition.length is not None:
            raise DTypeError(f"a pointer's condition is {condition!r}; expected a scalar i1")
        if not isinstance(other, Pointer) or other.space != self.space:
            raise DTypeError(f"{self!r} or {other!r}; expected another {self.space} pointer")
        return Pointer(emit("arith.select", [condition.ir, self.ir, other.ir], [self.ir.type]).results[0], self.space)


@functools.cache
def _gep_attributes() -> dict[str, ir.Attribute]:
    with context():
        return {
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([-(2**31)]),
            "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(8)),
        }


@functools.cache
def _access_attributes(align: int, constant: bool = False) -> dict[str, ir.Attribute]:
    attributes = {"alignment": i64_attribute(align), "ordering": i64_attribute(0)}
    if constant:
        attributes["invariant"] = ir.UnitAttr.get(context())
    return attributes


def _check(pointer: Pointer, align: int) -> None:
    if not isinstance(pointer, Pointer):
        raise DTypeError(f"{pointer!r} is no pointer")
    if align <= 0 or align & (align - 1):
        raise ShapeError(f"alignment {align} is no power of two")


def _result_type(dtype: DType, length: int | None) -> ir.Type:
    if length is not None and length <= 0:
        raise ShapeError(f"cannot load {length} elements; expected a positive count")
    return dtype.mlir if length is None else dtype.vector(length)


def load(
    pointer: Pointer, dtype: DType, length: int | None = None, *, align: int | None = None, constant: bool = False
) -> Value:
    """Load a scalar, or a vector of `length` elements; `align` in bytes, by default one element's size.

    `constant`: nothing changes the memory while the kernel runs. The compiler may move such a load past copies and
    stores, and makes it a scalar one on AMD where all lanes have one address.
    """
    align = align or dtype.bytes
    _check(pointer, align)
    if dtype is i1:  # one byte each in memory, whereas a vector of i1 is packed
        return load(pointer, i8, length, align=align, constant=constant).to(i1)
    result, attributes = _result_type(dtype, length), _access_attributes(align, constant)
    return Value(emit("llvm.load", [pointer.ir], [result], attributes).results[0], dtype, length)


def store(value: Value, pointer: Pointer, *, align: int | None = None) -> None:
    """Store a scalar or a vector; `align` in bytes, by default one element's size."""
    if not isinstance(value, Value):
        raise DTypeError(f"can only store traced values, not {value!r}; make one with fly.f32(...)")
    align = align or value.dtype.bytes
    _check(pointer, align)
    if value.dtype is i1:
        value = value.to(i8)
    emit("llvm.store", [value.ir, pointer.ir], [], _access_attributes(align))


def bounded_operands(base: Pointer, offset: Any, bound: Any) -> list[ir.Value]:
    """Operands of an access to `base + offset` below a bound.

    Raises:
        DTypeError: no pointer to global memory, or an offset or bound that is no scalar i32.
    """
    if base.space != "global":
        raise DTypeError(f"bounded accesses are to global memory, not through {base!r}")
    offset, bound = (i32(x) if isinstance(x, int) else x for x in (offset, bound))
    for name, x in (("offset", offset), ("bound", bound)):
        if not isinstance(x, Value) or x.dtype is not i32 or x.length is not None:
            raise DTypeError(f"{name} of a bounded access must be a scalar i32, not {x!r}")
    return [base.ir, offset.ir, bound.ir]


def load_bounded(
    base: Pointer,
    offset: Any,
    bound: Any,
    dtype: DType,
    length: int | None = None,
    *,
    align: int | None = None,
) -> Value:
    """Load at `base + offset`, or all zeros where `offset >= bound` (unsigned bytes).

    An access lies wholly below or wholly at or above the bound. `base` and `bound` are the same for all threads
    of a wave. On AMD this is a buffer load whose descriptor does the check.
    """
    align = align or dtype.bytes
    _check(base, align)
    operands = bounded_operands(base, offset, bound)
    if dtype is i1:
        return load_bounded(base, offset, bound, i8, length, align=align).to(i1)
    attributes = {"align": i64_attribute(align)}
    return Value(
        emit("fly.load_bounded", operands, [_result_type(dtype, length)], attributes).results[0],
        dtype,
        length,
    )


def store_bounded(value: Value, base: Pointer, offset: Any, bound: Any, *, align: int | None = None) -> None:
    """Store at `base + offset` where `offset < bound` (unsigned bytes); see `load_bounded`."""
    if not isinstance(value, Value):
        raise DTypeError(f"can only store traced values, not {value!r}; make one with fly.f32(...)")
    align = align or value.dtype.bytes
    _check(base, align)
    if value.dtype is i1:
        value = value.to(i8)
    emit("fly.store_bounded", [value.ir, *bounded_operands(base, offset, bound)], [], {"align": i64_attribute(align)})


def alloc_shared(name: str, size: int, align: int = 16) -> Pointer:
    """A buffer of `size` bytes in the block's shared memory; buffers whose uses do not overlap share space."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise StaticValueError(f"shared buffer {name!r} has size {size!r}; expected a static number of bytes")
    if size <= 0:
        raise ShapeError(f"shared buffer {name!r} has size {size}; expected a positive number of bytes")
    if align <= 0 or align & (align - 1):
        raise ShapeError(f"shared buffer {name!r} has alignment {align}; expected a power of two")
    taken = current().memo.setdefault("shared names", set())
    if name in taken:
        raise ShapeError(f"a shared buffer named {name!r} exists already; names are unique in a kernel")
    taken.add(name)
    attributes = {
        "name": string_attribute(name),
        "bytes": i64_attribute(size),
        "align": i64_attribute(align),
    }
    op = emit("fly.alloc_shared", [], [pointer_type("shared")], attributes)
    return Pointer(op.results[0], "shared")
