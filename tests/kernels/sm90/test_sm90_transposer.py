"""Turning tiles of V in shared memory, run in the simulator: every byte, every bank, and what is cleared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fly
from fly.backends.nvvm.wgmma import PAIRS, PanelTile
from fly.backends.target import target
from fly.errors import LayoutError
from fly.ir import memory
from kernels.sm90.producer import clear_rows
from kernels.sm90.transposer import TileTranspose
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

LINE = 128 * 16  # bytes that the threads of a warpgroup move at once
TILES = [
    (128, 64),
    (128, 128),
    (64, 256),
    (128, 256),
    (64, 64),
    (64, 128),
    (32, 64),
    (32, 256),
    (96, 64),
    (160, 128),
    (192, 128),
]
every_tile = pytest.mark.parametrize(("keys", "dim"), TILES)


def tiles(keys: int, dim: int) -> tuple[PanelTile, PanelTile]:
    """As they arrive, and as consumers read them."""
    return PanelTile.widest(keys, dim, 1), PanelTile.widest(dim, keys, 1)


def placed(tile: PanelTile, values: np.ndarray) -> np.ndarray:
    """A matrix of bytes where the tile has it."""
    result = np.zeros(tile.bytes, np.uint8)
    for place in np.ndindex(values.shape):
        result[tile(*place)] = values[place]
    return result


def run(
    keys: int, dim: int, source: np.ndarray, first: int | None = None, warps: int = 4
) -> tuple[np.ndarray, Machine]:
    """What the last warps make of the bytes of a tile, whose rows from `first` on a warpgroup clears, if given."""
    raw, transposed = tiles(keys, dim)

    def kernel(x: fly.Tensor, y: fly.Tensor, rows: fly.i32):
        arrived, made = (fly.alloc_shared(name, raw.bytes, 1024) for name in ("arrived", "made"))
        mine = fly.thread_id.x * 16
        for at in range(0, raw.bytes, LINE):
            fly.store(x.load((mine + at) // 4, length=4), arrived.offset(mine + at), align=16)
        fly.barrier()
        if first is not None:
            clear_rows(raw, arrived, rows)
            fly.barrier()
        transpose = TileTranspose(raw, transposed, warps)
        with fly.when(fly.thread_id.x >= 128 - 32 * warps):
            for unit in transpose.units:
                transpose.store(made, transpose.load(arrived, [unit]), [unit])
        fly.barrier()
        for at in range(0, raw.bytes, LINE):
            y.store(memory.load(made.offset(mine + at), fly.i32, 4, align=16), (mine + at) // 4)

    module = trace(kernel, matrix("i32"), matrix("i32"), "i32", arch="sm_90a", block=128)
    machine = Machine(Program.of(module, target("sm_90a")), observe_shared=True)
    result = np.full(raw.bytes // 4, -1, np.int32)
    machine(flat(source.view(np.int32).copy(), result, first or 0))
    return result.view(np.uint8), machine


def wanted(values: np.ndarray) -> np.ndarray:
    """(D, keys) in the order of A registers."""
    slots = np.arange(len(values))
    return values[16 * (slots // 16) + [PAIRS(int(slot % 16)) for slot in slots]].T


@every_tile
@pytest.mark.parametrize("warps", [1, 2, 4])
def test_a_tile_is_turned_in_the_order_of_registers(keys, dim, warps):
    raw, transposed = tiles(keys, dim)
    values = np.random.default_rng(dim + keys).integers(0, 256, (keys, dim), np.uint8)
    made, _ = run(keys, dim, placed(raw, values), warps=warps)
    np.testing.assert_array_equal(made, placed(transposed, wanted(values)))


@every_tile
def test_rows_of_a_matrix_are_in_banks_of_their_own(keys, dim):
    raw, _ = tiles(keys, dim)
    _, machine = run(keys, dim, np.zeros(raw.bytes, np.uint8))
    found = [access for access in machine.shared_accesses if access.kind.endswith("matrix")]
    assert len(found) == 2 * raw.bytes // 512  # four matrices of 128 bytes each are read, and stored, once
    for access, matrix_ in itertools.product(found, range(4)):
        pieces = [address // 16 % 8 for address in access.addresses[8 * matrix_ : 8 * matrix_ + 8]]
        assert sorted(pieces) == list(range(8))


@pytest.mark.parametrize("first", [-3, 0, 1, 37, 127])
@pytest.mark.parametrize("dim", [64, 256])
def test_rows_that_are_no_sequences_become_zero(dim, first):
    raw, transposed = tiles(128, dim)
    values = np.random.default_rng(first + 3).integers(1, 256, (128, dim), np.uint8)
    made, _ = run(128, dim, placed(raw, values), first)
    values[max(first, 0) :] = 0
    np.testing.assert_array_equal(made, placed(transposed, wanted(values)))


@pytest.mark.parametrize(
    ("raw", "transposed", "text"),
    [
        (PanelTile(128, 64, 64, 1), PanelTile(128, 128, 128, 1), "cannot become .*expected its columns as rows"),
        (PanelTile(64, 64, 128), PanelTile(64, 64, 128), "cannot become .*of 8-bit elements"),
        (PanelTile(32, 32, 32, 1), PanelTile(32, 32, 32, 1), "expected multiples of 32 keys of enough columns"),
    ],
)
def test_tiles_that_cannot_be_turned(raw, transposed, text):
    with pytest.raises(LayoutError, match=text):
        TileTranspose(raw, transposed)
