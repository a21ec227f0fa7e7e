"""torch's scaled_dot_product_attention on fly, on a GPU: results and gradients of what its flash backend takes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import fly_attention
from tests.kernels.gradient_reference import Gradients
from tests.kernels.reference import SLACK, max_difference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

# (queries, keys, query heads, key heads)
SHAPES = [(512, 512, 4, 4), (1, 700, 8, 2), (130, 1000, 8, 1), (999, 999, 4, 2), (64, 64, 1, 1)]
MASKS = ["full", "causal", "lower right"]
CASES = [
    (shape, mask, head_dim)
    for shape, mask, head_dim in itertools.product(SHAPES, MASKS, (64, 80, 128, 256))
    if mask != "causal" or shape[0] == shape[1]
]


def table(dtype, generator):
    """(case, result or gradient, error, bound) of every case."""
    for (queries, keys, heads, kv_heads), mask, head_dim in CASES:
        shapes = (2, heads, queries, head_dim), (2, kv_heads, keys, head_dim), (2, kv_heads, keys, head_dim)
        inputs = [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]
        dout = torch.randn(shapes[0], device="cuda", generator=generator).to(dtype)
        seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
        seen = seen if mask == "full" else seen.tril(keys - queries)

        def exact(dtype, inputs=inputs, dout=dout, seen=seen, heads=heads):
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
            q, k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in leaves)
            scores = (q * q.shape[-1] ** -0.5) @ k.mT
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
            return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

        leaves = [x.requires_grad_() for x in inputs]
        asked = {"is_causal": mask == "causal", "enable_gqa": heads != kv_heads}
        if mask == "lower right":
            asked["attn_mask"] = causal_lower_right(queries, keys)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*leaves, **asked)
            found = torch.autograd.grad(out, leaves, dout)
        case = f"{queries} x {keys}, heads {heads}:{kv_heads}, D={head_dim}, {mask}"
        plain, right = exact(dtype), exact(torch.float64)
        yield case, "out", max_difference(out, right[0]), 2 * max_difference(plain[0], right[0]) + SLACK
        for row in Gradients(tuple(right[1:]), tuple(plain[1:]), slack=2.0).errors(found):
            yield case, *row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_form_is_right(dtype, generator, seed):
    fly_attention.activate()
    try:
        rows = list(table(dtype, generator))
    finally:
        fly_attention.deactivate()
    worst: dict[str, tuple[float, str]] = {}
    for case, name, error, bound in rows:
        worst[name] = max(worst.get(name, (0.0, "")), (error / bound, case))
    print(f"{dtype}: {len(rows)} results; largest error of the bound: {worst}")
    wrong = [row for row in rows if not row[2] <= row[3]]
    assert not wrong, f"seed {seed}: {wrong}"
