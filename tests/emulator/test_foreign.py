"""Code objects of another compiler run with every check on and match the reference."""

from __future__ import annotations

import math
import struct

import pytest

from fly.emulator import Program, Region

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.peers
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_triton_attention_forward(arch: str, d: int, causal: bool) -> None:
    from tests.emulator.triton_attention import ROWS, compile_attention

    compiled = compile_attention(arch, d, causal)
    program = Program(compiled.asm["hsaco"], arch)
    kernel = compiled.metadata.name
    heads, n = 2, 256
    torch.manual_seed(d)
    q, k, v = ((torch.rand(heads, n, d) * 2 - 1).bfloat16() for _ in range(3))
    out = torch.zeros_like(q)
    scale = d**-0.5
    pointers = [x.data_ptr() for x in (q, k, v, out)]
    packed = struct.pack("<QQQQfiii", *pointers, scale * math.log2(math.e), n * d, d, n)
    packed += b"\0" * (program.code.kernels[kernel].kernarg_bytes - len(packed))
    regions = [Region(x.data_ptr(), x.nbytes, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (out, "out"))]
    program.launch(kernel, (n // ROWS, heads), (256,), packed, regions, dynamic_lds=compiled.metadata.shared)
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
    weights = torch.softmax(scores, -1)
    exact = weights @ v.float()
    rounded = (weights.bfloat16() @ v).float()
    assert (out.float() - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 1e-5
