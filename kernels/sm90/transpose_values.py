"""V transposed before the Hopper kernel for 8-bit inputs, where whole tensors are read by many tiles of queries."""

from __future__ import annotations

import torch

import fly
from fly.backends.nvvm import wgmma

from ..problem.contract import Tensors
from ..work.steps import Steps, bind_kernel
from ..work.tile_scheduler import fold_grid, slice_of_block

TRANSPOSE_THREADS = 128
KEYS, DIMS = 16, 16  # that a thread transposes, 16 bytes each
BLOCKS = {64: 5}  # on a multiprocessor, by head dimension: ptxas fits six there, and spills a register for it
TRANSPOSED_DIMS = (64, 128, 256)  # whose rows are shared by one, two or all of a block's warps


def keys_of_block(head_dim: int) -> int:
    """Keys that one block of `transpose_values` takes."""
    return TRANSPOSE_THREADS * KEYS * DIMS // head_dim


@fly.kernel
def transpose_values(v: fly.Tensor, transposed: fly.Tensor, *, head_dim: int, folded: bool = False) -> None:
    """transposed[b, h, :, 16 i + j] = v[b, 16 i + PAIRS(j), h, :], zero past the last key.

    v: (B, S, Hkv, D), transposed: (B, Hkv, D, S rounded up to 16), 8-bit, 16-byte aligned. Grid: (blocks of
    `keys_of_block`, Hkv, B), or `folded`. A thread has 16 keys by 16 dimensions in registers; 32 threads load 64
    bytes of each key, and store 128 of each dimension.
    """
    if head_dim in BLOCKS:
        fly.occupancy(min_blocks=BLOCKS[head_dim])
    first, head, batch, exists = fly.block_id.x * keys_of_block(head_dim), fly.block_id.y, fly.block_id.z, None
    if folded:
        slice_, exists = slice_of_block(v.shape[2] * v.shape[0])
        batch = slice_ // v.shape[2]
        head = slice_ - batch * v.shape[2]
    lane, warp, beside = fly.thread_id.x % 32, fly.thread_id.x // 32, head_dim // (4 * DIMS)
    column = (lane % 4 + 4 * (warp % beside)) * DIMS
    key = (lane // 4 + 8 * (warp // beside)) * KEYS
    rows = v[batch, :, head, :].rows(head_dim).window(first, keys_of_block(head_dim))
    columns = transposed[batch, head, :, :]
    inside = first + key < transposed.shape[3]
    with fly.when(inside if exists is None else inside & exists):
        words = [rows.load(key + i, column, DIMS).bitcast(fly.i32) for i in range(KEYS)]
        for word in range(DIMS // 4):
            fours = [
                _transposed([words[wgmma.PAIRS(4 * slot + i)][word] for i in range(4)]) for slot in range(KEYS // 4)
            ]
            for i in range(4):
                values = fly.from_elements([four[i] for four in fours]).bitcast(v.dtype)
                fly.store(values, columns.at(column + 4 * word + i, first + key), align=16)


def _transposed(words: list[fly.Value]) -> list[fly.Value]:
    """A 4 by 4 matrix of bytes, a word a row, transposed."""
    even, low = 0x00FF00FF, 0xFFFF

    def twos(a: fly.Value, b: fly.Value) -> tuple[fly.Value, fly.Value]:
        return (a & even) | ((b & even) << 8), ((a >> 8) & even) | (b & ~even)

    (even_01, odd_01), (even_23, odd_23) = twos(*words[:2]), twos(*words[2:])
    pairs = ((even_01, even_23), (odd_01, odd_23))
    lower = [(a & low) | (b << 16) for a, b in pairs]
    upper = [((a >> 16) & low) | (b & ~low) for a, b in pairs]
    return [*lower, *upper]


def transposed_like(v: torch.Tensor) -> torch.Tensor:
    """Memory for v, (B, S, Hkv, D), transposed."""
    batch, keys, kv_heads, head_dim = v.shape
    return torch.empty(batch, kv_heads, head_dim, keys + -keys % KEYS, dtype=v.dtype, device=v.device)


def behind_transposing(forward: Steps, tensors: Tensors) -> Steps:
    """A launch that reads `transposed`, behind the kernel that makes it of v in the call's workspace."""
    batch, keys, kv_heads, head_dim = tensors["v"].shape
    grid, fold = fold_grid((-(-keys // keys_of_block(head_dim)), kv_heads, batch))
    transpose = bind_kernel(transpose_values, grid, TRANSPOSE_THREADS, tensors, {"head_dim": head_dim, **fold})
    return forward.behind(transpose, "transposed", tensors["transposed"].numel())
