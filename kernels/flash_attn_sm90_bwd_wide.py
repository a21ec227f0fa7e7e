"""Flash attention backward for Hopper, wide heads: `flash_attn_sm90_bwd` with consumers that share keys.

Registers hold dK and dV of 64 keys at D=256, and not of 128. So both consumers of a block have the same 64 keys: one
makes S, P and sums up dV, the other dP, dS and sums up dK. Each has its operand in registers as it made it. Two
blocks are a cluster, with 128 keys and the same tiles of queries. Each makes half of dQ's columns over all of these
keys, of its own dS and of the other one's, which comes by a copy between the two (`sm90.exchange`): half of the
additions. That takes a while, so a step makes dQ of the tile before:

| | consumer of values | in shared memory | consumer of keys |
|---|---|---|---|
| 1 | wait for S; P | P, float32, when dS before is there | dP = V dO^T |
| 2 | dV += P^T dO | dS, on its way to the other block | wait for dP, P; dS |
| 3 | a quarter of dQ before; the next tile's S | | a quarter of dQ before; dK += dS^T Q |
| 4 | wait for dV, then for dQ; add it up | | wait for dQ; add it up; wait for dK; the next tile's dP |

Beyond `WHOLE` columns tiles of dO come in chunks (`Sm90BackwardOptions.chunked`): dV is made chunk by chunk, each of
which is free for the next tile's as soon as it was read. There dK is started before dQ, and the next S behind both.

P has one slot: that of the next tile is written when dS of this one, which is made from it, is there. dS has two.
What dropout decides on P comes with it, a bit each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, anew, barrier_arrive, barrier_sync, elect_one, fence_async_shared
from fly.backends.nvvm.mbarrier import Position
from fly.ir import memory

from .flash_attn_sm90_bwd import prepare as prepare_with
from .problem.contract import Launch, Request, Tensors
from .problem.dropout_tile import DecidedTile, KeptTile
from .problem.gradients import HeadOfKeys, ScoreGradients, Weights, transposed
from .sm90.backward import BLOCK_M, CONSUMERS
from .sm90.consumer import WRITTEN, Consumer, State, Step
from .sm90.dq_sums import load, of_thread, put
from .sm90.dropout import made_again, remade
from .work.kept_pairs import KeptPairs

WEIGHED = 4  # named barrier: P is in shared memory
STORED = 5  # named barrier: dS of the block's keys is
OF_BOTH = 2  # groups of products of a piece of dQ: over the block's keys, and over the other one's


class Halves(Consumer):
    """One of two consumers of the same keys."""

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        """What the consumer sums up of dK and dV, as far as it is of the first `count` keys."""
        weights = fly.alloc_shared("weights", self.options.weight_bytes, 128)
        kept = {field.name: getattr(self, field.name) for field in fields(Consumer)}
        for number, kind in enumerate((_OfValues, _OfKeys)):
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

    @property
    def _own_decisions(self) -> fly.Pointer:
        """Where this thread's first word of dropout's decisions is."""
        behind = 4 * BLOCK_M * self.options.block_n
        return self.weights.offset(fly.thread_id.x % WARPGROUP * 4 + behind)

    def head(
        self, head: fly.Value, sums: tuple[fly.Value, ...], q_at: Position, dout_at: Position, slot: fly.Value
    ) -> tuple[Any, ...]:
        """All tiles of one query head: a step makes dQ of the tile before, as the other block's dS takes a while."""
        first, last = self._ends_of(head)
        end = self._through_last(last)

        def begun() -> State:
            return State(sums, self.start(q_at, dout_at, first), q_at, dout_at, slot)

        def one() -> tuple[Any, ...]:
            state = self.step(replace(first, last=True), begun())
            return state.sums, state.q_at, state.dout_at

        def several() -> tuple[Any, ...]:
            state = self.step(first, begun())
            state = self.step(end, self._through(first.number + 1, last, state))
            return state.sums, state.q_at, state.dout_at

        sums, q_at, dout_at = fly.cond(first.number == last.number, one, several)
        before = q_at.before(self.options.stages)
        self.meet_before()
        (part,) = wgmma.wait(0, self._dq_of_both(before))
        self.take(part, end.place, end.walk.tile(end.number), before)
        return sums, q_at, dout_at, slot

    def _dq_of_both(self, at: Position) -> fly.Value:
        """Start the consumer's piece of dS K of the tile in slots `at`, `OF_BOTH` groups over the cluster's keys."""
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


class _OfValues(_Half):
    """The consumer that sums up dV."""

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        dout, dim = self.buffers.dout, self.options.head_dim_v
        return tuple(fly.broadcast(fly.f32(0.0), dout.columns(i, dim) // 2) for i in range(dout.chunks))

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        self.write_values(dv, fly.concat(self.run()), count)

    def _of_values(self, made: Weights, j: fly.Value, decided: DecidedTile | None) -> tuple[fly.Value, ...]:
        """P of tile j as the A operand of dV; `decided`: what dropout does to it, if `made` does not know."""
        p = self._narrow(made.of_values)
        return p if decided is None else KeptPairs.of(made_again(decided, j), self.layout).only(p)

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
        if self.options.hands_decisions:
            self._hand_on(made, decided)
        barrier_arrive(WEIGHED, CONSUMERS * WARPGROUP)
        started = self._onto_chunks(self._of_values(made, j, decided), state, j)
        part = None if step.first else self._dq_of_both(before)
        q_next, scores, dv = q.ring.next(state.q_at), state.product, []
        ahead = not (self.options.chunked or step.last)
        if ahead:
            scores = self.scores(q_next, step.following)
        behind = len(started) + (0 if part is None else OF_BOTH) + ahead
        for place, product in zip(dout.places(state.dout_at), started, strict=True):
            behind -= 1
            dv += wgmma.wait(behind, product)
            dout.ring.release(place)
        if part is not None:
            (part,) = wgmma.wait(int(ahead), part)
            self.take(part, step.place, step.walk.tile(step.number - 1), before)
        if not (ahead or step.last):
            scores = self.scores(q_next, step.following)
        return State(tuple(dv), scores, q_next, dout.after(state.dout_at), state.slot)

    def _hand_on(self, made: Weights, decided: DecidedTile | None) -> None:
        """What dropout decides, for the other consumer; `decided`: as of `_of_values`."""
        if decided is None:
            assert made.kept is not None
            decided = made.kept.decided
        for i, word in enumerate(decided.words.values()):
            fly.store(word, self._own_decisions.offset(i * WARPGROUP * 4), align=4)

    def _onto_chunks(self, p: tuple[fly.Value, ...], state: State, j: fly.Value) -> list[fly.Value]:
        """Start dV += P^T dO, a group for each chunk."""
        dout = self.buffers.dout
        for place in dout.places(state.dout_at):
            self._arrived(dout, place, lambda: j)
        return [
            self._onto_values(p, place, dv) for place, dv in zip(dout.places(state.dout_at), state.sums, strict=True)
        ]

    def meet_before(self) -> None:
        """Until dS of the tile before is in shared memory, and P of it has been read."""
        barrier_sync(WRITTEN, CONSUMERS * WARPGROUP)


class _OfKeys(_Half):
    """The consumer that sums up dK, and has written dS itself."""

    @property
    def zeros(self) -> tuple[fly.Value, ...]:
        return super().zeros[:1]

    def write(self, dk: fly.Tensor, dv: fly.Tensor, count: fly.Value) -> None:
        (values,) = self.run()
        self.write_keys(dk, values, count)

    def start(self, q_at: Position, dout_at: Position, step: Step) -> fly.Value:
        return self.excess(dout_at, step.walk.tile(step.number))

    def step(self, step: Step, state: State) -> State:
        """One tile of queries, whose dP is in flight; then the next one's is, but behind the last."""
        assert self.exchange is not None
        q, dout = self.buffers.q, self.buffers.dout
        j, before = step.walk.tile(step.number), state.q_at.before(self.options.stages)
        (excess,) = wgmma.wait(0, state.product)
        barrier_sync(WEIGHED, CONSUMERS * WARPGROUP)
        ds = self._pulled(*self._weights(step, j), excess, state.dout_at, j, step)
        self.exchange.claim(state.q_at)
        self._hand_over(ds, state.q_at.index)
        # not before: loads of -delta may wait behind additions for longer than the next tile takes to arrive
        dout.release(state.dout_at)
        with fly.when((fly.thread_id.x % WARPGROUP < 32) & elect_one()):
            self.exchange.send(state.q_at)
        # where dO comes in chunks dK comes first: it does not wait for the other block's dS
        names, started = ("dk", "dq") if self.options.chunked else ("dq", "dk"), {}
        for name in names:
            if name == "dk":
                self._arrived(q, state.q_at, lambda: j)
                started[name] = self._onto_keys(ds, state.q_at, *state.sums)
            elif not step.first:
                started[name] = self._dq_of_both(before)
        groups = {"dk": 1, "dq": OF_BOTH}
        behind = sum(groups[name] for name in started)
        for name, product in started.items():
            behind -= groups[name]
            (result,) = wgmma.wait(behind, product)
            if name == "dk":
                dk = result
                q.ring.release(state.q_at)
            else:
                self.take(result, step.place, step.walk.tile(step.number - 1), before)
        dout_next = dout.after(state.dout_at)
        excess = state.product if step.last else self.excess(dout_next, step.walk.tile(step.number + 1))
        return State((dk,), excess, q.ring.next(state.q_at), dout_next, state.slot)

    def _hand_over(self, ds: tuple[fly.Value, ...], slot: Any) -> None:
        """dS to shared memory, for this consumer's products and then for the other one, which is not waited for."""
        self._store(ds, slot)
        fence_async_shared()
        barrier_sync(STORED, WARPGROUP)
        barrier_arrive(WRITTEN, CONSUMERS * WARPGROUP)

    def _weights(self, step: Step, j: fly.Value) -> tuple[Weights, KeptPairs | None]:
        """P of tile j, which the other consumer made, with scores' derivatives in it, and what dropout keeps of it.

        `Weights` know that themselves unless it was decided before the scores.
        """
        values = load(BLOCK_M * self.options.block_n // WARPGROUP, self._own_weights)
        found = transposed(fly.Fragment(self.layout, ((values,),)))
        dropout = step.given.dropout(step.place)
        if dropout is None:
            return Weights(found, ScoreGradients), None
        if not self.options.hands_decisions:
            kept = remade(dropout, j).kept(found, j * BLOCK_M, anew(self.block.first_key, j))
            return Weights(found, ScoreGradients, kept), None
        places = range(0, BLOCK_M * self.options.block_n // 8, WARPGROUP * 4)
        words = [memory.load(self._own_decisions.offset(place), fly.i32) for place in places]
        if self.options.thrift.decides:
            decided = DecidedTile.of_words(words, self.layout, "columns")
            return Weights(found, ScoreGradients), KeptPairs.of(decided, self.layout)
        decided = DecidedTile.of_words(words, found.layout, "rows")
        return Weights(found, ScoreGradients, KeptTile(decided, found.layout)), None


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind the backward pass of one kind of call: see `flash_attn_sm90_bwd.prepare`."""
    return prepare_with(tensors, request, Halves)
