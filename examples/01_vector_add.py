"""Vector add: the smallest kernel. What a kernel is, who computes what, how it is launched.

A kernel is a Python function that runs once per configuration, on stand-ins for the values that the GPU will have;
what it does to them becomes the program. Positional parameters are the launch's arguments. Keyword-only parameters
are *static*: plain Python values, known when the kernel is compiled, and each combination is compiled once.

    python examples/01_vector_add.py            # on the GPU, or emulated; --compile only shows code
    cd examples; python -m fly inspect 01_vector_add:vector_add --args "f32[1] f32[1] f32[1]" --stage isa
"""

import sys

import _device
import torch

import fly

THREADS = 256


@fly.kernel
def vector_add(a: fly.Tensor, b: fly.Tensor, c: fly.Tensor, *, vector: int = 4):
    """c = a + b; every thread adds `vector` neighbouring elements, with one load and store of 16 bytes."""
    (threads, _, _) = fly.block_dim()  # static, as the block is part of what is compiled
    # a layout says who owns what: (thread, value) -> element of the block's tile, here thread * vector + value
    tile = fly.Layout((threads, vector), (vector, 1))
    block, thread = fly.block_id.x, fly.thread_id.x  # run-time values
    a_part, b_part, c_part = (x.tile(tile.size, block).share(tile, thread) for x in (a, b, c))
    c_part.store(a_part.load() + b_part.load())  # elements past the end read as zero and are not written


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b for contiguous f32 vectors of one length."""
    c = torch.empty_like(a)
    blocks = -(-len(a) // (THREADS * 4))
    vector_add[blocks, THREADS](a, b, c)  # compiles on the first call, and returns without waiting
    return c


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        vector = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)
        _device.show(vector_add, vector, vector, vector, block=THREADS)
        return
    for length in (1, 1000, 4096, 5003):
        a, b = (torch.randn(length, device=device) for _ in range(2))
        _device.check(f"length {length}", add(a, b), a + b, bound=0)
    if device == "cuda":
        a, b = (torch.randn(1 << 26, device=device) for _ in range(2))
        _device.race(lambda: add(a, b), lambda: a + b, work=3 * 4 * len(a), unit="B")


if __name__ == "__main__":
    main()
