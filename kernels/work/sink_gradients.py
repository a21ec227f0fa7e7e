"""The gradients of sinks: sums over a head's query rows, as partial sums whose order is the same in every run."""

from __future__ import annotations

import fly
from fly.ir.memory import load_bounded

from ..problem.dropout_tile import kept_share
from ..problem.scores import LOG2_E
from .row_statistics import LARGEST
from .sequences import Sequence, tokens_of
from .tile_scheduler import head_of_block

ROWS_OF_LANE = 16


def rows_of_part(wave_size: int) -> int:
    """Rows that one partial sum is of."""
    return ROWS_OF_LANE * wave_size


@fly.kernel
def sink_gradients(
    out: fly.Tensor,
    lse2: fly.Tensor,
    delta: fly.Tensor,
    sink: fly.Tensor,
    dsink: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    seqused_q: fly.Tensor | None,
    *dropped: fly.Operand,
    negated: bool = False,
    folded: bool = False,
) -> None:
    """dsink[part, b, h] = -sum of exp(sink[h] - lse[i]) * delta[i] over a part of sequence b's rows i.

    A sink's weight in a row is exp(sink - lse), and its value is zero, so that of dP - delta there is -delta. out as
    of the forward pass, for its sizes; lse2 and delta as `row_statistics` leaves them, `negated` or not, of the same
    `dropped`; sink: (H,) floats; dsink: (parts, B, H) f32, every element of which is written. Rows that no sequence
    has do not count. Grid: (parts, H, B) of one wave each, which has `rows_of_part` rows.
    """
    part = fly.block_id.x
    head, batch, exists = head_of_block(dsink.shape[2], dsink.shape[1], folded=folded)
    queries = Sequence.of(tokens_of(out, cu_seqlens_q), cu_seqlens_q, batch, seqused_q)
    lanes = fly.block_dim()[0]
    first = fly.minimum(part * (ROWS_OF_LANE * lanes), queries.length)
    bound = (queries.length - first) * fly.f32.bytes
    logs, deltas = (queries.vector(x, head).at(first) for x in (lse2, delta))
    # of sinks near -3e38, whose weight is 1 where there is no key
    own = fly.maximum(sink.load(head).to(fly.f32) * LOG2_E, -LARGEST)
    total = fly.f32(0.0)
    for i in range(ROWS_OF_LANE):
        offset = (fly.thread_id.x + i * lanes) * fly.f32.bytes
        log, excess = (load_bounded(vector, offset, bound, fly.f32) for vector in (logs, deltas))
        weight = fly.exp2(fly.minimum(own - log, 0.0))
        total = total + fly.select(offset < bound, weight * (excess if negated else -excess), 0.0)
    total = fly.lane_sum(total)
    for threshold in dropped:
        total = total * fly.rcp(kept_share(threshold))  # type: ignore[arg-type]  # a Value in here
    first_lane = fly.thread_id.x == 0
    with fly.when(first_lane if exists is None else first_lane & exists):
        dsink.store(total, part, batch, head)
