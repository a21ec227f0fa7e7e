"""Bugs of which other implementations had the like, planted one at a time, in calls of gradients and in kernels.

Beside `test_planted_gradient_bugs`, whose cases are calls of one sequence. Results begin as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fly_attention import flydsl_flash_attn_backward, flydsl_flash_attn_workspace
from kernels import flash_attn_generic_bwd as bwd
from kernels.call import gradients as calls
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.work import row_statistics as rows
from tests.kernels.backward.planted import Cases, forget, shown
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """The simulated Hopper GPU without what was planned or traced before, and memory that begins as NaN."""
    emulate("sm_90a", "generic")
    forget(monkeypatch)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty_like(x, **options).fill_(torch.nan))


def wrong(
    seed: int,
    queries: int,
    keys: int,
    causal: bool = False,
    laid: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    of_lse: bool = False,
    **options: Any,
) -> bool:
    """Whether gradients of a call are; `laid`: how the gradient of out lies. `of_lse`: the loss is of lse alone."""
    inputs = Inputs([queries], [keys], 2, 2, 32, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    if of_lse:
        dlse, leaves = inputs.floats(1, 2, queries), [x.clone().requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(flydsl_flash_attn_func(*leaves, causal, return_lse=True)[1], leaves, dlse)
        return bool(gradients(q, k, v, causal, torch.zeros_like(q), dlse).wrong(found))
    found = by_autograd(q, k, v, causal, laid(dout), None, **options)
    return bool(gradients(q, k, v, causal, dout, **options).wrong(found))


def wrong_behind_the_last_sequence(seed: int) -> bool:
    """Tokens that are in no sequence have gradients of zero."""
    inputs = Inputs([9, 20], [9, 20], 2, 1, 32, packed=True, seed=seed)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 7)) for x in inputs.tensors())
    options = {**inputs.form(), "max_seqlen_q": 20, "max_seqlen_kv": 20}
    found = by_autograd(q, k, v, True, torch.ones_like(q), None, **options)
    return any(bool((x[29:] != 0).any()) for x in found)


def wrong_where_unseen_keys_are_large(seed: int) -> bool:
    """What is masked is masked before the exponential, which would be infinite."""
    inputs = Inputs([40], [40], 1, 1, 32, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    q[:, 20:], dout[:, 20:], k[:, 20:] = 0.0, 0.0, 1e30
    return not all(x.isfinite().all() for x in by_autograd(q, k, v, True, dout, None))


def wrong_with_dirty_counters(seed: int) -> bool:
    """In turn, with a window, in a workspace that held something else."""
    inputs = Inputs([70], [140], 1, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    options: dict[str, Any] = {"window_size": (100, 9)}
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, **options)
    options["deterministic"] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLY_BACKWARD_KERNEL", "sm90")
        size = flydsl_flash_attn_workspace(q, k, v, False, backward=True, **options)
        memory = torch.full((size,), 1, dtype=torch.uint8)
        found = flydsl_flash_attn_backward(dout, q, k, v, out, lse, False, workspace=memory, **options)
    return bool(gradients(q, k, v, False, dout, window_size=(100, 9)).wrong(found))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same with heads outside of tokens."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CASES: Cases = {
    "dout transposed": lambda seed: wrong(seed, 40, 40, laid=apart),
    "lse alone": lambda seed: wrong(seed, 40, 40, of_lse=True),
    "dropout": lambda seed: wrong(seed, 70, 40, dropout_p=0.4, rng_state=torch.tensor([seed, 8])),
    "keys that nobody sees": lambda seed: wrong(seed, 20, 160, window_size=(5, 9)),
    "tokens behind": wrong_behind_the_last_sequence,
    "large keys": wrong_where_unseen_keys_are_large,
    "dirty counters": wrong_with_dirty_counters,
}
_MASKED = """if hide is not None:
        scores = hide(scores)
    exponents = scores.fma_rows(given.scale(scale_log2), lse2.map(lambda x: -x))"""
_MASKED_LATE = """exponents = scores.fma_rows(given.scale(scale_log2), lse2.map(lambda x: -x))
    if hide is not None:
        seen = hide(scores.map(lambda x, r, c: x * 0.0))
        exponents = exponents.map(lambda x, r, c: fly.log2(fly.exp2(x) * fly.exp2(seen.tiles[r][c])))"""
BUGS = (
    Bug(
        "the gradient of out is taken to lie as out does",
        calls,
        "run",
        "dout = loadable(dout) => dout = dout.as_strided(out.shape, out.stride())",
        "dout transposed",
        "wrong",
    ),
    Bug(
        "a missing gradient of out is whatever there is",
        calls,
        "run",
        "dout = torch.zeros_like(out, memory_format=_CONTIGUOUS) => dout = out",
        "lse alone",
        "wrong",
    ),
    Bug(
        "the backward pass draws anew what is dropped",
        calls,
        "run",
        'if dlse is not None and => tensors["rng_state"] = tensors["rng_state"] + 1\n    if dlse is not None and',
        "dropout",
        "wrong",
    ),
    Bug(
        "every tile of queries has the first one's dropped weights",
        bwd._KeyBlock,
        "take_in",
        "lse, hide, first_query, scarce => lse, hide, fly.i32(0), scarce",
        "dropout",
        "wrong",
    ),
    Bug(
        "blocks of keys that nobody sees are not written",
        bwd.flash_attn_generic_dkdv,
        "function",
        "fly.when(first_key < keys.length) => fly.when((first_key < keys.length) & (tiles.first < tiles.end))",
        "keys that nobody sees",
        "wrong",
    ),
    Bug(
        "memory for gradients is not cleared where tokens have none",
        calls,
        "results_for",
        "torch.zeros_like if => torch.empty_like if",
        "tokens behind",
        "wrong",
    ),
    Bug(
        "scores are masked behind the exponential",
        bwd,
        "weights",
        f"{_MASKED} => {_MASKED_LATE}",
        "large keys",
        "wrong",
    ),
    Bug(
        "counters of turns begin with what was there",
        rows,
        "_clear_counts",
        "counts.store(0, at) => pass",
        "dirty counters",
        "wrong deadlock global-race out-of-bounds",
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_there_is_none(case, seed):
    assert not CASES[case](seed), f"seed {seed}"


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, monkeypatch, seed):
    found = shown(CASES, bug, monkeypatch, seed)
    assert found in bug.found.split(), f"{found}, seed {seed}"
