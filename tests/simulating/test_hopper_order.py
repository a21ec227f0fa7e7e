"""What the simulator says about copies and products: a mistake each, and the same kernel mended."""

from __future__ import annotations

import pytest
import torch

import fly
from fly.backends.nvvm import intrinsics, tma, wgmma
from fly.backends.nvvm.mbarrier import Position, Ring, init_all
from fly.ir import memory
from tests.simulating.mistakes import (
    TILE,
    Mistake,
    Mistakes,
    keep,
    landing,
    load_tile,
    loaded,
    square,
    thread,
    tile,
    zeroed,
)
from tests.simulating.schedules import SEEDS, reported

mistake = Mistakes()
RACE = "with nothing that orders the two"

# copies


@mistake("shared-race", f"reads byte 0 of 'tile', written by a bulk copy that completes on mbarrier landed.0. {RACE}")
def no_wait_for_a_copy(g, right):
    to, landed = tile(), landing()
    load_tile(g.source, to, landed)
    if right:
        landed.wait(0, 0)
    g.out.store(memory.load(to.offset(thread() * 4), fly.i32), thread())  #!
    landed.wait(0, 0)


@mistake("shared-race", f"reads byte 0 of 'tile', written by a bulk copy that completes on mbarrier landed.0. {RACE}")
def a_phase_that_is_over(g, right):
    """The second wait is for the first copy again."""
    to, landed = tile(), landing()
    load_tile(g.source, to, landed)
    landed.wait(0, 0)
    load_tile(g.source, to, landed)
    landed.wait(0, 1 if right else 0)
    g.out.store(memory.load(to.offset(thread() * 4), fly.i32), thread())  #!


@mistake("shared-race", f"reads byte 0 of 'tile', written by a bulk copy that completes on mbarrier landed.1. {RACE}")
def the_other_copys_barrier(g, right):
    to, other, landed = tile(), tile("other"), landing(count=2)
    load_tile(g.source, other, landed, 0)
    load_tile(g.source, to, landed, 1)
    landed.wait(1 if right else 0, 0)
    g.out.store(memory.load(to.offset(thread() * 4), fly.i32), thread())  #!


@mistake("shared-race", "writes byte 0 of 'tile', in use by a bulk copy that completes on mbarrier landed.0.")
def a_store_while_a_copy_lands(g, right):
    to, landed = tile(), landing()
    load_tile(g.source, to, landed)
    if right:
        landed.wait(0, 0)
    fly.store(thread(), to.offset(thread() * 4))  #!
    landed.wait(0, 0)


@mistake("shared-race", "writes byte 0 of 'tile', in use by a bulk copy that completes on mbarrier landed.0.")
def two_copies_to_one_place(g, right):
    to, other, landed = tile(), tile("other"), landing(count=2)
    load_tile(g.source, to, landed, 0)
    with fly.when(thread() == 0):
        landed.arrive_expecting(1, TILE.bytes)
        tma.load(g.source, other if right else to, (64, 0), landed.at(1))  #!
    landed.wait(0, 0)
    landed.wait(1, 0)


@mistake("shared-race", "writes byte 128 of 'tile', in use by warp 1")
def a_copy_over_what_is_read(g, right):
    """The thread that starts the copy knows of its own warp only."""
    to, landed = tile(), landing(count=2)
    load_tile(g.source, to, landed, 0)
    landed.wait(0, 0)
    g.out.store(memory.load(to.offset(thread() * 4), fly.i32), thread())
    if right:
        fly.barrier()
    with fly.when(thread() == 0):
        landed.arrive_expecting(1, TILE.bytes)
        tma.load(g.source, to, (0, 0), landed.at(1))  #!
    landed.wait(1, 0)


@mistake("shared-race", f"writes byte 0 of 'tile', in use by a bulk store of warp 0 {RACE}")
def a_store_over_what_a_copy_reads(g, right):
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))
        tma.commit()
        if right:
            tma.wait_read()
    fly.barrier()
    fly.store(thread(), to.offset(thread() * 4))  #!
    with fly.when(thread() == 0):
        tma.wait_read()


@mistake("shared-race", f"writes byte 0 of 'tile', in use by a bulk store of warp 0 {RACE}")
def a_wait_for_all_groups_but_one(g, right):
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))
        tma.commit()
        tma.wait_read(0 if right else 1)
    fly.barrier()
    fly.store(thread(), to.offset(thread() * 4))  #!
    with fly.when(thread() == 0):
        tma.wait_read()


@mistake("shared-race", f"writes byte 0 of 'tile', in use by a bulk store of warp 0 {RACE}")
def a_wait_by_another_thread(g, right):
    """Groups of stores are a thread's own."""
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))
        tma.commit()
    with fly.when(thread() == (0 if right else 1)):
        tma.wait_read()
    fly.barrier()
    fly.store(thread(), to.offset(thread() * 4))  #!
    with fly.when(thread() == 0):
        tma.wait_read()


@mistake("shared-race", f"writes byte 0 of 'tile', in use by a bulk store of warp 0 {RACE}")
def a_store_that_is_in_no_group(g, right):
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))
        if right:
            tma.commit()
        tma.wait_read()
    fly.barrier()
    fly.store(thread(), to.offset(thread() * 4))  #!
    with fly.when(thread() == 0):
        tma.commit()
        tma.wait_read()


# products


@mistake("shared-race", f"writes byte 0 of 'tile', in use by a product of warpgroup 0 {RACE}")
def a_store_while_a_product_reads(g, right):
    place = loaded(g.source)
    total = wgmma.issue(*square(place))
    if right:
        (total,) = wgmma.wait(0, total)
    fly.store(thread(), place.offset(thread() * 4))  #!
    if not right:
        (total,) = wgmma.wait(0, total)
    keep(total, g.out)


@mistake("shared-race", f"writes byte 0 of 'tile', in use by a product of warpgroup 0 {RACE}")
def a_wait_for_the_product_before(g, right):
    place, other = loaded(g.source), zeroed("other")
    intrinsics.fence_async_shared()
    fly.barrier()
    first, second = wgmma.issue(*square(other)), wgmma.issue(*square(place))
    (first,) = wgmma.wait(0 if right else 1, first)
    fly.store(thread(), place.offset(thread() * 4))  #!
    (second,) = wgmma.wait(0, second)
    keep(first + second, g.out)


@mistake("shared-race", f"reads byte 0 of 'tile', written by a bulk copy that completes on mbarrier landed.0. {RACE}")
def a_product_before_its_operand(g, right):
    place, landed = tile(), landing()
    load_tile(g.source, place, landed)
    if right:
        landed.wait(0, 0)
    total = wgmma.issue(*square(place))  #!
    keep(wgmma.wait(0, total)[0], g.out)
    landed.wait(0, 0)


@mistake(
    {
        "shared-race": f"writes byte 0 of 'slots', in use by a product of warpgroup 0 {RACE}",
    },
    block=160,
)
def a_slot_is_released_before_the_wait(g, right):
    """A ring of one slot, of which the consumer still reads."""
    place, ring = tile("slots"), Ring.allocate("ring", 1, 4)
    init_all([ring])
    with fly.when(thread() == 128):
        for _, at in (loop := fly.range(3, carry=Position.start())):
            full = ring.acquire(at, TILE.bytes)
            tma.load(g.source, place, (0, 0), full)  #!
            loop.next(ring.next(at))
    with fly.when(thread() < 128):
        for _, at in (loop := fly.range(3, carry=Position.start())):
            ring.wait(at)
            total = wgmma.issue(*square(place))
            if not right:
                ring.release(at)
            (total,) = wgmma.wait(0, total)
            if right:
                ring.release(at)
            keep(total, g.out)
            loop.next(ring.next(at))


@mistake(
    {
        "shared-race": "(writes byte 0 of 'slots', in use by a product of warpgroup 0"
        f"|reads byte 0 of 'slots', written by a bulk copy that completes on mbarrier ring_full.0.) {RACE}",
    },
    block=160,
)
def a_slot_is_released_before_the_product(g, right):
    place, ring = tile("slots"), Ring.allocate("ring", 1, 4)
    init_all([ring])
    with fly.when(thread() == 128):
        for _, at in (loop := fly.range(3, carry=Position.start())):
            full = ring.acquire(at, TILE.bytes)
            tma.load(g.source, place, (0, 0), full)  #!
            loop.next(ring.next(at))
    with fly.when(thread() < 128):
        for _, at in (loop := fly.range(3, carry=Position.start())):
            ring.wait(at)
            if not right:
                ring.release(at)
            total = wgmma.issue(*square(place))  #!
            (total,) = wgmma.wait(0, total)
            if right:
                ring.release(at)
            keep(total, g.out)
            loop.next(ring.next(at))


@mistake(
    {
        "shared-race": "(writes byte 0 of 'slots', in use by a product of warpgroup 0"
        f"|reads byte 0 of 'slots', written by a bulk copy that completes on mbarrier ring_full.0.) {RACE}",
        "uninitialised": "reads byte 0 of 'slots', which nothing has written",
        "deadlock": "nobody can go on",
    },
    block=160,
)
def a_parity_of_the_round_before(g, right):
    """The consumer starts with the other parity, which a barrier that was never used has passed."""
    place, ring = tile("slots"), Ring.allocate("ring", 1, 4)
    init_all([ring])
    with fly.when(thread() == 128):
        for _, at in (loop := fly.range(3, carry=Position.start())):
            full = ring.acquire(at, TILE.bytes)
            tma.load(g.source, place, (0, 0), full)  #!
            loop.next(ring.next(at))
    with fly.when(thread() < 128):
        for _, at in (loop := fly.range(3, carry=Position.start())):
            ring.full.wait(at.index, at.phase ^ (0 if right else 1))  #!
            (total,) = wgmma.wait(0, wgmma.issue(*square(place)))  #!
            ring.release(at)
            keep(total, g.out)
            loop.next(ring.next(at))


@mistake("in-flight", "uses accumulators of a product that has not been waited for")
def accumulators_without_a_wait(g, right):
    total = wgmma.issue(*square(loaded(g.source)))
    if right:
        (total,) = wgmma.wait(0, total)
    g.out.store(total[0].to(fly.i32), thread())  #!
    wgmma.wait(0)


@mistake("in-flight", "the wait leaves the product unfinished whose accumulators it gives")
def a_wait_that_leaves_the_last_product(g, right):
    place = loaded(g.source)
    first, second = wgmma.issue(*square(place)), wgmma.issue(*square(place))
    (second,) = wgmma.wait(0 if right else 1, second)  #!
    (first,) = wgmma.wait(0, first)
    keep(first + second, g.out)


# the asynchronous proxy

FENCE = "reads byte 0 of 'tile', which a warp stored with no fence.proxy.async since"


@mistake("proxy-fence", FENCE)
def no_fence_before_a_copy(g, right):
    to = zeroed()
    if right:
        intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))  #!
        tma.commit()
        tma.wait_read()


@mistake("proxy-fence", FENCE)
def a_fence_before_the_stores(g, right):
    if not right:
        intrinsics.fence_async_shared()
    place = zeroed()
    if right:
        intrinsics.fence_async_shared()
    fly.barrier()
    total = wgmma.issue(*square(place))  #!
    keep(wgmma.wait(0, total)[0], g.out)


@mistake("proxy-fence", "reads byte 512 of 'tile', which a warp stored with no fence.proxy.async since")
def a_fence_of_one_warp(g, right):
    """The others' stores come after it, or nothing says otherwise."""
    place = zeroed()
    if right:
        intrinsics.fence_async_shared()
    else:
        with fly.when(thread() < 32):
            intrinsics.fence_async_shared()
    fly.barrier()
    total = wgmma.issue(*square(place))  #!
    keep(wgmma.wait(0, total)[0], g.out)


@mistake("shared-race", f"reads byte 512 of 'tile', written by warp 1 {RACE}")
def a_fence_without_a_barrier(g, right):
    to = zeroed()
    intrinsics.fence_async_shared()
    if right:
        fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))  #!
        tma.commit()
        tma.wait_read()


@mistake("proxy-fence", "writes over byte 0 of 'tile', which a warp stored with no fence.proxy.async since")
def no_fence_before_a_copy_over_stores(g, right):
    to, landed = zeroed(), landing(count=2)
    if right:
        intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
        tma.load(g.source, to, (0, 0), landed.at(0))  #!
    landed.wait(0, 0)


# global memory


def stored_tile(g) -> None:
    """A tile of zeros on its way to `result`, whose memory may be used again."""
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))  #!
        tma.commit()
        tma.wait_read()


@mistake("global-race", f"reads byte 0 of result, which another warp or copy wrote {RACE}", schedules=(0, 1, 2))
def a_copy_back(g, right):
    """A wait is for what a copy has read: nothing says when it has written."""
    to, landed = tile("back"), landing()
    stored_tile(g)
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
        tma.load(g.result, to, (64 if right else 0, 0), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("global-race", f"writes byte 0 of result, which another warp or copy wrote {RACE}")
def two_copies_out_to_one_place(g, right):
    other, landed = tile("other"), landing()
    load_tile(g.source, other, landed)
    landed.wait(0, 0)
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))  #!
        tma.store(g.result, other, (64 if right else 0, 0))  #!
        tma.commit()
        tma.wait_read()


@mistake.each
def test_a_mistake_is_reported_at_its_line(case: Mistake):
    case.check_reported()


@mistake.each
def test_the_kernel_is_right_without_it(case: Mistake):
    case.check_mended()


@fly.kernel
def stored_and_copied(x: fly.Tensor, source: fly.TensorMap, *, row: int, fenced: bool = False):
    """Row 0 of x = 1, and then a copy of row `row` of it."""
    to, landed = fly.alloc_shared("row", 512, 128), landing()
    x.store(1.0, 0, thread())
    fly.barrier()
    with fly.when(thread() == 0):
        if fenced:
            intrinsics.fence_async_global()
        landed.arrive_expecting(0, 512)
        tma.load(source, to, (row, 0), landed.at(0))
    landed.wait(0, 0)


@pytest.mark.parametrize("schedule", SEEDS)
def test_a_copy_does_not_see_what_threads_have_stored_to_global_memory(schedule):
    x = torch.zeros(2, 128)
    report = reported(lambda: stored_and_copied[1, 128](x, fly.tensor_map(x, (1, 128)), row=0), schedule)
    assert report.kind == "proxy-fence"
    assert (
        "a bulk copy reads byte 0 of x, which the launch has stored, with no fence.proxy.async.global" in report.text
    )
    for right in ({"row": 1}, {"row": 0, "fenced": True}):
        x.zero_()
        stored_and_copied[1, 128](x, fly.tensor_map(x, (1, 128)), **right)
        assert x[0].all()


@fly.kernel
def handed_over(
    x: fly.Tensor,
    source: fly.TensorMap,
    middle: fly.TensorMap,
    count: fly.Tensor,
    out: fly.Tensor,
    *,
    waits: bool = True,
    order: str = "release",
    fenced: bool = True,
):
    """Block 0 copies x to `middle` by way of shared memory, block 1 copies that to its own and stores it to out."""
    memory, landed = fly.alloc_shared("memory", 512, 128), landing()
    with fly.when((fly.block_id.x == 0) & (thread() == 0)):
        landed.arrive_expecting(0, 512)
        tma.load(source, memory, (0, 0), landed.at(0))
        landed.wait(0, 0)
        tma.store(middle, memory, (0, 0))
        tma.commit()
        (tma.wait if waits else tma.wait_read)()
        fly.atomic_add(fly.i32(1), count.at(0), order=order)
    with fly.when(fly.block_id.x == 1):
        with fly.when(thread() == 0):
            for _ in (spin := fly.while_((fly.load_acquire(count.at(0)),), lambda c: c[0] == 0)):
                spin.next(fly.load_acquire(count.at(0)))
            if fenced:
                intrinsics.fence_async_global()
            landed.arrive_expecting(0, 512)
            tma.load(middle, memory, (0, 0), landed.at(0))
        landed.wait(0, 0)
        out.store(memory_of(memory), thread())


def memory_of(start: fly.Pointer) -> fly.Value:
    """This thread's number of a line."""
    return memory.load(start.offset(thread() * 4), fly.f32)


@pytest.mark.parametrize("schedule", SEEDS)
@pytest.mark.parametrize(
    ("mistake", "kind"),
    [({"waits": False}, "global-race"), ({"order": "relaxed"}, "global-race"), ({"fenced": False}, "proxy-fence")],
    ids=str,
)
def test_a_block_copies_what_another_one_has_copied_out(mistake, kind, schedule):
    x = torch.randn(1, 128)

    def call(**options):
        between, out = torch.zeros(1, 128), torch.zeros(128)
        maps = (fly.tensor_map(t, (1, 128)) for t in (x, between))
        handed_over[2, 128](x, *maps, torch.zeros(1, dtype=torch.int32), out, **options)
        return out

    assert reported(lambda: call(**mistake), schedule).kind == kind
    assert torch.equal(call(), x[0])
