"""`fly.print` and `fly.check`: lines of text and assertions of a running kernel, the same on every target.

Each thread appends a record to a log (`fly.lang.messages`), an argument that only kernels with messages have; the
launch waits for such kernels, and prints or raises what the log holds.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from fly.errors import DTypeError, MessageError, ShapeError, author_location
from fly.ir import pytree
from fly.ir.context import LOCK, context, current, emit, unknown_location
from fly.ir.control import when
from fly.ir.dtypes import f32, i1, i32, i64
from fly.ir.memory import Pointer, i64_attribute, load, pointer_type, store, string_attribute
from fly.ir.mlir import ir
from fly.ir.value import Value, concat, from_elements
from fly.lang.ids import block_dim, block_id, thread_id
from fly.lang.messages import CAPACITY, DROPPED, FAILED, HEADER_BYTES, USED, Logged, Message, to_text
from fly.lang.tensor import Tensor

_MOST_WORDS = 256
_ADD, _MONOTONIC = 1, 2  # llvm.atomicrmw's numbering
_STATIC = (bool, int, float, str)


def print(*values: Any, when: Any = None) -> None:
    """Print a line from every thread that comes here, or of those where `when` (i1) holds.

    `print("row {} of {}: {:.3f}", i, n, x)` puts values into a text as `str.format` does; `print(x, y)` shows them
    alone. Values are traced scalars and vectors of any type, and Python's numbers, strings and whatever has a `str`.
    Each line starts with its block and thread. The launch is waited for, and then its lines come out: block by block,
    thread by thread, each thread's in the order in which it printed them. What does not fit the log
    (`FLY_PRINT_SIZE_MB`) is dropped, and counted. Not for launches that a graph captures.

    Raises:
        MessageError: the text does not fit the values.
        DTypeError: a value that has no text, such as a tensor, or a condition that is no scalar i1.
        ShapeError: more values than a record has room for.
    """
    text, given = _text(values, "fly.print")
    if when is not None:
        _require_condition(when, "fly.print")
    _append("print", text, given, when)


def check(condition: Any, *message: Any) -> None:
    """Assert that `condition` (i1; of a vector, every element) holds in every thread that comes here.

    `check(i < n, "index {} is not below {}", i, n)`: the message is as for `fly.print`. The launch is waited for, and
    raises a `fly.errors.CheckError` with the line of the kernel, the block, the thread and the message. The thread
    itself goes on: what must not happen after a failed check belongs under `fly.when`.

    Raises:
        MessageError: the text does not fit the values.
        DTypeError: a condition that is no i1 (a static one is a Python `assert`), or a value that has no text.
        ShapeError: more values than a record has room for.
    """
    if not isinstance(condition, Value) or condition.dtype is not i1:
        raise DTypeError(
            f"fly.check needs a run-time i1 condition, not {condition!r}; a static condition is a Python assert"
        )
    text, given = _text(message, "fly.check") if message else ("", ())
    if condition.length is not None:
        condition = functools.reduce(operator.and_, condition)
    _append("check", text, given, ~condition)


def _require_condition(condition: Any, what: str) -> None:
    if not isinstance(condition, Value) or condition.dtype is not i1 or condition.length is not None:
        raise DTypeError(
            f"when of {what} is {condition!r}; expected a scalar run-time i1 (a static condition is a Python if)"
        )


def _text(values: tuple[Any, ...], what: str) -> tuple[str, tuple[Any, ...]]:
    """The format string and what it shows; without a string in front, the values with spaces between."""
    if not values:
        raise MessageError(f"{what} has nothing to say; give it a text or values")
    if isinstance(values[0], str):
        return values[0], tuple(_shown(value, what) for value in values[1:])
    return " ".join(["{}"] * len(values)), tuple(_shown(value, what) for value in values)


def _shown(value: Any, what: str) -> Any:
    if isinstance(value, Value):
        return value
    if isinstance(value, _STATIC):
        return value
    if isinstance(value, Tensor) or pytree.leaves(value):
        raise DTypeError(f"{what} shows traced values and Python's, not {value!r}; load an element of it")
    return str(value)


def _append(kind: str, text: str, values: tuple[Any, ...], condition: Value | None) -> None:
    logged = tuple(Logged(v.dtype.name, v.length) if isinstance(v, Value) else v for v in values)
    message = Message(kind, author_location(), text, logged)
    problem = message.problem()
    if problem is not None:
        raise MessageError(f"the text {text!r} of fly.{kind} does not fit its values: {problem}")
    if message.words > _MOST_WORDS:
        raise ShapeError(f"fly.{kind} has {message.words} words to log; expected at most {_MOST_WORDS}")
    log, number = _register(message)
    if condition is None:
        _write(log, number, message, values)
        return
    with when(condition):
        _write(log, number, message, values)


def _register(message: Message) -> tuple[Pointer, int]:
    """The log, which the first message makes the kernel's last argument, and the message's number."""
    memo = current().memo
    function = memo["function"]
    if "log" not in memo:
        body = function.regions[0].blocks[0]
        argument = body.add_argument(pointer_type("global"), unknown_location())
        types = [a.type for a in body.arguments]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, []))
        attributes = [*ir.ArrayAttr(function.attributes["arg_attrs"]), ir.DictAttr.get({})]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        memo["log"] = Pointer(argument, "global"), []
    log, messages = memo["log"]
    messages.append(message)
    function.attributes["fly.messages"] = string_attribute(to_text(messages))
    return log, len(messages)


def _write(log: Pointer, number: int, message: Message, values: tuple[Any, ...]) -> None:
    words = message.words
    place = _add(log.offset(USED), words)
    fits = place + words <= load(log.offset(CAPACITY), i64)
    with when(fits):
        x, y, z = block_dim()
        thread = thread_id.x if (y, z) == (1, 1) else thread_id.x + x * (thread_id.y + y * thread_id.z)
        head = from_elements([i32(number), block_id.x, block_id.y, block_id.z, thread])
        record = concat([head, *(_words(v) for v in values if isinstance(v, Value))])
        store(record, log.offset(HEADER_BYTES).offset(place * 4), align=4)
    with when(~fits):
        _add(log.offset(DROPPED), 1)
    if message.kind == "check":
        _add(log.offset(FAILED), 1)


def _words(value: Value) -> Value:
    """A value as the i32 words of a record."""
    if value.dtype.is_int and value.dtype.bits < 32:
        value = value.to(i32)
    elif value.dtype.bits < 32:
        value = value.to(f32)
    bits = value.bitcast(i32)
    return bits if bits.length is not None else from_elements([bits])


def _add(pointer: Pointer, amount: int) -> Value:
    """Add to a 64-bit word that all threads share; what it was before."""
    attributes = {"bin_op": i64_attribute(_ADD), "ordering": i64_attribute(_MONOTONIC), "alignment": i64_attribute(8)}
    op = emit("llvm.atomicrmw", [pointer.ir, i64(amount).ir], [i64.mlir], attributes)
    return Value(op.results[0], i64)


def messages_of(module: ir.Module) -> str | None:
    """The messages of a traced kernel, as an artefact keeps them; None where it has none."""
    with LOCK, context():
        (function,) = (op.operation for op in module.body.operations if "fly.block" in op.operation.attributes)
        if "fly.messages" not in function.attributes:
            return None
        messages: str = ir.StringAttr(function.attributes["fly.messages"]).value
        return messages
