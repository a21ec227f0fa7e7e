"""Errors of FlashAttention's functions: in the names of the function that was called, whatever found the mistake."""

from __future__ import annotations

import pickle
import re
import warnings

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, UnsupportedError
from kernels import flash_attn_api as api
from kernels.arguments.callers import CALLERS, FUNC, KVCACHE, VARLEN, arg, plain, problem
from tests.kernels.api.api_calls import (
    APPENDED,
    BF16,
    CACHE,
    CALLS,
    FP8,
    HUB,
    IN_PAGES,
    KV,
    OFFSETS,
    PAGES,
    QKV,
    TABLE,
    VL,
    VL_KV,
    VL_QKV,
    VLLM,
    K,
    Q,
    call,
    int32,
    zeros,
)


@pytest.fixture(autouse=True)
def inference(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    torch.compiler.reset()
    with torch.no_grad():
        yield


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([zeros(2, 3), zeros(3, 3)], layout=layout)


# (function, what replaces a good call's arguments, what the message says after the function's name)
NAMED = [
    ("flash_attn_func", {"seqused_k": int32(1)}, "seqused_k must hold 2 contiguous int32 numbers"),
    ("flash_attn_func", {"learnable_sink": zeros(3)}, "learnable_sink must have one entry a query head"),
    ("flash_attn_func", {"num_splits": -1}, "num_splits must be at least 0, got -1"),
    ("flash_attn_func", {"k": zeros(2, 8, 3, 32), "v": zeros(2, 8, 3, 32)}, "q's heads must be a multiple of k's"),
    (
        KV,
        {"kv": zeros(2, 8, 2, 3, 32)},
        "q's heads must be a multiple of kv[:, :, 0]'s heads, got q 4 and kv[:, :, 0]",
    ),
    (KV, {"kv": zeros(3, 8, 2, 2, 32)}, "q and kv[:, :, 0] must have the same batch, got q 2 and kv[:, :, 0] 3"),
    (KV, {"kv": zeros(2, 8, 2, 2, 32, dtype=torch.float16)}, "kv[:, :, 0] must have q's dtype torch.bfloat16"),
    (QKV, {"qkv": zeros(2, 8, 3, 2, 32, dtype=torch.float32)}, "qkv[:, :, 0] has dtype torch.float32; accepted:"),
    (VL, {"cu_seqlens_k": OFFSETS.long()}, "cu_seqlens_k must hold batch + 1 contiguous int32 offsets"),
    (VL, {"cu_seqlens_k": int32(0, 6)}, "cu_seqlens_q and cu_seqlens_k must have the same length, got 3 and 2"),
    (VL, {"cu_seqlens_q": None}, "cu_seqlens_q must be a torch.Tensor, got NoneType"),
    (VL, {"max_seqlen_k": -1}, "max_seqlen_k must be from 0 to 2147483647, got -1"),
    (VL, {"max_seqlen_k": None}, "packed sequences need max_seqlen_k, the longest sequence's length"),
    (VL, {"max_seqlen_q": 2.5}, "max_seqlen_q must be an int, got 2.5 (float)"),
    (
        VL,
        {"k": PAGES, "v": PAGES, "page_table": TABLE.long()},
        "page_table must be (B, pages of a sequence) int32 on",
    ),
    (VL, {"k": PAGES, "v": PAGES, "block_table": TABLE.long()}, "block_table must be (B, pages of a sequence) int32"),
    (VL_KV, {"max_seqlen_k": None}, "packed sequences need max_seqlen_k"),
    (VL_KV, {"kv": zeros(6, 2, 3, 32)}, "q's heads must be a multiple of kv[:, 0]'s heads"),
    (VL_QKV, {"cu_seqlens": OFFSETS.long()}, "cu_seqlens must hold batch + 1 contiguous int32 offsets"),
    (VL_QKV, {"cu_seqlens": None}, "cu_seqlens must be a torch.Tensor, got NoneType"),
    (VL_QKV, {"max_seqlen": -1}, "max_seqlen must be from 0 to 2147483647, got -1"),
    (VL_QKV, {"max_seqlen": "3"}, "max_seqlen must be an int, got '3' (str)"),
    (VL_QKV, {"qkv": zeros(6, 3, 2, 32, dtype=torch.int8)}, "qkv[:, 0] has dtype torch.int8; accepted"),
    (CACHE, {"cache_seqlens": int32(1)}, "cache_seqlens must hold 2 contiguous int32 numbers on cpu, got shape (1,)"),
    (CACHE, {"cache_seqlens": torch.ones(2)}, "cache_seqlens must hold 2 contiguous int32 numbers on cpu, got"),
    (CACHE, {"cache_seqlens": 1.5}, "cache_seqlens must be an int or (B,) int32, got 1.5 (float)"),
    (CACHE, {"cache_seqlens": torch.tensor(1.5)}, "cache_seqlens must be an int or (B,) int32, got tensor(1.5000)"),
    (CACHE, {"cache_batch_idx": int32(1)}, "cache_batch_idx must hold 2 contiguous int32 numbers"),
    (CACHE, {"cache_leftpad": [0, 0]}, "cache_leftpad must be a torch.Tensor, got list"),
    (
        CACHE,
        {"v_cache": zeros(2, 9, 2, 32)},
        "k_cache and v_cache must have the same shape up to head_dim, got k_cac",
    ),
    (CACHE, {"k_cache": zeros(2, 8, 2, 40), "v_cache": zeros(2, 8, 2, 40)}, "q and k_cache must have the same head"),
    (CACHE, {"return_softmax_lse": 2}, "return_softmax_lse must be True or False, got 2 (int)"),
    (CACHE, {"rotary_interleaved": "x"}, "rotary_interleaved must be True or False, got 'x' (str)"),
    (CACHE, {"num_splits": "x"}, "num_splits must be an int, got 'x' (str)"),
    (CACHE, {"learnable_sink": zeros(3)}, "learnable_sink must have one entry a query head"),
    (CACHE, IN_PAGES | {"page_table": TABLE[:1]}, "page_table must have a row for each of 2 sequences"),
    (CACHE, APPENDED | {"k": K[:1, :1].clone()}, "k must have shape (2, 1, 2, 32)"),
    (CACHE, APPENDED | IN_PAGES | {"page_table": TABLE[:1]}, "page_table must have q's batch of 2 rows, got 1"),
    (CACHE, APPENDED | {"k_cache": K, "v_cache": K}, "k_cache must not share memory with v_cache"),
    (CACHE, FP8 | {"cache_seqlens": 4}, "no flash-attention kernel serves this call on target gfx950"),
    (VLLM, {"s_aux": zeros(3)}, "s_aux must have one entry a query head"),
    (VLLM, {"return_softmax_lse": 2}, "return_softmax_lse must be True or False"),
    (VLLM, {"return_attn_probs": "x"}, "return_attn_probs must be True or False, got 'x' (str)"),
    (VLLM, {"out": zeros(6, 4, 40)}, "out must have shape (6, 4, 32) (q's, with v's head_dim), got (6, 4, 40)"),
    (VLLM, {"fa_version": "2"}, "fa_version must be an int, got '2' (str)"),
    (VLLM, {"cp_rank": "x"}, "cp_rank must be an int, got 'x' (str)"),
    (
        VLLM,
        {"cp_tot_seqused_k": OFFSETS},
        "cp_tot_seqused_k is for a rank's keys in pages: pass cp_world_size, cp_rank, cp_tot_seqused_k and seqused_k",
    ),
    (VLLM, {"cp_rank": 1}, "cp_rank must be from 0 to 0, got 1"),
    (VLLM, {"window_size": 3}, "window_size must be two ints (left, right), got 3 (int)"),
    (VLLM, {"q_descale": torch.ones(2, 2, dtype=torch.float64)}, "q_descale has dtype torch.float64; accepted"),
    (HUB, {"key": zeros(2, 4, 8, 40)}, "query and key must have the same head_dim, got query 32 and key 40"),
    (HUB, {"value": zeros(2, 4, 9, 32)}, "key and value must have the same shape up to head_dim, got key (2, 8,"),
    (HUB, {"query": [1]}, "query must be a torch.Tensor, got list"),
    (HUB, {"value": zeros(4, 8, 32)}, "value must have 4 dimensions, got shape (4, 8, 32)"),
    (HUB, {"scaling": -1.0}, "scaling must be a finite positive number, got -1.0"),
    (HUB, {"s_aux": zeros(3)}, "s_aux must have one entry a query head"),
    (HUB, {"mask": torch.zeros(2, 4, 8, 8, dtype=torch.int32)}, "attention_mask has dtype torch.int32; accepted"),
    (HUB, {"mask": [1]}, "attention_mask must be a torch.Tensor, got list"),
    (HUB, {"sliding_window": 0}, "sliding_window must be from 1 to 2147483647, got 0"),
    (HUB, {"sliding_window": "x"}, "sliding_window must be an int, got 'x' (str)"),
    (HUB, {"is_causal": 1}, "is_causal must be True or False, got 1 (int)"),
    (HUB, {"dropout": "x"}, "dropout must be a Python number, got 'x' (str)"),
    (HUB, {"dropout": 1.5}, "dropout must be a probability from 0 up to 1, got 1.5"),
    (HUB, {"dropout": 0.001}, "dropout must be 0 or from 1/512 up to 511/512, as it is rounded to 256ths, got 0.001"),
]


@pytest.mark.parametrize(("name", "changes", "message"), NAMED, ids=lambda x: x if isinstance(x, str) else "")
def test_errors_name_the_function_and_its_arguments(name, changes, message):
    with pytest.raises(FlyError, match="^" + re.escape(f"{name}: {message}")) as caught:
        call(name, **changes)
    assert not re.search(
        r"seqused_kv|num_kv_splits|kv_batch_idx|\bsink\b|return_lse|max_seqlen_kv", str(caught.value)
    )
    assert not re.search(r"cu_seqlens_kv|\0", str(caught.value))


# (function, what replaces a good call's arguments, what the checks of numbers on the device say)
ON_DEVICE = [
    (CACHE, {"cache_seqlens": int32(3, 99)}, "cache_seqlens[1] is 99; accepted: 0 to 8"),
    (
        CACHE,
        APPENDED | {"cache_seqlens": 8},
        "cache_seqlens[0] is 8; with 1 new key 9 are more than the 8 that an entry",
    ),
    (CACHE, {"cache_batch_idx": int32(0, 5), "cache_seqlens": 3}, "cache_batch_idx[1] is 5; accepted: 0 to 1"),
    (CACHE, IN_PAGES | {"page_table": TABLE + 9}, "page_table[0, 0] is 9; accepted: 0 to 3"),
    (CACHE, IN_PAGES | {"cache_seqlens": 99}, "cache_seqlens[0] is 99; accepted: 0 to 32, what page_table's 2 pages"),
    (VL, {"cu_seqlens_k": int32(0, 9, 6)}, "cu_seqlens_k[1] is 9; accepted: up to 6, the tokens of k"),
    (VL, {"seqused_k": int32(7, 1)}, "seqused_k[0] is 7; accepted: 0 to 3"),
    (VL_QKV, {"cu_seqlens": int32(0, 9, 6)}, "cu_seqlens[1] is 9; accepted: up to 6, the tokens of qkv[:, 0]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), ON_DEVICE, ids=lambda x: x if isinstance(x, str) else "")
def test_checks_of_numbers_on_the_device_name_the_callers_arguments(name, changes, message):
    with pytest.raises(ArgumentError, match="^" + re.escape(f"{name}: {message}")):
        call(name, **changes)


def test_refusals_by_kernels_name_the_callers_arguments(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    monkeypatch.setenv("FLY_KERNEL", "gfx942")
    pages = zeros(4, 16, 2, 64)
    with pytest.raises(UnsupportedError) as caught:
        call(CACHE, **IN_PAGES | {"q": zeros(2, 3, 4, 64), "k_cache": pages, "v_cache": pages.clone()})
    for part in ("keys in pages (page_table)", "gather a sequence's pages into k_cache and v_cache"):
        assert part in str(caught.value)


def test_values_that_look_like_names_stay_as_they_are():
    with pytest.raises(
        ArgumentTypeError, match=re.escape("softmax_scale must be a Python number, got 'k sink' (str)")
    ):
        call(CACHE, softmax_scale="k sink")
    marked = repr("\0k\0")
    with pytest.raises(ArgumentTypeError, match=re.escape(f"got {marked} (str)")):
        call(CACHE, softmax_scale="\0k\0")


def test_an_error_is_said_in_any_callers_names():
    error = problem(ArgumentError, f"{arg.k} and {arg('sink, k')} of {arg.score_mod}", "f")
    assert str(error) == "f: k and sink, k of score_mod"
    KVCACHE.tell(error)
    assert str(error) == (
        "flash_attn_with_kvcache: k_cache and learnable_sink, k_cache of score_mod of flydsl_flash_attn_func"
    )
    FUNC.tell(error)
    assert str(error) == "flash_attn_func: k and learnable_sink, k of score_mod of flydsl_flash_attn_func"
    copy = pickle.loads(pickle.dumps(error))
    KVCACHE.tell(copy)
    assert str(copy).startswith("flash_attn_with_kvcache: k_cache and learnable_sink")
    untold = ArgumentError("as it was")
    FUNC.tell(untold)
    assert str(untold) == "as it was" and plain(f"{arg.q}") == "q"


def test_callers_have_keys_of_their_own():
    assert all(CALLERS[caller.key] is caller for caller in CALLERS.values())
    assert VARLEN.given({"page_table": TABLE}).name("block_table") == "page_table"
    assert VARLEN.given({"page_table": None}) is VARLEN and FUNC.given({"page_table": TABLE}) is FUNC


@pytest.mark.parametrize("compiled", [False, True], ids=["operation", "compiled"])
def test_the_operation_names_the_callers_arguments(compiled):
    lengths = torch.ones(2, dtype=torch.int64)
    message = "flash_attn_with_kvcache: cache_seqlens must hold 2 contiguous int32 numbers on cpu"
    if compiled:
        step = torch.compile(api.flash_attn_with_kvcache, fullgraph=True, backend="eager")
        attempt = lambda: step(Q, K, K, cache_seqlens=lengths)  # noqa: E731
    else:
        attempt = lambda: torch.ops.fly.flash_attn(Q, K, K, False, seqused_kv=lengths, caller=KVCACHE.key)  # noqa: E731
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attempt()
    with pytest.raises(ArgumentError, match=r"^flydsl_flash_attn_func: seqused_kv must hold 2 contiguous int32"):
        torch.ops.fly.flash_attn(Q, K, K, False, seqused_kv=lengths)


def test_the_operation_of_appending_names_the_callers_arguments():
    step = torch.compile(api.flash_attn_with_kvcache, fullgraph=True, backend="eager")
    table = {"page_table": TABLE[:1], "cache_seqlens": int32(1, 1)}
    with pytest.raises(
        ArgumentError, match=r"^flash_attn_with_kvcache: page_table must have q's batch of 2 rows, got 1"
    ):
        step(Q, PAGES, PAGES.clone(), APPENDED["k"], APPENDED["v"], **table)


TENSORS = [
    (name, argument)
    for name, (_, given) in CALLS.items()
    for argument, value in given.items()
    if isinstance(value, torch.Tensor)
] + [(CACHE, argument) for argument in ("k", "v", "cache_seqlens", "cache_leftpad", "cache_batch_idx", "block_table")]
ODD = {
    "sparse": (lambda x: torch.zeros(x.shape).to(x.dtype).to_sparse(), "is of layout torch.sparse_coo"),
    "nested": (lambda x: nested(torch.strided), "is a nested tensor"),
    "jagged": (lambda x: nested(torch.jagged), "is a "),
    "mkldnn": (lambda x: torch.zeros(2, 2).to_mkldnn(), "is of layout torch._mkldnn"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_tensors_that_are_not_dense_are_refused_by_name(name, argument, kind):
    make, message = ODD[kind]
    like = (CALLS[name][1] | APPENDED).get(argument)
    changes = {argument: make(like if isinstance(like, torch.Tensor) else int32(1, 1))}
    if argument in ("k", "v") and name == CACHE:
        changes = APPENDED | changes
    with pytest.raises(ArgumentTypeError, match=f"^{re.escape(name)}: .*{argument}.* {re.escape(message)}"):
        call(name, **changes)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_tensors_without_dimensions_are_refused_by_name(name, argument):
    if argument == "cache_seqlens":
        pytest.skip("one length for all")
    changes = {argument: torch.zeros((), dtype=BF16)}
    if argument in ("k", "v") and name == CACHE:
        changes = APPENDED | changes
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)}: .*{argument}"):
        call(name, **changes)
