"""`flex_attention` against torch's own, and its gradients against autograd through the same functions."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask

import fly_attention
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests.kernels.gradient_reference import Gradients
from tests.kernels.reference import SLACK, max_difference


@pytest.fixture(autouse=True)
def emulated(emulate, seed):
    torch.manual_seed(seed)
    emulate("gfx950", "generic")
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")


def inputs(queries=40, keys=40, heads=2, kv_heads=2, head_dim=32, value_dim=None, batch=1):
    shapes = (batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim), (batch, kv_heads, keys, value_dim)
    return [torch.randn(*shape[:3], shape[3] or head_dim).bfloat16() for shape in shapes]


def near(found, plain, exact):
    """As far as what torch computes in 16 bits is from the exact result, that of fly may be twice."""
    return max_difference(found, exact) <= 2 * max_difference(plain, exact) + SLACK


def causal(b, h, q, k):
    return q >= k


def relative(s, b, h, q, k):
    return s - (q - k).abs() * 0.25 * (h + 1)


TABLE, DOCUMENTS = torch.randn(2, 40), torch.arange(40) // 9
CASES = {
    "a captured table, more queries than keys, and shared keys": (
        {"queries": 23, "heads": 4, "head_dim": 20, "value_dim": 12},
        {
            "score_mod": lambda s, b, h, q, k: torch.tanh(s + TABLE[h // 2, q - k]) + TABLE[h // 4][-2],
            "enable_gqa": True,
            "scale": 0.3,
        },
    ),
    "documents, of one batch of keys": (
        {},
        {"block_mask": (and_masks(lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k], causal), 2), "batch": 2},
    ),
    "both": (
        {"queries": 33},
        {
            "block_mask": (lambda b, h, q, k: (q + 3 >= k) & (TABLE[h, k] > -1.0), None),
            "score_mod": lambda s, b, h, q, k: relative(
                torch.where(DOCUMENTS[q] == DOCUMENTS[k], s, s / 2), b, h, q, k
            ),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_flex_attentions(name, seed):
    sizes, options = CASES[name][0], dict(CASES[name][1])
    q, k, v = inputs(**sizes)
    if (batch := options.pop("batch", None)) is not None:
        q = torch.randn(batch, *q.shape[1:]).bfloat16()
    if "block_mask" in options:
        mask_mod, batch = options["block_mask"]
        lengths = q.shape[2], k.shape[2]
        options["block_mask"] = create_block_mask(mask_mod, batch, None, *lengths, device="cpu")
    asked = AuxRequest(lse=True)
    (exact, aux), (plain, _) = (
        flex.flex_attention(*(x.to(t) for x in (q, k, v)), **options, return_aux=asked)
        for t in (torch.float32, torch.bfloat16)
    )
    out, found = fly_attention.flex_attention(q, k, v, **options, return_aux=asked)
    assert near(out, plain, exact) and out.dtype is torch.bfloat16 and out.shape == exact.shape, f"seed {seed}"
    torch.testing.assert_close(found.lse, aux.lse, rtol=1e-3, atol=1e-3)


def test_gradients_of_inputs_and_captured_tensors(seed):
    q, k, v = (x.requires_grad_() for x in inputs(queries=20, keys=24, head_dim=16))
    table = torch.randn(2, 24, requires_grad=True)

    def made(table):
        return lambda s, b, h, q, k: torch.where(q >= k, s, s * 0.5) + (table * 2)[h, k]

    dout, dlse = torch.randn(q.shape).bfloat16(), torch.randn(q.shape[:3])

    def by_autograd(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, table)]
        places = (torch.arange(n).view(-1, *[1] * i) for n, i in ((1, 3), (2, 2), (20, 1), (24, 0)))
        scores = made(leaves[3])(leaves[0] @ leaves[1].mT * 0.25, *places)
        results = scores.softmax(-1).to(dtype) @ leaves[2], scores.logsumexp(-1)
        given = [g.to(x.dtype) for x, g in zip(results, (dout, dlse))]
        return torch.autograd.grad(results, leaves, given)

    mask = create_block_mask(lambda b, h, q, k: q < 99, None, None, 20, 24, device="cpu", BLOCK_SIZE=(32, 64))
    results = fly_attention.flex_attention(q, k, v, made(table), mask, return_lse=True)
    found = torch.autograd.grad(results, [q, k, v, table], [dout, dlse])
    names = ("q", "k", "v", "t")
    by_torch = Gradients(by_autograd(torch.float32), by_autograd(torch.bfloat16), 2.0, names)
    assert not by_torch.wrong(found), f"seed {seed}"


def test_options_of_tritons_kernels_change_nothing():
    q, k, v = inputs(queries=3, keys=5)
    plain = fly_attention.flex_attention(q, k, v)
    options = {"BLOCK_M": 64, "fwd_num_stages": 3, "BACKEND": "AUTO"}
    assert torch.equal(plain, fly_attention.flex_attention(q, k, v, kernel_options=options))
    _, lse = fly_attention.flex_attention(q, k, v, return_lse=True)
    exact = (q.float() @ k.float().mT / math.sqrt(32)).logsumexp(-1)
    torch.testing.assert_close(lse, exact, rtol=1e-3, atol=1e-3)


MASK = create_block_mask(causal, None, None, 3, 5, device="cpu")
MISTAKES = {
    "float32": ({"query": torch.zeros(1, 2, 3, 32)}, ArgumentTypeError, "query has dtype torch.float32; accepted"),
    "three dimensions": ({"key": torch.zeros(2, 5, 32).half()}, ArgumentError, r"key must have 4 dimensions \(B, H"),
    "shared keys": ({"key": torch.zeros(1, 1, 5, 32).bfloat16()}, ArgumentError, "query has 2 heads and key 1: pass"),
    "no flag": ({"enable_gqa": 1}, ArgumentTypeError, "enable_gqa must be True or False, got 1"),
    "no mask": ({"block_mask": causal}, ArgumentTypeError, "block_mask must be a torch.*BlockMask, got function"),
    "another mask's lengths": (
        {"block_mask": MASK, "query": torch.zeros(1, 2, 4, 32).bfloat16()},
        ArgumentError,
        "lock_mask is for",
    ),
    "scale": ({"scale": -1.0}, ArgumentError, "scale must be"),
    "maxima": ({"return_aux": AuxRequest(max_scores=True)}, UnsupportedError, "max_scores of return_aux are not"),
    "two requests": ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ArgumentError, "two ways to ask"),
    "no request": ({"return_aux": {"lse"}}, ArgumentTypeError, "return_aux must be an AuxRequest, got set"),
    "options": ({"kernel_options": 3}, ArgumentTypeError, "kernel_options must be a dict, got int"),
    "an unknown option": ({"kernel_options": {"BACKEND": "FLASH"}}, UnsupportedError, "'BACKEND': 'FLASH' is not"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_is_wrong(name):
    change, error, message = MISTAKES[name]
    given = dict(zip(("query", "key", "value"), inputs(queries=3, keys=5))) | change
    with pytest.raises(error, match=f"^flex_attention: .*{message}"):
        fly_attention.flex_attention(**given)


def test_compilers_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        UnsupportedError, match=r"^flex_attention: it is compiled here already, and not for torch.comp"
    ):
        fly_attention.flex_attention(*inputs(3, 5))
