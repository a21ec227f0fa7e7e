"""Tiles of the generic kernels that divide the blocks of a block-sparse mask."""

from __future__ import annotations

from fly.errors import UnsupportedError

Tiles = tuple[int, int, int]  # (block_m, block_n, waves)


def tiles_within(blocks: tuple[int, int], tiles: Tiles, kernel: str) -> Tiles:
    """As many rows and waves of `tiles` as divide a block's rows; `blocks`: (rows, what passes by) of one.

    `kernel`: whose tiles they are.

    Raises:
        UnsupportedError: no number of waves does, or what passes by of a block is no multiple of a tile's.
    """
    rows, columns = blocks
    block_m, block_n, waves = tiles
    least = block_m // waves
    while rows % block_m and waves > 1:
        block_m, waves = block_m // 2, waves // 2
    if rows % block_m or columns % block_n:
        raise UnsupportedError(
            f"a block_mask's BLOCK_SIZE is {blocks}; {kernel} takes multiples of ({least}, {block_n}) at this head "
            "dimension: build it with such blocks, or pass its mask_mod as mask_mod"
        )
    return block_m, block_n, waves
