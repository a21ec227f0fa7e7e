"""Copies of tiles of pages in ROCm's vectorised layouts (`work.vectorized`) to shared memory, through registers.

A thread takes pieces of 8 elements, which lie side by side: of a key along its columns, or of a column of V along
the keys, which is how V's operand wants them, so that nothing is transposed. Neighbouring threads take neighbouring
keys of K and neighbouring columns of V: those whose pieces are next to each other in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.errors import ShapeError

from ..problem.catalogue import VECTOR_STEP
from ..work.vectorized import VectorRows


def _threads() -> int:
    x, y, z = fly.block_dim()
    return x * y * z


def _factored(values: fly.Value, factor: fly.Value | None, dtype: fly.DType) -> fly.Value:
    """Elements as a tile's, times a factor in f32 if there is one."""
    scaled: fly.Value = values if factor is None else values.to(fly.f32) * factor
    return scaled.to(dtype)


class KeyPieces:
    """Tiles of K, kept as rows of keys. A thread has the same key in all of its pieces."""

    def __init__(self, source: VectorRows, layout: fly.SwizzledTile):
        self.source = source
        self.tile_rows = layout.rows
        self._whole = layout.columns == source.columns
        together, rest = divmod(_threads(), layout.rows)
        pieces = layout.columns // VECTOR_STEP
        if rest or pieces % together:
            raise ShapeError(f"{_threads()} threads do not divide a tile of {layout.rows} keys of {pieces} pieces")
        thread = fly.thread_id.x
        self.row = thread % layout.rows
        first = thread // layout.rows * VECTOR_STEP
        self._columns = [first + p * together * VECTOR_STEP for p in range(pieces // together)]
        self._places = [layout.base(self.row, column) for column in self._columns]

    def locate(self, tile: Any) -> tuple[fly.Value, ...]:
        """The page of the thread's key."""
        return (self.source.page_of(tile * self.tile_rows + self.row),)

    def issue(
        self, tile: Any, destination: fly.SharedTile, located: tuple[fly.Value, ...] | None = None
    ) -> tuple[fly.Value, ...]:
        """Load tile number `tile` into registers; zeros past the last column.

        Keys past the end are as the last one, and their scores are hidden.
        """
        del destination  # the data waits in registers
        row = tile * self.tile_rows + self.row
        (page,) = located or self.locate(tile)

        def load(column: fly.Value) -> fly.Value:
            if self._whole:
                return self.source.load(page, row, column)
            inside = column < self.source.columns
            words = self.source.load(page, row, fly.select(inside, column, 0))
            return fly.select(inside, words, 0)

        return tuple(map(load, self._columns))

    def land(self, in_flight: Sequence[fly.Value], destination: fly.SharedTile) -> None:
        """Store what was loaded; other threads need a barrier to see it."""
        for words, place in zip(in_flight, self._places, strict=True):
            values = _factored(words.bitcast(self.source.dtype), None, destination.dtype)
            fly.store(values, destination.pointer.offset(place), align=VECTOR_STEP * destination.dtype.bytes)


@dataclass(frozen=True)
class _Piece:
    """8 keys, from `row` of a tile on, of one `column`; `places` of both halves in the shared tile."""

    row: fly.Value
    column: fly.Value
    places: tuple[fly.Value, fly.Value]


class ValuePieces:
    """Tiles of V, stored transposed: a row is a column of V, its keys in the order of `slot_of_piece`.

    See `fly.TransposedCopy`, whose tiles these are.
    """

    def __init__(self, source: VectorRows, layout: fly.SwizzledTile, slot_of_piece: tuple[int, ...]):
        self.source = source
        self.tile_rows = layout.columns
        passes, rest = divmod(layout.rows * layout.columns // VECTOR_STEP, _threads())
        if rest or layout.columns % VECTOR_STEP:
            raise ShapeError(f"{_threads()} threads do not divide a tile of {layout.columns} keys x {layout.rows}")

        # lanes of a wave then have the same keys, and what is computed of these is scalar
        self._alike = layout.rows % fly.wave_size() == 0

        def piece(index: fly.Value) -> _Piece:
            group = index // layout.rows
            group = fly.first_lane(group) if self._alike else group
            column = index - group * layout.rows
            halves = (fly.TransposedCopy.slot(group * 2 + half, slot_of_piece) for half in range(2))
            low, high = (layout.base(column, slot) for slot in halves)
            return _Piece(group * VECTOR_STEP, column, (low, high))

        self._pieces = [piece(fly.thread_id.x + p * _threads()) for p in range(passes)]

    def own_rows(self) -> list[fly.Value]:
        """The keys of a tile that this thread takes, piece after piece."""
        return [piece.row + i for piece in self._pieces for i in range(VECTOR_STEP)]

    def locate(self, tile: Any) -> tuple[fly.Value, ...]:
        """The page of each piece."""
        return tuple(self.source.page_of(tile * self.tile_rows + piece.row) for piece in self._pieces)

    def issue(
        self, tile: Any, destination: fly.SharedTile, located: tuple[fly.Value, ...] | None = None
    ) -> tuple[fly.Value, ...]:
        """Load tile number `tile` into registers; zeros past the last key and the last column."""
        del destination  # the data waits in registers
        first, pages = tile * self.tile_rows, located or self.locate(tile)
        return tuple(self._load(first, piece, page) for piece, page in zip(self._pieces, pages, strict=True))

    def _load(self, first: Any, piece: _Piece, page: fly.Value) -> fly.Value:
        row = first + piece.row
        if self._alike:
            return self._kept(self.source.load_of_all(page, row, piece.column), self.source.count - row)
        inside = piece.column < self.source.columns
        words = self.source.load(page, row, fly.select(inside, piece.column, 0))
        return self._kept(words, fly.select(inside, self.source.count - row, 0))

    def _kept(self, words: fly.Value, keys: fly.Value) -> fly.Value:
        """The first `keys` elements of a piece, and zeros: weights of the others are 0, and they may be NaN."""
        bits = 8 * self.source.dtype.bytes
        each = 32 // bits

        def word(first: int) -> fly.Value:
            mask: fly.Value = fly.i32(0)
            for i in range(each):
                ones = -1 if i + 1 == each else (1 << bits * (i + 1)) - 1
                mask = fly.select(keys > first + i, ones, mask)
            return mask

        kept: fly.Value = words & fly.from_elements([word(first) for first in range(0, VECTOR_STEP, each)])
        return kept

    def land(
        self, in_flight: Sequence[fly.Value], destination: fly.SharedTile, factors: Sequence[fly.Value] = ()
    ) -> None:
        """Store what was loaded; other threads need a barrier to see it.

        `factors`: f32 of each of `own_rows`, which elements are multiplied by before they are rounded.
        """
        for p, (words, piece) in enumerate(zip(in_flight, self._pieces, strict=True)):
            factor = fly.from_elements(factors[p * VECTOR_STEP : (p + 1) * VECTOR_STEP]) if factors else None
            values = _factored(words.bitcast(self.source.dtype), factor, destination.dtype)
            for half, place in enumerate(piece.places):
                part = values[half * 4 : half * 4 + 4]
                fly.store(part, destination.pointer.offset(place), align=4 * destination.dtype.bytes)
