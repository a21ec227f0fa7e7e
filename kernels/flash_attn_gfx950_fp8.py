"""Flash attention forward for gfx950 on 8-bit floats: `flash_attn_gfx950`, with e4m3 products.

Q, K and V are e4m3, out is bf16. What differs from 16 bits:

| what | why |
|---|---|
| products have k = 64, at twice the rate | a tile's 64 keys are one product: all weights are made before it |
| vector instructions decide, and are single ones | packed ones would wait for the other group's products |
| exponents are in cluster 0, weights in 1 and 2, with one group all in 1 | beside products of its own or the others |
| V is read by `ds_read_b64_tr_b8` | it turns 8 keys by 16 head dimensions at a time |
| P is 2^7 exp(score - max), rescales are lazy by 2^1.75 | e4m3 holds 2^-9 to 448 |
| V has 32 columns of ones: what they make divides O | weights add up to 1, also where the largest is rounded |
| at D=64 and 256 a block has four waves | a tile of 64 has four lines to copy; 256 take more than 256 registers |
| at D=256 reads are in the clusters of products | a wave has a SIMD for itself, and nothing else computes meanwhile |

Log-sum-exps are made of sums of P before it is rounded, where they are asked for: as exact as in 16 bits.

`q_descale * k_descale` of a sequence and key head multiplies scores with the softmax's scale, `v_descale` the output.
Features are the stages of 16 bits. Products add up in f32, so that `fp8_accumulate` has nothing to choose between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import fly
from fly.backends.rocdl.intrinsics import Group, cvt_pk_fp8, sched_barrier, sched_groups, settle_products

from .flash_attn_gfx950 import Tiles, attend
from .gfx950 import byte_tiles
from .gfx950.interleaving import MFMA, TRANS, VALU
from .gfx950.launch import prepare_kernel
from .gfx950.options import BLOCK_N, WAVES, DualWaveOptions, has_small_blocks
from .problem.catalogue import DESCALES
from .problem.contract import Launch, Request, Tensors
from .problem.dropout_tile import DecidedTile
from .problem.features import BoundFeatures
from .problem.lazy_softmax import LazySoftmax
from .work.fragments import group_size
from .work.tile_scheduler import BlockWork, block_work

# Weights are 2**OFFSET times what they are, and 2**RESCALE_THRESHOLD times more before a rescale: below e4m3's
# largest number, 448. The weight of the maximum that was last taken in is exact.
OFFSET, RESCALE_THRESHOLD = 7.0, 1.75
LEAST_SCALE = 1e-30  # a margin is divided by the scale


@dataclass(frozen=True)
class Fp8Options(DualWaveOptions):
    """The same of a build for 8-bit floats, whose FMAs are not packed."""

    head_dims: ClassVar[tuple[int, ...]] = byte_tiles.HEAD_DIMS
    most_staged: ClassVar[int] = byte_tiles.HEAD_DIMS[-1]
    element_bytes: ClassVar[int] = 1
    ahead: bool = False

    @property
    def alone(self) -> bool:
        """Whether a wave has a SIMD for itself."""
        return self.head_dim > 128

    @classmethod
    def block_of(cls, request: Request) -> tuple[bool, int]:
        few = request.head_dim != 128 or has_small_blocks(request)
        return request.head_dim > 128, WAVES // 2 if few else WAVES


@fly.kernel
def flash_attn_gfx950_fp8(
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
    options: Fp8Options,
    folded: bool = False,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, as `flash_attn_gfx950`.

    operands: those of `options.features`, among them q_descale, k_descale and v_descale, (B, Hkv) f32.
    """
    fly.occupancy(waves_per_eu=1 if options.alone else options.waves_per_eu)
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
        page_size=options.page_size,
        folded=folded,
    )
    scale_log2, given = descaled(work, given, scale_log2, group_size(q, k))
    with work.if_any_row():
        attend(work, scale_log2, given.at(work), debug_counts, options, Fp8Tiles)


def descaled(
    work: BlockWork, given: BoundFeatures, scale_log2: fly.Value, group: fly.Value
) -> tuple[fly.Value, BoundFeatures]:
    """The scale of scores with those of queries and keys, and `given` with the scales, (B, Hkv), as numbers.

    `group`: query heads of a key head.
    """
    head = work.head // group
    asked = given.features.operands
    scales = {n: fly.first_lane(given.get(n).load(work.batch, head)) for n in DESCALES if n in asked}
    scale_log2 = scale_log2 * scales.get("q_descale", 1.0) * scales.get("k_descale", 1.0)
    given = replace(given, operands={**given.operands, **scales})
    return fly.maximum(scale_log2, LEAST_SCALE), given


class SummedTiles(Tiles):
    """The stages with weights of 8 bits; `given` has v_descale as a number.

    The output has one more tile, of columns of ones in V: the sums of the weights as they are multiplied. Another
    format has another `offset`, and byte that is one.
    """

    threshold = RESCALE_THRESHOLD
    sums = 1
    branches = False  # what else a compute cluster does takes longer than its products: one block to the scheduler
    offset, one = OFFSET, 0x38

    def run(self) -> tuple[fly.Fragment, LazySoftmax]:
        word = fly.remade(fly.i32(self.one * 0x01010101))
        self.ones = fly.from_elements([word] * (self.link.atom.k // 8)).bitcast(self.dtype)
        output, softmax = super().run()
        settle_products()
        *tiles, sums = output.tiles[0]
        # all of a lane's are of one row, and of all keys
        self.weights_total = fly.RowVector(output.layout, ((sums[0],),))
        return fly.Fragment(output.layout, (tuple(tiles),)), softmax

    def finish(self, softmax: LazySoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        _, lse = super().finish(softmax)
        inverse, _ = self.finish_rows(softmax, self.weights_total)
        scale = self.given.get("v_descale")
        return (inverse if scale is None else inverse.map(lambda x: x * scale)), lse

    def _narrow(self, probabilities: fly.Value) -> fly.Value:
        return cvt_pk_fp8(probabilities, self.dtype)

    def _shift(self, maximum: fly.Value) -> fly.Value:
        return self.offset - maximum * self.scale


class Fp8Tiles(SummedTiles):
    """The stages on tiles of e4m3."""

    options: Fp8Options
    atom = (32, 32, 64)
    measured_shift = OFFSET - 2.0**-21

    def _arranged(self, stages: list[fly.Stage]) -> list[fly.Stage]:
        """Stages in front of others, and in their cluster: all weights are made before a product needs them.

        With one group nothing else is sure to fill what the scores' products leave, so all of them are beside those.
        Alone, a wave computes while it reads: clusters 0 and 2 start and await copies.
        """
        moves: dict[str, tuple[str, dict[str, Any]]] = {"late weights": ("wait for K", {})}
        if self.options.waves < WAVES:
            moves = {"late weights": ("interleave", {})}
        if self.options.alone:
            moves |= {
                "read V": ("scores", {}),
                "read K": ("output", {"delay": 0, "past_end": not self.staged}),
                "exponents": ("early weights", {}),
                "copy V": ("wait for V", {}),
            }
        for name, (before, changes) in moves.items():
            (moved,) = (stage for stage in stages if stage.name == name)
            stages.remove(moved)
            (at,) = (i for i, stage in enumerate(stages) if stage.name == before)
            stages.insert(at, replace(moved, cluster=stages[at].cluster, **changes))
        return stages

    def interleave_scores(self, tile: fly.PipelineTile) -> None:
        """Exponentials, conversions and where they are wanted sums; alone reads of V and the exponents too."""
        products = self.key_tiles * self.dim_steps
        summed = int(self.work.lse is not None)
        if self.options.alone:
            each = 32 // products
            reads = 2 * self.dim_tiles * self.key_steps * self.key_tiles // products
            arithmetic = each * (3 + 2 * summed) // 2
            sched_groups((MFMA, 1), (Group.DS_READ, reads), (VALU, arithmetic), (TRANS, each), repeat=products)
        else:
            each = (16 if self.options.waves == WAVES else 32) // products
            sched_groups((MFMA, 1), (TRANS, each), (VALU, each * (1 + 2 * summed) // 2), repeat=products)

    def interleave_output(self) -> None:
        """The maximum; alone reads of K too."""
        products = self.dim_tiles + 1
        if self.options.alone:
            # scores are not ready before, see `settle_products`
            first = products // 2 + 1
            reads = -(-2 * self.key_tiles * self.dim_steps // first)
            sched_groups((MFMA, 1), (Group.DS_READ, reads), repeat=first)
            sched_groups((MFMA, 1), (VALU, 5), repeat=products - first)
        else:
            sched_groups((MFMA, 1), (VALU, 4), repeat=products)

    def boundary(self, cluster: int, step: int | None) -> None:
        """Alone, waves meet behind what they waited for."""
        if self.options.alone and cluster % 2 == 1:
            sched_barrier()
        else:
            super().boundary(cluster, step)

    def featured(
        self, tile: fly.PipelineTile, early: fly.Value, late: fly.Value, listed: fly.Value | None = None
    ) -> tuple[fly.Value, ...]:
        settle_products()
        return super().featured(tile, early, late, listed)

    def raise_maximum(self, tile: fly.PipelineTile, early: fly.Value, *state: Any) -> Any:
        """In the first step no product of weights is between."""
        if isinstance(tile.number, int):
            settle_products()
        return super().raise_maximum(tile, early, *state)

    def exponents(
        self, tile: fly.PipelineTile, early: fly.Value, late: fly.Value, softmax: LazySoftmax
    ) -> tuple[fly.Value, fly.Value]:
        """One by one: packed ones would wait for the other group's products."""

        def scaled(scores: fly.Value) -> fly.Value:
            each = [fly.fma(scores[i], self.scale, softmax.shift) for i in range(len(scores))]
            return fly.from_elements(each)

        return scaled(early), scaled(late)

    def weights(
        self, half: int, tile: fly.PipelineTile, exponents: fly.Value, softmax: LazySoftmax, *decided: DecidedTile
    ) -> tuple[list[fly.Value], LazySoftmax]:
        """Those of half of a tile, and where log-sum-exps are wanted their sum before they are rounded."""
        probabilities = fly.exp2(exponents)
        if self.work.lse is not None:
            # a tree: each addition of a chain would wait for the last one
            sums = [probabilities[i] for i in range(len(probabilities))]
            while len(sums) > 2:
                sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
            total = [softmax.total[i] + part for i, part in enumerate(sums)]
            softmax = replace(softmax, total=fly.from_elements(total))
        return [self._narrow(probabilities)], softmax

    def accumulate(
        self,
        tile: fly.PipelineTile,
        output: fly.Fragment,
        v: list[list[fly.Value]],
        early: list[fly.Value],
        late: list[fly.Value],
    ) -> fly.Fragment:
        weights = fly.concat([*early, *late])
        return super().accumulate(tile, output, [[*v[0], self.ones]], [weights], [])

    def _loads(self) -> tuple[fly.MatrixLoad, ...]:
        loads: tuple[fly.MatrixLoad, ...] = fly.target().byte_loads
        return loads

    def _layouts(self) -> tuple[fly.PaddedTile, fly.PaddedTile]:
        shape = self.options.head_dim, self.options.together
        return byte_tiles.k_tile(*shape), byte_tiles.v_tile(*shape)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    # both ways to add up are f32's
    request = replace(request, static_features=replace(request.static_features, fp8_accumulate=None))
    return prepare_kernel(flash_attn_gfx950_fp8, tensors, request, Fp8Options)
