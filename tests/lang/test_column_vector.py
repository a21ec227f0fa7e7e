"""Column vectors: which columns a lane has values for, where they are loaded from, and sums over rows."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import ShapeError
from fly.lang.fragment import AccumulatorLayout
from tests.backends.builds import build
from tests.filecheck import filecheck
from tests.layouts import accumulator_layouts
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

EMULATED = ("gfx942", "gfx950")
LAYOUTS = accumulator_layouts(warpgroups=(8, 48))
EVERY_LAYOUT = pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
ROW_TILES, COLUMN_TILES = 2, 3
TOGETHER = 4


@EVERY_LAYOUT
def test_slots_and_column_mates_cover_a_column_once(arch, layout):
    assert sorted(v for values in layout.column_slot_values for v in values) == list(range(layout.values))
    for lane in range(layout.atom.lanes):
        mates = {lane}
        for mask in layout.column_mates:
            mates |= {mate ^ mask for mate in mates}
        for slot, registers in enumerate(layout.column_slot_values):
            places = [layout.coordinate(mate, v) for mate in mates for v in registers]
            assert {column for _, column in places} == {layout.column_lane(lane) + layout.column_slots[slot]}
            assert sorted(row for row, _ in places) == list(range(layout.rows))


@fly.kernel
def column_operations(
    source: fly.Tensor,
    factors: fly.Tensor,
    changed: fly.Tensor,
    index: fly.Tensor,
    sums: fly.Tensor,
    maxima: fly.Tensor,
    first: fly.i32,
    *,
    layout: AccumulatorLayout,
    together: int,
):
    """changed[r, c] = source[r, c] * factors[first + c] + c, and per column: its number, its sum, its maximum.

    Sums and maxima are of a wave's rows, a row of the results for each wave.
    """
    lane = fly.lane_of(layout.atom.lanes)
    row0, column0 = fly.evaluate(layout.row_lane, lane), layout.first_column()

    def places(r: int, c: int) -> list[tuple[fly.Value, fly.Value]]:
        offsets = zip(layout.value_rows, layout.value_columns, strict=True)
        return [(row0 + (r * layout.rows + i), column0 + (c * layout.columns + j)) for i, j in offsets]

    fragment = fly.Fragment.zeros(layout, ROW_TILES, COLUMN_TILES).map(
        lambda tile, r, c: fly.from_elements([source.load(*place) for place in places(r, c)])
    )
    loaded = fly.ColumnVector.load(layout, COLUMN_TILES, factors, first, fill=-3.0, together=together)
    columns = fly.ColumnVector.full(layout, COLUMN_TILES, 0.0).columns()
    result = fragment.map_columns(lambda x, factor, c: x * factor + c.to(fly.f32), loaded, columns)
    for r, row in enumerate(result.tiles):
        for c, tile in enumerate(row):
            for value, place in zip(tile, places(r, c), strict=True):
                changed.store(value, *place)
    total = fragment.column_sum().reduce_lanes(lambda a, b: a + b)
    largest = fragment.column_max().reduce_lanes(fly.maximum)
    for tiles in zip(columns.values, total.values, largest.values, strict=True):
        for column, of_sum, of_max in zip(*tiles, strict=True):
            index.store(column, column)
            sums.store(of_sum, fly.wave_id(), column)
            maxima.store(of_max, fly.wave_id(), column)


def check(run, layout: AccumulatorLayout, wave: int, missing: int, together: int) -> None:
    """What `run(arguments, statics)` leaves is right where the last `missing` factors do not exist."""
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    shape = _, columns = ROW_TILES * layout.rows, COLUMN_TILES * layout.columns
    waves, first = layout.atom.lanes // wave, 8
    source = random.integers(-99, 99, shape).astype(np.float32)
    factors = random.integers(-99, 99, first + columns - missing).astype(np.float32)
    changed, index = np.zeros_like(source), np.zeros(columns, np.int32)
    sums, maxima = (np.zeros((waves, columns), np.float32) for _ in range(2))
    run((source, factors, changed, index, sums, maxima, first), {"layout": layout, "together": together})
    wanted = np.append(factors[first:], np.full(missing, -3.0, np.float32))
    np.testing.assert_array_equal(changed, source * wanted + np.arange(columns), f"seed {seed}")
    np.testing.assert_array_equal(index, np.arange(columns))
    of_waves = source.reshape(ROW_TILES, waves, layout.rows // waves, columns)  # each tile's rows by waves
    np.testing.assert_array_equal(sums, of_waves.sum(axis=(0, 2)), f"seed {seed}")
    np.testing.assert_array_equal(maxima, of_waves.max(axis=(0, 2)), f"seed {seed}")


MISSING = pytest.mark.parametrize(("missing", "together"), [(0, 1), (3, 1), (0, TOGETHER), (2 * TOGETHER, TOGETHER)])


@EVERY_LAYOUT
@MISSING
def test_every_lane_sees_its_columns(arch, layout, missing, together):
    specs = (*(matrix("f32", rank) for rank in (2, 1, 2)), matrix("i32"), *[matrix("f32", 2)] * 2, "i32")

    def run(arguments, statics):
        module = trace(column_operations, *specs, arch=arch, block=layout.atom.lanes, **statics)
        Machine(Program.of(module, target(arch)))(flat(*arguments))

    check(run, layout, target(arch).wave_size, missing, together)


@pytest.mark.parametrize(("arch", "layout"), [p for p in LAYOUTS if p.values[0] in EMULATED])
@pytest.mark.parametrize(("missing", "together"), [(3, 1), (2 * TOGETHER, TOGETHER)])
def test_every_lane_sees_its_columns_on_amd(arch, layout, missing, together, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)

    def run(arguments, statics):
        column_operations[1, layout.atom.lanes](*arguments, **statics)

    check(run, layout, 64, missing, together)


def subtract(scores: fly.Tensor, columns: fly.Tensor, out: fly.Tensor, *, layout: AccumulatorLayout):
    """out = scores - columns, of one tile; every lane's own elements are contiguous in memory."""
    lane = fly.lane_of(layout.atom.lanes)
    fragment = fly.Fragment(layout, ((scores.load(lane * layout.values, length=layout.values),),))
    vector = fly.ColumnVector.load(layout, 1, columns, together=4)
    ((tile,),) = fragment.map_columns(lambda x, c: x - c, vector).tiles
    out.store(tile, lane * layout.values)


def test_columns_side_by_side_are_one_load():
    layout = AccumulatorLayout(target("gfx950").atom("mfma_32x32x16_bf16"), "n")
    assert (layout.column_slots, layout.run) == (tuple(8 * i + j for i in range(4) for j in range(4)), 4)
    filecheck(
        trace(subtract, *[matrix()] * 3, arch="gfx950", layout=layout),
        """
        CHECK-COUNT-4: "fly.load_bounded"{{.*}} -> vector<4xf32>
        CHECK-NOT: fly.load_bounded
        CHECK: vector.from_elements
        CHECK: arith.subf {{.*}} : vector<16xf32>
        """,
    )
    isa = build(fly.kernel(subtract), "gfx950", specs=(matrix(),) * 3, block=64, layout=layout).isa
    assert len(re.findall(r"buffer_load_dwordx4", isa)) == 4 and not re.search(r"buffer_load_dword ", isa)


def test_a_lane_with_one_column_loads_it_once():
    layout = AccumulatorLayout(target("gfx950").atom("mfma_32x32x16_bf16"), "m")
    isa = build(fly.kernel(subtract), "gfx950", specs=(matrix(),) * 3, block=64, layout=layout).isa
    assert len(re.findall(r"buffer_load_dword ", isa)) == 1


def test_neighbours_are_one_load_on_nvidia():
    layout = AccumulatorLayout(target("sm_80").mma("bf16"), "m")
    isa = build(fly.kernel(subtract), "sm_80", specs=(matrix(),) * 3, block=32, layout=layout).isa
    assert len(re.findall(r"ld\.global\.v2\.(?:f|b|u)32", isa)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"together": 3}, r"together is 3; expected a power of two"), ({}, r"unit stride, not <tensor of rank 1, f32>")],
)
def test_mistakes(options, message):
    def kernel(x: fly.Tensor):
        layout = AccumulatorLayout(fly.target().mma("bf16"), "m")
        with pytest.raises(ShapeError, match=message):
            fly.ColumnVector.load(layout, 1, x, fill=math.inf, **options)

    trace(kernel, matrix(unit_stride=bool(options)))
