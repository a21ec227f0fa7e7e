"""Layouts: functions from coordinates to indices, and CuTe's algebra on them.

A layout S:D has a shape S and a congruent stride D, each an int or a nested tuple. For a coordinate it gives
the dot product with the strides. A linear index stands for the coordinate that it enumerates with the *first
mode fastest* (colexicographic order), so a layout is also a function of one integer:

    L = (s0, s1, ...):(d0, d1, ...)        L(i) = (i % s0) * d0 + (i // s0 % s1) * d1 + ...

Extents are static and at least 1. Strides, coordinates and indices may be run-time values, which are only
added, multiplied and, where a linear index must be split, divided (`//`, `%`). Operations whose result
depends on the value of a stride need static ones that are not negative, and raise `LayoutError` otherwise.
`compose` and the divides only multiply the strides of the layout that they cut up, so a tensor with run-time
strides can be tiled.

As in CuTe, a call checks no bounds: beyond the shape, the last mode whose extent is not 1 continues.

The definitions are those of CUTLASS, "CuTe Layouts" (01_layout.md) and "CuTe Layout Algebra"
(02_layout_algebra.md); each is a test in tests/layout. (A, B) is the layout with the modes A and B, and A∘B
is `A.compose(B)`. A tiler is a layout, an int n for n:1, or a tuple of tilers to be applied mode by mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, TypeAlias

from fly.errors import LayoutError
from fly.int_tuple import (
    Pairs,
    Shape,
    Stride,
    checked_number,
    checked_shape,
    checked_stride,
    compact_stride,
    depth,
    dot,
    idx2crd,
    is_static,
    leaves,
    merged,
    split_progression,
    text,
    times,
)
from fly.swizzle import ComposedLayout, Swizzle

__all__ = ["ComposedLayout", "Layout", "Swizzle", "Tiler", "crd2idx", "idx2crd"]

Tiler: TypeAlias = "Layout | int | tuple[Tiler, ...]"
_Operation: TypeAlias = "Callable[[Layout, Any], Layout]"


@dataclass(frozen=True, eq=False)
class Layout:
    """The function from coordinates of `shape` to indices that `stride` defines; no stride means compact.

    The compact default is column-major: d(0) = 1, d(k + 1) = d(k) * s(k) over the leaves in order. Layouts
    are immutable and hashable; they are equal if shape and stride are, a run-time stride being equal to
    itself only.

    Raises:
        LayoutError: an extent is not an int of at least 1, a stride is not a number, or the stride does not
        have
            the structure of the shape.
    """

    shape: Shape
    stride: Stride = None

    def __post_init__(self) -> None:
        shape = checked_shape(self.shape)
        stride = compact_stride(shape) if self.stride is None else checked_stride(self.stride, shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    @staticmethod
    def row_major(shape: Shape) -> Layout:
        """The compact layout of `shape` whose last leaf is fastest."""
        return Layout(shape, compact_stride(checked_shape(shape), last_fastest=True))

    @staticmethod
    def of(*modes: Layout) -> Layout:
        """The layout with these modes: of(A, B)((a, b)) == A(a) + B(b)."""
        return Layout(tuple(mode.shape for mode in modes), tuple(mode.stride for mode in modes))

    @property
    def size(self) -> int:
        """Number of coordinates: the product of the extents."""
        return math.prod(leaves(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest index: 1 + max L(i). Needs static strides, none negative."""
        largest: int = sum((extent - 1) * stride for extent, stride in self._static("cosize of"))
        return 1 + largest

    @property
    def rank(self) -> int:
        """Number of modes; a layout whose shape is an int has one."""
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    @property
    def depth(self) -> int:
        """Nesting of the shape: 0 for an int, 1 for a tuple of ints, and so on."""
        return depth(self.shape)

    @cached_property
    def modes(self) -> tuple[Layout, ...]:
        """The modes, as layouts; a layout whose shape is an int is its own only mode."""
        return tuple(map(Layout, self.shape, self.stride)) if isinstance(self.shape, tuple) else (self,)

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

    def table(self) -> list[int]:
        """[L(0), ..., L(size - 1)]. Needs static strides."""
        values = [0]
        for extent, stride in self._static("table of", negative=True):
            values = [value + stride * digit for digit in range(extent) for value in values]
        return values

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

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return f"{text(self.shape)}:{text(self.stride)}"

    def __call__(self, *coordinate: Any) -> Any:
        """The index of a coordinate.

        L(i) takes a linear index; L(i, j) or L((i, j)) one entry per mode, each an index into its mode or
        nested like it, or one entry per leaf. Gives an int if only static numbers take part. No operation is
        spent on strides of 0, factors of 1, or splitting a linear index between modes that continue one
        another.

        Raises:
            LayoutError: the coordinate does not fit the shape.
        """
        given = coordinate[0] if len(coordinate) == 1 else coordinate
        if (modes := self._numbers) is not None:  # most calls, by far
            if given.__class__ is int:
                return _place(self._digits, given)
            if given.__class__ is tuple and len(given) == len(modes) and all(i.__class__ is int for i in given):
                return sum(map(_place, modes, given))
        return dot(self._terms(given))

    @cached_property
    def _numbers(self) -> tuple[Pairs, ...] | None:
        """The digits of each mode, if all strides are ints."""
        if not all(stride.__class__ is int for stride in leaves(self.stride)):
            return None
        return tuple(mode._digits for mode in self.modes)

    def _terms(self, coordinate: Any) -> Iterator[tuple[Any, Any]]:
        """(digit, stride) pairs whose products add up to the index of `coordinate`."""
        if isinstance(coordinate, tuple):
            strides = leaves(self.stride)
            if isinstance(self.shape, tuple) and len(coordinate) == len(self.shape):
                for entry, mode in zip(coordinate, self.modes, strict=True):
                    yield from mode._terms(entry)
            elif len(coordinate) == len(strides) and not any(isinstance(entry, tuple) for entry in coordinate):
                for entry, stride in zip(coordinate, strides, strict=True):
                    yield checked_number(entry, "coordinate"), stride
            else:
                raise LayoutError(f"coordinate {text(coordinate)} does not fit the shape {text(self.shape)}")
            return
        index = checked_number(coordinate, "coordinate")
        period = 1
        for position, (extent, stride) in enumerate(self._digits, start=1):
            if not is_static(stride) or stride:
                digit = index if period == 1 else index // period
                yield (digit if position == len(self._digits) else digit % extent), stride
            period *= extent

    def flatten(self) -> Layout:
        """The layout with the leaves as modes: R(i) == L(i), and the depth of R is at most 1."""
        if not isinstance(self.shape, tuple):
            return self
        return Layout(tuple(leaves(self.shape)), tuple(leaves(self.stride)))

    def coalesce(self, profile: Shape = 1) -> Layout:
        """The flat layout with fewest modes that is the same function: R(i) == L(i), size(R) == size(L).

        With a tuple as `profile`, the modes that it lists are coalesced one by one and the rest is kept; only
        its structure matters: `L.coalesce((1, 1))` keeps the first two modes apart.

        Raises:
            LayoutError: the profile has more modes than the layout, or a stride is not static.
        """
        if isinstance(profile, tuple):
            return self._by_mode("coalesce", profile, Layout.coalesce)
        return _from_pairs(merged(self._static("coalesce of", negative=True)))

    def group(self, begin: int = 0, end: int | None = None) -> Layout:
        """The layout with the modes begin, ..., end - 1 nested into one; the same function of a linear index.

        Raises:
            LayoutError: not 0 <= begin < end <= rank.
        """
        end = self.rank if end is None else end
        if not 0 <= begin < end <= self.rank:
            raise LayoutError(f"cannot group the modes from {begin} up to {end} of {self}; its rank is {self.rank}")
        return Layout.of(*self.modes[:begin], self[begin:end], *self.modes[end:])

    def compose(self, inner: Tiler) -> Layout:
        """A∘B, the composition of functions: R(c) == A(B(c)) for every coordinate c of B.

        R has the structure of B, with a leaf of B split where it runs across modes of A. A may have run-time
        strides.

        Raises:
            LayoutError: a leaf s:d of B runs unevenly across the modes of A (coalesced): where it leaves one
                of extent a, either a must divide d, or d must divide a and a / d divide s. Or leaves of B add
                up to a or more within a mode of A.
        """
        if isinstance(inner, tuple):
            return self._by_mode("compose", inner, Layout.compose)
        return self._compose(_as_layout(inner), f"compose {self} with {inner}")

    def _compose(self, inner: Layout, purpose: str) -> Layout:
        inner._static("composition with")
        sizes = [extent for extent, _ in self._digits]
        reached = [0] * len(sizes)

        def walk(shape: Shape, stride: Any) -> Layout:
            if isinstance(shape, tuple):
                return Layout.of(*map(walk, shape, stride))
            parts = split_progression(sizes, shape, stride)
            if parts is None:
                raise LayoutError(
                    f"cannot {purpose}: {shape}:{stride} of the inner layout runs unevenly across "
                    f"the extents {text(tuple(sizes))} of the outer"
                )
            for digit, count, step in parts:
                reached[digit] += (count - 1) * step
            return _from_pairs(
                [(count, times(step, self._digits[digit][1])) for digit, count, step in parts] or [(shape, 0)]
            )

        result = walk(inner.shape, inner.stride)
        for extent, digit in list(zip(sizes, reached, strict=True))[:-1]:
            if digit >= extent:
                raise LayoutError(
                    f"cannot {purpose}: the inner modes add up to {digit} within a mode of extent {extent} "
                    "of the outer, and would carry into the next"
                )
        return result

    def complement(self, cosize: int | None = None) -> Layout:
        """A*, which enumerates the translates of A's image that cover {0, ..., cosize - 1}.

        With M = cosize (A's own by default) and A without its strides of 0: (A, A*) is injective and compact,
        size((A, A*)) >= M, A*(i) < A*(i + 1), and no layout with fewer elements does it.

        Raises:
            LayoutError: A overlaps itself, or has holes that no translates of it fill: with the strides in
                ascending order, one is not a multiple of extent * stride of the one before.
        """
        pairs = self._static("complement of")
        bound = self.cosize if cosize is None else cosize
        if not isinstance(bound, Integral) or bound < 1:
            raise LayoutError(f"complement of {self} within {cosize!r}: the cosize is an int of at least 1")
        result: Pairs = []
        covered = 1
        for stride, extent in sorted((stride, extent) for extent, stride in pairs if extent > 1 and stride):
            if stride % covered:
                raise LayoutError(
                    f"{self} has no complement: its stride {stride} is not a multiple of {covered}, "
                    "the extent times stride of the mode below"
                )
            result.append((stride // covered, covered))
            covered = stride * extent
        result.append((-(-bound // covered), covered))
        return _from_pairs(merged(result))

    def logical_divide(self, tiler: Tiler) -> Layout:
        """A∘(T, T*), T* = complement(T, size(A)): R((t, r)) == A(T(t) + T*(r)); r selects the tile.

        A tuple divides mode by mode and keeps the modes beyond it. Tiles may hang over the end of A.

        Raises:
            LayoutError: T has no complement, A∘(T, T*) is no layout, or there are more tilers than modes.
        """
        if isinstance(tiler, tuple):
            return self._by_mode("logical_divide", tiler, Layout.logical_divide)
        tile = _as_layout(tiler)
        both = Layout.of(tile, tile.complement(self.size))
        return self._compose(both, f"divide {self} by {tile}, which is to compose it with {both}")

    def zipped_divide(self, tiler: Tiler) -> Layout:
        """`logical_divide` with its modes sorted: ((t0, t1, ...), (r0, r1, ..., modes beyond the tiler))."""
        return Layout.of(*self._unzip("zipped_divide", tiler, Layout.logical_divide))

    def tiled_divide(self, tiler: Tiler) -> Layout:
        """`zipped_divide` with its second mode spread out: ((t0, t1, ...), r0, r1, ...)."""
        tile, rest = self._unzip("tiled_divide", tiler, Layout.logical_divide)
        return Layout.of(tile, *rest.modes)

    def logical_product(self, tiler: Tiler) -> Layout:
        """(A, A*∘B), A* = complement(A, size(A) * cosize(B)): R((a, b)) == A(a) + A*(B(b)).

        B says where the copies of A go, counted in copies. A tuple multiplies mode by mode and keeps the
        modes beyond it.

        Raises:
            LayoutError: A has no complement, A*∘B is no layout, or there are more factors than modes.
        """
        if isinstance(tiler, tuple):
            return self._by_mode("logical_product", tiler, Layout.logical_product)
        grid = _as_layout(tiler)
        rest = self.complement(self.size * grid.cosize)
        purpose = f"multiply {self} by {grid}, which is to compose its complement {rest} with the latter"
        return Layout.of(self, rest._compose(grid, purpose))

    def zipped_product(self, tiler: Tiler) -> Layout:
        """`logical_product` with its modes sorted: ((a0, a1, ...), (b0, b1, ..., modes beyond the tiler))."""
        return Layout.of(*self._unzip("zipped_product", tiler, Layout.logical_product))

    def tiled_product(self, tiler: Tiler) -> Layout:
        """`zipped_product` with its second mode spread out: ((a0, a1, ...), b0, b1, ...)."""
        block, grid = self._unzip("tiled_product", tiler, Layout.logical_product)
        return Layout.of(block, *grid.modes)

    def blocked_product(self, grid: Layout) -> Layout:
        """`logical_product` whose mode k runs through mode k of the block A, then through that of the grid B.

        R((..., a_k + size(A_k) * b_k, ...)) == A(a) + A*(B(b)). A missing mode counts as 1:0.

        Raises:
            LayoutError: as `logical_product`.
        """
        return self._interleave(grid, lambda a, b: Layout.of(a, b))

    def raked_product(self, grid: Layout) -> Layout:
        """`blocked_product` with interleaved blocks: mode k of the result is b_k + size(B_k) * a_k."""
        return self._interleave(grid, lambda a, b: Layout.of(b, a))

    def right_inverse(self) -> Layout:
        """R with A(R(i)) == i for i < size(R).

        If A is injective, size(R) is the largest n for which A's image holds all of {0, ..., n - 1}.
        """
        period = 1
        candidates = []
        for extent, stride in merged(self._static("right_inverse of")):
            candidates.append((stride, extent, period))
            period *= extent
        found: Pairs = []
        reached = 1
        for stride, extent, place in sorted(candidates):
            if stride == reached:
                found.append((extent, place))
                reached *= extent
        return _from_pairs(merged(found))

    def left_inverse(self) -> Layout:
        """R with R(A(i)) == i for i < size(A): the right inverse of (A, A*).

        Raises:
            LayoutError: A is not injective, or has no complement.
        """
        if any(extent > 1 and stride == 0 for extent, stride in self._static("left_inverse of")):
            raise LayoutError(f"{self} has no left inverse: a stride of 0 sends several indices to one place")
        return Layout.of(self, self.complement()).right_inverse()

    @cached_property
    def _digits(self) -> Pairs:
        """(extent, stride) of the digits that a linear index is split into, fastest first."""
        if not isinstance(self.shape, tuple):
            return [(self.shape, self.stride)]
        return merged(zip(leaves(self.shape), leaves(self.stride), strict=True))

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """What equality compares: run-time strides by identity, since their own == is traced."""
        return (
            self.shape,
            *(stride if is_static(stride) else ("?", id(stride)) for stride in leaves(self.stride)),
        )

    def _static(self, operation: str, negative: bool = False) -> Pairs:
        """(extent, stride) of every leaf, once the strides are known to suit `operation`."""
        pairs = list(zip(leaves(self.shape), leaves(self.stride), strict=True))
        for _, stride in pairs:
            if not is_static(stride):
                raise LayoutError(f"{operation} {self}: needs static strides, and {stride!r} is a run-time value")
            if stride < 0 and not negative:
                raise LayoutError(f"{operation} {self}: the stride {stride} must not be negative")
        return pairs

    def _pair(self, operation: str, tiler: tuple[Any, ...]) -> Iterator[tuple[Layout, Any]]:
        """The leading modes, each with its entry of a tuple of operands."""
        if len(tiler) > self.rank:
            raise LayoutError(f"{operation} of {self}: {len(tiler)} operands are more than its {self.rank} modes")
        return zip(self.modes, tiler, strict=False)

    def _by_mode(self, operation: str, tiler: tuple[Any, ...], apply: _Operation) -> Layout:
        done = [apply(mode, entry) for mode, entry in self._pair(operation, tiler)]
        return Layout.of(*done, *self.modes[len(tiler) :])

    def _unzip(self, operation: str, tiler: Tiler, apply: _Operation) -> tuple[Layout, Layout]:
        """The two modes of what `apply` gives, each gathered over the modes that a tuple stands for."""
        if not isinstance(tiler, tuple):
            first, second = apply(self, tiler)
            return first, second
        parts = [mode._unzip(operation, entry, apply) for mode, entry in self._pair(operation, tiler)]
        rest = self.modes[len(tiler) :]
        return Layout.of(*(first for first, _ in parts)), Layout.of(*(second for _, second in parts), *rest)

    def _interleave(self, grid: Layout, join: Callable[[Layout, Layout], Layout]) -> Layout:
        rank = max(self.rank, grid.rank)
        block, grid = (Layout.of(*one.modes, *[Layout(1, 0)] * (rank - one.rank)) for one in (self, grid))
        modes = map(join, *block.logical_product(grid))
        return Layout.of(*(mode.coalesce() for mode in modes))


def crd2idx(coordinate: Any, shape: Shape, stride: Stride = None) -> Any:
    """The index of `coordinate` in `shape`:`stride` (compact by default): what calling the layout gives."""
    return Layout(shape, stride)(coordinate)


def _place(digits: Pairs, index: int) -> int:
    """The index in memory of a linear index: the last digit is unbounded."""
    place = 0
    for extent, stride in digits[:-1]:
        index, digit = divmod(index, extent)
        place += digit * stride
    return place + index * digits[-1][1] if digits else place


def _from_pairs(pairs: Pairs) -> Layout:
    """The flat layout of the pairs: 1:0 for none, and no tuple for one."""
    if len(pairs) < 2:
        return Layout(*(pairs[0] if pairs else (1, 0)))
    extents, strides = zip(*pairs, strict=True)
    return Layout(extents, strides)


def _as_layout(tiler: Layout | int) -> Layout:
    return tiler if isinstance(tiler, Layout) else Layout(tiler)
