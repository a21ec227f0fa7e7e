import pytest

from fly.errors import ArgumentError, ArgumentTypeError, KernelDefinitionError
from fly.lang.signature import Field, Parameter, ScalarSpec, Signature, TensorSpec

SIGNATURE = Signature(
    (
        Parameter("q", "tensor"),
        Parameter("mask", "tensor", optional=True),
        Parameter("scale", "scalar", dtype="f32"),
    ),
    {"causal": True},
)
Q, SCALE = TensorSpec("f16", 2, 16, True), ScalarSpec("f32")


def test_flat_arguments_are_address_sizes_and_strides():
    assert SIGNATURE.flatten((Q, None, SCALE)) == (
        Field("q", "ptr"),
        Field("q.shape0", "i32"),
        Field("q.shape1", "i32"),
        Field("q.stride0", "i64"),
        Field("scale", "f32"),
    )


def test_a_last_stride_that_is_not_one_is_an_argument():
    names = [field.name for field in TensorSpec("f16", 2, 2, False).fields("x")]
    assert names == ["x", "x.shape0", "x.shape1", "x.stride0", "x.stride1"]


def test_a_tensor_of_rank_0_is_its_address():
    assert TensorSpec("f32", 0, 4, False).fields("x") == (Field("x", "ptr"),)


@pytest.mark.parametrize(
    ("specs", "error", "text"),
    [
        ((Q, None), ArgumentError, "2 specs for 3 parameters"),
        ((None, None, SCALE), ArgumentError, "'q' is None"),
        ((SCALE, None, SCALE), ArgumentTypeError, "accepted: a tensor"),
        ((Q, None, ScalarSpec("f64")), ArgumentTypeError, "accepted: a scalar f32"),
        ((Q, None, Q), ArgumentTypeError, "'scale'"),
    ],
)
def test_specs_must_fit_the_parameters(specs, error, text):
    with pytest.raises(error, match=text):
        SIGNATURE.flatten(specs)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TensorSpec("u8", 1, 1, True), ArgumentTypeError, "'u8'"),
        (lambda: TensorSpec("f16", 1, 32, True), ArgumentError, "32"),
        (lambda: TensorSpec("f16", -1, 16, False), ArgumentError, "-1"),
        (lambda: TensorSpec("f16", 0, 16, True), ArgumentError, "unit stride"),
        (lambda: ScalarSpec("f16"), ArgumentTypeError, "'f16'"),
        (lambda: Field("x", "u32"), ArgumentError, "'u32'"),
        (lambda: Parameter("x", "array"), KernelDefinitionError, "'array'"),
        (lambda: Parameter("x", "scalar"), KernelDefinitionError, "None"),
        (lambda: Parameter("x", "tensor", dtype="f32"), KernelDefinitionError, "'f32'"),
    ],
)
def test_wrong_descriptions_are_rejected(make, error, text):
    with pytest.raises(error, match=text):
        make()
