"""V is transposed beside the products of an 8-bit launch, by warps of the producer's warpgroup that copy nothing.

A launch before that transposes V takes as long as memory does, which products leave idle. Instead blocks transpose
tiles of V for all of them, to the memory that a launch before would fill: a tile is claimed by counting, comes by a
bulk copy, is transposed in shared memory, goes by another one, and is counted. Producers wait for the tiles of their
key head. They wait only for what running warps do, in whatever order blocks start. The last of all roles leaves the
counters as it found them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import fly
from fly.backends.nvvm import tma
from fly.backends.nvvm.intrinsics import anew, barrier_sync, fence_async_global, fence_async_shared
from fly.backends.nvvm.mbarrier import Mbarriers, init_all

from ..problem.contract import Request
from ..work.spin import spin
from ..work.tile_scheduler import Work
from .counters import FIRST_ARRIVAL, MANY_ARRIVALS
from .fp8_builds import AHEAD_WARPS, SHARED_BYTES, Fp8Options
from .helpers import HelperOf
from .producer import copy_tile
from .schedule import Schedule
from .transposer import TileTranspose

CLAIMED, ENDED = 2, 3  # counters: of tiles, and of roles that have nothing left to do
ROLES = 2  # of a block: its producer, and the warps that transpose
WORKERS = 32 * AHEAD_WARPS
BESIDE = 2048  # bytes of shared memory for barriers and alignment
LONGEST = 8192  # keys: in longer sequences there are few heads, and all of them begin at once
HEADS_PER_WAVE = 4  # as many of all heads as begin at once are too few to be hidden


def is_ahead(request: Request, options: Fp8Options, units: int) -> bool:
    """Whether a build, which reads V from memory where it is transposed, transposes it itself, on so many `units`.

    As measured on an H100: where the build is one that `options` say it of, and heads that begin together are few.
    """
    slices = request.batch * request.num_kv_heads
    tiles_of_head = -(-request.seq_len // options.queries) * (request.num_heads // options.pack_gqa)
    together = -(-units // max(1, tiles_of_head // request.num_kv_heads))
    raw, transposed = options.ahead_tiles
    fits = options.tile_bytes + raw.bytes + transposed.bytes + BESIDE <= SHARED_BYTES
    few = slices <= MANY_ARRIVALS and request.seq_len_kv <= LONGEST and HEADS_PER_WAVE * together <= slices
    return options.ahead and fits and few and not options.combines


@dataclass(frozen=True)
class ValuesAhead:
    """What a launch's blocks transpose.

    `raw`: a map of v, (B, S, Hkv, D), whose box is a panel of a tile; `transposed`: one of what consumers read, see
    `transpose_values`; `group`: sets of query heads of a key head. `memory`: of a tile as it comes and transposed;
    `arrived`: it has come; `told`: a number for all workers.
    """

    raw: fly.TensorMap
    transposed: fly.TensorMap
    group: Any
    options: Fp8Options
    memory: tuple[fly.Pointer, fly.Pointer]
    arrived: Mbarriers
    told: fly.SharedMemory

    @staticmethod
    def allocate(raw: fly.TensorMap, transposed: fly.TensorMap, group: Any, options: Fp8Options) -> ValuesAhead:
        """By all threads of a block."""
        names, tiles = ("values_ahead", "transposed_ahead"), options.ahead_tiles
        first, second = (fly.alloc_shared(name, tile.bytes, 1024) for name, tile in zip(names, tiles, strict=True))
        arrived, told = Mbarriers.allocate("values_arrived", 1, 1), fly.SharedMemory("told", "i32", 1)
        init_all([arrived])
        return ValuesAhead(raw, transposed, group, options, (first, second), arrived, told)

    @property
    def helper(self) -> HelperOf:
        """The role of the warps that transpose."""
        return lambda schedule, buffers, options, barrier, number: _Workers(self, schedule, barrier)

    def kv_heads(self, schedule: Schedule, step: Any) -> Any:
        """How many there are; made again where `step` (i32) is, as the producer's threads have few registers."""
        return anew(schedule.heads, step) // self.group

    def tiles(self, schedule: Schedule, step: Any) -> Any:
        """Of each of them; the same."""
        return fly.ceil_div(anew(schedule.seq_len_kv, step), self.options.block_n)

    def wait(self, schedule: Schedule, work: Work) -> None:
        """By the thread that copies: until all values of a tile's key head are where they are copied from."""
        step = work.head
        count = self.done(schedule, work.batch * self.kv_heads(schedule, step) + step // self.group)
        spin(lambda: fly.load_acquire(count), self.tiles(schedule, step))
        fence_async_global()

    def done(self, schedule: Schedule, slice_: Any) -> fly.Pointer:
        """How many tiles of a key head of a sequence are transposed."""
        return schedule.counters.at(FIRST_ARRIVAL + slice_)

    def finish(self, schedule: Schedule) -> None:
        """By one thread of each role at its end."""
        last = ROLES * fly.grid_dim.x - 1
        with fly.when(fly.fetch_wrap(last, schedule.counters.at(ENDED)) == last):
            schedule.counters.store(fly.i32(0), CLAIMED)
            for slice_ in fly.range(schedule.batch * self.kv_heads(schedule, last)):
                fly.store(fly.i32(0), self.done(schedule, slice_), align=4)


@dataclass(frozen=True)
class _Workers:
    """The warps of a block that transpose tiles of V, together; `barrier`: a named one, theirs."""

    ahead: ValuesAhead
    schedule: Schedule
    barrier: int
    registers: ClassVar[int] = 0  # of the producer's warpgroup

    @property
    def _is_first(self) -> fly.Value:
        first: fly.Value = fly.thread_id.x % WORKERS == 0
        return first

    def run(self) -> None:
        """Tiles, until all of them are claimed."""
        schedule, ahead = self.schedule, self.ahead
        begin = fly.i32(0) + schedule.batch
        total = schedule.batch * ahead.kv_heads(schedule, begin) * ahead.tiles(schedule, begin)
        start = self._claimed(), fly.i32(0)
        for number, phase in (loop := fly.while_(start, lambda carried: carried[0] < total)):
            tiles, kv_heads = ahead.tiles(schedule, number), ahead.kv_heads(schedule, number)
            slice_ = number // tiles
            batch = slice_ // kv_heads
            # keys are walked from the last tile on
            tile = tiles - 1 - (number - slice_ * tiles)
            self._transpose(batch, slice_ - batch * kv_heads, tile, phase)
            with fly.when(self._is_first):
                fly.atomic_add(fly.i32(1), ahead.done(schedule, slice_), order="release")
            loop.next(self._claimed(), phase ^ 1)
        with fly.when(self._is_first):
            ahead.finish(schedule)

    def _claimed(self) -> fly.Value:
        """The number of the next tile, for all workers: they meet once more before the first one claims again."""
        told = self.ahead.told
        with fly.when(self._is_first):
            told.store(fly.fetch_add(1, self.schedule.counters.at(CLAIMED)), 0)
        barrier_sync(self.barrier, WORKERS)
        number: fly.Value = fly.first_lane(told.load(0))
        return number

    def _transpose(self, batch: Any, head: Any, number: Any, phase: Any) -> None:
        """Tile `number` of a key head; it has been written when the first worker returns."""
        ahead, (raw_tile, tile) = self.ahead, self.ahead.options.ahead_tiles
        raw, transposed = ahead.memory
        first_key = number * ahead.options.block_n
        with fly.when(self._is_first):
            ahead.arrived.arrive_expecting(0, raw_tile.bytes)
            copy_tile(ahead.raw, raw_tile, raw, [(batch, first_key, head)], ahead.arrived.at(0))
        ahead.arrived.wait(0, phase)
        transpose = TileTranspose(raw_tile, tile, AHEAD_WARPS)
        # one at a time, in a loop, by lanes that are counted again: a thread has the producer's few registers
        with fly.reread_ids(lanes=True):
            for step in fly.range(transpose.blocks):
                for group in transpose.groups:
                    transpose.store(transposed, transpose.load(raw, [(group, step)]), [(group, step)])
        fence_async_shared()
        barrier_sync(self.barrier, WORKERS)
        with fly.when(self._is_first):
            for panel in range(tile.panels):
                corner = batch, head, 0, first_key + panel * tile.panel_columns
                tma.store(ahead.transposed, transposed.offset(panel * tile.panel_bytes), corner)
            tma.commit()
            tma.wait()
