"""In which order the blocks of the Hopper backward kernel start: key heads side by side, section after section.

A grid is (blocks of key heads side by side, clusters of keys, sections of heads): devices start blocks along x
first. Under a causal mask the first keys' blocks take longest. Heads one after the other would end the launch with a
few long blocks beside idle multiprocessors; side by side they start from the longest to the shortest, section after
section. Sections are no larger, as what a head reads and adds to stays in the level-2 cache as long as it is in work.
"""

from __future__ import annotations

from typing import Any

import fly
from fly.errors import ShapeError

from ..problem.contract import Request
from ..work.tile_scheduler import MAX_GRID_YZ
from .backward import Sm90BackwardOptions

_IN_TURN = 2  # waves of blocks of a section
_LONG = 2048  # queries
_FEW = 8  # waves of blocks


def heads_of_wave(blocks: int, units: int) -> int:
    """Of so many key heads are about all blocks in work at a time, with `blocks` each on `units` multiprocessors."""
    return max(1, round(units / blocks))


def heads_beside(request: Request, options: Sm90BackwardOptions, slices: int, blocks: int, units: int) -> int:
    """How many of all `slices`, key heads or parts of them of `blocks` each, are side by side.

    `units`: multiprocessors. Blocks of one head that add in turn are a step apart, however many of these are free: so
    those start blocks of several heads, twice as many as are in work at a time. A causal section has about as many
    blocks as are in work. Where all blocks take the same time, heads follow each other, and, as measured on an H100,
    where there are many waves of short blocks, or of blocks of wide heads, which wait for the level-2 cache.
    """
    if options.ordered:
        return -(-units // blocks) * _IN_TURN
    ends_uneven = (request.seq_len >= _LONG and not options.apart) or slices * blocks < _FEW * units
    return heads_of_wave(blocks, units) if options.sectioned and ends_uneven else 1


def grid(clusters: int, slices: int, blocks: int, beside: int) -> tuple[int, int, int]:
    """Of `slices` key heads with so many `clusters` of `blocks` each, about `beside` of them side by side.

    Raises:
        ShapeError: more keys than there may be blocks along y.
    """
    if clusters > MAX_GRID_YZ:
        raise ShapeError(f"seq_len_kv takes {clusters} blocks of keys; the Hopper backward kernel has {MAX_GRID_YZ}")
    sections = -(-slices // max(beside, -(-slices // MAX_GRID_YZ)))
    return -(-slices // sections) * blocks, clusters, sections


def head_of_block(heads: Any, sequences: Any, blocks: int) -> tuple[fly.Value, fly.Value, fly.Value]:
    """(key head, sequence, whether the block has any) in such a grid."""
    beside, column = (fly.grid_dim.x // blocks, fly.block_id.x // blocks)
    place, slices = fly.block_id.z * beside + column, heads * sequences
    slice_ = fly.minimum(place, slices - 1)
    sequence = slice_ // heads
    return slice_ - sequence * heads, sequence, place < slices
