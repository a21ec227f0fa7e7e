"""The gfx942 kernel on the emulated GPU with all checks on: results, features, and what it leaves to the generic one.

A finding of the checks raises, so that a test that passes has had none.
"""

from __future__ import annotations

import pytest
import torch

from fly.errors import UnsupportedError
from kernels.dispatch import KERNELS
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.options import BLOCK_N, WAVES
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, compare
from tests.kernels.reference import check, reference

FORMS = {"dense": (False, 1), "packed": (True, 1), "split": (False, 2), "packed-split": (True, 3)}
LEFT_OUT = ("dropout", "block_mask")
(ROW,) = (row for row in KERNELS if row.name == "gfx942")


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx942 with checks, and no other kernel."""
    emulate("gfx942", "gfx942")


def inputs(seed, queries, keys, head_dim, dtype=torch.bfloat16, largest=4.0):
    """q, k and v, uniform in [-largest, largest]: large scores make maxima grow, so that rescales are taken."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, queries, 2, head_dim), (1, keys, 1, head_dim), (1, keys, 1, head_dim))
    return [((torch.rand(*s, generator=generator) * 2 - 1) * largest).to(dtype) for s in shapes]


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "dtype", "causal"),
    [
        (300, 333, 128, torch.bfloat16, True),
        (200, 256, 64, torch.float16, True),
        (33, 64, 128, torch.float16, False),  # one tile: nothing but prologue and epilogue
        (1, 450, 64, torch.bfloat16, True),
    ],
)
def test_lengths(queries, keys, head_dim, dtype, causal, seed):
    q, k, v = inputs(seed, queries, keys, head_dim, dtype)
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_every_score(causal, seed):
    """At the head dimension at which every tile makes a bias' rows again."""
    given = Inputs([70], [140], head_dim=128, seed=seed)
    report = compare(*given.tensors(), causal, 1, **FEATURES["bias"](given))
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("name", [name for name in FEATURES if not any(out in name for out in LEFT_OUT)])
def test_a_feature(name, seed):
    """Each once, in forms, masks and head dimensions by turns."""
    number = list(FEATURES).index(name)
    forms = [form for form in FORMS if not (form.startswith("packed") and name in DENSE_ONLY)]
    packed, splits = FORMS[forms[number % len(forms)]]
    lengths = ([33, 5], [140, 3]) if packed else ([40], [210])
    given = Inputs(*lengths, head_dim=(64, 128)[number % 2], packed=packed, seed=seed)
    tensors = given.tensors(entries=3 if name == "kv_batch_idx" else None)
    report = compare(*tensors, number % 3 == 0, splits, **FEATURES[name](given), **given.form())
    assert report.ok, f"seed {seed}: {report}"


def test_tiles_are_counted_with_and_without_a_rescale(seed):
    """Each wave has as many steps as tiles: none is added to fill a loop's turn. The first tile of each rescales."""
    q, k, v = (torch.zeros_like(x) for x in inputs(seed, 256, 5 * BLOCK_N, 64))
    counts = torch.zeros(2)
    flydsl_flash_attn_func(q, k, v, False, debug_counts=counts)
    assert counts.tolist() == [4 * WAVES * 2, WAVES * 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dropout_p": 0.1}, "does not do dropout"),
        ({"daz": True, "dualwave_swp_setprio": False}, "has no tuning option dualwave_swp_setprio on gfx942"),
    ],
)
def test_what_it_does_not_serve(options, why, seed):
    with pytest.raises(UnsupportedError, match=f"the gfx942 kernel {why}"):
        flydsl_flash_attn_func(*inputs(seed, 8, 8, 64), False, **options)


def test_the_generic_kernel_serves_the_rest(monkeypatch, seed):
    monkeypatch.delenv("FLY_KERNEL")
    q, k, v = inputs(seed, 40, 70, 64)
    out = flydsl_flash_attn_func(q, k, v, False)
    assert flydsl_flash_attn_func(q, k, v, False, dropout_p=0.1).shape == out.shape
    assert check(out, reference(q, k, v, causal=False)).ok
