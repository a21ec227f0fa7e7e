"""Divides and products, against their definitions over all indices."""

from itertools import product

import pytest
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
)

# division


def assert_divided(result: Layout, a: Layout, tile: Layout):
    """R((t, r)) == A(T(t) + T*(r))."""
    rest = tile.complement(a.size)
    for t, r in coordinates((tile.size, rest.size)):
        assert result(t, r) == a(tile(t) + rest(r))
    assert result.rank == 2 and result[0].size == tile.size and result[1].size == rest.size


@forall(power_layouts() | layouts((1, 2, 4, 8), low=-3), power_layouts())
def test_logical_divide(a, tile):
    assert_divided(a.logical_divide(tile), a, tile)


@forall(layouts(low=-3), layouts(rank=2))
def test_logical_divide_is_right_or_an_error(a, tile):
    try:
        result = a.logical_divide(tile)
    except LayoutError:
        return
    assert_divided(result, a, tile)


@forall(layouts(low=-3), st.data())
def test_divide_into_runs(a, data):
    """Any layout is cut into runs of a product of its leading extents times a divisor of the next."""
    *lead, last = extents(a.coalesce())[: data.draw(st.integers(1, a.coalesce().rank))]
    tile = size(tuple(lead)) * data.draw(st.sampled_from([n for n in range(1, last + 1) if last % n == 0]))
    result = a.logical_divide(tile)
    for i in range(a.size):
        assert result(i % tile, i // tile) == a(i)


@forall(st.integers(1, 40), st.integers(1, 12))
def test_tiles_may_hang_over(n, tile):
    """A mode whose extent is no multiple of the tile gives one more tile; what is inside is where it was."""
    mode = Layout(n, 3)
    result = mode.logical_divide(tile)
    assert result.size == -(-mode.size // tile) * tile
    for i in range(mode.size):
        assert result(i % tile, i // tile) == mode(i)


@forall(power_layouts(), power_layouts(rank=2), power_layouts(), power_layouts(rank=2), power_layouts())
def test_divide_by_mode(a, s, b, t, c):
    """The three orders of one division: ((s, x), (t, y), c), ((s, t), (x, y, c)) and ((s, t), x, y, c)."""
    both = Layout.of(a, b, c)
    (tile_a, rest_a), (tile_b, rest_b) = a.logical_divide(s), b.logical_divide(t)
    assert both.logical_divide((s, t)) == Layout.of(a.logical_divide(s), b.logical_divide(t), c)
    tiles = Layout.of(tile_a, tile_b)
    assert both.zipped_divide((s, t)) == Layout.of(tiles, Layout.of(rest_a, rest_b, c))
    assert both.tiled_divide((s, t)) == Layout.of(tiles, rest_a, rest_b, c)


@forall(power_layouts(), power_layouts())
def test_divide_by_one_layout_is_zipped_already(a, tile):
    tiles, rest = a.logical_divide(tile)
    assert a.zipped_divide(tile) == a.logical_divide(tile)
    assert a.tiled_divide(tile) == Layout.of(tiles, *rest)


@forall(power_layouts(rank=2), power_layouts(rank=2), power_layouts(rank=2), st.sampled_from((1, 2, 4)))
def test_divide_by_nested_tilers(a, b, c, tile):
    whole = Layout.of(Layout.of(a, b), c)
    (tile_a, rest_a), (tile_c, rest_c) = a.logical_divide(tile), c.logical_divide(2)
    assert whole.zipped_divide(((tile,), 2)) == Layout.of(
        Layout.of(Layout.of(tile_a), tile_c), Layout.of(Layout.of(rest_a, b), rest_c)
    )


def test_divide_examples():
    """CuTe Layout Algebra, "Logical Divide 1-D Example", "2-D Example" and "Zipped, Tiled, Flat Divides"."""
    assert Layout((4, 2, 3), (2, 1, 8)).logical_divide(Layout(4, 2)) == Layout(((2, 2), (2, 3)), ((4, 1), (2, 8)))
    a = Layout((9, (4, 8)), (59, (13, 1)))
    tiler = (Layout(3, 3), Layout((2, 4), (1, 8)))
    assert a.logical_divide(tiler) == Layout(((3, 3), ((2, 4), (2, 2))), ((177, 59), ((13, 2), (26, 1))))
    assert a.zipped_divide(tiler) == Layout(((3, (2, 4)), (3, (2, 2))), ((177, (13, 2)), (59, (26, 1))))
    assert a.tiled_divide(tiler) == Layout(((3, (2, 4)), 3, (2, 2)), ((177, (13, 2)), 59, (26, 1)))


# product


def assert_multiplied(result: Layout, a: Layout, b: Layout):
    """R((a, b)) == A(a) + A*(B(b)) with A* = complement(A, size(A) * cosize(B)), and R's first mode is A."""
    translates = a.complement(a.size * b.cosize)
    assert result.rank == 2 and result[0] == a
    assert_refines(result[1].shape, b.shape)
    for j, coordinate in enumerate(coordinates(b.shape)):
        for i in range(a.size):
            assert result(i, j) == result(i, coordinate) == a(i) + translates(b(coordinate))


@forall(power_layouts(rank=2), power_layouts(rank=2))
def test_logical_product(a, b):
    assert_multiplied(a.logical_product(b), a, b)


@forall(power_layouts(rank=2), power_layouts(rank=2))
def test_logical_product_holds_disjoint_copies(a, b):
    """As many translates of A as B has coordinates, no two of which share a place."""
    result = a.logical_product(b)
    copies = [{result(i, j) for i in range(a.size)} for j in range(b.size)]
    for j, copy in enumerate(copies):
        assert {place - result(0, j) for place in copy} == set(a.table())
    assert len(set.union(*copies)) == a.size * b.size


@forall(compact_layouts(rank=2), layouts(rank=2))
def test_product_of_a_compact_block_exists_for_every_grid(a, b):
    """The complement of a compact block is one mode, which nothing can run across unevenly."""
    result = a.logical_product(b)
    assert_multiplied(result, a, b)
    assert [result(i, j) for j in range(b.size) for i in range(a.size)] == [
        a(i) + a.size * b(j) for j in range(b.size) for i in range(a.size)
    ]


@forall(layouts(rank=2), layouts(rank=2))
def test_logical_product_is_right_or_an_error(a, b):
    try:
        result = a.logical_product(b)
    except LayoutError:
        return
    assert_multiplied(result, a, b)


@forall(power_layouts(rank=2), power_layouts(rank=2), power_layouts(rank=2), power_layouts(rank=2))
def test_product_by_mode(a, s, b, t):
    both, c = Layout.of(a, b, Layout(3, 7)), Layout(3, 7)
    (block_a, grid_a), (block_b, grid_b) = a.logical_product(s), b.logical_product(t)
    blocks = Layout.of(block_a, block_b)
    assert both.logical_product((s, t)) == Layout.of(a.logical_product(s), b.logical_product(t), c)
    assert both.zipped_product((s, t)) == Layout.of(blocks, Layout.of(grid_a, grid_b, c))
    assert both.tiled_product((s, t)) == Layout.of(blocks, grid_a, grid_b, c)


def test_product_examples():
    """CuTe Layout Algebra, "Logical Product 1-D Example"."""
    block = Layout((2, 2), (4, 1))
    assert block.logical_product(6) == Layout(((2, 2), (2, 3)), ((4, 1), (2, 8)))
    assert block.logical_product(Layout((4, 2), (2, 1))) == Layout(((2, 2), (4, 2)), ((4, 1), (8, 2)))


@forall(power_layouts(rank=2), power_layouts(rank=2))
def test_blocked_and_raked_product(a, b):
    """Coordinate a_k + size(A_k) * b_k (or b_k + size(B_k) * a_k) of mode k is at A(a) + A*(B(b))."""
    blocked, raked = a.blocked_product(b), a.raked_product(b)
    translates = a.complement(a.size * b.cosize)
    rank = max(a.rank, b.rank)
    extents_a = [mode.size for mode in a] + [1] * (rank - a.rank)
    extents_b = [mode.size for mode in b] + [1] * (rank - b.rank)
    assert blocked.rank == raked.rank == rank
    assert [mode.size for mode in blocked] == [m * n for m, n in zip(extents_a, extents_b, strict=True)]
    for i, j in product(coordinates(tuple(extents_a)), coordinates(tuple(extents_b))):
        place = a(i[: a.rank]) + translates(b(j[: b.rank]))
        assert blocked(tuple(x + m * y for x, m, y in zip(i, extents_a, j, strict=True))) == place
        assert raked(tuple(y + n * x for x, n, y in zip(i, extents_b, j, strict=True))) == place


def test_blocked_and_raked_examples():
    """CuTe Layout Algebra, "Blocked and Raked Products", with the modes coalesced where they can be."""
    block, grid = Layout((2, 5), (5, 1)), Layout((3, 4), (1, 3))
    blocked = block.blocked_product(grid)
    assert (
        blocked == Layout(((2, 3), (5, 4)), ((5, 10), (1, 30))).coalesce((1, 1)) == Layout((6, (5, 4)), (5, (1, 30)))
    )
    assert block.raked_product(grid) == Layout(((3, 2), (4, 5)), ((10, 5), (30, 1)))


# errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Layout((4, 6), (6, 1)).logical_divide(3),
            r"cannot divide \(4,6\):\(6,1\) by 3:1, which is to compose it with \(3,8\):\(1,3\): 8:3",
        ),
        (lambda: Layout(8).logical_divide(Layout((2, 2), (1, 1))), r"\(2,2\):\(1,1\) has no complement"),
        (
            lambda: Layout((4, 8)).logical_divide((2, 2, 2)),
            "logical_divide of .*: 3 operands are more than its 2",
        ),
        (
            lambda: Layout((4, 8)).zipped_divide((2, 2, 2)),
            "zipped_divide of .*: 3 operands are more than its 2",
        ),
        (
            lambda: Layout((4, 8)).tiled_divide((2, 2, 2)),
            "tiled_divide of .*: 3 operands are more than its 2",
        ),
        (
            lambda: Layout(2, 2).logical_product(Layout(3)),
            r"cannot multiply 2:2 by 3:1, .* its complement \(2,2\):\(1,4\) with the latter: 3:1 of",
        ),
        (lambda: Layout((3, 2), (2, 3)).logical_product(2), r"\(3,2\):\(2,3\) has no complement"),
        (
            lambda: Layout((4, 8)).logical_product((2, 2, 2)),
            "logical_product of .*: 3 operands are more than",
        ),
        (lambda: Layout((4, 8)).zipped_product((2, 2, 2)), "zipped_product of .*: 3 operands are more than"),
        (lambda: Layout((4, 8)).tiled_product((2, 2, 2)), "tiled_product of .*: 3 operands are more than"),
    ],
)
def test_errors(make, message):
    with pytest.raises(LayoutError, match=message):
        make()
