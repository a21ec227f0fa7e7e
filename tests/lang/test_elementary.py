"""Elementary functions against float64, on emulated GPUs and, where there is one, on an NVIDIA GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

import fly

COUNT, THREADS, VECTOR = 2048, 256, 4
PLACES = pytest.mark.parametrize(
    "place",
    [
        "gfx942",
        "gfx950",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="no NVIDIA GPU"),
            ],
        ),
    ],
)
LEAST, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)

Reference = Callable[..., np.ndarray]
erf = np.vectorize(math.erf, otypes=[np.float64])


@fly.kernel
def tabulate(x: fly.Tensor, out: fly.Tensor, *, functions: tuple, inputs: int):
    """out[i] = functions[i] of the first `inputs` rows of x."""
    first = (fly.block_id.x * THREADS + fly.thread_id.x) * VECTOR
    arguments = [x.load(row, first, length=VECTOR) for row in range(inputs)]
    for i, function in enumerate(functions):
        out.store(function(*arguments), i, first)


def computed(place: str, functions: tuple, *arguments: np.ndarray) -> list[np.ndarray]:
    """What each function gives; arguments are arrays of one dtype and of a multiple of 1024 elements."""
    stacked = np.stack(arguments)
    assert stacked.shape[1] % (THREADS * VECTOR) == 0
    results = np.empty((len(functions), stacked.shape[1]), stacked.dtype)
    blocks = stacked.shape[1] // (THREADS * VECTOR)
    if place == "cuda":
        given, out = (torch.from_numpy(a.view(f"i{a.itemsize}")).cuda() for a in (stacked, results))
        dtype = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16}
        kind = dtype.get(str(stacked.dtype), torch.bfloat16)
        tabulate[blocks, THREADS](given.view(kind), out.view(kind), functions=functions, inputs=len(arguments))
        return list(out.cpu().numpy().view(stacked.dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLY_ARCH", place)
        tabulate[blocks, THREADS](stacked, results, functions=functions, inputs=len(arguments))
    return list(results)


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units in the last place of f32; infinite where only one is NaN or infinity, or they differ."""
    with np.errstate(all="ignore"):
        size = np.abs(exact)
        unit = np.exp2(np.maximum(np.floor(np.log2(np.where(size > 0, size, 1.0))), -126) - 23)
        distance = np.abs(got.astype(np.float64) - exact) / unit
        rounded = exact.astype(np.float32)
        same = (got == rounded) | (np.isnan(got) & np.isnan(exact))
        return np.where(np.isfinite(rounded) & np.isfinite(got), distance, np.where(same, 0.0, math.inf))


def inputs(rng: np.random.Generator) -> np.ndarray:
    """Any bits at all, moderate numbers, denormal ones, numbers around one, large angles, and the special ones."""
    parts = (
        rng.integers(0, 1 << 32, COUNT, dtype=np.uint32).view(np.float32),
        rng.uniform(-10, 10, COUNT),
        rng.uniform(-1e5, 1e5, COUNT),
        np.exp2(rng.uniform(-149, -120, COUNT)) * rng.choice([-1, 1], COUNT),
        1 + rng.uniform(-0.5, 0.5, COUNT) * np.exp2(rng.uniform(-20, 0, COUNT)),
        np.exp2(rng.uniform(17, 48, COUNT)) * rng.choice([-1, 1], COUNT),
        np.rint(rng.uniform(-1000, 1000, COUNT)) / 2,
    )
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = np.concatenate(parts).astype(np.float32)
    x[:12] = [0.0, 0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, LEAST, LARGEST, -LARGEST, 2.0**48, 2.0**-149]
    return x


# function, reference, ulp, and which inputs count
FUNCTIONS: tuple[tuple[Callable, Reference, float, Callable[[np.ndarray], np.ndarray] | None], ...] = (
    (fly.sin, np.sin, 2, lambda x: ~(np.abs(x) > 2.0**48)),
    (fly.cos, np.cos, 2, lambda x: ~(np.abs(x) > 2.0**48)),
    (fly.log, np.log, 1, None),
    (fly.erf, erf, 2, None),
    (fly.rsqrt, lambda x: 1 / np.sqrt(x), 2, None),
    (fly.sqrt, np.sqrt, 0.5, None),
    (fly.floor, np.floor, 0, None),
    (fly.ceil, np.ceil, 0, None),
    (fly.trunc, np.trunc, 0, None),
    (fly.round, np.rint, 0, None),
    (fly.exp2, np.exp2, 2, lambda x: ~(x < -126)),
    (fly.absolute, np.abs, 0, None),
)


@PLACES
def test_functions_are_within_their_bounds(place):
    seed = np.random.SeedSequence().entropy
    x = inputs(np.random.default_rng(seed))
    for (function, reference, bound, where), got in zip(
        FUNCTIONS, computed(place, tuple(f[0] for f in FUNCTIONS), x), strict=True
    ):
        with np.errstate(all="ignore"):
            exact = reference(x.astype(np.float64))
        off = np.where(True if where is None else where(x), ulps(got, exact), 0.0)
        worst = off.argmax()
        assert off[worst] <= bound, (function.__name__, x[worst], got[worst], exact[worst], off[worst], seed)


@PLACES
def test_angles_that_cannot_be_reduced_have_no_sine(place):
    x = np.full(1024, 1e20, np.float32)
    x[1:4] = [np.inf, -np.inf, np.nextafter(np.float32(2.0**48), np.float32(np.inf))]
    for got in computed(place, (fly.sin, fly.cos), x):
        assert np.isnan(got).all()


def bases_and_exponents(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    anything = rng.integers(0, 1 << 32, (2, COUNT), dtype=np.uint32).view(np.float32)
    wide = np.exp2(rng.uniform(-149, 128, COUNT)), rng.uniform(-2, 2, COUNT)
    near = np.exp2(rng.uniform(-2, 2, COUNT)), rng.uniform(-70, 70, COUNT)
    negative = -np.exp2(rng.uniform(-8, 8, COUNT)), np.rint(rng.uniform(-16, 16, COUNT))
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e30, -1e30, 2.0**-149]
    crossed = [np.tile(a.ravel(), 4) for a in np.meshgrid(special, special)]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x, y = (np.concatenate(parts) for parts in zip(anything, wide, near, negative, crossed, strict=True))
    return x.astype(np.float32), y.astype(np.float32)


@PLACES
def test_powers_are_those_of_ieee_754(place):
    seed = np.random.SeedSequence().entropy
    x, y = bases_and_exponents(np.random.default_rng(seed))
    (got,) = computed(place, (fly.pow,), x, y)
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
        off = ulps(got, exact.astype(np.float64))
    worst = off.argmax()
    assert off[worst] <= 1, (x[worst], y[worst], got[worst], exact[worst], off[worst], seed)


def operators(x: fly.Value) -> fly.Value:
    """All forms of the operator, so that one kernel has them."""
    return fly.concat([(x**n)[:1] for n in (0, 3)] + [(x**-2)[:1], (2.0**x)[:1]])


@PLACES
def test_the_operator_multiplies_or_is_pow(place):
    seed = np.random.SeedSequence().entropy
    x = np.random.default_rng(seed).uniform(-4, 4, 1024).astype(np.float32)
    (got,) = computed(place, (operators,), x)
    wide = x[::VECTOR].astype(np.float64)
    for i, exact in enumerate((np.ones_like(wide), wide**3, wide**-2.0, 2.0**wide)):
        assert ulps(got[i::VECTOR], exact).max() <= 2, (i, seed)


@PLACES
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_16_bit_floats_are_rounded_once_from_f32(place, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    chosen = (
        (fly.log, np.log),
        (fly.erf, erf),
        (fly.exp2, np.exp2),
        (fly.floor, np.floor),
        (fly.rsqrt, lambda x: 1 / np.sqrt(x)),
    )
    for (function, reference), got in zip(chosen, computed(place, tuple(f for f, _ in chosen), every), strict=True):
        with np.errstate(all="ignore"):
            exact = reference(every.astype(np.float64))
            wanted = exact.astype(np.float32).astype(dtype)
            # nearest, but for results so close to the middle of two that f32's last bits decide
            near = np.abs(got.astype(np.float64) - exact) <= np.abs(wanted.astype(np.float64) - exact) * (1 + 2.0**-7)
            same = (got == wanted) | (np.isnan(got) & np.isnan(wanted)) | near
            same |= (np.abs(exact) < LEAST) & (got == 0)  # exp2 may give zero there
        assert same.all(), (function.__name__, every[~same][:5], got[~same][:5], wanted[~same][:5])


@PLACES
def test_exp2_of_f64(place):
    seed = np.random.SeedSequence().entropy
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(-1080, 1030, 2048), rng.uniform(-1, 1, 1024)])
    x[:6] = [np.inf, -np.inf, np.nan, 0.0, 1024.0, -1074.0]
    (got,) = computed(place, (fly.exp2,), x)
    with np.errstate(all="ignore"):
        exact = np.exp2(x.astype(np.longdouble))
        wanted = exact.astype(np.float64)
        error = np.abs(got - exact) / np.spacing(wanted)
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    assert (same | (error <= 1)).all(), (x[~same][:5], got[~same][:5], seed)


@fly.kernel
def widened(x: fly.Tensor, out: fly.Tensor, *, length: int | None):
    """out = x of 8-bit floats, every thread `length` neighbouring ones (None: one)."""
    first = fly.thread_id.x * (length or 1)
    out.store(x.load(first, length=length).to(fly.f32), first)


@PLACES
@pytest.mark.parametrize("length", [None, 1, 2, 4])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_every_8_bit_float_is_exact_as_f32(place, kind, length, monkeypatch):
    bits = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256)
    if place == "cuda":
        bits, out = bits.cuda(), out.cuda()
    else:
        monkeypatch.setenv("FLY_ARCH", place)
    widened[1, 256 // (length or 1)](bits.view(kind), out, length=length)
    torch.testing.assert_close(out, bits.view(kind).float(), rtol=0, atol=0, equal_nan=True)


def test_targets_with_instructions_for_8_bit_floats_use_them():
    def isa(arch: str, dtype: str = "f8e4m3") -> str:
        specs = fly.TensorSpec(dtype, 1, 16, True), fly.TensorSpec("f32", 1, 16, True)
        return fly.compile(widened, *specs, block=64, target=arch, length=4).isa

    assert isa("gfx950").count("v_cvt_pk_f32_fp8") == 2
    assert "_fp8" not in isa("gfx942")  # whose instructions read another format
    assert isa("sm_90a").count("cvt.rn.f16x2.e4m3x2") == 2
    assert "e4m3" not in isa("sm_80")
    assert isa("gfx942", "f8e4m3fnuz").count("v_cvt_pk_f32_fp8") == 2
    for arch in ("gfx950", "sm_90a"):
        assert not re.search("fp8|e4m3", isa(arch, "f8e4m3fnuz"))


@fly.kernel
def narrowed(x: fly.Tensor, out: fly.Tensor, *, length: int):
    """out = x as out's 8-bit floats."""
    first = (fly.block_id.x * 64 + fly.thread_id.x) * length
    out.store(x.load(first, length=length).to(out.dtype), first)


# numbers of e4m3fnuz, what is halfway between two, near it, too small and too large; a NaN of either sign
OF_FNUZ = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fnuz).float()
HALFWAY = (OF_FNUZ[:127] + OF_FNUZ[1:128]) / 2
BESIDE = torch.cat([HALFWAY * (1 + 2.0**-20), HALFWAY * (1 - 2.0**-20)])
SPECIAL = torch.tensor([240.0, 247.9, 248.0, 1e9, torch.inf, torch.nan, 0.0, 2.0**-11, 2.0**-12, 1e-40])
TO_FNUZ = torch.cat([OF_FNUZ, HALFWAY, -HALFWAY, BESIDE, -BESIDE, SPECIAL, -SPECIAL])


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("place", ["gfx942", "gfx950"])
def test_f32_is_rounded_to_the_nearest_even_e4m3fnuz(place, length, monkeypatch):
    """By gfx942's instruction, and by bits elsewhere. What is too large is the largest; there is no -0."""
    monkeypatch.setenv("FLY_ARCH", place)
    x = torch.zeros(1280)
    x[: len(TO_FNUZ)] = TO_FNUZ
    out = torch.full((1280,), 85, dtype=torch.uint8)
    narrowed[1280 // (64 * length), 64](x, out.view(torch.float8_e4m3fnuz), length=length)
    # torch makes NaN of what is too large
    wanted = x.clamp(-240, 240).to(torch.float8_e4m3fnuz).view(torch.uint8)
    assert torch.equal(out, wanted)
    assert not bool(((out == 128) != x.isnan()).any())


def test_gfx942_has_an_instruction_that_makes_e4m3fnuz():
    def isa(arch: str) -> str:
        specs = fly.TensorSpec("f32", 1, 16, True), fly.TensorSpec("f8e4m3fnuz", 1, 16, True)
        return fly.compile(narrowed, *specs, block=64, target=arch, length=4).isa

    assert isa("gfx942").count("v_cvt_pk_fp8_f32") == 2
    assert "_fp8" not in isa("gfx950")


@fly.kernel
def from_literals(out: fly.Tensor):
    out.store(fly.exp2(3) + fly.fma(2, 3, 4) + fly.fma(2, 0.5, fly.f32(1)) + fly.sqrt(16) + fly.pow(2, 3), 0)


def test_functions_take_python_numbers():
    out = np.zeros(1, np.float32)
    from_literals[1, 64](out)
    assert out == 8 + 10 + 2 + 4 + 8
