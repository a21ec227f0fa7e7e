"""Flash attention backward for gfx950 (CDNA4): one fused kernel with five products.

A block is four waves, one on each SIMD with most of its registers. A wave owns 64 keys (32 at head_dim 192), whose dK
and dV it sums up in accumulators, and queries pass by in tiles of 32.

| what | where |
|---|---|
| K, V of the wave's keys, operands of S and dP | registers |
| K of the block, for dQ | LDS, once |
| Q, dO, the rows' statistics | LDS, two slots each, by direct copies (`gfx950.panels`) |
| S, dP, P, dS and the sums dK, dV | registers, keys as rows: P^T and dS^T are operands as they are (`fly.chain`) |
| dS of the block | LDS, two slots |
| dQ | sums in global memory, atomically (`gfx950.dq_sums`) |

One tile's step, j:

| | matrix | vector | LDS and memory |
|---|---|---|---|
| before the barrier | dP = V dO^T | P = exp2(S(j)) | reads of dO |
| | dV += P^T dO | dS | dO transposed |
| | dK += dS^T Q | | dS stored; Q transposed |
| behind it | S(j+1) = K Q(j+1)^T | | copies of tile j+2 start; reads of Q(j+1) |
| | a quarter of dQ's columns = dS K | | reads of dS and K, of all keys; atomic additions |

One barrier a tile is enough: what a wave writes behind it, or before the next, nobody reads any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import fly
from fly.backends.target import target
from fly.runtime.device import device_of

from .generic.blocks import uniform
from .generic.operands import direct_rows
from .gfx950 import dq_sums as sums_of_dq
from .gfx950.backward import BLOCK_M, BUILDS, LINK_ROWS, STAGES, WAVES, Gfx950BackwardOptions
from .gfx950.dq_sums import ACROSS, APART, round_dq
from .gfx950.dq_sums import Sums as SumsOfDq
from .gfx950.operand_queue import Compute, Multiply, between, in_order
from .gfx950.panels import Copies, Loads, Panels, Products, Sums, plan
from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import HeadOfKeys, Weights, transposed, transposed_layout, weights
from .problem.mask import QueryRange, TileRange
from .problem.scores import LOG2_E
from .work.fragments import row_numbers, store_output
from .work.query_tiles import tiles_of_all
from .work.row_statistics import THREADS, lanes_of_row, row_statistics
from .work.sequences import Sequence as Tokens
from .work.sequences import sequences_of, tokens_of
from .work.sink_gradients import sink_gradients
from .work.steps import BoundKernel, Steps, aligned, bind_kernel
from .work.tile_scheduler import fold_grid, head_of_block

Operands = list[list[fly.Value]]  # of a wave's rows: [step over the columns][row tile]


@fly.kernel
def flash_attn_gfx950_bwd(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    dout: fly.Tensor,
    lse2: fly.Tensor,
    delta: fly.Tensor,
    dq_sums: fly.Tensor,
    dk: fly.Tensor,
    dv: fly.Tensor,
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    group: fly.i32,  # type: ignore[valid-type]
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *operands: fly.Operand,
    options: Gfx950BackwardOptions,
    folded: bool = False,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, summed over the query heads of a key head; dq_sums += dS k.

    Tensors as of `flash_attn_generic_dkdv`; dq_sums: see `gfx950.dq_sums`.
    Grid: (key blocks, key heads, sequences), or `folded`.
    """
    fly.occupancy(waves_per_eu=1)
    parameters = options.features.bind(operands)
    given = parameters.reread()

    def keys_here() -> tuple[fly.Value, fly.Value, Tokens, fly.Value]:
        """(key head, sequence, its keys, the block's first one)."""
        sequences, heads = sequences_of(fly.reread(q), fly.reread(cu_seqlens_q)), fly.reread(k).shape[-2]
        kv_head, batch, exists = head_of_block(heads, sequences, folded=folded)
        block = fly.block_id.x
        if exists is None:
            # all heads' first blocks begin first: with causality those take longest, and where heads divide among the
            # dies, all blocks of a head add to the sums of dQ in the same level-2 cache
            number = block + fly.grid_dim.x * kv_head
            block = fly.first_lane(number // heads)
            kv_head = number - block * heads
        offsets = fly.reread(cu_seqlens_kv)
        keys = Tokens.of(tokens_of(fly.reread(k), offsets), offsets, batch, fly.reread(parameters.get("seqused_kv")))
        first = block * options.block_n
        return kv_head, batch, keys, first if exists is None else fly.select(exists, first, keys.length)

    kv_head, batch, keys, first_key = keys_here()
    offsets = fly.reread(cu_seqlens_q)
    queries = Tokens.of(tokens_of(fly.reread(q), offsets), offsets, batch, given.get("seqused_q"))
    seen = given.key_range(queries.length, keys.length, options.causal)
    # Q and dO are zeros past the end, so that finite weights there add nothing; but what modifies scores may make inf
    inverse = QueryRange.of(seen, open_end=not options.features.modifies)
    tiles = inverse.tiles(first_key, options.block_n, BLOCK_M)
    # keys past the end would have weights, and parts of dQ: in the block with any, all tiles are masked
    tail = first_key + options.block_n > keys.length
    tiles = replace(tiles, whole_from=fly.select(tail, tiles.end, tiles.whole_from))
    with fly.when(first_key < keys.length):
        block = _Block(options, inverse, tiles, keys, queries, first_key, q.dtype)
        block.load(
            keys.rows(fly.reread(k), kv_head, options.head_dim), keys.rows(fly.reread(v), kv_head, options.head_dim_v)
        )
        sums, count = block.zeros(), fly.reread(group)
        first_head = kv_head * count
        for head, carried in (heads := fly.range(first_head, first_head + count, carry=sums)):
            place = HeadOfKeys(fly.remade(batch), head, seen)
            views = (
                queries.rows(fly.reread(q), head, options.head_dim),
                queries.rows(fly.reread(dout), head, options.head_dim_v),
            )
            statistics = (queries.vector(fly.reread(lse2), head), queries.vector(fly.reread(delta), head))
            part = SumsOfDq(fly.reread(dq_sums), queries, batch)
            of_head = parameters.reread().at(place)
            heads.next(*block.take_in(carried, of_head, place, fly.reread(scale_log2), views, statistics, part))
        sum_k, sum_v = heads.results
        with fly.reread_ids():
            kv_head, _, keys, first_key = keys_here()
            given, first = parameters.reread(), first_key + fly.wave_id() * options.wave_keys
            factor = given.scale_kept(fly.reread(scale_log2) * (1 / LOG2_E))
            sum_v = sum_v.map(lambda x, r, c: given.scale_kept(x))
            store_output(keys.rows(fly.reread(dv), kv_head, options.head_dim_v), sum_v, first, options.wave_keys)
            sum_k = sum_k.map(lambda x, r, c: x * factor)
            store_output(keys.rows(fly.reread(dk), kv_head, options.head_dim), sum_k, first, options.wave_keys)


@dataclass(frozen=True)
class _State:
    """What one tile hands to the next: the sums, its S, the last one's dQ, and what is in flight behind it."""

    sums: tuple[fly.Fragment, fly.Fragment]
    raw: fly.Fragment
    dq: fly.Fragment
    flight: fly.Token
    statistics: tuple[Any, ...]


@dataclass(frozen=True)
class _Slot:
    """Where one tile of two is in LDS. Copies and reads of different buffers need not wait for each other."""

    q: Panels
    dout: Panels
    vectors: tuple[fly.SharedVector, ...]
    ds: fly.SharedTile


class _Block:
    """A block's buffers, its wave's operands, and the steps over queries.

    `tiles`: of queries that see a key of the block.
    """

    def __init__(
        self,
        options: Gfx950BackwardOptions,
        inverse: QueryRange,
        tiles: TileRange,
        keys: Tokens,
        queries: Tokens,
        first_key: fly.Value,
        dtype: fly.DType,
    ):
        self.options, self.inverse, self.tiles, self.dtype = options, inverse, tiles, dtype
        self.keys, self.queries, self.first_key = keys, queries, first_key
        self.link = link = fly.chain(fly.target().mma(dtype.name))
        self.layout = link.layout
        self.wave_row = fly.wave_id() * options.wave_keys
        self.k_panels = Panels.allocate("k", options.head_dim, dtype, options.block_n // LINK_ROWS)
        atom = sums_of_dq.atom(dtype)
        shape = options.block_n, BLOCK_M
        self.stored = fly.plan_stored_operand(self.layout, shape, atom, "b", "columns", read_banks=64)
        self.slots = [self._slot(i) for i in range(STAGES)]
        self.of_q, self.of_dout = (Products(link, x) for x in (self.slots[0].q, self.slots[0].dout))
        zero = fly.i32(0)
        self.ds_corner = (zero, self.wave_row) if self.stored.turned else (self.wave_row, zero)
        mine = fly.i32(0), fly.wave_id() * ACROSS
        self.k_turned = Loads(self.k_panels, plan(atom, "a", transposed=True), mine)

    def _slot(self, i: int) -> _Slot:
        options, dtype = self.options, self.dtype
        return _Slot(
            Panels.allocate(f"q{i} ", options.head_dim, dtype, 1),
            Panels.allocate(f"dout{i} ", options.head_dim_v, dtype, 1),
            tuple(fly.SharedVector.ring(f"{name}{i}", BLOCK_M, fly.f32, 1) for name in ("lse", "delta")),
            fly.SharedTile.ring(f"ds{i}", self.stored.layout, dtype, 1)[0],
        )

    def zeros(self) -> tuple[fly.Fragment, fly.Fragment]:
        """The sums dK and dV of the wave's keys."""
        dims = self.options.head_dim, self.options.head_dim_v
        of_k, of_v = (
            fly.Fragment.zeros(self.layout, self.options.row_tiles, dim // self.layout.columns) for dim in dims
        )
        return of_k, of_v

    def load(self, k: fly.RowView, v: fly.RowView) -> None:
        """K of the block to LDS; K and V of the wave's keys to registers."""
        options, link = self.options, self.link
        copies = Copies(self.k_panels, k)
        parts = options.block_n // LINK_ROWS
        flights = [copies.issue(self.first_key + i * LINK_ROWS, self.k_panels.slot(fly.i32(i))) for i in range(parts)]
        window = v.window(self.first_key, options.block_n)
        steps = options.head_dim_v // link.atom.k
        of_v = direct_rows(link, window, self.wave_row, options.wave_keys)
        self.v: Operands = [of_v(t) for t in range(steps)]
        for flight in flights:
            fly.wait(flight)
        fly.barrier()
        straight = Loads(self.k_panels, plan(link.atom, link.row_operand, transposed=False))
        first = fly.wave_id() * options.row_tiles
        mine = [self.k_panels.slot(first + r) for r in range(options.row_tiles)]
        self.k_rows = lambda t: [straight.load(tile, 0, t * link.atom.k) for tile in mine]

    def take_in(
        self,
        sums: tuple[fly.Fragment, fly.Fragment],
        given: BoundFeatures,
        place: HeadOfKeys,
        scale_log2: fly.Value,
        views: tuple[fly.RowView, fly.RowView],
        statistics: tuple[fly.Tensor, fly.Tensor],
        dq: SumsOfDq,
    ) -> tuple[fly.Fragment, fly.Fragment]:
        """`sums` with those over the queries of one head; `views`: of Q and dO."""
        options, tiles = self.options, self.tiles
        first, count = uniform(tiles.first), uniform(tiles.end - tiles.first)
        copies = Copies(self.slots[0].q, views[0]), Copies(self.slots[0].dout, views[1])
        vectors = [fly.VectorCopy(vector, asynchronous=False) for vector in statistics]
        nothing = fly.Fragment.zeros(self.layout, options.row_tiles, 1)

        def issue(tile: Any, slot: _Slot) -> tuple[fly.Token, tuple[Any, ...]]:
            row = tile * BLOCK_M
            token = fly.join([copies[0].issue(row, slot.q), copies[1].issue(row, slot.dout)])
            return token, tuple(copy.issue(tile, x) for copy, x in zip(vectors, slot.vectors, strict=True))

        def land(token: fly.Token, numbers: tuple[Any, ...], slot: _Slot) -> None:
            for copy, vector, loaded in zip(vectors, slot.vectors, numbers, strict=True):
                copy.land(loaded, vector)
            fly.wait(token)

        def step(j: fly.Value, now: _State, slot: _Slot, other: _Slot) -> _State:
            first_query = j * BLOCK_M
            lse_at, delta_at = slot.vectors
            wave_key = self.first_key + self.wave_row
            dp, dk, dv = Sums(nothing), Sums(now.sums[0]), Sums(now.sums[1])
            made: Weights
            p = ds = nothing

            def hide(scores: fly.Fragment) -> fly.Fragment:
                def hidden() -> fly.Fragment:
                    return given.mask(self._limit(scores, first_query), rows, wave_key, place)

                if options.features.masks_every_tile:
                    return hidden()
                seen: fly.Fragment = fly.cond(tiles.sees_whole(j), lambda: scores, hidden)
                return seen

            lse = fly.RowVector(transposed_layout(self.layout), lse_at.columns(self.layout, 1).values)
            rows = lse.rows().map(lambda row: row + first_query)

            def weigh() -> None:
                nonlocal made, p
                found = weights(
                    transposed(now.raw), given, place, rows, wave_key, scale_log2, lse, hide, first_query, early=True
                )
                made, p = found, self._narrow(found.of_values)

            def pull() -> None:
                nonlocal ds
                deltas = delta_at.columns(self.layout, 1).map(given.of_kept)
                less = nothing.map_columns(lambda zero, delta: -delta, deltas)
                excess = dp.fragment.map(lambda x, r, c: x + less.tiles[r][c])
                ds = self._narrow(made.score_gradients(transposed(excess), transposed(less)).raw)
                fly.FragmentStore(self.stored, self.ds_corner).store(ds, slot.ds)

            before: list[Multiply | Compute] = [
                *self.of_dout.across(dp, self.v.__getitem__, slot.dout, kept=True),  # dP = V dO^T
                Compute(weigh),
                *self.of_dout.along(dv, lambda: p, slot.dout),  # dV += P^T dO
                Compute(pull),
                *self.of_q.along(dk, lambda: ds, slot.q),  # dK += dS^T Q
            ]
            # the last tile's dQ is added meanwhile
            in_order(between(before, dq.add(now.dq, place.head, fly.maximum(j - 1, first))), options.ahead)
            land(now.flight, now.statistics, other)
            fly.barrier()
            flight, numbers = issue(j + 2, slot)
            raw = Sums(nothing)
            of_tile = self._no_dq()
            # S(j+1) = K Q(j+1)^T, dQ = dS K
            in_order(
                [*self.of_q.across(raw, self.k_rows, other.q, kept=False), *self._dq(of_tile, slot.ds)], options.ahead
            )
            return _State((dk.fragment, dv.fragment), raw.fragment, of_tile.fragment, flight, numbers)

        fly.barrier()  # nobody reads the slots of the head before any more
        pairs = (count + 1) // 2
        here, there = self.slots
        land(*issue(first, here), here)
        flight, numbers = issue(first + 1, there)
        fly.barrier()
        raw = Sums(nothing)
        in_order(self.of_q.across(raw, self.k_rows, here.q, kept=False), options.ahead)
        state = _State(sums, raw.fragment, self._no_dq().fragment, flight, numbers)
        for pair, now in (loop := fly.range(0, pairs, carry=state)):
            j = first + pair * 2
            loop.next(step(j + 1, step(j, now, here, there), there, here))
        fly.wait(loop.results.flight)
        with fly.when(count > 0):
            in_order(dq.add(loop.results.dq, place.head, first + pairs * 2 - 1), 0)
        result: tuple[fly.Fragment, fly.Fragment] = loop.results.sums
        return result

    def _narrow(self, fragment: fly.Fragment) -> fly.Fragment:
        """Rows and columns exchanged, in 16 bits."""
        return transposed(fragment).map(lambda x, r, c: x.to(self.dtype, rounding="nearest_any"))

    def _limit(self, scores: fly.Fragment, first_query: fly.Value) -> fly.Fragment:
        """-inf where a query does not see a key, or there is no such key."""
        count = self.keys.length
        keys = row_numbers(self.layout, self.options.row_tiles, self.first_key + self.wave_row)
        limited = self.inverse.apply(transposed(scores), keys, first_query)
        return transposed(limited.map(lambda x, r, c: fly.select(limited.spread(keys, r) < count, x, -math.inf)))

    def _no_dq(self) -> Sums:
        layout, across = sums_of_dq.layout(self.dtype), self.options.head_dim // APART
        return Sums(fly.Fragment.zeros(layout, BLOCK_M // layout.rows, across))

    def _dq(self, sums: Sums, ds: fly.SharedTile) -> Iterator[Multiply]:
        """The wave's columns of dS K, of all keys of the block."""
        load, atom = self.stored.loader(), self.stored.atom
        for key in range(0, self.options.block_n, atom.k):
            rows: list[fly.Value] = []
            slot, row = divmod(key, LINK_ROWS)
            tile = self.k_panels.slot(fly.i32(slot))
            for c in range(len(sums.tiles[0])):

                def read(
                    c: int = c, key: int = key, row: int = row, tile: Panels = tile, rows: list[fly.Value] = rows
                ) -> fly.Value:
                    if not rows:
                        for r in range(0, BLOCK_M, atom.n * load.plan.tiles):
                            rows.extend(load.load(ds, *self.stored.place(r, key)))
                    return self.k_turned.load(tile, row, c * APART)

                def use(column: fly.Value, c: int = c, rows: list[fly.Value] = rows) -> None:
                    for r, operand in enumerate(rows):
                        sums.tiles[r][c] = fly.mma(atom, column, operand, sums.tiles[r][c])

                yield Multiply(read, use, 4 if c else 4 + 4 * len(sums.tiles))


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    See `flash_attn_generic_bwd.prepare`.
    """
    packed = tensors.get("cu_seqlens_q") is not None
    dims, features = (request.head_dim, request.value_dim), request.static_features
    build = BUILDS[dims]
    options = Gfx950BackwardOptions(*dims, request.causal, build.wave_keys, build.ahead, features)
    wave = target(device_of(tensors["q"].device).target).wave_size
    sequences, heads = request.batch, request.num_heads
    tokens, lse = tensors["out"].shape[-3], tensors["lse"]
    entries = 1 if packed else sequences
    lines = THREADS // lanes_of_row(request.value_dim)
    tiles = tiles_of_all(tokens, sequences, packed, BLOCK_M)
    # blocks of `row_statistics` clear as many rows as they have; steps come in pairs, which may have one too many
    padded = -(-(tiles + 1) * BLOCK_M // lines) * lines
    sums = torch.empty((entries, heads, padded, request.head_dim), dtype=torch.float32, device=lse.device)
    sizes = {"lse2": lse.numel(), "delta": lse.numel(), "dq_sums": sums.numel()}
    if tensors.get("delta") is not None:
        del sizes["delta"]
    given = {
        **tensors,
        "scale_log2": request.scale_log2,
        "group": heads // request.num_kv_heads,
        "sequences": sequences,
        # only sizes and strides matter here
        **dict.fromkeys(sizes, torch.empty(lse.shape, dtype=torch.float32, device=lse.device)),
        "dq_sums": sums,
    }
    steps: list[BoundKernel] = []

    def add(
        kernel: Any, grid: tuple[int, int, int], threads: int, operands: Sequence[str] = (), **statics: Any
    ) -> None:
        grid, fold = fold_grid(grid)
        steps.append(bind_kernel(kernel, grid, threads, given, {**statics, **fold}, operands=operands))

    add(row_statistics, (padded // lines, heads, entries), THREADS, head_dim=request.value_dim)
    if (dsink := tensors.get("dsink")) is not None:
        add(sink_gradients, (dsink.shape[0], heads, sequences), wave)
    threads = WAVES * wave
    blocks = -(-request.seq_len_kv // options.block_n), request.num_kv_heads, sequences
    add(flash_attn_gfx950_bwd, blocks, threads, request.operands, options=options)
    blocks = -(-request.seq_len // BLOCK_M), heads, sequences
    add(round_dq, blocks, threads, request.operands, options=options)
    parts, nbytes = {}, 0
    for name, size in sizes.items():
        parts[name] = nbytes
        nbytes += aligned(4 * size)
    return Steps(tuple(steps), parts, nbytes).launch()
