"""Which conversions happen by themselves, which must be asked for, and which operation each one is."""

from __future__ import annotations

import itertools

import pytest

import fly
from fly.errors import DTypeError
from fly.ir.dtypes import DTYPES, dtype
from tests.tracing import trace, traced

INTS = ("i1", "i8", "i16", "i32", "i64")
FLOATS = ("f16", "bf16", "f32", "f64")
STORAGE = ("f8e4m3", "f8e5m2", "f8e4m3fnuz")
WIDTH = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def one(name: str) -> fly.Value:
    return fly.from_elements([dtype(name)(1)])[0]


def meeting(a: str, b: str) -> str | None:
    """The dtype of a + b, or None where the author must convert."""
    if a == b:
        return a
    if (a in INTS) != (b in INTS) or {a, b} == {"f16", "bf16"}:
        return None
    return max(a, b, key=WIDTH.__getitem__)


def test_what_meets_what():
    def body():
        for a, b in itertools.product(INTS + FLOATS, repeat=2):
            wanted = meeting(a, b)
            if wanted is None:
                with pytest.raises(DTypeError, match=r"do not mix; convert one with \.to\("):
                    one(a) + one(b)
            else:
                assert (one(a) + one(b)).dtype.name == wanted, (a, b)

    trace(body)


@pytest.mark.parametrize("name", STORAGE)
def test_storage_types_have_no_arithmetic(name):
    def body():
        bits = fly.i8(60).bitcast(dtype(name))
        for use in (
            lambda: bits + bits,
            lambda: bits < bits,
            lambda: -bits,
            lambda: dtype(name)(1.0),
        ):
            with pytest.raises(DTypeError, match="storage type"):
                use()
        with pytest.raises(DTypeError, match=f"conversion of <f32> to {name}; expected a vector of an even number"):
            fly.f32(1.0).to(dtype(name))
        with pytest.raises(DTypeError, match=f"no conversion from {name} to i32: 8-bit floats convert to floats"):
            bits.to(fly.i32)
        with pytest.raises(DTypeError, match=f"no conversion from i32 to {name}: only floats narrow to 8-bit ones"):
            fly.i32(1).to(dtype(name))
        assert bits.to(fly.bf16).dtype is fly.bf16
        assert bits.bitcast(fly.i8).dtype is fly.i8

    trace(body)


# What `.to` emits, by source and target; "cmp" for tests against zero, "" for nothing
def conversion(source: str, target: str) -> str:
    if source == target:
        return ""
    if target == "i1":
        return "arith.cmpf" if source in FLOATS else "arith.cmpi"
    narrower = WIDTH[target] < WIDTH[source]
    if source in INTS and target in INTS:
        return "arith.trunci" if narrower else "arith.extui" if source == "i1" else "arith.extsi"
    if source in INTS:
        return "arith.uitofp" if source == "i1" else "arith.sitofp"
    if target in INTS:
        return "arith.fptosi"
    if WIDTH[source] == WIDTH[target]:
        return "arith.truncf"  # bf16 and f16, through f32
    return "arith.truncf" if narrower else "arith.extf"


@pytest.mark.parametrize("source", INTS + FLOATS)
def test_every_explicit_conversion(source):
    def body():
        value = one(source)
        for target in INTS + FLOATS:
            converted = value.to(dtype(target))
            assert converted.dtype.name == target
            wanted = conversion(source, target)
            if wanted:
                assert converted.ir.owner.name == wanted
            else:
                assert converted is value
        long = fly.broadcast(value, 4).to(fly.f32)
        assert (long.dtype, long.length) == (fly.f32, 4)

    trace(body)


def test_nearest_any_is_a_target_operation_on_f32_vectors_alone():
    def body():
        vector = fly.broadcast(fly.f32(1.0), 2)
        assert vector.to(fly.bf16, "nearest_any").ir.owner.name == "fly.narrow"
        assert vector.to(fly.bf16).ir.owner.name == "arith.truncf"
        assert fly.f32(1.0).to(fly.bf16, "nearest_any").ir.owner.name == "arith.truncf"
        with pytest.raises(DTypeError, match=r"unknown rounding 'up'; expected 'nearest' or 'nearest_any'"):
            vector.to(fly.bf16, "up")

    trace(body)


@pytest.mark.parametrize(
    ("literal", "partner", "result"),
    [
        (2, "i8", "i8"),
        (2, "i64", "i64"),
        (2, "f16", "f16"),
        (2.5, "bf16", "bf16"),
        (True, "i32", "i32"),
        (0xFFFFFFFF, "i32", "i32"),  # a bit pattern
    ],
)
def test_literals_take_their_partners_dtype(literal, partner, result):
    assert traced(lambda: (one(partner) + literal).dtype.name) == result
    assert traced(lambda: (literal + one(partner)).dtype.name) == result


@pytest.mark.parametrize(
    ("literal", "partner", "message"),
    [
        (2.5, "i32", "2.5 is not an integer and its partner is i32"),
        (1 << 32, "i32", "4294967296 does not fit i32"),
        (-129, "i8", "-129 does not fit i8"),
        ("2", "i32", "'2' is no traced value or number"),
        (None, "f32", "None is no traced value or number"),
    ],
)
def test_literals_that_do_not_fit(literal, partner, message):
    def body():
        with pytest.raises(DTypeError, match=message):
            one(partner) + literal

    trace(body)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x < 0x80000000,
        lambda x: x < 0x80000000,
        lambda x: x // 0x80000000,
        lambda x: x % 3000000000,
    ],
)
def test_bit_patterns_are_not_taken_for_negative_numbers(use):
    def body():
        with pytest.raises(DTypeError, match=r"\d+ does not fit <i32>"):
            use(one("i32"))
        assert fly.compare("ult", one("i32"), 0x80000000).dtype is fly.i1

    trace(body)


def test_python_numbers_become_the_default_dtypes():
    def body():
        assert fly.select(one("i1"), 1, 2).dtype is fly.i32
        assert fly.maximum(1.0, 2.0).dtype is fly.f32
        assert fly.select(one("i1"), True, False).dtype is fly.i1

    trace(body)


def test_constants_keep_zero_false_and_minus_zero_apart():
    def body():
        values = [fly.i32(0), fly.i1(False), fly.f32(0.0), fly.f32(-0.0), fly.f32(0)]
        attributes = [str(v.ir.owner.attributes["value"]) for v in values]
        assert attributes == ["0 : i32", "false", "0.000000e+00 : f32", "-0.000000e+00 : f32", "0.000000e+00 : f32"]

    trace(body)


def test_names_and_sizes():
    assert [dtype(name) for name in DTYPES] == list(DTYPES.values())
    assert dtype(fly.bf16) is fly.bf16
    assert {name: t.bytes for name, t in DTYPES.items()} == {
        **{name: WIDTH[name] // 8 for name in WIDTH if name != "i1"},
        "i1": 1,
        **dict.fromkeys(STORAGE, 1),
    }
    with pytest.raises(DTypeError, match=r"unknown dtype 'fp16'; expected one of i1, i8"):
        dtype("fp16")
