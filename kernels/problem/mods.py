"""Functions of the caller that are traced into kernels, `score_mod` and the like, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import fly
from fly.errors import DTypeError


@dataclass(frozen=True)
class Mod:
    """A Python function that is traced into a kernel.

    Two are equal when they have the same code, captured and global values and defaults, so that a function made anew
    for every call is compiled once.
    """

    function: Callable[..., Any] = field(compare=False)
    identity: Hashable

    @staticmethod
    def of(function: Callable[..., Any]) -> Mod:
        """Of a function; one that depends on what cannot be hashed, such as a list, is equal to itself only."""
        identity = _identity(function, ())
        try:
            hash(identity)
        except TypeError:
            return Mod(function, function)
        return Mod(function, identity)


def _identity(value: Any, inside: tuple[Any, ...]) -> Hashable:
    """What a function that depends on `value` depends on; `inside`: the functions that are being looked at."""
    if isinstance(value, MethodType):
        return _identity(value.__func__, inside), value.__self__
    if isinstance(value, partial):
        return _identity(value.func, inside), value.args, tuple(sorted(value.keywords.items()))
    if not isinstance(value, FunctionType) or value in inside:
        # the type too, as 1 equals 1.0 and True
        return type(value), value
    inside = (*inside, value)
    code, names = value.__code__, value.__globals__
    used = tuple((name, _identity(names[name], inside)) for name in _global_names(code) if name in names)
    captured = tuple(_identity(cell.cell_contents, inside) for cell in value.__closure__ or ())
    defaults = (value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items())))
    return code, used, captured, defaults


def dependencies(function: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function captures or finds in its module, functions that it calls included."""
    if not isinstance(function, FunctionType) or function in inside:
        return
    names = function.__globals__
    captured = zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))
    for name, value in (*captured, *((n, names[n]) for n in _global_names(function.__code__) if n in names)):
        for part in value if isinstance(value, tuple) else (value,):
            yield name, part
            yield from dependencies(part, (*inside, function))


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Names that a function may look up among its module's, functions inside of it too."""
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _global_names(part))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@dataclass(frozen=True)
class Aux:
    """An auxiliary tensor in a `score_mod` or `mask_mod`: `aux[i, j]` loads an element."""

    tensor: fly.Tensor

    def __getitem__(self, index: Any) -> fly.Value:
        value = self.tensor.load(*(index if isinstance(index, tuple) else (index,)))
        return value.to(fly.f32) if value.dtype.is_float else value


class Batch(fly.Value):
    """A sequence's number, with what FlexAttention's `and_masks` and `or_masks` ask of it."""

    __slots__ = ()

    def new_ones(self, *size: Any, **options: Any) -> fly.Value:
        """True, to be combined with masks."""
        seen: fly.Value = fly.i1(True)
        return seen

    def new_zeros(self, *size: Any, **options: Any) -> fly.Value:
        """False, to be combined with masks."""
        seen: fly.Value = fly.i1(False)
        return seen


def score_of(value: Any, mod: Mod, called: str = "score_mod") -> fly.Value:
    """What a function of a score returned, in f32; `called`: its keyword."""
    if isinstance(value, int | float):
        score: fly.Value = fly.f32(float(value))
        return score
    if not isinstance(value, fly.Value) or not value.dtype.is_float or value.length is not None:
        raise DTypeError(f"{called} {mod.function!r} returned {value!r}; expected a float")
    return value.to(fly.f32)
