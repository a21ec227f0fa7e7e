"""Layouts: functions from coordinates to indices, and CuTe's algebra on them.

A layout S:D has a shape S and a congruent stride D, each an int or a nested tuple. For a coordinate c it gives
the dot product of c's digits with the strides. A linear index stands for the coordinate that it enumerates with
the *first mode fastest* (colexicographic order), so a layout is also a function of one integer:

    L = (s0, s1, ...):(d0, d1, ...)        L(i) = (i % s0) * d0 + (i // s0 % s1) * d1 + ...

Extents are static and at least 1. Strides, coordinates and indices may be run-time values: objects with `+`, `*`
and, where a linear index must be split, `//` and `%`; nothing compares them or asks for their truth. Operations
whose result depends on the value of a stride need static ones that are not negative, and raise `LayoutError`
otherwise. `compose` and the divides only multiply the strides of the layout that they cut up, so a tensor with
run-time strides can be tiled.

As in CuTe, a call does not check bounds: beyond the shape the last mode whose extent is not 1 continues.

Definitions follow CUTLASS, "CuTe Layouts" (01_layout.md), "CuTe Layout Algebra" (02_layout_algebra.md) and
"Categorical Foundations for CuTe Layouts"; every one of them is a test in tests/layout. Below, (A, B) is the
layout with the modes A and B, and A∘B is `A.compose(B)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Number
from typing import Any, TypeAlias

from fly.errors import LayoutError

Shape: TypeAlias = "int | tuple[Shape, ...]"
Stride: TypeAlias = "Any | tuple[Stride, ...]"
Tiler: TypeAlias = "Layout | int | tuple[Tiler, ...]"

_Pairs: TypeAlias = list[tuple[int, Any]]


@dataclass(frozen=True, eq=False)
class Layout:
    """The function from coordinates of `shape` to indices that `stride` defines; no stride means compact.

    The compact default is column-major: d0 = 1, d(k+1) = d(k) * s(k) over the leaves in order. Layouts are
    immutable and hashable; two are equal if shapes and strides are, a run-time stride being equal to itself only.

    Raises:
        LayoutError: an extent that is not an int of at least 1, a stride that is not a number, or a stride whose
            structure is not that of the shape.
    """

    shape: Shape
    stride: Stride = None

    def __post_init__(self):
        shape = _checked_shape(self.shape)
        if self.stride is None:
            stride = _compact(shape, _leaves(shape))
        else:
            stride = _checked_stride(self.stride, shape, self)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    @staticmethod
    def row_major(shape: Shape) -> Layout:
        """The compact layout of `shape` whose last leaf is fastest."""
        shape = _checked_shape(shape)
        return Layout(shape, _compact(shape, _leaves(shape), last_fastest=True))

    @staticmethod
    def of(*modes: Layout) -> Layout:
        """The layout with these modes: of(A, B)((a, b)) == A(a) + B(b)."""
        return Layout(tuple(mode.shape for mode in modes), tuple(mode.stride for mode in modes))

    # what it is

    @property
    def size(self) -> int:
        """Number of coordinates: the product of the extents."""
        return math.prod(_leaves(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest index: 1 + max L(i). Needs static strides, none negative."""
        return 1 + sum((extent - 1) * stride for extent, stride in self._static("cosize"))

    @property
    def rank(self) -> int:
        """Number of modes; a layout whose shape is an int has one."""
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    @property
    def depth(self) -> int:
        """Nesting of the shape: 0 for an int, 1 for a tuple of ints, and so on."""
        return _depth(self.shape)

    @property
    def modes(self) -> tuple[Layout, ...]:
        """The modes, as layouts; a layout whose shape is an int is its own only mode."""
        if not isinstance(self.shape, tuple):
            return (self,)
        return tuple(Layout(shape, stride) for shape, stride in zip(self.shape, self.stride, strict=True))

    def __iter__(self) -> Iterator[Layout]:
        return iter(self.modes)

    def __getitem__(self, mode: int | slice) -> Layout:
        """One mode, or with a slice the layout of several.

        Raises:
            LayoutError: there is no such mode.
        """
        if isinstance(mode, slice):
            return Layout.of(*self.modes[mode])
        if not isinstance(mode, Integral) or not -self.rank <= mode < self.rank:
            raise LayoutError(f"{self} has no mode {mode!r}; its rank is {self.rank}")
        return self.modes[mode]

    @property
    def is_injective(self) -> bool:
        """Whether different indices go to different places: L(i) == L(j) only for i == j."""
        return len(set(self.table())) == self.size

    @property
    def is_compact(self) -> bool:
        """Whether there are no holes: {L(i)} == {0, ..., n - 1} for some n."""
        image = set(self.table())
        return image == set(range(len(image)))

    @property
    def is_bijective(self) -> bool:
        """Whether L permutes {0, ..., size - 1}: injective and compact."""
        return set(self.table()) == set(range(self.size))

    def table(self) -> list[int]:
        """[L(0), ..., L(size - 1)]. Needs static strides."""
        values = [0]
        for extent, stride in self._static("table", negative=True):
            values = [value + stride * digit for digit in range(extent) for value in values]
        return values

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return f"{_text(self.shape)}:{_text(self.stride)}"

    # the function

    def __call__(self, *coordinate: Any) -> Any:
        """The index of a coordinate: L(i) for a linear index, L(i, j) or L((i, j)) with one entry per mode (each
        an index into its mode, or nested like it), or with one entry per leaf.

        Returns an int if only static numbers take part. No operation is spent on zero strides, factors of one,
        or splitting an index between modes that continue one another.

        Raises:
            LayoutError: the coordinate does not fit the shape.
        """
        static, traced = 0, None
        for digit, stride in self._terms(coordinate[0] if len(coordinate) == 1 else coordinate):
            term = _times(digit, stride)
            if type(term) is int:
                static += term
            else:
                traced = term if traced is None else traced + term
        if traced is None:
            return static
        return traced + static if static else traced

    def _terms(self, coordinate: Any) -> Iterator[tuple[Any, Any]]:
        """(digit, stride) pairs whose products add up to the index of `coordinate`."""
        if isinstance(coordinate, tuple):
            if isinstance(self.shape, tuple) and len(coordinate) == len(self.shape):
                for entry, mode in zip(coordinate, self.modes, strict=True):
                    yield from mode._terms(entry)
                return
            leaves = _leaves(self.stride)
            if len(coordinate) != len(leaves) or any(isinstance(entry, tuple) for entry in coordinate):
                raise LayoutError(
                    f"coordinate {_text(coordinate)} does not fit the shape {_text(self.shape)}"
                )
            for entry, stride in zip(coordinate, leaves, strict=True):
                yield _checked_number(entry, "coordinate"), stride
            return
        index = _checked_number(coordinate, "coordinate")
        period = 1
        for position, (extent, stride) in enumerate(self._digits, start=1):
            if type(stride) is not int or stride != 0:
                digit = index if period == 1 else index // period
                yield (digit if position == len(self._digits) else digit % extent), stride
            period *= extent

    # reshaping: the same function of a linear index

    def flatten(self) -> Layout:
        """The layout with the leaves as modes: flatten(L)(i) == L(i), and its depth is at most 1."""
        if not isinstance(self.shape, tuple):
            return self
        return Layout(tuple(_leaves(self.shape)), tuple(_leaves(self.stride)))

    def coalesce(self, profile: Shape = 1) -> Layout:
        """The flat layout with fewest modes that is the same function: R(i) == L(i), size(R) == size(L).

        With a tuple as `profile`, the modes that it lists are coalesced one by one and the rest is kept; only
        its structure matters: `L.coalesce((1, 1))` keeps the first two modes apart.

        Raises:
            LayoutError: the profile has more modes than the layout, or a stride is not static.
        """
        if isinstance(profile, tuple):
            return self._by_mode("coalesce", profile, Layout.coalesce)
        return _from_pairs(_merged(self._static("coalesce", negative=True)))

    def group(self, begin: int = 0, end: int | None = None) -> Layout:
        """The layout with the modes begin, ..., end - 1 nested into one; the same function of a linear index.

        Raises:
            LayoutError: not 0 <= begin < end <= rank.
        """
        last = self.rank if end is None else end
        if not 0 <= begin < last <= self.rank:
            raise LayoutError(f"cannot group the modes {begin} to {last} of {self}; its rank is {self.rank}")
        modes = self.modes
        return Layout.of(*modes[:begin], Layout.of(*modes[begin:last]), *modes[last:])

    # the algebra

    def compose(self, inner: Tiler) -> Layout:
        """A∘B, functional composition: R(c) == A(B(c)) for every coordinate c of B.

        R has the structure of B, with a leaf of B split where it runs across modes of A. B may be an int, which
        stands for the layout n:1, or a tuple that is composed mode by mode. A may have run-time strides.

        Raises:
            LayoutError: B∘ is not a layout by CuTe's divisibility conditions: a leaf s:d of B crosses a mode of
                A whose extent a neither divides d nor is divided by it, or s is not a multiple of the part a / d
                that fits; or the digits of two leaves of B add up to more than a mode of A holds.
        """
        if isinstance(inner, tuple):
            return self._by_mode("compose", inner, Layout.compose)
        return self._compose(_as_layout(inner), "compose {} with {}")

    def _compose(self, inner: Layout, what: str) -> Layout:
        digits = self._digits
        reached = [0] * len(digits)
        what = what.format(self, inner)
        inner._static("composition")

        def leaf(extent: int, stride: int) -> Layout:
            parts = _split([size for size, _ in digits], extent, stride)
            if parts is None:
                raise LayoutError(
                    f"cannot {what}: the mode {extent}:{stride} does not divide the extents "
                    f"{_text(tuple(size for size, _ in digits))}"
                )
            for mode, count, step in parts:
                reached[mode] += (count - 1) * step
            if not parts:
                return Layout(extent, 0)
            return _from_pairs([(count, _times(step, digits[mode][1])) for mode, count, step in parts])

        def walk(shape: Shape, stride: Stride) -> Layout:
            if isinstance(shape, tuple):
                return Layout.of(*map(walk, shape, stride))
            return leaf(shape, stride)

        result = walk(inner.shape, inner.stride)
        for (extent, _), digit in list(zip(digits, reached, strict=True))[:-1]:
            if digit >= extent:
                raise LayoutError(
                    f"cannot {what}: its modes add up to {digit} within a mode of extent {extent}, "
                    "so the sum carries into the next mode and is no layout"
                )
        return result

    def complement(self, cosize: int | None = None) -> Layout:
        """A*, which enumerates the translates of A's image that cover {0, ..., cosize - 1}.

        With M = cosize (A's own by default) and A without its zero strides: (A, A*) is injective and compact,
        cosize((A, A*)) >= M, A*(i) < A*(i + 1), and A* is the smallest such layout.

        Raises:
            LayoutError: A overlaps itself, or has a hole that no translate fills: with the strides in ascending
                order, one is not a multiple of the extent times stride before it.
        """
        pairs = self._static("complement")
        bound = self.cosize if cosize is None else cosize
        if not isinstance(bound, Integral) or bound < 1:
            raise LayoutError(f"complement of {self} within {cosize!r}: the cosize is an int of at least 1")
        result: _Pairs = []
        covered = 1
        for stride, extent in sorted(
            (stride, extent) for extent, stride in pairs if extent > 1 and stride > 0
        ):
            if stride % covered:
                raise LayoutError(
                    f"{self} has no complement: its stride {stride} is not a multiple of {covered}, "
                    "the extent times stride of the mode before it"
                )
            result.append((stride // covered, covered))
            covered = stride * extent
        result.append((-(-bound // covered), covered))
        return _from_pairs(_merged(result))

    def logical_divide(self, tiler: Tiler) -> Layout:
        """A∘(T, T*) with T* = complement(T, size(A)): R((t, r)) == A(T(t) + T*(r)); t is in the tile, r says which.

        A tuple of tilers divides mode by mode and keeps the modes of A beyond them.

        Raises:
            LayoutError: T has no complement, A∘(T, T*) is no layout, or there are more tilers than modes.
        """
        if isinstance(tiler, tuple):
            return self._by_mode("logical_divide", tiler, Layout.logical_divide)
        tile = _as_layout(tiler)
        return self._compose(
            Layout.of(tile, tile.complement(self.size)), "divide {} by a tile: compose with {}"
        )

    def zipped_divide(self, tiler: Tiler) -> Layout:
        """`logical_divide` with the modes sorted as ((t0, t1, ...), (r0, r1, ..., modes beyond the tilers))."""
        return Layout.of(*self._unzipped("zipped_divide", tiler, Layout.logical_divide))

    def tiled_divide(self, tiler: Tiler) -> Layout:
        """`zipped_divide` with the second mode spread out: ((t0, t1, ...), r0, r1, ...)."""
        tile, rest = self._unzipped("tiled_divide", tiler, Layout.logical_divide)
        return Layout.of(tile, *rest.modes)

    def logical_product(self, tiler: Tiler) -> Layout:
        """(A, A*∘B) with A* = complement(A, size(A) * cosize(B)): R((a, b)) == A(a) + A*(B(b)).

        B says where the copies of A go, counted in copies. A tuple of layouts multiplies mode by mode and keeps
        the modes of A beyond them.

        Raises:
            LayoutError: A has no complement, A*∘B is no layout, or there are more factors than modes.
        """
        if isinstance(tiler, tuple):
            return self._by_mode("logical_product", tiler, Layout.logical_product)
        copies = _as_layout(tiler)
        rest = self.complement(self.size * copies.cosize)
        return Layout.of(
            self, rest._compose(copies, f"multiply {self}: compose its complement {{}} with {{}}")
        )

    def zipped_product(self, tiler: Tiler) -> Layout:
        """`logical_product` with the modes sorted as ((a0, a1, ...), (b0, b1, ..., modes beyond the factors))."""
        return Layout.of(*self._unzipped("zipped_product", tiler, Layout.logical_product))

    def tiled_product(self, tiler: Tiler) -> Layout:
        """`zipped_product` with the second mode spread out: ((a0, a1, ...), b0, b1, ...)."""
        block, rest = self._unzipped("tiled_product", tiler, Layout.logical_product)
        return Layout.of(block, *rest.modes)

    def blocked_product(self, tiler: Layout) -> Layout:
        """`logical_product` of a block A and a grid B of equal rank, so that mode k runs over A's mode k and then
        over B's: R((.., a_k + size(A_k) * b_k, ..)) == A(a) + A*(B(b)). The shorter one gets modes of extent 1.

        Raises:
            LayoutError: as `logical_product`.
        """
        return self._interleaved(tiler, lambda block, grid: Layout.of(block, grid))

    def raked_product(self, tiler: Layout) -> Layout:
        """`blocked_product` with B's mode first, so that the blocks interleave: mode k is b_k + size(B_k) * a_k."""
        return self._interleaved(tiler, lambda block, grid: Layout.of(grid, block))

    def right_inverse(self) -> Layout:
        """R with A(R(i)) == i for i < size(R). If A is injective, size(R) is the largest n for which A's image
        holds {0, ..., n - 1}.

        Raises:
            LayoutError: a stride is not static, or negative.
        """
        found: _Pairs = []
        period, reached = 1, 1
        candidates = []
        for extent, stride in _merged(self._static("right_inverse")):
            candidates.append((stride, extent, period))
            period *= extent
        for stride, extent, place in sorted(candidates):
            if stride == reached:
                found.append((extent, place))
                reached *= extent
        return _from_pairs(_merged(found))

    def left_inverse(self) -> Layout:
        """L with L(A(i)) == i for i < size(A): the right inverse of (A, A*).

        Raises:
            LayoutError: A is not injective, or has no complement.
        """
        if any(extent > 1 and stride == 0 for extent, stride in self._static("left_inverse")):
            raise LayoutError(f"{self} has no left inverse: a stride of 0 sends several indices to one place")
        return Layout.of(self, self.complement()).right_inverse()

    # helpers

    @cached_property
    def _digits(self) -> _Pairs:
        """(extent, stride) of what a linear index is split into, first fastest."""
        if not isinstance(self.shape, tuple):
            return [(self.shape, self.stride)]
        return _merged(zip(_leaves(self.shape), _leaves(self.stride), strict=True))

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        strides = (
            stride if type(stride) is int else ("run-time", id(stride)) for stride in _leaves(self.stride)
        )
        return (self.shape, *strides)

    def _static(self, operation: str, negative: bool = False) -> _Pairs:
        """(extent, stride) of every leaf, once the strides are known to suit `operation`."""
        pairs: _Pairs = list(zip(_leaves(self.shape), _leaves(self.stride), strict=True))
        for _, stride in pairs:
            if type(stride) is not int:
                raise LayoutError(
                    f"{operation} of {self}: the stride {stride!r} must be static, not a run-time value"
                )
            if stride < 0 and not negative:
                raise LayoutError(f"{operation} of {self}: the stride {stride} must not be negative")
        return pairs

    def _paired(self, operation: str, tiler: tuple[Any, ...]) -> list[tuple[Layout, Any]]:
        if not isinstance(self.shape, tuple) or len(tiler) > self.rank:
            raise LayoutError(
                f"{operation} of {self} by mode: there are {len(tiler)} operands and "
                f"{len(self.shape) if isinstance(self.shape, tuple) else 'no'} modes"
            )
        return list(zip(self.modes, tiler, strict=False))

    def _by_mode(
        self, operation: str, tiler: tuple[Any, ...], apply: Callable[[Layout, Any], Layout]
    ) -> Layout:
        done = [apply(mode, entry) for mode, entry in self._paired(operation, tiler)]
        return Layout.of(*done, *self.modes[len(tiler) :])

    def _unzipped(
        self, operation: str, tiler: Tiler, apply: Callable[[Layout, Any], Layout]
    ) -> tuple[Layout, Layout]:
        """The two modes of `apply`, each gathered over the modes that a tuple of tilers names."""
        if not isinstance(tiler, tuple):
            first, second = apply(self, tiler)
            return first, second
        parts = [mode._unzipped(operation, entry, apply) for mode, entry in self._paired(operation, tiler)]
        rest = self.modes[len(tiler) :]
        return Layout.of(*(first for first, _ in parts)), Layout.of(*(second for _, second in parts), *rest)

    def _interleaved(self, tiler: Layout, join: Callable[[Layout, Layout], Layout]) -> Layout:
        rank = max(self.rank, tiler.rank)
        padded = (
            Layout.of(*layout.modes, *[Layout(1, 0)] * (rank - layout.rank)) for layout in (self, tiler)
        )
        block, grid = next(padded).logical_product(next(padded))
        return Layout.of(*(join(*modes).coalesce() for modes in zip(block, grid, strict=True)))


@dataclass(frozen=True)
class Swizzle:
    """x ^ (the `bits` bits of x at `base` + `shift`, moved to `base`): CuTe's Swizzle<bits, base, shift>.

    An involution that keeps every block of 2 ** (base + bits + |shift|) indices, and moves runs of 2 ** base
    indices as a whole. With a negative shift the bits at `base` are folded into those at `base` - `shift`.

        x = ....YYY....ZZZ....    ->    ....YYY....(ZZZ ^ YYY)....
                |<-shift->|<base>

    Raises:
        LayoutError: not bits >= 0, base >= 0 and |shift| >= bits.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self):
        if not all(isinstance(value, Integral) for value in (self.bits, self.base, self.shift)):
            raise LayoutError(
                f"Swizzle({self.bits!r}, {self.base!r}, {self.shift!r}): bits, base and shift are ints"
            )
        if self.bits < 0 or self.base < 0 or abs(self.shift) < self.bits:
            raise LayoutError(
                f"Swizzle({self.bits}, {self.base}, {self.shift}): bits and base must not be negative, and the "
                "shift at least as large as bits, so that the fields do not overlap"
            )

    def __call__(self, index: Any) -> Any:
        """The swizzled index; a run-time index needs `^`, `&`, `>>` (`<<` if the shift is negative)."""
        if not self.bits:
            return index
        field = index & (((1 << self.bits) - 1) << (self.base + max(self.shift, 0)))
        return index ^ (field >> self.shift if self.shift > 0 else field << -self.shift)

    def compose(self, layout: Layout) -> ComposedLayout:
        """The function c -> swizzle(layout(c))."""
        return ComposedLayout(self, layout)

    def __str__(self) -> str:
        return f"Sw<{self.bits},{self.base},{self.shift}>"


@dataclass(frozen=True)
class ComposedLayout:
    """A layout followed by a swizzle: c -> swizzle(layout(c))."""

    swizzle: Swizzle
    layout: Layout

    @property
    def shape(self) -> Shape:
        """Shape of the coordinates."""
        return self.layout.shape

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.layout.size

    @property
    def cosize(self) -> int:
        """One more than the largest index."""
        return 1 + max(self.table())

    def table(self) -> list[int]:
        """[R(0), ..., R(size - 1)]. Needs static strides."""
        return [self.swizzle(index) for index in self.layout.table()]

    def compose(self, inner: Tiler) -> ComposedLayout:
        """R(c) == self(inner(c)); errors as `Layout.compose`."""
        return ComposedLayout(self.swizzle, self.layout.compose(inner))

    def __call__(self, *coordinate: Any) -> Any:
        """The swizzled index of a coordinate, which is as for a `Layout`."""
        return self.swizzle(self.layout(*coordinate))

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.layout}"


def crd2idx(coordinate: Any, shape: Shape, stride: Stride = None) -> Any:
    """The index of `coordinate` in `shape`:`stride` (compact by default); the same as calling the layout."""
    return Layout(shape, stride)(coordinate)


def idx2crd(index: Any, shape: Shape) -> Any:
    """The coordinate of a linear index, with the structure of `shape`: crd2idx(idx2crd(i, S), S, D) == S:D(i).

    A leaf of extent 1 has coordinate 0; the last other leaf takes what is left of an index beyond the shape.

    Raises:
        LayoutError: the shape is none, or the index is no number.
    """
    layout = Layout(shape)
    index = _checked_number(index, "index")
    period = 1

    def walk(part: Shape) -> Any:
        nonlocal period
        if isinstance(part, tuple):
            return tuple(map(walk, part))
        if part == 1:
            return 0
        digit = index if period == 1 else index // period
        period *= part
        return digit if period == layout.size else digit % part

    return walk(layout.shape)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]


def _depth(tree: Any) -> int:
    return 1 + max(map(_depth, tree), default=0) if isinstance(tree, tuple) else 0


def _text(tree: Any) -> str:
    if isinstance(tree, tuple):
        return f"({','.join(map(_text, tree))})"
    return str(tree) if isinstance(tree, Number) else "?"


def _checked_shape(shape: Any) -> Shape:
    if isinstance(shape, tuple):
        return tuple(map(_checked_shape, shape))
    if not isinstance(shape, Integral) or isinstance(shape, bool) or shape < 1:
        raise LayoutError(f"shape {shape!r}: an extent is an int of at least 1, or a tuple of extents")
    return int(shape)


def _checked_number(value: Any, what: str) -> Any:
    """`value` as an int, or unchanged if it can be a run-time number."""
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Number | str | bytes | list) or not hasattr(type(value), "__mul__"):
        raise LayoutError(f"{what} {value!r}: an int or a run-time integer is needed")
    return value


def _checked_stride(stride: Any, shape: Shape, layout: Layout) -> Stride:
    if isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride):
        return tuple(_checked_stride(entry, mode, layout) for entry, mode in zip(stride, shape, strict=True))
    if isinstance(shape, tuple) or isinstance(stride, tuple):
        raise LayoutError(
            f"{_text(layout.shape)}:{_text(layout.stride)}: the stride {_text(stride)} does not have the structure "
            f"of the shape {_text(shape)}"
        )
    return _checked_number(stride, "stride")


def _compact(shape: Shape, extents: list[int], last_fastest: bool = False) -> Stride:
    """Strides of `shape`, whose leaves are `extents`, that enumerate it without holes."""
    position = 0

    def walk(part: Shape) -> Stride:
        nonlocal position
        if isinstance(part, tuple):
            return tuple(map(walk, part))
        position += 1
        return math.prod(extents[position:] if last_fastest else extents[: position - 1])

    return walk(shape)


def _times(a: Any, b: Any) -> Any:
    """a * b without an operation for a static 0 or 1; a run-time factor is the left operand."""
    if type(a) is int and type(b) is not int:
        a, b = b, a
    if type(b) is int and b in (0, 1):
        return a if b else 0
    return a * b


def _merged(pairs: Iterable[tuple[int, Any]]) -> _Pairs:
    """The pairs without extents of 1, and with those that continue one another joined."""
    result: _Pairs = []
    for extent, stride in pairs:
        if extent == 1:
            continue
        count, step = result[-1] if result else (1, None)
        if type(stride) is int and type(step) is int and stride == count * step:
            result[-1] = (count * extent, step)
        else:
            result.append((extent, stride))
    return result


def _from_pairs(pairs: _Pairs) -> Layout:
    """The flat layout of the pairs: 1:0 for none, and no tuple for one."""
    if len(pairs) < 2:
        return Layout(*(pairs[0] if pairs else (1, 0)))
    return Layout(tuple(extent for extent, _ in pairs), tuple(stride for _, stride in pairs))


def _split(sizes: list[int], extent: int, stride: int) -> list[tuple[int, int, int]] | None:
    """How j -> stride * j, j < extent, runs through the digits of a number with these sizes: (mode, count, step)
    of each digit that moves, first fastest. None if the digits do not move so evenly.
    """
    parts: list[tuple[int, int, int]] = []
    if extent == 1 or stride == 0:
        return parts
    for mode, size in enumerate(sizes):
        if mode == len(sizes) - 1 or stride * (extent - 1) < size:
            return [*parts, (mode, extent, stride)]
        if stride % size == 0:
            stride //= size
        elif size % stride == 0 and extent % (size // stride) == 0:
            parts.append((mode, size // stride, stride))
            extent //= size // stride
            stride = 1
        else:
            return None
    return parts


def _as_layout(tiler: Layout | int) -> Layout:
    return tiler if isinstance(tiler, Layout) else Layout(tiler)
