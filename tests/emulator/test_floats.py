"""Float instructions: exact arithmetic, modifiers, conversions, and the accuracy of the transcendental ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.machine_code import ARCHS, Case, bench, half, wide
from tests.emulator.test_valu import exact, rounded

TYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
OPERATIONS: dict[str, tuple[int, Callable[..., Fraction]]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
}
# instruction: (operation, type)
EXACT = {
    f"v_{op}_{t}": (op, t) for t in TYPES for op in OPERATIONS if (op, t) != ("sub", "f64")
} | {"v_fmac_f32": ("fma", "f32"), "v_fmac_f64": ("fma", "f64")}  # fmt: skip
PACKED = {"v_pk_add_f16": ("add", "f16"), "v_pk_mul_f16": ("mul", "f16"), "v_pk_fma_f16": ("fma", "f16"),
          "v_pk_add_f32": ("add", "f32"), "v_pk_mul_f32": ("mul", "f32"), "v_pk_fma_f32": ("fma", "f32")}  # fmt: skip
ROUNDING = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "rndne": round}
# (function in float64, largest error in units of the last place of f32, inputs)
TRANSCENDENTAL = {
    "v_exp_f32": (np.exp2, 1.0, (-120, 120)), "v_log_f32": (np.log2, 1.0, (1e-30, 1e30)),
    "v_rcp_f32": (lambda x: 1 / x, 1.0, (1e-30, 1e30)), "v_rsq_f32": (lambda x: x**-0.5, 1.0, (1e-30, 1e30)),
    "v_sqrt_f32": (np.sqrt, 1.0, (1e-30, 1e30)),
}  # fmt: skip
# modifiers of v_fma_f32 $0, $1, $2, $3 as text, and what they do
MODIFIERS: dict[str, tuple[str, Callable]] = {
    "neg": ("-$1, $2, -$3", lambda a, b, c: -a * b - c),
    "abs": ("|$1|, -|$2|, $3", lambda a, b, c: abs(a) * -abs(b) + c),
    "clamp": ("$1, $2, $3 clamp", lambda a, b, c: min(max(a * b + c, 0.0), 1.0)),
    "mul2": ("$1, $2, $3 mul:2", lambda a, b, c: (a * b + c) * 2),
    "mul4": ("$1, $2, $3 mul:4", lambda a, b, c: (a * b + c) * 4),
    "div2": ("$1, $2, $3 div:2", lambda a, b, c: (a * b + c) / 2),
    "all": ("-$1, |$2|, $3 clamp div:2", lambda a, b, c: min(max((-a * abs(b) + c) / 2, 0.0), 1.0)),
}
_SIZE = {"f16": "v", "f32": "v", "f64": "v2"}


def _text(name: str, count: int, fused: bool = False) -> str:
    operands = ", ".join(f"${i}" for i in range(count + 1))
    # fmac adds to its destination
    if fused:
        wide_move = "v_mov_b64" if name.endswith("64") else "v_mov_b32"
        return f"{wide_move} $0, $3\n{name} $0, $1, $2"
    return f"{name} {operands}"


CASES = (
    *(
        Case(n, _text(n, OPERATIONS[op][0], "fmac" in n), _SIZE[t], " ".join([_SIZE[t]] * OPERATIONS[op][0]))
        for n, (op, t) in EXACT.items()
    ),
    *(
        Case(
            n,
            _text(n, OPERATIONS[op][0]),
            "v" if t == "f16" else "v2",
            " ".join(["v" if t == "f16" else "v2"] * OPERATIONS[op][0]),
        )
        for n, (op, t) in PACKED.items()
    ),
    *(Case(f"v_{r}_{t}", _text(f"v_{r}_{t}", 1), _SIZE[t], _SIZE[t]) for r in ROUNDING for t in TYPES),
    *(Case(n, _text(n, 1), "v", "v") for n in TRANSCENDENTAL),
    *(Case(f"modified.{n}", f"v_fma_f32 $0, {text}", "v", "v v v") for n, (text, _) in MODIFIERS.items()),
    *(
        Case(n, _text(n, 1), "v", "v")
        for n in (
            "v_cvt_f16_f32",
            "v_cvt_f32_f16",
            "v_cvt_u32_f32",
            "v_cvt_i32_f32",
            "v_cvt_u16_f16",
            "v_cvt_i16_f16",
            "v_cvt_rpi_i32_f32",
            "v_cvt_flr_i32_f32",
            "v_frexp_exp_i32_f32",
            "v_frexp_mant_f32",
            "v_fract_f32",
            "v_sin_f32",
            "v_cos_f32",
        )
    ),
    Case("v_cvt_f32_f64", _text("v_cvt_f32_f64", 1), "v", "v2"),
    Case("v_cvt_f64_f32", _text("v_cvt_f64_f32", 1), "v2", "v"),
    Case("v_cvt_i32_f64", _text("v_cvt_i32_f64", 1), "v", "v2"),
    Case("v_cvt_u32_f64", _text("v_cvt_u32_f64", 1), "v", "v2"),
    Case("v_cvt_f64_i32", _text("v_cvt_f64_i32", 1), "v2", "v"),
    Case("v_ldexp_f32", _text("v_ldexp_f32", 2)),
    Case("v_cvt_pkrtz_f16_f32", _text("v_cvt_pkrtz_f16_f32", 2)),
    Case("v_cvt_pk_bf16_f32", _text("v_cvt_pk_bf16_f32", 2), archs=("gfx950",)),
    Case("v_cvt_pk_f16_f32", _text("v_cvt_pk_f16_f32", 2), archs=("gfx950",)),
    *(
        Case(
            f"v_cvt_pk_{k}_f32",
            f"v_mov_b32 $0, $3\nv_cvt_pk_{k}_f32 $0, $1, $2\nv_cvt_pk_{k}_f32 $0, $2, $1 op_sel:[0,0,1]",
            "v",
            "v v v",
        )
        for k in ("fp8", "bf8")
    ),
    *(
        Case(
            f"v_cvt_f32_{k}",
            "\n".join(f"v_cvt_f32_{k}_sdwa ${i}, $4 src0_sel:BYTE_{i}" for i in range(4)),
            "v v v v",
            "v",
        )
        for k in ("fp8", "bf8")
    ),
    *(
        Case(
            f"v_cvt_pk_f32_{k}",
            f"v_cvt_pk_f32_{k}_e32 $0, $2\nv_cvt_pk_f32_{k}_sdwa $1, $2 src0_sel:WORD_1",
            "v2 v2",
            "v",
        )
        for k in ("fp8", "bf8")
    ),
    *(Case(n, _text(n, 2)) for n in ("v_min_f32", "v_max_f32", "v_min_f16", "v_max_f16")),
    *(Case(n, _text(n, 3), "v", "v v v") for n in ("v_med3_f32", "v_min3_f32", "v_max3_f32")),
    Case("v_fma_f16.opsel", "v_mov_b32 $0, $4\nv_fma_f16 $0, $1, $2, $3 op_sel:[1,0,1,1]", "v", "v v v v"),
    Case("v_fma_f16.low", "v_mov_b32 $0, $4\nv_fma_f16 $0, $1, $2, $3", "v", "v v v v"),
    Case("v_add_f16.low", "v_mov_b32 $0, $3\nv_add_f16 $0, $1, $2", "v", "v v v"),
    Case(
        "pk.opsel",
        "v_pk_fma_f16 $0, $1, $2, $3 op_sel:[1,0,0] op_sel_hi:[0,1,0] neg_lo:[0,1,0] neg_hi:[1,0,0]",
        "v",
        "v v v",
    ),
    Case(
        "pk32.opsel",
        "v_pk_fma_f32 $0, $1, $2, $3 op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0] neg_hi:[0,0,1]",
        "v2",
        "v2 v2 v2",
    ),
    Case("pk32.broadcast", "v_pk_mul_f32 $0, $1, $2 op_sel_hi:[1,0]", "v2", "v2 v2"),
    Case("v_mad_mix_f32", "v_fma_mix_f32 $0, $1, $2, $3 op_sel:[0,1,0] op_sel_hi:[1,1,0]", "v", "v v v"),
    Case(
        "v_cmp",
        "v_cmp_lt_f32 vcc, $4, $5\ns_mov_b64 $0, vcc\nv_cmp_class_f32 vcc, $4, $6\ns_mov_b64 $1, vcc\n"
        "v_cmp_nge_f32_e64 $2, |$4|, -$5\nv_cmp_u_f32_e64 $3, $4, $5",
        "s2 s2 s2 s2",
        "v v v",
        "vcc",
    ),
)


def samples(seed: int, kind: str, count: int, spread: int = 6) -> list[np.ndarray]:
    """Finite numbers of a type, (64,) each, subnormals and neighbours among them."""
    rng = np.random.default_rng(seed)
    dtype, info = TYPES[kind], np.finfo(TYPES[kind])
    edges = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, float(info.smallest_subnormal), float(info.tiny), 3.0], dtype)
    out = []
    for _ in range(count):
        x = (rng.standard_normal(64) * 2.0 ** rng.integers(-spread, spread, 64)).astype(dtype)
        x[40:52] = rng.choice(edges, 12)
        out.append(x)
    return out


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal numbers, zeros of the same sign, NaN for NaN."""
    np.testing.assert_array_equal(got, want, err_msg=what)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number], err_msg=what)


def lanewise(function: Callable, kind: str, x: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(results, lanes that have one) of an exact operation."""
    run = exact(function, kind)
    values = [run(*(float(v[i]) for v in x)) for i in range(64)]
    return np.array([0.0 if v is None else v for v in values], TYPES[kind]), np.array([v is not None for v in values])


def read(out: np.ndarray, kind: str) -> np.ndarray:
    return half(out) if kind == "f16" else out.view(np.float32) if kind == "f32" else wide(out, np.float64)


@pytest.mark.parametrize("arch", ARCHS)
def test_arithmetic(arch: str) -> None:
    for seed, (name, (op, kind)) in enumerate(EXACT.items()):
        count, function = OPERATIONS[op]
        x = samples(seed, kind, count)
        want, known = lanewise(function, kind, x)
        got = read(bench(CASES, arch).run(name, *x)[0], kind)
        assert known.sum() > 40
        np.testing.assert_array_equal(got[known], want[known], err_msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_arithmetic(arch: str) -> None:
    for seed, (name, (op, kind)) in enumerate(PACKED.items()):
        count, function = OPERATIONS[op]
        x = [samples(seed + 50 * i, kind, count) for i in (1, 2)]
        registers = [
            low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)
            if kind == "f16" else np.stack([low, high]) for low, high in zip(*x)
        ]  # fmt: skip
        (out,) = bench(CASES, arch).run(name, *registers)
        for i in (0, 1):
            want, known = lanewise(function, kind, x[i])
            got = half(out, i) if kind == "f16" else out[i].view(np.float32)
            np.testing.assert_array_equal(got[known], want[known], err_msg=f"{name} {i}")


@pytest.mark.parametrize("arch", ARCHS)
def test_modifiers(arch: str) -> None:
    shared = bench(CASES, arch)
    # few significant bits: float64 is exact
    a, b, c = (np.round(x * 8).astype(np.float32) / 8 for x in samples(3, "f32", 3, 3))
    for name, (_, function) in MODIFIERS.items():
        want = np.array([function(*(float(v[i]) for v in (a, b, c))) for i in range(64)], np.float32)
        np.testing.assert_array_equal(shared.run(f"modified.{name}", a, b, c)[0].view(np.float32), want, err_msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_rounding(arch: str) -> None:
    for name, function in ROUNDING.items():
        for kind in TYPES:
            (x,) = samples(4, kind, 1)
            x[:8] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1024.0, -3.0]
            want = np.array([math.copysign(float(function(float(v))), float(v)) for v in x], TYPES[kind])
            same(read(bench(CASES, arch).run(f"v_{name}_{kind}", x)[0], kind), want, f"{name} {kind}")


@pytest.mark.parametrize("arch", ARCHS)
def test_transcendental_accuracy(arch: str) -> None:
    rng = np.random.default_rng(5)
    for name, (function, ulps, (low, high)) in TRANSCENDENTAL.items():
        x = rng.uniform(low, high, 64) if low < 0 else np.exp(rng.uniform(math.log(low), math.log(high), 64))
        x = x.astype(np.float32)
        got, want = bench(CASES, arch).run(name, x)[0].view(np.float32), function(x.astype(np.float64))
        assert (np.abs(got - want) <= ulps * np.spacing(np.abs(want).astype(np.float32))).all(), name
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1.0, 1e-40] * 8, np.float32)
    wanted = {
        "v_exp_f32": [1, 1, np.inf, 0, np.nan, 0.5, 2, 1],
        "v_log_f32": [-np.inf, -np.inf, np.inf, np.nan, np.nan, np.nan, 0, -np.inf],
        "v_rcp_f32": [np.inf, -np.inf, 0, -0.0, np.nan, -1, 1, np.inf],
        "v_rsq_f32": [np.inf, -np.inf, 0, np.nan, np.nan, np.nan, 1, np.inf],
        "v_sqrt_f32": [0, -0.0, np.inf, np.nan, np.nan, np.nan, 1, 0],
    }
    for name, values in wanted.items():
        same(bench(CASES, arch).run(name, special)[0].view(np.float32)[:8], np.array(values, np.float32), name)
    turns = rng.uniform(-4, 4, 64).astype(np.float32)
    for name, function in (("v_sin_f32", np.sin), ("v_cos_f32", np.cos)):
        got = bench(CASES, arch).run(name, turns)[0].view(np.float32)
        assert np.abs(got - function(2 * np.pi * turns.astype(np.float64))).max() < 2**-20, name


def clipped(x: np.ndarray, low: int, high: int, function: Callable = math.trunc) -> np.ndarray:
    """Saturating conversion with NaN to 0, as Python integers."""
    out = []
    for v in x.astype(np.float64):
        if math.isnan(v):
            out.append(0)
        else:
            out.append(max(low, min(high, function(v) if math.isfinite(v) else (low if v < 0 else high))))
    return np.array(out, np.int64)


@pytest.mark.parametrize("arch", ARCHS)
def test_conversions_to_integers(arch: str) -> None:
    shared = bench(CASES, arch)
    rng = np.random.default_rng(6)
    for name, kind, low, high, function in (
        ("v_cvt_u32_f32", "f32", 0, 2**32 - 1, math.trunc), ("v_cvt_i32_f32", "f32", -(2**31), 2**31 - 1, math.trunc),
        ("v_cvt_u16_f16", "f16", 0, 65535, math.trunc), ("v_cvt_i16_f16", "f16", -32768, 32767, math.trunc),
        ("v_cvt_i32_f64", "f64", -(2**31), 2**31 - 1, math.trunc), ("v_cvt_u32_f64", "f64", 0, 2**32 - 1, math.trunc),
        ("v_cvt_rpi_i32_f32", "f32", -(2**31), 2**31 - 1, lambda v: math.floor(Fraction(v) + Fraction(1, 2))),
        ("v_cvt_flr_i32_f32", "f32", -(2**31), 2**31 - 1, math.floor),
    ):  # fmt: skip
        x = (rng.standard_normal(64) * 2.0 ** rng.integers(-2, 15 if kind == "f16" else 34, 64)).astype(TYPES[kind])
        x[:8] = [np.nan, np.inf, -np.inf, 0.5, -0.5, 2.5, -0.0, 60000.0]
        got = shared.run(name, x)[0].astype(np.int64)
        mask = 0xFFFF if name.endswith("f16") else 0xFFFFFFFF
        np.testing.assert_array_equal(got, clipped(x, low, high, function) & mask, err_msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_conversions_between_floats(arch: str) -> None:
    shared = bench(CASES, arch)
    rng = np.random.default_rng(8)
    a, b = ((rng.standard_normal(64) * 2.0 ** rng.integers(-26, 18, 64)).astype(np.float32) for _ in range(2))
    a[:6] = [65504, 65519, 65520, -65536, 2.0**-25, 1e-9]
    nearest = [np.array([rounded(Fraction(float(v)), "f16") for v in x], np.float16) for x in (a, b)]
    same(half(shared.run("v_cvt_f16_f32", a)[0]), nearest[0], "v_cvt_f16_f32")
    (out,) = shared.run("v_cvt_pkrtz_f16_f32", a, b)
    for i, x in enumerate((a, b)):
        toward = nearest[i].copy()
        far = np.abs(toward.astype(np.float64)) > np.abs(x)
        toward[far] = np.nextafter(toward[far], np.float16(0))
        same(half(out, i), toward, "v_cvt_pkrtz_f16_f32")
    if arch == "gfx950":
        (out,) = shared.run("v_cvt_pk_f16_f32", a, b)
        same(half(out, 0), nearest[0], "v_cvt_pk_f16_f32"), same(half(out, 1), nearest[1], "v_cvt_pk_f16_f32")
        (out,) = shared.run("v_cvt_pk_bf16_f32", a, b)
        for i, x in enumerate((a, b)):
            want = np.array([rounded(Fraction(float(v)), "bf16") for v in x], np.float32)
            same(half(out, i, np.uint16).astype(np.uint32).__lshift__(np.uint32(16)).view(np.float32), want, "bf16")
    halves = np.arange(64, dtype=np.uint16) * 1031
    same(shared.run("v_cvt_f32_f16", halves)[0].view(np.float32), halves.view(np.float16).astype(np.float32), "f16")
    x = rng.standard_normal(64) * 2.0 ** rng.integers(-150, 140, 64)
    want = np.array([rounded(Fraction(float(v)), "f32") for v in x], np.float32)
    same(shared.run("v_cvt_f32_f64", x)[0].view(np.float32), want, "v_cvt_f32_f64")
    same(wide(shared.run("v_cvt_f64_f32", a)[0], np.float64), a.astype(np.float64), "v_cvt_f64_f32")
    integers = rng.integers(-(2**31), 2**31, 64).astype(np.int32)
    same(wide(shared.run("v_cvt_f64_i32", integers)[0], np.float64), integers.astype(np.float64), "v_cvt_f64_i32")
    exponents = rng.integers(-160, 160, 64).astype(np.int32)
    want = np.array([rounded(Fraction(float(v)) * Fraction(2) ** int(e), "f32") for v, e in zip(a, exponents)])
    same(shared.run("v_ldexp_f32", a, exponents)[0].view(np.float32), want.astype(np.float32), "v_ldexp_f32")
    mantissa = shared.run("v_frexp_mant_f32", a)[0].view(np.float32).astype(np.float64)
    exponent = shared.run("v_frexp_exp_i32_f32", a)[0].view(np.int32)
    assert (mantissa * 2.0**exponent == a).all() and ((np.abs(mantissa) >= 0.5) & (np.abs(mantissa) < 1)).all()
    fraction = shared.run("v_fract_f32", a)[0].view(np.float32)
    assert ((fraction >= 0) & (fraction < 1)).all()
    np.testing.assert_allclose(fraction, a.astype(np.float64) - np.floor(a.astype(np.float64)), atol=2**-24)


_ML = {("fp8", "gfx950"): ml_dtypes.float8_e4m3fn, ("bf8", "gfx950"): ml_dtypes.float8_e5m2,
       ("fp8", "gfx942"): ml_dtypes.float8_e4m3fnuz, ("bf8", "gfx942"): ml_dtypes.float8_e5m2fnuz}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_fp8(kind: str, arch: str) -> None:
    """To and from the OCP formats on gfx950 and the FNUZ ones on gfx942."""
    shared, dtype = bench(CASES, arch), _ML[kind, arch]
    rng = np.random.default_rng(9)
    most = float(ml_dtypes.finfo(dtype).max)
    a, b = (
        np.clip(rng.standard_normal(64) * 2.0 ** rng.integers(-16, 8, 64), -most, most).astype(np.float32)
        for _ in "ab"
    )
    (out,) = shared.run(f"v_cvt_pk_{kind}_f32", a, b, np.zeros(64, np.uint32))
    codes = [x.astype(dtype).view(np.uint8).astype(np.uint32) for x in (a, b)]
    np.testing.assert_array_equal(out, codes[0] | codes[1] << 8 | codes[1] << 16 | codes[0] << 24)
    every = np.arange(256, dtype=np.uint8).view(np.uint32)
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).reshape(64, 4)
    for i, got in enumerate(shared.run(f"v_cvt_f32_{kind}", every)):
        same(got.view(np.float32), values[:, i], f"byte {i}")
    low, high = shared.run(f"v_cvt_pk_f32_{kind}", every)
    for i, got in enumerate((*low, *high)):
        same(got.view(np.float32), values[:, i], f"pair {i}")


@pytest.mark.parametrize("arch", ARCHS)
def test_minimum_and_maximum(arch: str) -> None:
    """The other operand for a NaN; zeros are ordered by sign."""
    shared, nan = bench(CASES, arch), np.nan
    for kind in ("f32", "f16"):
        t = TYPES[kind]
        a = np.array([1, 2, nan, 3, nan, -0.0, 0.0, -np.inf] * 8, t)
        b = np.array([2, 1, 5, nan, nan, 0.0, -0.0, 1] * 8, t)
        same(
            read(shared.run(f"v_min_{kind}", a, b)[0], kind)[:8],
            np.array([1, 1, 5, 3, nan, -0.0, -0.0, -np.inf], t),
            "min",
        )
        same(read(shared.run(f"v_max_{kind}", a, b)[0], kind)[:8], np.array([2, 2, 5, 3, nan, 0.0, 0.0, 1], t), "max")
    a, b, c = (np.array(x * 16, np.float32) for x in ([1, 5, nan, 2], [2, 4, 1, nan], [3, 3, 2, 1]))
    for name, want in (("v_med3_f32", [2, 4, 1, 1]), ("v_min3_f32", [1, 3, 1, 1]), ("v_max3_f32", [3, 5, 2, 2])):
        same(shared.run(name, a, b, c)[0].view(np.float32)[:4], np.array(want, np.float32), name)


@pytest.mark.parametrize("arch", ARCHS)
def test_halves(arch: str) -> None:
    """op_sel of scalar and packed operations, and which of them keep the other half."""
    shared = bench(CASES, arch)
    rng = np.random.default_rng(10)
    pairs = [rng.integers(-30, 30, (2, 64)).astype(np.float16) for _ in range(3)]
    a, b, c = (np.ascontiguousarray(p.T).view(np.uint32)[:, 0] for p in pairs)
    old = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    (al, ah), (bl, bh), (cl, ch) = (p.astype(np.float64) for p in pairs)
    (out,) = shared.run("v_fma_f16.opsel", a, b, c, old)
    np.testing.assert_array_equal(half(out, 1), (ah * bl + ch).astype(np.float16))
    np.testing.assert_array_equal(half(out, 0, np.uint16), half(old, 0, np.uint16))
    (out,) = shared.run("v_fma_f16.low", a, b, c, old)
    np.testing.assert_array_equal(half(out), (al * bl + cl).astype(np.float16))
    np.testing.assert_array_equal(half(out, 1, np.uint16), half(old, 1, np.uint16), err_msg="VOP3 op_sel keeps")
    (out,) = shared.run("v_add_f16.low", a, b, old)
    np.testing.assert_array_equal(half(out, 1, np.uint16), 0, err_msg="VOP2 clears")
    (out,) = shared.run("pk.opsel", a, b, c)
    np.testing.assert_array_equal(half(out, 0), (ah * -bl + cl).astype(np.float16))
    np.testing.assert_array_equal(half(out, 1), (-al * bh + cl).astype(np.float16))
    (out,) = shared.run("v_mad_mix_f32", a, b, np.float32(0.5) * cl.astype(np.float32))
    np.testing.assert_array_equal(out.view(np.float32), al * bh + 0.5 * cl)
    x, y, z = (rng.integers(-30, 30, (2, 64)).astype(np.float32) for _ in range(3))
    (out,) = shared.run("pk32.opsel", x, y, z)
    np.testing.assert_array_equal(out.view(np.float32), np.stack([x[1] * -y[0] + z[0], x[0] * y[1] - z[1]]))
    (out,) = shared.run("pk32.broadcast", x, y)
    np.testing.assert_array_equal(out.view(np.float32), x * y[0])


@pytest.mark.parametrize("arch", ARCHS)
def test_compares(arch: str) -> None:
    values = np.array([1, -2, np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], np.float32)
    a, b = np.repeat(values, 8), np.tile(values, 8)
    wanted = np.uint32(1 << 0 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 7)  # NaN, -inf, -0, +subnormal
    less, special, nge, unordered = bench(CASES, arch).run("v_cmp", a, b, np.full(64, wanted, np.uint32))
    flags = [np.unpackbits(m[:, 0].copy().view(np.uint8), bitorder="little").astype(bool)
             for m in (less, special, nge, unordered)]  # fmt: skip
    np.testing.assert_array_equal(flags[0], a < b)
    tiny = (np.abs(a) < 1e-38) & (a > 0)
    np.testing.assert_array_equal(flags[1], np.isnan(a) | (a == -np.inf) | ((a == 0) & np.signbit(a)) | tiny)
    np.testing.assert_array_equal(flags[2], ~(np.abs(a) >= -b))
    np.testing.assert_array_equal(flags[3], np.isnan(a) | np.isnan(b))
