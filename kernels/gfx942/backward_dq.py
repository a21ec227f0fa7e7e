"""A tile's part of dQ on its way to the sums, in steps that stand between matrix instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fly

from ..gfx950.dq_sums import Sums


def steps(
    sums: Sums, part: Callable[[], fly.Fragment], count: int, head: Any, tile: Any
) -> tuple[Callable[[], None], list[Callable[[], None]]]:
    """A step that finds the place of a tile, and the additions of `count` registers of its part.

    They know where they go before there is anything to add.
    """
    places: list[Any] = []
    values: list[Iterator[fly.Value]] = []

    def find() -> None:
        places.append(sums.of_lane(head, tile))

    def add(number: int) -> None:
        if not values:
            values.append(value for row in part().tiles for of_tile in row for value in of_tile)
        sums.add_some(number, [next(values[0]) for _ in range(sums.together)], places[0])

    return find, [lambda i=i: add(i) for i in range(count // sums.together)]  # type: ignore[misc]
