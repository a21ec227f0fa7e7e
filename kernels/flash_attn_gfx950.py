"""Flash attention forward for gfx950 (CDNA4): two wave groups in antiphase, one tile of software pipelining.

A block of 8 waves computes 256 query rows of one head; a wave owns 32 rows, a lane one of them (S^T = K Q^T and
O^T = V^T P^T on 32x32x16 matrix instructions, see `fly.chain`). Keys come in tiles of 64. Each SIMD holds two waves:
waves 0-3 run one barrier ahead of waves 4-7, so that one of the two computes while the other moves data.

One tile takes four clusters with a barrier after each. Cluster by cluster, for tile j:

| cluster | matrix | vector; between the matrix instructions | LDS reads | copies started | waited for |
|---|---|---|---|---|---|
| 0 memory | | | K(j) | K(j+1) | V(j-1) |
| 1 compute | S(j) = K(j) Q | x = scale * S(j-1) - scale * max before all; P(j-1) = exp2(x), sum: first half | | | |
| 2 memory | | | V(j-1) | V(j) | K(j+1) |
| 3 compute | O += V(j-1) P(j-1) | second half of P(j-1); max of S(j); rarely a mask and a rescale | | | |

At D=128 cluster 1 has three quarters of P(j-1), and adds most of the last quarter of P(j-2) to the sum. At other D,
x is in cluster 0. Above 128, K and V lie in LDS in
panels of columns (`gfx950/wide.py`), and what registers do not hold of a tile is read in compute clusters
(`gfx950/interleaving.py`). `Tiles` has this table as stages; `fly.Pipeline` makes prologue, loop and epilogue of it.
K and V have two buffers each, filled by direct-to-LDS
copies, from contiguous keys or from pages (`gfx950/copies.py`). A wait comes two barriers before the reads that need
it: the other group passes its own wait one barrier later. The loop body holds two tiles, so that buffers are static.

In the first step there is only K(0) to wait for. The block's queries are copied behind it, through LDS too
(`gfx950/queries.py`); what the loop starts with is computed meanwhile ("settle"). All waves meet once, when both are
there, and the groups part behind that (`gfx950/groups.py`), to meet again after the output is stored. No copy is
started past the last tile: a block takes an even number of tiles, and the two steps behind the loop end the last
ones. Causal blocks are spared some of that: a wave none of whose rows sees a key of the last tile only waits, meets
the others and starts copies (the stages that are `shared`) in the steps in which no other tile is left.

Pages, lists and D above 128 have another prologue, without scalar registers or LDS: every lane loads its query itself
and the groups part before K(0) is on its way. They take an odd number of tiles, with one step behind the loop and a
copy past the end.

Lazy rescale: O and the sum are rescaled only when a row's maximum grew by more than 2**8 since the last time, in any
row of the wave; until then probabilities stay below 2**8, which f32 sums and 16-bit operands hold as well as 1. So
a tile takes each lane's own maximum against a limit; lanes exchange maxima only to rescale. Where tiles need a mask
the limit is -inf, so that one branch leads to both, and the rest of a tile is one block to the scheduler.

Features (`features`): score modifiers and mask functions are a stage of cluster 2, between S(j) and its
maximum; windows make the first tiles partial as well as the last; the sink is one more score at the end.

A block-sparse mask's tiles are those of its list, a step each, and any of them may be partial: the limit is set for
each tile. `mask_mod` is behind the same branch as other masks. Where 256 rows do not divide a mask's blocks, a block
has 128 rows and four waves, no second group: two such blocks, which may walk different lists, share a compute unit
(three at D=64). Nothing but priorities makes one compute while the other moves data.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import fly
from fly.backends.rocdl.intrinsics import (
    s_nop,
    s_setprio,
    sched_barrier,
    sched_groups,
    unlikely,
)

from .gfx950.copies import copies_of, k_tile, v_tile
from .gfx950.groups import land, meet, part, rejoin
from .gfx950.interleaving import (
    PAIRS,
    among_output,
    among_scores,
    most_among_scores,
    reads_ahead,
    rest_among_output,
)
from .gfx950.launch import prepare_kernel
from .gfx950.options import BLOCK_N, WAVE_ROWS, DualWaveOptions
from .gfx950.partial_tiles import PartialTiles
from .gfx950.queries import StagedQueries
from .gfx950.stores import add_counts, store_wide
from .gfx950.sums import add_owed, with_weights
from .gfx950.wide import WIDEST, Layout, layout_of, loader
from .problem.contract import Launch, Request, Tensors
from .problem.dropout_tile import DecidedTile
from .problem.features import BoundFeatures
from .problem.lazy_softmax import LazySoftmax
from .problem.online_softmax import EXACT_BELOW, LARGEST, finish_rows, finish_with_sink
from .work.fragments import load_queries, row_numbers, store_lse
from .work.kept_pairs import KeptPairs
from .work.score_stages import ScoreStages
from .work.tile_scheduler import BlockWork, block_work

RESCALE_THRESHOLD = 8.0  # log2 units


@fly.kernel
def flash_attn_gfx950(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    debug_counts: fly.Tensor | None,
    *operands: fly.Operand,
    options: DualWaveOptions,
    folded: bool = False,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, per sequence and head; arguments as in `flash_attn_generic`.

    debug_counts: (2,) f32. Every wave adds the number of its key tiles that went without a rescale, and with one.
    """
    options.tell_compiler()
    given = options.features.bind(operands)
    work = block_work(
        (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv),
        head_dim=options.head_dim,
        head_dim_v=options.value_dim,
        causal=options.causal,
        block_m=options.block_m,
        block_n=BLOCK_N,
        xcds=fly.target().xcds,
        given=given,
        page_size=options.page_size,
        folded=folded,
        scarce=options.scarce,
    )
    with work.if_any_row():
        attend(work, scale_log2, given.at(work), debug_counts, options, Tiles)


def attend(
    work: BlockWork,
    scale_log2: fly.Value,
    given: BoundFeatures,
    debug_counts: fly.Tensor | None,
    options: DualWaveOptions,
    kind: type[Tiles],
) -> None:
    """A block's work, with tiles of a kind."""
    for _ in range(kind.nops):
        s_nop()
    wave = fly.wave_id()
    wave_row = work.first_row + wave * WAVE_ROWS
    tiles = kind(work, wave * WAVE_ROWS, scale_log2, given, options)
    if options.stagger and not tiles.staged:
        part(wave)
    output, softmax = tiles.run()
    if options.scarce:
        wave_row = fly.first_lane(tiles.rows.values[0][0])  # the first lane's row; no scalar register kept it

    inverse, row_lse = tiles.finish(softmax)
    tiles.store(output.scale_rows(given.scale_kept(inverse)), wave_row)
    if work.lse is not None:
        # made again: kept over the loop, a lane's row takes a register that features need
        rows = row_numbers(tiles.link.layout, 1, fly.remade(tiles.first_row))
        store_lse(work.lse, row_lse, rows, work.keys.queries)
    if debug_counts is not None:
        add_counts(debug_counts, tiles.pipeline.rounded(tiles.count) - softmax.rescales, softmax.rescales)
    if options.stagger:
        rejoin(wave)


class Tiles:
    """The stages of the module's table, over the buffers in LDS and the operands in registers.

    Tiles count from `work.tiles.first`; where they are steps of a list, stages also get `listed`, the key tile's
    number. The wave's rows begin `row_offset` into the block's. Another kind changes `atom`, (m, n, k) of its matrix
    instructions, `threshold` and `stages_queries` (through LDS), see the module, `measured_shift`, that of scores
    measured from their maximum: nearly a maximum of 0's, but none that such a row has by chance and is not as good;
    `sums`, tiles that the output has behind its own; and `branches`: what is rare is behind branches that LLVM takes
    for rare, and so puts behind the loop. A wave that is alone on a SIMD waits for branches. `nops`: 4 bytes of code
    each in front of all else, so that the loop's packed instructions lie in lines of 32 bytes (a test looks).
    """

    atom = (32, 32, 16)
    threshold, stages_queries = RESCALE_THRESHOLD, True
    measured_shift = 2.0**-143  # its bits are 64, which instructions hold
    sums = 0
    branches = True
    nops = 1

    def __init__(
        self,
        work: BlockWork,
        row_offset: fly.Value,
        scale_log2: fly.Value,
        given: BoundFeatures,
        options: DualWaveOptions,
    ):
        self.work = work
        self.given = given
        self.options = options
        if options.daz:
            self.measured_shift = max(self.measured_shift, 2.0**-126)  # less is 0, the shift of a row without keys
        self.scale_log2 = scale_log2
        self.scale = given.scale(scale_log2)
        self.dtype = work.q.dtype
        self.link = fly.chain(fly.target().mma(self.dtype.name, self.atom))
        self.dim_steps = -(-options.head_dim // self.link.atom.k)
        self.dim_tiles = -(-options.value_dim // self.link.layout.columns)
        self.key_tiles = BLOCK_N // self.link.layout.columns
        self.key_steps = BLOCK_N // self.link.atom.k
        self.k_ahead, self.v_ahead = reads_ahead(self.dim_steps, self.dim_tiles, self.key_steps, options)
        self.packed_first = options.ahead and options.head_dim == 128  # see `exponents`
        # scores of the second key tile whose weights are made beside the scores' products, which have room for them
        more = self.packed_first and not given.features.drops
        self.more_early = self.link.atom.values(self.link.row_operand) if more else 0
        # pairs of its last weights that are added a tile later (`gfx950/sums.py`); features need those registers
        self.owed = PAIRS - self.more_early // 2 - 1 if more and not given.features.per_score else 0
        threshold = self.threshold if options.lazy_rescale and not given.features.invariant else 0.0
        self.margin = threshold * fly.rcp(self.scale)
        self.first_row = first = work.first_row + row_offset
        self.rows = row_numbers(self.link.layout, 1, first)
        self.stages = ScoreStages(work, given, scale_log2, self.rows, BLOCK_N)
        self.branches = self.branches and not options.alone
        self.numbers = PartialTiles(work, given.features.windowed, self.branches)
        # pages and lists leave no scalar registers for this: they take an odd number of tiles, a copy past the end
        self.staged = self.stages_queries and options.staged
        self.spares = self.staged and options.causal
        # a block without keys has a tile that nobody sees
        self.count = fly.maximum(work.tiles.end - work.tiles.first, 1)
        if options.head_dim != 64 or not self.staged or "bias" not in given.operands:
            # what LLVM knows of the least count costs it registers; with a bias at 64 it saves instructions
            self.count = fly.remade(self.count)
        if not self.staged:
            window = work.q.window(work.first_row, options.block_m)
            self.queries = load_queries(self.link, window, row_offset, 1, self.dim_steps)[0]
        self._open()
        self.pipeline = self._pipeline()

    def _open(self) -> None:
        """Set up buffers, copies and operand loads."""
        link, loads = self.link, self._loads()
        atom, operand = link.atom, link.column_operand

        def plan(**kwargs: Any) -> fly.OperandPlan:
            want = fly.operand_coordinates(atom, operand, **kwargs)
            return fly.require_plan(fly.plan_operand(loads, want, atom.values(operand)), atom, operand)

        k_layout, v_layout = self._layouts()
        self.copies = copies_of(self.work, k_layout, v_layout, not self.staged)
        self.k_load = loader(plan(transposed=False), k_layout)
        self.v_load = loader(plan(transposed=True, slot_of=lambda slot: link.columns[slot]), v_layout)
        self.copies.allocate()
        if self.staged:
            assert isinstance(k_layout, fly.PaddedTile)
            self.staging = StagedQueries(self.work.q, k_layout, self.options.block_m, WAVE_ROWS)

    def _loads(self) -> tuple[fly.MatrixLoad, ...]:
        """Those of the target for these elements."""
        loads: tuple[fly.MatrixLoad, ...] = fly.target().matrix_loads
        return loads

    def _layouts(self) -> tuple[Layout, Layout]:
        """Of K and V in LDS."""
        together = self.options.together
        return (
            layout_of(self.options.head_dim, lambda columns: k_tile(columns, together)),
            layout_of(self.options.value_dim, lambda columns: v_tile(columns, together)),
        )

    def _narrow(self, probabilities: fly.Value) -> fly.Value:
        """As the matrix instructions take them."""
        return probabilities.to(self.dtype, rounding="nearest_any")

    def store(self, output: fly.Fragment, first_row: fly.Value) -> None:
        """The wave's rows on their way to memory."""
        store_wide(self.work.late_out(), output, first_row, WAVE_ROWS)

    def finish(self, softmax: LazySoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        """What the output is multiplied by, and the log-sum-exp."""
        total = fly.RowVector(self.link.layout, ((fly.reduce_sum(softmax.total),),))
        return self.finish_rows(softmax, total.reduce_lanes(lambda a, b: a + b))

    def finish_rows(self, softmax: LazySoftmax, total: fly.RowVector) -> tuple[fly.RowVector, fly.RowVector]:
        """The same with a row's sum."""
        origin = fly.select(self._measured(softmax.shift), fly.minimum(softmax.maximum * self.scale, LARGEST), 0.0)
        pivot = origin - softmax.shift
        # the shift of a row without any key is 0
        empty = total.map(lambda t: t == 0.0)
        if (sink := self.given.sink(self.work, self.rows)) is not None:
            return finish_with_sink(empty.map(lambda e: fly.select(e, -math.inf, pivot)), total, sink)
        return finish_rows(total, empty, lambda t: (fly.log2(t) + pivot) * math.log(2))

    def _pipeline(self) -> fly.Pipeline:
        """The module's table; step i of the pipeline has K(i) on its way, S(i-1), and O with tile i-2."""
        stage = fly.Stage
        scores, featured, listed = "raw_early raw_late", [], self.copies.listed
        if self.given.features.per_score:
            takes = f"{scores} {listed}"
            featured = [stage("features", self.featured, takes, "new_early new_late", delay=1, cluster=2)]
            scores = "new_early new_late"
        decided = "decided" if self.given.features.drops else ""
        decide = [stage("decide", self.decide, listed, decided, delay=2, cluster=0)] if decided else []
        early, late = (functools.partial(self.weights, half) for half in (0, 1))
        first, past_end = self.packed_first, not self.staged
        exponents = stage(
            "exponents", self.exponents, "s_early s_late softmax", "e_early e_late", delay=2, cluster=int(first)
        )
        carried = " ".join(running := (*self.copies.running, "output", "softmax"))
        settled = (
            [stage("settle", self.settle, carried, carried, delay=0, cluster=1, shared=True)] if self.staged else []
        )
        sums = [stage("sums", add_owed, "softmax", "softmax", delay=2, cluster=1)] if self.owed else []
        packed_among_loads, packed_first = ([], [*sums, exponents]) if first else ([exponents], [])
        # fmt: off
        return fly.Pipeline(
            self._arranged([
                stage("watch", self.numbers.watch, f"softmax {listed}", "softmax", delay=1, cluster=0),
                stage("read K", self.read_k, "", "k", delay=1, cluster=0),
                self.copies.k_stage(delay=0, cluster=0, shared=True, past_end=past_end),
                *decide,
                *packed_among_loads,
                stage("wait for V", land, "v_flight", delay=2, cluster=0, shared=True),
                *self.copies.ahead(delay=0, cluster=0, shared=True, past_end=past_end),
                *packed_first,
                *settled,
                stage("scores", self.scores, "k", "raw_early raw_late", delay=1, cluster=1),
                stage("early weights", early, f"e_early softmax {decided}", "p_early softmax", delay=2, cluster=1),
                stage("interleave", self.interleave_scores, delay=2, cluster=1),
                *featured,
                stage("read V", self.read_v, "", "v", delay=2, cluster=2),
                self.copies.v_stage(delay=1, cluster=2, shared=True),
                stage("wait for K", land, "k_flight", delay=0, cluster=2, shared=True, past_end=past_end),
                stage("late weights", late, f"e_late softmax {decided}", "p_late softmax", delay=2, cluster=3),
                stage("output", self.accumulate, "output v p_early p_late", "output", delay=2, cluster=3),
                stage("maximum", self.raise_maximum, f"{scores} output softmax {listed}",
                      "s_early s_late output softmax", delay=1, cluster=3),
            ]),
            running=running,
            unroll=2,
            boundary=self.boundary,
            spares=self.spares,
        )
        # fmt: on

    def _arranged(self, stages: list[fly.Stage]) -> list[fly.Stage]:
        """The table as another kind has it."""
        return stages

    def run(self) -> tuple[fly.Fragment, LazySoftmax]:
        """All tiles of this block: the output, not divided by the sum yet, and the softmax."""
        low, zero = fly.f32(-math.inf), fly.f32(0.0)
        done = self.pipeline.run(
            self.count,
            spare=(lambda: self.spare) if self.spares else None,
            **self.copies.start(self.work.tiles.first),
            output=fly.Fragment.zeros(self.link.layout, 1, self.dim_tiles + self.sums),
            softmax=LazySoftmax(low, zero, low, low, fly.broadcast(zero, 2 + 2 * self.owed), fly.i32(0)),
        )
        return done["output"], done["softmax"]

    @functools.cached_property
    def spare(self) -> fly.Value:
        """Whether no row of the wave sees a key of the last tile."""
        last = self.work.tiles.first + (self.pipeline.rounded(self.count) - 1)
        return fly.any_lane(self.work.keys.limit(self.first_row + (WAVE_ROWS - 1)) <= last * BLOCK_N)

    # stages

    def interleave_scores(self, tile: fly.PipelineTile) -> None:
        """Between the matrix instructions of the scores."""
        products, reads = self.key_tiles * self.dim_steps, (self.dim_steps - self.k_ahead) * self.key_tiles
        if self.more_early:
            sched_groups(*most_among_scores(products, PAIRS + self.more_early // 2))
        else:
            sched_groups(*among_scores(products, reads))

    def interleave_output(self) -> None:
        """Between those of the output. At D=128 the maximum, which the branch waits for, is before the last ones."""
        products, reads = self.key_steps * self.dim_tiles, (self.key_steps - self.v_ahead) * self.dim_tiles
        if self.more_early:
            sched_groups(*rest_among_output(products, PAIRS - self.more_early // 2, self.owed > 0))
        else:
            sched_groups(*among_output(products, 3 if self.packed_first else None, reads))

    def settle(self, tile: fly.PipelineTile, *running: Any) -> tuple[Any, ...]:
        """What the loop starts with, computed while K(0) is on its way."""
        return fly.early(running) if isinstance(tile.number, int) and tile.number == 0 else running

    def read_k(self, tile: fly.PipelineTile) -> list[list[fly.Value]]:
        """K operands [step over head_dim][key tile], those that are read before the matrix instructions."""
        return [self.k_operands(tile, t) for t in range(self.k_ahead)]

    def k_operands(self, tile: fly.PipelineTile, step: int) -> list[fly.Value]:
        """K operands of a step over head_dim, one for each key tile."""
        rows, depth = self.link.layout.columns, self.link.atom.k
        buffer = self.copies.k[tile.slot]
        return [self.k_load.load(buffer, n * rows, step * depth)[0] for n in range(self.key_tiles)]

    def read_v(self, tile: fly.PipelineTile) -> list[list[fly.Value]]:
        """V operands [step over keys][dim tile], those that are read before the matrix instructions."""
        return [self.v_operands(tile, t) for t in range(self.v_ahead)]

    def v_operands(self, tile: fly.PipelineTile, step: int) -> list[fly.Value]:
        """V operands of a step over keys, one for each tile of columns."""
        columns, depth = self.link.layout.columns, self.link.atom.k
        buffer = self.copies.v[tile.slot]
        return [self.v_load.load(buffer, step * depth, n * columns)[0] for n in range(self.dim_tiles)]

    def scores(self, tile: fly.PipelineTile, k: list[list[fly.Value]]) -> tuple[fly.Value, ...]:
        """Raw scores of the key tiles."""
        tiles = fly.Fragment.zeros(self.link.layout, 1, self.key_tiles).tiles[0]
        for t in range(self.dim_steps):
            operands = k[t] if t < self.k_ahead else self.k_operands(tile, t)
            tiles = tuple(self.link.mma(self.queries[t], x, s) for x, s in zip(operands, tiles, strict=True))
        return tiles

    def featured(
        self, tile: fly.PipelineTile, early: fly.Value, late: fly.Value, listed: fly.Value | None = None
    ) -> tuple[fly.Value, ...]:
        """Scores as the softmax takes them; of the masks, that which is a function for every tile."""
        key_tile = self.numbers.key_tile(tile, listed)
        scores = self.stages.modify(fly.Fragment(self.link.layout, ((early, late),)), key_tile)
        if self.given.features.masks_every_tile:
            scores = self.stages.hide(scores, key_tile)
        return scores.tiles[0]

    def exponents(
        self, tile: fly.PipelineTile, early: fly.Value, late: fly.Value, softmax: LazySoftmax
    ) -> tuple[fly.Value, fly.Value]:
        """scale * score + shift, in packed instructions: they wait until no wave's matrix instruction is in flight.

        At D=128 that is at the start of a compute cluster, before the first one; the other group's last one ends
        while the groups meet. At D=64 vector instructions decide, and the matrix pipe has gaps anyway.
        """
        # a pair at a time, the scale takes two scalar registers, not one an element: for lists, and pages of panels
        panels = self.options.page_size is not None and max(self.options.head_dim, self.options.value_dim) > WIDEST
        width = 2 if self.copies.listed or panels else len(early)
        scale, shift = (fly.broadcast(x, width) for x in (self.scale, softmax.shift))

        def scaled(scores: fly.Value) -> fly.Value:
            return fly.concat([fly.fma(scores[i : i + width], scale, shift) for i in range(0, len(scores), width)])

        exponents = scaled(early), scaled(late)
        if self.packed_first:
            sched_barrier()
        if not self.more_early:
            return exponents
        first, second = exponents
        return fly.concat([first, second[: self.more_early]]), second[self.more_early :]

    def decide(self, tile: fly.PipelineTile, *listed: fly.Value) -> DecidedTile:
        """Which weights dropout keeps."""
        dropout = self.given.dropout(self.work, remade=True)
        assert dropout is not None
        corner = self.first_row, self.numbers.key_tile(tile, *listed) * BLOCK_N
        return dropout.decided(self.link.layout, *corner, tiles=(1, self.key_tiles), scarce=self.options.scarce)

    def weights(
        self, half: int, tile: fly.PipelineTile, exponents: fly.Value, softmax: LazySoftmax, *decided: DecidedTile
    ) -> tuple[list[fly.Value], LazySoftmax]:
        """Probabilities of half of a key tile as operands, those that dropout keeps, and the sum with all of them."""
        probabilities = fly.exp2(exponents)
        if self.more_early:
            owed = self.owed if half else 0
            softmax = replace(softmax, total=with_weights(softmax.total, probabilities, owed))
        else:
            total = sum((probabilities[i : i + 2] for i in range(0, len(probabilities), 2)), softmax.total)
            softmax = replace(softmax, total=total)
        narrow = self._narrow(probabilities)
        for which in decided:
            layout = self.link.layout
            (narrow,) = KeptPairs.of(which, layout, column=half * layout.columns).only([narrow])
        return self.link.operands([narrow]), softmax

    def accumulate(
        self,
        tile: fly.PipelineTile,
        output: fly.Fragment,
        v: list[list[fly.Value]],
        early: list[fly.Value],
        late: list[fly.Value],
    ) -> fly.Fragment:
        tiles = list(output.tiles[0])
        for t, weights in enumerate([*early, *late]):
            operands = v[t] if t < self.v_ahead else self.v_operands(tile, t)
            for n, columns in enumerate(operands):
                tiles[n] = self.link.mma(weights, columns, tiles[n])
        return fly.Fragment(output.layout, (tuple(tiles),))

    def raise_maximum(
        self,
        tile: fly.PipelineTile,
        early: fly.Value,
        late: fly.Value,
        output: fly.Fragment,
        softmax: LazySoftmax,
        listed: fly.Value | None = None,
    ) -> tuple[fly.Value, fly.Value, fly.Fragment, LazySoftmax]:
        """Mask what is not seen, take the maximum in where it is worth it, and rescale what was accumulated.

        Both are rare, and behind one branch.
        """
        largest = fly.reduce_max(fly.concat([early, late]))
        needed = fly.any_lane(largest > softmax.limit)
        if tile.last and self.spares:
            needed = needed & ~self.spare
        self.interleave_output()

        # told apart from the number that `watch` compares, or LLVM keeps what it found, and a mask's columns
        known = listed is not None or isinstance(tile.number, int)

        def masked(number: fly.Value | int) -> tuple[fly.Value, fly.Value, fly.Value]:
            key_tile = self.numbers.key_tile(replace(tile, number=number), listed)
            scores = fly.Fragment(self.link.layout, ((early, late),))
            # a selection right after its comparison would wait: the comparisons first, 16 at a time
            stages = self.stages.remade(self.first_row) if self.options.remakes_rows else self.stages
            scores = stages.limit(scores, key_tile, between=sched_barrier)
            seen = scores.tiles[0]
            if listed is not None:
                seen = fly.cond(
                    self.numbers.ends(tile.number),
                    lambda: self.stages.hide(scores, key_tile, one_by_one=True).tiles[0],
                    lambda: scores.tiles[0],
                )
            seen_early, seen_late = seen
            return seen_early, seen_late, fly.reduce_max(fly.concat(seen))

        def rescaled(largest: fly.Value) -> tuple[fly.Fragment, LazySoftmax]:
            row = fly.RowVector(self.link.layout, ((largest,),)).reduce_lanes(fly.maximum).values[0][0]
            maximum = fly.maximum(softmax.maximum, row)
            large = fly.absolute(maximum * self.scale) >= EXACT_BELOW
            shift = fly.select(large, self.measured_shift, self._shift(maximum))
            # a row without any key so far is measured from 0: -inf - -inf is NaN
            shift = fly.select(maximum == -math.inf, 0.0, shift)
            apart = (softmax.maximum - maximum) * self.scale
            apart = fly.select(self._measured(shift) | self._measured(softmax.shift), apart, shift - softmax.shift)
            # at most 1, also from a row without keys: nothing was accumulated there
            factor = fly.minimum(fly.maximum(fly.exp2(apart), 0.0), 1.0)
            factors = fly.RowVector(self.link.layout, ((factor,),))
            limit = unmasked = fly.select(self._measured(shift), -math.inf, maximum + self.margin)
            if listed is None and self.given.features.windowed:
                limit = fly.select(self.numbers.partial(tile.number + 1), -math.inf, limit)
            total = softmax.total * fly.broadcast(factor, len(softmax.total))
            state = LazySoftmax(maximum, shift, limit, unmasked, total, softmax.rescales + 1)
            # before the first tile nothing is accumulated
            return (output if isinstance(tile.number, int) else output.scale_rows(factors)), state

        def rare() -> tuple[fly.Value, fly.Value, fly.Fragment, LazySoftmax]:
            number = tile.number if known else fly.remade(tile.number)
            s_early, s_late, top = fly.cond(
                self.numbers.partial(number, listed), lambda: masked(number), lambda: (early, late, largest)
            )
            grown = fly.any_lane(top > softmax.maximum + self.margin)
            result, state = fly.cond(grown, lambda: rescaled(top), lambda: (output, softmax))
            measured = self._measured(state.shift)

            def from_maximum() -> tuple[fly.Value, fly.Value]:
                origin = fly.broadcast(fly.select(measured, state.maximum, 0.0), len(early))
                return s_early - origin, s_late - origin

            s_early, s_late = fly.cond(fly.any_lane(measured), from_maximum, lambda: (s_early, s_late))
            return s_early, s_late, result, state

        taken: tuple[fly.Value, fly.Value, fly.Fragment, LazySoftmax] = fly.cond(
            unlikely(needed) if self.branches else needed, rare, lambda: (early, late, output, softmax)
        )
        return taken

    def _measured(self, shift: fly.Value) -> fly.Value:
        """Whether scores of a row with this shift are measured from its maximum before they are scaled."""
        return shift == self.measured_shift

    def _shift(self, maximum: fly.Value) -> fly.Value:
        """What is added to scale * score of a row with this maximum."""
        return -(maximum * self.scale)

    def boundary(self, cluster: int, step: int | None) -> None:
        """The end of a cluster: where every wave's priority changes, and the groups meet.

        In the first step there is only K(0) to wait for; behind it the groups part.
        """
        if step == 0 and self.staged:
            self.first_step(cluster)
            return
        compute = cluster % 2 == 1
        if compute and self.options.setprio:
            s_setprio(0)
        meet()
        if not compute and self.options.setprio:
            s_setprio(1)

    def first_step(self, cluster: int) -> None:
        """K(0) and the queries arrive."""
        if cluster == 0:
            self.flight = self.staging.start(self.work.first_row)
        if cluster == 2:
            fly.wait(self.flight)
            meet()
            self.queries = self.staging.read(self.k_load, self.dim_steps, self.link.atom.k)
            if self.options.stagger:
                part(fly.wave_id())


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare` and `prepare_kernel`."""
    return prepare_kernel(flash_attn_gfx950, tensors, request)
