"""Barriers, registers, election, atomics and messages on the simulated Hopper GPU, and what every NVIDIA GPU has."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly import config
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    barrier_any,
    barrier_arrive,
    barrier_sync,
    elect_one,
    setmaxnreg_dec,
    setmaxnreg_inc,
    sync_warp,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import Position, Ring, init_all
from fly.errors import CheckError
from tests.simulating.schedules import SEEDS, in_every_schedule

# named barriers


@fly.kernel
def ping_pong(out: fly.Tensor, *, turns: int):
    """Two warpgroups add to one line in turn, each at a named barrier of its own that the other arrives at."""
    line = fly.SharedMemory("line", fly.i32, WARPGROUP)
    thread, group = fly.lane_of(WARPGROUP), warpgroup_id()
    with fly.when(group == 0):
        line.store(thread, thread)
    with fly.when(group == 1):
        barrier_arrive(1, 2 * WARPGROUP)  # the first turn is warpgroup 0's
    for _ in fly.range(turns):
        barrier_sync(group + 1, 2 * WARPGROUP)
        value = line.load(thread)
        line.store(value * 3 + group, thread)
        barrier_arrive(2 - group, 2 * WARPGROUP)
    with fly.when(group == 0):
        barrier_sync(1, 2 * WARPGROUP)
        out.store(line.load(WARPGROUP - 1 - thread), thread)


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_two_warpgroups_take_turns(turns):
    out = torch.zeros(WARPGROUP, dtype=torch.int32)
    in_every_schedule(lambda: ping_pong[1, 256](out, turns=turns), out)
    wanted = torch.arange(WARPGROUP, dtype=torch.int32).flip(0)
    for _ in range(turns):
        wanted = (wanted * 3) * 3 + 1
    assert torch.equal(out, wanted)


@fly.kernel
def neighbours(out: fly.Tensor):
    """Pairs of warps of one warpgroup meet at a barrier each; out[i] is what the pair's other warp stored."""
    line = fly.SharedMemory("line", fly.i32, WARPGROUP)
    thread = fly.thread_id.x
    line.store(thread * 7, thread)
    barrier_sync(1 + fly.wave_id() // 2, 64)
    out.store(line.load(thread ^ 32), thread)


def test_pairs_of_warps_meet():
    out = torch.zeros(WARPGROUP, dtype=torch.int32)
    in_every_schedule(lambda: neighbours[1, WARPGROUP](out), out)
    assert torch.equal(out, 7 * (torch.arange(WARPGROUP, dtype=torch.int32) ^ 32))


@fly.kernel
def asked(out: fly.Tensor, number: fly.i32, *, both: bool):
    """Whether a thread of the warpgroup, or of `both`, has that number."""
    thread, group = fly.thread_id.x, warpgroup_id()
    barrier, threads = (1, 2 * WARPGROUP) if both else (group + 1, WARPGROUP)
    for turn in range(2):
        held = barrier_any(barrier, threads, thread == number + turn)
        out.store(fly.select(held, 1, 0), turn, thread)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("number", [-1, 0, 77, 127, 255, 256])
def test_a_barrier_tells_all_threads_what_one_knows(number, both):
    out = torch.full((2, 256), -1, dtype=torch.int32)
    in_every_schedule(lambda: asked[1, 256](out, number, both=both), out)
    group = torch.arange(256) // 128
    for turn in range(2):
        asked_for = number + turn
        held = (0 <= asked_for < 256) & ((group == asked_for // 128) | both)
        assert torch.equal(out[turn], held.int())


# registers


@fly.kernel
def traded(out: fly.Tensor):
    """Warpgroups 1 and 2 take the registers that warpgroup 0 gives up when another one has told it to."""
    thread, group = fly.thread_id.x, warpgroup_id()
    line = fly.SharedMemory("line", fly.i32, 1)
    with fly.when(group == 0):
        barrier_sync(1, 2 * WARPGROUP)
        setmaxnreg_dec(24)
    with fly.when(group == 1):
        line.store(5, 0)
        barrier_arrive(1, 2 * WARPGROUP)
        setmaxnreg_inc(240)
    with fly.when(group == 2):
        setmaxnreg_inc(240)
    fly.barrier()
    out.store(line.load(0) + group, thread)


def test_warpgroups_wait_for_registers_of_another():
    out = torch.zeros(384, dtype=torch.int32)
    in_every_schedule(lambda: traded[2, 384](out), out)
    assert torch.equal(out, 5 + torch.arange(384, dtype=torch.int32) // 128)


# election and atomics


@fly.kernel
def elected(counts: fly.Tensor, lanes: fly.Tensor):
    """Every elected thread counts, and says who it is: the same one each time."""
    thread = fly.thread_id.x
    for turn in range(2):
        with fly.when(elect_one()):
            fly.fetch_add(1, counts.at(turn))
            lanes.store(thread, turn, fly.block_id.x, thread // 32)


def test_one_thread_of_each_warp_is_elected():
    counts, lanes = torch.zeros(2, dtype=torch.int32), torch.full((2, 5, 6), -1, dtype=torch.int32)
    in_every_schedule(lambda: elected[5, 192](counts, lanes), counts, lanes)
    assert counts.tolist() == [30, 30]
    assert torch.equal(lanes[0], lanes[1])
    assert torch.equal(lanes[0] // 32, torch.arange(6, dtype=torch.int32).expand(5, 6))


@fly.kernel
def counting(counters: fly.Tensor, before: fly.Tensor, last: fly.i32, step: fly.i32):
    """Every thread adds `step` to one counter and counts in a circle on another; what it found there."""
    thread = fly.block_id.x * 64 + fly.thread_id.x
    before.store(fly.fetch_add(step, counters.at(0)), 0, thread)
    before.store(fly.fetch_wrap(last, counters.at(1)), 1, thread)


@settings(max_examples=8, deadline=None)
@given(last=st.integers(0, 300), step=st.integers(-(2**31), 2**31 - 1), start=st.integers(0, 2**31 - 1))
def test_counters_wrap_around(last, step, start):
    counters = torch.tensor([start, 0], dtype=torch.int32)
    before = torch.zeros(2, 192, dtype=torch.int32)
    counting[3, 64](counters, before, last, step)
    wrapped = [(start + i * step) % 2**32 for i in range(193)]
    sums = torch.tensor(wrapped).to(torch.int32)  # keeps the low bits
    circle = torch.tensor([i % (last + 1) for i in range(193)], dtype=torch.int32)
    assert torch.equal(before[0].sort().values, sums[:-1].sort().values)
    assert torch.equal(before[1].sort().values, circle[:-1].sort().values)
    assert counters.tolist() == [sums[-1], circle[-1]]


@fly.kernel
def last_one_adds(source: fly.Tensor, parts: fly.Tensor, counters: fly.Tensor, out: fly.Tensor):
    """out[y, i] = sum over the grid's x of 2 source[x, y, i], by whichever block of a row is the last."""
    x, y, thread = fly.block_id.x, fly.block_id.y, fly.thread_id.x
    blocks = source.shape[0]
    is_last = fly.SharedMemory("is_last", fly.i32, 1)
    parts.store(source.load(x, y, thread) * 2.0, x, y, thread)
    fly.barrier()
    with fly.when(thread == 0):
        is_last.store(fly.select(fly.fetch_wrap(blocks - 1, counters.at(y)) == blocks - 1, 1, 0), 0)
    fly.barrier()
    with fly.when(is_last.load(0) == 1):
        for i, total in (loop := fly.range(blocks, carry=fly.f32(0.0))):
            loop.next(total + parts.load(i, y, thread))
        out.store(loop.results, y, thread)


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_the_last_block_adds_what_all_have_stored(blocks):
    source = torch.randint(-9, 9, (blocks, 3, 64)).float()
    parts, out, counters = torch.zeros_like(source), torch.zeros(3, 64), torch.zeros(3, dtype=torch.int32)

    def launch():
        for _ in range(2):  # the counters are as before
            last_one_adds[(blocks, 3), 64](source, parts, counters, out)

    in_every_schedule(launch, out, parts, counters)
    assert torch.equal(out, 2 * source.sum(0))
    assert not counters.any()


@fly.kernel
def persistent(counter: fly.Tensor, source: fly.Tensor, out: fly.Tensor):
    """out = source²; blocks take rows from a counter until there are none."""
    thread, rows = fly.thread_id.x, source.shape[0]
    taken = fly.SharedMemory("taken", fly.i32, 1)

    def take() -> fly.Value:
        fly.barrier()  # all have read the last one
        with fly.when(thread == 0):
            taken.store(fly.fetch_add(1, counter.at(0)), 0)
        fly.barrier()
        return fly.first_lane(taken.load(0))

    for row in (loop := fly.while_(take(), lambda row: row < rows)):
        value = source.load(row, thread)
        out.store(value * value, row, thread)
        loop.next(take())


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_blocks_take_rows_from_a_counter(rows):
    source, out = torch.randn(rows, 64), torch.full((rows, 64), torch.nan)
    counter = torch.zeros(1, dtype=torch.int32)
    in_every_schedule(lambda: persistent[6, 64](counter, source, out), out, counter)
    assert torch.equal(out, source * source)
    assert counter.item() == rows + 6


# lanes of a warp


@fly.kernel
def lanes(source: fly.Tensor, out: fly.Tensor):
    """Sums and maxima over a warp, a value of another lane, and a vote; then a loop of each lane's own length."""
    thread, lane = fly.thread_id.x, fly.lane_id()
    value = source.load(thread)
    out.store(fly.lane_sum(value), 0, thread)
    out.store(fly.lane_max(value), 1, thread)
    out.store(fly.shuffle(value, (lane + 5) % 32), 2, thread)
    out.store(fly.select(fly.any_lane(value > 30), 1, 0), 3, thread)
    for _, total in (loop := fly.range(lane % 7, carry=fly.i32(0))):
        loop.next(total + value)
    out.store(loop.results, 4, thread)
    sync_warp()
    out.store(fly.cond(lane < 9, lambda: value * 2, lambda: value - 1), 5, thread)


def test_what_lanes_of_a_warp_do():
    source = torch.randint(-40, 40, (128,), dtype=torch.int32)
    out = torch.zeros(6, 128, dtype=torch.int32)
    in_every_schedule(lambda: lanes[1, 128](source, out), out)
    warps, lane = source.view(4, 32), torch.arange(128, dtype=torch.int32) % 32
    wanted = [
        warps.sum(1, keepdim=True).expand(4, 32).flatten(),
        warps.max(1, keepdim=True).values.expand(4, 32).flatten(),
        warps.roll(-5, 1).flatten(),
        (warps > 30).any(1, keepdim=True).expand(4, 32).flatten(),
        source * (lane % 7),
        torch.where(lane < 9, source * 2, source - 1),
    ]
    for found, expected in zip(out, wanted, strict=True):
        assert torch.equal(found, expected.int())


# messages


@fly.kernel
def noted(x: fly.Tensor, limit: fly.i32):
    i = fly.block_id.x * 128 + fly.thread_id.x
    fly.print("{} has {}", i, x.load(i), when=i % 100 == 1)
    fly.check(i < limit, "index {} is not below {}", i, limit)
    x.store(0.0, i)


@pytest.mark.parametrize("schedule", SEEDS)
def test_lines_of_a_kernel_are_printed(schedule, capsys, monkeypatch):
    monkeypatch.setenv(config.SIMULATOR_SEED.name, str(schedule))
    capsys.readouterr()
    noted[2, 128](torch.arange(256.0) / 2, 256)
    assert capsys.readouterr().out.splitlines() == [
        "block 0, thread 1: 1 has 0.5",
        "block 0, thread 101: 101 has 50.5",
        "block 1, thread 73: 201 has 100.5",
    ]


@pytest.mark.parametrize("schedule", SEEDS)
def test_an_assertion_of_a_kernel_is_raised(schedule, monkeypatch):
    monkeypatch.setenv(config.SIMULATOR_SEED.name, str(schedule))
    x = torch.arange(256.0)
    with pytest.raises(CheckError, match=r"test_hopper_units.py:\d+.*block 1, thread 72: index 200 is not below 200"):
        noted[2, 128](x, 200)
    assert not x.any()  # threads go on, and so does the launch


# what kernels for every NVIDIA GPU use


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_matrix_product_that_names_no_architecture(arch, dtype, monkeypatch):
    """Asynchronous copies of 16 bytes in a ring of three slots, matrix loads, and products of warps."""
    monkeypatch.setenv(config.ARCH.name, arch)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    example = importlib.import_module("03_matmul")
    a, b = (torch.randint(-4, 5, (rows, 128)).to(dtype) for rows in (70, 40))
    c = torch.full((70, 40), torch.nan, dtype=dtype)
    tiling = example.Tiling(m=64, n=64, k=32)
    in_every_schedule(lambda: example.matmul[(1, 2), example.THREADS](a, b, c, tiling=tiling), c)
    assert torch.equal(c, (a.double() @ b.double().T).to(dtype))


# warps of one warpgroup with roles of their own


@fly.kernel
def pipeline(source: fly.Tensor, out: fly.Tensor, *, rows: int, stages: int):
    """out = 3 (source + 1): warp 0 fills a ring, warp 1 adds and fills another one, warp 2 takes from that.

    Warp 3 leaves; and warpgroup 1 counts the rows that warp 2 tells it of.
    """
    words = [fly.SharedMemory(name, fly.f32, stages * 32) for name in ("first", "second")]
    rings = [Ring.allocate(name, stages, 1, producer_warps=1) for name in ("ring", "next_ring")]
    init_all(rings)
    warp, lane = fly.thread_id.x // 32, fly.lane_id()
    with fly.when(warp == 0):
        for row, at in (loop := fly.range(rows, carry=Position.start())):
            rings[0].claim(at)
            words[0].store(source.load(row, lane), at.index * 32 + lane)
            rings[0].publish(at)
            loop.next(rings[0].next(at))
    with fly.when(warp == 1):
        for _, at in (loop := fly.range(rows, carry=Position.start())):
            rings[0].wait(at)
            rings[1].claim(at)
            words[1].store(words[0].load(at.index * 32 + lane) + 1.0, at.index * 32 + lane)
            rings[0].release(at)
            rings[1].publish(at)
            loop.next(rings[1].next(at))
    with fly.when(warp == 2):
        for row, at in (loop := fly.range(rows, carry=Position.start())):
            rings[1].wait(at)
            out.store(words[1].load(at.index * 32 + lane) * 3.0, row, lane)
            rings[1].release(at)
            barrier_sync(1, 64)
            loop.next(rings[1].next(at))
    with fly.when(warp == 4):
        for row, total in (loop := fly.range(rows, carry=fly.i32(0))):
            barrier_sync(1, 64)
            loop.next(total + row)
        out.store(loop.results.to(fly.f32), rows, lane)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_warps_of_a_warpgroup_work_for_one_another(stages):
    rows = 5
    source, out = torch.randint(-50, 50, (rows, 32)).float(), torch.full((rows + 1, 32), torch.nan)
    in_every_schedule(lambda: pipeline[2, 160](source, out, rows=rows, stages=stages), out)
    assert torch.equal(out[:rows], 3 * (source + 1))
    assert torch.equal(out[rows], torch.full((32,), 10.0))
