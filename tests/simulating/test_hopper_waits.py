"""What the simulator says about barriers, registers and who goes where: mistakes, and the same kernels mended."""

from __future__ import annotations

import fly
from fly.backends.nvvm import intrinsics, tma, wgmma
from fly.backends.nvvm.intrinsics import barrier_arrive, barrier_sync, setmaxnreg_dec, setmaxnreg_inc
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring, init_all
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

mistake = Mistakes()

# mbarriers


@mistake("mbarrier-init", "byte 0 of 'landed' is no mbarrier that was initialised")
def a_barrier_that_nobody_initialised(g, right):
    landed = Mbarriers.allocate("landed", 1, 128)
    if right:
        init_all([landed])
    landed.arrive(0)  #!


@mistake("mbarrier-init", "uses mbarrier landed.0., whose initialisation nothing orders before that")
def no_barrier_after_the_initialisation(g, right):
    landed = Mbarriers.allocate("landed", 1, 128)
    with fly.when(thread() == 0):
        landed.init()
        intrinsics.fence_mbarrier_init()
    if right:
        fly.barrier()
    landed.arrive(0)  #!


@mistake("mbarrier-init", "uses mbarrier landed.0., whose initialisation no fence made visible to bulk copies")
def no_fence_after_the_initialisation(g, right):
    to, landed = tile(), Mbarriers.allocate("landed", 1, 1)
    with fly.when(thread() == 0):
        landed.init()
        if right:
            intrinsics.fence_mbarrier_init()
    fly.barrier()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
        tma.load(g.source, to, (0, 0), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("mbarrier-init", "mbarrier landed.0. is initialised again")
def two_initialisations(g, right):
    landed = landing(128)
    with fly.when(thread() == 0):
        if not right:
            landed.init()  #!
    fly.barrier()
    landed.arrive(0)


@mistake("mbarrier-init", "byte 0 of 'landed' for 1048576 arrivals")
def too_many_arrivals_for_a_counter(g, right):
    landed = Mbarriers.allocate("landed", 1, (1 << 20) - bool(right))
    with fly.when(thread() == 0):
        landed.init()  #!


@mistake("mbarrier-init", "more than 128 mbarriers in a block")
def too_many_barriers(g, right):
    landed = Mbarriers.allocate("landed", 128 if right else 129, 1)
    with fly.when(thread() == 0):
        landed.init()  #!


@mistake("mbarrier-count", "arrives at mbarrier landed.0., where phase 0 has all of its 100 arrivals")
def more_threads_than_were_counted(g, right):
    landed = landing(128 if right else 100)
    landed.arrive(0)  #!


@mistake("mbarrier-count", "arrives at mbarrier empty.0., where phase 0 has all of its 1 arrivals", block=128)
def all_threads_arrive_for_one(g, right):
    empty = Mbarriers.allocate("empty", 1, 1)
    init_all([empty])
    if right:
        with fly.when(thread() == 0):
            empty.arrive(0)
    else:
        empty.arrive(0)  #!


@mistake("mbarrier-bytes", "a copy of 8192 bytes completes on mbarrier landed.0., whose phase . expects (4096|0)")
def fewer_bytes_than_come(g, right):
    to, landed = tile(), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes if right else 4096)
        tma.load(g.source, to, (0, 0), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("mbarrier-bytes", "mbarrier landed.0. expects 1048576 more bytes; it holds up to 1048575")
def more_bytes_than_a_counter_holds(g, right):
    to, landed = tile(), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes if right else 1 << 20)  #!
        tma.load(g.source, to, (0, 0), landed.at(0))
    landed.wait(0, 0)


@mistake("deadlock", "waits for mbarrier landed.0., phase 0, which lacks 8192 bytes")
def bytes_of_two_boxes_and_one_copy(g, right):
    to, other, landed = tile(), tile("other"), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, 2 * TILE.bytes)
        tma.load(g.source, to, (0, 0), landed.at(0))
        if right:
            tma.load(g.source, other, (64, 0), landed.at(0))
    landed.wait(0, 0)  #!


@mistake("deadlock", "waits for mbarrier landed.0., phase 0, which lacks 1 of 2 arrivals")
def an_arrival_too_few(g, right):
    to, landed = tile(), landing(arrivals=1 if right else 2)
    load_tile(g.source, to, landed)
    landed.wait(0, 0)  #!


@mistake("deadlock", "waits for mbarrier landed.0., phase 1, which lacks 1 of 1 arrivals")
def a_phase_that_never_comes(g, right):
    to, landed = tile(), landing()
    load_tile(g.source, to, landed)
    landed.wait(0, 0)
    landed.wait(0, 0 if right else 1)  #!


@mistake(
    "deadlock",
    r"warpgroup 0 at .*: waits for mbarrier ring_full.0., phase 1, which lacks 1 of 1 arrivals; "
    r".*warp 4 at .*: waits for mbarrier ring_empty.0., phase 0, which lacks 1 of 4 arrivals",
    block=160,
)
def a_warp_that_does_not_release(g, right):
    """Warp 3 of the consumer leaves before it has told the producer."""
    place, ring = tile("slots"), Ring.allocate("ring", 1, 4)
    init_all([ring])
    with fly.when(thread() == 128):
        for _, at in (loop := fly.range(2, carry=Position.start())):
            tma.load(g.source, place, (0, 0), ring.acquire(at, TILE.bytes))
            loop.next(ring.next(at))
    with fly.when(thread() < 128):
        for _, at in (loop := fly.range(2, carry=Position.start())):
            ring.wait(at)  #!
            keep(wgmma.wait(0, wgmma.issue(*square(place)))[0], g.out)
            with fly.when(thread() < (128 if right else 96)):
                ring.release(at)
            loop.next(ring.next(at))


@mistake("unfinished", "the block ends while mbarrier landed.0. expects 4096 bytes")
def bytes_that_nobody_waits_for(g, right):
    to, landed = tile(), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes if right else 3 * TILE.bytes // 2)  #!
        tma.load(g.source, to, (0, 0), landed.at(0))
    if right:
        landed.wait(0, 0)


@mistake("unfinished", "warpgroup 0 ends with products that it has not waited for")
def products_that_nobody_waits_for(g, right):
    place = loaded(g.source)
    first = wgmma.issue(*square(place))
    second = wgmma.issue(*square(place))  #!
    (first,) = wgmma.wait(1, first)
    keep(first, g.out)
    if right:
        wgmma.wait(0, second)


@mistake("unfinished", "warp 0 ends with bulk stores that may still read shared memory")
def stores_that_nobody_waits_for(g, right):
    to = zeroed()
    intrinsics.fence_async_shared()
    fly.barrier()
    with fly.when(thread() == 0):
        tma.store(g.result, to, (0, 0))  #!
        tma.commit()
        if right:
            tma.wait_read()


# named barriers


@mistake("named-barrier", "barrier 1 of (256 threads, others said 512|512 threads, others said 256)", block=256)
def two_opinions_of_a_barrier(g, right):
    with fly.when(thread() < 128):
        barrier_sync(1, 256)  #!
    with fly.when(thread() >= 128):
        barrier_sync(1, 256 if right else 512)  #!


@mistake("named-barrier", "160 threads come to barrier 1, which is of 128", block=192)
def too_many_warps_at_a_barrier(g, right):
    with fly.when(thread() < 96):
        barrier_arrive(1, 160 if right else 128)  #!
    with fly.when(thread() >= 128):
        barrier_sync(1, 160 if right else 128)  #!


@mistake("named-barrier", "barrier 16; there are 0 to 15")
def a_barrier_that_there_is_not(g, right):
    barrier_sync(g.x.load(1) + (0 if right else 15), 128)  #!


@mistake("deadlock", "waits for barrier 1, where 128 of 256 threads are", block=256)
def a_barrier_that_never_fills(g, right):
    """The other warpgroup goes to another one."""
    with fly.when(thread() < 128):
        barrier_sync(1, 256)  #!
    with fly.when(thread() >= 128):
        barrier_sync(1, 256) if right else barrier_sync(2, 128)


@mistake("deadlock", "waits for barrier 1, where 96 of 128 threads are")
def a_warp_that_leaves_a_loop_early(g, right):
    warp = thread() // 32
    for _ in fly.range(3 - (warp == 3).to(fly.i32) * (0 if right else 1)):
        barrier_sync(1, 128)  #!


@mistake("deadlock", "warpgroup 0 at .*: waits for mbarrier others.0., phase 0, which lacks 32 of 32 arrivals")
def a_warp_that_waits_for_another_before_a_product(g, right):
    """Warps of a warpgroup may wait for one another, but not where only one of them gets to the product."""
    place, others = loaded(g.source), landing(32, name="others")
    if right:
        with fly.when(thread() >= 96):
            others.arrive(0)
    with fly.when(thread() < 32):
        others.wait(0, 0)  #!
    keep(wgmma.wait(0, wgmma.issue(*square(place)))[0], g.out)


# registers


@mistake("registers", "setmaxnreg.dec to 240 registers, with 168", block=384)
def giving_up_more_than_there_are(g, right):
    setmaxnreg_dec(160 if right else 240)  #!


@mistake("registers", "setmaxnreg.inc to 160 registers, with 168", block=384)
def taking_fewer_than_there_are(g, right):
    setmaxnreg_inc(168 if right else 160)  #!


@mistake("deadlock", "waits for 72 registers a thread, where (8|24) are free", block=384)
def registers_that_nobody_gives_up(g, right):
    with fly.when(thread() < 128):
        setmaxnreg_dec(24 if right else 152)
    with fly.when(thread() >= 128):
        setmaxnreg_inc(240)  #!


# who goes where


@mistake("divergence", "fly.barrier in a part of a block")
def a_part_at_the_blocks_barrier(g, right):
    with fly.when(thread() < (1024 if right else 64)):
        fly.barrier()  #!


@mistake("divergence", "a named barrier in a part of a warp")
def a_part_of_a_warp_at_a_barrier(g, right):
    with fly.when(thread() < (64 if right else 48)):
        barrier_arrive(1, 128)  #!
    with fly.when(thread() >= 64):
        barrier_sync(1, 128)


@mistake("divergence", "a barrier's number differs between lanes")
def two_barriers_of_a_warp(g, right):
    barrier_sync(1 + (thread() // (64 if right else 16) & 1), 64)  #!


@mistake("divergence", "wgmma in a part of a warpgroup")
def a_product_of_three_warps(g, right):
    place = loaded(g.source)
    with fly.when(thread() < (128 if right else 96)):
        wgmma.wait(0, wgmma.issue(*square(place)))  #!


@mistake("divergence", "wgmma.wait_group in a part of a warpgroup")
def a_wait_of_three_warps(g, right):
    total = wgmma.issue(*square(loaded(g.source)))
    with fly.when(thread() < (128 if right else 96)):
        wgmma.wait(0, total)  #!


@mistake("divergence", "a descriptor differs between lanes")
def two_operands_of_a_product(g, right):
    place, other = loaded(g.source), zeroed("other")
    intrinsics.fence_async_shared()
    fly.barrier()
    which = fly.select(thread() < (128 if right else 64), 0, 1)
    chosen = place.offset(which * 9216)
    del other
    keep(wgmma.wait(0, wgmma.issue(*square(chosen)))[0], g.out)  #!


@mistake("divergence", "setmaxnreg in a part of a warpgroup", block=256)
def registers_of_three_warps(g, right):
    with fly.when(thread() < (128 if right else 96)):
        setmaxnreg_dec(24)  #!


@mistake("divergence", "a shuffle in a part of a warp")
def a_sum_of_half_a_warp(g, right):
    with fly.when(thread() < (32 if right else 16)):
        g.out.store(fly.lane_sum(g.x.load(thread())), thread())  #!


@mistake("divergence", "a shuffle from a lane outside of the warp")
def a_value_of_no_lane(g, right):
    value = g.x.load(thread())
    g.out.store(fly.shuffle(value, thread() % 32 + (0 if right else 1)), thread())  #!


@mistake("divergence", "a vote in a part of a warp")
def a_vote_of_half_a_warp(g, right):
    with fly.when(thread() < (32 if right else 16)):
        g.out.store(fly.select(fly.any_lane(thread() == 3), 1, 0), thread())  #!


@mistake("divergence", "bar.warp.sync in a part of a warp")
def a_part_of_a_warp_waits(g, right):
    with fly.when(thread() < (32 if right else 31)):
        intrinsics.sync_warp()  #!


@mistake("divergence", "ldmatrix in a part of a warp")
def matrices_for_half_a_warp(g, right):
    place = loaded(g.source)
    with fly.when(thread() < (32 if right else 16)):
        g.out.store(intrinsics.load_matrices_transposed(place.offset(thread() * 16))[0], thread())  #!


@mistake("divergence", "stmatrix in a part of a warp")
def matrices_of_half_a_warp(g, right):
    place = tile()
    with fly.when(thread() < (32 if right else 16)):
        intrinsics.store_matrices(place.offset(thread() * 16), [thread()] * 4)  #!


@mistake("divergence", "32 lanes start a bulk copy each")
def every_lane_starts_a_copy(g, right):
    to, landed = tile(), landing()
    with fly.when(thread() == 0):
        landed.arrive_expecting(0, TILE.bytes)
    with fly.when(thread() < (1 if right else 32)):
        tma.load(g.source, to, (0, 0), landed.at(0))  #!
    landed.wait(0, 0)


@mistake("divergence", "an mbarrier's address differs between lanes")
def two_barriers_of_a_warps_lanes(g, right):
    landed = landing(128 if right else 64, count=2)
    landed.arrive(0 if right else thread() & 1)  #!


@mistake("divergence", "a parity differs between lanes")
def two_parities_of_a_warps_lanes(g, right):
    landed = landing()
    landed.wait(0, fly.i32(1) if right else thread() & 1)  #!


@mistake.each
def test_a_mistake_is_reported_at_its_line(case: Mistake):
    case.check_reported()


@mistake.each
def test_the_kernel_is_right_without_it(case: Mistake):
    case.check_mended()
