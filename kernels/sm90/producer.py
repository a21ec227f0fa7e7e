"""The producer of the Hopper kernel: one thread that fills rings in shared memory with tiles of Q, K and V by TMA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly
from fly.backends.nvvm import tma
from fly.backends.nvvm.intrinsics import WARPGROUP, barrier_sync, fence_async_shared
from fly.backends.nvvm.mbarrier import Position, Ring
from fly.backends.nvvm.wgmma import UNIT, Operand, PanelTile

from ..work.sequences import PagedSequence, Sequence
from ..work.tile_scheduler import Work
from .builds import Sm90Options
from .schedule import Schedule, WorkRing

Pages = tuple[fly.Value, ...]
Opened = tuple[Position, Position, tuple[Pages, Pages]]


@dataclass(frozen=True)
class Slots:
    """Tiles in shared memory, and the ring over them."""

    memory: fly.Pointer
    tile: PanelTile
    ring: Ring

    @staticmethod
    def allocate(name: str, tile: PanelTile, stages: int, consumer_warps: int, producer_warps: int = 0) -> Slots:
        """`consumer_warps`, `producer_warps`: see `Ring.allocate`."""
        memory = fly.alloc_shared(name, tile.bytes * stages, 1024)
        return Slots(memory, tile, Ring.allocate(name, stages, consumer_warps, producer_warps))

    def at(self, at: Position) -> fly.Pointer:
        """The tile of a slot."""
        return self.memory.offset(at.index * self.tile.bytes)

    def operand(self, at: Position, *, units: Any = 0, along_rows: bool = False) -> Operand:
        """A slot's tile as an operand of WGMMA, `units` of `wgmma.UNIT` bytes behind its start."""
        return Operand(self.memory, self.tile, along_rows, at.index * (self.tile.bytes // UNIT) + units)


@dataclass(frozen=True)
class Buffers:
    """Shared memory: tiles of Q, K and V, and the ring of what the block works on.

    `numbers`: with a block mask, which key tile is in each slot of K. `raw_k`, `raw_v`: K and V as they arrive, where
    a warpgroup makes of them what consumers read; `scales`: f32 by key, of two rounds of K's slots, if it leaves any.
    """

    q: Slots
    k: Slots
    v: Slots
    works: WorkRing
    numbers: fly.SharedMemory | None
    raw_k: Slots | None
    raw_v: Slots | None
    scales: fly.SharedMemory | None

    @staticmethod
    def allocate(options: Sm90Options) -> Buffers:
        """Of one block."""
        q_tile, k_tile, v_tile = options.tiles
        warps, making = options.consumers * WARPGROUP // 32, options.helper_warps
        raw_k, raw_v, stages = options.raw_key_tile, options.raw_tile, options.stages
        # (tile, stages, warps that empty a slot, warps that fill it or 0 for a thread through TMA)
        rings: dict[str, tuple[PanelTile | None, int, int, int, int]] = {
            "q": (q_tile, options.q_stages, warps, 0, 1),
            "k": (k_tile, options.k_stages, warps, 0 if raw_k is None else making, options.blocks),
            "v": (v_tile, options.v_stages, warps, 0 if raw_v is None else making, options.blocks),
            "raw_k": (raw_k, stages, making, 0, 1),
            "raw_v": (raw_v, stages, making, 0, 1),
        }
        tiles = {name: tile for name, (tile, *_) in rings.items() if tile is not None}
        # all tiles before all barriers, behind which a tile would be moved to its alignment
        memories = {n: fly.alloc_shared(n, tile.bytes * rings[n][1], 1024) for n, tile in tiles.items()}
        slots = {n: Slots(memories[n], tile, Ring.allocate(n, *rings[n][1:])) for n, tile in tiles.items()}
        lists, kept = options.features.block_size is not None, 2 * options.k_stages * options.block_n
        return Buffers(
            q=slots["q"],
            k=slots["k"],
            v=slots["v"],
            works=WorkRing.allocate(warps + options.helpers * making, lists),
            numbers=fly.SharedMemory("numbers", "i32", stages) if lists else None,
            raw_k=slots.get("raw_k"),
            raw_v=slots.get("raw_v"),
            scales=fly.SharedMemory("scales", "f32", kept) if options.scales_by_key else None,
        )

    @property
    def rings(self) -> list[Ring]:
        """All of them."""
        slots = (self.q, self.k, self.v, self.raw_k, self.raw_v)
        return [self.works.ring, *(some.ring for some in slots if some is not None)]


def entry_of(tokens: Sequence | PagedSequence) -> Any:
    """The entry of the batch that a sequence's tokens are in; packed ones are all in one."""
    return 0 if tokens.index is None else tokens.index


@dataclass(frozen=True)
class Producer:
    """The one thread that fills the rings, in the order in which consumers need them."""

    schedule: Schedule
    buffers: Buffers
    q: fly.TensorMap
    k: fly.TensorMap
    v: fly.TensorMap
    group: Any
    pack: int

    def run(self) -> None:
        """All of the block's tiles."""
        schedule, works = self.schedule, self.buffers.works
        work = schedule.find(fly.block_id.x)
        works_at = works.publish(Position.start(), work, schedule)
        q_at, k_at, pages = self._open(work, Position.start(), Position.start())
        number = fly.block_id.x if schedule.together > 1 else None
        carry = (work, q_at, k_at, Position.start(), works_at, pages, number)
        for work, q_at, k_at, v_at, works_at, pages, number in (tiles := fly.while_(carry, lambda c: c[0].exists)):
            # it is needed only after the loads
            early = schedule.take_early(number)
            rest = work.tiles.end - work.tiles.first
            for i, (k_at_, v_at_, (here, ahead)) in (loop := fly.range(1, rest, carry=(k_at, v_at, pages))):
                j = work.tiles.end - 1 - i
                pages = ahead, self._pages(work, j - 1)
                loop.next(self._load_k(k_at_, work, j, ahead), self._load_v(v_at_, work, j + 1, here), pages)
            k_at, v_at, (here, _) = loop.results
            following = schedule.find(schedule.take() if early is None else early, work)
            works_at = works.publish(works_at, following, schedule)
            # a tile's first K comes before the last V of the tile before
            q_at, k_at, pages = self._open(following, q_at, k_at)
            tiles.next(
                following,
                q_at,
                k_at,
                self._load_v(v_at, work, work.tiles.first, here),
                works_at,
                pages,
                None if number is None else early,
            )
        schedule.finish()

    def _open(self, work: Work, q_at: Position, k_at: Position) -> Opened:
        """Start on a tile, if it is one: its Q, and the last of its K tiles. Also that one's pages, which its V
        needs, and those of the one before."""

        def start() -> Opened:
            here, ahead = (self._pages(work, work.tiles.end - i) for i in (1, 2))
            q_next = self._load_q(q_at, work)
            k_next = self._load_k(k_at, work, work.tiles.end - 1, here)
            self._await_values(work)
            return q_next, k_next, (here, ahead)

        none = (fly.i32(0),) * self.schedule.pages_of_tile
        opened: Opened = fly.cond(work.exists, start, lambda: (q_at, k_at, (none, none)))
        return opened

    def _await_values(self, work: Work) -> None:
        """Until V of a tile's head can be copied: at once, where the launch makes none of it."""

    def _load_q(self, at: Position, work: Work) -> Position:
        head = (work.head,) if self.pack == 1 else (work.head, 0)
        place = (entry_of(work.queries), work.queries.start + work.first_row, *head)
        return self._load(self.q, self.buffers.q, at, [place])

    def _load_k(self, at: Position, work: Work, j: Any, pages: Pages) -> Position:
        j, buffers = self._tile(work, j), self.buffers
        note = None if buffers.numbers is None else partial(buffers.numbers.store, j, at.index)
        return self._load(self.k, buffers.raw_k or buffers.k, at, self._keys(work, j, pages), note=note)

    def _load_v(self, at: Position, work: Work, j: Any, pages: Pages) -> Position:
        places = self._keys(work, self._tile(work, j), pages)
        return self._load(self.v, self.buffers.raw_v or self.buffers.v, at, places)

    def _tile(self, work: Work, j: Any) -> Any:
        """Key tile j, or that of step j of a list."""
        return j if work.listed is None else work.listed.tile(j)

    def _pages(self, work: Work, j: Any) -> Pages:
        """The pages of key tile j, none where keys are not in pages; loaded a tile before they are needed."""
        schedule = self.schedule
        if not isinstance(work.kv, PagedSequence):
            return ()
        return work.kv.pages(j * schedule.block_n, schedule.pages_of_tile)

    def _keys(self, work: Work, j: Any, pages: Pages) -> list[tuple[Any, ...]]:
        """Where the pieces of key tile j, in `pages`, begin: (entry of the batch, or page; row; key head)."""
        schedule = self.schedule
        row, head = work.kv.start + j * schedule.block_n, work.head // self.group
        if schedule.page_size is None:
            return [(entry_of(work.kv), row, head)]
        inside = row % schedule.page_size if len(pages) == 1 else 0
        return [(page, inside, head) for page in pages]

    def _load(
        self,
        tensor_map: fly.TensorMap,
        slots: Slots,
        at: Position,
        places: list[tuple[Any, ...]],
        column: Any = 0,
        note: Callable[[], None] | None = None,
    ) -> Position:
        """A tile in equal pieces, one above the other, which begin at `places`, all coordinates but the last, and
        `column`; `note` stores what consumers are to read beside it."""
        barrier = slots.ring.acquire(at, slots.tile.bytes, note)
        if slots.ring.blocks == 1:
            copy_tile(tensor_map, slots.tile, slots.at(at), places, barrier, column)
        else:
            copy_part(tensor_map, slots.tile, slots.at(at), places[0], barrier, slots.ring.blocks)
        return slots.ring.next(at)


def copy_tile(
    tensor_map: fly.TensorMap,
    tile: PanelTile,
    memory: fly.Pointer,
    places: list[tuple[Any, ...]],
    barrier: fly.Value,
    column: Any = 0,
) -> None:
    """One thread starts a tile's copies, whose bytes arrive at `barrier`: panel by panel, in equal pieces.

    These are one above the other and begin at `places`, all coordinates but the last, and `column`.
    """
    piece_bytes = tile.panel_bytes // len(places)
    for i, place in enumerate(places):
        for panel in range(tile.panels):
            corner = (*place, column + panel * tile.panel_columns)
            tma.load(tensor_map, memory.offset(panel * tile.panel_bytes + i * piece_bytes), corner, barrier)


def copy_part(
    tensor_map: fly.TensorMap,
    tile: PanelTile,
    memory: fly.Pointer,
    place: tuple[Any, ...],
    barrier: fly.Value,
    blocks: int,
) -> None:
    """One thread starts the copies of this block's part of a tile's rows to all `blocks` of its cluster.

    Their bytes arrive at `barrier` in each. The tile begins at `place`: an entry of the batch, a row and a head.
    """
    rank, rows = fly.block_id.x % blocks, tile.rows // blocks
    entry, row, head = place
    for panel in range(tile.panels):
        part = memory.offset(panel * tile.panel_bytes + rank * (rows * tile.swizzle))
        corner = entry, row + rank * rows, head, panel * tile.panel_columns
        tma.load(tensor_map, part, corner, barrier, blocks)


def clear_tail(
    tile: PanelTile, memory: fly.Pointer, rows: fly.Value, barrier: int, index: Any = 0, threads: int = WARPGROUP
) -> None:
    """`clear_rows` from `rows` on, if the tile has any there, by a warpgroup that then meets at a named barrier.

    The barrier is number `index` from `barrier` on.
    """
    with fly.when(rows < tile.rows):
        clear_rows(tile, memory, rows, threads)
        barrier_sync(index + barrier, threads)


def clear_rows(tile: PanelTile, memory: fly.Pointer, first: fly.Value, threads: int = WARPGROUP) -> None:
    """Set a tile's rows from `first` on to zero: for values that are no sequence's, as a NaN there times 0 is NaN.

    By a warpgroup, which then meets at a barrier.
    """
    begin = fly.maximum(first, 0) * tile.swizzle + fly.thread_id.x % threads * 16
    zero = fly.broadcast(fly.i32(0), 4)
    for panel in range(tile.panels):
        for offset in fly.range(begin, tile.panel_bytes, threads * 16):
            fly.store(zero, memory.offset(offset + panel * tile.panel_bytes), align=16)
    fence_async_shared()
