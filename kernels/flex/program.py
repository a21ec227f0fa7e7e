"""What kernels trace in the place of a function that is written with torch: a `Program` of steps, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import fly

from ..problem.mods import Aux
from .operations import DTYPES, MET, OPERATIONS, RESULT, as_type

LOAD = "load"


class Ref(NamedTuple):
    """What an earlier step of a program computed; the first ones are its arguments."""

    place: int


class Number(NamedTuple):
    """A Python number as it is written, so that 1, 1.0 and True differ, and NaN is equal to itself."""

    text: str

    @property
    def value(self) -> Any:
        """The number."""
        return {"True": True, "False": False}[self.text] if self.text[0] in "TF" else self._number()

    def _number(self) -> float:
        return float(self.text) if {*self.text} & {*".einf"} else int(self.text)


@dataclass(frozen=True)
class Step:
    """One operation: `operation` is ATen's name, or `LOAD`, whose operands are a tensor's number and its indices.

    `result`, `met`: the types of its result and of its operands together, by their names. `wraps`: of a load, which
    of the indices may be negative, to count from the end.
    """

    operation: str
    operands: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()
    result: str = "f32"
    met: str = "f32"
    wraps: tuple[bool, ...] = ()

    def compute(self, values: list[Any], tensors: Sequence[Aux]) -> Any:
        """Its result, traced; `values`: of the arguments and the steps before."""
        operands = [_known(x, values) for x in self.operands]
        if self.operation == LOAD:
            return _loaded(tensors[operands[0]], operands[1:], self.wraps).to(DTYPE[self.result])
        row, result = OPERATIONS[self.operation], DTYPE[self.result]
        options = {name: _known(x, values) for name, x in self.options}
        if row.operands in (RESULT, MET):
            to = result if row.operands == RESULT else DTYPE[self.met]
            operands = [None if x is None else as_type(x, to) for x in operands]
        return row.compute(result, *operands, **options)


DTYPE: Mapping[str, fly.DType] = {dtype.name: dtype for dtype in DTYPES.values()}


def _known(operand: Any, values: list[Any]) -> Any:
    if isinstance(operand, Ref):
        return values[operand.place]
    return operand.value if isinstance(operand, Number) else operand


def _loaded(aux: Aux, indices: list[Any], wraps: tuple[bool, ...]) -> fly.Value:
    """An element; a negative index counts from the end, as torch has it."""
    places = []
    for dim, (index, may_wrap) in enumerate(zip(indices, wraps, strict=True)):
        place = index
        if may_wrap:
            place = fly.select(index < 0, index + aux.tensor.shape[dim], index)
        places.append(place.to(fly.i32))
    return aux[tuple(places)] if places else aux[0]


@dataclass(frozen=True)
class Program:
    """A function as a kernel traces it: called with traced values and the call's auxiliary tensors.

    `arguments`: how many of the values there are. `first`: which of the auxiliary tensors is the first of its own.
    Two are equal when they compute the same.
    """

    arguments: int
    steps: tuple[Step, ...]
    result: Ref | Number
    is_mask: bool
    first: int = 0
    _hash: int = field(init=False, compare=False, repr=False)  # every call looks a program up

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.arguments, self.steps, self.result, self.is_mask, self.first)))

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *given: Any) -> Any:
        """The score, or for a mask whether a key is seen."""
        values, aux = list(given[: self.arguments]), given[self.arguments + self.first :]
        for step in self.steps:
            values.append(step.compute(values, aux))
        return as_type(_known(self.result, values), fly.i1 if self.is_mask else fly.f32)
