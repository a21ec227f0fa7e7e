"""P and dS of a tile in the gfx942 backward kernel, pair by pair of a lane's elements.

Vector instructions run beside matrix ones, but for packed ones: so elements are taken one by one, and in steps that
are few enough to stand between two matrix instructions. dP's accumulators begin as delta and V is negated, so that
they hold delta - dP: P times them is -dS, for which no subtraction is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly
from fly.ir import memory

from ..problem.gradients import Weights, transposed
from .backward_tiles import Loads


def negated(operand: fly.Value) -> fly.Value:
    """An operand of 16-bit floats with other signs."""
    words = operand.bitcast(fly.i32) ^ -(2**31 - 2**15)
    return words.bitcast(operand.dtype)


@dataclass(frozen=True)
class Statistics:
    """Of the queries of a tile: log-sum-exp in log2 units and delta, a register for each of an accumulator tile."""

    lse: fly.Value
    delta: fly.Value

    @staticmethod
    def of(loads: Sequence[Loads]) -> Statistics:
        """What `load` gave, traced."""
        return Statistics(*(fly.concat(x.values) for x in loads))

    @staticmethod
    def load(layout: fly.AccumulatorLayout, sources: Sequence[fly.Tensor], first: Any) -> list[Loads]:
        """Loads from query `first` on, zeros past the end."""
        return [_by_columns(layout, source, first) for source in sources]


def _by_columns(layout: fly.AccumulatorLayout, source: fly.Tensor, first: Any) -> Loads:
    """Of each register of an accumulator tile, the vector's element of its column."""
    size, run = fly.f32.bytes, layout.run
    lane = layout.first_column() * size
    return Loads(
        lambda: source.at(first),
        lambda: (source.shape[0] - fly.minimum(source.shape[0], first)) * size,
        [
            # words at any address of a word: `align` is what they are cut into
            lambda base, bound, at=layout.value_columns[v] * size: memory.load_bounded(  # type: ignore[misc]
                base, lane + at, bound, fly.f32, run, align=size
            )
            for v in range(0, layout.values, run)
        ],
    )


class Pairs:
    """Elements of a tile's fragment in 16 bits, which are made pair by pair: operands of a chain's next product."""

    def __init__(self, link: fly.Chain, row_tiles: int):
        self.values = link.atom.values(link.row_operand)
        self.pairs: list[list[fly.Value]] = [[] for _ in range(row_tiles)]

    @staticmethod
    def of(link: fly.Chain, fragment: fly.Fragment) -> Pairs:
        """A fragment of one column tile that is there already."""
        found = Pairs(link, len(fragment.tiles))
        found.pairs = [[tile[v : v + 2] for v in range(0, len(tile), 2)] for (tile,) in fragment.tiles]
        return found

    def operands(self, t: int) -> list[fly.Value]:
        """Those of a step, one a row tile."""
        count = self.values // 2
        return [fly.concat(row[t * count : (t + 1) * count]) for row in self.pairs]


class Plain:
    """P and -dS where nothing modifies scores."""

    def __init__(self, link: fly.Chain, dtype: fly.DType, row_tiles: int, scale_log2: fly.Value):
        self.dtype, self.scale, self.count = dtype, scale_log2, link.layout.values
        self.p, self.ds = Pairs(link, row_tiles), Pairs(link, row_tiles)
        self.exact: list[list[fly.Value]] = [[] for _ in range(row_tiles)]

    def weigh(self, scores: Callable[[], fly.Fragment], lse: fly.Value) -> Iterator[Callable[[], None]]:
        """Steps that make P of S, an element each; every other one narrows two, and makes no exponent before."""
        exponents: list[list[fly.Value]] = [[] for _ in self.exact]

        def exponent(v: int, r: int) -> None:
            (tile,) = scores().tiles[r]
            exponents[r].append(fly.fma(tile[v], self.scale, -lse[v]))

        def first(v: int, r: int) -> None:
            exponent(v, r)
            self.exact[r].append(fly.exp2(exponents[r][v]))
            exponent(v + 1, r)

        def second(v: int, r: int) -> None:
            self.exact[r].append(fly.exp2(exponents[r][v]))
            self.p.pairs[r].append(self._narrow(self.exact[r][v - 1 :]))

        for v in range(self.count):
            for r in range(len(self.exact)):
                yield partial(second if v % 2 else first, v, r)

    def pull(
        self, excess: Callable[[], fly.Fragment], store: Callable[[int, int, fly.Value], None]
    ) -> Iterator[Callable[[], None]]:
        """Steps that make -dS of P and delta - dP, and give it to `store(row tile, register, element)`."""
        for v in range(0, self.count, 2):
            for r in range(len(self.exact)):

                def run(v: int = v, r: int = r) -> None:
                    (tile,) = excess().tiles[r]
                    pair = self._narrow([self.exact[r][i] * tile[i] for i in (v, v + 1)])
                    self.ds.pairs[r].append(pair)
                    store(r, v, pair[0])
                    store(r, v + 1, pair[1])

                yield run

    def _narrow(self, pair: list[fly.Value]) -> fly.Value:
        return fly.from_elements(pair).to(self.dtype, rounding="nearest_any")


def minus_score_gradients(made: Weights, excess: fly.Fragment, deltas: fly.Value) -> fly.Fragment:
    """-dS of modified scores, keys as rows, from delta - dP."""
    less = fly.Fragment(excess.layout, tuple((-deltas,) for _ in excess.tiles))
    found = made.score_gradients(transposed(excess.map(lambda x, r, c: -x)), transposed(less)).raw
    return transposed(found).map(lambda x, r, c: -x)
