"""Which keys and tiles a windowed row or block sees, which queries see a key, and how splits share tiles: counted.

One predicate, `sees`, tells element by element what ranges must say; they are traced, and computed on integers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from kernels.problem.mask import KeyRange, QueryRange, TileRange
from tests.host import Evaluator

ROWS, TILE = 8, 5
EXAMPLES = settings(max_examples=200, deadline=None)


@dataclass(frozen=True)
class Kind:
    """What a range has."""

    causal: bool
    left: bool
    right: bool
    stop: bool
    chunk: bool


@dataclass(frozen=True)
class Drawn:
    """The numbers of a range; what its kind has not does not matter."""

    queries: int
    keys: int
    left: int
    right: int
    stop: int
    chunk: int

    def range(self, kind: Kind) -> KeyRange:
        return made(kind, self.queries, self.keys, self.left, self.right, self.stop, self.chunk)

    def sees(self, kind: Kind, i: int, j: int) -> bool:
        position = i + self.keys - self.queries
        after = not kind.left or j >= position - self.left
        before = position if kind.causal else position + self.right if kind.right else self.keys
        beside = not kind.chunk or j // self.chunk == position // self.chunk  # both rounded down
        return after and beside and j <= before and j < (self.stop if kind.stop else self.keys)


def made(kind: Kind, queries: Any, keys: Any, left: Any, right: Any, stop: Any, chunk: Any) -> KeyRange:
    return KeyRange(
        queries,
        keys,
        kind.causal,
        stop if kind.stop else None,
        left if kind.left else None,
        right if kind.right and not kind.causal else None,
        chunk=chunk if kind.chunk else None,
    )


@st.composite
def drawn(draw: Any, least_keys: int = 0, least_side: int = 0) -> Drawn:
    queries, keys = draw(st.integers(1, 60)), draw(st.integers(least_keys, 60))
    left, right = (draw(st.integers(least_side, 70)) for _ in range(2))
    return Drawn(
        queries, keys, left, right, draw(st.integers(0, keys)), draw(st.integers(1, 80) | st.just(2**31 - 1))
    )


def found_by(seen: KeyRange | QueryRange, first: Any, row: Any) -> tuple[Any, ...]:
    """The four numbers of a block's tiles, and a row's first and limit."""
    tiles = seen.tiles(first, ROWS, TILE)
    start = seen.start(row) if seen.hides_first else 0
    numbers = tiles.first, tiles.whole_from, tiles.whole_end, tiles.end, start, seen.limit(row)
    return tuple(x if isinstance(x, int | np.integer) else x + fly.i32(0) for x in numbers)


@functools.cache
def traced(kind: Kind, inverse: bool) -> Evaluator:
    def found(first: Any, row: Any, *numbers: Any) -> tuple[Any, ...]:
        seen = made(kind, *numbers)
        results = found_by(QueryRange.of(seen) if inverse else seen, first, row)
        return tuple(fly.i32(x) if isinstance(x, int) else x for x in results)

    return Evaluator(found, ("i32",) * 8)


def both_ways(kind: Kind, numbers: Drawn, inverse: bool, first: int, row: int) -> tuple[int, ...]:
    """`found_by` on integers, and traced: the same."""
    seen = numbers.range(kind)
    plain = found_by(QueryRange.of(seen) if inverse else seen, first, row)
    given = numbers.queries, numbers.keys, numbers.left, numbers.right, numbers.stop, numbers.chunk
    assert tuple(int(x) for x in traced(kind, inverse)(first, row, *given)) == plain
    return plain


def check_tiles(found: tuple[int, ...], rows: Sequence[int], streamed: int, sees: Callable[[int, int], bool]) -> None:
    """A block's tiles against `sees(row, column)` of `streamed` columns."""
    first, whole_from, whole_end, end, *_ = found
    assert 0 <= first <= whole_from <= end and 0 <= whole_end <= end
    columns = [range(t * TILE, t * TILE + TILE) for t in range(-(-streamed // TILE) + 1)]
    whole = [t for t, js in enumerate(columns) if all(j < streamed and sees(i, j) for i in rows for j in js)]
    assert whole == list(range(whole_from, whole_end))
    touched = [t for t, js in enumerate(columns) if any(j < streamed and sees(i, j) for i in rows for j in js)]
    assert set(touched) <= set(range(first, end))
    if touched:
        assert (touched[0], touched[-1]) == (first, end - 1)


KINDS = st.builds(Kind, *[st.booleans()] * 5)


@EXAMPLES
@given(KINDS, drawn(), st.data())
def test_tiles_that_are_skipped_seen_and_seen_whole(kind, numbers, data):
    first_row = data.draw(st.integers(0, (numbers.queries - 1) // ROWS)) * ROWS
    rows = range(first_row, min(first_row + ROWS, numbers.queries))
    row = data.draw(st.sampled_from(rows))
    found = both_ways(kind, numbers, False, first_row, row)
    sees = functools.partial(numbers.sees, kind)
    assert [j for j in range(numbers.keys) if sees(row, j)] == list(range(found[4], max(found[5], 0)))
    check_tiles(found, rows, numbers.keys, sees)


WHOLE_KINDS = st.builds(Kind, st.booleans(), st.booleans(), st.booleans(), st.just(False), st.booleans())


@EXAMPLES
@given(WHOLE_KINDS, drawn(least_keys=1), st.data())
def test_query_tiles_that_see_a_block_of_keys_in_part_and_whole(kind, numbers, data):
    first_key = data.draw(st.integers(0, (numbers.keys - 1) // ROWS)) * ROWS
    keys = range(first_key, min(first_key + ROWS, numbers.keys))
    key = data.draw(st.sampled_from(keys))
    found = both_ways(kind, numbers, True, first_key, key)
    assert [i for i in range(numbers.queries) if numbers.sees(kind, i, key)] == list(
        range(found[4], max(found[5], 0))
    )
    check_tiles(found, keys, numbers.queries, lambda j, i: numbers.sees(kind, i, j))


@EXAMPLES
@given(WHOLE_KINDS, drawn(least_keys=1, least_side=-20), st.booleans(), st.data())
def test_windows_that_leave_out_their_own_position_lose_no_tile(kind, numbers, inverse, data):
    """Sides below 0 are no call's, but the union of what rows see has gaps then: tiles may be too many, never few."""
    resident, streamed = (numbers.keys, numbers.queries) if inverse else (numbers.queries, numbers.keys)
    first = data.draw(st.integers(0, (resident - 1) // ROWS)) * ROWS
    rows = range(first, min(first + ROWS, resident))
    row = data.draw(st.sampled_from(rows))
    *_, start, limit = both_ways(kind, numbers, inverse, first, row)

    def sees(r: int, c: int) -> bool:
        return numbers.sees(kind, *((c, r) if inverse else (r, c)))

    assert [c for c in range(streamed) if sees(row, c)] == list(range(start, max(limit, 0)))
    tiles = numbers.range(kind)
    of_block = (QueryRange.of(tiles) if inverse else tiles).tiles(first, ROWS, TILE)
    touched = {c // TILE for r in rows for c in range(streamed) if sees(r, c)}
    assert touched <= set(range(of_block.first, of_block.end))


@pytest.mark.parametrize(("queries", "keys"), list(itertools.product((1, 2, 3, 7, 8, 9), repeat=2)))
def test_forward_and_inverse_are_one_relation(queries, keys):
    """Every small size: query i is in key j's range exactly where j is in i's, with every kind and side."""
    for causal, left, right, chunk in itertools.product(
        (False, True), (None, 0, 2, 9), (None, 0, 1, 9), (None, 1, 3, 2**31 - 1)
    ):
        seen = KeyRange(queries, keys, causal, left=left, right=None if causal else right, chunk=chunk)
        seen_by = QueryRange.of(seen)
        forward = {
            (i, j)
            for i in range(queries)
            for j in range(seen.start(i) if seen.hides_first else 0, max(0, seen.limit(i)))
        }
        inverse = {
            (i, j)
            for j in range(keys)
            for i in range(seen_by.start(j) if seen_by.hides_first else 0, max(0, seen_by.limit(j)))
        }
        assert forward == inverse


def test_lengths_of_zero_have_no_tile():
    causal = KeyRange(5, 0, True)
    assert causal.tiles(0, ROWS, TILE) == TileRange(0, 0, 0, 0)
    assert QueryRange.of(KeyRange(0, 5, True)).tiles(0, ROWS, TILE).end == 0


@functools.cache
def splitting() -> Evaluator:
    def part(first: Any, whole_from: Any, whole_end: Any, end: Any, split: Any, splits: Any) -> tuple[Any, ...]:
        taken = TileRange(first, whole_from, whole_end, end).part(split, splits)
        return taken.first, taken.whole_from, taken.whole_end, taken.end

    return Evaluator(part, ("i32",) * 6)


@EXAMPLES
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 45), st.integers(0, 45), st.integers(1, 9))
def test_splits_share_the_tiles_from_the_first_on(first, count, whole_from, whole_end, splits):
    tiles = TileRange(first, whole_from, whole_end, first + count)
    parts = [tiles.part(s, splits) for s in range(splits)]
    numbers = tiles.first, tiles.whole_from, tiles.whole_end, tiles.end
    assert parts == [TileRange(*map(int, splitting()(*numbers, s, splits))) for s in range(splits)]
    assert parts[0].first == first and parts[-1].end == tiles.end
    assert all(before.end == after.first for before, after in itertools.pairwise(parts))
    sizes = [part.end - part.first for part in parts]
    assert max(sizes) - min(sizes) <= 1
    whole = set(range(whole_from, whole_end))
    for part in parts:
        assert set(range(part.whole_from, part.whole_end)) == whole & set(range(part.first, part.end))
