"""Accumulators stored for the next product: every operand register gets its element, and no bank has to wait."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.emulator.banks import MODELS, BankCounter
from fly.errors import DTypeError, LayoutError, ShapeError, TargetError
from fly.lang.banks import bank_conflicts
from fly.lang.stored_operand import load_conflicts, store_conflicts
from fly.lang.sync import swap_lanes
from fly.runtime.device import device_for
from tests.backends.builds import build
from tests.backends.lowering import lowered
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace, traced

SHAPES = [(64, 64), (128, 32), (32, 128), (64, 96), (32, 32)]


def atoms(arch: str) -> list:
    return [atom for atom in target(arch).mma_atoms if atom.dtype == "f16"]


CASES = [
    pytest.param(
        *(arch, source, rows_on, atom, operand, outer),
        id=f"{arch}-{source.name}-{rows_on}-{atom.name}-{operand}-{outer}",
    )
    for arch in ("gfx942", "gfx950", "sm_80", "sm_90a")
    for source, rows_on, atom, operand, outer in itertools.product(
        atoms(arch), "mn", atoms(arch), "ab", ("rows", "columns")
    )
]
every_case = pytest.mark.parametrize(("arch", "source", "rows_on", "atom", "operand", "outer"), CASES)


@fly.kernel
def round_trip(source: fly.Tensor, out: fly.Tensor, *, layout, shape, atom, operand, outer, waves=1):
    """Each wave stores its rows of `source` as it would accumulators; then each loads all operands of all waves.

    out[wave, lane] = the registers of the lane, operands along the outer dimension, those of one outer place along k.
    """
    whole = shape[0] * waves, shape[1]
    stored = fly.plan_stored_operand(layout, whole, atom, operand, outer)
    wave, lane = fly.wave_id(), fly.lane_id()
    fragment = fly.Fragment.zeros(layout, shape[0] // layout.rows, shape[1] // layout.columns)
    rows = fly.evaluate(layout.row_lane, lane) + wave * shape[0]
    columns = layout.first_column()

    def element(r: int, c: int, v: int) -> fly.Value:
        row, column = r * layout.rows + layout.value_rows[v], c * layout.columns + layout.value_columns[v]
        return source.load(rows + row, columns + column)

    fragment = fragment.map(lambda _, r, c: fly.from_elements([element(r, c, v) for v in range(layout.values)]))
    tile = fly.SharedTile.ring("stored", stored.layout, source.dtype, 1)[0]
    first = wave * shape[0], fly.i32(0)
    store = fly.FragmentStore(stored, (first[::-1] if stored.turned else first) if waves > 1 else None)
    store.store(fragment, tile)
    fly.barrier()
    loader, register = stored.loader(), 0
    for at_outer, at_k in operand_places(stored, whole, outer):
        for value in loader.load(tile, *stored.place(at_outer, at_k)):
            for i in range(len(value)):
                out.store(value[i], wave, lane, register)
                register += 1


def operand_places(stored, shape, outer) -> list[tuple[int, int]]:
    """(outer, k) of every load."""
    atom, plan = stored.atom, stored.plan
    extents = shape if outer == "rows" else shape[::-1]
    step = (atom.m if stored.operand == "a" else atom.n) * plan.tiles
    return list(itertools.product(range(0, extents[0], step), range(0, extents[1], atom.k)))


def wanted(stored, source: np.ndarray, outer: str) -> np.ndarray:
    """(lanes, registers) of elements."""
    atom, matrix_ = stored.atom, source if outer == "rows" else source.T
    layout, extent = (atom.a, atom.m) if stored.operand == "a" else (atom.b, atom.n)
    result = []
    for lane in range(atom.lanes):
        registers = []
        for (at_outer, at_k), tile, v in itertools.product(
            operand_places(stored, source.shape, outer), range(stored.plan.tiles), range(stored.plan.values)
        ):
            k, place = divmod(layout((lane, v)), extent)
            registers.append(matrix_[at_outer + tile * extent + place, at_k + k])
        result.append(registers)
    return np.array(result)


def plan(arch, source, rows_on, atom, operand, outer, shape):
    layout = fly.AccumulatorLayout(source, rows_on)
    return traced(lambda: fly.plan_stored_operand(layout, shape, atom, operand, outer), arch=arch)


def bits(shape) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape).view(np.float16)


@pytest.mark.sample(4)
@every_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_register_gets_its_element_without_a_conflict(arch, source, rows_on, atom, operand, outer, shape):
    """On the simulator, over the addresses that lanes really give."""
    stored, layout = plan(arch, source, rows_on, atom, operand, outer, shape), fly.AccumulatorLayout(source, rows_on)
    given = bits(shape)
    expected = wanted(stored, given, outer)
    out = np.zeros((1, *expected.shape), np.float16)
    options = {"layout": layout, "shape": shape, "atom": atom, "operand": operand, "outer": outer}
    module = trace(round_trip, matrix("f16", 2), matrix("f16", 3), arch=arch, **options)
    machine = Machine(Program.of(module, target(arch)), observe_shared=True)
    machine(flat(given, out))
    np.testing.assert_array_equal(out[0].view(np.int16), expected.view(np.int16))
    kinds = {access.kind for access in machine.shared_accesses}
    assert "store" in kinds and len(kinds) == 2
    for access in machine.shared_accesses:
        assert bank_conflicts(access.addresses, access.bytes) == 0


AMD = [
    pytest.param(*case.values, dtype, id=f"{case.id}-{dtype}")
    for case, dtype in itertools.product(CASES, ("f16", "bf16"))
    if case.values[0].startswith("gfx")
]


@pytest.mark.sample(9)
@pytest.mark.parametrize(("arch", "source", "rows_on", "atom", "operand", "outer", "dtype"), AMD)
def test_waves_fill_one_tile_in_the_emulator(arch, source, rows_on, atom, operand, outer, dtype, monkeypatch):
    """The machine code, with all checks, and its banks counted with the phases that were measured."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("FLY_ARCH", arch)
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    if dtype == "bf16":
        source, atom = (target(arch).atom(a.name.replace("f16", "bf16")) for a in (source, atom))
    shape, waves = (64, 64), 2
    stored = plan(arch, source, rows_on, atom, operand, outer, (shape[0] * waves, shape[1]))
    given = bits((shape[0] * waves, shape[1]))
    expected = wanted(stored, given, outer).view(np.int16)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    x = torch.from_numpy(given.view(np.int16).copy()).view(kind)
    out = torch.zeros((waves, *expected.shape), dtype=kind)
    counter = BankCounter(arch)
    device = device_for(("cpu", 0))
    monkeypatch.setattr(device, "lds_observer", counter)
    layout = fly.AccumulatorLayout(source, rows_on)
    round_trip[1, 64 * waves](
        x, out, layout=layout, shape=shape, atom=atom, operand=operand, outer=outer, waves=waves
    )
    for wave in range(waves):
        np.testing.assert_array_equal(out[wave].view(torch.int16).numpy(), expected)
    written = {name: extra for name, extra in counter.extra.items() if "write" in name}
    assert written and not any(written.values())


def test_a_turned_tile_has_wide_stores_where_lanes_trade_halves():
    """S^T of 32 x 32 products on gfx950, whose lanes have 4 keys in a row, and 8 after a swap."""
    atom = target("gfx950").mma("bf16")
    for rows_on, turned in (("n", False), ("m", True)):
        outer = "columns" if turned else "rows"
        stored = plan("gfx950", atom, rows_on, atom, "a", outer, (64, 64))
        assert (stored.turned, stored.runs.length, stored.runs.swap) == (turned, 8, 32)
    stored = plan("gfx942", target("gfx942").mma("bf16"), "n", target("gfx942").mma("bf16"), "a", "rows", (64, 64))
    assert (stored.runs.length, stored.runs.swap, stored.layout.granule, stored.plan.load.name) == (4, 0, 4, "load64")


def test_the_model_of_banks_can_say_no():
    """Without the swizzle's rotation, transposing loads of what was stored for rows meet in a bank; so do stores."""
    atom = target("gfx950").mma("bf16")
    stored = plan("gfx950", atom, "n", atom, "a", "columns", (64, 64))
    assert stored.plan.load.name == "ds_read_b64_tr_b16" and stored.layout.rotate
    assert load_conflicts(stored.layout, stored.plan) == store_conflicts(stored.layout, stored.runs) == 0
    assert load_conflicts(fly.SwizzledTile(64, 64), stored.plan) > 0
    short = plan("gfx942", target("gfx942").mma("bf16"), "n", target("gfx942").mma("bf16"), "a", "rows", (64, 64))
    assert store_conflicts(fly.SwizzledTile(64, 64), short.runs) > 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_stores_are_free_of_conflicts_with_the_measured_phases_too(model):
    for case in CASES:
        arch, *rest = case.values
        if arch == model.name:
            stored = plan(arch, *rest, (64, 64))
            runs, layout = stored.runs, stored.layout
            addresses = [2 * layout(runs.row(lane), runs.column(lane)) for lane in range(64)]
            assert model.extra_cycles(addresses, 2 * runs.length, write=True) == 0


def shaped(shape, outer="rows"):
    atom = fly.target().mma("bf16")
    return fly.plan_stored_operand(fly.AccumulatorLayout(atom, "n"), shape, atom, "a", outer)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda: shaped((48, 64)), ShapeError, "48 rows of a stored fragment; expected a multiple of 32"),
        (lambda: shaped((64, 0)), ShapeError, "0 columns of a stored fragment; expected a multiple of 32"),
        (lambda: shaped((64, 64), "keys"), ShapeError, "outer is 'keys'; expected 'rows' or 'columns'"),
        (lambda: swap_lanes(fly.i32(0), fly.i32(1), 8), TargetError, "gfx950 does not swap lanes by mask 8; it has"),
        (lambda: swap_lanes(fly.i32(0), fly.f32(1), 16), DTypeError, "lanes swap values of one type, not <i32> and"),
    ],
)  # fmt: skip
def test_mistakes(mistake, error, message):
    with pytest.raises(error) as caught:
        traced(mistake)
    assert message in str(caught.value)


def test_fragments_that_do_not_fit_are_refused():
    def kernel(n: fly.i32):
        atom = fly.target().mma("bf16")
        layout = fly.AccumulatorLayout(atom, "n")
        stored = shaped((32, 64))
        tile = fly.SharedTile.ring("tile", stored.layout, fly.bf16, 1)[0]
        store = fly.FragmentStore(stored)
        with pytest.raises(DTypeError, match="cannot store a fragment of f32 into a tile of bf16; narrow it"):
            store.store(fly.Fragment.zeros(layout, 1, 2), tile)
        with pytest.raises(ShapeError, match="the store is for fragments of"):
            store.store(fly.Fragment.zeros(fly.AccumulatorLayout(atom, "m"), 1, 2), tile)
        with pytest.raises(DTypeError, match="cannot store a fragment of f32 into a tile of bf16; narrow it"):
            store.store_run(fly.from_elements([fly.f32(0.0)] * 4), tile, 0, 0)
        with pytest.raises(ShapeError, match=r"registers \(1, 2\) are not stored at once; a lane stores \["):
            store.store_run(fly.from_elements([fly.f32(0.0)] * 2).to(fly.bf16), tile, 0, 1)

    trace(kernel, "i32")


def test_no_tile_is_an_error():
    """Rows of 8 elements are too short for any swizzle to part 16 of them."""
    from fly.lang import stored_operand

    atom = target("gfx942").mma("bf16")
    source = fly.AccumulatorLayout(atom, "n")
    with pytest.raises(LayoutError, match=r"no shared tile takes 32 x 32 accumulators .* without bank conflicts"):
        stored_operand._plan(source, (32, 32), atom, "a", "rows", (), ())


def test_swaps_lower_to_one_instruction():
    body = '%a, %b = "fly.swap"(%i, %i) {mask = %d} : (i32, i32) -> (i32, i32)'
    for mask in (16, 32):
        filecheck(
            lowered(body.replace("%d", str(mask)), "gfx950"),
            f"""
            CHECK: %[[BOTH:.*]] = llvm.call_intrinsic "llvm.amdgcn.permlane{mask}.swap"
            CHECK: llvm.extractvalue %[[BOTH]][0]
            CHECK: llvm.extractvalue %[[BOTH]][1]
            CHECK-NOT: fly.
            """,
        )


@pytest.mark.parametrize(
    ("arch", "stores", "loads"),
    [("gfx942", "ds_write2?_?.*b64", "ds_read2?_?.*b64"), ("gfx950", "ds_write_b128", "ds_read_b128"),
     ("sm_80", r"st\.shared\.v2\.b16", "ldmatrix"), ("sm_90a", r"st\.shared\.v2\.b16", "ldmatrix")],
)  # fmt: skip
def test_rows_of_a_chained_product_are_stored_in_wide_pieces(arch, stores, loads):
    atom = target(arch).mma("bf16")
    layout = fly.chain(atom).layout
    statics = {"layout": layout, "shape": (64, 64), "atom": atom, "operand": "a", "outer": "rows"}
    isa = build(
        round_trip, arch, specs=(matrix("bf16", 2), matrix("bf16", 3)), block=target(arch).wave_size, **statics
    ).isa
    filecheck(isa, f"CHECK: {{{{{stores}}}}}\nCHECK: {{{{{loads}}}}}")
