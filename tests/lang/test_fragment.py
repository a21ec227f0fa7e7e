"""Accumulator tiles seen as matrices: where registers are, and what row operations compute."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import AtomError, ShapeError
from fly.lang.atoms import MmaAtom
from fly.lang.fragment import AccumulatorLayout
from tests.layouts import accumulator_layouts
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

LAYOUTS = accumulator_layouts(warpgroups=(8, 48))
EVERY_LAYOUT = pytest.mark.parametrize(("arch", "layout"), LAYOUTS)


@EVERY_LAYOUT
def test_coordinates_split_into_lane_and_register_parts(arch, layout):
    seen = set()
    for lane in range(layout.atom.lanes):
        row, column = layout.row_lane(lane), layout.column_lane(lane)
        for v in range(layout.values):
            place = layout.coordinate(lane, v)
            assert place == (row + layout.value_rows[v], column + layout.value_columns[v])
            seen.add(place)
    assert seen == {(r, c) for r in range(layout.rows) for c in range(layout.columns)}


@EVERY_LAYOUT
def test_slots_and_row_mates_cover_a_row_once(arch, layout):
    assert sorted(v for values in layout.slot_values for v in values) == list(range(layout.values))
    for lane in range(layout.atom.lanes):
        mates = {lane}
        for mask in layout.row_mates:
            mates |= {mate ^ mask for mate in mates}
        for slot, registers in enumerate(layout.slot_values):
            places = [layout.coordinate(mate, v) for mate in mates for v in registers]
            assert {row for row, _ in places} == {layout.coordinate(lane, layout.slot_values[slot][0])[0]}
            assert sorted(column for _, column in places) == list(range(layout.columns))


def test_known_layouts():
    mfma = AccumulatorLayout(target("gfx950").atom("mfma_32x32x16_bf16"), "n")
    assert (mfma.rows, mfma.columns, mfma.slots, mfma.row_mates) == (32, 32, (0,), (32,))
    mma = AccumulatorLayout(target("sm_80").mma("bf16"), "m")
    assert (mma.rows, mma.columns, mma.slots, mma.row_mates) == (16, 8, (0, 8), (1, 2))
    with pytest.raises(AtomError, match=r"rows_on is 'k'; expected 'm' or 'n'"):
        AccumulatorLayout(mma.atom, "k")


ROW_TILES, COLUMN_TILES = 2, 3


def row_operations(
    source: fly.Tensor,
    limits: fly.Tensor,
    maxima: fly.Tensor,
    sums: fly.Tensor,
    index: fly.Tensor,
    changed: fly.Tensor,
    masked: fly.Tensor,
    starts: fly.Tensor,
    cut: fly.Tensor,
    *,
    layout: AccumulatorLayout,
):
    """Load a fragment, reduce its rows, change and mask its elements, and store all of it."""
    lane = fly.lane_of(layout.atom.lanes)
    row0, column0 = fly.evaluate(layout.row_lane, lane), fly.evaluate(layout.column_lane, lane)

    def places(r: int, c: int) -> list[tuple[fly.Value, fly.Value]]:
        return [
            (
                row0 + (r * layout.rows + layout.value_rows[v]),
                column0 + (c * layout.columns + layout.value_columns[v]),
            )
            for v in range(layout.values)
        ]

    def load(tile: fly.Value, r: int, c: int) -> fly.Value:
        return fly.from_elements([source.load(*place) for place in places(r, c)])

    def store(fragment: fly.Fragment, out: fly.Tensor) -> None:
        for r, row in enumerate(fragment.tiles):
            for c, tile in enumerate(row):
                for value, place in zip(tile, places(r, c), strict=True):
                    out.store(value, *place)

    fragment = fly.Fragment.zeros(layout, ROW_TILES, COLUMN_TILES).map(load)
    row_max = fragment.row_max().reduce_lanes(fly.maximum)
    row_sum = fragment.row_sum().reduce_lanes(lambda a, b: a + b)
    rows = row_max.rows()
    for found, values in ((maxima, row_max), (sums, row_sum), (index, rows)):
        for value_tile, row_tile in zip(values.values, rows.values, strict=True):
            for value, row in zip(value_tile, row_tile, strict=True):
                found.store(value, row)
    store(fragment.fma_rows(fly.f32(2.0), row_max).scale_rows(row_max), changed)
    bounds, begins = (rows.map(lambda row, tensor=tensor: tensor.load(row)) for tensor in (limits, starts))
    store(fragment.keep_columns_below(bounds, -1.0), masked)
    store(fragment.keep_columns_below(bounds, -1.0, starts=begins), cut)


@EVERY_LAYOUT
def test_row_operations_compute_what_they_say(arch, layout):
    shape = rows, columns = ROW_TILES * layout.rows, COLUMN_TILES * layout.columns
    random = np.random.default_rng(0)
    source = random.integers(-99, 99, shape).astype(np.float32)
    limits, starts = (random.integers(-2, columns + 2, rows).astype(np.int32) for _ in range(2))
    maxima, sums, index = np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    changed, masked, cut = (np.zeros_like(source) for _ in range(3))
    full, vector, ints = matrix("f32", 2), matrix("f32"), matrix("i32")
    specs = (full, ints, vector, vector, ints, full, full, ints, full)
    module = trace(row_operations, *specs, arch=arch, block=layout.atom.lanes, layout=layout)
    Machine(Program.of(module, target(arch)))(flat(source, limits, maxima, sums, index, changed, masked, starts, cut))
    largest = source.max(axis=1)
    np.testing.assert_array_equal(maxima, largest)
    np.testing.assert_array_equal(sums, source.sum(axis=1))
    np.testing.assert_array_equal(index, np.arange(rows))
    np.testing.assert_array_equal(changed, (source * 2 + largest[:, None]) * largest[:, None])
    seen = np.arange(columns) < limits[:, None]
    np.testing.assert_array_equal(masked, np.where(seen, source, -1))
    np.testing.assert_array_equal(cut, np.where(seen & (np.arange(columns) >= starts[:, None]), source, -1))


def store_runs(out: fly.Tensor, *, layout: AccumulatorLayout, columns: int):
    fragment = fly.Fragment.zeros(layout, ROW_TILES, COLUMN_TILES).map(lambda tile, r, c: tile + 1.0)
    for row, column, values in fragment.runs(columns):
        out.store(values, row, column)


@pytest.mark.parametrize("arch", ["gfx950", "sm_80"])
@pytest.mark.parametrize("left_out", [0, 8, 16])
def test_runs_of_the_columns_in_use(arch, left_out):
    layout = fly.chain(target(arch).mma("bf16")).layout
    out = np.zeros((ROW_TILES * layout.rows, COLUMN_TILES * layout.columns), np.float32)
    columns = out.shape[1] - left_out
    module = trace(store_runs, matrix("f32", 2), arch=arch, layout=layout, columns=columns)
    Machine(Program.of(module, target(arch)))(flat(out))
    assert (out[:, :columns] == 1).all() and (out[:, columns:] == 0).all()
    with pytest.raises(ShapeError, match=r"20 columns of a fragment in use; expected a multiple of 8"):
        trace(store_runs, matrix("f32", 2), arch=arch, layout=layout, columns=20)


def test_a_fragment_has_tiles():
    def kernel(n: fly.i32):
        layout = AccumulatorLayout(fly.target().mma("bf16"), "m")
        with pytest.raises(ShapeError, match="a fragment needs at least one tile, not 0 x 2"):
            fly.Fragment.zeros(layout, 0, 2)

    trace(kernel, "i32")


def test_layouts_are_static_to_loops():
    assert AccumulatorLayout.is_static and MmaAtom.__dataclass_params__.frozen


def numbered(source: fly.Tensor, limits: fly.Tensor, out: fly.Tensor, *, layout: AccumulatorLayout):
    """out = source + limit of the row + 1000 * column, where `map_places` says that an element is."""
    lane = fly.lane_of(layout.atom.lanes)
    row0, column0 = fly.evaluate(layout.row_lane, lane), fly.evaluate(layout.column_lane, lane)
    layouts = list(zip(layout.value_rows, layout.value_columns, strict=True))

    def places(r: int, c: int) -> list[tuple[fly.Value, fly.Value]]:
        return [(row0 + (r * layout.rows + i), column0 + (c * layout.columns + j)) for i, j in layouts]

    start = fly.Fragment.zeros(layout, ROW_TILES, COLUMN_TILES)
    fragment = start.map(lambda t, r, c: fly.from_elements([source.load(*place) for place in places(r, c)]))
    rows = start.row_max().rows().map(lambda row: limits.load(row))
    result = fragment.map_places(rows, lambda tile, row, column: tile + (row + column * 1000).to(fly.f32))
    for r, tiles in enumerate(result.tiles):
        for c, tile in enumerate(tiles):
            for value, place in zip(tile, places(r, c), strict=True):
                out.store(value, *place)


@EVERY_LAYOUT
def test_map_places_tells_rows_and_columns(arch, layout):
    shape = rows, columns = ROW_TILES * layout.rows, COLUMN_TILES * layout.columns
    random = np.random.default_rng(0)
    source = random.integers(-99, 99, shape).astype(np.float32)
    limits = random.integers(-99, 99, rows).astype(np.int32)
    out = np.zeros_like(source)
    specs = (matrix("f32", 2), matrix("i32"), matrix("f32", 2))
    module = trace(numbered, *specs, arch=arch, block=layout.atom.lanes, layout=layout)
    Machine(Program.of(module, target(arch)))(flat(source, limits, out))
    np.testing.assert_array_equal(out, source + limits[:, None] + 1000 * np.arange(columns))
