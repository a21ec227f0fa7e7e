"""Swizzled tiles: a bijection, free of bank conflicts, and the same at trace time and at run time."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import LayoutError
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

TILES = [
    fly.SwizzledTile(rows, columns, granule, fold)
    for rows, columns, granule, fold in itertools.product(
        (16, 128), (32, 64, 96, 128, 160), (4, 8, 16), (False, True)
    )
]
TILES += [
    fly.SwizzledTile(64, columns, granule, rotate=rotate)
    for columns, granule, rotate in itertools.product((32, 64, 96), (4, 8), (1, 2, 3))
]
TILES += [fly.SwizzledTile(24, 192), fly.SwizzledTile(72, 224, 16), fly.SwizzledTile(64, 256)]
EVERY_TILE = pytest.mark.parametrize(
    "tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}g{t.granule}{'f' * t.fold}r{t.rotate}"
)


@functools.cache
def offsets(tile: fly.SwizzledTile) -> np.ndarray:
    return np.array([[tile(r, c) for c in range(tile.columns)] for r in range(tile.rows)])


@pytest.mark.sample(3)
@EVERY_TILE
def test_is_a_bijection_that_keeps_runs_together(tile):
    table = offsets(tile)
    assert sorted(table.flat) == list(range(tile.rows * tile.columns))
    assert tile.bytes == 2 * table.size
    runs = table.reshape(tile.rows, -1, tile.granule)
    np.testing.assert_array_equal(runs, runs[:, :, :1] + np.arange(tile.granule))
    # rows stay in their place
    np.testing.assert_array_equal(table // tile.columns, np.arange(tile.rows)[:, None] + 0 * table)


@pytest.mark.parametrize("tile", [t for t in TILES if not t.fold], ids=str)
def test_as_many_rows_as_fill_the_banks_are_free_of_conflicts_at_any_column(tile):
    """Runs of one column in consecutive rows, as matrix loads read them: 128 bytes lie in different banks.

    Folded tiles are for another pattern.
    """
    together = 64 // tile.granule
    starts = offsets(tile)[:, :: tile.granule] // tile.granule  # in runs
    for first in range(0, tile.rows - together + 1, together):
        for column in starts[first : first + together].T:
            assert sorted(column % together) == list(range(together))


@EVERY_TILE
def test_phases_of_disjoint_row_bits_combine_by_xor(tile):
    for low, high in itertools.product(range(8), range(0, tile.rows, 8)):
        assert tile.phase(low + high) == tile.phase(low) ^ tile.phase(high)


@pytest.mark.sample(3)
@EVERY_TILE
def test_repeats_after_its_period(tile):
    table = offsets(tile)
    for row in range(tile.row_period, tile.rows):
        np.testing.assert_array_equal(
            table[row] - tile.columns * row, table[row % tile.row_period] - tile.columns * (row % tile.row_period)
        )


def tabulate(out: fly.Tensor, *, tile: fly.SwizzledTile):
    """out[row, column] = the byte offset at run time; one thread a row."""
    row = fly.thread_id.x
    for column in fly.range(tile.columns):
        out.store(tile.base(row, column), row, column)


@EVERY_TILE
def test_run_time_offsets_are_the_static_ones(tile):
    threads = -(-tile.rows // 32) * 32
    out = np.zeros((threads, tile.columns), np.int32)
    module = trace(tabulate, matrix("i32", 2), arch="sm_80", block=threads, tile=tile)
    Machine(Program.of(module, target("sm_80")))(flat(out))
    np.testing.assert_array_equal(out[: tile.rows], 2 * offsets(tile))


@EVERY_TILE
def test_displacing_a_base_is_addressing_the_sum(tile):
    """Every split (lane part, static part) that `displace` accepts, with disjoint column bits."""
    table = 2 * offsets(tile)
    for row in range(0, tile.rows, tile.row_period):
        for column in range(0, tile.columns, tile.granule):
            xor, add = tile.displace(row, column)
            for lane_row in range(0, min(tile.row_period, tile.rows - row), 3):
                for lane_column in range(0, tile.columns, tile.granule):
                    if not lane_column & column and lane_column + column < tile.columns:
                        assert (table[lane_row, lane_column] ^ xor) + add == table[
                            lane_row + row, lane_column + column
                        ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fly.SwizzledTile(28, 64), r"rows of a swizzled tile is 28; expected a multiple of 8"),
        (lambda: fly.SwizzledTile(64, 0), r"columns of a swizzled tile is 0; expected a multiple of its granule 8"),
        (lambda: fly.SwizzledTile(64, 64, 3), r"granule of a swizzled tile is 3; expected a power of two"),
        (
            lambda: fly.SwizzledTile(64, 40, 16),
            r"columns of a swizzled tile is 40; expected a multiple of its granule 16",
        ),
        (
            lambda: fly.SwizzledTile(64, 64).displace(4, 0),
            r"\(4, 0\) of a swizzled tile must be a multiple of \(8, 8\)",
        ),
        (lambda: fly.SwizzledTile(64, 64).displace(8, 4), r"\(8, 4\) of a swizzled tile must be a multiple"),
        (lambda: fly.SwizzledTile(64, 64, fold=True).displace(8, 0), r"must be a multiple of \(64, 8\)"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(LayoutError, match=message):
        make()
