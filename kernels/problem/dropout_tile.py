"""Dropout of a tile of scores: the decisions on the lanes' accumulators, each Philox call made once by one lane.

Of the 32 positions of a call (see `dropout.py`), which differ in some bits of rows and columns, a lane holds those
whose bits are numbers of its registers. Where one of these bits is a bit of the lane's index, lanes share calls: xor
4 and 1 in accumulators of `mma.sync` and of WGMMA whose rows are queries, 4 and 8 where they are keys, two to four
such bits in those of MFMA. These lanes split the calls that they all need, and make a word of 32 decisions of each.
Then lanes that differ in such a bit swap halves of words, one bit of the index after the other: of two lanes, each
keeps the half of its word that has its own bit, and gets that half of the other's in the place of what it sent. So a
lane has one word of the decisions on what it holds, of all the calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import fly
from fly.backends.nvvm.intrinsics import permute_bytes
from fly.errors import AtomError

from .dropout import ROUNDS, WORD, RandomHead, key_number, key_place, query_number, query_place

Side = Literal["rows", "columns"]
SIDES: tuple[Side, Side] = ("columns", "rows")  # in the order in which their calls are shared


@dataclass(frozen=True)
class Mate:
    """A bit of the lane's index that is a bit of the position in a call.

    `place`: that bit. `shares`: the bit of the call's index that the two lanes split, or None where each makes all
    calls that it needs.
    """

    lane_bit: int
    place: int
    shares: tuple[Side, int] | None = None


@dataclass(frozen=True)
class Plan:
    """Who makes which call: of an accumulator layout, numbers of tiles, and the side that queries are on.

    `rows`, `columns`: numbers of calls (`query_number`, `key_number`) that a lane needs, from its own first on; the
    calls are all their pairs, and some that nobody needs may be among them. `row_lane`, `column_lane`: the first that
    it makes, for each lane. `mates`: those that share first.
    """

    queries: Side
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_lane: tuple[int, ...]
    column_lane: tuple[int, ...]
    mates: tuple[Mate, ...]

    def made(self, side: Side) -> list[tuple[int, int]]:
        """(index, number) of the rows or columns of calls that a lane makes: shared bits of the index are 0."""
        numbers = self.rows if side == "rows" else self.columns
        shared = sum(1 << mate.shares[1] for mate in self.mates if mate.shares and mate.shares[0] == side)
        return [(i, number) for i, number in enumerate(numbers) if not i & shared]

    @property
    def calls(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """`made` of the row and of the column of each call that a lane makes, in the order of words."""
        return itertools.product(self.made("rows"), self.made("columns"))


def _number(queries: Side, side: Side, position: int) -> int:
    """Of a row's or column's call."""
    number: int = query_number(position) if side == queries else key_number(position)
    return number


def _place(queries: Side, row: int, column: int) -> int:
    """Of a row and column, the place in their call."""
    query, key = _by_queries(queries, row, column)
    place: int = query_place(query) | key_place(key)
    return place


def _by_queries(queries: Side, row: Any, column: Any) -> tuple[Any, Any]:
    """What is the query's of a row's and a column's, and what the key's."""
    return (row, column) if queries == "rows" else (column, row)


def _sharing(numbers: Sequence[int]) -> Iterator[int]:
    """Bits of the index of a call's row or column whose two values are, in all of them, the same distance apart."""
    bit = 0
    while len(numbers) % (2 << bit) == 0:
        ones = [i for i in range(len(numbers)) if i >> bit & 1]
        if len({numbers[i] - numbers[i ^ 1 << bit] for i in ones}) != 1:
            return
        yield bit
        bit += 1


def _extended(numbers: tuple[int, ...], mates: int) -> tuple[int, ...]:
    """Numbers of calls, and of some that nobody needs if lanes that share by so many bits then make fewer of them."""
    count, steps = len(numbers), {b - a for a, b in itertools.pairwise(numbers)}
    most = min(count & -count, 1 << mates)  # lanes that share as it is
    rounds = -(-count >> mates)  # rounded up
    if len(steps) != 1 or rounds >= count // most:
        return numbers
    (step,) = steps
    return tuple(range(numbers[0], numbers[0] + (rounds << mates) * step, step))


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
    numbers = {side: tuple(sorted({_number(queries, side, place) for place in held[side]})) for side in SIDES}
    places = [_place(queries, row, column) for row, column in zip(lane["rows"], lane["columns"], strict=True)]
    bits = [(1 << bit, places[1 << bit]) for bit in range((len(lanes) - 1).bit_length()) if places[1 << bit]]
    free: list[tuple[Side, int]] = []
    for side in SIDES if shared else ():
        left = len(bits) - len(free)
        numbers[side] = _extended(numbers[side], left)
        free.extend((side, bit) for bit in itertools.islice(_sharing(numbers[side]), left))
    mates = tuple(Mate(bit, place, shares) for (bit, place), shares in itertools.zip_longest(bits, free))

    def first(side: Side) -> tuple[int, ...]:
        """The number of a lane's first call: of those that it shares, the one that it makes."""
        own = [
            (mate.lane_bit, numbers[side][1 << mate.shares[1]] - numbers[side][0])
            for mate in mates
            if mate.shares and mate.shares[0] == side
        ]
        return tuple(_number(queries, side, lane[side][i]) + sum(step for bit, step in own if i & bit) for i in lanes)

    return Plan(queries, numbers["rows"], numbers["columns"], first("rows"), first("columns"), mates)


Index = tuple[int, int]  # of a call: of its row and of its column, in a plan


@dataclass(frozen=True)
class DecidedTile:
    """What dropout decides on a fragment's elements: bits of `words`, by indices of the calls that a lane made."""

    made: Plan
    words: dict[Index, fly.Value]

    @staticmethod
    def of_words(words: Sequence[fly.Value], layout: fly.AccumulatorLayout, queries: Side) -> DecidedTile:
        """Of one accumulator, whose `words` a lane with the same number decided on as `decided_tile` does."""
        made = plan(layout, 1, 1, queries, True)
        indices = [(r, c) for (r, _), (c, _) in made.calls]
        return DecidedTile(made, dict(zip(indices, words, strict=True)))

    def place(self, row: int, column: int) -> tuple[Index, int]:
        """The word of an element, by its place relative to the lane's first, and which bit it is."""
        made = self.made
        index = {
            "rows": made.rows.index(_number(made.queries, "rows", row)),
            "columns": made.columns.index(_number(made.queries, "columns", column)),
        }
        number = _place(made.queries, row, column)
        for mate in made.mates:
            if mate.shares is not None:
                side, bit = mate.shares
                number |= mate.place * (index[side] >> bit & 1)
                index[side] &= ~(1 << bit)
        return (index["rows"], index["columns"]), number


def decided_tile(
    layout: fly.AccumulatorLayout,
    row_tiles: int,
    column_tiles: int,
    first_row: Any,
    first_column: Any,
    head: RandomHead,
    dropped: fly.Value | tuple[fly.Value, ...] | int,
    *,
    queries: Side = "rows",
    rounds: int = ROUNDS,
    shared: bool = True,
    scarce: bool = False,
) -> DecidedTile:
    """The decisions on a fragment of so many tiles; see `kept_tile`, for `dropped` also `dropout.decisions`."""
    made = plan(layout, row_tiles, column_tiles, queries, shared)
    lane = fly.lane_of(layout.atom.lanes)
    if scarce:
        lane = _anew(lane)
    row, column = (
        # a multiple of 16, whose number in calls has fewer bits
        (first >> (2 if side == queries else 3)) + fly.lane_map(table, lane)
        for side, first, table in (("rows", first_row, made.row_lane), ("columns", first_column, made.column_lane))
    )
    words = {}
    for (r, row_step), (c, column_step) in made.calls:
        query, key = _by_queries(queries, row + row_step, column + column_step)
        words[r, c] = head.decisions(query, key, dropped, rounds)
    for mate in made.mates:
        ones = (lane & mate.lane_bit) != 0
        words = {index: _own(word, mate, ones) for index, word in words.items()}
    return DecidedTile(made, words)


# of a place that is whole bytes: who takes which of the own word's and the other's, a lane whose bit is 1, and one's
# whose is 0
_BYTES = {8: (0x3715, 0x6240), 16: (0x3276, 0x5410)}


def _own(word: fly.Value, mate: Mate, ones: fly.Value) -> fly.Value:
    """The half of a word that has the lane's own bit, `ones`, of the mate's; and that half of the mate's word.

    Of two words, the one of the lane whose bit is 0 is where that bit of the place is 0.
    """
    if mate.shares is None:
        return word >> fly.select(ones, mate.place, 0)
    other = fly.shuffle_xor(word, mate.lane_bit)
    if mate.place in _BYTES and fly.target().hopper:
        return permute_bytes(word, other, fly.select(ones, *_BYTES[mate.place]))
    zeros = sum(1 << place for place in range(32) if not place & mate.place)
    own = fly.select(ones, as_word(WORD & ~zeros), as_word(zeros))
    # what a shift brings in from the sign is not taken
    moved = fly.select(ones, other >> mate.place, other << mate.place)
    kept: fly.Value = moved ^ ((moved ^ word) & own)
    return kept


def as_word(bits: int) -> int:
    """32 bits as the i32 that they are."""
    return bits - (bits >> 31 << 32)


@dataclass(frozen=True)
class KeptTile:
    """Which of a fragment's elements dropout keeps: bits of words until they are asked for.

    On AMD `only` takes a mask of the element, since conditions of all lanes take two scalar registers each; `either`
    does not, so that masks are not kept for it. `scarce`: see `kept_tile`.
    """

    decided: DecidedTile
    layout: fly.AccumulatorLayout
    scarce: bool = False

    def only(self, values: fly.Fragment) -> fly.Fragment:
        """f32 that are kept, and 0 for others."""
        if fly.target().backend != "rocdl":
            return self._chosen(values, lambda x, r, c: fly.broadcast(fly.f32(0.0), len(x)))

        def masked(x: fly.Value, r: int, c: int) -> fly.Value:
            masks = fly.from_elements([word << (31 - number) >> 31 for word, number in self._bits(r, c)])
            return _apart((x.bitcast(fly.i32) & masks).bitcast(fly.f32))

        return values.map(masked)

    def signed(self, values: fly.Fragment) -> fly.Fragment:
        """f32, less than 0 where they are not kept; of values from 0 on."""
        return self._chosen(values, lambda x, r, c: -x)

    def either(self, kept: fly.Fragment, dropped: fly.Fragment) -> fly.Fragment:
        """The f32 of one fragment that are kept, and of the other those that are not."""
        return self._chosen(kept, lambda x, r, c: dropped.tiles[r][c])

    def conditions(self, r: int, c: int) -> fly.Value:
        """Of a tile of the fragment, i1."""
        bits = list(self._bits(r, c))
        if self.scarce:
            bits = _in_reach(bits)
        return fly.from_elements([word & as_word(1 << number) for word, number in bits]) != 0

    def _chosen(self, values: fly.Fragment, other: Callable[[fly.Value, int, int], fly.Value]) -> fly.Fragment:
        def chosen(x: fly.Value, r: int, c: int) -> fly.Value:
            return _apart(fly.select(self.conditions(r, c), x, other(x, r, c)))

        return values.map(chosen)

    def _bits(self, r: int, c: int) -> Iterator[tuple[fly.Value, int]]:
        """Words, and which bit of each, of a tile's elements."""
        layout = self.layout
        for i, j in zip(layout.value_rows, layout.value_columns, strict=True):
            index, number = self.decided.place(r * layout.rows + i, c * layout.columns + j)
            yield self.decided.words[index], number


REACH = 7  # bits of a word that are constants of an instruction on AMD; others take a scalar register each


def _in_reach(bits: Sequence[tuple[fly.Value, int]]) -> list[tuple[fly.Value, int]]:
    """The same bits, each among the first of a word: words are moved there, and LLVM does not see that."""
    moved: dict[tuple[int, int], fly.Value] = {}
    found = []
    for word, number in bits:
        steps = number // REACH * REACH
        if steps and (id(word), steps) not in moved:
            moved[id(word), steps] = _anew(word >> steps)
        found.append((moved[id(word), steps] if steps else word, number - steps))
    return found


def _anew(number: fly.Value) -> fly.Value:
    """The same i32 in a vector register, of which LLVM knows nothing: what comes of it is not made before a loop."""
    made: fly.Value = fly.early(number.bitcast(fly.f32)).bitcast(fly.i32)
    return made


def _apart(made: fly.Value) -> fly.Value:
    """A tile's values, before any test of another tile's: AMD's scheduler would make all of them first."""
    fly.sched_barrier()
    return made


def kept_tile(
    like: fly.Fragment,
    first_row: Any,
    first_column: Any,
    head: RandomHead,
    dropped: fly.Value | int,
    *,
    queries: Side = "rows",
    rounds: int = ROUNDS,
    shared: bool = True,
    scarce: bool = False,
) -> KeptTile:
    """Which elements of a fragment laid out as `like` dropout keeps: what `RandomHead.keeps` says of each.

    first_row, first_column: i32 positions of the fragment's corner in its sequences, multiples of 16; dropped: the
    threshold; queries: whether these are the rows (the keys the columns) or the other way around. `shared`: lanes
    that need the same calls split them and swap words, so that all lanes of the wave must come here together; else
    each makes all that it needs, which is two to eight times the arithmetic. `scarce`: in a loop that has no scalar
    registers for constants and for conditions on the lane.
    """
    layout, tiles = like.layout, (len(like.tiles), len(like.tiles[0]))
    corner = first_row, first_column
    decided = decided_tile(
        layout, *tiles, *corner, head, dropped, queries=queries, rounds=rounds, shared=shared, scarce=scarce
    )
    return KeptTile(decided, layout, scarce)


def kept_share(dropped: fly.Value) -> fly.Value:
    """The share of the weights that is kept, f32, of the threshold, i32."""
    share: fly.Value = (256 - dropped).to(fly.f32) * (1 / 256)
    return share


@dataclass(frozen=True)
class Dropout:
    """What dropout does to a head's weights: its random numbers, and `dropped`, the threshold, i32."""

    random: RandomHead
    dropped: fly.Value

    def made_by(self, make: Callable[[fly.Value], fly.Value]) -> Dropout:
        """The same with each of its i32, which are the same in every lane, as `make` gives it back."""
        random = self.random
        low, high, head, offset = map(make, (*random.key, random.head, random.offset))
        return Dropout(RandomHead((low, high), head, offset), make(self.dropped))

    def kept(self, like: fly.Fragment, first_query: Any, first_key: Any, scarce: bool = False) -> KeptTile:
        """Which of a tile's weights are kept: rows are queries; see `kept_tile`."""
        return kept_tile(like, first_query, first_key, self.random, self.dropped, scarce=scarce)

    def decided(
        self,
        layout: fly.AccumulatorLayout,
        first_row: Any,
        first_column: Any,
        queries: Side = "rows",
        tiles: tuple[int, int] = (1, 1),
        scarce: bool = False,
    ) -> DecidedTile:
        """What is decided on weights, for kernels that make masks of it (`work/kept_pairs.py`); see `kept_tile`."""
        return decided_tile(
            layout, *tiles, first_row, first_column, self.random, self.dropped, queries=queries, scarce=scarce
        )

    def drop(self, weights: fly.Fragment, first_query: Any, first_key: Any, scarce: bool = False) -> fly.Fragment:
        """Weights, 0 where they are not kept; their scale is left to the end (`BoundFeatures.scale_kept`)."""
        return self.kept(weights, first_query, first_key, scarce).only(weights)
