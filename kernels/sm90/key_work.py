"""What a block of the Hopper backward kernel works on: its keys, and the tiles of queries that pass by."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any

import fly
from fly.backends.nvvm.intrinsics import anew

from ..problem.features import BoundFeatures
from ..problem.mask import KeyRange, QueryRange, TileRange
from ..work.sequences import Sequence as Tokens
from ..work.sequences import Uniform, alone
from ..work.tile_scheduler import head_of_block
from . import sections, turns
from .backward import BLOCK_M, Sm90BackwardOptions
from .key_block import Block
from .turns import Neighbours
from .walk import Walk

Head = tuple[Any, Any, Any]  # a key head, its sequence, and whether there is such a one; None: there is
NOWHERE = 1 << 20  # the number of a block without any head: no sequence has so many keys


class Place(enum.IntEnum):
    """Where in the kernel a block's work is found out again; at two places nothing is kept from one for the other."""

    NOTE = 1
    PRODUCER = 2
    CONSUMERS = 3
    VALUES = 4
    KEYS = 5
    ROUNDED = 6
    TILES = 7


@dataclass(frozen=True)
class KeyWork:
    """The keys of a `block`, which of the queries see them, and the `tiles` of these.

    `number`: the cluster's among those of the sequence's keys; `group`: query heads of the key head, or of a part of
    it; `here`: whether it has any keys; `exists`: whether there is such a head, None: where there is not, no key has
    the cluster's number. Once `begun`, `heads` are the first of the query heads and one past the last, of each of
    which the tiles pass by in a `walk`.
    """

    options: Sm90BackwardOptions
    number: Any
    group: Any
    block: Block
    seen: KeyRange
    inverse: QueryRange
    tiles: TileRange
    here: Any
    exists: Any
    heads: tuple[Any, Any] = (None, None)
    walk: Walk = field(default_factory=lambda: Walk(TileRange(0, 0, 0, 0)))

    def begun(self) -> KeyWork:
        """The same, with its query heads and its walk over tiles."""
        first, ordered = self.block.part * self.group, self.options.ordered
        heads = first, first + self.group
        lists = self.options.features.block_size is not None
        walk = Walk(self.tiles.mirrored() if ordered else self.tiles, ordered, self.here if lists else None)
        walk = walk.in_pairs(self.block.rank) if self.options.paired else walk
        return replace(self, heads=heads, walk=walk)

    @property
    def near(self) -> Neighbours:
        """The blocks of keys next to it."""
        return Neighbours.of(self.number, self.block.keys.length, self.inverse, self.options.span)

    def near_again(self, step: fly.Value) -> Neighbours:
        """The same, made apart for what follows `step` (i32): nothing that it is made of is kept for later."""
        return replace(self, number=anew(self.number, step)).near

    @property
    def written(self) -> Any:
        """How many of the sequence's keys the block may write results of."""
        keys = self.block.keys.length
        # where no block waits for its turn, one without keys has no row below their number either
        spare = self.options.crowded and self.exists is None
        return keys if spare else fly.select(self.here, keys, 0)


@dataclass(frozen=True)
class KeyBlocks:
    """The blocks of a launch, by its parameters: see `flash_attn_sm90_bwd`.

    `tokens`: of all queries and of all keys, `offsets`: of packed ones; `kv_heads`: how many there are, in parts.
    `ticket`: of blocks in turn, the cluster's.
    """

    options: Sm90BackwardOptions
    given: BoundFeatures
    tokens: tuple[Any, Any]
    offsets: tuple[fly.Tensor | None, fly.Tensor | None]
    kv_heads: Any
    sequences: Any
    group: Any
    folded: bool
    ticket: fly.SharedMemory | None = None

    @property
    def of_head(self) -> Any:
        """How many there are of each head."""
        return fly.grid_dim.y * self.options.blocks if self.options.sectioned else fly.grid_dim.x

    @property
    def rank(self) -> Any:
        """This block's in its cluster."""
        return fly.block_id.x % self.options.blocks if self.options.blocks > 1 else 0

    @property
    def head(self) -> Head:
        """Of this block."""
        if self.options.sectioned:
            return sections.head_of_block(self.kv_heads, self.sequences, self.options.blocks)
        return head_of_block(self.kv_heads, self.sequences, folded=self.folded)

    def work(self, head: Head, uniform: Uniform = fly.first_lane) -> KeyWork:
        """This block's, which has such a head; by all threads of a warp, unless `uniform` is of one `alone`."""
        options, given, rank = self.options, self.given, self.rank
        kv_head, batch, exists = head
        if self.ticket is not None:
            number = turns.number_of(self.ticket, uniform)
        elif options.sectioned:
            number, exists = fly.select(exists, fly.block_id.y, NOWHERE), None
        else:
            number = fly.block_id.x // options.blocks
        keys = Tokens.of(self.tokens[1], self.offsets[1], batch, given.get("seqused_kv"), uniform=uniform)
        queries = Tokens.of(self.tokens[0], self.offsets[0], batch, given.get("seqused_q"), uniform=uniform)
        first_key = number * options.span  # of the cluster, whose blocks see the same tiles
        here = first_key < keys.length if exists is None else exists & (first_key < keys.length)
        seen = given.key_range(queries.length, keys.length, options.causal)
        inverse = QueryRange.of(seen, open_end=not options.features.modifies)
        tiles = inverse.tiles(first_key, options.span, BLOCK_M)
        # keys past the end would have weights: in the block with any, all tiles are masked
        end = fly.select(here, tiles.end, tiles.first)
        tail = first_key + options.span > keys.length
        tiles = TileRange(tiles.first, fly.select(tail, end, tiles.whole_from), tiles.whole_end, end)
        block = Block(batch, kv_head, first_key + rank * options.block_n, keys, queries, rank, options.parts)
        return KeyWork(options, number, self.group, block, seen, inverse, tiles, here, exists)

    def tiles_again(self) -> tuple[Walk, Block, tuple[Any, Any]]:
        """The producer's walk, block and query heads, once K and V are on their way."""
        work = self.again(Place.TILES, alone)
        return work.walk, work.block, work.heads

    def again(self, step: Any, uniform: Uniform = fly.first_lane) -> KeyWork:
        """This block's, from ids and parameters alone: nothing is kept from before for what follows `step` (i32).

        `uniform`: as of `work`.
        """
        step = fly.i32(0) + step

        def parameter(number: Any) -> Any:
            return anew(number, step) if isinstance(number, fly.Value) else number

        tokens, numbers = tuple(map(parameter, self.tokens)), map(parameter, (self.kv_heads, self.sequences))
        with fly.reread_ids():
            kv_heads, sequences = numbers
            blocks = replace(self, tokens=tokens, kv_heads=kv_heads, sequences=sequences)
            work = blocks.work(blocks.head, uniform)
            if self.options.blocks > 1:  # else ptxas keeps the one that it has found first
                rank = parameter(fly.block_id.x) % self.options.blocks
                work = replace(work, block=replace(work.block, rank=rank))
            return work.begun()


def with_sizes_anew(tensor: fly.Tensor, step: Any) -> fly.Tensor:
    """The same tensor; nothing that is made of its shape and strides behind `step` (i32) is kept for others."""

    def made(number: Any) -> Any:
        if not isinstance(number, fly.Value):
            return number
        if number.dtype is fly.i32:
            return anew(number, step)
        low, high = (anew(half.to(fly.i32), step).to(fly.i64) for half in (number, number >> 32))
        return (high << 32) | (low & 0xFFFFFFFF)

    shape, stride = (tuple(map(made, numbers)) for numbers in (tensor.shape, tensor.stride))
    return fly.Tensor(tensor.pointer, tensor.dtype, shape, stride, tensor.alignment)
