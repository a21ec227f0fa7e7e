"""A panel's tiles end where the matrix does: a ring that runs ahead must copy nothing from behind it."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

ROWS, COLUMNS = 20, 16


def reach(a: fly.Tensor, rows: fly.Tensor, bounds: fly.Tensor):
    """Of each tile of 16 columns: how many of its rows may be read, and how many bytes from its first one on."""
    for tile in range(4):
        window = a.panel(0, COLUMNS).tile(fly.i32(tile), 32)
        rows.store(window.rows_left, tile)
        bounds.store(window.bound, tile)


@pytest.mark.parametrize("arch", ["gfx950", "sm_80", "sm_90a"])
@pytest.mark.parametrize(("width", "whole"), [(16, 1), (40, 2), (64, 4)])
def test_a_tile_behind_the_last_has_no_rows(arch, width, whole):
    """Buffer loads go by the bound, and asynchronous copies by the rows: each alone keeps them inside."""
    a = np.zeros((ROWS, width), np.float16)
    rows, bounds = np.full(4, -1, np.int32), np.full(4, -1, np.int32)
    module = trace(reach, matrix("f16", 2), matrix("i32"), matrix("i32"), arch=arch, block=1)
    Machine(Program.of(module, target(arch)))(flat(a, rows, bounds), (1, 1, 1))
    assert rows.tolist() == [ROWS] * whole + [0] * (4 - whole)
    assert all(bounds[:whole] > 0) and not bounds[whole:].any()
