"""Whatever a launch is given, it raises nothing but fly's errors, and they name the argument."""

import decimal
import fractions

import numpy as np
import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, LaunchError
from fly.lang.signature import Parameter
from fly.runtime.launch import launch

from .fakes import Kernel


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise ValueError


class Interface:
    """Has this as its array interface."""

    def __init__(self, **entries):
        given = {"shape": (4,), "typestr": "<f4", "data": (256, False), "version": 3} | entries
        self.__cuda_array_interface__ = {name: value for name, value in given.items() if value != "left out"}


class Nothing:
    __cuda_array_interface__ = None


NO_TENSORS = {
    "sparse": torch.zeros(4).to_sparse(),
    "compressed": torch.zeros(4, 4).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
    "jagged": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged),
    "meta": torch.zeros(4, device="meta"),
    "complex": torch.zeros(4, dtype=torch.complex64),
    "negated": torch._neg_view(torch.zeros(4)),
    "masked": np.ma.masked_array(np.zeros(4, np.float32), mask=[1, 0, 0, 0]),
    "objects": np.array([object()]),
    "records": np.zeros(3, [("a", "f4"), ("b", "i1")]),
    "a record's field": np.zeros(3, [("a", "f4"), ("b", "i1")])["a"],
    "dates": np.zeros(3, "datetime64[s]"),
    "another byte order": np.zeros(4, ">f4"),
    "too long": np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2**33,), (0,)),
    "a list": [1.0, 2.0],
    "a number": 3,
    "a class": torch.Tensor,
    "a module": torch,
    "hostile": Hostile(),
    "no interface": Nothing(),
    "shape is a list": Interface(shape=[4]),
    "sizes are text": Interface(shape=("a",)),
    "sizes are negative": Interface(shape=(-3,)),
    "no type": Interface(typestr="left out"),
    "type is a number": Interface(typestr=5),
    "type is short": Interface(typestr="f4"),
    "type of structures": Interface(typestr="|V8"),
    "no data": Interface(data="left out"),
    "data is None": Interface(data=None),
    "address is text": Interface(data=("256", False)),
    "strides are text": Interface(strides="ab"),
    "too few strides": Interface(strides=()),
}
NO_NUMBERS = {
    "text": "1",
    "a list": [1],
    "complex": 1j,
    "a fraction": fractions.Fraction(1, 2),
    "a decimal": decimal.Decimal(1),
    "a tensor": torch.tensor(1),
    "an array": np.array(1),
    "numpy's complex": np.complex64(1),
    "numpy's longdouble": np.longdouble(1),
    "true": True,
    "numpy's true": np.bool_(True),
    "none": None,
    "hostile": Hostile(),
    "more digits than Python prints": 10**5000,
}
OUT_OF_RANGE = {
    "i32": (2**31, -(2**31) - 1, 2**40, 10**400, np.int64(2**40), np.uint64(2**63)),
    "i64": (2**63, -(2**63) - 1, 10**400, np.uint64(2**63)),
    "f32": (10**39, 10**400, 1e39, -1e300, np.float64(1e300)),
    "f64": (10**309, 10**400),
}
FITS = {
    "i32": (2**31 - 1, -(2**31), np.int64(5), np.uint8(5)),
    "i64": (2**63 - 1, -(2**63), np.int8(-5)),
    "f32": (3e38, 1, 2**40, float("inf"), float("nan"), np.float16(0.5), np.int32(7)),
    "f64": (1e308, 10**308, 2**63, np.float32(0.5)),
}


@pytest.fixture(params=["first", "later"])
def refused(request, device, compiler):
    """`refused(parameter, good, bad)`: the error of a launch with `bad`, before or after one with `good`."""

    def call(parameter, good, bad):
        kernel = Kernel(Parameter("out", "tensor"), parameter)
        if request.param == "later":
            launch(kernel, 1, 64, (torch.zeros(4), good), {}, None, compiler)
        before = len(device.launches)
        with pytest.raises(FlyError) as raised:
            launch(kernel, 1, 64, (torch.zeros(4), bad), {}, None, compiler)
        assert len(device.launches) == before
        return raised.value

    return call


@pytest.mark.parametrize("value", NO_TENSORS.values(), ids=NO_TENSORS)
def test_what_is_no_tensor_is_named(refused, value):
    error = refused(Parameter("x", "tensor"), torch.zeros(4), value)
    assert isinstance(error, ArgumentError) and "argument 'x'" in str(error)


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("dtype", OUT_OF_RANGE)
def test_what_is_no_number_is_named(refused, dtype, value):
    error = refused(Parameter("x", "scalar", dtype=dtype), 1, value)
    assert isinstance(error, ArgumentError) and "argument 'x'" in str(error)
    assert f"fits {dtype}" in str(error) and len(str(error)) < 300


@pytest.mark.parametrize(("dtype", "value"), [(d, v) for d, values in OUT_OF_RANGE.items() for v in values], ids=str)
def test_numbers_out_of_range_are_named(refused, dtype, value):
    error = refused(Parameter("x", "scalar", dtype=dtype), 1, value)
    assert type(error) is ArgumentError and f"accepted: a number that fits {dtype}" in str(error)


@pytest.mark.parametrize(("dtype", "value"), [(d, v) for d, values in FITS.items() for v in values], ids=str)
def test_numbers_in_range_are_taken(device, compiler, dtype, value):
    kernel = Kernel(Parameter("out", "tensor"), Parameter("x", "scalar", dtype=dtype))
    for _ in range(2):
        launch(kernel, 1, 64, (torch.zeros(4), value), {}, None, compiler)
    assert len(device.launches) == 2


@pytest.mark.parametrize(
    "size",
    [0, -1, 1.5, "a", None, (), (1, 1, 1, 1), (1, "b"), True, np.array([2, 1]), torch.zeros(2), Hostile(), {1: 2}],
    ids=lambda size: type(size).__name__,
)
def test_grids_and_blocks_of_no_size_are_named(device, compiler, size):
    kernel = Kernel(Parameter("x", "tensor"))
    with pytest.raises(LaunchError, match=r"grid is .*; accepted: one to three positive ints"):
        launch(kernel, size, 64, (torch.zeros(4),), {}, None, compiler)
    with pytest.raises(LaunchError, match=r"block is .*; accepted: one to three positive ints"):
        launch(kernel, 1, size, (torch.zeros(4),), {}, None, compiler)


@pytest.mark.parametrize("stream", ["a", -1, 1.5, 2**64, True, object(), Hostile()], ids=lambda s: type(s).__name__)
def test_streams_that_are_none_are_named(device, compiler, stream):
    with pytest.raises(ArgumentTypeError, match=r"argument 'stream' is .*; accepted: a handle"):
        launch(Kernel(Parameter("x", "tensor")), 1, 64, (torch.zeros(4),), {}, stream, compiler)


def test_the_interface_of_a_property_that_fails_is_named(device, compiler):
    class Failing:
        @property
        def __cuda_array_interface__(self):
            raise OSError

    with pytest.raises(ArgumentTypeError, match="Failing whose __cuda_array_interface__ raised OSError"):
        launch(Kernel(Parameter("x", "tensor")), 1, 64, (Failing(),), {}, None, compiler)
