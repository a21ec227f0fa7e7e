"""Kernels of any target: waves of 32 and 64 lanes, roles that meet, threads' own copies, and mistakes with them."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.rocdl import intrinsics
from fly.backends.target import target
from fly.errors import SimulatorError
from fly.ir import memory
from fly.ir.context import emit
from tests.simulated import Machine, Program, SharedAccess, flat
from tests.simulating.mistakes import thread
from tests.simulating.portable import PortableMistakes, copy, copy_direct, in_every_schedule, program, token
from tests.tracing import matrix, trace

AMD, ALL = ("gfx942", "gfx950"), ("gfx942", "gfx950", "sm_80", "sm_90a")
RACE = "with nothing that orders the two"
mistake = PortableMistakes()


def line(words: int = 512) -> fly.SharedMemory:
    return fly.SharedMemory("line", fly.i32, words)


def first_lane() -> fly.Value:
    """The number of the wave's first thread."""
    return thread() - fly.lane_id()


# what waves do


@pytest.mark.parametrize("arch", ALL)
def test_lanes_of_a_wave_exchange_values(arch):
    size = target(arch).wave_size

    def kernel(out: fly.Tensor):
        me = thread()
        exchanged = (
            fly.shuffle(me, 5),
            fly.shuffle(me, fly.lane_id() ^ (size - 1)),
            fly.shuffle_xor(me, size // 2),
            fly.lane_sum(me),
            fly.lane_max(me),
            fly.any_lane(me == size + 3).to(fly.i32),
        )
        for row, value in enumerate(exchanged):
            out.store(value, row, me)

    out = np.full((6, 3 * size), -1, np.int32)
    in_every_schedule(kernel, out, arch=arch, block=3 * size)
    me = np.arange(3 * size)
    first = me // size * size
    wanted = [
        first + 5,
        first + (me - first ^ size - 1),
        first + (me - first ^ size // 2),
        first * size + size * (size - 1) // 2,
        first + size - 1,
        me // size == 1,
    ]
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("arch", ALL)
def test_a_vote_counts_the_lanes_that_are_there(arch):
    """Waves that are elsewhere, as a whole, have no say and get no answer."""
    size = target(arch).wave_size

    def kernel(out: fly.Tensor):
        with fly.when(thread() // size % 2 == 1):
            out.store(fly.any_lane(thread() < 3 * size // 2).to(fly.i32), thread())

    out = np.full(4 * size, -1, np.int32)
    in_every_schedule(kernel, out, arch=arch, block=4 * size)
    np.testing.assert_array_equal(out.reshape(4, size)[:, 0], [-1, 1, -1, 0])
    np.testing.assert_array_equal(out, out[::size].repeat(size))


@pytest.mark.parametrize("arch", ALL)
def test_barriers_order_all_waves_of_a_block(arch):
    """More waves than go together: each turn, every thread takes what a thread of another wave has left."""
    threads = 8 * target(arch).wave_size

    def kernel(out: fly.Tensor):
        shared = line(threads)
        shared.store(thread(), thread())
        for turn in fly.range(3):
            fly.barrier()
            value = shared.load((thread() + 3 * threads // 8) % threads)
            fly.barrier()
            shared.store(value * 2 + turn, thread())
        out.store(shared.load(thread()), thread())

    out = np.zeros(threads, np.int32)
    in_every_schedule(kernel, out, arch=arch, block=threads)
    wanted = np.arange(threads)
    for turn in range(3):
        wanted = np.roll(wanted, -3 * threads // 8) * 2 + turn
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("threads", [256, 512])
def test_halves_of_a_block_take_turns(threads):
    """One half comes to a barrier before and the other after the loop: they are never in the same part of a turn."""

    def kernel(out: fly.Tensor):
        shared, half = line(1), thread() // (threads // 2)
        with fly.when(thread() == 0):
            shared.store(1, 0)
        fly.barrier()
        with fly.when(half == 1):
            intrinsics.s_barrier()
        for turn in fly.range(3):
            with fly.when(thread() % (threads // 2) < 64):
                value = shared.load(0)
                out.store(value, turn, half)
                shared.store(value * 3 + half, 0)
            intrinsics.s_waitcnt_lds()
            intrinsics.s_barrier()
            intrinsics.s_barrier()
        with fly.when(half == 0):
            intrinsics.s_barrier()

    out = np.zeros((3, 2), np.int32)
    in_every_schedule(kernel, out, arch="gfx950", block=threads)
    wanted = [1]
    for turn in range(5):
        wanted.append(wanted[-1] * 3 + turn % 2)
    assert out.ravel().tolist() == wanted


# what is observed


def test_accesses_of_waves_are_told():
    def kernel(out: fly.Tensor):
        shared = line(256)
        shared.store(thread(), thread() ^ 1)
        fly.barrier()
        with fly.when(thread() % 64 < 16):
            memory.store(memory.load(shared.at(thread() // 2 * 2), fly.i32, 2, align=8)[1], out.at(thread()))

    out = np.zeros(128, np.int32)
    machine = Machine(program(kernel, out, arch="gfx942", block=128), observe_shared=True)
    machine(flat(out))
    start = machine.shared_accesses[0].addresses[1]
    lanes = np.arange(64)
    stores = [tuple((start + 4 * (64 * wave + (lanes ^ 1))).tolist()) for wave in range(2)]
    loads = [(*(start + 4 * (64 * wave + lanes[:16] // 2 * 2)).tolist(), *[None] * 48) for wave in range(2)]
    assert machine.shared_accesses == [
        *(SharedAccess("store", 4, addresses) for addresses in stores),
        *(SharedAccess("load", 8, addresses) for addresses in loads),
    ]


def test_nothing_is_told_unless_it_is_asked_for():
    def kernel(out: fly.Tensor):
        shared = line(64)
        shared.store(thread(), thread())
        out.store(shared.load(thread()), thread())

    out = np.zeros(64, np.int32)
    machine = Machine(program(kernel, out, arch="gfx942"))
    machine(flat(out))
    assert machine.shared_accesses == []


# copies of threads' own


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_copies_arrive_and_loops_carry_their_tokens(arch):
    """One tile ahead of the loop: rows come in order, whenever copies land."""
    size = target(arch).wave_size

    def kernel(x: fly.Tensor, out: fly.Tensor):
        shared = line(2 * size)

        def start(row: fly.Value) -> fly.Token:
            to = shared.at(row % 2 * size)
            if arch == "sm_80":
                return token(emit(*copy(to.offset(thread() * 4), x.at(row, thread()), row < 5)))
            return token(emit(*copy_direct(to, x.at(0, 0), (row * size + thread()) * 4, 5 * size * 4)))

        for row, current in (loop := fly.range(5, carry=start(fly.i32(0)))):
            following = start(row + 1)
            fly.wait(current)
            out.store(shared.load(row % 2 * size + (thread() ^ 1)), row, thread())
            loop.next(following)
        fly.wait(loop.results)

    x, out = np.arange(5 * size, dtype=np.int32).reshape(5, size), np.zeros((5, size), np.int32)
    in_every_schedule(kernel, x, out, arch=arch)
    np.testing.assert_array_equal(out.reshape(5, -1, 2), x.reshape(5, -1, 2)[:, :, ::-1])


def test_copies_are_zero_where_nothing_is_to_be_read():
    def kernel(x: fly.Tensor, out: fly.Tensor):
        shared = line(128)
        copies = [copy_direct(shared.at(0), x.at(0), thread() * 4, 164, shift) for shift in (0, 256)]
        fly.wait(fly.join([token(emit(*given)) for given in copies]))
        for half in range(2):
            out.store(shared.load(64 * half + thread()), 64 * half + thread())

    x, out = np.arange(1, 129, dtype=np.int32), np.full(128, -1, np.int32)
    in_every_schedule(kernel, x, out, arch="gfx942")
    np.testing.assert_array_equal(out, np.where(np.arange(128) < 41, x, 0))


def test_a_wait_for_a_newer_copy_is_not_for_an_older_one():
    """In the schedule whose copies are late, what was not waited for is not there."""

    def kernel(x: fly.Tensor, out: fly.Tensor):
        shared = line(64)
        older, newer = (token(emit(*copy(shared.at(at), x.at(at)))) for at in (thread(), thread() + 32))
        fly.wait(newer)
        out.store(shared.load(thread()), thread())
        fly.wait(older)
        out.store(shared.load(thread()), thread() + 32)

    x = np.arange(64, dtype=np.int32)
    read = program(kernel, x, x, arch="sm_80")
    for late, first in ((False, x[:32]), (True, [-1] * 32)):
        out = np.zeros(64, np.int32)
        Machine(read, late_copies=late)(flat(x, out))
        np.testing.assert_array_equal(out, [*first, *x[:32]])


@mistake("shared-race", "reads byte 0 of 'line', written by a copy of warp 0 that is not waited for", arch="sm_80")
def a_copy_is_not_waited_for(g, right):
    shared = line()
    current = token(emit(*copy(shared.at(thread()), g.x.at(thread()))))
    if right:
        fly.wait(current)
    g.out.store(shared.load(thread()), thread())  #!
    fly.wait(current)


@mistake("shared-race", "reads byte 0 of 'line', written by a copy of warp 0", arch="gfx950")
def a_direct_copy_is_not_waited_for(g, right):
    shared = line()
    current = token(emit(*copy_direct(shared.at(first_lane()), g.x.at(0), thread() * 4, 2048)))
    if right:
        fly.wait(current)
    g.out.store(shared.load(thread()), thread())  #!
    fly.wait(current)


@mistake("shared-race", "written by a copy of warp", arch="sm_80", block=256)
def a_barrier_before_the_wait(g, right):
    shared = line()
    current = token(emit(*copy(shared.at(thread()), g.x.at(thread()))))
    if right:
        fly.wait(current)
        fly.barrier()
    else:
        fly.barrier()
        fly.wait(current)
    g.out.store(shared.load(thread() ^ 128), thread())  #!


@mistake("shared-race", f"writes byte 0 of 'line', in use by warp 1 {RACE}", arch="gfx950")
def a_copy_over_what_others_read(g, right):
    shared = line()
    shared.store(thread(), thread())
    fly.barrier()
    value = shared.load(thread() ^ 64)
    if right:
        fly.barrier()
    fly.wait(token(emit(*copy_direct(shared.at(first_lane()), g.x.at(0), thread() * 4, 2048))))  #!
    g.out.store(value, thread())


@mistake("shared-race", "in use by a copy of warp . that is not waited for", arch="gfx942")
def two_waves_copy_to_one_place(g, right):
    shared = line()
    to = shared.at(first_lane() if right else 0)
    fly.wait(token(emit(*copy_direct(to, g.x.at(0), thread() * 4, 2048))))  #!


@mistake("divergence", "the destination of a direct copy differs between lanes", arch=AMD)
def a_destination_for_each_lane(g, right):
    shared = line()
    to = shared.at(first_lane() if right else thread())
    fly.wait(token(emit(*copy_direct(to, g.x.at(0), thread() * 4, 2048))))  #!


@mistake("divergence", "a direct copy in a part of a warp", arch=AMD)
def some_lanes_copy_directly(g, right):
    shared = line()
    with fly.when(thread() < (64 if right else 32)):
        fly.wait(token(emit(*copy_direct(shared.at(0), g.x.at(0), thread() * 4, 2048))))  #!


@mistake("divergence", "a token of copies in a loop or a branch that threads leave apart", arch=("gfx950", "sm_80"))
def copies_as_many_as_a_thread_likes(g, right):
    shared = line()
    current = token(emit(*copy(shared.at(thread()), g.x.at(thread()))))
    for _, following in (loop := fly.range(2 if right else thread() + 1, carry=current)):  #!
        fly.wait(following)
        loop.next(token(emit(*copy(shared.at(thread()), g.x.at(thread())))))  #!
    fly.wait(loop.results)


@mistake(
    "out-of-bounds", "4 bytes of global memory at 0x[0-9a-f]+, byte 2048 of argument 0, which has 2048", arch="sm_80"
)
def a_copy_from_beyond_a_tensor(g, right):
    shared = line()
    fly.wait(token(emit(*copy(shared.at(thread()), g.x.at(thread() + (384 if right else 385))))))  #!


# where lanes are


@mistake("divergence", "a shuffle in a part of a warp", arch=ALL)
def some_lanes_shuffle(g, right):
    with fly.when(thread() < (64 if right else 16)):
        g.out.store(fly.shuffle_xor(thread(), 1), thread())  #!


@mistake("divergence", "a vote in a part of a warp", arch=ALL)
def some_lanes_vote(g, right):
    with fly.when(thread() < (64 if right else 16)):
        g.out.store(fly.any_lane(thread() == 3).to(fly.i32), thread())  #!


@mistake("divergence", "fly.barrier in a part of a block", arch=ALL)
def some_waves_come_to_a_barrier(g, right):
    with fly.when(thread() < (128 if right else 64)):
        fly.barrier()  #!


@mistake("deadlock", r"barrier 0, where 256 of 512 threads are", arch=AMD, block=512)
def some_roles_come_to_a_barrier(g, right):
    with fly.when(thread() < (512 if right else 256)):
        fly.barrier()  #!


@mistake("deadlock", r"barrier 0, where 384 of 512 threads are", arch=AMD, block=512)
def waves_meet_without_one_another(g, right):
    with fly.when(thread() < (512 if right else 384)):
        intrinsics.s_barrier()  #!


@mistake("divergence", "the base of a bounded access differs between lanes", arch=AMD)
def a_base_for_each_lane(g, right):
    base, offset = (g.out.at(0), thread() * 4) if right else (g.out.at(thread()), fly.i32(0))
    fly.store_bounded(thread(), base, offset, 2048)  #!


@mistake("divergence", "the bound of a bounded access differs between lanes", arch=AMD)
def a_bound_for_each_lane(g, right):
    bound = fly.i32(256) if right else thread() * 4
    fly.store_bounded(fly.load_bounded(g.x.at(0), thread() * 4, bound, fly.i32), g.out.at(0), thread() * 4, 2048)  #!


def test_bases_and_bounds_are_each_lane_s_own_on_nvidia():
    def kernel(x: fly.Tensor, out: fly.Tensor):
        value = fly.load_bounded(x.at(thread()), fly.i32(0), fly.select(thread() % 3 == 0, 4, 0), fly.i32)
        fly.store_bounded(value + 1, out.at(thread()), fly.i32(0), fly.select(thread() < 50, 4, 0))

    x, out = np.arange(64, dtype=np.int32), np.full(64, -1, np.int32)
    in_every_schedule(kernel, x, out, arch="sm_80", block=64)
    wanted = np.where(x % 3 == 0, x, 0) + 1
    np.testing.assert_array_equal(out, np.where(x < 50, wanted, -1))


# memory


@mistake("shared-race", f"written by warp . {RACE}|which nothing has written", arch=ALL)
def no_barrier_between_waves(g, right):
    shared = line()
    shared.store(thread(), thread())
    if right:
        fly.barrier()
    g.out.store(shared.load(thread() ^ 64), thread())  #!


@mistake("shared-race", f"writes byte 0 of 'line', in use by warp 0 {RACE}", arch=ALL)
def two_values_of_one_word(g, right):
    line().store(fly.i32(5) if right else thread(), thread() % 64)  #!


@mistake("global-race", f"writes byte 0 of argument 2, which another warp or copy wrote {RACE}", arch=ALL)
def two_values_of_one_result(g, right):
    g.out.store(fly.i32(5) if right else thread(), thread() % 64)  #!


@mistake("out-of-bounds", "a bounded access begins below its bound and ends above it", arch=ALL)
def across_a_bound(g, right):
    values = fly.from_elements([thread()] * 4)
    fly.store_bounded(values, g.out.at(0), thread() * 16, 160 if right else 168, align=4)  #!


@mistake("out-of-bounds", "byte 2048 of argument 2, which has 2048", arch=ALL)
def beyond_a_tensor(g, right):
    g.out.store(thread(), thread() + (384 if right else 385))  #!


@mistake("misaligned", "expected a multiple of 8", arch=ALL)
def half_of_a_pair(g, right):
    pair = memory.load(g.x.at(thread() * 2 + (0 if right else 1)), fly.i32, 2, align=8)  #!
    g.out.store(pair[0], thread())


@mistake("uninitialised", "reads byte 512 of 'line', which nothing has written", arch=ALL)
def what_nobody_stored(g, right):
    shared = line()
    shared.store(thread(), thread())
    fly.barrier()
    g.out.store(shared.load(thread() ^ (1 if right else 128)), thread())  #!


@mistake("out-of-bounds", "buffer 'large' ends at byte 70000 of 65536 of shared memory", arch="gfx942")
def more_than_there_is(g, right):
    fly.alloc_shared("large", 60_000 if right else 70_000, 16)  #!


def test_an_operation_without_a_meaning_here():
    def kernel(out: fly.Tensor):
        out.store(intrinsics.cvt_pk_fp8(fly.broadcast(1.0, 4)).bitcast(fly.f32)[0], 0)

    read = Program.of(trace(kernel, matrix("f32"), arch="gfx950"), target("gfx950"))
    with pytest.raises(SimulatorError, match=r"does not know llvm.mlir.poison at .*test_waves.py:\d+"):
        Machine(read)(flat(np.zeros(1, np.float32)))


@mistake.each
def test_a_mistake_is_reported_at_its_line(case):
    case.check_reported()


@mistake.each
def test_the_kernel_is_right_without_it(case):
    case.check_mended()
