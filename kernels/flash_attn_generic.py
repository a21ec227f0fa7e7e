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

Tiles that every row sees whole take the unmasked loop; the masked loop does the rest. `tile_scheduler` says
which block computes what, for dense and packed tensors and for split keys. With `overlap`, a tile's scores are
computed while the tile before it goes through the softmax:

    S(j + 1) = Q K(j + 1)^T    and    P(j), O += P(j) V(j)    have no value in common
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.target import Target, target
from fly.errors import ShapeError
from fly.runtime.device import device_of

from .generic.block_tiles import tiles_within
from .generic.blocks import WaveRows
from .generic.operands import KeyValues, Queries, SharedRows, Tiling, column_tiles, direct_rows, padded
from .generic.tiles import TILES
from .problem.contract import HEAD_DIMS, Launch, Request, Tensors
from .problem.features import NO_FEATURES, BoundFeatures, Features
from .problem.online_softmax import OnlineSoftmax
from .work.fragments import store_lse, store_output
from .work.key_scales import KeyScales, times_keys
from .work.launch import bind_forward, heads_as_rows, split_count
from .work.score_stages import ScoreStages
from .work.tile_scheduler import BlockWork, block_work

# by target and whether weights are dropped: up to which head dimension all comparisons of a masked tile with a
# `mask_mod` come at once, each of which takes two scalar registers
AT_ONCE = {("gfx942", False): 128, ("gfx942", True): 128, ("gfx950", True): 160}


@dataclass(frozen=True)
class GenericOptions:
    """The static parameters of one build.

    Wave w owns rows w * block_m / waves and on. `vector` is the number of elements that one copy moves (16 bytes
    at most), `stages` the slots of the K and V rings; with one stage, tiles go through registers, or, if they
    `alternate`, K and V take turns with asynchronous copies. `queries` says where Q's operands stay. `overlap`
    computes scores a tile ahead. `lazy` rescales the output only when a maximum has grown a lot, `late` behind the
    tile's exponentials. `head_dim_v` is V's and the output's head dimension (None: `head_dim`). `features`: what the
    operands are; `page_size`: of keys in pages.

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
    late: bool = False
    features: Features = NO_FEATURES
    page_size: int | None = None

    def __post_init__(self) -> None:
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
        if self.late and not self.lazy:
            raise ShapeError("late is True; expected False without lazy: other rescales come first")
        if self.alternate and self.stages != 1:
            raise ShapeError(f"tiles that alternate have one stage, not {self.stages}")
        if self.overlap and self.stages < 2:
            raise ShapeError(f"overlap needs two stages or more, not {self.stages}")
        if self.overlap and self.features.block_size is not None:
            raise ShapeError("overlap needs a first tile, which a block mask's lists may not have")
        if (self.page_size is None) == ("block_table" in self.features.operands):
            raise ShapeError(f"page_size is {self.page_size}; expected one with block_table and only then")
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

    def is_scarce(self) -> bool:
        """Whether the target's scalar registers are too few, which AMD's are for these features.

        What all scores of a lane are compared with or multiplied by is narrowed then, and what dropout and the
        epilogue need is made again.
        """
        of = self.features
        drops = of.drops and (of.modifies or of.block_size is not None)
        return (drops or of.masks_every_tile) and fly.target().backend == "rocdl"

    def counts_lanes(self) -> bool:
        """Whether the epilogue counts lanes anew, for want of vector registers: of small blocks on gfx950."""
        of, dim = self.features, padded(max(self.head_dim, self.value_dim))
        small = of.block_size is not None and min(of.block_size) < 128 and not (of.modifies or of.drops)
        return small and self.causal and dim == 128 and fly.target().arch == "gfx950"

    def masks_in_parts(self) -> bool:
        """Whether a list's partial tiles are masked a column tile after the other, for want of scalar registers."""
        if self.features.block_size is None:
            return False
        dim = padded(max(self.head_dim, self.value_dim))
        has_room = dim != 224 and self.waves < 4 and not self.features.drops
        return not has_room and dim > AT_ONCE.get((fly.target().arch, self.features.drops), HEAD_DIMS[-1])


@fly.kernel
def flash_attn_generic(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *operands: fly.Operand,
    options: GenericOptions,
    folded: bool = False,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, per sequence and head.

    Tensors in the forms of `tile_scheduler`; H is a multiple of Hkv; v and out may have another head
    dimension than q and k, and k and v 8 bits where q has 16; scale_log2: softmax_scale * log2(e); operands of
    `options.features`.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    if options.daz:
        fly.flush_denormals()
    scarce = options.is_scarce()
    if scarce:
        fly.narrow_splats()
    given = options.features.bind(operands)
    work = block_work(
        (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv),
        head_dim=options.head_dim,
        head_dim_v=options.value_dim,
        causal=options.causal,
        block_m=options.block_m,
        block_n=options.block_n,
        xcds=fly.target().xcds,
        given=given,
        page_size=options.page_size,
        folded=folded,
        scarce=scarce,
    )
    with work.if_any_row():
        scales = KeyScales.of(given, work, q.shape[-2])
        scale_log2 = scales.times_head(scale_log2)
        output, softmax, rows = _attend(work, scale_log2, given.at(work), options, scales)
        inverse, row_lse = softmax.finish(given.scale(scale_log2), given.sink(work, rows.numbers))
        inverse = scales.times_values(inverse)
        view = work.late_out() if scarce else work.out
        with fly.reread_ids(lanes=True) if options.counts_lanes() else nullcontext():
            store_output(view, output.scale_rows(given.scale_kept(inverse)), rows.first, rows.count)
        if work.lse is not None:
            store_lse(work.lse, row_lse, rows.numbers, work.keys.queries)


def _attend(
    work: BlockWork, scale_log2: fly.Value, given: BoundFeatures, options: GenericOptions, scales: KeyScales
) -> tuple[fly.Fragment, OnlineSoftmax, WaveRows]:
    """O before its division by the sum, the sums and maxima, and which rows they are."""
    link = fly.chain(fly.target().mma(work.q.dtype.name))
    layout = link.layout
    mine = WaveRows.of(layout, work.first_row, options.block_m // options.waves)
    rows, row_tiles = mine.numbers, mine.count // layout.rows

    q_window = work.q.window(work.first_row, options.block_m)
    if options.asynchronous:
        arriving = SharedRows("q", link, q_window, options.block_m, options.vector)
    tiling = Tiling(options.block_n, options.stages, options.vector, options.alternate)
    listed = work.listed
    tile_number = None if listed is None else listed.tile
    value_factor = None if scales.v_keys is None else scales.v_keys.load
    tiles = KeyValues(link, work.k, work.v, tiling, int(options.overlap), tile_number, work.q.dtype, value_factor)
    ring = tiles.ring
    output = fly.Fragment.zeros(layout, row_tiles, column_tiles(link, work.v.columns, work.v))
    softmax = OnlineSoftmax.start(layout, row_tiles)
    flight = ring.start(work.tiles.first)
    queries: Queries
    if options.asynchronous:
        fly.wait(arriving.flight)
        fly.barrier()
        queries = arriving.operands(mine.offset, mine.count, keep=options.queries == "registers")
    else:
        queries = direct_rows(link, q_window, mine.offset, mine.count)

    scale, scarce = given.scale(scale_log2), options.is_scarce()

    stages = ScoreStages(work, given, scale_log2, rows, options.block_n)

    def tile_of(j: Any) -> Any:
        return j if listed is None else listed.tile(j)

    def featured(scores: fly.Fragment, j: Any, masked: bool, bias: fly.Fragment | None) -> fly.Fragment:
        tile = tile_of(j)
        scores = times_keys(scores, scales.k_keys, tile * options.block_n)
        scores = stages.modify(scores, tile, bias)
        return stages.mask(scores, tile, masked, in_parts=options.masks_in_parts())

    def take_in(
        scores: fly.Fragment, j: Any, v_tile: fly.SharedTile, state: Sequence[Any], masked: bool
    ) -> tuple[fly.Fragment, OnlineSoftmax]:
        output, softmax = state
        masked = masked or given.features.may_hide
        softmax, probabilities, output = softmax.update(
            scores, output, scale, masked=masked, lazy=options.lazy, late=options.late
        )
        dropout = given.dropout(work, remade=scarce)
        if dropout is not None:
            probabilities = dropout.drop(probabilities, mine.first, tile_of(j) * options.block_n, scarce)
        return tiles.accumulate(output, probabilities, v_tile), softmax

    def step(j: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
        *before, flight = state
        (k_tile, v_tile), flight = ring.advance(j, flight)
        bias = stages.bias(lambda: tile_of(j))
        scores = tiles.scores(queries, row_tiles, k_tile)
        flight = ring.halfway(j, flight)
        return *take_in(featured(scores, j, masked, bias), j, v_tile, before, masked), flight

    def step_ahead(j: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
        *before, scores, flight = state
        (k_tile, v_tile), flight = ring.advance(j, flight)
        bias = stages.bias(lambda: tile_of(j))
        following = featured(tiles.scores(queries, row_tiles, k_tile), j, masked, bias)
        return *take_in(scores, j - 1, v_tile, before, masked), following, flight

    first, full, last = work.tiles.first, work.tiles.whole_end, work.tiles.end
    if given.features.mask_mod is not None and listed is None:
        full = first
    state: tuple[Any, ...] = (output, softmax, flight)
    if options.overlap:
        # the first tile's scores come before the loops, and where there is no tile, they are all masked
        (k_tile, _), flight = ring.advance(first, flight)
        bias = stages.bias(lambda: tile_of(first))
        scores = featured(tiles.scores(queries, row_tiles, k_tile), first, True, bias)
        state = (output, softmax, scores, flight)
        first, step = first + 1, step_ahead
        full, last = fly.maximum(full, first), fly.maximum(last, first)
    if given.features.windowed and listed is None:
        whole = fly.maximum(work.tiles.whole_from, first)
        full = fly.maximum(full, whole)
        for j, carried in (loop := fly.range(first, whole, carry=state)):
            loop.next(step(j, carried, masked=True))
        first, state = whole, loop.results
    for j, carried in (loop := fly.range(first, full, carry=state)):
        loop.next(step(j, carried, masked=False))
    for j, carried in (loop := fly.range(full, last, carry=loop.results)):
        loop.next(step(j, carried, masked=True))
    output, softmax, *ahead, flight = loop.results
    if options.overlap:
        (_, v_tile), _ = ring.advance(last, flight)
        output, softmax = take_in(ahead[0], last - 1, v_tile, (output, softmax), masked=True)
    return output, softmax, mine


def _tiles(block_m: int, block_n: int, waves: int, stages: int, **more: Any) -> Mapping[str, Any]:
    return {"block_m": block_m, "block_n": block_n, "waves": waves, "stages": stages, **more}


# NVIDIA without asynchronous copies: what is in flight takes registers too
UNALIGNED_TILES: Mapping[int, Mapping[str, Any]] = {
    **dict.fromkeys((32, 64, 96, 128), _tiles(64, 64, 4, 1)),
    **dict.fromkeys((160, 192, 224, 256), _tiles(64, 32, 4, 1)),
}


# NVIDIA where what features take leaves `ptxas` no registers: tiles of fewer keys, O rescaled later or in a branch
CROWDED: Mapping[int, Mapping[str, Any]] = {
    96: {"block_n": 32, "min_blocks": 2},
    128: {"late": True},
    256: {"lazy": True},
}


@dataclass(frozen=True)
class Build:
    """Of a call of D=256 on Hopper, what decides what spills."""

    features: Features
    causal: bool
    packed: bool

    @property
    def has_limits(self) -> bool:
        """Whether rows or tiles have limits of their own beside causality: packed builds with them have room."""
        of = self.features
        return of.windowed or of.masks_every_tile or bool({"seqused_q", "seqused_kv"} & {*of.operands})

    @property
    def listed(self) -> bool:
        """Whether there is a block mask."""
        return self.features.block_size is not None

    @property
    def caps_in_window(self) -> bool:
        """Whether there are a softcap and a window."""
        return self.features.windowed and "softcap" in self.features.operands


# in order, the first that a build has; others are as `CROWDED` says. Packed, 48 keys take 0.8 of 64's time (H100)
CROWDED_ON_HOPPER: tuple[tuple[Callable[[Build], bool], Mapping[str, Any]], ...] = (
    (lambda b: b.packed and not b.has_limits and b.features.drops, {"block_n": 48}),
    (lambda b: b.packed and not b.has_limits, {"block_n": 48, "lazy": True}),
    (lambda b: b.causal and b.caps_in_window and not b.packed, {"block_n": 48, "lazy": True}),
    # their tiles divide blocks
    (lambda b: b.listed and b.features.drops and not b.causal, {"block_n": 32, "lazy": True}),
    (lambda b: b.listed and b.causal, {"lazy": True}),
)


def _crowded(target: Target, dim: int, features: Features, causal: bool, packed: bool) -> Mapping[str, Any]:
    """What a build has instead where it spills. Without features only D=256 does, before Hopper; pages have room."""
    if target.backend != "nvvm" or "block_table" in features.operands:
        return {}
    # rows of batch-invariant calls are added up alike, packed or not
    if dim == 256 and target.hopper and not features.invariant:
        build = Build(features, causal, packed)
        found = next((tiles for has, tiles in CROWDED_ON_HOPPER if has(build)), None)
        if found is not None:
            return found
    takes_more = features.per_score or features.drops or features.windowed
    return CROWDED.get(dim, {}) if takes_more or (dim == 256 and not target.hopper) else {}


def options_for(
    target: Target,
    head_dim: int,
    causal: bool,
    alignment: int,
    tuning: Mapping[str, Any] | None = None,
    head_dim_v: int | None = None,
    features: Features = NO_FEATURES,
    page_size: int | None = None,
    converts: bool = False,
    packed: bool = False,
) -> GenericOptions:
    """The build for a target: tile sizes, and copies as wide as q's, k's and v's `alignment` (bytes) allows.

    `converts`: k and v have 8 bits, and q has 16. `packed`: sequences are.

    The table is by backend and padded head dimension (the larger one of q's and v's), full and causal alike. AMD's
    tiles go through registers; two waves a SIMD have 256 of them each, one has 512.
    """
    tuning = tuning or {}
    dim = padded(max(head_dim, head_dim_v or head_dim))
    tiles = dict(TILES[target.backend, dim])
    asynchronous = tiles["stages"] > 1 or tiles.get("alternate", False)
    if asynchronous and converts:
        # what is converted on its way goes through registers
        tiles = dict(UNALIGNED_TILES[dim])
    elif asynchronous and alignment in target.async_copy_bytes:
        tiles |= {"vector": alignment // 2, **_crowded(target, dim, features, causal, packed)}
    elif asynchronous:
        # no asynchronous copy is that narrow: 16-byte pieces go through registers, loaded in parts
        tiles = dict(UNALIGNED_TILES[dim])
    if "waves_per_eu" in tuning:
        tiles["waves_per_eu"] = tuning["waves_per_eu"]
    if features.block_size is not None:
        names = ("block_m", "block_n", "waves")
        given = (tiles["block_m"], tiles["block_n"], tiles["waves"])
        tiles |= zip(names, tiles_within(features.block_size, given, flash_attn_generic.name), strict=True)
    if features.invariant:
        tiles |= {"lazy": False, "late": False}  # lazy rows of a wave are rescaled together
    tiles["daz"] = bool(tuning.get("daz"))
    return GenericOptions(head_dim, causal, head_dim_v=head_dim_v, features=features, page_size=page_size, **tiles)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`.

    One build serves equal and different lengths: masks follow the lengths at run time.

    Raises:
        UnsupportedError: rows of a tensor are 2**31 bytes or more apart within one tile.
    """
    tensors, request = heads_as_rows(tensors, request)
    description = target(device_of(tensors["q"].device).target)
    options = options_for(
        description,
        request.head_dim,
        request.causal,
        request.alignment,
        request.tuning,
        request.head_dim_v,
        request.static_features,
        request.page_size,
        "fp8_cache" in request.features,
        "packed" in request.features,
    )
    return bind_forward(
        flash_attn_generic,
        tensors,
        request,
        block_m=options.block_m,
        block_n=options.block_n,
        threads=options.waves * description.wave_size,
        statics={"options": options},
        splits=split_count(request, tensors["q"].device, options.block_m, options.block_n),
    )
