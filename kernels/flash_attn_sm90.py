"""Flash attention forward for Hopper (sm_90a): warp-specialised, persistent, on WGMMA and TMA.

Shah et al., "FlashAttention-3" (2024). A block is one producer warpgroup and two or three consumer warpgroups; a
consumer owns 64 query rows of the block's `block_m`, keys and values come in tiles of `block_n`.

| who | registers | what |
|---|---|---|
| producer, one thread | few | Q, K and V tiles by TMA into rings in shared memory, ahead of the consumers |
| consumer warpgroups | most | S = Q K^T and O += P V on WGMMA, P in registers; softmax; O through shared memory by TMA |

Inside a consumer, tile j's S is started before tile j+1's (earlier) O += P V, and the softmax of j runs while that
product finishes. Between consumers, named barriers let one start its products while another is in its softmax.
Blocks are persistent: tile t of the launch goes to block t mod grid, so that the producer loads the next tile's Q
and K while consumers finish the last one. Keys are walked from the last tile, which may need a mask, to the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.nvvm import tma, wgmma
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    barrier_arrive,
    barrier_sync,
    elect_one,
    fence_async_shared,
    setmaxnreg_dec,
    setmaxnreg_inc,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import Position, Ring, init_all
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from fly.errors import ShapeError
from fly.runtime.compile import compile_kernel
from fly.runtime.prepared import bind
from kernels.attention_tiles import store_lse
from kernels.mask import KeyRange
from kernels.online_softmax import OnlineSoftmax

TURN, EPILOGUE = 1, 5  # first named barrier: whose turn it is to start products; a consumer's own


@dataclass(frozen=True)
class Sm90Options:
    """The static parameters of one build.

    `consumers` warpgroups of 64 query rows, tiles of `block_n` keys, `stages` slots in each of the K and V rings;
    `ping_pong`: consumers take turns in starting products; `own_output`: O has shared memory of its own instead
    of Q's, so that the next Q can be loaded earlier.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    consumers: int
    block_n: int
    stages: int
    ping_pong: bool = True
    own_output: bool = True

    def __post_init__(self):
        if self.consumers not in (1, 2, 3):
            raise ShapeError(f"consumers is {self.consumers}; expected 1, 2 or 3")

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of a consumer: 512 a lane of the four schedulers in all."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.consumers]


@dataclass(frozen=True)
class Work:
    """One tile of the launch: which query rows of which head, and how many key tiles they see."""

    batch: Any
    head: Any
    first_row: Any
    full_tiles: Any
    all_tiles: Any


@dataclass(frozen=True)
class Problem:
    """The launch's sizes (i32 values), and the walk over its tiles."""

    seq_len: Any
    seq_len_kv: Any
    heads: Any
    batch: Any
    options: Sm90Options

    @property
    def row_blocks(self) -> Any:
        return fly.ceil_div(self.seq_len, self.options.block_m)

    @property
    def keys(self) -> KeyRange:
        return KeyRange(self.seq_len, self.seq_len_kv, self.options.causal)

    def tiles(self, carry: Any) -> Any:
        """This block's tiles of the launch, by number."""
        total = self.row_blocks * self.heads * self.batch
        return fly.range(fly.block_id.x, total, fly.grid_dim.x, carry=carry)

    def work(self, number: Any) -> Work:
        """Tile `number`: causal ones longest first, others head after head."""
        if self.options.causal:
            slices = self.heads * self.batch
            block, slice_ = self.row_blocks - 1 - number // slices, number % slices
        else:
            block, slice_ = number % self.row_blocks, number // self.row_blocks
        first_row = block * self.options.block_m
        full, every = self.keys.tiles(first_row, self.options.block_m, self.options.block_n)
        # a tile without any key is computed like the others, all masked
        return Work(slice_ // self.heads, slice_ % self.heads, first_row, full, fly.maximum(every, 1))


@dataclass(frozen=True)
class Buffers:
    """Shared memory: tiles, and the rings over them."""

    q: fly.Pointer
    k: fly.Pointer
    v: fly.Pointer
    out: fly.Pointer
    q_tile: PanelTile
    k_tile: PanelTile
    v_tile: PanelTile
    out_tile: PanelTile
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring

    @staticmethod
    def allocate(options: Sm90Options) -> Buffers:
        q_tile = PanelTile.widest(options.block_m, options.head_dim)
        k_tile = PanelTile.widest(options.block_n, options.head_dim)
        v_tile = PanelTile.widest(options.block_n, options.head_dim_v)
        out_tile = PanelTile.widest(options.block_m, options.head_dim_v)
        warps = options.consumers * WARPGROUP // 32
        q = fly.alloc_shared("q", max(q_tile.bytes, 0 if options.own_output else out_tile.bytes), 1024)
        return Buffers(
            q=q,
            k=fly.alloc_shared("k", k_tile.bytes * options.stages, 1024),
            v=fly.alloc_shared("v", v_tile.bytes * options.stages, 1024),
            out=fly.alloc_shared("out", out_tile.bytes, 1024) if options.own_output else q,
            q_tile=q_tile,
            k_tile=k_tile,
            v_tile=v_tile,
            out_tile=out_tile,
            q_ring=Ring.allocate("q", 1, warps),
            k_ring=Ring.allocate("k", options.stages, warps),
            v_ring=Ring.allocate("v", options.stages, warps),
        )


@fly.kernel
def flash_attn_sm90(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    out: fly.TensorMap,
    lse: fly.Tensor | None,
    seq_len: fly.i32,
    seq_len_kv: fly.i32,
    heads: fly.i32,
    group: fly.i32,
    batch: fly.i32,
    scale_log2: fly.f32,
    *,
    options: Sm90Options,
):
    """out = softmax(softmax_scale * q k^T) v, per batch and head.

    q, k, v, out: maps of (B, S, H, D) tensors, see `prepare`; lse: (B, H, Sq) f32 or None; `group` query heads
    share a key head; scale_log2: softmax_scale * log2(e). Any one-dimensional grid; a block for each
    multiprocessor is best.
    """
    fly.occupancy(min_blocks=1)
    problem = Problem(seq_len, seq_len_kv, heads, batch, options)
    buffers = Buffers.allocate(options)
    init_all([buffers.q_ring, buffers.k_ring, buffers.v_ring])
    warpgroup = warpgroup_id()
    producer, consumer = options.registers
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(producer)
        with fly.when((fly.wave_id() == 0) & elect_one()):
            _produce(problem, buffers, q, k, v, group)
    with fly.when(warpgroup != 0):
        setmaxnreg_inc(consumer)
        _consume(problem, buffers, warpgroup - 1, out, lse, scale_log2, q.spec.dtype)


def _load_tile(
    tensor_map: fly.TensorMap, tile: PanelTile, destination: fly.Pointer, at: tuple, barrier: fly.Value
) -> None:
    batch, row, head = at
    for panel in range(tile.panels):
        place = (batch, row, head, panel * tile.panel_columns)
        tma.load(tensor_map, destination.offset(panel * tile.panel_bytes), place, barrier)


def _produce(
    problem: Problem, buffers: Buffers, q: fly.TensorMap, k: fly.TensorMap, v: fly.TensorMap, group: Any
) -> None:
    """Fill the rings for all of the block's tiles."""
    block_n = problem.options.block_n

    def load_k(at: Position, work: Work, j: Any) -> Position:
        barrier = buffers.k_ring.acquire(at, buffers.k_tile.bytes)
        slot = buffers.k.offset(at.index * buffers.k_tile.bytes)
        _load_tile(k, buffers.k_tile, slot, (work.batch, j * block_n, work.head // group), barrier)
        return buffers.k_ring.next(at)

    def load_v(at: Position, work: Work, j: Any) -> Position:
        barrier = buffers.v_ring.acquire(at, buffers.v_tile.bytes)
        slot = buffers.v.offset(at.index * buffers.v_tile.bytes)
        _load_tile(v, buffers.v_tile, slot, (work.batch, j * block_n, work.head // group), barrier)
        return buffers.v_ring.next(at)

    start = (Position.start(), Position.start(), Position.start())
    for number, (q_at, k_at, v_at) in (tiles := problem.tiles(start)):
        work = problem.work(number)
        barrier = buffers.q_ring.acquire(q_at, buffers.q_tile.bytes)
        _load_tile(q, buffers.q_tile, buffers.q, (work.batch, work.first_row, work.head), barrier)
        k_at = load_k(k_at, work, work.all_tiles - 1)
        for i, (k_at_, v_at_) in (loop := fly.range(1, work.all_tiles, carry=(k_at, v_at))):
            j = work.all_tiles - 1 - i
            loop.next(load_k(k_at_, work, j), load_v(v_at_, work, j + 1))
        k_at, v_at = loop.results
        tiles.next(buffers.q_ring.next(q_at), k_at, load_v(v_at, work, fly.i32(0)))


@dataclass(frozen=True)
class State:
    """What one key tile hands to the next: the output without it, its softmax and its probabilities."""

    output: fly.Value
    softmax: OnlineSoftmax
    weights: tuple[fly.Value, ...]
    k_at: Position
    v_at: Position


def _consume(
    problem: Problem,
    buffers: Buffers,
    consumer: fly.Value,
    out: fly.TensorMap,
    lse: fly.Tensor | None,
    scale_log2: fly.Value,
    dtype: str,
) -> None:
    """Compute this warpgroup's rows of all of the block's tiles."""
    compute = Consumer(problem, buffers, consumer, scale_log2, dtype)
    if problem.options.ping_pong:
        with fly.when(consumer == problem.options.consumers - 1):
            compute.pass_turn()
    start = (Position.start(), Position.start(), Position.start())
    for number, (q_at, k_at, v_at) in (tiles := problem.tiles(start)):
        work = problem.work(number)
        buffers.q_ring.wait(q_at)
        state = compute.first(work, k_at, v_at)
        if problem.options.causal:
            masked_end = fly.maximum(work.full_tiles, 0)
            for i, carried in (loop := fly.range(1, work.all_tiles - masked_end, carry=state)):
                loop.next(compute.step(work, work.all_tiles - 1 - i, carried, masked=True))
            state = loop.results
            rest = fly.minimum(masked_end, work.all_tiles - 1)
        else:
            rest = work.all_tiles - 1
        for i, carried in (loop := fly.range(rest, carry=state)):
            loop.next(compute.step(work, rest - 1 - i, carried, masked=False))
        state = loop.results
        if problem.options.own_output:
            buffers.q_ring.release(q_at)
        output, softmax, v_at = compute.last(state)
        inverse, row_lse = softmax.finish(scale_log2)
        compute.store(out, work, compute.fragment(output).scale_rows(inverse))
        if not problem.options.own_output:
            with fly.when(fly.thread_id.x % WARPGROUP == 0):
                tma.wait_read()
            barrier_sync(consumer + EPILOGUE, WARPGROUP)
            buffers.q_ring.release(q_at)
        if lse is not None:
            store_lse(lse[work.batch, work.head, :], row_lse, compute.rows(work), problem.seq_len)
        tiles.next(buffers.q_ring.next(q_at), state.k_at, v_at)
    with fly.when(fly.thread_id.x % WARPGROUP == 0):
        tma.wait_read()


class Consumer:
    """The steps of one consumer warpgroup."""

    def __init__(self, problem: Problem, buffers: Buffers, index: fly.Value, scale: fly.Value, dtype: str):
        options = problem.options
        self.problem, self.buffers, self.index, self.scale = problem, buffers, index, scale
        self.options = options
        self.dtype = fly.DType.named(dtype) if hasattr(fly.DType, "named") else getattr(fly, dtype)
        self.score_atom = WarpgroupAtom(options.block_n, dtype)
        self.output_atom = WarpgroupAtom(options.head_dim_v, dtype)
        self.score_layout = fly.AccumulatorLayout(self.score_atom, "m")
        self.output_layout = fly.AccumulatorLayout(self.output_atom, "m")
        tile = buffers.q_tile
        self.queries = Operand(buffers.q.offset(index * (64 * tile.swizzle)), tile)

    def fragment(self, output: fly.Value) -> fly.Fragment:
        """The output's accumulators as a fragment of 64 rows."""
        return fly.Fragment(self.output_layout, ((output,),))

    def rows(self, work: Work) -> fly.RowVector:
        """Query index of each row that the thread holds."""
        first = work.first_row + self.index * 64
        return fly.RowVector.full(self.score_layout, 1, 0.0).rows().map(lambda r: r + first)

    def pass_turn(self) -> None:
        """Let the next consumer start its products."""
        following = fly.select(self.index == self.options.consumers - 1, 0, self.index + 1)
        barrier_arrive(following + TURN, 2 * WARPGROUP)

    def take_turn(self) -> None:
        """Wait for the consumer before."""
        barrier_sync(self.index + TURN, 2 * WARPGROUP)

    def _scores(self, k_at: Position) -> fly.Value:
        tile = self.buffers.k_tile
        keys = Operand(self.buffers.k.offset(k_at.index * tile.bytes), tile)
        return wgmma.issue(self.score_atom, self.queries, keys, self.options.head_dim // wgmma.K)

    def _accumulate(self, output: fly.Value, weights: tuple, v_at: Position) -> fly.Value:
        tile = self.buffers.v_tile
        values = Operand(self.buffers.v.offset(v_at.index * tile.bytes), tile, along_rows=True)
        return wgmma.issue(self.output_atom, weights, values, self.options.block_n // wgmma.K, output)

    def _softmax(
        self, work: Work, j: Any, scores: fly.Value, softmax: OnlineSoftmax, masked: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        fragment = fly.Fragment(self.score_layout, ((scores,),))
        if masked:
            fragment = self.problem.keys.apply(fragment, self.rows(work), j * self.options.block_n)
        return softmax.update(fragment, self.scale, masked=masked)

    def _narrow(self, probabilities: fly.Fragment) -> tuple[fly.Value, ...]:
        """P as the A registers of the second product, 16 keys each."""
        narrow = probabilities.tiles[0][0].to(self.dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def first(self, work: Work, k_at: Position, v_at: Position) -> State:
        """The last key tile, which nothing comes before."""
        self.buffers.k_ring.wait(k_at)
        (scores,) = wgmma.wait(0, self._scores(k_at))
        self.buffers.k_ring.release(k_at)
        start = OnlineSoftmax.start(self.score_layout, 1)
        softmax, probabilities, _ = self._softmax(work, work.all_tiles - 1, scores, start, masked=True)
        zero = fly.Fragment.zeros(self.output_layout, 1, 1).tiles[0][0]
        return State(zero, softmax, self._narrow(probabilities), self.buffers.k_ring.next(k_at), v_at)

    def step(self, work: Work, j: Any, state: State, masked: bool) -> State:
        """Key tile j: its scores and softmax, and the product of the tile before it."""
        buffers = self.buffers
        buffers.k_ring.wait(state.k_at)
        if self.options.ping_pong:
            self.take_turn()
        scores = self._scores(state.k_at)
        buffers.v_ring.wait(state.v_at)
        output = self._accumulate(state.output, state.weights, state.v_at)
        if self.options.ping_pong:
            self.pass_turn()
        (scores,) = wgmma.wait(1, scores)
        buffers.k_ring.release(state.k_at)
        softmax, probabilities, factor = self._softmax(work, j, scores, state.softmax, masked)
        (output,) = wgmma.wait(0, output)
        buffers.v_ring.release(state.v_at)
        output = self.fragment(output).scale_rows(_on(self.output_layout, factor)).tiles[0][0]
        return State(
            output,
            softmax,
            self._narrow(probabilities),
            buffers.k_ring.next(state.k_at),
            buffers.v_ring.next(state.v_at),
        )

    def last(self, state: State) -> tuple[fly.Value, OnlineSoftmax, Position]:
        """The product of the first key tile."""
        self.buffers.v_ring.wait(state.v_at)
        (output,) = wgmma.wait(0, self._accumulate(state.output, state.weights, state.v_at))
        self.buffers.v_ring.release(state.v_at)
        return output, state.softmax, self.buffers.v_ring.next(state.v_at)

    def store(self, out: fly.TensorMap, work: Work, output: fly.Fragment) -> None:
        """Round to the output's dtype and copy out through shared memory; rows past the end are dropped."""
        tile = self.buffers.out_tile
        origin = self.buffers.out.offset(self.index * (64 * tile.swizzle))
        leader = fly.thread_id.x % WARPGROUP == 0
        if self.options.own_output:
            with fly.when(leader):
                tma.wait_read()  # of the last tile's output
            barrier_sync(self.index + EPILOGUE, WARPGROUP)
        wgmma.store_matrices(output.tiles[0][0].to(self.dtype), origin, tile)
        fence_async_shared()
        barrier_sync(self.index + EPILOGUE, WARPGROUP)
        with fly.when(leader):
            row = work.first_row + self.index * 64
            for panel in range(tile.panels):
                place = (work.batch, row, work.head, panel * tile.panel_columns)
                tma.store(out, origin.offset(panel * tile.panel_bytes), place)
            tma.commit()


def _on(layout: fly.AccumulatorLayout, rows: fly.RowVector) -> fly.RowVector:
    """Values per row for a fragment of another width: the same rows in the same threads."""
    return fly.RowVector(layout, rows.values)


# by (head_dim, head_dim_v, causal): consumers, block_n, stages, ping_pong, own_output
_TILES = {
    (64, 64, False): (3, 128, 2, True, True),
    (64, 64, True): (3, 128, 2, True, True),
    (128, 128, False): (2, 128, 2, True, True),
    (128, 128, True): (2, 128, 2, True, True),
    (256, 256, False): (2, 80, 2, True, False),
    (256, 256, True): (2, 80, 2, True, False),
}


def options_for(head_dim: int, head_dim_v: int, causal: bool) -> Sm90Options:
    """The build for a shape."""
    return Sm90Options(head_dim, head_dim_v, causal, *_TILES[head_dim, head_dim_v, causal])


def prepare(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    causal: bool,
    options: Sm90Options | None = None,
    **_: Any,
) -> Callable[..., None]:
    """Compile and bind a launch for these tensors; returns `launch(q, k, v, out, lse, stream)`."""
    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv, kv_heads = k.shape[1:3]
    options = options or options_for(head_dim, v.shape[-1], causal)
    q_tile, k_tile = PanelTile.widest(options.block_m, head_dim), PanelTile.widest(options.block_n, head_dim)
    v_tile = PanelTile.widest(options.block_n, options.head_dim_v)

    def mapped(tensor: Any, rows: int, tile: PanelTile) -> Any:
        return fly.tensor_map(tensor, (1, rows, 1, tile.panel_columns), swizzle=tile.swizzle)

    arguments = (
        mapped(q, options.block_m, q_tile),
        mapped(k, options.block_n, k_tile),
        mapped(v, options.block_n, v_tile),
        mapped(out, 64, v_tile),
        lse,
        seq_len,
        seq_len_kv,
        heads,
        heads // kv_heads,
        batch,
        softmax_scale * math.log2(math.e),
    )
    import torch

    units = torch.cuda.get_device_properties(q.device).multi_processor_count
    tiles = -(-seq_len // options.block_m) * heads * batch
    prepared = bind(
        flash_attn_sm90, min(units, tiles), options.threads, arguments, {"options": options}, compile_kernel
    )

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, stream: Any) -> None:
        if lse is None:
            prepared(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), stream=stream)
        else:
            prepared(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), stream=stream)

    return launch
