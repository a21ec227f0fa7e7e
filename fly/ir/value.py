"""`Value`: a traced scalar or vector, with Python's operators and explicit conversions.

Integer arithmetic wraps; `//` and `%` round towards minus infinity, as in Python. Comparisons are signed.
Widening (i32 to i64, bf16 to f32) is implicit when two values meet; narrowing, and going between integers and
floats, never is: use `x.to(fly.bf16)`.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard, cast

from fly.errors import DTypeError, ShapeError, StaticValueError
from fly.ir.context import context, emit
from fly.ir.dtypes import DType, dtype, f32, i1, i32
from fly.ir.mlir import ir

Number = int | float | bool


class Traced:
    """Base of everything that stands for one SSA value: what loops and branches can carry."""

    __slots__ = ("ir",)
    ir: ir.Value

    def with_ir(self, value: ir.Value) -> Traced:
        """The same kind of object around another SSA value of the same type."""
        raise NotImplementedError(type(self).__name__)

    def _static(self, what: str, alternative: str) -> StaticValueError:
        return StaticValueError(f"{what} of {self!r}, which is only known at run time; {alternative}")

    def __bool__(self) -> bool:
        raise self._static(
            "Python needs the truth value (if, while, and, or, not)",
            "use fly.when(c), fly.cond(c, f, g) or fly.select(c, a, b), & | ~ between conditions, "
            "fly.maximum for max, fly.minimum for min",
        )

    def __index__(self) -> int:
        raise self._static("Python needs the integer value", "use fly.range for loops, or a static parameter")

    def __int__(self) -> int:
        raise self._static("int()", "use .to(fly.i32), or a static parameter")

    def __float__(self) -> float:
        raise self._static("float()", "use .to(fly.f32), and fly.exp where Python has math.exp")


class Value(Traced):
    """A scalar (`length is None`) or a vector of `length` elements of `dtype`."""

    __slots__ = ("dtype", "length")

    def __init__(self, value: ir.Value, dtype: DType, length: int | None = None):
        self.ir = value
        self.dtype = dtype
        self.length = length

    def with_ir(self, value: ir.Value) -> Value:
        return Value(value, self.dtype, self.length)

    @property
    def type(self) -> ir.Type:
        """The MLIR type."""
        return self.dtype.mlir if self.length is None else self.dtype.vector(self.length)

    def __repr__(self) -> str:
        return f"<{self.dtype}>" if self.length is None else f"<{self.length} x {self.dtype}>"

    def __len__(self) -> int:
        if self.length is None:
            raise ShapeError(f"{self!r} is a scalar and has no len()")
        return self.length

    __hash__ = object.__hash__

    # conversions

    def to(self, target: DType, rounding: str = "nearest") -> Value:
        """Convert every element to `target`.

        Floats narrow with round-to-nearest-even; `rounding="nearest_any"` leaves the direction of exact ties to
        the target, which is cheaper where there is no instruction for the conversion (gfx942 and bf16).
        Float to integer truncates towards zero; anything but 0 is true as an i1. 8-bit floats become other floats on
        every target, exactly. To an 8-bit float go vectors of an even length, where the target has an instruction for
        it (sm_89 and later); what is too large becomes the largest.

        Raises:
            DTypeError: there is no such conversion.
        """
        from fly.ir.casts import cast

        return cast(self, dtype(target), rounding)

    def bitcast(self, target: DType) -> Value:
        """Reinterpret the bits as elements of `target`; the total size must be the same.

        Raises:
            ShapeError: the sizes do not divide.
        """
        total = self.dtype.bits * (self.length or 1)
        if total % target.bits:
            raise ShapeError(f"cannot bitcast {self!r} to {target}: {total} bits are not a multiple")
        count = total // target.bits
        if self.length is None and count == 1:
            op = emit("arith.bitcast", [self.ir], [target.mlir])
            return Value(op.results[0], target)
        source = self if self.length is not None else broadcast(self, 1)
        op = emit("vector.bitcast", [source.ir], [target.vector(count)])
        return Value(op.results[0], target, count)

    # elements

    def __getitem__(self, index: int | slice) -> Value:
        if self.length is None:
            raise ShapeError(f"{self!r} is a scalar and cannot be indexed")
        if isinstance(index, slice):
            picked = range(self.length)[index]
            if not picked:
                raise ShapeError(f"slice {index} of {self!r} is empty")
            return shuffle(self, self, list(picked))
        if isinstance(index, Traced):
            raise index._static("indexing a vector with the value", "vectors are indexed at compile time")
        if not isinstance(index, int):
            raise ShapeError(f"{self!r} is indexed with {index!r}; expected an integer or a slice")
        if not -self.length <= index < self.length:
            raise ShapeError(f"index {index} is out of range for {self!r}")
        position = ir.DenseI64ArrayAttr.get([index % self.length], context())
        op = emit("vector.extract", [self.ir], [self.dtype.mlir], {"static_position": position})
        return Value(op.results[0], self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise DTypeError(f"elements of {self!r} are not assigned; make another with fly.from_elements or fly.select")

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))

    # arithmetic

    def __add__(self, other: Any) -> Value:
        return _arith("add", self, other)

    def __sub__(self, other: Any) -> Value:
        return _arith("sub", self, other)

    def __mul__(self, other: Any) -> Value:
        return _arith("mul", self, other)

    def __radd__(self, other: Any) -> Value:
        return _arith("add", other, self)

    def __rsub__(self, other: Any) -> Value:
        return _arith("sub", other, self)

    def __rmul__(self, other: Any) -> Value:
        return _arith("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _divide(other, self)

    def __floordiv__(self, other: Any) -> Value:
        return _floor_divide(self, other)

    def __mod__(self, other: Any) -> Value:
        return _floor_modulo(self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _floor_divide(*unify(other, self))

    def __rmod__(self, other: Any) -> Value:
        return _floor_modulo(*unify(other, self))

    def __neg__(self) -> Value:
        if self.dtype.is_float:
            return Value(emit("arith.negf", [self.ir], [self.type]).results[0], self.dtype, self.length)
        return 0 - self

    def __pow__(self, other: Any) -> Value:
        return _power(self, other)

    def __rpow__(self, other: Any) -> Value:
        return _power(other, self)

    def __abs__(self) -> Value:
        from fly.ir.math import absolute

        return absolute(self)

    def __round__(self) -> Value:
        from fly.ir.math import round as to_integer

        return to_integer(self)

    def __and__(self, other: Any) -> Value:
        return _bitwise("arith.andi", self, other)

    def __or__(self, other: Any) -> Value:
        return _bitwise("arith.ori", self, other)

    def __xor__(self, other: Any) -> Value:
        return _bitwise("arith.xori", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Value:
        return self ^ (True if self.dtype is i1 else -1)

    def __lshift__(self, other: Any) -> Value:
        return _shift("arith.shli", self, other)

    def __rshift__(self, other: Any) -> Value:
        return _shift("arith.shrsi", self, other)

    def __rlshift__(self, other: Any) -> Value:
        return _shift("arith.shli", *unify(other, self))

    def __rrshift__(self, other: Any) -> Value:
        return _shift("arith.shrsi", *unify(other, self))

    # comparisons

    def __lt__(self, other: Any) -> Value:
        return compare("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return compare("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return compare("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return compare("ge", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]  # a traced comparison, no bool
        return compare("eq", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]  # a traced comparison, no bool
        return compare("ne", self, other)


def constant(number: Number, dtype: DType, length: int | None = None) -> Value:
    """A constant scalar, or a vector with every element equal.

    Raises:
        DTypeError: a fraction for an integer type, or an integer that does not fit.
    """
    if dtype.is_int:
        if isinstance(number, float):
            raise DTypeError(f"{number!r} is not an integer; expected a value of {dtype}")
        if not -(1 << (dtype.bits - 1)) <= int(number) < (1 << dtype.bits):
            raise DTypeError(f"{number} does not fit {dtype}")
    elif not dtype.is_float:
        raise DTypeError(f"{dtype} has no constants: it is a storage type")
    return Value(_constant(number, dtype, length), dtype, length)


def _constant(number: Number, dtype: DType, length: int | None) -> ir.Value:
    attribute = _constant_attribute(number, repr(number), dtype, length)
    type_ = dtype.mlir if length is None else dtype.vector(length)
    return emit("arith.constant", [], [type_], {"value": attribute}).results[0]


@functools.lru_cache(maxsize=4096)
def _constant_attribute(number: Number, _: str, dtype: DType, length: int | None) -> ir.Attribute:
    # how it is written is part of the key: -0.0 == 0.0 == 0 == False
    with context(), ir.Location.unknown():
        if dtype.is_int:
            wrapped = int(number) & ((1 << dtype.bits) - 1)
            signed = wrapped - (1 << dtype.bits) if wrapped >> (dtype.bits - 1) and dtype.bits > 1 else wrapped
            scalar = ir.IntegerAttr.get(dtype.mlir, signed)
        else:
            scalar = ir.FloatAttr.get(dtype.mlir, float(number))
        if length is None:
            return scalar
        return ir.DenseElementsAttr.get_splat(dtype.vector(length), scalar)


def convert(value: Any, target: DType) -> Value:
    """`target(value)`: a Python number becomes a constant, a traced value is converted."""
    if isinstance(value, Value):
        return value.to(target)
    if isinstance(value, Number):
        return constant(value, target)
    raise DTypeError(f"cannot make a {target} of {value!r}; expected a number or a traced value")


def as_value(value: Any, what: str = "operand") -> Value:
    """A traced value, or a Python bool/int/float as i1/i32/f32."""
    if isinstance(value, Value):
        return value
    if isinstance(value, bool):
        return constant(value, i1)
    if isinstance(value, int):
        return constant(value, i32)
    if isinstance(value, float):
        return constant(value, f32)
    raise DTypeError(f"{what} is {value!r}; expected a traced value or a number")


def broadcast(value: Any, length: int) -> Value:
    """A vector of `length` copies of a scalar (a traced value or a number).

    Raises:
        ShapeError: it is a vector already, or the length is not positive.
    """
    value = as_value(value, "what is broadcast")
    if value.length is not None:
        raise ShapeError(f"cannot broadcast {value!r}: it is a vector already")
    if not isinstance(length, int) or length <= 0:
        raise ShapeError(f"cannot broadcast to {length!r} elements; expected a static positive number")
    op = emit("vector.broadcast", [value.ir], [value.dtype.vector(length)])
    return Value(op.results[0], value.dtype, length)


def shuffle(a: Value, b: Value, indices: Sequence[int]) -> Value:
    """The elements of `a` followed by those of `b`, picked by static `indices`."""
    mask = ir.DenseI64ArrayAttr.get(list(indices), context())
    op = emit("vector.shuffle", [a.ir, b.ir], [a.dtype.vector(len(indices))], {"mask": mask})
    return Value(op.results[0], a.dtype, len(indices))


def from_elements(elements: Sequence[Value | Number]) -> Value:
    """A vector of scalars of one dtype; numbers take the dtype of the first traced one.

    Raises:
        DTypeError: an element is no traced scalar, or the dtypes differ.
        ShapeError: there are none.
    """
    if not elements:
        raise ShapeError("a vector needs at least one element")
    first: Any = next((element for element in elements if isinstance(element, Value)), elements[0])
    if isinstance(first, Value):
        elements = [constant(e, _literal_type(e, first.dtype)) if isinstance(e, Number) else e for e in elements]
    for element in elements:
        if not isinstance(element, Value):
            raise DTypeError(f"vector element {element!r} is no traced value; make one with fly.f32(...)")
        if element.dtype is not first.dtype or element.length is not None:
            raise DTypeError(f"vector elements must be scalars of one dtype; got {first!r} and {element!r}")
    values = cast("Sequence[Value]", elements)
    op = emit("vector.from_elements", [e.ir for e in values], [first.dtype.vector(len(elements))])
    return Value(op.results[0], first.dtype, len(elements))


def concat(parts: Sequence[Value]) -> Value:
    """Vectors of one dtype, end to end.

    Raises:
        DTypeError: a part is no traced value, or the dtypes differ.
        ShapeError: a part is a scalar, or there are none.
    """
    parts = list(parts)
    if not parts:
        raise ShapeError("nothing to join")
    for part in parts:
        if not isinstance(part, Value):
            raise DTypeError(f"cannot join {part!r}: it is no traced value")
        if part.dtype is not parts[0].dtype:
            raise DTypeError(f"cannot join {parts[0]!r} and {part!r}: dtypes differ")
        if part.length is None:
            raise ShapeError(f"cannot join {part!r}: it is a scalar")
    while len(parts) > 1:
        joined = [shuffle(a, b, range(len(a) + len(b))) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = joined + parts[len(joined) * 2 :]
    return parts[0]


# meeting of two operands


def _literal_type(number: Number, partner: DType) -> DType:
    if partner.is_float or isinstance(number, int):
        return partner
    raise DTypeError(f"{number!r} is not an integer and its partner is {partner}; convert with .to(fly.f32)")


def _foreign(value: Any) -> bool:
    """Whether it is a number that is not one of Python's own, such as numpy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, Number)


def _plain(value: Any) -> Any:
    """A foreign number as Python's; anything else as it is."""
    if not _foreign(value):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def unify(a: Any, b: Any) -> tuple[Value, Value]:
    """Bring two operands to one dtype and length: literals adapt, narrow types widen, scalars broadcast.

    Raises:
        DTypeError: an integer meets a float, or an operand is no number.
        ShapeError: vectors of different lengths.
    """
    if isinstance(a, Value) and isinstance(b, Value):
        if a.dtype is not b.dtype:
            if a.dtype.kind != b.dtype.kind or {a.dtype.name, b.dtype.name} == {"f16", "bf16"}:
                raise DTypeError(f"{a!r} and {b!r} do not mix; convert one with .to(...)")
            if a.dtype.bits < b.dtype.bits:
                a = a.to(b.dtype)
            else:
                b = b.to(a.dtype)
    elif isinstance(a, Value) and isinstance(b, Number):
        b = constant(b, _literal_type(b, a.dtype), a.length)
    elif isinstance(b, Value) and isinstance(a, Number):
        a = constant(a, _literal_type(a, b.dtype), b.length)
    elif _foreign(a) or _foreign(b):
        return unify(_plain(a), _plain(b))
    else:
        bad = a if not isinstance(a, Value | Number) else b
        loads = "; load from it first: x.load(i)" if hasattr(bad, "load") else ""
        raise DTypeError(f"{bad!r} is no traced value or number{loads}")
    if a.length != b.length:
        if a.length is None:
            a = broadcast(a, b.length)
        elif b.length is None:
            b = broadcast(b, a.length)
        else:
            raise ShapeError(f"{a!r} and {b!r} have different lengths")
    return a, b


def _no_storage_types(value: Value) -> None:
    if value.dtype.kind == "float8":
        raise DTypeError(f"{value!r} is a storage type without arithmetic; convert with .to(fly.f32)")


def binary(name: str, a: Any, b: Any, attributes: dict[str, ir.Attribute] | None = None) -> Value:
    """One elementwise operation on unified operands."""
    a, b = unify(a, b)
    _no_storage_types(a)
    return Value(emit(name, [a.ir, b.ir], [a.type], attributes).results[0], a.dtype, a.length)


_NEUTRAL = {"add": 0, "sub": 0, "mul": 1}


def _arith(operation: str, a: Any, b: Any) -> Value:
    if type(b) is int and b == _NEUTRAL[operation] and isinstance(a, Value) and a.dtype.is_int:
        return a
    if operation != "sub" and type(a) is int and a == _NEUTRAL[operation] and b.dtype.is_int:
        value: Value = b
        return value
    a, b = unify(a, b)
    return binary(f"arith.{operation}{'f' if a.dtype.is_float else 'i'}", a, b)


def _bitwise(name: str, a: Any, b: Any) -> Value:
    a, b = unify(a, b)
    if not a.dtype.is_int:
        raise DTypeError(f"bitwise operators take integers, not {a!r}; use .bitcast(fly.i{a.dtype.bits})")
    return binary(name, a, b)


def _divide(a: Any, b: Any) -> Value:
    a, b = unify(a, b)
    if not a.dtype.is_float:
        raise DTypeError(f"/ takes floats, not {a!r}; use // for integers")
    return binary("arith.divf", a, b)


def _power(a: Any, b: Any) -> Value:
    from fly.ir.elementary import power

    return power(a, b)


def _require_ints(a: Value, operator: str) -> None:
    if not a.dtype.is_int or a.dtype is i1:
        raise DTypeError(f"{operator} takes integers, not {a!r}")


def _require_signed(number: Any, partner: Any, operator: str) -> None:
    """Literals may be bit patterns (0xFFFFFFFF), but not where the operation would see a negative number."""
    if type(number) is int and isinstance(partner, Value) and partner.dtype.is_int and partner.dtype is not i1:
        limit = 1 << (partner.dtype.bits - 1)
        if not -limit <= number < limit:
            raise DTypeError(f"{number} does not fit {partner!r} in {operator}; widen the value with .to(...)")


def _shift(name: str, a: Any, count: Any) -> Value:
    if isinstance(count, int) and isinstance(a, Value) and not 0 <= count < a.dtype.bits:
        raise DTypeError(f"cannot shift {a!r} by {count}; expected 0 to {a.dtype.bits - 1}")
    return _bitwise(name, a, count)


def _power_of_two(number: Any) -> TypeGuard[int]:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


def _floor_divide(a: Value, b: Value | int) -> Value:
    _require_ints(a, "//")
    _require_signed(b, a, "//")
    if _power_of_two(b):
        return a >> (b.bit_length() - 1)
    if isinstance(b, int) and b == 0:
        raise DTypeError("division by zero")
    a, b = unify(a, b)
    quotient = binary("arith.divsi", a, b)
    remainder = a - quotient * b
    # the hardware truncates: a remainder whose sign is not the divisor's means one too many
    return select((remainder != 0) & ((remainder < 0) ^ (b < 0)), quotient - 1, quotient)


def _floor_modulo(a: Value, b: Value | int) -> Value:
    _require_ints(a, "%")
    _require_signed(b, a, "%")
    if _power_of_two(b):
        return a & (b - 1)
    return a - _floor_divide(a, b) * b


_INT_PREDICATES = {
    "eq": 0,
    "ne": 1,
    "lt": 2,
    "le": 3,
    "gt": 4,
    "ge": 5,
    "ult": 6,
    "ule": 7,
    "ugt": 8,
    "uge": 9,
}
# ordered comparisons, so that NaN compares false; "ne" is unordered, so that NaN != NaN
_FLOAT_PREDICATES = {"eq": 1, "gt": 2, "ge": 3, "lt": 4, "le": 5, "ne": 13}


@functools.cache
def _i64_attribute(value: int) -> ir.Attribute:
    with context():
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def compare(predicate: str, a: Any, b: Any) -> Value:
    """Elementwise comparison to i1; `ult` and friends compare integers as unsigned, as all do i1."""
    if predicate in ("lt", "le", "gt", "ge"):
        _require_signed(a, b, "a signed comparison")
        _require_signed(b, a, "a signed comparison")
    a, b = unify(a, b)
    _no_storage_types(a)
    if a.dtype is i1 and predicate in ("lt", "le", "gt", "ge"):
        predicate = "u" + predicate  # as a signed number, true would be -1
    table, name = (_FLOAT_PREDICATES, "arith.cmpf") if a.dtype.is_float else (_INT_PREDICATES, "arith.cmpi")
    if predicate not in table:
        raise DTypeError(f"no comparison {predicate!r} on {a!r}")
    result = i1.mlir if a.length is None else i1.vector(a.length)
    op = emit(name, [a.ir, b.ir], [result], {"predicate": _i64_attribute(table[predicate])})
    return Value(op.results[0], i1, a.length)


def select(condition: Any, a: Any, b: Any) -> Value:
    """`a` where `condition` (i1, scalar or per element) holds, else `b`; both are evaluated."""
    if isinstance(condition, bool):
        return as_value(a) if condition else as_value(b)
    if not isinstance(condition, Value) or condition.dtype is not i1:
        raise DTypeError(f"select needs an i1 condition, not {condition!r}")
    if isinstance(a, Number) and isinstance(b, Number):
        a = as_value(a)
    a, b = unify(a, b)
    if condition.length is not None and a.length is None:
        a, b = broadcast(a, condition.length), broadcast(b, condition.length)
    if condition.length is not None and condition.length != a.length:
        raise ShapeError(f"condition {condition!r} and values {a!r} have different lengths")
    op = emit("arith.select", [condition.ir, a.ir, b.ir], [a.type])
    return Value(op.results[0], a.dtype, a.length)
