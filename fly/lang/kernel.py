"""`@fly.kernel`: from a Python function to a traced module."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fly.errors import ArgumentError, CompileError, ControlFlowError, KernelDefinitionError, ShapeError, TargetError
from fly.ir import memory
from fly.ir.context import current, tracing
from fly.ir.dtypes import DType, dtype, i32, i64
from fly.ir.memory import i64_attribute
from fly.ir.mlir import ir
from fly.ir.value import Value
from fly.lang.signature import REQUIRED, Parameter, ScalarSpec, Signature, Spec, TensorMapSpec
from fly.lang.tensor import Tensor
from fly.lang.tensor_map import TensorMap, parameter_attributes, pointer_type

_SCALARS = ("i32", "i64", "f32", "f64")

# Set by the package: what `kernel[grid, block](...)` calls. `fly.lang` itself knows no device.
launch: Callable[..., None] | None = None


class Operand:
    """The annotation of a kernel's `*operands`: each is a `fly.Tensor`, an i32 or an f32 in the kernel."""


def kernel(function: Callable[..., None]) -> Kernel:
    """Make a GPU kernel of a Python function.

    Positional parameters are run-time arguments, annotated `fly.Tensor`, `fly.TensorMap`, one of these with
    `| None`, or a scalar type (`fly.i32`, `fly.i64`, `fly.f32`, `fly.f64`). After them, `*operands: fly.Operand`
    takes any number of tensors and numbers (an int is an i32, a float an f32); static parameters say what they are.
    Keyword-only parameters are static: any hashable Python value; each combination is compiled once. Launch it with
    `kernel[grid, block](*arguments, **statics)`.

    Raises:
        KernelDefinitionError: a parameter without a usable annotation, **kwargs, or a return value.
    """
    return Kernel(function)


class Kernel:
    """A kernel's source and signature; see `kernel`."""

    def __init__(self, function: Callable[..., None]):
        self.signature = _signature(function)
        self.function = function
        self.name = function.__name__
        self.launcher: Any = None  # the runtime's: what it has compiled and loaded of this kernel
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ArgumentError(f"kernel {self.name} needs a grid and a block: {self.name}[grid, block](...)")

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        """`kernel[grid, block]`: a callable that launches; grid and block are integers or tuples of up to three."""
        if not isinstance(configuration, tuple) or len(configuration) != 2:
            raise ArgumentError(f"kernel {self.name} takes [grid, block], not [{configuration!r}]")
        grid, block = configuration
        return functools.partial(_launch, self, grid, block)

    def bind_statics(self, statics: Mapping[str, Any]) -> dict[str, Any]:
        """Static parameters with defaults filled in.

        Raises:
            ArgumentError: an unknown, missing or unhashable static parameter.
        """
        known = self.signature.statics
        for name, value in statics.items():
            if name not in known:
                raise ArgumentError(
                    f"kernel {self.name} has no static parameter {name!r}; it has {', '.join(known) or 'none'}"
                )
            try:
                hash(value)
            except TypeError:
                raise ArgumentError(
                    f"static parameter {name!r} of kernel {self.name} is {value!r}; expected a hashable value"
                ) from None
        bound = {**known, **statics}
        for name, value in bound.items():
            if value is REQUIRED:
                raise ArgumentError(f"kernel {self.name} misses its static parameter {name!r}")
        return bound

    def trace(
        self,
        specs: tuple[Spec, ...],
        statics: Mapping[str, Any],
        target: Any,
        block: tuple[int, int, int],
    ) -> ir.Module:
        """The MLIR module of one configuration: a `func.func` whose arguments are the flattened parameters.

        Raises:
            ArgumentError: specs or static parameters that do not fit the signature.
            TargetError: tensor maps for a target that cannot copy through them.
            AuthorError: a mistake in the kernel.
        """
        statics = self.bind_statics(statics)
        if not target.hopper and any(isinstance(spec, TensorMapSpec) for spec in specs):
            raise TargetError(f"{target.arch} cannot copy through tensor maps; sm_90a can (kernel {self.name})")
        with tracing(target, block) as trace:
            fields = self.signature.flatten(specs)
            argument_types = [_field_type(field.kind) for field in fields]
            code = self.function.__code__
            location = ir.Location.file(code.co_filename, code.co_firstlineno, 0)
            with location, ir.InsertionPoint(trace.module.body):
                function = ir.Operation.create(
                    "func.func",
                    attributes={
                        "sym_name": ir.StringAttr.get(self.name),
                        "function_type": ir.TypeAttr.get(ir.FunctionType.get(argument_types, [])),
                        "fly.block": ir.DenseI32ArrayAttr.get(list(block)),
                        "arg_attrs": ir.ArrayAttr.get(
                            [
                                parameter_attributes() if field.kind == "map" else ir.DictAttr.get({})
                                for field in fields
                            ]
                        ),
                    },
                    regions=1,
                )
            body = function.regions[0].blocks.append(*argument_types, arg_locs=[location] * len(argument_types))
            trace.memo["function"] = function
            arguments = _arguments(self.signature, specs, iter(body.arguments))
            with ir.InsertionPoint(body):
                result = self.function(*arguments, **statics)
                if trace.open_regions:
                    what, at = trace.open_regions[-1]
                    raise ControlFlowError(f"{what} was left by break or return; it runs to its end", at=at)
                if result is not None:
                    raise KernelDefinitionError(
                        f"kernel {self.name} returned {result!r}; kernels return nothing, they store",
                        at=f"{code.co_filename}:{code.co_firstlineno}",
                    )
                ir.Operation.create("func.return", loc=location)
            _verify(trace.module)
            return trace.module


def _verify(module: ir.Module) -> None:
    """What only the whole function shows: values used outside of the loop or branch that they belong to."""
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        first = error.error_diagnostics[0]
        if "does not dominate" not in first.message:
            raise CompileError(f"the traced kernel is not valid: {error}") from None
        raise ControlFlowError(
            "a value made inside a fly.range, fly.when or fly.cond body is used outside of it; use loop.results, "
            "or what fly.cond returns",
            at=f"{first.location.filename}:{first.location.start_line}",
        ) from None


def _launch(kernel: Kernel, grid: Any, block: Any, *args: Any, stream: Any = None, **statics: Any) -> None:
    if launch is None:
        raise ArgumentError(f"kernel {kernel.name} cannot be launched: import fly, not fly.lang alone")
    launch(kernel, grid, block, args, statics, stream)


def occupancy(
    *, waves_per_eu: int | None = None, max_registers: int | None = None, min_blocks: int | None = None
) -> None:
    """Tell the code generator how many waves should fit.

    `waves_per_eu`: waves on an AMD SIMD (1 to 8); `max_registers`: NVIDIA registers a thread (16 to 255);
    `min_blocks`: NVIDIA blocks on a multiprocessor. Ones that the target does not have are ignored, as the
    kernel's meaning does not depend on them.

    Raises:
        ShapeError: out of range.
    """
    limits = {"waves_per_eu": (1, 8), "max_registers": (16, 255), "min_blocks": (1, 32)}
    given = {"waves_per_eu": waves_per_eu, "max_registers": max_registers, "min_blocks": min_blocks}
    function = current().memo["function"]
    for name, value in given.items():
        if value is None:
            continue
        low, high = limits[name]
        if not isinstance(value, int) or not low <= value <= high:
            raise ShapeError(f"occupancy: {name} is {value!r}; expected {low} to {high}")
        function.attributes[f"fly.{name}"] = i64_attribute(value)


def compiler_options(*options: str) -> None:
    """LLVM command-line options for this kernel alone, such as "--enable-post-misched=false"."""
    for option in options:
        if not isinstance(option, str) or not option.startswith("-"):
            raise ShapeError(f"compiler option {option!r} is no string that starts with '-'")
    function = current().memo["function"]
    function.attributes["fly.options"] = ir.ArrayAttr.get([ir.StringAttr.get(o) for o in options])


def narrow_splats() -> None:
    """Numbers that all elements of a vector share take two registers in this kernel, not one for each element.

    For kernels with many of them beside a loop. AMD's compiler alone is told so: elsewhere they take one anyway.
    """
    current().memo["function"].attributes["fly.narrow_splats"] = ir.UnitAttr.get()


def flush_denormals() -> None:
    """f32 arithmetic of this kernel takes and gives denormal numbers as zero."""
    current().memo["function"].attributes["fly.daz"] = ir.UnitAttr.get()


def _field_type(kind: str) -> ir.Type:
    if kind == "map":
        return pointer_type()
    return memory.pointer_type("global") if kind == "ptr" else dtype(kind).mlir


def _arguments(signature: Signature, specs: tuple[Spec, ...], values: typing.Iterator[ir.Value]) -> list[Any]:
    arguments: list[Any] = []
    for spec in specs:
        if spec is None:
            arguments.append(None)
        elif isinstance(spec, ScalarSpec):
            arguments.append(Value(next(values), dtype(spec.dtype)))
        elif isinstance(spec, TensorMapSpec):
            arguments.append(TensorMap(next(values), spec))
        else:
            pointer = memory.Pointer(next(values), "global")
            shape = tuple(Value(next(values), i32) for _ in range(spec.rank))
            dynamic = spec.rank - 1 if spec.unit_stride else spec.rank
            stride: tuple[Value | int, ...] = tuple(Value(next(values), i64) for _ in range(dynamic))
            if spec.unit_stride:
                stride = (*stride, 1)
            arguments.append(Tensor(pointer, dtype(spec.dtype), shape, stride, spec.alignment))
    return arguments


def _signature(function: Callable[..., None]) -> Signature:
    if not inspect.isfunction(function):
        raise KernelDefinitionError(f"@fly.kernel takes a function, not {function!r}")
    code = function.__code__
    at = f"{code.co_filename}:{code.co_firstlineno}"
    try:
        hints = typing.get_type_hints(function)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise KernelDefinitionError(f"kernel {function.__name__}: {error} in an annotation", at=at) from None
    parameters: list[Parameter] = []
    statics: dict[str, Any] = {}
    variadic = None
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and hints.get(name) is Operand:
            variadic = name
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise KernelDefinitionError(
                f"kernel {function.__name__} takes *{name}; every parameter needs a name, or is *{name}: fly.Operand",
                at=at,
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            statics[name] = REQUIRED if parameter.default is parameter.empty else parameter.default
            continue
        if parameter.default is not parameter.empty:
            raise KernelDefinitionError(
                f"parameter {name!r} of kernel {function.__name__} has a default; make it keyword-only (static)",
                at=at,
            )
        annotation = hints.get(name, function.__annotations__.get(name))
        parameters.append(_parameter(function.__name__, name, annotation, at))
    return Signature(tuple(parameters), statics, variadic)


def _parameter(kernel_name: str, name: str, annotation: Any, at: str) -> Parameter:
    for class_, kind in ((Tensor, "tensor"), (TensorMap, "map")):
        if annotation is class_:
            return Parameter(name, kind, False, None)
        union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        if union and set(typing.get_args(annotation)) == {class_, type(None)}:
            return Parameter(name, kind, True, None)
    if isinstance(annotation, DType) and annotation.name in _SCALARS:
        return Parameter(name, "scalar", False, annotation.name)
    raise KernelDefinitionError(
        f"parameter {name!r} of kernel {kernel_name} has annotation {annotation!r}; expected fly.Tensor, "
        "fly.TensorMap, one of these with | None, or one of "
        + ", ".join(f"fly.{s}" for s in _SCALARS)
        + " (static parameters come after *)",
        at=at,
    )
