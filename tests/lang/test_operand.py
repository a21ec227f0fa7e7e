"""Loading operands from shared tiles: every plan fetches the elements that were asked for, at every offset."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fly
from fly.backends.target import target, targets
from fly.errors import AtomError, LayoutError
from fly.lang.atoms import MmaAtom, plain_load
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

CASES = [
    pytest.param(t.arch, atom, operand, transposed, id=f"{t.arch}-{atom.name}-{operand}{'-t' * transposed}")
    for t in targets()
    for atom in t.mma_atoms
    for operand in "ab"
    for transposed in (False, True)
]

# the layouts of bf16 atoms are those of f16, and gfx942 has a part of gfx950's loads
LOADERS = [case for case in CASES if case.values[0] in ("gfx950", "sm_80") and case.values[1].dtype == "f16"]


def planned(arch: str, atom: MmaAtom, operand: str, transposed: bool, chained: bool = False):
    slot_of = (lambda k: fly.chain(atom).columns[k]) if chained else (lambda k: k)
    want = fly.operand_coordinates(atom, operand, transposed, slot_of)
    return want, fly.plan_operand(target(arch).matrix_loads, want, atom.values(operand))


@pytest.mark.parametrize(("arch", "atom", "operand", "transposed"), CASES)
@pytest.mark.parametrize("chained", [False, True])
def test_a_plan_fetches_the_wanted_elements(arch, atom, operand, transposed, chained):
    want, plan = planned(arch, atom, operand, transposed, chained)
    if plan is None:
        # only transposing loads turn a tile, and gfx942 has none
        assert arch == "gfx942" and (transposed or chained)
        return
    load = plan.load
    for index, step in enumerate(plan.steps):
        address = [
            (step.row(lane) + step.row_offset, step.column(lane) + step.column_offset) for lane in range(load.lanes)
        ]
        for lane, value in itertools.product(range(load.lanes), range(load.values)):
            source, column = divmod(load.table((lane, value)), load.run)
            row, first = address[source]
            assert (row, first + column) == want(lane, index * load.values + value)
            assert first % load.run == 0
    assert len(plan.steps) * load.values == plan.tiles * plan.values


def test_every_target_can_feed_both_products():
    for t, dtype in itertools.product(targets(), ("f16", "bf16")):
        link = fly.chain(t.mma(dtype))
        _, keys = planned(t.arch, link.atom, link.column_operand, transposed=False)
        _, values = planned(t.arch, link.atom, link.column_operand, transposed=True, chained=True)
        assert keys is not None
        assert values is not None or t.arch == "gfx942"


def fetch(source: fly.Tensor, out: fly.Tensor, *, plan, tile: fly.SwizzledTile, row: int, column: int, prepare: bool):
    """Fill a shared tile from `source`, load operands at a static offset, and store the registers of every lane."""
    buffer = fly.SharedTile.ring("tile", tile, source.dtype, 1)[0]
    lane = fly.lane_id()
    for i in fly.range(tile.rows * tile.columns // fly.wave_size()):
        index = i * fly.wave_size() + lane
        r, c = index // tile.columns, index % tile.columns
        at = buffer.pointer.offset(tile.base(r, c))
        fly.ir.memory.store(source.load(r, c), at)
    fly.barrier()
    loader = fly.OperandLoader(plan, tile)
    if prepare:
        loader.prepare(row, column)
    values = loader.load(buffer, row, column)
    for i, value in enumerate(fly.concat(values)):
        out.store(value, lane, i)


@pytest.mark.parametrize(("arch", "atom", "operand", "transposed"), LOADERS)
def test_loaders_fetch_them_at_every_static_offset(arch, atom, operand, transposed):
    want, plan = planned(arch, atom, operand, transposed)
    if plan is None:
        return
    extent = (atom.m if operand == "a" else atom.n) * plan.tiles
    steps = (atom.k, extent) if transposed else (extent, atom.k)
    rows, columns = 128, 64
    source = np.arange(rows * columns, dtype=np.int16).reshape(rows, columns).view(np.float16)
    offsets = [(r, c) for r in range(0, rows, steps[0]) for c in range(0, columns, steps[1])]
    for number, (row, column) in enumerate(offsets[:: max(1, len(offsets) // 2)]):
        tile = fly.SwizzledTile(rows, columns, plan.load.granule, fold=bool(number % 2) and not transposed)
        out = np.zeros((target(arch).wave_size, plan.tiles * plan.values), np.float16)
        module = trace(
            fetch,
            matrix("f16", 2),
            matrix("f16", 2),
            arch=arch,
            plan=plan,
            tile=tile,
            row=row,
            column=column,
            prepare=bool(number % 2),
        )
        Machine(Program.of(module, target(arch)))(flat(source, out))
        wanted = [
            [source[r + row, c + column] for r, c in (want(lane, v) for v in range(plan.tiles * plan.values))]
            for lane in range(target(arch).wave_size)
        ]
        np.testing.assert_array_equal(out.view(np.int16), np.array(wanted).view(np.int16))


def test_no_load_fits():
    atom = target("gfx942").mma_atoms[0]
    want = fly.operand_coordinates(atom, "b", transposed=True)
    assert fly.plan_operand([plain_load(64, 8)], want, 8) is None
    with pytest.raises(AtomError, match=r"no load of the target can fetch operand b of mfma_32x32x8_bf16"):
        fly.require_plan(None, atom, "b")


def test_static_columns_that_lanes_span_are_refused():
    def kernel(n: fly.i32):
        atom = target("gfx950").mma_atoms[0]
        _, plan = planned("gfx950", atom, "a", transposed=False)
        tile = fly.SwizzledTile(64, 64)
        buffer = fly.SharedTile.ring("tile", tile, fly.bf16, 1)[0]
        with pytest.raises(LayoutError, match=r"static column 8 overlaps the columns that the lanes' addresses span"):
            fly.OperandLoader(plan, tile).load(buffer, 0, 8)

    trace(kernel, "i32")


def test_operands_of_a_product_are_checked():
    def kernel(n: fly.i32):
        atom = fly.target().mma("bf16")
        a = fly.broadcast(fly.bf16(0.0), 8)
        c = fly.broadcast(0.0, 16)
        with pytest.raises(AtomError, match=r"operand a of mfma_32x32x16_bf16 is <8 x f16>; expected <8 x bf16>"):
            fly.mma(atom, a.to(fly.f16), a, c)
        with pytest.raises(AtomError, match=r"operand b of .* is <4 x bf16>; expected <8 x bf16>"):
            fly.mma(atom, a, a[:4], c)
        with pytest.raises(AtomError, match=r"operand c of .* is 0.0; expected <16 x f32>"):
            fly.mma(atom, a, a, 0.0)

    trace(kernel, "i32")
