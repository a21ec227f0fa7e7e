"""What a caller can get wrong about features, and what the message says; nothing is compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError
from kernels.arguments import checks as argument_checks
from kernels.flash_attn_interface import flydsl_flash_attn_func

B, SQ, SKV, H, HKV, D = 2, 5, 7, 6, 3, 64
TYPE, VALUE = ArgumentTypeError, ArgumentError


def tensor(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def dense():
    return {"q": tensor(B, SQ, H, D), "k": tensor(B, SKV, HKV, D), "v": tensor(B, SKV, HKV, D)}


def packed():
    offsets = torch.tensor([0, 2, SQ], dtype=torch.int32)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 3, "max_seqlen_kv": 3}
    return {"q": tensor(SQ, H, D), "k": tensor(SQ, HKV, D), "v": tensor(SQ, HKV, D)} | lengths


def counts(*shape, dtype=torch.int32):
    return tensor(*shape, dtype=dtype)


def floats(*shape, dtype=torch.float32):
    return tensor(*shape, dtype=dtype)


def mod(*_):
    return 0.0


def mod_bwd(*_):
    return 0.0


COUNTS = ("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx")

# name: (arguments added to a good dense call, error class, what the message says)
MISTAKES = {
    "window is a number": ({"window_size": 5}, TYPE, "window_size must be two ints (left, right), got 5"),
    "window is None": ({"window_size": None}, TYPE, "window_size must be two ints (left, right), got None"),
    "window of one": ({"window_size": (5,)}, TYPE, "window_size must be two ints (left, right), got (5,)"),
    "window of floats": ({"window_size": (5.0, 1)}, TYPE, "window_size must be two ints (left, right), got (5.0, 1)"),
    "window of bools": (
        {"window_size": (True, 1)},
        TYPE,
        "window_size must be two ints (left, right), got (True, 1)",
    ),
    "window of -2": (
        {"window_size": [-2, 3]},
        VALUE,
        "window_size must have sides from 0 to 2**31 - 1, or -1 for no limit, got (-2, 3)",
    ),
    "window of 2**31": ({"window_size": (0, 2**31)}, VALUE, "or -1 for no limit, got (0, 2147483648)"),
    "a derivative of nothing": (
        {"score_mod_bwd": mod_bwd},
        VALUE,
        "score_mod_bwd is the derivative of a score_mod, and there is none: pass both or neither",
    ),
    "a derivative is a number": (
        {"score_mod": mod, "score_mod_bwd": 2.0},
        TYPE,
        "score_mod_bwd must be a function, got 2.0 (float)",
    ),
    "softcap is a string": ({"softcap": "30"}, TYPE, "softcap must be a Python number, got '30' (str)"),
    "softcap is None": ({"softcap": None}, TYPE, "softcap must be a Python number, got None (NoneType)"),
    "softcap is True": ({"softcap": True}, TYPE, "softcap must be a Python number, got True (bool)"),
    "softcap is a tensor": (
        {"softcap": torch.tensor(2.0)},
        TYPE,
        "softcap must be a Python number, got tensor(2.) (Tensor)",
    ),
    "softcap is negative": (
        {"softcap": -1.0},
        VALUE,
        "softcap must be a finite positive number, or 0 for none, got -1.0",
    ),
    "softcap is NaN": ({"softcap": float("nan")}, VALUE, "or 0 for none, got nan"),
    "softcap is infinite": ({"softcap": float("inf")}, VALUE, "or 0 for none, got inf"),
    "slopes are a list": ({"alibi_slopes": [1.0] * H}, TYPE, "alibi_slopes must be a torch.Tensor, got list"),
    "slopes are ints": (
        {"alibi_slopes": counts(H)},
        TYPE,
        "alibi_slopes has dtype torch.int32; accepted: torch.float32",
    ),
    "slopes of key heads": (
        {"alibi_slopes": floats(HKV)},
        VALUE,
        "alibi_slopes must have shape (6,) or (2, 6), got (3,)",
    ),
    "slopes of one batch": (
        {"alibi_slopes": floats(1, H)},
        VALUE,
        "alibi_slopes must have shape (6,) or (2, 6), got (1, 6)",
    ),
    "slopes are strided": (
        {"alibi_slopes": floats(2 * H)[::2]},
        VALUE,
        "alibi_slopes's last dimension must be contiguous (stride 1)",
    ),
    "bias is a list": ({"bias": [[0.0]]}, TYPE, "bias must be a torch.Tensor, got list"),
    "bias is float64": (
        {"bias": floats(SQ, SKV, dtype=torch.float64)},
        TYPE,
        "bias has dtype torch.float64; accepted: torch.float32",
    ),
    "bias of other keys": (
        {"bias": floats(SQ, SKV + 1)},
        VALUE,
        "bias must broadcast to (B, H, Sq, Skv) = (2, 6, 5, 7), got shape (5, 8)",
    ),
    "bias of key heads": ({"bias": floats(HKV, SQ, SKV)}, VALUE, "= (2, 6, 5, 7), got shape (3, 5, 7)"),
    "bias of rank 5": ({"bias": floats(1, B, H, SQ, SKV)}, VALUE, "got shape (1, 2, 6, 5, 7)"),
    "sink is a number": ({"sink": 1.0}, TYPE, "sink must be a torch.Tensor, got float"),
    "sink of ints": ({"sink": counts(H)}, TYPE, "sink has dtype torch.int32; accepted: torch.float32"),
    "sink of key heads": (
        {"sink": floats(HKV)},
        VALUE,
        "sink must have one entry a query head, shape (6,), got (3,)",
    ),
    "sink of a batch": ({"sink": floats(B, H)}, VALUE, "shape (6,), got (2, 6)"),
    "sink is strided": ({"sink": floats(2 * H)[::2]}, VALUE, "sink's last dimension must be contiguous (stride 1)"),
    "score_mod is a string": ({"score_mod": "alibi"}, TYPE, "score_mod must be a function, got 'alibi' (str)"),
    "mask_mod is a tensor": (
        {"mask_mod": torch.ones(1)},
        TYPE,
        "mask_mod must be a function, got tensor([1.]) (Tensor)",
    ),
    "mask_mod captures a tensor": (
        {"mask_mod": (lambda table: lambda b, h, q, k: table[k] > 0)(floats(3))},
        TYPE,
        "mask_mod captures the tensor 'table': pass it in aux_tensors, and it is an argument after key",
    ),
    "aux_tensors is one tensor": (
        {"aux_tensors": floats(3), "score_mod": mod},
        TYPE,
        "aux_tensors must be a sequence of tensors, got Tensor",
    ),
    "aux_tensors is None": (
        {"aux_tensors": None, "score_mod": mod},
        TYPE,
        "aux_tensors must be a sequence of tensors, got NoneType",
    ),
    "aux_tensors holds an array": (
        {"aux_tensors": [floats(3), np.zeros(3)], "mask_mod": mod},
        TYPE,
        "aux_tensors[1] must be a torch.Tensor, got ndarray",
    ),
    "aux_tensors of bools": (
        {"aux_tensors": [tensor(3, dtype=torch.bool)], "mask_mod": mod},
        TYPE,
        "aux_tensors[0] has dtype torch.bool; accepted: torch.float32, torch.bfloat16, torch.float16, torch.int32, "
        "torch.int64, torch.int16, torch.int8",
    ),
    "aux_tensors without a function": (
        {"aux_tensors": [floats(3)], "softcap": 2.0},
        VALUE,
        "aux_tensors are for score_mod and mask_mod, and neither is given: leave them out",
    ),
    **{f"{name} is a list": ({name: [1, 2]}, TYPE, f"{name} must be a torch.Tensor, got list") for name in COUNTS},
    **{
        f"{name} of 3": (
            {name: counts(3)},
            VALUE,
            f"{name} must hold 2 contiguous int32 numbers on cpu, got shape (3,), strides (1,), dtype "
            "torch.int32 on cpu",
        )
        for name in COUNTS
    },
    **{
        f"{name} of int64": (
            {name: counts(2, dtype=torch.int64)},
            VALUE,
            f"{name} must hold 2 contiguous int32 numbers on cpu, got shape (2,), strides (1,), dtype "
            "torch.int64 on cpu",
        )
        for name in COUNTS
    },
    **{
        f"{name} is strided": ({name: counts(4)[::2]}, VALUE, f"{name} must hold 2 contiguous int32 numbers on cpu")
        for name in COUNTS
    },
}

PACKED_MISTAKES = {
    "bias": (
        {"bias": floats(SQ, SQ)},
        "bias is for (B, S, H, D) tensors; for packed sequences pass a score_mod with aux_tensors",
    ),
    "cache_leftpad": (
        {"cache_leftpad": counts(2)},
        "cache_leftpad is for (B, S, Hkv, D) keys; packed ones have cu_seqlens_kv and seqused_kv",
    ),
    "kv_batch_idx": (
        {"kv_batch_idx": counts(2)},
        "kv_batch_idx is for (B, S, Hkv, D) keys; packed ones have cu_seqlens_kv and seqused_kv",
    ),
    "seqused_q of the tokens": (
        {"seqused_q": counts(SQ)},
        "seqused_q must hold 2 contiguous int32 numbers on cpu, got shape (5,)",
    ),
    "alibi_slopes of three sequences": (
        {"alibi_slopes": floats(3, H)},
        "alibi_slopes must have shape (6,) or (2, 6), got (3, 6)",
    ),
}


def raised(error, call):
    with pytest.raises(error) as caught:
        flydsl_flash_attn_func(**call)
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    given, error, message = MISTAKES[name]
    text = raised(error, dense() | given)
    assert text.startswith("flydsl_flash_attn_func: ") and message in text


@pytest.mark.parametrize("name", PACKED_MISTAKES)
def test_a_mistake_with_packed_sequences_is_named(name):
    given, message = PACKED_MISTAKES[name]
    assert message in raised(VALUE, packed() | given)


ELSEWHERE = {
    **{
        name: (
            {name: tensor(2, dtype=torch.int32, device="meta")},
            f"{name} must hold 2 contiguous int32 numbers on cpu",
        )
        for name in COUNTS
    },
    "alibi_slopes": (
        {"alibi_slopes": tensor(H, dtype=torch.float32, device="meta")},
        "alibi_slopes must be on q's device cpu, got meta",
    ),
    "bias": ({"bias": tensor(SQ, SKV, device="meta")}, "bias must be on q's device cpu, got meta"),
    "sink": ({"sink": tensor(H, device="meta")}, "sink must be on q's device cpu, got meta"),
    "aux_tensors": (
        {"aux_tensors": [tensor(3), tensor(3, device="meta")], "mask_mod": mod},
        "aux_tensors[1] must be on q's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_on_another_device(name, monkeypatch):
    monkeypatch.setattr(argument_checks, "DEVICE_TYPES", ("cpu", "meta"))
    given, message = ELSEWHERE[name]
    assert message in raised(VALUE, dense() | given)


def test_the_batch_of_keys_is_free_only_with_its_index():
    call = dense() | {"k": tensor(9, SKV, HKV, D), "v": tensor(9, SKV, HKV, D)}
    assert "q and k must have the same batch, got q 2 and k 9" in raised(VALUE, call)
