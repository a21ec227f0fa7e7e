"""Calls of fused backward kernels, their gradients against autograd through the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import flash_attn_interface
from kernels.call import gradients as gradients_of_calls
from kernels.gfx950 import backward_launch
from tests.kernels.backward.test_dropout_kernels import state_of
from tests.kernels.feature_cases import FEATURES, Inputs, stripes
from tests.kernels.gradient_reference import by_autograd, gradients

Options = Callable[[Inputs], dict[str, Any]]


def halved(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Without anything loaded."""
    return score * 0.5


def wrong(
    inputs: Inputs, causal: bool, deterministic: bool = False, dq_accumulate: str = "float32", **options: Any
) -> list[str]:
    """Which gradients of a call are not the reference's."""
    q, k, v = inputs.tensors()
    options |= inputs.form()
    dout = inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    dlse = inputs.floats(*q.shape[:-3], q.shape[-2], q.shape[-3])
    if "seqused_q" in options:
        # what is not in use has results of no meaning, whose gradients have none
        for b, n in enumerate(options["seqused_q"].tolist()):
            dout[b, n:], dlse[b, :, n:] = torch.nan, torch.nan
    longest = {"max_seqlen_q": max(inputs.queries), "max_seqlen_kv": max(inputs.keys)} if inputs.packed else {}
    how = {"deterministic": deterministic, "dq_accumulate": dq_accumulate}
    found = by_autograd(q, k, v, causal, dout, dlse, **how, **options, **longest)
    dout, dlse = dout.nan_to_num(0.0), dlse.nan_to_num(0.0)
    return gradients(q, k, v, causal, dout, dlse, **options).wrong(found)


# at tiles of 32 queries, and blocks of up to 256 keys
AMD_CASES: dict[str, tuple[dict[str, Any], bool, Options]] = {
    "several blocks, different lengths": ({"queries": [70], "keys": [300], "head_dim": 128}, False, lambda i: {}),
    "causal, rows without keys": ({"queries": [110], "keys": [60], "head_dim": 64}, True, lambda i: {}),
    "heads share keys, softcap": (
        {"queries": [70], "keys": [70], "heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": "f16"},
        True,
        lambda i: {"softcap": 3.0},
    ),
    "packed, empty sequences": (
        {"queries": [0, 70, 1, 130], "keys": [20, 290, 0, 40], "packed": True, "head_dim": 64, "dtype": "f16"},
        True,
        lambda i: {},
    ),
    "lengths in use": (
        {"queries": [70] * 3, "keys": [90] * 3, "head_dim": 128},
        False,
        lambda i: {
            "seqused_q": torch.tensor([70, 7, 40], dtype=torch.int32),
            "seqused_kv": torch.tensor([0, 75, 20], dtype=torch.int32),
        },
    ),
    "windows and slopes": (
        {"queries": [150], "keys": [170], "heads": 2, "kv_heads": 2, "head_dim": 64},
        False,
        lambda i: {"window_size": (20, 5), "alibi_slopes": i.floats(2).abs()},
    ),
    "sinks": ({"queries": [70], "keys": [40], "head_dim": 128}, False, lambda i: {"sink": i.floats(2)}),
    "a mask's function": ({"queries": [70], "keys": [80], "head_dim": 64}, False, lambda i: {"mask_mod": stripes}),
    "a bias of keys, functions": (
        {"queries": [50], "keys": [70], "head_dim": 128},
        True,
        lambda i: {**FEATURES["bias of keys"](i), **FEATURES["score_mod aux"](i)},
    ),
    "dropout": (
        {"queries": [70], "keys": [80], "head_dim": 128},
        True,
        lambda i: {"dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "one query": ({"queries": [1], "keys": [290], "head_dim": 64}, False, lambda i: {}),
    "chunks": ({"queries": [70], "keys": [100], "head_dim": 128}, True, lambda i: {"attention_chunk": 30}),
    "chunks, dropout": (
        {"queries": [70], "keys": [100], "head_dim": 64},
        False,
        lambda i: {"attention_chunk": 30, "dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "softcap in a window": (
        {"queries": [70, 40], "keys": [100, 50], "packed": True, "heads": 4, "kv_heads": 2, "head_dim": 64},
        False,
        lambda i: {"softcap": 3.0, "window_size": (20, 5)},
    ),
    "softcap, dropout": (
        {"queries": [70], "keys": [80], "heads": 2, "kv_heads": 1, "head_dim": 128},
        True,
        lambda i: {"softcap": 3.0, "dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "slopes": (
        {"queries": [70], "keys": [290], "head_dim": 128},
        True,
        lambda i: {"alibi_slopes": i.floats(2).abs()},
    ),
    "a bias of scores": ({"queries": [70], "keys": [290], "head_dim": 128}, True, FEATURES["bias"]),
    "a mask's function, causal": (
        {"queries": [70], "keys": [80], "head_dim": 128},
        True,
        lambda i: {"mask_mod": stripes},
    ),
    "a bias of scores, dropout": (
        {"queries": [70], "keys": [290], "head_dim": 64},
        True,
        lambda i: {**FEATURES["bias"](i), "dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "slopes, dropout, packed": (
        {"queries": [70, 40], "keys": [100, 50], "packed": True, "head_dim": 64},
        True,
        lambda i: {"alibi_slopes": i.floats(2).abs(), "dropout_p": 0.3, "rng_state": state_of(i.seed)},
    ),
    "a function of scores, packed": (
        {"queries": [70, 40], "keys": [100, 50], "packed": True, "head_dim": 64},
        False,
        lambda i: {"score_mod": halved},
    ),
    "a function of scores in a window": (
        {"queries": [70], "keys": [100], "head_dim": 64},
        True,
        lambda i: {"score_mod": halved, "window_size": (20, 0)},
    ),
}


# calls with the query heads of a key head in parts, and in how many
PARTS_CASES: dict[str, tuple[dict[str, Any], int, bool, Options]] = {
    "each head a part": (
        {"queries": [70], "keys": [300], "heads": 4, "kv_heads": 1, "head_dim": 128},
        4,
        True,
        lambda i: {},
    ),
    "two heads a part, packed": (
        {"queries": [70, 0, 33], "keys": [90, 20, 0], "packed": True, "heads": 8, "kv_heads": 2, "head_dim": 64},
        2,
        False,
        lambda i: {},
    ),
    "softcap in a window": (
        {"queries": [70], "keys": [300], "heads": 4, "kv_heads": 1, "head_dim": 64},
        4,
        True,
        lambda i: {"softcap": 3.0, "window_size": (20, 0)},
    ),
    "lengths in use, dropout": (
        {"queries": [70] * 2, "keys": [90] * 2, "heads": 6, "kv_heads": 2, "head_dim": 64},
        3,
        False,
        lambda i: {
            "seqused_q": torch.tensor([70, 40], dtype=torch.int32),
            "seqused_kv": torch.tensor([20, 75], dtype=torch.int32),
            "dropout_p": 0.3,
            "rng_state": state_of(i.seed),
        },
    ),
}


def wrong_in_parts(name: str, monkeypatch: pytest.MonkeyPatch, seed: int, **how: Any) -> list[str]:
    """Which gradients of one of `PARTS_CASES` are not the reference's."""
    sizes, parts, causal, options_of = PARTS_CASES[name]
    monkeypatch.setattr(backward_launch, "parts_of_group", lambda *args, **named: parts)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(gradients_of_calls, "_kinds", {})
    inputs = Inputs(**sizes, seed=seed)
    return wrong(inputs, causal, **how, **options_of(inputs))
