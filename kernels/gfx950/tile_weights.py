"""P and dS of a wave's tile in the gfx950 backward kernel: vector instructions between matrix instructions.

`PlainWeights` makes them a few elements at a time, in the order in which the products take them: elements that are
queries of the first product first, of all row tiles. `WholeWeights` makes a tile's at once, whatever changes scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import fly

from ..problem.gradients import Weights, transposed
from .operand_queue import Compute

TOGETHER = 2  # elements that become one register of an operand
STORED = 4  # elements of a store to LDS


class TileWeights:
    """What both are: operands as they are made.

    `weigh`, `pull`: the steps that make P, and dS from dP - delta, which is stored to LDS too.
    """

    def __init__(self, link: fly.Chain, dtype: fly.DType):
        self.link, self.dtype = link, dtype
        self.weigh: list[Compute] = []
        self.pull: list[Compute] = []

    def begin(self) -> None:
        """What is read before the first step."""

    def p(self, t: int) -> Sequence[fly.Value]:
        """The operands of P in step t over the tile's queries, one a row tile."""
        raise NotImplementedError

    def ds(self, t: int) -> Sequence[fly.Value]:
        """The same of dS."""
        raise NotImplementedError

    def narrow(self, values: fly.Value) -> fly.Value:
        """In 16 bits."""
        found: fly.Value = values.to(self.dtype, rounding="nearest_any")
        return found


class PlainWeights(TileWeights):
    """Of scores that nothing changes.

    Args:
        scores, excess: S, and dP - delta, when a step is traced.
        lse: the rows' log-sum-exp, of so many of a tile's registers from one on; read a few steps ahead.
        store: puts a part of dS into LDS: (values, row tile, their first register).
    """

    def __init__(
        self,
        link: fly.Chain,
        dtype: fly.DType,
        row_tiles: int,
        scale: fly.Value,
        scores: Callable[[], fly.Fragment],
        lse: Callable[[int, int], Sequence[fly.Value]],
        excess: Callable[[], fly.Fragment],
        store: Callable[[fly.Value, int, int], None],
    ):
        super().__init__(link, dtype)
        self.scale, self.scores, self.excess, self.store = scale, scores, excess, store
        self._weights: dict[tuple[int, int], fly.Value] = {}
        self._p: dict[tuple[int, int], fly.Value] = {}
        self._ds: dict[tuple[int, int], fly.Value] = {}
        values = link.layout.values
        self._late: list[Callable[[], None]] = []
        self._lse: dict[int, fly.Value] = {}
        self._read = lse
        for first in range(0, values, STORED):
            if first:
                self.weigh.insert(len(self.weigh) - 2 * row_tiles, Compute(partial(self._look, first)))
            for r in range(row_tiles):
                for i in range(first, first + STORED, TOGETHER):
                    self.weigh.append(Compute(partial(self._weigh, r, i)))
                    self.pull.append(Compute(partial(self._pull, r, i)))
                self.pull.append(Compute(partial(self._store, r, first)))
        self.weigh.append(Compute(self._narrow_last))

    def begin(self) -> None:
        self._look(0)

    def _look(self, first: int) -> None:
        self._lse.update(zip(range(first, first + STORED), self._read(first, STORED), strict=True))

    def _weigh(self, r: int, first: int) -> None:
        tile, lse = self.scores().tiles[r][0], self._lse
        places = range(first, first + TOGETHER)
        found = [fly.exp2(fly.fma(tile[i], self.scale, -lse[i])) for i in places]
        self._narrow_last()  # a register's exponentials are used a step later: right behind them they are waited for
        self._weights.update({(r, i): x for i, x in zip(places, found, strict=True)})
        self._late.append(partial(self._put, self._p, r, first, found))

    def _narrow_last(self) -> None:
        while self._late:
            self._late.pop()()

    def _put(self, into: dict[tuple[int, int], fly.Value], r: int, first: int, found: list[fly.Value]) -> None:
        # words, or LLVM narrows a tile's elements all at once
        (into[r, first],) = self.narrow(fly.from_elements(found)).bitcast(fly.i32)

    def _pull(self, r: int, first: int) -> None:
        tile = self.excess().tiles[r][0]
        self._put(self._ds, r, first, [tile[i] * self._weights[r, i] for i in range(first, first + TOGETHER)])

    def _store(self, r: int, first: int) -> None:
        self.store(self._words(self._ds, r, first, STORED), r, first)

    def _words(self, made: dict[tuple[int, int], fly.Value], r: int, first: int, count: int) -> fly.Value:
        words = fly.from_elements([made[r, i] for i in range(first, first + count, TOGETHER)])
        return words.bitcast(self.dtype)

    def _operands(self, made: dict[tuple[int, int], fly.Value], t: int) -> list[fly.Value]:
        count = self.link.atom.values(self.link.row_operand)
        return [self._words(made, r, t * count, count) for r in range(len(self.scores().tiles))]

    def p(self, t: int) -> Sequence[fly.Value]:
        self._narrow_last()
        return self._operands(self._p, t)

    def ds(self, t: int) -> Sequence[fly.Value]:
        return self._operands(self._ds, t)


class WholeWeights(TileWeights):
    """Of whatever `weights` makes of scores.

    Args:
        weights: `problem.gradients.weights` of the tile, with queries as rows.
        excess, less: dP - delta, and -delta, when a step is traced. store: puts dS into LDS.
    """

    def __init__(
        self,
        link: fly.Chain,
        dtype: fly.DType,
        weights: Callable[[], Weights],
        excess: Callable[[], fly.Fragment],
        less: Callable[[], fly.Fragment],
        store: Callable[[fly.Fragment], None],
    ):
        super().__init__(link, dtype)
        made: list[Weights] = []
        self._p: list[list[fly.Value]] = []
        self._ds: list[list[fly.Value]] = []

        def weigh() -> None:
            made.append(weights())
            self._p.extend(self._operands(made[0].of_values))

        def pull() -> None:
            found = made[0].score_gradients(transposed(excess()), transposed(less())).raw
            self._ds.extend(self._operands(found))
            store(transposed(found).map(lambda x, r, c: self.narrow(x)))

        self.weigh, self.pull = [Compute(weigh)], [Compute(pull)]

    def _operands(self, found: fly.Fragment) -> Iterator[list[fly.Value]]:
        """Of each row tile."""
        narrow = transposed(found).map(lambda x, r, c: self.narrow(x))
        return (self.link.operands(row) for row in narrow.tiles)

    def p(self, t: int) -> Sequence[fly.Value]:
        return [row[t] for row in self._p]

    def ds(self, t: int) -> Sequence[fly.Value]:
        return [row[t] for row in self._ds]
