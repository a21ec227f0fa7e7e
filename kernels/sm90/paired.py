"""Consumers of the Hopper backward kernel in clusters of two blocks, which make dQ of every other tile each.

Additions to dQ, in float32, are what blocks of 128 keys ask of the second-level cache, and what a tile costs beside
its products. Two blocks that add what all of their 256 keys give to a tile add half as often. So tiles pass by in
pairs: of the first one a block sends its dS to the other block, of the second one it gets the other block's, and makes
dQ. What comes second in the one block comes first in the other.

| | started before | then |
|---|---|---|
| 1 to 2, both tiles | S | as `sm90.consumer` does, to dS |
| 3, the first | dV | dS to shared memory and on its way; dK += dS^T Q; wait for dV |
| 3, the second | dV | dS to shared memory; dQ = dS K of the other block's keys, then of the own; dK += dS^T Q; wait for dQ; add it up |
| 4, both | dK | the next tile's S; wait for dK |

The other block's dS has a tile's time to arrive, and the other consumer's of this block as long as a product takes.
"""  # noqa: E501  # a table

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP, barrier_sync, elect_one, fence_async_shared
from fly.backends.nvvm.mbarrier import Position

from ..problem.features import NO_FEATURES
from .backward import BLOCK_N, LATER, Sm90BackwardOptions
from .consumer import Consumer, State, Step

STORED = 4  # first named barrier of the consumers' own: dS that is sent is in shared memory
LONG = {False: 1536, True: 4096}  # tokens of a sequence from which on pairs are faster, by whether it is causal


def pays(options: Sm90BackwardOptions, queries: int, keys: int) -> bool:
    """Whether a build is to have pairs, by how many queries and keys a sequence has on average.

    As measured on an H100. Short sequences have more keys past their end in larger clusters, and under a causal mask
    the keys of its second block see nothing of the first tiles.
    """
    plain = options.features == NO_FEATURES and not (options.ordered or options.apart)
    dim = max(options.head_dim, options.head_dim_v)
    return plain and LATER < dim <= BLOCK_N and min(queries, keys) >= LONG[options.causal]


class Paired(Consumer):
    """One consumer warpgroup of a block of a cluster; each query head has a whole number of pairs."""

    def head(
        self, head: fly.Value, sums: tuple[fly.Value, ...], q_at: Position, dout_at: Position, slot: Any
    ) -> tuple[Any, ...]:
        """All tiles of one query head, in pairs."""
        first, last = self._ends_of(head)
        state = State(sums, self.start(q_at, dout_at, first), q_at, dout_at, slot)
        state = self._pair(last, self._through(first.number, last, state))
        return state.sums, state.q_at, state.dout_at, state.slot

    def _through(self, first: Any, last: Step, state: State) -> State:
        """Pairs from that of step `first` to the `last` one's, which is not one of them."""
        tiles, end = last.walk.tiles, last.number - 1

        def whole(number: Any) -> Any:
            return tiles.first + (number - tiles.first) // 2 * 2

        whole_from = fly.first_lane(fly.minimum(fly.maximum(whole(tiles.whole_from + 1), first), end))
        whole_end = fly.first_lane(fly.minimum(fly.maximum(whole(tiles.whole_end), whole_from), end))
        for start, stop, masked in (
            (first, whole_from, True),
            (whole_from, whole_end, False),
            (whole_end, end, True),
        ):
            for number, carried in (loop := fly.range(start, stop, 2, carry=state)):
                loop.next(self._pair(replace(last, number=number + 1, masked=masked, last=False), carried))
            state = loop.results
        return state

    def _pair(self, second: Step, state: State) -> State:
        """Two tiles of queries, the first one's S in flight; then the next pair's is, but behind the last."""
        first = replace(second, number=second.number - 1, last=False)
        return self._own(second, self._sent(first, state))

    def _of_pair(self, state: State) -> Position:
        """Where dS is: one slot is the own one, one to send, one the other block's, each used once a pair."""
        return Position(fly.i32(0), state.q_at.phase)

    def _sent(self, step: Step, state: State) -> State:
        """One tile of queries, of which the other block makes dQ."""
        exchange = self.exchange
        assert exchange is not None
        q, dout, at = self.buffers.q, self.buffers.dout, self._of_pair(state)
        _, ds, dv = self._through_ds(step, state)
        exchange.claim(at)
        self._store(ds, exchange.sent(at))
        fence_async_shared()
        barrier_sync(STORED + self.index, WARPGROUP)
        sender = fly.first_lane(self.index)  # one register for all lanes
        with fly.when((fly.thread_id.x % WARPGROUP < 32) & elect_one()):
            exchange.send(at, sender)
        dk = self._onto_keys(ds, state.q_at, state.sums[0])
        (dv,) = wgmma.wait(1, dv)
        dout.ring.release(state.dout_at)
        q_next = q.ring.next(state.q_at)
        scores = self.scores(q_next, step.following)
        (dk,) = wgmma.wait(1, dk)
        q.ring.release(state.q_at)
        return State((dk, dv), scores, q_next, dout.ring.next(state.dout_at), state.slot)

    def _own(self, step: Step, state: State) -> State:
        """One tile of queries, of which this block makes dQ."""
        exchange, buffers = self.exchange, self.buffers
        assert exchange is not None and buffers.beside is not None and buffers.written is not None
        q, dout, at = buffers.q, buffers.dout, self._of_pair(state)
        j, ds, dv = self._through_ds(step, state)
        self._publish(ds, at.index)
        part = self._part_of_dq(exchange.wait(at), buffers.beside, self.options.beside_tile, self.piece)
        buffers.written.wait(at.index, at.phase)
        part = self._part_of_dq(at.index, buffers.k, self.options.tiles["k"], self.piece, part)
        dk = self._onto_keys(ds, state.q_at, state.sums[0])
        part, dv = wgmma.wait(1, part, dv)
        dout.ring.release(state.dout_at)
        exchange.release(at)
        # the last pair may have a tile behind the last one
        with fly.when(j < self.work.tiles.end):
            self.add(part, step.place.head, j, state.q_at)
        q_next = q.ring.next(state.q_at)
        scores = state.product if step.last else self.scores(q_next, step.following)
        (dk,) = wgmma.wait(0 if step.last else 1, dk)
        q.ring.release(state.q_at)
        return State((dk, dv), scores, q_next, dout.ring.next(state.dout_at), state.slot)
