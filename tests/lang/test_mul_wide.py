"""`fly.mul_wide`: both words of an unsigned product, and the instructions that it becomes."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import DTypeError
from tests.backends.builds import build
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

ENDS = (0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, 0xD2511F53)
THREADS, VECTOR = 64, 2


@fly.kernel
def multiply(x: fly.Tensor, out: fly.Tensor):
    """Rows of `out`: the high and the low words of x[0] * x[1], vectors and scalars, and of x[0] * 0xCD9E8D57."""
    first = (fly.block_id.x * THREADS + fly.thread_id.x) * VECTOR
    a, b = (x.load(row, first, length=VECTOR) for row in (0, 1))
    for row, words in enumerate((*fly.mul_wide(a, b), *fly.mul_wide(0xCD9E8D57, a))):
        out.store(words, row, first)
    for i in range(VECTOR):
        for row, word in enumerate(fly.mul_wide(a[i], b[i])):
            out.store(word, 4 + row, first + i)


def operands() -> tuple[np.ndarray, str]:
    """Pairs of the numbers at the ends, and random ones; and where they come from."""
    seed = np.random.SeedSequence().entropy
    ends = np.array(list(itertools.product(ENDS, ENDS)), np.uint32).T
    random = np.random.default_rng(seed).integers(0, 1 << 32, (2, 4 * THREADS * VECTOR - ends.shape[1]), np.uint32)
    return np.concatenate([ends, random], axis=1), f"seed {seed}"


def check(run) -> None:
    """`run(kernel's arguments)` leaves the words of all products."""
    x, seed = operands()
    out = np.zeros((6, x.shape[1]), np.int32)
    run(x.view(np.int32), out)
    a, b = x.astype(np.uint64)
    for rows, product in (((0, 1), a * b), ((2, 3), a * np.uint64(0xCD9E8D57)), ((4, 5), a * b)):
        for row, words in zip(rows, (product >> np.uint64(32), product & np.uint64(0xFFFFFFFF)), strict=True):
            np.testing.assert_array_equal(out[row].view(np.uint32), words.astype(np.uint32), seed)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_both_words_on_amd(arch, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    check(lambda x, out: multiply[4, THREADS](x, out))


def test_both_words_on_nvidia():
    module = trace(multiply, matrix("i32", 2, 4), matrix("i32", 2, 4), arch="sm_90a", block=THREADS)
    check(lambda x, out: Machine(Program.of(module, target("sm_90a")))(flat(x, out), (4, 1, 1)))


def test_operands_are_extended_with_zeros():
    def kernel(n: fly.i32):
        fly.mul_wide(n, n)

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: %[[A:.*]] = arith.extui %[[N:.*]] : i32 to i64
        CHECK: %[[B:.*]] = arith.extui %[[N]] : i32 to i64
        CHECK: %[[PRODUCT:.*]] = arith.muli %[[A]], %[[B]] : i64
        CHECK: %[[HIGH:.*]] = arith.shrsi %[[PRODUCT]]
        CHECK: arith.trunci %[[HIGH]] : i64 to i32
        CHECK: arith.trunci %[[PRODUCT]] : i64 to i32
        """,
    )


@fly.kernel
def one_product(x: fly.Tensor, out: fly.Tensor):
    thread = fly.thread_id.x
    high, low = fly.mul_wide(x.load(thread), 0xD2511F53)
    out.store(high ^ low, thread)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_product_is_one_instruction_or_a_pair_on_amd(arch):
    isa = build(one_product, arch, specs=(matrix("i32"), matrix("i32")), block=64).isa
    products = sorted(re.findall(r"v_(?:mul|mad)_\w+", isa))
    assert products in (["v_mad_u64_u32"], ["v_mul_hi_u32", "v_mul_lo_u32"]), isa


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_product_is_one_instruction_on_nvidia(arch):
    isa = build(one_product, arch, specs=(matrix("i32"), matrix("i32")), block=64).isa
    by_the_constant = [line for line in isa.splitlines() if str(0xD2511F53 - 2**32) in line]
    assert len(by_the_constant) == 1 and "mul.wide.u32" in by_the_constant[0], isa


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda n: fly.mul_wide(n.to(fly.i64), n), r"mul_wide takes i32, not <i64>"),
        (lambda n: fly.mul_wide(n.to(fly.f32), 2.0), r"mul_wide takes i32, not <f32>"),
        (lambda n: fly.mul_wide(n, 1 << 32), r"4294967296 does not fit i32"),
        (lambda n: fly.mul_wide(n, 1.5), r"1.5 is not an integer"),
    ],
)
def test_mistakes(use, message):
    def kernel(n: fly.i32):
        with pytest.raises(DTypeError, match=message):
            use(n)

    trace(kernel, "i32")
