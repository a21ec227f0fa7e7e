"""Flash attention forward for Hopper with 16-bit queries and 8-bit keys and values, as caches have them.

The pipeline of `flash_attn_sm90`, with one more warpgroup: K and V are e4m3 in memory and on their way, half as many
bytes, and the converter (`sm90/converter.py`) makes of their tiles the 16-bit tiles that consumers multiply with.

| scale | is applied |
|---|---|
| of K, by head | to the scale of the softmax |
| of K, by key | to scores, in f32, from shared memory |
| of V, by head | to the output's rows, in f32 |
| of V, by key | to V's tile, before it is rounded to 16 bits |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import fly
from fly.backends.nvvm.wgmma import PanelTile, WarpgroupAtom
from fly.errors import ShapeError
from fly.ir.dtypes import dtype as dtype_of
from fly.runtime.device import device_of

from .flash_attn_sm90 import Consumer, run_block
from .problem.contract import Launch, Request, Tensors
from .problem.online_softmax import Growth, OnlineSoftmax, margin_of
from .sm90.builds import Key, Sm90Options, build_for, keys_seen
from .sm90.converter import PIECE, ROWS, Conversion, Converter, first_scale
from .sm90.launch import bind_build, typical_lengths
from .sm90.producer import Buffers, Producer
from .sm90.schedule import Schedule
from .work.key_scales import of_head, scaled, times_columns
from .work.score_stages import OfHead
from .work.tile_scheduler import Work

HEAD_DIMS = range(PIECE, 256 + 1, PIECE)
TWO_CONVERTERS = 128  # columns of the output, up to which a build for decoding may have two

# Like kernels/sm90/tiles.py. Beside a converter, three consumers have too few registers, and two for more than 192
# columns of the output. Those of one consumer and of 192 columns were not measured.
TILES: dict[Key, Mapping[str, Any]] = {
    (dim, dim, causal, consumers, None): fields
    for causal in (False, True)
    for dim, consumers, fields in (
        (64, 2, {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "always"}),
        (64, 1, {"block_n": 128, "stages": 2, "q_stages": 2, "ping_pong": False, "rescale": "always", "cost": 0.6}),
        (128, 2, {"block_n": 128, "stages": 2, "q_stages": 1, "rescale": "always"}),
        (128, 1, {"block_n": 128, "stages": 2, "q_stages": 1, "ping_pong": False, "rescale": "always", "cost": 0.6}),
        (192, 2, {"block_n": 64, "stages": 2, "q_stages": 1, "rescale": "always"}),
        (256, 1, {"block_n": 64, "stages": 2, "q_stages": 1, "ping_pong": False, "rescale": "always"}),
    )
}
_DECODING: Mapping[int, Mapping[str, Any]] = {
    64: {"block_n": 128, "stages": 4, "q_stages": 2, "rescale": "always"},
    128: {"block_n": 128, "stages": 2, "q_stages": 1, "rescale": "always"},
    256: {"block_n": 64, "stages": 1, "q_stages": 1, "rescale": "rows"},
}
DECODING = {dim: _DECODING[min(wide for wide in _DECODING if wide >= dim)] for dim in HEAD_DIMS}


@dataclass(frozen=True)
class CacheOptions(Sm90Options):
    """A build on 8-bit keys and values: `slots` for each of K's and V's 16-bit tiles, `stages` for those of 8 bits.

    `converters`: warpgroups that convert, one for both or one for each. `key_scales`, `value_scales`: whether scales
    of K and of V are by key.
    """

    slots: int = 2
    converters: int = 1
    key_scales: bool = False
    value_scales: bool = False
    decoding: ClassVar[Mapping[int, Mapping[str, Any]]] = DECODING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.consumers > 2:
            raise ShapeError(f"consumers is {self.consumers}; expected 1 or 2 beside a converter")
        if self.block_n not in ROWS:
            raise ShapeError(f"block_n is {self.block_n}; expected one of {', '.join(map(str, ROWS))}")

    @property
    def helpers(self) -> int:
        return self.converters

    @property
    def registers(self) -> tuple[int, int]:
        """As of `Sm90Options`; of four warpgroups all have 512."""
        if self.consumers == 2:
            return (24 if self.page_size is None else 40), 208
        return super().registers if self.converters == 1 else ((40 if self.page_size is None else 72), 240)

    @property
    def converter_registers(self) -> int:
        """A thread's of a converter."""
        producer, consumer = self.registers
        return min(144, (512 - producer - self.consumers * consumer) // self.converters // 8 * 8)

    def value_dtype(self, dtype: fly.DType) -> fly.DType:
        """Of V's 16-bit tiles and of probabilities, for queries of a `dtype`.

        f16 has all numbers of e4m3 too, and converting them is one instruction for two; scaled ones may leave its
        range.
        """
        return dtype if self.value_scales else fly.f16

    @property
    def raw_key_tile(self) -> PanelTile:
        """Of K as it arrives."""
        return PanelTile.covering(self.block_n, self.head_dim, 1)

    @property
    def raw_tile(self) -> PanelTile:
        return PanelTile.covering(self.block_n, self.head_dim_v, 1)

    @property
    def k_stages(self) -> int:
        return self.slots

    @property
    def v_stages(self) -> int:
        return self.slots

    @property
    def scales_by_key(self) -> bool:
        return self.key_scales

    @property
    def loaded_bytes(self) -> int:
        return self.block_n * (self.head_dim + self.head_dim_v)


@fly.kernel
def flash_attn_sm90_fp8_cache(
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
    options: CacheOptions,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, as `flash_attn_sm90`.

    q: 16-bit, k, v: e4m3 maps; among the operands k_descale and v_descale, see `work/key_scales.py`.
    """
    tensors = (out, lse, cu_seqlens_q, cu_seqlens_kv, counters, whole_out, whole_lse)
    sizes, dtype = (seq_len_kv, group, section), dtype_of(q.spec.dtype)

    def converter(
        schedule: Schedule, buffers: Buffers, options: CacheOptions, barrier: int, number: int
    ) -> Converter:
        assert buffers.raw_k is not None and buffers.raw_v is not None
        of_k = Conversion("k_descale", buffers.raw_k, buffers.k, options.head_dim, dtype)
        of_v = Conversion("v_descale", buffers.raw_v, buffers.v, options.head_dim_v, options.value_dtype(dtype))
        mine = (of_k, of_v) if options.helpers == 1 else ((of_k, of_v)[number],)
        return Converter(schedule, buffers, mine, options.converter_registers)

    run_block((q, k, v), tensors, sizes, scale_log2, operands, options, Producer, CacheConsumer, converter)


class CacheConsumer(Consumer):
    """A consumer of tiles that were converted, and whose scales are not applied yet."""

    options: CacheOptions

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.weight_dtype = self.options.value_dtype(self.dtype)
        self.output_atom = WarpgroupAtom(self.options.head_dim_v, self.weight_dtype.name)
        self.output_layout = fly.AccumulatorLayout(self.output_atom, "m")

    def _narrow(self, probabilities: fly.Fragment) -> tuple[fly.Value, ...]:
        narrow = probabilities.tiles[0][0].to(self.weight_dtype)
        return tuple(narrow[i : i + 8] for i in range(0, len(narrow), 8))

    def _of_head(self, work: Work) -> OfHead:
        """With K's scale in that of the head's scores."""
        return replace(super()._of_head(work), scale_log2=scaled(self.scale_log2, self._scale(work, "k_descale")))

    def _scale(self, work: Work, name: str) -> fly.Value | None:
        """The scale of the work's head, if there is one."""
        return of_head(self.given.get(name), work.batch, work.head, self.schedule.heads)

    def _beside(self, work: Work, j: Any, k_at: Any) -> fly.Value | None:
        """Where the scales of the tile's keys begin, if there are such: of the slot that is released meanwhile."""
        return first_scale(self.buffers, k_at) if self.options.key_scales else None

    def _modified(self, work: Work, j: Any, scores: fly.Value, of_head: OfHead, beside: Any = None) -> fly.Fragment:
        if beside is not None:
            assert self.buffers.scales is not None
            place = self.buffers.scales.at(beside)
            factors = fly.ColumnVector.load_shared(self.score_layout, 1, place, fly.f32)
            scores = times_columns(fly.Fragment(self.score_layout, ((scores,),)), factors).tiles[0][0]
        return super()._modified(work, j, scores, of_head)

    def _advance(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        return softmax.advance(scores, of_head.scale, masked=masked)

    def _advance_lazily(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[fly.Fragment, Growth]:
        scale, rescale = of_head.scale, self.options.rescale
        margin = margin_of(scale) if rescale == "rows" else None
        return softmax.advance_lazily(scores, scale, margin, masked=masked, wave=rescale == "wave")

    def _finish(self, work: Work, softmax: OnlineSoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        inverse, lse = softmax.finish(self._of_head(work).scale, self.given.sink(self.place(work)))
        factor = self._scale(work, "v_descale")
        return inverse if factor is None else inverse.map(lambda x: x * factor), lse


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    units = device_of(tensors["q"].device).compute_units
    seen = replace(request, seq_len_kv=keys_seen(request, tensors))
    options, splits = build_for(seen, units, typical_lengths(tensors, request), table=TILES, kind=CacheOptions)
    assert isinstance(options, CacheOptions)
    of_k, of_v = (by_key_of(tensors.get(name)) for name in ("k_descale", "v_descale"))
    # scales by key make decoding's converter the slower of the two; outputs of more columns have no registers for two
    both = options.takes_late and (of_k or of_v) and options.head_dim_v <= TWO_CONVERTERS
    options = replace(options, key_scales=of_k, value_scales=of_v, converters=1 + both)
    return bind_build(flash_attn_sm90_fp8_cache, tensors, request, options, splits).launch()


def by_key_of(scales: Any) -> bool:
    """Whether a call's scales are by key."""
    return scales is not None and scales.dim() == 3
