"""Rows of any number of columns in LDS: in tiles of 64 or 128 columns, several of them (panels) above 128.

Columns that rows have less than their tiles are zeros. The copies, buffers and operand loads of several panels are
used as those of one tile are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import fly

WIDEST = 128


def widths(head_dim: int) -> list[int]:
    """Columns of the panels, those of tiles in LDS; what rows have less is filled with zeros."""
    return [64 if min(WIDEST, head_dim - first) <= 64 else WIDEST for first in range(0, head_dim, WIDEST)]


@dataclass(frozen=True)
class PanelLayout:
    """A layout for each panel."""

    panels: tuple[fly.PaddedTile, ...]


Layout = fly.PaddedTile | PanelLayout


def layout_of(head_dim: int, of: Callable[[int], fly.PaddedTile]) -> Layout:
    """That of the panels, or of the only one; `of(columns)` is a panel's."""
    panels = tuple(map(of, widths(head_dim)))
    return panels[0] if len(panels) == 1 else PanelLayout(panels)


class PanelCopy:
    """`fly.DirectCopy` of every panel; positions and destinations are tuples of theirs."""

    def __init__(self, source: fly.RowView, layout: PanelLayout, group: int = 1, past_end: bool = True):
        self.source, self.layout, self.group = source, layout, group
        self.panels = [
            fly.DirectCopy(_panel(source, i), panel, group, past_end) for i, panel in enumerate(layout.panels)
        ]

    def start(self, first: Any) -> tuple[fly.CopyPosition, ...]:
        return tuple(panel.start(first) for panel in self.panels)

    def next(self, at: tuple[fly.CopyPosition, ...]) -> tuple[fly.CopyPosition, ...]:
        return tuple(panel.next(position) for panel, position in zip(self.panels, at, strict=True))

    def issue(
        self, at: tuple[fly.CopyPosition, ...], tile: int, destination: tuple[fly.SharedTile, ...]
    ) -> fly.Token:
        started = zip(self.panels, at, destination, strict=True)
        return fly.join([panel.issue(position, tile, to) for panel, position, to in started])


def _panel(source: fly.RowView, index: int) -> fly.RowView:
    first = index * WIDEST
    columns = min(WIDEST, source.columns - first)
    return replace(source, pointer=source.pointer.offset(first * source.dtype.bytes), columns=columns)


class PanelLoader:
    """`fly.OperandLoader` of every panel; panels of one layout share what is computed of the lane."""

    def __init__(self, plan: fly.OperandPlan, layout: PanelLayout):
        of = {panel: fly.OperandLoader(plan, panel) for panel in dict.fromkeys(layout.panels)}
        self.panels = [of[panel] for panel in layout.panels]

    def load(self, tile: tuple[fly.SharedTile, ...], row: int, column: int) -> list[fly.Value]:
        """As an `OperandLoader`'s."""
        panel, column = divmod(column, WIDEST)
        return self.panels[panel].load(tile[panel], row, column)


class PanelPagedCopy:
    """`fly.PagedDirectCopy` of every panel, whose lines of a wave are of the same rows: positions are the first's."""

    def __init__(self, source: fly.PagedRows, layout: PanelLayout):
        self.source, self.layout = source, layout
        self.panels = [fly.PagedDirectCopy(_paged_panel(source, i), panel) for i, panel in enumerate(layout.panels)]
        self.start, self.next = self.panels[0].start, self.panels[0].next

    def issue(self, at: fly.PagePosition, destination: tuple[fly.SharedTile, ...]) -> fly.Token:
        return fly.join([panel.issue(at, to) for panel, to in zip(self.panels, destination, strict=True)])


def _paged_panel(source: fly.PagedRows, index: int) -> fly.PagedRows:
    first, pages = index * WIDEST, source.pages
    pointer = pages.pointer.offset(first * source.dtype.bytes)
    moved = fly.Tensor(pointer, pages.dtype, pages.shape, pages.stride, pages.alignment)
    return replace(source, pages=moved, columns=min(WIDEST, source.columns - first))


def paged_copy(source: fly.PagedRows, layout: Layout) -> Any:
    """`direct_copy` of rows in pages."""
    return PanelPagedCopy(source, layout) if isinstance(layout, PanelLayout) else fly.PagedDirectCopy(source, layout)


def direct_copy(source: fly.RowView, layout: Layout, group: int = 1, past_end: bool = True) -> Any:
    """The copy into tiles of a layout; `past_end`: see `fly.DirectCopy`."""
    kind: Any = PanelCopy if isinstance(layout, PanelLayout) else fly.DirectCopy
    return kind(source, layout, group, past_end)


def loader(plan: fly.OperandPlan, layout: Layout) -> Any:
    """The loads from tiles of a layout."""
    return PanelLoader(plan, layout) if isinstance(layout, PanelLayout) else fly.OperandLoader(plan, layout)


def buffer(name: str, layout: Layout, dtype: fly.DType) -> Any:
    """A tile of a layout in LDS, or one for each panel."""
    if isinstance(layout, PanelLayout):
        return tuple(fly.SharedTile.ring(f"{name}.{i}", p, dtype, 1)[0] for i, p in enumerate(layout.panels))
    return fly.SharedTile.ring(name, layout, dtype, 1)[0]
