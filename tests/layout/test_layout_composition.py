"""Composition, complement and the inverses, against their definitions over all indices."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from fly.errors import LayoutError
from fly.layout import Layout
from tests.layout.strategies import (
    assert_refines,
    compact_layouts,
    coordinates,
    extents,
    forall,
    layouts,
    power_layouts,
    size,
    tame_layouts,
    values,
)


def without_zero_strides(layout: Layout) -> Layout:
    leaves = layout.flatten().modes
    return Layout.of(*(leaf for leaf in leaves if leaf.stride))


def assert_composition(result: Layout, outer: Layout, inner: Layout):
    """R(c) == A(B(c)) for every coordinate of B and for every linear index, and R has B's structure."""
    for index, coordinate in enumerate(coordinates(inner.shape)):
        assert result(coordinate) == outer(inner(coordinate))
        assert result(index) == outer(inner(index))
    assert_refines(result.shape, inner.shape)


# composition


@forall(power_layouts() | layouts((1, 2, 4, 8)), power_layouts())
def test_compose(a, b):
    assert_composition(a.compose(b), a, b)


def test_compose_every_small_pair():
    """All A of three modes, compact in three orders, with all B of one: what is found is right."""
    outcomes = Counter()
    for sizes, order in product(product((2, 3, 4, 6), repeat=3), ((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        strides = {mode: size(tuple(sizes[k] for k in order[:place])) for place, mode in enumerate(order)}
        a = Layout(sizes, tuple(strides[mode] for mode in range(3)))
        for b in (Layout(extent, step) for extent in (2, 3, 4, 6, 8) for step in (0, 1, 2, 3, 4, 6, 12)):
            try:
                result = a.compose(b)
            except LayoutError:
                outcomes["none"] += 1
            else:
                outcomes["found"] += 1
                assert result.size == b.size
                assert [result(i) for i in range(b.size)] == [a(b(i)) for i in range(b.size)]
    assert outcomes["found"] > 2 * outcomes["none"] > 0


@forall(layouts(), layouts(rank=2))
def test_compose_is_right_or_an_error(a, b):
    """An inner layout that carries between the modes of the outer is never let through."""
    try:
        result = a.compose(b)
    except LayoutError:
        return
    assert_composition(result, a, b)


@forall(layouts((1, 2, 4, 8), low=-3), power_layouts(), power_layouts())
def test_compose_is_associative(a, b, c):
    """A∘(B∘C) == (A∘B)∘C, if C's image is within B's domain."""
    assume(c.cosize <= b.size)
    left, right = a.compose(b.compose(c)), a.compose(b).compose(c)
    assert [left(i) for i in range(c.size)] == [right(i) for i in range(c.size)]


@forall(layouts(low=-3))
def test_compose_with_the_identity(a):
    assert values(a.compose(Layout(a.shape))) == values(a)
    assert values(a.compose(Layout(a.size))) == values(a)
    assert values(a.compose(a.size)) == values(a)


@forall(st.integers(1, 30), layouts())
def test_identity_composed_with_a_layout(n, b):
    assert values(Layout(n).compose(b)) == values(b)
    if 1 not in extents(b):
        assert Layout(n).compose(b) == b


@pytest.mark.parametrize(
    ("outer", "inner", "result"),
    [
        (Layout((6, 2), (8, 2)), Layout((4, 3), (3, 1)), Layout(((2, 2), 3), ((24, 2), 8))),
        (Layout(20, 2), Layout((5, 4), (4, 1)), Layout((5, 4), (8, 2))),
        (Layout((10, 2), (16, 4)), Layout((5, 4), (1, 5)), Layout((5, (2, 2)), (16, (80, 4)))),
    ],
)
def test_compose_examples(outer, inner, result):
    """CuTe Layout Algebra, "Composition"."""
    assert outer.compose(inner) == result


def test_compose_by_mode():
    """CuTe Layout Algebra, "By-mode composition"."""
    a = Layout((12, (4, 8)), (59, (13, 1)))
    assert a.compose((Layout(3, 4), Layout(8, 2))) == Layout((3, (2, 4)), (236, (26, 1)))
    assert a.compose((3, 8)) == Layout((3, (4, 2)), (59, (13, 1)))
    assert a.compose((3,)) == Layout.of(Layout(3, 59), a[1])
    assert a.compose((3, (2, 8))) == Layout((3, (2, 8)), (59, (13, 1)))


def test_compose_gives_extents_of_one_no_stride():
    assert Layout((8, 2), (3, 1)).compose(Layout((1, 4), (5, 2))) == Layout((1, 4), (0, 6))


def test_compose_stays_inside_a_mode_that_its_stride_does_not_divide():
    assert Layout((8, 2), (1, 100)).compose(Layout(2, 5)) == Layout(2, 5)


# complement


def forced_tiling(image: set[int], bound: int) -> list[int]:
    """The offsets at which disjoint translates of `image` fill 0, 1, 2, ... without holes, up to `bound`.

    The lowest free place forces each offset, so no other tiling exists.
    """
    offsets, filled = [], set()
    while True:
        lowest = next(place for place in range(len(filled) + 1) if place not in filled)
        if lowest == len(filled) >= bound:
            return offsets
        translate = {lowest + place for place in image}
        assert not translate & filled
        offsets.append(lowest)
        filled |= translate


@forall(tame_layouts(), st.integers(1, 200))
def test_complement(a, bound):
    complement = a.complement(bound)
    both = Layout.of(a, complement)
    assert both.is_bijective
    assert both.size >= bound
    assert complement.table() == forced_tiling(set(a.table()), bound)
    assert complement == complement.coalesce()


@forall(tame_layouts(rank=2), st.sampled_from((1, 2, 3)), st.integers(1, 50))
def test_complement_ignores_zero_strides(a, copies, bound):
    assert Layout.of(Layout(copies, 0), a).complement(bound) == a.complement(bound)


@forall(tame_layouts())
def test_complement_fills_the_own_cosize_by_default(a):
    assert a.complement() == a.complement(a.cosize)
    assert Layout.of(a, a.complement()).is_bijective


@forall(layouts(), st.integers(1, 60))
def test_complement_is_right_or_an_error(a, bound):
    try:
        complement = a.complement(bound)
    except LayoutError:
        return
    both = Layout.of(without_zero_strides(a), complement)
    assert both.is_bijective
    assert both.size >= bound
    assert complement.table() == sorted(set(complement.table()))


@pytest.mark.parametrize(
    ("layout", "result"),
    [
        (Layout(4), Layout(6, 4)),
        (Layout(6, 4), Layout(4)),
        (Layout((4, 6)), Layout(1, 0)),
        (Layout(4, 2), Layout((2, 3), (1, 8))),
        (Layout((2, 4), (1, 6)), Layout(3, 2)),
        (Layout((2, 2), (1, 6)), Layout((3, 2), (2, 12))),
    ],
)
def test_complement_examples(layout, result):
    """CuTe Layout Algebra, "Complement Examples"."""
    assert layout.complement(24) == result


# inverses


@forall(layouts())
def test_right_inverse(a):
    inverse = a.right_inverse()
    for i in range(inverse.size):
        assert a(inverse(i)) == i


@forall(tame_layouts() | layouts().filter(lambda layout: layout.is_injective))
def test_right_inverse_of_an_injection_is_as_long_as_can_be(a):
    image = set(a.table())
    assert a.right_inverse().size == next(n for n in range(a.cosize + 1) if n not in image)


@forall(compact_layouts())
def test_inverses_of_a_permutation(a):
    assert a.right_inverse() == a.left_inverse()
    assert a.right_inverse().size == a.size
    for i in range(a.size):
        assert a.right_inverse()(a(i)) == a(a.right_inverse()(i)) == i


@forall(tame_layouts())
def test_left_inverse(a):
    inverse = a.left_inverse()
    for i in range(a.size):
        assert inverse(a(i)) == i


def test_inverses_pass_over_broadcasts_and_repeats():
    assert Layout((2, 4), (0, 1)).right_inverse() == Layout(4, 2)
    assert Layout((2, 4, 3), (1, 1, 2)).right_inverse() == Layout((2, 3), (1, 8))


# errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Layout((4, 6), (6, 1)).compose(Layout(8, 3)),
            r"cannot compose \(4,6\):\(6,1\) with 8:3: 8:3 of the inner layout runs unevenly "
            r"across the extents \(4,6\) of the outer",
        ),
        (lambda: Layout((6, 2), (2, 1)).compose(Layout(3, 4)), "3:4 of the inner layout runs unevenly"),
        (
            lambda: Layout((4, 6), (6, 1)).compose(Layout((5, 2), (2, 0))),
            r"5:2 of the inner .* extents \(4,6\)",
        ),
        (
            lambda: Layout((2, 2), (1, 10)).compose(Layout((2, 2), (1, 1))),
            r"cannot compose \(2,2\):\(1,10\) with \(2,2\):\(1,1\): the inner modes add up to 2 within "
            "a mode of extent 2 of the outer, and would carry into the next",
        ),
        (
            lambda: Layout(4).compose(Layout(2, -1)),
            "composition with 2:-1: the stride -1 must not be negative",
        ),
        (lambda: Layout(4).compose("x"), "shape 'x': an extent is an int"),
        (lambda: Layout(4).compose(0), "shape 0: an extent is an int of at least 1"),
        (
            lambda: Layout((4, 8)).compose((2, 2, 2)),
            r"compose of \(4,8\):\(1,4\): 3 operands are more than its 2 modes",
        ),
        (
            lambda: Layout((3, 2), (2, 3)).complement(),
            r"\(3,2\):\(2,3\) has no complement: its stride 3 is not a multiple of 6, the",
        ),
        (lambda: Layout((2, 2), (1, 1)).complement(), "its stride 1 is not a multiple of 2"),
        (lambda: Layout(4).complement(0), "complement of 4:1 within 0: the cosize is an int of at least 1"),
        (lambda: Layout(4).complement(2.5), "complement of 4:1 within 2.5: the cosize is an int"),
        (lambda: Layout(4, -1).complement(8), "complement of 4:-1: the stride -1 must not be negative"),
        (lambda: Layout(4, -1).right_inverse(), "right_inverse of 4:-1: the stride -1 must not be negative"),
        (
            lambda: Layout((2, 4), (0, 1)).left_inverse(),
            r"\(2,4\):\(0,1\) has no left inverse: a stride of 0",
        ),
        (lambda: Layout((2, 2), (1, 1)).left_inverse(), r"\(2,2\):\(1,1\) has no complement"),
    ],
)
def test_errors(make, message):
    with pytest.raises(LayoutError, match=message):
        make()
