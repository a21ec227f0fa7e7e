"""Gradients of biases, sinks and auxiliary tensors against autograd through the reference, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fly
from fly.backends.target import target
from fly.errors import DerivativeError, DTypeError, UnsupportedError
from fly.runtime.launch import bindings
from kernels.flash_attn_api import flash_attn_func
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_cases import Inputs, Pair, by_head, stripes
from tests.kernels.gradient_reference import gradients, with_leaves

Options = Callable[[Inputs], dict[str, Any]]


def found(inputs: Inputs, causal: bool, of: Sequence[str], dout: Any, dlse: Any, **options: Any) -> Any:
    """Those of q, k, v and what `of` names of a call's `options`."""
    options, more = with_leaves(options, of)
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    longest = {"max_seqlen_q": max(inputs.queries), "max_seqlen_kv": max(inputs.keys)} if inputs.packed else {}
    results = flydsl_flash_attn_func(*leaves, causal, return_lse=True, **options, **longest)
    return torch.autograd.grad(results, [*leaves, *more], [dout, dlse])


def wrong(inputs: Inputs, causal: bool, of: Sequence[str], **options: Any) -> list[str]:
    state = inputs.generator.get_state()
    q, k, v = inputs.tensors()
    options |= inputs.form()
    dout = inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    # of one sign: what all of a head's rows share is then a sum that grows faster than its error
    dlse = inputs.floats(*q.shape[:-3], q.shape[-2], q.shape[-3]).abs()
    if (used := options.get("seqused_q")) is not None:
        for b, length in enumerate(used.tolist()):
            dout[b, length:], dlse[b, :, length:] = torch.nan, torch.nan
    inputs.generator.set_state(state)
    got = found(inputs, causal, of, dout, dlse, **options)
    return gradients(q, k, v, causal, dout.nan_to_num(0.0), dlse.nan_to_num(0.0), of, **options).wrong(got)


def by_key_and_head(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any, factors: Any) -> Any:
    """A product of what is loaded twice, by the key and by the head alone."""
    return score * factors[head] + table[head, key] * factors[head]


Case = tuple[dict[str, Any], bool, tuple[str, ...], Options]
CASES: dict[str, Case] = {
    "of every score, behind a softcap, and sinks": (
        {"queries": [20], "keys": [42]},
        True,
        ("bias", "sink"),
        lambda i: {"bias": i.floats(1, 2, 20, 42), "sink": i.floats(2, dtype=torch.bfloat16), "softcap": 3.0},
    ),
    "shared by sequences and heads, before a function": (
        # heads enough that plain attention's error, the bound of a number of each head, is not small by chance
        {"queries": [20] * 2, "keys": [48] * 2, "heads": 24, "kv_heads": 2},
        False,
        ("bias", "aux_tensors"),
        lambda i: {
            "bias": i.floats(20, 48, dtype=torch.bfloat16),
            "score_mod": by_key_and_head,
            "mask_mod": stripes,
            "aux_tensors": (i.floats(24, 48), i.floats(24, dtype=torch.float16)),
        },
    ),
    "of keys, rows without keys": (
        {"queries": [70], "keys": [33]},
        True,
        ("bias",),
        lambda i: {"bias": i.floats(1, 2, 1, 33)},
    ),
    "of keys and of what a function loads, tiles of 32 keys": (
        {"queries": [40], "keys": [70], "head_dim": 96},
        True,
        ("bias", "aux_tensors"),
        lambda i: {"bias": i.floats(2, 1, 70), "score_mod": by_head, "aux_tensors": (i.floats(2, 70),)},
    ),
    "of queries": (
        {"queries": [20], "keys": [40]},
        False,
        ("bias",),
        lambda i: {"bias": i.floats(1, 1, 20, 1)},
    ),
    "of one query": (
        {"queries": [1], "keys": [40], "head_dim": 128},
        False,
        ("bias", "sink"),
        lambda i: {"bias": i.floats(2, 1, 40), "sink": i.floats(2)},
    ),
    "lengths in use": (
        {"queries": [40] * 2, "keys": [40] * 2},
        False,
        ("bias", "sink"),
        lambda i: {
            "bias": i.floats(2, 2, 40, 40),
            "sink": i.floats(2),
            "seqused_q": torch.tensor([40, 7], dtype=torch.int32),
            "seqused_kv": torch.tensor([0, 35], dtype=torch.int32),
        },
    ),
    "packed, with more rows than a part of a sum": (
        # heads enough that plain attention's error, the bound, is not small by chance
        {"queries": [0, 33, 520], "keys": [20, 0, 9], "heads": 12, "kv_heads": 2, "packed": True},
        False,
        ("sink", "aux_tensors"),
        lambda i: {"sink": i.floats(12), "score_mod": by_head, "aux_tensors": (i.floats(12, 20),)},
    ),
}


# each way to memory on each target, and all cases where they are traced and not compiled
PLACES = [
    ("gfx942", "of every score, behind a softcap, and sinks"),
    ("gfx942", "of keys, rows without keys"),
    ("gfx950", "of keys and of what a function loads, tiles of 32 keys"),
    ("gfx950", "shared by sequences and heads, before a function"),
    *(("sm_90a", name) for name in CASES),
]


@pytest.mark.parametrize(("arch", "name"), PLACES)
def test_gradients_of_operands_are_the_references(arch, name, emulate, seed):
    emulate(arch, "generic")
    sizes, causal, of, options = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    assert not wrong(inputs, causal, of, **options(inputs)), f"seed {seed}"


def bent(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Steeper above zero, by a branch at run time."""
    return fly.cond(score > 0.0, lambda: score * 2.0, lambda: score * 0.5)


def bent_bwd(gradient: Any, score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return gradient * fly.select(score > 0.0, 2.0, 0.5)


BENT = Pair(bent, lambda score, *at: torch.where(score > 0, 2 * score, score / 2))


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_a_derivative_by_hand_is_the_references(arch, emulate, seed):
    emulate(arch, "generic")
    inputs = Inputs([20], [42], seed=seed)
    options = {"bias": inputs.floats(1, 2, 20, 42), "softcap": 3.0}
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    kernel, more = with_leaves(options, ["bias"])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flydsl_flash_attn_func(*leaves, score_mod=BENT.kernel, score_mod_bwd=bent_bwd, **kernel)
    got = torch.autograd.grad(out, [*leaves, *more], dout)
    expected = gradients(q.detach(), k.detach(), v.detach(), True, dout, of=["bias"], score_mod=BENT.torch, **options)
    assert not expected.wrong(got), f"seed {seed}"


def test_a_function_with_a_branch_needs_a_derivative_by_hand(simulated):
    q, k, v = Inputs([20], [40]).tensors()
    out = flydsl_flash_attn_func(q.requires_grad_(), k, v, score_mod=bent)
    with pytest.raises(DerivativeError, match=r"has no derivative.*give the derivative yourself \(score_mod_bwd\)"):
        out.sum().backward()


def test_what_a_function_loads_has_no_gradient_by_hand(simulated):
    q, k, v = Inputs([20], [40]).tensors()
    options = {"score_mod": by_head, "score_mod_bwd": lambda gradient, *rest: gradient}
    with pytest.raises(UnsupportedError, match=r"aux_tensors\[0\] requires a gradient, and has none"):
        flydsl_flash_attn_func(q, k, v, aux_tensors=[torch.zeros(2, 40, requires_grad=True)], **options)


def test_a_derivative_that_is_no_number_is_named(simulated):
    q, k, v = Inputs([20], [40]).tensors()
    out = flydsl_flash_attn_func(q.requires_grad_(), k, v, score_mod=bent, score_mod_bwd=lambda *_: None)
    with pytest.raises(DTypeError, match=r"score_mod_bwd .* returned None; expected a float"):
        out.sum().backward()


@pytest.fixture
def simulated(emulate):
    emulate("sm_90a", "generic")


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_biases_that_are_broadcast_have_the_same_bits_where_torch_is_deterministic(simulated, deterministic, seed):
    bias = Inputs([20], [40], seed=seed).floats(1, 2, 1, 40)
    inputs = Inputs([20] * 3, [40] * 3, seed=seed)
    assert not wrong(inputs, False, ("bias",), bias=bias), f"seed {seed}"
    q, k, v = inputs.tensors()
    bias.requires_grad_()
    loss = flydsl_flash_attn_func(q, k, v, bias=bias).square().sum()
    first, again = (torch.autograd.grad(loss, bias, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_sums_by_atomic_additions_are_refused_where_torch_is_deterministic(simulated, deterministic):
    q, k, v = Inputs([20], [40]).tensors()
    tables = torch.zeros(2, 40), torch.zeros(2, 40, requires_grad=True)
    loss = flydsl_flash_attn_func(
        q, k, v, score_mod=lambda s, b, h, i, j, mine, other: s + other[h, j], aux_tensors=tables
    ).sum()
    with pytest.raises(UnsupportedError, match=r"aux_tensors\[1\] requires a gradient, which is a sum of atomic"):
        loss.backward(retain_graph=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=r"aux_tensors\[1\] requires a gradient, which is a sum of atomic"):
        loss.backward()
    assert tables[1].grad is not None


def test_what_a_head_s_scores_share_is_summed_before_it_is_added(simulated):
    q, k, v = Inputs([20], [40]).tensors()
    factors = torch.ones(2, requires_grad=True)
    with bindings() as bound:
        out = flydsl_flash_attn_func(
            q, k, v, score_mod=lambda s, b, h, i, j, of: s * of[h] + of[h], aux_tensors=(factors,)
        )
        out.sum().backward()
    dq = bound[-1]
    traced = str(dq.kernel.trace(dq.specs, dq.statics, target("sm_90a"), dq.block))
    # one in the loop over whole tiles, one in the loop over others
    assert traced.count("fly.atomic_add") == 2


def test_an_auxiliary_tensor_of_a_mask_has_a_gradient_of_zero(simulated):
    q, k, v = Inputs([20], [40]).tensors()
    table = torch.ones(40, requires_grad=True)
    out = flydsl_flash_attn_func(q, k, v, mask_mod=lambda b, h, i, j, of: of[j] > 0, aux_tensors=(table,))
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient.shape == table.shape and not gradient.any()


def test_sinks_of_a_call_without_keys_have_the_gradient_of_the_log_sum_exp(simulated, seed):
    inputs = Inputs([6] * 2, [0] * 2, seed=seed)
    q, k, v = inputs.tensors()
    sink, dlse = inputs.floats(2).requires_grad_(), inputs.floats(2, 2, 6)
    _, lse = flydsl_flash_attn_func(q, k, v, sink=sink, return_lse=True)
    lse.backward(dlse)
    torch.testing.assert_close(sink.grad, dlse.sum((0, 2)))


def test_learnable_sinks_learn(simulated, seed):
    # heads enough that plain attention's error, the bound of a number of each head, is not small by chance
    inputs = Inputs([20], [20], heads=24, kv_heads=12, seed=seed)
    q, k, v = inputs.tensors()
    sink, dout = inputs.floats(24), inputs.floats(*q.shape, dtype=q.dtype)
    options, (leaf,) = with_leaves({"learnable_sink": sink}, ["learnable_sink"])
    flash_attn_func(q, k, v, **options).backward(dout)
    expected = gradients(q, k, v, False, dout, of=("sink",), sink=sink)
    zeros = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    assert [line for line in expected.wrong((*zeros, leaf.grad)) if "sink" in line] == [], f"seed {seed}"
