"""The acceptance table: its samples cover everything, and what is wrong does not pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.shapes import SMALL_LENGTHS, Kind
from kernels import dispatch
from tests.kernels import acceptance
from tests.kernels.acceptance import EMULATED, KINDS, REDUCED_LENGTHS, Run
from tests.kernels.reference import attention
from tests.sampling import in_sample

KIND = Kind(16, "bf16", True)
PACKED = KIND.packed([(3, 5), (0, 4), (6, 0), (9, 9)], 2)
DENSE = KIND.dense(1, 8, 2)


@pytest.mark.parametrize(("number", "family"), list(enumerate(REDUCED_LENGTHS)))
def test_every_configuration_runs_on_two_rows_or_three(number, family):
    """Of what `test_emulated` runs, which is marked `sample(2)`."""
    runs = Counter(
        replace(workload, **vars(KINDS[0]))
        for i, run in enumerate(EMULATED)
        for j, kind in enumerate(KINDS)
        if in_sample({"run": i, "kind": j, "family": number}, 2)
        for workload in acceptance.sampled(run, family, kind)
    )
    every = {replace(workload, **vars(KINDS[0])) for workload in acceptance.reduced(family, KINDS[0])}
    assert runs.keys() == every and set(runs.values()) <= {2, 3}


def test_every_small_length_runs_on_every_row():
    """Of what `test_emulated_small_lengths` runs, which is marked `sample(2)`."""
    for i, run in enumerate(EMULATED):
        taken = [kind for j, kind in enumerate(KINDS) if in_sample({"run": i, "kind": j}, 2)]
        workloads = [w for kind in taken for w in acceptance.sampled_pairs(run, kind)]
        assert {w.seq_len for w in workloads} == {w.seq_len_kv for w in workloads} == set(SMALL_LENGTHS)


def test_the_samples_cover_everything():
    for first in EMULATED:
        for family in REDUCED_LENGTHS:
            sampled = [w for kind in KINDS for w in acceptance.sampled(first, family, kind)]
            assert len(sampled) == len(acceptance.reduced(family, KINDS[0]))
            shapes = [
                {replace(w, **vars(KINDS[0])) for w in some}
                for some in (sampled, acceptance.reduced(family, KINDS[0]))
            ]
            assert shapes[0] == shapes[1]
            assert {w.causal for w in sampled} == {True, False} and {w.dtype for w in sampled} == {"bf16", "f16"}
        runs = [run for run in EMULATED if run.kernel == first.kernel]
        pairs = [(w.seq_len, w.seq_len_kv) for run in runs for k in KINDS for w in acceptance.sampled_pairs(run, k)]
        assert len(pairs) == len(set(pairs)) == 72 * len(runs)
        for side in zip(*pairs):
            assert set(side) == set(SMALL_LENGTHS)
    assert len({(w.seq_len, w.seq_len_kv) for w in acceptance.every_pair(KINDS[0])}) == 144


@pytest.fixture
def computing(monkeypatch):
    """Have attention computed by torch, then changed by a function, in place of a kernel."""

    def install(change=lambda out, lse: None):
        def attend(q, k, v, causal, *, out=None, return_lse=False, cu_seqlens_q=None, **options):
            lengths = () if cu_seqlens_q is None else PACKED.lengths
            result, lse = attention(q, k, v, causal=causal, lengths=lengths)
            out = torch.empty_like(q) if out is None else out
            out.copy_(result)
            change(out, lse)
            return (out, lse) if return_lse else out

        monkeypatch.setattr(acceptance, "flydsl_flash_attn_func", attend)

    return install


@pytest.mark.parametrize("workload", [PACKED, DENSE], ids=str)
def test_what_is_right_passes(computing, workload):
    computing()
    assert acceptance.failure(workload, 1, device="cpu") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda out, lse: out[-1, -1].fill_(torch.nan),
        lambda out, lse: out.mul_(1.1),
        lambda out, lse: lse.add_(0.01),
    ],
    ids=["not written", "too large", "lse"],
)
@pytest.mark.parametrize("workload", [PACKED, DENSE], ids=str)
def test_what_is_wrong_fails_and_names_the_seed(computing, workload, change):
    computing(change)
    assert f"{workload}, seed 5, schedule 0: WRONG" in acceptance.failure(workload, 5, device="cpu")
    assert len(acceptance.failures(Run("generic", "gfx950"), [workload, workload], 5)) == 2


def row(features=(), module="kernels.flash_attn_generic"):
    return replace(next(r for r in dispatch.KERNELS if r.name == "generic"), features=features, module=module)


def test_what_a_kernel_does_not_serve_must_be_refused(computing, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", (row(features=("split_kv",)),))
    run = Run("generic", "gfx950")
    split = replace(DENSE, num_kv_splits=2)
    assert run.refuses(PACKED) and not run.refuses(split) and not run.refuses(DENSE)
    assert run.refuses(replace(PACKED, num_kv_splits=2))
    computing()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        acceptance.failures(run, [PACKED], 1)

    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(acceptance, "flydsl_flash_attn_func", refuse)
    assert acceptance.failures(run, [PACKED], 1) == []


def test_a_run_forces_its_kernel_or_is_skipped(monkeypatch):
    monkeypatch.setenv("FLY_KERNEL", "sm90")
    monkeypatch.setenv("FLYDSL_DISABLE_DUALWAVE_SWP", "1")
    with monkeypatch.context() as patch:
        Run("generic", "gfx942").start(patch)
        assert [v.get() for v in (acceptance.config.KERNEL, acceptance.config.ARCH)] == ["generic", "gfx942"]
        assert not acceptance.config.DISABLE_DUALWAVE_SWP.get() and acceptance.config.EMULATOR_CHECKS.get()
        Run("", "gfx942").start(patch)
        assert acceptance.config.KERNEL.get() == ""
    monkeypatch.setattr(dispatch, "KERNELS", (row(module=None),))
    assert Run("generic", "gfx950").unavailable() == "the generic kernel is not dispatched yet"
    with pytest.raises(pytest.skip.Exception, match="not dispatched yet"):
        Run("generic", "gfx950").start(monkeypatch)


def test_runs_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Run("generic").unavailable() == "torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(acceptance, "device_of", lambda place: SimpleNamespace(target="gfx942"))
    assert Run("generic").unavailable() is None and Run("").unavailable() is None
    monkeypatch.setattr(dispatch, "KERNELS", (replace(row(), archs=("gfx950",)),))
    assert Run("generic").unavailable() == "the generic kernel is not for gfx942"
