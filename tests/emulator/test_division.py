"""Division as compilers write it: V_DIV_SCALE at the ends of its ranges, and quotients rounded once everywhere."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fly.emulator.floats import div_scale
from tests.emulator.kernels import run
from tests.emulator.toolchain import build

KINDS = {"f32": np.float32, "f64": np.float64}
# exponents: of the smallest normal number, how far apart is too far, the largest of a tiny numerator, the scaling
RANGES = {"f32": (-126, 96, 23 - 127, 64), "f64": (-1022, 768, 53 - 1023, 128)}


def scaled(kind: str, denominator: float, numerator: float, take: str) -> tuple[float, bool]:
    """(the exponent that V_DIV_SCALE adds to the denominator or the numerator, its flag)."""
    s1, s2 = (np.full(1, x, KINDS[kind]) for x in (denominator, numerator))
    s0 = s1 if take == "denominator" else s2
    with np.errstate(over="ignore"):
        value, flag = div_scale(s0, s1, s2)
    return float(np.log2(value[0].astype(np.longdouble)) - np.log2(s0[0].astype(np.longdouble))), bool(flag[0])


def two(exponent: int, odd: float = 1.0) -> np.longdouble:
    """odd·2^exponent."""
    return np.ldexp(np.longdouble(odd), exponent)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranges_of_div_scale(kind):
    """CDNA3 ISA, V_DIV_SCALE_F32 and _F64; the last exponent within a range, and the first beyond it."""
    least, far, tiny, up = RANGES[kind]
    # (denominator, numerator): (scaling of the denominator, of the numerator, flag)
    expected = {
        (two(3), two(3 + far - 1)): (0, 0, False),
        (two(3), two(3 + far)): (up, 0, True),
        (two(3, 1.5), two(3 + far)): (up, 0, True),  # the exponents count, not the quotient
        (two(3), two(3 + far - 1, 1.5)): (0, 0, False),
        (two(least), two(least + 60)): (0, 0, False),
        (two(least - 1), two(least + 60)): (up, up, False),
        (two(-least), two(0)): (0, 0, False),  # the reciprocal is the smallest normal number
        (two(-least, 1.5), two(0, 1.5)): (-up, -up, False),
        (two(-least, 1.5), two(0)): (-up, 0, True),
        (two(-least - 20), two(-20)): (0, 0, False),
        (two(-least - 20), two(-21)): (0, up, True),
        (two(-10), two(tiny)): (up, up, False),
        (two(-10), two(tiny + 1)): (0, 0, False),
    }
    for (denominator, numerator), (of_denominator, of_numerator, flag) in expected.items():
        got = [scaled(kind, denominator, numerator, take) for take in ("denominator", "numerator")]
        assert got == [(of_denominator, flag), (of_numerator, flag)], f"{numerator} / {denominator}"


QUOTIENT = """
define amdgpu_kernel void @divide(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %out) #0 {{
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %g = call i32 @llvm.amdgcn.workgroup.id.x()
  %first = shl i32 %g, 8
  %i = add i32 %first, %t
  %i64 = zext i32 %i to i64
  %pa = getelementptr {type}, ptr addrspace(1) %a, i64 %i64
  %pb = getelementptr {type}, ptr addrspace(1) %b, i64 %i64
  %po = getelementptr {type}, ptr addrspace(1) %out, i64 %i64
  %x = load {type}, ptr addrspace(1) %pa
  %y = load {type}, ptr addrspace(1) %pb
  %q = fdiv {type} %x, %y
  store {type} %q, ptr addrspace(1) %po
  ret void
}}
declare i32 @llvm.amdgcn.workitem.id.x()
declare i32 @llvm.amdgcn.workgroup.id.x()
attributes #0 = {{ "amdgpu-flat-work-group-size"="256,256" }}
"""
TYPES = {"half": (np.float16, np.uint16), "float": (np.float32, np.uint32), "double": (np.float64, np.uint64)}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", TYPES)
def test_quotients_are_rounded_once_whatever_the_exponents(kind, arch):
    """Numbers of all exponents, subnormal ones too, divided by such."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng, (dtype, unsigned) = np.random.default_rng(seed), TYPES[kind]
    count, last = 8192, np.array(np.inf, dtype).view(unsigned)
    a, b = (rng.integers(1, last, count, unsigned) for _ in range(2))
    # a quarter: quotients near the largest and the smallest numbers
    near = rng.integers(0, last // 64, count // 4, unsigned)
    a[: count // 8], b[: count // 8] = last - 1 - near[: count // 8], near[: count // 8] + 1
    a[count // 8 : count // 4], b[count // 8 : count // 4] = near[count // 8 :] + 1, last - 1 - near[count // 8 :]
    a ^= rng.integers(0, 2, count, unsigned) << unsigned(8 * a.itemsize - 1)
    a, b, out = a.view(dtype), b.view(dtype), np.zeros(count, dtype)
    run(build(QUOTIENT.format(type=kind), arch), "divide", (count // 256,), (256,), [a, b, out])
    with np.errstate(all="ignore"):
        want = a / b
    wrong = np.flatnonzero(out.view(unsigned) != want.view(unsigned))
    assert not wrong.size, f"seed {seed}: {a[wrong[0]]} / {b[wrong[0]]} is {want[wrong[0]]}, got {out[wrong[0]]}"
    assert np.isinf(want).any() and (want == 0).any() and np.isfinite(want).sum() > count // 4
