"""Which keys a query row sees, which queries see a key, and which tiles need a mask at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import fly


def _smaller(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else fly.minimum(a, b)


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else fly.maximum(a, b)


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    return (a if condition else b) if isinstance(condition, bool) else fly.select(condition, a, b)


PAST_ALL = 1 << 30  # a key that no query sees


@dataclass(frozen=True)
class TileRange:
    """The tiles [first, end) that some row of a block sees; all rows see those of [whole_from, whole_end) whole.

    The others, [first, whole_from) and [whole_end, end), need a mask; the former are none without a window. Numbers
    are integers or i32 values. Where `whole_end` is less than `whole_from`, no tile is whole.
    """

    first: Any
    whole_from: Any
    whole_end: Any
    end: Any

    def part(
        self, index: Any, parts: Any, uniform: Callable[[Any], Any] = lambda x: x, each: Any = None
    ) -> TileRange:
        """One of `parts` even parts of the tiles, so that causal blocks split as evenly as others.

        `uniform` tells the compiler that the part's ends are the same in every lane. With `each`, parts have so many
        of all tiles, counted from tile 0, and those of them that are seen: where a part ends follows from nothing
        else. The last one has the rest.
        """
        if each is not None:
            last = _chosen(index + 1 == parts, self.end, each * (index + 1))
            first, end = (_smaller(_larger(x, self.first), self.end) for x in (each * index, last))
        else:
            count = self.end - self.first
            size = count // parts
            longer = count - size * parts  # parts that have one tile more
            first, end = (size * i + _smaller(i, longer) + self.first for i in (index, index + 1))
        whole_end = _smaller(_larger(self.whole_end, first), end)
        first, whole_end, end = map(uniform, (first, whole_end, end))
        return TileRange(first, _smaller(_larger(self.whole_from, first), end), whole_end, end)

    def mirrored(self) -> TileRange:
        """The same tiles in opposite order, as a range of steps: step s is tile first + end - 1 - s."""
        both = self.first + self.end
        return TileRange(self.first, both - self.whole_end, both - self.whole_from, self.end)

    def sees_whole(self, tile: Any) -> Any:
        """Whether all rows see a tile whole."""
        return (tile >= self.whole_from) & (tile < self.whole_end)


@dataclass(frozen=True)
class KeyRange:
    """Causal, windowed (both bottom-right aligned) or full attention of `queries` rows over `keys` keys.

    Query i stands at key position p = i + keys - queries and sees the keys from p - `left` to p + `right`, at least
    0; None leaves that side open. `causal` is `right` = 0. With a `chunk` of at least 1, it sees of those only the
    keys of p's chunk, from p - p % chunk on, and none where p < 0. `stop`: keys from there on are another block's,
    which takes them for the same rows; None for all keys. `one_query`: the rows are the last query's, all of them,
    in as many heads. `chunk_origin`: see `QueryRange`; None of keys. Numbers are integers or i32 values.
    """

    queries: Any
    keys: Any
    causal: bool
    stop: Any = None
    left: Any = None
    right: Any = None
    one_query: bool = False
    chunk: Any = None
    chunk_origin: Any = None

    @property
    def hides_first(self) -> bool:
        """Whether there are rows that do not see the first keys."""
        return self.left is not None or self.chunk is not None

    def limit(self, row: Any) -> Any:
        """One past the last key that query `row` sees; may be zero or negative when it sees none."""
        row = self._query(row)
        stop = self.keys if self.stop is None else self.stop
        if self.chunk is not None:
            stop = _smaller(self._chunk(row)[1], stop)
        if self.causal:
            return _smaller(row + (self.keys - self.queries + 1), stop)
        if self.right is None:
            return stop
        return _smaller(row + (self.keys - self.queries + 1 + self.right), stop)

    def start(self, row: Any) -> Any:
        """The first key that query `row` sees, 0 or more, where `left` or a `chunk` limits it."""
        row = self._query(row)
        if self.left is None:
            return self._chunk(row)[0]
        first = _larger(row + (self.keys - self.queries - self.left), 0)
        return first if self.chunk is None else _larger(first, self._chunk(row)[0])

    def _chunk(self, row: Any) -> tuple[Any, Any]:
        """(first key, one past the last) of the chunk of query `row`'s position; none where that is negative."""
        origin = 0 if self.chunk_origin is None else self.chunk_origin
        place = row + (self.keys - self.queries + origin)
        first = _larger(place, 0)
        first = first - first % self.chunk
        # not first + chunk, which may be out of range
        end = _chosen(place < 0, 0, first + _smaller(self.chunk, self.keys + origin - first))
        return (first, end) if self.chunk_origin is None else (_larger(first - origin, 0), end - origin)

    def _query(self, row: Any) -> Any:
        return self.queries - 1 if self.one_query else row

    def remade(self) -> KeyRange:
        """The same, of lengths that are `fly.remade`; they are the same in every lane of a wave."""
        return replace(self, queries=fly.remade(self.queries), keys=fly.remade(self.keys))

    def tiles(self, first_row: Any, rows: int, tile: int) -> TileRange:
        """The key tiles of a block of `rows` queries from `first_row` on, which exists."""
        last_row = _smaller(first_row + (rows - 1), self.queries - 1)
        seen_by_all, seen_by_any = (_larger(self.limit(row), 0) for row in (first_row, last_row))
        whole, end = seen_by_all // tile, fly.ceil_div(seen_by_any, tile)
        if not self.hides_first:
            return TileRange(0, 0, whole, end)
        first = _smaller(self.start(first_row) // tile, end)
        return TileRange(first, _smaller(fly.ceil_div(self.start(last_row), tile), end), whole, end)

    def apply(
        self,
        scores: fly.Fragment,
        rows: fly.RowVector,
        first_key: Any,
        between: Callable[[], None] | None = None,
        scarce: bool = False,
    ) -> fly.Fragment:
        """Scores with -inf where the row (a query index) does not see the key; columns start at `first_key`.

        `between`, `scarce`: see `fly.Fragment.keep_columns_below`.
        """
        limits = rows.map(lambda row: self.limit(row) - first_key)
        starts = None if not self.hides_first else rows.map(lambda row: self.start(row) - first_key)
        return scores.keep_columns_below(limits, float("-inf"), between, starts, scarce)


@dataclass(frozen=True)
class QueryRange:
    """The inverse of a `KeyRange`: which queries see a key, and the query tiles of a block of keys.

    Key j stands at position j - (keys - queries) among the queries and is seen by those from there - `right` to
    there + `left`, in its own chunk: a range of the same kind with the two exchanged, whose chunks begin where those
    of keys do. `exchanged` is that range; its "queries" are these keys. With `open_end`, queries past the end count
    as seen wherever nothing but the end hides them: for sums to which these add zeros.
    """

    exchanged: KeyRange
    open_end: bool = False

    @staticmethod
    def of(seen: KeyRange, *, open_end: bool = False) -> QueryRange:
        """The inverse of a range of all keys, whose rows are queries of their own: no `stop`, not `one_query`."""
        assert seen.stop is None and not seen.one_query
        left = 0 if seen.causal else seen.right
        origin = None if seen.chunk is None else seen.keys - seen.queries
        return QueryRange(
            KeyRange(seen.keys, seen.queries, False, None, left, seen.left, chunk=seen.chunk, chunk_origin=origin),
            open_end,
        )

    @property
    def hides_first(self) -> bool:
        """Whether there are keys that the first queries do not see."""
        return self.exchanged.hides_first

    @property
    def limits(self) -> bool:
        """Whether there are keys that the last queries do not see, or those past the end must not."""
        return not self.open_end or self.exchanged.right is not None or self.exchanged.chunk is not None

    def start(self, key: Any) -> Any:
        """The first query that sees a key, 0 or more, where causality, a window or a chunk limits it."""
        return self.exchanged.start(key)

    def limit(self, key: Any) -> Any:
        """One past the last query that sees a key; may be less than `start` when none does."""
        return self.exchanged.limit(key)

    def tiles(self, first_key: Any, keys: int, tile: int) -> TileRange:
        """The tiles of `tile` queries of a block of `keys` keys from `first_key` on, which exists."""
        tiles = self.exchanged.tiles(first_key, keys, tile)
        return tiles if self.limits else replace(tiles, whole_end=tiles.end)

    def apply(
        self,
        scores: fly.Fragment,
        keys: fly.RowVector,
        first_query: Any,
        count: fly.Value | None = None,
        between: Callable[[], None] | None = None,
        scarce: bool = False,
    ) -> fly.Fragment:
        """Transposed scores, K Q^T, with -inf where a query does not see the row (a key index).

        `count`: how many keys there are, where rows may be past the end. `between`, `scarce`: see
        `fly.Fragment.keep_columns_below`.
        """
        if count is not None and self.hides_first:
            # one comparison an element, which takes two scalar registers on AMD
            keys = keys.map(lambda key: fly.select(key < count, key, PAST_ALL))
        elif count is not None and self.limits and scarce:
            # for the same reason; a comparison with the end beside it was there before
            limits = keys.map(lambda key: fly.select(key < count, self.limit(key), 0) - first_query)
            return scores.keep_columns_below(limits, float("-inf"), between, scarce=scarce)
        elif count is not None:
            scores = scores.map(lambda x, r, c: fly.select(scores.spread(keys, r) < count, x, float("-inf")))
        if self.limits:
            return self.exchanged.apply(scores, keys, first_query, between, scarce)
        if self.exchanged.left is None:
            return scores
        # causal: not `start`, since a query's number is at least 0 anyway, and a maximum would take a register a key
        causal = isinstance(self.exchanged.left, int) and self.exchanged.left == 0
        shift = self.exchanged.keys - self.exchanged.queries - first_query
        starts = keys.map(lambda key: key + shift if causal else self.start(key) - first_query)
        return scores.keep_columns_below(None, float("-inf"), between, starts)
