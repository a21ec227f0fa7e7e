"""K and V of the gfx950 kernel on their way to LDS: how tiles lie there, and the stages that start their copies.

Two buffers of each, filled by direct-to-LDS copies, of which a wave starts one for a line of 1024 bytes:

| keys | base and bound of a wave's copies | rows of a wave's lines, D=128 |
|---|---|---|
| contiguous, and pages of 64 and more | advance every two tiles; of pages, computed for every tile | 16 apart |
| contiguous, tiles of a block mask's list | computed for every tile | 16 apart |
| pages of 16 and 32 | computed for every tile | 4 apart, so that they are of one page |

Which page or tile that is a wave loads from the table or the lists a tile ahead, at the end of cluster 0: the next
wait for LDS, which a scalar load shares, is two clusters later. V's copy, a step later, has the number from K's.
"""

from __future__ import annotations

from typing import Any

import fly
from fly.backends.rocdl.intrinsics import sched_barrier

from ..work.tile_list import Listed
from ..work.tile_scheduler import BlockWork
from .wide import Layout, PanelCopy, PanelPagedCopy, buffer, direct_copy, paged_copy

TILE_KEYS = 64
LINE = 512  # elements


class KeyCopies:
    """What the kinds of copies share: the buffers, and which stages there are.

    `running`: the values of the pipeline that the stages start with; `listed`: the one that is a tile's number where
    it does not follow from the step, else "".
    """

    running: tuple[str, ...] = ()
    listed = ""
    k_copy: fly.DirectCopy | fly.PagedDirectCopy | PanelCopy | PanelPagedCopy
    v_copy: fly.DirectCopy | fly.PagedDirectCopy | PanelCopy | PanelPagedCopy

    def allocate(self) -> None:
        """The buffers, `k` and `v`."""
        self.k = [self._buffer(f"k{i}", self.k_copy) for i in range(2)]
        self.v = [self._buffer(f"v{i}", self.v_copy) for i in range(2)]

    @staticmethod
    def _buffer(name: str, copy: Any) -> Any:
        return buffer(name, copy.layout, copy.source.dtype)

    def start(self, first_tile: Any) -> dict[str, Any]:
        """What the stages' running values start with."""
        raise NotImplementedError

    def k_stage(self, **place: Any) -> fly.Stage:
        """Starts a tile of K: gives "k_flight"."""
        raise NotImplementedError

    def v_stage(self, **place: Any) -> fly.Stage:
        """Starts a tile of V: gives "v_flight"."""
        raise NotImplementedError

    def ahead(self, **place: Any) -> list[fly.Stage]:
        """What is done for the next tile of K."""
        return []


class Copies(KeyCopies):
    """Of contiguous keys: two tiles share base and bound, of which the first has an even number."""

    running = ("k_at", "v_at")
    k_copy: fly.DirectCopy | PanelCopy
    v_copy: fly.DirectCopy | PanelCopy

    def __init__(self, work: BlockWork, k_layout: Layout, v_layout: Layout, past_end: bool):
        assert isinstance(work.k, fly.RowView) and isinstance(work.v, fly.RowView)
        self.k_copy = direct_copy(work.k, k_layout, 2, past_end)
        self.v_copy = direct_copy(work.v, v_layout, 2, past_end)

    def start(self, first_tile: Any) -> dict[str, Any]:
        first_key = first_tile * TILE_KEYS
        return {"k_at": self.k_copy.start(first_key), "v_at": self.v_copy.start(first_key)}

    def k_stage(self, **place: Any) -> fly.Stage:
        return fly.Stage("copy K", self.copy_k, "k_at", "k_flight k_at", **place)

    def v_stage(self, **place: Any) -> fly.Stage:
        return fly.Stage("copy V", self.copy_v, "v_at", "v_flight v_at", **place)

    def copy_k(self, tile: fly.PipelineTile, at: fly.CopyPosition) -> tuple[fly.Token, fly.CopyPosition]:
        return self._copy(self.k_copy, tile, at, self.k)

    def copy_v(self, tile: fly.PipelineTile, at: fly.CopyPosition) -> tuple[fly.Token, fly.CopyPosition]:
        return self._copy(self.v_copy, tile, at, self.v)

    @staticmethod
    def _copy(
        copy: Any, tile: fly.PipelineTile, at: fly.CopyPosition, buffers: list[Any]
    ) -> tuple[fly.Token, fly.CopyPosition]:
        flight = copy.issue(at, tile.slot, buffers[tile.slot])
        # early, or LLVM has two numbers for the base in a loop with copies behind it, and adds them up every turn
        return flight, fly.early(copy.next(at)) if tile.slot == copy.group - 1 else at


class PagedCopies(KeyCopies):
    """Of keys in pages; a tile's pages are those of K and of V."""

    running = ("pages",)
    k_copy: fly.PagedDirectCopy | PanelPagedCopy
    v_copy: fly.PagedDirectCopy | PanelPagedCopy

    def __init__(self, work: BlockWork, k_layout: Layout, v_layout: Layout, past_end: bool):
        assert isinstance(work.k, fly.PagedRows) and isinstance(work.v, fly.PagedRows)
        self.k_copy = paged_copy(work.k, k_layout)
        self.v_copy = paged_copy(work.v, v_layout)

    def start(self, first_tile: Any) -> dict[str, Any]:
        return {"pages": self.k_copy.start(first_tile * TILE_KEYS)}

    def k_stage(self, **place: Any) -> fly.Stage:
        return fly.Stage("copy K", self.copy_k, "pages", "k_flight at", **place)

    def v_stage(self, **place: Any) -> fly.Stage:
        return fly.Stage("copy V", self.copy_v, "at", "v_flight", **place)

    def ahead(self, **place: Any) -> list[fly.Stage]:
        return [fly.Stage("find pages", self.find, "pages", "pages", **place)]

    def copy_k(self, tile: fly.PipelineTile, at: fly.PagePosition) -> tuple[fly.Token, fly.PagePosition]:
        sched_barrier()  # K's reads before base and bound, which are computed while LDS is busy
        at = at.within(self.k_copy.source.pages.shape[0])  # v has as many
        return self.k_copy.issue(at, self.k[tile.slot]), at

    def copy_v(self, tile: fly.PipelineTile, at: fly.PagePosition) -> fly.Token:
        return self.v_copy.issue(at, self.v[tile.slot])

    def find(self, tile: fly.PipelineTile, at: fly.PagePosition) -> fly.PagePosition:
        """Behind the cluster's wait, which would wait for this load too."""
        sched_barrier()
        return self.k_copy.next(at)


class ListedCopies(KeyCopies):
    """Of contiguous keys whose tiles a block mask lists; the pipeline's tiles are steps of the list."""

    running = ("found",)
    listed = "key_tile"
    k_copy: fly.DirectCopy | PanelCopy
    v_copy: fly.DirectCopy | PanelCopy

    def __init__(self, work: BlockWork, k_layout: Layout, v_layout: Layout, past_end: bool):
        assert work.listed is not None
        assert isinstance(work.k, fly.RowView) and isinstance(work.v, fly.RowView)
        self.list, self.first = work.listed, work.tiles.first
        self.k_copy = direct_copy(work.k, k_layout)
        self.v_copy = direct_copy(work.v, v_layout)

    def start(self, first_tile: Any) -> dict[str, Any]:
        return {"found": self.list.find(first_tile, constant=True)}

    def k_stage(self, **place: Any) -> fly.Stage:
        return fly.Stage("copy K", self.copy_k, "found", "k_flight key_tile", **place)

    def v_stage(self, **place: Any) -> fly.Stage:
        return fly.Stage("copy V", self.copy_v, "key_tile", "v_flight", **place)

    def ahead(self, **place: Any) -> list[fly.Stage]:
        return [fly.Stage("find tile", self.find, "found", "found", **place)]

    def copy_k(self, tile: fly.PipelineTile, found: Listed) -> tuple[fly.Token, fly.Value]:
        sched_barrier()  # as for pages
        key_tile = self.list.tile_of(found)
        return self._copy_tile(self.k_copy, key_tile, self.k[tile.slot]), key_tile

    def copy_v(self, tile: fly.PipelineTile, key_tile: fly.Value) -> fly.Token:
        return self._copy_tile(self.v_copy, key_tile, self.v[tile.slot])

    @staticmethod
    def _copy_tile(copy: Any, key_tile: fly.Value, destination: Any) -> fly.Token:
        flight: fly.Token = copy.issue(copy.start(key_tile * TILE_KEYS), 0, destination)
        return flight

    def find(self, tile: fly.PipelineTile, found: Listed) -> Listed:
        """As for pages."""
        sched_barrier()
        return self.list.find(self.first + tile.number + 1, constant=True)


def copies_of(work: BlockWork, k_layout: Layout, v_layout: Layout, past_end: bool) -> KeyCopies:
    """Those that a block's keys need; `past_end`: of a tile past the last one too."""
    if work.listed is not None:
        return ListedCopies(work, k_layout, v_layout, past_end)
    return (PagedCopies if isinstance(work.k, fly.PagedRows) else Copies)(work, k_layout, v_layout, past_end)


def k_tile(head_dim: int, together: int = TILE_KEYS) -> fly.PaddedTile:
    """K in LDS: lines of 1024 bytes, each with rows of one run of `together` (64, or less: 16) rows.

    Of 64, a line's rows are 16 (or 8) apart, so that 16 neighbours are in 16 lines. With 16 bytes of padding a line,
    16 rows start in 16 different runs of 16 bytes of 256. Of 16, a line's rows are 4 (or 2) apart, in pieces of 64
    (or 32) bytes by turns: pieces and lines together tell 16 rows apart. More padding puts every 16 rows on multiples
    of 256 bytes, because a read takes rows of two of them at once.
    """
    if together >= TILE_KEYS:
        lines = TILE_KEYS * head_dim // LINE
        return fly.PaddedTile(fly.Layout(((lines, TILE_KEYS // lines), head_dim), ((LINE, head_dim), 1)), LINE, 8)
    if head_dim == 128:
        order = fly.Layout(((4, 4, 4), (32, 4)), ((512, 32, 2048), (1, 128)))
        return fly.PaddedTile(order, LINE, 8, group=4, group_pad=96)
    order = fly.Layout(((2, 8, 4), (16, 4)), ((512, 16, 1024), (1, 128)))
    return fly.PaddedTile(order, LINE, 8, group=2, group_pad=112)


def v_tile(head_dim: int, together: int = TILE_KEYS) -> fly.PaddedTile:
    """V in LDS: as K, with 32 bytes of padding, and odd 32-byte pieces of a row 128 bytes from the even ones.

    Four neighbouring rows then start in the four 32-byte quarters of 128 bytes, and the two pieces of a row that the
    halves of 32 lanes read are in different halves of 256 bytes.
    """
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    if head_dim == 128:
        rows = ((16, 4), (512, 128)) if together >= TILE_KEYS else ((4, 4, 4), (512, 128, 2048))
        columns = (16, 2, 4), (1, 64, 16)
    else:
        rows = ((8, 2, 4), (512, 32, 128)) if together >= TILE_KEYS else ((2, 2, 4, 4), (512, 32, 128, 1024))
        columns = (16, 2, 2), (1, 64, 16)
    return fly.PaddedTile(fly.Layout((rows[0], columns[0]), (rows[1], columns[1])), LINE, 16)
