"""The stages between a tile's products with keys and the softmax, once for all kernels: bias, modifiers and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import fly

from ..problem.features import BoundFeatures
from ..problem.gradients import tile_by_tile
from .fragments import row_numbers
from .tile_scheduler import Work


@dataclass(frozen=True)
class OfHead:
    """What a head's scores need: `given`, with what is loaded once, and the scale of raw ones, in log2 units."""

    given: BoundFeatures
    scale_log2: fly.Value

    @property
    def scale(self) -> fly.Value:
        """What the softmax multiplies scores by."""
        return self.given.scale(self.scale_log2)


@dataclass(frozen=True)
class ScoreStages:
    """What is done to raw scores of `rows`, query indices, with tiles of `block_n` keys.

    `work` tells whose they are; `given` are a call's features, with what is one number a head loaded or not. A tile
    is the number of a key tile; with a block mask's list, `step` is where in the list one is.
    `anew`: the first of `rows`, where `modify` makes them again.
    """

    work: Work
    given: BoundFeatures
    scale_log2: fly.Value
    rows: fly.RowVector
    block_n: int
    anew: fly.Value | None = None

    def remade(self, first_row: fly.Value) -> ScoreStages:
        """The same with the rows from `first_row` on made again: nothing that comes of them is kept over a loop."""
        return replace(self, rows=row_numbers(self.rows.layout, len(self.rows.values), fly.remade(first_row)))

    def bias(self, tile: Callable[[], Any]) -> fly.Fragment | None:
        """The bias of a tile, if there is one: to be called before the products, on its way while they are."""
        return self.given.load_bias(self.block_n, lambda: (self.rows, tile() * self.block_n, self.work))

    def modify(self, scores: fly.Fragment, tile: Any, bias: fly.Fragment | None = None) -> fly.Fragment:
        """Scores as the softmax takes them, not masked."""
        stages = self if self.anew is None else self.remade(self.anew)
        return self.given.modify(scores, self.scale_log2, stages.rows, tile * self.block_n, self.work, bias)

    def limit(
        self, scores: fly.Fragment, tile: Any, between: Callable[[], None] | None = None, column: int = 0
    ) -> fly.Fragment:
        """-inf for what lengths, causality and windows hide; `between`: see `KeyRange.apply`.

        `column`: the first of `scores`, where these are a part of the tile.
        """
        return self.work.keys.apply(scores, self.rows, self._first_key(tile, column), between)

    def hide(self, scores: fly.Fragment, tile: Any, one_by_one: bool = False, column: int = 0) -> fly.Fragment:
        """-inf for what a `mask_mod` hides, where there is one; `one_by_one`: see `BoundFeatures.mask`."""
        return self.given.mask(scores, self.rows, self._first_key(tile, column), self.work, one_by_one)

    def _first_key(self, tile: Any, column: int) -> Any:
        first = tile * self.block_n
        return first + column if column else first

    def limit_unless_whole(self, scores: fly.Fragment, tile: Any) -> fly.Fragment:
        """`limit` of a listed tile that is not seen whole, behind a test: most are."""
        assert self.work.seen is not None
        limited: fly.Fragment = fly.cond(
            self.work.seen.sees_whole(tile), lambda: scores, lambda: self.limit(scores, tile)
        )
        return limited

    def mask(self, scores: fly.Fragment, tile: Any, masked: bool, in_parts: bool = False) -> fly.Fragment:
        """All masks of a tile of a loop that is `masked`; of others, what cuts a list's whole blocks.

        `in_parts`: by `tile_by_tile`, and a part's comparisons with limits before those of a `mask_mod`.
        """
        between = fly.sched_barrier if in_parts else None

        def both(part: fly.Fragment, column: int) -> fly.Fragment:
            return self.hide(self.limit(part, tile, between, column), tile, column=column)

        if masked:
            return tile_by_tile(scores, both) if in_parts else both(scores, 0)
        return scores if self.work.listed is None else self.limit_unless_whole(scores, tile)

    def mask_step(self, scores: fly.Fragment, step: Any, tile: Any) -> fly.Fragment:
        """All masks of a list's step of either kind; most steps are whole, and test it once."""
        assert self.work.seen is not None
        whole = step < self.work.tiles.whole_end

        def masked() -> fly.Fragment:
            kept = self.limit(scores, tile)
            hidden: fly.Fragment = fly.cond(whole, lambda: kept, lambda: self.hide(kept, tile))
            return hidden

        seen: fly.Fragment = fly.cond(whole & self.work.seen.sees_whole(tile), lambda: scores, masked)
        return seen
