"""Which keys a query row sees, and which key tiles need a mask at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly


@dataclass(frozen=True)
class KeyRange:
    """Causal, windowed (both bottom-right aligned) or full attention of `queries` rows over `keys` keys, i32 values.

    Query i stands at key position p = i + keys - queries and sees the keys from p - `left` to p + `right`, i32 values
    of at least 0; None leaves that side open. `causal` is `right` = 0. With a `chunk`, an i32 value of at least 1, it
    sees of those only the keys of p's chunk, from p - p % chunk on, and none where p < 0. `stop`: keys from there on
    are another block's, which takes them for the same rows; None for all keys. `one_query`: the rows are the last
    query's, all of them, in as many heads.
    """

    queries: Any
    keys: Any
    causal: bool
    stop: Any = None
    left: Any = None
    right: Any = None
    one_query: bool = False
    chunk: Any = None

    @property
    def hides_first(self) -> bool:
        """Whether there are rows that do not see the first keys."""
        return self.left is not None or self.chunk is not None

    def limit(self, row: Any) -> Any:
        """One past the last key that query `row` sees; may be zero or negative when it sees none."""
        row = self._query(row)
        stop = self.keys if self.stop is None else self.stop
        if self.chunk is not None:
            stop = fly.minimum(self._chunk(row)[1], stop)
        if self.causal:
            return fly.minimum(row + (self.keys - self.queries + 1), stop)
        if self.right is None:
            return stop
        return fly.minimum(row + (self.keys - self.queries + 1 + self.right), stop)

    def start(self, row: Any) -> Any:
        """The first key that query `row` sees, 0 or more, where `left` or a `chunk` limits it."""
        row = self._query(row)
        if self.left is None:
            return self._chunk(row)[0]
        first = fly.maximum(row + (self.keys - self.queries - self.left), 0)
        return first if self.chunk is None else fly.maximum(first, self._chunk(row)[0])

    def _chunk(self, row: Any) -> tuple[Any, Any]:
        """(first key, one past the last) of the chunk of query `row`'s position; none where that is negative."""
        position = row + (self.keys - self.queries)
        first = fly.maximum(position, 0)
        first = first - first % self.chunk
        end = first + fly.minimum(self.chunk, (2**31 - 1) - first)
        return first, fly.select(position < 0, 0, end)

    def _query(self, row: Any) -> Any:
        return self.queries - 1 if self.one_query else row

    def skipped(self, first_row: Any, rows: int, tile: int) -> tuple[Any, Any]:
        """(unseen, partial): number of leading key tiles that no row of a block sees, and that some row does not see
        whole for `left` or a `chunk`; at most the number of tiles that any row sees."""
        if not self.hides_first:
            return fly.i32(0), fly.i32(0)
        _, last = self.tiles(first_row, rows, tile)
        last_row = fly.minimum(first_row + (rows - 1), self.queries - 1)
        unseen = fly.minimum(self.start(first_row) // tile, last)
        return unseen, fly.minimum(fly.ceil_div(self.start(last_row), tile), last)

    def tiles(self, first_row: Any, rows: int, tile: int) -> tuple[Any, Any]:
        """(full, all): number of leading key tiles that every row of a block sees whole, and that any row sees."""
        last_row = fly.minimum(first_row + (rows - 1), self.queries - 1)
        seen_by_all = fly.maximum(self.limit(first_row), 0)
        seen_by_any = fly.maximum(self.limit(last_row), 0)
        return seen_by_all // tile, fly.ceil_div(seen_by_any, tile)

    def apply(
        self,
        scores: fly.Fragment,
        rows: fly.RowVector,
        first_key: Any,
        between: Callable[[], None] | None = None,
    ) -> fly.Fragment:
        """Scores with -inf where the row (a query index) does not see the key; columns start at `first_key`.

        `between`: see `fly.Fragment.keep_columns_below`.
        """
        limits = rows.map(lambda row: self.limit(row) - first_key)
        starts = None if not self.hides_first else rows.map(lambda row: self.start(row) - first_key)
        return scores.keep_columns_below(limits, float("-inf"), between, starts)
