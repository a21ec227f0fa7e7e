"""Direct copies: every row where it belongs, zeros past the last, groups of tiles, pages, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import ShapeError
from fly.ir import memory
from fly.runtime.compile import compile_kernel
from fly.runtime.inspect import loops
from kernels.gfx950.copies import k_tile, v_tile
from tests.isa import count, kinds
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

LAYOUTS = {"k128": k_tile(128), "v128": v_tile(128), "k64": k_tile(64), "v64": v_tile(64)}


@fly.kernel
def stream(source: fly.Tensor, out: fly.Tensor, first: fly.i32, *, layout: fly.PaddedTile, group: int, turns: int):
    """out = what arrives of source from row `first` on, in `turns` groups; nothing before it is asked for."""
    lead = group - 1  # the first group has one tile
    copy = fly.DirectCopy(source.rows(layout.columns), layout, group=group)
    shared = fly.SharedTile.ring("tile", layout, source.dtype, 1)[0]
    thread, threads = fly.thread_id.x, fly.block_dim()[0]

    def bring(at: fly.CopyPosition, turn: fly.Value, tile: int) -> None:
        fly.wait(copy.issue(at, tile, shared))
        fly.barrier()
        for i in fly.range(layout.rows * layout.columns // threads):
            index = i * threads + thread
            row, column = index // layout.columns, index % layout.columns
            value = memory.load(shared.pointer.offset(layout.base(row, column)), source.dtype)
            out.store(value, (turn * group + (tile - lead)) * layout.rows + row, column)
        fly.barrier()

    start = copy.start(first, lead=lead)
    bring(start, fly.i32(0), lead)
    for turn, at in (loop := fly.range(1, turns, carry=copy.next(start))):
        for tile in range(group):
            bring(at, turn, tile)
        loop.next(copy.next(at))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, 320])
@pytest.mark.parametrize(("layout", "group"), [("k128", 2), ("v128", 1), ("k64", 1), ("v64", 3)])
def test_rows_arrive_and_missing_ones_are_zero(layout, group, length, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    tile = LAYOUTS[layout]
    first, turns = 5, 3
    # only the rows from `first` on are memory that the kernel may touch, and every second row of it
    memory_ = np.random.default_rng(length).standard_normal((2 * (first + length), tile.columns)).astype(np.float16)
    source = memory_[::2]
    tiles = 1 + group * (turns - 1)
    out = np.full((tiles * tile.rows, tile.columns), 7, np.float16)
    stream[1, 512](source, out, first, layout=tile, group=group, turns=turns)
    arrived = min(length, len(out))
    np.testing.assert_array_equal(out[:arrived], source[first : first + arrived])
    assert (out[arrived:] == 0).all()


@fly.kernel
def stream_to_the_end(source: fly.Tensor, out: fly.Tensor, *, layout: fly.PaddedTile):
    """out = what arrives of source, in groups of two tiles of which the first has a row."""
    copy = fly.DirectCopy(source.rows(layout.columns), layout, group=2, past_end=False)
    shared = [fly.SharedTile.ring(f"tile{i}", layout, source.dtype, 1)[0] for i in range(2)]
    thread, threads = fly.thread_id.x, fly.block_dim()[0]
    turns = (source.shape[0] + (2 * layout.rows - 1)) // (2 * layout.rows)
    for turn, at in (loop := fly.range(turns, carry=copy.start(fly.i32(0)))):
        for tile in range(2):
            fly.wait(copy.issue(at, tile, shared[tile]))
            fly.barrier()
            for i in fly.range(layout.rows * layout.columns // threads):
                index = i * threads + thread
                row, column = index // layout.columns, index % layout.columns
                value = memory.load(shared[tile].pointer.offset(layout.base(row, column)), source.dtype)
                out.store(value, (turn * 2 + tile) * layout.rows + row, column)
            fly.barrier()
        loop.next(copy.next(at))


@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 200])
def test_groups_with_a_row_need_no_limit(length, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    tile = LAYOUTS["k128"]
    source = np.random.default_rng(length).standard_normal((length, tile.columns)).astype(np.float16)
    out = np.full((-(-length // 128) * 128, tile.columns), 7, np.float16)
    stream_to_the_end[1, 512](source, out, layout=tile)
    np.testing.assert_array_equal(out[:length], source)
    assert (out[length:] == 0).all()
    spec = matrix("f16", 2)
    isa = compile_kernel(stream_to_the_end, (spec, spec), {"layout": tile}, "gfx950", (512, 1, 1)).isa
    assert "s_max_u32" not in isa


def test_the_simulator_agrees():
    tile = LAYOUTS["v128"]
    source = np.random.default_rng(1).standard_normal((100, 128)).astype(np.float16)
    out = np.full((3 * 64, 128), 7, np.float16)
    spec = matrix("f16", 2)
    module = trace(stream, spec, spec, "i32", arch="gfx950", block=512, layout=tile, group=1, turns=3)
    Machine(Program.of(module, target("gfx950")))(flat(source, out, 3))
    np.testing.assert_array_equal(out[:97], source[3:])
    assert (out[97:] == 0).all()


def test_positions_advance_on_the_scalar_unit():
    """Two tiles a turn: no vector instruction adds to an offset, and one constant tells a wave's lines apart."""
    spec = matrix("f16", 2)

    @fly.kernel
    def only_copies(source: fly.Tensor, *, layout: fly.PaddedTile):
        copy = fly.DirectCopy(source.rows(layout.columns), layout, group=2)
        shared = [fly.SharedTile.ring(f"tile{i}", layout, source.dtype, 1)[0] for i in range(2)]
        for _, at in (loop := fly.range(source.shape[0] // 128, carry=copy.start(fly.i32(0)))):
            for tile in range(2):
                fly.wait(copy.issue(at, tile, shared[tile]))
            loop.next(copy.next(at))

    isa = compile_kernel(only_copies, (spec,), {"layout": k_tile(128)}, "gfx950", (512, 1, 1)).isa
    (loop,) = loops(isa)
    assert (loop.mix["global load"], isa.count("offset:1040 lds")) == (4, 2)
    assert not kinds(loop.opcodes, "v_.*") and count(loop.opcodes, "s_addc_u32") == 1


@fly.kernel
def stream_pages(
    pages: fly.Tensor,
    table: fly.Tensor,
    out: fly.Tensor,
    count: fly.i32,
    first: fly.i32,
    *,
    layout: fly.PaddedTile,
    page_size: int,
    tiles: int,
):
    """out = what arrives of the `count` rows in pages from row `first` on, in `tiles` tiles."""
    source = fly.PagedRows(pages, table, count, page_size, layout.columns)
    copy = fly.PagedDirectCopy(source, layout)
    shared = fly.SharedTile.ring("tile", layout, pages.dtype, 1)[0]
    thread, threads = fly.thread_id.x, fly.block_dim()[0]
    for tile, at in (loop := fly.range(tiles, carry=copy.start(first))):
        fly.wait(copy.issue(at.within(pages.shape[0]), shared))
        fly.barrier()
        for i in fly.range(layout.rows * layout.columns // threads):
            index = i * threads + thread
            row, column = index // layout.columns, index % layout.columns
            value = memory.load(shared.pointer.offset(layout.base(row, column)), pages.dtype)
            out.store(value, tile * layout.rows + row, column)
        fly.barrier()
        loop.next(copy.next(at))


def in_pages(page_size: int, columns: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages that are not contiguous, their table, and the rows; what no row has is NaN or names no page."""
    random = np.random.default_rng(count)
    used = -(-count // page_size)
    pages = random.standard_normal((used + 3, page_size, 2, columns)).astype(np.float16)[:, :, 1]
    table = np.array([*random.permutation(used + 3)[:used], 99, -5], np.int32)
    rows = pages[table[:used]].reshape(-1, columns)[:count].copy()
    if count % page_size:
        pages[table[used - 1], count % page_size :] = np.nan
    return pages, table, rows


PAGED = {"k128": k_tile(128, 16), "v128": v_tile(128, 16), "k64": k_tile(64, 16), "v64": v_tile(64, 16)}


@pytest.mark.parametrize("count", [0, 1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize(
    ("layout", "page_size"),
    [
        *((name, 16) for name in PAGED),
        ("k128", 32),
        ("v64", 32),
        ("whole k64", 64),
        ("whole v128", 256),
        ("k64", 128),
    ],
)
def test_rows_of_pages_arrive_and_missing_ones_are_zero(layout, page_size, count, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    tile = LAYOUTS[layout.split()[1]] if layout.startswith("whole") else PAGED[layout]
    pages, table, rows = in_pages(page_size, tile.columns, count)
    first, tiles = 64 if count > 64 else 0, 4
    out = np.full((tiles * tile.rows, tile.columns), 7, np.float16)
    stream_pages[1, 512](pages, table, out, count, first, layout=tile, page_size=page_size, tiles=tiles)
    np.testing.assert_array_equal(out[: count - first], rows[first:])
    assert (out[count - first :] == 0).all()


def test_the_simulator_agrees_on_pages():
    tile = PAGED["k128"]
    pages, table, rows = in_pages(16, 128, 150)
    out = np.full((3 * 64, 128), 7, np.float16)
    specs = (matrix("f16", 3), matrix("i32"), matrix("f16", 2), "i32", "i32")
    module = trace(stream_pages, *specs, arch="gfx950", block=512, layout=tile, page_size=16, tiles=3)
    Machine(Program.of(module, target("gfx950")), late_copies=True)(
        flat(np.ascontiguousarray(pages), table, out, 150, 0)
    )
    np.testing.assert_array_equal(out[:150], rows)
    assert (out[150:] == 0).all()


@pytest.mark.parametrize("page_size", [16, 256])
def test_pages_are_found_on_the_scalar_unit(page_size):
    """A tile a turn: its page is a scalar load, and no vector instruction computes base, bound or offset."""

    @fly.kernel
    def only_copies(pages: fly.Tensor, table: fly.Tensor, count: fly.i32):
        copy = fly.PagedDirectCopy(fly.PagedRows(pages, table, count, page_size, 128), PAGED["k128"])
        shared = fly.SharedTile.ring("tile", PAGED["k128"], pages.dtype, 1)[0]
        for _, at in (loop := fly.range(count // 64, carry=copy.start(fly.i32(0)))):
            fly.wait(copy.issue(at.within(pages.shape[0]), shared))
            loop.next(copy.next(at))

    specs = (matrix("f16", 3), matrix("i32"), fly.ScalarSpec("i32"))
    isa = compile_kernel(only_copies, specs, {}, "gfx950", (512, 1, 1)).isa
    loop = max(loops(isa), key=lambda loop: loop.mix.get("global load", 0))
    assert loop.mix["global load"] == 2 and count(loop.opcodes, "s_load_dword") == 1
    assert not kinds(loop.opcodes, "v_.*") and not kinds(loop.opcodes, "global_.*")


def test_a_wave_has_one_page():
    def body(pages: fly.Tensor, table: fly.Tensor, count: fly.i32):
        fly.PagedDirectCopy(fly.PagedRows(pages, table, count, 16, 128), LAYOUTS["k128"])

    with pytest.raises(ShapeError, match="lines of a wave have rows of 4 pages of 16 rows"):
        trace(body, matrix("f16", 3), matrix("i32"), "i32", arch="gfx950", block=512)


def test_a_wave_has_lines_of_one_group():
    def body(source: fly.Tensor):
        fly.DirectCopy(source.rows(128), PAGED["k128"])

    with pytest.raises(ShapeError, match="groups of 4 lines do not divide into runs of 8"):
        trace(body, matrix("f16", 2), arch="gfx950", block=128)


@pytest.mark.parametrize(
    ("arch", "block", "columns", "alignment", "layout", "message"),
    [
        ("gfx942", 512, 128, 16, "k128", "gfx942 has no direct-to-shared copy of 16 bytes a lane"),
        (
            "gfx950",
            512,
            60,
            8,
            "k128",
            "rows of 128 elements, or fewer in steps of 8, at 4-byte alignment, not 60 at 8",
        ),
        (
            "gfx950",
            512,
            192,
            16,
            "k128",
            "rows of 128 elements, or fewer in steps of 8, at 4-byte alignment, not 192",
        ),
        ("gfx950", 512, 128, 2, "k128", "or fewer in steps of 8, at 4-byte alignment, not 128 at 2"),
        ("gfx950", 192, 128, 16, "k128", "16 lines of 512 elements do not divide into runs of 3 waves"),
        ("gfx950", 64, 128, 16, "k128", "16 lines of 1040 bytes a wave; expected 4095 bytes at most"),
        ("gfx950", 64, 64, 16, None, "8 lines of 128 elements do not divide into runs of 1 waves, 512 elements each"),
    ],
)
def test_refusals(arch, block, columns, alignment, layout, message):
    tile = LAYOUTS[layout] if layout else fly.PaddedTile(fly.Layout((16, 64), (64, 1)), 128, 8)

    def body(source: fly.Tensor):
        fly.DirectCopy(source.rows(columns), tile)

    with pytest.raises(ShapeError) as caught:
        trace(body, matrix("f16", 2, alignment), arch=arch, block=block)
    assert message in str(caught.value)
