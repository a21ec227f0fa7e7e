"""Score modifiers, masks, windows, sinks and lengths in use: the generic kernel's machine code, emulated with checks.

A finding of the emulator's checks, such as a load outside of a tensor, raises.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

import fly
from fly.errors import DTypeError, EmulatorError
from kernels import dispatch, flash_attn_interface
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.contract import Launch
from kernels.problem.mods import Mod
from kernels.work import steps
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, Pair, by_head, compare, document_mask, stripes
from tests.kernels.feature_reference import check_used, feature_reference

ARCHS = ("gfx942", "gfx950")
FORMS = {"dense": (False, 1), "packed": (True, 1), "split": (False, 2), "packed-split": (True, 3)}


@pytest.fixture(params=["gfx950"])
def arch(request):
    """A test that has no other runs on one emulated GPU."""
    return request.param


@pytest.fixture(autouse=True)
def emulated(arch, emulate):
    """The emulated GPU of a test's `arch`, with checks, and the generic kernel."""
    emulate(arch, "generic")


def combinations():
    """Every feature in half of its forms, each with one mask on one of the GPUs; the others with --exhaustive."""
    forms = [(feature, form) for feature in FEATURES for form in FORMS]
    possible = [(f, form) for f, form in forms if not (form.startswith("packed") and f in DENSE_ONLY)]
    rows = []
    for number, (feature, form) in enumerate(possible):
        row = number // len(FORMS)
        for place, (causal, arch) in enumerate(itertools.product((False, True), ARCHS)):
            taken = (number + row) % 2 == 0 and (number // 2 + row) % 4 == place
            marks = [] if taken else [pytest.mark.exhaustive]
            name = f"{feature}-{form}-{'causal' if causal else 'full'}-{arch}"
            rows.append(pytest.param(arch, feature, form, causal, marks=marks, id=name))
    return rows


@pytest.mark.parametrize(("arch", "feature", "form", "causal"), combinations())
def test_a_feature(arch, feature, form, causal, seed):
    packed, splits = FORMS[form]
    lengths = ([13, 40, 5], [70, 3, 33]) if packed else ([21, 21], [75, 75])
    inputs = Inputs(*lengths, packed=packed, seed=seed)
    q, k, v = inputs.tensors(entries=3 if feature == "kv_batch_idx" else None)
    report = compare(q, k, v, causal, splits, **FEATURES[feature](inputs), **inputs.form())
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(("arch", "causal", "splits"), [("gfx942", False, 2), ("gfx950", True, 1)])
def test_everything_at_once(arch, causal, splits, seed):
    """In the documented order; keys and biases count from the first key in use."""
    inputs = Inputs([21, 21], [100, 100], heads=4, kv_heads=2, head_dim=40, dtype="f16", seed=seed)
    q, k, v = inputs.tensors(entries=3)
    options = {
        "softcap": 2.0,
        "alibi_slopes": inputs.floats(4).abs() * 0.1,
        "bias": inputs.floats(1, 4, 21, 100),
        "sink": inputs.floats(4),
        "score_mod": by_head,
        "mask_mod": lambda b, h, query, key, table: (key + query + b) % 4 != 1,
        "aux_tensors": (inputs.floats(4, 100),),
        "window_size": (60, 20),
        "seqused_q": torch.tensor([21, 10], dtype=torch.int32),
        "seqused_kv": torch.tensor([90, 100], dtype=torch.int32),
        "cache_leftpad": torch.tensor([0, 37], dtype=torch.int32),
        "kv_batch_idx": torch.tensor([2, 0], dtype=torch.int32),
    }
    report = compare(q, k, v, causal, splits, softmax_scale=0.3, **options)
    assert report.ok, f"seed {seed}: {report}"


def test_features_can_have_another_value_dimension(seed):
    inputs = Inputs([9, 9], [70, 70], head_dim_v=48, seed=seed)
    report = compare(*inputs.tensors(), True, bias=inputs.floats(9, 70), window_size=(20, 0), sink=inputs.floats(2))
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(
    ("name", "splits"), [("seqused_q", 2), ("seqused_kv", 1), ("cache_leftpad", 2), ("kv_batch_idx", 1)]
)
@pytest.mark.usefixtures("unchecked")
def test_counts_that_are_wrong_stay_inside(name, splits, seed):
    """Lengths, paddings and entries that leave the tensors are cut; the emulator faults on any other access."""
    inputs = Inputs([9, 9], [70, 70], seed=seed)
    most = {"seqused_q": 9, "kv_batch_idx": 1}.get(name, 70)
    tensors = inputs.tensors()
    counts = {name: torch.tensor([-5, 1000], dtype=torch.int32)}
    out, lse = flydsl_flash_attn_func(*tensors, False, return_lse=True, num_kv_splits=splits, **counts)
    ref = feature_reference(*tensors, False, **{name: counts[name].clamp(0, most)})
    report = check_used(out, ref, lse)
    assert report.ok, f"seed {seed}: {report}"


def test_masked_rows_of_a_block_are_zero(seed):
    """Rows without a key: out 0 and lse -inf, or with a sink the sink."""
    inputs = Inputs([21], [75], seed=seed)
    q, k, v = inputs.tensors()
    sink = torch.tensor([0.5, -math.inf])
    for options in ({"mask_mod": lambda b, h, query, key: query != 4}, {"score_mod": lambda *_: -math.inf}):
        for extra in ({}, {"sink": sink}):
            out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, **options, **extra)
            rows = slice(4, 5) if "mask_mod" in options else slice(None)
            assert (out[:, rows] == 0).all()
            wanted = (sink if extra else torch.full((2,), -math.inf))[None, :, None].expand_as(lse[:, :, rows])
            torch.testing.assert_close(lse[:, :, rows], wanted)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("empty", ["keys", "queries"])
def test_empty_calls_with_a_sink(packed, empty):
    """The softmax is the sink's alone: lse is the sink, also in the second call, and with numbers before it."""
    sizes = ([0], [3]) if empty == "queries" else ([3], [0])
    inputs = Inputs(*sizes, packed=packed)
    options = {"sink": torch.tensor([1.0, 2.0]), "window_size": (4, 4), "softcap": 3.0, **inputs.form()}
    if packed:
        options |= {"max_seqlen_q": sizes[0][0], "max_seqlen_kv": sizes[1][0]}
    for _ in range(2):
        out, lse = flydsl_flash_attn_func(*inputs.tensors(), return_lse=True, **options)
        assert (out == 0).all()
        assert torch.equal(lse, torch.tensor([1.0, 2.0])[:, None].expand_as(lse))


def test_an_index_outside_of_an_auxiliary_tensor_is_found(arch):
    """What the tests above would see if the kernel asked for a key or query that does not exist."""
    q, k, v = Inputs([21], [75]).tensors()
    table = torch.zeros(75)
    flydsl_flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j, t: s + t[j], aux_tensors=[table])
    with pytest.raises(EmulatorError, match="operands"):
        flydsl_flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j, t: s + t[j + 1], aux_tensors=[table])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8])
def test_auxiliary_tensors_of_every_dtype(dtype, seed):
    inputs = Inputs([5], [20], seed=seed)
    table = inputs.ints(0, 9, 20).to(dtype)
    convert = Pair(
        lambda s, b, h, i, j, t: s + t[j].to(fly.f32) * 0.125, lambda s, b, h, i, j, t: s + t[j].float() * 0.125
    )
    report = compare(*inputs.tensors(), False, score_mod=convert, aux_tensors=[table])
    assert report.ok, f"seed {seed}: {report}"


def test_auxiliary_tensors_of_any_rank_and_stride(seed):
    inputs = Inputs([5, 5], [20, 20], seed=seed)
    table = inputs.floats(20, 2, 5, 2).permute(3, 1, 2, 0)[:, :, ::1]
    report = compare(
        *inputs.tensors(), False, score_mod=lambda s, b, h, i, j, t: s + t[b, h, i, j], aux_tensors=[table]
    )
    assert report.ok, f"seed {seed}: {report}"
    everywhere = compare(
        *inputs.tensors(),
        False,
        score_mod=lambda s, b, h, i, j, t: s + t[h],
        aux_tensors=[torch.tensor(0.5).expand(2)],
    )
    assert everywhere.ok, f"seed {seed}: {everywhere}"


RETURNED = {
    "an int tensor's element": ("score_mod", lambda s, b, h, q, k: k, r"score_mod .* returned .*; expected a float"),
    "nothing": ("score_mod", lambda s, b, h, q, k: None, r"score_mod .* returned None; expected a float"),
    "a comparison": ("score_mod", lambda s, b, h, q, k: q > k, r"score_mod .* returned .*; expected a float"),
    "a float": ("mask_mod", lambda b, h, q, k: 1.0, r"mask_mod .* returned 1\.0; expected a comparison's result"),
    "a number": ("mask_mod", lambda b, h, q, k: q - k, r"mask_mod .* returned .*; expected a comparison's result"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_function_must_return(name):
    keyword, function, message = RETURNED[name]
    with pytest.raises(DTypeError, match=message):
        flydsl_flash_attn_func(*Inputs([5], [20]).tensors(), **{keyword: function})


def test_a_function_may_return_constants(seed):
    inputs = Inputs([5], [20], seed=seed)
    for options in (
        {"score_mod": Pair(lambda *_: 1, lambda s, *_: torch.ones_like(s))},
        {"mask_mod": lambda *_: True},
        {"mask_mod": lambda *_: False},
    ):
        report = compare(*inputs.tensors(), False, **options)
        assert report.ok, f"seed {seed}: {report}"


@pytest.fixture
def compiled(monkeypatch):
    """How many kernels were prepared so far, with no plan kept from before."""
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    names = []

    def counting(kernel, *arguments):
        names.append(kernel.name)
        return bind(kernel, *arguments)

    bind = steps.bind
    monkeypatch.setattr(steps, "bind", counting)
    return names


def below(limit):
    """A fresh function for every call."""
    return lambda b, h, q, k: k < limit


def test_functions_of_equal_code_are_compiled_once(compiled, seed):
    q, k, v = Inputs([5], [20], seed=seed).tensors()
    for limit, count in ((3, 1), (3, 1), (7, 2), (3, 2)):
        out = flydsl_flash_attn_func(q, k, v, False, mask_mod=below(limit))
        wanted = feature_reference(q, k, v, False, mask_mod=below(limit)).out
        torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=0)
        assert len(compiled) == count


def test_other_tensors_of_the_same_shapes_are_not_compiled_again(compiled, seed):
    for i in range(2):
        inputs = Inputs([5], [20], seed=seed + i)
        options = {"bias": inputs.floats(5, 20), "sink": inputs.floats(2), "score_mod": by_head}
        report = compare(*inputs.tensors(), True, 2, aux_tensors=[inputs.floats(2, 20)], **options)
        assert report.ok, f"seed {seed}: {report}"
    assert compiled == ["flash_attn_generic", "split_combine"]


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": (5, 6)},
        {"window_size": (4, -1)},
        {"softcap": 0.0},
        {"softcap": 2.5},
        {"sink": None},
        {"sink": torch.zeros(2, dtype=torch.bfloat16)},
        {"mask_mod": stripes},
        {"aux_tensors": [torch.zeros(3)], "mask_mod": document_mask},
    ],
    ids=lambda change: " ".join(change),
)
def test_what_shapes_a_launch_is_part_of_the_plan(change, monkeypatch):
    prepared = []
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(
        dispatch,
        "prepare_function",
        lambda kernel: lambda tensors, request: prepared.append(request) or Launch(lambda *_: None),
    )
    q, k, v = Inputs([3], [3]).tensors()
    options = {"window_size": (5, 5), "softcap": 2.0, "sink": torch.zeros(2)}
    for _ in range(2):
        flydsl_flash_attn_func(q, k, v, **options)
    assert len(prepared) == 1
    if "aux_tensors" in change:
        change = change | {"aux_tensors": [torch.zeros(3, dtype=torch.int32)]}
    flydsl_flash_attn_func(q, k, v, **options | change)
    assert len(prepared) == 2


SCALE = 2.0


class Scaled:
    """A score modifier with a number of its own."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, score, batch, head, query, key):
        return score * self.factor

    def mod(self, score, batch, head, query, key):
        return score * self.factor


def scaled(score, batch, head, query, key, *, factor=1.0):
    return score * factor


def scaled_by_global(score, batch, head, query, key):
    return score * SCALE


def through_another(score, batch, head, query, key):
    return scaled_by_global(score, batch, head, query, key)


def test_what_makes_functions_equal(monkeypatch):
    one, two, unhashable = Scaled(1.0), Scaled(2.0), [3]
    assert Mod.of(below(3)) == Mod.of(below(3)) and hash(Mod.of(below(3))) == hash(Mod.of(below(3)))
    assert len({Mod.of(below(value)) for value in (3, 4, 3.0, True)}) == 4
    assert Mod.of(one.mod) == Mod.of(one.mod) != Mod.of(two.mod)
    assert Mod.of(one) == Mod.of(one) != Mod.of(two)
    assert Mod.of(partial(scaled, factor=1.0)) == Mod.of(partial(scaled, factor=1.0))
    assert Mod.of(partial(scaled, factor=1.0)) != Mod.of(partial(scaled, factor=2.0))
    functions = [lambda b, h, q, k: k < unhashable[0] for _ in range(2)]
    assert Mod.of(functions[0]) == Mod.of(functions[0]) != Mod.of(functions[1])
    before = [Mod.of(f) for f in (scaled_by_global, through_another, lambda *a: scaled_by_global(*a))]
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    after = [Mod.of(f) for f in (scaled_by_global, through_another)]
    assert before[0] != after[0] and before[1] != after[1]


def test_functions_that_change_with_a_global_are_compiled_anew(monkeypatch, seed):
    q, k, v = Inputs([5], [20], seed=seed).tensors()
    for value in (2.0, 5.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        out = flydsl_flash_attn_func(q, k, v, score_mod=through_another)
        wanted = feature_reference(q, k, v, score_mod=lambda s, *_, value=value: s * value).out
        torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=0)


def test_methods_of_two_objects_are_two_functions(seed):
    q, k, v = Inputs([5], [20], seed=seed).tensors()
    for factor in (1.0, 4.0):
        out = flydsl_flash_attn_func(q, k, v, score_mod=Scaled(factor).mod)
        wanted = feature_reference(q, k, v, score_mod=lambda s, *_, factor=factor: s * factor).out
        torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=0)
