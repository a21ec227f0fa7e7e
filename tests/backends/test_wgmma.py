"""Warpgroup products: tiles and descriptors against what the PTX ISA says, and what is emitted.

The functions named after the hardware are written from the ISA's definitions and share nothing with the compiler.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlir import ir

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.wgmma import FirstRows, Operand, PanelTile, WarpgroupAtom
from fly.backends.target import target
from fly.errors import AtomError, LayoutError, ShapeError
from fly.lang.fragment import AccumulatorLayout
from fly.lang.signature import TensorSpec
from tests.backends.lowering import instructions
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

SWIZZLES = (128, 64, 32)
TILES = [
    PanelTile(16, 64),
    PanelTile(64, 128),
    PanelTile(24, 32, 64),
    PanelTile(80, 96, 64),
    PanelTile(16, 16, 32),
    PanelTile(128, 48, 32),
]
EVERY_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}-{t.swizzle}")

# Where TMA puts the 16-byte pieces of a line (CUDA driver API, CUtensorMapSwizzle): place of piece c in row r.
PLACES = {
    128: [[c ^ r for c in range(8)] for r in range(8)],
    64: [[0, 1, 2, 3]] * 2 + [[1, 0, 3, 2]] * 2 + [[2, 3, 0, 1]] * 2 + [[3, 2, 1, 0]] * 2,
    32: [[0, 1]] * 4 + [[1, 0]] * 4,
}


def address_bits_swapped(address: int, swizzle: int) -> int:
    """The shared-memory address that an engine with this swizzle uses for a plain one."""
    return address ^ (address >> 7 & (swizzle // 16 - 1)) << 4


# tiles


@EVERY_TILE
def test_a_tile_is_what_tma_writes(tile):
    for row in range(tile.rows):
        for column in range(tile.columns):
            panel, inside = divmod(column * 2, tile.swizzle)
            piece, byte = divmod(inside, 16)
            line = panel * tile.rows * tile.swizzle + row * tile.swizzle
            assert tile(row, column) == line + 16 * PLACES[tile.swizzle][row % 8][piece] + byte


@EVERY_TILE
def test_a_tile_holds_every_element_once(tile):
    places = {tile(row, column) for row in range(tile.rows) for column in range(tile.columns)}
    assert places == set(range(0, tile.bytes, 2))
    assert tile.panels * tile.panel_bytes == tile.bytes


@given(st.sampled_from(SWIZZLES), st.integers(1, 20), st.integers(1, 4), st.data())
@settings(max_examples=50, deadline=None)
def test_rows_repeat_every_8(swizzle, eights, panels, data):
    tile = PanelTile(8 * eights, panels * swizzle // 2, swizzle)
    row, column = (data.draw(st.integers(0, n - 1)) for n in (tile.rows, tile.columns))
    assert tile(row, column) == tile(row % 8, column) + row // 8 * 8 * swizzle
    assert tile(row, column) // tile.panel_bytes == column // tile.panel_columns
    assert tile(row, column) % 16 == column * 2 % 16


@pytest.mark.parametrize(
    ("columns", "swizzle"), [(16, 32), (32, 64), (48, 32), (64, 128), (96, 64), (128, 128), (80, 32), (256, 128)]
)
def test_the_widest_swizzle_that_divides_the_columns(columns, swizzle):
    assert PanelTile.widest(8, columns) == PanelTile(8, columns, swizzle)


@pytest.mark.parametrize(
    ("columns", "held", "swizzle"),
    [
        *((8, 16, 32), (16, 16, 32), (24, 32, 64), (40, 64, 128), (64, 64, 128), (72, 96, 64), (96, 96, 64)),
        *((104, 128, 128), (136, 160, 64), (168, 192, 128), (200, 224, 64), (232, 256, 128), (256, 256, 128)),
    ],
)
def test_the_tile_of_long_lines_that_holds_columns_in_the_fewest_bytes(columns, held, swizzle):
    assert PanelTile.covering(8, columns) == PanelTile(8, held, swizzle)


@pytest.mark.parametrize(
    ("columns", "held", "swizzle"),
    [(8, 16, 32), (24, 32, 64), (40, 64, 128), (72, 128, 128), (136, 192, 128), (200, 256, 128), (248, 256, 128)],
)
def test_the_tile_that_holds_columns_in_the_fewest_lines(columns, held, swizzle):
    assert PanelTile.covering(8, columns, few_lines=True) == PanelTile(8, held, swizzle)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PanelTile(8, 64, 16), r"swizzle of 16 bytes; expected one of 128, 64, 32"),
        (lambda: PanelTile(12, 64), r"rows of a panel tile is 12; expected a positive multiple of 8"),
        (lambda: PanelTile(0, 64), r"rows of a panel tile is 0"),
        (lambda: PanelTile(8, 96), r"columns of a panel tile is 96; expected a positive multiple of 64"),
        (lambda: PanelTile(8, 0, 32), r"columns of a panel tile is 0; expected a positive multiple of 16"),
        (lambda: PanelTile.widest(8, 24), r"columns of a panel tile is 24; expected a multiple of 16"),
    ],
)
def test_tiles_that_are_refused(make, text):
    with pytest.raises(LayoutError, match=text):
        make()


# descriptors

MODES = {1: 128, 2: 64, 3: 32}  # PTX ISA, "Matrix Descriptor Format", bits 62-63


def field(descriptor: int, low: int, bits: int) -> int:
    return descriptor >> low & (1 << bits) - 1


def hardware_address(descriptor: int, transposed: bool, mn: int, k: int) -> int:
    """Where WGMMA reads element (mn, k) of one 16-wide step (PTX ISA, "Strides" and "Canonical Layouts").

    K-major: 8 rows of a swizzle's width follow each other, then the stride offset to the next 8. MN-major: lines of
    a swizzle's width run along mn, 8 of them (along k) follow each other; the stride offset leads to the next 8 of
    k, the leading offset to the next line's width of mn.
    """
    swizzle = MODES[field(descriptor, 62, 2)]
    start = field(descriptor, 0, 14) << 4
    leading, stride = field(descriptor, 16, 14) << 4, field(descriptor, 32, 14) << 4
    if transposed:
        block, inside = divmod(mn * 2, swizzle)
        plain = start + block * leading + k // 8 * stride + k % 8 * swizzle + inside
    else:
        plain = start + mn // 8 * stride + mn % 8 * swizzle + k * 2
    return address_bits_swapped(plain, swizzle)


@EVERY_TILE
@pytest.mark.parametrize("along_rows", [False, True], ids=["k-major", "mn-major"])
def test_the_hardware_finds_the_elements(tile, along_rows):
    start = 0x18400  # where the tile is; the period of every swizzle divides it
    layout = tile.by_rows if along_rows else tile.by_columns
    width, depth = (tile.columns, tile.rows) if along_rows else (tile.rows, tile.columns)
    operand = Operand(None, tile, along_rows)
    assert layout.transposed is along_rows and operand.layout == layout
    for t, step in enumerate(operand.steps(depth // 16, width)):
        descriptor = (layout.bits | start >> 4) + step
        for mn in range(width):
            for k in range(16):
                coordinate = (16 * t + k, mn) if along_rows else (mn, 16 * t + k)
                assert hardware_address(descriptor, along_rows, mn, k) == start + tile(*coordinate)


@EVERY_TILE
def test_fields_of_descriptors(tile):
    for layout in (tile.by_columns, tile.by_rows):
        assert field(layout.bits, 0, 14) == 0
        assert field(layout.bits, 32, 14) << 4 == 8 * tile.swizzle
        assert MODES[field(layout.bits, 62, 2)] == tile.swizzle
        known = 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62
        assert layout.bits & ~known == 0  # base offset and the rest
    assert field(tile.by_rows.bits, 16, 14) << 4 == tile.panel_bytes
    assert field(tile.by_columns.bits, 16, 14) == 1  # ignored by the hardware with a swizzle; 1 is the convention


@pytest.mark.parametrize("first", [8, 64])
def test_rows_of_a_tile_are_an_operand_of_their_own(first):
    """A warpgroup's 64 rows of a taller tile: only the start address differs."""
    tile = PanelTile(128, 128)
    descriptor = tile.by_columns.bits | (0x8000 + first * tile.swizzle) >> 4
    for t, step in enumerate(Operand(None, tile).steps(8, 64)):
        for mn in range(64):
            assert hardware_address(descriptor + step, False, mn, 3) == 0x8000 + tile(first + mn, 16 * t + 3)


def test_steps_must_fit_the_tile():
    tile = PanelTile(80, 128)
    assert len(Operand(None, tile).steps(8, 80)) == 8
    assert len(Operand(None, tile, along_rows=True).steps(5, 128)) == 5
    for operand, count, extent, have in [
        (Operand(None, tile), 9, 80, "80 by 128"),
        (Operand(None, tile), 8, 96, "80 by 128"),
        (Operand(None, tile), 0, 80, "80 by 128"),
        (Operand(None, tile, along_rows=True), 6, 128, "128 by 80"),
    ]:
        with pytest.raises(
            ShapeError, match=f"{count} steps of a WGMMA operand of {extent} by 16 do not fit .* {have}"
        ):
            operand.steps(count, extent)


# the atom


@pytest.mark.parametrize("n", [8, 64, 80, 256])
def test_accumulators_are_where_the_isa_says(n):
    atom = WarpgroupAtom(n, "bf16")
    seen = set()
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(atom.values("c")):
            row = 16 * warp + lane // 4 + (8 if i % 4 >= 2 else 0)
            column = i // 4 * 8 + lane % 4 * 2 + i % 2
            assert atom.c((thread, i)) == row + 64 * column
            seen.add(atom.c((thread, i)))
    assert seen == set(range(64 * n))


@pytest.mark.parametrize("n", [32, 128])
def test_first_rows_are_half_of_the_accumulators(n):
    """What is kept is where its layout says, and doubled has the same places in the atom's layout."""
    atom = WarpgroupAtom(n, "f8e4m3")
    whole, half = (AccumulatorLayout(x, "m") for x in (atom, FirstRows(atom)))
    assert half.slots == (0,) and half.values == n // 4

    def kernel(source: fly.Tensor, kept: fly.Tensor, doubled: fly.Tensor):
        lane = fly.lane_of(128)
        values = fly.from_elements([source.load(lane, i) for i in range(n // 2)])
        first = FirstRows.of(values)
        for i in range(n // 4):
            kept.store(first[i], lane, i)
        for i, value in enumerate(FirstRows.twice(first)):
            doubled.store(value, lane, i)

    places = [[whole.coordinate(lane, v) for v in range(n // 2)] for lane in range(128)]
    source = np.array([[row + 64 * column for row, column in of_lane] for of_lane in places], np.int32)
    kept, doubled = np.zeros((128, n // 4), np.int32), np.zeros((128, n // 2), np.int32)
    module = trace(kernel, *[matrix("i32", 2)] * 3, arch="sm_90a", block=128)
    Machine(Program.of(module, target("sm_90a")))(flat(source, kept, doubled))
    for lane in range(128):
        found = [(int(x) % 64, int(x) // 64) for x in kept[lane]]
        assert found == [half.coordinate(lane, v) for v in range(n // 4)]
    assert (doubled % 64 % 16 < 8).all() and (doubled // 64 == source // 64).all()
    assert (doubled % 64 == source % 64 // 16 * 16 + source % 8).all()


def test_accumulators_are_the_next_products_operand():
    """Values 8t ... 8t + 7 are the A registers of columns 16t ... 16t + 15 (PTX ISA, A fragment of m64k16)."""
    layout = AccumulatorLayout(WarpgroupAtom(128, "f16"), "m")
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for t in range(8):
            for i in range(8):
                row = 16 * warp + lane // 4 + (8 if i in (2, 3, 6, 7) else 0)
                column = lane % 4 * 2 + i % 2 + (8 if i >= 4 else 0)
                assert layout.coordinate(thread, 8 * t + i) == (row, 16 * t + column)


@pytest.mark.parametrize(
    ("n", "dtype", "text"),
    [
        (64, "f32", "WGMMA of f32; expected one of bf16, f16"),
        (0, "f16", "WGMMA with n = 0; expected a multiple of 8 from 8 to 256"),
        (12, "f16", "WGMMA with n = 12"),
        (264, "bf16", "WGMMA with n = 264"),
    ],
)
def test_products_that_do_not_exist(n, dtype, text):
    with pytest.raises(AtomError, match=text):
        WarpgroupAtom(n, dtype)


# what is emitted


def emitted(body, **arguments) -> ir.Module:
    """The trace of a kernel with one warpgroup."""

    def kernel(x: fly.Tensor):
        body(x)

    return trace(kernel, matrix("bf16", 2), arch="sm_90a", block=128, **arguments)


def shared(rows: int, columns: int, along_rows: bool = False) -> Operand:
    tile = PanelTile.widest(rows, columns)
    return Operand(fly.alloc_shared(f"tile of {rows}", tile.bytes, 1024), tile, along_rows)


def test_a_product_of_two_tiles():
    def body(x):
        wgmma.wait(0, wgmma.issue(WarpgroupAtom(8, "bf16"), shared(64, 32), shared(8, 32), 2))

    filecheck(
        instructions(emitted(body)),
        r"""
        CHECK: llvm.ptrtoint
        CHECK: %[[B64:.*]] = vector.bitcast {{.*}} : vector<2xi32> to vector<1xi64>
        CHECK: %[[B:.*]] = vector.extract %[[B64]][0]
        CHECK: %[[A64:.*]] = vector.bitcast {{.*}} : vector<2xi32> to vector<1xi64>
        CHECK: %[[A:.*]] = vector.extract %[[A64]][0]
        CHECK: %[[D:.*]] = llvm.inline_asm has_side_effects asm_dialect = att
        CHECK-SAME: setp.ne.b32 first, 0, 0;
        CHECK-SAME: wgmma.fence.sync.aligned;
        CHECK-SAME: add.s64 db, $4, 0;
        CHECK-SAME: add.s64 da, $5, 0;
        CHECK-SAME: wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, da, db, first, 1, 1, 0, 0;
        CHECK-SAME: add.s64 db, $4, 2;
        CHECK-SAME: add.s64 da, $5, 2;
        CHECK-SAME: wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, da, db, 1, 1, 1, 0, 0;
        CHECK-SAME: wgmma.commit_group.sync.aligned;
        CHECK-SAME: "=&f,=&f,=&f,=&f,l,l,~{memory}" %[[B]], %[[A]] : (i64, i64) -> !llvm.struct<(f32, f32, f32, f32)>
        CHECK: llvm.inline_asm has_side_effects asm_dialect = att "wgmma.wait_group.sync.aligned 0;"
        CHECK-SAME: "=f,=f,=f,=f,0,1,2,3,~{memory}"
        """,
    )


def test_a_product_with_registers_onto_an_accumulator():
    def body(x):
        b = shared(32, 16, along_rows=True)
        a = [fly.from_elements([x.load(i, t) for i in range(8)]) for t in range(2)]
        start = fly.Fragment.zeros(AccumulatorLayout(WarpgroupAtom(16, "bf16"), "m"), 1, 1).tiles[0][0]
        wgmma.issue(WarpgroupAtom(16, "bf16"), a, b, 2, start)

    d = ", ".join(f"${i}" for i in range(8))
    filecheck(
        instructions(emitted(body)),
        rf"""
        CHECK: llvm.inline_asm has_side_effects asm_dialect = att
        CHECK-SAME: setp.eq.b32 first, 0, 0;
        CHECK-SAME: add.s64 db, $16, 0;
        CHECK-SAME: m64n16k16.f32.bf16.bf16 {{{d}}}, {{$17, $18, $19, $20}}, db, first, 1, 1, 1;
        CHECK-SAME: add.s64 db, $16, 32;
        CHECK-SAME: {{$21, $22, $23, $24}}, db, 1, 1, 1, 1;
        CHECK-SAME: "{"=f," * 8}0,1,2,3,4,5,6,7,l,{"r," * 8}~{{memory}}"
        CHECK-SAME: (f32, f32, f32, f32, f32, f32, f32, f32, i64, i32, i32, i32, i32, i32, i32, i32, i32)
        """,
    )


def test_a_descriptor_keeps_18_bits_of_the_address():
    def body(x):
        shared(64, 64).descriptor()

    filecheck(
        str(emitted(body)),
        f"""
        CHECK: %[[AT:.*]] = llvm.ptrtoint %{{{{.*}}}} : !llvm.ptr<3> to i32
        CHECK: %[[MASK:.*]] = arith.constant 262143 : i32
        CHECK: %[[LOW:.*]] = arith.andi %[[AT]], %[[MASK]] : i32
        CHECK: %[[FOUR:.*]] = arith.constant 4 : i32
        CHECK: %[[UNITS:.*]] = arith.shrsi %[[LOW]], %[[FOUR]] : i32
        CHECK: %[[LEADING:.*]] = arith.constant {1 << 16} : i32
        CHECK: %[[START:.*]] = arith.ori %[[UNITS]], %[[LEADING]] : i32
        CHECK: %[[REST:.*]] = arith.constant {64 | 1 << 30} : i32
        CHECK: vector.from_elements %[[START]], %[[REST]]
        """,
    )


def test_a_loop_over_slots_adds_to_a_descriptor_once():
    """What does not change is made before the loop: the first product of a tile waits for its descriptor."""

    def body(x):
        tile = PanelTile.widest(64, 64)
        slots = fly.alloc_shared("slots", 3 * tile.bytes, 1024)
        total = fly.Fragment.zeros(AccumulatorLayout(WarpgroupAtom(64, "bf16"), "m"), 1, 1).tiles[0][0]
        for i, c in (loop := fly.range(x.shape[0], carry=total)):
            slot = Operand(slots, tile, units=i * (tile.bytes // wgmma.UNIT))
            loop.next(wgmma.wait(0, wgmma.issue(WarpgroupAtom(64, "bf16"), slot, slot, 4, c))[0])
        x.store(loop.results[0].to(fly.bf16), 0, 0)

    def kernel(x: fly.Tensor):
        body(x)

    isa = fly.compile(fly.kernel(kernel), matrix("bf16", 2), target="sm_90a", block=128).isa
    before, inside = isa.split("wgmma.fence", 1)[0].rsplit("$L__BB", 1)
    masks = r"and\.b|shr|bfe|or\.b32"  # `or.b64` sets the other half of a pair of registers
    assert re.search(masks, before) and not re.search(masks, inside)


def test_a_wait_for_several_accumulators_after_other_work():
    def body(x):
        b, atom = shared(8, 16), WarpgroupAtom(8, "bf16")
        a = shared(64, 16)
        first, second = (wgmma.issue(atom, a, b, 1) for _ in range(2))
        waited = wgmma.wait(1, first, second, after=[fly.f32(1.0), fly.f32(2.0)])
        assert [len(v) for v in waited] == [4, 4]

    filecheck(
        instructions(emitted(body)),
        r"""
        CHECK: wgmma.mma_async
        CHECK: wgmma.mma_async
        CHECK: setp.ne.b32 p, 0, 0;
        CHECK-SAME: setp.lt.or.f32 p, $16, 0fBF800000, p;
        CHECK-SAME: setp.lt.or.f32 p, $17, 0fBF800000, p;
        CHECK-SAME: vote.sync.any.pred p, p, -1;
        CHECK-SAME: @p trap;
        CHECK-SAME: wgmma.wait_group.sync.aligned 1;
        CHECK-SAME: "=f,=f,=f,=f,=f,=f,=f,=f,0,1,2,3,4,5,6,7,f,f,~{memory}"
        """,
    )


def wrong_accumulator(x):
    wgmma.issue(WarpgroupAtom(8, "bf16"), shared(64, 16), shared(8, 16), 1, fly.broadcast(fly.f32(0.0), 8))


def narrow_accumulator(x):
    wgmma.issue(WarpgroupAtom(8, "bf16"), shared(64, 16), shared(8, 16), 1, fly.broadcast(fly.bf16(0.0), 4))


def missing_registers(x):
    wgmma.issue(WarpgroupAtom(8, "bf16"), [fly.broadcast(fly.bf16(0.0), 8)], shared(8, 32), 2)


def wrong_registers(x):
    wgmma.issue(WarpgroupAtom(8, "bf16"), [fly.broadcast(fly.f16(0.0), 8)], shared(8, 16), 1)


def short_registers(x):
    wgmma.issue(WarpgroupAtom(8, "f16"), [fly.broadcast(fly.f16(0.0), 4)], shared(8, 16), 1)


def low_a(x):
    wgmma.issue(WarpgroupAtom(8, "f16"), shared(32, 16), shared(8, 16), 1)


def narrow_b(x):
    wgmma.issue(WarpgroupAtom(32, "f16"), shared(64, 16), shared(16, 16, along_rows=True), 1)


def runs_of_f32(x):
    wgmma.runs(fly.broadcast(fly.f32(0.0), 32))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (wrong_accumulator, "the accumulator of WGMMA with n = 8 is <8 x f32>; expected 4 x f32"),
        (narrow_accumulator, "the accumulator of WGMMA with n = 8 is <4 x bf16>; expected 4 x f32"),
        (missing_registers, "1 register operands for 2 steps of WGMMA; expected one each"),
        (wrong_registers, "a register operand of WGMMA is <8 x f16>; expected 8 x bf16"),
        (short_registers, "a register operand of WGMMA is <4 x f16>; expected 8 x f16"),
        (low_a, "1 steps of a WGMMA operand of 64 by 16 do not fit a tile of 32 by 16"),
        (narrow_b, "1 steps of a WGMMA operand of 32 by 16 do not fit a tile of 16 by 16"),
        (runs_of_f32, "runs of <32 x f32>; expected elements of 16 bits"),
    ],
)
def test_operands_that_do_not_fit(body, text):
    with pytest.raises(ShapeError, match=text):
        emitted(body)


# runs


@pytest.mark.parametrize("n", [8, 32, 56, 72, 128])
def test_runs_are_eight_columns_each(n):
    """Every thread's accumulators hold their own coordinates; the runs are those of the whole matrix."""
    layout = AccumulatorLayout(WarpgroupAtom(n, "f16"), "m")

    def kernel(source: fly.Tensor, result: fly.Tensor):
        lane = fly.lane_of(128)
        row0, column0 = fly.evaluate(layout.row_lane, lane), fly.evaluate(layout.column_lane, lane)
        places = zip(layout.value_rows, layout.value_columns, strict=True)
        values = fly.from_elements([source.load(row0 + row, column0 + column) for row, column in places])
        rows, column, pieces = wgmma.runs(values)
        assert [[len(piece) for piece in part] for part in pieces] == [[8] * -(-n // 32)] * 2
        for row, part in zip(rows, pieces, strict=True):
            for i, piece in enumerate(part):
                with fly.when(column + 32 * i < n):
                    fly.store(piece, result.at(row, column + 32 * i), align=16)

    half = TensorSpec("f16", 2, 16, True)
    module = trace(kernel, half, half, arch="sm_90a", block=128)
    source = np.arange(64 * n, dtype=np.int16).reshape(64, n).view(np.float16)
    result = np.zeros_like(source)
    Machine(Program.of(module, target("sm_90a")))(flat(source, result))
    np.testing.assert_array_equal(result.view(np.int16), source.view(np.int16))
