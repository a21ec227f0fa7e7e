"""Random combinations of features, forms and sizes against the reference, stratified by target and form.

A failure prints a program that runs its case again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, compare
from tests.kernels.reference import Report

FORMS = ("dense", "packed", "split", "packed-split")
# of each group a call has one at most
GROUPS = (
    ("window left", "window both", "window narrow"),
    ("softcap",),
    ("alibi heads", "alibi batch"),
    ("bias", "bias of keys", "bias padded"),
    ("sink",),
    ("score_mod", "score_mod aux"),
    ("mask_mod", "mask_mod aux"),
    ("seqused",),
    ("cache_leftpad",),
    ("kv_batch_idx",),
)
AUX = {"score_mod aux", "mask_mod aux"}  # whose auxiliary tensors are not each other's
MOST = 4  # features of one call


@dataclass(frozen=True)
class Case:
    """One call; `features` are names in `tests.kernels.feature_cases.FEATURES`."""

    features: tuple[str, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    packed: bool
    splits: int
    seed: int
    arch: str = ""
    kernel: str = "generic"
    device: str = "cpu"


def run(case: Case) -> Report:
    """The case's call against the reference; on the CPU `case.kernel`, emulated with checks."""
    before = dict(os.environ)
    if case.arch:
        os.environ |= {"FLY_ARCH": case.arch, "FLY_EMULATOR_CHECKS": "1", "FLY_KERNEL": case.kernel}
    try:
        inputs = Inputs(
            list(case.queries),
            list(case.keys),
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.dtype,
            case.packed,
            case.head_dim_v,
            case.seed,
            case.device,
        )
        tensors = inputs.tensors(entries=inputs.batch + 1 if "kv_batch_idx" in case.features else None)
        options = inputs.form()
        for name in case.features:
            options |= FEATURES[name](inputs)
        if {"cache_leftpad", "seqused_kv"} <= options.keys():  # no more than there are keys
            options["cache_leftpad"] = torch.minimum(options["cache_leftpad"], options["seqused_kv"])
        return compare(*tensors, case.causal, case.splits, **options)
    finally:
        os.environ.clear()
        os.environ |= before


def check(case: Case) -> None:
    """Fail with a program to paste."""
    program = f"from tests.kernels.problem.test_features_random import Case, run\nprint(run({case!r}))"
    try:
        report = run(case)
    except Exception as error:
        error.add_note(f"to see it again:\n{program}")
        raise
    if not report.ok:
        raise AssertionError(f"{report}\nto see it again:\n{program}")


@st.composite
def cases(
    draw, form: str, arch: str = "", kernel: str = "", device: str = "cpu", scale: int = 1, dims=(32, 40, 64)
) -> Case:
    """A call of one form; lengths up to `scale` times what an emulator does in a second."""
    packed, splits = "packed" in form, draw(st.integers(2, 4)) if "split" in form else 1
    batch = draw(st.integers(1, 3 if packed else 2))

    def lengths(most: int) -> tuple[int, ...]:
        if packed:
            found = draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
            return (max(found[0], 1), *found[1:])
        return (draw(st.integers(1, most)),) * batch

    chosen = draw(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=MOST, unique=True))
    names = [draw(st.sampled_from(group)) for group in chosen]
    if set(names) >= AUX:
        names.remove("mask_mod aux")
    if packed:
        names = [name for name in names if name not in DENSE_ONLY]
    kv_heads = draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from(dims))
    return Case(
        tuple(names),
        lengths(40 * scale),
        lengths(140 * scale),
        kv_heads * draw(st.integers(1, 2 * scale)),
        kv_heads,
        head_dim,
        draw(st.sampled_from([head_dim] * 4 + list(dims))) if kernel != "gfx950" else head_dim,
        draw(st.sampled_from(["bf16", "f16"])),
        draw(st.booleans()),
        packed,
        splits,
        draw(st.integers(0, 2**31 - 1)),
        arch,
        kernel,
        device,
    )


def trials(number: int):
    """Settings for cases that take a second each: none is kept, none is made smaller."""
    return settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def search(number: int, **options) -> None:
    """Try `number` random cases, after the plainest one, which hypothesis always begins with and other tests have."""
    plainest = True

    @trials(number + 1)
    @given(cases(**options))
    def one(case):
        nonlocal plainest
        if not plainest:
            check(case)
        plainest = False

    one()


KERNELS = (("gfx942", "generic"), ("gfx950", "generic"), ("gfx950", "gfx950"))
STRATA = [(arch, kernel, form) for arch, kernel in KERNELS for form in FORMS]


@pytest.mark.parametrize(("arch", "kernel", "form"), STRATA)
def test_random_calls(arch, kernel, form):
    dims = (64,) if kernel == "gfx950" else (32, 40, 64)
    search(1, form=form, arch=arch, kernel=kernel, dims=dims)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "kernel", "form"), STRATA)
def test_many_random_calls(arch, kernel, form):
    dims = (64, 128) if kernel == "gfx950" else (32, 40, 64, 96, 128, 256)
    search(100, form=form, arch=arch, kernel=kernel, dims=dims)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("form", FORMS)
def test_random_calls_on_a_gpu(form):
    search(25, form=form, device="cuda", scale=8, dims=(32, 64, 72, 96, 128, 192, 256))


def test_a_failure_can_be_pasted(monkeypatch):
    """What is printed runs, and gives the same again."""
    case = Case(("softcap", "sink"), (3,), (5,), 1, 1, 32, 32, "bf16", True, False, 1, 7, "gfx950", "generic")
    monkeypatch.setattr("tests.kernels.problem.test_features_random.run", lambda case: Report(1.0, 0.5, 0.0, None))
    with pytest.raises(AssertionError) as caught:
        check(case)
    monkeypatch.undo()
    program = str(caught.value).split("to see it again:\n")[1]
    found = {}
    exec(program.replace("print(run(", "found = (run("), found)
    assert found["found"] == run(case) and found["found"].ok
