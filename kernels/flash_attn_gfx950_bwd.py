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

One tile's step, j; the other columns of a row are between its matrix instructions, in an order that LLVM's scheduler
keeps where scores are as they are and nothing is dropped (`gfx950.tile_weights`):

| | matrix | vector | LDS and memory |
|---|---|---|---|
| before the barrier | dP - delta = V dO^T - delta | P = exp2(S(j)) | reads of dO |
| | dV += P^T dO | dS | dO transposed; dS stored; the last tile's dQ added atomically |
| | dK += dS^T Q | | Q transposed; statistics of tile j+1 to LDS |
| behind it | the last of them | | |
| | S(j+1) = K Q(j+1)^T | | copies of tile j+2 start; reads of Q(j+1), K |
| | a quarter of dQ's columns = dS K | | reads of dS and K, of all keys |

One barrier a tile is enough: what a wave writes behind it, or before the next, nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import fly

from .generic.blocks import uniform
from .generic.operands import direct_rows
from .gfx950 import dq_sums as of_dq
from .gfx950.backward import (
    BLOCK_M,
    LINK_ROWS,
    REREAD,
    STAGES,
    WAVES,
    Gfx950BackwardOptions,
    build_of,
    counts_lanes,
    is_sparing,
)
from .gfx950.backward_launch import parts_of_call, prepare_backward
from .gfx950.dq_in_place import sums_of_dq
from .gfx950.dq_sums import ACROSS, APART
from .gfx950.dq_sums import Sums as SumsOfDq
from .gfx950.operand_queue import Compute, Meet, Multiply, Room, Step, in_order, merged, spread
from .gfx950.own_operands import OwnOperands
from .gfx950.panels import Copies, Loads, Panels, Products, Sums, plan
from .gfx950.tile_weights import PlainWeights, TileWeights, WholeWeights
from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import HeadOfKeys, Weights, tile_by_tile, transposed, transposed_layout, weights
from .problem.mask import QueryRange, TileRange
from .problem.scores import LOG2_E
from .work.fragments import row_numbers, store_output
from .work.sequences import Sequence as Tokens
from .work.sequences import sequences_of, tokens_of
from .work.tile_scheduler import head_of_block

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
    dq_tails: fly.Tensor | None,
    *operands: fly.Operand,
    options: Gfx950BackwardOptions,
    parts: int = 1,
    folded: bool = False,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, summed over the query heads of a key head; dq_sums += dS k.

    Tensors as of `flash_attn_generic_dkdv`; dq_sums: see `gfx950.dq_sums`, or with dq_tails, dq itself
    (`gfx950.dq_in_place`). With `parts` a block has so many fewer query heads, `group` of
    them, and dk and dv are parts (`gfx950.group_parts`).
    Grid: (key blocks, key heads * parts, sequences), or `folded`.
    """
    fly.occupancy(waves_per_eu=1)
    if options.scarce:
        fly.narrow_splats()
    parameters = options.features.bind(operands)
    given = parameters.reread()

    def keys_here() -> tuple[fly.Value, fly.Value, Tokens, fly.Value]:
        """(key head, or part of one, sequence, its keys, the block's first one)."""
        sequences, heads = sequences_of(fly.reread(q), fly.reread(cu_seqlens_q)), fly.reread(k).shape[-2]
        if parts > 1:
            heads = heads * parts
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
        block = _Block(parameters, options, inverse, tiles, keys, queries, first_key, q.dtype)
        whole = kv_head if parts == 1 else kv_head // parts
        block.load(
            keys.rows(fly.reread(k), whole, options.head_dim), keys.rows(fly.reread(v), whole, options.head_dim_v)
        )
        # one length for all of them where scalar registers are short: a tensor has its own, in one over the loops
        here = replace(queries, first=queries.start) if options.features.drops else queries
        sums, count = block.zeros(), fly.reread(group)
        first_head = kv_head * count
        for head, carried in (heads := fly.range(first_head, first_head + count, carry=sums)):
            place = HeadOfKeys(fly.remade(batch), head, seen)
            views = (
                here.rows(fly.reread(q), head, options.head_dim),
                here.rows(fly.reread(dout), head, options.head_dim_v),
            )
            statistics = (here.vector(fly.reread(lse2), head), here.vector(fly.reread(delta), head))
            part = sums_of_dq(dq_sums, dq_tails, queries, batch, options.head_dim)
            of_head = parameters.reread().at(place)
            heads.next(*block.take_in(carried, of_head, place, fly.reread(scale_log2), views, statistics, part))
        sum_k, sum_v = heads.results
        with fly.reread_ids(lanes=options.counts_lanes):
            kv_head, _, keys, first_key = keys_here()
            given, first = parameters.reread(), first_key + fly.wave_id() * options.wave_keys
            factor = given.scale_kept(fly.reread(scale_log2) * (1 / LOG2_E))
            sum_v = sum_v.map(lambda x, r, c: given.scale_kept(x))
            store_output(keys.rows(fly.reread(dv), kv_head, options.head_dim_v), sum_v, first, options.wave_keys)
            sum_k = sum_k.map(lambda x, r, c: x * factor)
            store_output(keys.rows(fly.reread(dk), kv_head, options.head_dim), sum_k, first, options.wave_keys)


@dataclass
class _State:
    """What one tile hands to the next, step by step: the sums, its S, the last one's dQ and where it is to be added,
    and what is in flight behind it.
    """

    sums: tuple[fly.Fragment, fly.Fragment]
    raw: fly.Fragment
    dq: fly.Fragment
    flight: fly.Token
    statistics: tuple[Any, ...]
    at: Any


@dataclass(frozen=True)
class _Slot:
    """Where one tile of two is in LDS. Copies and reads of different buffers need not wait for each other."""

    q: Panels
    dout: Panels
    vectors: tuple[fly.SharedVector, ...]
    ds: fly.SharedTile


class _Statistics:
    """Of a tile's rows, as a lane holds them: read from LDS where they are asked for."""

    def __init__(self, layout: fly.AccumulatorLayout, vectors: tuple[fly.SharedVector, ...]):
        self._layout, self._vectors = layout, vectors

    @property
    def lse(self) -> tuple[fly.Value, ...]:
        """The log-sum-exp."""
        return self._vectors[0].columns(self._layout, 1).values[0]

    @property
    def less(self) -> fly.ColumnVector:
        """Minus delta."""
        return self._vectors[1].columns(self._layout, 1)


class _Block:
    """A block's buffers, its wave's operands, and the steps over queries.

    `tiles`: of queries that see a key of the block.
    """

    def __init__(
        self,
        parameters: BoundFeatures,
        options: Gfx950BackwardOptions,
        inverse: QueryRange,
        tiles: TileRange,
        keys: Tokens,
        queries: Tokens,
        first_key: fly.Value,
        dtype: fly.DType,
    ):
        self.options, self.inverse, self.tiles, self.dtype = options, inverse, tiles, dtype
        self.parameters = parameters
        self.keys, self.queries, self.first_key = keys, queries, first_key
        self.link = link = fly.chain(fly.target().mma(dtype.name))
        self.layout = link.layout
        self.wave_row = fly.wave_id() * options.wave_keys
        self.k_panels = Panels.allocate("k", options.head_dim, dtype, options.block_n // LINK_ROWS)
        atom = of_dq.atom(dtype)
        shape = options.block_n, BLOCK_M
        self.stored = fly.plan_stored_operand(self.layout, shape, atom, "b", "columns", read_banks=64)
        self.slots = [self._slot(i) for i in range(STAGES)]
        self.of_q, self.of_dout = (Products(link, x) for x in (self.slots[0].q, self.slots[0].dout))
        zero = fly.i32(0)
        corner = (zero, self.wave_row) if self.stored.turned else (self.wave_row, zero)
        self.ds_store = fly.FragmentStore(self.stored, corner)
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
        flights = [
            copies.issue(copies.locate(self.first_key + i * LINK_ROWS), self.k_panels.slot(fly.i32(i)))
            for i in range(parts)
        ]
        window = v.window(self.first_key, options.block_n)
        steps = options.head_dim_v // link.atom.k
        of_v = direct_rows(link, window, self.wave_row, options.wave_keys)
        self.v = self._columns([of_v(t) for t in range(steps)])
        for flight in flights:
            fly.wait(flight)
        fly.barrier()
        straight = Loads(self.k_panels, plan(link.atom, link.row_operand, transposed=False))
        first = fly.wave_id() * options.row_tiles
        mine = [self.k_panels.slot(first + r) for r in range(options.row_tiles)]
        self.k_rows = lambda t: [straight.load(tile, 0, t * link.atom.k) for tile in mine]

    def _columns(self, operands: Operands) -> Callable[[int], Sequence[fly.Value]]:
        """V of the wave's keys by steps over its columns; the last ones, as many as are `waiting`, wait in LDS."""
        first = len(operands) - self.options.waiting
        if first == len(operands):
            return operands.__getitem__
        rows = self.options.row_tiles
        waiting = OwnOperands.store("v", list(chain.from_iterable(operands[first:])), WAVES * fly.wave_size())

        def of(t: int) -> Sequence[fly.Value]:
            if t < first:
                return operands[t]
            return [waiting.load((t - first) * rows + r) for r in range(rows)]

        return of

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
        if options.features.drops:
            # a number that LLVM knows nothing of: else it counts what it makes of it along, in scalar registers
            first = fly.remade(first)
        slots = self.slots[0].q, self.slots[0].dout
        copies = [Copies(slot, view, options.sparing) for slot, view in zip(slots, views, strict=True)]
        vectors = [fly.VectorCopy(vector, asynchronous=False) for vector in statistics]
        nothing = fly.Fragment.zeros(self.layout, options.row_tiles, 1)
        plain = not options.features.weighs_whole
        rows = transposed_layout(self.layout)

        def issue(tile: Any, slot: _Slot) -> tuple[fly.Token, tuple[Any, ...]]:
            row = tile * BLOCK_M
            token = fly.join([x.issue(x.locate(row), y) for x, y in zip(copies, (slot.q, slot.dout), strict=True)])
            return token, tuple(copy.issue(tile, x) for copy, x in zip(vectors, slot.vectors, strict=True))

        def start(tile: Any, slot: _Slot, now: _State) -> tuple[list[Compute], list[Compute]]:
            """The same in steps, addresses first; `now` gets what is in flight."""
            row = tile * BLOCK_M
            tokens: list[fly.Token] = []
            numbers: list[Any] = []
            places: list[list[Any]] = []

            def statistics(copy: fly.VectorCopy, vector: fly.SharedVector) -> None:
                numbers.append(copy.issue(tile, vector))
                now.statistics = tuple(numbers)

            def locate(copy: Copies) -> None:
                places.append(copy.locate(row))

            def panels(copy: Copies, into: Panels) -> None:
                tokens.append(copy.issue(places.pop(0), into))
                now.flight = fly.join(tokens)

            pairs = zip(vectors, slot.vectors, strict=True)
            return [Compute(partial(locate, copy)) for copy in copies], [
                *(Compute(partial(statistics, *pair)) for pair in pairs),
                Compute(partial(panels, copies[0], slot.q)),
                Compute(partial(panels, copies[1], slot.dout)),
            ]

        def land(numbers: tuple[Any, ...], slot: _Slot) -> None:
            """Of the statistics: the rows' log-sum-exp, and minus delta."""
            of_lse, of_delta = numbers
            of_delta = tuple(-given.of_kept(delta) for delta in of_delta)
            for copy, vector, loaded in zip(vectors, slot.vectors, (of_lse, of_delta), strict=True):
                copy.land(loaded, vector)

        def numbers_of(first_query: fly.Value) -> fly.RowVector:
            zeros = fly.RowVector.full(rows, 1, 0.0)
            return zeros.rows().map(lambda row: row + first_query)

        def hide(scores: fly.Fragment, tile: fly.Value) -> fly.Fragment:
            """-inf where queries do not see keys; queries are rows."""
            first_query, wave_key = tile * BLOCK_M, self.first_key + self.wave_row

            def masked(part: fly.Fragment, column: int) -> fly.Fragment:
                limited = self._limit(part, first_query, column)
                first = wave_key + column if column else wave_key
                return given.mask(limited, numbers_of(first_query), first, place)

            seen: fly.Fragment
            if options.features.masks_every_tile:
                # a branch that is always taken: in one piece with the rest of the loop it costs registers all over it
                seen = fly.cond(fly.remade(fly.i32(0)) != 0, lambda: scores, lambda: tile_by_tile(scores, masked))
            else:
                seen = fly.cond(tiles.sees_whole(tile), lambda: scores, lambda: masked(scores, 0))
            return seen

        def tile_weights(
            j: fly.Value, now: _State, excess: Sums, statistics: _Statistics, slot: _Slot
        ) -> TileWeights:
            if plain:
                return PlainWeights(
                    self.link, self.dtype, options.row_tiles, given.scale(scale_log2), lambda: now.raw,
                    lambda first, count: statistics.lse[first : first + count], lambda: excess.fragment,
                    lambda values, r, first: self.ds_store.store_run(values, slot.ds, r, first),
                )  # fmt: skip
            first_query, wave_key = fly.remade(j * BLOCK_M), self.first_key + self.wave_row

            of_tile = given.reread_from(self.parameters, REREAD) if options.features.drops else given

            def whole() -> Weights:
                return weights(
                    transposed(now.raw), of_tile, place, numbers_of(first_query), wave_key, scale_log2,
                    fly.RowVector(rows, (statistics.lse,)), lambda scores: hide(scores, j), first_query, early=True,
                    scarce=True,
                )  # fmt: skip

            return WholeWeights(
                self.link, self.dtype, whole, lambda: excess.fragment,
                lambda: nothing.map_columns(lambda zero, less: less, statistics.less),
                lambda ds: self.ds_store.store(ds, slot.ds),
            )  # fmt: skip

        def step(j: fly.Value, now: _State, slot: _Slot, other: _Slot) -> Iterator[Step]:
            """One tile's; `now` becomes the next one's state."""
            excess, dk, dv, raw, stale = (Sums(x) for x in (nothing, *now.sums, nothing, now.dq))
            of_tile, statistics = self._no_dq(), _Statistics(self.layout, slot.vectors)
            tile = tile_weights(j, now, excess, statistics, slot)
            located, coming = start(j + 2, slot, now)
            where = now.at
            adds = [Compute(add) for add in dq.add(stale, lambda: where)]
            # weights that are made at once need the registers of the last tile's dQ
            weighing, pulling = (tile.weigh, adds) if plain else (merged(adds, tile.weigh), [])

            def begin() -> None:
                tile.begin()
                # P times dO, minus the rows' delta from the start on
                less = nothing.spread(statistics.less, 0)
                excess.tiles = [[less] for _ in excess.tiles]
                if plain:  # a branch: before what is to be done between products
                    now.raw = transposed(hide(transposed(now.raw), j))

            def find() -> None:
                now.at = dq.of_lane(place.head, j)

            def meet() -> None:
                fly.wait(now.flight)
                fly.barrier()

            def end() -> None:
                now.sums, now.raw, now.dq = (dk.fragment, dv.fragment), raw.fragment, dq.rounded(of_tile)

            of_v = list(self.of_dout.along(dv, tile.p, slot.dout))
            of_k = list(self.of_q.along(dk, tile.ds, slot.q))
            soon, behind = len(of_v) // 8, len(of_k) // 4
            yield Compute(begin)
            yield Room(options.ahead)
            yield from spread(self.of_dout.across(excess, self.v, slot.dout, kept=True), weighing)
            yield from of_v[:soon]
            # the last tile's dQ is added meanwhile
            yield from spread(of_v[soon:], merged(tile.pull, pulling))
            yield from spread(of_k[: -2 * behind], [*located, Compute(find)])
            yield Compute(lambda: land(now.statistics, other))
            yield from of_k[-2 * behind : -behind]
            yield Meet(meet, behind)
            yield from of_k[-behind:]
            yield Room(options.behind)
            yield from spread(self.of_q.across(raw, self.k_rows, other.q, kept=False), coming)
            yield from self._dq(of_tile, slot.ds)
            yield Compute(end)

        fly.barrier()  # nobody reads the slots of the head before any more
        pairs = (count + 1) // 2
        here, there = self.slots
        flight, numbers = issue(first, here)
        land(numbers, here)
        fly.wait(flight)
        flight, numbers = issue(first + 1, there)
        fly.barrier()
        raw = Sums(nothing)
        in_order(self.of_q.across(raw, self.k_rows, here.q, kept=False), options.ahead)
        state = _State(sums, raw.fragment, dq.rounded(self._no_dq()), flight, numbers, dq.of_lane(place.head, first))
        for pair, carried in (loop := fly.range(0, pairs, carry=state)):
            j, now = first + pair * 2, replace(carried)
            in_order([*step(j, now, here, there)], fenced=plain)
            in_order([*step(j + 1, now, there, here)], fenced=plain)
            loop.next(now)
        fly.wait(loop.results.flight)
        with fly.when(count > 0):
            last = dq.of_lane(place.head, first + pairs * 2 - 1)
            in_order(map(Compute, dq.add(Sums(loop.results.dq), lambda: last)))
        result: tuple[fly.Fragment, fly.Fragment] = loop.results.sums
        return result

    def _limit(self, scores: fly.Fragment, first_query: fly.Value, column: int) -> fly.Fragment:
        """-inf where a query does not see a key, or there is no such key.

        `scores`: of the wave's keys from `column` on; rows are queries.
        """
        first = self.first_key + self.wave_row
        keys = row_numbers(self.layout, len(scores.tiles[0]), first + column if column else first)
        # a tile's comparisons and selections, and then the next one's: LLVM would put other registers in their place
        between = fly.sched_barrier
        of_keys, count, scarce = transposed(scores), self.keys.length, self.options.scarce
        if self.options.features.drops:
            count = fly.remade(count)  # or which keys there are takes two registers a row tile over the loop
        return transposed(self.inverse.apply(of_keys, keys, first_query, count, between, scarce))

    def _no_dq(self) -> Sums:
        layout, across = of_dq.layout(self.dtype), self.options.head_dim // APART
        return Sums(fly.Fragment.zeros(layout, BLOCK_M // layout.rows, across))

    def _dq(self, sums: Sums, ds: fly.SharedTile) -> Iterator[Multiply]:
        """The wave's columns of dS K, of all keys of the block."""
        for key in range(0, self.options.block_n, self.stored.atom.k):
            yield from self._dq_of(key, sums, ds)

    def _dq_of(self, key: int, sums: Sums, ds: fly.SharedTile) -> Iterator[Multiply]:
        """The same of as many keys from `key` on as an instruction takes."""
        load, atom = self.stored.loader(), self.stored.atom
        queries: list[fly.Value] = []
        columns: list[fly.Value] = []
        slot, row = divmod(key, LINK_ROWS)
        tile = self.k_panels.slot(fly.i32(slot))

        def read(c: int, r: int) -> None:
            if r == 0:
                columns.append(self.k_turned.load(tile, row, c * APART))
            if len(queries) <= r:
                queries.extend(load.load(ds, *self.stored.place(r * atom.n, key)))

        def use(c: int, r: int, read: None) -> None:
            sums.tiles[r][c] = fly.mma(atom, columns[c], queries[r], sums.tiles[r][c])

        for c, of_columns in enumerate(zip(*sums.tiles, strict=True)):
            for r in range(len(of_columns)):
                yield Multiply(partial(read, c, r), partial(use, c, r), 4 * ((r == 0) + (c == 0)))


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: see `prepare_backward`."""
    dims = request.head_dim, request.value_dim
    parts = parts_of_call(tensors, request, WAVES * build_of(request).wave_keys)
    build, features = build_of(request, parts), request.static_features
    options = Gfx950BackwardOptions(
        *dims,
        request.causal,
        build.wave_keys,
        build.ahead,
        features,
        behind=build.behind,
        waiting=build.waiting,
        counts_lanes=counts_lanes(request),
        sparing=is_sparing(request),
    )
    # steps come in pairs, which may have one too many
    return prepare_backward(flash_attn_gfx950_bwd, options, tensors, request, parts, spare_tiles=1)
