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

To `CLUSTERED` columns two blocks are a cluster, with 128 keys and the same tiles of queries. Each makes half of dQ's
columns over all of these keys, of its own dS and of the other one's, which comes by a copy between the two
(`sm90.exchange`): half of the additions. That takes a while, so a step makes dQ of the tile before:

| | consumer of values | in shared memory | consumer of keys |
|---|---|---|---|
| 1 | wait for S; P | P, float32, when dS before is there | dP = V dO^T |
| 2 | dV += P^T dO | dS, on its way to the other block | wait for dP, P; dS |
| 3 | a quarter of dQ before; the next tile's S | | a quarter of dQ before; dK += dS^T Q; the next tile's dP |
| 4 | wait for dV, then for dQ; add it up | | wait for dQ; add it up; wait for dK |
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, anew, barrier_arrive, barrier_sync, elect_one, fence_async_shared
from fly.backends.nvvm.mbarrier import Position

from .flash_attn_sm90_bwd import prepare as prepare_with
from .problem.contract import Launch, Request, Tensors
from .problem.dropout_tile import DecidedTile
from .problem.gradients import HeadOfKeys, ScoreGradients, Weights, transposed
from .sm90.backward import BLOCK_M, CONSUMERS
from .sm90.consumer import WRITTEN, Consumer, State, Step
from .sm90.dq_sums import load, of_thread, put
from .sm90.dropout import made_again, remade
from .sm90.walk import Walk
from .work.kept_pairs import KeptPairs

WEIGHED = 4  # named barrier: P is in shared memory
STORED = 5  # named barrier: dS of the block's keys is


class Halves(Consumer):
    """One of two consumers of the same keys."""

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        """What the consumer sums up of dK and dV, as far as it is of the first `count` keys."""
        weights = fly.alloc_shared("weights", self.options.weight_bytes, 128)
        kept = {field.name: getattr(self, field.name) for field in fields(Consumer)}
        kinds = (_OfValuesInCluster, _OfKeysInCluster) if self.options.blocks > 1 else (_OfValues, _OfKeys)
        for number, kind in enumerate(kinds):
            if self.again is not None:
                kept["index"] = number  # no register is kept for it
            with fly.when(self.index == number):
                kind(**kept, weights=weights).write(dk, dv, count)


@dataclass(frozen=True)
class _Half(Consumer):
    """`weights`: P, each thread's of the one as the same thread of the other reads them."""

    weights: fly.Pointer

    @property
    def first_row(self) -> int:
        return 0

    @property
    def _own_weights(self) -> fly.Pointer:
        """Where this thread's first values of P are."""
        return of_thread(self.weights)


class _OfValues(_Half):
    """The consumer that sums up dV."""

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        return super().zeros[1:]

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        (values,) = self.run()
        self.write_values(dv, values, count)

    def _of_values(self, made: Weights, j: fly.Value, decided: DecidedTile | None) -> tuple[fly.Value, ...]:
        """P of tile j as the A operand of dV; `decided`: what dropout does to it, if `made` does not know."""
        p = self._narrow(made.of_values)
        return p if decided is None else KeptPairs.of(made_again(decided, j), self.layout).only(p)

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S is in flight; then the next one's is, but behind the last."""
        options, q, dout = self.options, self.buffers.q, self.buffers.dout
        j = step.walk.tile(step.number)
        decided = self._decided(j, step) if self.options.thrift.decides else None
        (raw,) = wgmma.wait(0, state.product)
        made = self.weigh(raw, state.q_at, j, step, drops=decided is None)
        q.ring.release(state.q_at)
        (handed,) = (made.steep or made.weights).tiles[0]
        put(handed, self._own_weights)
        barrier_arrive(WEIGHED, CONSUMERS * WARPGROUP)
        p = self._of_values(made, j, decided)
        self._arrived(dout, state.dout_at, lambda: j)
        dv = self._onto_values(p, state.dout_at, *state.sums)
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)
        for piece in range(options.dq_pieces - 1):
            part, dv = wgmma.wait(0, self._dq(state.slot, piece), dv)
            self.add(part, step.place.head, j, state.q_at, piece)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        part = self._dq(state.slot, options.dq_pieces - 1)
        ahead, scores = options.ahead and not step.last, state.product
        if ahead:
            scores = self.scores(*step.next_at(q_next))
        part, dv = wgmma.wait(int(ahead), part, dv)
        dout.ring.release(state.dout_at)
        self.add(part, step.place.head, j, state.q_at, options.dq_pieces - 1)
        if not ahead and not step.last:
            scores = self.scores(*step.next_at(q_next))
        return replace(state, sums=(dv,), product=scores, q_at=q_next, dout_at=dout_next)


class _OfKeys(_Half):
    """The consumer that sums up dK."""

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        return super().zeros[:1]

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        (values,) = self.run()
        self.write_keys(dk, values, count)

    def start(self, q_at: Position, dout_at: Position, walk: Walk, number: Any) -> fly.Value:
        return self.excess(dout_at, walk.tile(number))

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose dP is in flight; then the next one's is, but behind the last."""
        options, q, dout = self.options, self.buffers.q, self.buffers.dout
        j = step.walk.tile(step.number)
        (excess,) = wgmma.wait(0, state.product)
        barrier_sync(WEIGHED, CONSUMERS * WARPGROUP)
        made = self._weights(step, j)
        ds = self._narrow(self.pull(made, excess, state.dout_at, j, step))
        dout.ring.release(state.dout_at)
        self._hand_over(ds, state.slot)
        started = [self._dq(state.slot, piece) for piece in range(options.dq_pieces)]
        self._arrived(q, state.q_at, lambda: j)
        dk = self._onto_keys(ds, state.q_at, *state.sums)
        for piece, part in enumerate(started):
            (part,) = wgmma.wait(options.dq_pieces - piece, part)
            self.add(part, step.place.head, j, state.q_at, piece)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        excess = state.product if step.last else self.excess(dout_next, step.walk.tile(step.number + 1))
        (dk,) = wgmma.wait(0 if step.last else 1, dk)
        q.ring.release(state.q_at)
        return replace(state, sums=(dk,), product=excess, q_at=q_next, dout_at=dout_next)

    def _hand_over(self, ds: tuple[fly.Value, ...], slot: Any) -> None:
        """dS to shared memory, for this consumer's products and then for the other one, which is not waited for."""
        self._store(ds, slot)
        fence_async_shared()
        barrier_sync(STORED, WARPGROUP)
        barrier_arrive(WRITTEN, CONSUMERS * WARPGROUP)

    def _weights(self, step: Step, j: fly.Value) -> Weights:
        """P of tile j, which the other consumer made, with scores' derivatives in it."""
        values = load(BLOCK_M * self.options.block_n // WARPGROUP, self._own_weights)
        found = transposed(fly.Fragment(self.layout, ((values,),)))
        dropout = step.given.dropout(step.place)
        if dropout is None:
            return Weights(found, ScoreGradients)
        kept = remade(dropout, j).kept(found, j * BLOCK_M, anew(self.block.first_key, j))
        return Weights(found, ScoreGradients, kept)


class _InCluster(_Half):
    """One of two consumers of a block in a cluster."""

    def head(
        self, head: fly.Value, sums: tuple[fly.Value, ...], q_at: Position, dout_at: Position, slot: fly.Value
    ) -> tuple[Any, ...]:
        """All tiles of one query head: a step makes dQ of the tile before, as the other block's dS takes a while."""
        first, last = self._ends_of(head)

        def begun() -> State:
            return State(sums, self.start(q_at, dout_at, first.walk, first.number), q_at, dout_at, slot)

        def one() -> tuple[Any, ...]:
            state = self.step(replace(first, last=True), begun())
            return state.sums, state.q_at, state.dout_at

        def several() -> tuple[Any, ...]:
            state = self.step(first, begun())
            state = self.step(last, self._through(first.number + 1, last, state))
            return state.sums, state.q_at, state.dout_at

        sums, q_at, dout_at = fly.cond(first.number == last.number, one, several)
        before = q_at.before(self.options.stages)
        self.meet_before()
        (part,) = wgmma.wait(0, self._dq_of_both(before))
        self.take(part, last.place, last.walk.tile(last.number), before)
        return sums, q_at, dout_at, slot

    def _dq_of_both(self, at: Position) -> fly.Value:
        """Start the consumer's piece of dS K of all keys of the cluster, of the tile in slots `at`."""
        assert self.exchange is not None and self.buffers.beside is not None
        part = self._dq(at.index)
        slot = self.exchange.wait(at)
        return self._part_of_dq(slot, self.buffers.beside, self.options.beside_tile, self.index, part)

    def take(self, part: fly.Value, place: HeadOfKeys, j: fly.Value, at: Position) -> None:
        """Add the consumer's piece of tile j's dQ to the sums; its slots have been read."""
        assert self.exchange is not None
        self.exchange.release(at)
        self.add(part, place.head, j, at)

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, and dQ of the one before, but with the `first`."""
        raise NotImplementedError

    def meet_before(self) -> None:
        """Until dS of the tile before is in shared memory."""


class _OfValuesInCluster(_InCluster, _OfValues):
    """The consumer that sums up dV."""

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S is in flight; then the next one's is, but behind the last."""
        q, dout = self.buffers.q, self.buffers.dout
        j, before = step.walk.tile(step.number), state.q_at.before(self.options.stages)
        decided = self._decided(j, step) if self.options.thrift.decides else None
        (raw,) = wgmma.wait(0, state.product)
        made = self.weigh(raw, state.q_at, j, step, drops=decided is None)
        q.ring.release(state.q_at)
        if not step.first:
            self.meet_before()
        (handed,) = (made.steep or made.weights).tiles[0]
        put(handed, self._own_weights)
        barrier_arrive(WEIGHED, CONSUMERS * WARPGROUP)
        p = self._of_values(made, j, decided)
        self._arrived(dout, state.dout_at, lambda: j)
        dv = self._onto_values(p, state.dout_at, *state.sums)
        part = None if step.first else self._dq_of_both(before)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        scores = state.product if step.last else self.scores(*step.next_at(q_next))
        (dv,) = wgmma.wait((not step.last) + 2 * (not step.first), dv)
        dout.ring.release(state.dout_at)
        if part is not None:
            (part,) = wgmma.wait(int(not step.last), part)
            self.take(part, step.place, step.walk.tile(step.number - 1), before)
        return State((dv,), scores, q_next, dout_next, state.slot)

    def meet_before(self) -> None:
        """Until dS of the tile before is in shared memory, and P of it has been read."""
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)


class _OfKeysInCluster(_InCluster, _OfKeys):
    """The consumer that sums up dK, and has written dS itself."""

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose dP is in flight; then the next one's is, but behind the last."""
        assert self.exchange is not None
        q, dout = self.buffers.q, self.buffers.dout
        j, before = step.walk.tile(step.number), state.q_at.before(self.options.stages)
        (excess,) = wgmma.wait(0, state.product)
        barrier_sync(WEIGHED, CONSUMERS * WARPGROUP)
        made = self._weights(step, j)
        ds = self._narrow(self.pull(made, excess, state.dout_at, j, step))
        dout.ring.release(state.dout_at)
        self.exchange.claim(state.q_at)
        self._hand_over(ds, state.q_at.index)
        with fly.when((fly.thread_id.x % WARPGROUP < 32) & elect_one()):
            self.exchange.send(state.q_at)
        part = None if step.first else self._dq_of_both(before)
        self._arrived(q, state.q_at, lambda: j)
        dk = self._onto_keys(ds, state.q_at, *state.sums)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        excess = state.product if step.last else self.excess(dout_next, step.walk.tile(step.number + 1))
        if part is not None:
            (part,) = wgmma.wait(1 + (not step.last), part)
            self.take(part, step.place, step.walk.tile(step.number - 1), before)
        (dk,) = wgmma.wait(int(not step.last), dk)
        q.ring.release(state.q_at)
        return State((dk,), excess, q_next, dout_next, state.slot)


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: see `flash_attn_sm90_bwd.prepare`."""
    return prepare_with(tensors, request, Halves)
