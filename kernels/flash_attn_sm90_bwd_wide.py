"""Flash attention backward for Hopper, wide heads: `flash_attn_sm90_bwd` with consumers that share keys.

Registers hold dK and dV of 64 keys at D=256, and not of 128. So both consumers of a block have the same 64 keys: one
makes S, P and sums up dV, the other dP, dS and sums up dK. Each has its operand in registers as it made it.

| | consumer of values | in shared memory | consumer of keys |
|---|---|---|---|
| 1 | wait for S; P | P, float32 | dP = V dO^T |
| 2 | dV += P^T dO | dS | wait for dP, P; dS |
| 3 | half of dQ = dS K; add it up | | the other half; dK += dS^T Q; add its half up |
| 4 | the next tile's S | | the next tile's dP; wait for dK |

P and dS have one slot each: P of the next tile is written behind the barrier at which dS came, which is made from it,
and dS of the next tile behind that at which P came, before which the other consumer waits for its half of dQ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, barrier_arrive, barrier_sync
from fly.backends.nvvm.mbarrier import Position
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.ir import memory

from .flash_attn_sm90_bwd import WRITTEN, Consumer, State
from .flash_attn_sm90_bwd import prepare as prepare_with
from .problem.contract import Launch, Request, Tensors
from .problem.features import BoundFeatures
from .problem.gradients import HeadOfKeys, ScoreGradients, Weights, transposed
from .sm90.backward import BLOCK_M, CONSUMERS
from .sm90.walk import Walk

WEIGHED = 4  # named barrier: P is in shared memory
PIECE = 4  # values of a thread that lie side by side there


class Halves(Consumer):
    """One of two consumers of the same keys."""

    def write(self, heads: tuple[fly.Value, fly.Value], dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        """What the consumer sums up of dK and dV, as far as it is of the sequence's first `count` keys."""
        weights = fly.alloc_shared("weights", self.options.weight_bytes, 128)
        kept = {field.name: getattr(self, field.name) for field in fields(Consumer)}
        for number, kind in enumerate((_OfValues, _OfKeys)):
            with fly.when(self.index == number):
                kind(**kept, weights=weights).write(heads, dk, dv, count)


@dataclass(frozen=True)
class _Half(Consumer):
    """`weights`: P, each thread's of the one as the same thread of the other reads them."""

    weights: fly.Pointer

    @property
    def first_row(self) -> int:
        return 0

    def _pieces(self) -> list[fly.Pointer]:
        """Where this thread's values of P are."""
        count = BLOCK_M * self.options.block_n // WARPGROUP
        first = self.weights.offset(fly.thread_id.x % WARPGROUP * (4 * PIECE))
        return [first.offset(i * WARPGROUP * 4) for i in range(0, count, PIECE)]


class _OfValues(_Half):
    """The consumer that sums up dV."""

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        return super().zeros[1:]

    def write(self, heads: tuple[fly.Value, fly.Value], dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        (values,) = self.run(heads)
        self.write_values(dv, values, count)

    def step(
        self,
        number: fly.Value,
        state: State,
        walk: Walk,
        place: HeadOfKeys,
        given: BoundFeatures,
        *,
        masked: bool,
        last: bool = False,
    ) -> State:
        """One tile of queries, whose S is in flight; then the next one's is, but behind the last."""
        options, q, dout = self.options, self.buffers.q, self.buffers.dout
        j = walk.tile(number)
        (raw,) = wgmma.wait(0, state.product)
        made = self.weigh(raw, state.q_at, j, number, walk, place, given, masked=masked)
        q.ring.release(state.q_at)
        (handed,) = (made.steep or made.weights).tiles[0]
        for i, at in enumerate(self._pieces()):
            fly.store(handed[PIECE * i : PIECE * (i + 1)], at, align=4 * PIECE)
        barrier_arrive(WEIGHED, CONSUMERS * WARPGROUP)
        p = self._narrow(made.of_values)
        self._arrived(dout, state.dout_at, lambda: j)
        atom = WarpgroupAtom(options.head_dim_v, self.dtype.name)
        (dv,) = state.sums
        dv = wgmma.issue(atom, p, dout.operand(state.dout_at, along_rows=True), BLOCK_M // atom.k, dv)
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)
        for piece in range(options.dq_pieces - 1):
            part, dv = wgmma.wait(0, self._dq(state.slot, piece), dv)
            self.add(part, place.head, j, state.q_at, piece)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        part = self._dq(state.slot, options.dq_pieces - 1)
        ahead, scores = options.ahead and not last, state.product
        if ahead:
            scores = self.scores(q_next, walk, number + 1)
        part, dv = wgmma.wait(int(ahead), part, dv)
        dout.ring.release(state.dout_at)
        self.add(part, place.head, j, state.q_at, options.dq_pieces - 1)
        if not ahead and not last:
            scores = self.scores(q_next, walk, number + 1)
        return replace(state, sums=(dv,), product=scores, q_at=q_next, dout_at=dout_next)


class _OfKeys(_Half):
    """The consumer that sums up dK."""

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        return super().zeros[:1]

    def write(self, heads: tuple[fly.Value, fly.Value], dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        (values,) = self.run(heads)
        self.write_keys(dk, values, count)

    def start(self, q_at: Position, dout_at: Position, walk: Walk, number: Any) -> fly.Value:
        return self.excess(dout_at, walk.tile(number))

    def step(
        self,
        number: fly.Value,
        state: State,
        walk: Walk,
        place: HeadOfKeys,
        given: BoundFeatures,
        *,
        masked: bool,
        last: bool = False,
    ) -> State:
        """One tile of queries, whose dP is in flight; then the next one's is, but behind the last."""
        options, q, dout = self.options, self.buffers.q, self.buffers.dout
        j = walk.tile(number)
        (excess,) = wgmma.wait(0, state.product)
        barrier_sync(WEIGHED, CONSUMERS * WARPGROUP)
        made = self._weights(place, given, j)
        ds = self._narrow(self.pull(made, excess, state.dout_at, j, walk, given, masked=masked))
        dout.ring.release(state.dout_at)
        self._put(ds, state.slot)
        started = [self._dq(state.slot, piece) for piece in range(options.dq_pieces)]
        self._arrived(q, state.q_at, lambda: j)
        atom = WarpgroupAtom(options.head_dim, self.dtype.name)
        (dk,) = state.sums
        dk = wgmma.issue(atom, ds, q.operand(state.q_at, along_rows=True), BLOCK_M // atom.k, dk)
        for piece, part in enumerate(started):
            (part,) = wgmma.wait(options.dq_pieces - piece, part)
            self.add(part, place.head, j, state.q_at, piece)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        excess = state.product if last else self.excess(dout_next, walk.tile(number + 1))
        (dk,) = wgmma.wait(0 if last else 1, dk)
        q.ring.release(state.q_at)
        return replace(state, sums=(dk,), product=excess, q_at=q_next, dout_at=dout_next)

    def _weights(self, place: HeadOfKeys, given: BoundFeatures, j: fly.Value) -> Weights:
        """P of tile j, which the other consumer made, with scores' derivatives in it."""
        values = fly.concat([memory.load(piece, fly.f32, PIECE, align=4 * PIECE) for piece in self._pieces()])
        found = transposed(fly.Fragment(self.layout, ((values,),)))
        dropout = given.dropout(place)
        kept = None if dropout is None else dropout.kept(found, j * BLOCK_M, self.block.first_key)
        return Weights(found, ScoreGradients, kept)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: see `flash_attn_sm90_bwd.prepare`."""
    return prepare_with(tensors, request, Halves)
