"""Flash attention forward for gfx950 on 8-bit floats: `flash_attn_gfx950`, with e4m3 products.

Q, K and V are e4m3, out is bf16. What differs from 16 bits:

| what | why |
|---|---|
| an operand is 16 bytes a lane, for two instructions of k = 16 | LDS reads of K stay 16 bytes wide, half as many |
| V is read by `ds_read_b64_tr_b8` | it turns 8 keys by 16 head dimensions at a time |
| P is 2^8 exp(score - max) | e4m3 holds 2^-9 to 448: probabilities from 2^-17 on do not vanish |
| no lazy rescale: one wherever a maximum grew | P would pass 448; and the largest of a row is then exact |
| sums are of P before it is rounded | log-sum-exps are as exact as in 16 bits; rounding errors of P have no sign |

`q_descale * k_descale` of a sequence and key head multiplies scores with the softmax's scale, `v_descale` the output.
"""

from __future__ import annotations

from dataclasses import replace

import fly
from fly.backends.rocdl.intrinsics import cvt_pk_fp8
from fly.errors import ShapeError

from .flash_attn_gfx950 import Tiles, attend, prepare_kernel
from .gfx950.options import BLOCK_M, BLOCK_N, DualWaveOptions
from .problem.catalogue import DESCALES
from .problem.contract import Launch, Request, Tensors
from .problem.lazy_softmax import LazySoftmax
from .work.fragments import group_size
from .work.tile_scheduler import block_work

OFFSET = 8.0  # probabilities are 2**OFFSET times what they are, below e4m3's largest number, 448
LEAST_SCALE = 1e-30  # a margin is divided by the scale


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
    options: DualWaveOptions,
    folded: bool = False,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, as `flash_attn_gfx950` without packed sequences, at D=128.

    operands: q_descale, k_descale, v_descale or some of them, (B, Hkv) f32.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu)
    if options.daz:
        fly.flush_denormals()
    if options.head_dim != 128:
        raise ShapeError(f"head_dim is {options.head_dim}; the gfx950 kernel of 8-bit floats takes 128")
    given = options.features.bind(operands)
    work = block_work(
        (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv),
        head_dim=options.head_dim,
        causal=options.causal,
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        xcds=fly.target().xcds,
        given=given,
        folded=folded,
    )
    head = work.head // group_size(q, k)
    asked = options.features.operands
    scales = {n: fly.first_lane(given.get(n).load(work.batch, head)) for n in DESCALES if n in asked}
    scale_log2 = scale_log2 * scales.get("q_descale", 1.0) * scales.get("k_descale", 1.0)
    given = replace(given, operands=scales)
    with work.if_any_row():
        attend(work, fly.maximum(scale_log2, LEAST_SCALE), given, debug_counts, options, Fp8Tiles)


class Fp8Tiles(Tiles):
    """The stages on 8-bit tiles; `given` has v_descale as a number."""

    atom = (32, 32, 32)
    threshold = 0.0
    measured_shift = OFFSET - 2.0**-21

    def finish(self, softmax: LazySoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        inverse, lse = super().finish(softmax)
        scale = self.given.get("v_descale")
        return (inverse if scale is None else inverse.map(lambda x: x * scale)), lse

    def _loads(self) -> tuple[fly.MatrixLoad, ...]:
        loads: tuple[fly.MatrixLoad, ...] = fly.target().byte_loads
        return loads

    def _layouts(self) -> tuple[fly.PaddedTile, fly.PaddedTile]:
        return k_tile(), v_tile()

    def _narrow(self, probabilities: fly.Value) -> fly.Value:
        return cvt_pk_fp8(probabilities)

    def _shift(self, maximum: fly.Value) -> fly.Value:
        return OFFSET - maximum * self.scale


def k_tile() -> fly.PaddedTile:
    """K in LDS: 8 lines of 1024 bytes with 16 of padding; 8 neighbouring rows are in 8 lines.

    Those start in 8 different runs of 16 bytes of 128, and the next 8 rows in the other half of 256 bytes.
    """
    return fly.PaddedTile(fly.Layout(((8, 8), 128), ((1024, 128), 1)), 1024, 16, element_bytes=1)


def v_tile() -> fly.PaddedTile:
    """V in LDS: as K, with odd 16-byte pieces of a row 128 bytes from the even ones.

    Rows 0-3 and 8-11 (from each 4), which 16 lanes turn, start in 8 different runs of 16 bytes of 128; the pieces
    that the halves of 32 lanes read are in different halves of 256 bytes.
    """
    order = fly.Layout(((4, 2, 2, 4), (16, 2, 4)), ((1024, 64, 4096, 256), (1, 128, 16)))
    return fly.PaddedTile(order, 1024, 16, element_bytes=1)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    return prepare_kernel(flash_attn_gfx950_fp8, tensors, request)
