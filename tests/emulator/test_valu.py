"""Vector ALU instructions, lane by lane against Python integers and exact fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.machine_code import ARCHS, Case, bench

U32 = 0xFFFFFFFF


def s(x: int, bits: int = 32) -> int:
    """Low bits as a signed integer."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & U32))[0]


def f16(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


_FORMATS = {"f16": (11, -24, 15), "f32": (24, -149, 127), "f64": (53, -1074, 1023), "bf16": (8, -133, 127)}


def rounded(value: Fraction, kind: str, zero: float = 0.0) -> float:
    """The nearest number of a format, ties to even; `zero` gives the sign of an exact zero."""
    precision, least, most = _FORMATS[kind]
    if value == 0:
        return zero
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    step = Fraction(2) ** max(exponent - precision + 1, least)
    steps = size / step
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    result = whole * step
    if result >= Fraction(2) ** (most + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(result), value)


def exact(operation: Callable[..., Fraction], kind: str) -> Callable[..., float]:
    """IEEE arithmetic of finite numbers from exact fractions; None where an operand is not finite."""

    def run(*x: float) -> float | None:
        if not all(math.isfinite(v) for v in x):
            return None
        value = operation(*(Fraction(v) for v in x))
        return None if value == 0 else rounded(value, kind)

    return run


def bits32(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits16(value: float) -> int:
    return struct.unpack("<H", struct.pack("<e", value))[0]


def leading(x: int) -> int:
    return 32 - x.bit_length() if x else U32


def perm(a: int, b: int, c: int) -> int:
    data, out = (a << 32 | b), 0
    for i in range(4):
        sel = c >> 8 * i & 255
        byte = 0xFF
        if sel < 8:
            byte = data >> 8 * sel & 255
        elif sel < 12:
            byte = 255 * (data >> (16 * (sel - 8) + 15) & 1)
        elif sel == 12:
            byte = 0
        out |= byte << 8 * i
    return out


def bytes_of(x: int) -> list[int]:
    return [x >> 8 * i & 255 for i in range(4)]


def dot(a: int, b: int, c: int, bits: int, signed: bool) -> int:
    for i in range(0, 32, bits):
        x, y = (a >> i) & ((1 << bits) - 1), (b >> i) & ((1 << bits) - 1)
        c += s(x, bits) * s(y, bits) if signed else x * y
    return c


def halves(f: Callable[..., int]) -> Callable[..., int]:
    """A function of 16-bit values, on both halves."""
    return lambda *x: (f(*(v & 0xFFFF for v in x)) & 0xFFFF) | (f(*(v >> 16 for v in x)) & 0xFFFF) << 16


def clip(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


# name: number of sources, function of unsigned 32-bit integers
INTEGER: dict[str, tuple[int, Callable[..., int]]] = {
    "v_mov_b32": (1, lambda a: a),
    "v_not_b32": (1, lambda a: ~a),
    "v_bfrev_b32": (1, lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32": (1, leading),
    "v_ffbl_b32": (1, lambda a: (a & -a).bit_length() - 1 if a else U32),
    "v_ffbh_i32": (1, lambda a: U32 if a in (0, U32) else leading(a ^ (U32 if a >> 31 else 0))),
    "v_sat_pk_u8_i16": (1, lambda a: clip(s(a, 16), 0, 255) | clip(s(a >> 16, 16), 0, 255) << 8),
    "v_add_u32": (2, lambda a, b: a + b),
    "v_sub_u32": (2, lambda a, b: a - b),
    "v_subrev_u32": (2, lambda a, b: b - a),
    "v_mul_i32_i24": (2, lambda a, b: s(a, 24) * s(b, 24)),
    "v_mul_hi_i32_i24": (2, lambda a, b: s(a, 24) * s(b, 24) >> 32),
    "v_mul_u32_u24": (2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "v_mul_hi_u32_u24": (2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    "v_mul_lo_u32": (2, lambda a, b: a * b),
    "v_mul_hi_u32": (2, lambda a, b: a * b >> 32),
    "v_mul_hi_i32": (2, lambda a, b: s(a) * s(b) >> 32),
    "v_min_i32": (2, lambda a, b: min(s(a), s(b))),
    "v_max_i32": (2, lambda a, b: max(s(a), s(b))),
    "v_min_u32": (2, min),
    "v_max_u32": (2, max),
    "v_lshlrev_b32": (2, lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": (2, lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": (2, lambda a, b: s(b) >> (a & 31)),
    "v_and_b32": (2, lambda a, b: a & b),
    "v_or_b32": (2, lambda a, b: a | b),
    "v_xor_b32": (2, lambda a, b: a ^ b),
    "v_xnor_b32": (2, lambda a, b: ~(a ^ b)),
    "v_bcnt_u32_b32": (2, lambda a, b: a.bit_count() + b),
    "v_bfm_b32": (2, lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_add_i32": (2, lambda a, b: a + b),
    "v_sub_i32": (2, lambda a, b: a - b),
    "v_add_u16": (2, lambda a, b: a + b & 0xFFFF),
    "v_sub_u16": (2, lambda a, b: a - b & 0xFFFF),
    "v_subrev_u16": (2, lambda a, b: b - a & 0xFFFF),
    "v_mul_lo_u16": (2, lambda a, b: a * b & 0xFFFF),
    "v_lshlrev_b16": (2, lambda a, b: b << (a & 15) & 0xFFFF),
    "v_lshrrev_b16": (2, lambda a, b: (b & 0xFFFF) >> (a & 15)),
    "v_ashrrev_i16": (2, lambda a, b: s(b, 16) >> (a & 15) & 0xFFFF),
    "v_min_u16": (2, lambda a, b: min(a & 0xFFFF, b & 0xFFFF)),
    "v_max_u16": (2, lambda a, b: max(a & 0xFFFF, b & 0xFFFF)),
    "v_min_i16": (2, lambda a, b: min(s(a, 16), s(b, 16)) & 0xFFFF),
    "v_max_i16": (2, lambda a, b: max(s(a, 16), s(b, 16)) & 0xFFFF),
    "v_cvt_pk_u16_u32": (2, lambda a, b: min(a, 0xFFFF) | min(b, 0xFFFF) << 16),
    "v_cvt_pk_i16_i32": (
        2,
        lambda a, b: clip(s(a), -32768, 32767) & 0xFFFF | (clip(s(b), -32768, 32767) & 0xFFFF) << 16,
    ),
    "v_pack_b32_f16": (2, lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16),
    "v_bfe_u32": (3, lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1)),
    "v_bfe_i32": (
        3,
        lambda a, b, c: (
            s(a >> (b & 31), c & 31) if c & 31 and (b & 31) + (c & 31) < 32 else (s(a) >> (b & 31)) * ((c & 31) > 0)
        ),
    ),
    "v_bfi_b32": (3, lambda a, b, c: a & b | ~a & c),
    "v_perm_b32": (3, perm),
    "v_alignbit_b32": (3, lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32": (3, lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_mad_u32_u24": (3, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "v_mad_i32_i24": (3, lambda a, b, c: s(a, 24) * s(b, 24) + c),
    "v_mad_u32_u16": (3, lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c),
    "v_mad_i32_i16": (3, lambda a, b, c: s(a, 16) * s(b, 16) + c),
    "v_add3_u32": (3, lambda a, b, c: a + b + c),
    "v_lshl_add_u32": (3, lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": (3, lambda a, b, c: (a + b) << (c & 31)),
    "v_lshl_or_b32": (3, lambda a, b, c: (a << (b & 31)) | c),
    "v_and_or_b32": (3, lambda a, b, c: a & b | c),
    "v_or3_b32": (3, lambda a, b, c: a | b | c),
    "v_xad_u32": (3, lambda a, b, c: (a ^ b) + c),
    "v_min3_u32": (3, min),
    "v_max3_u32": (3, max),
    "v_med3_u32": (3, lambda *x: sorted(x)[1]),
    "v_min3_i32": (3, lambda *x: min(map(s, x))),
    "v_max3_i32": (3, lambda *x: max(map(s, x))),
    "v_med3_i32": (3, lambda *x: sorted(map(s, x))[1]),
    "v_sad_u8": (3, lambda a, b, c: sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b))) + c),
    "v_sad_hi_u8": (3, lambda a, b, c: (sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b))) << 16) + c),
    "v_sad_u16": (3, lambda a, b, c: abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)) + c),
    "v_sad_u32": (3, lambda a, b, c: abs(a - b) + c),
    "v_lerp_u8": (
        3,
        lambda a, b, c: sum(
            (x + y + (z & 1) >> 1) << 8 * i for i, (x, y, z) in enumerate(zip(bytes_of(a), bytes_of(b), bytes_of(c)))
        ),
    ),
    "v_dot4_i32_i8": (3, lambda a, b, c: dot(a, b, c, 8, True)),
    "v_dot4_u32_u8": (3, lambda a, b, c: dot(a, b, c, 8, False)),
    "v_dot2_i32_i16": (3, lambda a, b, c: dot(a, b, c, 16, True)),
    "v_dot8_i32_i4": (3, lambda a, b, c: dot(a, b, c, 4, True)),
    "v_dot8_u32_u4": (3, lambda a, b, c: dot(a, b, c, 4, False)),
    "v_pk_add_u16": (2, halves(lambda a, b: a + b)),
    "v_pk_sub_i16": (2, halves(lambda a, b: a - b)),
    "v_pk_mul_lo_u16": (2, halves(lambda a, b: a * b)),
    "v_pk_mad_u16": (3, halves(lambda a, b, c: a * b + c)),
    "v_pk_mad_i16": (3, halves(lambda a, b, c: a * b + c)),
    "v_pk_lshlrev_b16": (2, halves(lambda a, b: b << (a & 15))),
    "v_pk_lshrrev_b16": (2, halves(lambda a, b: b >> (a & 15))),
    "v_pk_ashrrev_i16": (2, halves(lambda a, b: s(b, 16) >> (a & 15))),
    "v_pk_max_i16": (2, halves(lambda a, b: max(s(a, 16), s(b, 16)))),
    "v_pk_min_u16": (2, halves(min)),
    "v_cvt_f32_u32": (1, lambda a: bits32(rounded(Fraction(a), "f32"))),
    "v_cvt_f32_i32": (1, lambda a: bits32(rounded(Fraction(s(a)), "f32"))),
    **{f"v_cvt_f32_ubyte{i}": (1, lambda a, i=i: bits32(float(a >> 8 * i & 255))) for i in range(4)},
    "v_cvt_f16_u16": (1, lambda a: bits16(rounded(Fraction(a & 0xFFFF), "f16"))),
    "v_cvt_f16_i16": (1, lambda a: bits16(rounded(Fraction(s(a, 16)), "f16"))),
}
# the same with CLAMP: limited to the type's range
CLAMPED: dict[str, Callable[..., int]] = {
    "v_add_u32": lambda a, b: min(a + b, U32), "v_sub_u32": lambda a, b: max(a - b, 0),
    "v_add_i32": lambda a, b: clip(s(a) + s(b), -(2**31), 2**31 - 1),
    "v_sub_i32": lambda a, b: clip(s(a) - s(b), -(2**31), 2**31 - 1),
    "v_add_u16": lambda a, b: min((a & 0xFFFF) + (b & 0xFFFF), 0xFFFF),
    "v_sub_u16": lambda a, b: max((a & 0xFFFF) - (b & 0xFFFF), 0),
    "v_pk_add_u16": halves(lambda a, b: min(a + b, 0xFFFF)),
    "v_pk_sub_i16": halves(lambda a, b: clip(s(a, 16) - s(b, 16), -32768, 32767)),
}  # fmt: skip
_WIDE_INTEGER: dict[str, tuple[str, Callable[..., int]]] = {
    "v_lshlrev_b64": ("v v2", lambda a, b: b << (a & 63)), "v_lshrrev_b64": ("v v2", lambda a, b: b >> (a & 63)),
    "v_ashrrev_i64": ("v v2", lambda a, b: s(b, 64) >> (a & 63)), "v_mov_b64": ("v2", lambda a: a),
    "v_lshl_add_u64": ("v2 v v2", lambda a, b, c: (a << (b & 7)) + c),
}  # fmt: skip


def _plain(name: str, count: int) -> str:
    return f"{name} " + ", ".join(f"${i}" for i in range(count + 1))


CASES = (
    *(Case(name, _plain(name, n), "v", "v " * n) for name, (n, _) in INTEGER.items()),
    *(Case(name + ".clamp", _plain(name, 2) + " clamp", "v", "v v") for name in CLAMPED),
    *(Case(n, _plain(n, len(ins.split())), "v2", ins) for n, (ins, _) in _WIDE_INTEGER.items()),
    Case("carry", "v_add_co_u32 $0, vcc, $2, $3\nv_addc_co_u32 $1, vcc, $4, $5, vcc", "v v", "v v v v", "vcc"),
    Case("borrow", "v_sub_co_u32 $0, vcc, $2, $3\nv_subb_co_u32 $1, vcc, $4, $5, vcc", "v v", "v v v v", "vcc"),
    Case("carry.sgpr", "v_add_co_u32 $0, $1, $2, $3", "v s2", "v v"),
    Case("mad_u64", "v_mad_u64_u32 $0, $1, $2, $3, $4", "v2 s2", "v v v2"),
    Case("mad_i64", "v_mad_i64_i32 $0, $1, $2, $3, $4", "v2 s2", "v v v2"),
    Case("mbcnt", "v_mbcnt_lo_u32_b32 $0, $1, 0\nv_mbcnt_hi_u32_b32 $0, $2, $0", "v", "v v"),
    Case("cndmask", "v_cndmask_b32_e64 $0, $1, -|$2|, $3", "v", "v v s2"),
    Case("swap", "v_mov_b32 $0, $2\nv_mov_b32 $1, $3\nv_swap_b32 $0, $1", "v v", "v v"),
    Case("bitop3", "v_bitop3_b32 $0, $1, $2, $3 bitop3:0x6b", "v", "v v v", archs=("gfx950",)),
    Case("inline16", "v_pk_add_u16 $0, $2, -3\nv_pk_add_u16 $1, $2, 5 op_sel_hi:[1,0]", "v v", "v"),
    Case("inline16f", "v_pk_add_f16 $0, $2, 1.0 op_sel_hi:[1,0]\nv_pk_mul_f16 $1, $2, 2.0", "v v", "v"),
    Case("pack", "v_pack_b32_f16 $0, 4.0, -|$1| op_sel:[0,1,0]", "v", "v"),
    Case("inline64", "v_mov_b64 $0, 4.0\nv_mov_b64 $1, -0.5", "v2 v2", "v"),
)  # fmt: skip


def integers(seed: int, count: int) -> list[np.ndarray]:
    """Edges and random bits, (64,) uint32 each."""
    rng = np.random.default_rng(seed)
    edges = np.array([0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000, 0xFFFFFF,
                      0x7FFFFFFF, 0x80000000, 0x80000001, U32 - 1, U32, 0x0C0B0A09, 0x07050301, 0x8000FFFF],
                     np.uint32)  # fmt: skip
    out = []
    for _ in range(count):
        x = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
        x[16:] = np.where(rng.random(48) < 0.6, rng.choice(edges, 48), x[16:])
        out.append(x)
    return out


def lanes(function: Callable[..., int], *x: np.ndarray) -> np.ndarray:
    """A function of Python integers in every lane, low 32 bits."""
    return np.array([function(*(int(v[i]) for v in x)) & U32 for i in range(64)], np.uint32)


@pytest.mark.parametrize("arch", ARCHS)
def test_integers(arch: str) -> None:
    shared = bench(CASES, arch)
    for seed, (name, (count, function)) in enumerate(INTEGER.items()):
        x = integers(seed, count)
        np.testing.assert_array_equal(shared.run(name, *x)[0], lanes(function, *x), err_msg=name)
    for seed, (name, function) in enumerate(CLAMPED.items()):
        x = integers(seed, 2)
        np.testing.assert_array_equal(
            shared.run(name + ".clamp", *x)[0], lanes(function, *x), err_msg=name + " clamp"
        )


@pytest.mark.parametrize("arch", ARCHS)
def test_wide_integers(arch: str) -> None:
    shared = bench(CASES, arch)
    for seed, (name, (ins, function)) in enumerate(_WIDE_INTEGER.items()):
        parts = [integers(9 * seed + i, 2) for i in range(len(ins.split()))]
        numbers = [
            p[0].astype(np.uint64) | p[1].astype(np.uint64) << np.uint64(32) if k == "v2" else p[0]
            for p, k in zip(parts, ins.split())
        ]
        (got,) = shared.run(name, *(np.stack(p) if k == "v2" else p[0] for p, k in zip(parts, ins.split())))
        want = [function(*(int(v[i]) for v in numbers)) & (1 << 64) - 1 for i in range(64)]
        assert [int(got[0, i]) | int(got[1, i]) << 32 for i in range(64)] == want, name


def _bitop3(x: int, y: int, z: int) -> int:
    return sum((0x6B >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1) << i for i in range(32))


def mask_of(flags: list[bool]) -> tuple[int, int]:
    value = sum(int(f) << i for i, f in enumerate(flags))
    return value & U32, value >> 32


@pytest.mark.parametrize("arch", ARCHS)
def test_carries(arch: str) -> None:
    shared = bench(CASES, arch)
    a, b, c, d = (list(map(int, x)) for x in integers(5, 4))
    arrays = [np.array(x, np.uint32) for x in (a, b, c, d)]
    low, high = shared.run("carry", *arrays)
    want = [(x | z << 32) + (y | w << 32) for x, y, z, w in zip(a, b, c, d)]
    assert [int(p) | int(q) << 32 for p, q in zip(low, high)] == [w & (1 << 64) - 1 for w in want]
    low, high = shared.run("borrow", *arrays)
    want = [(x | z << 32) - (y | w << 32) for x, y, z, w in zip(a, b, c, d)]
    assert [int(p) | int(q) << 32 for p, q in zip(low, high)] == [w & (1 << 64) - 1 for w in want]
    _, flags = shared.run("carry.sgpr", *arrays[:2])
    assert tuple(flags[:, 0].tolist()) == mask_of([x + y > U32 for x, y in zip(a, b)])
    for name, signed in (("mad_u64", False), ("mad_i64", True)):
        got, flags = shared.run(name, arrays[0], arrays[1], np.stack(arrays[2:]))
        want, over = [], []
        for x, y, z, w in zip(a, b, c, d):
            add = z | w << 32
            total = s(x) * s(y) + s(add, 64) if signed else x * y + add
            want.append(total & (1 << 64) - 1)
            over.append(not -(1 << 63) <= total < 1 << 63 if signed else total >> 64 != 0)
        assert [int(p) | int(q) << 32 for p, q in zip(*got)] == want, name
        assert tuple(flags[:, 0].tolist()) == mask_of(over), name


@pytest.mark.parametrize("arch", ARCHS)
def test_masks_and_moves(arch: str) -> None:
    shared = bench(CASES, arch)
    a, b, c = integers(11, 3)
    (got,) = shared.run("mbcnt", a, b)
    below = [(1 << i) - 1 for i in range(64)]
    want = [((int(x) | int(y) << 32) & m).bit_count() for x, y, m in zip(a, b, below)]
    assert got.tolist() == want
    mask = 0x0123_4567_89AB_CDEF
    (got,) = shared.run("cndmask", a, b, np.array([mask & U32, mask >> 32], np.uint32))
    assert got.tolist() == [int(y) | 1 << 31 if mask >> i & 1 else int(x) for i, (x, y) in enumerate(zip(a, b))]
    first, second = shared.run("swap", a, b)
    assert (first == b).all() and (second == a).all()
    four, half = shared.run("inline64", a)
    assert (four == [[0], [0x40100000]]).all() and (half == [[0], [0xBFE00000]]).all()
    minus, plus = shared.run("inline16", a)
    # 32 bits of -3: its high half is -1
    np.testing.assert_array_equal(minus, lanes(lambda x: (x - 3 & 0xFFFF) | (x >> 16) - 1 << 16, a))
    np.testing.assert_array_equal(plus, lanes(halves(lambda x: x + 5), a))
    both, low = shared.run("inline16f", np.full(64, 0x3C003C00, np.uint32))
    assert (both == 0x40004000).all() and (low == 0x00004000).all()
    (got,) = shared.run("pack", a)
    np.testing.assert_array_equal(got, lanes(lambda x: 0x4400 | (x >> 16 | 0x8000) << 16, a))
    if arch == "gfx950":
        (got,) = shared.run("bitop3", a, b, c)
        np.testing.assert_array_equal(got, lanes(_bitop3, a, b, c))
