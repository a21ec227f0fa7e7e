"""Features on the gfx942 kernel of 8-bit floats: its machine code, emulated with checks, and its builds' registers.

A finding of the emulator's checks raises. Plain builds are in `test_flash_attn_gfx942_fp8`.
"""

from __future__ import annotations

import itertools

import pytest

import fly
from kernels.dispatch import KERNELS
from kernels.flash_attn_gfx942_fp8 import HEAD_DIMS, flash_attn_gfx942_fp8
from kernels.problem.catalogue import DESCALES
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, by_head, compare, document_mask
from tests.kernels.gfx942.test_flash_attn_gfx942_fp8 import options_of
from tests.kernels.gfx950.test_features_gfx950 import LENGTHS, MATRIX, OPERANDS, VECTOR

FORMS = {"dense": (False, 1), "packed": (True, 1), "split": (False, 2), "packed-split": (True, 3)}
MINE = [name for name in FEATURES if name != "dropout"]


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx942 with checks, and no other kernel."""
    emulate("gfx942", "gfx942_fp8")


def combinations():
    """Every feature once, in forms, masks and head dimensions by turns; all of them with --exhaustive."""
    rows = []
    for number, feature in enumerate(MINE):
        forms = [form for form in FORMS if not (form.startswith("packed") and feature in DENSE_ONLY)]
        every = list(itertools.product(forms, (False, True), HEAD_DIMS))
        for place, (form, causal, head_dim) in enumerate(every):
            marks = [] if place == number * 7 % len(every) else [pytest.mark.exhaustive]
            name = f"{feature}-{form}-{'causal' if causal else 'full'}-{head_dim}"
            rows.append(pytest.param(feature, form, causal, head_dim, marks=marks, id=name))
    return rows


@pytest.mark.parametrize(("feature", "form", "causal", "head_dim"), combinations())
def test_a_feature(feature, form, causal, head_dim, seed):
    packed, splits = FORMS[form]
    lengths = ([33, 5], [140, 3]) if packed else ([40], [210])
    inputs = Inputs(*lengths, head_dim=head_dim, dtype="e4m3fnuz", packed=packed, seed=seed)
    tensors = inputs.tensors(entries=3 if feature == "kv_batch_idx" else None)
    report = compare(*tensors, causal, splits, **FEATURES[feature](inputs), **inputs.form())
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(
    ("window", "causal", "queries", "keys", "splits", "head_dim"),
    [
        ((63, -1), True, 130, 450, 1, 128),  # first tiles, whole tiles and last tiles
        ((100, -1), True, 300, 300, 2, 64),
    ],
)
def test_windows(window, causal, queries, keys, splits, head_dim, seed):
    inputs = Inputs([queries], [keys], heads=1, head_dim=head_dim, dtype="e4m3fnuz", seed=seed)
    report = compare(*inputs.tensors(), causal, splits, window_size=window)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_query_of_many_heads(head_dim, seed):
    """Heads as rows, with sinks and a window."""
    inputs = Inputs([1, 1], [300, 300], 8, 2, head_dim, "e4m3fnuz", seed=seed)
    options = {"sink": inputs.floats(8), "window_size": (130, -1)}
    report = compare(*inputs.tensors(), True, 2, **options)
    assert report.ok, f"seed {seed}: {report}"


def test_the_table_has_what_is_tested_here():
    row, wide = (next(kernel for kernel in KERNELS if kernel.name == name) for name in ("gfx942_fp8", "gfx942"))
    assert set(row.features) == set(wide.features) | {"descale", "fp8_accumulate"}


OF_FP8 = OPERANDS | dict.fromkeys(DESCALES, MATRIX)


@pytest.mark.sample(2)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("names", "functions", "aux"),
    [
        ((*LENGTHS, "window_left", "sink"), {}, ()),
        (("window_left", "window_right", "softcap", *DESCALES), {}, ()),
        (("alibi_slopes",), {}, ()),
        (("bias",), {}, ()),
        ((), {"score_mod": by_head}, (MATRIX,)),
        ((), {"mask_mod": document_mask}, (VECTOR,)),
    ],
    ids=["lengths", "softcap", "alibi", "bias", "score_mod", "mask_mod"],
)
def test_builds_without_spills(names, functions, aux, head_dim):
    tensor, out, lse = (fly.TensorSpec(*x, 16, True) for x in (("f8e4m3fnuz", 4), ("bf16", 4), ("f32", 3)))
    operands = [OF_FP8[name] for name in names]
    specs = (*(tensor,) * 3, out, lse, fly.ScalarSpec("f32"), None, None, None, *operands, *aux)
    features = Features(names, **{name: Mod.of(function) for name, function in functions.items()})
    options = options_of(head_dim, True, features=features)
    block = 64 * options.waves
    artefact = fly.compile(flash_attn_gfx942_fp8, *specs, block=block, target="gfx942", options=options)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= 256
