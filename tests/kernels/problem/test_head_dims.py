"""Every head dimension of the kernels that have all of them: emulated with all checks on, and on a GPU."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.shapes import Kind
from kernels.problem.contract import HEAD_DIMS
from tests.kernels.acceptance import Run, failure
from tests.kernels.test_flash_attn_fwd import moved, run

__all__ = ["run"]  # a fixture
ARCHS = ("gfx942", "gfx950")
EVERY = ("generic", "sm90")


def on_gpu(*kernels: str):
    return pytest.mark.parametrize(
        "run", [pytest.param(Run(name), id=name, marks=pytest.mark.gpu) for name in kernels], indirect=True
    )


# whole tiles of 32 columns, and one to three quarters of the last one
SOME = (8, 32, 40, 72, 96, 136, 192, 224, 256)
# of Hopper: lines of 32, 64 and 128 bytes, rows that fill them and rows that do not, products of half a step
PADDED = (8, 16, 24, 32, 48, 72, 80, 88, 104, 120, 136, 160, 176, 208, 248)


def kind(head_dim: int, number: int) -> Kind:
    """Every combination of dtype and causality in turn."""
    return Kind(head_dim, *[("bf16", True), ("f16", False), ("bf16", False), ("f16", True)][number % 4])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("arch", "head_dim"), list(itertools.product(ARCHS, SOME)))
def test_emulated(monkeypatch, arch, head_dim, seed):
    """Two blocks of queries, the second one short; two tiles of keys, the last one short."""
    Run("generic", arch).start(monkeypatch)
    workload = kind(head_dim, SOME.index(head_dim) + ARCHS.index(arch)).dense(1, 133, 2, 1, 101)
    assert failure(workload, seed, device="cpu") is None


@pytest.mark.sample(3)
@pytest.mark.parametrize("head_dim", PADDED)
def test_simulated(monkeypatch, head_dim, seed):
    """The same on Hopper, of two heads: what is past a row's end is another head's."""
    Run("sm90", "sm_90a").start(monkeypatch)
    workload = kind(head_dim, PADDED.index(head_dim)).dense(1, 133, 2, 2, 101)
    assert failure(workload, seed, device="cpu") is None


@on_gpu(*EVERY)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_on_a_gpu(run, head_dim, seed):
    for number in range(4):
        for queries, keys in ((133, 101), (1000, 1000), (1, 300), (300, 1)):
            assert failure(kind(head_dim, number).dense(2, queries, 4, 2, keys), seed) is None


@on_gpu("generic")
@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [32, 72, 96, 160, 192, 224, 256])
def test_narrow_copies_on_a_gpu(run, head_dim, elements, seed):
    """Addresses that only 2, 4 and 8 bytes divide: no asynchronous copies, then 4- and 8-byte ones."""
    workload = Kind(head_dim, "bf16", True).dense(1, 200, 2, 1, 333)
    tensors = [moved(t, elements) for t in workload.tensors(seed, "cuda")]
    assert failure(workload, seed, tensors) is None
