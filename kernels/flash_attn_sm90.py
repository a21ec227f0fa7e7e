"""Flash attention forward for Hopper (sm_90a): warp-specialised, persistent, on WGMMA and TMA.

Shah et al., "FlashAttention-3" (2024). A block is one producer warpgroup and two or three consumer warpgroups; a
consumer owns 64 query rows of the block's `block_m`, keys and values come in tiles of `block_n`.

| who | registers | what |
|---|---|---|
| producer, one thread | few | Q, K and V tiles by TMA into rings in shared memory, ahead of the consumers |
| consumer warpgroups | most | S = Q K^T and O += P V on WGMMA, P in registers; softmax; O from registers |

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
    atomic_add,
    atomic_wrap,
    barrier_arrive,
    barrier_sync,
    elect_one,
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

TURN = 1  # first named barrier: whose turn it is to start products


@dataclass(frozen=True)
class Sm90Options:
    """The static parameters of one build.

    `consumers` warpgroups of 64 query rows, tiles of `block_n` keys, `stages` slots in each of the K and V rings and
    `q_stages` in Q's; `ping_pong`: consumers take turns in starting products; `lazy_rescale`: O keeps its scale while
    maxima grow little; `hold`: a tile's exponentials come before the wait for the last one's product.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    consumers: int
    block_n: int
    stages: int
    q_stages: int
    ping_pong: bool = True
    lazy_rescale: bool = True
    hold: bool = False

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
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]


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
    section: Any
    options: Sm90Options

    @property
    def row_blocks(self) -> Any:
        return fly.ceil_div(self.seq_len, self.options.block_m)

    @property
    def keys(self) -> KeyRange:
        return KeyRange(self.seq_len, self.seq_len_kv, self.options.causal)

    @property
    def total(self) -> Any:
        """Tiles of the launch."""
        return self.row_blocks * self.heads * self.batch

    def work(self, number: Any) -> Work:
        """Tile `number`: `section` heads at a time, row block after row block, the longest first."""
        slices, blocks = self.heads * self.batch, self.row_blocks
        first_slice = number // (self.section * blocks) * self.section
        beside = fly.minimum(self.section, slices - first_slice)
        inside = number - first_slice * blocks
        block, slice_ = inside // beside, first_slice + inside % beside
        if self.options.causal:
            block = blocks - 1 - block
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
    q_tile: PanelTile
    k_tile: PanelTile
    v_tile: PanelTile
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    numbers: fly.SharedMemory
    number_ring: Ring

    @staticmethod
    def allocate(options: Sm90Options) -> Buffers:
        q_tile = PanelTile.widest(options.block_m, options.head_dim)
        k_tile = PanelTile.widest(options.block_n, options.head_dim)
        v_tile = PanelTile.widest(options.block_n, options.head_dim_v)
        warps = options.consumers * WARPGROUP // 32
        return Buffers(
            q=fly.alloc_shared("q", q_tile.bytes * options.q_stages, 1024),
            k=fly.alloc_shared("k", k_tile.bytes * options.stages, 1024),
            v=fly.alloc_shared("v", v_tile.bytes * options.stages, 1024),
            q_tile=q_tile,
            k_tile=k_tile,
            v_tile=v_tile,
            q_ring=Ring.allocate("q", options.q_stages, warps),
            k_ring=Ring.allocate("k", options.stages, warps),
            v_ring=Ring.allocate("v", options.stages, warps),
            numbers=fly.SharedMemory("numbers", "i32", 2),
            number_ring=Ring.allocate("numbers", 2, warps),
        )


@fly.kernel
def flash_attn_sm90(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    counters: fly.Tensor,
    seq_len_kv: fly.i32,
    group: fly.i32,
    section: fly.i32,
    scale_log2: fly.f32,
    *,
    options: Sm90Options,
):
    """out = softmax(softmax_scale * q k^T) v, per batch and head.

    q, k, v: maps of (B, S, H, D) tensors, see `prepare`; out: (B, Sq, H, Dv); lse: (B, H, Sq) f32 or None; `counters`:
    two i32, zero before and after; `group` query heads share a key head; `section` heads are worked on at a time; scale_log2: softmax_scale * log2(e).
    Any one-dimensional grid; a block for each multiprocessor is best.
    """
    fly.occupancy(min_blocks=1)
    problem = Problem(out.shape[1], seq_len_kv, out.shape[2], out.shape[0], section, options)
    buffers = Buffers.allocate(options)
    init_all([buffers.q_ring, buffers.k_ring, buffers.v_ring, buffers.number_ring])
    warpgroup = warpgroup_id()
    producer, consumer = options.registers
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(producer)
        with fly.when((fly.wave_id() == 0) & elect_one()):
            _produce(problem, buffers, q, k, v, group, counters)
    with fly.when(warpgroup != 0):
        setmaxnreg_inc(consumer)
        _consume(problem, buffers, warpgroup - 1, out, lse, scale_log2)


def _load_tile(
    tensor_map: fly.TensorMap, tile: PanelTile, destination: fly.Pointer, at: tuple, barrier: fly.Value
) -> None:
    batch, row, head = at
    for panel in range(tile.panels):
        place = (batch, row, head, panel * tile.panel_columns)
        tma.load(tensor_map, destination.offset(panel * tile.panel_bytes), place, barrier)


def _produce(
    problem: Problem,
    buffers: Buffers,
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    group: Any,
    counters: fly.Tensor,
) -> None:
    """Fill the rings for all of the block's tiles."""
    block_n = problem.options.block_n

    def load_q(at: Position, work: Work) -> Position:
        barrier = buffers.q_ring.acquire(at, buffers.q_tile.bytes)
        slot = buffers.q.offset(at.index * buffers.q_tile.bytes)
        _load_tile(q, buffers.q_tile, slot, (work.batch, work.first_row, work.head), barrier)
        return buffers.q_ring.next(at)

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

    def first(number: Any, q_at: Position, k_at: Position) -> tuple[Position, Position]:
        work = problem.work(number)
        return load_q(q_at, work), load_k(k_at, work, work.all_tiles - 1)

    # in the order in which consumers need them: a tile's first K comes before the last V of the tile before
    start = first(fly.block_id.x, Position.start(), Position.start())
    carry = (fly.block_id.x, *start, Position.start(), Position.start())
    for number, q_at, k_at, v_at, number_at in (tiles := fly.while_(carry, lambda c: c[0] < problem.total)):
        taken = atomic_add(counters.at(0), 1)  # early: its answer takes as long as a key tile
        work = problem.work(number)
        for i, (k_at_, v_at_) in (loop := fly.range(1, work.all_tiles, carry=(k_at, v_at))):
            j = work.all_tiles - 1 - i
            loop.next(load_k(k_at_, work, j), load_v(v_at_, work, j + 1))
        k_at, v_at = loop.results
        following = taken + fly.grid_dim.x
        buffers.number_ring.empty.wait(number_at.index, number_at.phase ^ 1)
        buffers.numbers.store(following, number_at.index)
        buffers.number_ring.full.arrive(number_at.index)
        q_at, k_at = fly.cond(
            following < problem.total,
            lambda number=following, q_at=q_at, k_at=k_at: first(number, q_at, k_at),
            lambda q_at=q_at, k_at=k_at: (q_at, k_at),
        )
        tiles.next(following, q_at, k_at, load_v(v_at, work, fly.i32(0)), buffers.number_ring.next(number_at))
    # the last block to finish leaves the counters as it found them
    with fly.when(atomic_wrap(counters.at(1), fly.grid_dim.x - 1) == fly.grid_dim.x - 1):
        counters.store(fly.i32(0), 0)


@dataclass(frozen=True)
class State:
    """What one key tile hands to the next: its softmax, its probabilities, and where the rings are."""

    softmax: OnlineSoftmax
    weights: tuple[fly.Value, ...]
    q_at: Position
    k_at: Position
    v_at: Position


def _consume(
    problem: Problem,
    buffers: Buffers,
    consumer: fly.Value,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    scale_log2: fly.Value,
) -> None:
    """Compute this warpgroup's rows of all of the block's tiles."""
    compute = Consumer(problem, buffers, consumer, scale_log2, out.dtype)
    if problem.options.ping_pong:
        with fly.when(consumer == problem.options.consumers - 1):
            compute.pass_turn()
    start = (Position.start(), Position.start(), Position.start())
    started = compute.first(problem.work(fly.block_id.x), *start)
    carry = (fly.block_id.x, started, Position.start())
    for number, state, number_at in (tiles := fly.while_(carry, lambda c: c[0] < problem.total)):
        work = problem.work(number)
        output, state = compute.middle(work, state)
        buffers.number_ring.wait(number_at)
        following = fly.first_lane(buffers.numbers.load(number_at.index))
        buffers.number_ring.release(number_at)
        output, next_state = fly.cond(
            following < problem.total,
            lambda number=following, o=output, s=state: compute.turn_over(problem.work(number), o, s),
            lambda o=output, s=state: compute.last(o, s),
        )
        inverse, row_lse = state.softmax.finish(scale_log2)
        compute.store(out, work, compute.fragment(output).scale_rows(_on(compute.output_layout, inverse)))
        if lse is not None:
            store_lse(lse[work.batch, work.head, :], row_lse, compute.rows(work), problem.seq_len)
        tiles.next(following, next_state, buffers.number_ring.next(number_at))


class Consumer:
    """The steps of one consumer warpgroup."""

    def __init__(self, problem: Problem, buffers: Buffers, index: fly.Value, scale: fly.Value, dtype: fly.DType):
        options = problem.options
        self.problem, self.buffers, self.index, self.scale = problem, buffers, index, scale
        self.options = options
        self.dtype = dtype
        self.score_atom = WarpgroupAtom(options.block_n, dtype.name)
        self.output_atom = WarpgroupAtom(options.head_dim_v, dtype.name)
        self.score_layout = fly.AccumulatorLayout(self.score_atom, "m")
        self.output_layout = fly.AccumulatorLayout(self.output_atom, "m")

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

    def _scores(self, q_at: Position, k_at: Position) -> fly.Value:
        q_tile, k_tile = self.buffers.q_tile, self.buffers.k_tile
        q = self.buffers.q.offset(q_at.index * q_tile.bytes + self.index * (64 * q_tile.swizzle))
        k = self.buffers.k.offset(k_at.index * k_tile.bytes)
        steps = self.options.head_dim // wgmma.K
        return wgmma.issue(self.score_atom, Operand(q, q_tile), Operand(k, k_tile), steps)

    def _accumulate(self, output: fly.Value, weights: tuple, v_at: Position) -> fly.Value:
        tile = self.buffers.v_tile
        values = Operand(self.buffers.v.offset(v_at.index * tile.bytes), tile, along_rows=True)
        return wgmma.issue(self.output_atom, weights, values, self.options.block_n // wgmma.K, output)

    def _mask(self, work: Work, j: Any, scores: fly.Fragment) -> fly.Fragment:
        return self.problem.keys.apply(scores, self.rows(work), j * self.options.block_n)

    def _narrow(self, probabilities: fly.Fragment) -> tuple[fly.Value, ...]:
        """P as the A registers of the second product, 16 keys each."""
        narrow = probabilities.tiles[0][0].to(self.dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def _start(self, work: Work, scores: fly.Value) -> tuple[OnlineSoftmax, fly.Fragment]:
        """Softmax of a tile's first scores: those of the last key tile."""
        j, fragment = work.all_tiles - 1, fly.Fragment(self.score_layout, ((scores,),))
        if self.options.causal:
            fragment = self._mask(work, j, fragment)
        else:
            fragment = fly.cond(
                work.full_tiles < work.all_tiles, lambda: self._mask(work, j, fragment), lambda: fragment
            )
        start = OnlineSoftmax.start(self.score_layout, 1)
        softmax, probabilities, _, _ = start.advance(fragment, self.scale, masked=True, lazy=False)
        return softmax, probabilities

    def _scored(self, j: Any, q_at: Position, k_at: Position) -> None:
        """Key tile j has been multiplied: its slot is free, and after the last one Q's."""
        self.buffers.k_ring.release(k_at)
        with fly.when(j == 0):
            self.buffers.q_ring.release(q_at)

    def first(self, work: Work, q_at: Position, k_at: Position, v_at: Position) -> State:
        """The first scores of the block's first tile."""
        self.buffers.q_ring.wait(q_at)
        self.buffers.k_ring.wait(k_at)
        (scores,) = wgmma.wait(0, self._scores(q_at, k_at))
        self._scored(work.all_tiles - 1, q_at, k_at)
        softmax, probabilities = self._start(work, scores)
        return State(softmax, self._narrow(probabilities), q_at, self.buffers.k_ring.next(k_at), v_at)

    def middle(self, work: Work, state: State) -> tuple[fly.Value, State]:
        """All products but the last of a tile: (output so far, state)."""
        carry = (fly.Fragment.zeros(self.output_layout, 1, 1).tiles[0][0], state)
        rest = work.all_tiles - 1
        if self.options.causal:
            masked = work.all_tiles - work.full_tiles
            for i, carried in (loop := fly.range(1, masked, carry=carry)):
                loop.next(self.step(work, work.all_tiles - 1 - i, *carried, masked=True))
            carry = loop.results
            rest = fly.minimum(work.full_tiles, rest)
        for i, carried in (loop := fly.range(rest, carry=carry)):
            loop.next(self.step(work, rest - 1 - i, *carried, masked=False))
        return loop.results

    def step(self, work: Work, j: Any, output: fly.Value, state: State, masked: bool) -> tuple[fly.Value, State]:
        """Key tile j: its scores and softmax, and the product of the tile before it."""
        buffers = self.buffers
        buffers.k_ring.wait(state.k_at)
        if self.options.ping_pong:
            self.take_turn()
        scores = self._scores(state.q_at, state.k_at)
        buffers.v_ring.wait(state.v_at)
        output = self._accumulate(output, state.weights, state.v_at)
        if self.options.ping_pong:
            self.pass_turn()
        (scores,) = wgmma.wait(1, scores)
        self._scored(j, state.q_at, state.k_at)
        fragment = fly.Fragment(self.score_layout, ((scores,),))
        if masked:
            fragment = self._mask(work, j, fragment)
        softmax, probabilities, factor, needed = state.softmax.advance(
            fragment, self.scale, masked=masked, lazy=self.options.lazy_rescale
        )
        (output,) = wgmma.wait(0, output, after=softmax.total.values[0] if self.options.hold else ())
        buffers.v_ring.release(state.v_at)
        output = self._rescaled(output, factor, needed)
        k_at, v_at = buffers.k_ring.next(state.k_at), buffers.v_ring.next(state.v_at)
        return output, State(softmax, self._narrow(probabilities), state.q_at, k_at, v_at)

    def _rescaled(self, output: fly.Value, factor: fly.RowVector, needed: fly.Value | None) -> fly.Value:
        def scaled() -> fly.Value:
            return self.fragment(output).scale_rows(_on(self.output_layout, factor)).tiles[0][0]

        return scaled() if needed is None else fly.cond(needed, scaled, lambda: output)

    def turn_over(self, work: Work, output: fly.Value, state: State) -> tuple[fly.Value, State]:
        """A tile's last product, and the first scores of the next tile, `work`."""
        buffers = self.buffers
        q_at = buffers.q_ring.next(state.q_at)
        buffers.q_ring.wait(q_at)
        buffers.k_ring.wait(state.k_at)
        if self.options.ping_pong:
            self.take_turn()
        scores = self._scores(q_at, state.k_at)
        buffers.v_ring.wait(state.v_at)
        output = self._accumulate(output, state.weights, state.v_at)
        if self.options.ping_pong:
            self.pass_turn()
        (scores,) = wgmma.wait(1, scores)
        self._scored(work.all_tiles - 1, q_at, state.k_at)
        softmax, probabilities = self._start(work, scores)
        (output,) = wgmma.wait(0, output, after=softmax.total.values[0] if self.options.hold else ())
        buffers.v_ring.release(state.v_at)
        k_at, v_at = buffers.k_ring.next(state.k_at), buffers.v_ring.next(state.v_at)
        return output, State(softmax, self._narrow(probabilities), q_at, k_at, v_at)

    def last(self, output: fly.Value, state: State) -> tuple[fly.Value, State]:
        """The last product of the block's last tile."""
        self.buffers.v_ring.wait(state.v_at)
        (output,) = wgmma.wait(0, self._accumulate(output, state.weights, state.v_at))
        return output, state

    def store(self, out: fly.Tensor, work: Work, output: fly.Fragment) -> None:
        """Round to the output's dtype and store; rows past the end are dropped."""
        values = output.tiles[0][0].to(self.dtype)
        rows, column, pieces = wgmma.runs(values)
        first = work.first_row + self.index * 64
        view = out[work.batch, :, work.head, :]
        for row, row_pieces in zip(rows, pieces, strict=True):
            with fly.when(first + row < self.problem.seq_len):
                for i, piece in enumerate(row_pieces):
                    fly.store(piece, view.at(first + row, column + 32 * i), align=16)


def _on(layout: fly.AccumulatorLayout, rows: fly.RowVector) -> fly.RowVector:
    """Values per row for a fragment of another width: the same rows in the same threads."""
    return fly.RowVector(layout, rows.values)


# by (head_dim, head_dim_v, causal): consumers, block_n, stages, q_stages, ping_pong
_TILES = {
    (64, 64, False): (3, 128, 2, 2, True),
    (64, 64, True): (3, 128, 2, 2, True),
    (128, 128, False): (2, 128, 2, 2, True),
    (128, 128, True): (2, 128, 2, 2, True),
    (256, 256, False): (2, 80, 2, 1, True),
    (256, 256, True): (2, 80, 2, 1, True),
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

    def mapped(tensor: Any, tile: PanelTile) -> Any:
        return fly.tensor_map(tensor, (1, tile.rows, 1, tile.panel_columns), swizzle=tile.swizzle)

    arguments = (
        mapped(q, q_tile),
        mapped(k, k_tile),
        mapped(v, v_tile),
        out,
        lse,
        counters,
        seq_len_kv,
        heads // kv_heads,
        heads * batch,
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
