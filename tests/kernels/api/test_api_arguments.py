"""Arguments of FlashAttention's functions: which kinds of numbers, flags and hints they take."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels import flash_attn_api as api
from kernels.api import torch_ops
from kernels.api.conversions import HINTS as HINT_CHECKS
from kernels.api.conversions import lengths_of
from kernels.api.options import AVAILABLE, UNAVAILABLE, Extras
from kernels.arguments.checks import Checks
from kernels.arguments.stacked import leaves_of, unstacked
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.api.api_calls import (
    APPENDED,
    CACHE,
    FUNCTIONS,
    IN_PAGES,
    VL,
    VL_KV,
    VL_QKV,
    VLLM,
    call,
    int32,
    zeros,
)
from tests.kernels.api.api_reference import dense
from tests.kernels.reference import check


@pytest.fixture(autouse=True)
def inference(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    with torch.no_grad():
        yield


@pytest.fixture
def handed_on(monkeypatch):
    """Keywords of the calls that reach `flydsl_flash_attn_func`."""
    calls = []

    def record(q, k, v, causal, *, out=None, return_lse=False, **options):
        calls.append(options)
        q, _, v = unstacked(leaves_of(q, k, v))
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))

    monkeypatch.setattr(torch_ops, "flydsl_flash_attn_func", record)
    return calls


VALUES = [
    ("softmax_scale", 10**400, ArgumentError, "softmax_scale must be a finite positive number, got 1000"),
    ("softmax_scale", Fraction(10**400), ArgumentError, "softmax_scale must be a finite positive number, got Frac"),
    (
        "softmax_scale",
        10**5000,
        ArgumentError,
        "softmax_scale must be a finite positive number, got a int that has no",
    ),
    ("softmax_scale", [1.0], ArgumentTypeError, "softmax_scale must be a Python number, got [1.0] (list)"),
    ("softmax_scale", torch.ones(2), ArgumentTypeError, "softmax_scale must be a Python number, got tensor"),
    ("softcap", 10**400, ArgumentError, "softcap must be a finite positive number, or 0 for none, got 1000"),
    ("softcap", float("nan"), ArgumentError, "softcap must be a finite positive number, or 0 for none, got nan"),
    ("softcap", True, ArgumentTypeError, "softcap must be a Python number, got True (bool)"),
    ("softcap", torch.ones(2), ArgumentTypeError, "softcap must be a Python number, got tensor"),
    ("softcap", "", ArgumentTypeError, "softcap must be a Python number, got '' (str)"),
    ("causal", 1, ArgumentTypeError, "causal must be True or False, got 1 (int)"),
    ("causal", torch.ones(2), ArgumentTypeError, "causal must be True or False, got tensor"),
    ("window_size", (1.0, 2), ArgumentTypeError, "window_size must be two ints (left, right), got (1.0, 2) (tuple)"),
    ("window_size", (True, 2), ArgumentTypeError, "window_size must be two ints (left, right), got (True, 2)"),
    ("window_size", "ab", ArgumentTypeError, "window_size must be two ints (left, right), got 'ab' (str)"),
    ("window_size", torch.ones(3), ArgumentTypeError, "window_size must be two ints (left, right), got tensor"),
    ("window_size", torch.ones(2), ArgumentTypeError, "window_size must be two ints (left, right), got tensor"),
    (
        "window_size",
        (2**31, 0),
        ArgumentError,
        "window_size must have sides up to 2147483647, or -1 for no limit, got",
    ),
    (
        "window_size",
        (0, -(10**400)),
        ArgumentError,
        "window_size must have sides up to 2147483647, or -1 for no limit",
    ),
    ("pack_gqa", 1, ArgumentTypeError, "pack_gqa must be True or False, got 1 (int)"),
    ("sm_margin", -1, ArgumentError, "sm_margin must be at least 0, got -1"),
    ("sm_margin", "x", ArgumentTypeError, "sm_margin must be an int, got 'x' (str)"),
    ("scheduler_metadata", 1, ArgumentTypeError, "scheduler_metadata must be a torch.Tensor, got int"),
    ("attention_chunk", "x", ArgumentTypeError, "attention_chunk must be an int, got 'x' (str)"),
    ("num_splits", 65, UnsupportedError, "num_splits over 64 is not available, got 65: pass 0"),
]
PROBABILITIES = [
    ("dropout_p", "x", ArgumentTypeError, "dropout_p must be a Python number, got 'x' (str)"),
    ("dropout_p", None, ArgumentTypeError, "dropout_p must be a Python number, got None (NoneType)"),
    ("dropout_p", float("nan"), ArgumentError, "dropout_p must be a probability from 0 up to 1, got nan"),
    ("dropout_p", 1.5, ArgumentError, "dropout_p must be a probability from 0 up to 1, got 1.5"),
    ("dropout_p", 10**400, ArgumentError, "dropout_p must be a probability from 0 up to 1, got 1000"),
    ("dropout_p", torch.ones(2), ArgumentTypeError, "dropout_p must be a Python number, got tensor"),
    ("deterministic", "x", ArgumentTypeError, "deterministic must be True or False, got 'x' (str)"),
    ("deterministic", 1, ArgumentTypeError, "deterministic must be True or False, got 1 (int)"),
    ("return_attn_probs", "x", ArgumentTypeError, "return_attn_probs must be True or False, got 'x' (str)"),
    ("return_attn_probs", None, ArgumentTypeError, "return_attn_probs must be True or False, got None"),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("argument", "value", "error", "message"), VALUES + PROBABILITIES, ids=lambda x: x if isinstance(x, str) else "-"
)
def test_values_that_are_none_are_refused_by_name(name, argument, value, error, message):
    if name == CACHE and argument in [row[0] for row in PROBABILITIES]:
        pytest.skip("not one of its arguments")
    with pytest.raises(error, match="^" + re.escape(f"{name}: {message}")) as caught:
        call(name, **{argument: value})
    assert type(caught.value) is error


NO_PROBABILITIES = [row[1:] for row in PROBABILITIES if row[0] == "dropout_p"]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != CACHE])
@pytest.mark.parametrize(("value", "error", "message"), [*NO_PROBABILITIES, (np.zeros(2), *NO_PROBABILITIES[-1][1:])])
def test_a_dropout_p_that_is_none_is_refused_with_probabilities(name, value, error, message):
    message = message.replace("got tensor", f"got {'array' if isinstance(value, np.ndarray) else 'tensor'}")
    with pytest.raises(error, match="^" + re.escape(f"{name}: {message}")):
        call(name, dropout_p=value, return_attn_probs=True)


BOUNDS = [(None, -215), (40, -20), (-2, 5), (-7, -1), (np.int64(-2), 0), (torch.tensor(-2), 0), torch.tensor([3, -3])]


@pytest.mark.parametrize("name", [*FUNCTIONS, VLLM])
@pytest.mark.parametrize("window", BOUNDS, ids=str)
def test_a_windows_side_below_minus_one_is_refused(name, window):
    below = next(int(side) for side in window if side is not None and side < -1)
    message = (
        f"{name}: window_size has a side of {below}, which is no limit in FlashAttention-2 and -3 and a bound in "
        "FlashAttention-4: pass -1 or None for no limit, or a mask_mod to flydsl_flash_attn_func for a bound below 0"
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        call(name, window_size=window)


@pytest.mark.parametrize(
    ("window", "becomes"),
    [
        ((np.int64(3), np.int32(5)), (3, 5)),
        ((torch.tensor(3), torch.tensor(5, dtype=torch.int32)), (3, 5)),
        (torch.tensor([3, 5]), (3, 5)),
        (np.array([3, 5]), (3, 5)),
        ([torch.tensor(3), None], (3, -1)),
        ((np.array(3), 5), (3, 5)),
        ((0, 2**31 - 1), (0, 2**31 - 1)),
        ((None, -1), None),
        (torch.tensor([-1, -1]), None),
    ],
    ids=str,
)
def test_a_windows_sides_are_integers_of_any_kind(handed_on, window, becomes):
    for name in FUNCTIONS:
        call(name, window_size=window)
    assert len(handed_on) == len(FUNCTIONS)
    for options in handed_on:
        assert options.get("window_size") == becomes
        assert all(type(side) is int for side in options.get("window_size", ()))


def test_a_causal_windows_right_side_is_its_own(handed_on):
    call("flash_attn_func", window_size=(40, -20), causal=True)
    call("flash_attn_func", window_size=(None, -215), causal=True)
    assert [options.get("window_size") for options in handed_on] == [(40, -1), None]
    with pytest.raises(ArgumentError, match="window_size must have sides up to 2147483647"):
        call("flash_attn_func", window_size=(0, -(10**400)), causal=True)


KINDS = {
    "numpy": np.int64,
    "tensor": torch.tensor,
    "32 bits": lambda n: torch.tensor(n, dtype=torch.int32),
    "array": np.array,
}


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_integers_of_any_kind(handed_on, kind):
    number = KINDS[kind]
    for name in (VL, VL_KV, VLLM):
        call(name, max_seqlen_q=number(3), max_seqlen_k=number(4), num_splits=number(2))
    call(VL_QKV, max_seqlen=number(3))
    call(CACHE, cache_seqlens=number(7), num_splits=number(2), attention_chunk=number(4))
    *packed, one, cached = handed_on
    for options in packed:
        assert (options["max_seqlen_q"], options["max_seqlen_kv"], options["num_kv_splits"]) == (3, 4, 2)
        assert {type(options[name]) for name in ("max_seqlen_q", "max_seqlen_kv", "num_kv_splits")} == {int}
    assert (one["max_seqlen_q"], one["max_seqlen_kv"]) == (3, 3)
    assert torch.equal(cached["seqused_kv"], int32(7, 7)) and cached["seqused_kv"].dtype == torch.int32
    assert (cached["num_kv_splits"], cached["attention_chunk"]) == (2, 4)


def test_numbers_on_a_device_are_not_read(monkeypatch):
    meta = torch.tensor(3, device="meta")
    for name, changes in (
        (VL, {"max_seqlen_q": meta}),
        ("flash_attn_func", {"window_size": (meta, 1)}),
        (CACHE, {"num_splits": meta}),
    ):
        with pytest.raises(
            UnsupportedError, match=f"{next(iter(changes))} is on device 'meta', and reading it would"
        ):
            call(name, **changes)
    lengths = lengths_of(CACHE, meta, 5, meta.device)
    assert (lengths.shape, lengths.dtype, lengths.is_contiguous()) == ((5,), torch.int32, True)


HINTS = [{"pack_gqa": True}, {"pack_gqa": False}, {"sm_margin": 8}, {"sm_margin": np.int64(3)}]
HINTS += [{"scheduler_metadata": int32(1, 2, 3)}, {"pack_gqa": None, "sm_margin": 0, "scheduler_metadata": None}]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_hints_are_taken_and_change_nothing(handed_on, hint):
    for name in FUNCTIONS:
        call(name)
        call(name, **hint)
    for plain_call, hinted in zip(handed_on[::2], handed_on[1::2], strict=True):
        assert plain_call.keys() == hinted.keys()
        assert all(plain_call[key] is hinted[key] for key in plain_call if key != "seqused_kv")


def test_vllms_metadata_is_a_hint(handed_on):
    call(VLLM, scheduler_metadata=int32(1, 2))
    assert "scheduler_metadata" not in handed_on[0]


def test_every_keyword_of_later_versions_is_available_a_hint_or_refused():
    assert set(Extras.__annotations__) <= {*AVAILABLE, *HINT_CHECKS, *UNAVAILABLE}
    assert not HINT_CHECKS.keys() & {*AVAILABLE, *UNAVAILABLE}


def test_new_keys_without_lengths_are_refused_in_pages_too():
    with pytest.raises(ArgumentError, match=r"^flash_attn_with_kvcache: k and v need cache_seqlens"):
        call(CACHE, **(APPENDED | IN_PAGES | {"cache_seqlens": None}))


@pytest.mark.parametrize("head_dim", [20, 21, 36])
def test_a_padded_head_dimension_keeps_the_scale_that_was_given(handed_on, head_dim):
    q = zeros(1, 3, 2, head_dim)
    api.flash_attn_func(q, q, q, softmax_scale=0.3)
    api.flash_attn_func(q, q, q)
    assert [options["softmax_scale"] for options in handed_on] == [0.3, head_dim**-0.5]


def test_a_padded_head_dimension_is_right_with_a_scale(seed):
    q, k, v = (torch.randn(1, n, 2, 21).bfloat16() for n in (5, 9, 9))
    out = api.flash_attn_func(q, k, v, softmax_scale=1.1)
    report = check(out, dense(q, k, v, softmax_scale=1.1), None)
    assert report.ok, f"seed {seed}: {report}"


def test_a_chunk_of_none_is_no_chunk(handed_on):
    for value in (0, None, np.int64(0)):
        call("flash_attn_func", attention_chunk=value)
    assert all("attention_chunk" not in options for options in handed_on)
    with pytest.raises(ArgumentTypeError, match="attention_chunk must be an int, got array"):
        flydsl_flash_attn_func(zeros(1, 2, 2, 64), *[zeros(1, 2, 2, 64)] * 2, attention_chunk=np.zeros(2))


def test_checks_show_any_value():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(ArgumentTypeError, match="x must be True or False, got a Odd that has no repr"):
        Checks("f").flag("x", Odd())
    with pytest.raises(ArgumentTypeError, match=r"^.{0,260}$"):
        Checks("f").flag("x", "a" * 10_000)
