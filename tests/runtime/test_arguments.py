import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.errors import ArgumentError, ArgumentTypeError
from fly.lang.signature import Parameter, ScalarSpec, Signature, TensorSpec
from fly.runtime.arguments import collect, describe, describe_all

from .fakes import CudaArray, tensors

X = Parameter("x", "tensor")


def scalar(dtype):
    return Parameter("x", "scalar", dtype=dtype)


def aligned(shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype)  # torch aligns allocations to 64 bytes


DTYPES = {
    "f16": (torch.float16, np.float16),
    "bf16": (torch.bfloat16, ml_dtypes.bfloat16),
    "f32": (torch.float32, np.float32),
    "f64": (torch.float64, np.float64),
    "i8": (torch.int8, np.int8),
    "i16": (torch.int16, np.int16),
    "i32": (torch.int32, np.int32),
    "i64": (torch.int64, np.int64),
    "f8e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "f8e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "f8e4m3fnuz": (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
}


@pytest.mark.parametrize(("name", "dtypes"), DTYPES.items())
def test_dtypes(name, dtypes):
    assert describe(X, torch.empty(2, 3, dtype=dtypes[0])).spec.dtype == name
    assert describe(X, np.zeros((2, 3), dtypes[1])).spec.dtype == name


def test_a_tensor_is_address_sizes_and_strides():
    x = aligned((2, 3, 64))
    argument = describe(X, x)
    assert argument.spec == TensorSpec("f16", 3, 16, True)
    assert argument.values == (x.data_ptr(), 2, 3, 64, 192, 64)
    assert argument.device == ("cpu", 0)
    assert (argument.allocation.address, argument.allocation.nbytes) == (x.data_ptr(), 768)


def test_the_same_memory_is_the_same_argument_from_torch_and_numpy():
    x = torch.zeros(4, 6)[:, ::2].T
    assert describe(X, x) == describe(X, x.numpy())


def test_the_cuda_array_interface():
    contiguous = describe(X, CudaArray((2, 8), device=1))
    assert contiguous.spec == TensorSpec("f32", 2, 16, True)
    assert contiguous.values == ((1 << 40) + 256, 2, 8, 8)
    assert contiguous.device == ("cuda", 1)
    strided = describe(X, CudaArray((2, 8), "<f2", strides=(32, 4)))
    assert strided.values == (256, 2, 8, 16, 2)


def test_torch_is_not_looked_for_when_the_value_is_not_torchs(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert describe(X, np.zeros(3)).spec.dtype == "f64"
    assert describe(X, CudaArray()).spec.dtype == "f32"


@pytest.mark.parametrize(
    ("value", "alignment", "unit"),
    [
        (aligned((4, 64)), 16, True),
        (aligned(65)[1:], 2, True),
        (aligned(68)[4:], 8, True),
        (aligned((4, 65)), 2, True),  # odd rows
        (aligned((4, 66))[:, :64], 4, True),
        (aligned((64, 4)).T, 2, False),  # a stride of 1 that is not the last
        (aligned((1, 64)).expand(4, 64), 16, True),  # stride 0
        (aligned((64, 64))[:, ::8], 16, False),
        (aligned(()), 16, False),
        (torch.empty(0, 64, dtype=torch.float16), 16, True),
        (torch.empty(0, dtype=torch.float16), 16, True),
        (torch.empty(4, dtype=torch.int8), 16, True),
        (np.zeros(64, np.float32)[::-1], 4, False),
    ],
)
def test_alignment_and_unit_stride(value, alignment, unit):
    spec = describe(X, value).spec
    assert (spec.alignment, spec.unit_stride) == (alignment, unit)


@st.composite
def views(draw):
    """A strided view of a numpy array, negative and zero strides included."""
    rank = draw(st.integers(0, 4))
    value = np.zeros([draw(st.integers(1, 5)) for _ in range(rank)], draw(st.sampled_from("ehfi")))
    for axis in range(rank):
        step, start = draw(st.sampled_from([1, 1, 2, -1])), draw(st.integers(0, 1))
        value = value[(slice(None),) * axis + (slice(start if step > 0 else None, None, step),)]
    if rank and draw(st.booleans()):
        value = value.transpose(draw(st.permutations(range(rank))))
    if draw(st.booleans()):
        value = np.broadcast_to(value, (3, *value.shape))
    return value


@settings(max_examples=150, deadline=None)
@given(views())
def test_what_a_view_is_follows_from_the_definitions(value):
    argument = describe(X, value)
    address, item = (value.__array_interface__["data"][0] if value.size else 0), value.itemsize
    strides = [stride // item for stride in value.strides]
    unit = bool(strides) and strides[-1] == 1
    steps = [address, *((s * item) for s in (strides[:-1] if unit else strides))]
    assert argument.spec.unit_stride is unit
    assert argument.spec.alignment == max(a for a in (1, 2, 4, 8, 16) if all(step % a == 0 for step in steps))
    assert argument.values == (address, *value.shape, *(strides[:-1] if unit else strides))
    elements = [address + int(np.dot(index, value.strides)) for index in np.ndindex(value.shape)]
    if elements:
        memory = argument.allocation
        assert memory.address == min(elements)
        assert memory.address + memory.nbytes == max(elements) + item


@st.composite
def torch_views(draw):
    """A view of a torch tensor; its strides need not make sense, only be in bounds."""
    rank = draw(st.integers(0, 4))
    sizes = [draw(st.integers(0, 3)) for _ in range(rank)]
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 8, 16])) for _ in range(rank)]
    dtype = draw(st.sampled_from([pair[0] for pair in DTYPES.values()]))
    return torch.empty(256, dtype=dtype).as_strided(sizes, strides, draw(st.integers(0, 20)))


@settings(max_examples=200, deadline=None)
@given(torch_views(), torch_views())
def test_collect_appends_what_describe_finds_and_keys_what_it_specialises_on(a, b):
    values = []
    keys = [collect([view, None, 7, 2.5], values) for view in (a, b)]
    found = [describe(X, view) for view in (a, b)]
    assert values == [*found[0].values, 7, 2.5, *found[1].values, 7, 2.5]
    assert (keys[0] == keys[1]) == (found[0].spec == found[1].spec)


def test_collected_keys_differ_wherever_specs_differ():
    base = aligned((4, 64))
    different = [
        base,
        base.view(torch.bfloat16),
        base.view(torch.int8),
        base.view(4, 8, 8),
        base[:, :-1][:, 1:],
        base.T,
        aligned((4, 66)),
        aligned(()),
        None,
        1,
        1.0,
        True,
        np.zeros((4, 64), np.float16),
        np.zeros((4, 64), np.float32),
        CudaArray((4, 64)),
        CudaArray((4, 64), device=1),
    ]
    assert len({collect([value], []) for value in different}) == len(different)


def test_collected_keys_do_not_depend_on_sizes():
    keys = {collect([aligned((n, 64)), n, n / 7], []) for n in (1, 2, 77)}
    assert len(keys) == 1


def test_parameters_of_modules_and_tensors_that_require_gradients_are_tensors():
    weight = torch.nn.Parameter(torch.zeros(4, 8))
    assert describe(X, weight).spec == TensorSpec("f32", 2, 16, True)
    assert collect([weight], []) == collect([weight.data], [])


class Tagged(torch.Tensor):
    pass


def test_subclasses_of_tensors_are_tensors():
    tagged = torch.zeros(4).as_subclass(Tagged)
    values = []
    collect([tagged], values)
    assert values == [tagged.data_ptr(), 4]


def conjugated_part():
    return torch.zeros(3, dtype=torch.complex64).conj().imag


BAD_TENSORS = [
    (lambda: None, ArgumentError, "is None; accepted: a torch tensor, numpy array"),
    (lambda: [1, 2], ArgumentTypeError, r"is \[1, 2\] of type list; accepted: a torch tensor"),
    (lambda: 3, ArgumentTypeError, "is 3 of type int"),
    (lambda: "q", ArgumentTypeError, "'q' of type str"),
    (
        lambda: torch.zeros(2, dtype=torch.bool),
        ArgumentTypeError,
        r"dtype bool; accepted: float16, .*\.view\(int8\)",
    ),
    (lambda: np.zeros(2, np.bool_), ArgumentTypeError, "dtype bool"),
    (lambda: torch.zeros(2, dtype=torch.uint8), ArgumentTypeError, r"dtype uint8; .*\.view\(int8\)"),
    (lambda: torch.zeros(2, dtype=torch.complex64), ArgumentTypeError, "dtype complex64"),
    (lambda: np.zeros(2, ">f4"), ArgumentTypeError, "byte order '>'"),
    (lambda: np.zeros(2, "U3"), ArgumentTypeError, "dtype str96"),
    (conjugated_part, ArgumentError, r"negated view; pass \.resolve_neg\(\)"),
    (lambda: torch.eye(3).to_sparse(), ArgumentTypeError, r"sparse_coo tensor; accepted: strided .*to_dense"),
    (lambda: torch.eye(3).to_sparse_csr(), ArgumentTypeError, "sparse_csr"),
    (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), ArgumentTypeError, "nested"),
    (lambda: torch.empty(2, device="meta"), ArgumentTypeError, "device meta; accepted: .*cuda .*cpu"),
    (
        lambda: np.zeros((2, 3), "f4,i2")["f0"],
        ArgumentError,
        r"strides of \(18, 6\) bytes; accepted: multiples of 4",
    ),
    (
        lambda: np.broadcast_to(np.int8(0), (2**31, 1)),
        ArgumentError,
        "size 2147483648 in dimension 0; .*below 2",
    ),
    (lambda: CudaArray((2,), "<V2"), ArgumentTypeError, "dtype <V2"),
    (lambda: CudaArray((2,), ">f4"), ArgumentTypeError, "byte order '>'"),
    (lambda: CudaArray((2,), mask=CudaArray()), ArgumentTypeError, "masked"),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("make", "error", "text"), BAD_TENSORS)
def test_bad_tensors_are_named(make, error, text):
    with pytest.raises(error, match=f"argument 'x' .*{text}"):
        describe(X, make())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_tensors_without_memory_are_named():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(ArgumentTypeError, match="'x' is a FakeTensor without memory"):
        describe(X, fake)
    freed = torch.empty(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ArgumentTypeError, match="'x' is a Tensor without memory"):
        describe(X, freed)
    with pytest.raises(ArgumentError):
        collect([freed], [])


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("i32", -(2**31)),
        ("i32", 2**31 - 1),
        ("i32", np.int64(5)),
        ("i64", 2**63 - 1),
        ("f32", 3),
        ("f32", float("inf")),
        ("f32", 3.4e38),
        ("f32", np.float32(0.5)),
        ("f64", np.float64(1e300)),
    ],
)
def test_scalars(dtype, value):
    argument = describe(scalar(dtype), value)
    assert argument.spec == ScalarSpec(dtype)
    assert argument.values == (value,)
    assert argument.device is None


@pytest.mark.parametrize(
    ("dtype", "value", "error"),
    [
        ("i32", 2**31, ArgumentError),
        ("i32", -(2**31) - 1, ArgumentError),
        ("i64", 2**63, ArgumentError),
        ("f32", 1e39, ArgumentError),
        ("f32", 10**400, ArgumentError),
        ("f64", 10**400, ArgumentError),
        ("i32", 3.0, ArgumentTypeError),
        ("i32", np.float32(3), ArgumentTypeError),
        ("i32", True, ArgumentTypeError),
        ("f32", True, ArgumentTypeError),
        ("f32", np.True_, ArgumentTypeError),
        ("f32", "1", ArgumentTypeError),
        ("f32", torch.tensor(1.0), ArgumentTypeError),
        ("f32", None, ArgumentError),
    ],
)
def test_bad_scalars_are_named(dtype, value, error):
    with pytest.raises(error, match=f"argument 'x' is .*accepted: a number that fits {dtype}"):
        describe(scalar(dtype), value)


def test_none_where_it_is_allowed():
    argument = describe(Parameter("x", "tensor", optional=True), None)
    assert (argument.spec, argument.values) == (None, ())


def test_tensors_on_two_devices_are_both_named():
    signature = Signature(tensors("q", "k", "v"))
    with pytest.raises(ArgumentError, match="'q' is on cuda:1, argument 'v' on cpu; accepted: all tensors on one"):
        describe_all(signature, [CudaArray(device=1), CudaArray(device=1), torch.zeros(2)])


def test_empty_arrays_of_no_known_device_go_with_the_others():
    signature = Signature(tensors("q", "k"))
    _, device = describe_all(signature, [CudaArray((0, 4)), CudaArray(device=1)])
    assert device == ("cuda", 1)


def test_something_must_tell_the_device():
    with pytest.raises(ArgumentError, match="no tensor argument"):
        describe_all(Signature((scalar("i32"),)), [3])
