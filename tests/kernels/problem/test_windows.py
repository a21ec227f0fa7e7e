"""Which keys and tiles a windowed row or block sees, and how split keys share them, against counting one by one."""

from __future__ import annotations

import functools
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.problem.mask import KeyRange
from kernels.work.tile_scheduler import split_tiles
from tests.host import Evaluator

ROWS, TILE = 8, 5
EXAMPLES = settings(max_examples=200, deadline=None)


@functools.cache
def key_range(causal: bool, left: bool, right: bool, stop: bool, chunk: bool) -> Evaluator:
    """(first row, row, queries, keys, left, right, stop, chunk) to tiles, skipped, limit and start."""

    def found(first_row, row, queries, keys, left_, right_, stop_, chunk_):
        seen = KeyRange(
            queries,
            keys,
            causal,
            stop_ if stop else None,
            left_ if left else None,
            right_ if right else None,
            chunk=chunk_ if chunk else None,
        )
        start = seen.start(row) if left or chunk else row
        return (*seen.tiles(first_row, ROWS, TILE), *seen.skipped(first_row, ROWS, TILE), seen.limit(row), start)

    return Evaluator(found, ("i32",) * 8)


@EXAMPLES
@given(
    st.tuples(*[st.booleans()] * 5),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(1, 80) | st.just(2**31 - 1),
    st.data(),
)
def test_tiles_that_are_skipped_seen_and_seen_whole(kinds, queries, keys, left, right, chunk, data):
    causal, has_left, has_right, has_stop, has_chunk = kinds
    has_right = has_right and not causal
    first_row = data.draw(st.integers(0, (queries - 1) // ROWS)) * ROWS
    stop = data.draw(st.integers(0, keys))
    rows = range(first_row, min(first_row + ROWS, queries))
    row = data.draw(st.sampled_from(rows))

    def sees(i: int, j: int) -> bool:
        position = i + keys - queries
        after = not has_left or j >= position - left
        before = position if causal else position + right if has_right else keys
        beside = not has_chunk or j // chunk == position // chunk  # both rounded down
        return after and beside and j <= before and j < (stop if has_stop else keys)

    found = key_range(*kinds[:2], has_right, *kinds[3:])(first_row, row, queries, keys, left, right, stop, chunk)
    full, last, unseen, partial, limit, start = (int(x) for x in found)
    seen = [j for j in range(keys) if sees(row, j)]
    assert seen == list(range(start if has_left or has_chunk else 0, max(limit, 0)))
    assert 0 <= unseen <= partial <= last and 0 <= full <= last
    whole = [
        t
        for t in range(-(-keys // TILE))
        if all(sees(i, j) and j < keys for i in rows for j in range(t * TILE, t * TILE + TILE))
    ]
    assert whole == list(range(partial, full))
    touched = [
        t
        for t in range(-(-keys // TILE) + 1)
        if any(sees(i, j) for i in rows for j in range(t * TILE, t * TILE + TILE))
    ]
    assert set(touched) <= set(range(unseen, last))
    if touched:
        assert (touched[0], touched[-1]) == (unseen, last - 1)


@functools.cache
def splitting() -> Evaluator:
    return Evaluator(split_tiles, ("i32",) * 5)


@EXAMPLES
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 45), st.integers(1, 9))
def test_splits_share_the_tiles_from_start_on(start, count, full, splits):
    last = start + count
    parts = [[int(x) for x in splitting()(full, last, s, splits, start)] for s in range(splits)]
    assert parts[0][0] == start and parts[-1][2] == last
    for (_, _, end), (first, _, _) in itertools.pairwise(parts):
        assert end == first
    sizes = [end - first for first, _, end in parts]
    assert max(sizes) - min(sizes) <= 1
    for first, whole, end in parts:
        assert whole == min(max(full, first), end)
