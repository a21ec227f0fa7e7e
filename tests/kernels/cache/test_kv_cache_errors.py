"""What a caller of `append_to_cache` can get wrong, and what the message says."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, ShapeError, UnsupportedError
from kernels.arguments.checks import Checks
from kernels.cache import kv_cache
from kernels.cache.kv_cache import append_to_cache
from kernels.cache.rotary import Rotary

B, SQ, NEW, S, H, HKV, D = 2, 5, 3, 32, 6, 3, 64
TYPE, VALUE = ArgumentTypeError, ArgumentError


def tensor(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def numbers(*shape, dtype=torch.int32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def good():
    return {
        "q": tensor(B, SQ, H, D),
        "k_cache": tensor(B, S, HKV, D),
        "v_cache": tensor(B, S, HKV, D),
        "k": tensor(B, NEW, HKV, D),
        "v": tensor(B, NEW, HKV, D),
        "rotary_cos": tensor(S, 16),
        "rotary_sin": tensor(S, 16),
        "cache_seqlens": numbers(B),
    }


def fake_tensor():
    with FakeTensorMode():
        return tensor(B, SQ, H, D)


def transposed(*shape):
    return tensor(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


TABLES = {"rotary_cos": None, "rotary_sin": None}

# name: (what replaces a good call's arguments, error class, what the message says)
MISTAKES = {
    # types, devices, ranks, dtypes
    "q is a list": ({"q": [1.0]}, TYPE, "q must be a torch.Tensor, got list"),
    "k_cache is None": ({"k_cache": None}, TYPE, "k_cache must be a torch.Tensor, got NoneType"),
    "v is numpy": ({"v": np.zeros((B, NEW, HKV, D))}, TYPE, "v must be a torch.Tensor, got ndarray"),
    "q is fake": ({"q": fake_tensor()}, TYPE, "q is a FakeTensor, which has no memory of its own"),
    "q is sparse": ({"q": tensor(B, SQ, H, D).to_sparse()}, TYPE, "q is of layout torch.sparse_coo; a dense"),
    "q on meta": ({"q": tensor(B, SQ, H, D, device="meta")}, VALUE, "q is on device 'meta'; accepted: cuda, cpu"),
    "q of rank 3": ({"q": tensor(SQ, H, D)}, VALUE, "q must have 4 dimensions (B, Sq, H, D), got shape (5, 6, 64)"),
    "k_cache of rank 3": (
        {"k_cache": tensor(B, S, D)},
        VALUE,
        "k_cache must have 4 dimensions (B_cache, S_cache, Hkv, D), got shape (2, 32, 64)",
    ),
    "pages of rank 3": (
        {"v_cache": tensor(B, S, D), "block_table": numbers(B, 1)},
        VALUE,
        "v_cache must have 4 dimensions (num_pages, page_size, Hkv, D), got",
    ),
    "k of rank 5": ({"k": tensor(1, B, NEW, HKV, D)}, VALUE, "k must have 4 dimensions (B, S_new, Hkv, D), got"),
    "q is float32": (
        {"q": tensor(B, SQ, H, D, dtype=torch.float32)},
        TYPE,
        "q has dtype torch.float32; accepted: torch.bfloat16, torch.float16",
    ),
    "v_cache of another dtype": (
        {"v_cache": tensor(B, S, HKV, D, dtype=torch.float16)},
        TYPE,
        "v_cache must have q's dtype torch.bfloat16, got torch.float16",
    ),
    "rotary_sin of another dtype": (
        {"rotary_sin": tensor(S, 16, dtype=torch.float16)},
        TYPE,
        "rotary_sin must have q's dtype torch.bfloat16, got torch.float16",
    ),
    "rotary_cos is float32": (
        {"rotary_cos": tensor(S, 16, dtype=torch.float32)},
        TYPE,
        "rotary_cos has dtype torch.float32; accepted:",
    ),
    # strides
    **{
        f"{name} is transposed": (
            {name: transposed(*shape)},
            VALUE,
            f"{name}'s last dimension must be contiguous (stride 1), got strides",
        )
        for name, shape in {"q": (B, SQ, H, D), "v_cache": (B, S, HKV, D), "rotary_cos": (S, 16)}.items()
    },
    # shapes
    "caches that differ": (
        {"v_cache": tensor(B, S + 1, HKV, D)},
        VALUE,
        "k_cache and v_cache must have the same shape up to head_dim, got k_cache (2, 32, 3, 64) and v_cache (2, 33,",
    ),
    "no heads": (
        {name: tensor(B, S, 0, D) for name in ("k_cache", "v_cache")},
        VALUE,
        "k must have shape (2, 3, 0, 64) (q's batch, k's tokens",
    ),
    "q's head_dim is 0": ({"q": tensor(B, 1, HKV, 0)}, VALUE, "q's head_dim must be from 1 to 1024, got 0"),
    "v_cache's head_dim is 1032": (
        {"v_cache": tensor(B, S, HKV, 1032)},
        VALUE,
        "v_cache's head_dim must be from 1 to 1024, got 1032",
    ),
    "head_dims that differ": ({"q": tensor(B, SQ, H, 72)}, VALUE, "k_cache must have q's head_dim 72, got 64"),
    "k of another batch": (
        {"k": tensor(B + 1, NEW, HKV, D)},
        VALUE,
        "k must have shape (2, 3, 3, 64) (q's batch, k's tokens and the cache's heads and head_dim), got (3, 3, 3,",
    ),
    "k of other heads": (
        {"k": tensor(B, NEW, H, D)},
        VALUE,
        "k must have shape (2, 3, 3, 64) (q's batch, k's tokens",
    ),
    "v of other tokens": (
        {"v": tensor(B, NEW + 1, HKV, D)},
        VALUE,
        "v must have shape (2, 3, 3, 64) (q's batch, k's",
    ),
    "v of another head_dim": ({"v": tensor(B, NEW, HKV, 72)}, VALUE, "v must have shape (2, 3, 3, 64) (q's batch"),
    "many tokens": (
        {"q": tensor(D).expand(B, 2**25, 2**6, D)},
        VALUE,
        "q may have 2147418112 tokens times heads in a sequence, got 33554432 * 64",
    ),
    "many new tokens": (
        {name: tensor(D).expand(B, 2**30, HKV, D) for name in "kv"},
        VALUE,
        "k may have 2147418112 tokens times heads in a sequence, got 1073741824 * 3",
    ),
    "k_cache overlaps itself": (
        {"k_cache": tensor(1, S, HKV, D).expand(B, S, HKV, D)},
        VALUE,
        "k_cache must not overlap itself, got shape (2, 32, 3, 64) with strides (0, 192, 64, 1)",
    ),
    # what goes together
    "k alone": ({"v": None}, VALUE, "k and v go together, got only k"),
    "v alone": ({"k": None}, VALUE, "k and v go together, got only v"),
    "rotary_cos alone": ({"rotary_sin": None}, VALUE, "rotary_cos and rotary_sin go together, got only rotary_cos"),
    "tables without k": ({"k": None, "v": None}, VALUE, "rotary_cos and rotary_sin need k and v: without new tokens"),
    "no lengths": (
        {"cache_seqlens": None},
        VALUE,
        "k and v need cache_seqlens, the tokens that sequences have so far",
    ),
    # tables
    "tables that differ": (
        {"rotary_sin": tensor(S + 1, 16)},
        VALUE,
        "rotary_cos and rotary_sin must have one shape, got (32, 16) and (33, 16)",
    ),
    **{
        f"rotary_dim {2 * columns}": (
            {name: tensor(S, columns) for name in TABLES},
            VALUE,
            "rotary_dim, twice the columns of rotary_cos, must be a multiple of 16 from 16 to q's head_dim 64, got "
            f"{2 * columns}",
        )
        for columns in (0, 4, 12, 40)
    },
    "rotary_cos of rank 1": (
        {"rotary_cos": tensor(16)},
        VALUE,
        "rotary_cos must have 2 dimensions (positions, rotary_dim / 2), got shape (16,)",
    ),
    # lengths, indices, pages
    "a negative length": ({"cache_seqlens": -1}, VALUE, "cache_seqlens must be from 0 to 2147483647, got -1"),
    "a negative length, nothing to do": (
        {"cache_seqlens": -1, "k": None, "v": None} | TABLES,
        VALUE,
        "cache_seqlens must be from 0 to 2147483647, got -1",
    ),
    "a length that is True": ({"cache_seqlens": True}, TYPE, "cache_seqlens must be an int, got True (bool)"),
    "a length that is a float": ({"cache_seqlens": 1.0}, TYPE, "cache_seqlens must be a torch.Tensor, got float"),
    **{
        f"{name} of int64": (
            {name: numbers(B, dtype=torch.int64)},
            TYPE,
            f"{name} has dtype torch.int64; accepted: torch.int32",
        )
        for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad")
    },
    **{
        f"{name} of another batch": (
            {name: numbers(B + 1)},
            VALUE,
            f"{name} must have q's batch of 2 entries, got 3",
        )
        for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad")
    },
    "cache_seqlens of rank 2": (
        {"cache_seqlens": numbers(B, 1)},
        VALUE,
        "cache_seqlens must have 1 dimensions (B,), got shape (2, 1)",
    ),
    "block_table of rank 1": (
        {"block_table": numbers(B)},
        VALUE,
        "block_table must have 2 dimensions (B, pages of a sequence), got shape (2,)",
    ),
    "block_table of another batch": (
        {"block_table": numbers(3, 4)},
        VALUE,
        "block_table must have q's batch of 2 rows, got 3",
    ),
    "block_table of int64": (
        {"block_table": numbers(B, 1, dtype=torch.int64)},
        TYPE,
        "block_table has dtype torch.int64",
    ),
    "pages without tokens": (
        {"block_table": numbers(B, 1)} | {name: tensor(B, 0, HKV, D) for name in ("k_cache", "v_cache")},
        VALUE,
        "pages need at least one token, got k_cache (2, 0, 3, 64)",
    ),
    # flags
    "rotary_interleaved is 1": (
        {"rotary_interleaved": 1},
        TYPE,
        "rotary_interleaved must be True or False, got 1 (int)",
    ),
    "rotate_each_query is None": (
        {"rotate_each_query": None},
        TYPE,
        "rotate_each_query must be True or False, got None (NoneType)",
    ),
}


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    """No call of this module may get as far as a launch."""

    def launch(*arguments):
        raise AssertionError("a bad call was launched")

    monkeypatch.setattr(kv_cache, "_prepare", launch)
    monkeypatch.setattr(kv_cache, "_plans", {})


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    changes, error, message = MISTAKES[name]
    with pytest.raises(error, match=re.escape(message)) as raised:
        append_to_cache(**(good() | changes))
    assert type(raised.value) is error and str(raised.value).startswith("append_to_cache: ")


@pytest.mark.parametrize("name", ["q", "k_cache", "v", "cache_seqlens"])
def test_what_only_stands_for_a_tensor_is_not_asked_for_its_address(name, monkeypatch):
    asked = []
    monkeypatch.setattr(FakeTensor, "data_ptr", asked.append, raising=False)
    with pytest.raises(TYPE, match=f"{name} is a FakeTensor, which has no memory of its own"):
        append_to_cache(**(good() | {name: fake_tensor()}))
    assert not asked


def test_errors_are_the_standard_ones_too():
    assert issubclass(VALUE, ValueError) and issubclass(TYPE, TypeError) and issubclass(TYPE, FlyError)


@pytest.mark.parametrize("change", [{}, {"cache_seqlens": 3}, TABLES, {"block_table": numbers(B, 1)}])
def test_the_good_call_is_good(change):
    with pytest.raises(AssertionError, match="a bad call was launched"):
        append_to_cache(**(good() | change))


@pytest.mark.parametrize("name", [*good(), "cache_batch_idx", "cache_leftpad"])
def test_devices_that_differ(name, monkeypatch):
    if name == "q":
        pytest.skip("the others are compared with it")
    monkeypatch.setattr("kernels.arguments.checks.DEVICE_TYPES", ("cpu", "meta"))
    call = good() | {"cache_batch_idx": numbers(B), "cache_leftpad": numbers(B)}
    call[name] = call[name].to("meta")
    with pytest.raises(ArgumentError, match=f"{name} must be on q's device cpu, got meta"):
        append_to_cache(**call)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["q", "k", "v", "rotary_cos", "cache_seqlens"])
def test_caches_share_memory(cache, name):
    call = good()
    memory = call[cache].view(-1)[64:].view(call[name].dtype)
    call[name] = memory[: call[name].numel()].view(call[name].shape)
    with pytest.raises(ArgumentError, match=f"{cache} must not share memory with {name}; pass a copy of {name}"):
        append_to_cache(**call)


def test_one_tensor_for_both_caches():
    call = good()
    call["v_cache"] = call["k_cache"]
    with pytest.raises(ArgumentError, match="k_cache must not share memory with v_cache"):
        append_to_cache(**call)
    halves = tensor(B, S, HKV, 2 * D)
    call["k_cache"], call["v_cache"] = halves[..., :D], halves[..., D - 8 : -8]
    with pytest.raises(ArgumentError, match="k_cache must not share memory with v_cache"):
        append_to_cache(**call)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin"])
def test_backward_is_not_available(name):
    call = good()
    call[name].requires_grad_()
    with pytest.raises(UnsupportedError, match=f"append_to_cache: {name} requires a gradient, but the backward is"):
        append_to_cache(**call)
    with torch.no_grad(), pytest.raises(AssertionError, match="a bad call was launched"):
        append_to_cache(**call)


def test_vmap():
    call = good()
    q = call.pop("q")
    with pytest.raises(ArgumentTypeError, match="q is inside a functorch transform"):
        torch.vmap(lambda x: append_to_cache(q=x, **call))(q[None])


@pytest.mark.parametrize("dim", [0, -16, 8, 24])
def test_rotary_dims(dim):
    with pytest.raises(ShapeError, match=f"rotary dim is {dim}; expected a positive multiple of 16"):
        Rotary(dim, interleaved=False)


def test_the_function_is_named():
    with pytest.raises(ArgumentError, match=r"^some_function: x must be from 1 to 3, got 4$"):
        Checks("some_function").whole("x", 4, 1, 3)
