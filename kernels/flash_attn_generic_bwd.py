"""Flash attention backward for every target, as two kernels whose results are the same bits in every run.

Dao et al., "FlashAttention-2" (2023), algorithm 2, with the outer loop taken apart: no sum is shared between blocks.

| kernel | a block's rows | what passes by | results |
|---|---|---|---|
| `flash_attn_generic_dkdv` | keys of one key head | queries and dO of the group's heads | dV = P^T dO, dK = dS^T Q |
| `flash_attn_generic_dq` | queries of one head | keys and values | dQ = dS K |

Both make S = Q K^T and dP = dO V^T again, P from S and the row's log-sum-exp, and dS from P and dP
(`problem.gradients`): 7 products where one kernel with atomic additions has 5. The products of `dkdv` are the
transposes, K Q^T and V dO^T, so that P^T and dS^T are row operands as they are (`fly.chain`), and so is dS in `dq`.
`work.row_statistics` makes the rows' log-sum-exp in log2 units and delta before, and `work.sink_gradients` what sinks
get of them. Gradients of biases and of what a `score_mod` loads are `dq`'s, in builds of their own
(`generic.operand_gradients`).

| what | where |
|---|---|
| the block's rows: K and V, or Q and dO | registers, or shared memory where accumulators leave no room |
| what passes by | shared memory, swizzled, filled ahead (`fly.TileRing`), read straight and transposed |
| S, dP, P, dS, and the sums dV and dK, or dQ | registers, f32 |

Head dimensions above 128 have no registers for dK and dV together: a launch each, with S once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fly
from fly.backends.target import target
from fly.runtime.device import device_of

from .generic.backward import BackwardOptions, options_for, query_block
from .generic.blocks import WaveRows, uniform, walk
from .generic.operand_gradients import add_load_gradients, put_bias_gradients
from .generic.operands import Queries, SharedRows, Stream, column_tiles, direct_rows, listed_copies
from .problem.contract import Launch, Request, Tensors, aux_name
from .problem.features import NO_FEATURES, BoundFeatures
from .problem.gradients import SCORES_ALONE, HeadOfKeys, Inputs, tile_by_tile, transposed, transposed_layout, weights
from .problem.mask import QueryRange, TileRange
from .problem.scores import LOG2_E
from .work.fragments import row_numbers, store_output
from .work.gradient_steps import GradientSteps
from .work.row_statistics import THREADS, row_statistics, rows_of_block
from .work.score_stages import ScoreStages
from .work.sequences import Sequence as Tokens
from .work.sequences import sequences_of, tokens_of
from .work.sink_gradients import rows_of_part
from .work.tile_list import BY_KEYS, TileList
from .work.tile_scheduler import head_of_block


@dataclass(frozen=True)
class _KeyBlock:
    """A wave's keys and what it has of them for every query head: operands of K, and of V for dK.

    `tiles`: of queries that see a key of the block, but for a block mask; `first_key`: of the block.
    """

    options: BackwardOptions
    link: fly.Chain
    inverse: QueryRange
    tiles: TileRange
    first_key: fly.Value
    operands: list[Queries]

    @property
    def row_tiles(self) -> int:
        """Accumulator tiles along the wave's keys."""
        return self.options.wave_rows // self.link.layout.rows

    def take_in(
        self,
        sums: Sequence[fly.Fragment],
        given: BoundFeatures,
        place: HeadOfKeys,
        scale_log2: fly.Value,
        views: tuple[fly.RowView, fly.RowView],
        statistics: tuple[fly.Tensor, fly.Tensor],
    ) -> Sequence[fly.Fragment]:
        """`sums`, of `options.results`, with those over the queries of one head; `views`: of Q and dO."""
        options, link, layout = self.options, self.link, self.link.layout
        wants_k, wants_v = ("dk" in options.results), ("dv" in options.results)
        of_q = Stream("q", link, views[0], options.tiling, across=True, along=wants_k)
        of_dout = Stream("dout", link, views[1], options.tiling, across=wants_k, along=wants_v)
        listed, tiles = self._listed(given, place)
        tile_of = None if listed is None else listed.tile
        runs = [fly.SharedVector.ring(x, options.block_n, fly.f32, options.stages) for x in ("lse", "delta")]

        def copied() -> tuple[fly.TileRing, int]:
            """The ring, and how many of its tiles are of Q."""
            with fly.reread_ids():
                copies: list[tuple[Any, Any]] = of_q.copies()
                split = len(copies)
                copies += of_dout.copies()
            for vector, slots in zip(statistics, runs, strict=True):
                copies.append((fly.VectorCopy(vector, asynchronous=options.tiling.asynchronous), slots))
            return fly.TileRing(listed_copies(copies, tile_of), options.stages), split

        ring, split = copied()
        zeros = fly.Fragment.zeros(layout, self.row_tiles, of_q.row_tiles)

        def step(i: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            *sums, flight = state
            tile = i if tile_of is None else tile_of(i)
            first_query = tile * options.block_n
            here, inverse = place, self.inverse
            if listed is not None:
                here = replace(place, keys=place.keys.remade())
                inverse = QueryRange.of(here.keys, open_end=inverse.open_end)
            ready, flight = (copied()[0] if options.rereads else ring).advance(i, flight)
            q_tile, dout_tile, (lse_slot, delta_slot) = ready[:split], ready[split:-2], ready[-2:]
            lse = fly.RowVector(transposed_layout(layout), lse_slot.columns(layout, of_q.row_tiles).values)
            queries = lse.rows().map(lambda row: row + first_query)

            between = fly.sched_barrier if options.masks_in_parts and masked else None

            def limit(scores: fly.Fragment, query: int = 0) -> fly.Fragment:
                with fly.reread_ids(lanes=options.counts_lanes):
                    wave_key = fly.block_id.x * options.block_m + fly.wave_id() * options.wave_rows
                    keys = row_numbers(layout, self.row_tiles, wave_key)
                    first = first_query + query if query else first_query
                    return transposed(inverse.apply(transposed(scores), keys, first, between=between))

            def hidden(part: fly.Fragment, query: int) -> fly.Fragment:
                mine = fly.RowVector(queries.layout, (queries.values[query // layout.columns],))
                return transposed(given.mask(limit(transposed(part), query), mine, wave_key, here))

            def hide(scores: fly.Fragment) -> fly.Fragment:
                if masked and options.masks_in_parts:
                    with fly.reread_ids():
                        return transposed(tile_by_tile(transposed(scores), hidden))
                if masked:
                    with fly.reread_ids():
                        return given.mask(limit(scores), queries, wave_key, here)
                if listed is None:
                    return scores
                with fly.reread_ids():
                    first_key = fly.block_id.x * options.block_m
                    whole = inverse.tiles(first_key, options.block_m, options.block_n).sees_whole(tile)
                limited: fly.Fragment = fly.cond(whole, lambda: scores, lambda: limit(scores))
                return limited

            wave_key = fly.block_id.x * options.block_m + fly.wave_id() * options.wave_rows
            raw = transposed(of_q.across(zeros, self.operands[0], q_tile))
            made = weights(
                raw, given, here, queries, wave_key, scale_log2, lse, hide, first_query, scarce=options.is_scarce()
            )
            results = dict(zip(options.results, sums, strict=True))
            if wants_v:
                results["dv"] = of_dout.along(results["dv"], transposed(made.of_values), dout_tile)
            if wants_k:
                deltas = delta_slot.columns(layout, of_q.row_tiles).map(given.of_kept)
                less = zeros.map_columns(lambda zero, delta: -delta, deltas)
                excess = transposed(of_dout.across(less, self.operands[1], dout_tile))
                found = made.score_gradients(excess, transposed(less))
                results["dk"] = of_q.along(results["dk"], transposed(found.raw), q_tile)
            return *results.values(), flight

        fly.barrier()  # nobody reads the slots of the head before any more
        state = (*sums, ring.start(uniform(tiles.first)))
        *sums, flight = walk(tiles, state, step, always_masked=options.features.masks_every_tile)
        if ring.asynchronous:
            for token in flight.pending:
                fly.wait(token)
        return sums

    def _listed(self, given: BoundFeatures, place: HeadOfKeys) -> tuple[TileList | None, TileRange]:
        """A block mask's list of what a head's queries see of the block, if there is one, and what to walk."""
        if given.features.block_size is None:
            return None, self.tiles
        queries = place.keys.queries
        listed = TileList.of(
            given, place.batch, place.head, fly.remade(self.first_key), self.options.block_n, queries
        )
        return listed, TileRange(0, 0, listed.whole_steps, listed.steps)


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
    group: fly.i32,  # type: ignore[valid-type]
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *operands: fly.Operand,
    options: BackwardOptions,
    folded: bool = False,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, summed over the query heads of a key head.

    q, dout (B, Sq, H, D), k, v, dk, dv (B, Skv, Hkv, D), or packed (tokens, heads, D) with (B + 1,) i32 offsets; v,
    dout and dv may have another D; `group` is H / Hkv. lse2, delta: `work.row_statistics`. A block mask's lists are
    those by key blocks. Grid: (key blocks, key heads, sequences), or `folded`.

    Little more is kept in registers over the loop over queries than it needs: ids are read again before and after.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    fly.narrow_splats()
    parameters = options.features.bind(operands)
    given = parameters.reread()

    def keys_here() -> tuple[fly.Value, fly.Value, Tokens, fly.Value]:
        """(key head, sequence, its keys, the block's first one)."""
        sequences = sequences_of(fly.reread(q), fly.reread(cu_seqlens_q))
        kv_head, batch, exists = head_of_block(fly.reread(k).shape[-2], sequences, folded=folded)
        offsets = fly.reread(cu_seqlens_kv)
        keys = Tokens.of(tokens_of(fly.reread(k), offsets), offsets, batch, fly.reread(parameters.get("seqused_kv")))
        first = fly.block_id.x * options.block_m
        return kv_head, batch, keys, first if exists is None else fly.select(exists, first, keys.length)

    kv_head, batch, keys, first_key = keys_here()
    offsets = fly.reread(cu_seqlens_q)
    queries = Tokens.of(tokens_of(fly.reread(q), offsets), offsets, batch, given.get("seqused_q"))
    seen = given.key_range(queries.length, keys.length, options.causal)
    # Q and dO are zeros past the end, so that finite weights there add nothing; but what modifies scores may make inf
    inverse = QueryRange.of(seen, open_end=not options.features.modifies)
    tiles = inverse.tiles(first_key, options.block_m, options.block_n)
    link = fly.chain(fly.target().mma(q.dtype.name))
    wave_offset = fly.wave_id() * options.wave_rows
    dims = {"dk": options.head_dim, "dv": options.head_dim_v}

    with fly.when(first_key < keys.length):
        sides = {
            "k": keys.rows(fly.reread(k), kv_head, options.head_dim),
            "v": keys.rows(fly.reread(v), kv_head, options.head_dim_v),
        }
        if "dk" not in options.results:
            del sides["v"]
        arriving = _resident(link, sides, first_key, options)
        in_registers = options.resident == "registers"
        stay = [arrived(wave_offset) for arrived in arriving] if in_registers else []
        mine = _KeyBlock(options, link, inverse, tiles, first_key, stay)
        sums = tuple(
            fly.Fragment.zeros(link.layout, mine.row_tiles, column_tiles(link, dims[name]))
            for name in options.results
        )
        count = fly.reread(group)
        first_head = kv_head * count
        again = options.remakes_tiles()
        start = fly.i32(0) if again else first_head
        for number, carried in (heads := fly.range(start, start + count, carry=sums)):
            head = first_head + number if again else number
            place = HeadOfKeys(fly.remade(batch), head, seen)
            if again:
                with fly.reread_ids():
                    *_, first_key = keys_here()
                    mine = replace(mine, tiles=inverse.tiles(first_key, options.block_m, options.block_n))
            if not in_registers:
                with fly.reread_ids():
                    stay = [arrived(fly.wave_id() * options.wave_rows) for arrived in arriving]
                mine = replace(mine, operands=stay)
            views = (
                queries.rows(fly.reread(q), place.head, options.head_dim),
                queries.rows(fly.reread(dout), place.head, options.head_dim_v),
            )
            statistics = (queries.vector(fly.reread(lse2), place.head), queries.vector(fly.reread(delta), place.head))
            of_head = parameters.reread().at(place)
            heads.next(*mine.take_in(carried, of_head, place, fly.reread(scale_log2), views, statistics))

        results = dict(zip(options.results, heads.results, strict=True))
        with fly.reread_ids(lanes=options.counts_lanes):
            kv_head, _, keys, first_key = keys_here()
            wave_key = first_key + fly.wave_id() * options.wave_rows
            if dv is not None:
                view = keys.rows(fly.reread(dv), kv_head, options.head_dim_v)
                store_output(view, _scaled(results["dv"], parameters.reread()), wave_key, options.wave_rows)
            if dk is not None:
                view = keys.rows(fly.reread(dk), kv_head, options.head_dim)
                store_output(
                    view,
                    _scaled(results["dk"], parameters.reread(), fly.reread(scale_log2)),
                    wave_key,
                    options.wave_rows,
                )


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
    dbias: fly.Tensor | None,
    *operands: fly.Operand,
    options: BackwardOptions,
    folded: bool = False,
) -> None:
    """dq = softmax_scale * dS k; tensors as of `flash_attn_generic_dkdv`, dq like q. Grid: as of the forward pass.

    dbias: see `generic.operand_gradients`. Behind the operands come the gradients of `options.aux_gradients`, to
    which this adds. What no block sees is not written in either.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    fly.narrow_splats()
    count = len(operands) - len(options.aux_gradients)
    parameters = options.features.bind(operands[:count])
    given, scale = parameters.reread(), fly.reread(scale_log2)
    of_aux = [(given.aux[i], to) for i, to in zip(options.aux_gradients, operands[count:], strict=True)]
    inputs = Inputs(bias=dbias is not None, loads=bool(of_aux))
    tensors = (q, k, v, dout, lse2, cu_seqlens_q, cu_seqlens_kv)
    work = query_block(tuple(map(fly.reread, tensors)), options, given, folded=folded)
    assert work.lse is not None and isinstance(work.k, fly.RowView) and isinstance(work.v, fly.RowView)
    with work.if_any_row():
        link = fly.chain(fly.target().mma(q.dtype.name))
        layout, row_tiles = link.layout, options.wave_rows // link.layout.rows
        mine = WaveRows.of(layout, work.first_row, options.wave_rows)
        rows, wave_row = mine.numbers, mine.first
        featured = options.features != NO_FEATURES
        anew = partial(fly.reread_ids, lanes=options.counts_lanes) if featured else nullcontext
        here = given.at(work)
        arriving = _resident(link, {"q": work.q, "dout": work.out}, work.first_row, options)
        of_k = Stream("k", link, work.k, options.tiling, across=True, along=True)
        of_v = Stream("v", link, work.v, options.tiling, across=True, along=False)
        tiles, tile_of = work.tiles, None
        if work.listed is not None:
            tiles, tile_of = replace(tiles, first=0, whole_from=0), work.listed.tile
        of_keys = of_k.copies()
        ring, split = fly.TileRing(listed_copies([*of_keys, *of_v.copies()], tile_of), options.stages), len(of_keys)
        flight = ring.start(uniform(tiles.first))
        of_q, of_dout = (arrived(mine.offset) for arrived in arriving)
        queries = work.queries.length
        lse, deltas = (mine.load(of, queries) for of in (work.lse, work.queries.vector(fly.reread(delta), work.head)))
        if inputs != SCORES_ALONE:
            # rows past the end, whose results are dropped, have no weights either
            lse = lse.map(lambda value, row: fly.select(row < queries, value, math.inf), rows)
        deltas, scarce = deltas.map(given.of_kept), options.is_scarce()
        zeros = fly.Fragment.zeros(layout, row_tiles, of_k.row_tiles)
        less = zeros.map(lambda zero, r, c: -zeros.spread(deltas, r))

        def step(j: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            sums, flight = state
            tile = j if tile_of is None else tile_of(j)
            first_key = tile * options.block_n
            ready, flight = ring.advance(j, flight)
            with anew():
                here_now = WaveRows.of(layout, work.first_row, options.wave_rows) if featured else mine
            rows, wave_row = here_now.numbers, here_now.first
            place = work if tile_of is None else replace(work, keys=work.keys.remade())
            stages = ScoreStages(place, here, scale, rows, options.block_n)
            k_tile, v_tile = ready[:split], ready[split:]
            raw = of_k.across(zeros, of_q, k_tile)
            hide = partial(stages.mask, tile=tile, masked=masked, in_parts=options.masks_in_parts)
            with fly.reread_ids() if options.rereads else nullcontext():
                made = weights(
                    raw, here, place, rows, first_key, scale, lse, hide, wave_row, inputs, early=True, scarce=scarce
                )
            excess = of_v.across(less, of_dout, v_tile)
            found = made.score_gradients(excess, less)
            if dbias is not None and found.bias is not None:
                put_bias_gradients(dbias, found.bias, wave_row, first_key, work, adds=options.adds_bias)
            add_load_gradients(found.loads, of_aux, work)
            return of_k.along(sums, found.raw, k_tile), flight

        sums = fly.Fragment.zeros(layout, row_tiles, column_tiles(link, options.head_dim))
        always_masked = options.features.masks_every_tile
        sums, _ = walk(tiles, (sums, flight), step, always_masked=always_masked)
        with anew():
            sums = _scaled(sums, parameters.reread(), fly.reread(scale_log2))
            if featured:
                work = query_block(tuple(map(fly.reread, tensors)), options, parameters.reread(), folded=folded)
                wave_row = WaveRows.of(layout, work.first_row, options.wave_rows).first
            view = work.queries.rows(fly.reread(dq), work.head, options.head_dim)
            store_output(view, sums, wave_row, options.wave_rows)


def sink_parts(device: torch.device, queries: int) -> int:
    """How many partial sums of a sequence of so many queries a sink's gradient has."""
    return -(-queries // rows_of_part(target(device_of(device).target).wave_size))


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, then dK and dV, then dQ.

    `request` is one that this kernel's row of `dispatch.BACKWARD_KERNELS` serves. `tensors`: those of the forward
    call with its out and lse, and dout like out, dlse like lse or None, the results dq, dk and dv like q, k and v,
    and of a block mask the lists by key blocks, `tile_list.LISTS_BY_KEYS`. Rows past the end of packed sequences and
    of lengths in use are not written. q, k, v and dout are 16-byte aligned.

    Results that are there only where they are wanted: delta, float32 like lse; dsink (`sink_parts`, B, H) f32, to be
    summed over the first two; dbias, zeros of the shape (B, H, Sq, Skv) in any dtype, or in f32 the same expanded or
    (B, H, Skv), for the sums over what has stride 0; daux0 and so on (`aux_name`), zeros like the auxiliary tensors
    in f32.
    """
    description = target(device_of(tensors["q"].device).target)
    aux = tuple(i for i in range(request.aux_tensors) if tensors.get(f"d{aux_name(i)}") is not None)
    dbias = tensors.get("dbias")
    features, of_operands = request.static_features, bool(aux) or dbias is not None
    of_keys, of_queries = options_for(
        description,
        request.head_dim,
        request.value_dim,
        request.causal,
        features,
        of_operands,
        "packed" in request.features,
        request.aux_tensors > 0,
        dbias is not None and dbias.dim() == 3,
        (bias := tensors.get("bias")) is not None and bias.dtype.itemsize == 2,
    )
    of_queries = replace(of_queries, adds_bias=_is_summed(dbias), aux_gradients=aux)
    lse = tensors["lse"]
    parts = ("lse2",) if tensors.get("delta") is not None else ("lse2", "delta")
    made = dict.fromkeys(parts, torch.empty(lse.shape, dtype=torch.float32, device=lse.device))
    batch, heads, wave = request.batch, request.num_heads, description.wave_size
    steps = GradientSteps(tensors, request, made, group=heads // request.num_kv_heads)
    rows, tokens = rows_of_block(request.value_dim), tensors["out"].shape[-3]
    entries = 1 if tensors["out"].dim() == 3 else batch
    steps.add(row_statistics, (-(-tokens // rows), heads, entries), THREADS, head_dim=request.value_dim)
    steps.add_sinks()
    by_keys = [BY_KEYS.get(name, name) for name in request.operands]
    for options in of_keys:
        blocks = (-(-request.seq_len_kv // options.block_m), request.num_kv_heads, batch)
        left_out = {name: None for name in ("dk", "dv") if name not in options.results}
        threads = options.waves * wave
        steps.add(flash_attn_generic_dkdv, blocks, threads, by_keys, instead=left_out, options=options)
    blocks = (-(-request.seq_len // of_queries.block_m), heads, batch)
    operands = (*request.operands, *(f"d{aux_name(i)}" for i in aux))
    steps.add(flash_attn_generic_dq, blocks, of_queries.waves * wave, operands, options=of_queries)
    return steps.launch()


def _is_summed(dbias: torch.Tensor | None) -> bool:
    """Whether several scores have one element of a bias."""
    if dbias is None:
        return False
    return dbias.dim() == 3 or any(n > 1 and not stride for n, stride in zip(dbias.shape, dbias.stride()))
