"""Flash attention backward for Hopper (sm_90a): one fused kernel with five products, on WGMMA and TMA.

A block is a producer warpgroup and two consumer warpgroups; a consumer owns 64 keys of the block's 128, whose dK and
dV it sums up in registers, and queries pass by in tiles of 64.

| who | registers | what |
|---|---|---|
| producer, one thread | few | K and V once, then Q, dO and the rows' statistics of tile after tile, by TMA |
| consumer warpgroups | most | S = K Q^T, dP = V dO^T; dV += P^T dO, dK += dS^T Q; a part of dQ = dS K |

S and dP have keys as rows, so that P and dS are register operands of dV and dK as they are. dS goes to shared memory
besides, from where both consumers read all of it: each makes half of the tile's dQ, at once (`sm90.consumer`), a tile
later (`sm90.later`) or in clusters, each block for every other tile (`sm90.paired`). It is added to sums in global
memory (`sm90.dq_sums`), in an order that is not the same in every run unless blocks do so in turn (`sm90.turns`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fly
from fly.backends.nvvm import cluster
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    elect_one,
    setmaxnreg_dec,
    setmaxnreg_inc,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import init_all
from fly.ir.dtypes import dtype as dtype_of
from fly.runtime.device import device_of

from .problem.contract import Launch, Request, Tensors
from .sm90 import sections, turns
from .sm90.ahead import COUNTS, Ahead, distance_of
from .sm90.backward import ALONG, BLOCK_M, REGISTERS, Sm90BackwardOptions
from .sm90.backward import THREADS as BLOCK_THREADS
from .sm90.consumer import Consumer
from .sm90.dq_sums import Sums, clear_unseen, round_dq
from .sm90.exchange import Exchange
from .sm90.group_parts import parts_of, round_keys, sums_of
from .sm90.key_block import Buffers, produce
from .sm90.key_work import KeyBlocks, Place, with_sizes_anew
from .sm90.later import Alternating, Batched, Behind, Later
from .sm90.paired import Paired, pays
from .sm90.turns import Turns
from .work.gradient_steps import GradientSteps
from .work.query_tiles import tiles_of_all
from .work.row_statistics import THREADS, row_statistics, rows_of_block, rows_of_thread
from .work.sequences import tokens_of
from .work.tile_list import BY_KEYS


@fly.kernel
def flash_attn_sm90_bwd(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    dout: fly.TensorMap,
    lse2: fly.TensorMap,
    delta: fly.TensorMap,
    dq_sums: fly.Tensor,
    dq: fly.Tensor | None,
    counts: fly.Tensor | None,
    dk: fly.Tensor,
    dv: fly.Tensor,
    dk_sums: fly.Tensor | None,
    dv_sums: fly.Tensor | None,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    tokens: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    sequences: fly.i32,  # type: ignore[valid-type]
    scale_log2: fly.f32,  # type: ignore[valid-type]
    group: fly.i32,  # type: ignore[valid-type]
    distance: fly.i32,  # type: ignore[valid-type]
    *operands: fly.Operand,
    options: Sm90BackwardOptions,
    folded: bool = False,
    consumer: type[Any] | None = None,
) -> None:
    """dv = P^T dout, dk = softmax_scale * dS^T q, dq_sums += dS k.

    q, dout: maps of (B, Sq, H, D) tensors, k, v of (B, Skv, Hkv, D), lse2 and -delta of (B, H, Sq) f32
    (`work.row_statistics`, `dropped` where `options.alternates`), packed ones with B = 1; dk, dv (B, Skv, Hkv, D) or
    packed (tokens, Hkv, D) with (B + 1,) i32 offsets; dq_sums: see `sm90.dq_sums`, with turns, whose `counts` these
    are, dq is written where somebody has a part in it; where sums are cleared `distance` key heads ahead, `counts`
    are those of `sm90.ahead`. `tokens` is Sq, or all queries of packed sequences, `group` H / Hkv. With
    `options.parts`, `group` is a part's, and dk_sums and dv_sums, see `group_parts.place_of`, get what is dk and dv
    else.
    Grid: (key blocks, key heads, `sequences`), or `folded`; where `options.sectioned`, `sections.grid`. `consumer`:
    another one than `Consumer`.
    """
    fly.occupancy(min_blocks=1)
    kv_heads = dk.shape[-2] * options.parts
    given = options.features.bind(operands)
    if options.blocks > 1:
        cluster.declare(options.blocks)
    blocks = KeyBlocks(
        options,
        given,
        tokens=(tokens, tokens_of(dk, cu_seqlens_kv)),
        offsets=(cu_seqlens_q, cu_seqlens_kv),
        kv_heads=kv_heads,
        sequences=sequences,
        group=group,
        folded=folded,
    )
    rank, head = blocks.rank, blocks.head
    in_turn = ahead = None
    if counts is not None and options.ordered:
        kv_head, batch, exists = head
        apart = with_sizes_anew(dq_sums, fly.thread_id.x) if options.thrift.roles else dq_sums
        ticket = turns.taken(counts, apart, batch * kv_heads + kv_head, exists, options.blocks, rank)
        blocks = replace(blocks, ticket=ticket)
    early = None if options.thrift.roles else blocks.work(head)
    buffers = Buffers.allocate(options)
    if counts is not None and options.ordered:
        in_turn = Turns.allocate(counts, options)
        in_turn.note(early.near_again(fly.thread_id.x) if early else blocks.again(Place.NOTE).near)
    if counts is not None and options.clears:
        ahead = Ahead.allocate(dq_sums, counts, kv_heads * sequences, kv_heads, group, distance, blocks.of_head)
    exchange = Exchange.allocate(buffers.ds, rank, options) if options.blocks > 1 else None
    more = [barriers for part in (in_turn, exchange, ahead) if part is not None for barriers in part.barriers]
    init_all([*buffers.barriers, *more])
    if exchange is not None:
        cluster.sync()
    warpgroup = warpgroup_id()
    early = None if early is None else early.begun()
    with fly.when(warpgroup == 0):
        setmaxnreg_dec(REGISTERS[0])
        work = early or blocks.again(Place.PRODUCER)
        with fly.when((fly.wave_id() == 0) & elect_one()):
            maps = (q, k, v, dout, lse2, delta)
            tiles = blocks.tiles_again if options.thrift.tiles else None
            produce(maps, buffers, options, work.walk, work.block, given, work.heads, tiles)
        if in_turn is not None:
            sums, near = Sums.of(dq_sums, work, in_turn), work.near
            for warp, act in ((1, in_turn.take), (2, in_turn.hand_on)):
                with fly.when((fly.wave_id() == warp) & elect_one()):
                    sums.each_turn(act, near, work.walk, work.heads)
        if ahead is not None:
            with fly.when(fly.wave_id() != 0):
                ahead.work(work.block.batch * kv_heads + work.block.part)
    with fly.when(warpgroup != 0):
        setmaxnreg_inc(REGISTERS[1])
        work, dtype = early or blocks.again(Place.CONSUMERS), dtype_of(q.spec.dtype)
        sums, again = Sums.of(dq_sums, work, in_turn), blocks.again if options.thrift.heads else None
        what = (
            options,
            buffers,
            given,
            work,
            warpgroup - 1,
            scale_log2,
            dtype,
            sums,
            exchange,
            ahead,
            again,
            blocks.again if options.thrift.heads or options.parts > 1 else None,
        )
        working = (consumer or _consumer_of(options))(*what)
        results = (dk, dv) if dk_sums is None or dv_sums is None else (dk_sums, dv_sums)
        working.write(*results, work.written)
        if dq is not None:
            working.round(dq)
    if exchange is not None:
        cluster.sync()  # nobody reaches into a block that has ended


def _consumer_of(options: Sm90BackwardOptions) -> type[Consumer]:
    if options.paired:
        return Paired
    if not options.later:
        return Consumer
    if options.batched:
        return Batched
    return Alternating if options.alternates else Behind if options.behind else Later


def _options_of(tensors: Tensors, request: Request, apart: bool) -> Sm90BackwardOptions:
    """The build of a call, but whether it clears ahead, which goes by its sizes."""
    features = request.static_features
    if features.block_size is not None:
        features = replace(features, block_size=(features.block_size[1], features.block_size[0]))
    return Sm90BackwardOptions(
        request.head_dim,
        request.value_dim,
        request.causal,
        packed=tensors.get("cu_seqlens_q") is not None,
        features=features,
        ordered=request.deterministic,
        apart=apart,
        bias_by_query=request.bias_by_query,
        loads=request.aux_tensors > 0,
    )


@dataclass(frozen=True)
class _Plan:
    """Which build a call gets, and how its blocks lie: so many `clusters` for each key head, or part of its group.

    `slices`: key heads, or parts, of all sequences, about `beside` of them side by side; `distance`: `distance_of`.
    """

    options: Sm90BackwardOptions
    clusters: int
    slices: int
    beside: int
    distance: int

    @staticmethod
    def of(tensors: Tensors, request: Request, apart: bool) -> _Plan:
        """As `request` and the average lengths of sequences decide."""
        options, sequences = _options_of(tensors, request, apart), request.batch
        packed = options.packed
        lengths = [len(tensors[name]) // sequences if packed else tensors[name].shape[1] for name in ("q", "k")]
        options = replace(options, paired=pays(options, *lengths))
        clusters = -(-request.seq_len_kv // options.span)
        blocks, units = clusters * options.blocks, device_of(tensors["q"].device).compute_units
        options = replace(options, parts=parts_of(request, options, blocks, units))
        slices = sequences * request.num_kv_heads * options.parts
        beside = sections.heads_beside(request, options, slices, blocks, units)
        distance = distance_of(request, options, slices, blocks, beside, units)
        return _Plan(replace(options, clears=distance > 0), clusters, slices, beside, distance)

    def counts(self, tiles: int) -> int:
        """How many numbers blocks tell each other something by, with so many `tiles` of queries."""
        if self.options.ordered:
            return turns.counts_needed(tiles, self.slices, self.options.blocks)
        return COUNTS * self.slices if self.distance else 0

    def grid(self, request: Request) -> tuple[int, int, int]:
        """Of the fused kernel."""
        if self.options.sectioned:
            return sections.grid(self.clusters, self.slices, self.options.blocks, self.beside)
        return self.clusters * self.options.blocks, self.slices // request.batch, request.batch


def prepare(tensors: Tensors, request: Request, consumer: type[Consumer] | None = None) -> Launch:
    """Compile and bind the backward pass of one kind of call: statistics of the rows, dK, dV and sums of dQ, then dQ.

    See `flash_attn_generic_bwd.prepare`; `consumer`: of `flash_attn_sm90_bwd`.
    """
    plan = _Plan.of(tensors, request, apart=consumer is not None)
    options, heads, sequences = plan.options, request.num_heads, request.batch
    inputs = [tensors[name] for name in ("q", "k", "v", "dout")]
    q, k, v, dout = (t.unsqueeze(0) if options.packed else t for t in inputs)
    entries, tokens = q.shape[:2]
    memory = partial(torch.empty, dtype=torch.float32, device=q.device)
    numbers = memory((entries, heads, -(-tokens // ALONG) * ALONG))[:, :, :tokens]
    deep = rows_of_thread(request.value_dim)
    lines = rows_of_block(request.value_dim, deep)
    tiles = tiles_of_all(tokens, sequences, options.packed, BLOCK_M)
    padded = -(-tiles * BLOCK_M // lines) * lines
    sums = memory((entries, heads, padded, options.pieces * options.dq_columns))
    key_sums = sums_of(k, request, options.parts, options.packed) if options.parts > 1 else {}
    rows = numbers[0] if options.packed else numbers
    made = {**key_sums, "dq_sums": sums, "lse2": rows, "deltas": rows}  # `delta` is the caller's
    if counts := plan.counts(entries * heads * padded // BLOCK_M):
        made["counts"] = memory(counts, dtype=torch.int32)
    group = heads * sequences // plan.slices
    of_call = {"tokens": tokens, "sequences": sequences, "group": group, "distance": plan.distance}
    steps = GradientSteps(tensors, request, made, **of_call)

    # what nobody adds to at first needs no zeros, nor what blocks clear themselves
    cleared: dict[str, Any] = {"dq_sums": None} if options.ordered else {}
    if plan.distance:
        cleared = {"dq_sums": sums.flatten(0, 1)[None, : plan.distance * group]}
    statistics: dict[str, Any] = {"head_dim": request.value_dim, "deep": deep}
    # of the first heads last, whose rows are in the second-level cache then
    order: dict[str, Any] = {"negated": True, "first_heads": plan.distance > 0, "last_first": True}
    delta, dropped = {"delta": "deltas"}, ["dropped"] if options.alternates else []
    blocks = padded // lines, heads, entries
    steps.add(row_statistics, blocks, THREADS, dropped, called=delta, instead=cleared, **statistics, **order)
    if "delta" in tensors:
        blocks = -(-tokens // lines), heads, entries
        steps.add(row_statistics, blocks, THREADS, instead={"dq_sums": None, "counts": None}, **statistics)
    steps.add_sinks(dropped, called=delta, negated=True)

    tiles_of = zip(options.tiles.items(), (q, k, v, dout), strict=True)
    given: dict[str, Any] = {
        name: fly.tensor_map(tensor, (1, tile.rows, 1, tile.panel_columns), swizzle=tile.swizzle)
        for (name, tile), tensor in tiles_of
    }
    given |= dict.fromkeys(("lse2", "deltas"), fly.tensor_map(numbers, (1, 1, options.numbers)))
    if not options.ordered:
        given["dq"] = None
    steps.add(
        flash_attn_sm90_bwd,
        plan.grid(request),
        BLOCK_THREADS,
        [BY_KEYS.get(name, name) for name in request.operands],
        called=delta,
        instead=given,
        folds=not options.sectioned,
        options=options,
        consumer=consumer,
    )

    if not options.ordered or turns.may_see_nothing(request):
        last = clear_unseen if options.ordered else round_dq
        blocks = -(-request.seq_len // BLOCK_M), heads, sequences
        steps.add(last, blocks, options.pieces * WARPGROUP, request.operands, options=options)
    if key_sums:
        blocks = -(-request.seq_len_kv // BLOCK_M), request.num_kv_heads, sequences
        steps.add(round_keys, blocks, WARPGROUP, request.operands, options=options)
    return steps.launch()
