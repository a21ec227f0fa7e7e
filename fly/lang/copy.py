"""Bringing tiles of a matrix from global to shared memory with all threads of the block.

Two kinds of copy share one interface, so that a kernel is written once: `issue` starts a tile on its way and
returns what is in flight (a token, or the data in registers); `land` completes it in shared memory. `TileRing`
keeps tiles of several copies ahead of their use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fly.errors import ShapeError
from fly.ir import memory
from fly.ir.context import current, emit
from fly.ir.dialect import token_type
from fly.ir.dtypes import i32
from fly.ir.memory import i64_attribute
from fly.ir.value import Value, select, shuffle
from fly.lang.ids import linear_thread
from fly.lang.lanes import linear_layout
from fly.lang.shared import SharedTile, SwizzledTile
from fly.lang.sync import Token, barrier, join, wait
from fly.lang.tensor import Panel, RowView, Window

# As an unsigned byte offset, beyond every bound (they are below 2**31), also with a column's offset added.
PAST_THE_END = -(2**30)
NO_ROW = 2**31 - 1  # not below any number of rows


def _threads() -> int:
    x, y, z = current().block
    return x * y * z


class _Copy:
    """What the kinds of copy share: which part of a tile each thread moves.

    Tiles of a `RowView` follow one another along its rows, those of a `Panel` along its columns. A tile is cut
    along its `columns` into groups, one after the other: the largest power of two that divides them. Columns that
    the source lacks arrive as zeros.
    """

    def __init__(self, source: RowView | Panel, rows: int, columns: int, vector: int):
        if vector <= 0 or columns % vector or source.columns % vector:
            raise ShapeError(f"rows of {source.columns} elements do not divide into vectors of {vector}")
        self.source = source
        self.vector = vector
        self.group = columns & -columns
        lanes_per_row = self.group // vector
        threads = _threads()
        if lanes_per_row == 0 or threads % lanes_per_row:
            raise ShapeError(f"{threads} threads do not divide into rows of {lanes_per_row} vectors")
        self.rows_per_pass = min(rows, threads // lanes_per_row)
        if rows % self.rows_per_pass:
            raise ShapeError(f"{rows} rows do not divide into passes of {self.rows_per_pass} rows")
        if self.rows_per_pass * lanes_per_row < threads:
            raise ShapeError(f"a tile of {rows} x {columns} is too small for {threads} threads")
        self.passes = rows // self.rows_per_pass
        self.groups = range(0, columns, self.group)
        thread = linear_thread()
        self.row = thread // lanes_per_row
        self.column = (thread % lanes_per_row) * vector

    def _reach(self, values: list[Value], group: int, nowhere: int) -> list[Value]:
        """Where the pieces of a group of columns are: `nowhere` in lanes whose columns the source lacks."""
        if group + self.group <= self.source.columns:
            return values
        exists = self.column < self.source.columns - group
        return [select(exists, value, nowhere) for value in values]

    def _load(self, window: Window, offset: Value, step: int) -> Value:
        """A vector into registers, as 32-bit words where it has whole ones.

        Loops carry what is in flight. LLVM carries words, and conversions of many narrow vectors at the head of a
        loop keep it from rotating the loop.
        """
        dtype, count = self.source.dtype, self.vector
        align = min(self.source.alignment, count * dtype.bytes)
        if count > 1:
            dtype, count = i32, count * dtype.bytes // i32.bytes
        return memory.load_bounded(
            window.base, offset + step if step else offset, window.bound, dtype, count, align=align
        )


class RowCopy(_Copy):
    """Tiles of `layout.rows` rows, kept as rows.

    `asynchronous` copies go past the registers (the target must have copies of that width).
    """

    def __init__(self, source: RowView | Panel, layout: SwizzledTile, *, vector: int, asynchronous: bool):
        if layout.columns < source.columns or vector > layout.granule:
            raise ShapeError(
                f"a tile of {layout.columns} columns in runs of {layout.granule} does not take rows of "
                f"{source.columns} in vectors of {vector}"
            )
        super().__init__(source, layout.rows, layout.columns, vector)
        self.layout = layout
        self.asynchronous = asynchronous
        if asynchronous and vector * 2 not in current().target.async_copy_bytes:
            raise ShapeError(f"{current().target.arch} has no asynchronous copy of {vector * 2} bytes")
        bytes_ = source.dtype.bytes
        places = [[self._shared_offset(p, group) for p in range(self.passes)] for group in self.groups]
        self._places = [place for group in places for place in group]
        if asynchronous:
            self._first = self.row * source.pitch + self.column * bytes_
            self._rows = [self._reach([self.row], group, NO_ROW)[0] for group in self.groups]
        else:
            offsets = [self._offset(p) for p in range(self.passes)]
            self._offsets = [
                (offset, group * bytes_)
                for group in self.groups
                for offset in self._reach(offsets, group, PAST_THE_END)
            ]

    def _offset(self, p: int) -> Value:
        return (self.row + p * self.rows_per_pass) * self.source.pitch + self.column * self.source.dtype.bytes

    def _shared_offset(self, p: int, group: int) -> tuple[Value, int]:
        first = p * self.rows_per_pass
        if self.rows_per_pass % self.layout.row_period:
            base, (xor, add) = self.layout.base(self.row + first, self.column), self.layout.displace(0, group)
        else:
            base, (xor, add) = self._base(), self.layout.displace(first, group)
        return (base ^ xor if xor else base), add

    def _base(self) -> Value:
        if not hasattr(self, "_cached_base"):
            self._cached_base = self.layout.base(self.row, self.column)
        return self._cached_base

    def _window(self, tile: Any) -> Window:
        return self.source.tile(tile, self.layout.rows)

    def issue(self, tile: Any, destination: SharedTile) -> Any:
        """Start tile number `tile`; asynchronous copies write `destination` from now on."""
        return self.issue_window(self._window(tile), destination)

    def issue_window(self, window: Window, destination: SharedTile) -> Any:
        """Start a window of the source as high as a tile, which may begin at any row."""
        if self.asynchronous:
            return self._issue_asynchronous(window, destination)
        return tuple(self._load(window, offset, step) for offset, step in self._offsets)

    def _issue_asynchronous(self, window: Window, destination: SharedTile) -> Token:
        # One address a lane for the tile, and uniform steps from there: an address for each piece would be as many
        # registers. Comparing rows, not bytes, lets tiles of the same rows share the comparisons.
        lane = window.base.offset(self._first)
        step = self.source.pitch * self.rows_per_pass
        bytes_ = self.vector * self.source.dtype.bytes
        tokens = []
        places = iter(self._places)
        for group, row in zip(self.groups, self._rows, strict=True):
            for p in range(self.passes):
                base, add = next(places)
                target = destination.pointer.offset(base).offset(add)
                source = lane.offset(step * p if p else 0).offset(group * self.source.dtype.bytes)
                inside = row < window.rows_left - p * self.rows_per_pass
                op = emit(
                    "fly.copy_async",
                    [target.ir, source.ir, inside.ir],
                    [token_type()],
                    {"bytes": i64_attribute(bytes_)},
                )
                tokens.append(Token(op.results[0]))
        return join(tokens)

    def land(self, in_flight: Any, destination: SharedTile) -> None:
        """Complete a tile in shared memory; other threads need a barrier to see it."""
        if isinstance(in_flight, Token):
            wait(in_flight)
            return
        align = min(16, self.vector * self.source.dtype.bytes)
        for value, (base, add) in zip(in_flight, self._places, strict=True):
            value = value.bitcast(self.source.dtype)
            memory.store(value, destination.pointer.offset(base).offset(add), align=align)


class TransposedCopy(_Copy):
    """Tiles stored column by column: source row r becomes column `slot_of(r)` of the shared tile.

    Every thread takes 4 adjacent rows of `vector` columns and turns them in registers, so that it can store 4
    elements at a time. Within each group of `group` rows, 4-row pieces go to `slot_of_piece`.
    """

    PIECE = 4

    def __init__(self, source: RowView | Panel, layout: SwizzledTile, *, vector: int, slot_of_piece: tuple[int, ...]):
        if layout.rows < source.columns:
            raise ShapeError(
                f"a transposed tile of {source.columns} columns needs at least as many rows, not {layout.rows}"
            )
        linear_layout(slot_of_piece)  # what _slot relies on
        self.tile_rows = layout.columns
        super().__init__(source, layout.columns // self.PIECE, layout.rows, vector)
        self.layout = layout
        bytes_ = source.dtype.bytes
        pitch = source.pitch
        # of each piece: the offsets of its rows, the bytes from there to the group, where each column goes
        self._pieces = []
        for group in self.groups:
            for p in range(self.passes):
                first = (self.row + p * self.rows_per_pass) * self.PIECE
                offsets = [(first + r) * pitch + self.column * bytes_ for r in range(self.PIECE)]
                slot = self._slot(self.row + p * self.rows_per_pass, slot_of_piece)
                places = [layout.base(self.column + (group + c), slot) for c in range(vector)]
                self._pieces.append((self._reach(offsets, group, PAST_THE_END), group * bytes_, places))

    def _slot(self, piece: Value, slot_of_piece: tuple[int, ...]) -> Value:
        """Column of the tile where a 4-row piece starts."""
        count = len(slot_of_piece)
        inside = piece & (count - 1)
        # pieces are few: the permutation is linear in the bits of the piece index
        slot: Any = piece - inside
        for bit in range((count - 1).bit_length()):
            slot = slot + ((inside >> bit) & 1) * slot_of_piece[1 << bit]
        return slot * self.PIECE

    def _window(self, tile: Any) -> Window:
        return self.source.tile(tile, self.tile_rows)

    def issue(self, tile: Any, destination: SharedTile) -> Any:
        """Start loading tile number `tile` into registers."""
        del destination  # the data waits in registers
        window = self._window(tile)
        return tuple(
            tuple(self._load(window, offset, step) for offset in offsets) for offsets, step, _ in self._pieces
        )

    def land(self, in_flight: Any, destination: SharedTile) -> None:
        """Turn what was loaded and store it; other threads need a barrier to see it."""
        for words, (_, _, places) in zip(in_flight, self._pieces, strict=True):
            rows = [word.bitcast(self.source.dtype) for word in words]
            for column, base in enumerate(places):
                pairs = [shuffle(rows[i], rows[i + 1], [column, self.vector + column]) for i in (0, 2)]
                piece = shuffle(pairs[0], pairs[1], [0, 1, 2, 3])
                memory.store(piece, destination.pointer.offset(base), align=8)


@dataclass(frozen=True)
class InFlight:
    """A loop carry: what is on its way (oldest first) and the ring slot that holds the current tile."""

    pending: tuple[Any, ...]
    slot: Value


class TileRing:
    """Tiles of several copies, fetched ahead of their use into rings of `stages` slots.

    Asynchronous copies need two slots or more and keep `stages - 1` tiles in flight; one barrier per tile.
    Copies through registers use one slot and keep the next tile in registers; two barriers per tile. A copy's
    `lag` (0, or 1 with asynchronous copies) is how many tiles it is behind: step t uses its tile t - lag.
    """

    def __init__(
        self,
        copies: list[tuple[RowCopy | TransposedCopy, SharedTile]],
        stages: int,
        lags: tuple[int, ...] | None = None,
    ):
        self.copies = copies
        self.stages = stages
        self.lags = lags or (0,) * len(copies)
        self.asynchronous = all(getattr(copy, "asynchronous", False) for copy, _ in copies)
        if self.asynchronous != (stages > 1):
            raise ShapeError(
                f"{stages} stages do not suit {'asynchronous copies' if self.asynchronous else 'copies in registers'}"
            )
        if len(self.lags) != len(copies) or any(lag not in (0, int(self.asynchronous)) for lag in self.lags):
            raise ShapeError(f"lags {self.lags} of {len(copies)} copies; expected 0, or 1 if asynchronous, for each")

    def _issue(self, tile: Any, slot: Any, lags: tuple[int, ...]) -> Any:
        parts = tuple(
            copy.issue(tile - lag if lag else tile, self._tile(ring, slot, lag))
            for (copy, ring), lag in zip(self.copies, self.lags, strict=True)
            if lag in lags
        )
        return join(list(parts)) if self.asynchronous else parts

    def _tile(self, ring: SharedTile, slot: Any, lag: int) -> SharedTile:
        slot = _wrap(slot + (self.stages - lag), self.stages) if lag else slot
        return ring if isinstance(slot, int) and slot == 0 else ring.slot(slot)

    def start(self, first: Any) -> InFlight:
        """Set the first tiles on their way; `first` is the number of the first one."""
        count = max(1, self.stages - 1)
        # step `first` of a copy that lags has no tile
        return InFlight(
            tuple(self._issue(first + i, i32(i) if i else 0, (0, 1)[: i + 1]) for i in range(count)), i32(0)
        )

    def advance(self, tile: Any, flight: InFlight) -> tuple[list[SharedTile], InFlight]:
        """Complete the tiles of step `tile`, start later ones, and give the shared tiles to read now."""
        if self.asynchronous:
            wait(flight.pending[0])
            barrier()  # the tile is whole, and nobody reads the slot that is filled next any more
            ahead = _wrap(flight.slot + (self.stages - 1), self.stages)
            newest = self._issue(tile + (self.stages - 1), ahead, (0, 1))
            tiles = [
                self._tile(ring, flight.slot, lag) for (_, ring), lag in zip(self.copies, self.lags, strict=True)
            ]
            following = _wrap(flight.slot + 1, self.stages)
            return tiles, InFlight((*flight.pending[1:], newest), following)
        barrier()
        for (copy, ring), part in zip(self.copies, flight.pending[0], strict=True):
            copy.land(part, ring)
        barrier()
        newest = self._issue(tile + 1, 0, (0,))
        return [ring for _, ring in self.copies], InFlight((newest,), flight.slot)

    def halfway(self, tile: Any, flight: InFlight) -> InFlight:
        """What `AlternatingTiles` does here is done already."""
        del tile
        return flight


class AlternatingTiles:
    """Tiles of two asynchronous copies with one slot each: while one tile is read, the other one arrives.

    Half the shared memory of a ring, and two barriers per tile.
    """

    def __init__(self, first: tuple[RowCopy, SharedTile], second: tuple[RowCopy, SharedTile]):
        self.first = first
        self.second = second
        if not all(getattr(copy, "asynchronous", False) for copy, _ in (first, second)):
            raise ShapeError("alternating tiles need asynchronous copies")

    def start(self, first: Any) -> InFlight:
        """Set the first copy's first tile on its way; `first` is its number."""
        copy, place = self.first
        return InFlight((copy.issue(first, place),), i32(0))

    def advance(self, tile: Any, flight: InFlight) -> tuple[list[SharedTile], InFlight]:
        """Complete the first copy's tile, start the second's, and give both places; the first may be read."""
        return [self.first[1], self.second[1]], self._turn(self.second, tile, flight)

    def halfway(self, tile: Any, flight: InFlight) -> InFlight:
        """Nothing reads the first place any more: complete the second tile, start the first copy's next one."""
        return self._turn(self.first, tile + 1, flight)

    def _turn(self, other: tuple[RowCopy, SharedTile], tile: Any, flight: InFlight) -> InFlight:
        wait(flight.pending[0])
        barrier()  # the tile is whole, and nobody reads the other place any more
        copy, place = other
        return InFlight((copy.issue(tile, place),), flight.slot)


def _wrap(slot: Value, stages: int) -> Value:
    if stages & (stages - 1) == 0:
        return slot & (stages - 1)
    return select(slot >= stages, slot - stages, slot)
