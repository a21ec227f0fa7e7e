"""RMS norm of the rows of a 16-bit matrix: read once, kept in registers in f32, reduced over a whole block.

    y[row] = x[row] / sqrt(mean(x[row]²) + epsilon) · weight

New here: 16-bit tensors, and a reduction over more than one wave. Lanes of a wave read each other's registers, waves
do not: each leaves its sum in *shared memory*, a *barrier* waits until all have, and then every thread adds the few
sums. A block takes one row; a thread's part of it is vectors whose number is known at compile time: a Python list.
"""

import sys

import _device
import torch

import fly

THREADS, VECTOR = 256, 8


@fly.kernel
def rms_norm(x: fly.Tensor, weight: fly.Tensor, y: fly.Tensor, *, pieces: int, epsilon: float):
    """Grid: one block a row, of which a thread has `pieces` vectors, each next to its neighbour thread's."""
    piece = fly.Layout((THREADS, VECTOR), (VECTOR, 1))  # (thread, value) -> column within a piece of the row
    row, thread = fly.block_id.x, fly.thread_id.x

    def part(vector: fly.Tensor, i: int):
        """The thread's part of piece i; past the end of the row it reads as zero, and is not written."""
        return vector.tile(piece.size, i).share(piece, thread)

    values = [part(x[row, :], i).load().to(fly.f32) for i in range(pieces)]  # Python's range: unrolled
    squares = fly.lane_sum(sum(fly.reduce_sum(v * v) for v in values))  # of the wave, in each of its lanes

    waves = THREADS // fly.wave_size()
    sums = fly.SharedMemory("sums", "f32", waves)
    sums.store(squares, fly.wave_id())  # from every lane: the same number at the same place
    fly.barrier()
    mean = fly.reduce_sum(sums.load(0, length=waves)) / x.shape[1].to(fly.f32)

    scale = fly.rsqrt(mean + epsilon)
    for i, v in enumerate(values):
        scaled = v * scale * part(weight, i).load().to(fly.f32)
        part(y[row, :], i).store(scaled.to(y.dtype))


def normalise(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """The RMS norm of contiguous rows, in bf16 or f16."""
    y = torch.empty_like(x)
    pieces = -(-x.shape[1] // (THREADS * VECTOR))
    rms_norm[len(x), THREADS](x, weight, y, pieces=pieces, epsilon=epsilon)
    return y


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        matrix, vector = (fly.TensorSpec("bf16", rank, alignment=16, unit_stride=True) for rank in (2, 1))
        _device.show(rms_norm, matrix, vector, matrix, block=THREADS, pieces=2, epsilon=1e-6)
        return
    for dtype in (torch.bfloat16, torch.float16):
        for rows, columns in ((3, 100), (2, 2048), (5, 5000)):
            x, weight = (
                torch.randn(rows, columns, device=device).to(dtype),
                torch.rand(columns, device=device).to(dtype),
            )
            wide = x.double()
            exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
            bound = exact.abs().max().item() * torch.finfo(dtype).eps * 0.51  # one rounding to 16 bit
            _device.check(f"{dtype} {rows} x {columns}", normalise(x, weight), exact, bound)
    if device == "cuda":
        x, weight = torch.randn(16384, 4096, device=device).bfloat16(), torch.rand(4096, device=device).bfloat16()
        theirs = lambda: torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)  # noqa: E731
        _device.race(lambda: normalise(x, weight), theirs, work=2 * 2 * x.numel(), unit="B")


if __name__ == "__main__":
    main()
