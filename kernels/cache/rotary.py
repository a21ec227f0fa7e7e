"""Rotary position embeddings (Su et al., "RoFormer", 2021) on a few elements of a head at a time.

Of a head x at position p, each pair of dimensions is turned by an angle, whose cosine and sine are row p of two
tables (positions, dim / 2):

    interleaved: pairs (2i, 2i + 1)        halves: pairs (i, i + dim / 2)        for i below dim / 2

    first'  = first * cos[p, i] - second * sin[p, i]
    second' = first * sin[p, i] + second * cos[p, i]

computed in f32 and rounded once. Dimensions from `dim` on stay as they are, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import fly
from fly.errors import ShapeError

VECTOR = 8  # elements of a head that a thread has: 16 bytes
DIM_STEP = 2 * VECTOR  # so that both halves are whole vectors


@dataclass(frozen=True)
class Rotary:
    """The static side: `dim` dimensions are turned, a multiple of 16, in `interleaved` pairs or in halves.

    Raises:
        ShapeError: another `dim`.
    """

    dim: int
    interleaved: bool

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % DIM_STEP:
            raise ShapeError(f"rotary dim is {self.dim}; expected a positive multiple of {DIM_STEP}")

    def piece(self, head: fly.Window, column: fly.Value, cos: fly.Window, sin: fly.Window) -> fly.Value:
        """Elements [column, column + 8) of a turned head, in its dtype; `column` is a multiple of 8.

        `head` is a window of that one row, `cos` and `sin` of the row of its position.
        """
        x = head.load_inside(0, column, VECTOR)
        turned = self._interleaved if self.interleaved else self._halves
        if self.dim == head.view.columns:
            return turned(x, head, column, cos, sin)
        piece: fly.Value = fly.cond(column < self.dim, lambda: turned(x, head, column, cos, sin), lambda: x)
        return piece

    def _interleaved(
        self, x: fly.Value, head: fly.Window, column: fly.Value, cos: fly.Window, sin: fly.Window
    ) -> fly.Value:
        c, s = (table.load_inside(0, column // 2, VECTOR // 2).to(fly.f32) for table in (cos, sin))
        first, second = (x[start::2].to(fly.f32) for start in (0, 1))
        pairs = zip(first * c - second * s, first * s + second * c)
        return fly.from_elements([element for pair in pairs for element in pair]).to(x.dtype)

    def _halves(
        self, x: fly.Value, head: fly.Window, column: fly.Value, cos: fly.Window, sin: fly.Window
    ) -> fly.Value:
        # every thread loads its partner's elements too, which its wave has in the cache, and stores only its own
        half = self.dim // 2
        in_first = column < half
        angle = fly.select(in_first, column, column - half)
        partner = head.load_inside(0, fly.select(in_first, column + half, angle), VECTOR).to(fly.f32)
        c, s = (table.load_inside(0, angle, VECTOR).to(fly.f32) for table in (cos, sin))
        return (x.to(fly.f32) * c + partner * fly.select(in_first, -s, s)).to(x.dtype)
