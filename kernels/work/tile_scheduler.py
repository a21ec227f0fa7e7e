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

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import fly
from fly.errors import UnsupportedError

from ..problem.features import NOTHING, BoundFeatures
from ..problem.mask import KeyRange, TileRange
from .fragments import group_size
from .sequences import PagedSequence, Sequence, Uniform, keys_of, sequences_of, tokens_of
from .tile_list import TileList
from .vectorized import VectorPages, VectorRows

MAX_SPLITS = 64
MAX_GRID_YZ = 65_535  # blocks along y and along z: CUDA's limit; HIP's is one more
_MAX_BLOCKS = 2**31 - 1  # places are counted in i32
FEW_BLOCKS = 2**20  # from which on grids are folded; f32 divides numbers below exactly
STOP = -1


@dataclass(frozen=True)
class Work:
    """What a block computes, or a persistent one at a time: rows `first_row` and on of one `head` of one sequence,
    against some of its keys.

    `batch` is the sequence's number; `queries` and `kv` are where its tokens lie, and `keys` tells which keys a query
    sees. Key tiles of `tiles` that are not whole need `keys.apply`. With `listed`, which only who walks the list may
    have, `tiles` counts its steps, whole ones before partial ones, and of key tiles `seen` tells which need no
    `keys.apply`. `split`: there are other keys, as these are the `part` of that number.
    """

    batch: fly.Value
    head: Any
    first_row: fly.Value
    part: Any
    queries: Sequence
    kv: Sequence | PagedSequence
    keys: KeyRange
    tiles: TileRange
    split: bool
    listed: TileList | None = None
    seen: TileRange | None = None

    @property
    def exists(self) -> fly.Value:
        """Whether it is work, and not the end of a launch, which is of sequence `STOP`."""
        return self.batch > STOP

    @staticmethod
    def of(
        given: BoundFeatures,
        place: tuple[Any, Any, Any, Any],
        queries: Sequence,
        kv: Sequence | PagedSequence,
        *,
        causal: bool,
        block_m: int,
        block_n: int,
        parts: Any = 1,
        uniform: Uniform = fly.first_lane,
        steps: tuple[fly.Value, ...] = (),
    ) -> Work:
        """The work at a `place`: batch, head, first row and part, which is None or one of `parts`.

        `given`: windows and lists among a call's features. `steps`: first, end of the whole ones, and end, of a
        list's part that someone else walks.
        """
        batch, head, first_row, part = place
        keys = given.key_range(queries.length, kv.length, causal)
        tiles = keys.tiles(first_row, block_m, block_n)
        if part is None:
            tiles = replace(tiles, first=uniform(tiles.first) if keys.hides_first else fly.i32(0))
        listed = seen = None
        if given.features.block_size is not None:
            seen = tiles
            if not steps:
                listed = TileList.of(given, queries.index, head, first_row, block_n, kv.length, uniform)
                steps = fly.i32(0), listed.whole_steps, listed.steps
            first, whole_end, end = steps
            tiles = TileRange(first, first, whole_end, end)
        if part is not None and (seen is None or listed is not None):
            keys_each = given.get("split_keys")
            each = None if keys_each is None else keys_each // block_n
            tiles = tiles.part(part, parts, uniform, each)
            if listed is not None:
                listed = replace(listed, steps=tiles.end)
            else:
                keys = replace(keys, stop=fly.minimum(tiles.end * block_n, kv.length))
        split = part is not None and not (isinstance(parts, int) and parts == 1)
        return Work(batch, head, first_row, part, queries, kv, keys, tiles, split, listed, seen)


@dataclass(frozen=True, kw_only=True)
class BlockWork(Work):
    """The work of a block of a grid, with views of its sequence and heads alone, whose row 0 is the first token.

    `lse` is the sequence's vector, or None; `ragged`: there may be no query at all. `late_out()` is `out` with
    nothing computed before it is asked for: behind a long loop, LLVM does so in front of the last barriers otherwise.
    """

    q: fly.RowView
    k: fly.RowView | fly.PagedRows | VectorRows
    v: fly.RowView | fly.PagedRows | VectorRows
    out: fly.RowView
    lse: fly.Tensor | None
    ragged: bool
    late_out: Callable[[], fly.RowView]

    def if_any_row(self) -> AbstractContextManager[None]:
        """Where the block's code belongs: blocks past the end of a sequence have nothing to do."""
        return fly.when(self.first_row < self.queries.length) if self.ragged else nullcontext()


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
    given: BoundFeatures = NOTHING,
    page_size: int | None = None,
    folded: bool = False,
    scarce: bool = False,
) -> BlockWork:
    """This block's work, from its place in the grid.

    `tensors` are q, k, v, out, lse, cu_seqlens_q and cu_seqlens_kv, the last three or two None where the form has
    none. The block takes `block_m` query rows, and keys in tiles of `block_n`. `head_dim_v`: of v and out, if it is
    not `head_dim`. With several `xcds`, dies with a cache of their own that blocks are dealt to in turn, blocks are
    placed by `shared_keys_place`. `given`: lengths and windows among a call's features; with pages, of `page_size`
    keys each. `folded`: so is the grid, whose spare blocks have no row.
    `scarce`: scalar registers are; nothing of `out` is kept for `late_out`, where it is not a part of several.
    """
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv = tensors
    block, head, batch, part_of_keys = fly.block_id.x, fly.block_id.y, fly.block_id.z, None
    blocks, heads, slices, exists, parts = fly.grid_dim.x, q.shape[-2], None, None, 1
    divided = functools.partial(_quotient, few=not folded) if xcds > 1 else operator.floordiv
    if folded:
        slices = sequences_of(q, cu_seqlens_q) * (out.shape[0] if out.rank > q.rank else 1)
        slice_, exists = slice_of_block(heads * slices)
        batch = divided(slice_, heads)
        head = slice_ - batch * heads
    if xcds > 1:
        linear = block + blocks * (head + heads * batch)
        slices = fly.grid_dim.z if slices is None else slices
        places = blocks, heads, slices
        block, head, batch, kv_head = shared_keys_place(linear, places, k.shape[-2], xcds, folded=folded)
    else:
        kv_head = head // group_size(q, k)
    if out.rank > q.rank:
        parts = out.shape[0]
        entry = batch
        batch = divided(entry, parts)
        part_of_keys = entry - batch * parts
        assert lse is not None
        out, lse = part(out, part_of_keys), part(lse, part_of_keys)
    block = blocks - 1 - block if causal or given.features.block_size is not None else block
    first_row = block * block_m
    queries = Sequence.of(tokens_of(q, cu_seqlens_q), cu_seqlens_q, batch, given.get("seqused_q"))
    kv = keys_of(given, tokens_of(k, cu_seqlens_kv), cu_seqlens_kv, batch, k.shape[0], page_size)
    if exists is not None:
        first_row = fly.select(exists, first_row, queries.length)
    work = Work.of(
        given,
        (batch, head, first_row, part_of_keys),
        queries,
        kv,
        causal=causal,
        block_m=block_m,
        block_n=block_n,
        parts=parts,
    )

    def late_out() -> fly.RowView:
        sequence, tensor = queries, out
        if scarce and part_of_keys is None:
            tensor = fly.reread(out)
            if queries.index is not None:
                sequence = replace(queries, index=fly.remade(queries.index))
        return sequence.rows(tensor, fly.remade(head), head_dim_v or head_dim)

    return BlockWork(
        **vars(work),
        q=queries.rows(q, head, head_dim),
        k=_key_rows(kv, given, k, kv_head, head_dim, values=False),
        v=_key_rows(kv, given, v, kv_head, head_dim_v or head_dim, values=True),
        out=queries.rows(out, head, head_dim_v or head_dim),
        lse=None if lse is None else queries.vector(lse, head),
        ragged=queries.bounded or folded,
        late_out=late_out,
    )


def _key_rows(
    kv: Sequence | PagedSequence, given: BoundFeatures, tensor: fly.Tensor, head: Any, columns: int, *, values: bool
) -> fly.RowView | fly.PagedRows | VectorRows:
    """Rows of K, or V's `values`, of one head, in whichever layout they are."""
    layout = given.features.kv_cache_layout
    if layout is None or isinstance(kv, Sequence):
        return kv.rows(tensor, head, columns)
    pages = VectorPages(tensor, layout, kv.page_size, columns, values)
    return VectorRows(pages, head, kv.table[kv.index, :], kv.length)


def shared_keys_place(
    linear: Any, grid: tuple[Any, Any, Any], key_heads: Any, xcds: int, *, folded: bool = False
) -> tuple[Any, Any, Any, Any]:
    """(query block, head, sequence, key head) that block number `linear` of a grid works on: blocks that share keys
    together.

    Hardware deals blocks out to `xcds` dies in turn, each with a level-2 cache of its own. Each die gets a contiguous
    part of the list of all blocks, sorted by sequence, key head (of several query heads), query block, query head: so
    blocks that read the same keys are on one die when the number of (sequence, key head) is a multiple of `xcds`,
    on two at most otherwise unless they are more than a die's share. The place is a permutation of the grid. Numbers
    are integers or traced i32; there are less than `FEW_BLOCKS` blocks unless the grid is `folded`.
    """
    traced = isinstance(linear, fly.Value)
    smaller = fly.minimum if traced else min
    divided = functools.partial(_quotient, few=not folded) if traced else operator.floordiv
    blocks, heads, sequences = grid
    group = divided(heads, key_heads)
    total = blocks * heads * sequences
    share = total // xcds
    die = linear % xcds
    item = die * share + smaller(die, total - share * xcds) + linear // xcds
    each = blocks * group  # that share keys
    keys = divided(item, each)
    item = item - keys * each
    block = divided(item, group)
    sequence = divided(keys, key_heads)
    key_head = keys - sequence * key_heads
    return block, key_head * group + (item - block * group), sequence, key_head


def _quotient(a: fly.Value, b: fly.Value, *, few: bool) -> fly.Value:
    """a // b; of `few`, which are below `FEW_BLOCKS`, with a third of the instructions of a floored division."""
    found = fly.divide_unsigned(a & (FEW_BLOCKS - 1), b & (FEW_BLOCKS - 1)) if few else a // b
    # vector instructions divide: in a scalar register from here on, or a loop would read it from there each turn
    quotient: fly.Value = fly.first_lane(found)
    return quotient


def part(tensor: fly.Tensor, index: Any) -> fly.Tensor:
    """Entry `index` of the first dimension."""
    return tensor[(index, *[slice(None)] * (tensor.rank - 1))]


def grid(batch: int, heads: int, seq_len: int, block_m: int, splits: int = 1) -> tuple[int, int, int]:
    """The grid of a forward kernel; `seq_len` is the longest sequence's number of queries."""
    return -(-seq_len // block_m), heads, batch * splits


def fold_grid(grid: tuple[int, int, int], most: int | None = None) -> tuple[tuple[int, int, int], dict[str, bool]]:
    """(the grid to launch, `folded` as a static parameter if it is): `grid` itself, unless y or z is too large, or
    there are more than `most` blocks, where that is given.

    A folded grid's blocks in y and z, together, count the slices (heads of sequences) of `grid`, and less than one
    a z are spare: `slice_of_block` tells. It is for a build of its own, so that others have none of its arithmetic.

    Raises:
        UnsupportedError: more blocks than can be counted in 31 bits.
    """
    blocks, heads, sequences = grid
    if max(heads, sequences) <= MAX_GRID_YZ and (most is None or blocks * heads * sequences <= most):
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


def head_of_block(
    heads: Any, sequences: Any, *, folded: bool, last_first: bool = False
) -> tuple[fly.Value, fly.Value, fly.Value | None]:
    """(head, sequence, whether the block has any) in a grid of (blocks, heads, sequences); None: it has.

    Spare blocks of a `folded` grid have the last head's. `last_first`: heads and sequences are counted from the last
    one down: who takes them in another order than the launch before or behind finds what that had last in caches.
    """
    head, sequence, exists = fly.block_id.y, fly.block_id.z, None
    if folded:
        place, exists = slice_of_block(heads * sequences)
        sequence = place // heads
        head = place - sequence * heads
    return (heads - 1 - head, sequences - 1 - sequence, exists) if last_first else (head, sequence, exists)


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
