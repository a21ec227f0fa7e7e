"""The running softmax, tile by tile in the simulator: right when every tile rescales, and when few do."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest

import fly
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.backends.target import target
from fly.lang.fragment import AccumulatorLayout
from kernels.problem.online_softmax import LAZY_LOG2, OnlineSoftmax, margin_of
from kernels.sm90.fp8_builds import OFFSET
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

N, TILES = 16, 5
LAZY = ("rows", "scaled rows", "wave")
F32_MAX = float(np.finfo(np.float32).max)
F8_MAX, F16_MAX = 448.0, 65504.0  # e4m3's
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
    largest: fly.Tensor,
    *,
    layout: AccumulatorLayout,
    masked: bool,
    form: str,
    offset: float,
):
    """weights[row, c] = sum over tiles of softmax(scale * scores)[row, c + tile]; `form`: which step takes a tile in.

    rescaled[tile, thread] is 1 where the accumulators were multiplied, largest[tile, thread] the largest probability.
    """
    lane = fly.lane_of(layout.atom.lanes)
    row0, column0 = fly.evaluate(layout.row_lane, lane), fly.evaluate(layout.column_lane, lane)
    places = [(row0 + r, column0 + c) for r, c in zip(layout.value_rows, layout.value_columns, strict=True)]
    start = (OnlineSoftmax.start(layout, 1), fly.Fragment.zeros(layout, 1, 1))
    scale_log2 = scale * math.log2(math.e)
    margin = margin_of(scale_log2)
    for t, (state, output) in (loop := fly.range(TILES, carry=start)):
        tile = fly.from_elements([scores.load(row, column + t * layout.columns) for row, column in places])
        fragment = fly.Fragment(layout, ((tile,),))
        needed = fly.thread_id.x >= 0
        if form == "update":
            state, probabilities, output = state.update(fragment, output, scale_log2, masked=masked, lazy=False)
        elif form in ("advance", "offset"):
            state, probabilities, factor = state.advance(fragment, scale_log2, masked=masked, offset=offset)
            output = output.scale_rows(factor)
        else:
            probabilities, growth = state.advance_lazily(
                fragment, scale_log2, margin if form == "rows" else None, masked=masked, wave=form == "wave"
            )
            state, output = growth.apply(output, output.scale_rows)
            needed = growth.needed
        rescaled.store(needed.to(fly.i32), t * layout.atom.lanes + lane)
        largest.store(fly.reduce_max(probabilities.tiles[0][0]), t * layout.atom.lanes + lane)
        output = output.map(lambda o, r, c, p=probabilities: o + p.tiles[r][c])
        loop.next(state, output)
    state, output = loop.results
    inverse, row_lse = state.finish(scale_log2, offset=offset)
    for value, (row, column) in zip(output.scale_rows(inverse).tiles[0][0], places, strict=True):
        weights.store(value, row, column)
    for value, row in zip(row_lse.values[0], row_lse.rows().values[0], strict=True):
        lse.store(value, row)


@dataclass(frozen=True)
class Ran:
    """weights (rows x columns), lse (rows); by tile and thread, whether it rescaled and its largest probability."""

    weights: np.ndarray
    lse: np.ndarray
    rescaled: np.ndarray
    largest: np.ndarray


@functools.cache
def program(arch: str, masked: bool, form: str, offset: float) -> Program:
    full, vector = matrix("f32", 2), matrix("f32")
    specs = (full, "f32", full, vector, matrix("i32"), vector)
    statics = {"layout": LAYOUTS[arch], "masked": masked, "form": form, "offset": offset}
    module = trace(softmax, *specs, arch=arch, block=LAYOUTS[arch].atom.lanes, **statics)
    return Program.of(module, target(arch))


def run(arch: str, scores: np.ndarray, scale: float, *, masked: bool, form: str, offset: float = 0.0) -> Ran:
    layout = LAYOUTS[arch]
    weights = np.zeros((layout.rows, layout.columns), np.float32)
    lse, rescaled = np.zeros(layout.rows, np.float32), np.zeros(TILES * layout.atom.lanes, np.int32)
    largest = np.zeros(TILES * layout.atom.lanes, np.float32)
    arguments = flat(scores, np.float32(scale), weights, lse, rescaled, largest)
    Machine(program(arch, masked, form, offset))(arguments)
    return Ran(weights, lse, rescaled.reshape(TILES, -1), largest.reshape(TILES, -1))


def hold(arch: str, scores: np.ndarray, scale: float, message: str = "", **statics) -> Ran:
    """Run, and check the result against float64."""
    layout, ran = LAYOUTS[arch], run(arch, scores, scale, **statics)
    wide = scores.astype(np.float64) * np.float32(scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.where(np.isinf(wide.max(1)), 0.0, wide.max(1))
        powers = np.exp(wide - largest[:, None])
        wanted_lse = np.log(powers.sum(1)) + largest
        probabilities = np.nan_to_num(powers / powers.sum(1, keepdims=True))
    wanted = probabilities.reshape(layout.rows, TILES, layout.columns).sum(1)
    np.testing.assert_allclose(ran.weights, wanted, rtol=1e-5, atol=1e-6, err_msg=message)
    np.testing.assert_allclose(ran.lse, wanted_lse, rtol=1e-5, atol=1e-5, err_msg=message)
    return ran


def random_scores(arch: str, spread: float) -> np.ndarray:
    layout = LAYOUTS[arch]
    return np.random.default_rng().normal(0, spread, (layout.rows, TILES * layout.columns)).astype(np.float32)


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("form", ["update", "advance", *LAZY])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_a_softmax_over_tiles_is_the_softmax_of_the_row(arch, form, spread):
    hold(arch, random_scores(arch, spread), 0.7, masked=False, form=form)


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("form", ["update", "advance", *LAZY])
def test_masked_tiles(arch, form):
    """Rows whose first tiles, last tiles or all tiles hold no key."""
    scores, columns = random_scores(arch, 5.0), LAYOUTS[arch].columns
    scores[0] = scores[5, : 2 * columns] = scores[9, 3 * columns :] = -math.inf
    scores[3, columns + 1 :] = -math.inf
    hold(arch, scores, 1.3, masked=True, form=form)


@pytest.mark.parametrize("form", LAZY)
def test_lazy_rescaling_waits_for_rows_to_grow(form):
    """Maxima that grow by less than 2^LAZY_LOG2 leave the accumulators alone; one row's growth takes its wave's."""
    layout, threshold = LAYOUTS["sm_90a"], LAZY_LOG2 * math.log(2)
    scores = np.zeros((layout.rows, TILES, layout.columns), np.float32)
    scores[:, 1] += 0.9 * threshold
    scores[:, 2] += 0.4 * threshold
    scores[20, 3, 7] += 1.1 * threshold  # the second warp holds rows 16 ... 31
    scores[20, 4] += 1.9 * threshold
    rescaled = hold("sm_90a", scores.reshape(layout.rows, -1), 1.0, masked=False, form=form).rescaled
    warps = rescaled.reshape(TILES, 4, 32)
    assert (warps == warps[:, :, :1]).all()
    assert warps[0, :, 0].tolist() == [1] * 4  # from no scores at all
    assert warps[1:, 0, 0].tolist() == [0] * 4
    assert warps[1:, 1, 0].tolist() == [0, 0, 1, 0]


def test_rows_that_have_not_grown_keep_their_maxima_beside_one_that_has():
    """Unless a wave's rows go together: then their probabilities are at most 1."""
    layout = LAYOUTS["sm_90a"]
    scores = np.zeros((layout.rows, TILES, layout.columns), np.float32)
    scores[:, 1:] += 1.0
    scores[:16:8, 1:] += 100.0  # rows 0 and 8 of the first warp, whose lanes 4 and up have none of them
    largest = {
        form: hold("sm_90a", scores.reshape(layout.rows, -1), 1.0, masked=False, form=form).largest for form in LAZY
    }
    for form, lanes in largest.items():
        expected = 1.0 if form == "wave" else math.e
        np.testing.assert_allclose(lanes[1, 4:32], expected, rtol=1e-5, err_msg=form)
        np.testing.assert_allclose(lanes[1, 32:], math.e, rtol=1e-5, err_msg=form)


FORMS = {"update": 0.0, "advance": 0.0, **dict.fromkeys(LAZY, 0.0), "offset": OFFSET}
forms = pytest.mark.parametrize(("form", "offset"), FORMS.items(), ids=FORMS)
INF = math.inf
# Each tile's maximum in log2 units.
STEEP = {
    "all negative": (-(2.0**60),) * TILES,
    "all positive": (2.0**60,) * TILES,
    "alternating": (2.0**60, -(2.0**60), 2.0**60, -(2.0**60), 2.0**60),
    "alternating from below": (-(2.0**60), 2.0**60, -(2.0**60), 2.0**60, -(2.0**60)),
    "far below after an ordinary tile": (3.0, -(2.0**60), -(2.0**26), -(2.0**100), 3.0),
    "far below before an ordinary tile": (-(2.0**100), -(2.0**60), -(2.0**26), 3.0, 3.0),
    "far below after zeros": (0.0, -(2.0**26), -(2.0**27), -(2.0**28), -(2.0**100)),
    "far below after next to nothing": (2.0**-100, -(2.0**26), -(2.0**50), -(2.0**126), 2.0**-126),
    "far below after next to nothing, negative": (-(2.0**-100), -(2.0**27), -(2.0**50), -(2.0**126), -(2.0**-126)),
    "ordinary after a huge one": (2.0**60, 3.0, -3.0, 0.0, 2.0**60),
    "growing": (2.0**30, 2.0**50, 2.0**70, 2.0**90, 2.0**126),
    "growing from far below": (-(2.0**126), -(2.0**90), -(2.0**60), -(2.0**30), -(2.0**25)),
    "masked first": (-INF, 2.0**60, -INF, -(2.0**60), 2.0**60),
    "masked last": (-(2.0**60), -(2.0**61), -INF, -(2.0**60), -INF),
    "masked after zeros": (0.0, -INF, 0.0, -INF, 0.0),
    "masked before anything": (-INF, -INF, -INF, 3.0, -INF),
    "masked between next to nothing": (2.0**-28, -INF, 2.0**-100, -INF, -(2.0**-100)),
    "wholly masked": (-INF,) * TILES,
}
SCALES = [2.0**-60, 0.18, 0.9, 2.0**20]


def steep_scores(arch: str, maxima: tuple[float, ...], scale: float) -> np.ndarray:
    """Scores whose tiles have these maxima after the scale, up to a factor of each row's own.

    Every other score is the tile's maximum, the others are below it by a 256th and more, or masked.
    """
    layout, random = LAYOUTS[arch], np.random.default_rng()
    with np.errstate(over="ignore"):
        tiles = np.clip(np.array(maxima) / (scale * math.log2(math.e)), -F32_MAX, F32_MAX)
    tiles = np.where(np.isinf(maxima), maxima, tiles) * random.uniform(0.5, 1.0, (layout.rows, 1))
    scores = np.repeat(tiles[:, :, None], layout.columns, 2)
    lower = random.uniform(1 / 256, 1.0, scores.shape) * np.abs(scores)
    scores[..., 1::2] -= np.where(np.isinf(scores), 0.0, lower)[..., 1::2]
    if -INF in maxima:
        scores[..., 3::4] = -INF
    return (
        np.maximum(scores, -F32_MAX, where=~np.isinf(scores), out=scores).astype(np.float32).reshape(layout.rows, -1)
    )


@pytest.mark.parametrize("arch", LAYOUTS)
@forms
@pytest.mark.parametrize("maxima", STEEP.values(), ids=STEEP)
def test_maxima_that_float32_holds_no_fractions_of(arch, form, offset, maxima):
    for scale in SCALES:
        scores = steep_scores(arch, maxima, scale)
        hold(arch, scores, scale, f"scale {scale}", masked=-INF in maxima, form=form, offset=offset)


@pytest.mark.parametrize("arch", LAYOUTS)
@forms
def test_random_maxima_and_scales(arch, form, offset, seed):
    """Of all magnitudes and signs, tile by tile; every tile masked, some wholly."""
    random = np.random.default_rng(seed)
    for turn in range(30):
        scale = 2.0 ** random.uniform(-120, 40)
        maxima = random.choice([-1.0, 1.0], TILES) * 2.0 ** random.uniform(-126, 126, TILES)
        maxima[random.random(TILES) < 0.2] = random.choice([0.0, -INF])
        scores = steep_scores(arch, tuple(maxima), scale)
        message = f"seed {seed}, turn {turn}: {maxima} at scale {scale}"
        hold(arch, scores, scale, message, masked=True, form=form, offset=offset)


@pytest.mark.parametrize("arch", LAYOUTS)
@forms
def test_probabilities_fit_16_and_8_bits(arch, form, offset, seed):
    """Also where a maximum is rounded away from its scores, beside one that has not grown enough to be taken in."""
    random, layout = np.random.default_rng(seed), LAYOUTS[arch]
    for exponent in (20, 22, 23, 24, 24.9, 25, 25.1, 26, 27, 28, 30, 60):
        scale = random.uniform(0.5, 1.0)
        growth = np.cumsum(random.uniform(0, LAZY_LOG2, (layout.rows, TILES, layout.columns)), 1) - LAZY_LOG2 * TILES
        wide = random.choice([-1.0, 1.0]) * random.uniform(1, 2, (layout.rows, 1, 1)) * 2.0**exponent + growth
        scores = (wide / (scale * math.log2(math.e))).astype(np.float32).reshape(layout.rows, -1)
        ran = run(arch, scores, scale, masked=False, form=form, offset=offset)
        bound = 2.0 ** (OFFSET + 0.5) if offset else 2.0 ** (2.0 + (LAZY_LOG2 + 2.25 if form in LAZY else 0.0))
        assert bound <= (F8_MAX if offset else F16_MAX)
        assert ran.largest.max() <= bound, f"seed {seed}, 2**{exponent}: {ran.largest.max()}"


@pytest.mark.parametrize("arch", LAYOUTS)
@forms
@pytest.mark.parametrize("tile", [0, TILES - 1], ids=["first", "last"])
def test_maxima_out_of_range_in_log2_units(arch, form, offset, tile):
    """Scaled scores that float32 holds in natural units only, and those that it holds in none: then lse is inf."""
    columns = LAYOUTS[arch].columns
    scores = random_scores(arch, 1.0)
    scores[3, tile * columns : (tile + 1) * columns] = np.linspace(2.5e38, 3e38, columns)
    scores[4, tile * columns : (tile + 1) * columns] = -3e38
    hold(arch, scores, 1.0, masked=False, form=form, offset=offset)
    ran = run(arch, scores, 1e3, masked=False, form=form, offset=offset)
    assert ran.weights[3].argmax() == columns - 1 and abs(ran.weights[3].max() - 1) < 1e-5
    assert math.isinf(ran.lse[3]) and np.isfinite(np.delete(ran.lse, 3)).all() and np.isfinite(ran.weights).all()


@pytest.mark.parametrize("arch", LAYOUTS)
@forms
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
def test_what_is_no_number_shows(arch, form, offset, number):
    scores = random_scores(arch, 1.0)
    scores[5, 3] = number
    ran = run(arch, scores, 0.18, masked=False, form=form, offset=offset)
    wrong = np.isnan(ran.weights).any(1)
    assert wrong[5] and not np.isfinite(ran.lse[5]) and wrong.sum() == 1, np.flatnonzero(wrong)
