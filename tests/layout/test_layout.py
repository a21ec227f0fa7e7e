"""What a layout is: its function, its measures, and the forms that are the same function."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st

from fly.errors import LayoutError
from fly.layout import Layout, crd2idx, idx2crd
from tests.layout.strategies import coordinates, dot, forall, layouts, size, tame_layouts, values


@forall(layouts(low=-3))
def test_call_with_coordinates(layout):
    for coordinate in coordinates(layout.shape):
        assert layout(coordinate) == dot(coordinate, layout.stride)


@forall(layouts(low=-3))
def test_call_with_linear_index_enumerates_first_mode_fastest(layout):
    assert [layout(i) for i in range(layout.size)] == values(layout)


@forall(layouts(low=-3))
def test_call_with_one_index_per_mode(layout):
    """L(i, j, ...) is the sum of the modes' own values."""
    for entries in coordinates(tuple(mode.size for mode in layout.modes)):
        assert layout(entries) == sum(mode(entry) for mode, entry in zip(layout, entries, strict=True))
        assert layout(*entries) == layout(entries)


@forall(layouts(low=-3))
def test_call_with_one_entry_per_leaf(layout):
    flat = layout.flatten()
    for coordinate in coordinates(flat.shape):
        assert layout(coordinate) == dot(coordinate, flat.stride)


@forall(layouts(low=-3))
def test_table(layout):
    assert layout.table() == values(layout)


def test_compact_strides():
    assert Layout((4, 8)) == Layout((4, 8), (1, 4))
    assert Layout(((2, 3), 4)) == Layout(((2, 3), 4), ((1, 2), 6))
    assert Layout.row_major((4, 8)) == Layout((4, 8), (8, 1))
    assert Layout.row_major(((2, 3), 4)) == Layout(((2, 3), 4), ((12, 4), 1))
    assert Layout(5) == Layout.row_major(5) == Layout(5, 1)


@forall(layouts())
def test_compact_strides_enumerate_in_order(layout):
    """Column-major: in colexicographic order of the coordinates. Row-major: in lexicographic order."""
    every = coordinates(layout.shape)
    assert [Layout(layout.shape)(coordinate) for coordinate in every] == list(range(layout.size))
    assert [Layout.row_major(layout.shape)(coordinate) for coordinate in sorted(every)] == list(range(layout.size))


@forall(layouts())
def test_measures(layout):
    assert layout.size == size(layout.shape) == len(values(layout))
    assert layout.cosize == 1 + max(values(layout))
    assert layout.rank == (len(layout.shape) if isinstance(layout.shape, tuple) else 1)


def test_depth():
    assert [Layout(shape).depth for shape in (4, (4,), (4, 2), ((4, 2), 3), (((4, 2), 5), 3), ())] == [
        0,
        1,
        1,
        2,
        3,
        1,
    ]


def test_layout_of_no_modes():
    """A scalar: one coordinate, at index 0."""
    layout = Layout((), ())
    assert (layout.size, layout.cosize, layout.rank, layout(()), layout(0)) == (1, 1, 0, 0, 0)
    assert layout == Layout(()) == Layout.of()
    assert layout.coalesce() == Layout(1, 0)


def test_beyond_the_shape_the_last_mode_continues():
    layout = Layout((4, 2), (1, 10))
    assert [layout(i) for i in (7, 8, 9, 12)] == [13, 20, 21, 30]
    assert Layout((4, 2, 1), (1, 10, 99))(12) == 30
    assert [layout(4, 0), layout(0, 5), layout(-1, 0)] == [4, 50, -1]


@forall(layouts(low=-3))
def test_modes(layout):
    modes = layout.modes
    assert len(modes) == layout.rank
    assert list(layout) == list(modes) == [layout[k] for k in range(layout.rank)]
    assert layout[-1] == modes[-1]
    assert layout[1:] == Layout.of(*modes[1:])
    if isinstance(layout.shape, tuple):
        assert Layout.of(*modes) == layout
    else:
        assert modes == (layout,)


@forall(layouts(), layouts())
def test_of_adds(a, b):
    both = Layout.of(a, b)
    for i, j in coordinates((a.size, b.size)):
        assert both(i, j) == a(i) + b(j)


@forall(layouts(low=-3))
def test_flatten(layout):
    flat = layout.flatten()
    assert flat.depth <= 1
    assert values(flat) == values(layout)


@forall(layouts(low=-3), st.data())
def test_group(layout, data):
    begin = data.draw(st.integers(0, layout.rank - 1))
    end = data.draw(st.integers(begin + 1, layout.rank))
    grouped = layout.group(begin, end)
    assert values(grouped) == values(layout)
    assert grouped.rank == layout.rank - (end - begin) + 1
    assert grouped[begin] == layout[begin:end]
    assert layout.group(begin) == layout.group(begin, layout.rank)


@forall(layouts(low=-3))
def test_coalesce_is_the_same_function(layout):
    coalesced = layout.coalesce()
    assert values(coalesced) == values(layout)
    if layout.size > 1:
        assert [coalesced(i) for i in range(2 * layout.size)] == [layout(i) for i in range(2 * layout.size)]


@forall(layouts(low=-3))
def test_coalesce_has_fewest_modes(layout):
    """Each mode ends where the values stop continuing it: no layout with fewer modes is the same function."""
    modes = layout.coalesce().modes
    if layout.size == 1:
        assert layout.coalesce() == Layout(1, 0)
        return
    assert all(mode.depth == 0 and mode.size > 1 for mode in modes)
    for left, right in pairwise(modes):
        assert right.stride != left.shape * left.stride


def test_coalesce_examples():
    """CuTe Layout Algebra, "Coalesce"."""
    layout = Layout((2, (1, 6)), (1, (6, 2)))
    assert layout.coalesce() == Layout(12, 1)
    assert layout.coalesce((1, 1)) == Layout((2, 6), (1, 2))


@forall(layouts(low=-3))
def test_coalesce_by_mode(layout):
    by_mode = layout.coalesce((1,) * layout.rank)
    assert by_mode.modes == tuple(mode.coalesce() for mode in layout)
    assert Layout.of(layout, layout).coalesce((1,)) == Layout.of(layout.coalesce(), layout)


@forall(layouts(low=-2, rank=3) | tame_layouts())
def test_predicates(layout):
    indices = range(layout.size)
    image = {layout(i) for i in indices}
    injective = all(layout(i) != layout(j) for i in indices for j in range(i))
    compact = min(image) == 0 and max(image) == len(image) - 1
    assert layout.is_injective == injective
    assert layout.is_compact == compact
    assert layout.is_bijective == (injective and compact)


def test_predicates_tell_apart():
    assert Layout((4, 2), (2, 1)).is_bijective
    assert Layout(4, 2).is_injective and not Layout(4, 2).is_compact
    assert Layout((4, 2), (1, 0)).is_compact and not Layout((4, 2), (1, 0)).is_injective
    assert not Layout((3, 2), (2, 4)).is_injective and not Layout((3, 2), (2, 4)).is_compact


@forall(layouts())
def test_idx2crd_inverts_crd2idx(layout):
    """Coordinates in colexicographic order, congruent with the shape."""
    shape = layout.shape
    assert [crd2idx(coordinate, shape) for coordinate in coordinates(shape)] == list(range(layout.size))
    assert [idx2crd(i, shape) for i in range(layout.size)] == coordinates(shape)


@forall(layouts())
def test_idx2crd_agrees_with_call_beyond_the_shape(layout):
    if layout.size > 1:
        for i in range(2 * layout.size):
            assert crd2idx(idx2crd(i, layout.shape), layout.shape, layout.stride) == layout(i)


def test_text():
    assert str(Layout((4, 8))) == "(4,8):(1,4)"
    assert str(Layout(((2, 3), 4), ((1, 2), -6))) == "((2,3),4):((1,2),-6)"
    assert str(Layout(4)) == "4:1" and str(Layout((4,))) == "(4):(1)"
    assert repr(Layout((4, 8))) == "Layout(shape=(4, 8), stride=(1, 4))"


def test_equality_and_hash():
    assert Layout((4, 8)) == Layout((4, 8), (1, 4)) and hash(Layout((4, 8))) == hash(Layout((4, 8), (1, 4)))
    assert Layout((4, 8)) != Layout((4, 8), (8, 1)) and Layout(4) != Layout((4,)) and Layout(4) != 4
    assert len({Layout((4, 8)), Layout((4, 8), (1, 4)), Layout((8, 4)), Layout(((4, 8),))}) == 3


def test_layouts_are_frozen():
    with pytest.raises(AttributeError):
        Layout(4).shape = 5


def test_numpy_integers_become_ints():
    numpy = pytest.importorskip("numpy")
    layout = Layout((numpy.int64(4), 8), (numpy.int32(1), 4))
    assert layout == Layout((4, 8)) and type(layout.shape[0]) is type(layout.stride[0]) is int
    assert type(layout(numpy.int64(5), 2)) is int


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(0), "shape 0: an extent is an int of at least 1"),
        (lambda: Layout((4, -2)), "shape -2: an extent is an int"),
        (lambda: Layout((4, 2.0)), "shape 2.0: an extent is an int"),
        (lambda: Layout(True), "shape True: an extent is an int"),
        (lambda: Layout([4, 2]), r"shape \[4, 2\]: an extent is an int of at least 1, or a tuple of extents"),
        (lambda: Layout.row_major((4, None)), "shape None: an extent"),
        (
            lambda: Layout((4, 8), (1, 4, 32)),
            r"stride \(1,4,32\) does not have the structure of the shape \(4,8\)",
        ),
        (lambda: Layout((4, (2, 4)), (1, 4)), r"stride 4 does not have the structure of the shape \(2,4\)"),
        (lambda: Layout(4, (1,)), r"stride \(1\) does not have the structure of the shape 4"),
        (lambda: Layout((4, 8), (1, 0.5)), "stride 0.5: an int or a run-time integer is needed"),
        (lambda: Layout(4, "x"), "stride 'x': an int or a run-time integer is needed"),
        (lambda: Layout(4, False), "stride False: an int or a run-time integer is needed"),
        (lambda: Layout((4, None), (1, None)), "shape None: an extent"),
        (lambda: Layout(4)(1.0), "coordinate 1.0: an int or a run-time integer is needed"),
        (lambda: Layout((4, 8))(1, None), "coordinate None: an int or a run-time integer is needed"),
        (lambda: Layout((4, 8))(1, 2, 3), r"coordinate \(1,2,3\) does not fit the shape \(4,8\)"),
        (lambda: Layout((4, 8))(), r"coordinate \(\) does not fit the shape \(4,8\)"),
        (lambda: Layout((4, 8))((1, 2), 3), r"coordinate \(1,2\) does not fit the shape 4"),
        (lambda: Layout(((2, 2), 8))((0, 1, 1), 3), r"coordinate \(0,1,1\) does not fit the shape \(2,2\)"),
        (lambda: crd2idx((1, 2), 4), r"coordinate \(1,2\) does not fit the shape 4"),
        (lambda: idx2crd("3", (4, 8)), "index '3': an int or a run-time integer is needed"),
        (lambda: idx2crd((1, 2), (4, 8)), r"index \(1, 2\): an int or a run-time integer is needed"),
        (lambda: idx2crd(3, (4, 0)), "shape 0: an extent is an int of at least 1"),
        (lambda: Layout((4, 8))[2], r"\(4,8\):\(1,4\) has no mode 2; its rank is 2"),
        (lambda: Layout((4, 8))[-3], r"\(4,8\):\(1,4\) has no mode -3; its rank is 2"),
        (lambda: Layout((4, 8))["x"], r"\(4,8\):\(1,4\) has no mode 'x'"),
        (lambda: Layout((4, 8)).group(1, 1), r"cannot group the modes from 1 up to 1 of \(4,8\):\(1,4\)"),
        (lambda: Layout((4, 8)).group(0, 3), "cannot group the modes from 0 up to 3 of .*; its rank is 2"),
        (lambda: Layout((4, 8)).group(-1), "cannot group the modes from -1 up to 2"),
        (
            lambda: Layout((4, 8)).coalesce((1, 1, 1)),
            r"coalesce of \(4,8\):\(1,4\): 3 operands are more than its 2 modes",
        ),
        (lambda: Layout(4, -1).cosize, "cosize of 4:-1: the stride -1 must not be negative"),
    ],
)
def test_errors(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_errors_name_the_author_line():
    with pytest.raises(LayoutError, match=r"test_layout\.py:\d+: shape 0"):
        Layout(0)
