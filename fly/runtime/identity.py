"""What a kernel or a static value is, as text that is the same in every process and on every machine."""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fly.errors import ArgumentError

_PREFIX = __name__.removesuffix("fly.runtime.identity")  # where fly is a part of another package


def identity_of(value: Any, what: str) -> str:
    """The text of a value; `what` names it in errors.

    Numbers, strings, tuples, enumerations, dataclasses (the fields that they are compared by), classes, kernels, and
    functions, which are their code, their defaults and what they capture: code differs between minor versions of
    Python.

    Raises:
        ArgumentError: a value of another kind.
    """
    return _text(value, what, ())


def place_of(named: Any) -> str:
    """The dotted name of what a module defines: the same under all names that its package has."""
    return f"{_module(named.__module__)}.{named.__qualname__}"


@functools.cache
def _module(name: str) -> str:
    """A module's name, with the first in the alphabet of its package's names, which may have several."""
    name = name.removeprefix(_PREFIX)
    top, dot, rest = name.partition(".")
    loaded = sys.modules.get(_PREFIX + top)
    names = (n.removeprefix(_PREFIX) for n, module in [*sys.modules.items()] if module is loaded is not None)
    return min((n for n in names if "." not in n), default=top) + dot + rest


def _text(value: Any, what: str, inside: tuple[Any, ...]) -> str:
    def of(part: Any) -> str:
        return _text(part, what, inside)

    if isinstance(value, enum.Enum):
        return f"{place_of(type(value))}.{value.name}"
    if value is None or value is ... or isinstance(value, bool | int | str | bytes):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, float):
        return f"float {value.hex()}"
    if isinstance(value, tuple):
        return f"({', '.join(map(of, value))})"
    if isinstance(value, frozenset):
        return f"set({', '.join(sorted(map(of, value)))})"
    if isinstance(value, type | BuiltinFunctionType):
        return f"{value.__module__ and _module(value.__module__)}.{value.__qualname__}"
    if isinstance(value, ModuleType):
        return f"module {_module(value.__name__)}"
    if is_dataclass(value):
        given = (f"{f.name}={of(getattr(value, f.name))}" for f in fields(value) if f.compare)
        return f"{place_of(type(value))}({', '.join(given)})"
    if hasattr(value, "signature") and isinstance(getattr(value, "function", None), FunctionType):
        return f"kernel {place_of(value.function)}"
    if isinstance(value, functools.partial):
        return f"partial({of(value.func)}, {of(value.args)}, {of(tuple(sorted(value.keywords.items())))})"
    if isinstance(value, MethodType):
        return f"method({of(value.__func__)}, {of(value.__self__)})"
    if isinstance(value, CodeType):
        return f"code {_code(value, what, inside)}"
    if isinstance(value, FunctionType):
        if value in inside:
            return f"itself {inside.index(value)}"
        inside = (*inside, value)
        captured = tuple(cell.cell_contents for cell in value.__closure__ or ())
        named = tuple(sorted((value.__kwdefaults__ or {}).items()))
        return f"function({of(value.__code__)}, {of(captured)}, {of(value.__defaults__)}, {of(named)})"
    raise ArgumentError(
        f"{what} holds {value!r}, a {type(value).__name__}, by which no build that is made ahead is found again; "
        "accepted: numbers, strings, tuples, enumerations, dataclasses, classes and functions"
    )


def _code(code: CodeType, what: str, inside: tuple[Any, ...]) -> str:
    constants: Sequence[str] = [_text(constant, what, inside) for constant in code.co_consts]
    parts = (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
