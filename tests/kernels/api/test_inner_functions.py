"""FlashAttention-2's inner functions: what their signatures are, and parts of attention that are put together."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, UnsupportedError
from kernels import flash_attn_api as api
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import gradients

REQUIRED = inspect.Parameter.empty
QKV = dict.fromkeys(("q", "k", "v"), REQUIRED)
OFFSETS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED)
COMMON = dict.fromkeys(("dropout_p", "softmax_scale", "causal"), REQUIRED)
WINDOW = ("window_size_left", "window_size_right", "softcap", "alibi_slopes")
GIVEN = {"dout": REQUIRED, **QKV, **dict.fromkeys(("out", "softmax_lse", "dq", "dk", "dv"), REQUIRED)}
# flash_attn/flash_attn_interface.py of FlashAttention 2.8
SIGNATURES = {
    "_flash_attn_forward": QKV | COMMON | dict.fromkeys((*WINDOW, "return_softmax"), REQUIRED),
    "_flash_attn_varlen_forward": QKV
    | OFFSETS
    | COMMON
    | {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    | {"return_softmax": False, "block_table": None, "leftpad_k": None, "seqused_k": None, "zero_tensors": False},
    "_flash_attn_backward": GIVEN
    | COMMON
    | dict.fromkeys((*WINDOW, "deterministic"), REQUIRED)
    | {"rng_state": None},
    "_flash_attn_varlen_backward": GIVEN
    | OFFSETS
    | COMMON
    | dict.fromkeys((*WINDOW, "deterministic"), REQUIRED)
    | {"rng_state": None, "zero_tensors": False},
}


@pytest.fixture(autouse=True)
def gfx950(emulate):
    torch.compiler.reset()
    emulate("gfx950", "generic")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_flash_attention_2s(name):
    parameters = inspect.signature(getattr(api, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == list(SIGNATURES[name].items())
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of all keys, of those of disjoint parts."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    out = sum(out.float() * (part - lse).exp().mT[..., None] for out, part in parts)
    return out.to(parts[0][0].dtype), lse


@pytest.mark.parametrize("head_dim", [32, 20])
def test_parts_of_the_keys_add_up(head_dim, seed):
    inputs = Inputs(queries=[20], keys=[30], heads=2, kv_heads=1, head_dim=head_dim, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    scale = head_dim**-0.5
    # what a ring hands on: each keeps its queries and gets the others' keys
    places = slice(0, 14), slice(14, 30)
    parts = []
    for place in places:
        out, lse, mask, rng_state = api._flash_attn_forward(
            q, k[:, place], v[:, place], 0.0, scale, False, -1, -1, 0.0, None, False
        )
        assert mask.shape == rng_state.shape == (0,)
        parts.append((out, lse))
    out, lse = merged(parts)
    dq, dk, dv = (
        torch.zeros_like(q, dtype=torch.float32),
        torch.full_like(k, torch.nan),
        torch.full_like(v, torch.nan),
    )
    for place in places:
        part = torch.full_like(q, torch.nan)
        # into views of larger tensors
        api._flash_attn_backward(
            *(dout, q, k[:, place], v[:, place], out, lse, part, dk[:, place], dv[:, place]),
            *(0.0, scale, False, -1, -1, 0.0, None, True, rng_state),
        )
        dq += part.float()
    assert not gradients(q, k, v, False, dout).wrong((dq.to(q.dtype), dk, dv)), f"seed {seed}"


def packed(seed: int) -> tuple[Any, ...]:
    """(inputs, q, k, v, dout, offsets and lengths) of two sequences, with tokens behind them."""
    inputs = Inputs(queries=[9, 5], keys=[9, 5], heads=2, kv_heads=2, head_dim=32, packed=True, seed=seed)
    q, k, v, dout = inputs.floats(4, 17, 2, 32, dtype=torch.bfloat16)
    offsets = inputs.form()["cu_seqlens_q"]
    return q, k, v, dout, (offsets, offsets, 9, 9)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_packed_gradients_are_autograds_and_nothing_else_is_written(dropout_p, seed):
    q, k, v, dout, places = packed(seed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {"causal": True, "window_size": (4, -1), "dropout_p": dropout_p}
    torch.manual_seed(seed)
    autograd = torch.autograd.grad(api.flash_attn_varlen_func(*leaves, *places, **options), leaves, dout)
    scale = 32**-0.5
    torch.manual_seed(seed)
    out, lse, _, rng_state = api._flash_attn_varlen_forward(
        q, k, v, *places, dropout_p, scale, causal=True, window_size_left=4, window_size_right=0
    )
    # with strides that kernels do not write to
    found = [torch.full((17, 2, 33), 7.0, dtype=q.dtype)[..., 1:] for _ in range(3)]
    softmax_d = api._flash_attn_varlen_backward(
        *(dout, q, k, v, out, lse, *found, *places, dropout_p, scale, True, 4, 0, 0.0, None, False, rng_state)
    )
    assert all(torch.equal(x[:14], y[:14]) for x, y in zip(found, autograd, strict=True)), f"seed {seed}"
    assert all((x[14:] == 7.0).all() for x in found)
    exact = (dout[:14].double() * out[:14].double()).sum(-1).mT
    torch.testing.assert_close(softmax_d[:, :14].double(), exact, rtol=1e-4, atol=1e-4)


def test_parts_without_keys_have_gradients_of_zero():
    q, k = zeros(1, 4, 2, 32), zeros(1, 0, 2, 32)
    out, lse, _, _ = api._flash_attn_forward(q, k, k, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    dq = torch.full_like(q, torch.nan)
    given = (torch.ones_like(q), q, k, k, out, lse, dq, torch.empty_like(k), torch.empty_like(k))
    softmax_d = api._flash_attn_backward(*given, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    assert not dq.any() and not softmax_d.any() and softmax_d.shape == (1, 2, 4)


def test_compiled_parts_are_the_eager_ones(seed):
    q, k, v, dout, places = packed(seed)

    def both(q, k, v, dout, offsets):
        at = (offsets, offsets, 9, 9)
        out, lse, _, rng_state = api._flash_attn_varlen_forward(q, k, v, *at, 0.0, 0.2, True, 4)
        found = [torch.zeros_like(x) for x in (q, k, v)]
        softmax_d = api._flash_attn_varlen_backward(
            *(dout, q, k, v, out, lse, *found, *at, 0.0, 0.2, True, 4, -1, 0.0, None, True, rng_state)
        )
        return *found, softmax_d[:, :14] * 1.0

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(q, k, v, dout, places[0]), both(q, k, v, dout, places[0]), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs), f"seed {seed}"


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q = zeros(1, 4, 2, 32)
LSE = zeros(1, 2, 4, dtype=torch.float32)
FORWARD = dict.fromkeys("qkv", Q) | {"dropout_p": 0.0, "softmax_scale": 1.0, "causal": False, "softcap": 0.0}
FORWARD |= {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None, "return_softmax": False}
BACKWARD = {name: value for name, value in FORWARD.items() if name != "return_softmax"} | {"deterministic": True}
BACKWARD |= {"dout": Q, "out": Q, "softmax_lse": LSE}
REFUSED = [
    ({"window_size_left": -2}, ArgumentError, "window_size_left must be from -1 to 2147483647, got -2"),
    ({"window_size_right": None}, ArgumentTypeError, "window_size_right must be an int, got None (NoneType)"),
    ({"k": zeros(1, 4, 3, 32), "v": zeros(1, 4, 3, 32)}, ArgumentError, "q's heads must be a multiple of k's heads"),
]
OF_FORWARD = [({"return_softmax": True}, UnsupportedError, "return_softmax is not available: pass False")]
OF_BACKWARD = [
    ({"dq": None}, ArgumentTypeError, "dq must be a torch.Tensor, got NoneType"),
    ({"dropout_p": 0.1}, ArgumentError, "rng_state is None with dropout: pass what the forward function gave"),
    ({"rng_state": 3}, ArgumentTypeError, "rng_state must be a torch.Tensor, got int"),
    ({"dk": zeros(1, 4, 1, 32)}, ArgumentError, "dk must have shape (1, 4, 2, 32) on cpu, got (1, 4, 1, 32) on cpu"),
    ({"dv": zeros(1, 4, 2, 40)}, ArgumentError, "dv must have shape (1, 4, 2, 32) on cpu, got (1, 4, 2, 40) on cpu"),
    (
        {"softmax_lse": LSE.double()},
        ArgumentTypeError,
        "softmax_lse has dtype torch.float64; accepted: torch.float32",
    ),
    ({"dout": Q.half()}, ArgumentTypeError, "dout has dtype torch.float16; accepted: torch.bfloat16"),
    ({"dq": Q}, ArgumentError, "dq must not share memory with dout: pass a tensor of its own"),
    ({"deterministic": 1}, ArgumentTypeError, "deterministic must be True or False, got 1 (int)"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED + OF_FORWARD)
def test_what_the_forward_function_does_not_take_is_refused_by_name(changes, kind, message):
    with pytest.raises(FlyError, match=re.escape(f"_flash_attn_forward: {message}")) as caught:
        api._flash_attn_forward(**FORWARD | changes)
    assert caught.type is kind


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED[:2] + OF_BACKWARD)
def test_what_the_backward_function_does_not_take_is_refused_by_name(changes, kind, message):
    results = {name: torch.empty_like(Q) for name in ("dq", "dk", "dv")}
    with pytest.raises(FlyError, match=re.escape(f"_flash_attn_backward: {message}")) as caught:
        api._flash_attn_backward(**BACKWARD | results | changes)
    assert caught.type is kind


def test_zeroed_results_are_refused_by_name():
    q, k, v, _, places = packed(0)
    with pytest.raises(UnsupportedError, match="zero_tensors is not available: pass False"):
        api._flash_attn_varlen_forward(q, k, v, *places, 0.0, 1.0, False, zero_tensors=True)
