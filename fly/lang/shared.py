"""Shared memory: named buffers, and swizzled or padded tiles that operands are loaded from."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fly.errors import LayoutError, ShapeError
from fly.ir import memory
from fly.ir.dtypes import DType, dtype, i32
from fly.ir.memory import Pointer
from fly.ir.value import Number, Value, constant
from fly.layout import Layout

if TYPE_CHECKING:
    from fly.int_tuple import Shape

# What layouts are made free of conflicts for: 32 banks of 4 bytes.
BANK_BYTES = 128

_Whole = TypeVar("_Whole", int, Value)  # static or traced


class SharedMemory:
    """A buffer of `count` elements of `dtype` in the block's shared memory.

    Buffers whose uses do not overlap may be given the same place; see `plan-shared-memory`.
    """

    def __init__(self, name: str, dtype_: DType | str, count: int, *, align: int = 16):
        self.dtype = dtype(dtype_)
        self.count = count
        self.pointer = memory.alloc_shared(name, count * self.dtype.bytes, align)

    def at(self, index: Any) -> Pointer:
        """The address of element `index` (static or traced i32)."""
        if isinstance(index, int) and not 0 <= index < self.count:
            raise ShapeError(f"index {index} is out of range for a shared buffer of {self.count} elements")
        return self.pointer.offset(index * self.dtype.bytes)

    def __getitem__(self, index: Any) -> Value:
        raise ShapeError(f"a shared buffer is not indexed; write s.load({index!r}) for s[{index!r}]")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ShapeError(f"elements of a shared buffer are not assigned; write s.store(value, {index!r})")

    def load(self, index: Any, length: int | None = None, *, align: int | None = None) -> Value:
        """Load one element, or `length` of them from `index` on."""
        return memory.load(self.at(index), self.dtype, length, align=align)

    def store(self, value: Any, index: Any, *, align: int | None = None) -> None:
        """Store a number, or a scalar or vector of the buffer's dtype, at `index`."""
        if isinstance(value, Number):
            value = constant(value, self.dtype)
        if not isinstance(value, Value) or value.dtype is not self.dtype:
            raise ShapeError(f"cannot store {value!r} into a shared buffer of {self.dtype}; convert with .to(...)")
        memory.store(value, self.at(index), align=align)


@dataclass(frozen=True)
class SwizzledTile:
    """The layout of a (rows x columns) tile of 16-bit elements, row after row, swizzled against bank conflicts.

    Runs of `granule` elements are kept together. The largest power of two, up to 8 or as many runs as fit the banks
    once, that divides a row's runs is the field: the place of a run within its aligned field is xored with the row's
    `phase`. Rows that start in the same bank differ in their phase, so that as many rows as runs fit the banks once
    are free of conflicts at any column. With `fold`, the three row bits above take part too. `rotate` turns the bits
    of the phase to the left by so many: neighbouring rows then keep several neighbouring runs apart.
    """

    rows: int
    columns: int
    granule: int = 8
    fold: bool = False
    rotate: int = 0

    def __post_init__(self) -> None:
        if self.granule <= 0 or self.granule & (self.granule - 1):
            raise LayoutError(f"granule of a swizzled tile is {self.granule}; expected a power of two")
        if self.rows <= 0 or self.rows % 8:
            raise LayoutError(f"rows of a swizzled tile is {self.rows}; expected a multiple of 8")
        if self.columns <= 0 or self.columns % self.granule:
            raise LayoutError(
                f"columns of a swizzled tile is {self.columns}; expected a multiple of its granule {self.granule}"
            )

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * 2

    @property
    def field(self) -> int:
        """Runs in the xor field."""
        return math.gcd(max(8, BANK_BYTES // (self.granule * 2)), self.columns // self.granule)

    @property
    def _apart(self) -> int:
        """Rows from one to the next that starts in the same bank; a power of two."""
        runs = max(1, BANK_BYTES // (self.granule * 2))
        return runs // math.gcd(runs, self.columns // self.granule)

    @property
    def row_period(self) -> int:
        """Rows after which the swizzle repeats."""
        return max(64, 8 * self.field) if self.fold else max(8, self._apart * self.field)

    def phase(self, row: _Whole) -> _Whole:
        """What the runs of a row, static or traced, are xored with. Linear in the bits of the row."""
        phase = row if self._apart == 1 else row >> (self._apart.bit_length() - 1)
        if self.fold:
            phase = (phase & (self.field - 1)) ^ (row >> 3)
        phase = phase & (self.field - 1)
        bits = self.field.bit_length() - 1
        turn = self.rotate % bits if bits else 0
        if turn:
            phase = ((phase << turn) & (self.field - 1)) | (phase >> (bits - turn))
        return phase

    def __call__(self, row: int, column: int) -> int:
        """Element offset of a static coordinate."""
        offset: int = Layout((self.rows, self.columns), (self.columns, 1))((row, column))
        return offset ^ self.phase(row) * self.granule

    def base(self, row: Value, column: Value) -> Value:
        """Byte offset of a run-time coordinate; static parts are added by `displace`."""
        return (row * (self.columns * 2) + column * 2) ^ (self.phase(row) * (self.granule * 2))

    def displace(self, row: int, column: int) -> tuple[int, int]:
        """(xor, add): bytes that take `base(r, c)` to the address of (r + row, c + column).

        `row` is a multiple of `row_period`; the bits of `column` within the field are disjoint from those that c
        takes there.

        Raises:
            LayoutError: the static part does not fit those conditions.
        """
        if row % self.row_period or column % self.granule:
            raise LayoutError(
                f"static offset ({row}, {column}) of a swizzled tile must be a multiple of "
                f"({self.row_period}, {self.granule})"
            )
        inside = column % (self.field * self.granule)
        return inside * 2, (row * self.columns + column - inside) * 2


@dataclass(frozen=True)
class PaddedTile:
    """The layout of a (rows x columns) tile in lines, with unused elements after each line.

    `order` maps (row, column) to an element of the tile without padding: a bijection whose extents and strides are
    powers of two. `pad` elements follow every `line` of them, and `group_pad` more every `group` lines. Each bit of a
    coordinate then adds its own number of bytes, so that one register and a constant make the address of every
    operand of a lane.
    """

    order: Layout
    line: int
    pad: int
    element_bytes: int = 2
    group: int = 1
    group_pad: int = 0

    def __post_init__(self) -> None:
        if self.order.rank != 2 or not self.order.is_bijective:
            raise LayoutError(f"order {self.order} of a padded tile does not map (row, column) one to one")
        powers = (("line", self.line), ("group", self.group), ("rows", self.rows), ("columns", self.columns))
        for name, number in powers:
            if number <= 0 or number & (number - 1):
                raise LayoutError(f"{name} of a padded tile is {number}; expected a power of two")
        multiple = 16 // self.element_bytes
        pads = (self.pad, self.group_pad)
        if min(pads) < 0 or any(pad % multiple for pad in pads) or self.order.size % (self.line * self.group):
            raise LayoutError(
                f"a tile of {self.order.size} elements does not divide into lines of {self.line} with {self.pad} of "
                f"padding, {self.group} to a group with {self.group_pad} more; padding is a multiple of {multiple}"
            )
        table, bits = self.order.table(), [1 << b for b in range((self.order.size - 1).bit_length())]
        if sorted(table[bit] for bit in bits) != bits:
            raise LayoutError(f"order {self.order} of a padded tile mixes bits of its coordinates")

    @property
    def rows(self) -> int:
        return Layout(cast("tuple[Shape, ...]", self.order.shape)[0]).size

    @property
    def columns(self) -> int:
        return Layout(cast("tuple[Shape, ...]", self.order.shape)[1]).size

    @property
    def lines(self) -> int:
        """Lines in the tile."""
        return self.order.size // self.line

    @property
    def line_bytes(self) -> int:
        """Bytes from one line to the next."""
        return (self.line + self.pad) * self.element_bytes

    @property
    def bytes(self) -> int:
        return self.line_offset(self.lines)

    def line_offset(self, index: _Whole) -> _Whole:
        """Bytes from the tile's start to a line, static or traced."""
        offset = index * self.line_bytes
        return offset + index // self.group * (self.group_pad * self.element_bytes) if self.group_pad else offset

    def coordinate(self, place: int) -> tuple[int, int]:
        """(row, column) of the element at a place in the tile without padding: the inverse of `order`."""
        column, row = divmod(self._inverse[place], self.rows)
        return row, column

    @functools.cached_property
    def _inverse(self) -> list[int]:
        """By place in the tile without padding, the linear index of the element."""
        table = self.order.table()
        return sorted(range(len(table)), key=table.__getitem__)

    def __call__(self, row: int, column: int) -> int:
        """Element offset of a static coordinate."""
        place: int = self.order((row, column))
        return place + place // self.line * self.pad + place // (self.line * self.group) * self.group_pad

    def base(self, row: Value, column: Value) -> Value:
        """Byte offset of a run-time coordinate; static parts are added by `displace`."""
        place: Value = self.order((row, column))
        offset = place * self.element_bytes + place // self.line * (self.pad * self.element_bytes)
        if self.group_pad:
            offset = offset + place // (self.line * self.group) * (self.group_pad * self.element_bytes)
        return offset

    def displace(self, row: int, column: int) -> tuple[int, int]:
        """(0, add): bytes from `base(r, c)` to (r + row, c + column), whose bits are disjoint from r's and c's."""
        return 0, self(row, column) * self.element_bytes


@dataclass(frozen=True)
class SharedTile:
    """A tile at an address in shared memory."""

    pointer: Pointer
    layout: SwizzledTile | PaddedTile
    dtype: DType

    @staticmethod
    def ring(name: str, layout: SwizzledTile | PaddedTile, dtype_: DType, stages: int) -> tuple[SharedTile, ...]:
        """`stages` tiles of one layout in one buffer, tile after tile."""
        # a multiple of all banks' width keeps the layout's banks
        align = 256 if isinstance(layout, PaddedTile) else 1024
        buffer = memory.alloc_shared(name, layout.bytes * stages, align=align)
        return tuple(SharedTile(buffer.offset(i * layout.bytes), layout, dtype_) for i in range(stages))

    def slot(self, index: Value) -> SharedTile:
        """The tile `index` (traced i32) places further on in its ring."""
        return SharedTile(self.pointer.offset(index * i32(self.layout.bytes)), self.layout, self.dtype)

    def rows_from(self, row: Value) -> SharedTile:
        """A swizzled tile from a traced row on, a multiple of `layout.row_period`: each wave's part of a tile."""
        return SharedTile(self.pointer.offset(row * (self.layout.columns * 2)), self.layout, self.dtype)
