"""Every head dimension of the generic kernel: emulated with all checks on, and on a GPU."""

from __future__ import annotations

import itertools

import pytest

from kernels.dispatch import KERNELS
from kernels.flash_attn_generic import HEAD_DIMS
from tests.kernels.test_flash_attn_fwd import failure, moved, needs_emulator, needs_gpu, seed, square

__all__ = ["seed"]  # a fixture
ARCHS = ("gfx942", "gfx950")
# whole tiles of 32 columns, and one to three quarters of the last one
SOME = (32, 40, 72, 96, 136, 192, 224, 256)


@pytest.fixture
def generic(monkeypatch):
    """Force the generic kernel."""
    monkeypatch.setenv("FLY_KERNEL", "generic")


def kind(number: int) -> tuple[str, bool]:
    """dtype and causality: every combination in turn."""
    return [("bf16", True), ("f16", False), ("bf16", False), ("f16", True)][number % 4]


def test_the_dispatch_table_has_the_kernels_head_dims():
    (row,) = (kernel for kernel in KERNELS if kernel.name == "generic")
    assert row.head_dims == tuple(HEAD_DIMS)


@needs_emulator
@pytest.mark.parametrize(("arch", "head_dim"), list(itertools.product(ARCHS, SOME)))
def test_emulated(generic, monkeypatch, arch, head_dim, seed):
    """Two blocks of queries, the second one short; two tiles of keys, the last one short."""
    monkeypatch.setenv("FLY_ARCH", arch)
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    dtype, causal = kind(SOME.index(head_dim) + ARCHS.index(arch))
    assert failure(square(1, 133, 2, dtype, causal, head_dim, 1, 101), seed, device="cpu") is None


@needs_gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_on_a_gpu(generic, head_dim, seed):
    for dtype, causal in map(kind, range(4)):
        for lengths in ((133, 101), (1000, 1000), (1, 300), (300, 1)):
            workload = square(2, lengths[0], 4, dtype, causal, head_dim, 2, lengths[1])
            assert failure(workload, seed) is None


@needs_gpu
@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [32, 72, 96, 160, 192, 224, 256])
def test_narrow_copies_on_a_gpu(generic, head_dim, elements, seed):
    """Addresses that only 2, 4 and 8 bytes divide: no asynchronous copies, then 4- and 8-byte ones."""
    workload = square(1, 200, 2, "bf16", True, head_dim, 1, 333)
    tensors = [moved(t, elements) for t in workload.tensors(seed, "cuda")]
    assert failure(workload, seed, tensors) is None
