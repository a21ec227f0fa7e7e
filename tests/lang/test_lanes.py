"""Lane tables as layouts, and ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.target import target
from fly.errors import DTypeError, LayoutError, ShapeError, TraceError
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace


def run(kernel, *arrays: np.ndarray, arch: str = "gfx950", block=None, grid=(1, 1, 1), **statics) -> None:
    """Trace a kernel of i32 vectors and run it in numpy."""
    specs = [matrix("i32") for _ in arrays]
    Machine(Program.of(trace(kernel, *specs, arch=arch, block=block, **statics), target(arch)))(flat(*arrays), grid)


linear_tables = st.lists(st.integers(0, 300), min_size=0, max_size=6).map(
    lambda strides: [sum(s for bit, s in enumerate(strides) if lane >> bit & 1) for lane in range(1 << len(strides))]
)


@settings(max_examples=60, deadline=None)
@given(linear_tables)
def test_linear_layout_is_the_table(table):
    layout = fly.linear_layout(table)
    assert [layout(lane) for lane in range(len(table))] == table
    assert layout.size == len(table)


@settings(max_examples=60, deadline=None)
@given(linear_tables.filter(lambda t: len(t) > 2), st.data())
def test_other_tables_are_refused(table, data):
    place = data.draw(st.integers(0, len(table) - 1).filter(lambda i: i & (i - 1) or i == 0))
    table = [*table]
    table[place] += 1
    with pytest.raises(LayoutError, match=r"not linear in the lane's bits"):
        fly.linear_layout(table)


def test_the_length_is_a_power_of_two():
    with pytest.raises(LayoutError, match="a lane table has a power-of-two length, not 3"):
        fly.linear_layout([0, 1, 2])


def look_up(out: fly.Tensor, *, table: tuple[int, ...]):
    """out[lane] = table[lane]."""
    lane = fly.lane_id()
    out.store(fly.lane_map(table, lane), lane)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=6, max_size=6))
def test_run_time_lookup(strides):
    table = tuple(sum(s for bit, s in enumerate(strides) if lane >> bit & 1) for lane in range(64))
    out = np.zeros(64, np.int32)
    run(look_up, out, table=table)
    assert tuple(out) == table


def test_evaluating_a_contiguous_table_costs_nothing():
    def kernel(n: fly.i32):
        assert fly.evaluate(fly.Layout(64, 1), n) is n
        fly.lane_map([lane % 16 * 8 for lane in range(64)], n)

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: func.func
        CHECK-NEXT: arith.constant 15
        CHECK-NEXT: arith.andi
        CHECK-NEXT: arith.constant 8
        CHECK-NEXT: arith.muli
        CHECK-NEXT: return
        """,
    )


def who_am_i(out: fly.Tensor):
    """out[block, thread] = (block index, wave, lane, block count, threads)."""
    number = fly.block_id.x * fly.block_dim()[0] + fly.thread_id.x
    facts = [fly.block_id.x, fly.wave_id(), fly.lane_id(), fly.grid_dim.x, fly.i32(fly.block_dim()[0])]
    for i, fact in enumerate(facts):
        out.store(fact, number * 5 + i)


@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_ids(arch):
    size, threads = target(arch).wave_size, 128
    out = np.zeros(2 * threads * 5, np.int32)
    run(who_am_i, out, arch=arch, block=threads, grid=(2, 1, 1))
    wanted = [[b, t // size, t % size, 2, threads] for b in range(2) for t in range(threads)]
    np.testing.assert_array_equal(out.reshape(-1, 5), wanted)


def test_lanes_of_a_group_count_from_its_first():
    def kernel(out: fly.Tensor):
        for i, lanes in enumerate((32, 128, 1)):
            out.store(fly.lane_of(lanes), fly.thread_id.x * 3 + i)

    out = np.zeros(256 * 3, np.int32)
    run(kernel, out, arch="sm_90a", block=256)
    np.testing.assert_array_equal(out.reshape(-1, 3), [[t % 32, t % 128, 0] for t in range(256)])


def exchange(values: fly.Tensor, out: fly.Tensor):
    """out[i] for every exchange of the values that the lanes hold."""
    lane = fly.lane_id()
    mine = values.load(lane)
    size = fly.wave_size()
    results = [
        fly.shuffle(mine, 3),
        fly.shuffle(mine, (lane + 1) % size),
        fly.shuffle_xor(mine, 5),
        fly.first_lane(mine),
        fly.lane_sum(mine),
        fly.lane_max(mine),
        fly.reduce_lanes(mine, lambda a, b: a + b, masks=[1, 2]),
    ]
    for i, result in enumerate(results):
        out.store(result, lane + i * size)


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_exchanges_and_reductions(arch):
    size = target(arch).wave_size
    values = np.random.default_rng(0).integers(-99, 99, size).astype(np.int32)
    out = np.zeros(7 * size, np.int32)
    run(exchange, values, out, arch=arch)
    lanes = np.arange(size)
    quads = values.reshape(-1, 4).sum(axis=1).repeat(4)
    wanted = [
        np.full(size, values[3]),
        np.roll(values, -1),
        values[lanes ^ 5],
        np.full(size, values[0]),
        np.full(size, values.sum()),
        np.full(size, values.max()),
        quads,
    ]
    np.testing.assert_array_equal(out.reshape(7, size), wanted)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda n: fly.shuffle(n, 64), ShapeError, r"shuffle lane 64 is out of range; expected 0 to 63"),
        (lambda n: fly.shuffle(n, n.to(fly.i64)), DTypeError, r"shuffle lane <i64> is no scalar i32"),
        (lambda n: fly.shuffle(n, 1.0), DTypeError, r"shuffle lane 1.0 is no scalar i32"),
        (lambda n: fly.shuffle(n.to(fly.i64), 1), DTypeError, r"lanes exchange 32-bit scalars, not <i64>"),
        (lambda n: fly.shuffle_xor(n, 64), ShapeError, r"shuffle_xor mask 64 is out of range; expected 1 to 63"),
        (lambda n: fly.shuffle_xor(n, 0), ShapeError, r"shuffle_xor mask 0 is out of range"),
        (lambda n: fly.lane_sum(fly.broadcast(n, 2)), DTypeError, r"lanes exchange 32-bit scalars, not <2 x i32>"),
        (lambda n: fly.set_priority(4), ShapeError, r"priority 4 is out of range; expected 0 to 3"),
        (lambda n: fly.wait(n), DTypeError, r"wait takes a copy token, not <i32>"),
        (lambda n: fly.join([n]), DTypeError, r"join takes copy tokens, not <i32>"),
    ],
)
def test_mistakes(use, error, message):
    def kernel(n: fly.i32):
        with pytest.raises(error, match=message):
            use(n)

    trace(kernel, "i32")


def lanes_again(out: fly.Tensor):
    """out[thread] = its lane, which is counted anew."""
    with fly.reread_ids(lanes=True):
        lane = fly.lane_id()
    out.store(lane, fly.thread_id.x)


@pytest.mark.parametrize(("arch", "wave"), [("gfx950", 64), ("sm_80", 32)])
def test_lanes_that_are_counted_anew_are_the_lanes(arch, wave):
    out = np.full(128, -1, np.int32)
    run(lanes_again, out, arch=arch, block=128)
    assert out.tolist() == [thread % wave for thread in range(128)]


def test_lane_ids_need_a_one_dimensional_block():
    def kernel(n: fly.i32):
        with pytest.raises(TraceError, match=r"need a one-dimensional block, not \(32, 2, 1\)"):
            fly.lane_id()
        with pytest.raises(TraceError, match=r"need a one-dimensional block, not \(32, 2, 1\)"):
            fly.lane_of(32)
        with (
            pytest.raises(TraceError, match=r"need a one-dimensional block, not \(32, 2, 1\)"),
            fly.reread_ids(lanes=True),
        ):
            fly.lane_id()

    trace(kernel, "i32", block=(32, 2, 1))


def test_what_was_computed_is_not_read_again():
    def kernel(out: fly.Tensor, number: fly.i32):
        assert fly.reread(None) is None and fly.reread(3) == 3
        with pytest.raises(TraceError, match="was computed; reread takes parameters of the kernel"):
            fly.reread(number + 1)

    trace(kernel, matrix("i32"), "i32")
