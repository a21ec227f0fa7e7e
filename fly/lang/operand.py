"""Loading matrix operands from shared tiles: which load, at which address of which lane.

`plan_operand` is solved over all lanes at trace time: given where each register's element must come from, it finds
an instruction of the target that can fetch it and the address each lane has to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from fly.errors import AtomError, LayoutError
from fly.ir import memory
from fly.ir.context import emit
from fly.ir.dtypes import dtype
from fly.ir.memory import string_attribute
from fly.ir.value import Value, concat
from fly.lang.atoms import MatrixLoad, MmaAtom
from fly.lang.lane_address import LaneAddress
from fly.lang.lanes import linear_layout
from fly.lang.shared import PaddedTile, SharedTile, SwizzledTile
from fly.layout import Layout

Coordinate = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class LoadStep:
    """One load instruction: the (row, column) address of each lane, as layouts plus a static part."""

    row: Layout
    column: Layout
    row_offset: int
    column_offset: int


@dataclass(frozen=True)
class OperandPlan:
    """How one operand of `tiles` adjacent atoms is fetched: `load` once per step, values in order."""

    load: MatrixLoad
    steps: tuple[LoadStep, ...]
    tiles: int
    values: int


def _solve(load: MatrixLoad, want: Coordinate, first: int) -> LoadStep | None:
    """Addresses such that value v of `load` is element want(lane, first + v), if there are any."""
    address: dict[int, tuple[int, int]] = {}
    places = load.table.table()  # of every value of a lane, all lanes first
    lanes = load.lanes
    for lane in range(lanes):
        for value in range(load.values):
            source, column = divmod(places[lane + lanes * value], load.run)
            row, col = want(lane, first + value)
            if address.setdefault(source, (row, col - column)) != (row, col - column):
                return None
    row0, column0 = address[0]
    try:
        rows = linear_layout([address[lane][0] - row0 for lane in range(load.lanes)])
        columns = linear_layout([address[lane][1] - column0 for lane in range(load.lanes)])
    except (LayoutError, KeyError):
        return None
    if any(address[lane][1] % load.run for lane in range(load.lanes)):
        return None
    return LoadStep(rows, columns, row0, column0)


def plan_operand(loads: Sequence[MatrixLoad], want: Coordinate, values: int) -> OperandPlan | None:
    """How the first of `loads` that can do it fetches an operand, or None.

    `want(lane, value)` is the (row, column) in the shared tile of a lane's value, over the `values` of one atom
    and then those of the next one along the operand's outer dimension; a load may serve up to two atoms.
    """
    for load in loads:
        for tiles in (1, 2):
            if values * tiles % load.values:
                continue
            steps = [_solve(load, want, first) for first in range(0, values * tiles, load.values)]
            if all(step is not None for step in steps):
                return OperandPlan(load, tuple(cast("list[LoadStep]", steps)), tiles, values)
    return None


def operand_coordinates(
    atom: MmaAtom, operand: str, transposed: bool, slot_of: Callable[[int], int] = lambda k: k
) -> Coordinate:
    """want(lane, value) for adjacent tiles of operand "a" or "b" along its outer (m or n) dimension.

    The tile holds (outer, k) coordinates, or (k, outer) if `transposed`; `slot_of(k)` is the place in memory of
    the atom's k-th element.
    """
    layout, extent = (atom.a, atom.m) if operand == "a" else (atom.b, atom.n)
    elements, lanes, per_tile = layout.table(), atom.lanes, atom.values(operand)

    def want(lane: int, value: int) -> tuple[int, int]:
        tile, value = divmod(value, per_tile)
        k, outer = divmod(elements[lane + lanes * value], extent)
        outer, k = outer + tile * extent, slot_of(k)
        return (k, outer) if transposed else (outer, k)

    return want


class OperandLoader:
    """Loads operands from tiles of one layout; the per-lane address is computed once, when this is made.

    `first`: a traced (row, column) that is added to every place; see `LaneAddress`.
    """

    def __init__(
        self, plan: OperandPlan, layout: SwizzledTile | PaddedTile, first: tuple[Value, Value] | None = None
    ):
        self.plan = plan
        self.layout = layout
        self._addresses = [LaneAddress(layout, step.row, step.column, first) for step in plan.steps]

    def prepare(self, row: int, column: int) -> None:
        """Compute what a later `load` at this static offset needs, here rather than there (outside a loop)."""
        for step, address in zip(self.plan.steps, self._addresses):
            address.prepare(row + step.row_offset, column + step.column_offset)

    def load(self, tile: SharedTile, row: int, column: int) -> list[Value]:
        """The operands of `plan.tiles` adjacent atoms whose first element is at static (row, column)."""
        load, pieces = self.plan.load, []
        for step, lanes in zip(self.plan.steps, self._addresses):
            address = lanes.of(tile, row + step.row_offset, column + step.column_offset)
            element = tile.dtype
            if load.intrinsic:
                result = element.vector(load.values)
                op = emit("fly.load_matrix", [address.ir], [result], {"atom": string_attribute(load.name)})
                pieces.append(Value(op.results[0], element, load.values))
            else:
                pieces.append(memory.load(address, element, load.values, align=load.run * load.bits // 8))
        values = self.plan.values
        joined = pieces[0] if len(pieces) == 1 else None
        result = []
        for first in range(0, values * self.plan.tiles, values):
            if values % load.values == 0:
                start = first // load.values
                result.append(concat(pieces[start : start + values // load.values]))
            else:
                whole = joined if joined is not None else pieces[first // load.values]
                offset = first % load.values
                result.append(whole[offset : offset + values])
        return result


def require_plan(plan: OperandPlan | None, atom: MmaAtom, operand: str) -> OperandPlan:
    """`plan`, or an error that names the operand no load of the target can fetch."""
    if plan is None:
        raise AtomError(f"no load of the target can fetch operand {operand} of {atom.name} from shared memory")
    return plan


def mma(atom: MmaAtom, a: Value, b: Value, c: Value) -> Value:
    """C + A * B of one atom on the wave's registers.

    Raises:
        AtomError: an operand's dtype or number of values is not the atom's.
    """
    for operand, value, element in (("a", a, atom.dtype), ("b", b, atom.dtype), ("c", c, atom.accumulator)):
        if not isinstance(value, Value) or value.dtype is not dtype(element) or value.length != atom.values(operand):
            raise AtomError(
                f"operand {operand} of {atom.name} is {value!r}; expected <{atom.values(operand)} x {element}>"
            )
    op = emit("fly.mma", [a.ir, b.ir, c.ir], [c.type], {"atom": string_attribute(atom.name)})
    return Value(op.results[0], c.dtype, c.length)
