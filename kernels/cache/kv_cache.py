"""New keys and values into a KV cache, in place, and rotary embeddings of them and of the queries: one launch.

What comes before attention in `flash_attn_with_kvcache`. With L = cache_seqlens[b], token i of sequence b is at
position L + i:

    k_cache[entry, row] = rotated(k[b, i], L + i)        v_cache[entry, row] = v[b, i]
    result[b, i]        = rotated(q[b, i], L + i), or with every query at the end of the cache, rotated(q[b, i], L)

| cache | entry | row |
|---|---|---|
| (B_cache, S_cache, Hkv, D) | b, or cache_batch_idx[b] | position |
| pages (num_pages, page_size, Hkv, D) | block_table[b or cache_batch_idx[b], position // page_size] | the remainder |

Lengths, indices and pages are read on the device. A position that the cache or the rotary tables do not have is not
written, nor is one whose entry does not exist; `device_values` says so, where it is asked to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fly
from fly import config

from ..arguments.checks import ALIGNMENT, extent_bytes, has_memory
from ..call import device_values
from ..call.plan import Plans
from ..problem.contract import Launch, Tensors
from ..work.steps import Steps, bind_kernel
from ..work.tile_scheduler import fold_grid, slice_of_block
from ..work.vectorized import VectorPages
from .checks import CHECKS, SCALES, check_append, check_gradients, check_length, check_memory, written_scales
from .layouts import in_pages, is_linear, vectors
from .quantised import Quantised
from .rotary import VECTOR, Rotary

THREADS = 256

# the variables that a plan depends on
_environment, _ARCH, _CHECK_INPUTS = config.raw_value, config.ARCH.raw_name, config.CHECK_INPUTS.raw_name


@dataclass(frozen=True)
class Heads:
    """Which 16 bytes of (B, S, H, D) tensors a thread of a block works on; a row is one head of one token.

    Rows of one sequence are in memory's order, threads of a row next to each other. Where rows do not divide into
    pieces of 16 bytes, their last thread has the elements that are left.
    """

    columns: int

    @property
    def lanes(self) -> int:
        """Threads of a row."""
        return -(-self.columns // VECTOR)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return THREADS // self.lanes

    def blocks(self, tokens: Any, heads: Any) -> Any:
        """Blocks for the rows of one sequence; numbers or traced."""
        return fly.ceil_div(tokens * heads, self.rows)

    def place(self, tensor: fly.Tensor, block: fly.Value) -> tuple[fly.Value, fly.Value, fly.Value, fly.Value]:
        """(token, head, column, whether there is such a row) of this thread in `block` of the sequence's."""
        thread = fly.thread_id.x
        row = block * self.rows + thread // self.lanes
        token = row // tensor.shape[2]
        head = row - token * tensor.shape[2]
        exists = (thread < self.rows * self.lanes) & (token < tensor.shape[1])
        return token, head, thread % self.lanes * VECTOR, exists

    def row(self, tensor: fly.Tensor, batch: Any, token: Any, head: Any) -> fly.Window:
        """One row of a tensor, to load from."""
        return tensor[batch, :, head, :].rows(self.columns).window(token, 1)

    def store(
        self,
        piece: Callable[[], fly.Value],
        source: fly.Window,
        tensor: fly.Tensor,
        place: tuple[Any, ...],
        column: fly.Value,
    ) -> None:
        """Store the thread's part of a row, which begins at `column`, to the row of `tensor` at `place`.

        `piece()` is 16 bytes, in one access where the alignment allows it; fewer elements are `source`'s as they are.
        """
        rest = self.columns % VECTOR
        with fly.when(column + VECTOR <= self.columns) if rest else nullcontext():
            if self.columns >= VECTOR:
                fly.store(piece(), tensor.at(*place, column), align=tensor.alignment)
        if not rest:
            return
        with fly.when(column + VECTOR > self.columns):
            for i in range(rest):
                element = source.load_inside(0, column + i, 1)
                fly.store(element, tensor.at(*place, column + i), align=tensor.dtype.bytes)


def cache_place(
    cache: fly.Tensor, batch: Any, position: Any, cache_batch_idx: fly.Tensor | None, block_table: fly.Tensor | None
) -> tuple[fly.Value, fly.Value, fly.Value]:
    """(entry, row, whether the cache has it) of a position of sequence `batch`; see the module's table."""
    if block_table is None:
        entry = batch if cache_batch_idx is None else cache_batch_idx.load(batch)
        row, exists = position, fly.compare("ult", position, cache.shape[1])
    else:
        page = position // cache.shape[1]
        exists = fly.compare("ult", page, block_table.shape[1])
        row = batch
        if cache_batch_idx is not None:
            row = cache_batch_idx.load(batch)
            exists = exists & fly.compare("ult", row, block_table.shape[0])
        entry = fly.cond(exists, lambda: block_table.load(row, page), lambda: fly.i32(-1))
        row = position - page * cache.shape[1]
    return entry, row, exists & fly.compare("ult", entry, cache.shape[0])


@fly.kernel
def rotate_and_append(
    q: fly.Tensor | None,
    q_rotated: fly.Tensor | None,
    k: fly.Tensor,
    v: fly.Tensor,
    k_cache: fly.Tensor,
    v_cache: fly.Tensor,
    cos: fly.Tensor | None,
    sin: fly.Tensor | None,
    cache_seqlens: fly.Tensor,
    cache_batch_idx: fly.Tensor | None,
    block_table: fly.Tensor | None,
    k_descale: fly.Tensor | None,
    v_descale: fly.Tensor | None,
    *,
    head_dim: int,
    head_dim_v: int,
    rotary: Rotary | None,
    each_query: bool,
    layout: str | None = None,
    folded: bool = False,
) -> None:
    """The module's formulas; without `rotary` there are no q, tables and result, and k is appended as it is.

    To caches of 8 bits rows are appended divided by their scales, see `Quantised`. `layout`: of pages that are not
    (num_pages, page_size, Hkv, D), see `VectorPages`.

    Grid: (blocks of k's rows, then of v's, then of q's; sequences), or `folded`: spare blocks write what those of the
    last sequence do. A thread has 16 bytes of one row. Rotated dimensions of a query whose position the tables do
    not have become NaN.
    """
    batch = slice_of_block(k.shape[0])[0] if folded else fly.block_id.y
    length = cache_seqlens.load(batch)
    heads_k, heads_v = Heads(head_dim), Heads(head_dim_v)
    maxima = Quantised.room((k_descale, v_descale), THREADS)

    def target(cache: fly.Tensor, token: fly.Value) -> tuple[fly.Value, fly.Value, fly.Value]:
        entry, row, exists = cache_place(cache, batch, length + token, cache_batch_idx, block_table)
        if rotary is None:
            return entry, row, exists
        assert cos is not None
        return entry, row, exists & fly.compare("ult", length + token, cos.shape[0])

    def angles(position: fly.Value) -> list[fly.Window]:
        assert rotary is not None and cos is not None and sin is not None
        return [table.rows(rotary.dim // 2).window(position, 1) for table in (cos, sin)]

    block = fly.block_id.x
    end_k = heads_k.blocks(k.shape[1], k.shape[2])
    end_v = end_k + heads_v.blocks(v.shape[1], v.shape[2])

    def row_of(heads: Heads, new: fly.Tensor, token: Any, head: Any, column: Any, turns: bool) -> tuple[Any, Any]:
        """A new row, and what makes the thread's piece of it."""
        source = heads.row(new, batch, token, head)
        if rotary is None or not turns:
            return source, partial(source.load_inside, 0, column, VECTOR)
        return source, lambda: rotary.piece(source, column, *angles(length + token))

    def vectors_of(cache: fly.Tensor, heads: Heads) -> VectorPages | None:
        """The pages of a cache whose rows are not in one piece."""
        return None if layout is None else VectorPages(cache, layout, cache.shape[1], heads.columns, cache is v_cache)

    def append(
        heads: Heads, new: fly.Tensor, cache: fly.Tensor, scales: fly.Tensor | None, block: fly.Value, turns: bool
    ) -> None:
        """The block's rows of k, which it `turns`, or of v."""
        token, head, column, exists = heads.place(new, block)
        if cache.dtype is not new.dtype:
            if turns and cos is not None:
                # a row's largest element is looked for, and angles loaded, before it is known where the row goes
                exists = exists & fly.compare("ult", length + token, cos.shape[0])
            quantised = Quantised(cache, scales, heads.lanes, VECTOR, maxima, vectors_of(cache, heads))
            piece = lambda: row_of(heads, new, token, head, column, turns)[1]()  # noqa: E731
            quantised.store(piece, exists, (batch, head), lambda: target(cache, token), column)
            return
        with fly.when(exists):
            entry, row, writable = target(cache, token)
            with fly.when(writable):
                source, whole = row_of(heads, new, token, head, column, turns)
                if (pages := vectors_of(cache, heads)) is not None:
                    pages.store(whole(), (entry, row, head), column)
                else:
                    heads.store(whole, source, cache, (entry, row, head), column)

    with fly.when(block < end_k):
        append(heads_k, k, k_cache, k_descale, block, turns=True)
    with fly.when((block >= end_k) & (block < end_v)):
        append(heads_v, v, v_cache, v_descale, block - end_k, turns=False)

    if rotary is None:
        return
    assert q is not None and q_rotated is not None and cos is not None
    with fly.when(block >= end_v):
        token, head, column, exists = heads_k.place(q, block - end_v)
        with fly.when(exists):
            position = length + token if each_query else length
            known = fly.compare("ult", position, cos.shape[0])
            source = heads_k.row(q, batch, token, head)
            turned = partial(
                fly.cond,
                known,
                lambda: rotary.piece(source, column, *angles(position)),
                lambda: fly.select(column < rotary.dim, math.nan, source.load_inside(0, column, VECTOR)),
            )
            heads_k.store(turned, source, q_rotated, (batch, token, head), column)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prepared kind of call; `launch` is None when there is nothing to do.

    `extents` are the bytes that the given tensors span in memory. `checked`: what is on the device may have to be
    checked in every call.
    """

    launch: Launch | None
    extents: Mapping[str, int]
    checked: bool


_plans: dict[tuple[Any, ...], Plan] = Plans()


def append_to_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    *,
    rotate_each_query: bool = True,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    kv_cache_layout: str = "linear",
) -> torch.Tensor:
    """Write new keys and values into a KV cache, and rotate them and the queries by their positions.

    Token i of sequence b is written where position cache_seqlens[b] + i lies. What has no place there (negative,
    past the end of the cache, the tables or the block table, an entry or a page that does not exist) is not
    written. The caller's lengths stay as they are: attention that follows sees cache_seqlens + S_new keys. No call
    synchronises the device, and after the first call of a kind all may be captured into a graph.

    Args:
        q: (B, Sq, H, D), bfloat16 or float16, D 1 to 1024; never changed. The last dimension of tensors is
            contiguous, other strides are free.
        k_cache, v_cache: (B_cache, S_cache, Hkv, D), or with a `block_table` pages (num_pages, page_size, Hkv, D) of
            any size; changed in place. The head dimension of v and v_cache may be another one. All tensors have q's
            device, and those with elements of heads q's dtype; both caches may also be float8_e4m3fn, of head
            dimensions in steps of 8.
        k, v: (B, S_new, Hkv, D); both or neither. Without them nothing is written and q is the result.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype, rotary_dim 16 to D in steps of 16; both or
            neither, and only with k and v. v is not rotated.
        cache_seqlens: tokens that sequences have before this call, (B,) int32, or one int for all.
        cache_batch_idx: (B,) int32: the cache's entry of each sequence, b by default; with a `block_table` its row of
            it. Where two are the same, either one's tokens may be what is written.
        cache_leftpad: (B,) int32, where each sequence's keys begin. It moves what attention reads; positions count
            from the entry's first row, so that nothing here depends on it.
        block_table: (B, pages of a sequence) int32: the pages that hold a sequence's positions, in order. With
            cache_batch_idx it may have any number of rows.
        rotary_interleaved: pairs are neighbours (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        rotate_each_query: query i is at position cache_seqlens[b] + i, as causal attention and windows need it;
            otherwise all are at cache_seqlens[b].
        k_descale, v_descale: what values in 8-bit caches are to be multiplied by, positive float32. Of shape (),
            (1,), (Hkv,) or (B, Hkv) they are given, and new values are divided by them, 1 by default; what is then
            above 448 becomes 448. Of the shape of the cache without its last dimension, (B_cache, S_cache, Hkv) or
            (num_pages, page_size, Hkv), they are written: each new row's largest magnitude over 448.
        kv_cache_layout: what pages look like, as of `flydsl_flash_attn_func`; scales by key are the same in each,
            (num_pages, page_size, Hkv).

    Returns:
        A new tensor with q rotated, or q itself without tables. Rotated dimensions of a query whose position the
        tables do not have are NaN.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too); in the
            emulator, and on a GPU with FLY_CHECK_INPUTS=1, also what has no place.
        UnsupportedError: a tensor that needs a gradient; a graph capture with FLY_CHECK_INPUTS=1.
    """
    if not is_linear(kv_cache_layout):
        k_cache, v_cache = in_pages(CHECKS, kv_cache_layout, {"k_cache": k_cache, "v_cache": v_cache}, block_table)
    layout = vectors(kv_cache_layout)
    # fmt: off
    given = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "block_table": block_table, "k_descale": k_descale, "v_descale": v_descale,
    }
    # fmt: on
    geometry: list[Any] = [rotary_interleaved, rotate_each_query, layout]
    geometry += (_environment(_ARCH), _environment(_CHECK_INPUTS))
    addresses: dict[str, int] = {}
    needs_gradient = False
    extents: Mapping[str, int]
    key: tuple[Any, ...] | None
    try:
        for name, x in given.items():
            if x is None:
                geometry.append(x)
                continue
            if isinstance(x, int):
                geometry.append(x.__class__)
                continue
            if x.__class__ is not torch.Tensor and not has_memory(x.__class__):
                raise TypeError("no memory")
            address = x.data_ptr()
            geometry += (x.__class__, x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT)
            addresses[name] = address
            needs_gradient |= x.requires_grad
        key = tuple(geometry)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = plan = None  # something here is no tensor, or one without memory: the checks say what
    if plan is None:
        check_append(given, rotary_interleaved, rotate_each_query)
        extents = {name: extent_bytes(x) for name, x in given.items() if isinstance(x, torch.Tensor)}
        checked = q.device.type == "cpu" or device_values.on(q.device)
    else:
        extents, checked = plan.extents, plan.checked
    if k is None:
        return q

    # what the key does not hold is checked every time
    if needs_gradient and torch.is_grad_enabled():
        check_gradients(given)
    if _may_overlap(addresses, extents, scales := written_scales(given)):
        check_memory(given, scales)
    if isinstance(cache_seqlens, int):
        check_length(cache_seqlens)
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if checked and device_values.on(q.device):
        on_device = given | {"cache_seqlens": cache_seqlens}
        device_values.check_append(CHECKS, q, k_cache, k, rotary_cos, on_device, rotate_each_query)
    rotated = None if rotary_cos is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors = {**given, "cache_seqlens": cache_seqlens, "q_rotated": rotated}
    if plan is None:
        plan = Plan(_prepare(tensors, rotary_interleaved, rotate_each_query, layout), extents, checked)
        if key is not None:
            _plans[key] = plan
    if plan.launch is not None:
        plan.launch.run(tensors, None)
    return q if rotated is None else rotated


def _may_overlap(addresses: Mapping[str, int], extents: Mapping[str, int], written: Sequence[str]) -> bool:
    """Whether a cache, or scales that are `written`, lie within the span of another tensor."""
    for cache in ("k_cache", "v_cache", *written):
        start = addresses[cache]
        end = start + extents[cache]
        for name, address in addresses.items():
            if address < end and start < address + extents[name] and name != cache:
                return True
    return False


def _prepare(tensors: Tensors, interleaved: bool, each_query: bool, layout: str | None) -> Launch | None:
    """The launch for the arguments by name, and the result as q_rotated; None when nothing is written."""
    k, v, cos = (tensors[name] for name in ("k", "v", "rotary_cos"))
    q = None if cos is None else tensors["q"]
    batch, tokens, kv_heads, head_dim = k.shape
    head_dim_v = v.shape[-1]
    blocks = sum(Heads(columns).blocks(tokens, kv_heads) for columns in (head_dim, head_dim_v))
    if q is not None:
        blocks += Heads(head_dim).blocks(*q.shape[1:3])
    if not batch or not blocks:
        return None
    statics = {
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "rotary": None if cos is None else Rotary(2 * cos.shape[1], interleaved),
        "each_query": each_query,
        **({} if layout is None else {"layout": layout}),
    }
    grid, fold = fold_grid((blocks, batch, 1))
    called = {"cos": "rotary_cos", "sin": "rotary_sin"}
    sizes = (batch, kv_heads)
    scales = {n: x.expand(sizes) for n in SCALES if (x := tensors[n]) is not None and x.dim() < 3}
    arguments = {**tensors, **scales, "q": q}
    kernel = bind_kernel(rotate_and_append, grid, THREADS, arguments, {**statics, **fold}, called=called)
    return Steps((kernel,)).launch()
