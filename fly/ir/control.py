"""Run-time control flow: `range`, `while_`, `when`, `cond`. Python's own `if` and `for` are compile time."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar, cast

from fly.errors import CarryError, ControlFlowError, DTypeError, author_frame, author_location
from fly.ir import pytree
from fly.ir.context import caller_location, current, emit
from fly.ir.dtypes import i1
from fly.ir.mlir import ir
from fly.ir.value import Number, Value, as_value, unify

_NOTHING = object()
_Result = TypeVar("_Result")


@contextmanager
def _region(block: ir.Block, what: str, at: str) -> Iterator[None]:
    """Emit into `block`; the trace knows that `what`, opened at file:line `at`, is open until the body ends."""
    trace = current()
    trace.open_regions.append((what, at))
    with ir.InsertionPoint(block):
        yield
    trace.open_regions.pop()


class _Loop:
    """What loops with a carry have in common: `next` inside of the body, `results` after it."""

    kind = ""

    def __init__(self, carry: Any):
        self._carry = carry
        self._next: Any = _NOTHING
        self._results: Any = _NOTHING
        self._depth = 0
        self._at = author_location()

    def _leaves(self) -> list[Any]:
        initial = pytree.leaves(() if self._carry is _NOTHING else self._carry)
        if self._carry is not _NOTHING and not initial:
            raise CarryError(f"carry {self._carry!r} holds no traced value; start from one, for example fly.f32(0.0)")
        return initial

    def _final(self) -> list[ir.Value]:
        """The next values of the carry, at the end of the body."""
        if self._carry is _NOTHING:
            return []
        if self._next is _NOTHING:
            raise ControlFlowError(
                f"this {self.kind} loop has a carry but its body did not call loop.next(...)", at=self._at
            )
        return [leaf.ir for leaf in pytree.leaves(self._next)]

    def next(self, *carry: Any) -> None:
        """Give the carry's value for the next iteration: the same structure, as one argument or unpacked."""
        if self._carry is _NOTHING:
            raise ControlFlowError("loop.next(...) in a fly.range loop without a carry; pass carry=... to range")
        if self._next is not _NOTHING:
            raise ControlFlowError("loop.next(...) was called twice in one loop body")
        inside = current().open_regions[self._depth :]
        if inside:
            raise ControlFlowError(
                f"loop.next(...) inside {inside[0][0]}; call it at the loop body's own level, with the results of "
                "an inner loop, fly.cond or fly.select"
            )
        unpacked = isinstance(self._carry, tuple) and not (len(carry) == 1 and isinstance(carry[0], tuple))
        if not unpacked and len(carry) != 1:
            raise CarryError(f"loop.next takes 1 value for this carry, not {len(carry)}")
        value = carry if unpacked else carry[0]
        self._next = pytree.match(self._carry, value, "carry")

    @property
    def results(self) -> Any:
        """The carry after the last iteration (its initial value when there was none)."""
        if self._carry is _NOTHING:
            raise ControlFlowError("loop.results of a fly.range loop without a carry")
        if self._results is _NOTHING:
            raise ControlFlowError("loop.results is only known after the loop", at=None)
        return self._results


class range(_Loop):
    """A run-time loop: `for j, (acc, m) in (loop := fly.range(n, carry=(acc, m))):`.

    Takes `stop`, `start, stop` or `start, stop, step`, integers or traced integers (i32 or i64), step > 0.
    Without `carry` the loop yields `j`. With it, it yields `(j, carry)`, the body must end by calling
    `loop.next(...)` with the carry's next value, and `loop.results` holds the last one after the loop.

    Raises:
        ControlFlowError: no `next`, two `next`s, `break`, or `results` read inside the loop.
        CarryError: the carry changes its structure or types.
        DTypeError: a bound is no integer.
    """

    kind = "fly.range"

    def __init__(self, *bounds: Any, carry: Any = _NOTHING):
        if not 1 <= len(bounds) <= 3:
            raise ControlFlowError(f"fly.range takes 1 to 3 bounds, not {len(bounds)}")
        start, stop, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
        if isinstance(step, int) and step <= 0:
            raise ControlFlowError(f"fly.range needs a positive step, not {step}")
        for bound in (start, stop, step):
            if not isinstance(bound, int) and not (
                isinstance(bound, Value) and bound.dtype.is_int and bound.length is None
            ):
                raise DTypeError(f"fly.range bound {bound!r} is no scalar integer")
        super().__init__(carry)
        self._bounds = (start, stop, step)

    def __iter__(self) -> Iterator[Any]:
        start, stop, step = (as_value(b) for b in self._bounds)
        start, stop = unify(start, stop)
        start, step = unify(start, step)
        stop, step = unify(stop, step)
        initial = self._leaves()
        operands = [start.ir, stop.ir, step.ir, *(leaf.ir for leaf in initial)]
        op = emit("scf.for", operands, [leaf.ir.type for leaf in initial], regions=1)
        types = [start.ir.type, *(leaf.ir.type for leaf in initial)]
        block = op.regions[0].blocks.append(*types, arg_locs=[caller_location()] * len(types))
        index = Value(block.arguments[0], start.dtype)
        with _region(block, "the fly.range loop", self._at):
            self._depth = len(current().open_regions)
            if self._carry is _NOTHING:
                yield index
            else:
                yield index, pytree.unflatten(self._carry, list(block.arguments)[1:])
            emit("scf.yield", self._final(), [])
        if self._carry is not _NOTHING:
            self._results = pytree.unflatten(self._carry, list(op.results))


class while_(_Loop):
    """A run-time loop of unknown length: `for state in (loop := fly.while_(state, lambda s: s.left > 0)):`.

    `condition` makes an i1 of the carry before each iteration; the loop ends when it is false. The body must end by
    calling `loop.next(...)` with the carry's next value; `loop.results` holds the last one after the loop.
    Asynchronous copies with tokens do not go inside: how many are outstanding could not be known.

    Raises:
        ControlFlowError: no `next`, two `next`s, `break`, or `results` read inside the loop.
        CarryError: the carry changes its structure or types, or holds no traced value.
        DTypeError: the condition is no scalar i1.
    """

    kind = "fly.while_"

    def __init__(self, carry: Any, condition: Callable[[Any], Value]):
        super().__init__(carry)
        self._condition = condition

    def __iter__(self) -> Iterator[Any]:
        initial = self._leaves()
        types = [leaf.ir.type for leaf in initial]
        op = emit("scf.while", [leaf.ir for leaf in initial], types, regions=2)
        before, after = (
            region.blocks.append(*types, arg_locs=[caller_location()] * len(types)) for region in op.regions
        )
        with _region(before, "the condition of fly.while_", self._at):
            arguments = list(before.arguments)
            going = _condition(self._condition(pytree.unflatten(self._carry, arguments)), "fly.while_")
            emit("scf.condition", [going.ir, *arguments], [])
        with _region(after, "the fly.while_ loop", self._at):
            self._depth = len(current().open_regions)
            yield pytree.unflatten(self._carry, list(after.arguments))
            emit("scf.yield", self._final(), [])
        self._results = pytree.unflatten(self._carry, list(op.results))


def _condition(value: Any, where: str) -> Value:
    if not isinstance(value, Value) or value.dtype is not i1 or value.length is not None:
        raise DTypeError(
            f"{where} needs a scalar run-time i1 condition, not {value!r}; a static condition is a Python if"
        )
    return value


def _stays_inside() -> None:
    """A jump out of a `with fly.when` body would end the trace there for all threads, without a trace of it."""
    frame = author_frame()
    if frame is None:
        return
    for first, last, jump, line in _jumps(frame.f_code):
        if first <= frame.f_lineno <= last:
            raise ControlFlowError(
                f"{jump} at line {line} leaves the body of fly.when at compile time, in every thread; put what "
                "follows under the opposite condition"
            )


@functools.cache
def _jumps(code: CodeType) -> list[tuple[int, int, str, int]]:
    """(first line, last line) of the heads of `with` statements whose body is left by a jump, which, and where."""
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # no source, or a piece of one: there is nothing to look at
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            jump = next((j for statement in node.body for j in _leaving(statement, in_loop=False)), None)
            if jump is not None:
                first, last, line = (n + max(start, 1) - 1 for n in (node.lineno, node.body[0].lineno, jump.lineno))
                found.append((first, max(first, last - 1), type(jump).__name__.lower(), line))
    return found


def _leaving(node: ast.AST, in_loop: bool) -> Iterator[ast.stmt]:
    """The statements under `node` that jump out of it."""
    if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not in_loop):
        yield node
    if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _leaving(child, in_loop or isinstance(node, ast.For | ast.While))


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """Run the body's stores and effects only in threads where `condition` (i1) holds.

    Raises:
        DTypeError: the condition is no scalar i1 value.
        ControlFlowError: the body has a `return`, `break` or `continue` that leaves it.
    """
    condition = _condition(condition, "fly.when")
    _stays_inside()
    op = emit("scf.if", [condition.ir], [], regions=2)
    block = op.regions[0].blocks.append()
    with _region(block, "fly.when", author_location()):
        yield
        emit("scf.yield", [], [])


def _literal_result(block: ir.Block, number: Number, partner: Value) -> Value:
    """The number that a branch of fly.cond gave, as what the other branch gives."""
    block.operations[len(block.operations) - 1].operation.erase()
    with ir.InsertionPoint(block):
        literal, _ = unify(number, partner)
        emit("scf.yield", [literal.ir], [])
    return literal


def cond(condition: Any, then: Callable[[], _Result], otherwise: Callable[[], _Result | Number]) -> _Result:
    """The result of `then()` where `condition` (i1) holds, else of `otherwise()`; only one runs.

    Both return trees of traced values with the same structure and types; a number becomes what its partner is.

    Raises:
        CarryError: the two results differ in structure or type.
    """
    condition = _condition(condition, "fly.cond")
    at = author_location()
    blocks: list[tuple[ir.Operation, ir.Block]] = []
    results: list[Any] = []
    # Results are only known after tracing: both branches are built in a detached holder, then moved.
    for branch, name in ((then, "then"), (otherwise, "else")):
        holder = ir.Operation.create("scf.execute_region", regions=1, loc=caller_location())
        block = holder.regions[0].blocks.append()
        with _region(block, f"the {name} branch of fly.cond", at):
            result = branch()
            if results and isinstance(results[0], Number) and isinstance(result, Value):
                results[0] = _literal_result(blocks[0][1], results[0], result)
            if results:
                result = pytree.match(results[0], result, "the else branch's result", at=at)
            results.append(result)
            emit("scf.yield", [leaf.ir for leaf in pytree.leaves(result)], [])
        blocks.append((holder, block))
    types = [leaf.ir.type for leaf in pytree.leaves(results[0])]
    op = emit("scf.if", [condition.ir], types, regions=2)
    for region, (holder, block) in zip(op.regions, blocks, strict=True):
        block.append_to(region)
        holder.erase()
    return cast("_Result", pytree.unflatten(results[0], list(op.results)))
