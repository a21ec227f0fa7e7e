"""Features on the gfx950 kernel of 8-bit floats: its machine code, emulated with checks, and its builds' registers.

A finding of the emulator's checks raises. Plain builds are in `test_flash_attn_gfx950_fp8`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fly
from fly.emulator.banks import MODELS, BankCounter
from fly.runtime.device import device_for
from kernels.dispatch import KERNELS
from kernels.flash_attn_gfx950_fp8 import flash_attn_gfx950_fp8
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.byte_tiles import HEAD_DIMS
from kernels.problem.block_mask import create_block_mask
from kernels.problem.catalogue import DESCALES
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from tests.kernels.feature_cases import (
    DENSE_ONLY,
    FEATURES,
    Inputs,
    by_head,
    by_sequence_and_head,
    compare,
    document_mask,
)
from tests.kernels.feature_reference import check_used, feature_reference
from tests.kernels.fp8_reference import E4M3, references
from tests.kernels.gfx950.test_features_gfx950 import LENGTHS, MATRIX, OPERANDS, VECTOR
from tests.kernels.gfx950.test_flash_attn_gfx950_fp8 import options_of
from tests.kernels.gfx950.wait_states import too_early
from tests.kernels.paged import Paged
from tests.kernels.reference import check

FORMS = {"dense": (False, 1), "packed": (True, 1), "split": (False, 2), "packed-split": (True, 3)}
MINE = [name for name in FEATURES if name != "dropout"]


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx950 with checks, and no other kernel."""
    emulate("gfx950", "gfx950_fp8")


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
    inputs = Inputs(*lengths, head_dim=head_dim, dtype="e4m3", packed=packed, seed=seed)
    tensors = inputs.tensors(entries=3 if feature == "kv_batch_idx" else None)
    report = compare(*tensors, causal, splits, **FEATURES[feature](inputs), **inputs.form())
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(
    ("window", "causal", "queries", "keys", "splits", "head_dim"),
    [
        ((63, -1), True, 130, 450, 1, 128),  # first tiles, whole tiles and last tiles, each an odd and an even number
        ((150, 64), False, 65, 450, 1, 256),
        ((100, -1), True, 300, 300, 2, 64),
    ],
)
def test_windows(window, causal, queries, keys, splits, head_dim, seed):
    inputs = Inputs([queries], [keys], heads=1, head_dim=head_dim, dtype="e4m3", seed=seed)
    report = compare(*inputs.tensors(), causal, splits, window_size=window)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("size", "splits"), [(16, 3), (32, 1), (64, 1), (256, 2)])
def test_pages(head_dim, size, splits, seed):
    """Of sequences that are not equally long, with scales of each; what no sequence uses is NaN."""
    keys = [200, 0, 141, 1]
    wide = Paged.of(keys, size, 2, (head_dim, head_dim), torch.float32, seed)
    pages = replace(wide, **{name: getattr(wide, name).to(E4M3) for name in ("k", "v", "packed_k", "packed_v")})
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(keys), 3, 4, head_dim, generator=generator).to(E4M3)
    scales = {name: torch.rand(len(keys), 2, generator=generator) + 0.5 for name in DESCALES}
    options = {"return_lse": True, "num_kv_splits": splits} | pages.options | scales
    out, lse = flydsl_flash_attn_func(q, pages.k, pages.v, True, **options)
    parts = zip(q.unbind(0), pages.packed_k.split(keys), pages.packed_v.split(keys))
    ref = references([tuple(x[None] for x in part) for part in parts], causal=True, **scales)
    report = check(out.flatten(0, 1), ref, lse.transpose(0, 1).flatten(1))
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_block_masks(head_dim, seed):
    """At D=128 blocks of 256 rows have eight waves."""
    inputs = Inputs([300], [300], 2, 1, head_dim, "e4m3", seed=seed)
    q, k, v = inputs.tensors()
    mask = create_block_mask(by_sequence_and_head, 1, 2, 300, 300, "cpu", (256 if head_dim == 128 else 128, 64))
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    report = check_used(out, feature_reference(q, k, v, False, mask_mod=by_sequence_and_head), lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_query_of_many_heads(head_dim, seed):
    """Heads as rows, with sinks and a window."""
    inputs = Inputs([1, 1], [300, 300], 8, 2, head_dim, "e4m3", seed=seed)
    options = {"sink": inputs.floats(8), "window_size": (130, -1)}
    report = compare(*inputs.tensors(), True, 2, **options)
    assert report.ok, f"seed {seed}: {report}"


def test_the_table_has_what_is_tested_here():
    row, wide = (next(kernel for kernel in KERNELS if kernel.name == name) for name in ("gfx950_fp8", "gfx950"))
    assert set(row.features) == set(wide.features) - {"dropout"} | {"descale", "fp8_accumulate"}


PAGES = ("seqused_kv", "block_table")
OF_FP8 = OPERANDS | dict.fromkeys(DESCALES, MATRIX) | {"block_table": fly.TensorSpec("i32", 2, 4, True)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("names", "functions", "aux", "page_size"),
    [
        ((*LENGTHS, "window_left", "sink"), {}, (), None),
        (("window_left", "window_right", "softcap"), {}, (), None),
        (("alibi_slopes",), {}, (), None),
        (("bias",), {}, (), None),
        ((*PAGES, *DESCALES), {}, (), 16),
        ((*PAGES, *DESCALES), {}, (), 64),
        ((), {"score_mod": by_head}, (MATRIX,), None),
        ((), {"mask_mod": document_mask}, (VECTOR,), None),
    ],
    ids=["lengths", "softcap", "alibi", "bias", "pages of 16", "pages of 64", "score_mod", "mask_mod"],
)
def test_builds_without_spills(names, functions, aux, page_size, head_dim):
    tensor, out, lse = (fly.TensorSpec(*x, 16, True) for x in (("f8e4m3", 4), ("bf16", 4), ("f32", 3)))
    operands = [OF_FP8[name] for name in names]
    specs = (*(tensor,) * 3, out, lse, fly.ScalarSpec("f32"), None, None, None, *operands, *aux)
    features = Features(names, **{name: Mod.of(function) for name, function in functions.items()})
    options = options_of(head_dim, True, features=features, page_size=page_size)
    block = 64 * options.waves
    artefact = fly.compile(flash_attn_gfx950_fp8, *specs, block=block, target="gfx950", options=options)
    resources = artefact.resources
    assert too_early(artefact.isa) == []
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= (512 if options.alone else 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_bank_conflicts_of_pages(head_dim, monkeypatch):
    """Of 16 keys, whose tiles lie in another order, with 32 banks and with 64."""
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    device = device_for(("cpu", 0))
    q = torch.zeros(1, 128, 1, head_dim).to(E4M3)
    pages = Paged.of([256], 16, 1, (head_dim, head_dim), torch.float32, 0)
    for model in MODELS:
        device.lds_observer = counter = BankCounter(model)
        try:
            flydsl_flash_attn_func(q, pages.k.to(E4M3), pages.v.to(E4M3), False, **pages.options)
        finally:
            device.lds_observer = None
        assert set(counter.accesses) == {"buffer_load_dwordx4", "ds_read_b128", "ds_read_b64_tr_b8"}
        assert +counter.extra == {}
