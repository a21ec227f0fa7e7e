"""Scalar ALU instructions and SCC, against Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulator.machine_code import ARCHS, Case, bench
from tests.emulator.test_valu import leading, s

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
Result = tuple[int, int | None]  # value, and SCC where the instruction sets it


def nonzero(function: Callable[..., int], bits: int = 32) -> Callable[..., Result]:
    """SCC = result is not zero."""

    def run(*x: int) -> Result:
        value = function(*x) & (1 << bits) - 1
        return value, int(value != 0)

    return run


def silent(function: Callable[..., int]) -> Callable[..., Result]:
    """SCC stays."""
    return lambda *x: (function(*x), None)


def signed_overflow(value: int) -> Result:
    return value, int(not -(1 << 31) <= value < 1 << 31)


def bfe(bits: int, signed: bool) -> Callable[[int, int], int]:
    def run(a: int, b: int) -> int:
        offset, width = b & (bits - 1), b >> 16 & 127
        if not width:
            return 0
        a = (s(a, bits) if signed else a) >> offset
        if offset + width >= bits:
            return a
        return s(a, width) if signed else a & (1 << width) - 1

    return run


def first(x: int, bits: int) -> int:
    """Lowest set bit, -1 for none."""
    return (x & -x).bit_length() - 1


def flbit_i(x: int, bits: int) -> int:
    x = x ^ ((1 << bits) - 1) if x >> (bits - 1) else x
    return bits - x.bit_length() if x else -1


LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
# name: (registers of the destination and of each source, function)
TABLE: dict[str, tuple[str, Callable[..., Result]]] = {
    "s_add_u32": ("1 1 1", lambda a, b: (a + b, a + b >> 32)),
    "s_sub_u32": ("1 1 1", lambda a, b: (a - b, int(b > a))),
    "s_add_i32": ("1 1 1", lambda a, b: signed_overflow(s(a) + s(b))),
    "s_sub_i32": ("1 1 1", lambda a, b: signed_overflow(s(a) - s(b))),
    "s_addc_u32": ("1 1 1", lambda a, b: (a + b + 1, a + b + 1 >> 32)),
    "s_subb_u32": ("1 1 1", lambda a, b: (a - b - 1, int(b + 1 > a))),
    "s_mul_i32": ("1 1 1", silent(lambda a, b: a * b)),
    "s_mul_hi_u32": ("1 1 1", silent(lambda a, b: a * b >> 32)),
    "s_mul_hi_i32": ("1 1 1", silent(lambda a, b: s(a) * s(b) >> 32)),
    "s_min_i32": ("1 1 1", lambda a, b: (min(s(a), s(b)), int(s(a) < s(b)))),
    "s_max_i32": ("1 1 1", lambda a, b: (max(s(a), s(b)), int(s(a) > s(b)))),
    "s_min_u32": ("1 1 1", lambda a, b: (min(a, b), int(a < b))),
    "s_max_u32": ("1 1 1", lambda a, b: (max(a, b), int(a > b))),
    "s_lshl_b32": ("1 1 1", nonzero(lambda a, b: a << (b & 31))),
    "s_lshr_b32": ("1 1 1", nonzero(lambda a, b: a >> (b & 31))),
    "s_ashr_i32": ("1 1 1", nonzero(lambda a, b: s(a) >> (b & 31))),
    "s_lshl_b64": ("2 2 1", nonzero(lambda a, b: a << (b & 63), 64)),
    "s_lshr_b64": ("2 2 1", nonzero(lambda a, b: a >> (b & 63), 64)),
    "s_ashr_i64": ("2 2 1", nonzero(lambda a, b: s(a, 64) >> (b & 63), 64)),
    "s_bfe_u32": ("1 1 1", nonzero(bfe(32, False))),
    "s_bfe_i32": ("1 1 1", nonzero(bfe(32, True))),
    "s_bfe_u64": ("2 2 1", nonzero(bfe(64, False), 64)),
    "s_bfe_i64": ("2 2 1", nonzero(bfe(64, True), 64)),
    "s_bfm_b32": ("1 1 1", silent(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31))),
    "s_bfm_b64": ("2 1 1", silent(lambda a, b: ((1 << (a & 63)) - 1) << (b & 63))),
    "s_absdiff_i32": ("1 1 1", nonzero(lambda a, b: abs(s(a - b)))),
    "s_pack_ll_b32_b16": ("1 1 1", silent(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16)),
    "s_pack_lh_b32_b16": ("1 1 1", silent(lambda a, b: a & 0xFFFF | b >> 16 << 16)),
    "s_pack_hh_b32_b16": ("1 1 1", silent(lambda a, b: a >> 16 | b >> 16 << 16)),
    **{
        f"s_lshl{i}_add_u32": ("1 1 1", lambda a, b, i=i: ((a << i) + b, int((a << i) + b > U32)))
        for i in (1, 2, 3, 4)
    },
    **{f"s_{n}_b32": ("1 1 1", nonzero(f)) for n, f in LOGIC.items()},
    **{f"s_{n}_b64": ("2 2 2", nonzero(f, 64)) for n, f in LOGIC.items()},
    "s_cselect_b32": ("1 1 1", silent(lambda a, b: a)),
    "s_cselect_b64": ("2 2 2", silent(lambda a, b: a)),
    "s_mov_b32": ("1 1", silent(lambda a: a)),
    "s_mov_b64": ("2 2", silent(lambda a: a)),
    "s_not_b32": ("1 1", nonzero(lambda a: ~a)),
    "s_not_b64": ("2 2", nonzero(lambda a: ~a, 64)),
    "s_brev_b32": ("1 1", silent(lambda a: int(f"{a:032b}"[::-1], 2))),
    "s_brev_b64": ("2 2", silent(lambda a: int(f"{a:064b}"[::-1], 2))),
    "s_bcnt0_i32_b32": ("1 1", nonzero(lambda a: 32 - a.bit_count())),
    "s_bcnt1_i32_b32": ("1 1", nonzero(lambda a: a.bit_count())),
    "s_bcnt0_i32_b64": ("1 2", nonzero(lambda a: 64 - a.bit_count())),
    "s_bcnt1_i32_b64": ("1 2", nonzero(lambda a: a.bit_count())),
    "s_ff0_i32_b32": ("1 1", silent(lambda a: first(~a & U32, 32))),
    "s_ff1_i32_b32": ("1 1", silent(lambda a: first(a, 32))),
    "s_ff0_i32_b64": ("1 2", silent(lambda a: first(~a & U64, 64))),
    "s_ff1_i32_b64": ("1 2", silent(lambda a: first(a, 64))),
    "s_flbit_i32_b32": ("1 1", silent(leading)),
    "s_flbit_i32_b64": ("1 2", silent(lambda a: 64 - a.bit_length() if a else -1)),
    "s_flbit_i32": ("1 1", silent(lambda a: flbit_i(a, 32))),
    "s_flbit_i32_i64": ("1 2", silent(lambda a: flbit_i(a, 64))),
    "s_sext_i32_i8": ("1 1", silent(lambda a: s(a, 8))),
    "s_sext_i32_i16": ("1 1", silent(lambda a: s(a, 16))),
    "s_abs_i32": ("1 1", nonzero(lambda a: abs(s(a)))),
    "s_quadmask_b32": ("1 1", nonzero(lambda a: sum((a >> 4 * i & 15 != 0) << i for i in range(8)))),
    "s_wqm_b32": ("1 1", nonzero(lambda a: sum(15 * (a >> 4 * i & 15 != 0) << 4 * i for i in range(8)))),
    "s_bitreplicate_b64_b32": ("2 1", silent(lambda a: sum((a >> i & 1) * 3 << 2 * i for i in range(32)))),
}
_RELATIONS = {
    "eq": int.__eq__,
    "lg": int.__ne__,
    "gt": int.__gt__,
    "ge": int.__ge__,
    "lt": int.__lt__,
    "le": int.__le__,
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    **{f"s_cmp_{n}_u32": f for n, f in _RELATIONS.items()},
    **{f"s_cmp_{n}_i32": (lambda a, b, f=f: f(s(a), s(b))) for n, f in _RELATIONS.items()},
    "s_bitcmp0_b32": lambda a, b: not a >> (b & 31) & 1,
    "s_bitcmp1_b32": lambda a, b: bool(a >> (b & 31) & 1),
}
# s_NAMEk $0, -100: function of (old value, constant)
CONSTANT: dict[str, Callable[[int, int], Result]] = {
    "s_movk_i32": lambda a, k: (k, None), "s_addk_i32": lambda a, k: signed_overflow(s(a) + k),
    "s_mulk_i32": lambda a, k: (s(a) * k, None), "s_cmovk_i32": lambda a, k: (k, None),
    "s_cmpk_gt_i32": lambda a, k: (a, int(s(a) > k)), "s_cmpk_lt_u32": lambda a, k: (a, int(a < k & 0xFFFF)),
}  # fmt: skip
SET = "s_cmp_eq_u32 0, 0\n"  # SCC = 1
SHOW = "\ns_cselect_b32 $1, 1, 0"


def _registers(text: str) -> list[str]:
    return ["s" if n == "1" else f"s{n}" for n in text.split()]


def _cases() -> tuple[Case, ...]:
    cases = []
    for name, (sizes, _) in TABLE.items():
        out, *ins = _registers(sizes)
        operands = ", ".join(f"${i + 2}" for i in range(len(ins)))
        cases.append(Case(name, f"{SET}{name} $0, {operands}{SHOW}", f"{out} s", " ".join(ins), "scc"))
    cases += [Case(n, f"{n} $1, $2\ns_cselect_b32 $0, 1, 0", "s", "s s", "scc") for n in COMPARE]
    for name in CONSTANT:
        k = "0xff9c" if name.endswith("u32") else "-100"
        cases.append(Case(name, f"s_mov_b32 $0, $2\n{SET}{name} $0, {k}{SHOW}", "s s", "s", "scc"))
    for name in LOGIC:
        text = f"s_mov_b64 exec, $4\ns_{name}_saveexec_b64 $0, $3\ns_mov_b64 $1, exec\n"
        text += "s_cselect_b32 $2, 1, 0\ns_mov_b64 exec, -1"
        cases.append(Case(f"saveexec.{name}", text, "s2 s2 s", "s2 s2", "scc"))
    cases.append(
        Case("bitset", "s_mov_b32 $0, $2\ns_bitset1_b32 $0, $3\ns_mov_b32 $1, $2\ns_bitset0_b32 $1, $3", "s s", "s s")
    )
    cases.append(Case("literal", "s_add_u32 $0, $2, 0x12345678\ns_mov_b64 $1, 0x87654321", "s s2", "s", "scc"))
    cases.append(Case("inline", "s_mov_b64 $0, -5\ns_mov_b64 $1, 2.0\ns_mov_b32 $2, 2.0", "s2 s2 s", "s"))
    cases.append(Case("getpc", "s_getpc_b64 $0\ns_getpc_b64 $1", "s2 s2", "s"))
    cases.append(
        Case("loop", "s_mov_b32 $0, 0\ns_mov_b32 $1, $2\n.Lagain:\ns_add_u32 $0, $0, $1\ns_sub_u32 $1, $1, 1\n"
             "s_cmp_lg_u32 $1, 0\ns_cbranch_scc1 .Lagain", "s s", "s", "scc")
    )  # fmt: skip
    return tuple(cases)


CASES = _cases()
EDGES = [0, 1, 2, 31, 32, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, U32, 0x00080004, 0x00200000, 0x0010001F, 0xFFFF0000]


def operands(seed: int, sizes: list[str], count: int = 10) -> list[list[int]]:
    """Random operand tuples with edges among them."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        row = []
        for size in sizes:
            words = [
                int(rng.choice(EDGES)) if rng.random() < 0.6 else int(rng.integers(0, 1 << 32)) for _ in range(2)
            ]
            row.append(words[0] if size == "1" else words[0] | words[1] << 32)
        out.append(row)
    return out


def words(value: int, size: str) -> np.ndarray:
    return np.array([value >> 32 * i & U32 for i in range(int(size))], np.uint32)


def number(register: np.ndarray) -> int:
    """Value of a scalar result, which every lane stored."""
    rows = np.atleast_2d(register)
    assert (rows == rows[:, :1]).all()
    return sum(int(row[0]) << 32 * i for i, row in enumerate(rows))


@pytest.mark.parametrize("arch", ARCHS)
def test_arithmetic(arch: str) -> None:
    for seed, (name, (sizes, function)) in enumerate(TABLE.items()):
        out, *ins = sizes.split()
        for row in operands(seed, ins):
            value, scc = function(*row)
            got, flag = bench(CASES, arch).run(name, *(words(v, k) for v, k in zip(row, ins)))
            expected = (value & (U64 if out == "2" else U32), 1 if scc is None else scc)
            assert (number(got), number(flag)) == expected, (name, [hex(v) for v in row])


@pytest.mark.parametrize("arch", ARCHS)
def test_compares_and_constants(arch: str) -> None:
    shared = bench(CASES, arch)
    for seed, (name, function) in enumerate(COMPARE.items()):
        for a, b in [*operands(seed, ["1", "1"]), [5, 5]]:
            (flag,) = shared.run(name, words(a, "1"), words(b, "1"))
            assert number(flag) == int(function(a, b)), (name, hex(a), hex(b))
    for seed, (name, function) in enumerate(CONSTANT.items()):
        for (a,) in [*operands(seed, ["1"]), [U32 - 99], [0x80000050]]:
            value, scc = function(a, -100)
            got, flag = shared.run(name, words(a, "1"))
            assert (number(got), number(flag)) == (value & U32, 1 if scc is None else scc), (name, hex(a))


@pytest.mark.parametrize("arch", ARCHS)
def test_exec_and_control(arch: str) -> None:
    shared = bench(CASES, arch)
    for seed, (name, function) in enumerate(LOGIC.items()):
        for a, b in operands(seed, ["2", "2"], 4):
            old, new, flag = shared.run(f"saveexec.{name}", words(a, "2"), words(b, "2"))
            want = function(a, b) & U64
            assert (number(old), number(new), number(flag)) == (b, want, int(want != 0)), name
    high, low = shared.run("bitset", words(0x00FF00FF, "1"), words(32 + 9, "1"))
    assert (number(high), number(low)) == (0x00FF02FF, 0x00FF00FF)
    total, wide = shared.run("literal", words(8, "1"))
    assert number(total) == 0x12345680
    assert number(wide) == 0x87654321  # an unsigned operation extends a literal with zeros
    five, two, single = shared.run("inline", words(0, "1"))
    assert (number(five), number(two), number(single)) == (U64 - 4, 0x4000000000000000, 0x40000000)
    here, there = shared.run("getpc", words(0, "1"))
    assert number(there) - number(here) == 4
    total, _ = shared.run("loop", words(100, "1"))
    assert number(total) == 5050
