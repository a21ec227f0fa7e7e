"""Flash attention's forward pass on CPU tensors: the machine code of gfx942 and gfx950, emulated with all checks on.

A finding of the checks raises, so that a test that passes has had none.
"""

from __future__ import annotations

import itertools

import pytest

from tests.kernels.test_flash_attn_fwd import KINDS, LAYOUTS, SMALL_LENGTHS, failure, needs_emulator, seed, square

__all__ = ["seed"]  # a fixture
pytestmark = needs_emulator
ARCHS = ("gfx942", "gfx950")
VARIANTS = list(itertools.product(ARCHS, KINDS))
variants = pytest.mark.parametrize(
    "arch, kind", VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x))
)


@pytest.fixture
def emulated(arch, monkeypatch):
    """The emulated GPU of a test's `arch`, with checks."""
    monkeypatch.setenv("FLY_ARCH", arch)
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")


def failures(kind, lengths, seed) -> list[str]:
    dtype, causal, head_dim = kind
    workloads = [square(1, q, 2, dtype, causal, head_dim, 1, kv) for q, kv in lengths]
    return [f for w in workloads if (f := failure(w, seed, device="cpu")) is not None]


def sample(variant: int) -> list[tuple[int, int]]:
    """Ten pairs of small lengths: each length once as queries and once as keys.

    Ten variants together have every pair.
    """
    count = len(SMALL_LENGTHS)
    return [(SMALL_LENGTHS[i], SMALL_LENGTHS[(i + variant) % count]) for i in range(count)]


def test_the_samples_cover_every_pair():
    pairs = {pair for i in range(len(VARIANTS)) for pair in sample(i)}
    assert pairs == set(itertools.product(SMALL_LENGTHS, repeat=2))


@variants
def test_small_lengths(emulated, arch, kind, seed):
    assert failures(kind, sample(VARIANTS.index((arch, kind))), seed) == []


@pytest.mark.exhaustive
@variants
def test_every_pair_of_small_lengths(emulated, arch, kind, seed):
    assert failures(kind, itertools.product(SMALL_LENGTHS, repeat=2), seed) == []


@variants
def test_shared_keys_and_several_sequences(emulated, arch, kind, seed):
    dtype, causal, head_dim = kind
    for lengths in ((100, 200), (200, 100)):
        workload = square(2, lengths[0], 4, dtype, causal, head_dim, 2, lengths[1])
        assert failure(workload, seed, device="cpu") is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_strides(emulated, arch, layout, seed):
    workload = square(2, 17, 2, "f16", True, 64)
    tensors = [LAYOUTS[layout](t) for t in workload.tensors(seed, "cpu")]
    assert failure(workload, seed, tensors, device="cpu") is None
