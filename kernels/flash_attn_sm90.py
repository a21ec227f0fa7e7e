"""Flash attention forward for Hopper (sm_90a): warp-specialised, persistent, on WGMMA and TMA.

Shah et al., "FlashAttention-3" (2024). A block is one producer warpgroup and one to three consumer warpgroups; a
consumer owns 64 query rows of the block's `block_m`, keys and values come in tiles of `block_n`.

| who | registers | what |
|---|---|---|
| producer, one thread | few | Q, K and V tiles by TMA into rings in shared memory, ahead of the consumers |
| consumer warpgroups | most | S = Q K^T and O += P V on WGMMA, P in registers; softmax; O from registers |

Inside a consumer, tile j's S is started before tile j+1's (earlier) O += P V, and the softmax of j runs while that
product finishes. Between consumers, named barriers let one start its products while another is in its softmax.
Blocks are persistent and take tiles from a counter (`sm90/schedule.py`); the producer loads the next tile's Q
and K while consumers finish the last one. Keys are walked from the last tile, which may need a mask, to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    barrier_arrive,
    barrier_sync,
    elect_one,
    setmaxnreg_dec,
    setmaxnreg_inc,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import Position, init_all
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.ir.dtypes import dtype as dtype_of
from fly.runtime.device import device_of

from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.online_softmax import Growth, OnlineSoftmax, margin_of
from .sm90.builds import Sm90Options, build_for, keys_seen
from .sm90.combine import Combination
from .sm90.dropout import kept_weights, made
from .sm90.helpers import HelperOf
from .sm90.launch import bind_build, typical_lengths
from .sm90.producer import Buffers, Producer, clear_tail
from .sm90.schedule import PackedRows, Schedule, query_of
from .sm90.sharing import begin_cluster, end_cluster
from .sm90.stores import store_runs
from .work.fragments import row_numbers, store_lse
from .work.kept_pairs import KeptPairs
from .work.score_stages import OfHead, ScoreStages
from .work.tile_scheduler import Work, part

# first named barriers of each kind, one a consumer: who may start products, and a cleared V tile; of the
# second kind a helper has the one behind them
TENSOR_CORES, CLEARED = 1, 5
KeptOf = Callable[[], KeptPairs | None]
O = TypeVar("O")  # what a tile's output is, until its last product is in it
# of `flash_attn_sm90`, from out to whole_lse
BlockTensors = tuple[
    fly.Tensor,
    fly.Tensor | None,
    fly.Tensor | None,
    fly.Tensor | None,
    fly.Tensor,
    fly.Tensor | None,
    fly.Tensor | None,
]


@fly.kernel
def flash_attn_sm90(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    counters: fly.Tensor,
    whole_out: fly.Tensor | None,
    whole_lse: fly.Tensor | None,
    seq_len_kv: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    group: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    section: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    *operands: fly.Operand,
    options: Sm90Options,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, per sequence and head.

    q, k, v: maps of (B, S, H, D) tensors, packed ones with B = 1, k and v also of pages, see `prepare`; out, lse and
    the offsets in the dense, packed or split form of `tile_scheduler`; `counters`: see
    `sm90/counters.py`; `whole_out`, `whole_lse`: what parts are put together to, where the build `combines`;
    `seq_len_kv` is total_kv when packed; `group` query heads share a key head; `section` heads are worked on at a
    time. With `options.pack_gqa`, q is a map of (B, S, H / pack_gqa, pack_gqa, D), and heads of these two are
    sets of them; scale_log2: softmax_scale * log2(e); operands of `options.features`. Any one-dimensional grid: a
    block for each multiprocessor is best.
    """
    tensors = (out, lse, cu_seqlens_q, cu_seqlens_kv, counters, whole_out, whole_lse)
    run_block((q, k, v), tensors, (seq_len_kv, group, section), scale_log2, operands, options, Producer, Consumer)


def run_block(
    maps: tuple[fly.TensorMap, fly.TensorMap, fly.TensorMap],
    tensors: BlockTensors,
    sizes: tuple[fly.Value, fly.Value, fly.Value],
    scale_log2: fly.Value,
    operands: tuple[Any, ...],
    options: Sm90Options,
    producer_role: Callable[..., Producer],
    consumer_role: type[ConsumerOf[Any]],
    helper_of: HelperOf | None = None,
    fill: Callable[[Buffers], None] | None = None,
) -> None:
    """The body of `flash_attn_sm90` and of kernels that differ from it in what their roles do.

    `maps`, `tensors`, `sizes`: q to v, out to whole_lse, and seq_len_kv to section of its parameters.
    `helper_of`: what the warps do that make tiles, by number: `options.helpers` warpgroups behind the consumers', or
    warps of the producer's; they are given a named barrier. `fill`: for what stays in shared memory, called by all
    threads before any role begins.
    """
    q, k, v = maps
    out, lse, cu_seqlens_q, cu_seqlens_kv, counters, whole_out, whole_lse = tensors
    seq_len_kv, group, section = sizes
    fly.occupancy(min_blocks=1)
    split = out.dtype is fly.f32
    *leading, seq_len, heads, _ = out.shape
    pack = options.pack_gqa
    given = options.features.bind(operands)
    schedule = Schedule(
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
        heads=heads if pack == 1 else heads // pack,
        batch=leading[-1] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        splits=out.shape[0] if split else 1,
        section=section,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        counters=counters,
        causal=options.causal,
        block_m=options.queries,
        block_n=options.block_n,
        given=given,
        page_size=options.page_size,
        takes_late=options.takes_late,
        together=options.blocks,
    )
    buffers = Buffers.allocate(options)
    if fill is not None:
        fill(buffers)
    init_all(buffers.rings)
    begin_cluster(options.blocks)
    warpgroup = warpgroup_id()
    producer, consumer = options.registers
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(producer)
        with fly.when((fly.wave_id() == 0) & elect_one()):
            producer_role(schedule, buffers, q, k, v, group, pack).run()
        if helper_of is not None and not options.own_helpers:
            with fly.when(fly.wave_id() >= WARPGROUP // 32 - options.helper_warps):
                helper_of(schedule, buffers, options, CLEARED + options.consumers, 0).run()
    consumes = warpgroup != 0
    if helper_of is not None and options.own_helpers:
        consumes = consumes & (warpgroup <= options.consumers)
        for number in range(options.own_helpers):
            with fly.when(warpgroup == options.consumers + 1 + number):
                helper = helper_of(schedule, buffers, options, CLEARED + options.consumers, number)
                setmaxnreg_dec(helper.registers)
                helper.run()
    with fly.when(consumes):
        setmaxnreg_inc(consumer)
        dtype = dtype_of(q.spec.dtype)
        role = consumer_role(schedule, buffers, options, given, warpgroup - 1, scale_log2, dtype, split)
        combination = None
        if options.combines:
            assert lse is not None and whole_out is not None
            parts = (out, lse), (whole_out, whole_lse)
            combination = Combination(schedule, given, *parts, pack, options.head_dim_v, CLEARED)
        role.run(out, lse, combination)
    end_cluster(options.blocks)


@dataclass(frozen=True)
class State:
    """What one key tile hands to the next: its softmax, its probabilities, and where the rings are.

    `tile`: with a block mask, which key tile it is.
    """

    softmax: OnlineSoftmax
    weights: tuple[fly.Value, ...]
    q_at: Position
    k_at: Position
    v_at: Position
    tile: fly.Value | None = None


class ConsumerOf(Generic[O]):
    """One consumer warpgroup: its rows of all of the block's tiles. What its output is, is a subclass's."""

    def __init__(
        self,
        schedule: Schedule,
        buffers: Buffers,
        options: Sm90Options,
        given: BoundFeatures,
        index: fly.Value,
        scale_log2: fly.Value,
        dtype: fly.DType,
        split: bool,
    ):
        self.schedule, self.buffers, self.options = schedule, buffers, options
        self.given, self.index, self.dtype, self.split = given, index, dtype, split
        self.scale_log2, self.scale = scale_log2, given.scale(scale_log2)
        self.features = features = options.features
        # which tiles need a mask: none but a sequence's last, those along a diagonal, or all of them
        self.every_mask = features.masks_every_tile
        # whether loops of their own take those; where a list has an order of its own, each tile tests whether it does
        self.mask_loops = not (self.every_mask or schedule.lists)
        self.diagonal = options.causal or features.ends_early
        self.score_atom = WarpgroupAtom(options.block_n, dtype.name)
        self.output_atom = WarpgroupAtom(options.head_dim_v, dtype.name)
        self.score_layout = fly.AccumulatorLayout(self.score_atom, "m")
        self.output_layout = fly.AccumulatorLayout(self.output_atom, "m")
        self.margin = margin_of(self.scale) if options.rescale == "rows" else None

    def run(self, out: fly.Tensor, lse: fly.Tensor | None, combination: Combination | None) -> None:
        """All of the block's tiles."""
        works = self.buffers.works
        if self.options.ping_pong:
            with fly.when(self.index == self.options.consumers - 1):
                self.free_tensor_cores()
        work, works_at = works.read(Position.start(), self.schedule)
        start = (Position.start(), Position.start(), Position.start())
        state = self._first_if_any(work, start) if self.schedule.ragged else self.first(work, *start)
        carry = (work, state, works_at)
        for work, state, works_at in (tiles := fly.while_(carry, lambda c: c[0].exists)):
            output, state = self.middle(work, state)
            following, works_at = works.read(works_at, self.schedule)
            output, next_state = fly.cond(
                following.exists,
                functools.partial(self.change_work, work, following, output, state),
                functools.partial(self.last, work, output, state),
            )
            rows, row_lse = self._finished(work, state.softmax, output)
            of_part = (lambda tensor, w=work: part(tensor, w.part)) if self.split else lambda tensor: tensor
            view = self.schedule.rows_of(work, of_part(out), self.options.pack_gqa)
            (self.store_parts if self.split else self.store)(view, work, rows)
            if lse is not None:
                vector = self.schedule.vector_of(work, of_part(lse), self.options.pack_gqa)
                store_lse(vector, row_lse, self.rows(work), self.count(work))
            if combination is not None:
                combination.run(work, self.count(work))
            tiles.next(following, next_state, works_at)

    def _first_if_any(self, work: Work, start: tuple[Position, Position, Position]) -> State:
        """`first`, or where all sequences are empty, a state that nothing reads."""

        def none() -> State:
            zero = fly.broadcast(fly.i32(0), 4).bitcast(dtype_of(self.output_atom.dtype))
            softmax = OnlineSoftmax.start(self.score_layout, 1)
            weights = (zero,) * (self.options.block_n // self.output_atom.k)
            return State(softmax, weights, *start, fly.i32(0) if self.schedule.lists else None)

        state: State = fly.cond(work.exists, lambda: self.first(work, *start), none)
        return state

    def _no_output(self) -> O:
        raise NotImplementedError

    def fragment(self, output: O) -> fly.Fragment:
        """The output's accumulators as a fragment of 64 rows."""
        raise NotImplementedError

    def first_row(self, work: Work) -> fly.Value:
        """The consumer's first row; a row is a query, or with packed heads a query and a head."""
        return self._in_rows(work.first_row) + self.index * 64

    def count(self, work: Work) -> fly.Value:
        """Rows of the tile's sequence."""
        return self._in_rows(work.keys.queries)

    def _in_rows(self, queries: fly.Value) -> fly.Value:
        return queries if self.options.pack_gqa == 1 else queries * self.options.pack_gqa

    def rows(self, work: Work) -> fly.RowVector:
        """Index of each row that the thread holds."""
        first = self.first_row(work)
        return row_numbers(self.score_layout, 1, first)

    def place(self, work: Work) -> Work:
        """Whose scores the tile's are: the work, with the head of each row where heads are packed."""
        pack = self.options.pack_gqa
        if pack == 1:
            return work
        return replace(work, head=self.rows(work).map(lambda row: work.head * pack + (row & (pack - 1))))

    def free_tensor_cores(self) -> None:
        """Let the next consumer start its products."""
        following = fly.select(self.index == self.options.consumers - 1, 0, self.index + 1)
        barrier_arrive(following + TENSOR_CORES, 2 * WARPGROUP)

    def await_tensor_cores(self) -> None:
        """Wait for the consumer before."""
        barrier_sync(self.index + TENSOR_CORES, 2 * WARPGROUP)

    def _scores(self, q_at: Position, k_at: Position) -> fly.Value:
        q, k = self.buffers.q, self.buffers.k
        rows = q.operand(q_at, units=self.index * (64 * q.tile.swizzle // wgmma.UNIT))
        steps = -(-self.options.head_dim // self.score_atom.k)  # of a last half one, the rest is zero
        return wgmma.issue(self.score_atom, rows, k.operand(k_at), steps)

    def _listed(self, k_at: Position) -> fly.Value | None:
        """With a block mask, which key tile is in K's slot."""
        numbers = self.buffers.numbers
        return None if numbers is None else fly.first_lane(numbers.load(k_at.index))

    def _accumulate(self, work: Work, j: Any, output: O, state: State) -> fly.Value:
        """Start O += P V of key tile j, or with a list of step j."""
        raise NotImplementedError

    def _accumulated(self, started: fly.Value, output: O, state: State, after: Sequence[fly.Value] = ()) -> O:
        """`output` with what was started, when it is there; `after`: see `wgmma.wait`."""
        raise NotImplementedError

    def _stages(self, work: Work, of_head: OfHead | None = None) -> ScoreStages:
        """What is done to scores; `of_head`: for what changes them."""
        queries = self.rows(work).map(lambda row: query_of(row, self.options.pack_gqa))
        of_head = of_head or OfHead(self.given, self.scale_log2)
        return ScoreStages(self.place(work), of_head.given, of_head.scale_log2, queries, self.options.block_n)

    def _mask(self, work: Work, j: Any, scores: fly.Fragment) -> fly.Fragment:
        stages = self._stages(work)
        scores = stages.limit(scores, j)
        return stages.hide(scores, j) if self.every_mask else scores

    def _beside(self, work: Work, j: Any, k_at: Position) -> Any:
        """What `_modified` needs of key tile j, in K's slot `k_at`: its bias, on its way while the scores are."""
        return self._stages(work).bias(lambda: j)

    def _modified(self, work: Work, j: Any, scores: fly.Value, of_head: OfHead, beside: Any = None) -> fly.Fragment:
        """Scores of key tile j as the softmax takes them, not masked; `beside`: see `_beside`."""
        fragment = fly.Fragment(self.score_layout, ((scores,),))
        if not self.features.modifies:
            return fragment
        return self._stages(work, of_head).modify(fragment, j, beside)

    def _narrow(self, probabilities: fly.Fragment) -> tuple[fly.Value, ...]:
        """P as the A registers of the second product, 16 keys each."""
        narrow = probabilities.tiles[0][0].to(self.dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def _start(
        self, work: Work, listed: fly.Value | None, scores: fly.Value, of_head: OfHead, beside: Any
    ) -> tuple[OnlineSoftmax, fly.Fragment]:
        """Softmax of a tile's first scores: those of the last key tile, or `listed`, that of the last step."""
        j = work.tiles.end - 1
        fragment = self._modified(work, j if listed is None else listed, scores, of_head, beside)
        if listed is not None:
            fragment = self._stages(work).mask_step(fragment, j, listed)
        elif self.diagonal or self.every_mask or self.features.windowed:
            fragment = self._mask(work, j, fragment)
        else:
            fragment = fly.cond(
                work.tiles.whole_end < work.tiles.end, lambda: self._mask(work, j, fragment), lambda: fragment
            )
        start = OnlineSoftmax.start(self.score_layout, 1)
        softmax, probabilities, _ = self._advance(of_head, start, fragment, masked=True)
        return softmax, probabilities

    def _kept(self, work: Work, tile: Any, of_head: OfHead) -> KeptPairs | None:
        """Which weights of a key tile dropout keeps, if there is any: made while the scores are."""
        if not self.features.drops:
            return None
        dropout = of_head.given.dropout(work)
        assert dropout is not None
        return kept_weights(dropout, self.score_layout, self.first_row(work), tile * self.options.block_n)

    def _weights(self, probabilities: fly.Fragment, kept: KeptPairs | None) -> tuple[fly.Value, ...]:
        """`_narrow`, without what dropout drops."""
        weights = self._narrow(probabilities)
        return weights if kept is None else kept.only(weights)

    def _of_head(self, work: Work) -> OfHead:
        """What the head's scores need, loaded once a tile."""
        return OfHead(self.given.at(self.place(work)), self.scale_log2)

    def _advance(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        """`OnlineSoftmax.advance`."""
        return softmax.advance(scores, self.scale, masked=masked)

    def _advance_lazily(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[fly.Fragment, Growth]:
        """`OnlineSoftmax.advance_lazily`, as `options.rescale` says."""
        return softmax.advance_lazily(
            scores, self.scale, self.margin, masked=masked, wave=self.options.rescale == "wave"
        )

    def _finish(self, work: Work, softmax: OnlineSoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        """What each row of the output is to be multiplied by, and its log-sum-exp."""
        inverse, lse = softmax.finish(self.scale, self.given.sink(self.place(work)))
        return self.given.scale_kept(inverse), lse

    def _finished(self, work: Work, softmax: OnlineSoftmax, output: O) -> tuple[fly.Fragment, fly.RowVector]:
        """The output of a tile's rows, and their log-sum-exps."""
        inverse, lse = self._finish(work, softmax)
        return self.fragment(output).scale_rows(on(self.output_layout, inverse)), lse

    def _scored(self, work: Work, j: Any, q_at: Position, k_at: Position) -> None:
        """Key tile j has been multiplied: its slot is free, and after the last one Q's."""
        self.buffers.k.ring.release(k_at)
        with fly.when(j == work.tiles.first):
            self.buffers.q.ring.release(q_at)

    def first(self, work: Work, q_at: Position, k_at: Position, v_at: Position) -> State:
        """The first scores of the block's first tile."""
        of_head = self._of_head(work)
        self.buffers.q.ring.wait(q_at)
        self.buffers.k.ring.wait(k_at)
        listed = self._listed(k_at)
        tile = work.tiles.end - 1 if listed is None else listed
        beside = self._beside(work, tile, k_at)
        scores = self._scores(q_at, k_at)
        kept = self._kept(work, tile, of_head)
        (scores,) = wgmma.wait(0, scores, after=made(kept))
        self._scored(work, work.tiles.end - 1, q_at, k_at)
        softmax, probabilities = self._start(work, listed, scores, of_head, beside)
        return State(softmax, self._weights(probabilities, kept), q_at, self.buffers.k.ring.next(k_at), v_at, listed)

    def middle(self, work: Work, state: State) -> tuple[O, State]:
        """All products but the last of a tile: (output so far, state)."""
        carry = (self._no_output(), state)
        of_head = self._of_head(work)
        end, begin = work.tiles.end - 1, work.tiles.first
        if self.diagonal and self.mask_loops:
            for i, (output, state) in (loop := fly.range(1, work.tiles.end - work.tiles.whole_end, carry=carry)):
                loop.next(self.step(work, work.tiles.end - 1 - i, output, state, of_head, masked=True))
            carry = loop.results
            end = fly.minimum(work.tiles.whole_end, end)
        if self.features.windowed and self.mask_loops:
            begin = fly.minimum(work.tiles.whole_from, end)
        for i, (output, state) in (loop := fly.range(end - begin, carry=carry)):
            loop.next(self.step(work, end - 1 - i, output, state, of_head, masked=self.every_mask))
        if self.features.windowed and self.mask_loops:
            for i, (output, state) in (loop := fly.range(begin - work.tiles.first, carry=loop.results)):
                loop.next(self.step(work, begin - 1 - i, output, state, of_head, masked=True))
        results: tuple[O, State] = loop.results
        return results

    def step(self, work: Work, j: Any, output: O, state: State, of_head: OfHead, masked: bool) -> tuple[O, State]:
        """Key tile j, or with a list step j: its scores and softmax, and the product of the tile before it."""
        buffers = self.buffers
        buffers.k.ring.wait(state.k_at)
        listed = self._listed(state.k_at)
        tile = j if listed is None else listed
        beside = self._beside(work, tile, state.k_at)
        scores, started, kept = self._products(
            output,
            state,
            state.q_at,
            lambda: self._accumulate(work, j + 1, output, state),
            lambda: self._kept(work, tile, of_head),
        )
        self._scored(work, j, state.q_at, state.k_at)
        fragment = self._modified(work, tile, scores, of_head, beside)
        if listed is not None:
            fragment = self._stages(work).mask_step(fragment, j, listed)
        elif masked:
            fragment = self._mask(work, j, fragment)
        hides = masked or self.features.may_hide
        if self.options.rescale == "always":
            softmax, probabilities, factor = self._advance(of_head, state.softmax, fragment, masked=hides)
            output = self._rescaled(self._added(started, output, state, softmax.total), factor)
        else:
            probabilities, growth = self._advance_lazily(of_head, state.softmax, fragment, masked=hides)
            output = self._added(started, output, state, growth.sums)
            softmax, output = growth.apply(output, functools.partial(self._rescaled, output))
        k_at, v_at = buffers.k.ring.next(state.k_at), buffers.v.ring.next(state.v_at)
        return output, State(softmax, self._weights(probabilities, kept), state.q_at, k_at, v_at, listed)

    def _products(
        self, output: O, state: State, q_at: Position, accumulate: Callable[[], fly.Value], kept_of: KeptOf
    ) -> tuple[fly.Value, Any, KeptPairs | None]:
        """Start a tile's scores, and by `accumulate` the last one's O += P V: (scores, which are there, O's, kept).

        `kept_of` is called while the scores are made, before O += P V is started or behind that.
        """
        if self.options.ping_pong:
            self.await_tensor_cores()
        scores = self._scores(q_at, state.k_at)
        kept = kept_of() if self.options.decides_early else None
        for value in made(kept):
            wgmma.computed(value)
        started = accumulate()
        if self.options.ping_pong:
            self.free_tensor_cores()
        if not self.options.decides_early:
            kept = kept_of()
        return wgmma.wait(1, scores, after=made(kept))[0], started, kept

    def _added(self, started: Any, output: O, state: State, sums: fly.RowVector) -> O:
        """The output with what was started; V's slot is free then. `sums`: what may be there before the wait."""
        after = sums.values[0] if self.options.hold else ()
        output = self._accumulated(started, output, state, after)
        self.buffers.v.ring.release(state.v_at)
        return output

    def _rescaled(self, output: O, factor: fly.RowVector) -> O:
        raise NotImplementedError

    def change_work(self, work: Work, following: Work, output: O, state: State) -> tuple[O, State]:
        """A tile's last product, and the first scores of the next tile."""
        buffers = self.buffers
        of_head = self._of_head(following)
        q_at = buffers.q.ring.next(state.q_at)
        buffers.q.ring.wait(q_at)
        buffers.k.ring.wait(state.k_at)
        listed = self._listed(state.k_at)
        tile = following.tiles.end - 1 if listed is None else listed
        beside = self._beside(following, tile, state.k_at)
        scores, started, kept = self._products(
            output,
            state,
            q_at,
            lambda: self._accumulate(work, work.tiles.first, output, state),
            lambda: self._kept(following, tile, of_head),
        )
        self._scored(following, following.tiles.end - 1, q_at, state.k_at)
        softmax, probabilities = self._start(following, listed, scores, of_head, beside)
        output = self._added(started, output, state, softmax.total)
        k_at, v_at = buffers.k.ring.next(state.k_at), buffers.v.ring.next(state.v_at)
        return output, State(softmax, self._weights(probabilities, kept), q_at, k_at, v_at, listed)

    def last(self, work: Work, output: O, state: State) -> tuple[O, State]:
        """The last product of the block's last tile."""
        return self._accumulated(self._accumulate(work, work.tiles.first, output, state), output, state), state

    def store(self, view: fly.Tensor | PackedRows, work: Work, output: fly.Fragment) -> None:
        """Round to the output's dtype and store to a sequence's (Sq, Dv); rows past the end are dropped."""
        runs = wgmma.runs(output.tiles[0][0].to(self.dtype))
        store_runs(view, self.first_row(work), self.count(work), runs, self.options.head_dim_v)

    def store_parts(self, view: fly.Tensor | PackedRows, work: Work, output: fly.Fragment) -> None:
        """Store a split's part, f32; rows past the end are dropped."""
        self._store_runs(view, work, output, fly.f32)

    def _store_runs(self, view: fly.Tensor | PackedRows, work: Work, output: fly.Fragment, dtype: fly.DType) -> None:
        """Store what each thread holds, two columns at a time."""
        first, count = self.first_row(work), self.count(work)
        for row, column, values in output.runs():
            with fly.when(first + row < count):
                fly.store(values.to(dtype), view.at(first + row, column), align=2 * dtype.bytes)


class Consumer(ConsumerOf[fly.Value]):
    """A consumer whose output is its accumulators."""

    def _no_output(self) -> fly.Value:
        return fly.Fragment.zeros(self.output_layout, 1, 1).tiles[0][0]

    def fragment(self, output: fly.Value) -> fly.Fragment:
        return fly.Fragment(self.output_layout, ((output,),))

    def _accumulate(self, work: Work, j: Any, output: fly.Value, state: State) -> fly.Value:
        v = self.buffers.v
        v.ring.wait(state.v_at)
        if self.schedule.cut_keys:
            j = j if state.tile is None else state.tile
            # every consumer for itself: they store the same
            clear_tail(v.tile, v.at(state.v_at), work.keys.keys - j * self.options.block_n, CLEARED, self.index)
        steps = self.options.block_n // self.output_atom.k
        return wgmma.issue(self.output_atom, state.weights, v.operand(state.v_at, along_rows=True), steps, output)

    def _accumulated(
        self, started: fly.Value, output: fly.Value, state: State, after: Sequence[fly.Value] = ()
    ) -> fly.Value:
        return wgmma.wait(0, started, after=after)[0]

    def _rescaled(self, output: fly.Value, factor: fly.RowVector) -> fly.Value:
        return self.fragment(output).scale_rows(on(self.output_layout, factor)).tiles[0][0]


def on(layout: fly.AccumulatorLayout, rows: fly.RowVector) -> fly.RowVector:
    """Values per row for a fragment of another width: the same rows in the same threads."""
    return fly.RowVector(layout, rows.values)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    units = device_of(tensors["q"].device).compute_units
    seen = replace(request, seq_len_kv=keys_seen(request, tensors))
    options, splits = build_for(seen, units, typical_lengths(tensors, request))
    return bind_build(flash_attn_sm90, tensors, request, options, splits).launch()
