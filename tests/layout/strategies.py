"""Random layouts, and the definition of a layout written out without any of the code under test."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fly.layout import Layout

EXTENTS = (1, 2, 2, 3, 4, 5, 6)
POWERS = (1, 2, 2, 4, 8)
MOST = 96  # coordinates of a random layout: the tests look at all of them


def forall(*strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Run a test on random arguments."""
    return lambda test: settings(deadline=None, max_examples=60)(given(*strategies)(test))


def size(shape: Any) -> int:
    """Number of coordinates of a shape."""
    return prod(map(size, shape)) if isinstance(shape, tuple) else shape


def coordinates(shape: Any) -> list[Any]:
    """Every coordinate with the structure of `shape`, in colexicographic order."""
    if not isinstance(shape, tuple):
        return list(range(shape))
    result: list[Any] = [()]
    for mode in shape:
        result = [(*left, right) for right in coordinates(mode) for left in result]
    return result


def dot(coordinate: Any, stride: Any) -> int:
    """The index of a coordinate with the structure of `stride`."""
    if isinstance(stride, tuple):
        return sum(map(dot, coordinate, stride))
    return coordinate * stride


def values(layout: Layout) -> list[int]:
    """[L(0), ..., L(size - 1)] by definition."""
    return [dot(coordinate, layout.stride) for coordinate in coordinates(layout.shape)]


def extents(layout: Layout) -> list[int]:
    """The extents of the leaves."""
    return [leaf.size for leaf in layout.flatten()]


def assert_refines(shape: Any, coarse: Any) -> None:
    """`shape` is `coarse` with some extents split into tuples of the same size."""
    if isinstance(coarse, tuple):
        assert len(shape) == len(coarse)
        for part, whole in zip(shape, coarse, strict=True):
            assert_refines(part, whole)
    else:
        assert size(shape) == coarse


@st.composite
def nested(draw: st.DrawFn, flat: list[tuple[int, int]], depth: int = 2) -> Layout:
    """A layout with these (extent, stride) pairs as leaves, in order, nested at random."""
    if len(flat) == 1 and draw(st.booleans()):
        return Layout(*flat[0])
    modes = []
    start = 0
    while start < len(flat):
        stop = start + draw(st.integers(1, len(flat) - start)) if depth else start + 1
        part = flat[start:stop]
        modes.append(draw(nested(part, depth - 1)) if len(part) > 1 else Layout(*part[0]))
        start = stop
    return Layout.of(*modes)


@st.composite
def extent_lists(draw: st.DrawFn, extents: tuple[int, ...], rank: int) -> list[int]:
    """At most `rank` extents, and at least one, with a product of at most `MOST`."""
    chosen = [draw(st.sampled_from(extents))]
    for _ in range(draw(st.integers(0, rank - 1))):
        extent = draw(st.sampled_from(extents))
        if prod(chosen) * extent > MOST:
            break
        chosen.append(extent)
    return chosen


@st.composite
def layouts(draw: st.DrawFn, extents: tuple[int, ...] = EXTENTS, low: int = 0, rank: int = 4) -> Layout:
    """Any layout with small extents and strides from `low` on."""
    return draw(nested([(extent, draw(st.integers(low, 12))) for extent in draw(extent_lists(extents, rank))]))


@st.composite
def tame_layouts(
    draw: st.DrawFn, extents: tuple[int, ...] = EXTENTS, gaps: tuple[int, ...] = (1, 1, 2, 3), rank: int = 4
) -> Layout:
    """An injective layout whose sorted strides nest: each is a gap times the extent * stride before it."""
    leaves, stride = [], 1
    for extent in draw(extent_lists(extents, rank)):
        stride *= draw(st.sampled_from(gaps))
        leaves.append((extent, stride))
        stride *= extent
    return draw(nested(draw(st.permutations(leaves))))


def compact_layouts(extents: tuple[int, ...] = EXTENTS, rank: int = 4) -> st.SearchStrategy[Layout]:
    """A permutation of 0, ..., size - 1."""
    return tame_layouts(extents, (1,), rank)


def power_layouts(gaps: tuple[int, ...] = (1, 1, 2, 4), rank: int = 3) -> st.SearchStrategy[Layout]:
    """A tame layout of powers of two: every composition and division of such layouts exists."""
    return tame_layouts(POWERS, gaps, rank)
