"""States of attention merged: whatever the keys are split into, the result is attention to all of them."""

from __future__ import annotations

import math

import pytest
import torch

import fly_attention
from fly import config
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from fly_attention import flash_attn_func, merge_states
from kernels import merging
from kernels.integrations import flashinfer, vllm

LN2 = math.log(2)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


@pytest.fixture(autouse=True)
def emulated(monkeypatch, seed):
    torch.manual_seed(seed)
    monkeypatch.setenv(config.ARCH.name, "gfx950")
    monkeypatch.setenv(config.EMULATOR_CHECKS.name, "1")


def states(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list, list]:
    """outs of (..., S, H, D) and lses."""
    *batch, tokens, heads, _ = shape
    outs = [torch.randn(shape).to(dtype) for _ in range(count)]
    return outs, [4 * torch.randn(*batch, heads, tokens) for _ in range(count)]


def expected(outs, lses) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64; a state without keys has no lse but -inf."""
    lse = torch.logsumexp(torch.stack(list(lses)).double(), 0)
    total = torch.zeros(outs[0].shape, dtype=torch.float64)
    for out, own in zip(outs, lses):
        weight = torch.exp(own.double() - lse).nan_to_num(0.0).transpose(-1, -2)[..., None]
        total += torch.where(weight > 0, weight * out.double(), 0.0)
    return total, lse


def check(result, outs, lses, factor: float = 1.0) -> None:
    out, lse = result
    exact, exact_lse = expected(outs, [x * factor for x in lses])
    assert (out.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(out.dtype).eps + 1e-6
    torch.testing.assert_close(lse.double() * factor, exact_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_thousand_random_splits_are_the_whole(device):
    with torch.device(device):
        rows, keys, parts, head_dim = 1000, 12, 5, 16
        scores, values = 5 * torch.randn(rows, keys), torch.randn(rows, keys, head_dim)
        part_of = torch.randint(parts, (rows, keys)) % torch.randint(1, parts + 1, (rows, 1))
        outs, lses = torch.empty(parts, rows, 1, head_dim), torch.empty(parts, 1, rows)
        for part in range(parts):
            own = scores.masked_fill(part_of != part, -math.inf)
            lses[part, 0] = torch.logsumexp(own, -1)
            outs[part, :, 0] = (torch.softmax(own, -1)[..., None] * values).sum(1)  # NaN where there are no keys
        assert outs.isnan().any()
        lses[torch.logical_and(lses == -math.inf, torch.rand(lses.shape) < 0.5)] = math.inf
        out, lse = merge_states(outs, lses)
        whole = (torch.softmax(scores.double(), -1)[..., None] * values.double()).sum(1)
        assert (out[:, 0].double() - whole).abs().max() < 1e-5
        assert (lse[0].double() - torch.logsumexp(scores.double(), -1)).abs().max() < 1e-5


@pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90a"])
def test_other_targets(monkeypatch, arch):
    monkeypatch.setenv(config.ARCH.name, arch)
    outs, lses = states(2, 5, 2, 32)
    lses[0][0, 0] = math.inf
    outs[0][0, 0] = math.nan
    check(merge_states(outs, lses), outs, [lses[0].where(lses[0] < math.inf, -math.inf), lses[1]])


def test_parts_of_attention_are_the_whole():
    q, k, v = (torch.randn(2, s, 2, 32).bfloat16() for s in (5, 40, 40))
    parts = [flash_attn_func(q, k[:, at], v[:, at], return_attn_probs=True) for at in (slice(0, 7), slice(7, None))]
    out, lse = merge_states([part[0] for part in parts], [part[1] for part in parts])
    whole, whole_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.float() - whole.float()).abs().max() < 0.02
    torch.testing.assert_close(lse, whole_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", merging.DTYPES)
def test_states_apart_and_in_one_tensor_and_more_than_are_loaded_at_once(dtype):
    outs, lses = states(6, 9, 3, 24, dtype=dtype)
    out, lse = merge_states(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    check((out, lse), outs, lses)
    check(merge_states(torch.stack(outs), torch.stack(lses)), outs, lses)


def test_rows_without_any_keys():
    outs, lses = states(2, 4, 1, 32)
    lses = [torch.full_like(lses[0], -math.inf), torch.full_like(lses[0], math.inf)]
    out, lse = merge_states(outs, lses)
    assert not out.any() and (lse == -math.inf).all()


def test_any_strides_and_what_is_written():
    outs, lses = states(2, 2, 5, 3, 32)
    strided = [torch.stack([x, x], 3)[:, :, :, 0].transpose(0, 1).contiguous().transpose(0, 1) for x in outs]
    turned = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in lses]
    assert not any(x.is_contiguous() for x in (*strided, *turned))
    out = torch.full((2, 3, 5, 32), math.nan).transpose(1, 2)
    lse = torch.full((5, 2, 3), math.nan).permute(1, 2, 0)
    result = merge_states(strided, turned, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    check((out, lse), outs, lses)
    alone = merge_states(outs, lses, return_lse=False)
    assert alone[1] is None and torch.equal(alone[0], out.bfloat16())


def test_out_may_be_one_of_the_states():
    outs, lses = states(2, 300, 1, 32)
    wanted, _ = merge_states(outs, lses)
    out, _ = merge_states(outs, lses, out=outs[1])
    assert out is outs[1] and torch.equal(out, wanted)


def test_logarithms_of_base_2():
    outs, lses = states(2, 9, 3, 32)
    natural = merge_states(outs, lses)
    out, lse = merge_states(outs, [x / LN2 for x in lses], log2=True)
    check((out, lse), outs, [x / LN2 for x in lses], LN2)
    torch.testing.assert_close(lse * LN2, natural[1])


def test_compiled():
    outs, lses = states(2, 9, 3, 32)
    compiled = torch.compile(merge_states, backend="aot_eager", fullgraph=True)(outs, lses)
    assert all(torch.equal(a, b) for a, b in zip(compiled, merge_states(outs, lses)))


def test_nothing_to_merge():
    outs, lses = states(2, 0, 3, 32)
    out, lse = merge_states(outs, lses)
    assert out.shape == (0, 3, 32) and lse.shape == (3, 0)


@pytest.mark.parametrize("context", [None, 0, 4])
def test_vllms_function(context):
    (prefix, suffix), (prefix_lse, suffix_lse) = outs, lses = states(2, 9, 3, 32)
    output, output_lse = torch.full_like(prefix, math.nan), torch.full_like(prefix_lse, math.nan)
    vllm.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse, context)
    first = 9 if context is None else context
    assert torch.equal(output[first:], suffix[first:]) and torch.equal(output_lse[:, first:], suffix_lse[:, first:])
    if first:
        check((output[:first], output_lse[:, :first]), [x[:first] for x in outs], [x[:, :first] for x in lses])
    without = torch.empty_like(prefix)
    vllm.merge_attn_states(without, prefix, prefix_lse, suffix, suffix_lse, prefill_tokens_with_context=context)
    assert torch.equal(without, output)
    with pytest.raises(UnsupportedError, match="output_scale is not available"):
        vllm.merge_attn_states(without, prefix, prefix_lse, suffix, suffix_lse, output_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="prefill_tokens_with_context must be from 0 to 9, got 10"):
        vllm.merge_attn_states(without, prefix, prefix_lse, suffix, suffix_lse, None, 10)


def test_flashinfers_functions():
    outs, lses = states(3, 9, 2, 32)
    s = [x.transpose(0, 1).contiguous() / LN2 for x in lses]
    v, merged = flashinfer.merge_state(outs[0], s[0], outs[1], s[1])
    check((v, merged.transpose(0, 1)), outs[:2], [x.transpose(0, 1) for x in s[:2]], LN2)
    assert merged.is_contiguous()
    every, logs = flashinfer.merge_states(torch.stack(outs, 1), torch.stack(s, 1))
    check((every, logs.transpose(0, 1)), outs, [x.transpose(0, 1) for x in s], LN2)
    flashinfer.merge_state_in_place(outs[0], s[0], outs[1], s[1])
    assert torch.equal(outs[0], v) and torch.equal(s[0], merged)
    with pytest.raises(UnsupportedError, match="mask is not available"):
        flashinfer.merge_state_in_place(outs[0], s[0], outs[1], s[1], torch.ones(9, dtype=torch.bool))


def wrong(change):
    outs, lses = states(2, 9, 2, 32)
    return change(outs, lses)


MISTAKES = {
    "other number": (lambda o, s: (o, s[:1]), ArgumentError, "as many tensors, 1 to 16, got 2 and 1"),
    "none": (lambda o, s: ([], []), ArgumentError, "1 to 16, got 0 and 0"),
    "one stacked": (lambda o, s: (torch.stack(o), s[:1]), ArgumentError, "must be one tensor each"),
    "no list": (
        lambda o, s: (7, s),
        ArgumentTypeError,
        "outs must be a tensor of n states, or a list of tensors, got",
    ),
    "no tensor": (lambda o, s: ([1, 2], s), ArgumentTypeError, "outs must be a torch.Tensor, got int"),
    "rank": (lambda o, s: ([x[0] for x in o], s), ArgumentError, r"\(B, S, H, D\) or \(total, H, D\), got \(2, 32\)"),
    "head dim": (lambda o, s: ([x[..., :20] for x in o], s), ArgumentError, "multiple of 8 up to 2048, got 20"),
    "dtype": (lambda o, s: ([x.double() for x in o], s), ArgumentTypeError, "outs has dtype torch.float64; accepted"),
    "mixed": (
        lambda o, s: ([o[0], o[1].half()], s),
        ArgumentTypeError,
        "outs has dtype torch.float16; accepted: torch",
    ),
    "lse dtype": (lambda o, s: (o, [x.half() for x in s]), ArgumentTypeError, "lses has dtype torch.float16"),
    "lse shape": (
        lambda o, s: (o, [x.T for x in s]),
        ArgumentError,
        r"lses must have shape \(2, 9\) on cpu, got \(9, 2",
    ),
    "columns": (lambda o, s: ([x.mT.contiguous().mT for x in o], s), ArgumentError, "outs's last dimension must be"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_is_wrong(name):
    change, error, message = MISTAKES[name]
    for _ in range(2):
        with pytest.raises(error, match=f"merge_states: .*{message}"):
            merge_states(*wrong(change))


def test_memory_that_is_shared():
    outs, lses = states(2, 9, 2, 32)
    memory = torch.zeros(10, 2, 32).bfloat16()
    outs[0] = memory[1:]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="out must not share memory with one of outs, unless it is one"):
            merge_states(outs, lses, out=memory[:9])
        with pytest.raises(ArgumentError, match="lse must not share memory with one of lses: leave it out"):
            merge_states(outs, lses, lse=lses[0], out=torch.empty_like(outs[1]))
        with pytest.raises(ArgumentError, match="lse must not share memory with one of lses: leave it out"):
            merge_states(outs, lses, lse=lses[0])


def test_gradients_are_refused():
    outs, lses = states(2, 9, 2, 32)
    merge_states(outs, lses)
    with pytest.raises(UnsupportedError, match="merge_states: lses requires a gradient, but the backward is not"):
        merge_states(outs, [lses[0], lses[1].requires_grad_()])
    with torch.no_grad():
        merge_states(outs, lses)


def test_the_function_is_on_the_package():
    assert fly_attention.merge_states is merging.merge_states
