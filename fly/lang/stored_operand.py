"""Accumulators on their way through shared memory to the next product, where they are no operand as they are.

`plan_stored_operand` looks for a tile that the fragment's stores and the operand's loads both address without bank
conflicts: which runs stay together, how rows move them, whether the tile is stored turned, and whether lanes trade
pieces first so that each stores 16 bytes at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fly.errors import DTypeError, LayoutError, ShapeError
from fly.ir import memory
from fly.ir.context import current
from fly.ir.dtypes import i32
from fly.ir.value import Value, from_elements
from fly.lang.atoms import MatrixLoad, MmaAtom
from fly.lang.banks import bank_conflicts
from fly.lang.fragment import AccumulatorLayout, Fragment, from_registers
from fly.lang.lane_address import LaneAddress
from fly.lang.lanes import linear_layout
from fly.lang.operand import OperandLoader, OperandPlan, operand_coordinates, plan_operand
from fly.lang.shared import SharedTile, SwizzledTile
from fly.lang.sync import swap_lanes
from fly.layout import Layout

_BYTES = 2  # of an element
_GRANULES = (8, 4)  # elements of the runs that a swizzle may keep together


@dataclass(frozen=True)
class Runs:
    """What a lane stores at once of an accumulator tile, or of two that are neighbours along the columns.

    `registers[i]` is run i: its tile, and the registers whose elements are contiguous in the stored tile. The first
    of them lies at the lane's (row, column) plus `places[i]`. With `swap`, run 2 i and run 2 i + 1 change places in
    the lane and in its partner, whose index differs in the bits of `swap`, and together are one run of twice the
    length at `places[i]`.
    """

    registers: tuple[tuple[int, tuple[int, ...]], ...]
    places: tuple[tuple[int, int], ...]
    row: Layout
    column: Layout
    swap: int = 0

    @property
    def length(self) -> int:
        """Elements that are stored at once."""
        return len(self.registers[0][1]) * (2 if self.swap else 1)

    @property
    def tiles(self) -> int:
        """Accumulator tiles whose runs these are."""
        return 1 + max(tile for tile, _ in self.registers)


def _along(source: AccumulatorLayout, turned: bool, lane: int, tile: int, value: int) -> tuple[int, int]:
    """(row, column) in the stored tile of a register of accumulator tile `tile`, counted along the columns."""
    row, column = source.coordinate(lane, value)
    column += tile * source.columns
    return (column, row) if turned else (row, column)


def _plain_runs(source: AccumulatorLayout, turned: bool, tiles: int) -> Runs:
    """The longest runs, of up to 16 bytes, that every lane holds."""
    lanes = range(source.atom.lanes)
    held = {_along(source, turned, 0, t, v): (t, v) for t in range(tiles) for v in range(source.values)}
    starts = [_along(source, turned, lane, 0, 0) for lane in lanes]
    row, column = (linear_layout([start[axis] for start in starts]) for axis in (0, 1))
    aligned = math.gcd(8, source.rows if turned else source.columns, *(c for _, c in starts))
    for length in (1 << bit for bit in reversed(range(aligned.bit_length()))):
        firsts = sorted((r, c) for r, c in held if c % length == 0)
        if all((r, c - c % length + i) in held for r, c in held for i in range(length)):
            registers = [(held[r, c][0], tuple(held[r, c + i][1] for i in range(length))) for r, c in firsts]
            return Runs(tuple(registers), tuple(firsts), row, column)
    raise AssertionError("runs of one element are always there")


def _swapped(runs: Runs, swap: int) -> Runs | None:
    """The same runs after lanes have traded half of them, if that makes runs of twice the length."""
    length, lanes = runs.length, runs.row.size
    pairs = list(zip(runs.places[::2], runs.places[1::2]))
    apart = {(second[0] - first[0], second[1] - first[1]) for first, second in pairs}
    partner = runs.row(swap), runs.column(swap)
    if 2 * length * _BYTES > 16 or len(runs.places) % 2 or partner != (0, length) or len(apart) != 1:
        return None
    ((rows, step),) = apart
    if rows or step % (2 * length) or step & (step - 1):
        return None
    row = linear_layout([runs.row(lane & ~swap) for lane in range(lanes)])
    column = linear_layout([runs.column(lane & ~swap) + (step if lane & swap else 0) for lane in range(lanes)])
    return Runs(runs.registers, tuple(first for first, _ in pairs), row, column, swap)


def _candidates(source: AccumulatorLayout, turned: bool, tiles: int, swaps: Sequence[int]) -> Iterator[Runs]:
    """Ways to store a row of accumulator tiles, longest runs first."""
    for together in (t for t in (1, 2) if tiles % t == 0):
        runs = _plain_runs(source, turned, together)
        for swap in swaps:
            if (longer := _swapped(runs, swap)) is not None:
                yield longer
    yield _plain_runs(source, turned, 1)


@dataclass(frozen=True)
class StoredOperand:
    """A fragment's place in shared memory, and how `operand` ("a" or "b") of `atom` is loaded from there.

    `layout` is the tile's, whose rows are the fragment's columns where it is `turned`. `transposed`: the operand's k
    runs along the tile's rows.
    """

    source: AccumulatorLayout
    atom: MmaAtom
    operand: str
    layout: SwizzledTile
    turned: bool
    transposed: bool
    runs: Runs
    plan: OperandPlan

    def loader(self) -> OperandLoader:
        """Loads the operand: `loader.load(tile, *stored.place(outer, k))`."""
        return OperandLoader(self.plan, self.layout)

    def place(self, outer: int, k: int) -> tuple[int, int]:
        """(row, column) in the tile of an element of the operand."""
        return (k, outer) if self.transposed else (outer, k)


def store_conflicts(layout: SwizzledTile, runs: Runs) -> int:
    """Cycles that a store of one run of every lane takes in the banks beyond what it must."""
    lanes = range(runs.row.size)
    return bank_conflicts([_BYTES * layout(runs.row(i), runs.column(i)) for i in lanes], _BYTES * runs.length)


def load_conflicts(layout: SwizzledTile, plan: OperandPlan, banks: int = 32) -> int:
    """The same of the loads of one operand."""
    total = 0
    for step in plan.steps:
        places = (
            (step.row(i) + step.row_offset, step.column(i) + step.column_offset) for i in range(plan.load.lanes)
        )
        total += bank_conflicts([_BYTES * layout(*place) for place in places], _BYTES * plan.load.run, banks)
    return total


def plan_stored_operand(
    source: AccumulatorLayout,
    shape: tuple[int, int],
    atom: MmaAtom,
    operand: str,
    outer: str,
    read_banks: int = 32,
) -> StoredOperand:
    """How accumulators of `shape` (rows, columns), narrowed to 16 bits, become an operand through shared memory.

    The first way that the target's loads can fetch and that has no bank conflicts, neither in the stores nor in the
    loads, by the model of `fly.lang.banks` with so many `read_banks` for these. Operand "a" or "b" of `atom` has its
    outer (m or n) dimension along the fragment's `outer`, "rows" or "columns", and its k along the other.

    Raises:
        ShapeError: the shape is no multiple of the source's tiles and of the operand's, or `outer` is something else.
        LayoutError: there is no such way.
    """
    if outer not in ("rows", "columns"):
        raise ShapeError(f"outer is {outer!r}; expected 'rows' or 'columns'")
    rows, columns = shape
    extent = atom.m if operand == "a" else atom.n
    steps = (extent, atom.k) if outer == "rows" else (atom.k, extent)
    for what, number, multiples in (
        ("rows", rows, (source.rows, steps[0])),
        ("columns", columns, (source.columns, steps[1])),
    ):
        if number <= 0 or any(number % multiple for multiple in multiples):
            raise ShapeError(f"{number} {what} of a stored fragment; expected a multiple of {max(multiples)}")
    target = current().target
    loads, swaps = tuple(target.matrix_loads), tuple(target.lane_swaps)
    return _plan(source, shape, atom, operand, outer, loads, swaps, read_banks)


@functools.lru_cache(maxsize=256)
def _plan(
    source: AccumulatorLayout,
    shape: tuple[int, int],
    atom: MmaAtom,
    operand: str,
    outer: str,
    loads: tuple[MatrixLoad, ...],
    swaps: tuple[int, ...],
    banks: int = 32,
) -> StoredOperand:
    ways = []
    for turned in (False, True):
        transposed = (outer == "columns") != turned
        extents = shape[::-1] if turned else shape
        want = operand_coordinates(atom, operand, transposed)
        plans = [plan_operand([load], want, atom.values(operand)) for load in loads]
        tiles = shape[1] // source.columns
        for runs, plan in itertools.product(_candidates(source, turned, tiles, swaps), plans):
            if plan is not None:
                ways.append((turned, transposed, extents, runs, plan))
    # the fewest stores first, then the fewest loads; the sort is stable
    ways.sort(key=lambda way: (-way[3].length, -way[4].load.values))
    for turned, transposed, extents, runs, plan in ways:
        for layout in _layouts(extents, max(runs.length, plan.load.run)):
            if not store_conflicts(layout, runs) and not load_conflicts(layout, plan, banks):
                return StoredOperand(source, atom, operand, layout, turned, transposed, runs, plan)
    raise LayoutError(
        f"no shared tile takes {shape[0]} x {shape[1]} accumulators of {source} and gives operand {operand} of "
        f"{atom.name} along their {outer} without bank conflicts"
    )


def _layouts(extents: tuple[int, int], together: int) -> Iterator[SwizzledTile]:
    """Swizzles that keep runs of `together` elements."""
    rows, columns = extents
    for granule in (g for g in _GRANULES if g >= together and columns % g == 0):
        for rotate in range(SwizzledTile(rows, columns, granule).field.bit_length() - 1 or 1):
            yield SwizzledTile(rows, columns, granule, rotate=rotate)


class FragmentStore:
    """Stores fragments of one layout into tiles; the lanes' address is computed once, when this is made.

    `first`: traced (row, column) of the fragment in a larger stored tile, such as a wave's part of it, in multiples
    of the tile's `row_period` and of 64 columns, counted as the tile is stored.
    """

    def __init__(self, stored: StoredOperand, first: tuple[Value, Value] | None = None):
        self.stored = stored
        self._address = LaneAddress(stored.layout, stored.runs.row, stored.runs.column, first)

    def store(self, fragment: Fragment, tile: SharedTile) -> None:
        """Store a fragment; a `fly.barrier()` comes before other waves' loads.

        Raises:
            DTypeError: the fragment is not of the tile's dtype, which has 16 bits.
            ShapeError: it is of another layout, or its tiles are no multiple of what lanes trade.
        """
        stored, runs = self.stored, self.stored.runs
        source = stored.source
        if fragment.layout != source:
            raise ShapeError(f"the store is for fragments of {source}, not of {fragment.layout}")
        for r, row in enumerate(fragment.tiles):
            self._check(row[0], tile)
            if len(row) % runs.tiles:
                raise ShapeError(f"{len(row)} tiles in a row of the fragment; expected a multiple of {runs.tiles}")
            for c in range(0, len(row), runs.tiles):
                for place, piece in zip(runs.places, _pieces(runs, row[c : c + runs.tiles])):
                    self._store(piece, tile, r, c, place)

    def store_run(self, values: Value, tile: SharedTile, row_tile: int, first: int) -> None:
        """Store some neighbouring registers of a fragment's first tile in a row, or one, from number `first` on.

        Raises:
            DTypeError: as `store`.
            ShapeError: these registers are not what a lane stores at once, without trading with others.
        """
        self._check(values, tile)
        runs, wanted = self.stored.runs, tuple(range(first, first + (values.length or 1)))
        held = [registers for of_tile, registers in runs.registers if of_tile == 0]
        if runs.swap or wanted not in held:
            raise ShapeError(f"registers {wanted} are not stored at once; a lane stores {held}, swap {runs.swap}")
        self._store(values, tile, row_tile, 0, runs.places[runs.registers.index((0, wanted))])

    @staticmethod
    def _check(values: Value, tile: SharedTile) -> None:
        if values.dtype is not tile.dtype or tile.dtype.bits != 16:
            raise DTypeError(f"cannot store a fragment of {values.dtype} into a tile of {tile.dtype}; narrow it")

    def _store(self, values: Value, tile: SharedTile, r: int, c: int, place: tuple[int, int]) -> None:
        source, turned = self.stored.source, self.stored.turned
        row, column = _along(source, turned, 0, c, 0)
        if turned:
            column += r * source.rows
        else:
            row += r * source.rows
        address = self._address.of(tile, row + place[0], column + place[1])
        memory.store(values, address, align=self.stored.runs.length * _BYTES)


def _pieces(runs: Runs, tiles: Sequence[Value]) -> Iterator[Value]:
    """The vectors that a lane stores, in the order of `runs.places`."""
    own = [from_registers(tiles[tile], registers) for tile, registers in runs.registers]
    if not runs.swap:
        yield from own
        return
    for first, second in zip(own[::2], own[1::2]):
        pairs = [swap_lanes(a, b, runs.swap) for a, b in zip(first.bitcast(i32), second.bitcast(i32), strict=True)]
        words = [pair[side] for side in (0, 1) for pair in pairs]
        yield from_elements(words).bitcast(first.dtype)
