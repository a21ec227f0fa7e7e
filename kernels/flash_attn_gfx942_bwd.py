"""Flash attention backward for gfx942 (CDNA3): one fused kernel with five products.

A block is four waves, one on each SIMD with most of its registers. A wave owns 32 keys (64 at head_dim 64), whose dK
and dV it sums up in accumulators, and queries pass by in tiles of 32.

| what | where |
|---|---|
| K, V of the wave's keys, operands of S and dP | registers |
| the wave's columns of K of the block's keys, operands of dQ | registers, once transposed through LDS |
| Q, dO | LDS, two slots as they are, one transposed, through registers (`gfx942.backward_tiles`) |
| the rows' statistics | registers |
| S, dP, P, dS and the sums dK, dV | registers, keys as rows: P^T and dS^T are operands as they are (`fly.chain`) |
| dS of the block | LDS, stored element by element: no load of this target transposes |
| dQ | sums in global memory, atomically (`gfx950.dq_sums`) |

One tile's step, j, in the order in which it is written down (`gfx942.backward_order`):

| matrix | beside it |
|---|---|
| dP = V dO^T; in it a barrier: the transposed tile is whole | P = exp2(S(j)), an element at a time |
| dV += P^T dO | the last P; dS, which is stored; the last tile's dQ is added |
| dK += dS^T Q, but its last products | tile j+1 is stored as it is; its statistics are loaded |
| barrier: dS is whole, nobody reads the transposed tile any more | |
| the last products of dK; a quarter of dQ's columns = dS K | tile j+1 is stored transposed |
| S(j+1) = K Q(j+1)^T | tile j+2 is loaded |

LLVM's schedulers are off. Where something modifies scores, or with dropout, P and dS are made at once instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import fly

from .generic.blocks import uniform, walk
from .generic.operands import direct_rows
from .gfx942.backward_builds import REREAD, Gfx942BackwardOptions, ahead_of, build_of, is_narrow, late_of
from .gfx942.backward_order import Beside, Fence, Step, beside, idle, in_order, paced
from .gfx942.backward_tiles import PIECE, Copy, Halves, Products, Tile, in_halves
from .gfx942.backward_weights import Pairs, Plain, Statistics, minus_score_gradients, negated
from .gfx950 import dq_sums as of_dq
from .gfx950.backward import BLOCK_M, WAVES
from .gfx950.backward_launch import parts_of_call, prepare_backward
from .gfx950.dq_in_place import sums_of_dq
from .gfx950.dq_sums import ACROSS, APART
from .gfx950.operand_queue import Multiply
from .gfx950.panels import Sums, plan
from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import HeadOfKeys, Weights, tile_by_tile, transposed, transposed_layout, weights
from .problem.mask import QueryRange, TileRange
from .problem.scores import LOG2_E
from .work.fragments import row_numbers, store_output
from .work.sequences import Sequence as Tokens
from .work.sequences import sequences_of, tokens_of
from .work.tile_scheduler import head_of_block

# the order that is written down is the one that is wanted
IN_ORDER = ("--enable-misched=false", "--enable-post-misched=false")


@fly.kernel
def flash_attn_gfx942_bwd(
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
    options: Gfx942BackwardOptions,
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
    fly.compiler_options(*IN_ORDER)
    if options.narrows:
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
            block = number // heads
            kv_head = number - block * heads
        offsets = fly.reread(cu_seqlens_kv)
        keys = Tokens.of(tokens_of(fly.reread(k), offsets), offsets, batch, fly.reread(parameters.get("seqused_kv")))
        first = block * options.block_n
        return kv_head, batch, keys, first if exists is None else fly.select(exists, first, keys.length)

    kv_head, batch, keys, first_key = keys_here()
    offsets = fly.reread(cu_seqlens_q)
    queries = Tokens.of(tokens_of(fly.reread(q), offsets), offsets, batch, given.get("seqused_q"))
    seen = given.key_range(queries.length, keys.length, options.causal)
    if not options.causal and seen.right is None and seen.chunk is None:
        # no limit, but one that LLVM does not see through: with a loop of hidden tiles before that of whole ones it
        # leaves the reads at the loop's end where they are
        seen = replace(seen, right=queries.length + keys.length)
    # Q and dO are zeros past the end, so that finite weights there add nothing; but what modifies scores may make inf
    inverse = QueryRange.of(seen, open_end=not options.features.modifies)
    tiles = inverse.tiles(first_key, options.block_n, BLOCK_M)
    if options.hides_tail:
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
        with fly.reread_ids():
            kv_head, _, keys, first_key = keys_here()
            given, first = parameters.reread(), first_key + fly.wave_id() * options.wave_keys
            factor = given.scale_kept(fly.reread(scale_log2) * (-1 / LOG2_E))  # the sums are of -dS
            sum_v = sum_v.map(lambda x, r, c: given.scale_kept(x))
            store_output(keys.rows(fly.reread(dv), kv_head, options.head_dim_v), sum_v, first, options.wave_keys)
            sum_k = sum_k.map(lambda x, r, c: x * factor)
            store_output(keys.rows(fly.reread(dk), kv_head, options.head_dim), sum_k, first, options.wave_keys)


@dataclass(frozen=True)
class _State:
    """What one tile hands to the next: sums, its S, operands of its dP, its statistics, and the last one's dQ.

    `added`: the tile whose dQ that is. `flight`: rows of the tile behind it, as they are loaded.
    """

    sums: tuple[fly.Fragment, fly.Fragment]
    raw: fly.Fragment
    operands: tuple[fly.Value, ...]
    dq: fly.Fragment
    added: fly.Value
    statistics: Statistics
    flight: tuple[Any, ...]


class _Block:
    """A block's buffers, its wave's operands, and the steps over queries.

    `tiles`: of queries that see a key of the block.
    """

    def __init__(
        self,
        parameters: BoundFeatures,
        options: Gfx942BackwardOptions,
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
        self.q = Tile.allocate("q", options.head_dim, dtype)
        self.dout = Tile.allocate("dout", options.head_dim_v, dtype)
        self.atom = of_dq.atom(dtype)
        self.stored = fly.plan_stored_operand(self.layout, (options.block_n, BLOCK_M), self.atom, "b", "columns")
        self.ds = fly.SharedTile.ring("ds", self.stored.layout, dtype, 1)[0]
        zero = fly.i32(0)
        self.corner = (zero, self.wave_row) if self.stored.turned else (self.wave_row, zero)
        self.of_q = Products(link, self.q, options.head_dim)
        self.of_dout = Products(link, self.dout, options.head_dim_v)
        # where a run of 4 queries is among those of an operand whose others are weights' registers
        self.slots = [link.columns.index(PIECE * p) // PIECE for p in range(link.atom.k // PIECE)]

    def zeros(self) -> tuple[fly.Fragment, fly.Fragment]:
        """The sums dK and dV of the wave's keys."""
        dims = self.options.head_dim, self.options.head_dim_v
        of_k, of_v = (
            fly.Fragment.zeros(self.layout, self.options.row_tiles, dim // self.layout.columns) for dim in dims
        )
        return of_k, of_v

    def load(self, k: fly.RowView, v: fly.RowView) -> None:
        """K and V of the wave's keys, and the wave's columns of K of all keys, to registers."""
        options, link = self.options, self.link
        sides = [
            direct_rows(link, side.window(self.first_key, options.block_n), self.wave_row, options.wave_keys)
            for side in (k, v)
        ]
        self.k = [sides[0](t) for t in range(k.columns // link.atom.k)]
        self.v = [list(map(negated, sides[1](t))) for t in range(v.columns // link.atom.k)]
        # through the place of a tile of queries, as many keys at a time
        copy = Copy(k, self.q, range(self.atom.k // PIECE))
        mine = fly.wave_id() * ACROSS, fly.i32(0)
        loader = fly.OperandLoader(plan(self.atom, "a", transposed=False), self.q.turned.layout, mine)
        first, self.k_turned = self.first_key // BLOCK_M, list[list[fly.Value]]()
        parts = options.block_n // BLOCK_M
        loaded = [copy.issue(first + i).now().values for i in range(parts)]
        for part in loaded:
            fly.barrier()
            for store in copy.land_turned(part):
                store()
            fly.barrier()
            of_part = [negated(loader.load(self.q.turned, c, 0)[0]) for c in range(0, options.head_dim, APART)]
            self.k_turned.append(of_part)

    def take_in(
        self,
        sums: tuple[fly.Fragment, fly.Fragment],
        given: BoundFeatures,
        place: HeadOfKeys,
        scale_log2: fly.Value,
        views: tuple[fly.RowView, fly.RowView],
        statistics: tuple[fly.Tensor, fly.Tensor],
        dq: of_dq.Sums,
    ) -> tuple[fly.Fragment, fly.Fragment]:
        """`sums` with those over the queries of one head; `views`: of Q and dO."""
        options, tiles = self.options, self.tiles
        first, end = uniform(tiles.first), uniform(tiles.end)
        copies = Copy(views[0], self.q, self.slots), Copy(views[1], self.dout, self.slots)
        nothing = fly.Fragment.zeros(self.layout, options.row_tiles, 1)
        plain = not options.features.weighs_whole

        def step(j: fly.Value, now: _State, hides: bool) -> _State:
            dout_here, q_there, dout_there = self.dout.slot(j), self.q.slot(j + 1), self.dout.slot(j + 1)
            first_query, lse, delta = j * BLOCK_M, now.statistics.lse, given.of_kept(now.statistics.delta)
            wave_key = self.first_key + self.wave_row
            dp = Sums(fly.Fragment(self.layout, ((delta,),) * options.row_tiles))
            dk, dv, raw = Sums(now.sums[0]), Sums(now.sums[1]), Sums(nothing)
            stages = Plain(self.link, self.dtype, options.row_tiles, given.scale(scale_log2))
            made: Weights
            seen, to_ds = now.raw, fly.FragmentStore(self.stored, self.corner)
            of_next = Statistics.load(self.layout, statistics, first_query + BLOCK_M)
            flight = [copy.issue(j + 2) for copy in copies]

            def hide(scores: fly.Fragment) -> fly.Fragment:
                return tile_by_tile(scores, hidden) if options.hides_by_tile else hidden(scores, 0)

            def hidden(part: fly.Fragment, column: int) -> fly.Fragment:
                limited = self._limit(part, first_query, column)
                return given.mask(limited, rows, wave_key + column if column else wave_key, place)

            by_query = transposed_layout(self.layout)
            slots = [self.layout.value_columns.index(slot) for slot in self.layout.column_slots]
            of_rows = fly.RowVector(by_query, (tuple(lse[v] for v in slots),))
            rows = of_rows.rows().map(lambda row: row + first_query)

            def limit() -> None:
                nonlocal seen
                seen = transposed(hide(transposed(now.raw)))

            def weigh() -> None:
                nonlocal made
                raw = transposed(now.raw)
                made = weights(
                    raw,
                    given.reread_from(self.parameters, REREAD),
                    place,
                    rows,
                    wave_key,
                    scale_log2,
                    of_rows,
                    hide if hides else None,
                    first_query,
                    early=True,
                    scarce=True,
                )
                stages.p = Pairs.of(self.link, self._narrow(transposed(made.of_values)))

            def pull() -> None:
                ds = self._narrow(minus_score_gradients(made, dp.fragment, delta))
                to_ds.store(ds, self.ds)
                stages.ds = Pairs.of(self.link, ds)

            def store(r: int, v: int, element: fly.Value) -> None:
                to_ds.store_run(element, self.ds, r, v)

            of_dp = list(self.of_dout.across(dp, self.v.__getitem__, dout_here))  # delta - dP, dP = V dO^T
            across = len(of_dp)
            if plain:
                weighing = [*[limit] * hides, *stages.weigh(lambda: seen, lse)]
                making, pulling = (
                    [idle, *paced(weighing, *options.weigh)],
                    paced(list(stages.pull(lambda: dp.fragment, store)), *options.pull),
                )
            else:
                making, pulling = [idle, weigh], [pull]
            making += [*[idle] * (across - len(making)), *pulling]  # dS is made of all of dP, and behind the barrier
            of_dv = list(self.of_dout.along(dv, lambda t: stages.p.operands(t)))  # dV += P^T dO
            of_dk = list(self.of_q.along(dk, lambda t: stages.ds.operands(t)))  # dK -= dS^T Q
            of_raw = list(self.of_q.across(raw, self.k.__getitem__, q_there))  # S(j+1) = K Q(j+1)^T
            of_tile = self._no_dq()
            of_dq = list(self._dq(of_tile))  # dQ = dS K
            places: list[Any] = []
            additions = dq.add(Sums(now.dq), lambda: places[0])
            of_next_dp = list(self.of_dout.across(Sums(nothing), self.v.__getitem__, dout_there))
            late, early = len(of_dk) - options.late, len(of_dp) * 3 // 4
            rows_of = [
                store
                for copy, loaded, slot in zip(copies, now.flight, (q_there, dout_there), strict=True)
                for store in copy.land(loaded, slot)
            ]
            columns_of = [
                store for copy, loaded in zip(copies, now.flight, strict=True) for store in copy.land_turned(loaded)
            ]
            every: list[Step] = [
                *beside(of_dp[:early], Beside(making[:early])),
                Fence(fly.barrier, may=across - early),
                *beside(
                    [*of_dp[early:], *of_dv, *of_dk[:late]],
                    Beside(making[early:]),
                    Beside([step for x in of_next for step in (*x.where, *x.steps)], 2 * across - early),
                    Beside([lambda: places.append(dq.of_lane(place.head, now.added))], across + 2 - early),
                    Beside(additions, across + 4 - early),
                    Beside([step for x in flight for step in x.where], 2 * across + 4 - early),
                    Beside(rows_of, across),
                ),
                Fence(fly.barrier, early=options.late),
                *beside(
                    [*of_dk[late:], *of_dq, *of_raw],
                    Beside(columns_of),
                    Beside([step for x in flight for step in x.steps], options.late + len(of_dq)),
                    Beside(dq.round(of_tile), options.late + len(of_dq) + 8),
                ),
            ]
            operands = in_order(every, options.ahead, now.operands, of_next_dp[: options.before])
            found = tuple(x.values for x in flight)
            return _State(
                (dk.fragment, dv.fragment),
                raw.fragment,
                tuple(operands),
                of_tile.fragment,
                j,
                Statistics.of(of_next),
                found,
            )

        fly.barrier()  # nobody reads the tiles of the head before, or of K, any more
        arriving = Statistics.of([x.now() for x in Statistics.load(self.layout, statistics, first * BLOCK_M)])
        q_here, dout_here = self.q.slot(first), self.dout.slot(first)
        for copy, tile in zip(copies, (q_here, dout_here), strict=True):
            loaded = copy.issue(first).now().values
            for store in (*copy.land(loaded, tile), *copy.land_turned(loaded)):
                store()
        flight = tuple(copy.issue(first + 1).now().values for copy in copies)
        fly.barrier()
        raw = Sums(nothing)
        of_dp = list(self.of_dout.across(Sums(nothing), self.v.__getitem__, dout_here))[: options.before]
        operands = in_order(self.of_q.across(raw, self.k.__getitem__, q_here), options.ahead, (), of_dp)
        no_dq = dq.rounded(self._no_dq())
        state = _State(sums, raw.fragment, tuple(operands), no_dq, first, arriving, flight)

        def walked(j: fly.Value, carried: tuple[Any, ...], hides: bool) -> tuple[Any, ...]:
            return (step(j, carried[0], hides),)

        always = options.features.masks_every_tile
        # also where no masked tiles follow whole ones, a third loop: the second is faster for it
        (state,) = walk(replace(tiles, first=first, end=end), (state,), walked, always_masked=always)
        with fly.when(end > first):
            last = dq.of_lane(place.head, end - 1)
            for addition in dq.add(Sums(state.dq), lambda: last):
                addition()
        result: tuple[fly.Fragment, fly.Fragment] = state.sums
        return result

    def _narrow(self, fragment: fly.Fragment) -> fly.Fragment:
        """The same in 16 bits."""
        return fragment.map(lambda x, r, c: x.to(self.dtype, rounding="nearest_any"))

    def _limit(self, scores: fly.Fragment, first_query: fly.Value, column: int) -> fly.Fragment:
        """-inf where a query does not see a key, or, if that matters, there is no such key.

        `scores`: of the wave's keys from `column` on; rows are queries.
        """
        first = self.first_key + self.wave_row
        keys = row_numbers(self.layout, len(scores.tiles[0]), first + column if column else first)
        count = self.keys.length if self.options.hides_tail else None
        return transposed(self.inverse.apply(transposed(scores), keys, first_query, count))

    def _no_dq(self) -> Sums:
        layout, across = of_dq.layout(self.dtype), self.options.head_dim // APART
        return Sums(fly.Fragment.zeros(layout, BLOCK_M // layout.rows, across))

    def _dq(self, sums: Sums) -> Iterator[Multiply]:
        """The wave's columns of dS K, of all keys of the block."""
        load, atom, halves = self.stored.loader(), self.atom, Halves(self.atom)
        for key, of_part in zip(range(0, self.options.block_n, atom.k), self.k_turned, strict=True):
            for r, row in enumerate(sums.tiles):

                def read(r: int = r, key: int = key) -> fly.Value:
                    (operand,) = load.load(self.ds, *self.stored.place(r * atom.n, key))
                    return operand

                def use(
                    number: int,
                    operand: fly.Value,
                    row: list[fly.Value] = row,
                    of_part: list[fly.Value] = of_part,
                ) -> None:
                    part, c = divmod(number, len(of_part))
                    row[c] = halves.mma(part, of_part[c], operand, row[c])

                yield from in_halves(read, use, range(2 * len(of_part)))


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: see `prepare_backward`."""
    build = build_of(request)
    parts = parts_of_call(tensors, request, WAVES * build.wave_keys)
    options = Gfx942BackwardOptions(
        request.head_dim,
        request.value_dim,
        request.causal,
        build.wave_keys,
        ahead_of(request),
        request.static_features,
        weigh=build.weigh,
        pull=build.pull,
        late=late_of(request, parts),
        narrow=is_narrow(request, parts),
    )
    return prepare_backward(flash_attn_gfx942_bwd, options, tensors, request, parts)
