"""Pages of ROCm's vectorised layouts: where a key's and a value's elements are.

With x elements in 16 bytes, P keys in a page:

| layout | K | V | who has it |
|---|---|---|---|
| "vectorized" | (pages, Hkv, D / x, P, x) | (pages, Hkv, P / x, D, x) | AITER and vLLM's SHUFFLE, FlyDSL |
| "paged_attention" | (pages, Hkv, D / x, P, x) | (pages, Hkv, D, P) | vLLM's `PagedAttention` |

Kernels get such pages as tensors (pages, P, Hkv, D), whose elements are as many and in the same memory, and of which
they use the address of a page alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly
from fly.ir import memory

from ..problem.catalogue import VECTOR_LAYOUTS, VECTOR_STEP

VECTOR_BYTES = 16


@dataclass(frozen=True)
class VectorPages:
    """K's (`values` False) or V's pages of `layout`, of `page_size` keys and `columns` elements a key and head."""

    tensor: fly.Tensor
    layout: str
    page_size: Any
    columns: int
    values: bool

    @property
    def run(self) -> Any:
        """Elements side by side: of a key's columns, or of a column's keys."""
        whole = self.values and self.layout == VECTOR_LAYOUTS[1]
        return self.page_size if whole else VECTOR_BYTES // self.tensor.dtype.bytes

    def offset(self, key: Any, column: Any) -> Any:
        """Bytes from a page's head to an element, which begins a piece of columns, or of V's keys."""
        run = self.run
        across, along, lines = (key, column, self.columns) if self.values else (column, key, self.page_size)
        return (across // run * (lines * run) + along * run + across % run) * self.tensor.dtype.bytes

    def store(self, piece: fly.Value, place: tuple[Any, Any, Any], column: Any) -> None:
        """Store `VECTOR_STEP` elements of the row at (page, key, head), from `column` on, a multiple of these."""
        page, key, head = place
        pointer, size = self.head(page, head), self.tensor.dtype.bytes
        if not self.values:
            align = min(self.tensor.alignment, VECTOR_STEP * size)
            memory.store(piece, pointer.offset(self.offset(key, column)), align=align)
            return
        first = self.offset(key, column)
        for i in range(VECTOR_STEP):
            memory.store(piece[i], pointer.offset(first + i * self.run * size), align=size)

    def head(self, page: Any, head: Any) -> fly.Pointer:
        """Where a page's elements of a head begin."""
        size = self.page_size * self.columns * self.tensor.dtype.bytes
        pointer: fly.Pointer = self.tensor.at(page, 0, 0, 0).offset(head * size)
        return pointer


@dataclass(frozen=True)
class VectorRows:
    """One head's keys or values of a sequence in such pages: `count` rows of `columns` elements.

    `table`: the sequence's pages, of which only those of the `count` rows matter; others are cut to what exists.
    """

    pages: VectorPages
    head: Any
    table: fly.Tensor
    count: Any

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.pages.columns

    @property
    def dtype(self) -> fly.DType:
        """Of an element."""
        return self.pages.tensor.dtype

    def page_of(self, row: Any) -> fly.Value:
        """The page of a row, of the last one for rows past the end; lanes may have different rows."""
        found: fly.Value = self.table.load(self._place(row) // self.pages.page_size)
        return found

    def load(self, page: fly.Value, row: Any, column: Any) -> fly.Value:
        """A piece of elements from that of `row`, which lies in `page`, and `column` on, as 32-bit words.

        Of a row past the end, others of the sequence's. Lanes may have different rows.
        """
        place = self._piece(page, row, column)
        words: fly.Value = memory.load(place, fly.i32, self._words, align=self._align)
        return words

    def load_of_all(self, page: fly.Value, row: Any, column: Any) -> fly.Value:
        """The same of V where all lanes of a wave have one row; zeros of columns that there are not."""
        base = self._piece(fly.first_lane(page), row, 0)
        offset, bound = self.pages.offset(0, column), self.pages.offset(0, self.columns)
        words: fly.Value = memory.load_bounded(base, offset, bound, fly.i32, self._words, align=self._align)
        return words

    @property
    def _words(self) -> int:
        return VECTOR_STEP * self.dtype.bytes // 4

    @property
    def _align(self) -> int:
        return min(self.pages.tensor.alignment, self._words * 4)

    def _piece(self, page: fly.Value, row: Any, column: Any) -> fly.Pointer:
        """Where the piece of a row and column begins, which of V has more keys."""
        page = fly.minimum(fly.maximum(page, 0), self.pages.tensor.shape[0] - 1)
        key = self._place(row) % self.pages.page_size
        key = key - key % VECTOR_STEP if self.pages.values else key
        return self.pages.head(page, self.head).offset(self.pages.offset(key, column))

    def _place(self, row: Any) -> fly.Value:
        last = fly.minimum(self.count, self.table.shape[0] * self.pages.page_size) - 1
        place: fly.Value = fly.maximum(fly.minimum(row, last), 0)
        return place
