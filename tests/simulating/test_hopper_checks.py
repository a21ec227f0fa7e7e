"""What the simulator says about accesses to memory: a mistake each, and the same kernel mended."""

from __future__ import annotations

import fly
from fly.backends.nvvm import intrinsics, tma, wgmma
from fly.backends.nvvm.emit import operation
from fly.backends.nvvm.mbarrier import Position, Ring, init_all
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from fly.ir import memory
from tests.simulating.mistakes import (
    TILE,
    Mistake,
    Mistakes,
    keep,
    landing,
    line,
    load_tile,
    loaded,
    square,
    thread,
    tile,
    zeroed,
)

mistake = Mistakes()
RACE = "with nothing that orders the two"

# places


@mistake("out-of-bounds", "4 bytes of global memory at 0x[0-9a-f]+, byte 1024 of out, which has 1024", block=256)
def beyond_a_tensor(g, right):
    g.out.store(g.x.load(thread()), thread() + (0 if right else 1))  #!


@mistake("out-of-bounds", "byte -4 of x, which has 1024")
def before_a_tensor(g, right):
    g.out.store(g.x.load(thread() - (0 if right else 1)), thread())  #!


@mistake("out-of-bounds", "byte 1024 of 'line', which has 1024", block=256)
def beyond_a_buffer(g, right):
    shared = line()
    shared.store(g.x.load(thread()), thread() + (0 if right else 1))  #!


@mistake("out-of-bounds", "a bounded access begins below its bound and ends above it")
def across_a_bound(g, right):
    values = fly.from_elements([thread()] * 4)
    fly.store_bounded(values, g.out.at(0), thread() * 16, 160 if right else 168, align=4)  #!


@mistake("out-of-bounds", "8192 bytes of shared memory at 0x[0-9a-f]+, byte 0 of 'small', which has 4096")
def a_copy_beyond_a_buffer(g, right):
    to, landed = fly.alloc_shared("small", TILE.bytes if right else 4096, 1024), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
        tma.load(g.source, to, (0, 0), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("out-of-bounds", "of 'tile', which has 8192")
def a_product_beyond_a_buffer(g, right):
    place = loaded(g.source)
    rows = 64 if right else 128
    total = wgmma.issue(WarpgroupAtom(rows, "bf16"), Operand(place, TILE), Operand(place, PanelTile(rows, 64)), 4)  #!
    keep(wgmma.wait(0, total)[0], g.out)


@mistake("out-of-bounds", "buffer 'large' ends at byte 300000 of 232448 of shared memory")
def more_than_there_is(g, right):
    fly.alloc_shared("large", 200_000 if right else 300_000, 16)  #!


@mistake("misaligned", "address 0x[0-9a-f]+; expected a multiple of 16", block=32)
def a_vector_anywhere(g, right):
    values = memory.load(g.x.at(thread() * (4 if right else 1)), fly.i32, 4, align=16)  #!
    g.out.store(values[0], thread())


@mistake("misaligned", "a bulk copy at byte 64 of 'tile'; expected 128 bytes")
def a_copy_to_anywhere(g, right):
    to, landed = fly.alloc_shared("tile", 2 * TILE.bytes, 1024), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
        tma.load(g.source, to.offset(128 if right else 64), (0, 0), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("tensor-map", "a copy from column 4; expected a multiple of 16 bytes")
def a_copy_from_anywhere(g, right):
    to, landed = tile(), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
        tma.load(g.source, to, (3, 8 if right else 4), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("descriptor", "matrix descriptor 0x0000000000000001: layout 0, base offset 0")
def a_layout_without_a_swizzle(g, right):
    place = loaded(g.source)
    good = Operand(place, TILE).descriptor()
    attributes = {"n": 64, "dtype": "bf16", "accumulates": 0, "a_registers": 0, "a_transposed": 0, "b_transposed": 0}
    steps = {"a_steps": (0,), "b_steps": (0,)}
    operands = [good if right else fly.i64(1), good]
    (total,) = operation("wgmma", operands, [fly.f32.vector(32)], attributes | steps, operand_groups=(0, 1, 1))  #!
    keep(wgmma.wait(0, fly.Value(total, fly.f32, 32))[0], g.out)


# what is not there


@mistake("uninitialised", "reads byte 512 of 'line', which nothing has written")
def what_nobody_stored(g, right):
    shared = line()
    shared.store(g.x.load(thread()), thread())
    fly.barrier()
    g.out.store(shared.load(thread() ^ (1 if right else 128)), thread())  #!


@mistake("uninitialised", "reads byte 6144 of 'tile', which nothing has written")
def a_product_of_a_part(g, right):
    place = tile()
    for piece in range(4 if right else 3):
        fly.store(fly.broadcast(fly.i32(0), 4), place.offset(piece * 2048 + thread() * 16), align=16)
    intrinsics.fence_async_shared()
    fly.barrier()
    total = wgmma.issue(*square(place))  #!
    keep(wgmma.wait(0, total)[0], g.out)


# two warps


@mistake(
    {"shared-race": f"written by warp . {RACE}", "uninitialised": "which nothing has written"},
)
def no_barrier_after_stores(g, right):
    shared = line()
    shared.store(g.x.load(thread()), thread())
    if right:
        fly.barrier()
    g.out.store(shared.load(thread() ^ 32), thread())  #!


@mistake("shared-race", f"writes byte 0 of 'line', in use by warp 1 {RACE}")
def no_barrier_before_stores(g, right):
    shared = line()
    shared.store(g.x.load(thread()), thread())
    fly.barrier()
    value = shared.load(thread() ^ 32)
    if right:
        fly.barrier()
    shared.store(value + 1000, thread())  #!


@mistake("shared-race", f"writes byte 0 of 'line', in use by warp . {RACE}", block=256)
def two_values_of_one_word(g, right):
    shared = line()
    shared.store(g.x.load(thread()) if not right else fly.i32(5), thread() % 128)  #!


@mistake("shared-race", f"reads byte 0 of 'line', written by warp 4 {RACE}", block=256, schedules=(1, 2, 3, 4))
def an_arrival_before_the_store(g, right):
    shared = line()
    with fly.when(thread() >= 128):
        if not right:
            intrinsics.barrier_arrive(1, 256)
        shared.store(thread(), thread() - 128)
        if right:
            intrinsics.barrier_arrive(1, 256)
    with fly.when(thread() < 128):
        intrinsics.barrier_sync(1, 256)
        g.out.store(shared.load(thread()), thread())  #!


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


# global memory


@mistake("global-race", f"reads byte 128 of out, which another warp or copy wrote {RACE}")
def results_of_another_warp(g, right):
    g.out.store(g.x.load(thread()) + 1, thread())
    if right:
        fly.barrier()
    g.out.store(g.out.load(thread() ^ 32), 128 + thread())  #!


@mistake("global-race", f"writes byte 0 of out, which another warp or copy wrote {RACE}", grid=2)
def blocks_store_to_one_place(g, right):
    block = fly.block_id.x
    g.out.store(thread() + block + 5, thread() + (block * 128 if right else 0))  #!


@mistake("global-race", f"reads byte (0|128) of out, which another warp or copy wrote {RACE}", grid=3)
def a_count_that_orders_nothing(g, right):
    """Blocks but the last store a part; the last one to come reads all of them."""
    block = fly.block_id.x
    last = fly.SharedMemory("last", fly.i32, 1)
    with fly.when(thread() < 32):
        g.out.store(thread() + 5, block * 32 + thread())
    fly.barrier()
    with fly.when(thread() == 0):
        count = intrinsics.atomic_wrap if right else intrinsics.atomic_add
        last.store(count(g.out.at(255), 2 if right else 1), 0)
    fly.barrier()
    with fly.when((last.load(0) == 2) & (thread() < 32)):
        g.out.store(g.out.load(thread()) + g.out.load(32 + thread()), 128 + thread())  #!


@mistake.each
def test_a_mistake_is_reported_at_its_line(case: Mistake):
    case.check_reported()


@mistake.each
def test_the_kernel_is_right_without_it(case: Mistake):
    case.check_mended()
