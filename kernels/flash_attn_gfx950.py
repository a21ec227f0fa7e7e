"""Flash attention forward for gfx950 (CDNA4): two wave groups in antiphase, one tile of software pipelining.

A block of 8 waves computes 256 query rows of one head; a wave owns 32 rows, a lane one of them (S^T = K Q^T and
O^T = V^T P^T on 32x32x16 matrix instructions, see `fly.chain`). Keys come in tiles of 64. Each SIMD holds two waves:
waves 0-3 run one barrier ahead of waves 4-7, so that one of the two computes while the other moves data.

One tile takes four clusters with a barrier after each. Cluster by cluster, for tile j:

| cluster | matrix | vector | LDS reads | copies started | waited for |
|---|---|---|---|---|---|
| 0 memory | | | K(j) | K(j+1) | V(j-1) |
| 1 compute | S(j) = K(j) Q | P(j-1) = exp2(S(j-1) - max), sum | | | |
| 2 memory | | | V(j-1) | V(j) | K(j+1) |
| 3 compute | O += V(j-1) P(j-1) | max of S(j), rescale if it grew a lot | | | |

K and V have two buffers each, filled by direct-to-LDS copies. A wait comes two barriers before the reads that need
it: the other group passes its own wait one barrier later. The loop body holds two tiles, so that buffers are static.

Lazy rescale: O and the sum are rescaled only when a row's maximum grew by more than 2**8 since the last time, in any
row of the wave; until then probabilities stay below 2**8, which f32 sums and 16-bit operands hold as well as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import fly
from fly.backends.rocdl.intrinsics import s_barrier, s_setprio, s_waitcnt_lds, sched_barrier
from fly.errors import ShapeError
from kernels.attention_tiles import group_size, load_queries, store_lse, store_output
from kernels.mask import KeyRange

BLOCK_M, BLOCK_N, WAVES = 256, 64, 8
Mask = Callable[[Any, fly.Fragment], fly.Fragment]  # (tile number, scores) -> scores
RESCALE_THRESHOLD = 8.0  # log2 units


@dataclass(frozen=True)
class DualWaveOptions:
    """The static parameters of one build. The switches exist to measure what each device is worth."""

    head_dim: int
    causal: bool
    lazy_rescale: bool = True
    setprio: bool = True
    stagger: bool = True
    daz: bool = False
    waves_per_eu: int = 2

    def __post_init__(self):
        if self.head_dim not in (64, 128):
            raise ShapeError(f"head_dim is {self.head_dim}; the gfx950 kernel takes 64 and 128")


@dataclass(frozen=True)
class State:
    """What one tile hands to the next: scores of tile j-1, and O, maximum and sum up to tile j-2."""

    output: fly.Fragment
    maximum: fly.RowVector
    total: fly.RowVector
    scores: fly.Fragment
    k_flight: fly.Token
    v_flight: fly.Token
    k_at: tuple[fly.Value, ...]  # where the next copies read
    v_at: tuple[fly.Value, ...]


@fly.kernel
def flash_attn_gfx950(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    scale_log2: fly.f32,
    *,
    options: DualWaveOptions,
):
    """out = softmax(softmax_scale * q k^T) v, per batch and head; arguments as in `flash_attn_generic`.

    Grid: (query blocks, query heads, batch); causal blocks run longest first.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu)
    if options.daz:
        fly.flush_denormals()
    head, batch = fly.block_id.y, fly.block_id.z
    kv_head = head // group_size(q, k)
    block = fly.grid_dim.x - 1 - fly.block_id.x if options.causal else fly.block_id.x
    first_row = block * BLOCK_M
    wave = fly.wave_id()
    wave_rows = BLOCK_M // WAVES
    wave_row = first_row + wave * wave_rows
    keys = KeyRange(q.shape[1], k.shape[1], options.causal)

    tiles = Tiles(q, scale_log2, options)
    q_window = q[batch, :, head, :].rows(options.head_dim).window(first_row, BLOCK_M)
    queries = load_queries(tiles.link, q_window, wave * wave_rows, 1, tiles.dim_steps)[0]
    tiles.open(
        k[batch, :, kv_head, :].rows(options.head_dim), v[batch, :, kv_head, :].rows(options.head_dim), queries
    )
    rows = fly.RowVector.full(tiles.link.layout, 1, 0.0).rows().map(lambda r: r + wave_row)
    full_tiles, all_tiles = keys.tiles(first_row, BLOCK_M, BLOCK_N)

    def mask(j: Any, scores: fly.Fragment) -> fly.Fragment:
        return fly.cond(j < full_tiles, lambda: scores, lambda: keys.apply(scores, rows, j * BLOCK_N))

    if options.stagger:
        with fly.when(wave >= WAVES // 2):
            s_barrier()
    state = tiles.first(mask)
    for i, carried in (loop := fly.range(all_tiles // 2, carry=state)):
        j = i * 2 + 1
        loop.next(tiles.step(j + 1, 0, mask, tiles.step(j, 1, mask, carried)))
    # tiles come in pairs after the first, so the last one is in the even buffers
    output, maximum, total = tiles.last(loop.results)
    if options.stagger:
        with fly.when(wave < WAVES // 2):
            s_barrier()

    total = total.reduce_lanes(lambda a, b: a + b)
    inverse = total.map(lambda t: fly.select(t == 0.0, 0.0, fly.rcp(t)))
    store_output(out[batch, :, head, :].rows(options.head_dim), output.scale_rows(inverse), wave_row, wave_rows)
    if lse is not None:
        row_lse = maximum.map(
            lambda m, t: fly.select(t == 0.0, -math.inf, (m * scale_log2 + fly.log2(t)) * math.log(2)), total
        )
        store_lse(lse[batch, head, :], row_lse, rows, keys.queries)


class Tiles:
    """The clusters of the module's table, over the buffers in LDS and the operands in registers."""

    def __init__(self, q: fly.Tensor, scale_log2: fly.Value, options: DualWaveOptions):
        self.options = options
        self.scale = scale_log2
        self.dtype = q.dtype
        self.link = fly.chain(fly.target().mma(q.dtype.name, (32, 32, 16)))
        self.dim_steps = options.head_dim // self.link.atom.k
        self.dim_tiles = options.head_dim // self.link.layout.columns
        self.key_tiles = BLOCK_N // self.link.layout.columns
        self.key_steps = BLOCK_N // self.link.atom.k

    def open(self, k_rows: fly.RowView, v_rows: fly.RowView, queries: list[fly.Value]) -> None:
        """Set up buffers, copies and operand loads."""
        link, target, dim = self.link, fly.target(), self.options.head_dim
        atom, operand = link.atom, link.column_operand
        values = atom.values(operand)

        def plan(**kwargs: Any) -> fly.OperandPlan:
            want = fly.operand_coordinates(atom, operand, **kwargs)
            return fly.require_plan(fly.plan_operand(target.matrix_loads, want, values), atom, operand)

        k_plan = plan(transposed=False)
        v_plan = plan(transposed=True, slot_of=lambda slot: link.columns[slot])
        k_layout = fly.SwizzledTile(BLOCK_N, dim, k_plan.load.granule)
        v_layout = fly.SwizzledTile(BLOCK_N, dim, v_plan.load.granule)
        self.queries = queries
        self.k_copy, self.v_copy = fly.DirectCopy(k_rows, k_layout), fly.DirectCopy(v_rows, v_layout)
        self.k_load, self.v_load = fly.OperandLoader(k_plan, k_layout), fly.OperandLoader(v_plan, v_layout)
        self.k = [fly.SharedTile.ring(f"k{i}", k_layout, self.dtype, 1)[0] for i in range(2)]
        self.v = [fly.SharedTile.ring(f"v{i}", v_layout, self.dtype, 1)[0] for i in range(2)]
        for t in range(self.dim_steps):
            self.k_load.prepare(0, t * atom.k)
        for n in range(self.dim_tiles):
            self.v_load.prepare(0, n * link.layout.columns)

    def first(self, mask: Mask) -> State:
        """Tile 0, which has nothing before it to finish: its scores, and the copies for tile 1."""
        k_at, v_at = self.k_copy.start(), self.v_copy.start()
        k_flight = self.k_copy.issue(k_at, self.k[0])
        k_at = self.k_copy.next(k_at)
        fly.wait(k_flight)
        self._boundary()
        self._boundary()  # the other group's copies too
        operands = [self._read_k(0, n) for n in range(self.key_tiles)]
        k_flight = self.k_copy.issue(k_at, self.k[1])
        v_flight = self.v_copy.issue(v_at, self.v[0])
        scores = mask(fly.i32(0), fly.Fragment(self.link.layout, (self._scores(operands),)))
        layout = self.link.layout
        state = State(
            fly.Fragment.zeros(layout, 1, self.dim_tiles),
            fly.RowVector.full(layout, 1, -math.inf),
            fly.RowVector.full(layout, 1, 0.0),
            scores,
            k_flight,
            v_flight,
            self.k_copy.next(k_at),
            self.v_copy.next(v_at),
        )
        state = self._raise_maximum(state)
        fly.wait(k_flight)
        self._boundary()
        self._boundary()
        return state

    def step(self, j: Any, parity: int, mask: Mask, state: State) -> State:
        """Tile j >= 1, in the K buffer `parity`; finishes the tile before it."""
        # cluster 0
        k_operands = [self._read_k(parity, n) for n in range(self.key_tiles)]
        k_flight = self.k_copy.issue(state.k_at, self.k[1 - parity])
        fly.wait(state.v_flight)
        s_waitcnt_lds()
        self._boundary()
        # cluster 1
        self._priority(1)
        scores = fly.Fragment(self.link.layout, (self._scores(k_operands),))
        weights, total = self._probabilities(state)
        self._priority(0)
        self._boundary()
        # cluster 2
        v_operands = self._read_v(1 - parity)
        v_flight = self.v_copy.issue(state.v_at, self.v[parity])
        fly.wait(k_flight)
        s_waitcnt_lds()
        self._boundary()
        # cluster 3
        self._priority(1)
        scores = mask(j, scores)  # a branch: before the matrix instructions, so that they stay with what follows
        output = self._accumulate(state.output, v_operands, weights)
        state = State(
            output,
            state.maximum,
            total,
            scores,
            k_flight,
            v_flight,
            self.k_copy.next(state.k_at),
            self.v_copy.next(state.v_at),
        )
        state = self._raise_maximum(state)
        self._priority(0)
        self._boundary()
        return state

    def last(self, state: State) -> tuple[fly.Fragment, fly.RowVector, fly.RowVector]:
        """Finish the last tile, an even one."""
        weights, total = self._probabilities(state)
        fly.wait(state.v_flight)
        self._boundary()
        self._boundary()
        return self._accumulate(state.output, self._read_v(0), weights), state.maximum, total

    # parts of clusters

    def _boundary(self) -> None:
        sched_barrier()
        s_barrier()
        sched_barrier()

    def _priority(self, level: int) -> None:
        if self.options.setprio:
            s_setprio(level)

    def _read_k(self, parity: int, n: int) -> list[fly.Value]:
        """K operands of key tile n, one per step over head_dim."""
        rows, depth = self.link.layout.columns, self.link.atom.k
        return [self.k_load.load(self.k[parity], n * rows, t * depth)[0] for t in range(self.dim_steps)]

    def _read_v(self, parity: int) -> list[list[fly.Value]]:
        """V operands [step over keys][dim tile]."""
        columns, depth = self.link.layout.columns, self.link.atom.k
        return [
            [self.v_load.load(self.v[parity], t * depth, n * columns)[0] for n in range(self.dim_tiles)]
            for t in range(self.key_steps)
        ]

    def _scores(self, k_operands: list[list[fly.Value]]) -> tuple[fly.Value, ...]:
        """Raw scores of some key tiles."""
        tiles = fly.Fragment.zeros(self.link.layout, 1, len(k_operands)).tiles[0]
        for t in range(self.dim_steps):
            tiles = tuple(
                self.link.mma(self.queries[t], k[t], tile) for k, tile in zip(k_operands, tiles, strict=True)
            )
        return tiles

    def _accumulate(
        self, output: fly.Fragment, v_operands: list[list[fly.Value]], weights: list[fly.Value]
    ) -> fly.Fragment:
        tiles = list(output.tiles[0])
        for t in range(self.key_steps):
            for n in range(self.dim_tiles):
                tiles[n] = self.link.mma(weights[t], v_operands[t][n], tiles[n])
        return fly.Fragment(output.layout, (tuple(tiles),))

    def _raise_maximum(self, state: State) -> State:
        """Take the scores' maximum in; rescale what was accumulated only where it is worth it."""
        tile_max = state.scores.row_max().reduce_lanes(fly.maximum)
        maximum = state.maximum.map(fly.maximum, tile_max)

        def rescaled() -> tuple[fly.Fragment, fly.RowVector, fly.RowVector]:
            # a row without any key so far has -inf - -inf here; nothing was accumulated, so any factor does
            factor = state.maximum.map(
                lambda old, new: fly.select(new == -math.inf, 1.0, fly.exp2((old - new) * self.scale)), maximum
            )
            return state.output.scale_rows(factor), maximum, state.total.map(lambda t, f: t * f, factor)

        if not self.options.lazy_rescale:
            output, maximum, total = rescaled()
            return replace(state, output=output, maximum=maximum, total=total)
        grown = (maximum.values[0][0] - state.maximum.values[0][0]) * self.scale > RESCALE_THRESHOLD
        output, maximum, total = fly.cond(
            fly.any_lane(grown), rescaled, lambda: (state.output, state.maximum, state.total)
        )
        return replace(state, output=output, maximum=maximum, total=total)

    def _probabilities(self, state: State) -> tuple[list[fly.Value], fly.RowVector]:
        """P of the tile before as operands, and the sum with it."""
        # a row without any key so far is measured from 0: -inf - -inf is NaN
        pivot = state.maximum.map(lambda m: fly.select(m == -math.inf, 0.0, m))
        exponents = state.scores.fma_rows(self.scale, pivot.map(lambda m: -(m * self.scale)))
        probabilities = exponents.map(lambda tile, r, c: fly.exp2(tile))
        total = state.total.map(lambda t, p: t + p, probabilities.row_sum())
        narrow = [tile.to(self.dtype, rounding="nearest_any") for tile in probabilities.tiles[0]]
        return self.link.operands(narrow), total
