"""Gradients of the acceptance table's configurations on every row (`tests.kernels.gradient_acceptance`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from fly import config
from kernels import dispatch
from tests.kernels import gradient_acceptance
from tests.kernels.acceptance import FAMILIES, KINDS, reduced
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_acceptance import (
    EMULATED,
    FORMS,
    GPU_LENGTH,
    ON_GPU,
    configurations,
    failure,
    failures,
    inputs_of,
    kind_of,
)
from tests.kernels.gradient_reference import by_autograd, gradients, gradients_by_parts
from tests.kernels.test_flash_attn_fwd import kinds

emulated = pytest.mark.parametrize("run", EMULATED, ids=str, indirect=True)
on_gpu = pytest.mark.parametrize(
    "run", [pytest.param(row, id=str(row), marks=pytest.mark.gpu) for row in ON_GPU], indirect=True
)
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def run(request, monkeypatch):
    """A row, set up; the test is skipped where it cannot run."""
    request.param.start(monkeypatch)
    return request.param


@emulated
@forms
def test_emulated(run, form, seed):
    assert failures(run, configurations(form, kind_of(run, form), run), seed) == []


@pytest.mark.exhaustive
@emulated
@kinds
@forms
def test_emulated_exhaustively(run, kind, form, seed):
    assert failures(run, configurations(form, kind), seed) == []


@on_gpu
@kinds
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "long"])
def test_on_a_gpu(run, family, kind, seed):
    """Lengths of up to `GPU_LENGTH`; "long" would be "split" there."""
    assert failures(run, reduced(family, kind, GPU_LENGTH), seed) == []


@dataclass(frozen=True)
class Large:
    """A dense call of one sequence of so many tokens."""

    dims: tuple[int, int]
    dtype: str
    causal: bool
    tokens: int
    heads: tuple[int, int] = (2, 1)

    def __str__(self) -> str:
        return f"{self.dims[0]}-{self.dims[1]}-{self.dtype}-{'causal' if self.causal else 'full'}-{self.tokens}"


LARGE = (
    Large((32, 32), "f16", False, 8192),
    Large((40, 40), "bf16", True, 8192),
    Large((64, 64), "bf16", True, 16384),
    Large((64, 64), "f16", False, 16384),
    Large((72, 72), "bf16", False, 8192),
    Large((96, 96), "f16", True, 8192),
    Large((128, 128), "bf16", True, 16384, (4, 1)),
    Large((128, 128), "f16", False, 16384),
    Large((160, 160), "bf16", True, 4096),
    Large((192, 192), "f16", True, 8192),
    Large((256, 256), "bf16", False, 8192),
    Large((256, 256), "f16", True, 16384),
    Large((192, 128), "bf16", True, 16384),
)


@on_gpu
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_long_sequences(run, large, seed):
    inputs = Inputs(
        [large.tokens], [large.tokens], *large.heads, large.dims[0], large.dtype, seed=seed, device="cuda"
    )
    inputs.head_dim_v = large.dims[1]
    q, k, v = inputs.tensors()
    dout, dlse = inputs_of(q, v, seed)
    found = by_autograd(q, k, v, large.causal, dout, dlse)
    assert not gradients_by_parts(q, k, v, large.causal, dout, dlse).wrong(found), f"seed {seed}"


@forms
def test_every_configuration_runs_on_two_rows(form):
    def shapes(workloads):
        return Counter(replace(workload, **vars(KINDS[0])) for workload in workloads)

    every = shapes(configurations(form, KINDS[0]))
    taken = shapes(w for row in EMULATED for w in configurations(form, kind_of(row, form), row))
    assert taken == dict.fromkeys(every, 2)
    assert max(every.values()) == 1 and {family for of in FORMS.values() for family in of} <= set(FAMILIES)


def test_every_backward_kernel_of_emulated_gpus_is_forced():
    """And the generic one on each of them; those of others' packages have tests of their own."""
    rows = {(row.name, arch) for row in dispatch.BACKWARD_KERNELS for arch in row.archs if arch in dispatch.AMD}
    assert rows == {(run.backward, run.arch) for run in EMULATED if run.backward}


def test_a_row_forces_both_kernels(monkeypatch):
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")
    for run in EMULATED:
        with monkeypatch.context() as patch:
            run.start(patch)
            assert [v.get() for v in (config.KERNEL, config.BACKWARD_KERNEL)] == [run.kernel, run.backward]


def test_what_a_backward_kernel_does_not_serve_must_be_refused(monkeypatch):
    """A configuration that it refuses passes, and one that it computes after all does not."""
    run, workload = EMULATED[0], KINDS[0].packed([(3, 5), (4, 4)], 2)
    assert not run.refuses(workload)
    rows = [row for row in dispatch.BACKWARD_KERNELS if row.name != run.backward]
    (fused,) = (row for row in dispatch.BACKWARD_KERNELS if row.name == run.backward)
    monkeypatch.setattr(dispatch, "BACKWARD_KERNELS", (replace(fused, features=()), *rows))
    run.start(monkeypatch)
    assert run.refuses(workload) and not run.refuses(KINDS[0].dense(1, 8, 2))
    assert failures(run, [workload], 1) == []
    monkeypatch.setattr(gradient_acceptance, "by_autograd", lambda *_, **__: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        failures(run, [workload], 1)


def test_each_value_of_a_kind_runs():
    for name in ("dtype", "causal", "head_dim"):
        values = {getattr(kind_of(row, form), name) for row in EMULATED for form in FORMS}
        assert values == {getattr(kind, name) for kind in KINDS}


@pytest.mark.parametrize("lengths", [(), ((20, 33), (0, 4), (9, 0), (31, 23))], ids=["dense", "packed"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_by_parts_is_the_reference(lengths, causal, seed):
    """And the tolerance is of the same size, so that neither passes what the other one does not."""
    queries, keys = ([n for n, _ in lengths], [n for _, n in lengths]) if lengths else ([60] * 2, [47] * 2)
    inputs = Inputs(queries, keys, 4, 2, 32, packed=bool(lengths), seed=seed)
    q, k, v = inputs.tensors()
    dout, dlse = inputs_of(q, v, seed)
    whole = gradients(q, k, v, causal, dout, dlse, **inputs.form())
    parts = gradients_by_parts(q, k, v, causal, dout, dlse, lengths, max_scores=1500)
    for one, other, plain, of_parts in zip(whole.exact, parts.exact, whole.plain, parts.plain, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
        errors = [(x.double() - one).square().mean().sqrt().item() for x in (plain, of_parts)]
        assert errors[1] <= 1.5 * errors[0], f"seed {seed}"


@pytest.mark.parametrize(
    "change",
    [
        lambda dq, dk, dv: dq[-1, -1].fill_(torch.nan),
        lambda dq, dk, dv: dq.mul_(1.03),
        lambda dq, dk, dv: dk[:, :, :1].add_(dv[:, :, :1], alpha=0.05),
        lambda dq, dk, dv: dv[:, -1].zero_(),
    ],
    ids=["not written", "dq too large", "a head's dk", "a key's dv"],
)
def test_what_is_wrong_fails_and_names_the_seed(change, monkeypatch):
    workload = KINDS[0].dense(2, 33, 4, 2)

    def changed(q, k, v, causal, dout, dlse, **options):
        found = [x.to(q.dtype) for x in gradients(q, k, v, causal, dout, dlse).exact]
        change(*found)
        return found

    monkeypatch.setattr(gradient_acceptance, "by_autograd", changed)
    assert str(failure(workload, 5, "cpu")).startswith(f"{workload}, seed 5, schedule 0: d")
    change = lambda *_: None  # noqa: E731
    assert failure(workload, 5, "cpu") is None
