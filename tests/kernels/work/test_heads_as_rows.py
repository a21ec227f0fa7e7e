"""One query a sequence: query heads of a key head are rows of one block, on emulated GPUs with checks."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.work import steps
from kernels.work.split_combine import split_combine
from tests.kernels.feature_cases import Inputs, compare
from tests.kernels.reference import check, reference


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", request.param)
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    return request.param


@pytest.fixture
def grids(monkeypatch):
    """The grids that forward kernels are bound with."""
    found = []
    bind = steps.bind

    def spy(kernel, blocks, *rest):
        if kernel is not split_combine:
            found.append(blocks)
        return bind(kernel, blocks, *rest)

    monkeypatch.setattr(steps, "bind", spy)
    return found


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


SINKS = torch.tensor([1.0, -1.0, 0.5, 2.0, 7.0, -math.inf])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("causal", "splits", "options"),
    [
        (True, 1, {}),
        (False, 3, {}),
        (True, 2, {"softcap": 2.0, "seqused_kv": ints(100, 0)}),
        (False, 1, {"kv_batch_idx": ints(1, 0), "cache_leftpad": ints(30, 2)}),
        (True, 1, {"sink": SINKS}),
        (False, 3, {"sink": SINKS, "seqused_kv": ints(100, 0)}),
        (True, 1, {"window_size": (20, 0)}),
        (False, 2, {"window_size": (70, 5), "seqused_kv": ints(125, 3), "sink": SINKS}),
        (False, 1, {"window_size": (-1, 0)}),
        (True, 1, {"window_size": (0, 0), "softcap": 3.0}),
    ],
    ids=[
        "causal",
        "splits",
        "lengths",
        "cache",
        "sinks",
        "sinks of splits",
        "window",
        "window of splits",
        "right side",
        "one key",
    ],
)
def test_blocks_are_those_of_key_heads(arch, causal, splits, options, grids, seed):
    inputs = Inputs([1, 1], [130, 130], heads=6, kv_heads=2, head_dim=64, seed=seed)
    report = compare(*inputs.tensors(), causal, splits, **options)
    assert report.ok, f"seed {seed}: {report}"
    assert grids == [(1, 2, 2 * splits)]


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": torch.tensor([1.0, 0.5, 0.25, 0.125])},
        {"mask_mod": lambda b, h, query, key: key % 4 != h},
        {"seqused_q": ints(1)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_goes_by_head_is_right(arch, options, grids, seed):
    inputs = Inputs([1], [70], heads=4, kv_heads=2, head_dim=64, seed=seed)
    report = compare(*inputs.tensors(), True, **options)
    assert report.ok, f"seed {seed}: {report}"
    assert grids == [(1, 4, 1)]


def test_strides_of_heads_are_free(arch, grids, seed):
    """Also those of the output; several calls on other tensors go through one plan."""
    for _ in range(2):
        q, k, v = Inputs([1], [70], heads=4, kv_heads=2, head_dim=64, seed=seed).tensors()
        wide = torch.zeros(1, 1, 4, 3, 64, dtype=q.dtype)
        wide[..., 1, :] = q
        out = torch.full_like(wide, 7)
        result, lse = flydsl_flash_attn_func(wide[..., 1, :], k, v, out=out[..., 2, :], return_lse=True)
        report = check(result, reference(q, k, v, causal=True), lse)
        assert report.ok, f"seed {seed}: {report}"
        assert (out[..., :2, :] == 7).all()
    assert grids == [(1, 2, 1)]
