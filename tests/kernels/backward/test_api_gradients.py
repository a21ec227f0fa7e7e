"""Gradients through FlashAttention's functions, in the emulator."""

from __future__ import annotations

import pytest
import torch

from kernels import flash_attn_api as api
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import gradients

FUNCTIONS = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_flash_attentions_functions(name, emulate, seed):
    emulate("gfx950", "generic")
    packed = "varlen" in name
    lengths = [30, 20] if packed else [50]
    head_dim = 64 if packed else 21  # that is no multiple of 8: padded
    inputs = Inputs(queries=lengths, keys=lengths, heads=2, kv_heads=2, head_dim=head_dim, packed=packed, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    if "qkvpacked" in name:
        together = (torch.stack([q, k, v], -3).requires_grad_(),)
    elif "kvpacked" in name:
        together = (q.clone().requires_grad_(), torch.stack([k, v], -3).requires_grad_())
    else:
        together = tuple(x.clone().requires_grad_() for x in (q, k, v))
    options = {}
    if packed:
        offsets = inputs.form()["cu_seqlens_q"]
        one = "qkvpacked" in name
        options = {"cu_seqlens": offsets} if one else {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen": 30} if one else {"max_seqlen_q": 30, "max_seqlen_k": 30}
    getattr(api, name)(*together, causal=True, window_size=(15, -1), deterministic=True, **options).backward(dout)
    found = [g for x in together for g in ([x.grad] if x.grad.dim() == q.dim() else x.grad.unbind(-3))]
    expected = gradients(q, k, v, True, dout, window_size=(15, -1), **inputs.form())
    assert not expected.wrong(found), f"seed {seed}"
