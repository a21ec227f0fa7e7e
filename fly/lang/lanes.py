"""Maps from a lane's index to a coordinate, as layouts that cost a few bit operations at run time."""

from __future__ import annotations

from collections.abc import Sequence

from fly.errors import LayoutError
from fly.ir.dtypes import i32
from fly.ir.value import Value
from fly.layout import Layout


def linear_layout(table: Sequence[int]) -> Layout:
    """The layout f with f(lane) == table[lane] for every lane; modes are runs of bits with doubling strides.

    Raises:
        LayoutError: the table is not linear in the bits of the lane index (or not zero at lane 0).
    """
    bits = (len(table) - 1).bit_length()
    if 1 << bits != len(table):
        raise LayoutError(f"a lane table has a power-of-two length, not {len(table)}")
    strides = [table[1 << bit] for bit in range(bits)]
    for lane, wanted in enumerate(table):
        if wanted != sum(stride for bit, stride in enumerate(strides) if lane >> bit & 1):
            raise LayoutError(f"lane {lane} maps to {wanted}, which is not linear in the lane's bits")
    modes: list[tuple[int, int]] = []
    for stride in strides:
        if modes and stride == modes[-1][1] * modes[-1][0]:
            modes[-1] = (modes[-1][0] * 2, modes[-1][1])
        else:
            modes.append((2, stride))
    return Layout(tuple(shape for shape, _ in modes), tuple(stride for _, stride in modes))


def evaluate(layout: Layout, lane: Value) -> Value:
    """`layout(lane)` for a run-time lane; shifts and masks where the extents are powers of two."""
    index: Value | int = layout(lane)
    return index if isinstance(index, Value) else i32(index)


def lane_map(table: Sequence[int], lane: Value) -> Value:
    """`table[lane]` for a run-time lane; the table must be linear in the lane's bits."""
    return evaluate(linear_layout(table), lane)
