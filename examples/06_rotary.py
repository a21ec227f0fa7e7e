"""Rotary position embedding: pairs of a head's elements are turned by an angle that grows with the token's position.

    angle[j] = position · frequency[j]                                                   for j below D / 2
    y[j], y[j + D/2] = x[j] cos - x[j + D/2] sin,  x[j + D/2] cos + x[j] sin

New here: fixing coordinates of a tensor (`x[token, :, :]` is a matrix of heads), windows of its rows, and mathematics
that is right to the last digits: `fly.sin` reduces angles of any size that positions make, so no table of sines is
read. A thread turns `VECTOR` pairs at a time: it loads two runs of a row, half a head apart.
"""

import sys

import _device
import torch

import fly

THREADS, VECTOR = 128, 8


@fly.kernel
def rotary(x: fly.Tensor, positions: fly.Tensor, frequencies: fly.Tensor, y: fly.Tensor, *, head_dim: int):
    """y = x (tokens, heads, head_dim), turned. Grid: a block a token, whose threads share its heads' pairs."""
    token, half = fly.block_id.x, head_dim // 2
    heads = x.shape[1]
    position = positions.load(token).to(fly.f32)
    # all heads of the token: rows of head_dim elements; offsets in it are 32 bits, and its vectors aligned
    source, target = (t[token, :, :].rows(head_dim).window(0, None) for t in (x, y))
    runs = half // VECTOR  # of a head
    for run in fly.range(fly.thread_id.x, heads * runs, THREADS):
        head, first = run // runs, run % runs * VECTOR
        angle = position * frequencies.load(first, length=VECTOR)
        cos, sin = fly.cos(angle), fly.sin(angle)
        a, b = (source.load(head, first + at, VECTOR).to(fly.f32) for at in (0, half))
        target.store((a * cos - b * sin).to(y.dtype), head, first)
        target.store((b * cos + a * sin).to(y.dtype), head, first + half)


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """x (tokens, heads, head_dim), whose last stride is 1 and head_dim a multiple of 16, turned by i32 positions."""
    head_dim = x.shape[-1]
    y = torch.empty_like(x)
    frequencies = base ** -(torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / head_dim)
    rotary[len(x), THREADS](x, positions, frequencies, y, head_dim=head_dim)
    return y


def reference(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """The same in float64, of angles that are products in float32."""
    head_dim = x.shape[-1]
    frequencies = base ** -(torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / head_dim)
    angle = (positions.float()[:, None] * frequencies).double()[:, None, :]
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        heads, positions, frequencies = (
            fly.TensorSpec(dtype, rank, alignment=16, unit_stride=True)
            for dtype, rank in (("bf16", 3), ("i32", 1), ("f32", 1))
        )
        _device.show(rotary, heads, positions, frequencies, heads, block=THREADS, head_dim=128)
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens, heads, head_dim, last in ((5, 3, 64, 100), (2, 8, 128, 2_000_000)):
            x = torch.randn(tokens, heads, head_dim, device=device).to(dtype)
            positions = torch.randint(last, (tokens,), device=device, dtype=torch.int32)
            exact = reference(x, positions)
            bound = exact.abs().max().item() * torch.finfo(dtype).eps * (4 if dtype is torch.float32 else 0.51)
            _device.check(f"{dtype} {tokens} x {heads} x {head_dim}", rotate(x, positions), exact, bound)
    if device == "cuda":
        x = torch.randn(16384, 32, 128, device=device).bfloat16()
        positions = torch.arange(len(x), device=device, dtype=torch.int32)
        _device.race(lambda: rotate(x, positions), lambda: x.clone(), work=2 * 2 * x.numel(), unit="B")


if __name__ == "__main__":
    main()
