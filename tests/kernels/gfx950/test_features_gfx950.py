"""Features on the gfx950 kernel: its machine code, emulated with checks, and what the builds need of registers.

A finding of the emulator's checks raises. Plain builds are held by `test_flash_attn_gfx950_isa`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import fly
from fly.runtime.device import device_for
from kernels.dispatch import KERNELS
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.options import WAVES, DualWaveOptions
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, by_head, compare, document_mask

FORMS = {"dense": (False, 1), "packed": (True, 1), "split": (False, 2), "packed-split": (True, 3)}


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx950 with checks, and no other kernel."""
    emulate("gfx950", "gfx950")


def combinations():
    """Every feature once, in forms, masks and head dimensions by turns; all of them with --exhaustive."""
    rows = []
    for number, feature in enumerate(FEATURES):
        forms = [form for form in FORMS if not (form.startswith("packed") and feature in DENSE_ONLY)]
        every = list(itertools.product(forms, (False, True), (64, 128)))
        for place, (form, causal, head_dim) in enumerate(every):
            marks = [] if place == number * 5 % len(every) else [pytest.mark.exhaustive]
            name = f"{feature}-{form}-{'causal' if causal else 'full'}-{head_dim}"
            rows.append(pytest.param(feature, form, causal, head_dim, marks=marks, id=name))
    return rows


@pytest.mark.parametrize(("feature", "form", "causal", "head_dim"), combinations())
def test_a_feature(feature, form, causal, head_dim, seed):
    packed, splits = FORMS[form]
    lengths = ([33, 5], [140, 3]) if packed else ([40], [210])
    inputs = Inputs(*lengths, head_dim=head_dim, packed=packed, seed=seed)
    tensors = inputs.tensors(entries=3 if feature == "kv_batch_idx" else None)
    report = compare(*tensors, causal, splits, **FEATURES[feature](inputs), **inputs.form())
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.exhaustive), 128])
@pytest.mark.parametrize("feature", ["alibi heads", "bias", "mask_mod", "window of chunks"])
def test_a_feature_beside_dropout(feature, head_dim, seed):
    """Whose builds read operands later, or narrow splats."""
    inputs = Inputs([40], [210], head_dim=head_dim, seed=seed)
    options = {**FEATURES[feature](inputs), **FEATURES["dropout"](inputs)}
    report = compare(*inputs.tensors(), True, **options)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(
    ("window", "causal", "queries", "keys", "splits"),
    [
        ((0, 0), False, 70, 40, 1),  # queries before all keys
        ((63, -1), True, 130, 450, 1),  # first tiles, whole tiles and last tiles, each an odd and an even number
        ((150, 64), False, 65, 450, 1),
        ((300, -1), False, 3, 450, 3),
        ((100, -1), True, 300, 300, 2),
    ],
)
def test_windows(window, causal, queries, keys, splits, seed):
    inputs = Inputs([queries], [keys], heads=1, head_dim=64, seed=seed)
    report = compare(*inputs.tensors(), causal, splits, window_size=window)
    assert report.ok, f"seed {seed}: {report}"


def test_behind_the_first_tiles_a_window_costs_no_mask(monkeypatch):
    """Tiles that need a mask lower the limit to -inf; if it stayed there, every later tile took the rare branch."""
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    device, executed = device_for(("cpu", 0)), []
    for tiles in (9, 13):
        q, k = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (256, 64 * tiles))
        flydsl_flash_attn_func(q, k, k, False, window_size=(64 * (tiles - 4), -1))
        executed.append(device.last.executed)
    assert 176 < (executed[1] - executed[0]) / (4 * WAVES) < 183  # 176 without a window


@pytest.mark.parametrize(
    ("dtype", "unaligned", "most"),
    [(torch.float32, 0, 205), (torch.bfloat16, 0, 245), (torch.bfloat16, 1, 260)],
)
def test_a_bias_is_loaded_in_runs(dtype, unaligned, most, monkeypatch):
    """Instructions of a wave and a tile: 178.5 without a bias, 436.5 and more where every score has a load."""
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    device, executed = device_for(("cpu", 0)), []
    for keys in (9 * 64, 13 * 64):
        q, k = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (256, keys))
        bias = torch.zeros(256, keys + unaligned, dtype=dtype)[:, unaligned:]
        flydsl_flash_attn_func(q, k, k, False, bias=bias)
        executed.append(device.last.executed)
    assert 178 < (executed[1] - executed[0]) / (4 * WAVES) < most


@pytest.mark.parametrize(("head_dim", "splits"), [pytest.param(64, 1, marks=pytest.mark.exhaustive), (128, 2)])
def test_everything_at_once(head_dim, splits, seed):
    """In the documented order; keys and biases count from the first key in use."""
    inputs = Inputs([21], [150], heads=4, kv_heads=2, head_dim=head_dim, dtype="f16", seed=seed)
    options = {
        "softcap": 2.0,
        "alibi_slopes": inputs.floats(4).abs() * 0.1,
        "bias": inputs.floats(1, 4, 21, 150),
        "sink": inputs.floats(4),
        "score_mod": by_head,
        "mask_mod": lambda b, h, query, key, table: (key + query + b) % 4 != 1,
        "aux_tensors": (inputs.floats(4, 150),),
        "window_size": (90, 20),
        "seqused_q": torch.tensor([20], dtype=torch.int32),
        "seqused_kv": torch.tensor([140], dtype=torch.int32),
        "cache_leftpad": torch.tensor([37], dtype=torch.int32),
        "kv_batch_idx": torch.tensor([2], dtype=torch.int32),
    }
    report = compare(*inputs.tensors(entries=3), True, splits, softmax_scale=0.3, **options)
    assert report.ok, f"seed {seed}: {report}"


def test_rows_without_a_key(seed):
    """out 0 and lse -inf, or with a sink the sink, however far from other scores."""
    tensors = Inputs([21], [75], head_dim=64, seed=seed).tensors()
    sink = torch.tensor([-300.0, -math.inf])

    def none(*_):
        return -math.inf

    for hidden, extra in (
        ({"mask_mod": lambda b, h, query, key: query != 4}, {"sink": sink}),
        ({"score_mod": none}, {}),
    ):
        out, lse = flydsl_flash_attn_func(*tensors, False, return_lse=True, **hidden, **extra)
        rows = slice(4, 5) if extra else slice(None)
        assert (out[:, rows] == 0).all()
        wanted = (sink if extra else torch.full((2,), -math.inf))[None, :, None].expand_as(lse[:, :, rows])
        torch.testing.assert_close(lse[:, :, rows], wanted)


def test_the_table_has_what_is_tested_here():
    row = next(kernel for kernel in KERNELS if kernel.name == "gfx950")
    mine = {"seqused", "cache_leftpad", "kv_batch_idx", "window", "softcap", "alibi", "bias", "sink"}
    # tests.kernels.cache.test_paged, .test_block_mask_gfx950, .test_attention_chunk, .backward.test_dropout_kernels,
    # .work.test_batch_invariance
    elsewhere = {"paged", "block_mask", "attention_chunk", "dropout", "split_keys"}
    assert set(row.features) == mine | elsewhere | {"packed", "split_kv", "debug_counts", "score_mod", "mask_mod"}


VECTOR = fly.TensorSpec("i32", 1, 4, True)
OPERANDS = {
    "rng_state": fly.TensorSpec("i64", 1, 8, True),
    "dropped": fly.ScalarSpec("i32"),
    "query_heads": fly.ScalarSpec("i32"),
    **dict.fromkeys(("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx"), VECTOR),
    **dict.fromkeys(("window_left", "window_right"), fly.ScalarSpec("i32")),
    "softcap": fly.ScalarSpec("f32"),
    "alibi_slopes": fly.TensorSpec("f32", 2, 4, True),
    "bias": fly.TensorSpec("f32", 4, 16, True),
    "sink": fly.TensorSpec("f32", 1, 4, True),
}
BIASES = {
    "f32": OPERANDS["bias"],
    "bf16": fly.TensorSpec("bf16", 4, 16, True),
    "unaligned": fly.TensorSpec("f16", 4, 2, True),
    "keys": fly.TensorSpec("f32", 3, 16, True),
}
LENGTHS = ("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx")
MATRIX = fly.TensorSpec("f32", 2, 4, True)


@pytest.mark.parametrize(
    ("names", "functions", "aux"),
    [
        ((*LENGTHS, "window_left", "sink"), {}, ()),
        (("window_left", "window_right", "softcap"), {}, ()),
        (("alibi_slopes",), {}, ()),
        (("bias",), {}, ()),
        (("rng_state", "dropped", "query_heads"), {}, ()),
        ((), {"score_mod": by_head}, (MATRIX,)),
        ((), {"mask_mod": document_mask}, (VECTOR,)),
    ],
    ids=["lengths", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"],
)
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.exhaustive), 128])
def test_two_waves_a_simd_without_spills(names, functions, aux, head_dim):
    """8 waves a block are two a SIMD, with 256 registers each. Several functions at once may take more."""
    no_spills(Features(names, **{n: Mod.of(function) for n, function in functions.items()}), head_dim, names, aux)


@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", BIASES)
def test_biases_of_every_kind_without_spills(bias, causal, monkeypatch):
    monkeypatch.setitem(OPERANDS, "bias", BIASES[bias])
    no_spills(Features(("bias",)), 128, ("bias",), (), causal)


def no_spills(features, head_dim, names, aux, causal=False) -> None:
    """A build with two waves a SIMD has no spills."""
    tensor, lse = fly.TensorSpec("bf16", 4, 16, True), fly.TensorSpec("f32", 3, 4, True)
    operands = [OPERANDS[name] for name in names]
    specs = (*(tensor,) * 4, lse, fly.ScalarSpec("f32"), None, None, None, *operands, *aux)
    options = DualWaveOptions(head_dim, causal, features=features)
    artefact = fly.compile(flash_attn_gfx950, *specs, block=WAVES * 64, target="gfx950", options=options)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= 256
