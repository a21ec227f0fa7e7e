"""What arithmetic means, over numpy: scalars are uniform values or one a lane, vectors have a row a lane.

A value that is the same in all lanes is a numpy scalar, or a vector of one row: most of what a kernel computes about
places and sizes is, and numpy is an order of magnitude faster on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fly.simulator.program import Node, Type
from fly.simulator.report import Finding

FLOAT8: dict[str, np.dtype[np.generic]] = {
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def is_array(value: Any) -> bool:
    """Whether a scalar differs from lane to lane."""
    return value.__class__ is np.ndarray


def cast(value: Any, dtype: np.dtype) -> Any:
    """To another number format, rounded to nearest even."""
    return value.astype(dtype)


def truncate(value: Any, dtype: np.dtype) -> Any:
    """The low bits of an integer."""
    return (value & value.dtype.type(1)).astype(dtype) if dtype == np.bool_ else value.astype(dtype)


def signed_cast(value: Any, dtype: np.dtype) -> Any:
    """A signed integer to a wider or a floating format; a bit is 0 or -1."""
    return (-value.view(np.int8) if value.dtype == np.bool_ else value).astype(dtype)


def unsigned_cast(value: Any, dtype: np.dtype) -> Any:
    """An unsigned integer, or a bit, to a wider or a floating format."""
    if value.dtype != np.bool_:
        value = value.view(f"u{value.dtype.itemsize}")
    return value.astype(dtype)


def to_integer(value: Any, dtype: np.dtype) -> Any:
    """Towards zero, to the nearest integer that there is, NaN to zero: what the instruction does."""
    limits = np.iinfo(dtype)
    wide = np.nan_to_num(np.asarray(value, np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    inside = np.clip(np.trunc(wide), limits.min, limits.max)
    # the largest int64 is no float64
    return np.where(inside >= limits.max, limits.max, inside.astype(dtype))[()].astype(dtype)


def bitcast(value: Any, type_: Type) -> Any:
    """The same bits of a scalar, or of a lane's vector."""
    if type_.length is None and value.ndim < 2:
        return np.asarray(value).view(type_.dtype)[()]
    bits = np.ascontiguousarray(value if value.ndim == 2 else np.reshape(value, (-1, 1))).view(type_.dtype)
    if type_.length is not None:
        return bits
    return bits[:, 0] if len(bits) > 1 else bits[0, 0]


def select(condition: Any, a: Any, b: Any) -> Any:
    """By one condition, one a lane, or one an element."""
    if not is_array(condition):
        return a if condition else b
    if condition.ndim == 1 and is_array(a) and a.ndim == 2:
        condition = condition[:, None]
    return np.where(condition, a, b)


def merge(condition: Any, a: Any, b: Any) -> Any:
    """Values of two branches that lanes took apart; anything but numbers is the same in both.

    Raises:
        Finding: tokens of copies, which cannot be waited for by some lanes.
    """
    if a is b:
        return a
    if isinstance(a, frozenset):
        raise Finding("divergence", "a token of copies in a loop or a branch that threads leave apart")
    if is_array(a) and a.ndim == 2:
        condition = condition[:, None]
    return np.where(condition, a, b)


def extract(vector: np.ndarray, index: int) -> Any:
    """An element of a vector."""
    return vector[:, index] if len(vector) > 1 else vector[0, index]


def elements(*values: Any) -> np.ndarray:
    """A vector of scalars."""
    lanes = next((value for value in values if is_array(value)), None)
    if lanes is None:
        return np.array([values])
    vector = np.empty((len(lanes), len(values)), lanes.dtype)
    for i, value in enumerate(values):
        vector[:, i] = value
    return vector


def broadcast(value: Any, length: int) -> np.ndarray:
    """A vector of one scalar."""
    return np.repeat(np.reshape(value, (-1, 1)), length, axis=1)


def shuffle(a: np.ndarray, b: np.ndarray, mask: Any) -> np.ndarray:
    """Elements of two vectors, numbered one after the other."""
    if _only_first(mask, a.shape[1]):
        return a[:, mask]
    rows = max(len(a), len(b))
    both = [np.broadcast_to(v, (rows, v.shape[1])) for v in (a, b)]
    return np.concatenate(both, axis=1)[:, mask]


def _only_first(mask: slice[int, int, Any] | Iterable[int], length: int) -> bool:
    return mask.stop <= length if isinstance(mask, slice) else max(mask) < length


def indices_of(mask: Sequence[int], length: int, same: bool) -> Any:
    """A shuffle's mask as numpy wants it: a slice where elements are neighbours; `same`: both vectors are one."""
    if same:
        mask = [i % length for i in mask]
    first = mask[0]
    neighbours = list(mask) == list(range(first, first + len(mask)))
    return slice(first, first + len(mask)) if neighbours else np.array(mask)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once but for the rare sum that float64 rounds to a tie."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(c.dtype)


def divide(a: Any, b: Any) -> Any:
    """Of integers, towards zero; by zero, zero."""
    safe = np.where(b == 0, 1, b)[()]
    quotient = a // safe
    inexact = (a % safe != 0) & ((a < 0) != (safe < 0))
    return (quotient + inexact).astype(a.dtype)


def divide_unsigned(a: Any, b: Any) -> Any:
    """Of integers, their bits as numbers without a sign; by zero, zero."""
    unsigned = np.dtype(f"u{a.dtype}")
    return divide(a.view(unsigned), b.view(unsigned)).view(a.dtype)


def flush(value: Any) -> Any:
    """Subnormals as zeros: what approximate instructions make of them."""
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, value * 0, value)[()].astype(value.dtype)


def exp2(value: Any) -> Any:
    return flush(np.exp2(value))


def log2(value: Any) -> Any:
    return np.log2(flush(value))


def reciprocal(value: Any) -> Any:
    return flush((1 / value).astype(value.dtype))


def rsqrt(value: Any) -> Any:
    return (1 / np.sqrt(value)).astype(value.dtype)


def narrow_pairs(value: np.ndarray, kind: str) -> np.ndarray:
    """f32 to an 8-bit format, the largest number in place of infinity."""
    largest = float(ml_dtypes.finfo(FLOAT8[kind]).max)  # type: ignore[no-untyped-call]  # ml_dtypes has no types for it
    clipped: np.ndarray = np.clip(value, -largest, largest)
    return clipped.astype(FLOAT8[kind]).view(np.int8)


def widen_pairs(value: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(value).view(FLOAT8[kind]).astype(np.float32)


def below(offset: Any, bound: Any) -> Any:
    """Unsigned less than, of i32."""
    return offset.view(np.uint32) < bound.view(np.uint32)


def _of_type(function: str) -> Callable[[Node], str]:
    return lambda node: f"{function}({{0}}, {{type0}})"


_INTS = ("==", "!=", "<", "<=", ">", ">=")
_FLOATS = {1: "==", 2: ">", 3: ">=", 4: "<", 5: "<=", 13: "!="}  # ordered ones, and not equal or unordered


def _compare_integers(node: Node) -> str:
    predicate = node.attributes["predicate"]
    if predicate < 6:
        return f"({{0}} {_INTS[predicate]} {{1}})"
    unsigned = f"u{node.operand_types[0].dtype.itemsize}"
    return f"({{0}}.view({unsigned!r}) {_INTS[predicate - 4]} {{1}}.view({unsigned!r}))"


def _compare_floats(node: Node) -> str:
    return f"({{0}} {_FLOATS[node.attributes['predicate']]} {{1}})"


def _infix(operator: str) -> str:
    return f"({{0}} {operator} {{1}})"


def _integer(operator: str, of_bits: str) -> Callable[[Node], str]:
    """numpy's + of bits is a disjunction."""
    return lambda node: _infix(of_bits if node.types[0].dtype == np.bool_ else operator)


def _call(name: str, operands: int = 2) -> str:
    return f"{name}({', '.join(f'{{{i}}}' for i in range(operands))})"


# Python text of each operation: {0}, {1}, ... are operands, {type0} and so on the results' types, {dtype0} their
# element types. What depends on attributes is a function of the node.
EXPRESSIONS: dict[str, str | Callable[[Node], str]] = {
    "arith.addi": _integer("+", "^"),
    "arith.subi": _integer("-", "^"),
    "arith.muli": _integer("*", "&"),
    "arith.addf": _infix("+"),
    "arith.subf": _infix("-"),
    "arith.mulf": _infix("*"),
    "arith.divf": _infix("/"),
    "arith.negf": "(-{0})",
    "arith.andi": _infix("&"),
    "arith.ori": _infix("|"),
    "arith.xori": _infix("^"),
    "arith.shli": _call("np.left_shift"),
    "arith.shrsi": _call("np.right_shift"),
    "arith.divsi": _call("divide"),
    "arith.divui": _call("divide_unsigned"),
    "arith.maxsi": _call("np.maximum"),
    "arith.minsi": _call("np.minimum"),
    "arith.maxnumf": _call("np.fmax"),
    "arith.minnumf": _call("np.fmin"),
    "arith.cmpi": _compare_integers,
    "arith.cmpf": _compare_floats,
    "arith.select": _call("select", 3),
    **{f"arith.{name}": "cast({0}, {dtype0})" for name in ("extf", "truncf")},
    **{f"arith.{name}": "signed_cast({0}, {dtype0})" for name in ("extsi", "sitofp")},
    "arith.trunci": "truncate({0}, {dtype0})",
    **{f"arith.{name}": "unsigned_cast({0}, {dtype0})" for name in ("extui", "uitofp")},
    "arith.fptosi": "to_integer({0}, {dtype0})",
    "fly.narrow": "cast({0}, {dtype0})",
    "fly.narrow_pairs": lambda node: f"narrow_pairs({{0}}, {node.attributes['to']!r})",
    "fly.widen_pairs": lambda node: f"widen_pairs({{0}}, {node.attributes['from']!r})",
    "fly.rcp": _call("reciprocal", 1),
    "arith.bitcast": "bitcast({0}, {type0})",
    "vector.bitcast": "bitcast({0}, {type0})",
    "vector.broadcast": lambda node: f"broadcast({{0}}, {node.types[0].length})",
    "vector.extract": lambda node: f"extract({{0}}, {node.attributes['static_position'][0]})",
    "vector.from_elements": lambda node: _call("elements", len(node.operands)),
    "math.fma": _call("fma", 3),
    "math.exp2": _call("exp2", 1),
    "math.log2": _call("log2", 1),
    "math.tanh": _call("np.tanh", 1),
    "math.sqrt": _call("np.sqrt", 1),
    "math.rsqrt": _call("rsqrt", 1),
    "math.absf": _call("np.abs", 1),
    "math.floor": _call("np.floor", 1),
    "math.ceil": _call("np.ceil", 1),
    "math.trunc": _call("np.trunc", 1),
    "math.roundeven": _call("np.rint", 1),
    "llvm.ptrtoint": "cast({0}, {dtype0})",
    "llvm.getelementptr": "({0} + cast({1}, np.int64))",
}
NAMES = {
    function.__name__: function
    for function in (
        *(
            bitcast,
            broadcast,
            cast,
            divide,
            divide_unsigned,
            elements,
            exp2,
            extract,
            fma,
            log2,
            merge,
            narrow_pairs,
            reciprocal,
        ),
        *(rsqrt, select, shuffle, signed_cast, to_integer, truncate, unsigned_cast, widen_pairs),
    )
}
