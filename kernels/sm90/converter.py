"""The converter of the Hopper kernel's builds for 8-bit caches: a warpgroup that makes 16-bit tiles of K and V.

K and V arrive as they lie in memory, e4m3, in rings of their own; the converter makes of them what consumers read, in
the type of the queries. That is exact, but for scales of V by key, which it multiplies by before it rounds. Scales of
K by key it leaves beside K's slots in shared memory: scores are multiplied by them in f32, so that no product of a
query and a key is rounded.

A thread has one row of a tile, or a part of one: the eight threads that shared memory serves at a time have rows one
below the other, whose pieces the swizzles of both tiles put into different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.mbarrier import Position
from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import LayoutError
from fly.ir.memory import load

from ..work.key_scales import ScalesByKey, by_key
from ..work.tile_scheduler import Work
from .producer import Buffers, Slots
from .schedule import Schedule

ROWS = (16, 32, 64, 128, 256)
PIECE = 16  # columns that a thread converts at a time: 16 bytes as they arrive, and twice as many as they leave
Factors = tuple[tuple[fly.Value, ...], ...]  # of each conversion, none or one for each of a thread's rows


@dataclass(frozen=True)
class TileConversion:
    """How a warpgroup makes a tile of 16-bit elements of an 8-bit one of the same rows and at least as many columns.

    Columns from `columns` on become zero.
    """

    raw: PanelTile
    made: PanelTile
    columns: int

    def __post_init__(self) -> None:
        raw, made = self.raw, self.made
        if (raw.rows, raw.element_bytes, made.element_bytes) != (made.rows, 1, 2):
            raise LayoutError(f"{raw} cannot become {made}; expected 8-bit and 16-bit elements of as many rows")
        if raw.rows not in ROWS:
            raise LayoutError(f"{raw.rows} rows to convert; expected one of {', '.join(map(str, ROWS))}")
        if self.columns % PIECE or self.columns > min(raw.columns, made.columns):
            most = min(raw.columns, made.columns)
            raise LayoutError(f"{self.columns} columns to convert; expected a multiple of {PIECE} up to {most}")

    @property
    def sharing(self) -> int:
        """Threads that share a row."""
        return max(1, WARPGROUP // self.raw.rows)

    def rows(self) -> list[fly.Value]:
        """This thread's row in each pass."""
        thread = fly.thread_id.x % WARPGROUP
        row = thread % self.raw.rows if self.sharing > 1 else thread
        return [row + first for first in range(0, self.raw.rows, WARPGROUP)]

    def load(self, memory: fly.Pointer) -> list[fly.Value]:
        """This thread's pieces of the raw tile, words, to be called by `WARPGROUP` threads."""
        return [
            load(self._place(self.raw, memory, row, piece), fly.i32, 4, align=16) for row, piece in self._pieces()
        ]

    def store(
        self, memory: fly.Pointer, words: list[fly.Value], dtype: fly.DType, factors: tuple[fly.Value, ...]
    ) -> None:
        """What `load` gave, converted; `factors`: of the thread's row in each pass, or none."""
        each = len(words) // max(1, len(factors))
        for i, ((row, piece), word) in enumerate(zip(self._pieces(), words, strict=True)):
            values = word.bitcast(fly.f8e4m3).to(fly.f32)
            if factors:
                values = values * factors[i // each]
            halves = values.to(dtype)
            for half in range(2):
                place = self._place(self.made, memory, row, 2 * piece + half)
                fly.store(halves[8 * half : 8 * half + 8], place, align=16)
        zero = fly.broadcast(fly.i32(0), 4)
        for row in self.rows():
            for piece in range(self.columns // 8, self.made.columns // 8):
                fly.store(zero, self._place(self.made, memory, row, piece), align=16)

    def _pieces(self) -> list[tuple[fly.Value, Any]]:
        """(row, number of the piece) of what this thread takes, pass after pass.

        Threads that share a row take its pieces in turn; the last ones may take a piece that another one has too.
        """
        count, part = self.columns // PIECE, fly.thread_id.x % WARPGROUP // self.raw.rows
        numbers: list[Any] = list(range(0, count, self.sharing))
        if self.sharing > 1:
            numbers = [fly.minimum(part + number, count - 1) for number in numbers]
        return [(row, number) for row in self.rows() for number in numbers]

    def _place(self, tile: PanelTile, memory: fly.Pointer, row: fly.Value, piece: Any) -> fly.Pointer:
        """The address of 16 bytes of a row."""
        each = tile.swizzle // 16
        panel, inside = (divmod(piece, each)) if isinstance(piece, int) else (piece // each, piece % each)
        phase = row // (128 // tile.swizzle) % each
        return memory.offset(row * tile.swizzle + ((phase ^ inside) * 16)).offset(panel * tile.panel_bytes)


@dataclass(frozen=True)
class Conversion:
    """What a converter does with K or with V: tiles of `raw`, of so many `columns`, become those of `made`.

    These are of `dtype`. `scales`: the operand that has their scales, if they are by key.
    """

    scales: str
    raw: Slots
    made: Slots
    columns: int
    dtype: fly.DType

    @property
    def tile(self) -> TileConversion:
        """Of one tile."""
        return TileConversion(self.raw.tile, self.made.tile, self.columns)


@dataclass(frozen=True)
class Converter:
    """A warpgroup that converts tiles of K, of V or of both, in the order in which consumers need them."""

    schedule: Schedule
    buffers: Buffers
    conversions: tuple[Conversion, ...]
    registers: int

    def run(self) -> None:
        """All of the block's tiles."""
        works = self.buffers.works
        work, works_at = works.read(Position.start(), self.schedule)
        carry = (work, Position.start(), Position.start(), works_at)
        for work, raw_at, at, works_at in (tiles := fly.while_(carry, lambda c: c[0].exists)):
            last, scales = work.tiles.end - 1, self._scales(work)
            start = (raw_at, at, self._load(scales, last))
            for i, (raw_at_, at_, factors) in (loop := fly.range(last + 1 - work.tiles.first, carry=start)):
                # those of the next tile are on their way while this one is converted
                following = self._load(scales, last - 1 - i)
                loop.next(*self._convert(raw_at_, at_, factors), following)
            raw_at, at, _ = loop.results
            following_work, works_at = works.read(works_at, self.schedule)
            tiles.next(following_work, raw_at, at, works_at)

    def _convert(self, raw_at: Position, at: Position, factors: Factors) -> tuple[Position, Position]:
        """The next tile of each."""
        for conversion, mine in zip(self.conversions, factors, strict=True):
            raw, made, tile = conversion.raw, conversion.made, conversion.tile
            of_k = made is self.buffers.k
            raw.ring.wait(raw_at)
            words = tile.load(raw.at(raw_at))
            made.ring.claim(at)
            tile.store(made.at(at), words, conversion.dtype, () if of_k else mine)
            if of_k and mine:
                assert self.buffers.scales is not None
                for row, scale in zip(tile.rows(), mine, strict=True):
                    self.buffers.scales.store(scale, first_scale(self.buffers, at) + row)
            made.ring.publish(at)
            raw.ring.release(raw_at)
        return raw.ring.next(raw_at), made.ring.next(at)

    def _scales(self, work: Work) -> tuple[ScalesByKey | None, ...]:
        """Those of the keys that a tile's query head sees, where they are by key."""
        schedule = self.schedule
        given = [schedule.given.get(conversion.scales) for conversion in self.conversions]
        if not any(map(by_key, given)):
            return (None,) * len(given)
        kv = schedule.keys_of_sequence(work.batch)
        return tuple(ScalesByKey.of(x, kv, work.head, schedule.heads) if by_key(x) else None for x in given)

    def _load(self, scales: tuple[ScalesByKey | None, ...], j: Any) -> Factors:
        """Of this thread's rows of key tile j."""
        rows, first = self.conversions[0].tile.rows(), j * self.schedule.block_n
        return tuple(() if x is None else tuple(x.load(first + row) for row in rows) for x in scales)


def first_scale(buffers: Buffers, at: Position) -> fly.Value:
    """Where the scales of a slot of K begin: two rounds of slots have places of their own, so that consumers may read
    them when they have released the slot."""
    place: fly.Value = (at.phase * buffers.k.ring.stages + at.index) * buffers.k.tile.rows
    return place
