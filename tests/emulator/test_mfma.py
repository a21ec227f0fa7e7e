"""Matrix instructions against float64, with the register layouts of AMD's matrix instruction calculator as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from fly.emulator.native import fp8_table
from fly.errors import EmulatorError
from tests.emulator.machine_code import ARCHS, Case, bench

# (m, n, k, blocks), as in the instruction names
_WIDE = ((32, 32, 1, 2), (16, 16, 1, 4), (4, 4, 1, 16), (32, 32, 2, 1), (16, 16, 4, 1))
_HALF = ((32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 8, 1), (16, 16, 16, 1))
_BYTE = ((32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 16, 1), (16, 16, 32, 1))
_FP8 = ((32, 32, 16, 1), (16, 16, 32, 1))
BITS = {"f32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8}


@dataclass(frozen=True)
class Matrix:
    """One instruction: shape, element types of A and B, and where it exists."""

    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str
    archs: tuple[str, ...] = ARCHS
    types: str = ""  # as the instruction's name has them, where it is not by A and B

    @property
    def name(self) -> str:
        blocks = f"_{self.blocks}b" if self.blocks > 1 else ""
        types = self.types or (self.a if self.a[-1] != "8" or self.a == "i8" else f"{self.a}_{self.b}")
        return f"v_mfma_{self.result}_{self.m}x{self.n}x{self.k}{blocks}_{types}"

    @property
    def result(self) -> str:
        return "i32" if self.a == "i8" else "f32"

    @property
    def registers(self) -> tuple[int, int]:
        """32-bit registers of A (B has as many), and of C or D."""
        return self.m * self.k * self.blocks * BITS[self.a] // 2048, self.m * self.n * self.blocks // 64


TABLE = (
    *(Matrix(*s, "f32", "f32") for s in _WIDE),
    *(Matrix(*s, t, t) for t in ("f16", "bf16") for s in _HALF),
    *(Matrix(*s, "i8", "i8") for s in _BYTE),
    *(Matrix(*s, a, b) for s in _FP8 for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
    *(Matrix(*s, t, t, ("gfx950",)) for t in ("f16", "bf16") for s in ((32, 32, 16, 1), (16, 16, 32, 1))),
    *(Matrix(*s, "i8", "i8", ("gfx950",)) for s in ((32, 32, 32, 1), (16, 16, 64, 1))),
    *(Matrix(*s, "fp8", "fp8", ("gfx950",), "f8f6f4") for s in ((32, 32, 64, 1), (16, 16, 128, 1))),
)

_PLACE = dict[int, Callable[[np.ndarray, np.ndarray], tuple]]
# (lane, register) of C and D -> (block, row, column), by m
D_LAYOUT: _PLACE = {
    32: lambda lane, r: (r // 16, 8 * (r % 16 // 4) + 4 * (lane // 32) + r % 4, lane % 32),
    16: lambda lane, r: (r // 4, 4 * (lane // 16) + r % 4, lane % 16),
    4: lambda lane, r: (lane // 4, r, lane % 4),
}


def operand_layout(x: Matrix, lane: np.ndarray, e: np.ndarray) -> tuple:
    """(lane, element) of A (or B) -> (block, row of A or column of B, k).

    Lanes count rows, then blocks where there are several, then groups of consecutive k.
    """
    each = x.m * x.k * x.blocks // 64
    group = lane // x.m
    return (group, lane % x.m, e) if x.blocks > 1 else (0 * lane, lane % x.m, group * each + e)


def _asm(x: Matrix, c: str = "$3", tail: str = "") -> str:
    return f"s_nop 4\n{x.name} $0, $1, $2, {c}{tail}\ns_nop 15\ns_nop 15"


def _cases() -> tuple[Case, ...]:
    cases = []
    for x in TABLE:
        ab, cd = ("" if r == 1 else str(r) for r in x.registers)
        v, a, dv, da = f"v{ab}", f"a{ab}", f"v{cd}", f"a{cd}"
        one = "5" if x.a == "i8" else "1.0"
        for name, text, out, ins in (
            ("vvv", _asm(x), dv, f"{v} {v} {dv}"), ("aav", _asm(x), dv, f"{a} {a} {dv}"),
            ("vaa", _asm(x), da, f"{v} {a} {da}"), ("ava", _asm(x), da, f"{a} {v} {da}"),
            ("zero", _asm(x, "0"), dv, f"{v} {v}"), ("one", _asm(x, one), da, f"{v} {v}"),
            ("exec", f"s_mov_b64 exec, 5\n{_asm(x)}\ns_mov_b64 exec, -1", dv, f"{v} {v} {dv}"),
        ):  # fmt: skip
            cases.append(Case(f"{x.name}.{name}", text, out, ins, archs=x.archs))
    first = TABLE[8]
    assert first.name == "v_mfma_f32_32x32x8_f16"
    for tail in ("cbsz:1", "blgp:1", "cbsz:1 abid:1"):
        cases.append(
            Case(
                "modified." + tail.replace(":", "").replace(" ", "."),
                _asm(first, tail=" " + tail),
                "v16",
                "v2 v2 v16",
            )
        )
    cases.append(Case("f64", "s_nop 4\nv_mfma_f64_16x16x4_f64 $0, $1, $2, $3\ns_nop 15\ns_nop 15", "v8", "v2 v2 v8"))
    cases.append(
        Case("xf32", _asm(first).replace("32x32x8_f16", "32x32x4_xf32"), "v16", "v2 v2 v16", archs=("gfx942",))
    )
    cases.append(
        Case("sparse", "s_nop 4\nv_smfmac_f32_32x32x16_f16 $0, $1, $2, $3\ns_nop 15\ns_nop 15", "v16", "v2 v4 v")
    )
    cases.append(
        Case(
            "f8f6f4",
            _asm(first, tail=" cbsz:1").replace("32x32x8_f16", "32x32x64_f8f6f4"),
            "v16",
            "v8 v8 v16",
            archs=("gfx950",),
        )
    )
    return tuple(cases)


CASES = _cases()


def decode(codes: np.ndarray, kind: str, arch: str) -> np.ndarray:
    """float64 values of element codes."""
    if kind == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind in ("fp8", "bf8"):
        return published_fp8(kind, arch)[codes]
    return codes.view({"f32": np.float32, "f16": np.float16, "i8": np.int8}[kind]).astype(np.float64)


def published_fp8(kind: str, arch: str) -> np.ndarray:
    """All 256 values: OCP e4m3fn and e5m2 on gfx950, the FNUZ forms on gfx942, spelled out code by code."""
    exponent_bits, mantissa_bits = (4, 3) if kind == "fp8" else (5, 2)
    fnuz = arch == "gfx942"
    values = []
    for code in range(256):
        e, m = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        bias = (1 << exponent_bits - 1) - (not fnuz)
        value = (
            float(m) * 2.0 ** (1 - bias - mantissa_bits) if e == 0 else (1 + m / 2**mantissa_bits) * 2.0 ** (e - bias)
        )
        if fnuz:
            value = np.nan if code == 0x80 else value
        elif e == (1 << exponent_bits) - 1:
            if kind == "bf8":
                value = np.inf if m == 0 else np.nan
            elif m == 7:
                value = np.nan
        values.append(-value if code & 128 else value)
    return np.array(values)


def random_codes(rng: np.random.Generator, x: str, shape: tuple[int, ...], arch: str) -> np.ndarray:
    """Element codes of moderate numbers."""
    if x == "f32":
        return rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    if x == "f16":
        return rng.standard_normal(shape).astype(np.float16).view(np.uint16)
    if x == "bf16":
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    if x in ("fp8", "bf8"):
        codes[~np.isfinite(published_fp8(x, arch)[codes])] = 3
    return codes


def spread(x: Matrix, matrices: np.ndarray) -> np.ndarray:
    """(blocks, rows, k) codes -> uint32 registers (n, 64)."""
    each = x.m * x.k * x.blocks // 64
    lane, e = np.meshgrid(np.arange(64), np.arange(each), indexing="ij")
    return np.ascontiguousarray(matrices[operand_layout(x, lane, e)]).view(np.uint32).reshape(64, -1).T.copy()


def d_places(x: Matrix) -> tuple:
    """(block, row, column) of every (register, lane) of C and D."""
    r, lane = np.meshgrid(np.arange(x.registers[1]), np.arange(64), indexing="ij")
    return D_LAYOUT[x.m](lane, r)


def reference(x: Matrix, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 D, and the bound on float32 accumulation in any order, both (blocks, m, n)."""
    with np.errstate(all="ignore"):
        d = np.einsum("bik,bjk->bij", a, b) + c
        size = np.einsum("bik,bjk->bij", np.abs(a), np.abs(b)) + np.abs(c)
    return d, (x.k + 2) * 2.0**-24 * size + 2.0**-149


def run(x: Matrix, arch: str, variant: str, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """D of shape (blocks, m, n), as the bits' own type; A is (blocks, m, k), B (blocks, n, k), codes."""
    registers = [spread(x, a), spread(x, b)]
    if c is not None:
        registers.append(np.ascontiguousarray(c[d_places(x)]).view(np.uint32).reshape(-1, 64))
    (out,) = bench(CASES, arch).run(f"{x.name}.{variant}", *registers)
    d = np.zeros((x.blocks, x.m, x.n), np.uint32)
    d[d_places(x)] = out
    return d.view(np.int32 if x.a == "i8" else np.float32)


def pairs() -> list:
    """Every instruction on every architecture that has it."""
    return [pytest.param(x, arch, id=f"{arch}-{x.name}") for arch in ARCHS for x in TABLE if arch in x.archs]


def test_layouts_are_bijections() -> None:
    for x in TABLE:
        each = x.m * x.k * x.blocks // 64
        lane, e = np.meshgrid(np.arange(64), np.arange(each), indexing="ij")
        operand = set(zip(*(np.broadcast_to(v, lane.shape).ravel().tolist() for v in operand_layout(x, lane, e))))
        assert operand == {(b, i, k) for b in range(x.blocks) for i in range(x.m) for k in range(x.k)}
        result = set(zip(*(v.ravel().tolist() for v in d_places(x))))
        assert result == {(b, i, j) for b in range(x.blocks) for i in range(x.m) for j in range(x.n)}


@pytest.mark.parametrize(("x", "arch"), pairs())
def test_product(x: Matrix, arch: str) -> None:
    """Random matrices in every combination of register banks; EXEC does not matter."""
    rng = np.random.default_rng(7)
    a = random_codes(rng, x.a, (x.blocks, x.m, x.k), arch)
    b = random_codes(rng, x.b, (x.blocks, x.n, x.k), arch)
    c = rng.integers(-1000, 1000, (x.blocks, x.m, x.n)).astype(np.int32 if x.a == "i8" else np.float32)
    for variant in ("vvv", "aav", "vaa", "ava", "zero", "one", "exec"):
        start = {"zero": 0.0, "one": 5.0 if x.a == "i8" else 1.0}.get(variant)
        addend = c.astype(np.float64) if start is None else np.full(c.shape, start)
        want, bound = reference(x, decode(a, x.a, arch), decode(b, x.b, arch), addend)
        got = run(x, arch, variant, a, b, c if start is None else None)
        assert (np.abs(got - want) <= (0 if x.a == "i8" else bound)).all(), variant


def test_integers_wrap() -> None:
    x = next(t for t in TABLE if t.name == "v_mfma_i32_32x32x16_i8")
    full = np.full((1, 32, 16), 0x80, np.uint8)
    c = np.full((1, 32, 32), 2**31 - 5, np.int32)
    assert (run(x, "gfx950", "vvv", full, full, c) == np.int64(2**31 - 5 + 16 * 128 * 128 - 2**32)).all()


_SPECIAL = {
    # A's value, B's value, C's value, expected D, each as a number; 0·x elsewhere
    "inf": (np.inf, 2.0, 1.0, np.inf), "minus inf": (np.inf, -2.0, 1.0, -np.inf), "nan": (np.nan, 2.0, 1.0, np.nan),
    "inf times zero": (np.inf, 0.0, 1.0, np.nan), "inf in c": (1.0, 2.0, -np.inf, -np.inf),
    "inf minus inf": (np.inf, 1.0, -np.inf, np.nan), "nan in c": (1.0, 2.0, np.nan, np.nan),
}  # fmt: skip
_SUBNORMAL = {"f16": 3 * 2.0**-24, "bf16": 3 * 2.0**-133, "f32": 3 * 2.0**-149}


def _encode(value: float, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.array([value], {"f32": np.float32, "f16": np.float16}[kind]).view(f"u{BITS[kind] // 8}")


@pytest.mark.parametrize(("x", "arch"), [p for p in pairs() if p.values[0].a in ("f16", "bf16", "f32")])
def test_special_values(x: Matrix, arch: str) -> None:
    """Infinities, NaNs and subnormals in one row and column reach the elements that they should, and no others."""
    zeros = np.zeros((x.blocks, x.m, x.k), f"u{BITS[x.a] // 8}")
    for name, (av, bv, cv, want) in _SPECIAL.items():
        a, b, c = zeros.copy(), zeros.copy(), np.zeros((x.blocks, x.m, x.n), np.float32)
        a[-1, 1, -1], b[-1, 2, -1], c[-1, 1, 2] = _encode(av, x.a)[0], _encode(bv, x.a)[0], cv
        d = run(x, arch, "vvv", a, b, c)
        np.testing.assert_equal(float(d[-1, 1, 2]), want, err_msg=name)
        expected, _ = reference(x, decode(a, x.a, arch), decode(b, x.a, arch), c.astype(np.float64))
        np.testing.assert_array_equal(np.isnan(d), np.isnan(expected), err_msg=name)
        np.testing.assert_array_equal(np.isinf(d), np.isinf(expected), err_msg=name)
    tiny = _SUBNORMAL[x.a]
    a, b, c = zeros.copy(), zeros.copy(), np.zeros((x.blocks, x.m, x.n), np.float32)
    a[0, 0, 0], b[0, 0, 0] = _encode(tiny, x.a)[0], _encode(0.25 if x.a == "f16" else 2.0**60, x.a)[0]
    assert run(x, arch, "vvv", a, b, c)[0, 0, 0] == tiny * (0.25 if x.a == "f16" else 2.0**60)


@pytest.mark.parametrize("arch", ARCHS)
def test_fp8_special_values(arch: str) -> None:
    """Every code of both 8-bit formats, by multiplying with one."""
    for kind in ("fp8", "bf8"):
        np.testing.assert_array_equal(
            fp8_table(kind + ("z" if arch == "gfx942" else "")).astype(np.float64), published_fp8(kind, arch)
        )
        x = next(t for t in TABLE if t.name == f"v_mfma_f32_32x32x16_{kind}_fp8")
        unit = int(np.flatnonzero(published_fp8("fp8", arch) == 1.0)[0])
        for start in range(0, 256, 32):
            a, b = np.zeros((1, 32, 16), np.uint8), np.zeros((1, 32, 16), np.uint8)
            a[0, :, 5] = np.arange(start, start + 32)
            b[0, :, 5] = unit
            d = run(x, arch, "zero", a, b, None)
            np.testing.assert_array_equal(
                d[0, :, 9], published_fp8(kind, arch)[start : start + 32].astype(np.float32)
            )


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_not_modelled_is_an_error(arch: str) -> None:
    refused = {"f64": "v_mfma_f64_16x16x4", "sparse": "v_smfmac_f32_32x32x16_f16", "xf32": "v_mfma_f32_32x32x4_xf32",
               "f8f6f4": "f8f6f4", "modified.cbsz1": "v_mfma_f32_32x32x8_f16", "modified.blgp1": "32x32x8_f16",
               "modified.cbsz1.abid1": "32x32x8_f16"}  # fmt: skip
    shared = bench(CASES, arch)
    for name, text in refused.items():
        if name not in shared.cases:
            continue
        inputs = [np.zeros((int(i[1:] or 1), 64), np.uint32) for i in shared.cases[name].ins.split()]
        with pytest.raises(EmulatorError, match=rf"{name}: .*{text}.* at 0x[0-9a-f]+ "):
            shared.run(name, *inputs)
