"""Flash attention forward for gfx942 on 8-bit floats: `flash_attn_gfx942`, with products of e4m3fnuz.

Q, K and V are e4m3fnuz, the format of this chip's matrix instructions, out is bf16. What differs from 16 bits:

| what | why |
|---|---|
| products take half the time, and vector instructions as much as they | exponentials are in three clusters, 1 to 3 |
| an operand of 16 bytes is that of two products with k = 16 | 16 bytes are one read |
| V is turned by bytes, a word of 4 keys a dimension | this chip has no read that transposes |
| P is 2^6 exp(score - max), rescales are lazy by 2^1.75 | e4m3fnuz holds 2^-10 to 240 |
| at D=64 a block has four waves, of which a compute unit holds three | vector instructions decide there |
| V has 32 columns of ones: what they make divides O | weights add up to 1, also where the largest is rounded |

Log-sum-exps are made of sums of P before it is rounded, where they are asked for: as exact as in 16 bits.

`q_descale * k_descale` of a sequence and key head multiplies scores with the softmax's scale, `v_descale` the output.
Features are the stages of 16 bits. Products add up in f32, so that `fp8_accumulate` has nothing to choose between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import fly
from fly.backends.rocdl.intrinsics import sched_barrier, sched_groups
from fly.errors import ShapeError

from .flash_attn_gfx942 import MFMA, READ, TRANS, VALU, RegisterTiles, Share
from .flash_attn_gfx950 import attend
from .flash_attn_gfx950_fp8 import SummedTiles, descaled
from .gfx942.byte_copies import RUN, ByteCopies
from .gfx950.launch import prepare_kernel
from .gfx950.options import BLOCK_N, DualWaveOptions
from .problem.contract import Launch, Request, Tensors
from .problem.lazy_softmax import LazySoftmax
from .work.fragments import group_size
from .work.tile_scheduler import block_work

HEAD_DIMS = (64, 128)
# Weights are 2**OFFSET times what they are, and 2**1.75 times more before a rescale: below e4m3fnuz's
# largest number, 240. The weight of the maximum that was last taken in is exact.
OFFSET = 6.0


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


class FnuzTiles(SummedTiles, RegisterTiles):
    """The stages on tiles of e4m3fnuz that pass through registers."""

    atom = (32, 32, 32)
    measured_shift = OFFSET - 2.0**-21
    offset, one = OFFSET, 0x40
    copies_kind = ByteCopies
    shares: ClassVar[Mapping[int, Sequence[Share]]] = {
        64: (Share("early", 1, 0, 16), Share("middle", 2, 16, 24), Share("late", 3, 24, 32)),
        128: (Share("early", 1, 0, 8), Share("middle", 2, 8, 24), Share("late", 3, 24, 32)),
    }

    def some_weights(
        self, share: Share, tile: fly.PipelineTile, e_early: fly.Value, e_late: fly.Value, softmax: LazySoftmax
    ) -> tuple[list[fly.Value], LazySoftmax]:
        """Those of a share, rounded, as words, and where log-sum-exps are wanted their sum before."""
        if share.cluster == 2:
            sched_barrier()  # reads of V are on their way
        probabilities = fly.exp2(fly.concat([e_early, e_late])[share.first : share.last])
        if self.work.lse is not None:
            even, odd = softmax.total[0], softmax.total[1]
            for i in range(0, len(probabilities), 2):
                even, odd = even + probabilities[i], odd + probabilities[i + 1]
            softmax = replace(softmax, total=fly.from_elements([even, odd]))
        # LLVM would put bytes together one by one
        return [self._narrow(probabilities).bitcast(fly.i32)], softmax

    def accumulate(
        self, tile: fly.PipelineTile, output: fly.Fragment, v: list[list[fly.Value]], *shares: list[fly.Value]
    ) -> fly.Fragment:
        words = fly.concat([part for share in shares for part in share])
        operands = self.link.operands([words.bitcast(self.dtype)])
        return super().accumulate(tile, output, [[*columns, self.ones] for columns in v], operands, [])

    def interleave_scores(self, tile: fly.PipelineTile) -> None:
        """Exponentials, conversions and where they are wanted sums; reads of K's second half as the first is used."""
        early, *_ = self.shares[self.options.head_dim]
        products, summed = 2 * self.key_tiles * self.dim_steps, int(self.work.lse is not None)
        each = max(1, early.last // products)
        more = max(1, each * (1 + 2 * summed) // 2)
        sched_groups((MFMA, 1), (READ, 1), (TRANS, each), (VALU, more), repeat=self.dim_steps)
        sched_groups((MFMA, 1), (TRANS, each), (VALU, more), repeat=products - self.dim_steps)

    def interleave_output(self) -> None:
        """The rest, which the second half of the products needs, then the maximum."""
        products = 2 * self.dim_tiles
        summed = int(self.work.lse is not None)
        sched_groups((MFMA, 1), (TRANS, 8 // products), (VALU, 1 + summed), repeat=products)
        sched_groups((MFMA, 1), (VALU, 2), repeat=products + 4)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    # both ways to add up are f32's
    request = replace(request, static_features=replace(request.static_features, fp8_accumulate=None))
    return prepare_kernel(flash_attn_gfx942_fp8, tensors, request, FnuzOptions)
