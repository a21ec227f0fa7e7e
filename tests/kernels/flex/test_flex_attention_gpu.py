"""`flex_attention` on a GPU against torch's own, with gradients: the masks and scores that people write."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

import fly_attention
from tests.kernels.gradient_reference import Gradients
from tests.kernels.reference import SLACK, max_difference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

HEADS, LENGTH = 4, 600


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return q - k < 200


def cases(generator):
    """(score_mod, mask_mod, captured tensors that learn)."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    documents = torch.arange(LENGTH, device="cuda") // 170
    table = torch.randn(HEADS, 2 * LENGTH, device="cuda", generator=generator).requires_grad_()
    return {
        "alibi": (lambda s, b, h, q, k: s - slopes[h] * (q - k), causal, ()),
        "softcap": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5), and_masks(causal, window), ()),
        "documents": (None, lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k), ()),
        "a learned table": (lambda s, b, h, q, k: s + table[h, q - k + LENGTH], None, (table,)),
    }


@pytest.mark.parametrize("name", ["alibi", "softcap", "documents", "a learned table"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_and_gradients(name, head_dim, generator, seed):
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    score_mod, mask_mod, learned = cases(generator)[name]
    shapes = [(2, heads, LENGTH, head_dim) for heads in (HEADS, HEADS // 2, HEADS // 2)]
    inputs = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
    mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cuda")
    dout = torch.randn(shapes[0], device="cuda", generator=generator).bfloat16()

    def run(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        asked = AuxRequest(lse=True)
        out, aux = function(*leaves, score_mod, mask, enable_gqa=True, return_aux=asked)
        return [out, *torch.autograd.grad(out, [*leaves, *learned], dout.to(dtype))], aux.lse

    (exact, exact_lse), (plain, _) = (run(torchs, dtype) for dtype in (torch.float32, torch.bfloat16))
    found, lse = run(fly_attention.flex_attention, torch.bfloat16)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1e-3)
    assert max_difference(found[0], exact[0]) <= 2 * max_difference(plain[0], exact[0]) + SLACK, f"seed {seed}"
    names = ("q", "k", "v", *["learned"] * len(learned))
    assert not Gradients(tuple(exact[1:]), tuple(plain[1:]), 2.0, names).wrong(found[1:]), f"seed {seed}"
