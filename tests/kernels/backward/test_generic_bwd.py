"""The generic backward kernels: gradients of calls against autograd through the reference, where there is no GPU.

In the emulators of both AMD GPUs and in the simulator of sm_90a, with every check on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fly import config
from fly.backends.target import target, targets
from fly.errors import ShapeError, UnsupportedError
from fly.runtime.launch import bindings
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.generic.backward import BackwardOptions, options_for
from kernels.generic.operands import padded
from kernels.problem.contract import HEAD_DIMS
from kernels.problem.features import Features
from kernels.work import tile_scheduler
from tests.kernels.backward.planted import forget
from tests.kernels.feature_cases import Inputs, by_head, stripes
from tests.kernels.gradient_reference import by_autograd, gradients


def lengths(inputs: Inputs) -> dict[str, int]:
    return {"max_seqlen_q": max(inputs.queries), "max_seqlen_kv": max(inputs.keys)} if inputs.packed else {}


Options = Callable[[Inputs], dict[str, Any]]
CASES: dict[str, tuple[dict[str, Any], bool, Options]] = {
    "full, different lengths": ({"queries": [70], "keys": [150], "head_dim": 64}, False, lambda i: {}),
    "causal, rows without keys": ({"queries": [150], "keys": [70], "head_dim": 64}, True, lambda i: {}),
    "heads share keys, softcap": (
        {"queries": [40] * 2, "keys": [40] * 2, "heads": 4, "kv_heads": 2, "head_dim": 128},
        True,
        lambda i: {"softcap": 3.0},
    ),
    "packed, empty sequences": (
        {"queries": [0, 33, 1, 60], "keys": [20, 33, 0, 90], "packed": True, "head_dim": 72, "dtype": "f16"},
        True,
        lambda i: {},
    ),
    "lengths in use": (
        {"queries": [40] * 2, "keys": [80] * 2, "head_dim": 40, "head_dim_v": 8},
        False,
        lambda i: {
            "seqused_q": torch.tensor([40, 7], dtype=torch.int32),
            "seqused_kv": torch.tensor([0, 35], dtype=torch.int32),
        },
    ),
    "windows and slopes": (
        {"queries": [170], "keys": [170], "heads": 2, "kv_heads": 2, "head_dim": 32},
        False,
        lambda i: {"window_size": (40, 5), "alibi_slopes": i.floats(2).abs()},
    ),
    "bias and sinks": (
        {"queries": [50], "keys": [60], "head_dim": 96},
        False,
        lambda i: {"bias": i.floats(1, 2, 50, 60), "sink": i.floats(2)},
    ),
    "functions": (
        {"queries": [50], "keys": [60], "head_dim": 64},
        False,
        lambda i: {"score_mod": by_head, "mask_mod": stripes, "aux_tensors": (i.floats(2, 60),)},
    ),
    "a mask, rows in parts": (
        {"queries": [90], "keys": [140], "head_dim": 96},
        True,
        lambda i: {"mask_mod": stripes},
    ),
    "narrow heads, rows in parts": (
        {"queries": [130], "keys": [100], "heads": 4, "kv_heads": 2, "head_dim": 24},
        True,
        lambda i: {},
    ),
    "wide heads, other values": (
        {"queries": [40], "keys": [140], "head_dim": 192, "head_dim_v": 128},
        True,
        lambda i: {"attention_chunk": 30},
    ),
    "columns that tiles lack": (
        {"queries": [40], "keys": [70], "head_dim": 208, "head_dim_v": 216},
        True,
        lambda i: {},
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90a"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_references(name, arch, emulate, seed):
    emulate(arch, "generic")
    sizes, causal, options_of = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    q, k, v = inputs.tensors()
    options = {**inputs.form(), **options_of(inputs)}
    dout = inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    dlse = inputs.floats(*q.shape[:-3], q.shape[-2], q.shape[-3])
    if "seqused_q" in options:
        # what is not in use has results of no meaning, whose gradients have none
        dout[1, 7:], dlse[1, :, 7:] = torch.nan, torch.nan
    found = by_autograd(q, k, v, causal, dout, dlse, **options, **lengths(inputs))
    dout, dlse = dout.nan_to_num(0.0), dlse.nan_to_num(0.0)
    assert not gradients(q, k, v, causal, dout, dlse, **options).wrong(found), f"seed {seed}"


def small(**sizes: Any) -> tuple[Inputs, tuple[torch.Tensor, ...]]:
    inputs = Inputs(**{"queries": [40], "keys": [40], "heads": 2, "kv_heads": 2, "head_dim": 64, **sizes})
    return inputs, inputs.tensors()


@pytest.fixture
def gfx950(emulate):
    emulate("gfx950", "generic")


def test_results_are_the_same_bits_every_time(gfx950, seed):
    inputs, (q, k, v) = small(queries=[90], keys=[90], heads=4, seed=seed)
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    first, second = (by_autograd(q, k, v, True, dout, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("form", ["expanded", "transposed", "shifted", "alone"])
def test_gradients_of_results_may_have_any_strides(form, gfx950, seed):
    inputs, (q, k, v) = small(seed=seed)
    dout = {
        "expanded": lambda: torch.ones((), dtype=q.dtype).expand(q.shape),
        "transposed": lambda: inputs.floats(*q.mT.shape, dtype=q.dtype).mT,
        "shifted": lambda: inputs.floats(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape),
        # a stride that no element is away from another
        "alone": lambda: inputs.floats(*q.shape, dtype=q.dtype).as_strided(q.shape, (3, *q.stride()[1:])),
    }[form]()
    found = by_autograd(q, k, v, True, dout, None)
    assert not gradients(q, k, v, True, dout).wrong(found), f"seed {seed}"


def test_a_loss_of_the_log_sum_exp_alone(gfx950, seed):
    inputs, (q, k, v) = small(seed=seed)
    dlse = inputs.floats(1, 2, 40)
    dq, dk, dv = by_autograd(q, k, v, True, None, dlse)
    assert not dv.any()
    assert not gradients(q, k, v, True, torch.zeros_like(q), dlse).wrong((dq, dk, dv)), f"seed {seed}"


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_calls_without_queries_or_keys_have_gradients_of_zero(queries, keys, gfx950):
    _, (q, k, v) = small(queries=[queries], keys=[keys])
    assert not any(x.any() for x in by_autograd(q, k, v, True, torch.ones_like(q), None))


def test_tokens_outside_of_all_sequences_have_gradients_of_zero(gfx950, seed):
    inputs, _ = small(queries=[20], keys=[20], packed=True, seed=seed)
    q, k, v = inputs.floats(3, 30, 2, 64, dtype=torch.bfloat16)
    poison = torch.full((1 << 20,), torch.nan)  # what the allocator may give again
    del poison
    options = {**inputs.form(), **lengths(inputs)}
    found = by_autograd(q, k, v, True, inputs.floats(30, 2, 64, dtype=q.dtype), None, **options)
    assert not any(x[20:].any() for x in found)


def test_views_of_one_tensor_get_its_gradient(gfx950, seed):
    inputs, _ = small(seed=seed)
    qkv = inputs.floats(1, 40, 3, 2, 64, dtype=torch.bfloat16).requires_grad_()
    dout = inputs.floats(1, 40, 2, 64, dtype=qkv.dtype)
    flydsl_flash_attn_func(*qkv.unbind(2)).backward(dout)
    assert not gradients(*qkv.detach().unbind(2), True, dout).wrong(qkv.grad.unbind(2)), f"seed {seed}"


def test_gradients_of_gradients_are_refused(gfx950):
    _, (q, k, v) = small()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flydsl_flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="it has no second derivative; detach it"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": torch.empty(1, 40, 2, 64, dtype=torch.bfloat16)}, "out is given where a gradient is needed"),
        ({"workspace": torch.empty(16)}, "workspace is given where a gradient is needed: leave it out"),
        ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, "alibi_slopes requires a gradient, and has none"),
    ],
)  # fmt: skip
def test_what_has_no_gradient_is_refused_by_name(options, message, gfx950):
    _, (q, k, v) = small()
    with pytest.raises(UnsupportedError, match=message):
        flydsl_flash_attn_func(q.requires_grad_(), k, v, **options)


def test_keys_in_pages_have_no_gradient(gfx950, monkeypatch):
    monkeypatch.delenv(config.BACKWARD_KERNEL.name)
    _, (q, k, v) = small(keys=[64])
    options = {
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seqused_kv": torch.tensor([3], dtype=torch.int32),
    }
    with pytest.raises(
        UnsupportedError,
        match=r"no backward kernel serves this call on target gfx950: .*; the generic kernel does not do keys",
    ):
        flydsl_flash_attn_func(q, k.requires_grad_(), v, **options)


def test_numbers_of_8_bits_have_no_gradient(emulate):
    emulate("gfx950", "gfx950")
    q, k, v = (x.to(torch.float8_e4m3fn) for x in small(head_dim=128)[1])
    with pytest.raises(UnsupportedError, match=r"q requires a gradient, and torch\.float8_e4m3fn has none"):
        flydsl_flash_attn_func(q.requires_grad_(), k, v)


def test_grids_fold_where_there_are_more_heads_or_sequences_than_places(emulate, monkeypatch, seed):
    emulate("sm_90a", "generic")
    monkeypatch.setattr(tile_scheduler, "MAX_GRID_YZ", 3)
    forget(monkeypatch)
    inputs = Inputs([5] * 5, [20] * 5, heads=11, kv_heads=11, seed=seed)
    q, k, v = inputs.tensors()
    dout, sink = inputs.floats(*q.shape, dtype=q.dtype), inputs.floats(11).requires_grad_()
    leaves = [*(x.requires_grad_() for x in (q, k, v)), sink]
    with bindings() as bound:
        found = torch.autograd.grad(flydsl_flash_attn_func(*leaves[:3], sink=sink), leaves, dout)
    # 55 heads of sequences in 3 * 19 places, two of them spare; fewer heads may all have a sink of small error
    assert {binding.grid[1:] for binding in bound} == {(3, 19)} and len(bound) == 5
    assert not gradients(q, k, v, True, dout, of=["sink"], sink=sink).wrong(found), f"seed {seed}"


@pytest.mark.parametrize("arch", [t.arch for t in targets()])
def test_every_head_dimension_has_builds_that_fit(arch):
    description = target(arch)
    for head_dim, value_dim in itertools.chain(zip(HEAD_DIMS, HEAD_DIMS), itertools.product((8, 128, 256), (8, 256))):
        of_keys, of_queries = options_for(description, head_dim, value_dim, True)
        assert sorted(name for options in of_keys for name in options.results) == ["dk", "dv"]
        for kernel, builds in (("dkdv", of_keys), ("dq", (of_queries,))):
            for options in builds:
                assert options.block_bytes(kernel, description.wave_size) <= description.shared_bytes
                pieces = options.block_n * min(padded(head_dim), padded(value_dim)) // options.vector
                assert pieces >= options.waves * description.wave_size


@pytest.mark.parametrize(
    ("arch", "kernel", "head_dim", "causal", "features", "packed"),
    [
        ("sm_80", "dkdv", 64, True, Features(), True),
        ("sm_80", "dkdv", 128, True, Features(), True),
        ("sm_80", "dq", 128, True, Features(("window_left", "window_right")), False),
        ("sm_80", "dq", 128, False, Features(("alibi_slopes",)), False),
        ("sm_80", "dkdv", 256, False, Features(), True),
        ("sm_86", "dkdv", 64, True, Features(), True),
        ("sm_89", "dkdv", 64, True, Features(), True),
        ("sm_86", "dq", 128, False, Features(), True),
        ("sm_89", "dq", 128, True, Features(), True),
    ],
)
def test_tiles_have_half_the_rows_where_builds_would_spill(arch, kernel, head_dim, causal, features, packed):
    """What `python -m benchmarks.registers` found; sm_90a has registers for the whole tiles."""

    def rows(arch: str, packed: bool, features: Features) -> int:
        given = target(arch), head_dim, head_dim, causal, features, False, packed
        of_keys, of_queries = options_for(*given)
        return (of_queries if kernel == "dq" else of_keys[0]).block_n

    assert rows(arch, packed, features) * 2 == rows(arch, False, Features())
    assert rows("sm_90a", packed, features) == rows("sm_90a", False, features)


OPTIONS = BackwardOptions(64, 64, False, 64, 32, 4, 2, resident="shared")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vector": 3}, "vector is 3; expected 1, 2, 4 or 8 elements"),
        ({"waves": 3}, "block_m 64 does not divide into 3 waves"),
        ({"resident": "memory"}, "resident is 'memory'; expected 'registers' or 'shared'"),
        ({"stages": 1}, "rows in shared memory need asynchronous copies: two stages or more, not 1"),
        ({"results": ("dq",)}, r"results is \('dq',\); expected 'dk', 'dv' or both"),
    ],
)
def test_options_that_no_build_has(changes, message):
    with pytest.raises(ShapeError, match=message):
        replace(OPTIONS, **changes)
