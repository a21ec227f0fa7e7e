"""How tensors of a portable attention kernel become operands of its matrix instructions: rows that stay with a wave,
and tiles of rows that pass by.

The forward pass has queries that stay, and keys and values that pass by. Of the backward pass two tensors stay and
two pass by: queries pass keys that stay (dK, dV), or keys pass queries that stay (dQ). What passes by is an operand
in two ways: across its columns, as K is of the scores, and along its rows, as V is of the output.

Head dimensions are padded to multiples of 32 in shared memory only: copies fill what the tensors lack with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import fly

from ..work.fragments import load_queries, product
from ..work.vectorized import VectorRows
from .vectorized import KeyPieces, ValuePieces

Rows = fly.RowView | fly.PagedRows | VectorRows  # what passes by
Queries = Callable[[int], list[fly.Value]]  # step over the head dimension -> one operand per row tile
PAD = 32


def padded(head_dim: int, power_of_two: bool = False) -> int:
    """Columns of a shared tile for a head dimension; `power_of_two`: the next one."""
    return max(PAD, 1 << (head_dim - 1).bit_length()) if power_of_two else -(-head_dim // PAD) * PAD


def _plan(link: fly.Chain, operand: str, **kwargs: Any) -> fly.OperandPlan | None:
    want = fly.operand_coordinates(link.atom, operand, **kwargs)
    return fly.plan_operand(fly.target().matrix_loads, want, link.atom.values(operand))


def _straight_plan(link: fly.Chain, operand: str) -> fly.OperandPlan:
    """How an operand is read from a tile that has its rows."""
    return fly.require_plan(_plan(link, operand, transposed=False), link.atom, operand)


def _transposed_plan(link: fly.Chain) -> fly.OperandPlan | None:
    """How a tile is read transposed, rows in the order in which registers of weights hold them; None: no load can."""
    return _plan(link, link.column_operand, transposed=True, slot_of=lambda k: link.columns[k])


def _along_plan(link: fly.Chain, rows: Rows | None) -> fly.OperandPlan | None:
    """`_transposed_plan`, or None where `rows` are stored transposed, since that is how they come."""
    return None if isinstance(rows, VectorRows) else _transposed_plan(link)


def column_tiles(link: fly.Chain, columns: int, rows: Rows | None = None) -> int:
    """Accumulator tiles across `columns` columns of a product along a stream, which is of `rows` if they say more."""
    together = (_along_plan(link, rows) or _straight_plan(link, link.column_operand)).tiles
    return -(-columns // (link.layout.columns * together)) * together


def direct_rows(link: fly.Chain, window: fly.Window, offset: Any, count: int) -> Queries:
    """Operands of `count` rows, from the wave's `offset` in the block's window, straight from global memory."""
    steps = -(-window.view.columns // link.atom.k)
    operands = load_queries(link, window, offset, count // link.layout.rows, steps)
    return lambda t: [tile[t] for tile in operands]


class SharedRows:
    """A window of `count` rows on their way to shared memory, by asynchronous copies of `vector` elements."""

    def __init__(self, name: str, link: fly.Chain, window: fly.Window, count: int, vector: int):
        rows = window.view
        plan = _straight_plan(link, link.row_operand)
        layout = fly.SwizzledTile(count, padded(rows.columns), plan.load.granule)
        self.link = link
        self.steps = -(-rows.columns // link.atom.k)
        self.tile = fly.SharedTile.ring(name, layout, rows.dtype, 1)[0]
        self.loader = fly.OperandLoader(plan, layout)
        copy = fly.RowCopy(rows, layout, vector=vector, asynchronous=True)
        self.flight = copy.issue_window(window, self.tile)

    def operands(self, offset: Any, count: int, *, keep: bool) -> Queries:
        """Operands of `count` rows from the wave's `offset` on, behind a wait for `flight` and a barrier.

        `keep` loads them into registers now, otherwise each use loads its own.
        """
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
class Tiling:
    """Tiles of `rows` rows and how they travel: `stages` slots each, `vector` elements a copy.

    With one stage, tiles go through registers, or straight to shared memory by turns if they `alternate`.
    `power_of_two`: tiles have so many columns, so that threads that transpose copy several elements at a time.
    """

    rows: int
    stages: int
    vector: int
    alternate: bool = False
    power_of_two: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether tiles go past the registers."""
        return self.stages > 1 or self.alternate


class Stream:
    """Tiles of a matrix on their way to shared memory, and the products with them.

    `copies` are for a ring, which gives the tiles of every step in the same order: one, or two where no load of the
    target transposes what another load takes as it is. `dtype`: of tiles in shared memory, if it is not the rows'.
    """

    def __init__(
        self,
        name: str,
        link: fly.Chain,
        rows: Rows,
        tiling: Tiling,
        *,
        across: bool,
        along: bool,
        dtype: fly.DType | None = None,
    ) -> None:
        self.link = link
        dtype = dtype or rows.dtype
        self._copies: list[tuple[Callable[[], Any], fly.SharedTile]] = []
        atom, operand, columns = link.atom, link.column_operand, link.layout.columns
        self.steps = -(-rows.columns // atom.k)
        self.row_steps = tiling.rows // atom.k
        self.row_tiles = tiling.rows // columns
        plan, transposing = _straight_plan(link, operand), _along_plan(link, rows)
        if across or transposing is not None:
            granule = max(p.load.granule for p in (plan if across else None, transposing if along else None) if p)
            layout = fly.SwizzledTile(tiling.rows, padded(rows.columns, tiling.power_of_two), granule)
            slots = fly.SharedTile.ring(name, layout, dtype, tiling.stages)[0]
            self._copies.append((_row_copy(rows, layout, tiling), slots))
        if across:
            self._across = fly.OperandLoader(plan, layout)
            for t in range(self.steps):
                self._across.prepare(0, t * atom.k)
        if not along:
            return
        self._transposed = transposing is None
        if transposing is None:
            # no load transposes it: it is stored so, rows in the order in which registers of weights hold them
            dims = padded(rows.columns, tiling.power_of_two)
            layout = fly.SwizzledTile(dims, tiling.rows, plan.load.granule, fold=True)
            pieces = tuple(link.columns.index(4 * p) // 4 for p in range(atom.k // 4))
            transposed = fly.SharedTile.ring(f"{name} transposed", layout, dtype, tiling.stages)[0]
            self._copies.append((_transposed_copy(rows, layout, tiling, pieces), transposed))
        self._along = fly.OperandLoader(transposing or plan, layout)
        for n in range(0, column_tiles(link, rows.columns, rows), self._along.plan.tiles):
            for t in range(self.row_steps):
                self._along.prepare(*self._place(n, t))

    def copies(self) -> list[tuple[Any, fly.SharedTile]]:
        """Those for a ring, made here: what a thread takes of a tile is computed where this is called."""
        return [(make(), slots) for make, slots in self._copies]

    def _place(self, n: int, t: int) -> tuple[int, int]:
        row, column = t * self.link.atom.k, n * self.link.layout.columns
        return (column, row) if self._transposed else (row, column)

    def across(self, sums: fly.Fragment, rows: Queries, tiles: Sequence[fly.SharedTile]) -> fly.Fragment:
        """sums + rows · tileᵀ: a column for each row of the tile. `tiles`: of `copies`."""
        for t in range(self.steps):
            place = lambda n, t=t: (n * self.link.layout.columns, t * self.link.atom.k)  # noqa: E731
            sums = product(self.link, rows(t), self._across, tiles[0], place, sums)
        return sums

    def along(self, sums: fly.Fragment, weights: fly.Fragment, tiles: Sequence[fly.SharedTile]) -> fly.Fragment:
        """sums + weights · tile; the weights' registers, rounded to 16 bits, are operands as they are."""
        tile = tiles[-1]
        narrow = weights.map(lambda x, r, c: x.to(tile.dtype, rounding="nearest_any"))
        operands = [self.link.operands(row) for row in narrow.tiles]
        for t in range(self.row_steps):
            place = lambda n, t=t: self._place(n, t)  # noqa: E731
            sums = product(self.link, [row[t] for row in operands], self._along, tile, place, sums)
        return sums


@dataclass(frozen=True)
class ScaledCopy:
    """A copy through registers whose rows are multiplied by `factor_of(row)`, f32, which is loaded with them."""

    copy: Any
    factor_of: Callable[[fly.Value], fly.Value]

    def locate(self, tile: Any) -> tuple[fly.Value, ...]:
        """As the copy's."""
        located: tuple[fly.Value, ...] = self.copy.locate(tile)
        return located

    def issue(self, tile: Any, destination: fly.SharedTile, located: tuple[fly.Value, ...] | None = None) -> Any:
        """Set a tile and its factors on their way."""
        first = tile * self.copy.tile_rows
        factors = tuple(self.factor_of(first + row) for row in self.copy.own_rows())
        return self.copy.issue(tile, destination, located), factors

    def land(self, in_flight: Any, destination: fly.SharedTile) -> None:
        """Store what arrived."""
        rows, factors = in_flight
        self.copy.land(rows, destination, factors)


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


def listed_copies(
    copies: Sequence[tuple[Any, Any]], tile_of: Callable[[Any], Any] | None
) -> list[tuple[Any, fly.SharedTile]]:
    """`copies` for a ring whose steps take the tiles that `tile_of` names; None: those of the same numbers."""
    return [(copy if tile_of is None else ListedCopy(copy, tile_of), slots) for copy, slots in copies]


class KeyValues:
    """K and V tiles on their way through `ring`, and the products with them.

    `lag` (0 or 1) is how many tiles V is behind K. `listed`: the number of the tile that a step takes, where it is
    not the step's own. `dtype`: of tiles in shared memory, if it is not the rows'. `value_factor`: what a row of V is
    multiplied by before it is rounded, if tiles go through registers.
    """

    def __init__(
        self,
        link: fly.Chain,
        k_rows: Rows,
        v_rows: Rows,
        tiling: Tiling,
        lag: int = 0,
        listed: Callable[[Any], Any] | None = None,
        dtype: fly.DType | None = None,
        value_factor: Callable[[fly.Value], fly.Value] | None = None,
    ):
        self.k = Stream("k", link, k_rows, tiling, across=True, along=False, dtype=dtype)
        self.v = Stream("v", link, v_rows, tiling, across=False, along=True, dtype=dtype)
        values = self.v.copies()
        if value_factor is not None:
            values = [(ScaledCopy(copy, value_factor), slots) for copy, slots in values]
        copies = listed_copies((*self.k.copies(), *values), listed)
        self.ring = (
            fly.AlternatingTiles(*copies) if tiling.alternate else fly.TileRing(copies, tiling.stages, lags=(0, lag))
        )

    def scores(self, queries: Queries, row_tiles: int, tile: fly.SharedTile) -> fly.Fragment:
        """Raw scores of the queries with a tile of K."""
        return self.k.across(fly.Fragment.zeros(self.k.link.layout, row_tiles, self.k.row_tiles), queries, [tile])

    def accumulate(self, output: fly.Fragment, probabilities: fly.Fragment, tile: fly.SharedTile) -> fly.Fragment:
        """output + P V with a tile of V."""
        return self.v.along(output, probabilities, [tile])


def _row_copy(rows: Rows, layout: fly.SwizzledTile, tiling: Tiling) -> Callable[[], Any]:
    """What makes the copy of tiles that stay rows."""
    if isinstance(rows, VectorRows):
        return partial(KeyPieces, rows, layout)
    return partial(fly.RowCopy, rows, layout, vector=tiling.vector, asynchronous=tiling.asynchronous)


def _transposed_copy(
    rows: Rows, layout: fly.SwizzledTile, tiling: Tiling, slot_of_piece: tuple[int, ...]
) -> Callable[[], Any]:
    """What makes the copy of tiles that are stored transposed; values in vectors of keys are so already."""
    if isinstance(rows, VectorRows):
        return partial(ValuePieces, rows, layout, slot_of_piece)
    vector = min(tiling.vector, _turned_vector(tiling.rows, layout.rows))
    return partial(fly.TransposedCopy, rows, layout, vector=vector, slot_of_piece=slot_of_piece)


def _turned_vector(keys: int, dims: int) -> int:
    """Columns per thread so that all threads have a piece of 4 rows to transpose."""
    (threads, _, _) = fly.block_dim()
    group = dims & -dims
    return max(1, keys * group // (4 * threads))
