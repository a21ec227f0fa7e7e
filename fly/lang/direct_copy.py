"""Copies from global memory straight into shared memory, a wave at a time (CDNA's direct-to-LDS loads).

The hardware stores lane l's bytes at one address per wave plus l times the width. So a wave fills a line of the tile
at a time, each lane fetches what belongs at the place that it fills, and padding goes between lines.

The base and the bound of such a load are the same for a whole wave. Of a matrix they advance from tile to tile
(`DirectCopy`); of rows in pages they belong to the page that has the rows of a wave's lines (`PagedDirectCopy`).

A tile may have more columns than the rows: those become zeros, since their lanes fetch from past any bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fly.errors import ShapeError
from fly.ir import memory
from fly.ir.context import current, emit
from fly.ir.dialect import token_type
from fly.ir.math import maximum, minimum
from fly.ir.memory import Pointer, i64_attribute
from fly.ir.value import Value, compare, select
from fly.lang.ids import first_lane, lane_id, remade, wave_id
from fly.lang.lanes import lane_map
from fly.lang.paged import PagedRows
from fly.lang.shared import PaddedTile, SharedTile
from fly.lang.sync import Token, join
from fly.lang.tensor import RowView, wide

VECTOR_BYTES = 16  # that a lane moves with one instruction
MAX_SHIFT = 4095  # bytes; the instruction's own offset has 12 bits
PAST_ANY_BOUND = -(2**31)  # as a number without a sign, what rows span that are less wide than their tile at most


@dataclass(frozen=True)
class CopyPosition:
    """Where a group of tiles begins in global memory: its address, and the bytes from there to the last row's end.

    Where groups past the end may be asked for, `left` is at least a group's length, and holds that much more than
    there is: the next one subtracts it.
    """

    base: Pointer
    left: Value


class _LineCopy:
    """What the kinds of copy share: which lines of a tile each wave fills, and what its lanes fetch for them.

    A wave's lines lie side by side. What its lanes fetch is counted from row `origins[wave]` of the tile. `sparing`:
    whether each copy adds up anew where they are, so that no place takes a scalar register over a loop.
    """

    def __init__(self, source: RowView | PagedRows, layout: PaddedTile, sparing: bool = False):
        target = current().target
        if VECTOR_BYTES not in target.direct_copy_bytes:
            raise ShapeError(f"{target.arch} has no direct-to-shared copy of {VECTOR_BYTES} bytes a lane")
        if source.dtype.bytes != layout.element_bytes:
            raise ShapeError(f"a tile of {layout.element_bytes}-byte elements for rows of {source.dtype}")
        vector = VECTOR_BYTES // layout.element_bytes
        if source.columns > layout.columns or source.columns % vector or source.alignment < 4:
            raise ShapeError(
                f"a direct copy needs rows of {layout.columns} elements, or fewer in steps of {vector}, at 4-byte "
                f"alignment, not {source.columns} at {source.alignment}"
            )
        x, y, z = current().block
        self.waves = x * y * z // target.wave_size
        if layout.line != target.wave_size * vector or layout.lines % self.waves:
            raise ShapeError(
                f"{layout.lines} lines of {layout.line} elements do not divide into runs of {self.waves} waves, "
                f"{target.wave_size * vector} elements each"
            )
        self.source = source
        self.layout = layout
        self.sparing = sparing
        self.runs = layout.lines // self.waves
        if layout.group_pad and layout.group % self.runs:
            raise ShapeError(f"groups of {layout.group} lines do not divide into runs of {self.runs}")
        # a wave's lines lie side by side, and a constant in the instruction moves both ends of a copy from one to the
        # next; the base lies so much lower that no lane's offset is negative
        self._bias: int = (self.runs - 1) * layout.line_bytes
        if self._bias > MAX_SHIFT:
            raise ShapeError(
                f"{self.runs} lines of {layout.line_bytes} bytes a wave; expected {MAX_SHIFT} bytes at most"
            )
        self._places = [layout.coordinate(i * vector) for i in range(target.wave_size)]
        self._origins = self._rows_of_waves()
        self._wave = wave_id()

    def _rows_of_waves(self) -> list[int]:
        """For each wave, the row of a tile that the offsets of its lanes count from."""
        return [0] * self.waves

    def _plan_lanes(self) -> None:
        lane = lane_id()
        row = lane_map([r for r, _ in self._places], lane)
        column = lane_map([c for _, c in self._places], lane)
        self._offsets = [self._lane_offset(run, row, column) for run in range(self.runs)]

    def _lane_offset(self, run: int, row: Value, column: Value) -> Value:
        """Bytes from the base to what this lane fetches for line `wave * runs + run`, less what the shift adds."""
        places = [
            self.layout.coordinate(line * self.layout.line) for line in range(run, self.layout.lines, self.runs)
        ]
        lines = [(r - origin, c) for (r, c), origin in zip(places, self._origins, strict=True)]
        row = row + lane_map([r - lines[0][0] for r, _ in lines], self._wave) + lines[0][0]
        column = column + lane_map([c - lines[0][1] for _, c in lines], self._wave) + lines[0][1]
        offset = row * self.source.pitch + (
            column * self.layout.element_bytes + self._bias - run * self.layout.line_bytes
        )
        if self.source.columns == self.layout.columns:
            return offset
        return select(column < self.source.columns, offset, PAST_ANY_BOUND)

    def _start(self, base: Pointer, bound: Value, step: Any, destination: SharedTile) -> Token:
        """Fill the wave's lines of `destination` from `step` bytes past the base on."""
        lines = self.layout.line_offset(self._wave * self.runs)
        target = destination.pointer.offset(remade(lines) if self.sparing else lines)
        tokens = []
        for run, offset in enumerate(self._offsets):
            operands = [target.ir, base.ir, (offset + step).ir, bound.ir]
            attributes = {"bytes": i64_attribute(VECTOR_BYTES), "shift": i64_attribute(run * self.layout.line_bytes)}
            tokens.append(Token(emit("fly.copy_direct", operands, [token_type()], attributes).results[0]))
        return join(tokens)


class DirectCopy(_LineCopy):
    """Tiles of `layout.rows` rows of `source`, in groups of `group` that share one base and bound.

    Rows of fewer columns than the tile's, and a group's rows past their end, span less than 2**31 bytes together.
    Only the base and the bound advance, on the scalar unit; the lanes' offsets stay. Groups are as many as a
    loop's body copies. Without `past_end` no tile of a group is copied that has not a row, but for one of no rows
    at all: a bound then needs no limit. `sparing`: where several tiles are copied to in turn, their places are not
    kept in scalar registers, for which each copy adds them up.

    Raises:
        ShapeError: the target has no such copies, or the tile's lines do not divide among the waves.
    """

    source: RowView

    def __init__(
        self, source: RowView, layout: PaddedTile, group: int = 1, past_end: bool = True, sparing: bool = False
    ):
        super().__init__(source, layout, sparing)
        self.group = group
        self._step = source.pitch * layout.rows
        self._past_end = past_end
        self._plan_lanes()

    @property
    def _spare(self) -> Any:
        """What `CopyPosition.left` has more than there is."""
        return self._step * self.group if self._past_end else 0

    def start(self, first: Any, lead: int = 0, most: int | None = None) -> CopyPosition:
        """The group that begins `lead` tiles before row `first`; rows before that one are not to be copied.

        `most`: how many rows from `first` on may be copied, where all that follow span 2**32 bytes or more.
        """
        source = self.source
        count = source.count - minimum(source.count, first)
        count = count if most is None else minimum(count, most)
        bytes_ = select(count > 0, (count - 1) * source.pitch + source.columns * source.dtype.bytes, 0)
        base = source.row(wide(first) - lead * self.layout.rows).offset(-self._bias)
        return CopyPosition(base, bytes_ + (self._step * lead + self._spare + self._bias))

    def alone(self, first: Any) -> CopyPosition:
        """The tile of the rows from `first` on as tile 0 of a group: it alone is less than 2**31 bytes long."""
        window = self.source.window(first, self.layout.rows)
        return CopyPosition(window.base.offset(-self._bias), window.bound + (self._spare + self._bias))

    def next(self, at: CopyPosition) -> CopyPosition:
        """The next group."""
        step = self._step * self.group
        left = at.left - step
        left = select(compare("ult", left, step), step, left) if self._past_end else left
        return CopyPosition(at.base.offset(wide(step)), left)

    def issue(self, at: CopyPosition, tile: int, destination: SharedTile) -> Token:
        """Start tile number `tile` of a group on its way into `destination`; rows past the end become zeros."""
        bound = at.left - self._spare
        return self._start(at.base, bound, self._step * tile, destination)


@dataclass(frozen=True)
class PagePosition:
    """Where a wave's lines of a tile come from: rows from number `row` on, which lie in `page`, as the table says."""

    row: Value
    page: Value

    def within(self, pages: Any) -> PagePosition:
        """With a number that names no page cut to what exists."""
        # the order of the limits tells LLVM that the number has no sign, which saves half of a product
        return replace(self, page=maximum(minimum(first_lane(self.page), pages - 1), 0))


class PagedDirectCopy(_LineCopy):
    """Tiles of `layout.rows` rows in pages. All rows of a wave's lines lie in one page.

    Which one is a load from the table; made a tile ahead (`next`), it is there when the copy starts. Base and bound
    are computed on the scalar unit, the base in 64 bits: pages may be any distance apart. Rows are at least their
    length apart, or all of a page are one.

    Raises:
        ShapeError: as `DirectCopy`, and where a wave's lines have rows of several pages.
    """

    source: PagedRows

    def __init__(self, source: PagedRows, layout: PaddedTile):
        super().__init__(source, layout)
        self._last = minimum(source.count, source.table.shape[0] * source.page_size) - 1
        self._row_bytes = source.columns * source.dtype.bytes
        # where there is no row, a bound below 0 for whatever tile
        self._pitch = select(self._last >= 0, source.pitch, self._row_bytes)
        self._plan_lanes()

    def _rows_of_waves(self) -> list[int]:
        together = min(self.source.page_size, self.layout.rows)
        lines = [self.layout.coordinate(line * self.layout.line) for line in range(self.layout.lines)]
        first = []
        for wave in range(self.waves):
            mine = lines[wave * self.runs : (wave + 1) * self.runs]
            pages = {(line + row) // together for line, _ in mine for row, _ in self._places}
            if len(pages) > 1:
                raise ShapeError(f"lines of a wave have rows of {len(pages)} pages of {self.source.page_size} rows")
            first.append(min(pages) * together)
        return first

    def start(self, first: Any) -> PagePosition:
        """Of the tile that begins at row `first`, a multiple of the tile's rows."""
        return self._position(lane_map(self._origins, self._wave) + first)

    def next(self, at: PagePosition) -> PagePosition:
        """Of the next tile."""
        return self._position(at.row + self.layout.rows)

    def _position(self, row: Value) -> PagePosition:
        # the order of the limits tells LLVM that the number has no sign, which saves half of its arithmetic
        entry = self.source.table.at(maximum(minimum(row, self._last), 0) // self.source.page_size)
        return PagePosition(row, memory.load(entry, self.source.table.dtype, constant=True))

    def issue(self, at: PagePosition, destination: SharedTile) -> Token:
        """Start the tile on its way into `destination`, from a page `within` them; rows past the end are zeros."""
        source, together = self.source, min(self.source.page_size, self.layout.rows)
        base = source.pages.at(at.page, 0, 0).offset(-self._bias)
        if source.page_size > together:
            base = base.offset((at.row & (source.page_size - 1)) * self._pitch)
        last = minimum(self._last - at.row, together - 1)
        end = last * self._pitch + (self._row_bytes + self._bias)
        return self._start(base, maximum(end, self._bias), 0, destination)
