"""Runs of a vector on their way to shared memory, beside tiles or alone, and what lanes read of them."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.errors import ShapeError
from fly.lang.fragment import AccumulatorLayout
from tests.layouts import accumulator_layouts
from tests.tracing import matrix, trace

TILES = 4


@fly.kernel
def by_runs(
    source: fly.Tensor, out: fly.Tensor, *, layout: AccumulatorLayout, column_tiles: int, count: int, stages: int
):
    """out[run, thread, i] = the element of the thread's i-th column of each run."""
    copy = fly.VectorCopy(source, asynchronous=stages > 1)
    ring = fly.TileRing([(copy, fly.SharedVector.ring("runs", count, source.dtype, stages))], stages)
    for i, flight in (loop := fly.range(0, TILES, carry=ring.start(0))):
        (run,), flight = ring.advance(i, flight)
        values = [x for tile in run.columns(layout, column_tiles).values for x in tile]
        for n, value in enumerate(values):
            out.store(value, i, fly.thread_id.x, n)
        loop.next(flight)
    if stages > 1:
        for token in loop.results.pending:
            fly.wait(token)


# layouts whose columns a lane has side by side, and apart
LAYOUTS = [p for p in accumulator_layouts(warpgroups=()) if p.values[0] in ("gfx950", "sm_80")]


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
def test_every_lane_has_the_elements_of_its_columns(arch, layout, waves, monkeypatch):
    on_amd = arch == "gfx950"
    monkeypatch.setenv("FLY_ARCH", arch if on_amd else "sm_90a")
    column_tiles = 3  # runs are not as long as a power of two, nor as the block has threads
    count, threads = column_tiles * layout.columns, waves * (64 if on_amd else 32)
    slots = len(layout.column_slots)
    seed = np.random.SeedSequence().entropy
    source = np.random.default_rng(seed).standard_normal(TILES * count - 5).astype(np.float32)
    out = np.full((TILES, threads, column_tiles * slots), np.nan, np.float32)
    statics = {"layout": layout, "column_tiles": column_tiles, "count": count, "stages": 1 if on_amd else 2}
    by_runs[1, threads](source, out, **statics)
    whole = np.append(source, np.zeros(5, np.float32)).reshape(TILES, count)
    lane = np.arange(threads) % layout.atom.lanes
    first = np.array([layout.column_lane(int(x)) for x in lane])
    for i in range(column_tiles):
        for n, slot in enumerate(layout.column_slots):
            wanted = whole[:, first + i * layout.columns + slot]
            np.testing.assert_array_equal(out[:, :, i * slots + n], wanted, f"seed {seed}")


@pytest.mark.parametrize(
    ("spec", "count", "threads", "message"),
    [
        (matrix("bf16", 1), 32, 64, "runs are copied of a vector of 32-bit elements with unit stride, not"),
        (matrix("f32", 2), 32, 64, "runs are copied of a vector of 32-bit elements with unit stride, not"),
        (matrix("f32", 1), 0, 64, "a run of 0 elements for 64 threads; expected a power of two of threads"),
        (matrix("f32", 1), 32, 192, "a run of 32 elements for 192 threads; expected a power of two of threads"),
    ],
)
def test_what_cannot_be_copied_by_runs(spec, count, threads, message):
    def copied(source: fly.Tensor):
        fly.VectorCopy(source, asynchronous=False)
        fly.SharedVector.ring("runs", count, fly.f32, 1)

    with pytest.raises(ShapeError, match=message):
        trace(copied, spec, arch="gfx950", block=threads)
