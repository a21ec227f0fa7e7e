"""Bringing tiles of a matrix from global to shared memory with all threads of the block.

Two kinds of copy share one interface, so that a kernel is written once: `issue` starts a tile on its way and
returns what is in flight (a token, or the data in registers); `land` completes it in shared memory. `TileRing`
keeps tiles of several copies ahead of their use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fly.errors import ShapeError
from fly.ir import memory
from fly.ir.context import current, emit
from fly.ir.dialect import token_type
from fly.ir.dtypes import DType, f32, i16, i32
from fly.ir.memory import Pointer, i64_attribute
from fly.ir.value import Value, select, shuffle
from fly.lang.ids import linear_thread, wave_id
from fly.lang.lanes import linear_layout
from fly.lang.paged import PagedRows
from fly.lang.shared import SharedTile, SwizzledTile
from fly.lang.sync import Token, barrier, join, wait
from fly.lang.tensor import Panel, RowView, Window

# As an unsigned byte offset, beyond every bound (they are below 2**31), also with a column's offset added.
PAST_THE_END = -(2**30)
NO_ROW = 2**31 - 1  # not below any number of rows

Source = RowView | Panel | PagedRows
Located = tuple[Value, ...]  # what must be known of a tile before its copy starts; nothing but of pages


def block_threads() -> int:
    """Threads of the block; static."""
    x, y, z = current().block
    return x * y * z


class _Copy:
    """What the kinds of copy share: which part of a tile each thread moves.

    Tiles of a `RowView` or of `PagedRows` follow one another along the rows, those of a `Panel` along its columns. A
    tile is cut along its `columns` into groups, one after the other: the largest power of two that divides them.
    Columns that the source lacks arrive as zeros. A thread takes `unit` adjacent rows of the source in each pass;
    `rows` counts such units.

    Of pages, a tile is cut into runs of rows that one page has. A wave's rows of one pass lie in one run. Of pages
    whose rows are scattered, every thread looks up the rows that it takes.
    """

    def __init__(self, source: Source, rows: int, columns: int, vector: int, unit: int = 1):
        if vector <= 0 or columns % vector or source.columns % vector:
            raise ShapeError(f"rows of {source.columns} elements do not divide into vectors of {vector}")
        self.source = source
        self.vector = vector
        self.group = columns & -columns
        lanes_per_row = self.group // vector
        threads = block_threads()
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
        self._unit_rows = unit
        self.tile_rows = rows * unit
        self._plan_runs(lanes_per_row, unit)

    def _plan_runs(self, lanes_per_row: int, unit: int) -> None:
        """Cut a tile's rows: where runs begin, the run of each pass, and which units of it they are.

        Of pass p, a thread takes unit `_unit + _first_units[p]` of run `_run_of_pass[p]`.
        """
        passes = range(self.passes)
        self._unit, self._first_units = self.row, [p * self.rows_per_pass for p in passes]
        self._run_rows, self._runs, self._run_of_pass = self.tile_rows, [0], [0] * self.passes
        if not isinstance(self.source, PagedRows) or self.scattered or self.tile_rows <= self.source.page_size:
            return
        self._run_rows = self.source.page_size
        units = self._run_rows // unit
        if units >= self.rows_per_pass:
            self._runs = list(range(0, self.tile_rows, self._run_rows))
            self._run_of_pass = [first // units for first in self._first_units]
            self._first_units = [first % units for first in self._first_units]
            return
        wave_size = current().target.wave_size
        if max(1, wave_size // lanes_per_row) > units:
            raise ShapeError(
                f"a wave copies {wave_size // lanes_per_row * unit} rows at a time, and pages have {self._run_rows}"
            )
        run = wave_id() * wave_size // (lanes_per_row * units)  # of the wave's rows in the first pass
        self._unit = self.row & (units - 1)
        self._runs = [run * self._run_rows + first * unit for first in self._first_units]
        self._run_of_pass, self._first_units = list(passes), [0] * self.passes

    @property
    def scattered(self) -> bool:
        """Whether every row of the source is found alone."""
        return isinstance(self.source, PagedRows) and self.source.scattered

    def own_rows(self) -> list[Value]:
        """The rows of a tile that this thread takes, pass after pass."""
        first = [(self._unit + units) * self._unit_rows for units in self._first_units]
        runs = [self._runs[run] for run in self._run_of_pass]
        first = [row + run if isinstance(run, Value) or run else row for row, run in zip(first, runs, strict=True)]
        return [row + r for row in first for r in range(self._unit_rows)]

    def locate(self, tile: Any) -> Located:
        """What has to be known of tile number `tile` before it can start: of pages, which ones, else nothing.

        A load from memory, which is best made long before `issue`.
        """
        if not isinstance(self.source, PagedRows):
            return ()
        if self.scattered:
            return tuple(self.source.page_of(tile * self.tile_rows + row) for row in self.own_rows())
        return tuple(self.source.page(tile * self.tile_rows + run) for run in self._runs)

    def _windows(self, tile: Any, located: Located | None) -> list[Window]:
        """The runs of a tile."""
        if not isinstance(self.source, PagedRows):
            return [self.source.tile(tile, self.tile_rows)]
        pages = self.locate(tile) if located is None else located
        first = tile * self.tile_rows
        return [self.source.window(page, first + run, self._run_rows) for page, run in zip(pages, self._runs)]

    def _found(self, tile: Any, located: Located | None) -> list[tuple[Pointer, Value]]:
        """Of each of the thread's rows, which are scattered: its address, and whether it exists."""
        pages = self.locate(tile) if located is None else located
        rows = (tile * self.tile_rows + row for row in self.own_rows())
        assert isinstance(self.source, PagedRows)
        return [self.source.row(row, page) for row, page in zip(rows, pages, strict=True)]

    def _load_found(self, found: tuple[Pointer, Value], group: int) -> Value:
        """As `_load`, of a scattered row."""
        row, exists = found
        column = self.column + group
        if group + self.group > self.source.columns:
            inside = column < self.source.columns
            column, exists = select(inside, column, 0), exists & inside
        dtype, count, align = self._words()
        value = memory.load(row.offset(column * self.source.dtype.bytes), dtype, count, align=align)
        return select(exists, value, 0.0 if dtype.is_float else 0)

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
        dtype, count, align = self._words()
        return memory.load_bounded(
            window.base, offset + step if step else offset, window.bound, dtype, count, align=align
        )

    def _words(self) -> tuple[DType, int, int]:
        """(dtype, how many, alignment in bytes) of what a vector is loaded as."""
        dtype, count = self.source.dtype, self.vector
        size = count * dtype.bytes
        align = min(self.source.alignment, size)
        if size % i32.bytes:
            # of 8-bit elements, two; of others, one
            return (i16, 1, align) if count > 1 else (dtype, count, align)
        return (i32, size // i32.bytes, align) if count > 1 else (dtype, count, align)


class RowCopy(_Copy):
    """Tiles of `layout.rows` rows, kept as rows, of the source's elements or, through registers, converted ones.

    `asynchronous` copies go past the registers (the target must have copies of that width).
    """

    def __init__(self, source: Source, layout: SwizzledTile, *, vector: int, asynchronous: bool):
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
            self._first = self._unit * source.pitch + self.column * bytes_
            self._rows = [self._reach([self._unit], group, NO_ROW)[0] for group in self.groups]
        else:
            offsets = [self._offset(p) for p in range(self.passes)]
            self._offsets = [
                (offset, group * bytes_)
                for group in self.groups
                for offset in self._reach(offsets, group, PAST_THE_END)
            ]

    def _offset(self, p: int) -> Value:
        return (self._unit + self._first_units[p]) * self.source.pitch + self.column * self.source.dtype.bytes

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

    def issue(self, tile: Any, destination: SharedTile, located: Located | None = None) -> Any:
        """Start tile number `tile`; asynchronous copies write `destination` from now on.

        `located`: what `locate` said of the tile, if it was asked.
        """
        if not self.scattered:
            return self._issue(self._windows(tile, located), destination)
        found = self._found(tile, located)
        if self.asynchronous:
            return self._issue_found(found, destination)
        return tuple(self._load_found(row, group) for group in self.groups for row in found)

    def issue_window(self, window: Window, destination: SharedTile) -> Any:
        """Start a window of the source as high as a tile, which may begin at any row; not of pages."""
        return self._issue([window], destination)

    def _issue(self, windows: list[Window], destination: SharedTile) -> Any:
        if self.asynchronous:
            return self._issue_asynchronous(windows, destination)
        runs = itertools.cycle(self._run_of_pass)
        return tuple(self._load(windows[run], offset, step) for run, (offset, step) in zip(runs, self._offsets))

    def _issue_asynchronous(self, windows: list[Window], destination: SharedTile) -> Token:
        # One address a lane for a run of rows, and uniform steps from there: an address for each piece would be as
        # many registers. Comparing rows, not bytes, lets tiles of the same rows share the comparisons.
        lanes = [window.base.offset(self._first) for window in windows]
        step = self.source.pitch * self.rows_per_pass
        bytes_ = self.vector * self.source.dtype.bytes
        tokens = []
        places = iter(self._places)
        for group, row in zip(self.groups, self._rows, strict=True):
            for run, first in zip(self._run_of_pass, self._first_units):
                base, add = next(places)
                target = destination.pointer.offset(base).offset(add)
                source = lanes[run].offset(step * (first // self.rows_per_pass) if first else 0)
                source = source.offset(group * self.source.dtype.bytes)
                inside = row < windows[run].rows_left - first
                tokens.append(copy_async(target, source, inside, bytes_))
        return join(tokens)

    def _issue_found(self, found: list[tuple[Pointer, Value]], destination: SharedTile) -> Token:
        bytes_ = self.source.dtype.bytes
        tokens, places = [], iter(self._places)
        for group in self.groups:
            whole = group + self.group <= self.source.columns
            for row, exists in found:
                base, add = next(places)
                inside = exists if whole else exists & (self.column < self.source.columns - group)
                source = row.offset((self.column + group) * bytes_)
                target = destination.pointer.offset(base).offset(add)
                tokens.append(copy_async(target, source, inside, self.vector * bytes_))
        return join(tokens)

    def land(self, in_flight: Any, destination: SharedTile, factors: Sequence[Value] = ()) -> None:
        """Complete a tile in shared memory; other threads need a barrier to see it.

        `factors`: f32 of each of `own_rows`, which elements in registers are multiplied by before they are rounded.
        """
        if isinstance(in_flight, Token):
            wait(in_flight)
            return
        align = min(16, self.vector * destination.dtype.bytes)
        for i, (value, (base, add)) in enumerate(zip(in_flight, self._places, strict=True)):
            value = value.bitcast(self.source.dtype)
            value = _times(value, factors[i % self.passes] if factors else None).to(destination.dtype)
            memory.store(value, destination.pointer.offset(base).offset(add), align=align)


def _times(values: Value, factor: Value | None) -> Value:
    """Elements times a factor, in f32, or as they are."""
    if factor is None:
        return values
    scaled: Value = values.to(f32) * factor
    return scaled


def copy_async(target: Pointer, source: Pointer, inside: Value, bytes_: int) -> Token:
    """Of `bytes_`, zeros where it is not `inside`."""
    attributes = {"bytes": i64_attribute(bytes_)}
    return Token(emit("fly.copy_async", [target.ir, source.ir, inside.ir], [token_type()], attributes).results[0])


class TransposedCopy(_Copy):
    """Tiles stored column by column: source row r becomes column `slot_of(r)` of the shared tile.

    Every thread takes 4 adjacent rows of `vector` columns, converts them where the tile's elements are others, and
    turns them in registers, so that it can store 4 elements at a time. Within each group of `group` rows, 4-row
    pieces go to `slot_of_piece`.
    """

    PIECE = 4

    def __init__(self, source: Source, layout: SwizzledTile, *, vector: int, slot_of_piece: tuple[int, ...]):
        if layout.rows < source.columns:
            raise ShapeError(
                f"a transposed tile of {source.columns} columns needs at least as many rows, not {layout.rows}"
            )
        linear_layout(slot_of_piece)  # what `slot` relies on
        super().__init__(source, layout.columns // self.PIECE, layout.rows, vector, self.PIECE)
        self.layout = layout
        bytes_ = source.dtype.bytes
        pitch = source.pitch
        # of each piece: the offsets of its rows, the bytes from there to the group, where each column goes
        self._pieces = []
        for group in self.groups:
            for p in range(self.passes):
                first = (self._unit + self._first_units[p]) * self.PIECE
                offsets = [(first + r) * pitch + self.column * bytes_ for r in range(self.PIECE)]
                slot = self.slot(self.row + p * self.rows_per_pass, slot_of_piece)
                places = [layout.base(self.column + (group + c), slot) for c in range(vector)]
                self._pieces.append((self._reach(offsets, group, PAST_THE_END), group * bytes_, places))

    @staticmethod
    def slot(piece: Value, slot_of_piece: tuple[int, ...]) -> Value:
        """Column of the tile where a 4-row piece starts."""
        count = len(slot_of_piece)
        inside = piece & (count - 1)
        # pieces are few: the permutation is linear in the bits of the piece index
        slot = piece - inside
        for bit in range((count - 1).bit_length()):
            slot = slot + ((inside >> bit) & 1) * slot_of_piece[1 << bit]
        return slot * TransposedCopy.PIECE

    def issue(self, tile: Any, destination: SharedTile, located: Located | None = None) -> Any:
        """Start loading tile number `tile` into registers; `located`: see `RowCopy.issue`."""
        del destination  # the data waits in registers
        if self.scattered:
            found = self._found(tile, located)
            pieces = [found[i : i + self.PIECE] for i in range(0, len(found), self.PIECE)]
            return tuple(
                tuple(self._load_found(row, group) for row in piece) for group in self.groups for piece in pieces
            )
        windows, runs = self._windows(tile, located), itertools.cycle(self._run_of_pass)
        return tuple(
            tuple(self._load(windows[run], offset, step) for offset in offsets)
            for run, (offsets, step, _) in zip(runs, self._pieces)
        )

    def land(self, in_flight: Any, destination: SharedTile, factors: Sequence[Value] = ()) -> None:
        """Turn what was loaded and store it; other threads need a barrier to see it. `factors`: as of `RowCopy`."""
        for i, (words, (_, _, places)) in enumerate(zip(in_flight, self._pieces, strict=True)):
            first = i % self.passes * self.PIECE
            mine = factors[first : first + self.PIECE] if factors else (None,) * self.PIECE
            scaled = [_times(word.bitcast(self.source.dtype), f) for word, f in zip(words, mine, strict=True)]
            rows = [row.to(destination.dtype) for row in scaled]
            for column, base in enumerate(places):
                pairs = [shuffle(rows[i], rows[i + 1], [column, self.vector + column]) for i in (0, 2)]
                piece = shuffle(pairs[0], pairs[1], [0, 1, 2, 3])
                memory.store(piece, destination.pointer.offset(base), align=8)


class TileCopy(Protocol):
    """What rings need of a copy; `asynchronous` ones say so. Destinations are what its slots are."""

    def locate(self, tile: Any) -> Located: ...

    def issue(self, tile: Any, destination: Any, located: Located | None = None) -> Any: ...

    def land(self, in_flight: Any, destination: Any) -> None: ...


@dataclass(frozen=True)
class InFlight:
    """A loop carry: what is on its way (oldest first), the ring slot that holds the current tile, and for each copy
    what is known of the tile that starts next.
    """

    pending: tuple[Any, ...]
    slot: Value
    located: tuple[Located, ...]


class TileRing:
    """Tiles of several copies, fetched ahead of their use into rings of `stages` slots.

    Asynchronous copies need two slots or more and keep `stages - 1` tiles in flight; one barrier per tile.
    Copies through registers use one slot and keep the next tile in registers; two barriers per tile. A copy's
    `lag` (0, or 1 with asynchronous copies) is how many tiles it is behind: step t uses its tile t - lag.
    """

    def __init__(
        self,
        copies: Sequence[tuple[TileCopy, Any]],
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

    def _issue(self, tile: Any, slot: Any, lags: tuple[int, ...], located: tuple[Located, ...] | None = None) -> Any:
        known = located or (None,) * len(self.copies)
        parts = tuple(
            copy.issue(tile - lag if lag else tile, self._tile(ring, slot, lag), pages)
            for (copy, ring), lag, pages in zip(self.copies, self.lags, known, strict=True)
            if lag in lags
        )
        return join(list(parts)) if self.asynchronous else parts

    def _locate(self, tile: Any) -> tuple[Located, ...]:
        return tuple(copy.locate(tile - lag) for (copy, _), lag in zip(self.copies, self.lags, strict=True))

    def _tile(self, ring: Any, slot: Any, lag: int) -> Any:
        slot = _wrap(slot + (self.stages - lag), self.stages) if lag else slot
        return ring if isinstance(slot, int) and slot == 0 else ring.slot(slot)

    def start(self, first: Any) -> InFlight:
        """Set the first tiles on their way; `first` is the number of the first one."""
        count = max(1, self.stages - 1)
        # step `first` of a copy that lags has no tile
        return InFlight(
            tuple(self._issue(first + i, i32(i) if i else 0, (0, 1)[: i + 1]) for i in range(count)),
            i32(0),
            self._locate(first + count),
        )

    def advance(self, tile: Any, flight: InFlight) -> tuple[list[Any], InFlight]:
        """Complete the tiles of step `tile`, start later ones, and give the shared tiles to read now."""
        if self.asynchronous:
            wait(flight.pending[0])
            barrier()  # the tile is whole, and nobody reads the slot that is filled next any more
            ahead = _wrap(flight.slot + (self.stages - 1), self.stages)
            newest = self._issue(tile + (self.stages - 1), ahead, (0, 1), flight.located)
            located = self._locate(tile + self.stages)
            tiles = [
                self._tile(ring, flight.slot, lag) for (_, ring), lag in zip(self.copies, self.lags, strict=True)
            ]
            following = _wrap(flight.slot + 1, self.stages)
            return tiles, InFlight((*flight.pending[1:], newest), following, located)
        barrier()
        for (copy, ring), part in zip(self.copies, flight.pending[0], strict=True):
            copy.land(part, ring)
        barrier()
        newest = self._issue(tile + 1, 0, (0,), flight.located)
        return [ring for _, ring in self.copies], InFlight((newest,), flight.slot, self._locate(tile + 2))

    def halfway(self, tile: Any, flight: InFlight) -> InFlight:
        """What `AlternatingTiles` does here is done already."""
        del tile
        return flight


class AlternatingTiles:
    """Tiles of two asynchronous copies with one slot each: while one tile is read, the other one arrives.

    Half the shared memory of a ring, and two barriers per tile.
    """

    def __init__(self, first: tuple[TileCopy, SharedTile], second: tuple[TileCopy, SharedTile]):
        self.first = first
        self.second = second
        if not all(getattr(copy, "asynchronous", False) for copy, _ in (first, second)):
            raise ShapeError("alternating tiles need asynchronous copies")

    def start(self, first: Any) -> InFlight:
        """Set the first copy's first tile on its way; `first` is its number."""
        copy, place = self.first
        located = self._locate(first)
        return InFlight((copy.issue(first, place, located[0]),), i32(0), located)

    def _locate(self, tile: Any) -> tuple[Located, ...]:
        return tuple(copy.locate(tile) for copy, _ in (self.first, self.second))

    def advance(self, tile: Any, flight: InFlight) -> tuple[list[SharedTile], InFlight]:
        """Complete the first copy's tile, start the second's, and give both places; the first may be read."""
        flight = self._turn(self.second, tile, flight, flight.located[1])
        flight = replace(flight, located=self._locate(tile + 1))
        return [self.first[1], self.second[1]], flight

    def halfway(self, tile: Any, flight: InFlight) -> InFlight:
        """Nothing reads the first place any more: complete the second tile, start the first copy's next one."""
        return self._turn(self.first, tile + 1, flight, flight.located[0])

    def _turn(self, other: tuple[TileCopy, SharedTile], tile: Any, flight: InFlight, located: Located) -> InFlight:
        wait(flight.pending[0])
        barrier()  # the tile is whole, and nobody reads the other place any more
        copy, place = other
        return replace(flight, pending=(copy.issue(tile, place, located),))


def _wrap(slot: Value, stages: int) -> Value:
    if stages & (stages - 1) == 0:
        return slot & (stages - 1)
    return select(slot >= stages, slot - stages, slot)
