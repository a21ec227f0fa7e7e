"""A consumer warpgroup of the Hopper backward kernel: what it does with each tile of queries.

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

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    anew,
    barrier_sync,
    fence_async_shared,
    store_matrices,
    sync_warp,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import Position
from fly.backends.nvvm.wgmma import UNIT, Operand, PanelTile, WarpgroupAtom

from ..problem.dropout_tile import DecidedTile, decided_tile
from ..problem.features import BoundFeatures
from ..problem.gradients import HeadOfKeys, Weights, transposed, transposed_layout, weights
from ..problem.scores import LOG2_E
from ..work.fragments import row_numbers
from ..work.kept_pairs import KeptPairs
from . import group_parts
from .ahead import Ahead
from .backward import BLOCK_M, CONSUMERS, Sm90BackwardOptions
from .dq_sums import Sums, put
from .dropout import made_again, remade
from .exchange import Exchange
from .key_block import Block, Buffers
from .key_work import KeyWork, Place, with_sizes_anew
from .producer import Slots, clear_tail
from .stores import store_runs
from .walk import Walk

CLEARED = 2  # first named barrier of the consumers' own: rows past the end are zeros
WRITTEN = 1  # named barrier: dS of all keys is in shared memory
Loaded: TypeAlias = "fly.RowVector | None"  # numbers of a tile's queries, if they were loaded before


@dataclass(frozen=True)
class State:
    """What one tile hands to the next: the sums, what `Consumer.start` has in flight, and where the rings are.

    `slot`: of dS, or what else `Consumer.begin` says.
    """

    sums: tuple[fly.Value, ...]
    product: Any
    q_at: Position
    dout_at: Position
    slot: Any


@dataclass(frozen=True)
class Step:
    """One step of a walk over a query head's tiles; those that are not `masked` are seen whole.

    `first`, `last`: of all the head's.
    """

    number: fly.Value
    walk: Walk
    place: HeadOfKeys
    given: BoundFeatures
    masked: bool = True
    first: bool = False
    last: bool = False

    @property
    def following(self) -> Step:
        """The step behind, which may be `masked`."""
        return replace(self, number=self.number + 1, masked=True, first=False)


@dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a block; `work`: the block's; `sums`: of dQ.

    `exchange`: with the other block of a cluster. `ahead`: who clears sums of dQ, and knows when they are. `again`:
    makes the work again, for want of registers to keep it in over all tiles (`KeyBlocks.again`). `at_end`: the same,
    behind them. `held`: its keys of K and V in registers, once they are there.
    """

    options: Sm90BackwardOptions
    buffers: Buffers
    given: BoundFeatures
    work: KeyWork
    index: fly.Value
    scale_log2: fly.Value
    dtype: fly.DType
    sums: Sums
    exchange: Exchange | None
    ahead: Ahead | None
    again: Callable[[Any], KeyWork] | None
    at_end: Callable[[Any], KeyWork] | None
    held: Mapping[str, tuple[fly.Value, ...]] = field(default_factory=dict, kw_only=True)

    @property
    def block(self) -> Block:
        """The keys."""
        return self.work.block

    @property
    def walk(self) -> Walk:
        """The tiles, as they pass by; with a block mask, without its lists."""
        return self.work.walk

    def remade(self, step: Any) -> Self:
        """The same, with its work made again for what follows `step` (i32), where it is."""
        return self if self.again is None else self._with(self.again(step))

    def _with(self, work: KeyWork) -> Self:
        return replace(self, work=work, sums=Sums.of(self.sums.sums, work, self.sums.turns))

    @property
    def layout(self) -> fly.AccumulatorLayout:
        """Of S and dP: keys by queries."""
        return fly.AccumulatorLayout(WarpgroupAtom(BLOCK_M, self.dtype.name), "m")

    @property
    def first_row(self) -> Any:
        """The first of the consumer's keys in the block."""
        return self.index * BLOCK_M

    @property
    def first_key(self) -> Any:
        """The first of the consumer's keys."""
        return self.block.first_key + self.first_row

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        """dK and dV, or what of them the consumer sums up."""
        of_k, of_v = (fly.broadcast(fly.f32(0.0), n // 2) for n in (self.options.head_dim, self.options.head_dim_v))
        return of_k, of_v

    @property
    def factor(self) -> Any:
        """What dK and dQ are their sums times."""
        softmax_scale: Any = self.scale_log2 * (1 / LOG2_E)
        return self.given.scale_kept(softmax_scale)

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        """dK and dV of the consumer's keys, as far as they are among the sequence's first `count` (`written`)."""
        sum_k, sum_v = self.run()
        self.write_values(dv, sum_v, count)
        self.write_keys(dk, sum_k, count)

    def write_values(self, dv: fly.Tensor, values: fly.Value, count: fly.Value) -> None:
        """dV, from its sums."""
        self._write(dv, Place.VALUES, values, self.given.scale_kept, self.options.head_dim_v, count)

    def write_keys(self, dk: fly.Tensor, values: fly.Value, count: fly.Value) -> None:
        """dK, from its sums."""
        self._write(dk, Place.KEYS, values, lambda sums: sums * self.factor, self.options.head_dim, count)

    def _write(
        self,
        results: fly.Tensor,
        place: Place,
        sums: fly.Value,
        scaled: Callable[[fly.Value], fly.Value],
        columns: int,
        count: fly.Value,
    ) -> None:
        """dK or dV of the consumer's rows, of a part of the key head in float32 (`group_parts.place_of`)."""
        last = self._behind(place)
        if last is not self:
            results = with_sizes_anew(results, fly.i32(0) + int(place))
        block, written, values = last.block, count if last is self else last.work.written, scaled(sums)
        if self.options.parts > 1:
            first = last.first_key
            with fly.when(first < written):
                put(values, group_parts.place_of(results, block.keys, block.batch, block.part, first))
        else:
            view = block.keys.matrix(results, block.kv_head)
            store_runs(view, last.first_key, written, wgmma.runs(values.to(self.dtype)), columns)

    def round(self, dq: fly.Tensor) -> None:
        """In turn, behind all tiles: dq of those to which nobody adds behind the block (`Sums.round`)."""
        last = self._behind(Place.ROUNDED)
        near, tiles = last.work.near, last.work.tiles
        last.sums.round(dq, last.factor, last.work.heads, near.last_of(tiles), last.piece)

    def _behind(self, place: Place) -> Self:
        """The same behind all tiles: where work is made again there, nothing is kept for it, `index` neither."""
        if self.at_end is None:
            return self
        with fly.reread_ids():
            return replace(self._with(self.at_end(place)), index=warpgroup_id() - 1)

    def run(self) -> tuple[fly.Value, ...]:
        """The sums over all tiles of all query heads."""
        if self.buffers.random is not None:
            self.buffers.random.put(self.given.operands["rng_state"], self.given.operands["dropped"])
        zeros = self.zeros

        def all_heads() -> tuple[fly.Value, ...]:
            for i, (memory, tile, first_key) in enumerate(self.buffers.kept(self.options, self.block)):
                self.buffers.arrived.wait(i, 0)
                if self.block.keys.bounded:
                    clear_tail(tile, memory, self.block.keys.length - first_key, CLEARED, self.index)
            if self.ahead is not None:
                self.ahead.wait()
            working = replace(self, held=self._registers()) if self.options.held else self
            carry = (zeros, Position.start(), Position.start(), working.begin())
            for number, state in (loop := fly.range(*self._numbers_of_heads, carry=carry)):
                here = working.remade(number)
                loop.next(*here.head(here._head_of(number), *state))
            sums: tuple[fly.Value, ...] = loop.results[0]
            working.end(loop.results[-1], loop.results[1])
            return sums

        result: tuple[fly.Value, ...] = fly.cond(self.walk.exists, all_heads, lambda: zeros)
        return result

    @property
    def _numbers_of_heads(self) -> tuple[Any, Any]:
        """Of the query heads, from the first of all on, or from the block's first where work is made again."""
        return self.work.heads if self.again is None else (0, self.work.group)

    def _head_of(self, number: Any) -> Any:
        """The query head of such a number."""
        return number if self.again is None else self.work.heads[0] + number

    def begin(self) -> Any:
        """`State.slot` of the first tile."""
        return fly.i32(0)

    def end(self, slot: Any, q_at: Position) -> None:
        """What is left to do behind the last tile; `q_at`: one past its slot of Q."""

    def head(
        self, head: fly.Value, sums: tuple[fly.Value, ...], q_at: Position, dout_at: Position, slot: Any
    ) -> tuple[Any, ...]:
        """All tiles of one query head."""
        first, last = self._ends_of(head)
        state = State(sums, self.start(q_at, dout_at, first), q_at, dout_at, slot)
        state = self.step(self._through_last(last), self._through(first.number, last, state))
        return state.sums, state.q_at, state.dout_at, state.slot

    def _through_last(self, last: Step) -> Step:
        """The last step, of blocks in turn that of the first tile: where that is said, no number is kept for it."""
        if not self.options.thrift.turned:
            return last
        # as if there was one tile, the first, in step 0
        tiles = replace(last.walk.tiles, end=1)
        return replace(last, number=fly.i32(0), walk=replace(last.walk, tiles=tiles))

    def _ends_of(self, head: fly.Value) -> tuple[Step, Step]:
        """A query head's first step and its last."""
        block, place = self.block, HeadOfKeys(self.block.batch, head, self.work.seen)
        walk = self.walk.of_head(
            self.given, (block.batch, head), block.first_key, block.queries.length, fly.first_lane
        )
        given = self.given.at(place)
        first, last = fly.first_lane(fly.i32(0) + walk.tiles.first), fly.first_lane(walk.tiles.end - 1)
        return Step(first, walk, place, given, first=True), Step(last, walk, place, given, last=True)

    def _through(self, first: Any, last: Step, state: State) -> State:
        """Steps from that of number `first` to the `last`, which is not one of them."""
        tiles, end = last.walk.tiles, last.number
        whole_from = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_from, first), end))
        whole_end = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_end, whole_from), end))
        parts = [(first, whole_from, True), (whole_from, whole_end, False), (whole_end, end, True)]
        if last.walk.listed is not None:
            parts = parts[1:]
        if self.options.features.masks_every_tile or self.options.thrift.masks:
            parts = [(first, end, True)]
        for start, stop, masked in parts:
            for number, carried in (loop := fly.range(start, stop, carry=state)):
                loop.next(self.step(replace(last, number=number, masked=masked, last=False), carried))
            state = loop.results
        return state

    def _registers(self) -> dict[str, tuple[fly.Value, ...]]:
        """The consumer's keys of K and V, as `held`."""
        atom, found = WarpgroupAtom(BLOCK_M, self.dtype.name), {}
        for name, memory, columns in self._kept:
            tile, steps = self.options.tiles[name], -(-columns // atom.k)
            found[name] = wgmma.load_registers(atom, memory, tile, self.first_row, steps)
        return found

    @property
    def _kept(self) -> tuple[tuple[str, fly.Pointer, int], ...]:
        """Names, memory and columns of K and V."""
        options, buffers = self.options, self.buffers
        return ("k", buffers.k, options.head_dim), ("v", buffers.v, options.head_dim_v)

    def _own_rows(self, name: str, memory: fly.Pointer, column: int = 0) -> Operand | tuple[fly.Value, ...]:
        """The consumer's keys of K or V, from a column on."""
        if name in self.held:
            return self.held[name]
        tile = self.options.tiles[name]
        return Operand(memory, tile, False, self.first_row * (tile.swizzle // UNIT) + tile(0, column) // UNIT)

    def _tile(self, walk: Walk, number: Any, at: Position) -> Any:
        """Which tile a step's slot of Q holds, behind its arrival."""
        numbers = self.buffers.tiles
        if numbers is None:
            return walk.tile(number)
        # the lane that says when the slot is free is the only one that reads it: racecheck goes by threads
        releases = fly.thread_id.x % 32 == 0
        return fly.first_lane(fly.cond(releases, lambda: numbers.load(at.index), lambda: fly.i32(0)))

    def _arrived(self, slots: Slots, at: Position, tile: Callable[[], Any]) -> None:
        """Wait for a tile's slot; what is behind the sequence's end is no other sequence's then, but zeros."""
        slots.ring.wait(at)
        if self.block.queries.bounded:
            left = self.block.queries.length - tile() * BLOCK_M
            clear_tail(slots.tile, slots.at(at), left, CLEARED, self.index)

    def start(self, q_at: Position, dout_at: Position, step: Step) -> Any:
        """Start what of a step's products is in flight when the step begins."""
        return self.scores(q_at, step)

    def scores(self, at: Position, step: Step) -> fly.Value:
        """Start K Q^T of a step's tile."""
        options, q = self.options, self.buffers.q
        self._arrived(q, at, lambda: self._tile(step.walk, step.number, at))
        rows = self._own_rows("k", self.buffers.k)
        atom = WarpgroupAtom(BLOCK_M, self.dtype.name)
        return wgmma.issue(atom, rows, q.operand(at), -(-options.head_dim // atom.k))

    def excess(self, at: Position, j: Any, less: fly.Fragment | None = None) -> fly.Value:
        """Start V dO^T of tile j; with `less`, V dO^T - delta of a tile that is there."""
        options, dout = self.options, self.buffers.dout
        started = None if less is None else less.tiles[0][0]
        atom = WarpgroupAtom(BLOCK_M, self.dtype.name)
        for chunk, place in enumerate(dout.places(at)):
            if less is None:
                self._arrived(dout, place, lambda: j)
            rows = self._own_rows("v", self.buffers.v, dout.first_column(chunk))
            steps = -(-dout.columns(chunk, options.head_dim_v) // atom.k)
            started = wgmma.issue(atom, rows, dout.operand(place), steps, started)
        assert started is not None
        return started

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S is in flight; then the next one's is, but behind the last."""
        q, dout = self.buffers.q, self.buffers.dout
        j, ds, dv = self._through_ds(step, state)
        listed, (dk, _) = step.walk.listed, state.sums
        self._put(ds, state.slot)
        started = self._dq(state.slot)
        dk = self._onto_keys(ds, state.q_at, dk)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        part, dv = wgmma.wait(1, started, dv)
        dout.ring.release(state.dout_at)
        # a list's last block may have tiles behind the last one
        with nullcontext() if listed is None else fly.when(j < listed.tiles):
            self.add(part, step.place.head, j, state.q_at)
        scores = state.product if step.last else self.scores(q_next, step.following)
        (dk,) = wgmma.wait(0 if step.last else 1, dk)
        q.ring.release(state.q_at)
        return State((dk, dv), scores, q_next, dout_next, state.slot ^ 1)

    def _through_ds(self, step: Step, state: State) -> tuple[Any, tuple[fly.Value, ...], fly.Value]:
        """Of a tile whose S is in flight: its number, dS as the A operand of dK, and dV, which is in flight then."""
        j = self._tile(step.walk, step.number, state.q_at)
        late = self.options.thrift.is_late(step.masked)
        decided = self._decided(j, step) if self.options.thrift.decides else None
        (raw,) = wgmma.wait(0, state.product)
        started = None if late else self.excess(state.dout_at, j)
        made, p, kept = self._weighed(raw, state.q_at, j, step, decided)
        started = self.excess(state.dout_at, j) if started is None else started
        dv = self._onto_values(p, state.dout_at, state.sums[1])
        (excess,) = wgmma.wait(1, started)
        return j, self._pulled(made, kept, excess, state.dout_at, j, step), dv

    def _weighed(
        self,
        raw: fly.Value,
        at: Position,
        j: fly.Value,
        step: Step,
        decided: DecidedTile | None = None,
        lse2: Loaded = None,
    ) -> tuple[Weights, tuple[fly.Value, ...], KeptPairs | None]:
        """`weigh`; also the A operand of dV, and what dropout keeps; `decided`: `_decided`, if it was before."""
        made = self.weigh(raw, at, j, step, lse2=lse2)
        if decided is not None:
            kept = KeptPairs.of(made_again(decided, j), self.layout)
            return made, kept.only(self._narrow(made.weights)), kept
        p, decided = self._narrow(made.weights), self._decided(j, step)
        if decided is None:
            return made, p, None
        kept = KeptPairs.of(decided, self.layout)
        return made, kept.only(p), kept

    def _decided(self, j: fly.Value, step: Step) -> DecidedTile | None:
        """What dropout decides on a tile's weights, where there is any."""
        first_key, dropout = self.first_key, step.given.dropout(step.place)
        if dropout is None:
            return None
        # made or loaded again by every tile, as loops have no registers for what random numbers start from
        if (stored := self.buffers.random) is None:
            return remade(dropout, j).decided(self.layout, anew(first_key, j), j * BLOCK_M, "columns")
        random, bits = stored.load(dropout.random, j)
        return decided_tile(self.layout, 1, 1, anew(first_key, j), j * BLOCK_M, random, bits, queries="columns")

    def _pulled(
        self, made: Weights, kept: KeptPairs | None, excess: fly.Value, at: Position, j: fly.Value, step: Step
    ) -> tuple[fly.Value, ...]:
        """`pull` of what dropout keeps, as the A operand of dK."""
        if kept is not None:
            excess = kept.only_f32(excess)
        return self._narrow(self.pull(made, excess, at, j, step))

    def _onto_values(self, p: tuple[fly.Value, ...], at: Position, dv: fly.Value) -> fly.Value:
        """Start dV += P^T dO, of a tile of dO, or of a chunk of its columns and as many of dV."""
        atom = WarpgroupAtom(2 * len(dv), self.dtype.name)
        return wgmma.issue(atom, p, self.buffers.dout.operand(at, along_rows=True), BLOCK_M // atom.k, dv)

    def _onto_keys(self, ds: tuple[fly.Value, ...], at: Position, dk: fly.Value) -> fly.Value:
        """Start dK += dS^T Q."""
        atom = WarpgroupAtom(self.options.head_dim, self.dtype.name)
        return wgmma.issue(atom, ds, self.buffers.q.operand(at, along_rows=True), BLOCK_M // atom.k, dk)

    def weigh(
        self, raw: fly.Value, at: Position, j: fly.Value, step: Step, *, drops: bool = False, lse2: Loaded = None
    ) -> Weights:
        """P of tile j from its scores; statistics are in slot `at`, `drops` as in `weights`."""
        place, given, masked, listed = step.place, step.given, step.masked, step.walk.listed
        first_query, first_key = j * BLOCK_M, self.first_key
        if self.options.thrift.places:
            first_key = anew(first_key, first_query)
        if self.options.thrift.lengths:
            lengths = [anew(length, first_query) for length in (place.keys.queries, place.keys.keys)]
            place = replace(place, keys=replace(place.keys, queries=lengths[0], keys=lengths[1]))
        fragment = transposed(fly.Fragment(self.layout, ((raw,),)))
        queries = self._queries(first_query)
        lse2 = self.lse2(at, j, step) if lse2 is None else lse2

        def hide(scores: fly.Fragment) -> fly.Fragment:
            if listed is None:
                return given.mask(self._limit(scores, first_query), queries, first_key, place) if masked else scores
            limited: fly.Fragment = fly.cond(
                self.work.tiles.sees_whole(j), lambda: scores, lambda: self._limit(scores, first_query)
            )
            if not masked:
                return limited
            # the last step of all may be of a whole block too
            hidden: fly.Fragment = fly.cond(
                step.number < listed.whole_steps,
                lambda: limited,
                lambda: given.mask(limited, queries, first_key, place),
            )
            return hidden

        rows = queries, first_key, self.scale_log2, lse2
        return weights(fragment, given, place, *rows, hide, first_query, early=True, drops=drops)

    def lse2(self, at: Position, j: fly.Value, step: Step) -> fly.RowVector:
        """lse of tile j's queries, in log2 units, as rows of transposed scores; statistics are in slot `at`."""
        ends = step.masked or step.walk.listed is not None
        return self._numbers(self.buffers.lse2.at(at), self._queries(j * BLOCK_M), math.inf, masked=ends)

    def _queries(self, first_query: fly.Value) -> fly.RowVector:
        """A tile's queries, as rows of transposed scores."""
        layout = transposed_layout(self.layout)
        if self.options.crowded and self.block.queries.bounded:
            return row_numbers(layout, 1, 0).map(lambda row: anew(row, first_query) + first_query)
        return row_numbers(layout, 1, first_query)

    def pull(self, made: Weights, excess: fly.Value, at: Position, j: fly.Value, step: Step) -> fly.Fragment:
        """dS of tile j from dP, whose statistics are in slot `at`."""
        less = self.less(at, j, step)
        products = transposed(fly.Fragment(self.layout, ((excess,),))).map(lambda x, r, c: x + less.tiles[r][c])
        return made.score_gradients(products, less).raw

    def less(self, at: Position, j: fly.Value, step: Step) -> fly.Fragment:
        """-delta of each of tile j's queries, with dropout times the share that is kept; statistics are in slot `at`.

        Laid out as transposed scores.
        """
        like = fly.Fragment.zeros(transposed_layout(self.layout), 1, 1)
        queries, ends = row_numbers(like.layout, 1, j * BLOCK_M), step.masked or step.walk.listed is not None
        less = self._numbers(self.buffers.delta.at(at), queries, 0.0, masked=ends)
        if not self.options.alternates:
            less = less.map(step.given.of_kept)
        return like.map(lambda x, r, c: like.spread(less, r))

    def add(self, part: fly.Value, head: Any, j: fly.Value, at: Position) -> None:
        """Add the consumer's piece of a tile's dQ to the sums; `at`: the tile's slot of Q."""
        self.sums.take_in(part, head, j, self.piece, at)

    def _numbers(
        self, memory: fly.Pointer, queries: fly.RowVector, past_the_end: float, *, masked: bool
    ) -> fly.RowVector:
        """A number for each query, as rows of transposed scores."""
        shift = self.block.shift
        at = memory if shift is None else memory.offset(shift * 4)
        columns = fly.ColumnVector.load_shared(self.layout, 1, at, fly.f32, side_by_side=shift is None)
        loaded = fly.RowVector(transposed_layout(self.layout), columns.values)
        if not (self.block.queries.bounded and masked):
            return loaded
        count = self.block.queries.length
        return loaded.map(lambda x, row: fly.select(row < count, x, past_the_end), queries)

    def _limit(self, scores: fly.Fragment, first_query: fly.Value) -> fly.Fragment:
        """-inf where a query does not see a key, or there is no such key."""
        count = self.block.keys.length
        start = self.first_key
        keys = row_numbers(self.layout, 1, start)
        if self.options.remakes_keys or (self.options.causal and self.options.thrift.places):
            keys = keys.map(lambda key: anew(key, first_query))
        limited = self.work.inverse.apply(transposed(scores), keys, first_query)
        return transposed(limited.map(lambda x, r, c: fly.select(limited.spread(keys, r) < count, x, float("-inf"))))

    def _narrow(self, fragment: fly.Fragment) -> tuple[fly.Value, ...]:
        """Transposed scores as the A registers of a product over queries, 16 each."""
        narrow = fragment.tiles[0][0].to(self.dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def _put(self, ds: tuple[fly.Value, ...], slot: Any) -> None:
        """The consumer's keys of dS to shared memory, and meet the others."""
        self._store(ds, slot)
        fence_async_shared()
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)

    def _publish(self, ds: tuple[fly.Value, ...], slot: Any) -> None:
        """The consumer's keys of dS to shared memory, and say so to who waits for them."""
        assert self.buffers.written is not None
        self._store(ds, slot)
        fence_async_shared()
        sync_warp()
        with fly.when(fly.lane_id() == 0):
            self.buffers.written.arrive(slot)

    def _store(self, ds: tuple[fly.Value, ...], slot: Any) -> None:
        """The consumer's keys of dS to shared memory."""
        tile = self.options.ds_tile
        lane, warp = fly.lane_id(), fly.thread_id.x % WARPGROUP // 32
        if self.options.thrift.places:
            lane = anew(lane, slot)
        row_in = lane % 8
        row = self.first_row + warp * 16 + lane // 8 % 2 * 8 + row_in
        line = slot * tile.bytes + row * tile.swizzle
        memory = self.buffers.ds.offset(line)
        for i, operand in enumerate(ds):
            panel, inside = divmod(16 * i, tile.panel_columns)
            if self.options.crowded:
                # the same place, made of one number of the lane instead of one of each piece
                at = (line + ((lane // 16) ^ row_in) * UNIT) ^ (inside // 8 * UNIT)
                place = self.buffers.ds.offset(at + panel * tile.panel_bytes)
            else:
                piece = (lane // 16 + inside // 8) ^ row_in
                place = memory.offset(panel * tile.panel_bytes + piece * UNIT)
            words = operand.bitcast(fly.i32)
            store_matrices(place, [words[w] for w in range(4)])

    @property
    def piece(self) -> Any:
        """Which of the pieces of dQ's columns the consumer's is."""
        rank, index = self.block.rank, self.index
        with fly.reread_ids() if self.options.thrift.piece else nullcontext():
            if self.options.apart:
                rank = fly.block_id.x % self.options.blocks if self.options.thrift.piece else rank
                return rank * CONSUMERS + index
            return warpgroup_id() - 1 if self.options.thrift.piece else index

    def _dq(self, slot: Any) -> fly.Value:
        """Start the consumer's piece of dS K, of the block's keys."""
        return self._part_of_dq(slot, self.buffers.k, self.options.tiles["k"], self.piece)

    def _part_of_dq(
        self, slot: Any, memory: fly.Pointer, k: PanelTile, piece: Any, onto: fly.Value | None = None
    ) -> fly.Value:
        """Start dS of a slot times a piece of the columns of these keys."""
        options, ds = self.options, self.options.ds_tile
        atom = WarpgroupAtom(options.dq_columns, self.dtype.name)
        rows = Operand(self.buffers.ds, ds, True, slot * (ds.bytes // UNIT))
        columns = Operand(memory, k, True, piece * (k(0, options.dq_columns) // UNIT))
        return wgmma.issue(atom, rows, columns, options.block_n // atom.k, onto)
