"""diffusers' attention functions, on a stub: what is computed, refused, and registered."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels.integrations.diffusers import attention_forward, register
from tests.kernels.api.api_reference import dense
from tests.kernels.reference import check


@pytest.fixture(autouse=True)
def emulated(emulate, seed):
    torch.manual_seed(seed)
    emulate("gfx950", "generic")


def inputs(queries: int, keys: int) -> list[torch.Tensor]:
    return [torch.randn(2, n, h, 32).bfloat16() for n, h in ((queries, 4), (keys, 2), (keys, 2))]


def right(result, reference):
    out, lse = result if isinstance(result, tuple) else (result, None)
    report = check(out, reference, None if lse is None else lse.transpose(1, 2))
    assert report.ok, str(report)


def test_a_layer():
    q, k, v = inputs(5, 9)
    right(attention_forward(q, k, v, scale=0.3, return_lse=True), dense(q, k, v, softmax_scale=0.3))


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_causal_is_top_left(queries, keys):
    q, k, v = inputs(queries, keys)
    hidden = torch.ones(queries, keys).triu(1).bool()
    bias = torch.zeros(1, 1, queries, keys).masked_fill(hidden, -torch.inf)
    right(attention_forward(q, k, v, is_causal=True), dense(q, k, v, bias=bias))


@pytest.mark.parametrize("additive", [False, True])
def test_masks(additive):
    q, k, v = inputs(5, 9)
    seen = torch.rand(5, 9) < 0.7
    seen[:, 0] = True
    bias = torch.zeros(1, 1, 5, 9).masked_fill(~seen, -torch.inf)
    right(attention_forward(q, k, v, bias[0, 0].bfloat16() if additive else seen), dense(q, k, v, bias=bias))


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            lambda x: x.float(),
            {},
            ArgumentTypeError,
            "query has dtype torch.float32; accepted: torch.bfloat16, torch",
        ),
        (lambda x: x[0], {}, ArgumentError, r"query must have 4 dimensions \(B, S, H, D\), got shape \(5, 4, 32\)"),
        (lambda x: x, {"attn_mask": torch.ones(3, 9)}, ArgumentError, r"attn_mask must broadcast to \(B, H, Sq, Skv"),
        (lambda x: x, {"_parallel_config": object()}, UnsupportedError, "context parallelism is not available: call"),
        (lambda x: x, {"is_causal": 1}, ArgumentTypeError, "is_causal must be True or False, got 1"),
    ],
)
def test_what_is_refused(change, options, error, message):
    q, k, v = inputs(5, 9)
    with pytest.raises(error, match=f"diffusers' attention: {message}"):
        attention_forward(change(q), k, v, **options)


def test_register(monkeypatch):
    Name = Enum("Name", {"NATIVE": "native"}, type=str)  # as diffusers has it
    registered = {}

    class Registry:
        @staticmethod
        def register(backend):
            return lambda function: registered.update({backend: function})

    package, models = ModuleType("diffusers"), ModuleType("diffusers.models")
    dispatch = ModuleType("diffusers.models.attention_dispatch")
    dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry = Name, Registry
    for module in (package, models, dispatch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    register()
    register()
    assert registered == {"fly": attention_forward} and Name("fly") in registered
    assert [*Name.__members__] == ["NATIVE", "FLY"] and Name("fly").value == "fly" and Name("fly").name == "FLY"


def test_register_without_diffusers(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ModuleNotFoundError, match="diffusers"):
        register()
