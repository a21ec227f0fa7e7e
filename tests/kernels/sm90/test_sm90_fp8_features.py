"""Features on the Hopper kernel for 8-bit inputs, on the simulated GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError
from kernels.flash_attn_api import flash_attn_func
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.catalogue import FP8_SUMS
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, compare
from tests.kernels.simulated import simulated  # noqa: F401

KERNEL = "sm90_fp8"
HEAD_DIMS = (64, 96, 128, 192, 256)
# every feature in one form, and every form and head dimension with some feature
CASES = [
    (name, FP8_SUMS[i % 2], name not in DENSE_ONLY and i % 3 == 0, HEAD_DIMS[i % 5])
    for i, name in enumerate(name for name in FEATURES if name != "dropout")
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("queries", [1, 150])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_feature(case, queries, seed):
    """More rows than a tile and more keys than one, and decoding."""
    name, how, packed, head_dim = case
    lengths = ([queries, 3], [200, 3]) if packed else ([queries] * 2, [150] * 2)
    inputs = Inputs(*lengths, 2, 1, head_dim, "e4m3", packed, seed=seed)
    options = inputs.form() | FEATURES[name](inputs)
    tensors = inputs.tensors(3 if name == "kv_batch_idx" else None)
    report = compare(*tensors, seed % 2 == 0, **options, fp8_accumulate=how)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("exact", ArgumentError, "fp8_accumulate must be 'float32' or 'fast', got 'exact'"),
        (True, ArgumentTypeError, "fp8_accumulate must be 'float32' or 'fast', got True"),
        (np.zeros(2), ArgumentTypeError, "fp8_accumulate must be 'float32' or 'fast', got array"),
    ],
)
def test_what_no_sums_are_called(how, error, text):
    q, k, v = Inputs([4], [4], head_dim=64, dtype="e4m3").tensors()
    with pytest.raises(error, match=text):
        flydsl_flash_attn_func(q, k, v, fp8_accumulate=how)


def test_flash_attentions_functions_take_it():
    q, k, v = Inputs([40], [70], head_dim=64, dtype="e4m3").tensors()
    out = flash_attn_func(q, k, v, fp8_accumulate="fast")
    assert torch.equal(out, flydsl_flash_attn_func(q, k, v, False, fp8_accumulate="fast"))
    assert not torch.equal(out, flash_attn_func(q, k, v))
