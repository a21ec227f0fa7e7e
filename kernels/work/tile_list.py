"""Key tiles that a block-sparse mask lists, for the kernels that walk them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fly
from fly.ir import memory

from ..problem.features import BoundFeatures
from .sequences import Uniform

# counts (B, H, query blocks) and key blocks (B, H, query blocks, most) of blocks that are seen in part, and whole
PARTIAL = ("block_counts", "block_indices")
WHOLE = ("whole_block_counts", "whole_block_indices")
# the same by key blocks: (B, H, key blocks) and (B, H, key blocks, most), of query blocks
BY_KEYS = {name: f"{name}_by_keys" for name in (*PARTIAL, *WHOLE)}
LISTS_BY_KEYS = tuple(BY_KEYS.values())


@dataclass(frozen=True)
class BlockRow:
    """The key blocks that one query block lists: `count` of them, i32; what the lists say beyond is cut."""

    indices: fly.Tensor
    place: tuple[Any, ...]
    count: fly.Value

    @staticmethod
    def of(given: BoundFeatures, names: tuple[str, str], place: tuple[Any, ...], uniform: Uniform) -> BlockRow | None:
        """None where the mask has no such blocks."""
        counts, indices = map(given.get, names)
        if counts is None:
            return None
        count = fly.minimum(fly.maximum(counts.load(*place), 0), indices.shape[-1])
        return BlockRow(indices, place, uniform(count))

    def block(self, entry: Any, constant: bool = False) -> fly.Value:
        """The key block that an entry names; entries past the last one are the last one."""
        entry = fly.maximum(fly.minimum(entry, self.count - 1), 0)
        if constant:
            return memory.load(self.indices.at(*self.place, entry), self.indices.dtype, constant=True)
        return self.indices.load(*self.place, entry)


@dataclass(frozen=True)
class Listed:
    """What the lists have for a step: the key block if it is one of a whole block (None: there are none), and if it
    is one of a partial block."""

    step: Any
    whole: fly.Value | None
    partial: fly.Value


@dataclass(frozen=True)
class TileList:
    """The key tiles of one block of queries, by step: first those of whole key blocks, then those of partial ones.

    Steps [0, `whole_steps`) need no `mask_mod`, steps [whole_steps, `steps`) do; steps from there on have no key.
    `per_block`: tiles of a key block; `tiles`: of all keys. `uniform` tells the compiler that what is loaded is the
    same in every lane of a wave.
    """

    whole: BlockRow | None
    partial: BlockRow
    per_block: int
    tiles: fly.Value
    whole_steps: fly.Value
    steps: fly.Value
    uniform: Uniform

    @staticmethod
    def of(
        given: BoundFeatures,
        batch: Any,
        head: Any,
        first_row: Any,
        block_n: int,
        keys: Any,
        uniform: Uniform = fly.first_lane,
    ) -> TileList:
        """Of queries from `first_row` on; there are `keys` keys, in tiles of `block_n`."""
        assert given.features.block_size is not None
        rows, columns = given.features.block_size
        place = (batch, head, first_row // rows)
        whole, partial = (BlockRow.of(given, names, place, uniform) for names in (WHOLE, PARTIAL))
        assert partial is not None
        per_block = columns // block_n
        whole_steps = fly.i32(0) if whole is None else whole.count * per_block
        steps = whole_steps + partial.count * per_block
        return TileList(whole, partial, per_block, fly.ceil_div(keys, block_n), whole_steps, steps, uniform)

    def tile(self, step: Any) -> fly.Value:
        """The key tile of a step; one without keys past the list's end, and perhaps at the end of a last block."""
        return self.tile_of(self.find(step))

    def find(self, step: Any, constant: bool = False) -> Listed:
        """Load what `tile_of` needs for a step.

        `constant`: as of memory that nothing changes, a scalar load even behind direct copies to shared memory.
        """
        _, block = self._entry(step)
        whole = None if self.whole is None else self.whole.block(block, constant)
        return Listed(step, whole, self.partial.block(block, constant))

    def _entry(self, step: Any) -> tuple[fly.Value, fly.Value]:
        """A step's number among those of its kind, whole or partial, and the number of its block."""
        entry = fly.select(step < self.whole_steps, step, step - self.whole_steps)
        return entry, entry // self.per_block

    def tile_of(self, found: Listed) -> fly.Value:
        """`tile` of the step of `found`."""
        step, key_block = found.step, found.partial
        entry, block = self._entry(step)
        if found.whole is not None:
            key_block = fly.select(step < self.whole_steps, found.whole, key_block)
        tile = key_block * self.per_block + (entry - block * self.per_block)
        # of all tiles past the last one, which are masked, the first
        tile = fly.maximum(fly.minimum(tile, self.tiles), 0)
        return self.uniform(fly.select(step < self.steps, tile, self.tiles))
