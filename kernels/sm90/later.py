"""Consumers of the Hopper backward kernel that make a tile's dQ a tile later, beside the next one's arithmetic.

A tile's steps, and what is in flight meanwhile; dQ is that of the tile before:

| `Later` | started before | then |
|---|---|---|
| 1 | S | wait for S; dP; P |
| 2 | dP | dQ = dS K, dV += P^T dO; wait for dP; dS; wait for dQ |
| 3 | dV | dS to shared memory; dK += dS^T Q; add dQ up |
| 4 | dV, dK | the next tile's S; wait for dV and dK |

| `Behind` | started before | then |
|---|---|---|
| 1 | S | wait for S; dP; P |
| 2 | dP | dV += P^T dO; wait for dP; dS, to shared memory |
| 3 | dV | dQ = dS K, dK += dS^T Q, the next tile's S; wait for dQ; add it up |
| 4 | dK, S | wait for dK |

`Alternating` is `Behind` with consumers half a tile apart, whose statistics may be loaded before the wait for S and
the start of dV.

| `Batched` | started before | then |
|---|---|---|
| 1 | S, dP | wait for both; P; dS, to shared memory |
| 2 | | dV += P^T dO, dQ = dS K, dK += dS^T Q, the next tile's S and dP; wait for dQ; add it up |
| 3 | dK, S, dP | wait for dK |

dP starts from -delta, unless weights are dropped. Consumers do not meet: each goes on when it has written its keys of
a tile's dS, and waits for the others' a tile later. Who has written a tile's dS has read that of the last but one,
and but for `Later` that of the last but two: two slots of dS are enough, or three. Blocks in turn add in the turn of
the tile before, which has the slot of turns before.
"""

from __future__ import annotations

from dataclasses import dataclass

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, barrier_arrive, barrier_sync
from fly.backends.nvvm.mbarrier import Position

from ..problem.gradients import Weights, transposed
from ..work.kept_pairs import KeptPairs
from .backward import CONSUMERS
from .consumer import CLEARED, Consumer, State, Step

NONE = -1  # the number of no tile
TURN = CLEARED + CONSUMERS  # first named barrier of those that consumers wait for their turn at


@dataclass(frozen=True)
class Pending:
    """A tile whose dQ is still to be made: where its dS is, its query head and its number."""

    at: Position
    head: fly.Value
    tile: fly.Value


class Later(Consumer):
    """dQ of the tile before is started before a tile's dV; `State.slot` is what is `Pending`."""

    def begin(self) -> Pending:
        """Zeros, as if they were dS of a tile before the first one: what they make is added to that one's dQ."""
        at = Position.start()
        zeros = fly.broadcast(fly.f32(0.0), self.layout.values).to(self.dtype)
        self._publish(tuple(zeros[i : i + 8] for i in range(0, len(zeros), 8)), at.index)
        first = fly.i32(NONE) if self.options.ordered else fly.i32(0) + self.walk.tiles.first
        return Pending(at, fly.first_lane(self.work.heads[0]), fly.first_lane(first))

    def end(self, slot: Pending, q_at: Position) -> None:
        self._wait_for(slot)
        (part,) = wgmma.wait(0, self._dq(slot.at.index))
        self._add_late(part, slot, q_at)

    def _add_late(self, part: fly.Value, pending: Pending, q_at: Position) -> None:
        """Add what was made of a tile, whose turn is that of the slot of Q before `q_at`; there is one tile less."""
        if self.options.ordered:
            with fly.when(pending.tile != NONE):
                self.add(part, pending.head, pending.tile, q_at.before(self.options.stages))
        else:
            self.add(part, pending.head, pending.tile, q_at)

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S is in flight, and dQ of the one before; then the next one's S is."""
        q, dout, before = self.buffers.q, self.buffers.dout, state.slot
        j, (dk, dv) = self._tile(step.walk, step.number, state.q_at), state.sums
        less = self._start_of_excess(state.dout_at, j, step)
        (raw,) = wgmma.wait(0, state.product)
        started = self.excess(state.dout_at, j, less)
        made, p, kept = self._weighed(raw, state.q_at, j, step)
        self._wait_for(before)
        part = self._dq(before.at.index)
        dv = self._onto_values(p, state.dout_at, dv)
        (excess,) = wgmma.wait(2, started)
        ds = self._ds(less, made, kept, excess, state.dout_at, j, step)
        (part,) = wgmma.wait(1, part)
        here = Pending(before.at.next(self.options.ds_own), step.place.head, j)
        self._publish(ds, here.at.index)
        dk = self._onto_keys(ds, state.q_at, dk)
        self._add_late(part, before, state.q_at)
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        scores = state.product if step.last else self.scores(q_next, step.following)
        dk, dv = wgmma.wait(0 if step.last else 1, dk, dv)
        dout.ring.release(state.dout_at)
        q.ring.release(state.q_at)
        return State((dk, dv), scores, q_next, dout_next, here)

    def _start_of_excess(self, at: Position, j: fly.Value, step: Step) -> fly.Fragment | None:
        """-delta as dP is laid out, of a tile that is there then; None where dP has to be whole before."""
        if self.options.features.drops:
            return None
        self._arrived(self.buffers.dout, at, lambda: j)
        return self.less(at, j, step)

    def _ds(
        self,
        less: fly.Fragment | None,
        made: Weights,
        kept: KeptPairs | None,
        excess: fly.Value,
        at: Position,
        j: fly.Value,
        step: Step,
    ) -> tuple[fly.Value, ...]:
        """dS as the A operand of dK, of dP - delta, or of dP if that began with nothing."""
        if less is None:
            return self._pulled(made, kept, excess, at, j, step)
        return self._of_excess(made, excess)

    def _of_excess(self, made: Weights, excess: fly.Value) -> tuple[fly.Value, ...]:
        """dS of dP - delta."""
        return self._narrow(made.score_gradients(transposed(fly.Fragment(self.layout, ((excess,),)))).raw)

    def _wait_for(self, pending: Pending) -> None:
        """Until all keys' dS of a tile is in shared memory."""
        assert self.buffers.written is not None
        self.buffers.written.wait(pending.at.index, pending.at.phase)


class Behind(Later):
    """dQ of the tile before is started behind a tile's dS, and waited for behind the start of the next one's S.

    `AHEAD`: products that `start` starts.
    """

    AHEAD = 1

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S is in flight, and dQ of the one before; then the next one's S is."""
        j, (_, dv) = self._tile(step.walk, step.number, state.q_at), state.sums
        less = self._start_of_excess(state.dout_at, j, step)
        (raw,) = wgmma.wait(0, state.product)
        started = self.excess(state.dout_at, j, less)
        made, p, kept = self._weighed(raw, state.q_at, j, step)
        dv = self._onto_values(p, state.dout_at, dv)
        (excess,) = wgmma.wait(1, started)
        ds = self._ds(less, made, kept, excess, state.dout_at, j, step)
        here = self._published(ds, state.slot, j, step)
        return self._rest(ds, dv, here, step, state)

    def _published(self, ds: tuple[fly.Value, ...], before: Pending, j: fly.Value, step: Step) -> Pending:
        """dS of tile j to shared memory, when that of the tile before is whole."""
        here = Pending(before.at.next(self.options.ds_own), step.place.head, j)
        self._wait_for(before)
        self._publish(ds, here.at.index)
        return here

    def _rest(self, ds: tuple[fly.Value, ...], dv: fly.Value, here: Pending, step: Step, state: State) -> State:
        """What is behind a tile's dS and the start of its dV: dQ of the tile before, dK, what starts the next one."""
        q, dout, before = self.buffers.q, self.buffers.dout, state.slot
        part = self._dq(before.at.index)
        dk = self._onto_keys(ds, state.q_at, state.sums[0])
        q_next, dout_next = q.ring.next(state.q_at), dout.ring.next(state.dout_at)
        started = state.product if step.last else self.start(q_next, dout_next, step.following)
        ahead = 0 if step.last else self.AHEAD
        part, dv = wgmma.wait(1 + ahead, part, dv)
        dout.ring.release(state.dout_at)
        self._add_late(part, before, state.q_at)
        (dk,) = wgmma.wait(ahead, dk)
        q.ring.release(state.q_at)
        return State((dk, dv), started, q_next, dout_next, here)


class Batched(Behind):
    """All products of a tile but S and dP behind its dS, and those of the next tile right behind them.

    A warp that starts products goes on when they are nearly done: between them there is little time for anything
    else. So consumers make P and dS with none of their own in work, and come to do so while the other's are.
    """

    AHEAD = 2

    def start(self, q_at: Position, dout_at: Position, step: Step) -> tuple[fly.Value, fly.Value]:
        """S and dP."""
        scores = self.scores(q_at, step)
        j = self._tile(step.walk, step.number, q_at)
        less = self._start_of_excess(dout_at, j, step)
        return scores, self.excess(dout_at, j, less)

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S and dP are in flight, and dQ of the one before; then the next one's are."""
        j = self._tile(step.walk, step.number, state.q_at)
        raw, excess = wgmma.wait(0, *state.product)
        made, p, _ = self._weighed(raw, state.q_at, j, step)
        ds = self._of_excess(made, excess)
        here = self._published(ds, state.slot, j, step)
        dv = self._onto_values(p, state.dout_at, state.sums[1])
        return self._rest(ds, dv, here, step, state)


class Alternating(Behind):
    """With dropout: consumers make P in turn, from the wait for S to the start of dV.

    Left alone they come to make it at the same time, and then leave the tensor cores idle at the same time. The last
    turn of all is nobody's. dS begins as P times -delta while dP is made, and gets P times dP of what is kept.
    """

    def begin(self) -> Pending:
        with fly.when(self.index == 1):
            self._hand_on()
        return super().begin()

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose S is in flight, and dQ of the one before; then the next one's S is."""
        early = self.options.reads_early
        j = self._tile(step.walk, step.number, state.q_at)
        barrier_sync(TURN + self.index, CONSUMERS * WARPGROUP)
        lse2 = self.lse2(state.q_at, j, step) if early else None
        (raw,) = wgmma.wait(0, state.product)
        started = self.excess(state.dout_at, j)
        made, p, kept = self._weighed(raw, state.q_at, j, step, lse2=lse2)
        assert kept is not None, "consumers alternate with dropout alone"
        less = self.less(state.dout_at, j, step) if early else None
        dv = self._onto_values(p, state.dout_at, state.sums[1])
        self._hand_on()
        of_rows = self.less(state.dout_at, j, step) if less is None else less
        begun = made.weights.map(lambda x, r, c: x * of_rows.tiles[r][c])
        (excess,) = wgmma.wait(1, started)
        ds = self._narrow(made.weights.map(lambda x, r, c: kept.add_f32(begun.tiles[r][c], x, excess)))
        here = self._published(ds, state.slot, j, step)
        return self._rest(ds, dv, here, step, state)

    def _hand_on(self) -> None:
        barrier_arrive(TURN + 1 - self.index, CONSUMERS * WARPGROUP)
