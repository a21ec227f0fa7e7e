"""Softmax of the rows of a matrix: lanes that work on one row together, in one pass that keeps a running maximum.

New here: a run-time loop that carries values, waves and lanes, and reductions over them.

A *wave* (a warp on NVIDIA) is the group of 32 or 64 lanes that execute together, and that can read each other's
registers. One wave takes one row. Every lane goes over its share of the row and carries two numbers:

    top = the largest element so far          total = the sum of exp(element - top) so far

A new, larger `top` makes the old `total` too large by exp(new - old), so it is scaled down. That is all of "online
softmax", the idea that flash attention rests on: no second pass is needed to know the maximum.
"""

import math
import sys

import _device
import torch

import fly

LOG2E = math.log2(math.e)
LOWEST = -3.4028234663852886e38  # the smallest finite f32: unlike -inf, it can be subtracted from itself
THREADS = 256


@fly.kernel
def softmax(x: fly.Tensor, y: fly.Tensor, *, vector: int = 4):
    """y[row] = exp(x[row] - max) / sum, f32; a wave takes one row after another, whatever their length."""
    lanes = fly.wave_size()  # static: 64 on AMD, 32 on NVIDIA
    waves = fly.block_dim()[0] // lanes
    rows, columns = x.shape  # run-time values
    lane = fly.lane_id()
    piece = fly.Layout((lanes, vector), (vector, 1))  # (lane, value) -> column within a piece of the row
    pieces = fly.ceil_div(columns, piece.size)

    def load(row: fly.Value, j: fly.Value) -> fly.Value:
        """The lane's part of piece j, -inf past the end of the row."""
        part = x[row, :].tile(piece.size, j).share(piece, lane).load()
        first = j * piece.size + lane * vector
        column = fly.from_elements([first + i for i in range(vector)])
        return fly.select(column < columns, part, -math.inf)

    def exp(value: fly.Value) -> fly.Value:
        return fly.exp2(value * LOG2E)  # the hardware's exponential is of base 2

    for row in fly.range(fly.block_id.x * waves + fly.wave_id(), rows, fly.grid_dim.x * waves):
        start = (fly.f32(LOWEST), fly.f32(0.0))
        for j, (top, total) in (loop := fly.range(pieces, carry=start)):
            values = load(row, j)
            new_top = fly.maximum(top, fly.reduce_max(values))
            loop.next(new_top, total * exp(top - new_top) + fly.reduce_sum(exp(values - new_top)))
        top, total = loop.results

        # the same step once more, between lanes: each scales its sum to the row's maximum before they are added
        row_top = fly.lane_max(top)
        inverse = fly.rcp(fly.lane_sum(total * exp(top - row_top)))
        for j in fly.range(pieces):
            y[row, :].tile(piece.size, j).share(piece, lane).store(exp(load(row, j) - row_top) * inverse)


def row_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of an f32 matrix along its rows, which are contiguous."""
    y = torch.empty_like(x)
    blocks = min(-(-len(x) // 8), 2048)  # any number will do: waves step over the rows
    softmax[blocks, THREADS](x, y)
    return y


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        matrix = fly.TensorSpec("f32", rank=2, alignment=16, unit_stride=True)
        _device.show(softmax, matrix, matrix, block=THREADS)
        return
    for shape in ((1, 1), (3, 100), (9, 257), (5, 1024)):
        x = 10 * torch.randn(shape, device=device)
        _device.check(f"{shape[0]} x {shape[1]}", row_softmax(x), x.double().softmax(dim=-1), bound=1e-6)
    if device == "cuda":
        x = torch.randn(8192, 8192, device=device)
        _device.race(lambda: row_softmax(x), lambda: x.softmax(dim=-1), work=2 * 4 * x.numel(), unit="B")


if __name__ == "__main__":
    main()
