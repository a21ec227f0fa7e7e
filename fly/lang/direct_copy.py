"""Copies from global memory straight into shared memory, a wave at a time (CDNA's direct-to-LDS loads).

The hardware stores lane l's bytes at one address per wave plus l times the width, so a swizzle cannot be made where
the data is written. It is made where it is read: each lane fetches what belongs at the place that it fills.
"""

from __future__ import annotations

from fly.errors import ShapeError
from fly.ir.context import current, emit
from fly.ir.dialect import token_type
from fly.ir.dtypes import i32
from fly.ir.memory import i64_attribute
from fly.ir.value import Value
from fly.lang.ids import lane_id, wave_id
from fly.lang.shared import SharedTile, SwizzledTile
from fly.lang.sync import Token, join
from fly.lang.tensor import RowView

VECTOR = 8  # 16-bit elements a lane moves with one instruction


class DirectCopy:
    """Tiles of `layout.rows` rows; every wave moves runs of (wave size * 8) elements of the tile.

    Offsets are unsigned 32-bit bytes from the matrix's first row: three tiles past its end must be within 4 GiB.

    Raises:
        ShapeError: the target has no such copies, or the tile does not divide into them.
    """

    def __init__(self, source: RowView, layout: SwizzledTile):
        target = current().target
        if VECTOR * 2 not in target.direct_copy_bytes:
            raise ShapeError(f"{target.arch} has no direct-to-shared copy of {VECTOR * 2} bytes a lane")
        if source.columns != layout.columns or source.alignment < 4:
            raise ShapeError(
                f"a direct copy needs rows of {layout.columns} elements at 4-byte alignment, not {source.columns} "
                f"at {source.alignment}"
            )
        x, y, z = current().block
        run = target.wave_size * VECTOR
        waves = x * y * z // target.wave_size
        self.run_bytes = run * 2
        self.rows_per_run = run // layout.columns
        self.runs = layout.rows // (self.rows_per_run * waves)
        self.waves = waves
        if self.runs * self.rows_per_run * waves != layout.rows or run % layout.columns:
            raise ShapeError(f"a tile of {layout.rows} x {layout.columns} does not divide into runs of {waves} waves")
        if self.rows_per_run * waves % layout.row_period:
            raise ShapeError(f"{self.rows_per_run * waves} rows at a time do not keep the swizzle's phase")
        self.source = source
        self.layout = layout
        self.source = source
        self.layout = layout
        self._wave = wave_id()
        whole = source.window(0, None)
        self._base, self._bound = whole.base, whole.bound
        # where this lane's piece lies in the tile, and which column of its row belongs there
        lanes_per_row = layout.columns // VECTOR
        row = self._wave * self.rows_per_run + lane_id() // lanes_per_row
        column = (layout.base(row, (lane_id() % lanes_per_row) * VECTOR) - row * (layout.columns * 2)) >> 1
        self._first = row * source.pitch + column * 2

    def start(self) -> tuple[Value, ...]:
        """Where this lane reads tile 0, one byte offset per run: what `issue` takes and loops carry."""
        step = self.source.pitch * (self.waves * self.rows_per_run)
        return tuple(self._first + step * run for run in range(self.runs))

    def next(self, at: tuple[Value, ...]) -> tuple[Value, ...]:
        """Where this lane reads the next tile."""
        step = self.source.pitch * self.layout.rows
        return tuple(offset + step for offset in at)

    def issue(self, at: tuple[Value, ...], destination: SharedTile) -> Token:
        """Start the tile at `at` on its way into `destination`; rows past the end become zeros."""
        first = destination.pointer.offset(self._wave * self.run_bytes)
        tokens = []
        for run, offset in enumerate(at):
            target = first.offset(run * self.waves * self.run_bytes)
            operands = [target.ir, self._base.ir, offset.ir, i32(0).ir, self._bound.ir]
            op = emit("fly.copy_direct", operands, [token_type()], {"bytes": i64_attribute(VECTOR * 2)})
            tokens.append(Token(op.results[0]))
        return join(tokens)
