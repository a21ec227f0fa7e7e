"""`*operands` of a kernel: any number of tensors and numbers after the other parameters."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.errors import ArgumentError, ArgumentTypeError, KernelDefinitionError
from fly.lang.signature import Parameter, ScalarSpec
from tests.tracing import matrix, trace


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Arrays run on an emulated GPU."""
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")


@fly.kernel
def total(out: fly.Tensor, factor: fly.f32, *more: fly.Operand, scale: int = 1):
    """out[i] = factor * scale * the sum of what is given, elements i of tensors."""
    kinds.append([type(x).__name__ for x in more])
    i = fly.thread_id.x
    result = fly.f32(0.0)
    for operand in more:
        result = result + (operand.load(i) if isinstance(operand, fly.Tensor) else operand).to(fly.f32)
    out.store(result * factor * float(scale), i)


kinds: list = []


def arrays(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count, dtype=np.float32), np.arange(count, dtype=np.int32) * 10


def test_the_signature_names_them():
    assert total.signature.variadic == "more"
    assert total.signature.parameters == (Parameter("out", "tensor"), Parameter("factor", "scalar", False, "f32"))
    more = total.signature.parameters_for(4)[2:]
    assert more == (Parameter("more0", "operand"), Parameter("more1", "operand"))
    assert total.signature.parameters_for(2) == total.signature.parameters_for(0) == total.signature.parameters


def test_tensors_ints_and_floats_reach_the_kernel():
    floats, ints = arrays()
    out = np.zeros(64, np.float32)
    total[1, 64](out, 2.0, floats, 3, 0.5, ints)
    np.testing.assert_array_equal(out, 2 * (floats + 3 + 0.5 + ints))
    assert kinds[-1] == ["Tensor", "Value", "Value", "Tensor"]


def test_there_may_be_none():
    out = np.ones(64, np.float32)
    total[1, 64](out, 2.0)
    assert (out == 0).all()


def test_another_number_or_kind_is_another_build_and_another_value_is_not():
    floats, _ = arrays()
    out = np.zeros(64, np.float32)
    traced = len(kinds)
    for arguments in ((1.25,), (1.5,), (2,), (7,), (floats,), (floats * 2,), (2, 2)):
        total[1, 64](out, 1.0, *arguments, scale=3)
        np.testing.assert_allclose(out, 3 * sum(arguments) + np.zeros(64))
    assert len(kinds) == traced + 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("3",), ArgumentTypeError, r"more0.*'3' of type str; accepted: a tensor, an int that fits i32 or a float"),
        ((1, None), ArgumentError, r"more1.*None; accepted: a tensor"),
        ((2**31,), ArgumentError, r"more0"),
        ((1 + 2j,), ArgumentTypeError, r"more0.*of type complex; accepted: a tensor"),
        ((np.zeros(3, np.complex64),), ArgumentTypeError, r"more0"),
    ],
)
def test_bad_operands_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        total[1, 64](np.zeros(64, np.float32), 1.0, *arguments)


def test_specs_must_be_of_tensors_or_numbers():
    trace(total, matrix(), "f32", "i32", "f64", matrix("bf16"))
    with pytest.raises(ArgumentError, match=r"'more1' is None; accepted: a tensor or a number"):
        trace(total, matrix(), "f32", "i32", None)
    with pytest.raises(ArgumentError, match="1 specs for 2 parameters"):
        trace(total, matrix())


def test_an_exported_kernel_takes_what_it_was_compiled_for(tmp_path):
    floats, ints = arrays()
    out = np.zeros(64, np.float32)
    fly.compile(total, out, 1.0, floats, 3, 0.5, ints, block=64).save(tmp_path / "total.fly")
    loaded = fly.load(tmp_path / "total.fly")
    loaded[1, 64](out, 2.0, floats, 4, 0.25, ints)
    np.testing.assert_array_equal(out, 2 * (floats + 4 + 0.25 + ints))
    with pytest.raises(ArgumentError, match="more3"):
        loaded[1, 64](out, 2.0, floats, 4, 0.25)
    with pytest.raises(ArgumentTypeError, match="more1"):
        loaded[1, 64](out, 2.0, floats, floats, 0.25, ints)
    with pytest.raises(ArgumentError, match="positional arguments; accepted"):
        loaded[1, 64](out, 2.0, floats, 4, 0.25, ints, 1)


def untyped(*more):
    pass


def typed_otherwise(*more: fly.Tensor):
    pass


def named(**more: fly.Operand):
    pass


def single(more: fly.Operand):
    pass


@pytest.mark.parametrize("function", [untyped, typed_otherwise, named])
def test_definitions_that_are_refused(function):
    with pytest.raises(KernelDefinitionError, match=r"takes \*more; every parameter needs a name, or is \*more: fly"):
        fly.kernel(function)


def test_one_operand_is_no_parameter():
    with pytest.raises(KernelDefinitionError, match="more"):
        fly.kernel(single)


def test_operands_are_described_like_parameters():
    fields = total.signature.flatten((matrix(), ScalarSpec("f32"), matrix("i32"), ScalarSpec("i32")))
    assert [f.name for f in fields][2:] == ["factor", "more0", "more0.shape0", "more1"]
