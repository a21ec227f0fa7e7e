"""Flash attention forward for Hopper on 8-bit floats: the pipeline of `flash_attn_sm90`, with e4m3 products.

Q, K and V are e4m3, out is bf16. What differs from 16 bits:

| what | why |
|---|---|
| V's tiles are transposed in shared memory, by warps beside the producer's | k is along rows' bytes |
| its keys are in another order, in each 16 | P's accumulators, narrowed, are then A registers as they are |
| P is 2^8 exp(score - max) | e4m3 holds 2^-9 to 448: probabilities from 2^-17 on do not vanish |
| no lazy rescale | P would pass 448 |
| each tile's P V starts from zero and is added to O in f32 | 8-bit products add up with about 14 bits |
| where O and a tile's scores take most registers, O comes first | P V and scores are never in registers at once |
| V has columns of ones: what they make divides O | no instructions for sums, and weights that add up to 1 |

With `fp8_accumulate="fast"` (`FastConsumer`) O is the accumulators of all tiles' products; then maxima may be lazy.
Log-sum-exps are made of sums of P before it is rounded, where they are asked for: as exact as in 16 bits.

`q_descale * k_descale` of a sequence and key head multiplies scores with the softmax's scale, `v_descale` the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fly
from fly.backends.nvvm import tma, wgmma
from fly.backends.nvvm.intrinsics import fence_async_shared
from fly.backends.nvvm.mbarrier import Position
from fly.backends.nvvm.wgmma import FirstRows, WarpgroupAtom
from fly.runtime.device import device_of

from .flash_attn_sm90 import ConsumerOf, KeptOf, State, on, run_block
from .problem.contract import Launch, Request, Tensors
from .problem.online_softmax import Growth, OnlineSoftmax, margin_of
from .sm90.builds import build_for, keys_seen
from .sm90.fp8_builds import FAST_TILES, MOST_LOG2, ONES, TILES, Fp8Options, has_first_rows, transposing
from .sm90.helpers import HelperOf
from .sm90.launch import bind_build, typical_lengths
from .sm90.producer import Buffers, Pages, Producer, entry_of
from .sm90.schedule import PackedRows
from .sm90.transpose_values import TRANSPOSED_DIMS, behind_transposing, transposed_like
from .sm90.transposer import Transposer
from .sm90.values_ahead import ValuesAhead, is_ahead
from .work.kept_pairs import KeptPairs
from .work.score_stages import OfHead
from .work.tile_scheduler import Work

LEAST_SCALE = 2.0**-126
# Where sequences are parts of tensors, each tile of V is transposed in the kernel.
SOMEWHERE = frozenset(("packed", "paged", "seqused", "cache_leftpad", "kv_batch_idx"))
FOUR_ONES = 0x38383838


@fly.kernel
def flash_attn_sm90_fp8(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    raw_v: fly.TensorMap | None,
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
    options: Fp8Options,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, as `flash_attn_sm90` with e4m3 maps of q, k and v, and bf16 out.

    v: without `transposers` a map of what `transpose_values` makes, or where `options.ahead` the launch itself, of
    `raw_v`, a map of v as it lies; operands: those of `options.features`, among them q_descale, k_descale and
    v_descale, (B, Hkv) f32.
    """
    tensors = (out, lse, cu_seqlens_q, cu_seqlens_kv, counters, whole_out, whole_lse)
    sizes = (seq_len_kv, group, section)
    consumer = FastConsumer if options.chained else Fp8Consumer
    helper: HelperOf | None = Transposer.of if options.transposers else None
    producer: Callable[..., Producer] = Fp8Producer
    if options.ahead:
        assert raw_v is not None
        ahead = ValuesAhead.allocate(raw_v, v, group, options)
        helper, producer = ahead.helper, functools.partial(Fp8Producer, ahead=ahead)
    fill = functools.partial(fill_ones, options=options) if options.ones else None
    run_block((q, k, v), tensors, sizes, scale_log2, operands, options, producer, consumer, helper, fill)


def fill_ones(buffers: Buffers, options: Fp8Options) -> None:
    """Set the rows of each slot of V that are columns of ones: by all threads of a block."""
    slots, tile = buffers.v, buffers.v.tile
    first, words = options.head_dim_v * tile.swizzle, options.ones * tile.swizzle // 4
    for slot in range(slots.ring.stages):
        for panel in range(tile.panels):
            rows = slots.memory.offset(slot * tile.bytes + panel * tile.panel_bytes + first)
            for word in fly.range(fly.thread_id.x, words, options.threads):
                fly.store(fly.i32(FOUR_ONES), rows.offset(word * 4), align=4)
    fence_async_shared()


@dataclass(frozen=True)
class Fp8Producer(Producer):
    """The producer of 8-bit tiles; `ahead`: where V is transposed by the launch itself."""

    ahead: ValuesAhead | None = None

    def run(self) -> None:
        super().run()
        if self.ahead is not None:
            self.ahead.finish(self.schedule)

    def _await_values(self, work: Work) -> None:
        if self.ahead is not None:
            self.ahead.wait(self.schedule, work)

    def _load_v(self, at: Position, work: Work, j: Any, pages: Pages) -> Position:
        if self.buffers.raw_v is not None:
            return super()._load_v(at, work, j, pages)
        slots, tile = self.buffers.v, self.buffers.v.tile
        *_, rows, columns = self.v.spec.box
        barrier = slots.ring.acquire(at, rows * tile.columns)
        place, first = (entry_of(work.kv), work.head // self.group, 0), self._tile(work, j) * self.schedule.block_n
        for panel in range(tile.panels):
            memory = slots.at(at).offset(panel * tile.panel_bytes)
            tma.load(self.v, memory, (*place, first + panel * columns), barrier)
        return slots.ring.next(at)


@dataclass(frozen=True)
class Output:
    """O so far, and each row's sum of P where products make them (`Fp8Options.ones`).

    `factor`: what both are to be multiplied by before more is added, as they are measured from older maxima; None
    where they have been.
    """

    values: fly.Value
    total: fly.RowVector | None
    factor: fly.RowVector | None


class Fp8Consumer(ConsumerOf[Output]):
    """A consumer of 8-bit tiles."""

    options: Fp8Options

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.dtype = fly.bf16  # of the output
        if self.options.first_rows:
            atoms = (self.score_atom, self.output_atom)
            self.score_layout, self.output_layout = (fly.AccumulatorLayout(FirstRows(a), "m") for a in atoms)

    def _in_use(self, product: fly.Value) -> fly.Value:
        """A product's accumulators, or those of the rows that there are."""
        return FirstRows.of(product) if self.options.first_rows else product

    def _no_output(self) -> Output:
        zeros = fly.Fragment.zeros(self.output_layout, 1, 1).tiles[0][0]
        total = fly.RowVector.full(self.output_layout, 1, 0.0) if self.options.ones else None
        return Output(zeros, total, fly.RowVector.full(self.output_layout, 1, 1.0))

    def fragment(self, output: Output) -> fly.Fragment:
        return fly.Fragment(self.output_layout, ((output.values,),))

    def _product(self, number: int, state: State, onto: fly.Value | None = None) -> fly.Value:
        """Start P V of a key tile for the columns of one of the products, from zero or added to `onto`."""
        v, sizes = self.buffers.v, self.options.products
        columns = v.operand(state.v_at, units=sum(sizes[:number]) * v.tile.swizzle // wgmma.UNIT)
        atom = WarpgroupAtom(sizes[number], self.output_atom.dtype)
        return wgmma.issue(atom, state.weights, columns, self.options.block_n // atom.k, onto)

    def _accumulate(self, work: Work, j: Any, output: Output, state: State) -> fly.Value:
        self.buffers.v.ring.wait(state.v_at)
        return self._product(0, state)

    def _accumulated(
        self, started: fly.Value, output: Output, state: State, after: Sequence[fly.Value] = ()
    ) -> Output:
        return self._summed(started, output, state, after=after)[0]

    def _summed(
        self,
        started: fly.Value,
        output: Output,
        state: State,
        behind: Callable[[], fly.Value] | None = None,
        after: Sequence[fly.Value] = (),
    ) -> tuple[Output, fly.Value | None]:
        """O with the products of a key tile, of which the first is started, and what `behind` starts after them.

        One of them is added while the next is multiplied, and no more than two are in registers at a time.
        """
        starts: list[Callable[[], fly.Value]]
        starts = [functools.partial(self._product, number, state) for number in range(1, len(self.options.products))]
        starts += [] if behind is None else [behind]
        assert output.factor is not None
        before, factors = output.values, self.fragment(output).spread(output.factor, 0)
        pieces: list[fly.Value] = []
        flying: fly.Value | None = started
        done, total = 0, output.total
        for number in range(len(self.options.products)):
            following = None
            if number < len(starts):
                if pieces:
                    # a wait for nothing, before which the last piece must have been added and its product is free
                    pieces[-1:] = wgmma.wait(1, pieces[-1])
                following = starts[number]()
            assert flying is not None
            product = self._in_use(wgmma.wait(int(following is not None), flying, after=() if number else after)[0])
            end = min(done + len(product), len(before))
            pieces.append(fly.fma(before[done:end], factors[done:end], product[: end - done]))
            if total is not None and end == len(before):
                total = total.map(fly.fma, output.factor, self._ones(product))
            done, flying = end, following
        return Output(fly.concat(pieces), total, output.factor), flying

    def _ones(self, product: fly.Value) -> fly.RowVector:
        """What columns of ones made: sums of rows of P."""
        first = len(product) - ONES // 2
        return fly.RowVector(self.output_layout, ((product[first], product[first + 2]),))

    def _products(
        self, output: Output, state: State, q_at: Position, accumulate: Callable[[], fly.Value], kept_of: KeptOf
    ) -> tuple[fly.Value, Any, KeptPairs | None]:
        if not self.options.output_first:
            return super()._products(output, state, q_at, accumulate, kept_of)

        def scores() -> fly.Value:
            started = self._scores(q_at, state.k_at)
            if self.options.ping_pong:
                self.free_tensor_cores()
            return started

        if self.options.ping_pong:
            self.await_tensor_cores()
        output, started = self._summed(accumulate(), output, state, scores)
        assert started is not None
        self.buffers.v.ring.release(state.v_at)
        return wgmma.wait(0, started)[0], output, None

    def _added(self, started: Any, output: Output, state: State, sums: fly.RowVector) -> Output:
        added: Output = started if self.options.output_first else super()._added(started, output, state, sums)
        return added

    def _rescaled(self, output: Output, factor: fly.RowVector) -> Output:
        return replace(output, factor=on(self.output_layout, factor))

    def _descaled(self, value: Any, work: Work, *names: str) -> Any:
        """A value times the head's scales of these names, as far as there are any."""
        for name in names:
            scales = self.given.get(name)
            if scales is not None:
                head = work.head // (self.schedule.heads // scales.shape[1])
                value = value * scales.load(work.batch, head)
        return value

    def _of_head(self, work: Work) -> OfHead:
        """Of scores that are scaled by more than 0, with which masked ones would be NaN."""
        scale = fly.maximum(self._descaled(self.scale_log2, work, "q_descale", "k_descale"), LEAST_SCALE)
        return replace(super()._of_head(work), scale_log2=scale)

    def _modified(self, work: Work, j: Any, scores: fly.Value, of_head: OfHead, beside: Any = None) -> fly.Fragment:
        return super()._modified(work, j, self._in_use(scores), of_head, beside)

    def _advance(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        return softmax.advance(scores, of_head.scale, masked=masked, offset=self.options.offset)

    def _advance_lazily(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[fly.Fragment, Growth]:
        offset, most = self.options.offset, MOST_LOG2 - self.options.offset
        margin = margin_of(of_head.scale, most) if self.options.rescale == "rows" else None
        wave = self.options.rescale == "wave"
        return softmax.advance_lazily(
            scores, of_head.scale, margin, masked=masked, wave=wave, offset=offset, most=most
        )

    def _narrow(self, probabilities: fly.Fragment) -> tuple[fly.Value, ...]:
        """P as the A registers of the second product, 32 keys each."""
        values = probabilities.tiles[0][0]
        return wgmma.by_pairs(FirstRows.twice(values) if self.options.first_rows else values, fly.f8e4m3)

    def _finished(self, work: Work, softmax: OnlineSoftmax, output: Output) -> tuple[fly.Fragment, fly.RowVector]:
        scale, sink = self._of_head(work).scale, self.given.sink(self.place(work))
        inverse, lse = softmax.finish(scale, sink, self.options.offset)
        if output.total is not None:
            inverse, _ = softmax.finish(scale, sink, self.options.offset, output.total)
        of_values = self._descaled(fly.f32(1.0), work, "v_descale")
        return self.fragment(output).scale_rows(on(self.output_layout, inverse.map(lambda x: x * of_values))), lse

    def store(self, view: fly.Tensor | PackedRows, work: Work, output: fly.Fragment) -> None:
        if self.options.takes_late:
            # few rows to store; trading them among lanes would take registers that loops spill for at D=256
            self._store_runs(view, work, output, self.dtype)
        else:
            super().store(view, work, output)


class FastConsumer(Fp8Consumer):
    """A consumer whose output is its products' accumulators; sums of P start from zero in every tile."""

    def _no_output(self) -> Output:
        values = fly.broadcast(fly.f32(0.0), sum(self.options.products) // 2)
        return Output(values, super()._no_output().total, None)

    def fragment(self, output: Output) -> fly.Fragment:
        return super().fragment(replace(output, values=output.values[: self.columns]))

    @property
    def columns(self) -> int:
        """Accumulators of O that a thread has; those of sums are behind them."""
        return self.options.head_dim_v // 2

    def _accumulate(self, work: Work, j: Any, output: Output, state: State) -> fly.Value:
        self.buffers.v.ring.wait(state.v_at)
        return self._product(0, state, output.values)

    def _accumulated(
        self, started: fly.Value, output: Output, state: State, after: Sequence[fly.Value] = ()
    ) -> Output:
        values = wgmma.wait(0, started, after=after)[0]
        if output.total is None:
            return replace(output, values=values)
        total = output.total.map(lambda t, p: t + p, self._ones(values))
        # in place: ptxas would serialise products with accumulators that are moved to
        values = fly.concat([values[: self.columns], values[self.columns :] * 0.0])
        return replace(output, values=values, total=total)

    def _rescaled(self, output: Output, factor: fly.RowVector) -> Output:
        factor = on(self.output_layout, factor)
        scaled = self.fragment(output).scale_rows(factor).tiles[0][0]
        if output.total is None:
            return replace(output, values=scaled)
        values = fly.concat([scaled, output.values[self.columns :]])
        return replace(output, values=values, total=output.total.map(lambda t, f: t * f, factor))


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    units = device_of(tensors["q"].device).compute_units
    table = TILES if request.static_features.fp8_accumulate is None else FAST_TILES
    seen = replace(request, seq_len_kv=keys_seen(request, tensors))
    options, splits = build_for(seen, units, typical_lengths(tensors, request), table=table, kind=Fp8Options)
    assert isinstance(options, Fp8Options)
    if options.takes_late:
        options = replace(options, first_rows=has_first_rows(request, options))
    elif SOMEWHERE.intersection(request.features) or request.value_dim not in TRANSPOSED_DIMS:
        options = transposing(options)
    options = replace(options, ahead=is_ahead(request, options, units))
    if options.transposers:
        return bind_build(flash_attn_sm90_fp8, tensors, request, options, splits).launch()
    # only its sizes and strides matter here, and the workspace's are for others
    tensors = {**tensors, "transposed": transposed_like(tensors["v"]), "workspace": None}
    forward = bind_build(flash_attn_sm90_fp8, tensors, request, options, splits)
    if options.ahead:
        return forward.beside("transposed", tensors["transposed"].numel()).launch()
    return behind_transposing(forward, tensors).launch()
