"""Exported kernels: an artefact file that launches without a compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from fly.backends import records
from fly.backends.artefact import Artefact
from fly.errors import ArgumentError, ArgumentTypeError, ArtefactError, FlyError, LaunchError
from fly.lang.signature import (
    MAX_ALIGNMENT,
    MAX_BOX,
    SWIZZLES,
    Parameter,
    ScalarSpec,
    Signature,
    Spec,
    TensorMapSpec,
    TensorSpec,
)
from fly.runtime.device import Dim3
from fly.runtime.launch import launch
from fly.runtime.log import has_messages

_KEY = "arguments"
_MAX_RANK = 64  # torch's and numpy's
_MAX_ABSENT = 4096  # arguments that are None and so have no field


def export_metadata(signature: Signature, specs: Sequence[Spec]) -> dict[str, str]:
    """The metadata that an artefact needs to be launched alone: its parameters and what it assumes of each.

    Raises:
        ArgumentError: the specs do not fit the signature.
    """
    signature.flatten(specs)
    parameters = map(_settled, signature.parameters_for(len(specs)), specs)
    rows = [[asdict(p), None if s is None else asdict(s)] for p, s in zip(parameters, specs)]
    return {_KEY: json.dumps(rows)}


def _settled(parameter: Parameter, spec: Spec) -> Parameter:
    """An operand's parameter as what it turned out to be."""
    if parameter.kind != "operand":
        return parameter
    if isinstance(spec, ScalarSpec):
        return Parameter(parameter.name, "scalar", dtype=spec.dtype)
    return Parameter(parameter.name, "tensor")


def _read_metadata(artefact: Artefact) -> tuple[Signature, tuple[Spec, ...]]:
    if _KEY not in artefact.metadata:
        raise ArtefactError(f"{artefact.kernel}: the artefact does not describe its arguments: not an exported one")
    try:
        rows = records.array(
            "arguments", records.parse(artefact.metadata[_KEY]), 0, len(artefact.fields) + _MAX_ABSENT
        )
        read = [_read_argument(row) for row in rows]
        specs = tuple(spec for _, spec in read)
        signature = Signature(tuple(parameter for parameter, _ in read))
        fields = signature.flatten(specs)
    except (ValueError, FlyError) as error:
        raise ArtefactError(f"{artefact.kernel}: malformed argument description: {error}") from error
    if fields != (artefact.fields[:-1] if has_messages(artefact) else artefact.fields):
        raise ArtefactError(f"{artefact.kernel}: the argument description does not match the flat arguments")
    return signature, specs


def _read_argument(row: Any) -> tuple[Parameter, Spec]:
    """A row of `export_metadata`, every type and range of it checked; raises what is a ValueError or a FlyError."""
    given, spec = records.array("argument", row, 2, 2)
    given = records.record("parameter", given, ("name", "kind", "optional", "dtype"))
    name, kind = records.text("parameter name", given["name"]), records.text("parameter kind", given["kind"])
    dtype = None if given["dtype"] is None else records.text("parameter dtype", given["dtype"])
    parameter = Parameter(name, kind, records.truth("optional", given["optional"]), dtype)
    if spec is None:
        return parameter, None
    if kind not in _READ_SPEC:
        raise ArgumentError(f"parameter {name!r}: kind is {kind!r}; accepted: {', '.join(_READ_SPEC)}")
    return parameter, _READ_SPEC[kind](spec)


def _read_tensor(value: Any) -> TensorSpec:
    value = records.record("tensor", value, ("dtype", "rank", "alignment", "unit_stride"))
    return TensorSpec(
        records.text("dtype", value["dtype"]),
        records.whole("rank", value["rank"], 0, _MAX_RANK),
        records.whole("alignment", value["alignment"], 1, MAX_ALIGNMENT),
        records.truth("unit_stride", value["unit_stride"]),
    )


def _read_scalar(value: Any) -> ScalarSpec:
    return ScalarSpec(records.text("dtype", records.record("scalar", value, ("dtype",))["dtype"]))


def _read_map(value: Any) -> TensorMapSpec:
    value = records.record("map", value, ("dtype", "box", "swizzle"))
    box = tuple(records.whole("box", extent, 1, MAX_BOX) for extent in records.array("box", value["box"], 1, 5))
    return TensorMapSpec(
        records.text("dtype", value["dtype"]), box, records.whole("swizzle", value["swizzle"], 0, max(SWIZZLES))
    )


_READ_SPEC: dict[str, Callable[[Any], Spec]] = {"tensor": _read_tensor, "scalar": _read_scalar, "map": _read_map}


class Launchable:
    """An exported kernel: `launchable[grid, block](*arguments, stream=None)`, as the kernel itself.

    Its static values are those that it was compiled with. `block` must be `launchable.artefact.block`.

    Raises:
        ArtefactError: the artefact does not describe its arguments.
    """

    def __init__(self, artefact: Artefact):
        self.artefact = artefact
        self.name = artefact.kernel
        self.signature, self.specs = _read_metadata(artefact)

    def __getitem__(self, grid_and_block: tuple[Any, Any]) -> Callable[..., None]:
        if not isinstance(grid_and_block, tuple) or len(grid_and_block) != 2:
            raise LaunchError(f"{self.name}[{grid_and_block!r}]; accepted: {self.name}[grid, block]")
        grid, block = grid_and_block

        def run(*args: Any, stream: Any = None, **named: Any) -> None:
            launch(self, grid, block, args, named, stream, _provide)

        return run


def _provide(
    launchable: Launchable, specs: tuple[Spec, ...], statics: dict[str, Any], target: str, block: Dim3
) -> Artefact:
    """The `Compile` of an exported kernel: its artefact, if the arguments meet what it assumes."""
    for parameter, given, assumed in zip(launchable.signature.parameters, specs, launchable.specs):
        if not meets(given, assumed):
            raise ArgumentTypeError(
                f"{launchable.name}: argument {parameter.name!r} is {given}; compiled for {assumed}"
            )
    return launchable.artefact


def assumptions(artefact: Artefact) -> tuple[Spec, ...]:
    """What an exported kernel was compiled for, one spec an argument.

    Raises:
        ArtefactError: the artefact does not say.
    """
    return _read_metadata(artefact)[1]


def meets(given: Spec, assumed: Spec) -> bool:
    """Whether an argument is what a kernel was compiled for, or better aligned."""
    if not isinstance(given, TensorSpec) or not isinstance(assumed, TensorSpec):
        return given == assumed
    return (
        (given.dtype, given.rank) == (assumed.dtype, assumed.rank)
        and given.alignment >= assumed.alignment
        and given.unit_stride >= assumed.unit_stride
    )


def load(path: str | os.PathLike[str]) -> Launchable:
    """Read an exported kernel; loads no compiler, and no driver before the first launch.

    Raises:
        ArtefactError: the file cannot be read, or is no intact exported artefact of this version.
    """
    return Launchable(Artefact.load(path))
