"""Where a sequence's tokens lie in tensors that hold several: dense, packed, cut to lengths in use, or in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly

from ..problem.features import BoundFeatures

# Tells the compiler that what is loaded is the same in every lane of a wave: `fly.first_lane`, or for a thread that
# works alone, `alone`.
Uniform = Callable[[fly.Value], fly.Value]


def alone(value: fly.Value) -> fly.Value:
    """`Uniform` of a single thread: it has no lane to agree with."""
    return value


def existing(index: Any, count: Any) -> fly.Value:
    """A number that should be one of `count`, cut to what exists."""
    return fly.minimum(fly.maximum(index, 0), count - 1)


def tokens_of(tensor: fly.Tensor, offsets: fly.Tensor | None) -> fly.Value:
    """Tokens of each sequence of (B, S, H, D), or with `offsets` of all those of (total, H, D)."""
    tokens: fly.Value = tensor.shape[1 if offsets is None else 0]
    return tokens


def sequences_of(tokens: fly.Tensor, offsets: fly.Tensor | None) -> fly.Value:
    """How many sequences q or out has: its first dimension, or one less than there are `offsets`."""
    count: fly.Value = tokens.shape[0] if offsets is None else offsets.shape[0] - 1
    return count


@dataclass(frozen=True)
class Sequence:
    """One sequence's tokens in tensors that hold several: `length` from `first` on.

    Of entry `index` of the batch, or if `index` is None of all that is packed. `first` None: an entry's tokens are
    all the sequence's.
    """

    index: fly.Value | None
    first: fly.Value | None
    length: fly.Value

    @staticmethod
    def of(
        tokens: Any,
        offsets: fly.Tensor | None,
        index: Any,
        used: fly.Tensor | None = None,
        leftpad: fly.Tensor | None = None,
        entry: Any = None,
        uniform: Uniform = fly.first_lane,
    ) -> Sequence:
        """Sequence `index` of `tokens` in each entry of the batch, or in all with (B + 1,) `offsets`.

        `used`, `leftpad`: (B,) i32 for all sequences. `used` tokens count, `leftpad` of them are left out at the
        start, and dense tokens are in the batch's `entry`, `index` if it is None. Offsets that decrease, and what is
        more than there is, are cut to what exists.
        """
        # a load's result is not known to be the same in every lane, and addresses and bounds must be
        if offsets is None:
            entry, first, length = index if entry is None else entry, None, tokens
        else:
            first, end = offsets_of(offsets, index, tokens)
            entry, first = None, uniform(first)
            length = uniform(end) - first
        if used is not None:
            length = _cut(used, index, length, uniform)
            first = fly.i32(0) if first is None else first
        if leftpad is not None:
            skipped = _cut(leftpad, index, length, uniform)
            first, length = skipped if first is None else first + skipped, length - skipped
        return Sequence(entry, first, length)

    @property
    def bounded(self) -> bool:
        """Whether there may be fewer tokens than the tensor's shape tells, or none."""
        return self.first is not None

    @property
    def start(self) -> Any:
        """`first`, or 0."""
        return 0 if self.first is None else self.first

    def matrix(self, tensor: fly.Tensor, head: Any) -> fly.Tensor:
        """(S, D) of one head of (B, S, H, D) or (total, H, D)."""
        return self._section(tensor[:, head, :] if self.index is None else tensor[self.index, :, head, :])

    def vector(self, tensor: fly.Tensor, head: Any) -> fly.Tensor:
        """(S,) of one head of (B, H, S) or (H, total)."""
        return self._section(tensor[head, :] if self.index is None else tensor[self.index, head, :])

    def rows(self, tensor: fly.Tensor, head: Any, columns: int) -> fly.RowView:
        """The same as rows of `columns` elements."""
        return self.matrix(tensor, head).rows(columns)

    def _section(self, tokens: fly.Tensor) -> fly.Tensor:
        return tokens if self.first is None else tokens.section(self.first, self.length)


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's tokens in tensors of pages: `length` from `first` (None: 0) on, in the pages of row `index` of
    `table`, (B, pages of a sequence) i32."""

    table: fly.Tensor
    index: fly.Value
    page_size: int
    length: fly.Value
    first: fly.Value | None = None

    @staticmethod
    def of(
        table: fly.Tensor,
        page_size: int,
        offsets: fly.Tensor | None,
        index: Any,
        used: fly.Tensor | None,
        leftpad: fly.Tensor | None = None,
        entry: Any = None,
        uniform: Uniform = fly.first_lane,
    ) -> PagedSequence:
        """Sequence `index` in the table's row `entry`, or `index`; as many tokens as `paged_length` says.

        `leftpad` of them are left out at the start: see `Sequence.of`.
        """
        length, first = uniform(paged_length(table, page_size, offsets, index, used)), None
        if leftpad is not None:
            first = _cut(leftpad, index, length, uniform)
            length = length - first
        return PagedSequence(table, index if entry is None else entry, page_size, length, first)

    @property
    def start(self) -> Any:
        """`first`, or 0."""
        return 0 if self.first is None else self.first

    def rows(self, tensor: fly.Tensor, head: Any, columns: int) -> fly.PagedRows:
        """Rows of `columns` elements of one head of (pages, page_size, H, D)."""
        pages = self.table[self.index, :]
        return fly.PagedRows(tensor[:, :, head, :], pages, self.length, self.page_size, columns, self.first)

    def pages(self, row: Any, count: int) -> tuple[fly.Value, ...]:
        """The `count` pages from the one of token `row` on; of tokens that there are not, some of the sequence's."""
        last = fly.maximum(self.length - 1, 0)
        tokens = (row + i * self.page_size for i in range(count))
        places = (fly.maximum(fly.minimum(token, last), 0) // self.page_size for token in tokens)
        return tuple(self.table.load(self.index, place) for place in places)


def keys_of(
    given: BoundFeatures,
    tokens: Any,
    offsets: fly.Tensor | None,
    index: Any,
    entries: Any,
    page_size: int | None,
    uniform: Uniform = fly.first_lane,
) -> Sequence | PagedSequence:
    """The keys of sequence `index`, with what a call says of their lengths, padding, entries and pages.

    `tokens`, `offsets`: see `Sequence.of`. `entries` of the batch there are, where keys are not in pages; None where
    loads from others are harmless, as bulk copies are.
    """
    used, leftpad, entry = map(given.get, ("seqused_kv", "cache_leftpad", "kv_batch_idx"))
    table = given.get("block_table")
    if entry is not None:
        count = entries if table is None else table.shape[0]
        entry = entry.load(index) if count is None else existing(entry.load(index), count)
        entry = uniform(entry)
    if table is None:
        return Sequence.of(tokens, offsets, index, used, leftpad, entry, uniform)
    assert page_size is not None
    return PagedSequence.of(table, page_size, offsets, index, used, leftpad, entry, uniform)


def offsets_of(offsets: fly.Tensor, index: Any, total: Any) -> tuple[fly.Value, fly.Value]:
    """(first, end) of packed sequence `index`; offsets that decrease or leave [0, total] are cut to what exists."""
    first = fly.minimum(fly.maximum(offsets.load(index), 0), total)
    return first, fly.minimum(fly.maximum(offsets.load(index + 1), first), total)


def paged_length(
    table: fly.Tensor, page_size: int, offsets: fly.Tensor | None, index: Any, used: fly.Tensor | None
) -> fly.Value:
    """How many tokens sequence `index` has: `used[index]`, or what (B + 1,) `offsets` differ by, or the smaller one.

    At least 0, and at most what the table has pages for.
    """
    length = table.shape[1] * page_size
    if offsets is not None:
        length = fly.minimum(offsets.load(index + 1) - offsets.load(index), length)
    if used is not None:
        length = fly.minimum(used.load(index), length)
    return fly.maximum(length, 0)


def _cut(numbers: fly.Tensor, index: Any, length: Any, uniform: Uniform) -> fly.Value:
    """A sequence's number of tokens, at least 0 and at most `length`."""
    return fly.minimum(fly.maximum(uniform(numbers.load(index)), 0), length)
