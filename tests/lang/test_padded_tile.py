"""Padded tiles: their definition, addresses that add up, what they refuse, and loads free of bank conflicts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.emulator.banks import MODELS, BankModel
from fly.errors import LayoutError
from kernels.gfx950.copies import k_tile, v_tile
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

TILES = {
    "rows": fly.PaddedTile(fly.Layout((16, 64), (64, 1)), 512, 8),
    "columns": fly.PaddedTile(fly.Layout((16, 64), (1, 16)), 128, 24),
    **{f"k{d}": k_tile(d) for d in (64, 128)},
    **{f"v{d}": v_tile(d) for d in (64, 128)},
    **{f"k{d} of pages": k_tile(d, 16) for d in (64, 128)},
    **{f"v{d} of pages": v_tile(d, 16) for d in (64, 128)},
}
every_tile = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)


def coordinates(tile):
    return itertools.product(range(tile.rows), range(tile.columns))


@every_tile
def test_padding_follows_every_line(tile):
    for row, column in coordinates(tile):
        place = tile.order((row, column))
        groups = place // (tile.line * tile.group)
        padding = place // tile.line * tile.pad + groups * tile.group_pad
        assert tile(row, column) == place + padding
        assert 2 * tile(row, column) == tile.line_offset(place // tile.line) + 2 * (place % tile.line)
        assert tile.coordinate(place) == (row, column)
    assert len({tile(*at) for at in coordinates(tile)}) == tile.rows * tile.columns
    assert tile.bytes == tile.line_offset(tile.lines) > 2 * max(tile(*at) for at in coordinates(tile))
    assert tile.bytes == tile.lines * tile.line_bytes + tile.lines // tile.group * 2 * tile.group_pad


@every_tile
def test_every_bit_of_a_coordinate_adds_its_own_bytes(tile):
    for row, column in coordinates(tile):
        bits = [(1 << b, 0) for b in range(8) if row >> b & 1] + [(0, 1 << b) for b in range(8) if column >> b & 1]
        assert 2 * tile(row, column) == sum(tile.displace(*bit)[1] for bit in bits)
        assert tile.displace(row, column)[0] == 0


@every_tile
def test_run_time_coordinates(tile):
    def body(out: fly.Tensor):
        index = fly.block_id.x * 64 + fly.lane_id()
        out.store(tile.base(index // tile.columns, index % tile.columns), index)

    out = np.zeros(tile.rows * tile.columns, np.int32)
    Machine(Program.of(trace(body, matrix("i32")), target("gfx950")))(flat(out), (len(out) // 64, 1, 1))
    assert out.tolist() == [2 * tile(*at) for at in coordinates(tile)]


@pytest.mark.parametrize(
    ("order", "line", "pad", "message"),
    [
        (fly.Layout((16, 64), (128, 1)), 512, 8, "does not map (row, column) one to one"),
        (fly.Layout(1024, 1), 512, 8, "does not map (row, column) one to one"),
        (fly.Layout((3, 64), (64, 1)), 64, 8, "rows of a padded tile is 3; expected a power of two"),
        (fly.Layout((16, 64), (64, 1)), 96, 8, "line of a padded tile is 96; expected a power of two"),
        (fly.Layout((16, 64), (64, 1)), 2048, 8, "1024 elements does not divide into lines of 2048"),
        (fly.Layout((16, 64), (64, 1)), 512, 4, "with 4 of padding, 1 to a group with 0 more; padding is a multiple"),
        (fly.Layout((16, 64), (64, 1)), 512, -8, "with -8 of padding"),
    ],
)
def test_what_is_no_padded_tile(order, line, pad, message):
    with pytest.raises(LayoutError) as caught:
        fly.PaddedTile(order, line, pad)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("group", "group_pad", "message"),
    [
        (4, 8, "does not divide into lines of 512 with 8 of padding, 4 to a group with 8 more"),
        (2, 4, "2 to a group with 4 more; padding is a multiple of 8"),
        (3, 8, "group of a padded tile is 3; expected a power of two"),
    ],
)
def test_what_are_no_groups_of_lines(group, group_pad, message):
    with pytest.raises(LayoutError) as caught:
        fly.PaddedTile(fly.Layout((16, 64), (64, 1)), 512, 8, group=group, group_pad=group_pad)
    assert message in str(caught.value)


def plan(operand: str, dtype: str = "bf16") -> fly.OperandPlan:
    """How the gfx950 kernel loads K or V."""
    gfx950 = target("gfx950")
    link = fly.chain(gfx950.mma(dtype, (32, 32, 16)))
    options = {"transposed": False}
    if operand == "v":
        options = {"transposed": True, "slot_of": lambda slot: link.columns[slot]}
    want = fly.operand_coordinates(link.atom, link.column_operand, **options)
    return fly.require_plan(
        fly.plan_operand(gfx950.matrix_loads, want, link.atom.values(link.column_operand)), link.atom, operand
    )


def test_static_offsets_must_not_overlap_the_lanes_own():
    def body(out: fly.Tensor):
        loader = fly.OperandLoader(plan("k"), k_tile(128))
        loader.load(fly.SharedTile.ring("k", k_tile(128), fly.bf16, 1)[0], 16, 0)

    with pytest.raises(LayoutError, match="static row 16 overlaps the rows that the lanes' addresses span"):
        trace(body, matrix())


NEIGHBOURS = (BankModel("32 banks", 32, 32), BankModel("64 banks", 64, 64))


@pytest.mark.parametrize("model", [*MODELS.values(), *NEIGHBOURS], ids=lambda m: m.name)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("together", [64, 16])
def test_operand_loads_find_no_two_words_in_a_bank(together, operand, head_dim, model):
    """Over the layout alone: every load of a tile, as 32 or 64 banks serve it."""
    tile = (k_tile if operand == "k" else v_tile)(head_dim, together)
    loads = plan(operand)
    size = 2 * loads.load.run
    assert (loads.load.name, size) == {"k": ("load128", 16), "v": ("ds_read_b64_tr_b16", 8)}[operand]
    rows, columns = (32, 16) if operand == "k" else (16, 32)
    for row, column in itertools.product(range(0, tile.rows, rows), range(0, tile.columns, columns)):
        for step in loads.steps:
            addresses = [
                2 * tile(row + step.row(i) + step.row_offset, column + step.column(i) + step.column_offset)
                for i in range(64)
            ]
            assert model.extra_cycles(addresses, size) == 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", [k_tile, v_tile])
def test_lines_for_pages_have_rows_of_one_page(tile, head_dim):
    layout = tile(head_dim, 16)
    for line in range(layout.lines):
        rows = {layout.coordinate(line * layout.line + i)[0] for i in range(layout.line)}
        assert {row // 16 for row in rows} == {line * 4 // layout.lines}


def test_without_more_padding_a_group_there_are_conflicts():
    """The same, for the lines of pages: a read takes rows of two of them."""
    tile = fly.PaddedTile(k_tile(128, 16).order, 512, 8)
    steps = plan("k").steps[0]
    assert MODELS["gfx950"].extra_cycles([2 * tile(steps.row(i), steps.column(i)) for i in range(64)], 16) > 0


def test_without_padding_there_are_conflicts():
    """The proof above can fail: the same rows without padding."""
    tile = fly.PaddedTile(k_tile(128).order, 512, 0)
    loads = plan("k")
    addresses = [2 * tile(loads.steps[0].row(i), loads.steps[0].column(i)) for i in range(64)]
    assert all(model.extra_cycles(addresses, 16) > 0 for model in (*MODELS.values(), *NEIGHBOURS))
