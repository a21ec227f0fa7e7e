"""What the simulator says about accesses to memory: a mistake each, and the same kernel mended."""

from __future__ import annotations

import fly
from fly.backends.nvvm import intrinsics, tma, wgmma
from fly.backends.nvvm.emit import operation
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from fly.ir import memory
from tests.simulating.mistakes import (
    TILE,
    Mistake,
    Mistakes,
    keep,
    landing,
    line,
    loaded,
    square,
    thread,
    tile,
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
        last.store(fly.fetch_add(1, g.out.at(255), order="acq_rel" if right else "relaxed"), 0)
    fly.barrier()
    with fly.when((last.load(0) == 2) & (thread() < 32)):
        g.out.store(g.out.load(thread()) + g.out.load(32 + thread()), 128 + thread())  #!


@mistake.each
def test_a_mistake_is_reported_at_its_line(case: Mistake):
    case.check_reported()


@mistake.each
def test_the_kernel_is_right_without_it(case: Mistake):
    case.check_mended()
