"""What a tape has of a trace: operations as they are emitted, calls of functions as wholes, and loads.

`fly.ir.autodiff` reads it backwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from fly.ir.context import current
from fly.ir.mlir import ir
from fly.ir.value import Value

_Function = TypeVar("_Function", bound=Callable[..., Value])


@dataclass(frozen=True)
class Call:
    """A call of a function that is differentiated as a whole: what it computes inside is on no tape."""

    name: str
    arguments: tuple[Any, ...]
    result: Value


@dataclass(frozen=True)
class Load:
    """An element, or a vector of them, loaded from a tensor."""

    source: Any
    coordinates: tuple[Any, ...]
    value: Value


Entry: TypeAlias = "ir.Operation | Call | Load"


def primitive(function: _Function) -> _Function:
    """A function of floats that tapes have as one `Call`; `fly.ir.autodiff` has its derivatives under its name.

    For what is computed by way of integers, through which no derivative goes, or has a better one than its parts.
    """

    @functools.wraps(function)
    def apply(*arguments: Any) -> Value:
        trace = current()
        tapes, trace.tapes = trace.tapes, []
        try:
            result = function(*arguments)
        finally:
            trace.tapes = tapes
        for tape in tapes:
            tape.append(Call(function.__name__, arguments, result))
        return result

    return cast("_Function", apply)


def note_load(source: Any, coordinates: tuple[Any, ...], value: Value) -> None:
    """Tell the open tapes where a value was loaded from."""
    for tape in current().tapes:
        tape.append(Load(source, coordinates, value))
