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

from collections.abc import Sequence
from dataclasses import dataclass
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
from fly.backends.nvvm.mbarrier import Mbarriers, Position, init_all
from fly.backends.nvvm.wgmma import UNIT, Operand, PanelTile
from fly.ir.dtypes import dtype as dtype_of

from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import turned, turned_layout, weights
from .problem.mask import KeyRange, QueryRange, TileRange
from .problem.scores import LOG2_E
from .sm90 import dq_sums as sums_of_dq
from .sm90.backward import CONSUMERS, DS_STAGES, REGISTERS, Sm90BackwardOptions, options_for
from .sm90.dq_sums import round_dq, store_rows
from .sm90.producer import Slots
from .work.row_statistics import THREADS, lanes_of_row, row_statistics
from .work.sequences import Sequence as Tokens
from .work.steps import BoundKernel, Steps, aligned, bind_kernel
from .work.tile_scheduler import fold_grid, head_of_block

ALONG = 4  # numbers of 32 bits in the 16 bytes that rows of tensor maps are multiples of
WRITTEN = 1  # named barrier: dS of all keys is in shared memory


@dataclass(frozen=True)
class _Head:
    """One query head of a block of keys: a `problem.scores.Place`."""

    batch: fly.Value
    head: fly.Value
    keys: KeyRange
    split: bool = False


@dataclass(frozen=True)
class _Statistics:
    """A number for each query of a tile, beside the tile's slot."""

    memory: fly.Pointer
    queries: int

    @staticmethod
    def allocate(name: str, queries: int, stages: int) -> _Statistics:
        return _Statistics(fly.alloc_shared(name, 4 * queries * stages, 128), queries)

    @property
    def bytes(self) -> int:
        """Of a slot."""
        return 4 * self.queries

    def at(self, at: Position) -> fly.Pointer:
        return self.memory.offset(at.index * self.bytes)


@dataclass(frozen=True)
class _Buffers:
    """Shared memory of one block; `arrived`: barriers of K and of V."""

    k: fly.Pointer
    v: fly.Pointer
    q: Slots
    dout: Slots
    lse2: _Statistics
    delta: _Statistics
    ds: fly.Pointer
    arrived: Mbarriers

    @staticmethod
    def allocate(options: Sm90BackwardOptions) -> _Buffers:
        warps = CONSUMERS * WARPGROUP // 32
        return _Buffers(
            fly.alloc_shared("k", options.tiles["k"].bytes, 1024),
            fly.alloc_shared("v", options.tiles["v"].bytes, 1024),
            Slots.allocate("q", options.tiles["q"], options.stages, warps),
            Slots.allocate("dout", options.tiles["dout"], options.dout_stages, warps),
            _Statistics.allocate("lse2", options.block_m, options.stages),
            _Statistics.allocate("delta", options.block_m, options.dout_stages),
            fly.alloc_shared("ds", options.ds_tile.bytes * DS_STAGES, 1024),
            Mbarriers.allocate("arrived", 2, 1),
        )


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
    seq_len: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    scale_log2: fly.f32,  # type: ignore[valid-type]
    group: fly.i32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
    folded: bool = False,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, dq_sums += dS k.

    q, dout: maps of (B, Sq, H, D) tensors, k, v of (B, Skv, Hkv, D), lse2 and delta of (B, H, Sq) f32
    (`work.row_statistics`); dk, dv (B, Skv, Hkv, D); dq_sums: see `sm90.dq_sums`; `seq_len` is Sq, `group` H / Hkv.
    Grid: (key blocks, key heads, sequences), or `folded`.
    """
    fly.occupancy(min_blocks=1)
    given = options.features.bind(operands)
    kv_head, batch, exists = head_of_block(dk.shape[-2], dk.shape[0], folded=folded)
    keys = Tokens(batch, None, dk.shape[1])
    first_key = fly.block_id.x * options.block_n
    if exists is not None:
        first_key = fly.select(exists, first_key, keys.length)
    seen = given.key_range(seq_len, keys.length, options.causal)
    inverse = QueryRange.of(seen, open_end=not options.features.modifies)
    tiles = inverse.tiles(first_key, options.block_n, options.block_m)
    # keys past the end would have weights: in the block with any, all tiles are masked
    tail = first_key + options.block_n > keys.length
    tiles = TileRange(tiles.first, fly.select(tail, tiles.end, tiles.whole_from), tiles.whole_end, tiles.end)
    buffers = _Buffers.allocate(options)
    init_all([buffers.q.ring, buffers.dout.ring, buffers.arrived])
    warpgroup = warpgroup_id()
    heads = kv_head * group, kv_head * group + group
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(REGISTERS[0])
        with fly.when((fly.wave_id() == 0) & elect_one()):
            maps = (q, k, v, dout, lse2, delta)
            _produce(maps, buffers, options, tiles, (batch, kv_head, first_key), heads)
    with fly.when(warpgroup != 0):
        setmaxnreg_inc(REGISTERS[1])
        dtype = dtype_of(q.spec.dtype)
        block = (batch, first_key, keys.length)
        consumer = _Consumer(
            options, buffers, given, seen, inverse, tiles, block, warpgroup - 1, scale_log2, dtype, dq_sums
        )
        sum_k, sum_v = consumer.run(heads)
        first = first_key + (warpgroup - 1) * 64
        views = keys.matrix(dk, kv_head), keys.matrix(dv, kv_head)
        store_rows(views[1], first, keys.length, given.scale_kept(sum_v), dtype)
        store_rows(views[0], first, keys.length, given.scale_kept(sum_k * (scale_log2 * (1 / LOG2_E))), dtype)


def _produce(
    maps: tuple[fly.TensorMap, ...],
    buffers: _Buffers,
    options: Sm90BackwardOptions,
    tiles: TileRange,
    block: tuple[Any, Any, Any],
    heads: tuple[Any, Any],
) -> None:
    """The one thread that fills shared memory."""
    q, k, v, dout, lse2, delta = maps
    batch, kv_head, first_key = block

    def keep(index: int, tensor_map: fly.TensorMap, tile: PanelTile, memory: fly.Pointer) -> None:
        buffers.arrived.arrive_expecting(index, tile.bytes)
        _copy(tensor_map, tile, memory, (batch, first_key, kv_head), buffers.arrived.at(index))

    def load(
        slots: Slots,
        tensor_map: fly.TensorMap,
        numbers: _Statistics,
        of: fly.TensorMap,
        at: Position,
        j: Any,
        head: Any,
    ) -> Position:
        row = j * options.block_m
        barrier = slots.ring.acquire(at, slots.tile.bytes + numbers.bytes)
        _copy(tensor_map, slots.tile, slots.at(at), (batch, row, head), barrier)
        tma.load(of, numbers.at(at), (batch, head, row), barrier)
        return slots.ring.next(at)

    with fly.when(tiles.first < tiles.end):
        keep(0, k, options.tiles["k"], buffers.k)
        keep(1, v, options.tiles["v"], buffers.v)
        start = Position.start(), Position.start()
        for head, places in (all_heads := fly.range(*heads, carry=start)):
            for j, (q_at, dout_at) in (passing := fly.range(tiles.first, tiles.end, carry=places)):
                passing.next(
                    load(buffers.q, q, buffers.lse2, lse2, q_at, j, head),
                    load(buffers.dout, dout, buffers.delta, delta, dout_at, j, head),
                )
            all_heads.next(*passing.results)


def _copy(
    tensor_map: fly.TensorMap, tile: PanelTile, memory: fly.Pointer, place: Sequence[Any], barrier: fly.Value
) -> None:
    """Start the copy of a tile, panel by panel."""
    for panel in range(tile.panels):
        corner = (*place, panel * tile.panel_columns)
        tma.load(tensor_map, memory.offset(panel * tile.panel_bytes), corner, barrier)


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
    """One consumer warpgroup of a block; `block`: its sequence, first key, and the sequence's keys."""

    options: Sm90BackwardOptions
    buffers: _Buffers
    given: BoundFeatures
    seen: KeyRange
    inverse: QueryRange
    tiles: TileRange
    block: tuple[fly.Value, fly.Value, fly.Value]
    index: fly.Value
    scale_log2: fly.Value
    dtype: fly.DType
    dq_sums: fly.Tensor

    @property
    def layout(self) -> fly.AccumulatorLayout:
        """Of S and dP: keys by queries."""
        return fly.AccumulatorLayout(self.options.atom(self.options.block_m, self.dtype.name), "m")

    def run(self, heads: tuple[fly.Value, fly.Value]) -> tuple[fly.Value, fly.Value]:
        """dK and dV of the consumer's keys."""
        options = self.options
        zeros = tuple(fly.broadcast(fly.f32(0.0), dim // 2) for dim in (options.head_dim, options.head_dim_v))

        def all_heads() -> tuple[fly.Value, fly.Value]:
            for i in range(2):
                self.buffers.arrived.wait(i, 0)
            carry = (*zeros, Position.start(), Position.start(), fly.i32(0))
            for head, state in (loop := fly.range(*heads, carry=carry)):
                loop.next(*self.head(head, *state))
            return loop.results[0], loop.results[1]

        result: tuple[fly.Value, fly.Value] = fly.cond(self.tiles.first < self.tiles.end, all_heads, lambda: zeros)
        return result

    def head(
        self, head: fly.Value, dk: fly.Value, dv: fly.Value, q_at: Position, dout_at: Position, slot: fly.Value
    ) -> tuple[Any, ...]:
        """All tiles of one query head."""
        tiles = self.tiles
        place = _Head(self.block[0], head, self.seen)
        given = self.given.at(place)
        state = _State(dk, dv, self.scores(q_at), q_at, dout_at, slot)
        first, last = fly.first_lane(fly.i32(0) + tiles.first), fly.first_lane(tiles.end - 1)
        whole_from = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_from, first), last))
        whole_end = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_end, whole_from), last))
        for start, stop, masked in (
            (first, whole_from, True),
            (whole_from, whole_end, False),
            (whole_end, last, True),
        ):
            for j, carried in (loop := fly.range(start, stop, carry=state)):
                loop.next(self.step(j, carried, place, given, masked=masked))
            state = loop.results
        state = self.step(last, state, place, given, masked=True, last=True)
        return state.dk, state.dv, state.q_at, state.dout_at, state.slot

    def _own_rows(self, memory: fly.Pointer, tile: PanelTile) -> Operand:
        """The consumer's keys of K or V."""
        return Operand(memory, tile, False, self.index * (64 * tile.swizzle // UNIT))

    def scores(self, at: Position) -> fly.Value:
        """Start K Q^T."""
        options, q = self.options, self.buffers.q
        q.ring.wait(at)
        rows = self._own_rows(self.buffers.k, options.tiles["k"])
        atom = options.atom(options.block_m, self.dtype.name)
        return wgmma.issue(atom, rows, q.operand(at), options.head_dim // atom.k)

    def excess(self, at: Position) -> fly.Value:
        """Start V dO^T."""
        options, dout = self.options, self.buffers.dout
        dout.ring.wait(at)
        rows = self._own_rows(self.buffers.v, options.tiles["v"])
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
        started = self.excess(state.dout_at)
        fragment = fly.Fragment(self.layout, ((raw,),))
        lse2 = self._numbers(buffers.lse2.at(state.q_at))
        queries = lse2.rows().map(lambda row: row + first_query)
        first_key = self.block[1] + self.index * 64

        def hide(scores: fly.Fragment) -> fly.Fragment:
            return given.mask(self._limit(scores, first_query), queries, first_key, place) if masked else scores

        made = weights(turned(fragment), given, place, queries, first_key, self.scale_log2, lse2, hide, first_query)
        p = self._narrow(made.of_values)
        atom = options.atom(options.head_dim_v, dtype)
        dv = wgmma.issue(atom, p, dout.operand(state.dout_at, along_rows=True), options.block_m // atom.k, state.dv)
        (excess,) = wgmma.wait(1, started)
        delta = self._numbers(buffers.delta.at(state.dout_at)).map(given.of_kept)
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
        tile = sums_of_dq.place_of(self.dq_sums, place.batch, place.head, j, self.index, options)
        sums_of_dq.add(part, tile)
        scores = state.scores if last else self.scores(q_next)
        (dk,) = wgmma.wait(0 if last else 1, dk)
        q.ring.release(state.q_at)
        return _State(dk, dv, scores, q_next, dout_next, state.slot ^ 1)

    def _numbers(self, memory: fly.Pointer) -> fly.RowVector:
        """A number for each query, as rows of turned scores."""
        columns = fly.ColumnVector.load_shared(self.layout, 1, memory, fly.f32)
        return fly.RowVector(turned_layout(self.layout), columns.values)

    def _limit(self, scores: fly.Fragment, first_query: fly.Value) -> fly.Fragment:
        """-inf where a query does not see a key, or there is no such key."""
        _, first_key, count = self.block
        start = first_key + self.index * 64
        keys = fly.RowVector.full(self.layout, 1, 0.0).rows().map(lambda row: row + start)
        limited = self.inverse.apply(turned(scores), keys, first_query)
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
        ds, k = options.ds_tile, options.tiles["k"]
        atom = options.atom(options.dq_columns, self.dtype.name)
        at = slot * (ds.bytes // UNIT)
        if options.block_m == 64:
            # half of K's columns
            rows = Operand(self.buffers.ds, ds, True, at)
            columns = self.index * (options.dq_columns // k.panel_columns * k.panel_bytes // UNIT)
        else:
            rows = Operand(self.buffers.ds, ds, True, at + self.index * (ds.panel_bytes // UNIT))
            columns = fly.i32(0)
        return wgmma.issue(atom, rows, Operand(self.buffers.k, k, True, columns), options.block_n // atom.k)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    See `flash_attn_generic_bwd.prepare`.
    """
    options = options_for(request.head_dim, request.value_dim, request.causal, request.static_features)
    batch, heads, seq_len = request.batch, request.num_heads, request.seq_len
    device, tiles = tensors["q"].device, -(-seq_len // options.block_m)
    pitch = -(-seq_len // ALONG) * ALONG
    # only sizes and strides of these matter here
    numbers = torch.empty((batch, heads, pitch), dtype=torch.float32, device=device)[:, :, :seq_len]
    shape = batch, heads, tiles * options.block_m, request.head_dim
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    own = {
        "dq_sums": sums,
        "scale_log2": request.scale_log2,
        "seq_len": seq_len,
        "group": heads // request.num_kv_heads,
    }
    given = {**tensors, **own, "lse2": numbers, "delta": numbers}
    boxes = {name: (1, tile.rows, 1, tile.panel_columns) for name, tile in options.tiles.items()}
    maps = {
        name: fly.tensor_map(tensors[name], box, swizzle=options.tiles[name].swizzle) for name, box in boxes.items()
    }
    maps |= dict.fromkeys(("lse2", "delta"), fly.tensor_map(numbers, (1, 1, options.block_m)))
    steps: list[BoundKernel] = []

    def add(
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Tensors,
        operands: Sequence[str] = (),
        **statics: Any,
    ) -> None:
        grid, fold = fold_grid(grid)
        steps.append(bind_kernel(kernel, grid, threads, arguments, {**statics, **fold}, operands=operands))

    rows = THREADS // lanes_of_row(request.value_dim)
    add(row_statistics, (tiles * options.block_m // rows, heads, batch), THREADS, given, head_dim=request.value_dim)
    blocks = -(-request.seq_len_kv // options.block_n), request.num_kv_heads, batch
    add(flash_attn_sm90_bwd, blocks, options.threads, {**given, **maps}, request.operands, options=options)
    add(round_dq, (tiles, heads, batch), CONSUMERS * WARPGROUP, given, options=options)
    parts, nbytes = {}, 0
    for name, size in (
        ("dq_sums", 4 * sums.numel()),
        ("lse2", 4 * batch * heads * pitch),
        ("delta", 4 * batch * heads * pitch),
    ):
        if tensors.get(name) is None:
            parts[name] = nbytes
            nbytes += aligned(size)
    return Steps(tuple(steps), parts, nbytes).launch()
