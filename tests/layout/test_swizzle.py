"""Swizzles: the definition bit by bit, what they preserve, and the bank conflicts that they remove."""

import pytest
from hypothesis import strategies as st

from fly.errors import LayoutError
from fly.lang.banks import bank_conflicts
from fly.layout import ComposedLayout, Layout, Swizzle
from tests.layout.strategies import coordinates, forall, layouts, power_layouts


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 4))
    distance = draw(st.integers(bits, 6))
    return Swizzle(bits, draw(st.integers(0, 4)), draw(st.sampled_from((distance, -distance))))


@forall(swizzles(), st.integers(0, 2**16 - 1))
def test_definition_bit_by_bit(swizzle, index):
    """Bit base + k (of the lower field, or with a negative shift of the upper) is xored with its partner."""
    low = swizzle.base
    high = low + abs(swizzle.shift)
    source, target = (high, low) if swizzle.shift >= 0 else (low, high)
    expected = index
    for k in range(swizzle.bits):
        expected ^= (index >> (source + k) & 1) << (target + k)
    assert swizzle(index) == expected


@forall(swizzles(), st.integers(0, 2**20))
def test_involution(swizzle, index):
    assert swizzle(swizzle(index)) == index


@forall(swizzles(), st.integers(0, 3))
def test_permutes_aligned_blocks(swizzle, block):
    size = 2 ** (swizzle.base + swizzle.bits + abs(swizzle.shift))
    indices = range(block * size, (block + 1) * size)
    assert sorted(map(swizzle, indices)) == list(indices)


@forall(swizzles(), st.integers(0, 2**12))
def test_keeps_runs_together(swizzle, run):
    width = 2**swizzle.base
    start = swizzle(run * width)
    assert start % width == 0
    assert [swizzle(run * width + k) for k in range(width)] == [start + k for k in range(width)]


class Bits:
    """A run-time integer that can do nothing but what a swizzle needs."""

    def __init__(self, value: int):
        self.value = value

    def __and__(self, mask):
        return Bits(self.value & mask)

    def __rshift__(self, distance):
        return Bits(self.value >> distance)

    def __lshift__(self, distance):
        return Bits(self.value << distance)

    def __xor__(self, other):
        return Bits(self.value ^ other.value)

    def __mul__(self, factor):
        return Bits(self.value * factor)

    def __add__(self, other):
        return Bits(self.value + (other.value if isinstance(other, Bits) else other))


@forall(swizzles(), st.integers(0, 2**16))
def test_runtime_index(swizzle, index):
    assert swizzle(Bits(index)).value == swizzle(index)


def test_no_bits_is_the_identity():
    index = Bits(5)
    assert Swizzle(0, 4, 3)(index) is index


@forall(swizzles(), layouts())
def test_composed_layout(swizzle, layout):
    composed = swizzle.compose(layout)
    assert composed == ComposedLayout(swizzle, layout) and hash(composed) == hash(swizzle.compose(layout))
    assert (composed.shape, composed.size) == (layout.shape, layout.size)
    for coordinate in coordinates(layout.shape):
        assert composed(coordinate) == swizzle(layout(coordinate))
    assert composed.table() == [composed(i) for i in range(layout.size)]
    assert composed.cosize == 1 + max(composed.table())


@forall(swizzles(), layouts((1, 2, 4, 8)), power_layouts())
def test_composed_layout_composes(swizzle, layout, inner):
    composed = swizzle.compose(layout)
    for i in range(inner.size):
        assert composed.compose(inner)(i) == composed(inner(i))


def test_composed_layout_at_runtime():
    composed = Swizzle(3, 3, 3).compose(Layout.row_major((8, 64)))
    assert composed(Bits(5), Bits(17)).value == composed(5, 17) == (5 * 64 + 17) ^ (5 << 3)


def test_text():
    assert str(Swizzle(3, 4, -3)) == "Sw<3,4,-3>"
    assert str(Swizzle(3, 3, 3).compose(Layout((8, 8)))) == "Sw<3,3,3> o (8,8):(1,8)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 3), r"Swizzle\(bits=-1, base=0, shift=3\): bits and base must not be negative"),
        ((3, -1, 3), r"Swizzle\(bits=3, base=-1, shift=3\): bits and base must not be negative"),
        ((3, 0, 2), r"Swizzle\(bits=3, base=0, shift=2\): \|shift\| must be at least bits"),
        ((3, 0, -2), r"Swizzle\(bits=3, base=0, shift=-2\): \|shift\| must be at least bits"),
        ((3, 0.5, 3), r"Swizzle\(bits=3, base=0.5, shift=3\): bits, base and shift must be ints"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Swizzle(*arguments)


# bank conflicts of a 16-bit tile with rows of 64 elements, 128 bytes: all banks once

ROWS = Layout.row_major((64, 64))
SWIZZLED = Swizzle(3, 3, 3).compose(ROWS)


def column_reads(tile, column: int) -> list[int]:
    """Byte addresses of 32 lanes, lane r reading 8 elements of row r from `column` on."""
    return [2 * tile(row, column) for row in range(32)]


@pytest.mark.parametrize("column", range(0, 64, 8))
def test_swizzle_removes_bank_conflicts_down_a_column(column):
    assert bank_conflicts(column_reads(ROWS, column), 16) == 4 * 7
    assert bank_conflicts(column_reads(SWIZZLED, column), 16) == 0


@pytest.mark.parametrize("row", range(16))
def test_swizzle_keeps_rows_free_of_conflicts(row):
    addresses = [2 * SWIZZLED(row + lane // 8, lane % 8 * 8) for lane in range(32)]
    assert bank_conflicts(addresses, 16) == 0


def test_bank_conflicts_counts_extra_passes():
    assert bank_conflicts([4 * lane for lane in range(32)], 4) == 0
    assert bank_conflicts([0] * 32, 4) == 0
    assert bank_conflicts([8 * lane for lane in range(32)], 4) == 1
    assert bank_conflicts([128 * lane for lane in range(32)], 4) == 31
    assert bank_conflicts([132 * lane for lane in range(32)], 4) == 0
    assert bank_conflicts([128 * lane for lane in range(32)], 4, banks=64) == 15
