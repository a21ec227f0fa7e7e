"""Software pipelines: which stage sees which tile when, the values between them, and tables that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import PipelineError
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace


def nothing(tile):
    return None


def steps_of(stages, tiles, unroll=1, boundary=None):
    """What a pipeline runs, in the order of the trace: (stage, tile number or None in the loop, slot, place)."""
    events = []

    def record(stage):
        def run(tile, *values):
            static = isinstance(tile.number, int)
            events.append((stage.name, tile.number if static else None, tile.slot, tile.place))

        return fly.Stage(stage.name, run, delay=stage.delay, cluster=stage.cluster, past_end=stage.past_end)

    def body():
        cluster = None if boundary is None else lambda number, step: events.append(boundary(number, step))
        fly.Pipeline([record(s) for s in stages], unroll=unroll, boundary=cluster).run(tiles)

    trace(body)
    return events


def test_prologue_steady_state_and_epilogue():
    stages = [fly.Stage("load", nothing), fly.Stage("use", nothing, delay=2)]
    assert steps_of(stages, 5) == [
        ("load", 0, 0, 0),
        ("load", 1, 0, 0),
        ("load", None, 0, 0),  # the loop: tile i + 2 is loaded while tile i is used
        ("use", None, 0, 0),
        ("use", 3, 0, 0),
        ("use", 4, 0, 0),
    ]


def test_stages_that_may_run_past_the_end_leave_the_epilogue_shorter():
    stages = [
        fly.Stage("copy", nothing, past_end=True),
        fly.Stage("first", nothing, delay=1),
        fly.Stage("last", nothing, delay=2),
    ]
    assert [event[:2] for event in steps_of(stages, 4)] == [
        ("copy", 0),
        ("copy", 1),
        ("first", 0),
        ("copy", None),
        ("first", None),
        ("last", None),
        ("last", 3),
    ]


def test_unrolled_steps_have_static_slots_and_places():
    stages = [fly.Stage("copy", nothing, past_end=True), fly.Stage("use", nothing, delay=1)]
    assert steps_of(stages, 4, unroll=2) == [
        ("copy", 0, 0, 1),  # as if it were the last of a turn
        ("copy", None, 1, 0),  # tile 1, 3, ... is the first of each turn
        ("use", None, 0, 0),
        ("copy", None, 0, 1),
        ("use", None, 1, 1),
    ]
    pipeline = fly.Pipeline(stages, unroll=2)
    assert (pipeline.fewest, [pipeline.rounded(n) for n in range(5)]) == (0, [0, 2, 2, 4, 4])


def test_clusters_end_with_the_boundary():
    stages = [fly.Stage("copy", nothing), fly.Stage("use", nothing, delay=1, cluster=2)]
    events = steps_of(stages, 3, boundary=lambda cluster, step: f"end of {cluster} in {step}")
    ends = ["end of 0 in 0", "end of 1 in 0", "end of 2 in 0"]
    assert [event if isinstance(event, str) else event[0] for event in events] == [
        *("copy", *ends),
        *("copy", "end of 0 in None", "end of 1 in None", "use", "end of 2 in None"),
        *("end of 0 in None", "end of 1 in None", "use", "end of 2 in None"),
    ]


def test_waves_without_a_part_in_the_last_tile_run_what_is_shared():
    """The step that the last tile has to itself is there twice, and first without the stages of one's own."""
    events = []

    def record(name, **place):
        def run(tile, *values):
            events.append((name, tile.last))

        return fly.Stage(name, run, **place)

    def body(some: fly.i32):
        stages = [
            record("copy", past_end=True, shared=True),
            record("first", delay=1),
            record("wait", delay=2, shared=True),
            record("second", delay=2),
        ]
        pipeline = fly.Pipeline(stages, boundary=lambda cluster, step: events.append("end"), spares=True)
        pipeline.run(4, spare=lambda: some > 0)
        with pytest.raises(PipelineError, match="spare is None; expected one where the pipeline has spares"):
            pipeline.run(4)

    trace(body, "i32")
    prologue = [("copy", False), "end", ("copy", False), ("first", False), "end"]
    loop = [("copy", False), ("first", False), ("wait", False), ("second", False), "end"]
    assert events == [*prologue, *loop, ("wait", True), "end", ("wait", True), ("second", True), "end"]


def test_a_pipeline_of_fewer_tiles_than_it_has_steps():
    """A count that is known only at run time may be less than the fewest, by less than a turn of the loop."""

    def body(out: fly.Tensor, count: fly.i32):
        def note(tile):
            out.store(fly.i32(tile.number) if isinstance(tile.number, int) else tile.number, 0)

        pipeline = fly.Pipeline([fly.Stage("load", nothing), fly.Stage("use", note, delay=2)], unroll=2)
        pipeline.run(count)
        out.store(fly.i32(pipeline.rounded(count)), 1)

    for count, wanted in ((1, 2), (2, 2), (3, 4)):
        out = np.zeros(2, np.int32)
        Machine(Program.of(trace(body, matrix("i32", 1), "i32"), target("gfx950")))(flat(out, count))
        assert out.tolist() == [wanted - 1, wanted], count


@fly.kernel
def pipelined(a: fly.Tensor, out: fly.Tensor, sums: fly.Tensor, count: fly.i32, *, unroll: int):
    """out[t] = a[t] * (sum of a[..t-1] before it) + 10 * a[t] with the parts of a tile in steps 0, 1 and 3."""

    def load(tile):
        # past the end there is nothing: a zero changes no sum
        inside = fly.i32(tile.number) if isinstance(tile.number, int) else tile.number
        return fly.cond(inside < count, lambda: a.load(inside), lambda: fly.f32(0.0))

    def weigh(tile, value):
        return value * 10.0, value + 0.0

    def accumulate(tile, value, total):
        return total + value, total

    def store(tile, tenfold, value, before):
        with fly.when(tile.number < count):
            out.store(tenfold + value * before, tile.number)

    done = fly.Pipeline(
        [
            fly.Stage("accumulate", accumulate, "plain total", "total before", delay=3, cluster=0),
            fly.Stage("load", load, "", "value", past_end=True),
            fly.Stage("weigh", weigh, "value", "tenfold plain", delay=1, cluster=1),
            fly.Stage("store", store, "tenfold value before", delay=3, cluster=1),
        ],
        running=("total",),
        unroll=unroll,
    ).run(count, total=fly.f32(0.0))
    sums.store(done["total"], 0)


@pytest.mark.parametrize("unroll", [1, 2, 3])
@pytest.mark.parametrize("tiles", [2, 3, 4, 5, 8, 11])
def test_values_reach_their_tile(unroll, tiles):
    a = np.random.default_rng(tiles).standard_normal(tiles).astype(np.float32)
    out, sums = np.full(tiles, np.nan, np.float32), np.zeros(1, np.float32)
    module = trace(pipelined, matrix(), matrix(), matrix(), "i32", unroll=unroll)
    Machine(Program.of(module, target("gfx950")))(flat(a, out, sums, tiles))
    before = np.concatenate([[0], np.cumsum(a)[:-1]])
    np.testing.assert_allclose(out, a * before + 10 * a, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums[0], a.sum(), rtol=1e-5, atol=1e-5)


def test_emulated(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    a, out, sums = np.arange(1, 10, dtype=np.float32), np.zeros(9, np.float32), np.zeros(1, np.float32)
    pipelined[1, 64](a, out, sums, 9, unroll=2)
    np.testing.assert_array_equal(out, a * (np.cumsum(a) - a) + 10 * a)
    assert sums[0] == 45


def give(*names, delay=0, cluster=0, takes="", name="stage"):
    return fly.Stage(name, nothing, takes, " ".join(names), delay=delay, cluster=cluster)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ([], {}, "a pipeline needs at least one stage"),
        ([give()], {"unroll": 0}, "unroll is 0; expected a positive number of steps"),
        ([give(), give()], {}, "two stages are named 'stage'"),
        ([give(delay=-1)], {}, "stage 'stage' has delay -1 and cluster 0; neither is negative"),
        (
            [give(cluster=1, name="a"), give(name="b")],
            {},
            "stage 'b' of cluster 0 comes after 'a' of cluster 1; stages are listed in the order in which they run",
        ),
        (
            [give("x", name="a"), give("x", name="b", delay=1)],
            {},
            "stages 'a' and 'b' both give 'x'; what several stages change is a running value",
        ),
        (
            [give("x", name="a"), give(takes="y", name="b", delay=1)],
            {"running": ("total",)},
            "stage 'b' takes 'y', which no stage gives; there is total, x",
        ),
        ([give(takes="y")], {}, "stage 'stage' takes 'y', which no stage gives; there is nothing"),
        (
            [give(takes="x", name="use"), give("x", name="make")],
            {},
            "stage 'use' (delay 0) takes 'x' before stage 'make' (delay 0) gives it",
        ),
        (
            [give("x", name="make", delay=2), give(takes="x", name="use", delay=1)],
            {},
            "stage 'use' (delay 1) takes 'x' before stage 'make' (delay 2) gives it",
        ),
    ],
)
def test_tables_that_do_not_fit(stages, options, message):
    with pytest.raises(PipelineError) as caught:
        fly.Pipeline(stages, **options)
    assert message in str(caught.value)


def test_a_stage_gives_what_it_names():
    def body():
        fly.Pipeline([fly.Stage("load", nothing, gives="a b")]).run(1)

    with pytest.raises(PipelineError, match="stage 'load' gives a, b, but returned 0 values"):
        trace(body)


def test_running_values_must_all_be_given():
    def body():
        fly.Pipeline([fly.Stage("load", nothing)], running=("total",)).run(1, sum=fly.f32(0.0))

    with pytest.raises(PipelineError, match="starts with sum; its running values are total"):
        trace(body)
