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
from fly.ir.math import minimum
from fly.ir.memory import Pointer, i64_attribute
from fly.ir.value import Value, compare, select
from fly.lang.ids import lane_id, wave_id
from fly.lang.lanes import lane_map
from fly.lang.shared import PaddedTile, SharedTile
from fly.lang.sync import Token, join
from fly.lang.tensor import RowView, wide

VECTOR_BYTES = 16  # that a lane moves with one instruction
MAX_SHIFT = 4095  # bytes; the instruction's own offset has 12 bits


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
        if VECTOR_BYTES not in target.direct_copy_bytes:
            raise ShapeError(f"{target.arch} has no direct-to-shared copy of {VECTOR_BYTES} bytes a lane")
        if source.dtype.bytes != layout.element_bytes:
            raise ShapeError(f"a tile of {layout.element_bytes}-byte elements for rows of {source.dtype}")
        vector = VECTOR_BYTES // layout.element_bytes
        if source.columns != layout.columns or source.alignment < 4:
            raise ShapeError(
                f"a direct copy needs rows of {layout.columns} elements at 4-byte alignment, not {source.columns} "
                f"at {source.alignment}"
            )
        x, y, z = current().block
        waves = x * y * z // target.wave_size
        if layout.line != target.wave_size * vector or layout.lines % waves:
            raise ShapeError(
                f"{layout.lines} lines of {layout.line} elements do not divide into runs of {waves} waves, "
                f"{target.wave_size * vector} elements each"
            )
        self.source = source
        self.layout = layout
        self.group = group
        self.runs = layout.lines // waves
        # a wave's lines lie side by side, and a constant in the instruction moves both ends of a copy from one to the
        # next; the base lies so much lower that no lane's offset is negative
        self._bias = (self.runs - 1) * layout.line_bytes
        if self._bias > MAX_SHIFT:
            raise ShapeError(
                f"{self.runs} lines of {layout.line_bytes} bytes a wave; expected {MAX_SHIFT} bytes at most"
            )
        self._wave = wave_id()
        self._step = source.pitch * layout.rows
        lane = lane_id()
        places = [layout.coordinate(i * vector) for i in range(target.wave_size)]
        row = lane_map([r for r, _ in places], lane)
        column = lane_map([c for _, c in places], lane)
        self._offsets = [self._lane_offset(run, row, column) for run in range(self.runs)]

    def _lane_offset(self, run: int, row: Value, column: Value) -> Value:
        """Bytes from the base to what this lane fetches for line `wave * runs + run`, less what the shift adds."""
        lines = [self.layout.coordinate(line * self.layout.line) for line in range(run, self.layout.lines, self.runs)]
        row = row + lane_map([r - lines[0][0] for r, _ in lines], self._wave) + lines[0][0]
        column = column + lane_map([c - lines[0][1] for _, c in lines], self._wave) + lines[0][1]
        return row * self.source.pitch + (
            column * self.layout.element_bytes + self._bias - run * self.layout.line_bytes
        )

    def start(self, first: Any, lead: int = 0) -> CopyPosition:
        """The group that begins `lead` tiles before row `first`; rows before that one are not to be copied."""
        source = self.source
        count = source.count - minimum(source.count, first)
        bytes_ = select(count > 0, (count - 1) * source.pitch + source.columns * source.dtype.bytes, 0)
        base = source.row(wide(first) - lead * self.layout.rows).offset(-self._bias)
        return CopyPosition(base, bytes_ + (self._step * (lead + self.group) + self._bias))

    def next(self, at: CopyPosition) -> CopyPosition:
        """The next group."""
        step = self._step * self.group
        left = at.left - step
        return CopyPosition(at.base.offset(wide(step)), select(compare("ult", left, step), step, left))

    def issue(self, at: CopyPosition, tile: int, destination: SharedTile) -> Token:
        """Start tile number `tile` of a group on its way into `destination`; rows past the end become zeros."""
        bound = at.left - self._step * self.group
        target = destination.pointer.offset(self._wave * (self.runs * self.layout.line_bytes))
        tokens = []
        for run, offset in enumerate(self._offsets):
            operands = [target.ir, at.base.ir, (offset + self._step * tile).ir, bound.ir]
            attributes = {"bytes": i64_attribute(VECTOR_BYTES), "shift": i64_attribute(run * self.layout.line_bytes)}
            tokens.append(Token(emit("fly.copy_direct", operands, [token_type()], attributes).results[0]))
        return join(tokens)
