"""Flash attention backward for Hopper (sm_90a): one fused kernel with five products, on WGMMA and TMA.

A block is a producer warpgroup and two consumer warpgroups; a consumer owns 64 keys of the block's 128, whose dK and
dV it sums up in registers, and queries pass by in tiles of `block_m`.

| who | registers | what |
|---|---|---|
| producer, one thread | few | K and V once, then Q, dO and the rows' statistics of tile after tile, by TMA |
| consumer warpgroups | most | S = K Q^T, dP = V dO^T; dV += P^T dO, dK += dS^T Q; a part of dQ = dS K |

S and dP have keys as rows, so that P and dS are register operands of dV and dK as they are. dS goes to shared memory
besides, from where both consumers read all of it: each makes half of the tile's dQ, and adds it to sums in global
memory (`sm90.dq_sums`), in an order that is not the same in every run.

A tile's steps in a consumer, and what is in flight meanwhile:

| | started before | then |
|---|---|---|
| 1 | S | wait for S; dP = V dO^T; P |
| 2 | dP | dV += P^T dO; wait for dP; dS, to shared memory, a barrier of the consumers |
| 3 | dV | dQ = dS K, dK += dS^T Q; wait for dQ; add it up |
| 4 | dK | the next tile's S; wait for dK |

dS has two slots: whoever writes the second next tile's has passed a barrier at which the other had read this one's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

import fly
from fly.backends.nvvm import tma, wgmma
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    barrier_sync,
    elect_one,
    fence_async_shared,
    setmaxnreg_dec,
    setmaxnreg_inc,
    store_matrices,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import Position, Ring, init_all
from fly.backends.nvvm.wgmma import UNIT, Operand
from fly.backends.target import target
from fly.ir.dtypes import dtype as dtype_of
from fly.runtime.device import device_of

from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import turned, turned_layout, weights
from .problem.mask import KeyRange, QueryRange, TileRange
from .problem.scores import LOG2_E
from .sm90 import dq_sums as sums_of_dq
from .sm90.backward import (
    ALONG,
    CONSUMERS,
    DS_STAGES,
    REGISTERS,
    SLOT_ALIGNMENT,
    Sm90BackwardOptions,
    options_for,
    slot_bytes,
)
from .sm90.counters import counters_of
from .sm90.dq_sums import round_dq, slot_of, store_rows
from .sm90.producer import Slots, clear_tail, entry_of
from .work.row_statistics import THREADS, lanes_of_row, row_statistics
from .work.sequences import Sequence as Tokens
from .work.sequences import Uniform, alone, tokens_of
from .work.sink_gradients import sink_gradients
from .work.steps import BoundKernel, Steps, aligned, bind_kernel
from .work.tile_scheduler import fold_grid

WORKS = 2  # numbers of works that are known ahead
CLEARED = 2  # first named barrier of the consumers' own: rows past the end are zeros
WRITTEN = 1  # named barrier: dS of all keys is in shared memory


@dataclass(frozen=True)
class _Head:
    """One query head of a block of keys: a `problem.scores.Place`."""

    batch: fly.Value
    head: fly.Value
    keys: KeyRange
    split: bool = False


@dataclass(frozen=True)
class _Work:
    """What a block works on at a time: keys of a key head from `first_key` on, and the query tiles that see some."""

    batch: fly.Value
    kv_head: fly.Value
    first_key: fly.Value
    keys: Tokens
    queries: Tokens
    seen: KeyRange
    inverse: QueryRange
    tiles: TileRange

    @property
    def shift(self) -> fly.Value | None:
        """How far behind a multiple of `ALONG` packed queries start: copies of their statistics start there."""
        return None if self.queries.index is not None else self.queries.start % ALONG

    @property
    def exists(self) -> fly.Value:
        """Whether any query sees any of the keys."""
        return self.tiles.first < self.tiles.end


@dataclass(frozen=True)
class _Schedule:
    """The launch's works, numbered in the order in which they start: key blocks, key heads, sequences.

    Under causality the first key blocks, which more queries see, come first. `blocks`: of a sequence.
    """

    given: BoundFeatures
    options: Sm90BackwardOptions
    blocks: fly.Value
    kv_heads: fly.Value
    group: fly.Value
    sequences: fly.Value
    tokens: tuple[Any, Any]
    offsets: tuple[fly.Tensor | None, fly.Tensor | None]
    counters: fly.Tensor

    @property
    def total(self) -> fly.Value:
        total: fly.Value = self.blocks * self.kv_heads * self.sequences
        return total

    def find(self, number: fly.Value, uniform: Uniform) -> _Work:
        """The work of a number."""
        options, given = self.options, self.given
        above = number // self.blocks
        batch = above // self.kv_heads
        used = given.get("seqused_q"), given.get("seqused_kv")
        sides = zip(self.tokens, self.offsets, used, strict=True)
        queries, keys = (Tokens.of(n, of, batch, used, uniform=uniform) for n, of, used in sides)
        first_key = (number - above * self.blocks) * options.block_n
        seen = given.key_range(queries.length, keys.length, options.causal)
        inverse = QueryRange.of(seen, open_end=not options.features.modifies)
        tiles = inverse.tiles(first_key, options.block_n, options.block_m)
        # keys past the end would have weights: in the block with any, all tiles are masked
        end = fly.select(first_key < keys.length, tiles.end, tiles.first)
        tail = first_key + options.block_n > keys.length
        tiles = TileRange(tiles.first, fly.select(tail, end, tiles.whole_from), tiles.whole_end, end)
        return _Work(batch, above - batch * self.kv_heads, first_key, keys, queries, seen, inverse, tiles)

    def heads(self, work: _Work) -> tuple[fly.Value, fly.Value]:
        """The query heads of a work's key head: (first, end)."""
        first = work.kv_head * self.group
        return first, first + self.group


@dataclass(frozen=True)
class _Statistics:
    """A number for each query of a tile, beside the tile's slot."""

    memory: fly.Pointer
    numbers: int

    @staticmethod
    def allocate(name: str, numbers: int, stages: int) -> _Statistics:
        return _Statistics(fly.alloc_shared(name, slot_bytes(numbers) * stages, SLOT_ALIGNMENT), numbers)

    @property
    def bytes(self) -> int:
        """That a copy brings."""
        return 4 * self.numbers

    def at(self, at: Position) -> fly.Pointer:
        """A slot."""
        return self.memory.offset(at.index * slot_bytes(self.numbers))


@dataclass(frozen=True)
class _Buffers:
    """Shared memory of one block; `numbers`: of works, beside their ring."""

    k: Slots
    v: Slots
    q: Slots
    dout: Slots
    lse2: _Statistics
    delta: _Statistics
    ds: fly.Pointer
    numbers: fly.SharedMemory
    works: Ring

    @staticmethod
    def allocate(options: Sm90BackwardOptions) -> _Buffers:
        warps = CONSUMERS * WARPGROUP // 32
        tiles, stages = options.tiles, options.slots
        return _Buffers(
            *(Slots.allocate(name, tiles[name], stages[name], warps) for name in ("k", "v", "q", "dout")),
            _Statistics.allocate("lse2", options.numbers, options.stages),
            _Statistics.allocate("delta", options.numbers, options.dout_stages),
            fly.alloc_shared("ds", options.ds_tile.bytes * DS_STAGES, 1024),
            fly.SharedMemory("work", "i32", WORKS),
            Ring.allocate("work", WORKS, warps),
        )

    @property
    def rings(self) -> list[Ring]:
        return [self.k.ring, self.v.ring, self.q.ring, self.dout.ring, self.works]


@fly.kernel
def flash_attn_sm90_bwd(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    dout: fly.TensorMap,
    lse2: fly.TensorMap,
    delta: fly.TensorMap,
    dq_sums: fly.Tensor,
    dk: fly.Tensor,
    dv: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    counters: fly.Tensor,
    blocks: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    tokens: fly.i32,  # type: ignore[valid-type]
    sequences: fly.i32,  # type: ignore[valid-type]
    scale_log2: fly.f32,  # type: ignore[valid-type]
    group: fly.i32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, dq_sums += dS k.

    q, dout: maps of (B, Sq, H, D) tensors, k, v of (B, Skv, Hkv, D), lse2 and delta of (B, H, Sq) f32
    (`work.row_statistics`), packed ones with B = 1; dk, dv (B, Skv, Hkv, D) or packed (tokens, Hkv, D) with (B + 1,)
    i32 offsets; dq_sums: see `sm90.dq_sums`; `counters`: see `sm90/counters.py`; `blocks` of keys has the
    longest sequence; `tokens` is Sq, or all queries of packed sequences, `group` H / Hkv. Any one-dimensional grid.
    """
    fly.occupancy(min_blocks=1)
    given = options.features.bind(operands)
    schedule = _Schedule(
        given,
        options,
        blocks,
        dk.shape[-2],
        group,
        sequences,
        (tokens, tokens_of(dk, cu_seqlens_kv)),
        (cu_seqlens_q, cu_seqlens_kv),
        counters,
    )
    buffers = _Buffers.allocate(options)
    init_all(buffers.rings)
    warpgroup = warpgroup_id()
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(REGISTERS[0])
        with fly.when((fly.wave_id() == 0) & elect_one()):
            _Producer(schedule, buffers, {"q": q, "k": k, "v": v, "dout": dout, "lse2": lse2, "delta": delta}).run()
    with fly.when(warpgroup != 0):
        setmaxnreg_inc(REGISTERS[1])
        dtype = dtype_of(q.spec.dtype)
        _Consumer(schedule, buffers, warpgroup - 1, scale_log2, dtype, dq_sums).run(dk, dv)


@dataclass(frozen=True)
class _Producer:
    """The one thread that takes works and fills shared memory."""

    schedule: _Schedule
    buffers: _Buffers
    maps: dict[str, fly.TensorMap]

    def run(self) -> None:
        """All of the block's works."""
        schedule = self.schedule
        number = fly.block_id.x
        start = tuple(Position.start() for _ in range(4))
        carry = (number, start, self._publish(Position.start(), number))
        for number, places, works_at in (works := fly.while_(carry, lambda c: c[0] < schedule.total)):
            following = fly.fetch_add(1, schedule.counters.at(0)) + fly.grid_dim.x
            work = schedule.find(number, alone)
            places = fly.cond(work.exists, functools.partial(self._load, work, *places), lambda p=places: p)
            works.next(following, places, self._publish(works_at, following))
        ended = schedule.counters.at(1)
        with fly.when(fly.fetch_wrap(fly.grid_dim.x - 1, ended) == fly.grid_dim.x - 1):
            schedule.counters.store(fly.i32(0), 0)

    def _publish(self, at: Position, number: fly.Value) -> Position:
        """Let the consumers know the next work's number."""
        buffers = self.buffers
        buffers.works.empty.wait(at.index, at.phase ^ 1)
        buffers.numbers.store(number, at.index)
        buffers.works.full.arrive(at.index)
        return buffers.works.next(at)

    def _load(
        self, work: _Work, k_at: Position, v_at: Position, q_at: Position, dout_at: Position
    ) -> tuple[Position, ...]:
        """All tiles of a work."""
        options, buffers = self.schedule.options, self.buffers
        place = entry_of(work.keys), work.keys.start + work.first_key, work.kv_head
        k_at = self._copy("k", buffers.k, k_at, place)
        v_at = self._copy("v", buffers.v, v_at, place)
        for head, places in (heads := fly.range(*self.schedule.heads(work), carry=(q_at, dout_at))):
            for j, (q_at, dout_at) in (passing := fly.range(work.tiles.first, work.tiles.end, carry=places)):
                row, entry = work.queries.start + j * options.block_m, entry_of(work.queries)
                start = row if work.shift is None else row - work.shift
                place, numbers = (entry, row, head), (entry, head, start)
                passing.next(
                    self._copy("q", buffers.q, q_at, place, "lse2", buffers.lse2, numbers),
                    self._copy("dout", buffers.dout, dout_at, place, "delta", buffers.delta, numbers),
                )
            heads.next(*passing.results)
        return k_at, v_at, *heads.results

    def _copy(
        self,
        name: str,
        slots: Slots,
        at: Position,
        place: tuple[Any, ...],
        of: str | None = None,
        statistics: _Statistics | None = None,
        first: tuple[Any, ...] = (),
    ) -> Position:
        """A tile, panel by panel, and the rows' numbers of one kind that come with it."""
        tile = slots.tile
        barrier = slots.ring.acquire(at, tile.bytes + (0 if statistics is None else statistics.bytes))
        for panel in range(tile.panels):
            corner = (*place, panel * tile.panel_columns)
            tma.load(self.maps[name], slots.at(at).offset(panel * tile.panel_bytes), corner, barrier)
        if of is not None and statistics is not None:
            tma.load(self.maps[of], statistics.at(at), first, barrier)
        return slots.ring.next(at)


@dataclass(frozen=True)
class _State:
    """What one tile hands to the next: the sums, products in flight, and where the rings are.

    `slot`: of dS.
    """

    dk: fly.Value
    dv: fly.Value
    scores: fly.Value
    q_at: Position
    dout_at: Position
    slot: fly.Value


@dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup."""

    schedule: _Schedule
    buffers: _Buffers
    index: fly.Value
    scale_log2: fly.Value
    dtype: fly.DType
    dq_sums: fly.Tensor

    @property
    def options(self) -> Sm90BackwardOptions:
        return self.schedule.options

    def run(self, dk: fly.Tensor, dv: fly.Tensor) -> None:
        """All of the block's works."""
        schedule, given = self.schedule, self.schedule.given
        number, works_at = self._next(Position.start())
        carry = (number, (*(Position.start() for _ in range(4)), fly.i32(0)), works_at)
        for number, places, works_at in (loop := fly.while_(carry, lambda c: c[0] < schedule.total)):
            work = schedule.find(number, fly.first_lane)
            sum_k, sum_v, *places = _OfWork(**vars(self), work=work).sums(places)
            first, count = work.first_key + self.index * 64, work.keys.length
            factor = given.scale_kept(self.scale_log2 * (1 / LOG2_E))
            store_rows(work.keys.matrix(dv, work.kv_head), first, count, given.scale_kept(sum_v), self.dtype)
            store_rows(work.keys.matrix(dk, work.kv_head), first, count, sum_k * factor, self.dtype)
            following, works_at = self._next(works_at)
            loop.next(following, tuple(places), works_at)

    def _next(self, at: Position) -> tuple[fly.Value, Position]:
        """The number of the next work."""
        works = self.buffers.works
        works.wait(at)
        number = fly.first_lane(self.buffers.numbers.load(at.index))
        works.release(at)
        return number, works.next(at)


@dataclass(frozen=True)
class _OfWork(_Consumer):
    """A consumer at one of its works."""

    work: _Work

    def sums(self, places: tuple[Any, ...]) -> tuple[Any, ...]:
        """dK and dV of the consumer's keys, and where the rings and dS's slots are; zeros if no query sees them."""
        options = self.options
        zeros = tuple(fly.broadcast(fly.f32(0.0), dim // 2) for dim in (options.head_dim, options.head_dim_v))
        result: tuple[Any, ...] = fly.cond(
            self.work.exists, lambda: self._added_up(zeros, *places), lambda: (*zeros, *places)
        )
        return result

    @property
    def layout(self) -> fly.AccumulatorLayout:
        """Of S and dP: keys by queries."""
        return fly.AccumulatorLayout(self.options.atom(self.options.block_m, self.dtype.name), "m")

    def _added_up(
        self,
        zeros: tuple[fly.Value, ...],
        k_at: Position,
        v_at: Position,
        q_at: Position,
        dout_at: Position,
        slot: fly.Value,
    ) -> tuple[Any, ...]:
        k, v, work = self.buffers.k, self.buffers.v, self.work
        for slots, at in ((k, k_at), (v, v_at)):
            slots.ring.wait(at)
            if work.keys.bounded:
                clear_tail(slots.tile, slots.at(at), work.keys.length - work.first_key, CLEARED, self.index)
        carry = (*zeros, q_at, dout_at, slot)
        of_keys = _OfKeys(**vars(self), k_at=k_at, v_at=v_at)
        for head, state in (loop := fly.range(*self.schedule.heads(work), carry=carry)):
            loop.next(*of_keys.head(head, *state))
        dk, dv, q_at, dout_at, slot = loop.results
        for slots, at in ((k, k_at), (v, v_at)):
            slots.ring.release(at)
        return dk, dv, k.ring.next(k_at), v.ring.next(v_at), q_at, dout_at, slot


@dataclass(frozen=True)
class _OfKeys(_OfWork):
    """A consumer at a work whose K and V are there."""

    k_at: Position
    v_at: Position

    def head(
        self, head: fly.Value, dk: fly.Value, dv: fly.Value, q_at: Position, dout_at: Position, slot: fly.Value
    ) -> tuple[Any, ...]:
        """All tiles of one query head."""
        tiles = self.work.tiles
        place = _Head(self.work.batch, head, self.work.seen)
        given = self.schedule.given.at(place)
        state = _State(dk, dv, self.scores(q_at, tiles.first), q_at, dout_at, slot)
        first, last = fly.first_lane(fly.i32(0) + tiles.first), fly.first_lane(tiles.end - 1)
        whole_from = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_from, first), last))
        whole_end = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_end, whole_from), last))
        parts = [(first, whole_from, True), (whole_from, whole_end, False), (whole_end, last, True)]
        if self.options.features.masks_every_tile:
            parts = [(first, last, True)]
        for begin, stop, masked in parts:
            for j, carried in (loop := fly.range(begin, stop, carry=state)):
                loop.next(self.step(j, carried, place, given, masked=masked))
            state = loop.results
        state = self.step(last, state, place, given, masked=True, last=True)
        return state.dk, state.dv, state.q_at, state.dout_at, state.slot

    def _own_rows(self, slots: Slots, at: Position) -> Operand:
        """The consumer's keys of K or V."""
        return slots.operand(at, units=self.index * (64 * slots.tile.swizzle // UNIT))

    def _arrived(self, slots: Slots, at: Position, j: Any) -> None:
        """Wait for tile j's slot; what is behind the sequence's end is no other sequence's then, but zeros."""
        slots.ring.wait(at)
        if self.work.queries.bounded:
            left = self.work.queries.length - j * self.options.block_m
            clear_tail(slots.tile, slots.at(at), left, CLEARED, self.index)

    def scores(self, at: Position, j: Any) -> fly.Value:
        """Start K Q^T of tile j."""
        options, q = self.options, self.buffers.q
        self._arrived(q, at, j)
        rows = self._own_rows(self.buffers.k, self.k_at)
        atom = options.atom(options.block_m, self.dtype.name)
        return wgmma.issue(atom, rows, q.operand(at), options.head_dim // atom.k)

    def excess(self, at: Position, j: Any) -> fly.Value:
        """Start V dO^T of tile j."""
        options, dout = self.options, self.buffers.dout
        self._arrived(dout, at, j)
        rows = self._own_rows(self.buffers.v, self.v_at)
        atom = options.atom(options.block_m, self.dtype.name)
        return wgmma.issue(atom, rows, dout.operand(at), options.head_dim_v // atom.k)

    def step(
        self, j: fly.Value, state: _State, place: _Head, given: BoundFeatures, *, masked: bool, last: bool = False
    ) -> _State:
        """One tile of queries, whose S is in flight; then the next one's is, but behind the last."""
        options, buffers, dtype = self.options, self.buffers, self.dtype.name
        q, dout = buffers.q, buffers.dout
        first_query = j * options.block_m
        (raw,) = wgmma.wait(0, state.scores)
        started = self.excess(state.dout_at, j)
        fragment = fly.Fragment(self.layout, ((raw,),))
        queries = fly.RowVector.full(turned_layout(self.layout), 1, 0.0).rows().map(lambda row: row + first_query)
        count = self.work.queries.length if self.work.queries.bounded and masked else None

        def numbers(of: _Statistics, at: Position, past_the_end: float) -> fly.RowVector:
            loaded = self._numbers(of.at(at))
            if count is None:
                return loaded
            return loaded.map(lambda x, row: fly.select(row < count, x, past_the_end), queries)

        lse2 = numbers(buffers.lse2, state.q_at, math.inf)
        first_key = self.work.first_key + self.index * 64

        def hide(scores: fly.Fragment) -> fly.Fragment:
            return given.mask(self._limit(scores, first_query), queries, first_key, place) if masked else scores

        made = weights(turned(fragment), given, place, queries, first_key, self.scale_log2, lse2, hide, first_query)
        p = self._narrow(made.of_values)
        atom = options.atom(options.head_dim_v, dtype)
        dv = wgmma.issue(atom, p, dout.operand(state.dout_at, along_rows=True), options.block_m // atom.k, state.dv)
        (excess,) = wgmma.wait(1, started)
        delta = numbers(buffers.delta, state.dout_at, 0.0).map(given.of_kept)
        products = turned(fly.Fragment(self.layout, ((excess,),)))
        less = products.map(lambda x, r, c: -products.spread(delta, r))
        products = products.map(lambda x, r, c: x + less.tiles[r][c])
        ds = self._narrow(made.score_gradients(products, less).raw)
        self._put(ds, state.slot)
        started = self._dq(state.slot)
        atom = options.atom(options.head_dim, dtype)
        dk = wgmma.issue(atom, ds, q.operand(state.q_at, along_rows=True), options.block_m // atom.k, state.dk)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        part, dv = wgmma.wait(1, started, dv)
        dout.ring.release(state.dout_at)
        tile = sums_of_dq.place_of(self.dq_sums, *self._sums_of(place, j), self.index, options)
        sums_of_dq.add(part, tile)
        scores = state.scores if last else self.scores(q_next, j + 1)
        (dk,) = wgmma.wait(0 if last else 1, dk)
        q.ring.release(state.q_at)
        return _State(dk, dv, scores, q_next, dout_next, state.slot ^ 1)

    def _sums_of(self, place: _Head, j: fly.Value) -> tuple[Any, Any, Any]:
        """Where the sums of a tile are: (entry, head, tile)."""
        slot = slot_of(self.work.queries, place.batch, self.options)
        return (place.batch, place.head, j) if slot is None else (0, place.head, slot + j)

    def _numbers(self, memory: fly.Pointer) -> fly.RowVector:
        """A number for each query, as rows of turned scores."""
        shift = self.work.shift
        at = memory if shift is None else memory.offset(shift * 4)
        columns = fly.ColumnVector.load_shared(self.layout, 1, at, fly.f32, side_by_side=shift is None)
        return fly.RowVector(turned_layout(self.layout), columns.values)

    def _limit(self, scores: fly.Fragment, first_query: fly.Value) -> fly.Fragment:
        """-inf where a query does not see a key, or there is no such key."""
        count = self.work.keys.length
        start = self.work.first_key + self.index * 64
        keys = fly.RowVector.full(self.layout, 1, 0.0).rows().map(lambda row: row + start)
        limited = self.work.inverse.apply(turned(scores), keys, first_query)
        return turned(limited.map(lambda x, r, c: fly.select(limited.spread(keys, r) < count, x, float("-inf"))))

    def _narrow(self, fragment: fly.Fragment) -> tuple[fly.Value, ...]:
        """Turned scores as the A registers of a product over queries, 16 each."""
        narrow = fragment.tiles[0][0].to(self.dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def _put(self, ds: tuple[fly.Value, ...], slot: fly.Value) -> None:
        """The consumer's keys of dS to shared memory, and meet the others."""
        tile = self.options.ds_tile
        lane, warp = fly.lane_id(), fly.thread_id.x % WARPGROUP // 32
        row_in = lane % 8
        row = self.index * 64 + warp * 16 + lane // 8 % 2 * 8 + row_in
        memory = self.buffers.ds.offset(slot * tile.bytes + row * tile.swizzle)
        for i, operand in enumerate(ds):
            panel, inside = divmod(16 * i, tile.panel_columns)
            piece = (lane // 16 + inside // 8) ^ row_in
            words = operand.bitcast(fly.i32)
            store_matrices(memory.offset(panel * tile.panel_bytes + piece * UNIT), [words[w] for w in range(4)])
        fence_async_shared()
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)

    def _dq(self, slot: fly.Value) -> fly.Value:
        """Start the consumer's piece of dS K."""
        options = self.options
        ds, k = options.ds_tile, self.buffers.k
        atom = options.atom(options.dq_columns, self.dtype.name)
        at = slot * (ds.bytes // UNIT)
        if options.block_m == 64:
            # half of K's columns
            rows = Operand(self.buffers.ds, ds, True, at)
            columns = self.index * (k.tile(0, options.dq_columns) // UNIT)
        else:
            rows = Operand(self.buffers.ds, ds, True, at + self.index * (ds.panel_bytes // UNIT))
            columns = fly.i32(0)
        return wgmma.issue(
            atom, rows, k.operand(self.k_at, units=columns, along_rows=True), options.block_n // atom.k
        )


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    See `flash_attn_generic_bwd.prepare`.
    """
    packed = tensors.get("cu_seqlens_q") is not None
    features = request.static_features
    options = options_for(request.head_dim, request.value_dim, request.causal, features, packed=packed)
    sequences, heads, block_m = request.batch, request.num_heads, options.block_m
    q, k, v, dout = ((t.unsqueeze(0) if packed else t) for t in (tensors[name] for name in ("q", "k", "v", "dout")))
    (entries, tokens), device = q.shape[:2], q.device
    tiles = tokens // block_m + sequences if packed else -(-tokens // block_m)
    pitch = -(-tokens // ALONG) * ALONG
    # only sizes and strides of these matter here
    numbers = torch.empty((entries, heads, pitch), dtype=torch.float32, device=device)[:, :, :tokens]
    sums = torch.empty((entries, heads, tiles * block_m, request.head_dim), dtype=torch.float32, device=device)
    rows = numbers[0] if packed else numbers
    own = {
        "dq_sums": sums,
        "lse2": rows,
        # not `delta`, which is the caller's
        "deltas": rows,
        "counters": counters_of(device).example,
        "blocks": -(-request.seq_len_kv // options.block_n),
        "tokens": tokens,
        "sequences": sequences,
        "scale_log2": request.scale_log2,
        "group": heads // request.num_kv_heads,
    }
    maps: dict[str, Any] = {
        name: fly.tensor_map(tensor, (1, tile.rows, 1, tile.panel_columns), swizzle=tile.swizzle)
        for (name, tile), tensor in zip(options.tiles.items(), (q, k, v, dout), strict=True)
    }
    maps |= dict.fromkeys(("lse2", "deltas"), fly.tensor_map(numbers, (1, 1, options.numbers)))
    steps: list[BoundKernel] = []

    def add(
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        statics: dict[str, Any],
        operands: Sequence[str] = (),
        more: Tensors = MappingProxyType({}),
        delta: str = "deltas",
    ) -> None:
        grid, fold = fold_grid(grid)
        arguments = {**tensors, **own, **more}
        called = {"delta": delta}
        steps.append(bind_kernel(kernel, grid, threads, arguments, statics | fold, called=called, operands=operands))

    lines, statics = THREADS // lanes_of_row(request.value_dim), {"head_dim": request.value_dim}
    add(row_statistics, (tiles * block_m // lines, heads, entries), THREADS, statics)
    if "delta" in tensors:
        blocks = -(-tokens // lines), heads, entries
        add(row_statistics, blocks, THREADS, statics, more={"dq_sums": None}, delta="delta")
    if (dsink := tensors.get("dsink")) is not None:
        add(sink_gradients, (dsink.shape[0], heads, sequences), target(device_of(device).target).wave_size, {})
    statics = {"options": options}
    works = -(-request.seq_len_kv // options.block_n) * request.num_kv_heads * sequences
    grid = min(device_of(device).compute_units, works), 1, 1
    add(flash_attn_sm90_bwd, grid, options.threads, statics, request.operands, more=maps)
    blocks = -(-request.seq_len // block_m), heads, sequences
    add(round_dq, blocks, CONSUMERS * WARPGROUP, statics, request.operands)
    parts, nbytes = {}, 0
    for name in ("dq_sums", "lse2", "deltas"):
        parts[name] = nbytes
        nbytes += aligned(4 * (sums.numel() if name == "dq_sums" else entries * heads * pitch))
    return Steps(tuple(steps), parts, nbytes, {"counters": counters_of(device).address}).launch()
