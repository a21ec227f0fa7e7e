"""Dropout of a tile of scores: the bytes that the lanes' accumulators need, each Philox call made once by one lane.

Of the 16 positions of a call (see `dropout.py`), which differ in bits 0 and 3 of rows and columns, a lane holds those
whose bits are numbers of its registers. Where one of these bits is a bit of the lane's index, lanes share calls:
xor 4 for the rows of `mma.sync` and of WGMMA, xor 1 and 8 for the columns of MFMA 32x32, 1, 8 and 32 for MFMA 16x16.
Such lanes split the calls that they all need, and swap words, one such bit after the other: of two lanes, each has
made one of two calls, keeps the half that has its own bit, and gets that half of the other's. What a word is about is
data: labels of a call's bytes and of calls, some the index of a word, two the index of a byte in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import fly
from fly.errors import AtomError

from .dropout import ROUNDS, RandomHead, call_number, place_in_call

Side = Literal["rows", "columns"]
SIDES: tuple[Side, Side] = ("columns", "rows")  # in the order in which their calls are shared
# A label is a bit of a byte's number in its call, or a bit ("rows" or "columns", i) of the index of a call that lanes
# share. Words of a call: one for each place of its queries; bytes of a word: of its keys.
Label = int | tuple[Side, int]
KEY_LABELS: tuple[int, int] = (0, 1)
QUERY_LABELS: tuple[int, int] = (2, 3)
Bits = tuple[int, ...]
HIGH_BITS = 0x80808080 - (1 << 32)  # bit 7 of every byte, as i32


@dataclass(frozen=True)
class Mate:
    """A bit of the lane's index that is a bit of the position in a call: `label`.

    `shares`: the bit of the call's index that the two lanes split, or None where each makes all calls that it needs.
    """

    lane_bit: int
    label: int
    shares: tuple[Side, int] | None = None


@dataclass(frozen=True)
class Plan:
    """Who makes which call: of an accumulator layout, numbers of tiles, and the side that queries are on.

    `rows`, `columns`: numbers of calls (`call_number`) that a lane needs, from its own first on; the calls are all
    their pairs. `row_lane`, `column_lane`: its first, for each lane. `mates`: those that share first.
    """

    queries: Side
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_lane: tuple[int, ...]
    column_lane: tuple[int, ...]
    mates: tuple[Mate, ...]

    def labels(self, side: Side) -> tuple[int, int]:
        """Those of bits 0 and 3 of a row or column."""
        return QUERY_LABELS if side == self.queries else KEY_LABELS

    def made(self, side: Side) -> list[tuple[int, int]]:
        """(index, number) of the rows or columns of calls that a lane makes: shared bits of the index are 0."""
        numbers = self.rows if side == "rows" else self.columns
        shared = sum(1 << mate.shares[1] for mate in self.mates if mate.shares and mate.shares[0] == side)
        return [(i, number) for i, number in enumerate(numbers) if not i & shared]


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
    lanes = layout.atom.lanes
    of_lanes = {"rows": layout.row_lane, "columns": layout.column_lane}
    held = {
        "rows": {tile * layout.rows + place for tile in range(row_tiles) for place in layout.value_rows},
        "columns": {tile * layout.columns + place for tile in range(column_tiles) for place in layout.value_columns},
    }
    for side in SIDES:
        if any(of_lanes[side](lane) & place for lane in range(lanes) for place in held[side]):
            raise AtomError(f"{layout}: {side} are not made of bits of lanes and registers")
    numbers = {side: tuple(sorted(set(map(call_number, held[side])))) for side in SIDES}
    label_of = {  # of a bit of a row or column
        (side, bit): label
        for side in SIDES
        for bit, label in zip((1, 8), QUERY_LABELS if side == queries else KEY_LABELS, strict=True)
    }
    lane_bits = [1 << bit for bit in range((lanes - 1).bit_length())]
    places = ((bit, (side, of_lanes[side](bit))) for bit in lane_bits for side in SIDES)
    # those that choose words come first: bytes take three instructions more
    found = sorted(((bit, label_of[place]) for bit, place in places if place in label_of), key=lambda pair: -pair[1])
    free = [(side, bit) for side in SIDES for bit in _sharing(numbers[side])] if shared else []
    mates = tuple(Mate(bit, label, free[i] if i < len(free) else None) for i, (bit, label) in enumerate(found))

    def first(side: Side) -> tuple[int, ...]:
        """The number of a lane's first call: of those that it shares, the one that it makes."""
        own = [
            (mate.lane_bit, numbers[side][1 << mate.shares[1]] - numbers[side][0])
            for mate in mates
            if mate.shares and mate.shares[0] == side
        ]
        return tuple(
            call_number(of_lanes[side](lane)) + sum(step for bit, step in own if lane & bit) for lane in range(lanes)
        )

    return Plan(queries, numbers["rows"], numbers["columns"], first("rows"), first("columns"), mates)


@dataclass(frozen=True)
class Either:
    """A word that a lane made, or was `sent`: `one` where `bit` (i1) of the lane's index is set, or else `zero`.

    What takes bytes out of two words can choose as well, and needs no selection before.
    """

    bit: fly.Value
    zero: fly.Value
    one: fly.Value
    sent: fly.Value


@dataclass(frozen=True)
class Held:
    """Words of random bytes that a lane holds: `words[bits]` has a bit for each of `axes`.

    The number of a byte in its word has the bits `inner`: None where the wanted byte has been shifted to the start.
    """

    axes: tuple[Label, ...]
    inner: tuple[Label | None, Label | None]
    words: dict[Bits, Any]

    def settled(self) -> Held:
        """With a word in place of each choice."""
        return replace(self, words={bits: settled(word) for bits, word in self.words.items()})

    def pairs(self, axis: Label) -> Iterator[tuple[Bits, Bits]]:
        """Indices of words that differ in an axis only."""
        at = self.axes.index(axis)
        for bits in self.words:
            if not bits[at]:
                yield bits, (*bits[:at], 1, *bits[at + 1 :])

    def moved_out(self, label: Label, axis: Label) -> Held:
        """A label of bytes made the axis of words that another one was."""
        level, words = self.inner.index(label), {}
        for zero, one in self.pairs(axis):
            words[zero], words[one] = _gathered(self.words[zero], self.words[one], level)
        inner = tuple(axis if own == label else own for own in self.inner)
        return Held(tuple(label if own == axis else own for own in self.axes), (inner[0], inner[1]), words)

    def exchanged(self, mate: Mate, bit: fly.Value) -> Held:
        """The half that has the lane's own `bit` of the label, of both lanes' calls."""
        assert mate.shares is not None
        words = {}
        for zero, one in self.pairs(mate.label):
            received = fly.shuffle_xor(fly.select(bit, self.words[zero], self.words[one]), mate.lane_bit)
            words[zero] = Either(bit, self.words[zero], received, received)
            words[one] = Either(bit, received, self.words[one], received)
        return Held(tuple(mate.shares if own == mate.label else own for own in self.axes), self.inner, words)

    def chosen(self, mate: Mate, bit: fly.Value) -> Held:
        """What has the lane's own `bit` of the label."""
        if mate.label in self.inner:
            level = self.inner.index(mate.label)
            shift = fly.select(bit, 8 << level, 0)
            inner = tuple(None if own == mate.label else own for own in self.inner)
            return Held(self.axes, (inner[0], inner[1]), {bits: word >> shift for bits, word in self.words.items()})
        at = self.axes.index(mate.label)
        words = {
            (*zero[:at], *zero[at + 1 :]): fly.select(bit, self.words[one], self.words[zero])
            for zero, one in self.pairs(mate.label)
        }
        return Held((*self.axes[:at], *self.axes[at + 1 :]), self.inner, words)

    def byte(self, bit_of: Callable[[Label], int]) -> tuple[fly.Value, int]:
        """The word that has the byte whose labels have these bits, and which of its bytes that is."""
        word = self.words[tuple(map(bit_of, self.axes))]
        return word, sum(1 << level for level, label in enumerate(self.inner) if label is not None and bit_of(label))


def settled(word: fly.Value | Either) -> fly.Value:
    """A word, chosen if that is still to be done."""
    return fly.select(word.bit, word.one, word.zero) if isinstance(word, Either) else word


def _gathered(a: fly.Value, b: fly.Value, level: int) -> tuple[fly.Value, fly.Value]:
    """Of two words, the bytes whose number's bit `level` is 0, and the others; the bit then tells a from b."""
    low, shift = (0x00FF00FF, 8) if level == 0 else (0x0000FFFF, 16)
    return (a & low) | ((b & low) << shift), ((a >> shift) & low) | (b & ~low)


@dataclass(frozen=True)
class RandomTile:
    """The random bytes of a fragment's elements, in words of calls: `held` by indices of their rows and columns."""

    made: Plan
    held: dict[tuple[int, int], Held]

    def byte(self, row: int, column: int) -> tuple[fly.Value, int]:
        """A word and the number of its byte: that of an element, by its place relative to the lane's first."""
        made = self.made
        index = {"rows": made.rows.index(call_number(row)), "columns": made.columns.index(call_number(column))}

        def bit_of(label: Label) -> int:
            if isinstance(label, tuple):
                return index[label[0]] >> label[1] & 1
            side: Side = "rows" if label in made.labels("rows") else "columns"
            place: int = place_in_call(row if side == "rows" else column)
            return place >> made.labels(side).index(label) & 1

        base = dict(index)
        for mate in made.mates:
            if mate.shares is not None:
                base[mate.shares[0]] &= ~(1 << mate.shares[1])
        return self.held[base["rows"], base["columns"]].byte(bit_of)

    @property
    def words(self) -> list[Any]:
        """All of them."""
        return [word for held in self.held.values() for word in held.words.values()]


def random_tile(
    layout: fly.AccumulatorLayout,
    row_tiles: int,
    column_tiles: int,
    first_row: Any,
    first_column: Any,
    head: RandomHead,
    *,
    queries: Side = "rows",
    rounds: int = ROUNDS,
    shared: bool = True,
    of_words: Callable[[fly.Value], fly.Value] | None = None,
) -> RandomTile:
    """The random bytes of a fragment of so many tiles; see `keep_tile`."""
    made = plan(layout, row_tiles, column_tiles, queries, shared)
    lane = fly.lane_of(layout.atom.lanes)
    rows, columns = (
        (first >> 2) + fly.lane_map(table, lane)
        for first, table in ((first_row, made.row_lane), (first_column, made.column_lane))
    )
    own = [(mate, (lane & mate.lane_bit) != 0) for mate in made.mates]

    def held(row: fly.Value, column: fly.Value) -> Held:
        words = head.words(*_by_queries(made, row, column), rounds)
        if of_words is None:
            return _held(made, own, words).settled()
        return _held(made, own, [of_words(word) for word in words])

    calls = {
        (r, c): held(rows + row, columns + column)
        for r, row in made.made("rows")
        for c, column in made.made("columns")
    }
    return RandomTile(made, calls)


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
    each makes all that it needs, which is two to three times the arithmetic.
    """
    layout, tiles = like.layout, (len(like.tiles), len(like.tiles[0]))
    corner = first_row, first_column
    random = random_tile(layout, *tiles, *corner, head, queries=queries, rounds=rounds, shared=shared)

    def byte(row: int, column: int) -> fly.Value:
        word, number = random.byte(row, column)
        return (word >> 8 * number if number else word) & 0xFF

    def tile(_: fly.Value, r: int, c: int) -> fly.Value:
        places = zip(layout.value_rows, layout.value_columns, strict=True)
        return fly.from_elements([byte(r * layout.rows + i, c * layout.columns + j) for i, j in places]) >= dropped

    return like.map(tile)


def _by_queries(made: Plan, row: fly.Value, column: fly.Value) -> tuple[fly.Value, fly.Value]:
    return (row, column) if made.queries == "rows" else (column, row)


def _held(made: Plan, own: Sequence[tuple[Mate, fly.Value]], words: Sequence[fly.Value]) -> Held:
    """Of a call's words, and of those that mates make at the same time, what the lane needs."""
    low, high = QUERY_LABELS
    held = Held((low, high), KEY_LABELS, {(i & 1, i >> 1): word for i, word in enumerate(words)})
    later = [mate.label for mate in made.mates]
    for mate, bit in own:
        held = held.settled()
        later.remove(mate.label)
        if mate.shares is None:
            held = held.chosen(mate, bit)
            continue
        if mate.label in held.inner:
            axis = next((axis for axis in held.axes if axis not in later), held.axes[0])
            held = held.moved_out(mate.label, axis)
        held = held.exchanged(mate, bit)
    return held


def _at_least(word: fly.Value, low: fly.Value, below_half: fly.Value) -> fly.Value:
    """Bit 7 of every byte: whether the byte is at least the threshold.

    `low` has bits 0 to 6 of the threshold in every byte; `below_half`: all bits, if its bit 7 is 0, or none.
    """
    rest = (word | HIGH_BITS) - low  # nothing is borrowed: bit 7 stays where bits 0 to 6 are at least the threshold's
    return (word & rest) | (below_half & (word | rest))


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

    def kept_bytes(
        self, layout: fly.AccumulatorLayout, first_row: Any, first_column: Any, queries: Side = "rows"
    ) -> RandomTile:
        """Which weights of one tile are kept: bit 7 of each one's byte, whose other bits are anything.

        Four at a time, for kernels that make masks of these bits, and of an `Either`; see `keep_tile`.
        """
        low, below_half = (self.dropped & 0x7F) * 0x01010101, (self.dropped >> 7) - 1

        def compared(word: fly.Value) -> fly.Value:
            return _at_least(word, low, below_half)

        corner = first_row, first_column
        return random_tile(layout, 1, 1, *corner, self.random, queries=queries, of_words=compared)

    def drop(self, weights: fly.Fragment, first_query: Any, first_key: Any) -> fly.Fragment:
        """Weights, 0 where they are not kept; their scale is left to the end (`BoundFeatures.scale_kept`)."""
        return only(self.kept(weights, first_query, first_key), weights)


def only(kept: fly.Fragment, weights: fly.Fragment) -> fly.Fragment:
    """Weights that are kept, and 0 for others."""
    return weights.map(lambda x, r, c: fly.select(kept.tiles[r][c], x, 0.0))
