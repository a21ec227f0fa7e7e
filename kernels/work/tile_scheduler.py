"""Which part of an attention problem a block computes: its sequence, head, query rows and key tiles.

The grid of every forward kernel is (query blocks, query heads, sequences * key splits), and folded (see `fold_grid`)
where devices have no such grid. Causal blocks run longest first, and those of a block mask in the same order, since
many resemble a causal one. Three things vary, and follow from the arguments, so a kernel has no flag for them:

| form | told by | q, out | k, v | lse (f32) |
|---|---|---|---|---|
| dense | no offsets | (B, Sq, H, D) | (B, Skv, Hkv, D) | (B, H, Sq) |
| packed | `cu_seqlens_q`, `cu_seqlens_kv`: (B + 1,) i32 | (total_q, H, D) | (total_kv, Hkv, D) | (H, total_q) |
| split keys | out of rank one more than q's | out and lse (S, ...), f32 | as above | (S, ...) |
| pages | `block_table`: (B, pages of a sequence) i32 | as above | (pages, page_size, Hkv, D) | as above |

Lengths of packed sequences are only known on the device: blocks past the end of a sequence have no row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import fly
from fly.errors import UnsupportedError

from ..problem.features import NOTHING, Given
from ..problem.mask import KeyRange
from .fragments import group_size
from .tile_list import SeenTiles, TileList

MAX_SPLITS = 64
MAX_GRID_YZ = 65_535  # blocks along y and along z: CUDA's limit; HIP's is one more
_MAX_BLOCKS = 2**31 - 1  # places are counted in i32


@dataclass(frozen=True)
class Work:
    """What one block computes: rows `first_row` and on of one `head` of one sequence, against some of its keys.

    The views hold this sequence and these heads alone, their row 0 is the sequence's first token; `lse` is its
    vector, or None. `batch` is the sequence's number, and `keys` has its lengths. Key tiles [whole_from, full_tiles)
    are seen whole by every row of the block; [first_tile, whole_from), which is empty without a window, and
    [full_tiles, last_tile) need `keys.apply`. `ragged`: there may be no query at all; `split`: there are other
    keys. With `listed`, tiles are those of its steps [first_tile, last_tile), and `full_tiles` is where its partial
    blocks start; `seen` are those that need no `keys.apply` then.
    """

    batch: fly.Value
    head: fly.Value
    q: fly.RowView
    k: fly.RowView | fly.PagedRows
    v: fly.RowView | fly.PagedRows
    out: fly.RowView
    lse: fly.Tensor | None
    first_row: fly.Value
    keys: KeyRange
    first_tile: fly.Value
    whole_from: fly.Value
    full_tiles: fly.Value
    last_tile: fly.Value
    ragged: bool
    split: bool
    listed: TileList | None = None
    seen: SeenTiles | None = None

    def if_any_row(self) -> AbstractContextManager[None]:
        """Where the block's code belongs: blocks past the end of a sequence have nothing to do."""
        return fly.when(self.first_row < self.keys.queries) if self.ragged else nullcontext()


def block_work(
    tensors: tuple[
        fly.Tensor, fly.Tensor, fly.Tensor, fly.Tensor, fly.Tensor | None, fly.Tensor | None, fly.Tensor | None
    ],
    *,
    head_dim: int,
    causal: bool,
    block_m: int,
    block_n: int,
    head_dim_v: int | None = None,
    xcds: int = 1,
    given: Given = NOTHING,
    page_size: int | None = None,
    folded: bool = False,
) -> Work:
    """This block's work, from its place in the grid.

    `tensors` are q, k, v, out, lse, cu_seqlens_q and cu_seqlens_kv, the last three or two None where the form has
    none. The block takes `block_m` query rows, and keys in tiles of `block_n`. `head_dim_v`: of v and out, if it is
    not `head_dim`. With several `xcds`, dies with a cache of their own that blocks are dealt to in turn, blocks are
    placed by `shared_keys_place`. `given`: lengths and windows among a call's features; with pages, of `page_size`
    keys each. `folded`: so is the grid, whose spare blocks have no row.
    """
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv = tensors
    block, head, batch, split = fly.block_id.x, fly.block_id.y, fly.block_id.z, None
    blocks, heads, parts, exists = fly.grid_dim.x, q.shape[-2], None, None
    if folded:
        parts = sequences_of(q, cu_seqlens_q) * (out.shape[0] if out.rank > q.rank else 1)
        slice_, exists = slice_of_block(heads * parts)
        batch = slice_ // heads
        head = slice_ - batch * heads
    if xcds > 1:
        linear = block + blocks * (head + heads * batch)
        parts = fly.grid_dim.z if parts is None else parts
        block, head, batch = shared_keys_place(linear, (blocks, heads, parts), group_size(q, k), xcds, fly.minimum)
    kv_head = head // group_size(q, k)
    if out.rank > q.rank:
        splits = out.shape[0]
        entry = batch
        batch = entry // splits
        split = entry - batch * splits
        assert lse is not None
        out, lse = part(out, split), part(lse, split)
    block = blocks - 1 - block if causal or given.features.block_size is not None else block
    first_row = block * block_m

    queries = Sequence.of(q, cu_seqlens_q, batch, given.get("seqused_q"))
    keys: Sequence | PagedSequence
    if given.get("block_table") is None:
        keys = Sequence.of(
            k, cu_seqlens_kv, batch, given.get("seqused_kv"), given.get("cache_leftpad"), given.get("kv_batch_idx")
        )
    else:
        assert page_size is not None
        keys = PagedSequence.of(
            given.get("block_table"),
            page_size,
            cu_seqlens_kv,
            batch,
            given.get("seqused_kv"),
            given.get("cache_leftpad"),
            given.get("kv_batch_idx"),
        )
    key_range = given.key_range(queries.length, keys.length, causal)
    if exists is not None:
        first_row = fly.select(exists, first_row, queries.length)
    full, last = key_range.tiles(first_row, block_m, block_n)
    unseen, whole_from = key_range.skipped(first_row, block_m, block_n)
    first = fly.i32(0)
    if key_range.hides_first:
        first = fly.first_lane(unseen)
    listed = seen = None
    if given.features.block_size is not None:
        seen = SeenTiles(whole_from if key_range.hides_first else fly.i32(0), full)
        listed = TileList.of(given, batch, head, first_row, block_n, fly.ceil_div(keys.length, block_n))
        first, full, last = fly.i32(0), listed.whole_steps, listed.steps
        if split is not None:
            first, full, last = map(fly.first_lane, split_tiles(full, last, split, splits))
            listed = replace(listed, steps=last)
    elif split is not None:
        start = first if key_range.hides_first else 0
        first, full, last = map(fly.first_lane, split_tiles(full, last, split, splits, start))
        key_range = replace(key_range, stop=fly.minimum(last * block_n, keys.length))
    return Work(
        batch=batch,
        head=head,
        q=queries.matrix(q, head).rows(head_dim),
        k=keys.rows(k, kv_head, head_dim),
        v=keys.rows(v, kv_head, head_dim_v or head_dim),
        out=queries.matrix(out, head).rows(head_dim_v or head_dim),
        lse=None if lse is None else queries.vector(lse, head),
        first_row=first_row,
        keys=key_range,
        first_tile=first,
        whole_from=fly.minimum(fly.maximum(whole_from, first), last) if key_range.hides_first else first,
        full_tiles=full,
        last_tile=last,
        ragged=queries.bounded or folded,
        split=split is not None,
        listed=listed,
        seen=seen,
    )


def split_tiles(full: Any, last: Any, split: Any, splits: Any, start: Any = 0) -> tuple[Any, Any, Any]:
    """(first, full, last) key tiles of one split of a block that sees tiles `start` to `last`, whole ones to `full`.

    Even parts of the tiles that the block sees, so that causal blocks split as evenly as others.
    """
    count = last - start
    size = count // splits
    longer = count - size * splits  # parts that have one tile more
    first, end = (size * s + fly.minimum(s, longer) + start for s in (split, split + 1))
    return first, fly.minimum(fly.maximum(full, first), end), end


def offsets_of(offsets: fly.Tensor, index: Any, total: Any) -> tuple[fly.Value, fly.Value]:
    """(first, end) of packed sequence `index`; offsets that decrease or leave [0, total] are cut to what exists."""
    first = fly.minimum(fly.maximum(offsets.load(index), 0), total)
    return first, fly.minimum(fly.maximum(offsets.load(index + 1), first), total)


def shared_keys_place(
    linear: Any, grid: tuple[Any, Any, Any], group: Any, xcds: int, smaller: Callable[[Any, Any], Any] = min
) -> tuple[Any, Any, Any]:
    """(query block, head, sequence) that block number `linear` of a grid works on: blocks that share keys together.

    Hardware deals blocks out to `xcds` dies in turn, each with a level-2 cache of its own. Each die gets a contiguous
    part of the list of all blocks, sorted by sequence, key head (of `group` query heads), query block, query head: so
    blocks that read the same keys are on one die when the number of (sequence, key head) is a multiple of `xcds`,
    on two at most otherwise unless they are more than a die's share. The place is a permutation of the grid. Numbers
    are integers or traced i32 (then `smaller` is `fly.minimum`).
    """
    blocks, heads, sequences = grid
    total = blocks * heads * sequences
    share = total // xcds
    die = linear % xcds
    item = die * share + smaller(die, total - share * xcds) + linear // xcds
    each = blocks * group  # that share keys
    keys = item // each
    item = item - keys * each
    block = item // group
    sequence = keys // (heads // group)
    key_head = keys - sequence * (heads // group)
    return block, key_head * group + (item - block * group), sequence


@dataclass(frozen=True)
class Sequence:
    """One sequence's tokens in tensors that hold several: `length` from `first` on.

    Of entry `index` of the batch, or if `index` is None of all that is packed. `first` None: an entry's tokens are
    all the sequence's.
    """

    index: fly.Value | None
    first: fly.Value | None
    length: fly.Value

    @staticmethod
    def of(
        tensor: fly.Tensor,
        offsets: fly.Tensor | None,
        index: Any,
        used: fly.Tensor | None = None,
        leftpad: fly.Tensor | None = None,
        entries: fly.Tensor | None = None,
    ) -> Sequence:
        """Sequence `index` of a (B, S, H, D) tensor, or of a packed (total, H, D) one with (B + 1,) `offsets`.

        `used`, `leftpad`, `entries`: (B,) i32 for all sequences. `used` tokens count, `leftpad` of them are left out
        at the start, and dense tokens are in the batch's entry `entries[index]`. What leaves the tensor, and offsets
        that decrease, are cut to what exists.
        """
        # a load's result is not known to be the same in every lane, and addresses and bounds must be
        entry = index
        if entries is not None:
            entry = fly.first_lane(existing(entries.load(index), tensor.shape[0]))
        if offsets is None:
            first, length = None, tensor.shape[1]
        else:
            entry = None
            first, end = offsets_of(offsets, index, tensor.shape[0])
            first = fly.first_lane(first)
            length = fly.first_lane(end) - first
        if used is not None:
            length = fly.minimum(fly.maximum(fly.first_lane(used.load(index)), 0), length)
            first = fly.i32(0) if first is None else first
        if leftpad is not None:
            skipped = fly.minimum(fly.maximum(fly.first_lane(leftpad.load(index)), 0), length)
            first, length = skipped if first is None else first + skipped, length - skipped
        return Sequence(entry, first, length)

    @property
    def bounded(self) -> bool:
        """Whether there may be fewer tokens than the tensor's shape tells, or none."""
        return self.first is not None

    def matrix(self, tensor: fly.Tensor, head: Any) -> fly.Tensor:
        """(S, D) of one head of (B, S, H, D) or (total, H, D)."""
        return self._section(tensor[:, head, :] if self.index is None else tensor[self.index, :, head, :])

    def vector(self, tensor: fly.Tensor, head: Any) -> fly.Tensor:
        """(S,) of one head of (B, H, S) or (H, total)."""
        return self._section(tensor[head, :] if self.index is None else tensor[self.index, head, :])

    def rows(self, tensor: fly.Tensor, head: Any, columns: int) -> fly.RowView:
        """The same as rows of `columns` elements."""
        return self.matrix(tensor, head).rows(columns)

    def _section(self, tokens: fly.Tensor) -> fly.Tensor:
        return tokens if self.first is None else tokens.section(self.first, self.length)


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's tokens in tensors of pages: `length` from `first` (None: 0) on, in the pages of `table`."""

    table: fly.Tensor
    page_size: int
    length: fly.Value
    first: fly.Value | None = None

    @staticmethod
    def of(
        table: fly.Tensor,
        page_size: int,
        offsets: fly.Tensor | None,
        index: Any,
        used: fly.Tensor | None,
        leftpad: fly.Tensor | None = None,
        entries: fly.Tensor | None = None,
    ) -> PagedSequence:
        """Sequence `index` of a (B, pages of a sequence) i32 `table`, as many tokens as `paged_length` says.

        `leftpad` of them are left out at the start; with `entries`, the sequence's row of the table is
        `entries[index]`: see `Sequence.of`.
        """
        length, first = fly.first_lane(paged_length(table, page_size, offsets, index, used)), None
        if leftpad is not None:
            first = fly.minimum(fly.maximum(fly.first_lane(leftpad.load(index)), 0), length)
            length = length - first
        row = index if entries is None else fly.first_lane(existing(entries.load(index), table.shape[0]))
        return PagedSequence(table[row, :], page_size, length, first)

    def rows(self, tensor: fly.Tensor, head: Any, columns: int) -> fly.PagedRows:
        """Rows of `columns` elements of one head of (pages, page_size, H, D)."""
        return fly.PagedRows(tensor[:, :, head, :], self.table, self.length, self.page_size, columns, self.first)


def existing(index: Any, count: Any) -> fly.Value:
    """A number that should be one of `count`, cut to what exists."""
    return fly.minimum(fly.maximum(index, 0), count - 1)


def paged_length(
    table: fly.Tensor, page_size: int, offsets: fly.Tensor | None, index: Any, used: fly.Tensor | None
) -> fly.Value:
    """How many tokens sequence `index` has: `used[index]`, or what (B + 1,) `offsets` differ by, or the smaller one.

    At least 0, and at most what the table has pages for.
    """
    length = table.shape[1] * page_size
    if offsets is not None:
        length = fly.minimum(offsets.load(index + 1) - offsets.load(index), length)
    if used is not None:
        length = fly.minimum(used.load(index), length)
    return fly.maximum(length, 0)


def part(tensor: fly.Tensor, index: Any) -> fly.Tensor:
    """Entry `index` of the first dimension."""
    return tensor[(index, *[slice(None)] * (tensor.rank - 1))]


def grid(batch: int, heads: int, seq_len: int, block_m: int, splits: int = 1) -> tuple[int, int, int]:
    """The grid of a forward kernel; `seq_len` is the longest sequence's number of queries."""
    return -(-seq_len // block_m), heads, batch * splits


def fold_grid(grid: tuple[int, int, int]) -> tuple[tuple[int, int, int], dict[str, bool]]:
    """(the grid to launch, `folded` as a static parameter if it is): `grid` itself, unless y or z is too large.

    A folded grid's blocks in y and z, together, count the slices (heads of sequences) of `grid`, and less than one
    a z are spare: `slice_of_block` tells. It is for a build of its own, so that others have none of its arithmetic.

    Raises:
        UnsupportedError: more blocks than can be counted in 31 bits.
    """
    blocks, heads, sequences = grid
    if max(heads, sequences) <= MAX_GRID_YZ:
        return grid, {}
    slices = heads * sequences
    if blocks * slices > _MAX_BLOCKS:
        raise UnsupportedError(
            f"{blocks} blocks of rows for each of {heads} heads of {sequences} sequences (times parts of the keys); "
            f"one launch takes at most {_MAX_BLOCKS} blocks: pass the batch in parts"
        )
    z = -(-slices // MAX_GRID_YZ)
    return (blocks, -(-slices // z), z), {"folded": True}


def slice_of_block(slices: Any) -> tuple[fly.Value, fly.Value]:
    """(this block's slice of a folded grid, whether it has one); of spare blocks it is the last."""
    place = fly.block_id.y + fly.grid_dim.y * fly.block_id.z
    return fly.minimum(place, slices - 1), place < slices


def sequences_of(tokens: fly.Tensor, offsets: fly.Tensor | None) -> fly.Value:
    """How many sequences q or out has: its first dimension, or one less than there are `offsets`."""
    count: fly.Value = tokens.shape[0] if offsets is None else offsets.shape[0] - 1
    return count


# In the time of one key tile: what a block costs before its first tile, what combining costs at all, and what writing
# and reading the parts costs for every round of blocks. Estimates, not measured.
_START, _COMBINE, _COMBINE_ROUND = 3, 8, 4


def automatic_splits(blocks: int, key_tiles: int, compute_units: int) -> int:
    """How many parts the keys are best split into: the fewest that are predicted to be fastest.

    `blocks` of `key_tiles` each run `compute_units` at a time; a split adds blocks and shortens them. The model
    counts rounds of blocks times tiles of a block, each block with a fixed start, and the combination. 1 when the
    blocks alone fill the device, or when there is little to split.
    """

    def cost(splits: int) -> int:
        rounds = -(-blocks * splits // compute_units)
        combination = _COMBINE + _COMBINE_ROUND * rounds if splits > 1 else 0
        return rounds * (-(-key_tiles // splits) + _START) + combination

    if blocks >= compute_units:
        return 1
    return min(range(1, max(1, min(MAX_SPLITS, key_tiles)) + 1), key=cost)
