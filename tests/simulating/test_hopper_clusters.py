"""Clusters on the simulated Hopper GPU: what blocks do to each other's shared memory, and mistakes in that."""

from __future__ import annotations

import pytest
import torch

import fly
from fly.backends.nvvm import cluster, tma
from fly.backends.nvvm.intrinsics import fence_async_shared
from fly.backends.nvvm.mbarrier import Mbarriers, init_all
from fly.errors import LaunchError
from tests.backends.hopper import halved, passed_on
from tests.simulating.mistakes import TILE, Mistakes, line, thread
from tests.simulating.schedules import in_every_schedule

LINE = 128 * 4


@pytest.mark.parametrize("blocks", [2, 3, 8])
def test_a_block_copies_to_the_next_one_of_its_cluster(blocks):
    x, out = torch.arange(3 * blocks * 128, dtype=torch.int32), torch.zeros(3 * blocks * 128, dtype=torch.int32)
    in_every_schedule(lambda: passed_on[3 * blocks, 128](x, out, blocks=blocks), out)
    assert torch.equal(out.view(3, blocks, 128), x.view(3, blocks, 128).roll(1, 1))


@pytest.mark.parametrize("blocks", [2, 4])
def test_blocks_load_boxes_for_their_whole_cluster(blocks):
    x = torch.arange(blocks * 8 * 32, dtype=torch.int32).view(-1, 32)
    out = torch.zeros(2 * blocks, x.numel(), dtype=torch.int32)
    box = fly.tensor_map(x, (8, 32))
    in_every_schedule(lambda: halved[2 * blocks, 128](box, out, blocks=blocks), out)
    assert torch.equal(out, x.flatten().expand(2 * blocks, -1))


def test_a_grid_is_of_whole_clusters():
    x = torch.zeros(3 * 128, dtype=torch.int32)
    with pytest.raises(LaunchError, match="passed_on: 3 blocks along x in clusters of 2"):
        passed_on[3, 128](x, x.clone(), blocks=2)


mistake = Mistakes()


def ready(arrivals: int = 1) -> tuple[fly.SharedMemory, Mbarriers]:
    """In a cluster of two: a line, and a barrier that both blocks may use."""
    cluster.declare(2)
    words, arrived = line(), Mbarriers.allocate("arrived", 1, arrivals)
    init_all([arrived])
    cluster.sync()
    return words, arrived


def send(words: fly.SharedMemory, arrived: Mbarriers, count: int = LINE) -> None:
    """The first half of the line to the second half of the other block's."""
    other = fly.block_id.x % 2 ^ 1
    with fly.when(thread() == 0):
        cluster.arrive_expecting(arrived, 0, LINE, other)
        cluster.copy(words.pointer.offset(LINE), words.pointer, count, arrived, 0, other)


def filled(words: fly.SharedMemory, g, fence: bool = True) -> None:
    words.store(g.x.load(thread()), thread())
    if fence:
        fence_async_shared()
    fly.barrier()


@mistake({"shared-race": "reads byte 512 of 'line'", "uninitialised": "reads byte 512 of 'line'"}, grid=2)
def a_copy_that_is_not_waited_for(g, right):
    words, arrived = ready()
    filled(words, g)
    send(words, arrived)
    if right:
        arrived.wait(0, 0)
    else:
        fly.barrier()
    g.out.store(words.load(thread() + 128), thread())  #!
    cluster.sync()


@mistake("shared-race", "writes byte 0 of 'line', in use by a bulk store of warp 0", grid=2)
def a_source_that_may_not_have_been_read(g, right):
    words, arrived = ready()
    filled(words, g)
    send(words, arrived)
    if right:
        arrived.wait(0, 0)
        cluster.sync()  # the other block's wait was for this one's copy
    words.store(g.x.load(thread()) + 1, thread())  #!
    cluster.sync()


@mistake("proxy-fence", "reads byte 0 of 'line', which a warp stored with no fence", grid=2)
def a_source_without_a_fence(g, right):
    words, arrived = ready()
    filled(words, g, fence=right)
    other = fly.block_id.x % 2 ^ 1
    with fly.when(thread() == 0):
        cluster.arrive_expecting(arrived, 0, LINE, other)
        cluster.copy(words.pointer.offset(LINE), words.pointer, LINE, arrived, 0, other)  #!
    arrived.wait(0, 0)
    cluster.sync()


@mistake("mbarrier-bytes", "a copy of 512 bytes completes on mbarrier arrived.0.", grid=2)
def a_copy_of_more_than_was_announced(g, right):
    words, arrived = ready()
    filled(words, g)
    other = fly.block_id.x % 2 ^ 1
    with fly.when(thread() == 0):
        cluster.arrive_expecting(arrived, 0, LINE if right else LINE // 2, other)
        cluster.copy(words.pointer.offset(LINE), words.pointer, LINE, arrived, 0, other)  #!
    arrived.wait(0, 0)
    cluster.sync()


@mistake("misaligned", "a copy of 500 bytes", grid=2)
def a_copy_of_a_part_of_16_bytes(g, right):
    words, arrived = ready()
    filled(words, g)
    count = LINE if right else 500
    other = fly.block_id.x % 2 ^ 1
    with fly.when(thread() == 0):
        cluster.arrive_expecting(arrived, 0, count, other)
        cluster.copy(words.pointer.offset(LINE), words.pointer, count, arrived, 0, other)  #!
    arrived.wait(0, 0)
    cluster.sync()


@mistake({"mbarrier-init": "arrived", "out-of-bounds": "'arrived', which the other block .* not have yet"}, grid=2)
def a_barrier_of_a_block_that_may_not_have_begun(g, right):
    cluster.declare(2)
    arrived = Mbarriers.allocate("arrived", 1, 128)
    init_all([arrived])
    if right:
        cluster.sync()
    cluster.arrive(arrived, 0, fly.block_id.x % 2 ^ 1)  #!
    arrived.wait(0, 0)
    cluster.sync()


@mistake("out-of-bounds", "block 2 of a cluster of 2", grid=2)
def a_block_that_the_cluster_does_not_have(g, right):
    _, arrived = ready(128)
    cluster.arrive(arrived, 0, fly.block_id.x % 2 ^ 1 if right else 2)  #!
    arrived.wait(0, 0)
    cluster.sync()


@mistake(
    "unfinished",
    r"into block (.0, 0, 0.|0) of the cluster, which (may have|has) ended",
    grid=2,
)
def a_block_that_has_ended(g, right):
    _, arrived = ready(128)
    with fly.when(fly.block_id.x == 1):
        cluster.arrive(arrived, 0, 0)  #!
    if right:
        cluster.sync()


@mistake(
    "mbarrier-bytes", "a copy of 8192 bytes completes on mbarrier arrived.0., whose phase 0 expects 4096", grid=2
)
def a_box_for_all_that_a_block_expects_less_of(g, right):
    cluster.declare(2)
    tile, arrived = fly.alloc_shared("tile", TILE.bytes, 128), Mbarriers.allocate("arrived", 1, 2)
    init_all([arrived])
    cluster.sync()
    with fly.when(thread() < 2):
        arrived.arrive_expecting(0, TILE.bytes // 2 if right else TILE.bytes // 4)
    with fly.when((thread() == 0) & (fly.block_id.x == 0)):
        tma.load(g.source, tile, (0, 0), arrived.at(0), 2)  #!
    arrived.wait(0, 0)
    cluster.sync()


@mistake("deadlock", "waits for its cluster, barrier 0, where 128 of 256 threads are", grid=2)
def a_meeting_that_one_block_does_not_come_to(g, right):
    ready()
    if right:
        cluster.sync()
    else:
        with fly.when(fly.block_id.x == 1):
            cluster.sync()  #!


@mistake.each
def test_a_mistake_is_reported(case):
    case.check_reported()


@mistake.each
def test_without_it_nothing_is(case):
    case.check_mended()
