"""Small kernels on Hopper's asynchronous units, each about one of them, and compiling them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import fly
from fly.backends.artefact import Artefact
from fly.backends.nvvm import cluster, tma, wgmma
from fly.backends.nvvm.intrinsics import (
    WARPGROUP,
    barrier_any,
    barrier_arrive,
    barrier_sync,
    elect_one,
    fence_async_shared,
    setmaxnreg_dec,
    setmaxnreg_inc,
    warpgroup_id,
)
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring, init_all
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from fly.ir import memory
from fly.lang.signature import ScalarSpec, TensorMapSpec, TensorSpec
from tests.backends.builds import build

I32 = ScalarSpec("i32")
VECTOR_I32 = TensorSpec("i32", 1, 16, True)


@fly.kernel
def copy_box(source: fly.TensorMap, result: fly.TensorMap, raw: fly.Tensor, row: fly.i32, column: fly.i32):
    """A box of 16-bit elements of `source`, from (row, column), to shared memory, and that to `raw` and `result`.

    `raw` gets the bytes as they lie, as i32; `result` is as large as the box. One block of 128 threads.
    """
    rows, columns = source.spec.box
    box = fly.alloc_shared("box", rows * columns * 2, 1024)
    landed = Mbarriers.allocate("landed", 1, 1)
    init_all([landed])
    with fly.when(fly.thread_id.x == 0):
        tma.prefetch(source)
        landed.arrive_expecting(0, rows * columns * 2)
        tma.load(source, box, (row, column), landed.at(0))
    landed.wait(0, 0)
    for piece in fly.range(fly.thread_id.x, rows * columns // 8, WARPGROUP):
        words = memory.load(box.offset(piece * 16), fly.i32, 4, align=16)
        fly.store(words, raw.at(piece * 4), align=16)
    with fly.when(fly.thread_id.x == 0):
        tma.store(result, box, (0, 0))
        tma.commit()
        tma.wait_read()


def copy_specs(rows: int, columns: int, swizzle: int) -> tuple:
    box = TensorMapSpec("f16", (rows, columns), swizzle)
    return box, box, VECTOR_I32, I32, I32


@fly.kernel
def shifted(source: fly.Tensor, result: fly.TensorMap, *, count: int):
    """result = source + 1 for `count` f32: stores to shared memory that the copy engine must see."""
    box = fly.SharedMemory("box", fly.f32, count, align=128)
    thread = fly.thread_id.x
    box.store(source.load(thread) + 1.0, thread)
    fence_async_shared()
    fly.barrier()
    with fly.when(thread == 0):
        tma.store(result, box.pointer, (0,))
        tma.commit()
        tma.wait_read()


@dataclass(frozen=True)
class Product:
    """One warpgroup's product: 64 x `n`, over `k`; where A is, and whether A's and B's k runs along rows of tiles."""

    n: int
    k: int
    dtype: str = "bf16"
    a: str = "columns"  # "columns" or "rows" (both in shared memory), or "registers"
    b: str = "columns"
    split: bool = False  # as two products, the second one onto the first

    @property
    def a_tile(self) -> PanelTile:
        return PanelTile.widest(self.k, wgmma.M) if self.a == "rows" else PanelTile.widest(wgmma.M, self.k)

    @property
    def b_tile(self) -> PanelTile:
        return PanelTile.widest(self.k, self.n) if self.b == "rows" else PanelTile.widest(self.n, self.k)

    def specs(self) -> tuple:
        maps = [TensorMapSpec(self.dtype, (t.rows, t.panel_columns), t.swizzle) for t in (self.a_tile, self.b_tile)]
        matrix = TensorSpec(self.dtype, 2, 16, True)
        return *maps, matrix, matrix, TensorSpec("f32", 2, 16, True)


@fly.kernel
def product(
    a_map: fly.TensorMap,
    b_map: fly.TensorMap,
    a: fly.Tensor,
    narrow: fly.Tensor,
    wide: fly.Tensor,
    *,
    options: Product,
):
    """A B, rounded in `narrow` and as f32 in `wide`, both (64, n). `a` is (64, k), for A in registers."""
    a_tile, b_tile = options.a_tile, options.b_tile
    a_shared, b_shared = fly.alloc_shared("a", a_tile.bytes, 1024), fly.alloc_shared("b", b_tile.bytes, 1024)
    landed = Mbarriers.allocate("landed", 1, 1)
    init_all([landed])
    with fly.when(fly.thread_id.x == 0):
        landed.arrive_expecting(0, a_tile.bytes + b_tile.bytes)
        for source, tile, place in ((a_map, a_tile, a_shared), (b_map, b_tile, b_shared)):
            for panel in range(tile.panels):
                tma.load(
                    source, place.offset(panel * tile.panel_bytes), (0, panel * tile.panel_columns), landed.at(0)
                )
    landed.wait(0, 0)
    atom = WarpgroupAtom(options.n, options.dtype)
    steps = options.k // wgmma.K
    left = Operand(a_shared, a_tile, along_rows=options.a == "rows")
    if options.a == "registers":
        left = [registers(a, 16 * t) for t in range(steps)]
    right = Operand(b_shared, b_tile, along_rows=options.b == "rows")
    if options.split:
        (total,) = wgmma.wait(0, wgmma.issue(atom, left, right, steps))
        total = wgmma.issue(atom, left, right, steps, total)
        (total,) = wgmma.wait(0, total, after=[fly.exp2(a.load(0, 0).to(fly.f32))])
    else:
        (total,) = wgmma.wait(0, wgmma.issue(atom, left, right, steps))
    fragment = fly.Fragment(fly.AccumulatorLayout(atom, "m"), ((total,),))
    for row, column, values in fragment.runs():
        fly.store(values, wide.at(row, column), align=8)
    rows, column, pieces = wgmma.runs(total.to(narrow.dtype))
    for row, row_pieces in zip(rows, pieces, strict=True):
        for i, piece in enumerate(row_pieces):
            fly.store(piece, narrow.at(row, column + 32 * i), align=16)


def registers(a: fly.Tensor, first: int) -> fly.Value:
    """The thread's A registers for columns `first` to `first + 15` (PTX ISA, "Register Fragments for wgmma")."""
    lane, warp = fly.lane_id(), fly.wave_id()
    elements = []
    for i in range(8):
        row = warp * 16 + lane // 4 + 8 * (i // 2 % 2)
        elements.append(a.load(row, lane % 4 * 2 + (first + i % 2 + 8 * (i // 4))))
    return fly.from_elements(elements)


@fly.kernel
def ring_sum(source: fly.TensorMap, out: fly.Tensor, *, stages: int, count: int):
    """out[i] = sum over `count` rows of 128 f32: one warpgroup adds what a thread of another one loads."""
    fly.occupancy(min_blocks=1)
    line = 4 * WARPGROUP
    slots = fly.alloc_shared("slots", stages * line, 128)
    ring = Ring.allocate("ring", stages, WARPGROUP // 32)
    init_all([ring])
    group = warpgroup_id()
    with fly.when(group == 0):
        setmaxnreg_dec(24)
        with fly.when((fly.wave_id() == 0) & elect_one()):
            for row, at in (loop := fly.range(count, carry=Position.start())):
                tma.load(source, slots.offset(at.index * line), (row, 0), ring.acquire(at, line))
                loop.next(ring.next(at))
    with fly.when(group == 1):
        setmaxnreg_inc(240)
        thread = fly.lane_of(WARPGROUP)
        carry = (Position.start(), fly.f32(0.0))
        for _, (at, total) in (loop := fly.range(count, carry=carry)):
            ring.wait(at)
            value = memory.load(slots.offset(at.index * line + thread * 4), fly.f32)
            ring.release(at)
            loop.next(ring.next(at), total + value)
        out.store(loop.results[1], thread)


@fly.kernel
def handshake(out: fly.Tensor, number: fly.i32):
    """out[i] = 3 i: one warpgroup stores, another one waits for it at named barrier `number` and reads."""
    line = fly.SharedMemory("line", fly.i32, WARPGROUP)
    thread = fly.lane_of(WARPGROUP)
    group = warpgroup_id()
    with fly.when(group == 1):
        line.store(thread * 3, thread)
        barrier_arrive(number, 2 * WARPGROUP)
    with fly.when(group == 0):
        barrier_sync(number, 2 * WARPGROUP)
        out.store(line.load(WARPGROUP - 1 - thread), WARPGROUP - 1 - thread)


@fly.kernel
def asked(out: fly.Tensor, number: fly.i32):
    """out[i], i < 256: whether a thread of i's warpgroup has that number; each asks at a barrier of its own."""
    thread, group = fly.thread_id.x, warpgroup_id()
    out.store(fly.select(barrier_any(group + 1, WARPGROUP, thread == number), 1, 0), thread)


@fly.kernel
def passed_on(x: fly.Tensor, out: fly.Tensor, *, blocks: int):
    """out = x, whose lines of 128 each go once round their cluster and to the next block; a line a block of 128."""
    cluster.declare(blocks)
    line, thread = 4 * WARPGROUP, fly.thread_id.x
    own = fly.SharedMemory("own", fly.i32, 128, align=128)
    come = fly.SharedMemory("come", fly.i32, 128, align=128)
    arrived = Mbarriers.allocate("arrived", 1, 1)
    init_all([arrived])
    cluster.sync()
    rank = fly.block_id.x % blocks
    following = (rank + 1) % blocks
    place = fly.block_id.x * 128 + thread
    own.store(x.load(place), thread)
    for step in fly.range(blocks + 1):
        parity = step % 2
        fence_async_shared()
        fly.barrier()
        with fly.when(thread == 0):
            cluster.arrive_expecting(arrived, 0, line, following)
            cluster.copy(come.pointer, own.pointer, line, arrived, 0, following)
        arrived.wait(0, parity)
        word = come.load(thread)
        cluster.sync()
        own.store(word, thread)
    out.store(own.load(thread), place)


@fly.kernel
def halved(box: fly.TensorMap, out: fly.Tensor, *, blocks: int):
    """out[b] = the tensor's first `blocks` boxes, each loaded by one block of a cluster for all; b is the block."""
    cluster.declare(blocks)
    rows, columns = box.spec.box
    parts = fly.SharedMemory("parts", fly.i32, blocks * rows * columns, align=128)
    arrived = Mbarriers.allocate("arrived", 1, 1)
    init_all([arrived])
    cluster.sync()
    rank, nbytes = fly.block_id.x % blocks, 4 * rows * columns
    with fly.when(fly.thread_id.x == 0):
        arrived.arrive_expecting(0, blocks * nbytes)
        tma.load(box, parts.pointer.offset(rank * nbytes), (rank * rows, 0), arrived.at(0), blocks)
    arrived.wait(0, 0)
    for i in range(blocks * rows * columns // WARPGROUP):
        place = fly.thread_id.x + i * WARPGROUP
        out[fly.block_id.x, :].store(parts.load(place), place)
    cluster.sync()


@fly.kernel
def counted(counters: fly.Tensor, groups: fly.Tensor, last: fly.i32):
    """One thread of every warp counts, up and in a circle; every thread says which warpgroup it is in."""
    with fly.when(elect_one()):
        fly.fetch_add(1, counters.at(0))
        fly.fetch_wrap(last, counters.at(1))
    groups.store(warpgroup_id(), fly.thread_id.x)


SMALL = {
    "copy_box": (copy_box, 128, copy_specs(16, 64, 128), {}),
    "shifted": (shifted, 128, (TensorSpec("f32", 1, 16, True), TensorMapSpec("f32", (128,))), {"count": 128}),
    "product": (product, 128, Product(64, 64).specs(), {"options": Product(64, 64)}),
    "split": (product, 128, Product(32, 32, split=True).specs(), {"options": Product(32, 32, split=True)}),
    "registers": (
        product,
        128,
        Product(256, 32, "f16", "registers", "rows").specs(),
        {"options": Product(256, 32, "f16", "registers", "rows")},
    ),
    "ring_sum": (
        ring_sum,
        256,
        (TensorMapSpec("f32", (1, 128)), TensorSpec("f32", 1, 16, True)),
        {"stages": 3, "count": 8},
    ),
    "handshake": (handshake, 256, (VECTOR_I32, I32), {}),
    "passed_on": (passed_on, 128, (VECTOR_I32, VECTOR_I32), {"blocks": 2}),
    "asked": (asked, 256, (VECTOR_I32, I32), {}),
    "counted": (counted, 256, (VECTOR_I32, VECTOR_I32, I32), {}),
}
"""name -> (kernel, block, specs, static parameters)"""


@functools.cache
def artefact(name: str) -> Artefact:
    """One of the kernels above for sm_90a."""
    kernel, block, specs, statics = SMALL[name]
    return build(kernel, "sm_90a", specs=specs, block=block, **statics)
