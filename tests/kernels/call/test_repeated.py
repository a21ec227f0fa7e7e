"""Calls of q, k and v alone whose like there was: a shorter way to the same results, which refuses nothing itself."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels import flash_attn_interface
from kernels.flash_attn_api import flash_attn_func
from kernels.flash_attn_interface import flydsl_flash_attn_func, repeated


@pytest.fixture(autouse=True)
def emulated(emulate, monkeypatch):
    emulate("gfx950", "generic")
    monkeypatch.setattr(flash_attn_interface, "_plans", {})


def inputs(seed: int, length: int = 16, kv_heads: int = 2, value_dim: int = 64) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = ((2, 64), (kv_heads, 64), (kv_heads, value_dim))
    return [torch.randn(1, length, heads, dim, generator=drawn, dtype=torch.bfloat16) for heads, dim in shapes]


def the_long_way(monkeypatch, *given, **options):
    with monkeypatch.context() as patched:
        patched.setattr(flash_attn_interface, "repeated", lambda *_, **__: None)
        return flydsl_flash_attn_func(*given, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_lse": True},
        {"softmax_scale": 0.5},
        {"num_kv_splits": 2},
        {"num_kv_splits": 2, "return_lse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("value_dim", [64, 72])
def test_results_are_those_of_the_function(options, value_dim, monkeypatch, seed):
    first, second = (inputs(seed + n, 160, value_dim=value_dim) for n in range(2))
    assert repeated(*first, False, **options) is None, "there was none"
    flydsl_flash_attn_func(*first, False, **options)
    results, expected = repeated(*second, False, **options), the_long_way(monkeypatch, *second, False, **options)
    assert type(results) is type(expected)
    if isinstance(expected, torch.Tensor):
        results, expected = [results], [expected]
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype, f"seed {seed}"


@pytest.mark.parametrize("function", [flydsl_flash_attn_func, flash_attn_func], ids=lambda f: f.__name__)
def test_both_functions_go_by_it(function, monkeypatch, seed):
    given = inputs(seed)
    expected = function(*given, causal=True)
    monkeypatch.setattr(flash_attn_interface, "check_no_overlap", None)
    monkeypatch.setattr(flash_attn_interface, "_geometry", None)
    monkeypatch.setattr(flash_attn_interface, "plan_of", None)
    monkeypatch.setattr(flash_attn_interface, "check_call", None)
    assert torch.equal(function(*given, causal=True), expected), f"seed {seed}"


@pytest.mark.parametrize("function", [flydsl_flash_attn_func, flash_attn_func], ids=lambda f: f.__name__)
def test_a_mode_sees_the_memory_of_results(function, seed):
    given = [x.requires_grad_() for x in inputs(seed)]
    expected, dout = function(*given), torch.ones_like(given[0])
    gradients = torch.autograd.grad(expected, given, dout)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            seen.append(operation.name())
            return operation(*arguments, **(options or {}))

    with Mode():
        out = function(*given)
        forward = [*seen]
        found = torch.autograd.grad(out, given, dout)
    assert torch.equal(out, expected) and all(map(torch.equal, found, gradients)), f"seed {seed}"
    own = "fly::flash_attn"  # as which FlashAttention's function is seen
    assert own in forward if function is flash_attn_func else any("empty" in name for name in forward)
    assert any("empty" in name or name == f"{own}_backward" for name in seen[len(forward) :])


@pytest.mark.parametrize(
    "options",
    [{}, {"softmax_scale": 0.5}, {"softcap": 0.0, "window_size": (-1, -1), "bias": None, "deterministic": False}],
    ids=str,
)
def test_what_is_at_its_default_is_as_if_not_given(options, monkeypatch, seed):
    given = inputs(seed)
    expected = flydsl_flash_attn_func(*given, True, **options)
    monkeypatch.setattr(flash_attn_interface, "plan_of", None)
    monkeypatch.setattr(flash_attn_interface, "check_no_overlap", None)
    monkeypatch.setattr(flash_attn_interface.torch, "empty_like", None)  # the long way's
    q, k, v = given
    assert torch.equal(flydsl_flash_attn_func(v=v, k=k, q=q, causal=True, **options), expected), f"seed {seed}"


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.0, "softmax_scale": 0.5}, {"causal": True, "window_size": (-1, -1)}], ids=str
)
def test_flash_attentions_arguments_may_be_at_their_defaults(options, monkeypatch, seed):
    given = inputs(seed)
    expected = flash_attn_func(*given, **options)
    monkeypatch.setattr(flash_attn_interface, "plan_of", None)
    assert torch.equal(flash_attn_func(*given, **options), expected), f"seed {seed}"


def test_the_function_tells_its_arguments():
    names = [*inspect.signature(flydsl_flash_attn_func).parameters]
    assert names[:6] == ["q", "k", "v", "causal", "softmax_scale", "num_kv_heads"] and names[-1] == "names"
    with pytest.raises(TypeError, match=r"flydsl_flash_attn_func\(\) takes from 3 to 4 positional arguments"):
        flydsl_flash_attn_func(1, 2, 3, True, 0.5)
    with pytest.raises(TypeError, match=r"flydsl_flash_attn_func\(\) missing 1 required positional argument: 'v'"):
        flydsl_flash_attn_func(1, 2)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q[:, :8], k, v, True), {}),
        lambda q, k, v: ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v, True), {}),
        lambda q, k, v: ((q, k[:, :, :1], v[:, :, :1], True), {}),
        lambda q, k, v: ((q.half(), k.half(), v.half(), True), {}),
        lambda q, k, v: ((q, k.half(), v, True), {}),
        lambda q, k, v: ((unaligned(q), k, v, True), {}),
        lambda q, k, v: ((q, k, unaligned(v), True), {}),
        lambda q, k, v: ((q, k, v, False), {}),
        lambda q, k, v: ((q, k, v, True), {"softmax_scale": 0.5}),
        lambda q, k, v: ((q, k, v, True), {"num_kv_splits": 2}),
        lambda q, k, v: ((q, k, v, True), {"return_lse": True}),
        lambda q, k, v: ((torch.nn.Parameter(q), k, v, True), {}),
        lambda q, k, v: (([q], k, v, True), {}),
        lambda q, k, v: ((q.to("meta"), k, v, True), {}),
        lambda q, k, v: ((torch.stack((q, k, v), -3), None, None, True), {}),
        lambda q, k, v: ((q, k, v, True), {"softmax_scale": []}),
    ],
)
def test_another_kind_of_call_is_none(change, seed):
    given = inputs(seed)
    flydsl_flash_attn_func(*given)
    assert repeated(*given, True) is not None
    arguments, options = change(*given)
    assert repeated(*arguments, **options) is None


@pytest.mark.parametrize("variable, value", [("FLY_KERNEL", ""), ("FLY_ARCH", "gfx942")])
def test_nor_one_in_another_environment(variable, value, monkeypatch, seed):
    given = inputs(seed)
    flydsl_flash_attn_func(*given)
    monkeypatch.setenv(variable, value)
    assert repeated(*given, True) is None


def test_gradients_are_for_calls_whose_like_had_some(monkeypatch, seed):
    first, second = ([x.requires_grad_() for x in inputs(seed + n)] for n in range(2))
    with torch.no_grad():
        flydsl_flash_attn_func(*first, return_lse=True)
        assert repeated(*first, True, return_lse=True) is not None
    assert repeated(*first, True) is None, "whether there is a backward pass has not been checked"
    torch.autograd.grad(flydsl_flash_attn_func(*first).sum(), first)
    out = repeated(*second, True)
    expected = the_long_way(monkeypatch, *second)
    assert torch.equal(out, expected) and out.requires_grad
    found, wanted = (torch.autograd.grad(x.float().square().sum(), second) for x in (out, expected))
    assert all(map(torch.equal, found, wanted)), f"seed {seed}"
    with torch.no_grad():
        assert not repeated(*second, True, return_lse=True)[0].requires_grad


def test_gradients_of_the_lse_where_it_is_asked_for(monkeypatch, seed):
    given = [x.requires_grad_() for x in inputs(seed)]
    torch.autograd.grad(flydsl_flash_attn_func(*given, return_lse=True)[1].sum(), given)
    (_, lse), (_, expected) = (
        repeated(*given, True, return_lse=True),
        the_long_way(monkeypatch, *given, return_lse=True),
    )
    found, wanted = (torch.autograd.grad(x.sum(), given) for x in (lse, expected))
    assert all(map(torch.equal, found, wanted)), f"seed {seed}"


class _Nothing(torch.autograd.Function):
    """Its input, of which it gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_missing_gradient_is_zero(seed):
    given = [x.requires_grad_() for x in inputs(seed)]
    flydsl_flash_attn_func(*given).sum().backward()
    for x in given:
        x.grad = None
    _Nothing.apply(flydsl_flash_attn_func(*given)).sum().backward()
    assert not any(x.grad is not None and x.grad.any() for x in given)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"dropout_p": 2.0}, ArgumentError, "dropout_p"),
        ({"causal": 1}, ArgumentTypeError, "causal"),
        ({"window_size": (1, 2, 3)}, ArgumentError, "window_size"),
        ({"softcap": "1"}, ArgumentTypeError, "softcap"),
        ({"softmax_scale": -1.0}, ArgumentError, "softmax_scale"),
        ({"num_splits": 1000}, UnsupportedError, "num_splits"),
    ],
)
def test_bad_arguments_are_refused_after_a_good_call(options, error, said, seed):
    given = inputs(seed)
    for _ in range(2):
        flash_attn_func(*given, causal=True)
    with pytest.raises(error, match=said):
        flash_attn_func(*given, **{"causal": True, **options})


def test_tensors_that_need_copies_are_copied_after_calls_that_need_none(seed):
    q, k, v = inputs(seed)
    expected = flash_attn_func(q, k, v)
    apart = torch.empty(*q.shape, 2, dtype=q.dtype).select(-1, 0).copy_(q)
    assert torch.equal(flash_attn_func(apart, k, v), expected), f"seed {seed}"


def test_transforms_of_torch_are_refused_as_ever(seed):
    given = inputs(seed)
    flydsl_flash_attn_func(*given)
    with pytest.raises(ArgumentTypeError, match="functorch"):
        torch.func.vmap(flydsl_flash_attn_func)(*(x.unsqueeze(0) for x in given))
