"""Flash attention forward for gfx942 on 8-bit floats: `flash_attn_gfx942`, with products of e4m3fnuz.

Q, K and V are e4m3fnuz, the format of this chip's matrix instructions, out is bf16. What differs from 16 bits:

| what | why |
|---|---|
| products take half the time, and vector instructions as much as they | exponentials are in three clusters, 1 to 3 |
| an operand of 16 bytes is that of two products with k = 16 | 16 bytes are one read |
| V is turned by bytes, a word of 4 keys a dimension | this chip has no read that transposes |
| P is 2^6 exp(score - max), rescales are lazy by 2^1.75 | e4m3fnuz holds 2^-10 to 240 |
| at D=64 a block has four waves, of which a compute unit holds three | vector instructions decide there |
| products with ones make the sums that O is divided by | weights add up to 1, also where the largest is rounded |

Those products are of 16 rows and 32 values of k, which take half the time. Lane l holds row l % 32 of the weights and
8 keys; the instruction takes it for row l % 16 and other keys. The ones of its other operand are where keys are in
truth those of the row that a lane wants, zeros elsewhere, so that every lane gets its own row's sum.

Log-sum-exps are made of sums of P before it is rounded, where they are asked for: as exact as in 16 bits.

`q_descale * k_descale` of a sequence and key head multiplies scores with the softmax's scale, `v_descale` the output.
Features are the stages of 16 bits. Products add up in f32, so that `fp8_accumulate` has nothing to choose between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import fly
from fly.backends.rocdl.intrinsics import cvt_pk_fp8, sched_barrier, sched_groups
from fly.errors import ShapeError

from .flash_attn_gfx942 import MFMA, READ, TRANS, VALU, RegisterTiles, Share
from .flash_attn_gfx950 import attend
from .gfx942.byte_copies import RUN, ByteCopies
from .gfx950.byte_weights import RESCALE_THRESHOLD, descaled
from .gfx950.launch import prepare_kernel
from .gfx950.options import BLOCK_N, DualWaveOptions
from .problem.contract import Launch, Request, Tensors
from .problem.lazy_softmax import LazySoftmax
from .work.fragments import group_size
from .work.tile_scheduler import block_work

HEAD_DIMS = (64, 128)
# Weights are 2**OFFSET times what they are, and 2**RESCALE_THRESHOLD times more before a rescale: below e4m3fnuz's
# largest number, 240. The weight of the maximum that was last taken in is exact.
OFFSET = 6.0
FOUR_ONES = 0x40404040
SUMS = 4  # registers of a lane that the products with ones make; all are its row's sum


@dataclass(frozen=True)
class FnuzOptions(DualWaveOptions):
    """The same of a build for 8-bit floats, in whose blocks a thread copies 16 bytes of a tile.

    Raises:
        ShapeError: a head dimension that the kernel does not have, or another number of waves.
    """

    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS
    element_bytes: ClassVar[int] = 1

    @classmethod
    def block_of(cls, request: Request) -> tuple[bool, int]:
        return False, waves_of(request.head_dim)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.waves != waves_of(self.head_dim):
            wanted = waves_of(self.head_dim)
            raise ShapeError(
                f"waves is {self.waves}; this kernel has {wanted} in a block at head_dim {self.head_dim}"
            )


def waves_of(head_dim: int) -> int:
    """Waves of a block: a thread has 16 bytes of a tile."""
    return BLOCK_N * head_dim // (64 * RUN)


@fly.kernel
def flash_attn_gfx942_fp8(
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
    options: FnuzOptions,
    folded: bool = False,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, as `flash_attn_gfx942`.

    operands: those of `options.features`, among them q_descale, k_descale and v_descale, (B, Hkv) f32.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu)
    if options.daz:
        fly.flush_denormals()
    if options.features.modifies:
        fly.narrow_splats()
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
    scale_log2, given = descaled(work, given, scale_log2, group_size(q, k))
    with work.if_any_row():
        attend(work, scale_log2, given.at(work), debug_counts, options, FnuzTiles)


class FnuzTiles(RegisterTiles):
    """The stages on 8-bit tiles; `given` has v_descale as a number.

    The softmax's `total` has the sums of weights as they are multiplied, and behind them, where log-sum-exps are
    wanted, those of the weights before.
    """

    atom = (32, 32, 32)
    threshold = RESCALE_THRESHOLD
    measured_shift = OFFSET - 2.0**-21
    copies_kind = ByteCopies
    shares: ClassVar[dict[int, tuple[Share, ...]]] = {
        64: (Share("early", 1, 0, 16), Share("middle", 2, 16, 24), Share("late", 3, 24, 32)),
        128: (Share("early", 1, 0, 8), Share("middle", 2, 8, 24), Share("late", 3, 24, 32)),
    }

    def _open(self) -> None:
        super()._open()
        self.summed = self.work.lse is not None
        self.running_sums = SUMS + 2 * self.summed
        self.row_sums = fly.target().mma(self.dtype.name, (16, 16, 32))
        # lane l holds sums of rows like l % 16: even sixteens of lanes hold keys of the first 16 rows, odd ones others
        lane = fly.lane_id()
        mine = (lane // 4 % 2) == (lane // 16 % 2)
        word = fly.select(mine, FOUR_ONES, 0)
        self.ones = fly.from_elements([word, word]).bitcast(self.dtype)

    def some_weights(
        self, share: Share, tile: fly.PipelineTile, e_early: fly.Value, e_late: fly.Value, softmax: LazySoftmax
    ) -> tuple[list[fly.Value], LazySoftmax]:
        """Those of a share, rounded, and where log-sum-exps are wanted their sum before."""
        if share.cluster == 2:
            sched_barrier()  # reads of V are on their way
        probabilities = fly.exp2(fly.concat([e_early, e_late])[share.first : share.last])
        if self.summed:
            total = [softmax.total[i] for i in range(self.running_sums)]
            for i in range(len(probabilities)):
                total[SUMS + i % 2] = total[SUMS + i % 2] + probabilities[i]
            softmax = replace(softmax, total=fly.from_elements(total))
        # as words: LLVM puts bytes together one by one
        return [self._narrow(probabilities).bitcast(fly.i32)], softmax

    def output_stage(self, weights: str) -> fly.Stage:
        takes = f"output softmax v {weights}"
        return fly.Stage("output", self.accumulate_both, takes, "output softmax", delay=2, cluster=3)

    def accumulate_both(
        self,
        tile: fly.PipelineTile,
        output: fly.Fragment,
        softmax: LazySoftmax,
        v: list[list[fly.Value]],
        *weights: list[fly.Value],
    ) -> tuple[fly.Fragment, LazySoftmax]:
        """O += V P, and the sums of P."""
        whole = fly.concat([part for share in weights for part in share]).bitcast(self.dtype)
        operands = self.link.operands([whole])
        tiles, sums = list(output.tiles[0]), softmax.total[:SUMS]
        half = self.row_sums.values("b")
        for columns, operand in zip(v, operands, strict=True):
            for n, values in enumerate(columns):
                if n * half < len(operand):  # one after the other would wait for it
                    sums = fly.mma(self.row_sums, self.ones, operand[n * half : (n + 1) * half], sums)
                tiles[n] = self.link.mma(operand, values, tiles[n])
        total = fly.concat([sums, softmax.total[SUMS:]]) if self.summed else sums
        return fly.Fragment(output.layout, (tuple(tiles),)), replace(softmax, total=total)

    def finish(self, softmax: LazySoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        # all of a lane's are of one row, and of all keys
        inverse, lse = self.finish_rows(softmax, fly.RowVector(self.link.layout, ((softmax.total[0],),)))
        if self.summed:
            _, lse = super().finish(replace(softmax, total=softmax.total[SUMS:]))
        scale = self.given.get("v_descale")
        return (inverse if scale is None else inverse.map(lambda x: x * scale)), lse

    def interleave_scores(self, tile: fly.PipelineTile) -> None:
        """Exponentials, conversions and where they are wanted sums; reads of K's second half as the first is used."""
        early, *_ = self.shares[self.options.head_dim]
        products = 2 * self.key_tiles * self.dim_steps
        each = max(1, early.last // products)
        more = max(1, each * (1 + 2 * self.summed) // 2)
        sched_groups((MFMA, 1), (READ, 1), (TRANS, each), (VALU, more), repeat=self.dim_steps)
        sched_groups((MFMA, 1), (TRANS, each), (VALU, more), repeat=products - self.dim_steps)

    def interleave_output(self) -> None:
        """The rest, which the second half of the products needs, then the maximum."""
        products = 2 * self.dim_tiles
        sched_groups((MFMA, 1), (TRANS, 8 // products), (VALU, 1 + self.summed), repeat=products)
        sched_groups((MFMA, 1), (VALU, 2), repeat=products + 4)

    def _narrow(self, probabilities: fly.Value) -> fly.Value:
        return cvt_pk_fp8(probabilities, self.dtype)

    def _shift(self, maximum: fly.Value) -> fly.Value:
        return OFFSET - maximum * self.scale


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    # both ways to add up are f32's
    request = replace(request, static_features=replace(request.static_features, fp8_accumulate=None))
    return prepare_kernel(flash_attn_gfx942_fp8, tensors, request, FnuzOptions)
