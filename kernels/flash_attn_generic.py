"""Flash attention forward for every target: one algorithm over the target's matrix instructions and loads.

Dao et al., "FlashAttention-2" (2023). One block computes `block_m` query rows of one head; keys and values come
in tiles of `block_n`:

    S = Q K^T            accumulators: a lane owns whole rows or row parts (`fly.chain`)
    P = exp2(scale * S - scale * max), in f32; rounded to 16 bit, its registers are operands as they are
    O = O * factor + P V

| what | where |
|---|---|
| Q | registers, loaded once; or shared memory, where accumulators leave no room |
| K, V | shared memory, swizzled, filled ahead (`fly.TileRing`) or by turns (`fly.AlternatingTiles`) |
| V's operand | transposing load where the target has one that fits, else stored transposed |
| S, P, O, max, sum | registers, f32 |

With `overlap`, a tile's scores are computed while the tile before it goes through the softmax:

    S(j + 1) = Q K(j + 1)^T    and    P(j), O += P(j) V(j)    have no value in common

Grid: (query blocks, query heads, batch). Causal blocks run longest first. Tiles that every row sees whole take
the unmasked loop; the masked loop does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.target import Target, target
from fly.errors import ShapeError, UnsupportedError
from fly.runtime.arguments import describe_all
from fly.runtime.compile import compile_kernel
from fly.runtime.device import device_for
from fly.runtime.prepared import bind
from kernels.attention_operands import KeyValues, KeyValueTiling, SharedQueries, direct_queries
from kernels.attention_tiles import group_size, store_lse, store_output
from kernels.mask import KeyRange
from kernels.online_softmax import OnlineSoftmax

HEAD_DIMS = range(32, 257, 8)


@dataclass(frozen=True)
class GenericOptions:
    """The static parameters of one build.

    Wave w owns rows w * block_m / waves and on. `vector` is the number of elements that one copy moves (16 bytes
    at most), `stages` the slots of the K and V rings; with one stage, tiles go through registers, or, if they
    `alternate`, K and V take turns with asynchronous copies. `queries` says where Q's operands stay. `overlap`
    computes scores a tile ahead. `lazy` rescales the output only when a maximum has grown a lot. `head_dim_v` is
    V's and the output's head dimension (None: `head_dim`).

    Raises:
        ShapeError: a value that no build has, or some that do not go together.
    """

    head_dim: int
    causal: bool
    block_m: int
    block_n: int
    waves: int
    stages: int
    vector: int = 8
    waves_per_eu: int | None = None
    min_blocks: int | None = None
    daz: bool = False
    head_dim_v: int | None = None
    queries: str = "registers"
    alternate: bool = False
    overlap: bool = False
    lazy: bool = False

    def __post_init__(self):
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value not in HEAD_DIMS and (name, value) != ("head_dim_v", None):
                accepted = f"a multiple of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
                raise ShapeError(f"{name} is {value}; expected {accepted}")
        if self.vector not in (1, 2, 4, 8):
            raise ShapeError(f"vector is {self.vector}; expected 1, 2, 4 or 8 elements")
        if self.block_m % self.waves:
            raise ShapeError(f"block_m {self.block_m} does not divide into {self.waves} waves")
        if self.queries not in ("registers", "shared"):
            raise ShapeError(f"queries is {self.queries!r}; expected 'registers' or 'shared'")
        if self.alternate and self.stages != 1:
            raise ShapeError(f"tiles that alternate have one stage, not {self.stages}")
        if self.overlap and self.stages < 2:
            raise ShapeError(f"overlap needs two stages or more, not {self.stages}")
        if self.queries == "shared" and not self.asynchronous:
            raise ShapeError("queries in shared memory need asynchronous copies: two stages or more, or alternate")

    @property
    def asynchronous(self) -> bool:
        """Whether tiles go past the registers."""
        return self.stages > 1 or self.alternate

    @property
    def value_dim(self) -> int:
        """Head dimension of V and of the output."""
        return self.head_dim_v or self.head_dim


@fly.kernel
def flash_attn_generic(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    scale_log2: fly.f32,
    *,
    options: GenericOptions,
):
    """out = softmax(softmax_scale * q k^T) v, per batch and head.

    q: (B, Sq, H, D); k: (B, Skv, Hkv, D); v: (B, Skv, Hkv, Dv) with H a multiple of Hkv; out: (B, Sq, H, Dv);
    lse: (B, H, Sq) f32 or None; scale_log2: softmax_scale * log2(e).
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    if options.daz:
        fly.flush_denormals()
    link = fly.chain(fly.target().mma(q.dtype.name))
    layout = link.layout
    wave_rows = options.block_m // options.waves
    row_tiles = wave_rows // layout.rows

    head, batch = fly.block_id.y, fly.block_id.z
    kv_head = head // group_size(q, k)
    block = fly.grid_dim.x - 1 - fly.block_id.x if options.causal else fly.block_id.x
    first_row = block * options.block_m
    wave_offset = fly.wave_id() * wave_rows
    wave_row = first_row + wave_offset
    keys = KeyRange(q.shape[1], k.shape[1], options.causal)

    q_rows = q[batch, :, head, :].rows(options.head_dim)
    k_rows = k[batch, :, kv_head, :].rows(options.head_dim)
    v_rows = v[batch, :, kv_head, :].rows(options.value_dim)
    if options.asynchronous:
        arriving = SharedQueries(link, q_rows, block, options.block_m, options.vector)
    else:
        queries = direct_queries(link, q_rows.window(first_row, options.block_m), wave_offset, wave_rows)
    tiling = KeyValueTiling(
        options.block_n, options.stages, options.vector, options.alternate, lag=int(options.overlap)
    )
    tiles = KeyValues(link, k_rows, v_rows, tiling)
    ring = tiles.ring

    rows = fly.RowVector.full(layout, row_tiles, 0.0).rows().map(lambda r: r + wave_row)
    full_tiles, all_tiles = keys.tiles(first_row, options.block_m, options.block_n)

    def scores_of(j: Any, k_tile: fly.SharedTile, masked: bool) -> fly.Fragment:
        scores = tiles.scores(queries, row_tiles, k_tile)
        return keys.apply(scores, rows, j * options.block_n) if masked else scores

    def take(
        scores: fly.Fragment, v_tile: fly.SharedTile, output: Any, softmax: OnlineSoftmax, masked: bool
    ) -> tuple:
        softmax, probabilities, output = softmax.update(scores, output, scale_log2, masked=masked, lazy=options.lazy)
        return tiles.accumulate(output, probabilities, v_tile), softmax

    def step(j: Any, state: tuple, masked: bool) -> tuple:
        output, softmax, flight = state
        (k_tile, v_tile), flight = ring.advance(j, flight)
        scores = tiles.scores(queries, row_tiles, k_tile)
        flight = ring.halfway(j, flight)
        if masked:
            scores = keys.apply(scores, rows, j * options.block_n)
        return *take(scores, v_tile, output, softmax, masked), flight

    def step_ahead(j: Any, state: tuple, masked: bool) -> tuple:
        output, softmax, flight, scores = state
        (k_tile, v_tile), flight = ring.advance(j, flight)
        following = scores_of(j, k_tile, masked)
        return *take(scores, v_tile, output, softmax, masked), flight, following

    start = (
        fly.Fragment.zeros(layout, row_tiles, tiles.dim_tiles),
        OnlineSoftmax.start(layout, row_tiles),
        ring.start(fly.i32(0)),
    )
    if options.asynchronous:
        queries = arriving.arrive(wave_offset, wave_rows, keep=options.queries == "registers")
    first_tile: Any = 0
    if options.overlap:
        (k_tile, _), flight = ring.advance(fly.i32(0), start[2])
        start = (*start[:2], flight, scores_of(0, k_tile, True))
        first_tile, step = 1, step_ahead
        all_tiles = fly.maximum(all_tiles, 1)
    for j, state in (loop := fly.range(first_tile, full_tiles, carry=start)):
        loop.next(step(j, state, masked=False))
    for j, state in (loop := fly.range(fly.maximum(full_tiles, first_tile), all_tiles, carry=loop.results)):
        loop.next(step(j, state, masked=True))
    output, softmax, flight, *ahead = loop.results
    if options.overlap:
        (_, v_tile), _ = ring.advance(all_tiles, flight)
        output, softmax = take(ahead[0], v_tile, output, softmax, masked=True)

    inverse, row_lse = softmax.finish(scale_log2)
    store_output(out[batch, :, head, :].rows(options.value_dim), output.scale_rows(inverse), wave_row, wave_rows)
    if lse is not None:
        store_lse(lse[batch, head, :], row_lse, rows, keys.queries)


# (block_m, block_n, waves, stages) by backend, head dim and causality; AMD tiles go through registers
_TILES = {
    ("rocdl", 64, False): (128, 64, 4, 1),
    ("rocdl", 64, True): (128, 64, 4, 1),
    ("rocdl", 128, False): (128, 64, 4, 1),
    ("rocdl", 128, True): (128, 64, 4, 1),
    ("nvvm", 64, False): (128, 64, 4, 2),
    ("nvvm", 64, True): (128, 64, 4, 2),
    ("nvvm", 128, False): (64, 64, 4, 2),
    ("nvvm", 128, True): (64, 64, 4, 2),
}


def options_for(
    target: Target, head_dim: int, causal: bool, alignment: int, tuning: Mapping[str, Any] | None = None
) -> GenericOptions:
    """The build for a target: tile sizes, and copies as wide as K's and V's `alignment` (bytes) allows."""
    tuning = tuning or {}
    block_m, block_n, waves, stages = _TILES[target.backend, head_dim, causal]
    vector = 8
    if stages > 1 and alignment in target.async_copy_bytes:
        vector = alignment // 2
    elif stages > 1:
        stages = 1  # no asynchronous copy is that narrow: 16-byte pieces go through registers, loaded in parts
    waves_per_eu = tuning.get("waves_per_eu") or (2 if target.backend == "rocdl" else None)
    return GenericOptions(
        head_dim, causal, block_m, block_n, waves, stages, vector, waves_per_eu, daz=bool(tuning.get("daz"))
    )


def prepare(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    causal: bool,
    cross_seqlen: bool,
    tuning: Mapping[str, Any],
) -> Callable[..., None]:
    """Compile and bind a launch for these tensors; returns `launch(q, k, v, out, lse, stream)`.

    The launch takes other tensors of the same shapes, strides, dtypes, device and alignment. One build serves
    equal and different lengths (`cross_seqlen`): masks follow the lengths at run time.

    Raises:
        UnsupportedError: rows of K or V are 2**31 bytes or more apart within one tile.
    """
    del cross_seqlen
    batch, seq_len, heads, head_dim = q.shape
    arguments = describe_all(flash_attn_generic.signature, (q, k, v, out, lse, 0.0))
    (_, k_spec, v_spec, *_), place = [a.spec for a in arguments[0]], arguments[1]
    description = target(device_for(place).target)
    options = options_for(description, head_dim, causal, min(k_spec.alignment, v_spec.alignment), tuning)
    widest = max(t.stride(1) * t.element_size() for t in (q, k, v, out))
    if widest * max(options.block_m, options.block_n) >= 2**31:
        raise UnsupportedError(
            f"rows of q, k, v or out are {widest} bytes apart; the generic kernel on {description.arch} takes less "
            f"than {2**31 // max(options.block_m, options.block_n)}: make the tensors contiguous"
        )
    grid = (-(-seq_len // options.block_m), heads, batch)
    block = options.waves * description.wave_size
    scale_log2 = softmax_scale * math.log2(math.e)
    prepared = bind(
        flash_attn_generic, grid, block, (q, k, v, out, lse, scale_log2), {"options": options}, compile_kernel
    )

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, stream: Any) -> None:
        if lse is None:
            prepared(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), stream=stream)
        else:
            prepared(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), stream=stream)

    return launch
