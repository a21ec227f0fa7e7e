"""Block-sparse masks: which blocks of keys a block of queries sees in part, and which it sees whole.

A kernel walks these lists, so that blocks that nobody sees cost nothing, and calls `mask_mod` in partial blocks only.
The representation is FlexAttention's (`torch.nn.attention.flex_attention.BlockMask`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fly.errors import ArgumentTypeError

from ..arguments.checks import check_tensor, fail

DEFAULT_BLOCK = 128
TILE_QUERIES, TILE_KEYS = 32, 64  # blocks of multiples of these are lists of tiles of some kernel
PART, WHOLE = 1, 2  # how a block is seen, in the table of `BlockMask.retiled`; 0: not at all


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Lists of key blocks for every block of queries; B and H may be 1, for all of them.

    kv_num_blocks: (B, H, Qb) int32, how many blocks are seen in part. kv_indices: (B, H, Qb, N) int32, which ones;
    entries past the number do not matter. full_kv_num_blocks, full_kv_indices: the same for blocks that are seen
    whole, None where there is none. BLOCK_SIZE: (queries, keys) of a block. seq_lengths: (Sq, Skv). mask_mod:
    function (batch, head, query, key, *aux) that tells whether a query sees a key in a partial block. q_num_blocks,
    q_indices, full_q_num_blocks, full_q_indices: the same transposed, lists of query blocks for every block of keys,
    as far as there are any yet; see `transposed`.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None
    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    mask_mod: Callable[..., Any]
    q_num_blocks: torch.Tensor | None = None
    q_indices: torch.Tensor | None = None
    full_q_num_blocks: torch.Tensor | None = None
    full_q_indices: torch.Tensor | None = None

    @staticmethod
    def of(mask: Any) -> BlockMask:
        """Of FlexAttention's BlockMask; its `mask_mod` must be one that kernels can trace (see `docs/features.md`).

        Raises:
            ArgumentTypeError: something else.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        if isinstance(mask, BlockMask):
            return mask
        if not isinstance(mask, FlexBlockMask):
            fail(
                f"BlockMask.of takes a torch.nn.attention.flex_attention.BlockMask, got {type(mask).__name__}",
                ArgumentTypeError,
            )
        return BlockMask(
            mask.kv_num_blocks,
            mask.kv_indices,
            mask.full_kv_num_blocks,
            mask.full_kv_indices,
            (*mask.BLOCK_SIZE,),
            (*mask.seq_lengths,),
            mask.mask_mod,
            mask.q_num_blocks,
            mask.q_indices,
            mask.full_q_num_blocks,
            mask.full_q_indices,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The lists, partial ones first; those that there are."""
        whole = () if self.full_kv_num_blocks is None else (self.full_kv_num_blocks, self.full_kv_indices)
        return self.kv_num_blocks, self.kv_indices, *whole

    @property
    def brought(self) -> tuple[torch.Tensor, ...] | None:
        """`transposed` as it comes with the mask, None where it does not."""
        lists = [self.q_num_blocks, self.q_indices]
        if self.full_kv_num_blocks is not None:
            lists += [self.full_q_num_blocks, self.full_q_indices]
        there = tuple(x for x in lists if x is not None)
        return there if len(there) == len(lists) else None

    def transposed(self) -> tuple[torch.Tensor, ...]:
        """`tensors` by key blocks: (B, H, Kb) numbers and (B, H, Kb, N) indices of the query blocks that see them.

        The mask's own, or made of the lists by query blocks: on their device, without reading them on the host.
        """
        if (brought := self.brought) is not None:
            return brought
        blocks = -(-self.seq_lengths[1] // self.BLOCK_SIZE[1])
        pairs = zip(self.tensors[::2], self.tensors[1::2])
        return tuple(
            tensor
            for numbers, indices in pairs
            for tensor in _lists(_listed(numbers, indices, blocks).transpose(-1, -2))
        )

    @property
    def fits_tiles(self) -> bool:
        """Whether kernels walk its lists as they are."""
        rows, keys = self.BLOCK_SIZE
        return not (rows % TILE_QUERIES or keys % TILE_KEYS)

    def retiled(self, batch: int, heads: int, block: int = DEFAULT_BLOCK) -> tuple[BlockMask, torch.Tensor]:
        """The same mask in square blocks of another size, for calls of `batch` sequences and `heads` query heads.

        Blocks that see only whole blocks, or none, stay so. Those that others touch are seen in part, and the new
        `mask_mod` looks up which block of this mask a key is in: in a table (B, H, query blocks, key blocks) int8 of
        `PART` and `WHOLE`, the second result, which has to be the last of the call's auxiliary tensors. Made on the
        lists' device, without reading them on the host.

        Raises:
            ArgumentError, ArgumentTypeError: lists that are not for such calls.
        """
        self.check(batch, heads, self.seq_lengths, self.kv_num_blocks.device)
        blocks = -(-self.seq_lengths[1] // self.BLOCK_SIZE[1])
        table = _listed(self.kv_num_blocks, self.kv_indices, blocks).to(torch.int8) * PART
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            table = torch.where(_listed(self.full_kv_num_blocks, self.full_kv_indices, blocks), WHOLE, table)
        spans = [
            _touched(length, size, block, table.device) for length, size in zip(self.seq_lengths, self.BLOCK_SIZE)
        ]
        touched = (spans[0][1] - spans[0][0])[:, None] * (spans[1][1] - spans[1][0])
        whole = _counted(table == WHOLE, *spans) == touched
        part = (_counted(table > 0, *spans) > 0) & ~whole
        lists = (*_lists(part), *_lists(whole))
        mask_mod = _of_table(self.mask_mod, *self.BLOCK_SIZE)
        mask = BlockMask(*lists, (block, block), self.seq_lengths, mask_mod)
        return mask, table.to(torch.int8).expand(batch, heads, *table.shape[2:])

    def check(
        self, batch: int, heads: int, lengths: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """`tensors` for every sequence and head of a call.

        Raises:
            ArgumentError, ArgumentTypeError: the mask is not for such a call.
        """
        rows = self._check_sizes(lengths)[0]
        return _all_expanded("kv", self.tensors, (batch, heads, -(-lengths[0] // rows)), device)

    def check_transposed(
        self, batch: int, heads: int, lengths: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """`transposed` for every sequence and head of a call.

        Raises:
            ArgumentError, ArgumentTypeError: the mask is not for such a call.
        """
        self.check(batch, heads, lengths, device)
        return _all_expanded("q", self.transposed(), (batch, heads, -(-lengths[1] // self.BLOCK_SIZE[1])), device)

    def _check_sizes(self, lengths: tuple[int, int]) -> tuple[int, int]:
        if tuple(self.seq_lengths) != lengths:
            fail(
                f"block_mask is for (Sq, Skv) = {tuple(self.seq_lengths)}, not {lengths}: build one for these lengths"
            )
        rows, keys = self.BLOCK_SIZE
        if rows < 1 or keys < 1:
            fail(f"block_mask's BLOCK_SIZE must be positive, got {self.BLOCK_SIZE}")
        return rows, keys


def _all_expanded(
    of: str, tensors: tuple[torch.Tensor, ...], shape: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    names = (f"{of}_num_blocks", f"{of}_indices", f"full_{of}_num_blocks", f"full_{of}_indices")
    return tuple(
        _expanded(f"block_mask.{name}", tensor, shape, 3 + name.endswith("indices"), device)
        for name, tensor in zip(names, tensors)
    )


def _expanded(
    name: str, tensor: torch.Tensor, shape: tuple[int, int, int], rank: int, device: torch.device
) -> torch.Tensor:
    check_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        fail(f"{name} has dtype {tensor.dtype}; accepted: torch.int32", ArgumentTypeError)
    if tensor.device != device:
        fail(f"{name} must be on q's device {device}, got {tensor.device}")
    sizes = tensor.shape
    few = len(sizes) == rank and sizes[2] == shape[2] and all(n in (1, m) for n, m in zip(sizes[:2], shape))
    if not few or not tensor.numel():
        of, listed = ("query", "key") if "kv" in name else ("key", "query")
        wanted = f"(B or 1, H or 1, {of} blocks" + (f", {listed} blocks)" if rank == 4 else ")")
        fail(f"{name} must have shape {wanted} with (B, H, {of} blocks) = {shape}, got {tuple(sizes)}")
    return tensor.expand(*shape[:2], *sizes[2:])


def _listed(numbers: torch.Tensor, indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """(B, H, query blocks, key blocks) bool: which of `blocks` key blocks are listed."""
    entry = torch.arange(indices.shape[-1], device=indices.device)
    used = (entry < numbers[..., None]) & (indices >= 0) & (indices < blocks)
    flags = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, torch.where(used, indices, blocks).long(), True)[..., :blocks]


def _touched(length: int, size: int, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, one past the last) of the blocks of `size` that each block of `block` touches, of `length` tokens."""
    first = torch.arange(0, length, block, device=device)
    return first // size, (torch.clamp(first + block, max=length) + size - 1) // size


def _counted(flags: torch.Tensor, *spans: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How many blocks are set within each rectangle of spans."""
    sums = torch.nn.functional.pad(flags.to(torch.int32).cumsum(-1).cumsum(-2), (1, 0, 1, 0))
    (top, bottom), (left, right) = spans
    rows = sums[..., bottom, :] - sums[..., top, :]
    return rows[..., right] - rows[..., left]


def _of_table(mask_mod: Callable[..., Any], rows: int, keys: int) -> Callable[..., Any]:
    """The `mask_mod` of a mask in blocks of (rows, keys), whose table is the last auxiliary tensor."""

    def listed(batch: Any, head: Any, query: Any, key: Any, *aux: Any) -> Any:
        *own, table = aux
        state = table[batch, head, query // rows, key // keys]
        keep = mask_mod(batch, head, query, key, *own)
        if isinstance(keep, bool):
            return state >= (PART if keep else WHOLE)
        return (state == WHOLE) | ((state == PART) & keep)

    return listed


Function = Callable[..., Any]


def for_tiles(
    block_mask: BlockMask,
    score_mod: Function | None,
    score_mod_bwd: Function | None,
    aux: Sequence[torch.Tensor],
    q: torch.Tensor,
) -> tuple[BlockMask, Function | None, Function | None, Sequence[torch.Tensor]]:
    """The mask, functions and auxiliary tensors of a call with q as kernels take them: see `BlockMask.retiled`.

    What is no call with a block mask is returned as it is, for the checks.
    """
    good = all(f is None or callable(f) for f in (score_mod, score_mod_bwd)) and isinstance(aux, Sequence)
    if not good or q.dim() != 4 or block_mask.fits_tiles:
        return block_mask, score_mod, score_mod_bwd, aux
    mask, table = block_mask.retiled(q.shape[0], q.shape[2])
    return mask, _without_table(score_mod), _without_table(score_mod_bwd), (*aux, table)


def _without_table(function: Function | None) -> Function | None:
    if function is None:
        return None
    own = function

    def called(*arguments: Any) -> Any:
        return own(*arguments[:-1])

    return called


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Sq: int,
    Skv: int,
    device: torch.device | str = "cuda",
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    aux_tensors: Sequence[torch.Tensor] = (),
) -> BlockMask:
    """The block mask of a `mask_mod`, which is called with int64 tensors that broadcast.

    Args:
        mask_mod: function (batch, head, query, key, *aux) of index tensors; kernels trace the same function.
        B, H: batch and query heads; None or 1 when the mask is the same for all.
        Sq, Skv: lengths, at least 1.
        BLOCK_SIZE: (queries, keys) of a block, or one number for both. Multiples of (32, 64) are walked as they are,
            others are made into blocks of 128 in every call (`BlockMask.retiled`).
        aux_tensors: what `mask_mod` loads from; the same go to the attention call.

    Raises:
        ArgumentError: a size below 1.
    """
    rows, keys = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    for name, value in (("Sq", Sq), ("Skv", Skv), ("BLOCK_SIZE", min(rows, keys))):
        if value < 1:
            fail(f"create_block_mask: {name} must be at least 1, got {value}")
    batch, heads = B or 1, H or 1
    blocks = -(-Skv // keys)
    key = torch.arange(Skv, device=device)
    size = torch.full((blocks,), keys, device=device)
    size[-1] = Skv - (blocks - 1) * keys
    partial, whole = [], []
    for first in range(0, Sq, rows):
        query = torch.arange(first, min(first + rows, Sq), device=device)
        seen = torch.empty(batch, heads, blocks, dtype=torch.int64, device=device)
        for b in range(batch):
            for h in range(heads):
                place = (torch.tensor(x, device=device) for x in (b, h))
                keep = torch.as_tensor(mask_mod(*place, query[:, None], key[None], *aux_tensors), device=device)
                count = keep.to(torch.int64).expand(len(query), Skv).sum(0)
                count = torch.nn.functional.pad(count, (0, blocks * keys - Skv))
                seen[b, h] = count.view(blocks, keys).sum(-1)
        full = seen == size * len(query)
        whole.append(full)
        partial.append((seen > 0) & ~full)
    lists = [_lists(torch.stack(flags, 2)) for flags in (partial, whole)]
    return BlockMask(*lists[0], *lists[1], (rows, keys), (Sq, Skv), mask_mod)


def _lists(flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, indices) of the blocks of the last dimension that are set, in order."""
    order = torch.argsort(flags.to(torch.int8), dim=-1, descending=True, stable=True)
    return flags.sum(-1).to(torch.int32), order.to(torch.int32)
