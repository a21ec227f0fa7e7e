"""An additive bias, as a tile of scores takes it: loaded in as few pieces as its memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import fly

if TYPE_CHECKING:
    from .scores import Place

Source = tuple[Any, ...]  # the coordinates of a row of the bias: all but the key
Pieces = tuple[tuple[fly.Value, ...], ...]  # [row of the bias][column tile] -> the lane's elements
T = TypeVar("T")


@dataclass(frozen=True)
class BiasTile:
    """The bias of the scores of `columns` keys from `first_key` on, a multiple of their number.

    `bias`: (B, H, Sq, Skv), or (B, H, Skv), which a head's rows share; `rows`: query indices. Only elements of the
    tensor are read. Keys of which all have a column come in runs, as long as accumulators and alignment have them, at
    offsets that are static. Where some are past the end, or the last stride is not 1, they come one by one, and
    queries and keys are cut to those that exist: what others get is not used.
    """

    bias: fly.Tensor
    rows: fly.RowVector
    first_key: Any
    columns: int
    place: Place

    def load(self) -> fly.Fragment:
        """In the bias' own dtype: what is loaded ahead takes no more registers than that."""
        return self._fragment(self._by_end(range(0, self.columns, self.rows.layout.columns), lambda pieces: pieces))

    def add_to(self, scores: fly.Fragment, together: bool = False) -> fly.Fragment:
        """Scores plus the bias, loaded at once: a column tile at a time, or all `together`.

        Together they are one wait for memory less; where registers are nearly full, 16-bit elements, which take whole
        ones until they are summed, have no room for that, and f32 ones only beside nothing else.
        """
        layout, columns = scores.layout, list(zip(*scores.tiles))
        sums: list[Pieces] = []
        step = len(columns) if together else 1
        for first in range(0, len(columns), step):
            part = fly.Fragment(layout, tuple(zip(*columns[first : first + step])))
            tiles = range(first * layout.columns, (first + step) * layout.columns, layout.columns)

            def summed(pieces: Pieces, part: fly.Fragment = part) -> Pieces:
                return add(part, self._fragment(pieces)).tiles

            sums.append(self._by_end(tiles, summed))
        return fly.Fragment(layout, tuple(sum(row, ()) for row in zip(*sums)))

    def _by_end(self, tiles: range, use: Callable[[Pieces], T]) -> T:
        """What is made of the runs of column tiles, or of their elements where keys may be past the end."""
        stride = self.bias.stride[-1]
        if not isinstance(stride, int) or stride != 1:
            return use(self._elements(tiles))
        inside = self.first_key + tiles.stop <= self.bias.shape[-1]
        made: T = fly.cond(inside, lambda: use(self._runs(tiles)), lambda: use(self._elements(tiles)))
        return made

    def _elements(self, tiles: range) -> Pieces:
        first, last_key = self._first, fly.maximum(self.place.keys.keys - 1, 0)

        def of(source: Source, columns: Sequence[int]) -> fly.Value:
            return fly.from_elements([self.bias.load(*source, fly.minimum(first + c, last_key)) for c in columns])

        return self._pieces(tiles, of)

    def _runs(self, tiles: range) -> Pieces:
        bias, first, size = self.bias, self._first, self.bias.dtype.bytes
        run = math.gcd(self.rows.layout.run, self.columns, max(1, bias.alignment // size))

        def of(source: Source, columns: Sequence[int]) -> fly.Value:
            held = bias[*source, :].section(first, self.columns)
            return fly.concat([held.load(c, length=run, align=run * size) for c in columns[::run]])

        return self._pieces(tiles, of)

    @property
    def _first(self) -> fly.Value:
        """The key of the lane's first register."""
        first: fly.Value = self.rows.layout.first_column() + self.first_key
        return first

    @property
    def _slots(self) -> list[list[int]]:
        """The columns of every row that the lane holds in an accumulator tile, from its first register's on."""
        layout = self.rows.layout
        return [[layout.value_columns[v] for v in registers] for registers in layout.slot_values]

    @property
    def _shared(self) -> bool:
        """Whether a lane's rows all have the same values."""
        slots, of_rows = self._slots, isinstance(self.place.head, fly.RowVector)
        return self.bias.rank == 3 and not of_rows and all(slot == slots[0] for slot in slots)

    def _sources(self) -> list[Source]:
        """Of every row that the lane holds, one where they share it; queries are cut to those that exist."""
        place, one = self.place, self.place.head
        if self._shared:
            return [(place.batch, one)]
        last_row = fly.maximum(place.keys.queries - 1, 0)
        heads = one if isinstance(one, fly.RowVector) else self.rows.map(lambda _: one)
        held = [pair for numbers in zip(self.rows.values, heads.values) for pair in zip(*numbers)]
        query = (lambda row: (fly.minimum(row, last_row),)) if self.bias.rank == 4 else (lambda row: ())
        return [(place.batch, head, *query(row)) for row, head in held]

    def _pieces(self, tiles: range, of: Callable[[Source, Sequence[int]], fly.Value]) -> Pieces:
        held = zip(self._sources(), self._slots * len(self.rows.values))
        return tuple(tuple(of(source, [tile + c for c in slot]) for tile in tiles) for source, slot in held)

    def _fragment(self, pieces: Pieces) -> fly.Fragment:
        each, count = len(self._slots), len(self.rows.values)
        of_tile = [pieces * each if self._shared else pieces[r * each : (r + 1) * each] for r in range(count)]
        return fly.Fragment.from_rows(self.rows.layout, of_tile)


def add(scores: fly.Fragment, bias: fly.Fragment) -> fly.Fragment:
    """Scores plus a bias that has been loaded."""
    return scores.map(lambda tile, r, c: tile + bias.tiles[r][c].to(fly.f32))
