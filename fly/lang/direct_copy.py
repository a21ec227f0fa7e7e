"""Copies from global memory straight into shared memory, a wave at a time (CDNA's direct-to-LDS loads).

The hardware stores lane l's bytes at one address per wave plus l times the width. So a wave fills a line of the tile
at a time, each lane fetches what belongs at the place that it fills, and padding goes between lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fly.errors import ShapeError
from fly.ir.context import current, emit
from fly.ir.dialect import token_type
from fly.ir.dtypes import i32
from fly.ir.math import minimum
from fly.ir.memory import Pointer, i64_attribute
from fly.ir.value import Value, compare, select
from fly.lang.ids import lane_id, wave_id
from fly.lang.lanes import lane_map
from fly.lang.shared import PaddedTile, SharedTile
from fly.lang.sync import Token, join
from fly.lang.tensor import RowView, wide

VECTOR = 8  # 16-bit elements a lane moves with one instruction


@dataclass(frozen=True)
class CopyPosition:
    """Where a group of tiles begins in global memory: its address, and the bytes from there to the last row's end.

    `left` is at least a group's length, and holds that much more than there is: the next one subtracts it.
    """

    base: Pointer
    left: Value


class DirectCopy:
    """Tiles of `layout.rows` rows of `source`, in groups of `group` that share one base and bound.

    Only the base and the bound advance, on the scalar unit; the lanes' offsets stay. Groups are as many as a
    loop's body copies.

    Raises:
        ShapeError: the target has no such copies, or the tile's lines do not divide among the waves.
    """

    def __init__(self, source: RowView, layout: PaddedTile, group: int = 1):
        target = current().target
        if VECTOR * 2 not in target.direct_copy_bytes:
            raise ShapeError(f"{target.arch} has no direct-to-shared copy of {VECTOR * 2} bytes a lane")
        if source.columns != layout.columns or source.alignment < 4:
            raise ShapeError(
                f"a direct copy needs rows of {layout.columns} elements at 4-byte alignment, not {source.columns} "
                f"at {source.alignment}"
            )
        x, y, z = current().block
        waves = x * y * z // target.wave_size
        if layout.line != target.wave_size * VECTOR or layout.lines % waves:
            raise ShapeError(
                f"{layout.lines} lines of {layout.line} elements do not divide into runs of {waves} waves, "
                f"{target.wave_size * VECTOR} elements each"
            )
        self.source = source
        self.layout = layout
        self.group = group
        self.runs = layout.lines // waves
        self._waves = waves
        self._wave = wave_id()
        self._step = source.pitch * layout.rows
        lane = lane_id()
        places = [layout.coordinate(i * VECTOR) for i in range(target.wave_size)]
        row = lane_map([r for r, _ in places], lane)
        column = lane_map([c for _, c in places], lane)
        self._offsets = [self._lane_offset(run, row, column) for run in range(self.runs)]

    def _lane_offset(self, run: int, row: Value, column: Value) -> Value:
        """Bytes from the tile's first row to what this lane fetches for line `run * waves + wave`."""
        lines = [self.layout.coordinate(line * self.layout.line) for line in range(self.layout.lines)]
        first = run * self._waves
        row = row + lane_map([r - lines[first][0] for r, _ in lines[first : first + self._waves]], self._wave)
        column = column + lane_map([c - lines[first][1] for _, c in lines[first : first + self._waves]], self._wave)
        return (row + lines[first][0]) * self.source.pitch + (column + lines[first][1]) * 2

    def start(self, first: Any, lead: int = 0) -> CopyPosition:
        """The group that begins `lead` tiles before row `first`; rows before that one are not to be copied."""
        source = self.source
        count = source.count - minimum(source.count, first)
        bytes_ = select(count > 0, (count - 1) * source.pitch + source.columns * source.dtype.bytes, 0)
        before = self._step * lead
        base = source.row(wide(first) - lead * self.layout.rows)
        return CopyPosition(base, bytes_ + before + self._step * self.group)

    def next(self, at: CopyPosition) -> CopyPosition:
        """The next group."""
        step = self._step * self.group
        left = at.left - step
        return CopyPosition(at.base.offset(wide(step)), select(compare("ult", left, step), step, left))

    def issue(self, at: CopyPosition, tile: int, destination: SharedTile) -> Token:
        """Start tile number `tile` of a group on its way into `destination`; rows past the end become zeros."""
        bound = at.left - self._step * self.group
        first = destination.pointer.offset(self._wave * self.layout.line_bytes)
        tokens = []
        for run, offset in enumerate(self._offsets):
            target = first.offset(run * self._waves * self.layout.line_bytes)
            operands = [target.ir, at.base.ir, (offset + self._step * tile).ir, i32(0).ir, bound.ir]
            op = emit("fly.copy_direct", operands, [token_type()], {"bytes": i64_attribute(VECTOR * 2)})
            tokens.append(Token(op.results[0]))
        return join(tokens)
