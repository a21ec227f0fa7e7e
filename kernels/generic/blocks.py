"""What blocks of the generic kernels do alike: which rows a wave has, and the loop over tiles that pass by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly

from ..problem.mask import TileRange
from ..work.fragments import row_numbers


@dataclass(frozen=True)
class WaveRows:
    """The rows of a wave: `count` from `first` on, `offset` rows into its block's; the lane's rows are `numbers`."""

    count: int
    offset: fly.Value
    first: fly.Value
    numbers: fly.RowVector

    @staticmethod
    def of(layout: fly.AccumulatorLayout, block_first: fly.Value, count: int) -> WaveRows:
        """Of this wave, in a block from row `block_first` on whose waves have `count` rows each."""
        offset = fly.wave_id() * count
        first = block_first + offset
        return WaveRows(count, offset, first, row_numbers(layout, count // layout.rows, first))

    def load(self, vector: Any, length: fly.Value) -> fly.RowVector:
        """A number for each row, of `length` in `vector`; rows past the end have the last one's."""
        last = length - 1
        return self.numbers.map(lambda row: vector.load(fly.minimum(row, last)))


def uniform(number: Any) -> fly.Value:
    """A number that is the same in every lane, a Python int too, in a scalar register."""
    return fly.first_lane(fly.i32(0) + number)


Step = Callable[[Any, tuple[Any, ...], bool], tuple[Any, ...]]  # (step, carry, whether it is masked) -> carry


def walk(tiles: TileRange, state: tuple[Any, ...], step: Step, *, always_masked: bool) -> tuple[Any, ...]:
    """`step` over all tiles of a range, or of a list, masked where some row does not see a tile whole."""
    first, end = (uniform(number) for number in (tiles.first, tiles.end))
    if always_masked:
        parts = [(first, end, True)]
    else:
        to_the_end = tiles.whole_end is tiles.end
        whole_from = fly.first_lane(fly.maximum(tiles.whole_from, first))
        whole_end = end if to_the_end else fly.first_lane(fly.minimum(fly.maximum(tiles.whole_end, whole_from), end))
        parts = [(first, whole_from, True), (whole_from, whole_end, False), (whole_end, end, True)]
        if isinstance(tiles.whole_from, int) and tiles.whole_from == 0:
            parts = parts[1:]
        if to_the_end:
            parts = parts[:-1]
    for start, stop, masked in parts:
        for j, carried in (loop := fly.range(start, stop, carry=state)):
            loop.next(*step(j, carried, masked))
        state = tuple(loop.results)
    return state
