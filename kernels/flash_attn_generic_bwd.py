"""Flash attention backward for every target, as two kernels whose results are the same bits in every run.

Dao et al., "FlashAttention-2" (2023), algorithm 2, with the outer loop taken apart: no sum is shared between blocks.

| kernel | a block's rows | what passes by | results |
|---|---|---|---|
| `flash_attn_generic_dkdv` | keys of one key head | queries and dO of the group's heads | dV = P^T dO, dK = dS^T Q |
| `flash_attn_generic_dq` | queries of one head | keys and values | dQ = dS K |

Both make S = Q K^T and dP = dO V^T again, P from S and the row's log-sum-exp, and dS from P and dP
(`problem.gradients`): 7 products where one kernel with atomic additions has 5. The products of `dkdv` are the
transposes, K Q^T and V dO^T, so that P^T and dS^T are row operands as they are (`fly.chain`), and so is dS in `dq`.
`work.row_statistics` makes the rows' log-sum-exp in log2 units and delta before.

| what | where |
|---|---|
| the block's rows: K and V, or Q and dO | registers, or shared memory where accumulators leave no room |
| what passes by | shared memory, swizzled, filled ahead (`fly.TileRing`), read straight and turned |
| S, dP, P, dS, and the sums dV and dK, or dQ | registers, f32 |

Head dimensions above 128 have no registers for dK and dV together: a launch each, with S once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fly
from fly.backends.target import target
from fly.errors import UnsupportedError
from fly.runtime.device import device_of

from .arguments.callers import problem
from .generic.backward import BackwardOptions, options_for
from .generic.operands import Queries, SharedRows, Stream, column_tiles, direct_rows
from .problem.catalogue import BY_NAME
from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import turned, turned_layout, weights
from .problem.mask import KeyRange, QueryRange, TileRange
from .problem.scores import LOG2_E, Place
from .work.fragments import group_size, store_output
from .work.row_statistics import THREADS, lanes_of_row, row_statistics
from .work.sequences import Sequence as Tokens
from .work.sequences import tokens_of
from .work.steps import Steps, aligned, bind_kernel
from .work.tile_scheduler import MAX_GRID_YZ, block_work

# features of a call whose gradients of q, k and v these kernels have
WITH_GRADIENT = (
    "packed",
    "split_kv",
    "seqused",
    "window",
    "attention_chunk",
    "softcap",
    "alibi",
    "bias",
    "sink",
    "dropout",
    "score_mod",
    "mask_mod",
)


@dataclass(frozen=True)
class _Head:
    """One query head of a block of keys: a `problem.scores.Place`."""

    batch: fly.Value
    head: fly.Value
    keys: KeyRange
    split: bool = False


Step = Callable[[Any, tuple[Any, ...], bool], tuple[Any, ...]]  # (tile, carry, whether it is masked) -> carry


def _uniform(number: Any) -> fly.Value:
    """A number that is the same in every lane, a Python int too, in a scalar register."""
    return fly.first_lane(fly.i32(0) + number)


def _walk(tiles: TileRange, state: tuple[Any, ...], step: Step, *, always_masked: bool) -> tuple[Any, ...]:
    """`step` over all tiles of a range, masked where some row does not see a tile whole."""
    first, end = (_uniform(number) for number in (tiles.first, tiles.end))
    if always_masked:
        parts = [(first, end, True)]
    else:
        whole_from = fly.first_lane(fly.maximum(tiles.whole_from, first))
        whole_end = fly.first_lane(fly.minimum(fly.maximum(tiles.whole_end, whole_from), end))
        parts = [(first, whole_from, True), (whole_from, whole_end, False), (whole_end, end, True)]
        if isinstance(tiles.whole_from, int) and tiles.whole_from == 0:
            parts = parts[1:]
    for start, stop, masked in parts:
        for j, carried in (loop := fly.range(start, stop, carry=state)):
            loop.next(*step(j, carried, masked))
        state = tuple(loop.results)
    return state


@dataclass(frozen=True)
class _KeyBlock:
    """A wave's keys from `wave_key` on and what it has of them for every query head: operands of K, and of V for dK.

    `tiles`: of queries that see a key of the block.
    """

    options: BackwardOptions
    link: fly.Chain
    inverse: QueryRange
    tiles: TileRange
    wave_key: fly.Value
    operands: list[Queries]

    @property
    def row_tiles(self) -> int:
        """Accumulator tiles along the wave's keys."""
        return self.options.wave_rows // self.link.layout.rows

    def take_in(
        self,
        sums: Sequence[fly.Fragment],
        given: BoundFeatures,
        place: Place,
        scale_log2: fly.Value,
        views: tuple[fly.RowView, fly.RowView],
        statistics: tuple[fly.Tensor, fly.Tensor],
    ) -> Sequence[fly.Fragment]:
        """`sums`, of `options.results`, with those over the queries of one head; `views`: of Q and dO."""
        options, link, layout = self.options, self.link, self.link.layout
        wants_k, wants_v = ("dk" in options.results), ("dv" in options.results)
        of_q = Stream("q", link, views[0], options.tiling, across=True, along=wants_k)
        of_dout = Stream("dout", link, views[1], options.tiling, across=wants_k, along=wants_v)
        ring, split = fly.TileRing([*of_q.copies, *of_dout.copies], options.stages), len(of_q.copies)
        zeros = fly.Fragment.zeros(layout, self.row_tiles, of_q.row_tiles)
        keys = fly.RowVector.full(layout, self.row_tiles, 0.0).rows().map(lambda row: row + self.wave_key)

        def step(i: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            *sums, flight = state
            first_query = i * options.block_n
            # queries past the end have zeros here, in Q and in dO: whatever their weights are, they add nothing
            lse_columns, deltas = (
                fly.ColumnVector.load(layout, of_q.row_tiles, vector, first_query) for vector in statistics
            )
            lse = fly.RowVector(turned_layout(layout), lse_columns.values)
            queries = lse.rows().map(lambda row: row + first_query)
            less = zeros.map_columns(lambda zero, delta: -delta, deltas.map(given.of_kept))
            ready, flight = ring.advance(i, flight)
            q_tile, dout_tile = ready[:split], ready[split:]

            def hide(scores: fly.Fragment) -> fly.Fragment:
                return turned(self.inverse.apply(turned(scores), keys, first_query))

            raw = turned(of_q.across(zeros, self.operands[0], q_tile))
            made = weights(
                raw, given, place, queries, self.wave_key, scale_log2, lse, hide if masked else None, first_query
            )
            results = dict(zip(options.results, sums, strict=True))
            if wants_v:
                results["dv"] = of_dout.along(results["dv"], turned(made.of_values), dout_tile)
            if wants_k:
                excess = turned(of_dout.across(less, self.operands[1], dout_tile))
                results["dk"] = of_q.along(results["dk"], turned(made.score_gradients(excess, turned(less))), q_tile)
            return *results.values(), flight

        fly.barrier()  # nobody reads the slots of the head before any more
        state = (*sums, ring.start(_uniform(self.tiles.first)))
        *sums, flight = _walk(self.tiles, state, step, always_masked=options.features.masks_every_tile)
        if ring.asynchronous:
            for token in flight.pending:
                fly.wait(token)
        return sums


@fly.kernel
def flash_attn_generic_dkdv(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    dout: fly.Tensor,
    lse2: fly.Tensor,
    delta: fly.Tensor,
    dk: fly.Tensor | None,
    dv: fly.Tensor | None,
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *operands: fly.Operand,
    options: BackwardOptions,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, summed over the query heads of a key head.

    q, dout (B, Sq, H, D), k, v, dk, dv (B, Skv, Hkv, D), or packed (tokens, heads, D) with (B + 1,) i32 offsets; v,
    dout and dv may have another D. lse2, delta: `work.row_statistics`. Grid: (key blocks, key heads, sequences).
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    given = options.features.bind(operands)
    block, kv_head, batch = fly.block_id.x, fly.block_id.y, fly.block_id.z
    queries = Tokens.of(tokens_of(q, cu_seqlens_q), cu_seqlens_q, batch, given.get("seqused_q"))
    keys = Tokens.of(tokens_of(k, cu_seqlens_kv), cu_seqlens_kv, batch, given.get("seqused_kv"))
    seen = given.key_range(queries.length, keys.length, options.causal)
    inverse = QueryRange.of(seen)
    first_key = block * options.block_m
    tiles = inverse.tiles(first_key, options.block_m, options.block_n)
    link = fly.chain(fly.target().mma(q.dtype.name))
    wave_offset = fly.wave_id() * options.wave_rows
    dims = {"dk": options.head_dim, "dv": options.head_dim_v}

    with fly.when(first_key < keys.length):
        sides = {"k": keys.rows(k, kv_head, options.head_dim), "v": keys.rows(v, kv_head, options.head_dim_v)}
        if "dk" not in options.results:
            del sides["v"]
        stay = [arrived(wave_offset) for arrived in _resident(link, sides, first_key, options)]
        mine = _KeyBlock(options, link, inverse, tiles, first_key + wave_offset, stay)
        sums = tuple(
            fly.Fragment.zeros(link.layout, mine.row_tiles, column_tiles(link, dims[name]))
            for name in options.results
        )
        group = group_size(q, k)
        for g, carried in (heads := fly.range(0, group, carry=sums)):
            place = _Head(batch, kv_head * group + g, seen)
            views = (
                queries.rows(q, place.head, options.head_dim),
                queries.rows(dout, place.head, options.head_dim_v),
            )
            statistics = (queries.vector(lse2, place.head), queries.vector(delta, place.head))
            heads.next(*mine.take_in(carried, given.at(place), place, scale_log2, views, statistics))

        results = dict(zip(options.results, heads.results, strict=True))
        if dv is not None:
            view = keys.rows(dv, kv_head, options.head_dim_v)
            store_output(view, _scaled(results["dv"], given), mine.wave_key, options.wave_rows)
        if dk is not None:
            view = keys.rows(dk, kv_head, options.head_dim)
            store_output(view, _scaled(results["dk"], given, scale_log2), mine.wave_key, options.wave_rows)


def _resident(
    link: fly.Chain, views: dict[str, fly.RowView], first: fly.Value, options: BackwardOptions
) -> list[Callable[[fly.Value], Queries]]:
    """A block's rows of `views` from `first` on: functions of a wave's offset among them, which wait for them.

    Those in shared memory are there behind the next barrier.
    """
    windows = {name: view.window(first, options.block_m) for name, view in views.items()}
    if options.resident == "registers":

        def direct(window: fly.Window, offset: fly.Value) -> Queries:
            return direct_rows(link, window, offset, options.wave_rows)

        return [partial(direct, window) for window in windows.values()]

    def arrived(rows: SharedRows, offset: fly.Value) -> Queries:
        fly.wait(rows.flight)
        return rows.operands(offset, options.wave_rows, keep=False)

    arriving = [SharedRows(name, link, of, options.block_m, options.vector) for name, of in windows.items()]
    return [partial(arrived, rows) for rows in arriving]


def _scaled(sums: fly.Fragment, given: BoundFeatures, scale_log2: fly.Value | None = None) -> fly.Fragment:
    """Times dropout's scale, and times softmax_scale where it is given."""
    factor = None if scale_log2 is None else scale_log2 * (1 / LOG2_E)
    if given.features.drops:
        factor = given.scale_kept(fly.f32(1.0) if factor is None else factor)
    return sums if factor is None else sums.map(lambda x, r, c: x * factor)


@fly.kernel
def flash_attn_generic_dq(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    dout: fly.Tensor,
    lse2: fly.Tensor,
    delta: fly.Tensor,
    dq: fly.Tensor,
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *operands: fly.Operand,
    options: BackwardOptions,
) -> None:
    """dq = softmax_scale * dS k; tensors as of `flash_attn_generic_dkdv`, dq like q. Grid: as of the forward pass."""
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    given = options.features.bind(operands)
    work = block_work(
        (q, k, v, dout, lse2, cu_seqlens_q, cu_seqlens_kv),
        head_dim=options.head_dim,
        head_dim_v=options.head_dim_v,
        causal=options.causal,
        block_m=options.block_m,
        block_n=options.block_n,
        xcds=fly.target().xcds,
        given=given,
    )
    assert work.lse is not None and isinstance(work.k, fly.RowView) and isinstance(work.v, fly.RowView)
    with work.if_any_row():
        link = fly.chain(fly.target().mma(q.dtype.name))
        layout, row_tiles = link.layout, options.wave_rows // link.layout.rows
        wave_offset = fly.wave_id() * options.wave_rows
        wave_row = work.first_row + wave_offset
        rows = fly.RowVector.full(layout, row_tiles, 0.0).rows().map(lambda row: row + wave_row)
        here = given.at(work)
        arriving = _resident(link, {"q": work.q, "dout": work.out}, work.first_row, options)
        of_k = Stream("k", link, work.k, options.tiling, across=True, along=True)
        of_v = Stream("v", link, work.v, options.tiling, across=True, along=False)
        ring, split = fly.TileRing([*of_k.copies, *of_v.copies], options.stages), len(of_k.copies)
        flight = ring.start(_uniform(work.tiles.first))
        of_q, of_dout = (arrived(wave_offset) for arrived in arriving)
        last = work.queries.length - 1
        lse, deltas = (
            rows.map(lambda row, of=of: of.load(fly.minimum(row, last)))
            for of in (work.lse, work.queries.vector(delta, work.head))
        )
        deltas = deltas.map(given.of_kept)
        zeros = fly.Fragment.zeros(layout, row_tiles, of_k.row_tiles)
        less = zeros.map(lambda zero, r, c: -zeros.spread(deltas, r))

        def step(j: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            sums, flight = state
            first_key = j * options.block_n
            ready, flight = ring.advance(j, flight)
            k_tile, v_tile = ready[:split], ready[split:]

            def hide(scores: fly.Fragment) -> fly.Fragment:
                return work.keys.apply(scores, rows, first_key)

            raw = of_k.across(zeros, of_q, k_tile)
            made = weights(raw, here, work, rows, first_key, scale_log2, lse, hide if masked else None, wave_row)
            excess = of_v.across(less, of_dout, v_tile)
            return of_k.along(sums, made.score_gradients(excess, less), k_tile), flight

        sums = fly.Fragment.zeros(layout, row_tiles, column_tiles(link, options.head_dim))
        always_masked = options.features.masks_every_tile
        sums, _ = _walk(work.tiles, (sums, flight), step, always_masked=always_masked)
        view = work.queries.rows(dq, work.head, options.head_dim)
        store_output(view, _scaled(sums, given, scale_log2), wave_row, options.wave_rows)


def check_request(request: Request) -> None:
    """Raise `UnsupportedError` for a call whose gradients these kernels do not have."""
    for name in request.features:
        if name not in WITH_GRADIENT:
            what, instead = BY_NAME[name].told
            raise problem(UnsupportedError, f"the backward pass does not do {what}: {instead}")
    for what, count in (("heads", request.num_heads), ("sequences", request.batch)):
        if count > MAX_GRID_YZ:
            text = f"the backward pass takes {MAX_GRID_YZ} {what}, not {count}: pass the batch in parts"
            raise problem(UnsupportedError, text)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, then dK and dV, then dQ.

    `tensors`: those of the forward call with its out and lse, and dout like out, dlse like lse or None, and the
    results dq, dk and dv like q, k and v. Rows past the end of packed sequences and of lengths in use are not
    written. q, k, v and dout are 16-byte aligned.

    Raises:
        UnsupportedError: a feature that has no gradient here, or too many heads or sequences for a grid.
    """
    check_request(request)
    description = target(device_of(tensors["q"].device).target)
    of_keys, of_queries = options_for(
        description, request.head_dim, request.value_dim, request.causal, request.static_features
    )
    lse = tensors["lse"]
    start = aligned(4 * lse.numel())
    parts = {"lse2": 0, "delta": start}
    given = {
        **tensors,
        "scale_log2": request.scale_log2,
        # only sizes and strides matter here
        **dict.fromkeys(parts, torch.empty(lse.shape, dtype=torch.float32, device=lse.device)),
    }
    batch, heads, wave = request.batch, request.num_heads, description.wave_size
    rows, tokens = THREADS // lanes_of_row(request.value_dim), tensors["out"].shape[-3]
    entries = 1 if tensors["out"].dim() == 3 else batch
    statics: dict[str, Any] = {"head_dim": request.value_dim}
    steps = [bind_kernel(row_statistics, (-(-tokens // rows), heads, entries), THREADS, given, statics)]
    for options in of_keys:
        blocks = (-(-request.seq_len_kv // options.block_m), request.num_kv_heads, batch)
        wanted = {name: given[name] if name in options.results else None for name in ("dk", "dv")}
        steps.append(
            bind_kernel(
                flash_attn_generic_dkdv,
                blocks,
                options.waves * wave,
                {**given, **wanted},
                {"options": options},
                operands=request.operands,
            )
        )
    blocks = (-(-request.seq_len // of_queries.block_m), heads, batch)
    threads, statics = of_queries.waves * wave, {"options": of_queries}
    steps.append(bind_kernel(flash_attn_generic_dq, blocks, threads, given, statics, operands=request.operands))
    return Steps(tuple(steps), parts, 2 * start).launch()
