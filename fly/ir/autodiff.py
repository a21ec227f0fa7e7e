"""Derivatives of traced functions: reverse mode over what a tape recorded.

The tape has the operations in the order in which they were emitted, so that every value's cotangent is complete when
the operation that made it is met on the way back. What is emitted then is ordinary traced arithmetic.

Cotangents are f32 (f64 of f64), also those of 16-bit floats: a conversion between floats passes them on as they are.
Integers, comparisons and `floor`, `ceil`, `trunc`, `round` stop them. Derivatives are right to a few ulp of the terms
that they are sums of. Where there is none, or a choice of two:

| function | derivative |
|---|---|
| `maximum`, `minimum` | of equal operands, half for each; none for NaN beside a number |
| `absolute` at 0 | 0 |
| `select` | of the chosen operand alone |
| `sqrt` at 0; `log`, `log2`, `rsqrt`, `rcp`, `/` and negative powers at 0 | infinite, or NaN, as the formula is |
| `x ** y` with respect to y, at x = 0 | 0 for y >= 0 |

A cotangent of 0 stays 0 through those, and through `exp2` and powers that overflow: what `fly.select` does not choose
adds nothing to a gradient, as long as no product with an infinite factor is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fly.errors import DerivativeError, DTypeError, TraceError
from fly.ir.context import current
from fly.ir.dtypes import DTYPES, DType, f32, f64, i1
from fly.ir.elementary import cos, log, pow, sin
from fly.ir.math import exp2, rcp, reduce_sum
from fly.ir.mlir import ir
from fly.ir.tape import Call, Entry, Load
from fly.ir.value import Value, as_value, broadcast, constant, from_elements, select

_FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_float}
_LN2, _LOG2E = math.log(2), math.log2(math.e)


@dataclass(frozen=True)
class LoadGradient:
    """The cotangent of what `source.load(*coordinates)` gave: a vector's, from `coordinates` on, if it was one.

    Every load has its own, in the order of the loads: the gradient of an element is the sum over all that read it.
    """

    source: Any
    coordinates: tuple[Any, ...]
    cotangent: Value


@dataclass(frozen=True)
class Gradients:
    """What `Tape.gradients` found: a cotangent for each input, and for each float load that the value depends on."""

    inputs: tuple[Value, ...]
    loads: tuple[LoadGradient, ...]


class Tape:
    """Records what is traced while it is open; afterwards it gives derivatives of one of the values.

        with fly.Tape() as tape:
            value = score_mod(score, bias)
        (slope,) = tape.gradients(value, [score]).inputs

    Scalars and vectors; sums, products, quotients, `fma`, `maximum`, `minimum`, `select`, `absolute`, all of `fly`'s
    mathematics, conversions between floats of 16 bits and more, making vectors and taking them apart. The recorded
    code is what it would be without the tape; derivatives use its values again.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._open = False

    def __enter__(self) -> Tape:
        current().tapes.append(self._entries)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        current().tapes.pop()
        self._open = False

    def gradients(
        self, value: Value, inputs: Sequence[Value], cotangent: Value | float = 1.0, *, loads: bool = False
    ) -> Gradients:
        """The sum over the value's elements of `cotangent` times its derivative, with respect to each of `inputs`.

        value: a float scalar or vector that was computed on the tape, or that is one of the inputs. inputs: floats,
        from before the tape or on it. cotangent: a number, or a value of the same length. `loads`: with respect to
        what `Tensor.load` loaded, too. What the value does not depend on has zeros.

        Raises:
            DerivativeError: the value depends on an input through an operation without a rule: a branch or a loop
                (`fly.cond`, `fly.range`, `fly.while_`), exchanges between lanes, inline assembly.
            DTypeError: the value or an input is no float.
            TraceError: the tape is still open.
        """
        if self._open:
            raise TraceError("gradients of a tape that is still open; leave its `with` block first")
        for what, x in (("the value", value), *(("an input", x) for x in inputs)):
            if not isinstance(x, Value) or not x.dtype.is_float:
                raise DTypeError(f"{what} of a gradient is {x!r}; expected a traced float")
        active = self._active(inputs, loads)
        sums = _Sums(active)
        sums.add(value.ir, _spread(as_value(cotangent).to(_wide(value.dtype)), value.length))
        for entry in reversed(self._entries):
            if isinstance(entry, Load) or not any(operand in active for operand in _operands(entry)):
                continue  # where a value comes from that nothing was asked about
            for result in _results(entry):
                if (total := sums.total(result)) is not None:
                    _pass_on(entry, total, sums)
        return Gradients(
            tuple(_or_zero(sums.total(x.ir), x) for x in inputs),
            tuple(
                LoadGradient(entry.source, entry.coordinates, total)
                for entry in self._entries
                if isinstance(entry, Load) and (total := sums.total(entry.value.ir)) is not None
            ),
        )

    def _active(self, inputs: Sequence[Value], loads: bool) -> set[ir.Value]:
        """The floats that depend on an input, or on a load."""
        active = {x.ir for x in inputs}
        for entry in self._entries:
            if isinstance(entry, Load):
                results = [entry.value.ir] if loads else []
            else:
                results = _results(entry) if any(operand in active for operand in _operands(entry)) else []
            active.update(result for result in results if _float_of(result.type) is not None)
        return active


class _Sums:
    """Cotangents of active values, as far as they have been summed up; of vectors, also element by element."""

    def __init__(self, active: set[ir.Value]):
        self._active = active
        self._whole: dict[ir.Value, Value] = {}
        self._elements: dict[ir.Value, dict[int, Value]] = {}

    def add(self, to: ir.Value, cotangent: Value) -> None:
        """Add to a value's; one that was spread over a vector gets the sum of the elements."""
        if to not in self._active:
            return
        if cotangent.length is not None and not isinstance(to.type, ir.VectorType):
            cotangent = reduce_sum(cotangent)
        before = self._whole.get(to)
        self._whole[to] = cotangent if before is None else before + cotangent

    def add_element(self, to: ir.Value, index: int, cotangent: Value) -> None:
        """Add to that of a vector's element."""
        if to not in self._active:
            return
        elements = self._elements.setdefault(to, {})
        elements[index] = cotangent if index not in elements else elements[index] + cotangent

    def total(self, of: ir.Value) -> Value | None:
        """The sum up to now, or None where nothing was added."""
        elements = self._elements.pop(of, None)
        if elements is not None:
            length = ir.VectorType(of.type).shape[0]
            self.add(of, from_elements([elements.get(i, 0.0) for i in range(length)]))
        return self._whole.get(of)


def _float_of(type_: ir.Type) -> DType | None:
    """The element type of a float or a vector of floats."""
    return _FLOATS.get(str(type_.element_type if isinstance(type_, ir.VectorType) else type_))


def _wide(dtype: DType) -> DType:
    """The type of the cotangents of a float type."""
    return f64 if dtype is f64 else f32


def _or_zero(cotangent: Value | None, of: Value) -> Value:
    return constant(0.0, _wide(of.dtype), of.length) if cotangent is None else cotangent


def _spread(x: Value, length: int | None) -> Value:
    return x if length is None or x.length is not None else broadcast(x, length)


def _operands(entry: ir.Operation | Call) -> Iterator[ir.Value]:
    """What an entry takes, and what is taken in its regions."""
    if isinstance(entry, Call):
        yield from (argument.ir for argument in entry.arguments if isinstance(argument, Value))
        return
    yield from entry.operands
    for region in entry.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operands(inner.operation)


def _results(entry: ir.Operation | Call) -> list[ir.Value]:
    return [entry.result.ir] if isinstance(entry, Call) else list(entry.results)


def _number(x: ir.Value) -> Any:
    """An operand for a rule: floats as wide as cotangents, i1 as they are; rules use nothing else."""
    dtype = _float_of(x.type)
    length = ir.VectorType(x.type).shape[0] if isinstance(x.type, ir.VectorType) else None
    if dtype is not None:
        return Value(x, dtype, length).to(_wide(dtype))
    element = x.type if length is None else x.type.element_type
    return Value(x, i1, length) if element == i1.mlir else None


def _pass_on(entry: ir.Operation | Call, cotangent: Value, sums: _Sums) -> None:
    """Add what an entry's result's cotangent is for each operand."""
    if isinstance(entry, Call):
        of_call = _CALLS[entry.name]
        values = [a.to(_wide(a.dtype)) if isinstance(a, Value) else a for a in entry.arguments]
        result = entry.result.to(cotangent.dtype)
        for argument, derive in zip(entry.arguments, of_call, strict=True):
            if isinstance(argument, Value):
                sums.add(argument.ir, derive(cotangent, result, *values))
        return
    if entry.name in _VECTORS:
        _VECTORS[entry.name](entry, cotangent, sums)
        return
    rules = _OPERATIONS.get(entry.name)
    if rules is None:
        raise DerivativeError(
            f"{_UNKNOWN.get(entry.name.partition('.')[0], entry.name)} has no derivative, and what is differentiated "
            "depends on it; write it with fly.select and arithmetic, or give the derivative yourself (score_mod_bwd)",
            at=_place(entry),
        )
    result, operands = _number(entry.results[0]), list(entry.operands)
    numbers = [_number(operand) for operand in operands]
    for operand, rule in zip(operands, rules, strict=True):
        if rule is not None:
            sums.add(operand, rule(cotangent, result, *numbers))


_UNKNOWN = {"scf": "a branch or a loop at run time (fly.cond, fly.range, fly.while_)"}


def _place(op: ir.Operation) -> str:
    location = op.location
    return f"{location.filename}:{location.start_line}" if location.is_a_file() else ""


# vectors


def _extract(op: ir.Operation, cotangent: Value, sums: _Sums) -> None:
    (index,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
    sums.add_element(op.operands[0], index, cotangent)


def _from_elements(op: ir.Operation, cotangent: Value, sums: _Sums) -> None:
    for operand, part in zip(op.operands, cotangent, strict=True):
        sums.add(operand, part)


def _shuffle(op: ir.Operation, cotangent: Value, sums: _Sums) -> None:
    first, second = op.operands
    length = ir.VectorType(first.type).shape[0]
    for part, index in zip(cotangent, ir.DenseI64ArrayAttr(op.attributes["mask"]), strict=True):
        if index < length:
            sums.add_element(first, index, part)
        else:
            sums.add_element(second, index - length, part)


_VECTORS: dict[str, Callable[[ir.Operation, Value, _Sums], None]] = {
    "vector.extract": _extract,
    "vector.from_elements": _from_elements,
    "vector.shuffle": _shuffle,
}


# numbers: for each operand, its cotangent of that of the result, the result and the operands


Rule = Callable[..., Value]


def _where(cotangent: Value, contribution: Value) -> Value:
    """A contribution whose factor may be infinite: nothing of a cotangent of 0."""
    return select(cotangent == 0.0, 0.0, contribution)


def _inverse(x: Any) -> Any:
    """1 / x, by the fast instruction where there is one."""
    return rcp(x) if isinstance(x, Value) and x.dtype is f32 else 1.0 / x


def _same(g: Value, *_: Any) -> Value:
    return g


def _extremum(own: int, other: int) -> Rule:
    def rule(g: Value, y: Value, *x: Value) -> Value:
        return select(y == x[own], select(y == x[other], g * 0.5, g), 0.0)

    return rule


def _power_of_base(g: Value, y: Value, x: Any, n: Any) -> Value:
    return _where(g, g * select(n == 0.0, 0.0, n * pow(x, n - 1.0)))


def _power_of_exponent(g: Value, y: Value, x: Any, n: Any) -> Value:
    x = as_value(x)
    return _where(g, g * select((x == 0.0) & (as_value(n) >= 0.0), 0.0, y * log(x)))


_EXTREMUM = (_extremum(0, 1), _extremum(1, 0))
_EXP2: tuple[Rule, ...] = (lambda g, y, x: _where(g, g * y * _LN2),)
_STOPS = (None,)
_OPERATIONS: dict[str, tuple[Rule | None, ...]] = {
    "arith.addf": (_same, _same),
    "arith.subf": (_same, lambda g, y, a, b: -g),
    "arith.mulf": (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    "arith.divf": (
        lambda g, y, a, b: _where(g, g * _inverse(b)),
        lambda g, y, a, b: _where(g, -g * y * _inverse(b)),
    ),
    "arith.negf": (lambda g, y, x: -g,),
    "arith.maxnumf": _EXTREMUM,
    "arith.minnumf": _EXTREMUM,
    "arith.select": (
        None,
        lambda g, y, c, a, b: select(c, g, 0.0),
        lambda g, y, c, a, b: select(c, 0.0, g),
    ),
    "arith.extf": (_same,),
    "arith.truncf": (_same,),
    "fly.narrow": (_same,),
    "fly.rcp": (lambda g, y, x: _where(g, -g * y * y),),
    "math.fma": (lambda g, y, a, b, c: g * b, lambda g, y, a, b, c: g * a, _same),
    "math.absf": (lambda g, y, x: select(x > 0.0, g, select(x < 0.0, -g, 0.0)),),
    "math.exp2": _EXP2,
    "math.log2": (lambda g, y, x: _where(g, g * _inverse(x) * _LOG2E),),
    "math.sqrt": (lambda g, y, x: _where(g, g * 0.5 * _inverse(y)),),
    "math.floor": _STOPS,
    "math.ceil": _STOPS,
    "math.trunc": _STOPS,
    "math.roundeven": _STOPS,
    "vector.broadcast": (_same,),
}
_CALLS: dict[str, tuple[Rule, ...]] = {
    "exp2_of_f64": _EXP2,
    "rsqrt": (lambda g, y, x: _where(g, g * -0.5 * y * _inverse(x)),),
    "tanh": (lambda g, y, x: g * (1.0 - y * y),),
    "log": (lambda g, y, x: _where(g, g * _inverse(x)),),
    "sin": (lambda g, y, x: g * cos(x),),
    "cos": (lambda g, y, x: -g * sin(x),),
    "erf": (lambda g, y, x: g * (2.0 / math.sqrt(math.pi)) * exp2(x * x * -_LOG2E),),
    "pow": (_power_of_base, _power_of_exponent),
}
