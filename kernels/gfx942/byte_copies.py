"""K and V of the gfx942 kernel of 8-bit floats on their way to LDS; see `copies`.

As of 16 bits, K lies as it is and V with the keys of a dimension side by side, in the order in which the registers of
probabilities hold them, and an operand of either is one 16-byte read. It takes two matrix instructions.
"""

from __future__ import annotations

from typing import Any

import fly
from fly.backends.rocdl.intrinsics import perm_bytes
from fly.ir import memory
from fly.lang.ids import linear_thread

from .copies import PIECE, TILE_KEYS, InFlight, KeyCopy, RegisterCopies, TileCopy, load_from

RUN = 16  # bytes of padding, of a read, and of a tile that a thread copies
WIDTH = RUN // PIECE  # columns of V that a thread copies
NEIGHBOURS = 4  # threads that store pieces of one dimension side by side
# selectors of `perm_bytes`: the lower bytes of two words by turns, and their upper ones; the same of pairs of bytes
LOW_BYTES, HIGH_BYTES, LOW_PAIRS, HIGH_PAIRS = 0x05010400, 0x07030602, 0x05040100, 0x07060302


class ByteCopies(RegisterCopies):
    """The copies of a block in which a thread has 16 bytes of each tile."""

    def _parts(
        self, k: fly.RowView, v: fly.RowView, pieces: tuple[int, ...]
    ) -> tuple[TileCopy, TileCopy, tuple[fly.MatrixLoad, ...]]:
        keys = KeyCopy(k, k_tile(k.columns), RUN)
        return keys, ByteValueCopy(v, v_tile(k.columns), pieces), fly.target().byte_loads


class ByteValueCopy:
    """Tiles of V, stored a line a dimension: a thread loads 4 columns of 4 rows and turns them in registers.

    Of the threads of a wave, 4 neighbours have the pieces of 4 keys that lie side by side, the others columns.
    """

    def __init__(self, source: fly.RowView, layout: fly.PaddedTile, slot_of_piece: tuple[int, ...]):
        self.source, self.layout = source, layout
        group, across = len(slot_of_piece), layout.rows // WIDTH
        thread = linear_thread()
        slot = thread // (NEIGHBOURS * across) * NEIGHBOURS + thread % NEIGHBOURS
        column = thread // NEIGHBOURS % across * WIDTH
        piece_at = [s // group * group + slot_of_piece.index(s % group) for s in range(TILE_KEYS // PIECE)]
        piece = fly.lane_map(piece_at, slot)
        self.offset = piece * PIECE * source.pitch + column * source.dtype.bytes
        self.place = layout.base(column, slot * PIECE)

    def load(self, tile: Any) -> InFlight:
        """Start tile number `tile`: a word of each row."""
        window = self.source.tile(tile, self.layout.columns)
        return tuple(load_from(window, r, self.offset, WIDTH)[0] for r in range(PIECE))

    def store(self, in_flight: InFlight, destination: fly.SharedTile) -> None:
        """Turn what arrived and store it, a word of 4 keys a dimension."""
        halves = [
            [perm_bytes(in_flight[i], in_flight[i + 1], selectors) for i in (0, 2)]
            for selectors in (LOW_BYTES, HIGH_BYTES)
        ]
        turns = (LOW_PAIRS, HIGH_PAIRS)
        words = [perm_bytes(first, last, selectors) for first, last in halves for selectors in turns]
        for column, word in enumerate(words):
            _, add = self.layout.displace(column, 0)
            memory.store(word, destination.pointer.offset(self.place).offset(add), align=PIECE)


def k_tile(head_dim: int) -> fly.PaddedTile:
    """K in LDS, in lines of 128 bytes with 16 of padding: 8 neighbouring rows start in 8 runs of 16 bytes of 128."""
    return fly.PaddedTile(fly.Layout((TILE_KEYS, head_dim), (head_dim, 1)), 128, RUN, element_bytes=1)


def v_tile(head_dim: int) -> fly.PaddedTile:
    """V in LDS, a line of keys a dimension, 80 bytes from one to the next.

    The 4 dimensions that a thread stores are in different groups of lines, those of neighbouring columns of threads
    in neighbouring lines. Of 8 neighbouring dimensions, those of a group are 80 bytes apart in the banks, and groups
    as much as makes all of them start in different runs of 16 bytes.
    """
    group = head_dim // WIDTH
    order = fly.Layout(((WIDTH, group), TILE_KEYS), ((group * TILE_KEYS, TILE_KEYS), 1))
    return fly.PaddedTile(order, TILE_KEYS, RUN, element_bytes=1, group=group, group_pad=2 * RUN)
