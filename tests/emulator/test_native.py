"""The emulator's native loops give the same bits at every level of the host's instruction set."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np
import pytest

from fly.emulator import host, native
from fly.emulator.native import MatrixShape
from fly.errors import EmulatorError
from tests.host_level import host_level

levels = pytest.mark.parametrize("level", host.available())
SHAPES = [
    MatrixShape(32, 32, 8, 1, "f16", "f16"), MatrixShape(16, 16, 16, 1, "bf16", "bf16"),
    MatrixShape(4, 4, 1, 16, "f32", "f32"), MatrixShape(16, 16, 32, 1, "fp8z", "bf8z"),
    MatrixShape(16, 16, 32, 1, "i8", "i8"),
]  # fmt: skip
WAVES, REGISTERS = 3, 16


@pytest.fixture
def seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def at(level: str, monkeypatch: pytest.MonkeyPatch, run: Callable[[], np.ndarray]) -> np.ndarray:
    """The result with the loops compiled afresh for a level."""
    with monkeypatch.context() as patch:
        patch.setattr(native, "_level", lambda: level)
        for name in ("_fma", "matrix_product", "gather", "gather_transposed"):
            patch.setattr(native, name, getattr(native, name).__wrapped__)
        return run()


def numbers(bits: np.ndarray) -> np.ndarray:
    """Bits of floats, with one NaN: which of several NaNs goes on is not defined."""
    kind = np.float32 if bits.dtype == np.uint32 else np.float64
    return np.where(np.isnan(bits.view(kind)), np.array(np.nan, kind).view(bits.dtype), bits)


def elements(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Registers of normally distributed numbers, of 8-bit formats all codes."""
    floats = rng.standard_normal((REGISTERS, WAVES, 64, 2)).astype(np.float32)
    if kind == "f16":
        return floats.astype(np.float16).view(np.uint32)[..., 0]
    if kind == "bf16":
        return floats.view(np.uint16)[..., 1::2].copy().view(np.uint32)[..., 0]
    if kind == "f32":
        return floats[..., 0].copy().view(np.uint32)
    return rng.integers(0, 1 << 32, (REGISTERS, WAVES, 64), np.uint32)


@levels
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_fused_multiply_add(level, kind, monkeypatch, seed):
    rng, unsigned = np.random.default_rng(seed), np.uint32 if kind == "f32" else np.uint64
    dtype = np.float32 if kind == "f32" else np.float64
    a, b, c = (rng.integers(0, np.iinfo(unsigned).max, 4096, unsigned, True).view(dtype) for _ in range(3))
    # sums that nearly cancel, where a second rounding would show
    a[::2], b[::2] = rng.standard_normal((2, 2048)).astype(dtype)
    c[::2] = -(a[::2] * b[::2])
    with np.errstate(all="ignore"):
        want, got = (
            numbers(at(each, monkeypatch, lambda: native.fma(a, b, c, kind)).view(unsigned))
            for each in ("baseline", level)
        )
    assert (want == got).all(), f"seed {seed}"
    assert np.count_nonzero(want[::2] << unsigned(1)) > 1024  # rounding errors, not zeros


@levels
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.m}x{s.n}x{s.k}-{s.a}")
def test_matrix_product(level, shape, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    a, b = (elements(rng, kind) for kind in (shape.a, shape.b))
    c = elements(rng, "i8" if shape.integer else "f32")

    def run() -> np.ndarray:
        d = np.zeros_like(c)
        native.matrix_product(shape)(*(x.ctypes.data for x in (a, b, c, d)), WAVES * 256, WAVES)
        return d if shape.integer else numbers(d)

    want, got = (at(each, monkeypatch, run) for each in ("baseline", level))
    assert (want == got).all(), f"seed {seed}"
    assert len(np.unique(want)) > 250  # not the same number everywhere


@levels
@pytest.mark.parametrize("bits", [0, 8, 16])
def test_gathers(level, bits, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    memory, index = rng.integers(0, 256, 4096, np.uint8), 8 * rng.integers(0, 500, 64, np.int64)

    def run() -> np.ndarray:
        out = np.zeros((2, 64), np.uint32)
        gather = native.gather_transposed(bits) if bits else native.gather(2)
        gather(memory.ctypes.data, index.ctypes.data, 64, out.ctypes.data, 256)
        return out

    want, got = (at(each, monkeypatch, run) for each in ("baseline", level))
    assert (want == got).all(), f"seed {seed}"
    assert want.any()


@levels
def test_conversions_of_all_float16(level):
    """There and back through float32, at each level that has the instruction and at the one that has not."""
    text = """
define void @both(ptr %half, ptr %float, ptr %back) {
  %h = load half, ptr %half
  %f = fpext half %h to float
  store float %f, ptr %float
  %g = load float, ptr %back
  %r = fptrunc float %g to half
  store half %r, ptr %back
  ret void
}"""
    engine = host.compiled(text, level)
    both = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(engine.get_function_address("both"))
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = halves.astype(np.float32)
    # halfway to the next number and just beside it: ties go to even
    beside = np.random.default_rng(0).integers(-1, 2, wide.shape).astype(np.int32)
    with np.errstate(all="ignore"):
        given = ((wide + np.nextafter(halves, np.float16(np.inf)).astype(np.float32)) / 2).view(np.int32) + beside
        given = given.view(np.float32)
        want = given.astype(np.float16)
    for i in range(0, 1 << 16, 7):
        out, back = np.zeros(1, np.float32), given[i : i + 1].copy()
        both(halves[i : i + 1].ctypes.data, out.ctypes.data, back.ctypes.data)
        assert out[0] == wide[i] or (np.isnan(out[0]) and np.isnan(wide[i]))
        rounded = back.view(np.float16)[0]
        assert rounded.view(np.uint16) == want[i].view(np.uint16) or (np.isnan(rounded) and np.isnan(want[i]))


def test_a_level_that_the_host_lacks_is_an_error(monkeypatch):
    monkeypatch.setattr("fly.emulator.host.available", lambda: ("baseline",))
    with pytest.raises(EmulatorError, match="cannot run code for 'avx512'; it can for baseline"):
        host.compiled("", "avx512")


def test_an_unknown_level_for_the_tests_is_an_error(monkeypatch):
    monkeypatch.setenv("FLY_TEST_HOST", "sse5")
    with pytest.raises(ValueError, match="FLY_TEST_HOST='sse5': this CPU can run baseline"):
        host_level()
