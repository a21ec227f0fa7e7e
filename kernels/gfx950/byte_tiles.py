"""K and V of 8-bit floats in LDS: tiles of 64 keys in lines of 1024 bytes, one for each copy of a wave.

Reads of K take 16 bytes of each row: those of 16 neighbouring rows start in 16 different runs of 16 bytes of 256. V
is read by `ds_read_b64_tr_b8`, of which 16 lanes turn rows 0-3 and 8-11 (from each 4) of 16 columns: those rows start
in 8 different runs of 16 bytes of 128, and the next 16 columns, which the second half of 32 lanes reads, in the other
half of 256. What tells rows apart are lines, with 16 bytes of padding each, and places in a line.

Lines have rows of all of a tile, or where `together`, the number of neighbouring keys that lie one after the other in
memory, is less than a tile's, of one run of 16 keys.
"""

from __future__ import annotations

import fly

from .copies import TILE_KEYS

LINE = 1024
HEAD_DIMS = (64, 128, 256)


def _tile(
    rows: tuple[tuple[int, ...], tuple[int, ...]],
    columns: tuple[tuple[int, ...], tuple[int, ...]],
    pad: int = 16,
    group: int = 1,
    group_pad: int = 0,
) -> fly.PaddedTile:
    order = fly.Layout((rows[0], columns[0]), (rows[1], columns[1]))
    return fly.PaddedTile(order, LINE, pad, element_bytes=1, group=group, group_pad=group_pad)


def k_tile(head_dim: int, together: int = TILE_KEYS) -> fly.PaddedTile:
    """K: rows whole, neighbours in different lines; of runs of 16 keys, pieces of 16, 32 or 64 bytes by turns."""
    if together >= TILE_KEYS:
        lines = TILE_KEYS * head_dim // LINE
        return _tile(((lines, TILE_KEYS // lines), (LINE, head_dim)), ((head_dim,), (1,)))
    if head_dim == 64:
        return _tile(((16, 4), (16, 1024)), ((16, 4), (1, 256)), pad=0)
    if head_dim == 128:
        return _tile(((2, 8, 4), (1024, 32, 2048)), ((32, 4), (1, 256)), group=2, group_pad=224)
    return _tile(((4, 4, 4), (1024, 64, 4096)), ((64, 4), (1, 256)), group=4, group_pad=192)


# by head_dim and whether lines have rows of a whole tile: extents and strides of rows, then of columns
_V_TILES = {
    (64, True): (((4, 2, 2, 4), (1024, 32, 64, 256)), ((16, 2, 2), (1, 128, 16))),
    (64, False): (((4, 2, 2, 4), (16, 256, 64, 1024)), ((16, 2, 2), (1, 128, 512))),
    (128, True): (((4, 2, 2, 4), (1024, 64, 4096, 256)), ((16, 2, 4), (1, 128, 16))),
    (128, False): (((2, 2, 2, 2, 4), (1024, 32, 16, 64, 2048)), ((16, 2, 4), (1, 128, 256))),
    (256, True): (((4, 2, 2, 2, 2), (1024, 256, 4096, 8192, 512)), ((16, 2, 8), (1, 128, 16))),
    (256, False): (((4, 2, 2, 4), (1024, 256, 64, 4096)), ((16, 2, 4, 2), (1, 128, 16, 512))),
}


def v_tile(head_dim: int, together: int = TILE_KEYS) -> fly.PaddedTile:
    """V: rows in pieces of 16 bytes, of which odd ones are 128 bytes from the even ones."""
    return _tile(*_V_TILES[head_dim, together >= TILE_KEYS])
