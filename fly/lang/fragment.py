"""Accumulator tiles in registers, seen as a matrix whose rows and columns a lane can name.

A matrix instruction scatters its result over lanes. `AccumulatorLayout` answers, for either orientation of the
instruction, which row and column each register of a lane holds; `Fragment` is a grid of such tiles with the
operations on rows and columns that a softmax and its derivative need.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar

from fly.errors import AtomError, ShapeError
from fly.ir.context import context, current, emit
from fly.ir.dtypes import DType, dtype, f32, i32
from fly.ir.math import absolute, fma, maximum, minimum, reduce_max, reduce_sum
from fly.ir.memory import Pointer, load, load_bounded
from fly.ir.mlir import ir
from fly.ir.value import Number, Value, broadcast, compare, concat, constant, from_elements, select
from fly.lang.ids import lane_of
from fly.lang.lanes import evaluate, linear_layout
from fly.lang.sync import reduce_lanes
from fly.lang.tensor import Tensor
from fly.layout import Layout


class Accumulates(Protocol):
    """What a layout asks of an instruction: an `MmaAtom`, or a warpgroup's."""

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def accumulator(self) -> str: ...
    @property
    def c(self) -> Layout: ...
    def values(self, operand: str) -> int: ...


_Found = TypeVar("_Found")


def _once(make: Callable[[AccumulatorLayout], _Found]) -> functools.cached_property[_Found]:
    """A property that is worked out once for all layouts that are equal: kernels name theirs again and again."""
    return functools.cached_property(functools.cache(make))


@dataclass(frozen=True)
class AccumulatorLayout:
    """Which (row, column) each register of each lane holds in one accumulator tile.

    `rows_on` says which side of the instruction the matrix's rows are: "m" (as usual) or "n" (the instruction
    computes the transpose).
    """

    atom: Accumulates
    rows_on: str
    is_static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rows_on not in ("m", "n"):
            raise AtomError(f"rows_on is {self.rows_on!r}; expected 'm' or 'n'")

    @property
    def rows(self) -> int:
        return self.atom.m if self.rows_on == "m" else self.atom.n

    @property
    def columns(self) -> int:
        return self.atom.n if self.rows_on == "m" else self.atom.m

    @property
    def values(self) -> int:
        return self.atom.values("c")

    def coordinate(self, lane: int, value: int) -> tuple[int, int]:
        """(row, column) of a lane's register."""
        n, m = divmod(self.atom.c((lane, value)), self.atom.m)
        return (m, n) if self.rows_on == "m" else (n, m)

    @_once
    def row_lane(self) -> Layout:
        """lane -> row of its first register."""
        return linear_layout([self.coordinate(lane, 0)[0] for lane in range(self.atom.lanes)])

    @_once
    def column_lane(self) -> Layout:
        """lane -> column of its first register."""
        return linear_layout([self.coordinate(lane, 0)[1] for lane in range(self.atom.lanes)])

    @_once
    def value_rows(self) -> tuple[int, ...]:
        """Row of each register relative to the lane's first; the same in every lane."""
        return tuple(self.coordinate(0, v)[0] for v in range(self.values))

    @_once
    def value_columns(self) -> tuple[int, ...]:
        """Column of each register relative to the lane's first; the same in every lane."""
        return tuple(self.coordinate(0, v)[1] for v in range(self.values))

    @_once
    def slots(self) -> tuple[int, ...]:
        """The distinct rows a lane holds, relative to its first."""
        return tuple(sorted(set(self.value_rows)))

    @_once
    def slot_values(self) -> tuple[tuple[int, ...], ...]:
        """For each slot, the registers of that row."""
        return tuple(tuple(v for v, row in enumerate(self.value_rows) if row == slot) for slot in self.slots)

    @_once
    def column_slots(self) -> tuple[int, ...]:
        """The distinct columns a lane holds, relative to its first."""
        return tuple(sorted(set(self.value_columns)))

    @_once
    def column_slot_values(self) -> tuple[tuple[int, ...], ...]:
        """For each column slot, the registers of that column."""
        columns = self.value_columns
        return tuple(tuple(v for v, column in enumerate(columns) if column == slot) for slot in self.column_slots)

    @_once
    def run_starts(self) -> tuple[int, ...]:
        """The first register of every run of contiguous columns of a row; runs are equally long."""
        places = list(zip(self.value_rows, self.value_columns))
        return tuple(v for v, (row, column) in enumerate(places) if v == 0 or places[v - 1] != (row, column - 1))

    @_once
    def run(self) -> int:
        """The longest power of two of contiguous columns, from a multiple of it on, in which every lane has a row."""
        columns = (*map(self.column_lane, range(self.atom.lanes)), *(self.value_columns[v] for v in self.run_starts))
        run = math.gcd(self.values // len(self.run_starts), self.columns, *columns)
        return run & -run

    def first_column(self) -> Value:
        """The column of this lane's first register."""
        return evaluate(self.column_lane, lane_of(self.atom.lanes))

    @_once
    def row_mates(self) -> tuple[int, ...]:
        """Lane-index bits under which lanes hold the same rows: the xor masks of a row reduction."""
        return tuple(bit for bit in self._lane_bits if self.coordinate(bit, 0)[0] == self.coordinate(0, 0)[0])

    @_once
    def column_mates(self) -> tuple[int, ...]:
        """Lane-index bits under which lanes hold the same columns; of a warpgroup, also the bits of its warps."""
        return tuple(bit for bit in self._lane_bits if self.coordinate(bit, 0)[1] == self.coordinate(0, 0)[1])

    @property
    def _lane_bits(self) -> list[int]:
        return [1 << b for b in range((self.atom.lanes - 1).bit_length())]


@dataclass(frozen=True)
class _Vector:
    """One value per row, or per column, that a lane holds: `values[tile][slot]`."""

    layout: AccumulatorLayout
    values: tuple[tuple[Value, ...], ...]

    @staticmethod
    def slots(layout: AccumulatorLayout) -> tuple[int, ...]:
        """What a lane has a value for in each tile, relative to its first."""
        raise NotImplementedError

    @staticmethod
    def places(layout: AccumulatorLayout) -> tuple[int, ...]:
        """The slot that each register of a tile belongs to."""
        raise NotImplementedError

    @classmethod
    def full(cls, layout: AccumulatorLayout, tiles: int, number: float) -> Self:
        """The same f32 constant everywhere; `tiles`: of a fragment in this direction."""
        return cls(layout, tuple(tuple(f32(number) for _ in cls.slots(layout)) for _ in range(tiles)))

    def map(self, function: Callable[..., Value], *others: Self) -> Self:
        """`function` of the corresponding values, one by one."""
        return type(self)(
            self.layout,
            tuple(
                tuple(function(*slot) for slot in zip(*tile, strict=True))
                for tile in zip(self.values, *(o.values for o in others), strict=True)
            ),
        )

    def _numbered(self, first: Value, extent: int) -> Self:
        """Numbers from the fragment's corner: `first` is the lane's, `extent` the size of a tile."""
        slots = self.slots(self.layout)
        return type(self)(
            self.layout,
            tuple(tuple(first + (tile * extent + slot) for slot in slots) for tile in range(len(self.values))),
        )


@dataclass(frozen=True)
class RowVector(_Vector):
    """One value per row that a lane holds: `values[row_tile][slot]`."""

    @staticmethod
    def slots(layout: AccumulatorLayout) -> tuple[int, ...]:
        """The rows a lane holds in each tile, relative to its first."""
        return layout.slots

    @staticmethod
    def places(layout: AccumulatorLayout) -> tuple[int, ...]:
        """The row of each register of a tile, relative to the lane's first."""
        return layout.value_rows

    def reduce_lanes(self, combine: Callable[[Value, Value], Value]) -> RowVector:
        """Combine over the lanes that share a row."""
        return self.map(lambda x: reduce_lanes(x, combine, self.layout.row_mates))

    def rows(self) -> RowVector:
        """The i32 row index of each entry within the fragment (row tiles are stacked)."""
        first = evaluate(self.layout.row_lane, lane_of(self.layout.atom.lanes))
        return self._numbered(first, self.layout.rows)


@dataclass(frozen=True)
class ColumnVector(_Vector):
    """One value per column that a lane holds: `values[column_tile][slot]`."""

    @staticmethod
    def slots(layout: AccumulatorLayout) -> tuple[int, ...]:
        """The columns a lane holds in each tile, relative to its first."""
        return layout.column_slots

    @staticmethod
    def places(layout: AccumulatorLayout) -> tuple[int, ...]:
        """The column of each register of a tile, relative to the lane's first."""
        return layout.value_columns

    @staticmethod
    def load(
        layout: AccumulatorLayout,
        column_tiles: int,
        source: Tensor,
        first: Value | int = 0,
        *,
        fill: Number = 0,
        together: int = 1,
    ) -> ColumnVector:
        """Element `first` + c of a vector in global memory for each column c, of its dtype; `fill` past its end.

        `first` is not negative and the same for all lanes of a wave. `together`: `first` and the vector's length are
        multiples of so many elements; where a lane holds columns side by side, they are loaded at once.

        Raises:
            ShapeError: the source is no vector with unit stride, or `together` is no power of two.
        """
        if source.rank != 1 or not isinstance(source.stride[0], int) or source.stride[0] != 1:
            raise ShapeError(f"a column vector is loaded from a vector with unit stride, not {source!r}")
        if together <= 0 or together & (together - 1):
            raise ShapeError(f"together is {together}; expected a power of two")
        size, slots = source.dtype.bytes, layout.column_slots
        run = math.gcd(layout.run, together, max(1, source.alignment // size))
        count, lane_column = source.shape[0], layout.first_column()
        # not a clamp: LLVM makes that a vector instruction on AMD, and the bound is scalar
        valid = minimum(count - minimum(count, first), column_tiles * layout.columns)
        base, bound = source.at(first), valid * size

        def piece(column: int) -> Value:
            offset = (lane_column + column) * size
            return load_bounded(base, offset, bound, source.dtype, run, align=run * size)

        def tile(c: int) -> tuple[Value, ...]:
            columns = [c * layout.columns + slot for slot in slots]
            values = [value for column in columns[::run] for value in piece(column)]
            if fill == 0:
                return tuple(values)
            return tuple(select(lane_column + at < valid, x, fill) for at, x in zip(columns, values, strict=True))

        return ColumnVector(layout, tuple(tile(c) for c in range(column_tiles)))

    @staticmethod
    def load_shared(
        layout: AccumulatorLayout, column_tiles: int, pointer: Pointer, kind: DType, *, side_by_side: bool = True
    ) -> ColumnVector:
        """The element of each column, of a vector in shared memory that begins at `pointer`.

        `side_by_side`: it is aligned to as many elements as a lane has columns side by side, loaded at once.
        """
        run, size = layout.run if side_by_side else 1, kind.bytes
        lane = pointer.offset(layout.first_column() * size)

        def tile(c: int) -> tuple[Value, ...]:
            places = [(c * layout.columns + slot) * size for slot in layout.column_slots[::run]]
            loaded = [load(lane.offset(at), kind, run, align=run * size) for at in places]
            return tuple(value for piece in loaded for value in piece)

        return ColumnVector(layout, tuple(tile(c) for c in range(column_tiles)))

    def reduce_lanes(self, combine: Callable[[Value, Value], Value]) -> ColumnVector:
        """Combine over the lanes of a wave that share a column.

        Of a warpgroup's accumulators every warp has rows of its own: the results of its four warps are to be combined
        through memory.
        """
        wave_size = current().target.wave_size
        mates = [mate for mate in self.layout.column_mates if mate < wave_size]
        return self.map(lambda x: reduce_lanes(x, combine, mates))

    def columns(self) -> ColumnVector:
        """The i32 column index of each entry within the fragment (column tiles are side by side)."""
        return self._numbered(self.layout.first_column(), self.layout.columns)


@dataclass(frozen=True)
class Fragment:
    """A (row_tiles x column_tiles) grid of f32 accumulator tiles: `tiles[row_tile][column_tile]`."""

    layout: AccumulatorLayout
    tiles: tuple[tuple[Value, ...], ...]

    @staticmethod
    def zeros(layout: AccumulatorLayout, row_tiles: int, column_tiles: int) -> Fragment:
        if row_tiles <= 0 or column_tiles <= 0:
            raise ShapeError(f"a fragment needs at least one tile, not {row_tiles} x {column_tiles}")
        zero = constant(0.0, dtype(layout.atom.accumulator), layout.values)
        return Fragment(layout, tuple(tuple(zero for _ in range(column_tiles)) for _ in range(row_tiles)))

    @staticmethod
    def from_rows(layout: AccumulatorLayout, pieces: Sequence[Sequence[Sequence[Value]]]) -> Fragment:
        """Of every row's elements: `pieces[row_tile][slot][column_tile]` are those of `layout.slot_values[slot]`.

        They may be of another dtype than the accumulators.
        """
        held = [v for registers in layout.slot_values for v in registers]
        order = [held.index(v) for v in range(layout.values)]

        def tile(slots: Sequence[Value]) -> Value:
            joined = concat(slots)
            return from_registers(joined, tuple(order))

        return Fragment(layout, tuple(tuple(map(tile, zip(*row, strict=True))) for row in pieces))

    def map(self, function: Callable[[Value, int, int], Value]) -> Fragment:
        """`function(tile, row_tile, column_tile)` on every tile's vector."""
        return Fragment(
            self.layout,
            tuple(tuple(function(tile, r, c) for c, tile in enumerate(row)) for r, row in enumerate(self.tiles)),
        )

    def runs(self, columns_in_use: int | None = None) -> Iterator[tuple[Value, Value, Value]]:
        """(row, column, values) of every run of contiguous columns that the lane holds: what it can store at once.

        Rows and columns are i32 and count from the fragment's corner; `values` is a vector. Only runs below
        `columns_in_use` are given, which is a multiple of the columns that the lanes' runs span together.

        Raises:
            ShapeError: `columns_in_use` ends within what is stored at once.
        """
        layout = self.layout
        lane = lane_of(layout.atom.lanes)
        row0, column0 = evaluate(layout.row_lane, lane), evaluate(layout.column_lane, lane)
        rows, columns, starts = layout.value_rows, layout.value_columns, layout.run_starts
        length = layout.values // len(starts)
        span = max(layout.column_lane(lane) for lane in range(layout.atom.lanes)) + length
        end = len(self.tiles[0]) * layout.columns if columns_in_use is None else columns_in_use
        if end % span:
            raise ShapeError(f"{end} columns of a fragment in use; expected a multiple of {span}")
        for r, row in enumerate(self.tiles):
            for c, tile in enumerate(row):
                for v in (v for v in starts if c * layout.columns + columns[v] < end):
                    at_row, at_column = r * layout.rows + rows[v], c * layout.columns + columns[v]
                    yield row0 + at_row, column0 + at_column, tile[v : v + length]

    def spread(self, vector: RowVector | ColumnVector, tile: int) -> Value:
        """A row vector's (column vector's) values of its `tile` laid out like one of this fragment's tiles."""
        slots = vector.values[tile]
        if len(slots) == 1:
            return broadcast(slots[0], self.layout.values)
        index = {slot: i for i, slot in enumerate(vector.slots(self.layout))}
        return from_elements([slots[index[place]] for place in vector.places(self.layout)])

    def map_columns(self, function: Callable[..., Value], *columns: ColumnVector) -> Fragment:
        """`function(elements, *columns)` on every tile's vectors; the columns' values come spread over the tile."""
        spread = [[self.spread(x, c) for x in columns] for c in range(len(self.tiles[0]))]
        return self.map(lambda tile, r, c: function(tile, *spread[c]))

    def scale_rows(self, rows: RowVector) -> Fragment:
        """Every row times its factor."""
        factors = [self.spread(rows, r) for r in range(len(self.tiles))]
        return self.map(lambda tile, r, c: tile * factors[r])

    def fma_rows(self, scale: Value | RowVector, rows: RowVector) -> Fragment:
        """element * scale + its row's value; the scale is one number, or each row's own."""
        addends = [self.spread(rows, r) for r in range(len(self.tiles))]
        if isinstance(scale, RowVector):
            scales = [self.spread(scale, r) for r in range(len(self.tiles))]
        else:
            scales = [broadcast(scale, self.layout.values)] * len(self.tiles)
        return self.map(lambda tile, r, c: fma(tile, scales[r], addends[r]))

    def row_max(self) -> RowVector:
        """Each row's maximum over the columns that the lane itself holds."""
        return RowVector(self.layout, _maxima(self.tiles, self.layout.slot_values))

    def row_sum(self) -> RowVector:
        """Each row's sum over the columns that the lane itself holds."""
        return RowVector(self.layout, _sums(self.tiles, self.layout.slot_values))

    def column_max(self) -> ColumnVector:
        """Each column's maximum over the rows that the lane itself holds."""
        return ColumnVector(self.layout, _maxima(zip(*self.tiles), self.layout.column_slot_values))

    def column_sum(self) -> ColumnVector:
        """Each column's sum over the rows that the lane itself holds."""
        return ColumnVector(self.layout, _sums(zip(*self.tiles), self.layout.column_slot_values))

    def map_places(
        self,
        rows: RowVector,
        function: Callable[..., Value],
        *more: RowVector,
        first_column: Value | int = 0,
        others: Sequence[Fragment] = (),
    ) -> Fragment:
        """`function(elements, rows, columns, *more, *others)` on every tile's vectors.

        `rows` and `more` have a number for each row; their elements come spread over the tile. Columns are i32, of
        which the fragment's first is `first_column`. `others`: fragments of the same tiles.
        """
        layout = self.layout
        # one sum, then constants: a loop over columns has nothing here to keep in registers from turn to turn
        first = broadcast(layout.first_column() + first_column, layout.values)
        spread = [[self.spread(x, r) for x in (rows, *more)] for r in range(len(self.tiles))]

        def at(tile: Value, r: int, c: int) -> Value:
            columns = _static_vector([c * layout.columns + column for column in layout.value_columns])
            beside = (other.tiles[r][c] for other in others)
            return function(tile, spread[r][0], columns + first, *spread[r][1:], *beside)

        return self.map(at)

    def add_distances(self, positions: RowVector, factors: RowVector) -> Fragment:
        """Elements plus |column - their row's i32 position| times their row's f32 factor.

        Distances below 2**24 are exact.
        """
        layout = self.layout
        lane_column = layout.first_column()
        # one conversion a row: those of every element would take as long as exponentials
        first = positions.map(lambda position: (lane_column - position).to(f32))
        distances, spread = ([self.spread(x, r) for r in range(len(self.tiles))] for x in (first, factors))

        def add(tile: Value, r: int, c: int) -> Value:
            offset = c * layout.columns
            if offset and layout.values >= 16:
                # a sum a tile, so that large tiles share their constants: each would take a scalar register
                distance, offset = distances[r] + float(offset), 0
            else:
                distance = distances[r]
            columns = _static_vector([offset + column for column in layout.value_columns], f32)
            return fma(absolute(columns + distance), spread[r], tile)

        return self.map(add)

    def keep_columns_below(
        self,
        limits: RowVector | None,
        fill: float,
        between: Callable[[], None] | None = None,
        starts: RowVector | None = None,
        scarce: bool = False,
    ) -> Fragment:
        """Elements whose column index is below their row's i32 limit; `fill` elsewhere, and below the row's start.

        None for limits or starts leaves that side open.

        `between()` is called after the comparisons and after the selections of every tile, with both bounds of every
        half: a line for the scheduler, where a selection should not follow its comparison at once. `scarce`: of every
        half with limits alone too, and with one comparison an element, for loops that are short of scalar registers.
        """
        layout = self.layout
        lane_column = layout.first_column()

        def spread(bounds: RowVector | None) -> list[Value] | None:
            if bounds is None:
                return None
            return [self.spread(bounds.map(lambda x: x - lane_column), r) for r in range(len(self.tiles))]

        remaining, skipped = spread(limits), spread(starts)
        # AMD's comparisons take two scalar registers each: one of a column's distance from the start is enough
        lengths: list[Value] | None = None
        once = (between is None or scarce) and current().target.backend == "rocdl"
        if limits is not None and starts is not None and once:
            length = limits.map(lambda limit, start: maximum(limit - start, 0), starts)
            lengths = [self.spread(length, r) for r in range(len(self.tiles))]
        in_halves = remaining is not None and (scarce or (skipped is not None and lengths is None))
        half = layout.values // 2

        def keep(elements: Value, seen: Value) -> Value:
            if between is None:
                return select(seen, elements, fill)
            between()
            kept = select(seen, elements, fill)
            between()
            return kept

        def bound(bounds: list[Value], r: int, held: slice | None) -> Value:
            if held is None:
                return bounds[r]
            one = scarce and len(layout.slots) == 1  # of a splat a splat
            return broadcast(bounds[r][held.start], half) if one else bounds[r][held]

        def seen(columns: Value, r: int, held: slice | None) -> Value:
            def here() -> Value:
                return columns if held is None else columns[held]

            if skipped is None:
                assert remaining is not None
                return here() < bound(remaining, r, held)
            if remaining is None:
                return here() >= bound(skipped, r, held)
            if lengths is not None:
                return compare("ult", here() - bound(skipped, r, held), bound(lengths, r, held))
            return (here() < bound(remaining, r, held)) & (here() >= bound(skipped, r, held))

        def mask(tile: Value, r: int, c: int) -> Value:
            if remaining is None and skipped is None:
                return tile
            columns = _static_vector([c * layout.columns + column for column in layout.value_columns])
            if not in_halves:
                return keep(tile, seen(columns, r, None))
            parts = slice(0, half), slice(half, layout.values)
            return concat([keep(tile[part], seen(columns, r, part)) for part in parts])

        return self.map(mask)


Slots = tuple[tuple[int, ...], ...]  # the registers of each slot


def _maxima(lines: Iterable[Sequence[Value]], slots: Slots) -> tuple[tuple[Value, ...], ...]:
    """Of every line of tiles, each slot's maximum."""
    return tuple(
        tuple(reduce_max(concat([from_registers(tile, registers) for tile in line])) for registers in slots)
        for line in lines
    )


def _sums(lines: Iterable[Sequence[Value]], slots: Slots) -> tuple[tuple[Value, ...], ...]:
    """Of every line of tiles, each slot's sum."""
    result = []
    for line in lines:
        tiles = list(line)
        while len(tiles) > 1:  # tiles against each other first: whole vectors at a time
            pairs = [a + b for a, b in zip(tiles[::2], tiles[1::2], strict=False)]
            tiles = pairs + tiles[len(pairs) * 2 :]
        result.append(tuple(reduce_sum(from_registers(tiles[0], registers)) for registers in slots))
    return tuple(result)


def from_registers(tile: Value, registers: tuple[int, ...]) -> Value:
    """The chosen registers of a tile as a vector."""
    from fly.ir.value import shuffle

    return tile if registers == tuple(range(len(tile))) else shuffle(tile, tile, registers)


def _static_vector(numbers: list[int], dtype: DType = i32) -> Value:
    """A constant vector of i32 or f32."""
    attribute = _dense(tuple(numbers), dtype)
    op = emit("arith.constant", [], [dtype.vector(len(numbers))], {"value": attribute})
    return Value(op.results[0], dtype, len(numbers))


@functools.cache
def _dense(numbers: tuple[int, ...], dtype: DType) -> ir.Attribute:
    attribute = ir.IntegerAttr if dtype is i32 else ir.FloatAttr
    with context(), ir.Location.unknown():
        elements = [attribute.get(dtype.mlir, n) for n in numbers]
        return ir.DenseElementsAttr.get(elements, dtype.vector(len(numbers)))
