"""Warpgroup products and matrix loads and stores on the simulated Hopper GPU, against numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.nvvm import tma, wgmma
from fly.backends.nvvm.intrinsics import load_matrices_transposed, permute_bytes, store_matrices
from fly.backends.nvvm.mbarrier import Mbarriers, init_all
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from tests.simulating.schedules import in_every_schedule

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Product:
    """(64, k) times (k, n); where A is, and whether B's k runs along rows of its tile.

    `how`: "once"; "chain": twice onto itself with no wait between; "waits": with one; "pair": two products in flight,
    the second onto zeros, of which the first is waited for alone.
    """

    n: int
    k: int
    dtype: str = "bf16"
    a: str = (
        "columns"  # "columns" or "rows" (both in shared memory), "registers", or "loaded" (registers, from there)
    )
    b: str = "columns"
    how: str = "once"
    is_static: ClassVar[bool] = True

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def a_tile(self) -> PanelTile:
        sizes = (self.k, wgmma.M) if self.a == "rows" else (wgmma.M, self.k)
        return PanelTile.widest(*sizes, self.bytes)

    @property
    def b_tile(self) -> PanelTile:
        return PanelTile.widest(*((self.k, self.n) if self.b == "rows" else (self.n, self.k)), self.bytes)

    def __str__(self) -> str:
        return f"{self.n}x{self.k}-{self.dtype}-{self.a}-{self.b}-{self.how}"


def registers(a: fly.Tensor, atom: WarpgroupAtom, first: int) -> fly.Value:
    """The thread's A registers for columns from `first` on (PTX ISA, "Register Fragments for wgmma")."""
    lane, run = fly.thread_id.x, atom.k // 8
    elements = []
    for i in range(atom.values("a")):
        row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i // run % 2)
        elements.append(a.load(row, lane % 4 * run + (first + i % run + 4 * run * (i // (2 * run)))))
    return fly.from_elements(elements)


@fly.kernel
def product(a_map: fly.TensorMap, b_map: fly.TensorMap, a: fly.Tensor, out: fly.Tensor, *, options: Product):
    """out (2, 64, n): the first and the last result of `options.how`; `a` is (64, k) integers, for registers."""
    places = []
    landed = Mbarriers.allocate("landed", 1, 1)
    init_all([landed])
    for name, tile in (("a", options.a_tile), ("b", options.b_tile)):
        places.append(fly.alloc_shared(name, tile.bytes, 1024))
    with fly.when(fly.thread_id.x == 0):
        landed.arrive_expecting(0, options.a_tile.bytes + options.b_tile.bytes)
        for source, tile, place in zip((a_map, b_map), (options.a_tile, options.b_tile), places):
            for panel in range(tile.panels):
                to = place.offset(panel * tile.panel_bytes)
                tma.load(source, to, (0, panel * tile.panel_columns), landed.at(0))
    landed.wait(0, 0)
    atom = WarpgroupAtom(options.n, options.dtype)
    steps = options.k // atom.k
    left = Operand(places[0], options.a_tile, along_rows=options.a == "rows")
    if options.a == "registers":
        left = [registers(a, atom, atom.k * t).bitcast(fly_type(options.dtype)) for t in range(steps)]
    if options.a == "loaded":
        left = wgmma.load_registers(atom, places[0], options.a_tile, 0, steps)
    right = Operand(places[1], options.b_tile, along_rows=options.b == "rows")
    first = wgmma.issue(atom, left, right, steps)
    if options.how == "chain":
        (second,) = wgmma.wait(0, wgmma.issue(atom, left, right, steps, first))
        first = second
    elif options.how == "pair":
        second = wgmma.issue(atom, left, right, steps)
        (first,) = wgmma.wait(1, first)
        store(first, atom, out, 0)  # while the other one works
        (second,) = wgmma.wait(0, second)
    else:
        (first,) = wgmma.wait(0, first)
        second = first
        if options.how == "waits":
            (second,) = wgmma.wait(0, wgmma.issue(atom, left, right, steps, first))
    if options.how != "pair":
        store(first, atom, out, 0)
    store(second, atom, out, 1)


def fly_type(name: str) -> fly.DType:
    return getattr(fly, name)


def store(total: fly.Value, atom: WarpgroupAtom, out: fly.Tensor, which: int) -> None:
    fragment = fly.Fragment(fly.AccumulatorLayout(atom, "m"), ((total,),))
    for row, column, values in fragment.runs():
        fly.store(values, out.at(which, row, column), align=8)


def small_integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose products add up exactly."""
    return torch.randint(-4, 5, shape).to(dtype)


def tile_map(matrix: torch.Tensor, tile: PanelTile) -> fly.TensorMap:
    return fly.tensor_map(matrix, (tile.rows, tile.panel_columns), swizzle=tile.swizzle)


def check_product(options: Product) -> None:
    dtype = DTYPES[options.dtype]
    a, b = small_integers(64, options.k, dtype=dtype), small_integers(options.k, options.n, dtype=dtype)
    stored_a = (a.T if options.a == "rows" else a).contiguous()
    stored_b = (b if options.b == "rows" else b.T).contiguous()
    maps = tile_map(stored_a, options.a_tile), tile_map(stored_b, options.b_tile)
    bits = a.view(torch.int8 if options.bytes == 1 else torch.int16)
    out = torch.full((2, 64, options.n), torch.nan)
    in_every_schedule(lambda: product[1, 128](*maps, bits, out, options=options), out)
    once = a.double() @ b.double()
    times = {"once": (1, 1), "chain": (2, 2), "waits": (1, 2), "pair": (1, 1)}[options.how]
    for found, factor in zip(out, times, strict=True):
        assert torch.equal(found.double(), factor * once)


WIDTHS = (8, 64, 80, 176, 256)
PRODUCTS = [
    *(Product(n, 32, dtype) for n in WIDTHS for dtype in DTYPES),
    *(Product(n, 64, dtype, a="registers") for n in (8, 80) for dtype in DTYPES),
    *(Product(n, 64, b="rows") for n in (16, *WIDTHS[1:])),
    *(Product(64, k, "f16", a="rows", b=b) for k in (16, 48, 128) for b in ("columns", "rows")),
    *(Product(48, k, "f16", a="registers", b="rows") for k in (16, 80)),
    *(Product(24, k, dtype, a="loaded") for k in (32, 96, 128) for dtype in DTYPES),
    *(Product(32, 96, "f8e5m2", a=a, how=how) for a in ("columns", "registers") for how in ("chain", "pair")),
    *(Product(64, 32, a=a, b="rows", how=how) for a in ("rows", "registers") for how in ("chain", "waits", "pair")),
]


@pytest.mark.parametrize("options", PRODUCTS, ids=str)
def test_a_product_is_numpys(options):
    check_product(options)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_products_of_any_size(data):
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    wide = DTYPES[dtype].itemsize == 2
    b = data.draw(st.sampled_from(("columns", "rows"))) if wide else "columns"
    a = data.draw(st.sampled_from(("columns", "rows", "registers") if wide else ("columns", "registers")))
    n = 8 * data.draw(st.integers(1, 32))
    k = (16 if wide else 32) * data.draw(st.integers(1, 6))
    if b == "rows":
        n = -(-n // 16) * 16  # a tile has panels of 16 columns at least
    check_product(Product(n, k, dtype, a, b, data.draw(st.sampled_from(("once", "chain", "waits", "pair")))))


@fly.kernel
def matrices(source: fly.Tensor, turned: fly.Tensor, back: fly.Tensor):
    """Four 8 by 8 matrices of 16 bits a warp, (warps, 32, 4) words: turned words of each lane, and turned twice."""
    lane, warp = fly.lane_id(), fly.wave_id()
    place = (warp * 32 + lane) * 16
    tiles = fly.alloc_shared("tiles", 2 * 32 * 16, 16)
    fly.store(source.load(warp, lane, 0, length=4), tiles.offset(place), align=16)
    words = load_matrices_transposed(tiles.offset(place))
    fly.store(fly.from_elements(words), turned.at(warp, lane, 0), align=16)
    again = fly.alloc_shared("again", 2 * 32 * 16, 16)
    store_matrices(again.offset(place), words)
    words = load_matrices_transposed(again.offset(place))
    fly.store(fly.from_elements(words), back.at(warp, lane, 0), align=16)


def test_matrices_are_turned_as_the_isa_says():
    source = torch.randint(-(2**31), 2**31, (2, 32, 4), dtype=torch.int32)
    turned, back = torch.zeros_like(source), torch.zeros_like(source)
    in_every_schedule(lambda: matrices[1, 64](source, turned, back), turned, back)
    elements = source.view(torch.int16).view(2, 4, 8, 8)  # warp, matrix, row, column
    found = turned.view(torch.int16).view(2, 32, 4, 2)
    for lane in range(32):
        for half in range(2):
            wanted = elements[:, :, lane % 4 * 2 + half, lane // 4]
            assert torch.equal(found[:, lane, :, half], wanted)
    # words of the turned matrices, stored as they are and turned while they are loaded, are the first ones' rows
    rows = back.view(torch.int16).view(2, 32, 4, 2)
    for lane in range(32):
        wanted = elements[:, :, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
        assert torch.equal(rows[:, lane], wanted)


@fly.kernel
def permuted(words: fly.Tensor, out: fly.Tensor, selector: fly.i32):
    """out[i] = bytes of words[i, 0] and words[i, 1] by a uniform selector, and by one that is a lane's own."""
    thread = fly.thread_id.x
    low, high = words.load(thread, 0), words.load(thread, 1)
    out.store(permute_bytes(low, high, selector), thread, 0)
    out.store(permute_bytes(low, high, words.load(thread, 2)), thread, 1)


@settings(max_examples=10, deadline=None)
@given(digits=st.lists(st.integers(0, 15), min_size=4, max_size=4))
def test_bytes_of_two_words(digits):
    words = torch.randint(-(2**31), 2**31, (64, 3), dtype=torch.int32)
    out = torch.zeros(64, 2, dtype=torch.int32)
    permuted[1, 64](words, out, sum(d << 4 * i for i, d in enumerate(digits)))
    both = words[:, :2].contiguous().numpy().view(np.uint8)
    # a digit from 8 on: the highest bit of the byte in all bits
    both = np.concatenate([both, np.where(both < 128, 0, 255).astype(np.uint8)], axis=1)
    found = out.numpy().view(np.uint8).reshape(64, 2, 4)
    np.testing.assert_array_equal(found[:, 0], both[:, digits])
    own = words[:, 2].numpy()[:, None] >> np.array([0, 4, 8, 12]) & 15
    np.testing.assert_array_equal(found[:, 1], np.take_along_axis(both, own, 1))
