"""Dropout of a tile of scores: the decisions on the lanes' accumulators, each Philox call made once by one lane.

Of the 32 positions of a call (see `dropout.py`), which differ in some bits of rows and columns, a lane holds those
whose bits are numbers of its registers. Where one of these bits is a bit of the lane's index, lanes share calls: xor
4 and 1 in accumulators of `mma.sync` and of WGMMA whose rows are queries, 4 and 8 where they are keys, two to four
such bits in those of MFMA. These lanes split the calls that they all need, make a word of 32 decisions of each, and
swap words, one such bit of the index after the other. What is a lane's own of a word begins at a bit of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import fly
from fly.errors import AtomError

from .dropout import ROUNDS, RandomHead, key_number, key_place, query_number, query_place

Side = Literal["rows", "columns"]
SIDES: tuple[Side, Side] = ("columns", "rows")  # in the order in which their calls are shared


@dataclass(frozen=True)
class Mate:
    """A bit of the lane's index that is a bit of the position in a call.

    `shares`: the bit of the call's index that the two lanes split, or None where each makes all calls that it needs.
    """

    lane_bit: int
    shares: tuple[Side, int] | None = None


@dataclass(frozen=True)
class Plan:
    """Who makes which call: of an accumulator layout, numbers of tiles, and the side that queries are on.

    `rows`, `columns`: numbers of calls (`query_number`, `key_number`) that a lane needs, from its own first on; the
    calls are all their pairs. `row_lane`, `column_lane`: the first that it makes, for each lane; `place`: the part of
    places in calls that each lane has. `mates`: those that share first.
    """

    queries: Side
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_lane: tuple[int, ...]
    column_lane: tuple[int, ...]
    place: tuple[int, ...]
    mates: tuple[Mate, ...]

    def made(self, side: Side) -> list[tuple[int, int]]:
        """(index, number) of the rows or columns of calls that a lane makes: shared bits of the index are 0."""
        numbers = self.rows if side == "rows" else self.columns
        shared = sum(1 << mate.shares[1] for mate in self.mates if mate.shares and mate.shares[0] == side)
        return [(i, number) for i, number in enumerate(numbers) if not i & shared]

    def number(self, side: Side, position: int) -> int:
        """Of a row's or column's call."""
        return query_number(position) if side == self.queries else key_number(position)

    def place_of(self, row: int, column: int) -> int:
        """Of a row and column, the place in their call."""
        query, key = (row, column) if self.queries == "rows" else (column, row)
        return query_place(query) | key_place(key)


def _sharing(numbers: Sequence[int]) -> Iterator[int]:
    """Bits of the index of a call's row or column whose two values are, in all of them, the same distance apart."""
    bit = 0
    while len(numbers) % (2 << bit) == 0:
        ones = [i for i in range(len(numbers)) if i >> bit & 1]
        if len({numbers[i] - numbers[i ^ 1 << bit] for i in ones}) != 1:
            return
        yield bit
        bit += 1


@functools.lru_cache(maxsize=64)
def plan(layout: fly.AccumulatorLayout, row_tiles: int, column_tiles: int, queries: Side, shared: bool) -> Plan:
    """The plan for a fragment; `shared`: lanes split the calls that they have in common.

    Raises:
        AtomError: a layout whose rows or columns are not made of bits of lanes and registers.
    """
    lanes = range(layout.atom.lanes)
    lane = {"rows": [layout.row_lane(i) for i in lanes], "columns": [layout.column_lane(i) for i in lanes]}
    held = {
        "rows": {tile * layout.rows + place for tile in range(row_tiles) for place in layout.value_rows},
        "columns": {tile * layout.columns + place for tile in range(column_tiles) for place in layout.value_columns},
    }
    for side in SIDES:
        if any(of_lane & place for of_lane in lane[side] for place in held[side]):
            raise AtomError(f"{layout}: {side} are not made of bits of lanes and registers")
    empty = Plan(queries, (), (), (), (), (), ())
    numbers = {side: tuple(sorted({empty.number(side, place) for place in held[side]})) for side in SIDES}
    places = [empty.place_of(row, column) for row, column in zip(lane["rows"], lane["columns"], strict=True)]
    bits = [1 << bit for bit in range((len(lanes) - 1).bit_length()) if places[1 << bit]]
    free = [(side, bit) for side in SIDES for bit in _sharing(numbers[side])] if shared else []
    mates = tuple(itertools.starmap(Mate, itertools.zip_longest(bits, free[: len(bits)])))

    def first(side: Side) -> tuple[int, ...]:
        """The number of a lane's first call: of those that it shares, the one that it makes."""
        own = [
            (mate.lane_bit, numbers[side][1 << mate.shares[1]] - numbers[side][0])
            for mate in mates
            if mate.shares and mate.shares[0] == side
        ]
        return tuple(empty.number(side, lane[side][i]) + sum(step for bit, step in own if i & bit) for i in lanes)

    return Plan(queries, numbers["rows"], numbers["columns"], first("rows"), first("columns"), tuple(places), mates)


Index = tuple[int, int]  # of a call: of its row and of its column, in a plan


@dataclass(frozen=True)
class DecidedTile:
    """What dropout decides on a fragment's elements: `words` of decisions by indices of calls.

    `first`: the bit at which what is the lane's own begins.
    """

    made: Plan
    words: dict[Index, fly.Value]
    first: fly.Value

    def place(self, row: int, column: int) -> tuple[Index, int]:
        """The word of an element, by its place relative to the lane's first, and which bit it is from `first` on."""
        made = self.made
        index = made.rows.index(made.number("rows", row)), made.columns.index(made.number("columns", column))
        return index, made.place_of(row, column)


def decided_tile(
    layout: fly.AccumulatorLayout,
    row_tiles: int,
    column_tiles: int,
    first_row: Any,
    first_column: Any,
    head: RandomHead,
    dropped: fly.Value | int,
    *,
    queries: Side = "rows",
    rounds: int = ROUNDS,
    shared: bool = True,
) -> DecidedTile:
    """The decisions on a fragment of so many tiles; see `keep_tile`."""
    made = plan(layout, row_tiles, column_tiles, queries, shared)
    lane = fly.lane_of(layout.atom.lanes)
    row, column = (
        # a multiple of 16, whose number in calls has fewer bits
        (first >> (2 if side == queries else 3)) + fly.lane_map(table, lane)
        for side, first, table in (("rows", first_row, made.row_lane), ("columns", first_column, made.column_lane))
    )
    words = {}
    for (r, row_step), (c, column_step) in itertools.product(made.made("rows"), made.made("columns")):
        query, key = _by_queries(made, row + row_step, column + column_step)
        words[r, c] = head.decisions(query, key, dropped, rounds)
    for mate in made.mates:
        if mate.shares is not None:
            words = _swapped(words, mate.lane_bit, *mate.shares, (lane & mate.lane_bit) != 0)
    return DecidedTile(made, words, fly.lane_map(made.place, lane))


def _swapped(
    words: dict[Index, fly.Value], lane_bit: int, side: Side, bit: int, ones: fly.Value
) -> dict[Index, fly.Value]:
    """Each word twice: that of the lane whose bit is 0, and of the one whose bit is 1, which has another index."""
    found = {}
    for (r, c), own in words.items():
        other = fly.shuffle_xor(own, lane_bit)
        found[r, c] = fly.select(ones, other, own)
        found[(r | 1 << bit, c) if side == "rows" else (r, c | 1 << bit)] = fly.select(ones, own, other)
    return found


def as_word(bits: int) -> int:
    """32 bits as the i32 that they are."""
    return bits - (bits >> 31 << 32)


def keep_tile(
    like: fly.Fragment,
    first_row: Any,
    first_column: Any,
    head: RandomHead,
    dropped: fly.Value | int,
    *,
    queries: Side = "rows",
    rounds: int = ROUNDS,
    shared: bool = True,
) -> fly.Fragment:
    """Which elements dropout keeps, i1, laid out as `like`: what `RandomHead.keeps` says of each.

    first_row, first_column: i32 positions of the fragment's corner in its sequences, multiples of 16; dropped: the
    threshold; queries: whether these are the rows (the keys the columns) or the other way around. `shared`: lanes
    that need the same calls split them and swap words, so that all lanes of the wave must come here together; else
    each makes all that it needs, which is two to eight times the arithmetic.
    """
    layout, tiles = like.layout, (len(like.tiles), len(like.tiles[0]))
    corner = first_row, first_column
    decided = decided_tile(layout, *tiles, *corner, head, dropped, queries=queries, rounds=rounds, shared=shared)
    own = {index: word >> decided.first for index, word in decided.words.items()}

    def bit(row: int, column: int) -> fly.Value:
        index, number = decided.place(row, column)
        return own[index] & as_word(1 << number)

    def tile(_: fly.Value, r: int, c: int) -> fly.Value:
        places = zip(layout.value_rows, layout.value_columns, strict=True)
        return fly.from_elements([bit(r * layout.rows + i, c * layout.columns + j) for i, j in places]) != 0

    return like.map(tile)


def _by_queries(made: Plan, row: fly.Value, column: fly.Value) -> tuple[fly.Value, fly.Value]:
    return (row, column) if made.queries == "rows" else (column, row)


def kept_share(dropped: fly.Value) -> fly.Value:
    """The share of the weights that is kept, f32, of the threshold, i32."""
    share: fly.Value = (256 - dropped).to(fly.f32) * (1 / 256)
    return share


@dataclass(frozen=True)
class Dropout:
    """What dropout does to a head's weights: its random numbers, and `dropped`, the threshold, i32."""

    random: RandomHead
    dropped: fly.Value

    def kept(self, like: fly.Fragment, first_query: Any, first_key: Any) -> fly.Fragment:
        """Which of a tile's weights are kept, i1: rows are queries; see `keep_tile`."""
        return keep_tile(like, first_query, first_key, self.random, self.dropped)

    def decided(
        self,
        layout: fly.AccumulatorLayout,
        first_row: Any,
        first_column: Any,
        queries: Side = "rows",
        tiles: tuple[int, int] = (1, 1),
    ) -> DecidedTile:
        """What is decided on weights, for kernels that make masks of it (`work/kept_pairs.py`); see `keep_tile`."""
        return decided_tile(layout, *tiles, first_row, first_column, self.random, self.dropped, queries=queries)

    def drop(self, weights: fly.Fragment, first_query: Any, first_key: Any) -> fly.Fragment:
        """Weights, 0 where they are not kept; their scale is left to the end (`BoundFeatures.scale_kept`)."""
        return only(self.kept(weights, first_query, first_key), weights)


def only(kept: fly.Fragment, weights: fly.Fragment) -> fly.Fragment:
    """Weights that are kept, and 0 for others."""
    return weights.map(lambda x, r, c: fly.select(kept.tiles[r][c], x, 0.0))
