"""How the Hopper kernel's persistent blocks come to their work: tiles of the launch, handed out on demand.

Tiles are numbered in the order in which they should start. A block begins with the tile of its own number; when its
producer has loaded a tile's first keys (in decoding builds, whose tiles take long, its last ones) it takes the next
number from a counter in global memory, finds out what that tile is, and publishes it to the block's consumers through
shared memory. So blocks that got short tiles take more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import fly
from fly.backends.nvvm.mbarrier import Position, Ring

from ..problem.features import NOTHING, Given
from ..problem.mask import KeyRange
from ..work.tile_list import SeenTiles, TileList, alone
from ..work.tile_scheduler import Sequence, existing, offsets_of, paged_length, split_tiles

NUMBERS = 8  # i32 that describe a tile,
STEPS = 4  # and its part of a block mask's list
STOP = -1


@dataclass(frozen=True)
class Work:
    """One tile: the rows of one head of one sequence, against key tiles [first_tile, last_tile).

    `head` numbers sets of heads where heads are packed. `first_row` is a query and counts from the sequence's first;
    `q_first` and `k_first` are where the sequence starts in packed tensors, or after padding at the left (0 in
    others); `entry` is the batch's entry with its keys, for the producer only. Key tiles [whole_from, full_tiles) are
    seen whole by every row; `whole_from` is `first_tile` without a window. A tile without any key is computed like
    the others, all masked.

    With a block mask, [first_tile, last_tile) are steps of a list, of which those from `full_tiles` on need the
    `mask_mod`; `seen` says which key tiles need no other mask. The producer alone has the list itself, `listed`.
    """

    batch: fly.Value
    head: fly.Value
    first_row: fly.Value
    split: fly.Value
    q_first: Any
    k_first: Any
    keys: KeyRange
    first_tile: fly.Value
    whole_from: fly.Value
    full_tiles: fly.Value
    last_tile: fly.Value
    entry: Any = 0
    seen: SeenTiles | None = None
    listed: TileList | None = None

    @property
    def exists(self) -> fly.Value:
        """Whether it is a tile, and not the end of the launch."""
        return self.batch >= 0


@dataclass(frozen=True)
class Schedule:
    """The launch's sizes (i32 values and tensors), and how its tiles are numbered.

    A tile has `block_m` queries, of one head or of each head of a packed set; `heads` counts sets then. `section`
    heads at a time, row block after row block, the longest first; packed sequences one after the other, all heads of
    a row block side by side. `given`: lengths, windows, entries of the batch and pages among a call's features;
    `page_size`: keys of a page; `takes_late`: see `Sm90Options`.
    """

    seq_len: Any
    seq_len_kv: Any
    heads: Any
    batch: Any
    splits: Any
    section: Any
    cu_seqlens_q: fly.Tensor | None
    cu_seqlens_kv: fly.Tensor | None
    counters: fly.Tensor
    causal: bool
    block_m: int
    block_n: int
    given: Given = NOTHING
    page_size: int | None = None
    takes_late: bool = False

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def packed_keys(self) -> bool:
        """Whether keys are packed too, or in pages."""
        return self.packed and (self.cu_seqlens_kv is not None or self.page_size is not None)

    @property
    def ragged(self) -> bool:
        """Whether tiles of the launch may have no query."""
        return self.packed or self.given.get("seqused_q") is not None

    @property
    def bounded(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.ragged or self.cut_keys or self.given.get("cache_leftpad") is not None

    @property
    def cut_keys(self) -> bool:
        """Whether a sequence's keys may end before their tensor does."""
        return self.packed or self.page_size is not None or self.given.get("seqused_kv") is not None

    @property
    def lists(self) -> bool:
        """Whether a block mask lists the key tiles."""
        return self.given.features.block_size is not None

    @property
    def pages_of_tile(self) -> int:
        """How many pages a key tile is in; 0 where keys are not in pages."""
        return 0 if self.page_size is None else -(-self.block_n // self.page_size)

    def pages(self, work: Work, j: Any) -> tuple[fly.Value, ...]:
        """The pages that key tile j's rows are in, in order; for rows that there are not, some of the sequence's."""
        assert self.page_size is not None
        table, last = self.given.get("block_table"), fly.maximum(work.keys.keys - 1, 0)
        rows = (j * self.block_n + i * self.page_size for i in range(self.pages_of_tile))
        places = (fly.maximum(fly.minimum(row, last), 0) // self.page_size for row in rows)
        sequence = work.batch if self.given.get("kv_batch_idx") is None else existing(work.entry, table.shape[0])
        return tuple(table.load(sequence, place) for place in places)

    @property
    def total(self) -> fly.Value:
        """Tiles of the launch. For packed sequences `seq_len` is all of their queries: some tiles are empty."""
        tiles: fly.Value
        if self.packed:
            tiles = (self.seq_len // self.block_m + self.batch) * self.heads * self.splits
        else:
            tiles = fly.ceil_div(self.seq_len, self.block_m) * self.heads * self.batch * self.splits
        return tiles

    def take(self) -> fly.Value:
        """A number that no other block has had, by one thread; its answer takes as long as a key tile."""
        return fly.fetch_add(1, self.counters.at(0)) + fly.grid_dim.x

    def finish(self) -> None:
        """By one thread of each block at its end: the last one leaves the counters as it found them."""
        ended = self.counters.at(1)
        with fly.when(fly.fetch_wrap(fly.grid_dim.x - 1, ended) == fly.grid_dim.x - 1):
            self.counters.store(fly.i32(0), 0)

    def find(self, number: fly.Value) -> Work:
        """The tile of a number, or of the next one that is not empty; its `batch` is `STOP` when there is none."""
        if not self.ragged:
            return self._stopped(number, self._dense(number))
        describe = self._packed if self.packed else self._dense_in_use
        start = (number, *describe(number))
        for _ in (search := fly.while_(start, lambda c: (c[0] < self.total) & c[1])):
            following = self.take()
            search.next(following, *describe(following))
        number, _, described = search.results
        return self._stopped(number, described)

    def _stopped(self, number: fly.Value, described: tuple[Any, ...]) -> Work:
        batch, *rest = described
        work = self.work(fly.select(number < self.total, batch, STOP), *rest)
        entries = self.given.get("kv_batch_idx")
        if entries is None:
            return replace(work, entry=0 if self.packed_keys else work.batch)
        return replace(work, entry=entries.load(self._existing(batch)))

    def _existing(self, batch: fly.Value) -> fly.Value:
        """A sequence that exists, for numbers past the launch's end too."""
        return existing(batch, self.batch)

    def _in_use(self, batch: fly.Value, queries: Any, k_first: Any, keys: Any) -> tuple[Any, Any, Any]:
        """(queries, first key, keys) of a sequence that count, of those that it has."""
        batch = self._existing(batch)

        def cut(name: str, length: Any) -> Any:
            used = self.given.get(name)
            return length if used is None else fly.minimum(fly.maximum(used.load(batch), 0), length)

        queries = cut("seqused_q", queries)
        if self.page_size is None:
            keys = cut("seqused_kv", keys)
        else:
            table, used = self.given.get("block_table"), self.given.get("seqused_kv")
            keys = paged_length(table, self.page_size, self.cu_seqlens_kv, batch, used)
        if self.given.get("cache_leftpad") is None:
            return queries, k_first, keys
        skipped = cut("cache_leftpad", keys)
        return queries, k_first + skipped, keys - skipped

    def _dense_in_use(self, number: fly.Value) -> tuple[fly.Value, tuple[Any, ...]]:
        """Whether the tile is empty, and what it is."""
        described = self._dense(number)
        return described[2] >= described[5], described

    def _dense(self, number: fly.Value) -> tuple[Any, ...]:
        if self.lists:
            number = fly.minimum(number, self.total - 1)  # lists are read for what it gives
        slices, blocks = self.heads * self.batch * self.splits, fly.ceil_div(self.seq_len, self.block_m)
        first_slice = number // (self.section * blocks) * self.section
        beside = fly.minimum(self.section, slices - first_slice)
        inside = number - first_slice * blocks
        block, slice_ = inside // beside, first_slice + inside % beside
        head_of_batch = slice_ // self.splits
        q_first: Any
        k_first: Any
        q_first, queries, k_first, keys = 0, self.seq_len, 0, self.seq_len_kv
        if self.bounded:
            q_first = k_first = fly.i32(0)
            queries, k_first, keys = self._in_use(head_of_batch // self.heads, queries, k_first, keys)
        return (
            head_of_batch // self.heads,
            head_of_batch % self.heads,
            # a list is not known to be short or long, but many a mask shows later queries more
            (blocks - 1 - block if self.causal or self.lists else block) * self.block_m,
            slice_ % self.splits,
            q_first,
            queries,
            k_first,
            keys,
        )

    def _packed(self, number: fly.Value) -> tuple[fly.Value, tuple[Any, ...]]:
        """Whether the tile is empty, and what it is.

        Sequence b owns the row blocks from cu_seqlens_q[b] // block_m + b on: at least as many as it has.
        """
        offsets, side = self.cu_seqlens_q, self.heads * self.splits
        assert offsets is not None
        slot, inside = number // side, number % side

        def first_slot(b: Any) -> fly.Value:
            first: fly.Value = offsets.load(b) // self.block_m + b
            return first

        # the last sequence whose blocks start at the slot or before
        for low, high in (search := fly.while_((fly.i32(0), self.batch), lambda c: c[1] - c[0] > 1)):
            middle = (low + high) // 2
            after = first_slot(middle) <= slot
            search.next(fly.select(after, middle, low), fly.select(after, high, middle))
        batch, _ = search.results
        q_first, q_end = offsets_of(offsets, batch, self.seq_len)
        if self.page_size is None and self.packed_keys:
            assert self.cu_seqlens_kv is not None
            k_first, k_end = offsets_of(self.cu_seqlens_kv, batch, self.seq_len_kv)
        else:
            k_first = fly.i32(0)
            k_end = k_first if self.packed_keys else self.seq_len_kv
        block, queries = slot - first_slot(batch), q_end - q_first
        cut = not {"seqused_q", "seqused_kv", "cache_leftpad", "block_table"}.isdisjoint(self.given.features.operands)
        if cut:
            queries, k_first, keys = self._in_use(batch, queries, k_first, k_end - k_first)
        blocks = fly.ceil_div(queries, self.block_m)
        empty = (block < 0) | (block >= blocks)
        described = (
            batch,
            inside // self.splits,
            (blocks - 1 - block if self.causal else block) * self.block_m,
            inside % self.splits,
            q_first,
            queries,
            k_first,
            keys if cut else k_end - k_first,
        )
        return empty, described

    def work(
        self,
        batch: fly.Value,
        head: fly.Value,
        first_row: fly.Value,
        split: fly.Value,
        q_first: Any,
        queries: Any,
        k_first: Any,
        keys: Any,
        *steps: fly.Value,
    ) -> Work:
        """The tile that these numbers describe; `steps`: first_tile, full_tiles, last_tile of a list that has been
        read."""
        range_ = self.given.key_range(queries, keys, self.causal)
        full, last = range_.tiles(first_row, self.block_m, self.block_n)
        if self.lists:
            seen = SeenTiles(range_.skipped(first_row, self.block_m, self.block_n)[1], full)
            return self._listed((batch, head, first_row, split, q_first, k_first), range_, seen, steps)
        if not range_.hides_first:
            first, full, end = split_tiles(full, last, split, self.splits)
            whole = first
        else:
            unseen, whole = range_.skipped(first_row, self.block_m, self.block_n)
            first, full, end = split_tiles(full, last, split, self.splits, unseen)
            whole = fly.minimum(fly.maximum(whole, first), end)
        range_ = replace(range_, stop=fly.minimum(end * self.block_n, keys))
        last = fly.maximum(end, first + 1)
        return Work(batch, head, first_row, split, q_first, k_first, range_, first, whole, full, last)

    def _listed(
        self,
        place: tuple[Any, Any, Any, Any, Any, Any],
        range_: KeyRange,
        seen: SeenTiles,
        steps: tuple[fly.Value, ...],
    ) -> Work:
        """The tile at a place, of a list; the list is read where its `steps` are not known."""
        batch, head, first_row, split, *_ = place
        listed = None
        if not steps:
            tiles = fly.ceil_div(range_.keys, self.block_n)
            listed = TileList.of(self.given, self._existing(batch), head, first_row, self.block_n, tiles, alone)
            steps = split_tiles(listed.whole_steps, listed.steps, split, self.splits)
        first, partial, end = steps
        # a part without steps takes one past the list's end: parts with fewer steps are the last ones
        last = fly.maximum(end, first + 1)
        return Work(*place, range_, first, first, partial, last, seen=seen, listed=listed)

    def queries_of(self, work: Work) -> Sequence:
        """A tile's sequence in the tensors of queries, to be indexed by row and head."""
        if self.packed:
            return Sequence(None, work.q_first, work.keys.queries)
        return Sequence(work.batch, None, work.keys.queries)

    def rows_of(self, work: Work, tensor: fly.Tensor, pack: int) -> fly.Tensor | PackedRows:
        """A tile's rows of (B, S, H, D) or (total, H, D), by (row, column)."""
        sequence = self.queries_of(work)
        if pack == 1:
            return sequence.matrix(tensor, work.head)
        return PackedRows(sequence.matrix(tensor, slice(None)), work.head * pack, pack)

    def vector_of(self, work: Work, tensor: fly.Tensor, pack: int) -> fly.Tensor | PackedVector:
        """A tile's rows of (B, H, S) or (H, total)."""
        if pack == 1:
            return self.queries_of(work).vector(tensor, work.head)
        heads = tensor if self.packed else tensor[work.batch, :, :]
        return PackedVector(heads, work.q_first, work.head * pack, pack)


@dataclass(frozen=True)
class PackedRows:
    """`pack` heads of an (S, H, D) tensor from head `first` on, as one matrix: row r is query r // pack's.

    `pack` is a power of two.
    """

    tensor: fly.Tensor
    first: fly.Value
    pack: int

    def at(self, row: fly.Value, column: Any) -> fly.Pointer:
        """The address of an element."""
        return self.tensor.at(query_of(row, self.pack), self.first + (row & (self.pack - 1)), column)


@dataclass(frozen=True)
class PackedVector:
    """The same of an (H, S) tensor, whose queries start at `start`, as one vector."""

    tensor: fly.Tensor
    start: Any
    first: fly.Value
    pack: int

    def load(self, row: fly.Value) -> fly.Value:
        """One row's number."""
        return self.tensor.load(*self._place(row))

    def store(self, value: fly.Value, row: fly.Value) -> None:
        """Store one row's number."""
        self.tensor.store(value, *self._place(row))

    def _place(self, row: fly.Value) -> tuple[fly.Value, fly.Value]:
        return self.first + (row & (self.pack - 1)), query_of(row, self.pack) + self.start


def query_of(row: fly.Value, pack: int) -> fly.Value:
    """The query of a row where `pack` rows, a power of two, are one query's heads."""
    return row >> (pack.bit_length() - 1) if pack > 1 else row


@dataclass(frozen=True)
class Board:
    """Where a block's producer publishes tiles to its consumers: a ring of two descriptions of `size` i32."""

    numbers: fly.SharedMemory
    ring: Ring
    size: int

    @staticmethod
    def allocate(consumer_warps: int, lists: bool) -> Board:
        size = NUMBERS + STEPS if lists else NUMBERS
        return Board(fly.SharedMemory("work", "i32", 2 * size), Ring.allocate("work", 2, consumer_warps), size)

    def publish(self, at: Position, work: Work, schedule: Schedule) -> Position:
        """By one thread: let the consumers know the next tile, or that there is none."""
        self.ring.empty.wait(at.index, at.phase ^ 1)
        described = [work.batch, work.head, work.first_row, work.split]
        if schedule.bounded:
            described += [work.q_first, work.keys.queries, work.k_first, work.keys.keys]
        if schedule.lists:
            described += [work.first_tile, work.full_tiles, work.last_tile, fly.i32(0)]
        for i in range(0, len(described), 4):
            self.numbers.store(fly.from_elements(described[i : i + 4]), at.index * self.size + i, align=16)
        self.ring.full.arrive(at.index)
        return self.ring.next(at)

    def read(self, at: Position, schedule: Schedule) -> tuple[Work, Position]:
        """By all threads of a consumer: the next tile."""
        self.ring.wait(at)
        count = (NUMBERS if schedule.bounded else 4) + (STEPS if schedule.lists else 0)
        loaded: list[Any] = [
            fly.first_lane(x)
            for i in range(0, count, 4)
            for x in self.numbers.load(at.index * self.size + i, 4, align=16)
        ]
        self.ring.release(at)
        if not schedule.bounded:
            loaded[4:4] = [0, schedule.seq_len, 0, schedule.seq_len_kv]
        steps = loaded[8:11] if schedule.lists else ()
        return schedule.work(*loaded[:8], *steps), self.ring.next(at)
