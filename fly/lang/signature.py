"""A kernel's run-time parameters, what an argument is to the compiler, and how both become flat arguments.

No MLIR here: an exported kernel is launched with this module alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fly.errors import ArgumentError, ArgumentTypeError, KernelDefinitionError

TENSOR_DTYPES = ("f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "i1", "f8e4m3", "f8e5m2", "f8e4m3fnuz")
SCALAR_DTYPES = ("i32", "i64", "f32", "f64")
FIELD_KINDS = ("ptr", "i32", "i64", "f32", "f64", "map")
MAX_ALIGNMENT = 16
PARAMETER_KINDS = ("tensor", "scalar", "map", "operand")
MAP_DTYPES = tuple(d for d in TENSOR_DTYPES if d != "i1")
SWIZZLES = (0, 32, 64, 128)
MAX_BOX = 256

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()
"""The default of a static parameter that has none."""


def _one_of(what: str, value: object, accepted: Sequence[object], error: type[Exception]) -> None:
    if value not in accepted:
        raise error(f"{what} is {value!r}; accepted: " + ", ".join(map(repr, accepted)))


@dataclass(frozen=True)
class Field:
    """One flat kernel argument: its name, and its kind ("ptr", "i32", "i64", "f32", "f64" or "map").

    Raises:
        ArgumentError: the kind is none of these.
    """

    name: str
    kind: str

    def __post_init__(self) -> None:
        _one_of(f"field {self.name!r}: kind", self.kind, FIELD_KINDS, ArgumentError)


@dataclass(frozen=True)
class TensorSpec:
    """What a compiled kernel may assume about one tensor argument.

    `alignment` is the largest power of two, at most 16, that divides the address and, in bytes, every stride
    other than a last one of 1. `unit_stride`: the last stride is 1 element; false for rank 0.

    Raises:
        ArgumentTypeError: a dtype that kernels do not take.
        ArgumentError: a negative rank, rank 0 with a unit stride, or an alignment other than 1, 2, 4, 8, 16.
    """

    dtype: str
    rank: int
    alignment: int
    unit_stride: bool

    def __post_init__(self) -> None:
        _one_of("tensor dtype", self.dtype, TENSOR_DTYPES, ArgumentTypeError)
        _one_of("tensor alignment", self.alignment, (1, 2, 4, 8, MAX_ALIGNMENT), ArgumentError)
        if self.rank < self.unit_stride:
            raise ArgumentError(f"tensor rank is {self.rank}; accepted: 0 or more, 1 or more with a unit stride")

    def fields(self, name: str) -> tuple[Field, ...]:
        """The flat arguments of a tensor called `name`: address, i32 sizes, i64 strides in elements.

        The last stride is left out when it is known to be 1.
        """
        strides = self.rank - 1 if self.unit_stride else self.rank
        return (
            Field(name, "ptr"),
            *(Field(f"{name}.shape{i}", "i32") for i in range(self.rank)),
            *(Field(f"{name}.stride{i}", "i64") for i in range(strides)),
        )


@dataclass(frozen=True)
class ScalarSpec:
    """A run-time scalar: "i32", "i64", "f32" or "f64".

    Raises:
        ArgumentTypeError: any other dtype.
    """

    dtype: str

    def __post_init__(self) -> None:
        _one_of("scalar dtype", self.dtype, SCALAR_DTYPES, ArgumentTypeError)

    def fields(self, name: str) -> tuple[Field, ...]:
        """The one flat argument of a scalar called `name`."""
        return (Field(name, self.dtype),)


@dataclass(frozen=True)
class TensorMapSpec:
    """What a compiled kernel assumes about a tensor map: element type, and the box that one copy moves.

    `box` has one extent per dimension, in the tensor's order (the contiguous dimension last), 1 to 256 each;
    `swizzle` is the bytes of shared memory (0, 32, 64 or 128) within which 16-byte pieces are permuted: the
    bytes of the box's last extent, or 0 for none. CUDA driver API, cuTensorMapEncodeTiled.

    Raises:
        ArgumentTypeError: a dtype that tensor maps do not have.
        ArgumentError: a rank other than 1 to 5, or an extent or swizzle that is not accepted.
    """

    dtype: str
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        _one_of("tensor map dtype", self.dtype, MAP_DTYPES, ArgumentTypeError)
        _one_of("tensor map swizzle", self.swizzle, SWIZZLES, ArgumentError)
        object.__setattr__(self, "box", tuple(self.box))
        whole = all(isinstance(extent, int) for extent in self.box)
        if not whole or not 1 <= len(self.box) <= 5 or not all(1 <= extent <= MAX_BOX for extent in self.box):
            raise ArgumentError(f"tensor map box is {self.box}; accepted: 1 to 5 ints from 1 to {MAX_BOX}")

    def fields(self, name: str) -> tuple[Field, ...]:
        """The one flat argument of a tensor map called `name`."""
        return (Field(name, "map"),)


Spec = TensorSpec | ScalarSpec | TensorMapSpec | None
"""What one argument is; None for an optional argument that was not given."""


@dataclass(frozen=True)
class Parameter:
    """One run-time parameter: `kind` is "tensor", "scalar" or "map", `dtype` a scalar's, `optional` allows None.

    The kind "operand" is a tensor, or a number: an int is an i32, a float an f32.

    Raises:
        KernelDefinitionError: another kind, a scalar without an accepted dtype, or a tensor with one.
    """

    name: str
    kind: str
    optional: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        _one_of(f"parameter {self.name!r}: kind", self.kind, PARAMETER_KINDS, KernelDefinitionError)
        accepted = SCALAR_DTYPES if self.kind == "scalar" else (None,)
        _one_of(f"{self.kind} parameter {self.name!r}: dtype", self.dtype, accepted, KernelDefinitionError)


@dataclass(frozen=True)
class Signature:
    """A kernel's run-time parameters in order, and its static parameters with their defaults.

    A static parameter without a default has the default `REQUIRED`. `variadic` is the name of a parameter for any
    number of operands after the others, None where there is none.
    """

    parameters: tuple[Parameter, ...]
    statics: Mapping[str, Any] = field(default_factory=dict, hash=False)
    variadic: str | None = None

    def parameters_for(self, count: int) -> tuple[Parameter, ...]:
        """The parameters of a call with `count` arguments: a variadic one as often as arguments are left."""
        more = count - len(self.parameters)
        if self.variadic is None or more <= 0:
            return self.parameters
        return (*self.parameters, *(Parameter(f"{self.variadic}{i}", "operand") for i in range(more)))

    def flatten(self, specs: Sequence[Spec]) -> tuple[Field, ...]:
        """The flat kernel arguments for arguments described by `specs`, one spec a parameter, in order.

        An argument that is None has spec None and no flat arguments.

        Raises:
            ArgumentError: as many specs as parameters are needed, and None only where it is allowed.
            ArgumentTypeError: a spec of the wrong kind or scalar dtype.
        """
        parameters = self.parameters_for(len(specs))
        if len(specs) != len(parameters):
            raise ArgumentError(f"{len(specs)} specs for {len(parameters)} parameters")
        flat: list[Field] = []
        for parameter, spec in zip(parameters, specs):
            if spec is not None:
                flat += self._checked(parameter, spec).fields(parameter.name)
            elif not parameter.optional:
                wanted = "tensor or a number" if parameter.kind == "operand" else parameter.kind
                raise ArgumentError(f"argument {parameter.name!r} is None; accepted: a {wanted}")
        return tuple(flat)

    @staticmethod
    def _checked(
        parameter: Parameter, spec: TensorSpec | ScalarSpec | TensorMapSpec
    ) -> TensorSpec | ScalarSpec | TensorMapSpec:
        class_ = {
            "tensor": TensorSpec,
            "scalar": ScalarSpec,
            "map": TensorMapSpec,
            "operand": TensorSpec | ScalarSpec,
        }[parameter.kind]
        fits = isinstance(spec, class_) and (class_ is not ScalarSpec or spec.dtype == parameter.dtype)
        if not fits:
            wanted = parameter.kind if parameter.dtype is None else f"{parameter.kind} {parameter.dtype}"
            raise ArgumentTypeError(f"argument {parameter.name!r} is {spec}; accepted: a {wanted}")
        return spec
