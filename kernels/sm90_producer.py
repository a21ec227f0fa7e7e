"""The producer of the Hopper kernel: one thread that fills rings in shared memory with tiles of Q, K and V by TMA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly
from fly.backends.nvvm import tma
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.mbarrier import Position, Ring
from fly.backends.nvvm.wgmma import PanelTile
from kernels.sm90_builds import Sm90Options
from kernels.sm90_schedule import Board, Schedule, Work


@dataclass(frozen=True)
class Buffers:
    """Shared memory: tiles, the rings over them, and the board that says what the block works on.

    `numbers`: with a block mask, which key tile is in each slot of K.
    """

    q: fly.Pointer
    k: fly.Pointer
    v: fly.Pointer
    q_tile: PanelTile
    k_tile: PanelTile
    v_tile: PanelTile
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    board: Board
    numbers: fly.SharedMemory | None

    @staticmethod
    def allocate(options: Sm90Options) -> Buffers:
        """Of one block."""
        q_tile, k_tile, v_tile = options.tiles
        warps = options.consumers * WARPGROUP // 32
        lists = options.features.block_size is not None
        return Buffers(
            q=fly.alloc_shared("q", q_tile.bytes * options.q_stages, 1024),
            k=fly.alloc_shared("k", k_tile.bytes * options.stages, 1024),
            v=fly.alloc_shared("v", v_tile.bytes * options.stages, 1024),
            q_tile=q_tile,
            k_tile=k_tile,
            v_tile=v_tile,
            q_ring=Ring.allocate("q", options.q_stages, warps),
            k_ring=Ring.allocate("k", options.stages, warps),
            v_ring=Ring.allocate("v", options.stages, warps),
            board=Board.allocate(warps, lists),
            numbers=fly.SharedMemory("numbers", "i32", options.stages) if lists else None,
        )


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
        schedule, board = self.schedule, self.buffers.board
        work = schedule.find(fly.block_id.x)
        board_at = board.publish(Position.start(), work, schedule)
        q_at, k_at = self._open(work, Position.start(), Position.start())
        carry = (work, q_at, k_at, Position.start(), board_at)
        for work, q_at, k_at, v_at, board_at in (tiles := fly.while_(carry, lambda c: c[0].exists)):
            early = None if schedule.takes_late else schedule.take()  # it is needed only after the loads
            rest = work.last_tile - work.first_tile
            for i, (k_at_, v_at_) in (loop := fly.range(1, rest, carry=(k_at, v_at))):
                j = work.last_tile - 1 - i
                loop.next(self._load_k(k_at_, work, j), self._load_v(v_at_, work, j + 1))
            k_at, v_at = loop.results
            following = schedule.find(schedule.take() if early is None else early)
            board_at = board.publish(board_at, following, schedule)
            # a tile's first K comes before the last V of the tile before
            q_at, k_at = self._open(following, q_at, k_at)
            tiles.next(following, q_at, k_at, self._load_v(v_at, work, work.first_tile), board_at)
        schedule.finish()

    def _open(self, work: Work, q_at: Position, k_at: Position) -> tuple[Position, Position]:
        """Start on a tile, if it is one: its Q, and the last of its K tiles."""
        return fly.cond(
            work.exists,
            lambda: (self._load_q(q_at, work), self._load_k(k_at, work, work.last_tile - 1)),
            lambda: (q_at, k_at),
        )

    def _load_q(self, at: Position, work: Work) -> Position:
        head = (work.head,) if self.pack == 1 else (work.head, 0)
        place = (0 if self.schedule.packed else work.batch, work.q_first + work.first_row, *head)
        return self._load(self.q, self.buffers.q_ring, self.buffers.q, self.buffers.q_tile, at, [place])

    def _load_k(self, at: Position, work: Work, j: Any) -> Position:
        j, buffers = self._tile(work, j), self.buffers
        note = None if buffers.numbers is None else partial(buffers.numbers.store, j, at.index)
        return self._load(self.k, buffers.k_ring, buffers.k, buffers.k_tile, at, self._keys(work, j), note=note)

    def _load_v(self, at: Position, work: Work, j: Any) -> Position:
        places = self._keys(work, self._tile(work, j))
        return self._load(self.v, self.buffers.v_ring, self.buffers.v, self.buffers.v_tile, at, places)

    def _tile(self, work: Work, j: Any) -> Any:
        """Key tile j, or that of step j of a list."""
        return j if work.listed is None else work.listed.tile(j)

    def _keys(self, work: Work, j: Any) -> list[tuple[Any, ...]]:
        """Where the pieces of key tile j begin: (entry of the batch, or page; row; key head)."""
        schedule = self.schedule
        row, head = work.k_first + j * schedule.block_n, work.head // self.group
        if schedule.page_size is None:
            return [(work.entry, row, head)]
        # loaded before the wait for a slot, so that they arrive meanwhile; for V again, which holds fewer registers
        pages = schedule.pages(work, j)
        inside = row % schedule.page_size if len(pages) == 1 else 0
        return [(page, inside, head) for page in pages]

    def _load(
        self,
        tensor_map: fly.TensorMap,
        ring: Ring,
        memory: fly.Pointer,
        tile: PanelTile,
        at: Position,
        places: list[tuple[Any, ...]],
        column: Any = 0,
        note: Callable[[], None] | None = None,
    ) -> Position:
        """A tile in equal pieces, one above the other, which begin at `places`, all coordinates but the last, and
        `column`; `note` stores what consumers are to read beside it."""
        barrier = ring.acquire(at, tile.bytes, note)
        slot = memory.offset(at.index * tile.bytes)
        piece_bytes = tile.panel_bytes // len(places)
        for i, place in enumerate(places):
            for panel in range(tile.panels):
                corner = (*place, column + panel * tile.panel_columns)
                tma.load(tensor_map, slot.offset(panel * tile.panel_bytes + i * piece_bytes), corner, barrier)
        return ring.next(at)
