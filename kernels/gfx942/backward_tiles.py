"""Tiles of queries in LDS for the gfx942 backward kernel: as they are and transposed, from the same registers.

No LDS load of gfx942 transposes. So a thread takes 4 adjacent rows of a few columns from memory, stores them as they
are, turns them in registers and stores them once more, 4 rows of a column at a time. Which rows and columns lanes
beside each other take, and where tiles have theirs, keeps both kinds of stores and both kinds of 16-byte reads free
of bank conflicts, by the phases of `fly.emulator.banks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly
from fly.ir import memory
from fly.ir.value import shuffle

from ..gfx950.operand_queue import Multiply
from ..gfx950.panels import Sums, plan

ROWS = 32  # of a tile
PIECE = 4  # rows that a thread takes
PIECES = ROWS // PIECE
THREADS = 256
LINE, PAD = 64, 8  # elements: all banks once, and 16 bytes


def straight_tile() -> fly.PaddedTile:
    """The layout of a tile as it is, of up to 128 columns: lines of 64 of them.

    In units of 16 bytes, modulo all banks, a row's bits move it by 1, 2, 4, 2 and 0. A 16-byte read takes rows that
    differ in the first two and in the third and fifth together; a store takes those that differ in the third and the
    fourth, and columns.
    """
    lines = 1, 2, 4, 8, 32
    order = fly.Layout(((2,) * 5, (LINE, 2)), (tuple(LINE * x for x in lines), (1, LINE * 16)))
    return fly.PaddedTile(order, LINE, PAD, group=8, group_pad=2 * PAD)


def turned_tile(columns: int) -> fly.PaddedTile:
    """The layout of a transposed tile of 64 or 128 columns: rows of it, two in a line, are those.

    As in `straight_tile`: 1, 2, 4, 6, 0 of 128 columns, and 1, 2, 4, 4, 0 of 64, where a thread takes two, so that
    the stores of 16 lanes differ in the second and third instead.
    """
    if columns == 64:
        return fly.PaddedTile(fly.Layout(((2, 2, 2, 8), ROWS), ((64, 128, 32, 256), 1)), LINE, PAD)
    strides = 1, 2, 0.5, 4, 16, 8, 32  # in lines
    order = fly.Layout(((2,) * 7, ROWS), (tuple(int(LINE * x) for x in strides), 1))
    return fly.PaddedTile(order, LINE, PAD, group=4, group_pad=2 * PAD)


def columns_of_thread(columns: int) -> int:
    """How many columns a thread takes."""
    return columns * PIECES // THREADS


@dataclass(frozen=True)
class Tile:
    """A tile's places in LDS; two slots of it as it is, one transposed."""

    straight: fly.SharedTile
    turned: fly.SharedTile

    @staticmethod
    def allocate(name: str, columns: int, dtype: fly.DType) -> Tile:
        """Of a matrix of so many columns."""
        straight = fly.SharedTile.ring(name, straight_tile(), dtype, 2)[0]
        return Tile(straight, fly.SharedTile.ring(f"{name} turned", turned_tile(columns), dtype, 1)[0])

    def slot(self, number: fly.Value) -> Callable[[], fly.SharedTile]:
        """The tile as it is in the slot of a number, traced where it is asked for first."""
        return functools.cache(lambda: self.straight.slot(number & 1))


class Loads:
    """Loads from memory that are traced one by one, and before them where to: `base` and `bound`."""

    def __init__(
        self,
        base: Callable[[], fly.Pointer],
        bound: Callable[[], fly.Value],
        loads: Sequence[Callable[[fly.Pointer, fly.Value], fly.Value]],
    ):
        self._places: list[Callable[[], Any]] = [base, bound]
        self._loads, self._where, self._found = loads, list[Any](), list[fly.Value]()

    @property
    def where(self) -> list[Callable[[], None]]:
        """Steps of scalar instructions before the loads."""
        return [lambda place=place: self._where.append(place()) for place in self._places]  # type: ignore[misc]

    @property
    def steps(self) -> list[Callable[[], None]]:
        """One for each load."""
        return [lambda load=load: self._found.append(load(*self._where)) for load in self._loads]  # type: ignore[misc]

    def now(self) -> Loads:
        """With all of them traced."""
        for step in (*self.where, *self.steps):
            step()
        return self

    @property
    def values(self) -> tuple[fly.Value, ...]:
        """What was loaded."""
        assert len(self._found) == len(self._loads)
        return tuple(self._found)


class Copy:
    """Tiles of a matrix on their way to a place in LDS through registers.

    `slots`: where a tile's groups of 4 rows go among as many of them, one after the other, in the transposed tile.
    """

    def __init__(self, rows: fly.RowView, tile: Tile, slots: Sequence[int]):
        self.rows, self.tile = rows, tile
        self.vector = columns_of_thread(rows.columns)
        near = 16 // self.vector  # threads of neighbouring columns, with pieces of 16 rows
        shape = (4, near, 2, THREADS // (8 * near))
        thread = fly.thread_id.x
        piece = fly.evaluate(fly.Layout(shape, (1, 0, 4, 0)), thread)
        self.column = fly.evaluate(fly.Layout(shape, (0, self.vector, 0, 16)), thread)
        first = piece * PIECE
        bytes_ = rows.dtype.bytes
        self.offsets = [(first + r) * rows.pitch + self.column * bytes_ for r in range(PIECE)]
        count = len(slots)
        slot = piece - piece % count + fly.lane_map(slots, piece % count)
        self.straight_at = tile.straight.layout.base(first, self.column)
        self.turned_at = tile.turned.layout.base(self.column, slot * PIECE)

    def issue(self, tile: Any) -> Loads:
        """What loads tile number `tile`, rows past the end as zeros."""
        words, first = self.vector * self.rows.dtype.bytes // 4, tile * ROWS
        align = min(self.rows.alignment, words * 4)
        return Loads(
            lambda: self.rows.row(first),
            lambda: self.rows.window(first, ROWS).bound,
            [
                lambda base, bound, offset=offset: memory.load_bounded(  # type: ignore[misc]
                    base, offset, bound, fly.i32, words, align=align
                )
                for offset in self.offsets
            ],
        )

    def land(self, loaded: Sequence[fly.Value], slot: Callable[[], fly.SharedTile]) -> list[Callable[[], None]]:
        """Steps that store a tile's rows as they are; other threads need a barrier to see them."""

        def store(r: int) -> None:
            place = slot()
            _, add = place.layout.displace(r, 0)
            at = place.pointer.offset(self.straight_at).offset(add)
            memory.store(loaded[r].bitcast(place.dtype), at, align=self.vector * place.dtype.bytes)

        return [partial(store, r) for r in range(PIECE)]

    def land_turned(self, loaded: Sequence[fly.Value]) -> list[Callable[[], None]]:
        """Steps that store them transposed, a column each."""
        place = self.tile.turned

        def store(c: int) -> None:
            rows = [words.bitcast(place.dtype) for words in loaded]
            pairs = [shuffle(rows[i], rows[i + 1], [c, self.vector + c]) for i in (0, 2)]
            _, add = place.layout.displace(c, 0)
            piece = shuffle(pairs[0], pairs[1], [0, 1, 2, 3])
            memory.store(piece, place.pointer.offset(self.turned_at).offset(add), align=PIECE * place.dtype.bytes)

        return [partial(store, c) for c in range(self.vector)]


class Halves:
    """A matrix instruction of 8 elements of k a lane as two of 4, which other instructions can stand between."""

    def __init__(self, atom: fly.MmaAtom):
        self.atom = fly.target().mma(atom.dtype, (atom.m, atom.n, atom.k // 2))
        self.parts = range(2)

    def mma(self, part: int, a: fly.Value, b: fly.Value, accumulator: fly.Value) -> fly.Value:
        """accumulator + one half of a · b."""
        count = self.atom.values("a")
        half = slice(part * count, (part + 1) * count)
        return fly.mma(self.atom, a[half], b[half], accumulator)


def in_halves(
    read: Callable[[], fly.Value], use: Callable[[int, fly.Value], None], parts: Sequence[int]
) -> Iterator[Multiply]:
    """Steps that use what is read once, one for each of the parts."""
    held: list[fly.Value] = []

    def first(operand: fly.Value) -> None:
        held.append(operand)
        use(parts[0], operand)

    yield Multiply(read, first)
    for part in parts[1:]:
        yield Multiply(lambda: None, lambda nothing, part=part: use(part, held[0]), 0)  # type: ignore[misc]


class Products:
    """The two products of a chain with a tile, as steps of `operand_queue`, a row tile's instruction each."""

    def __init__(self, link: fly.Chain, tile: Tile, columns: int):
        self.link, self.tile, self.columns = link, tile, columns
        self.halves = Halves(link.atom)
        straight = plan(link.atom, link.column_operand, transposed=False)
        self.straight = fly.OperandLoader(straight, tile.straight.layout)
        self.turned = fly.OperandLoader(straight, tile.turned.layout)

    def _steps(
        self, sums: Sums, at: int, rows: Callable[[], Sequence[fly.Value]], read: Callable[[], fly.Value]
    ) -> Iterator[Multiply]:
        """Of column tile `at` of the sums, a row tile's two instructions after the other's."""
        count = len(sums.tiles)

        def use(number: int, column: fly.Value) -> None:
            part, r = divmod(number, count)
            sides = (rows()[r], column) if self.link.rows_on == "m" else (column, rows()[r])
            sums.tiles[r][at] = self.halves.mma(part, *sides, sums.tiles[r][at])

        return in_halves(read, use, range(2 * count))

    def across(
        self, sums: Sums, rows: Callable[[int], Sequence[fly.Value]], slot: Callable[[], fly.SharedTile]
    ) -> Iterator[Multiply]:
        """sums += rows · tileᵀ; `rows`: operands of a step over the columns, one a row tile."""
        depth = self.link.atom.k
        for t in range(self.columns // depth):

            def read(t: int = t) -> fly.Value:
                return self.straight.load(slot(), 0, t * depth)[0]

            yield from self._steps(sums, 0, partial(rows, t), read)

    def along(self, sums: Sums, weights: Callable[[int], Sequence[fly.Value]]) -> Iterator[Multiply]:
        """sums += weights · tile; `weights`: operands of a step over the rows, which are there when it is traced."""
        extent, depth = self.link.layout.columns, self.link.atom.k
        for t in range(ROWS // depth):
            for n in range(self.columns // extent):

                def read(t: int = t, n: int = n) -> fly.Value:
                    return self.turned.load(self.tile.turned, n * extent, t * depth)[0]

                yield from self._steps(sums, n, partial(weights, t), read)
