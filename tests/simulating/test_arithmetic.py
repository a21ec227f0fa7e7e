"""What integers and conversions are at their ends, of values that differ between lanes and of those that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import fly
from fly.ir.context import emit
from tests.simulating.portable import in_every_schedule

ENDS = {
    8: [-128, -127, -7, -2, -1, 0, 1, 2, 3, 64, 127],
    32: [-(2**31), 1 - 2**31, -7, -1, 0, 1, 3, 2**30, 2**31 - 1],
}
ENDS[64] = [-(2**63), 1 - 2**63, -(2**31), -7, -1, 0, 1, 3, 2**31, 2**32, 2**63 - 1]
NUMPY = {8: np.int8, 32: np.int32, 64: np.int64}
TYPES = {8: fly.i8, 32: fly.i32, 64: fly.i64}


def wrapped(value: int, bits: int) -> int:
    """The signed integer with the low bits of a value."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def truncated(a: int, b: int) -> int:
    """a / b towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def of_pairs(compute: Callable[[fly.Value, fly.Value], fly.Value], bits: int, ends: list[int]) -> np.ndarray:
    """An operation on all pairs of numbers: of lanes that have one each, and one after the other of all alike."""
    pairs = np.array(list(itertools.product(ends, ends)), NUMPY[bits]).T.copy()
    lanes = np.zeros((2, pairs.shape[1]), NUMPY[bits])

    def kernel(x: fly.Tensor, out: fly.Tensor):
        for i in fly.range(fly.thread_id.x, x.shape[1], 64):
            out.store(compute(x.load(0, i), x.load(1, i)), 0, i)
        for i in fly.range(x.shape[1]):
            out.store(compute(x.load(0, i), x.load(1, i)), 1, i)

    in_every_schedule(kernel, pairs, lanes, arch="sm_90a", block=64)
    np.testing.assert_array_equal(lanes[0], lanes[1])
    return lanes[0]


INTEGERS = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "subtract": (lambda a, b: a - b, lambda a, b: a - b),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b),
    "and": (lambda a, b: a & b, lambda a, b: a & b),
    "or": (lambda a, b: a | b, lambda a, b: a | b),
    "exclusive or": (lambda a, b: a ^ b, lambda a, b: a ^ b),
    "largest": (fly.maximum, max),
    "smallest": (fly.minimum, min),
    "negative": (lambda a, b: -a + b * 0, lambda a, b: -a),
}


@pytest.mark.parametrize("bits", [8, 32, 64])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_around(name, bits):
    compute, of_python = INTEGERS[name]
    wanted = [wrapped(of_python(a, b), bits) for a, b in itertools.product(ENDS[bits], ENDS[bits])]
    assert of_pairs(compute, bits, ENDS[bits]).tolist() == wanted


COMPARISONS = {
    "lt": lambda a, b, u: a < b,
    "le": lambda a, b, u: a <= b,
    "gt": lambda a, b, u: a > b,
    "ge": lambda a, b, u: a >= b,
    "eq": lambda a, b, u: a == b,
    "ne": lambda a, b, u: a != b,
    "ult": lambda a, b, u: a % u < b % u,
    "ule": lambda a, b, u: a % u <= b % u,
    "ugt": lambda a, b, u: a % u > b % u,
    "uge": lambda a, b, u: a % u >= b % u,
}


@pytest.mark.parametrize("bits", [8, 32, 64])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_signed_and_of_unsigned_integers(name, bits):
    found = of_pairs(lambda a, b: fly.compare(name, a, b).to(TYPES[bits]), bits, ENDS[bits])
    wanted = [COMPARISONS[name](a, b, 1 << bits) for a, b in itertools.product(ENDS[bits], ENDS[bits])]
    assert found.tolist() == wanted


@pytest.mark.parametrize("bits", [8, 32, 64])
def test_division_is_towards_zero_and_python_s_is_down(bits):
    """The most negative number by -1 is itself again."""
    ends = [n for n in ENDS[bits] if n]
    exact = of_pairs(
        lambda a, b: fly.Value(emit("arith.divsi", [a.ir, b.ir], [a.type]).results[0], a.dtype), bits, ends
    )
    floored, modulo = (of_pairs(f, bits, ends) for f in (lambda a, b: a // b, lambda a, b: a % b))
    pairs = list(itertools.product(ends, ends))
    assert exact.tolist() == [wrapped(truncated(a, b), bits) for a, b in pairs]
    assert floored.tolist() == [wrapped(a // b, bits) for a, b in pairs]
    assert modulo.tolist() == [a % b for a, b in pairs]


@pytest.mark.parametrize("bits", [8, 32, 64])
def test_shifts_drop_high_bits_and_keep_the_sign(bits):
    ends, counts = ENDS[bits], list(range(bits))
    pairs = np.array(list(itertools.product(ends, counts)), NUMPY[bits]).T.copy()
    out = np.zeros_like(pairs)

    def kernel(x: fly.Tensor, out: fly.Tensor):
        for i in fly.range(fly.thread_id.x, x.shape[1], 64):
            out.store(x.load(0, i) << x.load(1, i), 0, i)
            out.store(x.load(0, i) >> x.load(1, i), 1, i)

    in_every_schedule(kernel, pairs, out, arch="gfx942")
    given = list(itertools.product(ends, counts))
    assert out[0].tolist() == [wrapped(value << count, bits) for value, count in given]
    assert out[1].tolist() == [value >> count for value, count in given]


def converted(convert: Callable[[fly.Value], fly.Value], given: np.ndarray, dtype: type) -> np.ndarray:
    """A conversion of each number, of lanes that differ, and of all alike."""
    out = np.zeros((2, len(given)), dtype)

    def kernel(x: fly.Tensor, out: fly.Tensor):
        for i in fly.range(fly.thread_id.x, x.shape[0], 64):
            out.store(convert(x.load(i)), 0, i)
        for i in fly.range(x.shape[0]):
            out.store(convert(x.load(i)), 1, i)

    in_every_schedule(kernel, given, out, arch="sm_90a", block=64)
    np.testing.assert_array_equal(out[0], out[1])
    return out[0]


def operation(name: str, value: fly.Value, to: fly.DType) -> fly.Value:
    return fly.Value(emit(name, [value.ir], [to.mlir]).results[0], to)


@pytest.mark.parametrize(
    ("name", "bits", "wanted"),
    [
        ("arith.extsi", 32, lambda n: n),
        ("arith.extui", 32, lambda n: n % 256),
        ("arith.extsi", 64, lambda n: n),
        ("arith.extui", 64, lambda n: n % 256),
    ],
)
def test_bytes_are_widened_with_or_without_their_sign(name, bits, wanted):
    given = np.array(ENDS[8], np.int8)
    found = converted(lambda value: operation(name, value, TYPES[bits]), given, NUMPY[bits])
    assert found.tolist() == [wanted(n) for n in ENDS[8]]


@pytest.mark.parametrize(
    ("name", "to", "of_true"),
    [("extsi", "i32", -1), ("extui", "i32", 1), ("sitofp", "f32", -1.0), ("uitofp", "f32", 1.0)],
)
def test_a_bit_is_one_or_minus_one(name, to, of_true):
    given, type_ = np.arange(-2, 3, dtype=np.int32), getattr(fly, to)
    dtype = np.int32 if to == "i32" else np.float32
    found = converted(lambda value: operation(f"arith.{name}", value > 0, type_), given, dtype)
    assert found.tolist() == [0, 0, 0, of_true, of_true]


def test_bits_are_added_and_multiplied_modulo_two():
    def computed(a: fly.Value, b: fly.Value) -> fly.Value:
        p, q = a != 0, b != 0
        results = [emit(f"arith.{name}", [p.ir, q.ir], [fly.i1.mlir]).results[0] for name in ("addi", "subi", "muli")]
        total, difference, product = (fly.Value(result, fly.i1).to(fly.i32) for result in results)
        return total + difference * 2 + product * 4

    assert of_pairs(computed, 32, [0, 1]).tolist() == [0, 3, 3, 4]


def test_a_bit_is_the_lowest_of_an_integer():
    given = np.array([-3, -2, -1, 0, 1, 2, 256, 257], np.int32)
    found = converted(lambda value: operation("arith.trunci", value, fly.i1).to(fly.i32), given, np.int32)
    assert found.tolist() == [1, 0, 1, 0, 1, 0, 0, 1]
    found = converted(lambda value: value.to(fly.i1).to(fly.i32), given, np.int32)
    assert found.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]  # the language's own conversion: anything but 0 is true


def test_integers_are_cut_to_bytes():
    given = np.array([-129, -128, -1, 0, 127, 128, 255, 256, 2**31 - 1], np.int32)
    found = converted(lambda value: value.to(fly.i8), given, np.int8)
    assert found.tolist() == [wrapped(int(n), 8) for n in given]


@pytest.mark.parametrize("bits", [32, 64])
def test_floats_become_the_nearest_integers_there_are(bits):
    """Towards zero; what is too large the largest, and NaN zero, as the instruction has it."""
    limit = 2.0 ** (bits - 1)
    given = np.array(
        [0.0, -0.0, 0.99, -0.99, 1.5, -1.5, limit, 2 * limit, -limit, -2 * limit, np.inf, -np.inf, np.nan], np.float32
    )
    most, least = (1 << bits - 1) - 1, -(1 << bits - 1)
    found = converted(lambda value: value.to(TYPES[bits]), given, NUMPY[bits])
    assert found.tolist() == [0, 0, 0, 0, 1, -1, most, most, least, least, most, least, 0]


@pytest.mark.parametrize("bits", [8, 32, 64])
def test_integers_become_the_nearest_floats(bits):
    given = np.array(ENDS[bits], NUMPY[bits])
    found = converted(lambda value: value.to(fly.f32), given, np.float32)
    assert found.tolist() == given.astype(np.float32).tolist()


def test_comparisons_with_nan_are_false_but_for_not_equal():
    given = np.array([np.nan, 1.0, np.inf, -0.0], np.float32)
    for name, wanted in {"lt": 0, "le": 0, "gt": 0, "ge": 0, "eq": 0, "ne": 1}.items():
        found = converted(lambda v, name=name: fly.compare(name, v, fly.f32(np.nan)).to(fly.i32), given, np.int32)
        assert found.tolist() == [wanted] * 4


def test_subnormal_results_of_fast_instructions_are_zero():
    given = np.array([-126.0, -127.0, -140.0, 3.0, np.inf, -np.inf], np.float32)
    assert converted(fly.exp2, given, np.float32).tolist() == [2.0**-126, 0.0, 0.0, 8.0, np.inf, 0.0]
