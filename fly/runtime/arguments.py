"""Torch, numpy and CUDA-array-interface values as flat kernel arguments.

Two ways in. `collect` is the one that every launch takes: it appends each argument's flat values and returns
a hashable key of all that the kernel is specialised on, without checking what an equal key proved before.
`describe` is for the first launch with a key and for errors: it checks everything and names what is wrong.
Neither imports torch or numpy; whoever passes their values has.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fly.errors import ArgumentError, ArgumentTypeError
from fly.lang.signature import MAX_ALIGNMENT, Parameter, ScalarSpec, Signature, Spec, TensorMapSpec, TensorSpec
from fly.runtime.array_interface import ACCEPTED, check_interface
from fly.runtime.device import CPU, Allocation, DeviceKey
from fly.runtime.shown import shown

_MAX_SIZE = 2**31
_MAX_LAYOUTS = 4096  # strides remembered, of all kernels together
_INT_RANGES = {"i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}

# numpy and torch spell these types alike, ml_dtypes' names are numpy's
_DTYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "float8_e4m3fnuz": "f8e4m3fnuz",
}
_ACCEPTED_DTYPES = ", ".join(_DTYPES)
_ACCEPTED = {
    "tensor": ACCEPTED,
    "map": "what fly.tensor_map gives",
    "scalar": "a number that fits {}",
    "operand": "a tensor, an int that fits i32 or a float that fits f32",
}
_DTYPE_HINTS = {"bool": "; pass .view(int8)", "uint8": "; pass .view(int8)"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One checked argument: its spec, flat values in the spec's field order, device and memory.

    `device` is None for scalars, absent arguments, and empty arrays whose device cannot be known. `readonly`: an
    array that says of itself that it must not be written; torch's tensors say nothing of the kind.
    """

    name: str
    spec: Spec
    values: tuple[int | float | bytes, ...] = ()
    device: DeviceKey | None = None
    allocation: Allocation | None = None
    readonly: bool = False


@dataclass(frozen=True, slots=True)
class EncodedMap:
    """A tensor map, made by `fly.tensor_map`: 128 bytes for the GPU, and the memory that they describe.

    Whoever made it keeps the tensor alive.
    """

    spec: TensorMapSpec
    data: bytes
    device: DeviceKey
    address: int
    nbytes: int

    def allocation(self, name: str) -> Allocation:
        """The memory that copies through the map may touch."""
        return Allocation(name, self.address, self.nbytes)


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of any library: sizes and strides in elements, the address in bytes (0 when empty)."""

    dtype: str
    itemsize: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: DeviceKey | None
    readonly: bool = False

    def spec(self) -> TensorSpec:
        strides, unit = self.strides, self.strides[-1:] == (1,)
        bits = self.address | MAX_ALIGNMENT
        for stride in strides[:-1] if unit else strides:
            bits |= stride * self.itemsize
        return TensorSpec(self.dtype, len(self.shape), bits & -bits, unit)

    def values(self) -> tuple[int, ...]:
        unit = self.strides[-1:] == (1,)
        return (self.address, *self.shape, *(self.strides[:-1] if unit else self.strides))

    def allocation(self, name: str) -> Allocation:
        """The memory from the lowest to the highest element, whichever way the strides go."""
        if 0 in self.shape:
            return Allocation(name, self.address, 0)
        reach = [(size - 1) * stride * self.itemsize for size, stride in zip(self.shape, self.strides)]
        low = sum(r for r in reach if r < 0)
        high = sum(r for r in reach if r > 0)
        return Allocation(name, self.address + low, high - low + self.itemsize)


def _wrong_type(name: str, what: str, accepted: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"argument {name!r} is {what}; accepted: {accepted}")


def _dtype(name: str, spelled: str) -> str:
    if spelled not in _DTYPES:
        hint = _DTYPE_HINTS.get(spelled, "")
        raise _wrong_type(name, f"a tensor of dtype {spelled}", f"{_ACCEPTED_DTYPES}{hint}")
    return _DTYPES[spelled]


def _torch_view(name: str, value: Any) -> _View:
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or getattr(value, "is_nested", False):
        what = "nested" if getattr(value, "is_nested", False) else value.layout
        raise _wrong_type(name, f"a {what} tensor", "strided (dense) tensors; pass .to_dense()")
    dtype = _dtype(name, str(value.dtype).removeprefix("torch."))
    if value.is_neg():
        raise ArgumentError(f"argument {name!r} is a lazily negated view; pass .resolve_neg()")
    if value.device.type not in ("cpu", "cuda"):
        raise _wrong_type(name, f"on device {value.device}", "tensors on cuda (NVIDIA or AMD) or cpu")
    try:
        address = value.data_ptr()
    except RuntimeError:  # tensors that only stand for others
        address = 0
    if not address and value.numel():
        raise _wrong_type(name, f"a {type(value).__name__} without memory", "tensors that have memory")
    device = CPU if value.device.type == "cpu" else ("cuda", value.device.index)
    return _View(dtype, value.element_size(), address, tuple(value.shape), value.stride(), device)


def _numpy_view(name: str, value: Any) -> _View:
    dtype = value.dtype
    if not dtype.isnative:
        raise _wrong_type(name, f"an array of byte order {dtype.byteorder!r}", "native byte order")
    spelled = _dtype(name, dtype.name)
    address = value.__array_interface__["data"][0] if value.size else 0
    strides = _elements(name, value.strides, dtype.itemsize)
    return _View(spelled, dtype.itemsize, address, value.shape, strides, CPU, not value.flags.writeable)


def _masked_view(name: str, value: Any) -> _View:
    raise _wrong_type(name, "a masked array", "arrays without a mask, such as its .filled()")


def _elements(name: str, strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise ArgumentError(
            f"argument {name!r} has strides of {tuple(strides)} bytes; accepted: multiples of {itemsize}"
        )
    return tuple(stride // itemsize for stride in strides)


# `typestr` of the CUDA array interface: byte order, kind, bytes; bfloat16 and float8 have no spelling there
_TYPESTRS = {"f2": "float16", "f4": "float32", "f8": "float64"} | {f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)}


def _interface_view(name: str, value: Any) -> _View:
    interface = value.__cuda_array_interface__
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    native = "<" if sys.byteorder == "little" else ">"
    if interface.get("mask") is not None:
        raise _wrong_type(name, "a masked array", "arrays without a mask")
    if typestr[0] not in (native, "|"):
        raise _wrong_type(name, f"an array of byte order {typestr[0]!r}", "native byte order")
    spelled, itemsize = _dtype(name, _TYPESTRS.get(typestr[1:], typestr)), int(typestr[2:])
    compact: list[int] = []
    step = 1
    for size in reversed(shape):
        compact.insert(0, step)
        step *= size
    strides: Sequence[int] = compact
    if interface.get("strides") is not None:
        strides = _elements(name, interface["strides"], itemsize)
    if 0 in shape:
        return _View(spelled, itemsize, 0, shape, tuple(strides), None)
    from fly.runtime.cuda import ordinal_of

    address, readonly = interface["data"]
    return _View(spelled, itemsize, address, shape, tuple(strides), ("cuda", ordinal_of(address)), bool(readonly))


_ViewOf = Callable[[str, Any], _View]


def _view_of_class(cls: type) -> _ViewOf | None:
    """How values of this class are viewed as tensors; None when their class does not tell."""
    modules = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if "torch" in modules and issubclass(cls, sys.modules["torch"].Tensor):
        return _torch_view
    if "numpy" in modules and issubclass(cls, sys.modules["numpy"].ndarray):
        masked = sys.modules.get("numpy.ma")
        return _masked_view if masked is not None and issubclass(cls, masked.MaskedArray) else _numpy_view
    return None


def _number(value: Any) -> bool | int | float | None:
    """A Python or numpy scalar as a Python number; None when it is neither."""
    if type(value).__module__ == "numpy" and isinstance(value, sys.modules["numpy"].generic):
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


def describe(parameter: Parameter, value: Any) -> Argument:
    """Check one argument completely.

    Raises:
        ArgumentTypeError: a type or dtype that the parameter does not accept.
        ArgumentError: None for a parameter that needs a value, a size of 2^31 or more, a scalar out of range.
    """
    name = parameter.name
    accepted = _ACCEPTED[parameter.kind].format(parameter.dtype)
    if value is None:
        if not parameter.optional:
            raise ArgumentError(f"argument {name!r} is None; accepted: {accepted}")
        return Argument(name, None)
    if parameter.kind == "scalar":
        assert parameter.dtype is not None
        return _describe_scalar(name, parameter.dtype, value, accepted)
    if parameter.kind == "operand" and isinstance(value, int | float):
        return _describe_scalar(name, "f32" if isinstance(value, float) else "i32", value, accepted)
    if (parameter.kind == "map") != isinstance(value, EncodedMap):
        raise _wrong_type(name, f"{shown(value)} of type {type(value).__qualname__}", accepted)
    if parameter.kind == "map":
        return Argument(name, value.spec, (value.data,), value.device, value.allocation(name))
    view_of = _view_of_class(type(value)) or _interface_view
    if view_of is _interface_view:
        check_interface(name, value, accepted)
    view = view_of(name, value)
    for axis, size in enumerate(view.shape):
        if size >= _MAX_SIZE:
            raise ArgumentError(f"argument {name!r} has size {size} in dimension {axis}; accepted: below 2^31")
    return Argument(name, view.spec(), view.values(), view.device, view.allocation(name), view.readonly)


def _describe_scalar(name: str, dtype: str, value: Any, accepted: str) -> Argument:
    number = _number(value)
    integral = dtype in _INT_RANGES
    if number is None or isinstance(number, bool) or (integral and isinstance(number, float)):
        raise _wrong_type(name, f"{shown(value)} of type {type(value).__qualname__}", accepted)
    if integral:
        low, high = _INT_RANGES[dtype]
        fits = low <= number <= high
    else:
        try:
            struct.pack("<f" if dtype == "f32" else "<d", number)
            fits = True
        except (OverflowError, struct.error):
            fits = False
    if not fits:
        raise ArgumentError(f"argument {name!r} is {shown(value)}; accepted: {accepted}")
    return Argument(name, ScalarSpec(dtype), (number,))


def describe_all(signature: Signature, values: Sequence[Any]) -> tuple[tuple[Argument, ...], DeviceKey]:
    """Check all arguments, one value a parameter; the second result is the device they share.

    Raises:
        ArgumentTypeError: a type or dtype that its parameter does not accept.
        ArgumentError: a bad value, tensors on more than one device, or no tensor at all.
    """
    arguments = tuple(
        describe(parameter, value) for parameter, value in zip(signature.parameters_for(len(values)), values)
    )
    placed = [(argument, argument.device) for argument in arguments if argument.device is not None]
    if not placed:
        raise ArgumentError("no tensor argument tells which device to run on; pass at least one tensor")
    first, device = placed[0]
    for other, elsewhere in placed:
        if elsewhere != device:
            raise ArgumentError(
                f"argument {first.name!r} is on {_spelled(device)}, argument {other.name!r} on "
                f"{_spelled(elsewhere)}; accepted: all tensors on one device"
            )
    return arguments, device


def _spelled(device: DeviceKey) -> str:
    return "cpu" if device == CPU else f"{device[0]}:{device[1]}"


_Collect = Callable[[Any, list[Any]], object]


def _collect_none(value: None, values: list[Any]) -> object:
    return None


def _collect_other(value: Any, values: list[Any]) -> object:
    number = _number(value)
    if number is None:
        return _collect_interface(value, values)
    values.append(number)
    return number.__class__


def _collect_int(value: int, values: list[Any]) -> object:
    values.append(value)
    return int


def _collect_float(value: float, values: list[Any]) -> object:
    values.append(value)
    return float


def _collect_view(view_of: _ViewOf) -> _Collect:
    def collect_view(value: Any, values: list[Any]) -> object:
        view = view_of("", value)
        values += view.values()
        return view.spec(), view.device, view.readonly

    return collect_view


_collect_interface = _collect_view(_interface_view)


class _Collectors(dict[type, _Collect | None]):
    """Class of a value -> how it is collected, None for torch's own tensors; filled as classes are met."""

    def __missing__(self, cls: type) -> _Collect | None:
        view_of = _view_of_class(cls)
        collect: _Collect | None = _collect_other if view_of is None else _collect_view(view_of)
        if view_of is _torch_view:
            torch = sys.modules["torch"]
            collect = None if cls in (torch.Tensor, torch.nn.Parameter) else collect
        self[cls] = collect
        return collect


def _collect_map(value: EncodedMap, values: list[Any]) -> object:
    values.append(value.data)
    return value.spec, value.device


_collectors = _Collectors(
    {type(None): _collect_none, int: _collect_int, float: _collect_float, EncodedMap: _collect_map}
)

_Strides = tuple[int, ...]
_Layout = tuple[_Strides, tuple[int, ...], bool]


class _Layouts(dict[tuple[Any, _Strides], _Layout]):
    """(torch dtype, strides) -> (flat strides, spec number by low four bits of the address, may be negated).

    Equal specs have equal numbers, and those are quicker to hash than specs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[TensorSpec, int] = {}
        self._next = itertools.count()

    def __missing__(self, key: tuple[Any, _Strides]) -> _Layout:
        dtype, strides = key
        spelled = _DTYPES[str(dtype).removeprefix("torch.")]
        views = [_View(spelled, dtype.itemsize, low, strides, strides, None) for low in range(MAX_ALIGNMENT)]
        numbers = [self._numbers.setdefault(view.spec(), next(self._next)) for view in views]
        # the imaginary part of a conjugated tensor is negated lazily, and has one of these types
        negatable = spelled in ("f16", "f32", "f64")
        if len(self) >= _MAX_LAYOUTS:
            self.clear()
        layout = self[key] = (views[0].values()[1 + len(strides) :], tuple(numbers), negatable)
        return layout


_layouts = _Layouts()


def collect(arguments: Sequence[Any], values: list[int | float]) -> tuple[object, ...]:
    """Append the flat values of all arguments to `values`; the result keys what a kernel is specialised on.

    Errors of any kind mean that `describe_all` will name what is wrong.
    """
    key: list[object] = []
    place = None
    for argument in arguments:
        collect_one = _collectors[argument.__class__]
        if collect_one is not None:
            key.append(collect_one(argument, values))
            continue
        # what `_View` computes, without the objects: this runs five times in a ten-microsecond launch
        address = argument.data_ptr()
        strides, numbers, negatable = _layouts[argument.dtype, argument.stride()]
        device = argument.device
        if place is None:
            place = device
        if device != place or (negatable and argument.is_neg()) or (not address and argument.numel()):
            raise ArgumentError("torch tensors on two devices, negated, or without memory")
        values.append(address)
        values += argument.shape
        values += strides
        key.append(numbers[address & 15])
    key.append(place)
    return tuple(key)
