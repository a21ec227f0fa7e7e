"""A linear layer with its activation: what is done to a matrix product before it leaves the registers.

    y (M, N) = gelu(x (M, K) · w (N, K)ᵀ + bias (N)),   gelu(v) = v / 2 · (1 + erf(v / √2))

New here: an *epilogue*. The accumulators are f32 values in registers, and the third example's `store` hands them over
run by run, contiguous columns that one lane holds, so that a function of (values, first column) is all there is to
write. Kernels are made of Python functions: the product itself is the third example's, unchanged.
"""

import importlib
import math
import sys

import _device
import torch

import fly

matmul = importlib.import_module("03_matmul")
THREADS = matmul.THREADS


def gelu(v: fly.Value) -> fly.Value:
    """The exact one, elementwise in f32."""
    return 0.5 * v * (1.0 + fly.erf(v * math.sqrt(0.5)))


@fly.kernel
def linear_gelu(x: fly.Tensor, w: fly.Tensor, bias: fly.Tensor, y: fly.Tensor, *, tiling: matmul.Tiling):
    """y = gelu(x wᵀ + bias). Grid: (tiles along N, tiles along M)."""

    def finish(values: fly.Value, column: fly.Value) -> fly.Value:
        return gelu(values + bias.load(column, length=len(values)).to(fly.f32))

    matmul.store(matmul.product(x, w, tiling), y, tiling, finish)


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x wᵀ + bias): contiguous, f16 or bf16; any M, N a multiple of 8, K one of 64."""
    tiling = matmul.Tiling()
    (m, k), n = x.shape, len(w)
    if k % tiling.k or n % 8:
        raise ValueError(f"K = {k} must be a multiple of {tiling.k}, N = {n} one of 8")
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    linear_gelu[(-(-n // tiling.n), -(-m // tiling.m)), THREADS](x, w, bias, y, tiling=tiling)
    return y


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        matrix, vector = (fly.TensorSpec("bf16", rank, alignment=16, unit_stride=True) for rank in (2, 1))
        _device.show(linear_gelu, matrix, matrix, vector, matrix, block=THREADS, tiling=matmul.Tiling())
        return

    def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        x, w, bias = (torch.randn(*shape, device=device) for shape in ((m, k), (n, k), (n,)))
        return x.to(dtype), (w / math.sqrt(k)).to(dtype), bias.to(dtype)

    def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w.T + bias)

    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in ((128, 128, 64), (70, 136, 128)):
            given = inputs(m, n, k, dtype)
            exact = reference(*(a.double() for a in given))
            bound = 2 * (reference(*given).double() - exact).abs().max().item() + 1e-5
            _device.check(f"{dtype} {m} x {n} x {k}", linear(*given), exact, bound)
    if device == "cuda":
        given = inputs(8192, 8192, 8192, torch.bfloat16)
        _device.race(lambda: linear(*given), lambda: reference(*given), work=2 * 8192**3, unit="FLOP")


if __name__ == "__main__":
    main()
