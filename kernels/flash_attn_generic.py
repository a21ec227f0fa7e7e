"""Flash attention forward for every target: one algorithm over the target's matrix instructions and loads.

Dao et al., "FlashAttention-2" (2023). One block computes `block_m` query rows of one head; keys and values come
in tiles of `block_n`:

    S = Q K^T            accumulators: a lane owns whole rows or row parts (`fly.chain`)
    P = exp2(scale * S - scale * max), in f32; rounded to 16 bit, its registers are operands as they are
    O = O * factor + P V

| what | where |
|---|---|
| Q | registers, loaded once |
| K, V | shared memory, swizzled, filled ahead by `fly.TileRing` |
| V's operand | transposing load where the target has one that fits, else stored transposed |
| S, P, O, max, sum | registers, f32 |

Tiles that every row sees whole take the unmasked loop; the masked loop does the rest. `kernels.tile_scheduler` says
which block computes what, for dense and packed tensors and for split keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fly
from fly.backends.target import Target, target
from fly.errors import ShapeError
from kernels.attention_launch import bind_forward, split_count
from kernels.attention_tiles import load_queries, product, store_lse, store_output
from kernels.dispatch import Launch, Request, Tensors, target_of
from kernels.online_softmax import OnlineSoftmax
from kernels.tile_scheduler import Work, block_work


@dataclass(frozen=True)
class GenericOptions:
    """The static parameters of one build.

    `vector` is the number of elements that one copy moves (16 bytes at most), `stages` the slots of the K and V
    rings; with one stage, tiles go through registers.
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

    def __post_init__(self):
        if self.head_dim not in (64, 128):
            raise ShapeError(f"head_dim is {self.head_dim}; expected 64 or 128")
        if self.vector not in (1, 2, 4, 8):
            raise ShapeError(f"vector is {self.vector}; expected 1, 2, 4 or 8 elements")
        if self.block_m % self.waves:
            raise ShapeError(f"block_m {self.block_m} does not divide into {self.waves} waves")


@fly.kernel
def flash_attn_generic(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    scale_log2: fly.f32,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *,
    options: GenericOptions,
):
    """out = softmax(softmax_scale * q k^T) v, per sequence and head.

    Tensors of the dense, packed or split form of `kernels.tile_scheduler`; H is a multiple of Hkv; scale_log2:
    softmax_scale * log2(e). Wave w owns rows w * block_m / waves and on.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    if options.daz:
        fly.flush_denormals()
    work = block_work(
        (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv),
        head_dim=options.head_dim,
        causal=options.causal,
        block_m=options.block_m,
        block_n=options.block_n,
    )
    with work.if_any_row():
        _attend(work, scale_log2, options)


def _attend(work: Work, scale_log2: fly.Value, options: GenericOptions) -> None:
    link = fly.chain(fly.target().mma(work.q.dtype.name))
    layout, depth = link.layout, link.atom.k
    wave_rows = options.block_m // options.waves
    row_tiles, key_tiles = wave_rows // layout.rows, options.block_n // layout.columns
    dim_tiles, dim_steps, key_steps = (
        options.head_dim // layout.columns,
        options.head_dim // depth,
        options.block_n // depth,
    )
    wave_offset = fly.wave_id() * wave_rows
    wave_row = work.first_row + wave_offset
    keys = work.keys

    q_window = work.q.window(work.first_row, options.block_m)
    queries = load_queries(link, q_window, wave_offset, row_tiles, dim_steps)
    ring, k_loader, v_loader, v_place = _operands(link, work.k, work.v, options)
    rows = fly.RowVector.full(layout, row_tiles, 0.0).rows().map(lambda r: r + wave_row)

    def step(j: Any, state: tuple, masked: bool) -> tuple:
        output, softmax, flight = state
        (k_tile, v_tile), flight = ring.advance(j, flight)
        scores = fly.Fragment.zeros(layout, row_tiles, key_tiles)
        for t in range(dim_steps):
            scores = product(
                link, queries, t, k_loader, k_tile, lambda n, t=t: (n * layout.columns, t * depth), scores
            )
        if masked:
            scores = keys.apply(scores, rows, j * options.block_n)
        softmax, probabilities, factor = softmax.update(scores, scale_log2, masked=masked)
        output = output.scale_rows(factor)
        weights = probabilities.map(lambda tile, r, c: tile.to(work.q.dtype, rounding="nearest_any"))
        operands = [link.operands(tiles) for tiles in weights.tiles]
        for t in range(key_steps):
            output = product(link, operands, t, v_loader, v_tile, lambda n, t=t: v_place(n, t), output)
        return output, softmax, flight

    start = (
        fly.Fragment.zeros(layout, row_tiles, dim_tiles),
        OnlineSoftmax.start(layout, row_tiles),
        ring.start(work.first_tile),
    )
    for j, state in (loop := fly.range(work.first_tile, work.full_tiles, carry=start)):
        loop.next(step(j, state, masked=False))
    for j, state in (loop := fly.range(work.full_tiles, work.last_tile, carry=loop.results)):
        loop.next(step(j, state, masked=True))
    output, softmax, _ = loop.results

    inverse, row_lse = softmax.finish(scale_log2)
    store_output(work.out, output.scale_rows(inverse), wave_row, wave_rows)
    if work.lse is not None:
        store_lse(work.lse, row_lse, rows, keys.queries)


def _operands(link: fly.Chain, k_rows: fly.RowView, v_rows: fly.RowView, options: GenericOptions):
    """The ring of K and V tiles, their operand loaders, and where V's operand (dim tile, key step) is."""
    target, atom, operand = fly.target(), link.atom, link.column_operand
    values, columns, depth = atom.values(operand), link.layout.columns, atom.k
    asynchronous = options.stages > 1

    def plan(**kwargs: Any) -> fly.OperandPlan | None:
        want = fly.operand_coordinates(atom, operand, **kwargs)
        return fly.plan_operand(target.matrix_loads, want, values)

    k_plan = fly.require_plan(plan(transposed=False), atom, operand)
    k_layout = fly.SwizzledTile(options.block_n, options.head_dim, k_plan.load.granule)
    k_copy = fly.RowCopy(k_rows, k_layout, vector=options.vector, asynchronous=asynchronous)

    v_plan = plan(transposed=True, slot_of=lambda k: link.columns[k])
    if v_plan is not None:
        v_layout = fly.SwizzledTile(options.block_n, options.head_dim, v_plan.load.granule)
        v_copy: Any = fly.RowCopy(v_rows, v_layout, vector=options.vector, asynchronous=asynchronous)

        def v_place(n: int, t: int) -> tuple[int, int]:
            return t * depth, n * columns

    else:
        # no load turns V: it is stored turned, keys in the order in which P's registers hold them
        v_plan = fly.require_plan(plan(transposed=False), atom, operand)
        v_layout = fly.SwizzledTile(options.head_dim, options.block_n, v_plan.load.granule, fold=True)
        pieces = tuple(link.columns.index(4 * p) // 4 for p in range(depth // 4))
        v_copy = fly.TransposedCopy(
            v_rows, v_layout, vector=min(options.vector, _turned_vector(options)), slot_of_piece=pieces
        )

        def v_place(n: int, t: int) -> tuple[int, int]:
            return n * columns, t * depth

    k_ring = fly.SharedTile.ring("k", k_layout, k_rows.dtype, options.stages)[0]
    v_ring = fly.SharedTile.ring("v", v_layout, v_rows.dtype, options.stages)[0]
    ring = fly.TileRing([(k_copy, k_ring), (v_copy, v_ring)], options.stages)
    k_loader, v_loader = fly.OperandLoader(k_plan, k_layout), fly.OperandLoader(v_plan, v_layout)
    for t in range(options.head_dim // depth):
        k_loader.prepare(0, t * depth)
    for n in range(0, options.head_dim // columns, v_plan.tiles):
        for t in range(options.block_n // depth):
            v_loader.prepare(*v_place(n, t))
    return ring, k_loader, v_loader, v_place


def _turned_vector(options: GenericOptions) -> int:
    """Columns of V per thread so that all threads have a piece of 4 rows to turn."""
    threads = options.waves * fly.wave_size()
    return max(1, options.block_n * options.head_dim // (4 * threads))


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


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `kernels.dispatch.Prepare`.

    One build serves equal and different lengths: masks follow the lengths at run time.

    Raises:
        UnsupportedError: rows of a tensor are 2**31 bytes or more apart within one tile.
    """
    description = target(target_of(tensors.q.device))
    options = options_for(description, request.head_dim, request.causal, request.kv_alignment, request.tuning)
    return bind_forward(
        flash_attn_generic,
        tensors,
        request,
        block_m=options.block_m,
        block_n=options.block_n,
        threads=options.waves * description.wave_size,
        statics={"options": options},
        splits=split_count(request, tensors.q.device, options.block_m, options.block_n),
    )
