"""K and V of the gfx942 kernel of 8-bit floats on their way to LDS; see `copies`.

As of 16 bits, K lies as it is and V with the keys of a dimension side by side, in the order in which the registers of
probabilities hold them, and an operand of either is one 16-byte read. It takes two matrix instructions.
"""

from __future__ import annotations

from typing import Any

import fly
from fly.backends.rocdl.intrinsics import perm_bytes
from fly.ir import memory
from fly.ir.dtypes import i32
from fly.lang.ids import linear_thread

from .copies import PIECE, TILE_KEYS, InFlight, KeyCopy, RegisterCopies, load_from

RUN = 16  # bytes of padding, and of a read
NEIGHBOURS = 4  # threads that store pieces of one dimension side by side
# selectors of `perm_bytes`: the lower bytes of two words by turns, and their upper ones; the same of pairs of bytes
LOW_BYTES, HIGH_BYTES, LOW_PAIRS, HIGH_PAIRS = 0x05010400, 0x07030602, 0x05040100, 0x07060302


class ByteCopies(RegisterCopies):
    """The copies of a block of 512 threads."""

    def _parts(
        self, k: fly.RowView, v: fly.RowView, pieces: tuple[int, ...]
    ) -> tuple[KeyCopy, ByteValueCopy, tuple[fly.MatrixLoad, ...]]:
        head_dim = k.columns
        x, y, z = fly.block_dim()
        keys = KeyCopy(k, k_tile(head_dim), TILE_KEYS * head_dim // (x * y * z))
        return keys, ByteValueCopy(v, v_tile(head_dim), pieces), fly.target().byte_loads


class ByteValueCopy:
    """Tiles of V, stored a line a dimension: a thread loads 2 or 4 columns of 4 rows and turns them in registers.

    Of the threads of a wave, 4 neighbours have the pieces of 4 keys that lie side by side, the others columns.
    """

    def __init__(self, source: fly.RowView, layout: fly.PaddedTile, slot_of_piece: tuple[int, ...]):
        x, y, z = fly.block_dim()
        self.source, self.layout = source, layout
        pieces, group = layout.columns // PIECE, len(slot_of_piece)
        self.width = layout.rows * pieces // (x * y * z)  # columns of a thread
        across = layout.rows // self.width
        thread = linear_thread()
        slot = thread // (NEIGHBOURS * across) * NEIGHBOURS + thread % NEIGHBOURS
        column = thread // NEIGHBOURS % across * self.width
        piece_at = [s // group * group + slot_of_piece.index(s % group) for s in range(pieces)]
        piece = fly.lane_map(piece_at, slot)
        self.offset = piece * PIECE * source.pitch + column * source.dtype.bytes
        self.place = layout.base(column, slot * PIECE)

    def load(self, tile: Any) -> InFlight:
        """Start tile number `tile`: each row's part, as a word or as half of one."""
        window = self.source.tile(tile, self.layout.columns)
        return tuple(load_from(window, r, self.offset, self.width)[0] for r in range(PIECE))

    def store(self, in_flight: InFlight, destination: fly.SharedTile) -> None:
        """Turn what arrived and store it, a word of 4 keys a dimension."""
        rows = [part.to(i32) for part in in_flight]
        halves = (LOW_BYTES, HIGH_BYTES)[: self.width // 2]
        of_halves = [[perm_bytes(rows[i], rows[i + 1], bytes_) for i in (0, 2)] for bytes_ in halves]
        words = [perm_bytes(*pair, pairs) for pair in of_halves for pairs in (LOW_PAIRS, HIGH_PAIRS)]
        for column, word in enumerate(words):
            _, add = self.layout.displace(column, 0)
            memory.store(word, destination.pointer.offset(self.place).offset(add), align=PIECE)


def k_tile(head_dim: int) -> fly.PaddedTile:
    """K in LDS, with 16 bytes of padding a row: 8 neighbouring rows start in 8 different runs of 16 bytes of 128."""
    order = fly.Layout((TILE_KEYS, head_dim), (head_dim, 1))
    return fly.PaddedTile(order, head_dim, RUN, element_bytes=1)


def v_tile(head_dim: int) -> fly.PaddedTile:
    """V in LDS, a line of keys a dimension, 80 bytes from one to the next.

    The dimensions that a thread stores are in different groups of lines, those of neighbouring columns of threads in
    neighbouring lines. Of 8 neighbouring dimensions, those of a group are 80 bytes apart in the banks, and groups as
    much as makes all of them start in different runs of 16 bytes.
    """
    together = head_dim // 32
    order = fly.Layout(((together, 32), TILE_KEYS), ((32 * TILE_KEYS, TILE_KEYS), 1))
    return fly.PaddedTile(order, TILE_KEYS, RUN, element_bytes=1, group=32, group_pad=RUN * (8 // together))
