"""Bulk tensor copies on the simulated Hopper GPU, against slices of numpy arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.nvvm import tma
from fly.backends.nvvm.intrinsics import fence_async_shared
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring, init_all
from fly.ir import memory
from tests.simulating.schedules import in_every_schedule

DTYPES = {
    "i8": torch.int8,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i64": torch.int64,
    "f8e4m3": torch.float8_e4m3fn,
}
GUARD = 0x5A  # what bytes have that no copy may touch


@fly.kernel
def moved(source: fly.TensorMap, result: fly.TensorMap, raw: fly.Tensor, corners: fly.Tensor, *, nbytes: int):
    """A box of `source` to shared memory, and that to `result`; `raw` gets the bytes as they lie, as i32.

    `corners` (2, rank): where the box is taken from, and where it goes. One warp.
    """
    rank = len(source.spec.box)
    box = fly.alloc_shared("box", nbytes, 1024)
    landed = Mbarriers.allocate("landed", 1, 1)
    init_all([landed])
    first, second = ([corners.load(which, i) for i in range(rank)] for which in range(2))
    with fly.when(fly.thread_id.x == 0):
        tma.prefetch(source)
        landed.arrive_expecting(0, nbytes)
        tma.load(source, box, first, landed.at(0))
    landed.wait(0, 0)
    for piece in fly.range(fly.thread_id.x, nbytes // 16, 32):
        fly.store(memory.load(box.offset(piece * 16), fly.i32, 4, align=16), raw.at(piece * 4), align=16)
    with fly.when(fly.thread_id.x == 0):
        tma.store(result, box, second)
        tma.commit()
        tma.wait_read()


def overlap(corner, box, shape) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a box and a tensor have the same elements: (in the box, in the tensor)."""
    low = [min(b, max(0, -c)) for c, b in zip(corner, box)]
    high = [max(lo, min(b, n - c)) for lo, c, b, n in zip(low, corner, box, shape)]
    inside = tuple(slice(lo, hi) for lo, hi in zip(low, high))
    return inside, tuple(slice(max(0, lo + c), max(0, hi + c)) for lo, hi, c in zip(low, high, corner))


def random_tensor(shape, dtype: torch.dtype, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, a tensor in it) whose lines are multiples of 16 bytes apart and `padding` times 16 bytes more."""
    size = dtype.itemsize
    line = (-(-shape[-1] * size // 16) + padding) * 16
    data = torch.randint(0, 256, (*shape[:-1], line), dtype=torch.uint8)
    return data, data.view(dtype)[..., : shape[-1]]


def check_move(shape, box, dtype, swizzle, take, put, padding=0) -> None:
    """One launch of `moved` in every schedule, held against slices."""
    _, source = random_tensor(shape, dtype, padding)
    target, result = random_tensor(shape, dtype, padding)
    target.fill_(GUARD)
    nbytes = math.prod(box) * dtype.itemsize
    raw = torch.zeros(nbytes // 4, dtype=torch.int32)
    maps = [fly.tensor_map(tensor, box, swizzle=swizzle) for tensor in (source, result)]
    corners = torch.tensor([take, put], dtype=torch.int32)
    in_every_schedule(lambda: moved[1, 32](*maps, raw, corners, nbytes=nbytes), target, raw)

    words = [as_of_size(tensor, dtype.itemsize) for tensor in (source, result)]
    wanted = np.zeros(box, words[0].dtype)
    inside, there = overlap(take, box, shape)
    wanted[inside] = words[0][there]
    address = np.arange(nbytes)
    lines = address ^ ((address >> 7 & (swizzle // 16 - 1)) << 4) if swizzle else address
    np.testing.assert_array_equal(raw.numpy().view(np.uint8)[lines], wanted.ravel().view(np.uint8))

    expected = torch.full_like(target, GUARD)
    inside, there = overlap(put, box, shape)
    as_of_size(expected.view(dtype)[..., : shape[-1]], dtype.itemsize)[there] = wanted[inside]
    assert torch.equal(target, expected)


def as_of_size(tensor: torch.Tensor, size: int) -> np.ndarray:
    """A tensor's elements as integers of that many bytes, in the same memory."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[size]).numpy()


PLACES = {
    "inside": (5, 24),
    "first": (0, 0),
    "before the first row": (-3, 8),
    "before the first column": (4, -16),
    "before both": (-15, -56),
    "past the last row": (90, 0),
    "past the last column": (0, 184),
    "past both": (99, 192),
    "only rows outside": (100, 0),
    "only columns outside": (3, 200),
    "far outside": (100_000, -100_000 * 8),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("swizzle", "columns"), [(0, 64), (0, 24), (32, 16), (64, 32), (128, 64)])
def test_a_box_at_every_side_of_a_tensor(swizzle, columns, place):
    check_move((100, 200), (16, columns), torch.float16, swizzle, PLACES[place], PLACES[place], padding=1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("extent", [1, 13, 37, 203])
def test_a_tensors_last_columns_are_a_part_of_a_box(dtype, extent):
    """Lines whose bytes are no multiple of 16."""
    columns = 64 // dtype.itemsize
    for first in (0, extent // columns * columns, -columns // 2):
        check_move((9, extent), (4, columns), dtype, 64, (3, first), (7, first))


@pytest.mark.parametrize("rank", range(1, 6))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_boxes_of_any_rank(rank, data):
    dtype = DTYPES[data.draw(st.sampled_from(list(DTYPES)))]
    piece = 16 // dtype.itemsize  # columns of 16 bytes
    swizzle = data.draw(st.sampled_from((0, 32, 64, 128)))
    columns = swizzle // 16 * piece or piece * data.draw(st.integers(1, 5))
    box = (*(data.draw(st.integers(1, 4)) for _ in range(rank - 1)), columns)
    shape = (*(data.draw(st.integers(1, 6)) for _ in range(rank - 1)), data.draw(st.integers(1, 90)))

    def corner() -> tuple[int, ...]:
        outer = (data.draw(st.integers(-b, n)) for b, n in zip(box[:-1], shape))
        return *outer, piece * data.draw(st.integers(-6, shape[-1] // piece + 1))

    check_move(shape, box, dtype, swizzle, corner(), corner(), padding=data.draw(st.integers(0, 2)))


@pytest.mark.parametrize(
    "view", [lambda x: x[:, 1, :, 64:], lambda x: x.permute(2, 0, 1, 3)[1:, ::2, 1]], ids=["strided", "turned"]
)
def test_tensors_whose_dimensions_lie_anyhow(view):
    source, box = view(torch.randn(8, 3, 5, 128).to(torch.float16)), (2, 3, 32)
    result, raw = torch.zeros(box, dtype=torch.float16), torch.zeros(math.prod(box) // 2, dtype=torch.int32)
    maps = [fly.tensor_map(t, box, swizzle=64) for t in (source, result)]
    corners = torch.tensor([[1, 0, 8], [0, 0, 0]], dtype=torch.int32)
    in_every_schedule(lambda: moved[1, 32](*maps, raw, corners, nbytes=2 * math.prod(box)), result, raw)
    assert torch.equal(result, source[1:3, :3, 8:40])


@fly.kernel
def two_boxes(first: fly.TensorMap, second: fly.TensorMap, out: fly.Tensor):
    """out[i] = first[0, i] + second[0, i] for 64 f32, both on one mbarrier; stored by threads and then by a copy."""
    boxes = [fly.alloc_shared(name, 256, 128) for name in ("first", "second")]
    landed = Mbarriers.allocate("landed", 1, 1)
    init_all([landed])
    thread = fly.thread_id.x
    with fly.when(thread == 0):
        landed.arrive_expecting(0, 512)
        for source, box in zip((first, second), boxes):
            tma.load(source, box, (0, 0), landed.at(0))
    landed.wait(0, 0)
    a, b = (memory.load(box.offset(thread * 4), fly.f32) for box in boxes)
    out.store(a + b, thread)


def test_boxes_of_two_tensors_arrive_at_one_barrier():
    first, second, out = torch.randn(1, 64), torch.randn(1, 64), torch.zeros(64)
    maps = [fly.tensor_map(tensor, (1, 64)) for tensor in (first, second)]
    in_every_schedule(lambda: two_boxes[1, 64](*maps, out), out)
    assert torch.equal(out, (first + second)[0])


@fly.kernel
def staged(source: fly.Tensor, result: fly.TensorMap, *, rows: int, stages: int):
    """result = 2 source, (rows, 128) f32: stored to `stages` buffers in turn, of which copies read `stages` - 1."""
    line = 4 * 128
    slots = fly.alloc_shared("slots", stages * line, 128)
    thread = fly.thread_id.x
    for row in fly.range(rows):
        slot = slots.offset((row % stages) * line)
        fly.store(source.load(row, thread) * 2.0, slot.offset(thread * 4))
        fence_async_shared()
        fly.barrier()
        with fly.when(thread == 0):
            tma.store(result, slot, (row, 0))
            tma.commit()
            tma.wait_read(stages - 1)
        fly.barrier()
    with fly.when(thread == 0):
        tma.wait_read()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_buffers_that_copies_out_read_are_used_again(stages):
    source, result = torch.randn(9, 128), torch.zeros(9, 128)
    launch = lambda: staged[1, 128](source, fly.tensor_map(result, (1, 128)), rows=9, stages=stages)  # noqa: E731
    in_every_schedule(launch, result)
    assert torch.equal(result, 2 * source)


@fly.kernel
def ring_sum(source: fly.TensorMap, out: fly.Tensor, *, stages: int, count: int, blocks: int):
    """out[b, i] = the sum of rows b, b + blocks, ... of (count, 64) f32: warp 0 loads for warpgroup 1."""
    line = 4 * 64
    slots = fly.alloc_shared("slots", stages * line, 128)
    ring = Ring.allocate("ring", stages, 2)
    init_all([ring])
    thread = fly.thread_id.x
    first = fly.block_id.x
    with fly.when(thread == 0):
        for row, at in (loop := fly.range(first, count, blocks, carry=Position.start())):
            tma.load(source, slots.offset(at.index * line), (row, 0), ring.acquire(at, line))
            loop.next(ring.next(at))
    with fly.when(thread >= 128):
        mine = thread - 128
        for _, (at, total) in (loop := fly.range(first, count, blocks, carry=(Position.start(), fly.f32(0.0)))):
            ring.wait(at)
            value = memory.load(slots.offset(at.index * line + mine * 4), fly.f32)
            ring.release(at)
            loop.next(ring.next(at), total + value)
        out.store(loop.results[1], first, mine)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_a_ring_hands_every_box_over_once(stages, count):
    blocks = 2
    source = torch.randint(-99, 99, (count, 64)).float()
    out = torch.zeros(blocks, 64)
    launch = lambda: ring_sum[blocks, 192](  # noqa: E731
        fly.tensor_map(source, (1, 64)), out, stages=stages, count=count, blocks=blocks
    )
    in_every_schedule(launch, out)
    assert torch.equal(out, torch.stack([source[b::blocks].sum(0) for b in range(blocks)]))


@fly.kernel
def relayed(source: fly.Tensor, result: fly.TensorMap, *, rows: int, stages: int):
    """result = source + 1, (rows, 128) f32: warpgroup 0 stores rows to a ring, a thread of warpgroup 1 copies out."""
    line = 4 * 128
    slots = fly.alloc_shared("slots", stages * line, 128)
    ring = Ring.allocate("ring", stages, 1, producer_warps=4)
    init_all([ring])
    thread = fly.thread_id.x
    with fly.when(thread < 128):
        for row, at in (loop := fly.range(rows, carry=Position.start())):
            ring.claim(at)
            fly.store(source.load(row, thread) + 1.0, slots.offset(at.index * line + thread * 4))
            ring.publish(at)
            loop.next(ring.next(at))
    with fly.when(thread == 128):
        for row, at in (loop := fly.range(rows, carry=Position.start())):
            ring.wait(at)
            tma.store(result, slots.offset(at.index * line), (row, 0))
            tma.commit()
            tma.wait_read()
            ring.release(at)
            loop.next(ring.next(at))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_warps_fill_a_ring_for_copies_out(stages):
    source, result = torch.randn(8, 128), torch.zeros(8, 128)
    launch = lambda: relayed[1, 160](source, fly.tensor_map(result, (1, 128)), rows=8, stages=stages)  # noqa: E731
    in_every_schedule(launch, result)
    assert torch.equal(result, source + 1)
