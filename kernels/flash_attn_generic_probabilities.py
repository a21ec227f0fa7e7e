"""The weights of attention themselves, and which of them dropout keeps: for looking at, on every target.

Scores are made again as in the backward pass (`problem.gradients`), and P = exp(s - lse) is stored, with the sign of
what dropout does: P where a weight is kept, -P where it is dropped. It is not tuned: P is of the size of the scores.
"""

from __future__ import annotations

import math
from typing import Any

import fly
from fly.backends.target import target
from fly.errors import UnsupportedError
from fly.runtime.device import device_of

from .arguments.callers import problem
from .generic.backward import BackwardOptions, options_for, query_block
from .generic.blocks import WaveRows, uniform, walk
from .generic.operands import Stream, direct_rows
from .problem.catalogue import BY_NAME
from .problem.contract import Launch, Request, Tensors
from .problem.gradients import weights
from .problem.scores import LOG2_E
from .work.launch import bind_forward

# features of a call whose weights this kernel makes
SHOWN = (
    *("packed", "split_kv", "split_keys", "seqused", "window", "attention_chunk"),
    *("softcap", "alibi", "sink", "dropout"),
)


@fly.kernel
def flash_attn_generic_probabilities(
    q: fly.Tensor,
    k: fly.Tensor,
    lse: fly.Tensor,
    probabilities: fly.Tensor,
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    *operands: fly.Operand,
    options: BackwardOptions,
    folded: bool = False,
) -> None:
    """probabilities[b, h, i, j] = P, or -P where dropout drops it; queries and keys count in their sequence.

    q (B, Sq, H, D), k (B, Skv, Hkv, D) and lse (B, H, Sq), the forward call's, or packed; probabilities: (B, H, the
    longest Sq, the longest Skv). Places of tiles that no row sees are not written. Grid: as of the forward pass.
    """
    fly.occupancy(waves_per_eu=options.waves_per_eu, min_blocks=options.min_blocks)
    given = options.features.bind(operands)
    work = query_block((q, k, k, q, lse, cu_seqlens_q, cu_seqlens_kv), options, given, folded=folded)
    assert work.lse is not None and isinstance(work.k, fly.RowView)
    with work.if_any_row():
        link = fly.chain(fly.target().mma(q.dtype.name))
        mine = WaveRows.of(link.layout, work.first_row, options.wave_rows)
        rows, wave_row = mine.numbers, mine.first
        here, out = given.at(work), probabilities[work.batch, work.head, :, :]
        keys = Stream("k", link, work.k, options.tiling, across=True, along=False)
        ring = fly.TileRing(keys.copies(), options.stages)
        queries = direct_rows(link, work.q.window(work.first_row, options.block_m), mine.offset, options.wave_rows)
        lse2 = mine.load(work.lse, work.queries.length).map(_lse2)
        zeros = fly.Fragment.zeros(link.layout, options.wave_rows // link.layout.rows, keys.row_tiles)

        def step(j: Any, state: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            first_key = j * options.block_n
            tile, flight = ring.advance(j, *state)
            raw = keys.across(zeros, queries, tile)

            def hide(scores: fly.Fragment) -> fly.Fragment:
                return work.keys.apply(scores, rows, first_key)

            made = weights(raw, here, work, rows, first_key, scale_log2, lse2, hide, wave_row)
            for row, column, values in made.signed.map(lambda x, r, c: x.to(out.dtype)).runs():
                query, key = wave_row + row, first_key + column
                for i in range(len(values)):
                    with fly.when((query < work.queries.length) & (key + i < work.kv.length)):
                        out.store(values[i], query, key + i)
            return (flight,)

        walk(work.tiles, (ring.start(uniform(work.tiles.first)),), step, always_masked=True)


def _lse2(lse: fly.Value) -> fly.Value:
    """A row's log-sum-exp in log2 units, +inf where there is no key."""
    return fly.select(lse == -math.inf, math.inf, lse * LOG2_E)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; `tensors`: its q, k and lse, and the probabilities.

    q and k are 16-byte aligned.

    Raises:
        UnsupportedError: a feature that this kernel does not have, or tensors that are too large for it.
    """
    for name in request.features:
        if name not in SHOWN:
            what, instead = BY_NAME[name].told
            raise problem(UnsupportedError, f"probabilities are not available with {what}: {instead}")
    description = target(device_of(tensors["q"].device).target)
    dims = request.head_dim, request.head_dim
    _, options = options_for(description, *dims, request.causal, request.static_features)
    return bind_forward(
        flash_attn_generic_probabilities,
        tensors,
        request,
        block_m=options.block_m,
        block_n=options.block_n,
        threads=options.waves * description.wave_size,
        statics={"options": options},
    )
