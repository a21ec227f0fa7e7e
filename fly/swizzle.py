"""Swizzles: permutations of shared memory that spread a tile's rows over its banks."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from fly.errors import LayoutError

if TYPE_CHECKING:
    from fly.int_tuple import Shape
    from fly.layout import Layout, Tiler


@dataclass(frozen=True)
class Swizzle:
    """x ^ (the `bits` bits of x at `base` + `shift`, moved to `base`): CuTe's Swizzle<bits, base, shift>.

        ......YYY....ZZZ......    ->    ......YYY....(Y^Z)......
                 <shift><base>

    An involution. It permutes every aligned block of 2 ** (base + bits + |shift|) indices, and moves aligned
    runs of 2 ** base as a whole. A negative shift folds the bits at `base` into those at `base` - `shift`.

    Raises:
        LayoutError: not bits >= 0, base >= 0 and |shift| >= bits.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if not all(isinstance(value, Integral) for value in (self.bits, self.base, self.shift)):
            raise LayoutError(f"{self!r}: bits, base and shift must be ints")
        if self.bits < 0 or self.base < 0:
            raise LayoutError(f"{self!r}: bits and base must not be negative")
        if abs(self.shift) < self.bits:
            raise LayoutError(f"{self!r}: |shift| must be at least bits, or the two fields overlap")

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
