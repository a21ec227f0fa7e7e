"""How the Hopper kernel's persistent blocks come to their work: tiles of the launch, handed out on demand.

Tiles are numbered in the order in which they should start. A block begins with the tile of its own number; when its
producer has loaded a tile's first keys (in decoding builds, whose tiles take long, its last ones) it takes the next
number from a counter in global memory, finds out what that tile is, and publishes it to the block's consumers through
shared memory. So blocks that got short tiles take more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fly
from fly.backends.nvvm.mbarrier import Position, Ring

from ..problem.features import NOTHING, BoundFeatures
from ..work.sequences import PagedSequence, Sequence, alone, existing, keys_of
from ..work.tile_list import PARTIAL
from ..work.tile_scheduler import STOP, Work

NUMBERS = 8  # i32 that describe a tile,
STEPS = 4  # and its part of a block mask's list
Coordinates = tuple[Any, Any, Any, Any]  # of a tile: batch, head, first row, part of the keys
Tokens = tuple[Sequence, Sequence | PagedSequence]  # of a sequence: where its queries and keys lie


@dataclass(frozen=True)
class Schedule:
    """The launch's sizes (i32 values and tensors), and how its tiles are numbered.

    A tile has `block_m` queries, of one head or of each head of a packed set; `heads` counts sets then. `section`
    heads at a time, row block after row block, the longest first; packed sequences one after the other, all heads of
    a row block side by side. `together` blocks of a cluster have neighbouring row blocks, one each, and go through
    the same key tiles. `given`: lengths, windows, entries of the batch and pages among a call's features;
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
    given: BoundFeatures = NOTHING
    page_size: int | None = None
    takes_late: bool = False
    together: int = 1

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

    @property
    def total(self) -> fly.Value:
        """Tiles of the launch. For packed sequences `seq_len` is all of their queries: some tiles are empty."""
        tiles: fly.Value
        if self.packed:
            tiles = (self.seq_len // self.block_m + self.batch) * self.heads * self.splits
        else:
            tiles = self._row_blocks() * self.together * self.heads * self.batch * self.splits
        return tiles

    def _row_blocks(self) -> fly.Value:
        """Of a slice, those of a cluster together counted as one; the last of these may have no query."""
        blocks: fly.Value = fly.ceil_div(self.seq_len, self.block_m * self.together)
        return blocks

    def _first_row(self, block: fly.Value, rank: fly.Value | int) -> fly.Value:
        """Of row block `block` of a slice, and of its part for the block of that rank."""
        of_rank: fly.Value = block if self.together == 1 else block * self.together + rank
        return of_rank * self.block_m

    def take_early(self, number: fly.Value | None) -> fly.Value | None:
        """The number of the tile behind the one that is about to be loaded, or None where blocks take it late.

        `number`: of that one where blocks are in clusters, which take turns: all of one have to know it at once.
        """
        if number is not None:
            following: fly.Value = number + fly.grid_dim.x
            return following
        return None if self.takes_late else self.take()

    def take(self) -> fly.Value:
        """A number that no other block has had, by one thread; its answer takes as long as a key tile."""
        return fly.fetch_add(1, self.counters.at(0)) + fly.grid_dim.x

    def finish(self) -> None:
        """By one thread of each block at its end: the last one leaves the counters as it found them."""
        if self.together > 1:
            return
        ended = self.counters.at(1)
        with fly.when(fly.fetch_wrap(fly.grid_dim.x - 1, ended) == fly.grid_dim.x - 1):
            self.counters.store(fly.i32(0), 0)

    def find(self, number: fly.Value, after: Work | None = None) -> Work:
        """The tile of a number, or of the next one that is not empty; its `batch` is `STOP` when there is none.

        `after`: one whose number was smaller, if there is any.
        """
        if not self.ragged:
            batch, *rest = self._dense(number)
            batch = self._or_stop(number, batch)
            return self.work((batch, *rest), *self._tokens(batch))
        describe = partial(self._packed_in_use, after) if self.packed else self._dense_in_use
        start = (number, *describe(number))
        for _ in (search := fly.while_(start, lambda c: (c[0] < self.total) & c[1])):
            following = self.take()
            search.next(following, *describe(following))
        number, _, (batch, *rest), tokens = search.results
        return self.work((self._or_stop(number, batch), *rest), *tokens)

    def _or_stop(self, number: fly.Value, batch: fly.Value) -> fly.Value:
        return fly.select(number < self.total, batch, STOP)

    def _tokens(self, batch: fly.Value) -> Tokens:
        """Where the tokens of a sequence lie; of one past the launch's end, those of one that exists."""
        numbers = {"seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", *PARTIAL} & set(self.given.operands)
        index = existing(batch, self.batch) if numbers else batch
        queries = Sequence.of(self.seq_len, self.cu_seqlens_q, index, self.given.get("seqused_q"), uniform=alone)
        return queries, self._keys(index)

    def keys_of_sequence(self, batch: fly.Value) -> Sequence | PagedSequence:
        """Where a sequence's keys lie, for who must know more than a published tile says: entries and pages."""
        return self._keys(existing(batch, self.batch))

    def _keys(self, index: Any) -> Sequence | PagedSequence:
        sizes = (self.seq_len_kv, self.cu_seqlens_kv, index)
        return keys_of(self.given, *sizes, None, self.page_size, alone)

    def _dense_in_use(self, number: fly.Value) -> tuple[fly.Value, Coordinates, Tokens]:
        """Whether the tile is empty, its place, and its sequence's tokens."""
        place = self._dense(number)
        tokens = self._tokens(place[0])
        return place[2] >= tokens[0].length, place, tokens

    def _dense(self, number: fly.Value) -> Coordinates:
        if self.lists:
            number = fly.minimum(number, self.total - 1)  # lists are read for what it gives
        rank: Any = 0
        if self.together > 1:
            number, rank = number // self.together, number % self.together
        slices, blocks = self.heads * self.batch * self.splits, self._row_blocks()
        first_slice = number // (self.section * blocks) * self.section
        beside = fly.minimum(self.section, slices - first_slice)
        inside = number - first_slice * blocks
        block, slice_ = inside // beside, first_slice + inside % beside
        head_of_batch = slice_ // self.splits
        return (
            head_of_batch // self.heads,
            head_of_batch % self.heads,
            # a list is not known to be short or long, but many a mask shows later queries more
            self._first_row(blocks - 1 - block if self.causal or self.lists else block, rank),
            slice_ % self.splits,
        )

    def _packed_in_use(self, after: Work | None, number: fly.Value) -> tuple[fly.Value, Coordinates, Tokens]:
        """The same of packed sequences.

        Sequence b owns the row blocks from cu_seqlens_q[b] // block_m + b on: at least as many as it has, and at
        least one, so that the sequence of a number lies no further behind `after`'s than their blocks do.
        """
        offsets, side = self.cu_seqlens_q, self.heads * self.splits
        assert offsets is not None
        slot, inside = number // side, number % side

        def first_slot(b: Any) -> fly.Value:
            first: fly.Value = offsets.load(b) // self.block_m + b
            return first

        start: tuple[Any, Any] = (fly.i32(0), self.batch)
        if after is not None:
            ahead = slot - (after.queries.start // self.block_m + after.batch)
            start = (after.batch, fly.minimum(after.batch + ahead + 1, self.batch))
        # the last sequence whose blocks start at the slot or before
        for low, high in (search := fly.while_(start, lambda c: c[1] - c[0] > 1)):
            middle = (low + high) // 2
            begun = first_slot(middle) <= slot
            search.next(fly.select(begun, middle, low), fly.select(begun, high, middle))
        batch, _ = search.results
        tokens = self._tokens(batch)
        block, blocks = slot - first_slot(batch), fly.ceil_div(tokens[0].length, self.block_m)
        empty = (block < 0) | (block >= blocks)
        place = (
            batch,
            inside // self.splits,
            (blocks - 1 - block if self.causal else block) * self.block_m,
            inside % self.splits,
        )
        return empty, place, tokens

    def work(
        self, place: Coordinates, queries: Sequence, kv: Sequence | PagedSequence, steps: tuple[fly.Value, ...] = ()
    ) -> Work:
        """The tile at a place; `steps`: see `Work.of`.

        A tile without any key is computed like the others, all masked: where a part of a list has no step, that is
        one past the list's end, since parts with fewer steps are the last ones.
        """
        work = Work.of(
            self.given,
            place,
            queries,
            kv,
            causal=self.causal,
            block_m=self.block_m,
            block_n=self.block_n,
            parts=self.splits,
            uniform=alone,
            steps=steps,
        )
        tiles = work.tiles
        if self.together > 1:
            # blocks of a cluster load the same key tiles, all that the last of their rows sees
            rows, keys = self.block_m * self.together, self.given.key_range(queries.length, kv.length, self.causal)
            tiles = replace(tiles, end=keys.tiles(place[2] // rows * rows, rows, self.block_n).end)
        return replace(work, tiles=replace(tiles, end=fly.maximum(tiles.end, tiles.first + 1)))

    def rows_of(self, work: Work, tensor: fly.Tensor, pack: int) -> fly.Tensor | PackedRows:
        """A tile's rows of (B, S, H, D) or (total, H, D), by (row, column)."""
        if pack == 1:
            return work.queries.matrix(tensor, work.head)
        return PackedRows(work.queries.matrix(tensor, slice(None)), work.head * pack, pack)

    def vector_of(self, work: Work, tensor: fly.Tensor, pack: int) -> fly.Tensor | PackedVector:
        """A tile's rows of (B, H, S) or (H, total)."""
        if pack == 1:
            return work.queries.vector(tensor, work.head)
        heads = tensor if self.packed else tensor[work.batch, :, :]
        return PackedVector(heads, work.queries.start, work.head * pack, pack)


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
class WorkRing:
    """Where a block's producer publishes tiles to its consumers: a ring of two descriptions of `size` i32."""

    numbers: fly.SharedMemory
    ring: Ring
    size: int

    @staticmethod
    def allocate(consumer_warps: int, lists: bool) -> WorkRing:
        size = NUMBERS + STEPS if lists else NUMBERS
        return WorkRing(fly.SharedMemory("work", "i32", 2 * size), Ring.allocate("work", 2, consumer_warps), size)

    def publish(self, at: Position, work: Work, schedule: Schedule) -> Position:
        """By one thread: let the consumers know the next tile, or that there is none."""
        self.ring.empty.wait(at.index, at.phase ^ 1)
        described = [work.batch, work.head, work.first_row, work.part]
        if schedule.bounded:
            described += [work.queries.start, work.queries.length, work.kv.start, work.kv.length]
        if schedule.lists:
            described += [work.tiles.first, work.tiles.whole_end, work.tiles.end, fly.i32(0)]
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
        batch, head, first_row, index, q_first, queries, k_first, keys, *steps = loaded
        # consumers go by rows of their own; keys come to them in shared memory
        tokens = Sequence(None, q_first, queries) if schedule.packed else Sequence(batch, None, queries)
        kv = Sequence(None, k_first, keys)
        return schedule.work((batch, head, first_row, index), tokens, kv, tuple(steps[:3])), self.ring.next(at)
