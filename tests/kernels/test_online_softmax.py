"""The running softmax, tile by tile in the simulator: right when every tile rescales, and when few do."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fly
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.backends.target import target
from fly.lang.fragment import AccumulatorLayout
from kernels.online_softmax import LAZY_LOG2, OnlineSoftmax
from tests.simulator import Machine, Program, flat
from tests.tracing import matrix, trace

N, TILES = 16, 5
LAYOUTS = {
    "sm_90a": AccumulatorLayout(WarpgroupAtom(N, "bf16"), "m"),
    "gfx950": AccumulatorLayout(target("gfx950").atom("mfma_32x32x16_bf16"), "n"),
}


def softmax(
    scores: fly.Tensor,
    scale: fly.f32,
    weights: fly.Tensor,
    lse: fly.Tensor,
    rescaled: fly.Tensor,
    *,
    layout: AccumulatorLayout,
    masked: bool,
    lazy: bool | None,
):
    """weights[row, c] = sum over tiles of softmax(scale * scores)[row, c + tile]; `lazy` None: with `update`.

    rescaled[tile, thread] is 1 where the accumulators were multiplied.
    """
    lane = fly.lane_of(layout.atom.lanes)
    row0, column0 = fly.evaluate(layout.row_lane, lane), fly.evaluate(layout.column_lane, lane)
    places = [(row0 + r, column0 + c) for r, c in zip(layout.value_rows, layout.value_columns, strict=True)]
    start = (OnlineSoftmax.start(layout, 1), fly.Fragment.zeros(layout, 1, 1))
    scale_log2 = scale * math.log2(math.e)
    for t, (state, output) in (loop := fly.range(TILES, carry=start)):
        tile = fly.from_elements([scores.load(row, column + t * layout.columns) for row, column in places])
        fragment = fly.Fragment(layout, ((tile,),))
        if lazy is None:
            state, probabilities, output = state.update(fragment, output, scale_log2, masked=masked, lazy=False)
            needed = fly.thread_id.x >= 0
        else:
            state, probabilities, factor, needed = state.advance(fragment, scale_log2, masked=masked, lazy=lazy)
        if lazy is False:
            output = output.scale_rows(factor)
            needed = fly.thread_id.x >= 0
        elif lazy:
            output = fly.cond(needed, lambda o=output, f=factor: o.scale_rows(f), lambda o=output: o)
        rescaled.store(needed.to(fly.i32), t * layout.atom.lanes + lane)
        output = output.map(lambda o, r, c, p=probabilities: o + p.tiles[r][c])
        loop.next(state, output)
    state, output = loop.results
    inverse, row_lse = state.finish()
    for value, (row, column) in zip(output.scale_rows(inverse).tiles[0][0], places, strict=True):
        weights.store(value, row, column)
    for value, row in zip(row_lse.values[0], row_lse.rows().values[0], strict=True):
        lse.store(value, row)


def run(arch: str, scores: np.ndarray, scale: float, *, masked: bool, lazy: bool | None) -> np.ndarray:
    """Check the result against float64; gives which tiles rescaled in which thread."""
    layout = LAYOUTS[arch]
    weights = np.zeros((layout.rows, layout.columns), np.float32)
    lse, rescaled = np.zeros(layout.rows, np.float32), np.zeros(TILES * layout.atom.lanes, np.int32)
    full, vector = matrix("f32", 2), matrix("f32")
    specs = (full, "f32", full, vector, matrix("i32"))
    statics = {"layout": layout, "masked": masked, "lazy": lazy}
    module = trace(softmax, *specs, arch=arch, block=layout.atom.lanes, **statics)
    Machine(Program(module, target(arch)))(flat(scores, np.float32(scale), weights, lse, rescaled))
    wide = scores.astype(np.float64) * scale
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.where(np.isinf(wide.max(1)), 0.0, wide.max(1))
        total = np.exp(wide - largest[:, None]).sum(1)
        wanted_lse = np.log(total) + largest
        probabilities = np.nan_to_num(np.exp(wide - wanted_lse[:, None]))
    wanted = probabilities.reshape(layout.rows, TILES, layout.columns).sum(1)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    return rescaled.reshape(TILES, -1)


def random_scores(arch: str, spread: float) -> np.ndarray:
    layout = LAYOUTS[arch]
    return np.random.default_rng().normal(0, spread, (layout.rows, TILES * layout.columns)).astype(np.float32)


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("lazy", [None, False, True], ids=["update", "advance", "lazy"])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_a_softmax_over_tiles_is_the_softmax_of_the_row(arch, lazy, spread):
    run(arch, random_scores(arch, spread), 0.7, masked=False, lazy=lazy)


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("lazy", [None, False, True], ids=["update", "advance", "lazy"])
def test_masked_tiles(arch, lazy):
    """Rows whose first tiles, last tiles or all tiles hold no key."""
    scores, columns = random_scores(arch, 5.0), LAYOUTS[arch].columns
    scores[0] = scores[5, : 2 * columns] = scores[9, 3 * columns :] = -math.inf
    scores[3, columns + 1 :] = -math.inf
    run(arch, scores, 1.3, masked=True, lazy=lazy)


def test_lazy_rescaling_waits_for_rows_to_grow():
    """Maxima that grow by less than 2^LAZY_LOG2 leave the accumulators alone; one row's growth takes its wave's."""
    layout, threshold = LAYOUTS["sm_90a"], LAZY_LOG2 * math.log(2)
    scores = np.zeros((layout.rows, TILES, layout.columns), np.float32)
    scores[:, 1] += 0.9 * threshold
    scores[:, 2] += 0.4 * threshold
    scores[20, 3, 7] += 1.1 * threshold  # the second warp holds rows 16 ... 31
    scores[20, 4] += 1.9 * threshold
    rescaled = run("sm_90a", scores.reshape(layout.rows, -1), 1.0, masked=False, lazy=True)
    warps = rescaled.reshape(TILES, 4, 32)
    assert (warps == warps[:, :, :1]).all()
    assert warps[0, :, 0].tolist() == [1] * 4  # from no scores at all
    assert warps[1:, 0, 0].tolist() == [0] * 4
    assert warps[1:, 1, 0].tolist() == [0, 0, 1, 0]
