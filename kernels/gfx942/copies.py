"""K and V of the gfx942 kernel on their way to LDS, through registers: this chip copies no more than 4 bytes a lane
straight to LDS, and has no load that transposes. V is turned in registers before it is stored.

K lies as it is, V with the keys of a dimension side by side, in the order in which the registers of probabilities
hold them; an operand of either is one 16-byte read. Padding and not a swizzle keeps the banks apart: all reads of a
lane then share one address, and registers decide what fits.
"""

from __future__ import annotations

from typing import Any, Protocol

import fly
from fly.ir import memory
from fly.ir.dtypes import i32
from fly.ir.value import shuffle
from fly.lang.ids import linear_thread

from ..work.tile_scheduler import BlockWork

TILE_KEYS = 64
VECTOR = 8  # elements of an operand, and of K that a thread loads at a time
PIECE = 4  # keys that are stored together
K_BUFFERS = 2

InFlight = Any  # a tile's part in a thread's registers


class RegisterCopies:
    """The copies of a block's K and V, and the operands that are read of them.

    K has two buffers: a part of a tile is read while the next one is stored.
    """

    def __init__(self, work: BlockWork, link: fly.Chain):
        assert isinstance(work.k, fly.RowView) and isinstance(work.v, fly.RowView)
        self.link = link
        self.first = work.tiles.first
        columns, depth = link.layout.columns, link.atom.k
        head_dim = work.k.columns
        self.key_tiles, self.key_steps = TILE_KEYS // columns, TILE_KEYS // depth
        self.dim_tiles, self.dim_steps = head_dim // columns, head_dim // depth
        pieces = tuple(link.columns.index(PIECE * p) // PIECE for p in range(depth // PIECE))
        self.k_copy, self.v_copy, loads = self._parts(work.k, work.v, pieces)
        k_layout, v_layout = self.k_copy.layout, self.v_copy.layout
        self.k_tiles = fly.SharedTile.ring("k", k_layout, work.k.dtype, K_BUFFERS)
        (self.v_tile,) = fly.SharedTile.ring("v", v_layout, work.v.dtype, 1)
        operand = link.column_operand
        want = fly.operand_coordinates(link.atom, operand, transposed=False)
        plan = fly.require_plan(fly.plan_operand(loads, want, link.atom.values(operand)), link.atom, operand)
        self.k_load, self.v_load = (fly.OperandLoader(plan, layout) for layout in (k_layout, v_layout))

    def _parts(
        self, k: fly.RowView, v: fly.RowView, pieces: tuple[int, ...]
    ) -> tuple[TileCopy, TileCopy, tuple[fly.MatrixLoad, ...]]:
        """The copies, and the loads that operands may be read by; `pieces`: slots of those of an operand's keys."""
        head_dim = k.columns
        keys = KeyCopy(k, k_tile(head_dim), VECTOR)
        return keys, ValueCopy(v, v_tile(head_dim), pieces), fly.target().matrix_loads

    def load_k(self, tile: fly.PipelineTile) -> InFlight:
        """Start a tile of K on its way to registers."""
        return self.k_copy.load(self.first + tile.number)

    def load_v(self, tile: fly.PipelineTile) -> InFlight:
        """As `load_k`."""
        return self.v_copy.load(self.first + tile.number)

    def store_k(self, tile: fly.PipelineTile, flight: InFlight) -> None:
        """Store what arrived."""
        self.k_copy.store(flight, self._k_buffer(tile))

    def store_v(self, tile: fly.PipelineTile, flight: InFlight) -> None:
        """As `store_k`."""
        self.v_copy.store(flight, self.v_tile)

    def _k_buffer(self, tile: fly.PipelineTile) -> fly.SharedTile:
        if isinstance(tile.number, int):
            return self.k_tiles[tile.number % K_BUFFERS]
        return self.k_tiles[0].slot(tile.number % K_BUFFERS)

    def read_k(self, tile: fly.PipelineTile, n: int) -> list[fly.Value]:
        """Operands of K's key tile `n` [step over head_dim]."""
        buffer = self._k_buffer(tile)
        row, depth = n * self.link.layout.columns, self.link.atom.k
        return [self.k_load.load(buffer, row, t * depth)[0] for t in range(self.dim_steps)]

    def read_v(self, tile: fly.PipelineTile) -> list[list[fly.Value]]:
        """V operands [step over keys][dim tile]."""
        columns, depth = self.link.layout.columns, self.link.atom.k
        return [
            [self.v_load.load(self.v_tile, n * columns, t * depth)[0] for n in range(self.dim_tiles)]
            for t in range(self.key_steps)
        ]


class TileCopy(Protocol):
    """How a block's threads copy tiles of K or V."""

    layout: fly.PaddedTile

    def load(self, tile: Any) -> InFlight:
        """Start tile number `tile` on its way to registers."""

    def store(self, in_flight: InFlight, destination: fly.SharedTile) -> None:
        """Store what arrived."""


class KeyCopy:
    """Tiles of K, kept as rows: a thread loads `vector` elements of one row, or of several that are as many passes
    apart.
    """

    def __init__(self, source: fly.RowView, layout: fly.PaddedTile, vector: int):
        x, y, z = fly.block_dim()
        self.source, self.layout, self.vector = source, layout, vector
        lanes = layout.columns // vector
        self.rows = min(layout.rows, x * y * z // lanes)  # of a pass
        self.passes = layout.rows // self.rows
        thread = linear_thread()
        row, column = thread // lanes, thread % lanes * vector
        self.offset = row * source.pitch + column * source.dtype.bytes
        self.place = layout.base(row, column)

    def load(self, tile: Any) -> InFlight:
        """Start tile number `tile`: 32-bit words of each pass."""
        window = self.source.tile(tile, self.layout.rows)
        return tuple(load_from(window, p * self.rows, self.offset, self.vector) for p in range(self.passes))

    def store(self, in_flight: InFlight, destination: fly.SharedTile) -> None:
        """Store what arrived."""
        for p, words in enumerate(in_flight):
            _, add = self.layout.displace(p * self.rows, 0)
            place = destination.pointer.offset(self.place).offset(add)
            memory.store(words.bitcast(self.source.dtype), place, align=self.vector * self.source.dtype.bytes)


class ValueCopy:
    """Tiles of V, stored a line a dimension: a thread loads a few columns of 4 rows and turns them in registers.

    Pieces of 4 keys go to `slot_of_piece` within each group of as many pieces.
    """

    def __init__(self, source: fly.RowView, layout: fly.PaddedTile, slot_of_piece: tuple[int, ...]):
        x, y, z = fly.block_dim()
        self.source, self.layout = source, layout
        pieces = layout.columns // PIECE
        self.width = layout.rows * pieces // (x * y * z)  # columns of a thread
        lanes = layout.rows // self.width
        thread = linear_thread()
        piece, column = thread // lanes, thread % lanes * self.width
        self.offset = piece * PIECE * source.pitch + column * source.dtype.bytes
        group = len(slot_of_piece)
        slots = fly.lane_map([p // group * group + slot_of_piece[p % group] for p in range(pieces)], piece)
        self.place = layout.base(column, slots * PIECE)

    def load(self, tile: Any) -> InFlight:
        """Start tile number `tile`: 32-bit words of each row. Rows share an offset, from a base of their own."""
        window = self.source.tile(tile, self.layout.columns)
        return tuple(load_from(window, r, self.offset, self.width) for r in range(PIECE))

    def store(self, in_flight: InFlight, destination: fly.SharedTile) -> None:
        """Turn what arrived and store it."""
        rows = [words.bitcast(self.source.dtype) for words in in_flight]
        for column in range(self.width):
            pairs = [shuffle(rows[i], rows[i + 1], [column, self.width + column]) for i in (0, 2)]
            _, add = self.layout.displace(column, 0)
            place = destination.pointer.offset(self.place).offset(add)
            memory.store(shuffle(pairs[0], pairs[1], [0, 1, 2, 3]), place, align=8)


def load_from(window: fly.Window, row: int, offset: fly.Value, count: int) -> fly.Value:
    """`count` elements at an offset from a row of the window, as words."""
    dtype = window.view.dtype
    step = row * window.pitch
    base, bound = (
        (window.base.offset(step), fly.maximum(window.bound - step, 0)) if row else (window.base, window.bound)
    )
    size = count * dtype.bytes
    align = min(window.view.alignment, size)
    return memory.load_bounded(base, offset, bound, i32, size // i32.bytes, align=align)


def k_tile(head_dim: int) -> fly.PaddedTile:
    """K in LDS, with 16 bytes of padding a row: 8 neighbouring rows start in 8 different runs of 16 bytes of 128."""
    return fly.PaddedTile(fly.Layout((TILE_KEYS, head_dim), (head_dim, 1)), head_dim, 8)


def v_tile(head_dim: int) -> fly.PaddedTile:
    """V in LDS, a line of keys a dimension.

    The dimensions that a thread stores are in different groups of lines, those of neighbouring threads in
    neighbouring lines, 144 bytes apart. Of 8 neighbouring dimensions, those of a group are 16 bytes apart in the
    banks, and groups as much as their dimensions together: an operand's reads have no conflicts. Of a store's lanes,
    two share a bank.
    """
    together = head_dim // 32
    order = fly.Layout(((together, 32), TILE_KEYS), ((32 * TILE_KEYS, TILE_KEYS), 1))
    return fly.PaddedTile(order, TILE_KEYS, 8, group=32, group_pad=8 * (8 // together))
