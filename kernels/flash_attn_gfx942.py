"""Flash attention forward for gfx942 (CDNA3): the stages and the two wave groups of `flash_attn_gfx950`, pipelined
for a chip that has neither wide direct-to-LDS copies nor transposing reads, and half the matrix rate.

A block of 8 waves computes 256 query rows; waves 0-3 run one barrier ahead of waves 4-7. One tile of 64 keys takes
four clusters with a barrier after each. Cluster by cluster, for tile j:

| cluster | matrix | vector; between the matrix instructions | LDS reads | LDS stores | loads started |
|---|---|---|---|---|---|
| 0 memory | | x = scale * S(j-1) - scale * max | K(j), keys 0-31 | V(j-1) | K(j+1) |
| 1 compute | S(j) = K(j) Q | P(j-1) = exp2(x), sum: three quarters of it | K(j), keys 32-63 | | |
| 2 memory | | | V(j-1) | K(j+1) | V(j) |
| 3 compute | O += V(j-1) P(j-1) | the last quarter; max of S(j); rarely a mask and a rescale | | | |

K and V travel through registers (`gfx942/copies.py`), a tile's part in flight over one compute cluster. V has one
buffer: both groups have read it before the first one stores the next tile. K has two, since its reads reach into
cluster 1.

Registers decide: 256 a lane, of which O, Q, S and x have 160 at D=128, and operands of V 64 more. So K's operands
come in halves, whose scores are one chain of sums after the other; most of P is rounded before V is read; all reads
share an address each (padding and not a swizzle); and the loop's body is one tile, which works without a copy of S
because x is computed before the new scores begin. So no tile is added to fill a turn, either.

Vector instructions are plain ones: a packed one waits until no wave's matrix instruction is in flight, which here is
never for long. A 32-cycle matrix instruction hides an exponential and three others. At D=64 three quarters are half,
and vector instructions decide.

Every lane loads its query itself. Dropout has scalar registers left in no build; keys in pages and block masks have
no copies here: the generic kernel has all three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import fly
from fly.backends.rocdl.intrinsics import Group, s_waitcnt_lds, sched_barrier, sched_groups

from .flash_attn_gfx950 import Tiles, attend
from .gfx942.copies import RegisterCopies
from .gfx950.launch import prepare_kernel
from .gfx950.options import BLOCK_N, WAVE_ROWS, DualWaveOptions
from .problem.contract import Launch, Request, Tensors
from .problem.lazy_softmax import LazySoftmax
from .work.fragments import store_output
from .work.tile_scheduler import block_work

MFMA, TRANS, VALU, READ = Group.MFMA, Group.TRANS, Group.VALU, Group.DS_READ


@fly.kernel
def flash_attn_gfx942(
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
    """out = softmax(softmax_scale * q k^T) v, per sequence and head; arguments as in `flash_attn_gfx950`."""
    fly.occupancy(waves_per_eu=options.waves_per_eu)
    if options.daz:
        fly.flush_denormals()
    given = options.features.bind(operands)
    work = block_work(
        (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv),
        head_dim=options.head_dim,
        causal=options.causal,
        block_m=options.block_m,
        block_n=BLOCK_N,
        xcds=fly.target().xcds,
        given=given,
        folded=folded,
    )
    with work.if_any_row():
        attend(work, scale_log2, given.at(work), debug_counts, options, RegisterTiles)


@dataclass(frozen=True)
class Share:
    """Weights that are made in one cluster: those of a lane's registers from `first` on, before `last`."""

    name: str
    cluster: int
    first: int
    last: int


class RegisterTiles(Tiles):
    """The stages over tiles that pass through registers.

    Another kind changes `copies_kind` and `shares`, those of a tile's weights by head dimension.
    """

    stages_queries = False
    copies_kind: ClassVar[type[RegisterCopies]] = RegisterCopies
    shares: ClassVar[Mapping[int, Sequence[Share]]] = {
        64: (Share("early", 1, 0, 16), Share("late", 3, 16, 32)),
        128: (Share("early", 1, 0, 24), Share("late", 3, 24, 32)),
    }
    nops = 0

    def _open(self) -> None:
        self.packed_first = False
        if self._is_tight():
            self.stages = replace(self.stages, anew=self.first_row)
        self.through_registers = self.copies_kind(self.work, self.link)

    def _is_tight(self) -> bool:
        """Whether there is no register for addresses of a bias; of f32, full calls have it."""
        bias = self.given.get("bias")
        if bias is None or bias.rank != 4 or self.options.head_dim != 128 or self.dtype.bytes != 2:
            return False
        return self.options.causal or bias.dtype is not fly.f32

    def _pipeline(self) -> fly.Pipeline:
        stage, copies = fly.Stage, self.through_registers
        scores, featured = "raw_early raw_late", []
        if self.given.features.per_score:
            featured = [stage("features", self.featured, scores, "new_early new_late", delay=1, cluster=2)]
            scores = "new_early new_late"
        shares = self.shares[self.options.head_dim]
        weights: dict[int, list[fly.Stage]] = {cluster: [] for cluster in range(4)}
        for share in shares:
            make, gives = functools.partial(self.some_weights, share), f"p_{share.name} softmax"
            takes = "e_early e_late softmax"
            weights[share.cluster].append(
                stage(f"{share.name} weights", make, takes, gives, delay=2, cluster=share.cluster)
            )
        made = " ".join(f"p_{share.name}" for share in shares)
        # fmt: off
        return fly.Pipeline(
            [
                stage("watch", self.numbers.watch, "softmax", "softmax", delay=1, cluster=0),
                stage("read K", functools.partial(copies.read_k, n=0), "", "k_early", delay=1, cluster=0),
                stage("exponents", self.exponents, "s_early s_late softmax", "e_early e_late", delay=2, cluster=0),
                stage("store V", copies.store_v, "v_flight", delay=2, cluster=0, shared=True),
                stage("load K", copies.load_k, "", "k_flight", delay=0, cluster=0, shared=True, past_end=True),
                stage("read late K", functools.partial(copies.read_k, n=1), "", "k_late", delay=1, cluster=1),
                stage("scores", self.scores_in_turn, "k_early k_late", "raw_early raw_late", delay=1, cluster=1),
                *weights[1],
                stage("interleave", self.interleave_scores, delay=2, cluster=1),
                *featured,
                stage("read V", copies.read_v, "", "v", delay=2, cluster=2),
                stage("store K", copies.store_k, "k_flight", delay=0, cluster=2, shared=True, past_end=True),
                stage("load V", copies.load_v, "", "v_flight", delay=1, cluster=2, shared=True),
                *weights[2],
                *weights[3],
                stage("output", self.accumulate, f"output v {made}", "output", delay=2, cluster=3),
                stage("maximum", self.raise_maximum, f"{scores} output softmax", "s_early s_late output softmax",
                      delay=1, cluster=3),
            ],
            running=("output", "softmax"),
            boundary=self.boundary,
        )
        # fmt: on

    def run(self) -> tuple[fly.Fragment, LazySoftmax]:
        low, zero = fly.f32(-math.inf), fly.f32(0.0)
        done = self.pipeline.run(
            self.count,
            output=fly.Fragment.zeros(self.link.layout, 1, self.dim_tiles + self.sums),
            softmax=LazySoftmax(low, zero, low, low, fly.broadcast(zero, 2), fly.i32(0)),
        )
        return done["output"], done["softmax"]

    def store(self, output: fly.Fragment, first_row: fly.Value) -> None:
        store_output(self.work.out, output, first_row, WAVE_ROWS)

    def boundary(self, cluster: int, step: int | None) -> None:
        """What this wave stored is there for others behind the barrier, and what it read may be overwritten."""
        if cluster % 2 == 0:
            s_waitcnt_lds()
        super().boundary(cluster, step)

    def featured(
        self, tile: fly.PipelineTile, early: fly.Value, late: fly.Value, listed: fly.Value | None = None
    ) -> tuple[fly.Value, ...]:
        """Before V is read: its operands leave no registers for what is computed."""
        made = super().featured(tile, early, late, listed)
        sched_barrier()
        return made

    def exponents(
        self, tile: fly.PipelineTile, early: fly.Value, late: fly.Value, softmax: LazySoftmax
    ) -> tuple[fly.Value, fly.Value]:
        """scale * score + shift, one by one: the matrix pipe is the other group's now."""

        def scaled(scores: fly.Value) -> fly.Value:
            return fly.from_elements([fly.fma(scores[i], self.scale, softmax.shift) for i in range(len(scores))])

        return scaled(early), scaled(late)

    def some_weights(
        self, share: Share, tile: fly.PipelineTile, e_early: fly.Value, e_late: fly.Value, softmax: LazySoftmax
    ) -> tuple[list[fly.Value], LazySoftmax]:
        """Probabilities of a tile's share as operands, and the sum with them.

        One addition after the other: LLVM makes packed ones of vectors.
        """
        probabilities = fly.exp2(fly.concat([e_early, e_late])[share.first : share.last])
        even, odd = softmax.total[0], softmax.total[1]
        for i in range(0, len(probabilities), 2):
            even, odd = even + probabilities[i], odd + probabilities[i + 1]
        sums = replace(softmax, total=fly.from_elements([even, odd]))
        return self.link.operands([self._narrow(probabilities)]), sums

    def scores_in_turn(self, tile: fly.PipelineTile, *k: list[fly.Value]) -> tuple[fly.Value, ...]:
        """Raw scores, one key tile after the other: its operands' registers are free for what follows."""
        tiles = list(fly.Fragment.zeros(self.link.layout, 1, self.key_tiles).tiles[0])
        for n, row in enumerate(k):
            for query, keys in zip(self.queries, row, strict=True):
                tiles[n] = self.link.mma(query, keys, tiles[n])
        return tuple(tiles)

    def interleave_scores(self, tile: fly.PipelineTile) -> None:
        """An exponential, or the sum and conversion of those before it, behind each matrix instruction.

        Operands of K's second half are read as those of its first half are used.
        """
        if self.options.head_dim == 128:
            one = (MFMA, 1)
            for reads in (True, False):
                read = ((READ, 1),) if reads else ()
                sched_groups(
                    *(one, *read, (TRANS, 1)),
                    *(one, (VALU, 2), (TRANS, 1)),
                    *(one, *read, (VALU, 3), (TRANS, 1)),
                    *(one, (VALU, 3)),
                    repeat=4,
                )
        else:
            sched_groups((MFMA, 1), (READ, 1), (TRANS, 1), (VALU, 2), repeat=4)
            sched_groups((MFMA, 1), (TRANS, 1), (VALU, 3), repeat=12)

    def interleave_output(self) -> None:
        """The same for the rest, which the last products need, then the maximum."""
        if self.options.head_dim == 128:
            sched_groups((MFMA, 1), (TRANS, 1), (MFMA, 1), (VALU, 3), repeat=8)
            sched_groups((MFMA, 1), (VALU, 2), repeat=16)
        else:
            sched_groups((MFMA, 1), (TRANS, 1), (VALU, 3), repeat=16)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    return prepare_kernel(flash_attn_gfx942, tensors, request)
