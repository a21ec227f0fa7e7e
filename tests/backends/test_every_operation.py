"""Every operation of the language compiles for every kind of target."""

from __future__ import annotations

import re

import pytest

import fly
from fly.lang.signature import TensorSpec
from tests.backends.builds import build, needs_ptxas, run_ptxas


def floats(x, y):
    yield from (x + y, x - y, x * y, x / y, -x, fly.fma(x, y, x), fly.maximum(x, y), fly.minimum(x, y))
    yield from (fly.sqrt(x), fly.absolute(x), fly.select(x < y, x, y), fly.select(x != y, x, y), x**3, fly.rsqrt(y))
    yield from (fly.exp2(x), fly.floor(x), fly.ceil(x), fly.trunc(x), fly.round(x))


def approximations(x, y):
    yield from (fly.log2(x), fly.rcp(y), fly.exp(x), fly.tanh(x))


def elementary(x, y):
    yield from (fly.sin(x), fly.cos(x), fly.log(x), fly.erf(x), fly.pow(x, y), x**-1.5, 2.0**y)


def integers(x, y):
    yield from (x + y, x - y, x * y, -x, ~x, x & y, x | y, x ^ y, x << 2, x >> 2, x // y, x % y, x // 8, x % 8)
    yield from (fly.maximum(x, y), fly.minimum(x, y), fly.absolute(x), fly.select(fly.compare("ult", x, y), x, y))
    yield x**5


def words(x, y):
    yield from (*fly.mul_wide(x, y), *fly.mul_wide(x, 0xD2511F53))


def exchanges(x, _):
    yield from (fly.shuffle(x, 3), fly.shuffle_xor(x, 1), fly.shuffle_xor(x, 16), fly.first_lane(x))


GROUPS = {
    "f32": ("f32", (floats, approximations)),
    "f16": ("f16", (floats, approximations)),
    "bf16": ("bf16", (floats, approximations)),
    "elementary": ("f32", (elementary,)),
    "elementary of bf16": ("bf16", (elementary,)),
    "f64": ("f64", (floats,)),
    "i32": ("i32", (integers,)),
    "words": ("i32", (words,)),
    "i64": ("i64", (integers,)),
    "i16": ("i16", (integers,)),
    "lanes": ("f32", (exchanges,)),
}


@fly.kernel
def operations(a: fly.Tensor, out: fly.Tensor, *, functions, length):
    """out[i, thread] = the i-th result of the functions on two elements (or vectors) of a."""
    thread = fly.thread_id.x
    x, y = (a.load(row, thread * 4, length=length) for row in (0, 1))
    results = [result for function in functions for result in function(x, y)]
    for i, result in enumerate(results):
        out.store(result, i, thread * 4)


@fly.kernel
def conversions(a: fly.Tensor, out: fly.Tensor, *, types):
    """Each type from f32 and back, one element and four, with both roundings."""
    thread = fly.thread_id.x
    for i, name in enumerate(types):
        dtype = getattr(fly, name)
        out.store(a.load(0, thread).to(dtype).to(fly.f32), i, thread)
        for j, rounding in enumerate(("nearest", "nearest_any")):
            vector = a.load(0, thread * 4, length=4)
            out.store(vector.to(dtype, rounding=rounding).to(fly.f32), 16 + 2 * i + j, thread * 4)


def check(kernel, arch: str, dtype: str, **statics) -> str:
    tensor = TensorSpec(dtype, 2, 16, True)
    isa = build(kernel, arch, specs=(tensor, tensor), block=64, **statics).isa
    assert not re.search(r"\bcall\b|s_swappc|s_setpc", isa)  # nothing is left to a library
    return isa


ARCHS = pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80", "sm_90a"])


@ARCHS
@pytest.mark.parametrize(
    ("group", "length"), [(g, n) for g in GROUPS for n in (None, 4) if n is None or exchanges not in GROUPS[g][1]]
)
def test_operations(group, length, arch):
    dtype, functions = GROUPS[group]
    isa = check(operations, arch, dtype, functions=functions, length=length)
    assert "store" in isa or "st.global" in isa


@ARCHS
def test_conversions(arch):
    isa = check(conversions, arch, "f32", types=("f16", "bf16", "i32", "i16", "i64", "i8"))
    assert re.search("cvt", isa)


@needs_ptxas
@pytest.mark.parametrize("group", GROUPS)
def test_ptxas_accepts_operations(group, tmp_path):
    dtype, functions = GROUPS[group]
    run_ptxas(check(operations, "sm_80", dtype, functions=functions, length=None), "sm_80", tmp_path)
