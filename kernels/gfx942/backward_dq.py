"""A tile's part of dQ on its way to the sums, in steps that stand between matrix instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fly

from ..gfx950.dq_sums import LANES, Sums


class StepwiseSums(Sums):
    """`gfx950.dq_sums` whose additions know where they go before there is anything to add."""

    def steps(
        self, part: Callable[[], fly.Fragment], count: int, head: Any, tile: Any
    ) -> tuple[Callable[[], None], list[Callable[[], None]]]:
        """A step that finds the place of a tile, and one for each of `count` registers of its part."""
        places: list[fly.Pointer] = []
        values: list[Iterator[fly.Value]] = []

        def find() -> None:
            places.append(self.of_lane(head, tile))

        def add(i: int) -> None:
            if not values:
                values.append(value for row in part().tiles for of_tile in row for value in of_tile)
            fly.atomic_add(next(values[0]), places[0].offset(i * LANES * 4))

        return find, [lambda i=i: add(i) for i in range(count)]  # type: ignore[misc]
