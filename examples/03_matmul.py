"""Matrix multiplication in 16 bit: matrix instructions, swizzled shared tiles, and a ring that fetches tiles ahead.

    c (M, N) = a (M, K) · b (N, K)ᵀ           both operands contiguous along K, as in a linear layer

The code names no architecture. `fly.target()` offers matrix instructions as data (*atoms*: sizes, and which lane
holds which element) and loads from shared memory; every layout below follows from them.

A block of 256 threads computes a 128 × 128 tile of c, in steps of 64 along K. Its waves share the tiles of a and b;
each wave keeps its own part of the tile of c in registers, in f32:

| what | who | from → to |
|---|---|---|
| fetch a tile of a and of b | all threads, 16 bytes at a time | global → shared memory, steps ahead (`TileRing`) |
| load operands | each wave, its rows of a and of b | shared memory → registers, in the atom's layout |
| multiply | each wave | registers, one atom per row tile, column tile and depth |
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import _device
import torch

import fly

THREADS = 256


@dataclass(frozen=True)
class Tiling:
    """Static sizes: a block computes m x n of c, k at a time; `wave_rows` of its waves lie along m."""

    m: int = 128
    n: int = 128
    k: int = 64
    wave_rows: int = 2
    stages: int = 3  # slots of the ring where copies are asynchronous; without, the next tile waits in registers


class Side:
    """One operand: how its tiles of `rows` rows get into shared memory, and from there into a wave's registers."""

    def __init__(self, name: str, panel: fly.Panel, rows: int, atom: fly.MmaAtom, operand: str, stages: int):
        want = fly.operand_coordinates(atom, operand, transposed=False)  # (lane, value) -> (row, k)
        found = fly.plan_operand(fly.target().matrix_loads, want, atom.values(operand))
        plan = fly.require_plan(found, atom, operand)  # the load instruction, and the address that each lane gives
        layout = fly.SwizzledTile(rows, panel.columns, plan.load.granule)  # spreads lanes over the memory's banks
        self.copy = fly.RowCopy(panel, layout, vector=8, asynchronous=stages > 1)
        self.ring = fly.SharedTile.ring(name, layout, panel.dtype, stages)[0]
        self.loader = fly.OperandLoader(plan, layout)
        self.step = plan.tiles * (atom.m if operand == "a" else atom.n)  # one load may serve two atoms

    def load(self, tile: fly.SharedTile, rows: int, k: int) -> list[fly.Value]:
        """The operands of the tile's first `rows` rows at column k, one per atom."""
        return [value for row in range(0, rows, self.step) for value in self.loader.load(tile, row, k)]


def product(a: fly.Tensor, b: fly.Tensor, tiling: Tiling) -> fly.Fragment:
    """The wave's part of a bᵀ; wave w has rows w // wave_columns, columns w % wave_columns of the block's tile."""
    # of the atom's two orientations, the one in which a lane's registers run along the rows of c
    link = fly.chain(fly.target().mma(a.dtype.name))
    layout = link.layout
    stages = tiling.stages if 16 in fly.target().async_copy_bytes else 1
    wave_columns = fly.block_dim()[0] // fly.wave_size() // tiling.wave_rows
    rows, columns = tiling.m // tiling.wave_rows, tiling.n // wave_columns  # a wave's part of c
    wave_row, wave_column = fly.wave_id() // wave_columns, fly.wave_id() % wave_columns
    first_row, first_column = fly.block_id.y * tiling.m, fly.block_id.x * tiling.n

    left = Side("a", a.panel(first_row, tiling.k), tiling.m, link.atom, link.row_operand, stages)
    right = Side("b", b.panel(first_column, tiling.k), tiling.n, link.atom, link.column_operand, stages)
    ring = fly.TileRing([(left.copy, left.ring), (right.copy, right.ring)], stages)

    start = fly.Fragment.zeros(layout, rows // layout.rows, columns // layout.columns), ring.start(fly.i32(0))
    for t, (total, flight) in (loop := fly.range(a.shape[1] // tiling.k, carry=start)):
        (a_tile, b_tile), flight = ring.advance(t, flight)
        a_tile, b_tile = a_tile.rows_from(wave_row * rows), b_tile.rows_from(wave_column * columns)
        for k in range(0, tiling.k, link.atom.k):  # Python's range: unrolled
            total = multiply(link, left.load(a_tile, rows, k), right.load(b_tile, columns, k), total)
        loop.next(total, flight)
    return loop.results[0]


def multiply(link: fly.Chain, a: list[fly.Value], b: list[fly.Value], total: fly.Fragment) -> fly.Fragment:
    """total + a bᵀ for operands of one depth: every row tile of a with every row tile of b."""
    return total.map(lambda tile, r, c: link.mma(a[r], b[c], tile))


def store(total: fly.Fragment, c: fly.Tensor, tiling: Tiling, finish: Callable | None = None) -> None:
    """Write the wave's part of c; `finish` makes what is stored of (f32 values, their first column)."""
    wave_columns = fly.block_dim()[0] // fly.wave_size() // tiling.wave_rows
    rows, columns = tiling.m // tiling.wave_rows, tiling.n // wave_columns
    wave_row, wave_column = fly.wave_id() // wave_columns, fly.wave_id() % wave_columns
    part = c.rows(columns).beside(fly.block_id.x * wave_columns + wave_column)
    window = part.window(fly.block_id.y * tiling.m + wave_row * rows, rows)
    first_column = fly.block_id.x * tiling.n + wave_column * columns
    columns_left = c.shape[1] - first_column
    if finish is None:
        total = total.map(lambda tile, r, c: tile.to(part.dtype))
    for row, column, values in total.runs():  # contiguous columns that the lane holds
        with fly.when((row < window.rows_left) & (column < columns_left)):
            values = values if finish is None else finish(values, first_column + column)
            window.store(values.to(c.dtype), row, column)


@fly.kernel
def matmul(a: fly.Tensor, b: fly.Tensor, c: fly.Tensor, *, tiling: Tiling):
    """c = a bᵀ. Grid: (tiles along N, tiles along M)."""
    store(product(a, b, tiling), c, tiling)


def matmul_nt(a: torch.Tensor, b: torch.Tensor, tiling: Tiling | None = None) -> torch.Tensor:
    """a (M, K) times the transpose of b (N, K): contiguous, f16 or bf16; any M, N a multiple of 8, K one of 64."""
    tiling = tiling or Tiling()
    (m, k), n = a.shape, len(b)
    if k % tiling.k or n % 8 or a.data_ptr() % 16 or b.data_ptr() % 16:
        raise ValueError(f"K = {k} must be a multiple of {tiling.k}, N = {n} one of 8, and addresses ones of 16")
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    matmul[(-(-n // tiling.n), -(-m // tiling.m)), THREADS](a, b, c, tiling=tiling)
    return c


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        matrix = fly.TensorSpec("bf16", rank=2, alignment=16, unit_stride=True)
        _device.show(matmul, matrix, matrix, matrix, block=THREADS, tiling=Tiling())
        return

    def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)

    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in ((128, 128, 64), (1, 8, 128), (200, 136, 320)):
            a, b = inputs(m, n, k, dtype)
            exact = a.double() @ b.double().T
            bound = 2 * ((a @ b.T).double() - exact).abs().max().item() + 1e-5  # twice what torch's own result is off
            _device.check(f"{dtype} {m} x {n} x {k}", matmul_nt(a, b), exact, bound)
    if device == "cuda":
        size = 8192
        a, b = inputs(size, size, size, torch.bfloat16)
        _device.race(lambda: matmul_nt(a, b), lambda: a @ b.T, work=2 * size**3, unit="FLOP")


if __name__ == "__main__":
    main()
