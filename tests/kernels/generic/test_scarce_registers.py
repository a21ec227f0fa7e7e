"""Builds of the generic forward kernel for AMD that have too few scalar registers: their results in the emulator."""

from __future__ import annotations

import pytest

from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import create_block_mask
from tests.kernels.feature_cases import FEATURES, Inputs, compare
from tests.kernels.feature_reference import check_used, feature_reference

ARCHS = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


@ARCHS
@pytest.mark.parametrize(
    ("features", "form", "splits"),
    [
        (("mask_mod",), {}, 1),
        (("mask_mod aux",), {}, 2),
        (("softcap", "dropout"), {}, 1),
        (("softcap", "dropout"), {"packed": True}, 2),
    ],
    ids=str,
)
def test_results(features, form, splits, arch, emulate, seed):
    emulate(arch, "generic")
    lengths = ([40, 7], [90, 30]) if form else ([40], [130])
    inputs = Inputs(*lengths, head_dim=64, seed=seed, **form)
    options = {name: value for feature in features for name, value in FEATURES[feature](inputs).items()}
    report = compare(*inputs.tensors(), True, splits, **options, **inputs.form())
    assert report.ok, f"seed {seed}: {report}"


def sees_some(batch, head, query, key):
    return (key <= query + 60) & (key > query - 70)


@pytest.mark.parametrize(
    ("arch", "head_dim", "drops"),
    [
        ("gfx942", 64, True),
        ("gfx942", 160, True),
        ("gfx942", 160, False),
        ("gfx950", 64, True),
        ("gfx950", 160, True),
        ("gfx950", 192, True),
    ],
)
def test_a_block_mask(arch, head_dim, drops, emulate, seed):
    emulate(arch, "generic")
    inputs = Inputs([140], [210], heads=1, head_dim=head_dim, seed=seed)
    q, k, v = inputs.tensors()
    options = {"causal": False, **(FEATURES["dropout"](inputs) if drops else {})}
    listed = create_block_mask(sees_some, None, None, 140, 210, "cpu", 128)
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=listed, return_lse=True, **options)
    report = check_used(out, feature_reference(q, k, v, mask_mod=sees_some, **options), lse)
    assert report.ok, f"seed {seed}: {report}"
