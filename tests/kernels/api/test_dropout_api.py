"""Dropout of FlashAttention's functions, of vLLM's and of transformers': the same masks, and S_dmask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from fly_attention.problem.dropout_mask import dropout_mask, random_state
from kernels import flash_attn_api as api
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.integrations import transformers as hub
from tests.kernels.feature_cases import Inputs


@pytest.fixture(autouse=True)
def gfx950(emulate):
    emulate("gfx950", "generic")


def drawn(seed: int) -> torch.Tensor:
    """What the next call draws, of a generator with this seed."""
    torch.manual_seed(seed)
    state = random_state(torch.device("cpu"))
    torch.manual_seed(seed)
    return state


@pytest.mark.parametrize("packed", [False, True])
def test_probabilities_have_the_sign_of_the_mask(packed, seed):
    """Out is their product with the values, and where nothing is seen they are 0."""
    queries, keys = ([20, 0, 33], [40, 3, 33]) if packed else ([20, 20], [40, 40])
    head_dim = 32 if packed else 21
    inputs = Inputs(queries, keys, 4, 2, head_dim, packed=packed, seed=seed)
    q, k, v = inputs.tensors()
    state, options = drawn(seed), {"dropout_p": 0.4, "causal": True, "softcap": 5.0, "return_attn_probs": True}
    if packed:
        form = inputs.form()
        lengths = (form["cu_seqlens_q"], form["cu_seqlens_kv"], max(queries), max(keys))
        out, _, shown = api.flash_attn_varlen_func(q, k, v, *lengths, **options)
    else:
        out, _, shown = api.flash_attn_func(q, k, v, **options)
    shape = (len(queries), 4, max(queries), max(keys))
    assert shown.shape == shape and shown.dtype == q.dtype
    mask, tokens = dropout_mask(state, shape, 0.4), (0, 0)
    for b, (n, m) in enumerate(zip(queries, keys, strict=True)):
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n).expand(4, -1, -1)
        weights, kept = shown[b, :, :n, :m].double(), mask[b, :, :n, :m]
        assert torch.equal(weights > 0, kept & seen) and torch.equal(weights < 0, ~kept & seen), f"seed {seed}"
        assert not shown[b, :, n:].any() and not shown[b, :, :, m:].any()
        values = (v[tokens[1] : tokens[1] + m] if packed else v[b]).double().repeat_interleave(2, 1).transpose(0, 1)
        found = (out[tokens[0] : tokens[0] + n] if packed else out[b]).double().transpose(0, 1)
        tokens = tokens[0] + n, tokens[1] + m
        torch.testing.assert_close((weights.clamp_min(0) @ values) * 256 / 154, found, rtol=0.02, atol=0.05)
        assert torch.allclose(weights.abs().sum(-1), torch.ones(4, n).double(), atol=0.02)


def test_without_dropout_there_are_no_probabilities(seed):
    q, k, v = Inputs([5], [5], seed=seed).tensors()
    assert not api.flash_attn_func(q, k, v, return_attn_probs=True)[2].numel()


def test_probabilities_of_pages_are_refused():
    pages = torch.zeros(2, 16, 1, 32, dtype=torch.float16)
    q, offsets = torch.zeros(3, 2, 32, dtype=torch.float16), torch.tensor([0, 3], dtype=torch.int32)
    table = torch.zeros(1, 2, dtype=torch.int32)
    message = r"flash_attn_varlen_func: probabilities are not available with keys in pages \(block_table\)"
    with pytest.raises(UnsupportedError, match=message):
        api.flash_attn_varlen_func(
            q, pages, pages, offsets, offsets, 3, 3, dropout_p=0.5, return_attn_probs=True, block_table=table
        )


def test_probabilities_are_refused_while_torch_compiles(monkeypatch):
    q = torch.zeros(1, 5, 2, 32, dtype=torch.float16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    message = "flash_attn_func: return_attn_probs with dropout_p is not available while torch compiles"
    with pytest.raises(UnsupportedError, match=message):
        api.flash_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True)


def test_layers_of_transformers_drop_in_training(seed):
    q, k, v = Inputs([30], [30], 2, 2, 32, seed=seed).tensors()
    q.requires_grad_()
    state = drawn(seed)
    layers = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = hub.attention_forward(SimpleNamespace(is_causal=True), *layers, None, dropout=0.1)
    assert torch.equal(out, flydsl_flash_attn_func(q, k, v, dropout_p=0.1, rng_state=state))
    out.sum().backward()
    assert q.grad.any()


def test_compiled_calls_draw_outside_of_the_operation(seed):
    q, k, v = Inputs([20], [20], 2, 2, 32, seed=seed).tensors()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(lambda *x: api.flash_attn_func(*x, dropout_p=0.5), backend=backend, fullgraph=True)
        state = drawn(seed)
        out = compiled(q, k, v)
        assert torch.equal(out, flydsl_flash_attn_func(q, k, v, False, dropout_p=0.5, rng_state=state))
        assert not torch.equal(out, compiled(q, k, v))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("randint" in name for name in called) and any("flash_attn" in name for name in called)
    torch._dynamo.reset()


def test_operations_draw_nothing(seed):
    q, k, v = Inputs([5], [5], seed=seed).tensors()
    with pytest.raises(ArgumentError, match=r"torch\.ops\.fly\.flash_attn draws nothing: dropout_p needs rng_state"):
        torch.ops.fly.flash_attn(q, k, v, False, dropout_p=0.5)
