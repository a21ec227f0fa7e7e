"""How Q, K and V of a portable attention kernel become operands of its matrix instructions.

Head dimensions are padded to multiples of 32 in shared memory only: copies fill what the tensors lack with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fly

from ..work.fragments import load_queries, product

Queries = Callable[[int], list[fly.Value]]  # step over the head dimension -> one operand per row tile
PAD = 32


def padded(head_dim: int) -> int:
    """Columns of a shared tile for a head dimension."""
    return -(-head_dim // PAD) * PAD


def _plan(link: fly.Chain, operand: str, **kwargs: Any) -> fly.OperandPlan | None:
    want = fly.operand_coordinates(link.atom, operand, **kwargs)
    return fly.plan_operand(fly.target().matrix_loads, want, link.atom.values(operand))


def transposed_plan(link: fly.Chain) -> fly.OperandPlan | None:
    """How a tile is read turned, keys in the order in which registers of weights hold them; None: no load turns."""
    return _plan(link, link.column_operand, transposed=True, slot_of=lambda k: link.columns[k])


def turned_copy(
    link: fly.Chain, rows: fly.RowView | fly.PagedRows, count: int, vector: int, plan: fly.OperandPlan
) -> tuple[fly.SwizzledTile, fly.TransposedCopy]:
    """(layout, copy) that stores tiles of `count` rows turned, for loads of `plan`; rows as registers hold them."""
    dims, depth = padded(rows.columns), link.atom.k
    layout = fly.SwizzledTile(dims, count, plan.load.granule, fold=True)
    pieces = tuple(link.columns.index(4 * p) // 4 for p in range(depth // 4))
    vector = min(vector, _turned_vector(count, dims))
    return layout, fly.TransposedCopy(rows, layout, vector=vector, slot_of_piece=pieces)


def direct_queries(link: fly.Chain, window: fly.Window, offset: Any, count: int) -> Queries:
    """Operands of `count` rows, from the wave's `offset` in the block's window, straight from global memory."""
    steps = -(-window.view.columns // link.atom.k)
    operands = load_queries(link, window, offset, count // link.layout.rows, steps)
    return lambda t: [tile[t] for tile in operands]


class SharedQueries:
    """A window of `count` rows of Q on their way to shared memory, by asynchronous copies of `vector` elements."""

    def __init__(self, link: fly.Chain, window: fly.Window, count: int, vector: int):
        rows = window.view
        plan = fly.require_plan(_plan(link, link.row_operand, transposed=False), link.atom, link.row_operand)
        layout = fly.SwizzledTile(count, padded(rows.columns), plan.load.granule)
        self.link = link
        self.steps = -(-rows.columns // link.atom.k)
        self.tile = fly.SharedTile.ring("q", layout, rows.dtype, 1)[0]
        self.loader = fly.OperandLoader(plan, layout)
        copy = fly.RowCopy(rows, layout, vector=vector, asynchronous=True)
        self.flight = copy.issue_window(window, self.tile)

    def arrive(self, offset: Any, count: int, *, keep: bool) -> Queries:
        """Operands of `count` rows from the wave's `offset` on, when they are there.

        `keep` loads them into registers now, otherwise each use loads its own.
        """
        fly.wait(self.flight)
        fly.barrier()
        tile, link = self.tile.rows_from(offset), self.link
        places = range(0, count, link.layout.rows)
        for t in range(self.steps):
            self.loader.prepare(0, t * link.atom.k)

        def load(t: int) -> list[fly.Value]:
            return [self.loader.load(tile, row, t * link.atom.k)[0] for row in places]

        if not keep:
            return load
        operands = [load(t) for t in range(self.steps)]
        return lambda t: operands[t]


@dataclass(frozen=True)
class KeyValueTiling:
    """Tiles of `keys` keys and how they travel: `stages` slots each, `vector` elements a copy.

    With one stage, tiles go through registers, or straight to shared memory by turns if they `alternate`.
    `lag` (0 or 1) is how many tiles V is behind K.
    """

    keys: int
    stages: int
    vector: int
    alternate: bool = False
    lag: int = 0

    @property
    def asynchronous(self) -> bool:
        return self.stages > 1 or self.alternate


@dataclass(frozen=True)
class ListedCopy:
    """A copy of the tile that `tile_of(step)` names, for rings that count steps."""

    copy: Any
    tile_of: Callable[[Any], Any]

    @property
    def asynchronous(self) -> bool:
        """As the copy's."""
        return getattr(self.copy, "asynchronous", False)

    def locate(self, step: Any) -> tuple[fly.Value, ...]:
        """The step's tile, and what the copy has to know of it."""
        tile = self.tile_of(step)
        return tile, *self.copy.locate(tile)

    def issue(self, step: Any, destination: fly.SharedTile, located: tuple[fly.Value, ...] | None = None) -> Any:
        """Set the step's tile on its way."""
        tile, *known = located or self.locate(step)
        return self.copy.issue(tile, destination, tuple(known))

    def land(self, in_flight: Any, destination: fly.SharedTile) -> None:
        """Store what arrived."""
        self.copy.land(in_flight, destination)


class KeyValues:
    """K and V tiles on their way through `ring`, and the products with them.

    `listed`: the number of the tile that a step takes, where it is not the step's own.
    """

    def __init__(
        self,
        link: fly.Chain,
        k_rows: fly.RowView | fly.PagedRows,
        v_rows: fly.RowView | fly.PagedRows,
        tiling: KeyValueTiling,
        listed: Callable[[Any], Any] | None = None,
    ):
        self.link = link
        self.tiling = tiling
        columns, depth = link.layout.columns, link.atom.k
        self.key_tiles = tiling.keys // columns
        self.dim_steps = -(-k_rows.columns // depth)
        self.key_steps = tiling.keys // depth
        self._keys(k_rows)
        self._values(v_rows)
        self.dim_tiles = -(-v_rows.columns // (columns * self.v_plan.tiles)) * self.v_plan.tiles
        k_ring = fly.SharedTile.ring("k", self.k_copy.layout, k_rows.dtype, tiling.stages)[0]
        v_ring = fly.SharedTile.ring("v", self.v_copy.layout, v_rows.dtype, tiling.stages)[0]
        k_copy, v_copy = (c if listed is None else ListedCopy(c, listed) for c in (self.k_copy, self.v_copy))
        k, v = (k_copy, k_ring), (v_copy, v_ring)
        self.ring = (
            fly.AlternatingTiles(k, v)
            if tiling.alternate
            else fly.TileRing([k, v], tiling.stages, lags=(0, tiling.lag))
        )
        self.k_loader = fly.OperandLoader(self.k_plan, self.k_copy.layout)
        self.v_loader = fly.OperandLoader(self.v_plan, self.v_copy.layout)
        for t in range(self.dim_steps):
            self.k_loader.prepare(0, t * depth)
        for n in range(0, self.dim_tiles, self.v_plan.tiles):
            for t in range(self.key_steps):
                self.v_loader.prepare(*self._v_place(n, t))

    def _keys(self, rows: fly.RowView | fly.PagedRows) -> None:
        link, tiling = self.link, self.tiling
        operand = link.column_operand
        self.k_plan = fly.require_plan(_plan(link, operand, transposed=False), link.atom, operand)
        layout = fly.SwizzledTile(tiling.keys, padded(rows.columns), self.k_plan.load.granule)
        self.k_copy = fly.RowCopy(rows, layout, vector=tiling.vector, asynchronous=tiling.asynchronous)

    def _values(self, rows: fly.RowView | fly.PagedRows) -> None:
        link, tiling = self.link, self.tiling
        operand, columns, depth = link.column_operand, link.layout.columns, link.atom.k
        dims = padded(rows.columns)
        plan = _plan(link, operand, transposed=True, slot_of=lambda k: link.columns[k])
        self.turned = plan is None
        if plan is not None:
            self.v_plan = plan
            layout = fly.SwizzledTile(tiling.keys, dims, plan.load.granule)
            self.v_copy: fly.RowCopy | fly.TransposedCopy = fly.RowCopy(
                rows, layout, vector=tiling.vector, asynchronous=tiling.asynchronous
            )
            self._v_place: Callable[[int, int], tuple[int, int]] = lambda n, t: (t * depth, n * columns)
            return
        # no load turns V: it is stored turned, keys in the order in which P's registers hold them
        self.v_plan = fly.require_plan(_plan(link, operand, transposed=False), link.atom, operand)
        layout = fly.SwizzledTile(dims, tiling.keys, self.v_plan.load.granule, fold=True)
        pieces = tuple(link.columns.index(4 * p) // 4 for p in range(depth // 4))
        self.v_copy = fly.TransposedCopy(
            rows, layout, vector=min(tiling.vector, _turned_vector(tiling.keys, dims)), slot_of_piece=pieces
        )
        self._v_place = lambda n, t: (n * columns, t * depth)

    def scores(self, queries: Queries, row_tiles: int, tile: fly.SharedTile) -> fly.Fragment:
        """Raw scores of the queries with a tile of K."""
        link = self.link
        scores = fly.Fragment.zeros(link.layout, row_tiles, self.key_tiles)
        for t in range(self.dim_steps):
            scores = product(
                link,
                queries(t),
                self.k_loader,
                tile,
                lambda n, t=t: (n * link.layout.columns, t * link.atom.k),
                scores,
            )
        return scores

    def accumulate(self, output: fly.Fragment, probabilities: fly.Fragment, tile: fly.SharedTile) -> fly.Fragment:
        """output + P V with a tile of V; P's registers, rounded to 16 bit, are operands as they are."""
        weights = probabilities.map(lambda p, r, c: p.to(tile.dtype, rounding="nearest_any"))
        operands = [self.link.operands(row) for row in weights.tiles]
        for t in range(self.key_steps):
            output = product(
                self.link,
                [row[t] for row in operands],
                self.v_loader,
                tile,
                lambda n, t=t: self._v_place(n, t),
                output,
            )
        return output


def _turned_vector(keys: int, dims: int) -> int:
    """Columns of V per thread so that all threads have a piece of 4 rows to turn."""
    (threads, _, _) = fly.block_dim()
    group = dims & -dims
    return max(1, keys * group // (4 * threads))
