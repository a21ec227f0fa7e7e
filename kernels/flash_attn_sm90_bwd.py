"""Flash attention backward for Hopper (sm_90a): one fused kernel with five products, on WGMMA and TMA.

A block is a producer warpgroup and two consumer warpgroups; a consumer owns 64 keys of the block's 128, whose dK and
dV it sums up in registers, and queries pass by in tiles of 64.

| who | registers | what |
|---|---|---|
| producer, one thread | few | K and V once, then Q, dO and the rows' statistics of tile after tile, by TMA |
| consumer warpgroups | most | S = K Q^T, dP = V dO^T; dV += P^T dO, dK += dS^T Q; a part of dQ = dS K |

S and dP have keys as rows, so that P and dS are register operands of dV and dK as they are. dS goes to shared memory
besides, from where both consumers read all of it: each makes half of the tile's dQ, and adds it to sums in global
memory (`sm90.dq_sums`), in an order that is not the same in every run unless blocks do so in turn (`sm90.turns`).

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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

import fly
from fly.backends.nvvm import wgmma
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
from fly.backends.nvvm.mbarrier import Position, init_all
from fly.backends.nvvm.wgmma import UNIT, Operand, PanelTile, WarpgroupAtom
from fly.backends.target import target
from fly.ir.dtypes import dtype as dtype_of
from fly.runtime.device import device_of

from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import HeadOfKeys, Weights, transposed, transposed_layout, weights
from .problem.mask import KeyRange, QueryRange, TileRange
from .problem.scores import LOG2_E
from .sm90 import turns
from .sm90.backward import (
    ALONG,
    BLOCK_M,
    CONSUMERS,
    REGISTERS,
    Sm90BackwardOptions,
)
from .sm90.backward import THREADS as BLOCK_THREADS
from .sm90.dq_sums import Sums, clear_unseen, round_dq
from .sm90.dropout import KeptWeights
from .sm90.key_block import Block, Buffers, produce
from .sm90.producer import Slots, clear_tail
from .sm90.stores import store_runs
from .sm90.turns import Neighbours, Turns
from .sm90.walk import Walk
from .work.fragments import row_numbers
from .work.row_statistics import THREADS, lanes_of_row, row_statistics
from .work.sequences import Sequence as Tokens
from .work.sequences import tokens_of
from .work.sink_gradients import sink_gradients
from .work.steps import BoundKernel, Steps, aligned, bind_kernel
from .work.tile_list import BY_KEYS
from .work.tile_scheduler import fold_grid, head_of_block

CLEARED = 2  # first named barrier of the consumers' own: rows past the end are zeros
WRITTEN = 1  # named barrier: dS of all keys is in shared memory


@fly.kernel
def flash_attn_sm90_bwd(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    dout: fly.TensorMap,
    lse2: fly.TensorMap,
    delta: fly.TensorMap,
    dq_sums: fly.Tensor,
    dq: fly.Tensor | None,
    counts: fly.Tensor | None,
    dk: fly.Tensor,
    dv: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    tokens: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    sequences: fly.i32,  # type: ignore[valid-type]
    scale_log2: fly.f32,  # type: ignore[valid-type]
    group: fly.i32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
    folded: bool = False,
    consumer: type[Any] | None = None,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, dq_sums += dS k.

    q, dout: maps of (B, Sq, H, D) tensors, k, v of (B, Skv, Hkv, D), lse2 and delta of (B, H, Sq) f32
    (`work.row_statistics`), packed ones with B = 1; dk, dv (B, Skv, Hkv, D) or packed (tokens, Hkv, D) with (B + 1,)
    i32 offsets; dq_sums: see `sm90.dq_sums`, with turns, whose `counts` these are, dq is written where somebody has a
    part in it; `tokens` is Sq, or all queries of packed sequences, `group` H / Hkv.
    Grid: (key blocks, key heads, `sequences`), or `folded`; with turns, `turns.grid`. `consumer`: another one than
    `Consumer`.
    """
    fly.occupancy(min_blocks=1)
    given = options.features.bind(operands)
    if counts is None:
        kv_head, batch, exists = head_of_block(dk.shape[-2], sequences, folded=folded)
        number = fly.block_id.x
    else:
        kv_head, batch, exists = turns.head_of_block(dk.shape[-2], sequences)
        number = turns.taken(counts, dq_sums, batch * dk.shape[-2] + kv_head, exists)
    keys = Tokens.of(tokens_of(dk, cu_seqlens_kv), cu_seqlens_kv, batch, given.get("seqused_kv"))
    queries = Tokens.of(tokens, cu_seqlens_q, batch, given.get("seqused_q"))
    first_key = number * options.block_n
    here = first_key < keys.length if exists is None else exists & (first_key < keys.length)
    seen = given.key_range(queries.length, keys.length, options.causal)
    inverse = QueryRange.of(seen, open_end=not options.features.modifies)
    tiles = inverse.tiles(first_key, options.block_n, BLOCK_M)
    # keys past the end would have weights: in the block with any, all tiles are masked
    end = fly.select(here, tiles.end, tiles.first)
    tail = first_key + options.block_n > keys.length
    tiles = TileRange(tiles.first, fly.select(tail, end, tiles.whole_from), tiles.whole_end, end)
    block = Block(batch, kv_head, first_key, keys, queries)
    buffers = Buffers.allocate(options)
    in_turn = None if counts is None else Turns.allocate(counts, options)
    init_all([buffers.q.ring, buffers.dout.ring, buffers.arrived, *(in_turn.barriers if in_turn else ())])
    warpgroup = warpgroup_id()
    heads = kv_head * group, kv_head * group + group
    lists = options.features.block_size is not None
    walk = Walk(tiles.mirrored() if options.ordered else tiles, options.ordered, here if lists else None)
    sums = Sums(dq_sums, queries, batch, options, in_turn)
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(REGISTERS[0])
        with fly.when((fly.wave_id() == 0) & elect_one()):
            maps = (q, k, v, dout, lse2, delta)
            produce(maps, buffers, options, walk, block, given, heads)
        if in_turn is not None:
            near = Neighbours.of(number, keys.length, inverse)
            for warp, act in ((1, in_turn.take), (2, in_turn.hand_on)):
                with fly.when((fly.wave_id() == warp) & elect_one()):
                    sums.each_turn(act, near, walk, heads)
    with fly.when(warpgroup != 0):
        setmaxnreg_inc(REGISTERS[1])
        dtype = dtype_of(q.spec.dtype)
        working = (consumer or Consumer)(
            options, buffers, given, seen, inverse, tiles, walk, block, warpgroup - 1, scale_log2, dtype, sums
        )
        working.write(heads, dk, dv, fly.select(here, keys.length, 0))
        if dq is not None:
            near = Neighbours.of(number, keys.length, inverse)
            sums.round(dq, working.factor, heads, near.last_of(tiles), warpgroup - 1)


@dataclass(frozen=True)
class State:
    """What one tile hands to the next: the sums, the product in flight, and where the rings are.

    `slot`: of dS.
    """

    sums: tuple[fly.Value, ...]
    product: fly.Value
    q_at: Position
    dout_at: Position
    slot: fly.Value


@dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a block; `seen_tiles`: that its keys see, but for a block mask; `sums`: of dQ."""

    options: Sm90BackwardOptions
    buffers: Buffers
    given: BoundFeatures
    seen: KeyRange
    inverse: QueryRange
    seen_tiles: TileRange
    walk: Walk
    block: Block
    index: fly.Value
    scale_log2: fly.Value
    dtype: fly.DType
    sums: Sums

    @property
    def layout(self) -> fly.AccumulatorLayout:
        """Of S and dP: keys by queries."""
        return fly.AccumulatorLayout(WarpgroupAtom(BLOCK_M, self.dtype.name), "m")

    @property
    def first_row(self) -> Any:
        """The first of the consumer's keys in the block."""
        return self.index * BLOCK_M

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

    def write(self, heads: tuple[fly.Value, fly.Value], dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        """dK and dV of the consumer's keys, as far as they are among the sequence's first `count`."""
        sum_k, sum_v = self.run(heads)
        self.write_values(dv, sum_v, count)
        self.write_keys(dk, sum_k, count)

    def write_values(self, dv: fly.Tensor, values: fly.Value, count: fly.Value) -> None:
        """dV, from its sums."""
        view, first = self.block.keys.matrix(dv, self.block.kv_head), self.block.first_key + self.first_row
        runs = wgmma.runs(self.given.scale_kept(values).to(self.dtype))
        store_runs(view, first, count, runs, self.options.head_dim_v)

    def write_keys(self, dk: fly.Tensor, values: fly.Value, count: fly.Value) -> None:
        """dK, from its sums."""
        view, first = self.block.keys.matrix(dk, self.block.kv_head), self.block.first_key + self.first_row
        store_runs(view, first, count, wgmma.runs((values * self.factor).to(self.dtype)), self.options.head_dim)

    def run(self, heads: tuple[fly.Value, fly.Value]) -> tuple[fly.Value, ...]:
        """The sums over all tiles of these heads."""
        zeros = self.zeros

        def all_heads() -> tuple[fly.Value, ...]:
            for i, (name, memory) in enumerate((("k", self.buffers.k), ("v", self.buffers.v))):
                self.buffers.arrived.wait(i, 0)
                if self.block.keys.bounded:
                    left = self.block.keys.length - self.block.first_key
                    clear_tail(self.options.tiles[name], memory, left, CLEARED, self.index)
            carry = (zeros, Position.start(), Position.start(), fly.i32(0))
            for head, state in (loop := fly.range(*heads, carry=carry)):
                loop.next(*self.head(head, *state))
            sums: tuple[fly.Value, ...] = loop.results[0]
            return sums

        result: tuple[fly.Value, ...] = fly.cond(self.walk.exists, all_heads, lambda: zeros)
        return result

    def head(
        self, head: fly.Value, sums: tuple[fly.Value, ...], q_at: Position, dout_at: Position, slot: fly.Value
    ) -> tuple[Any, ...]:
        """All tiles of one query head."""
        block = self.block
        walk = self.walk.of_head(
            self.given, (block.batch, head), block.first_key, block.queries.length, fly.first_lane
        )
        tiles = walk.tiles
        place = HeadOfKeys(self.block.batch, head, self.seen)
        given = self.given.at(place)
        state = State(sums, self.start(q_at, dout_at, walk, tiles.first), q_at, dout_at, slot)
        first, last = fly.first_lane(fly.i32(0) + tiles.first), fly.first_lane(tiles.end - 1)
        whole_from = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_from, first), last))
        whole_end = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_end, whole_from), last))
        parts = [(first, whole_from, True), (whole_from, whole_end, False), (whole_end, last, True)]
        if walk.listed is not None:
            parts = parts[1:]
        if self.options.features.masks_every_tile:
            parts = [(first, last, True)]
        for start, stop, masked in parts:
            for number, carried in (loop := fly.range(start, stop, carry=state)):
                loop.next(self.step(number, carried, walk, place, given, masked=masked))
            state = loop.results
        state = self.step(last, state, walk, place, given, masked=True, last=True)
        return state.sums, state.q_at, state.dout_at, state.slot

    def _own_rows(self, memory: fly.Pointer, tile: PanelTile) -> Operand:
        """The consumer's keys of K or V."""
        return Operand(memory, tile, False, self.first_row * (tile.swizzle // UNIT))

    def _tile(self, walk: Walk, number: Any, at: Position) -> Any:
        """Which tile a step's slot of Q holds, behind its arrival."""
        numbers = self.buffers.tiles
        return walk.tile(number) if numbers is None else fly.first_lane(numbers.load(at.index))

    def _arrived(self, slots: Slots, at: Position, tile: Callable[[], Any]) -> None:
        """Wait for a tile's slot; what is behind the sequence's end is no other sequence's then, but zeros."""
        slots.ring.wait(at)
        if self.block.queries.bounded:
            left = self.block.queries.length - tile() * BLOCK_M
            clear_tail(slots.tile, slots.at(at), left, CLEARED, self.index)

    def start(self, q_at: Position, dout_at: Position, walk: Walk, number: Any) -> fly.Value:
        """Start the product of a step's tile that is in flight when the step begins."""
        return self.scores(q_at, walk, number)

    def scores(self, at: Position, walk: Walk, number: Any) -> fly.Value:
        """Start K Q^T of a step's tile."""
        options, q = self.options, self.buffers.q
        self._arrived(q, at, lambda: self._tile(walk, number, at))
        rows = self._own_rows(self.buffers.k, options.tiles["k"])
        atom = WarpgroupAtom(BLOCK_M, self.dtype.name)
        return wgmma.issue(atom, rows, q.operand(at), -(-options.head_dim // atom.k))

    def excess(self, at: Position, j: Any) -> fly.Value:
        """Start V dO^T of tile j."""
        options, dout = self.options, self.buffers.dout
        self._arrived(dout, at, lambda: j)
        rows = self._own_rows(self.buffers.v, options.tiles["v"])
        atom = WarpgroupAtom(BLOCK_M, self.dtype.name)
        return wgmma.issue(atom, rows, dout.operand(at), -(-options.head_dim_v // atom.k))

    def step(
        self,
        number: fly.Value,
        state: State,
        walk: Walk,
        place: HeadOfKeys,
        given: BoundFeatures,
        *,
        masked: bool,
        last: bool = False,
    ) -> State:
        """One tile of queries, whose S is in flight; then the next one's is, but behind the last."""
        options, q, dout = self.options, self.buffers.q, self.buffers.dout
        j, listed = self._tile(walk, number, state.q_at), walk.listed
        (raw,) = wgmma.wait(0, state.product)
        started = self.excess(state.dout_at, j)
        made = self.weigh(raw, state.q_at, j, number, walk, place, given, masked=masked, drops=False)
        p, dropout, first_key = (
            self._narrow(made.weights),
            given.dropout(place),
            self.block.first_key + self.first_row,
        )
        kept = None
        if dropout is not None:
            kept = KeptWeights.of(dropout, self.layout, first_key, j * BLOCK_M, "columns")
            p = kept.only(p)
        dk, dv = state.sums
        atom = WarpgroupAtom(options.head_dim_v, self.dtype.name)
        dv = wgmma.issue(atom, p, dout.operand(state.dout_at, along_rows=True), BLOCK_M // atom.k, dv)
        (excess,) = wgmma.wait(1, started)
        if kept is not None:
            excess = kept.only_f32(excess)
        ds = self._narrow(self.pull(made, excess, state.dout_at, j, walk, given, masked=masked))
        self._put(ds, state.slot)
        started = self._dq(state.slot)
        atom = WarpgroupAtom(options.head_dim, self.dtype.name)
        dk = wgmma.issue(atom, ds, q.operand(state.q_at, along_rows=True), BLOCK_M // atom.k, dk)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        part, dv = wgmma.wait(1, started, dv)
        dout.ring.release(state.dout_at)
        # a list's last block may have tiles behind the last one
        with nullcontext() if listed is None else fly.when(j < listed.tiles):
            self.add(part, place.head, j, state.q_at)
        scores = state.product if last else self.scores(q_next, walk, number + 1)
        (dk,) = wgmma.wait(0 if last else 1, dk)
        q.ring.release(state.q_at)
        return State((dk, dv), scores, q_next, dout_next, state.slot ^ 1)

    def weigh(
        self,
        raw: fly.Value,
        at: Position,
        j: fly.Value,
        number: fly.Value,
        walk: Walk,
        place: HeadOfKeys,
        given: BoundFeatures,
        *,
        masked: bool,
        drops: bool = True,
    ) -> Weights:
        """P of tile j, of step `number`, from its scores; statistics in slot `at`, `drops` as in `weights`."""
        first_query, first_key, listed = j * BLOCK_M, self.block.first_key + self.first_row, walk.listed
        fragment = transposed(fly.Fragment(self.layout, ((raw,),)))
        queries = row_numbers(fragment.layout, 1, first_query)
        ends = masked or listed is not None
        lse2 = self._numbers(self.buffers.lse2.at(at), queries, math.inf, masked=ends)

        def hide(scores: fly.Fragment) -> fly.Fragment:
            if listed is None:
                return given.mask(self._limit(scores, first_query), queries, first_key, place) if masked else scores
            limited: fly.Fragment = fly.cond(
                self.seen_tiles.sees_whole(j), lambda: scores, lambda: self._limit(scores, first_query)
            )
            if not masked:
                return limited
            # the last step of all may be of a whole block too
            hidden: fly.Fragment = fly.cond(
                number < listed.whole_steps,
                lambda: limited,
                lambda: given.mask(limited, queries, first_key, place),
            )
            return hidden

        rows = queries, first_key, self.scale_log2, lse2
        return weights(fragment, given, place, *rows, hide, first_query, early=True, drops=drops)

    def pull(
        self,
        made: Weights,
        excess: fly.Value,
        at: Position,
        j: fly.Value,
        walk: Walk,
        given: BoundFeatures,
        *,
        masked: bool,
    ) -> fly.Fragment:
        """dS of tile j from dP, whose statistics are in slot `at`."""
        products = transposed(fly.Fragment(self.layout, ((excess,),)))
        queries, ends = row_numbers(products.layout, 1, j * BLOCK_M), masked or walk.listed is not None
        delta = self._numbers(self.buffers.delta.at(at), queries, 0.0, masked=ends).map(given.of_kept)
        less = products.map(lambda x, r, c: -products.spread(delta, r))
        products = products.map(lambda x, r, c: x + less.tiles[r][c])
        return made.score_gradients(products, less).raw

    def add(self, part: fly.Value, head: Any, j: fly.Value, at: Position, piece: int = 0) -> None:
        """Add one of the consumer's pieces of a tile's dQ to the sums; `at`: the tile's slot of Q."""
        self.sums.take_in(part, head, j, self._piece(piece), at)

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
        start = self.block.first_key + self.first_row
        keys = row_numbers(self.layout, 1, start)
        limited = self.inverse.apply(transposed(scores), keys, first_query)
        return transposed(limited.map(lambda x, r, c: fly.select(limited.spread(keys, r) < count, x, float("-inf"))))

    def _narrow(self, fragment: fly.Fragment) -> tuple[fly.Value, ...]:
        """Transposed scores as the A registers of a product over queries, 16 each."""
        narrow = fragment.tiles[0][0].to(self.dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def _put(self, ds: tuple[fly.Value, ...], slot: fly.Value) -> None:
        """The consumer's keys of dS to shared memory, and meet the others."""
        tile = self.options.ds_tile
        lane, warp = fly.lane_id(), fly.thread_id.x % WARPGROUP // 32
        row_in = lane % 8
        row = self.first_row + warp * 16 + lane // 8 % 2 * 8 + row_in
        memory = self.buffers.ds.offset(slot * tile.bytes + row * tile.swizzle)
        for i, operand in enumerate(ds):
            panel, inside = divmod(16 * i, tile.panel_columns)
            piece = (lane // 16 + inside // 8) ^ row_in
            words = operand.bitcast(fly.i32)
            store_matrices(memory.offset(panel * tile.panel_bytes + piece * UNIT), [words[w] for w in range(4)])
        fence_async_shared()
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)

    def _piece(self, piece: int) -> fly.Value:
        """Which of the columns' pieces one of the consumer's is."""
        return self.index if self.options.dq_pieces == 1 else self.index * self.options.dq_pieces + piece

    def _dq(self, slot: fly.Value, piece: int = 0) -> fly.Value:
        """Start one of the consumer's pieces of dS K."""
        options = self.options
        ds, k = options.ds_tile, options.tiles["k"]
        atom = WarpgroupAtom(options.dq_columns, self.dtype.name)
        rows = Operand(self.buffers.ds, ds, True, slot * (ds.bytes // UNIT))
        columns = self._piece(piece) * (k(0, options.dq_columns) // UNIT)
        return wgmma.issue(atom, rows, Operand(self.buffers.k, k, True, columns), options.block_n // atom.k)


def prepare(tensors: Tensors, request: Request, consumer: type[Consumer] | None = None) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    See `flash_attn_generic_bwd.prepare`; `consumer`: of `flash_attn_sm90_bwd`.
    """
    packed = tensors.get("cu_seqlens_q") is not None
    dims, features = (request.head_dim, request.value_dim), request.static_features
    if features.block_size is not None:
        features = replace(features, block_size=(features.block_size[1], features.block_size[0]))
    ordered, apart = request.deterministic, consumer is not None
    options = Sm90BackwardOptions(
        *dims, request.causal, packed=packed, features=features, ordered=ordered, apart=apart
    )
    sequences, heads = request.batch, request.num_heads
    q, k, v, dout = ((t.unsqueeze(0) if packed else t) for t in (tensors[name] for name in ("q", "k", "v", "dout")))
    (entries, tokens), device = q.shape[:2], q.device
    tiles = tokens // BLOCK_M + sequences if packed else -(-tokens // BLOCK_M)
    pitch = -(-tokens // ALONG) * ALONG
    # only sizes and strides of these matter here
    numbers = torch.empty((entries, heads, pitch), dtype=torch.float32, device=device)[:, :, :tokens]
    lines = THREADS // lanes_of_row(request.value_dim)
    # blocks of `row_statistics` clear as many rows as they have
    padded = -(-tiles * BLOCK_M // lines) * lines
    shape = entries, heads, padded, options.pieces * options.dq_columns
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    rows = numbers[0] if packed else numbers
    numbers_of_turns = turns.counts_needed(entries * heads * padded // BLOCK_M, request.num_kv_heads, sequences)
    own = {
        "dq_sums": sums,
        "counts": torch.empty(numbers_of_turns, dtype=torch.int32, device=device) if ordered else None,
        "lse2": rows,
        # not `delta`, which is the caller's
        "deltas": rows,
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
        folds: bool = True,
    ) -> None:
        grid, fold = fold_grid(grid) if folds else (grid, {})
        arguments = {**tensors, **own, **more}
        called = {"delta": delta}
        steps.append(bind_kernel(kernel, grid, threads, arguments, statics | fold, called=called, operands=operands))

    statics: dict[str, Any] = {"head_dim": request.value_dim}
    # what nobody adds to at first needs no zeros
    cleared = {"dq_sums": None} if ordered else {}
    add(row_statistics, (padded // lines, heads, entries), THREADS, statics, more=cleared)
    if "delta" in tensors:
        blocks = -(-tokens // lines), heads, entries
        add(row_statistics, blocks, THREADS, statics, more={"dq_sums": None, "counts": None}, delta="delta")
    if (dsink := tensors.get("dsink")) is not None:
        add(sink_gradients, (dsink.shape[0], heads, sequences), target(device_of(device).target).wave_size, {})
    statics = {"options": options}
    blocks = -(-request.seq_len_kv // options.block_n), request.num_kv_heads, sequences
    if ordered:
        blocks = turns.grid(*blocks, device_of(device).compute_units)
    written: Tensors = {} if ordered else {"dq": None}
    more = {**maps, **written}
    by_keys = [BY_KEYS.get(name, name) for name in request.operands]
    add(
        flash_attn_sm90_bwd,
        blocks,
        BLOCK_THREADS,
        statics | {"consumer": consumer},
        by_keys,
        more,
        folds=not ordered,
    )
    blocks = -(-request.seq_len // BLOCK_M), heads, sequences
    if not ordered or turns.may_see_nothing(request):
        last = clear_unseen if ordered else round_dq
        add(last, blocks, options.pieces * WARPGROUP, statics, request.operands)
    sizes = {"dq_sums": sums.numel(), "lse2": entries * heads * pitch, "deltas": entries * heads * pitch}
    if ordered:
        sizes["counts"] = numbers_of_turns
    parts, nbytes = {}, 0
    for name, size in sizes.items():
        parts[name] = nbytes
        nbytes += aligned(4 * size)
    return Steps(tuple(steps), parts, nbytes).launch()
