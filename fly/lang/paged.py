"""Matrices whose rows lie in pages: equally many rows each, at places that a table in memory tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fly.errors import ShapeError
from fly.ir.dtypes import DType, i32
from fly.ir.math import maximum, minimum
from fly.ir.memory import Pointer
from fly.ir.value import Value
from fly.lang.ids import first_lane
from fly.lang.tensor import RowView, Tensor, Window

MIN_RUN = 16  # rows; of smaller pages, and of those that are no power of two, every row is looked up


@dataclass(frozen=True)
class PagedRows:
    """`count` rows of `columns` (static) contiguous elements: row r - `first` is row r % P of page `table[r // P]`.

    pages: (N, P, columns), P = `page_size`, static. table: a vector of i32, of which only the entries that belong to
    the `count` rows matter; those that name no page are cut to what exists. Pages may be any distance apart, the rows
    of one less than 2**31 bytes. `first` None is 0.

    Raises:
        ShapeError: a page size below 1, or tensors of other ranks.
    """

    pages: Tensor
    table: Tensor
    count: Value | int
    page_size: int
    columns: int
    first: Any = None

    def __post_init__(self) -> None:
        if self.page_size <= 0:
            raise ShapeError(f"page_size is {self.page_size}; expected 1 or more")
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
    def pitch(self) -> Value | int:
        """Bytes from one row of a page to the next, i32 or static."""
        stride: Value | int = self.pages.stride[1]
        return (stride.to(i32) if isinstance(stride, Value) else stride) * self.dtype.bytes

    @property
    def scattered(self) -> bool:
        """Whether copies look up every row (`page_of`, `row`), since runs of rows in one page follow no pattern."""
        return self.first is not None or self.page_size < MIN_RUN or bool(self.page_size & (self.page_size - 1))

    def page(self, row: Any) -> Value:
        """The page of a row, loaded from the table; the last one's for rows past the end."""
        last = maximum(minimum(self.count, self.table.shape[0] * self.page_size) - 1, 0)
        return self.table.load(minimum(row, last) // self.page_size)

    def page_of(self, row: Value) -> Value:
        """`page` for rows that are `scattered`; lanes may have different rows."""
        return self.table.load(self._place(row) // self.page_size)

    def row(self, row: Value, page: Value) -> tuple[Pointer, Value]:
        """(address of a row that lies in `page`, the last one's past the end; whether there is such a row).

        Lanes may have different rows. Where there are no rows at all, the address is still one of a page's rows.
        """
        page = minimum(maximum(page, 0), self.pages.shape[0] - 1)
        return self.pages.at(page, self._place(row) % self.page_size, 0), row < self.count

    def _place(self, row: Value) -> Value:
        """Which row of the table's pages it is; the last one for rows past the end."""
        place = maximum(minimum(row, self.count - 1), 0)
        place = place if self.first is None else place + self.first
        return minimum(place, self.table.shape[0] * self.page_size - 1)

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
