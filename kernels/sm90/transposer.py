"""The transposer of the Hopper kernel's builds on 8 bits that read V as it lies: warps for tiles in shared memory.

WGMMA takes 8-bit operands with k along bytes only, and V's k are keys. So V arrives as it lies in memory, (keys x D),
in a ring of its own, and the transposer makes of it what consumers read: (D x keys), with keys in the order
`wgmma.PAIRS` in each 16, see `wgmma.by_pairs`.

`ldmatrix` transposes pairs of bytes: of 16 keys and 16 dimensions, lane 4 c + t gets keys 2 t and 2 t + 1 of
dimensions 2 c and 2 c + 1, and of another matrix keys 8 + 2 t and 9 + 2 t. Two byte permutations make of them the
four keys of each dimension that are neighbours in `PAIRS`, which `stmatrix` stores as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import fly
from fly.backends.nvvm.intrinsics import WARPGROUP, load_matrices_transposed, permute_bytes, store_matrices
from fly.backends.nvvm.mbarrier import Position
from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import LayoutError

from ..work.tile_scheduler import Work
from .builds import Sm90Options
from .fp8_builds import ONES
from .producer import Buffers, clear_tail
from .schedule import Schedule

WARPS = WARPGROUP // 32
KEYS, DIMS = 32, 16  # that four matrices hold: what a warp transposes at a time
FEW = 2  # of these at a time where a warp has the producer's few registers
EVEN, ODD = 0x6420, 0x7531  # bytes of two words: those of a pair of dimensions' first, and of its second


@dataclass(frozen=True)
class TileTranspose:
    """How `warps` transpose a tile `raw`, (keys x D) 8-bit, to the first rows of `transposed`, (D x keys).

    A warp takes groups of `KEYS` keys, all of their dimensions, or where there are fewer groups than warps a part of
    them. The 8 rows of a matrix are in different banks: those of a stored one are dimensions 0, 2, 4, 6, 9, 11, 13
    and 15 of 16, or the others, since rows of even dimensions alone would share banks in twos.
    """

    raw: PanelTile
    transposed: PanelTile
    warps: int = WARPS

    def __post_init__(self) -> None:
        raw, transposed = self.raw, self.transposed
        rows = raw.columns, raw.columns + ONES
        wanted = (raw.rows, 1, 1)
        if transposed.rows not in rows or (transposed.columns, transposed.element_bytes, raw.element_bytes) != wanted:
            raise LayoutError(f"{raw} cannot become {transposed}; expected its columns as rows, of 8-bit elements")
        if raw.rows % KEYS or transposed.panel_columns < KEYS or raw.columns % (DIMS * self.sharing):
            raise LayoutError(f"a tile to transpose is {raw}; expected multiples of {KEYS} keys of enough columns")

    @property
    def sharing(self) -> int:
        """Warps that share the dimensions of a group of keys."""
        groups = self.raw.rows // KEYS
        return next(n for n in (1, 2, 4) if not groups % -(-self.warps // n))

    @property
    def units(self) -> list[tuple[int, int]]:
        """(group, block) of what a warp transposes at a time, counted from its first ones."""
        return [(group, step) for group in self.groups for step in range(self.blocks)]

    def load(
        self, memory: fly.Pointer, units: Sequence[tuple[int, int]] | None = None
    ) -> list[tuple[fly.Value, ...]]:
        """This warp's matrices of the raw tile, four at a time: two halves of 16 keys, and of the next 16."""
        lane, raw = fly.lane_id(), self.raw
        # a lane's row is a key
        at = memory.offset((self._first_group * KEYS + lane) * raw.swizzle)
        swap = _phase(raw, lane) * 16
        per_panel = raw.panel_columns // DIMS
        words: list[tuple[fly.Value, ...]] = []
        for group, step in self.units if units is None else units:
            block = self._first_block + step
            panel, column = block // per_panel, block % per_panel * DIMS
            inside = panel * raw.panel_bytes + group * KEYS * raw.swizzle
            words.append(load_matrices_transposed(at.offset((column ^ swap) + inside)))
        return words

    def store(
        self, memory: fly.Pointer, words: list[tuple[fly.Value, ...]], units: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """What `load` gave, transposed."""
        lane, transposed = fly.lane_id(), self.transposed
        # the rows of matrices: two of each 16 keys, with one of each pair of dimensions
        row, matrix = lane % 8, lane // 8
        upper = row // 4
        dim = 2 * row + (upper ^ (matrix % 2))
        # the words of a lane are of row lane // 4 of each matrix
        of_first = fly.select(lane // 16 == 0, EVEN, ODD)
        of_second = of_first ^ (EVEN ^ ODD)
        keys = matrix // 2 * 16
        at = memory.offset((self._first_block * DIMS + dim) * transposed.swizzle)
        for (group, step), pairs in zip(self.units if units is None else units, words, strict=True):
            first = (self._first_group + group) * KEYS
            panel = first // transposed.panel_columns if transposed.panels > 1 else 0
            column = (first - panel * transposed.panel_columns + keys) ^ (_phase(transposed, dim) * 16)
            place = at.offset(panel * transposed.panel_bytes + column)
            four = [permute_bytes(pairs[i], pairs[i + 1], which) for i in (0, 2) for which in (of_first, of_second)]
            store_matrices(place.offset(step * DIMS * transposed.swizzle), four)

    @property
    def _warp(self) -> fly.Value:
        return fly.thread_id.x // 32 % self.warps

    @property
    def _first_group(self) -> fly.Value:
        return self._warp % (self.warps // self.sharing)

    @property
    def groups(self) -> range:
        """Groups that a warp takes, counted from its first."""
        return range(0, self.raw.rows // KEYS, self.warps // self.sharing)

    @property
    def blocks(self) -> int:
        """Blocks of `DIMS` dimensions that a warp takes of each group."""
        return self.raw.columns // DIMS // self.sharing

    @property
    def _first_block(self) -> Any:
        return 0 if self.sharing == 1 else self._warp // (self.warps // self.sharing) * self.blocks


def _phase(tile: PanelTile, row: fly.Value) -> fly.Value:
    """Which 16-byte pieces of a row are swapped: what a piece's number is xored with."""
    return row // (128 // tile.swizzle) % (tile.swizzle // 16)


@dataclass(frozen=True)
class Transposer:
    """The warps that transpose V's tiles, in the order in which consumers need them: a warpgroup, or fewer."""

    schedule: Schedule
    buffers: Buffers
    barrier: Any
    warps: int
    registers: ClassVar[int] = 144  # of a warpgroup; with those of the producer and of one consumer no more than 504

    @staticmethod
    def of(schedule: Schedule, buffers: Buffers, options: Sm90Options, barrier: int, number: int) -> Transposer:
        """See `flash_attn_sm90.run_block`."""
        return Transposer(schedule, buffers, barrier, options.helper_warps)

    def run(self) -> None:
        """All of the block's tiles."""
        works = self.buffers.works
        work, works_at = works.read(Position.start(), self.schedule)
        carry = (work, Position.start(), Position.start(), works_at)
        for work, raw_at, at, works_at in (tiles := fly.while_(carry, lambda c: c[0].exists)):
            last = work.tiles.end - 1
            for i, places in (loop := fly.range(last + 1 - work.tiles.first, carry=(raw_at, at))):
                loop.next(*self._transpose(work, last - i, *places))
            following, works_at = works.read(works_at, self.schedule)
            tiles.next(following, *loop.results, works_at)

    def _transpose(self, work: Work, j: Any, raw_at: Position, at: Position) -> tuple[Position, Position]:
        """Key tile j."""
        raw, transposed = self.buffers.raw_v, self.buffers.v
        assert raw is not None
        transpose, memory = TileTranspose(raw.tile, transposed.tile, self.warps), raw.at(raw_at)
        raw.ring.wait(raw_at)
        if self.schedule.cut_keys:
            clear_tail(
                raw.tile, memory, work.keys.keys - j * self.schedule.block_n, self.barrier, threads=32 * self.warps
            )
        units = transpose.units
        together = len(units) if self.warps == WARPS else FEW
        for first in range(0, len(units), together):
            some = units[first : first + together]
            words = transpose.load(memory, some)
            if not first:
                transposed.ring.claim(at)
            transpose.store(transposed.at(at), words, some)
        transposed.ring.publish(at)
        raw.ring.release(raw_at)
        return raw.ring.next(raw_at), transposed.ring.next(at)
