"""Nested tuples of numbers: the shapes, strides and coordinates that `fly.layout` is about.

A number is a static int, or a run-time value: any object with `*`, and with `+`, `//` and `%` as far as those
are needed. A run-time value is never compared nor asked for its truth, and always is the left operand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Number
from typing import Any, TypeAlias, TypeGuard

from fly.errors import LayoutError

Shape: TypeAlias = "int | tuple[Shape, ...]"
Stride: TypeAlias = "Any | tuple[Stride, ...]"
Pairs: TypeAlias = list[tuple[int, Any]]


def leaves(tree: Any) -> list[Any]:
    """What a nested tuple holds, from left to right."""
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in leaves(branch)]
    return [tree]


def depth(tree: Any) -> int:
    """Nesting: 0 for a number, 1 for a tuple of numbers, and so on."""
    return 1 + max(map(depth, tree), default=0) if isinstance(tree, tuple) else 0


def text(tree: Any) -> str:
    """CuTe's notation: (2,(3,4)), with ? for a run-time value."""
    if isinstance(tree, tuple):
        return f"({','.join(map(text, tree))})"
    return str(tree) if isinstance(tree, Number | str) else "?"


def is_static(number: Any) -> TypeGuard[int]:
    """Whether a checked number is known at compile time."""
    return type(number) is int


def checked_number(value: Any, what: str) -> Any:
    """`value` as an int, or unchanged if it can be a run-time number.

    Raises:
        LayoutError: it is neither.
    """
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Number | str | bytes | list | tuple) or not hasattr(type(value), "__mul__"):
        raise LayoutError(f"{what} {value!r}: an int or a run-time integer is needed")
    return value


def checked_shape(shape: Any) -> Shape:
    """`shape` with ints as leaves.

    Raises:
        LayoutError: an extent is not an int of at least 1.
    """
    if isinstance(shape, tuple):
        return tuple(map(checked_shape, shape))
    if not isinstance(shape, Integral) or isinstance(shape, bool) or shape < 1:
        raise LayoutError(f"shape {shape!r}: an extent is an int of at least 1, or a tuple of extents")
    return int(shape)


def checked_stride(stride: Any, shape: Shape) -> Stride:
    """`stride` with ints or run-time values as leaves, where `shape` has extents.

    Raises:
        LayoutError: a leaf is not a number, or the structure is another one.
    """
    if isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride):
        return tuple(map(checked_stride, stride, shape))
    if isinstance(shape, tuple) or isinstance(stride, tuple):
        raise LayoutError(f"the stride {text(stride)} does not have the structure of the shape {text(shape)}")
    return checked_number(stride, "stride")


def compact_stride(shape: Shape, last_fastest: bool = False) -> Stride:
    """Strides that enumerate `shape` without holes, its first (or last) leaf fastest."""
    extents = leaves(shape)
    position = 0

    def walk(part: Shape) -> Stride:
        nonlocal position
        if isinstance(part, tuple):
            return tuple(map(walk, part))
        position += 1
        return math.prod(extents[position:] if last_fastest else extents[: position - 1])

    return walk(shape)


def times(a: Any, b: Any) -> Any:
    """a * b, without an operation if one of them is a static 0 or 1."""
    if is_static(a) and not is_static(b):
        a, b = b, a
    if is_static(b) and b in (0, 1):
        return a if b else 0
    return a * b


def dot(terms: Iterable[tuple[Any, Any]]) -> Any:
    """The sum of the products: an int if all of them are static."""
    static, traced = 0, None
    for a, b in terms:
        term = times(a, b)
        if is_static(term):
            static += term
        else:
            traced = term if traced is None else traced + term
    if traced is None:
        return static
    return traced + static if static else traced


def merged(pairs: Iterable[tuple[int, Any]]) -> Pairs:
    """(extent, stride) pairs without extents of 1, and with those that continue one another joined."""
    result: Pairs = []
    for extent, stride in pairs:
        if extent == 1:
            continue
        count, step = result[-1] if result else (1, None)
        if is_static(stride) and is_static(step) and stride == count * step:
            result[-1] = (count * extent, step)
        else:
            result.append((extent, stride))
    return result


def split_progression(sizes: list[int], count: int, step: int) -> list[tuple[int, int, int]] | None:
    """How 0, step, 2 * step, ... (`count` numbers) run through the digits of a number system.

    `sizes` holds the number of values of each digit, fastest first; the last digit is unbounded. Gives
    (digit, count, step) of each digit that moves, so that the digits of number j are those of the mixed-radix
    number j times their steps; None if they do not move as evenly as that.
    """
    parts: list[tuple[int, int, int]] = []
    if count == 1 or step == 0:
        return parts
    for digit, size in enumerate(sizes):
        if digit == len(sizes) - 1 or step * (count - 1) < size:
            return [*parts, (digit, count, step)]
        if step % size == 0:
            step //= size
        elif size % step == 0 and count % (size // step) == 0:
            parts.append((digit, size // step, step))
            count //= size // step
            step = 1
        else:
            return None
    return parts


def idx2crd(index: Any, shape: Shape) -> Any:
    """The coordinate of a linear index, structured like the shape: crd2idx(idx2crd(i, S), S, D) == S:D(i).

    A leaf of extent 1 has coordinate 0; the last other leaf takes what is left of an index beyond the shape.

    Raises:
        LayoutError: an extent is not an int of at least 1, or the index is not a number.
    """
    shape = checked_shape(shape)
    index = checked_number(index, "index")
    size = math.prod(leaves(shape))
    period = 1

    def walk(part: Shape) -> Any:
        nonlocal period
        if isinstance(part, tuple):
            return tuple(map(walk, part))
        if part == 1:
            return 0
        digit = index if period == 1 else index // period
        period *= part
        return digit if period == size else digit % part

    return walk(shape)
