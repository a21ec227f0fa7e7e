"""Matrices whose rows lie in pages: equally many rows each, at places that a table in memory tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fly.errors import ShapeError
from fly.ir.dtypes import DType, i32
from fly.ir.math import maximum, minimum
from fly.ir.value import Value
from fly.lang.ids import first_lane
from fly.lang.tensor import RowView, Tensor, Window


@dataclass(frozen=True)
class PagedRows:
    """`count` rows of `columns` (static) contiguous elements: row r is row r % P of page `table[r // P]`.

    pages: (N, P, columns), P = `page_size`, static and a power of two. table: a vector of i32, of which only the
    entries that belong to the `count` rows matter; those that name no page are cut to what exists. Pages may be any
    distance apart, the rows of one less than 2**31 bytes.

    Raises:
        ShapeError: a page size that is no power of two, or tensors of other ranks.
    """

    pages: Tensor
    table: Tensor
    count: Any
    page_size: int
    columns: int

    def __post_init__(self):
        if self.page_size <= 0 or self.page_size & (self.page_size - 1):
            raise ShapeError(f"page_size is {self.page_size}; expected a power of two")
        if (self.pages.rank, self.table.rank) != (3, 1):
            raise ShapeError(
                f"pages need a tensor of rank 3 and a table of rank 1, not {self.pages!r}, {self.table!r}"
            )

    @property
    def dtype(self) -> DType:
        return self.pages.dtype

    @property
    def alignment(self) -> int:
        """Bytes that divide the address of every row."""
        return self.pages.alignment

    @property
    def pitch(self) -> Any:
        """Bytes from one row of a page to the next, i32 or static."""
        stride = self.pages.stride[1]
        return (stride.to(i32) if isinstance(stride, Value) else stride) * self.dtype.bytes

    def page(self, row: Any) -> Value:
        """The page of a row, loaded from the table; the last one's for rows past the end."""
        last = maximum(minimum(self.count, self.table.shape[0] * self.page_size) - 1, 0)
        return self.table.load(minimum(row, last) // self.page_size)

    def window(self, page: Value, first: Any, rows: int) -> Window:
        """Rows [first, first + rows), which lie in `page`; those that do not exist read as zero.

        All lanes of a wave have the same rows.
        """
        page = first_lane(minimum(maximum(page, 0), self.pages.shape[0] - 1))
        tensor = self.pages[page, :, :]
        inside = first % self.page_size if rows < self.page_size else 0
        left = self.count - minimum(self.count, first)
        here = RowView(tensor.pointer, self.dtype, left + inside, tensor.stride[0], self.columns, self.alignment)
        return here.window(inside, rows)
