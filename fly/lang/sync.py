"""Barriers, lane exchange, reductions over lanes, and waiting for asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fly.errors import DTypeError, ShapeError, TargetError
from fly.ir.context import current, emit
from fly.ir.dialect import token_type
from fly.ir.dtypes import i1, i32
from fly.ir.math import maximum
from fly.ir.memory import i64_attribute, string_attribute
from fly.ir.mlir import ir
from fly.ir.value import Traced, Value


class Token(Traced):
    """An asynchronous copy in flight; loops can carry it, `wait` ends it."""

    __slots__ = ()

    def __init__(self, value: ir.Value):
        self.ir = value

    def with_ir(self, value: ir.Value) -> Token:
        return Token(value)

    def __repr__(self) -> str:
        return "<copy token>"


def join(tokens: Sequence[Token]) -> Token:
    """One token for several copies: a group that is waited for together."""
    for token in tokens:
        if not isinstance(token, Token):
            raise DTypeError(f"join takes copy tokens, not {token!r}")
    return Token(emit("fly.join", [t.ir for t in tokens], [token_type()]).results[0])


def wait(token: Token) -> None:
    """Until the copies of `token` that this thread issued have landed in shared memory.


    The compiler turns it into the wait with the largest count of newer copies that is still correct. Other
    threads' copies need a `barrier` after it.
    """
    if not isinstance(token, Token):
        raise DTypeError(f"wait takes a copy token, not {token!r}")
    emit("fly.wait", [token.ir], [])


def barrier(*, publish: bool = False) -> None:
    """Every thread of the block arrives before any goes on; shared-memory accesses are ordered across it.

    `publish`: stores and additions to global memory before it are part of what any thread of the block releases after
    it (`fly.atomic_add(..., order="release")`). On AMD each wave then waits for its own; on NVIDIA it costs nothing.
    """
    if publish:
        emit("fly.publish", [], [])
    emit("fly.barrier", [], [])


def sched_barrier() -> None:
    """A line that the instruction scheduler does not move anything across (no run-time cost)."""
    emit("fly.sched", [], [], {"kind": string_attribute("barrier"), "value": i64_attribute(0)})


def set_priority(level: int) -> None:
    """The wave's issue priority, 0 (default) to 3; ignored on NVIDIA."""
    if not isinstance(level, int) or not 0 <= level <= 3:
        raise ShapeError(f"priority {level!r} is out of range; expected 0 to 3")
    emit("fly.sched", [], [], {"kind": string_attribute("priority"), "value": i64_attribute(level)})


def _exchangeable(value: Value) -> None:
    if not isinstance(value, Value) or value.length is not None or value.dtype.bits != 32:
        raise DTypeError(f"lanes exchange 32-bit scalars, not {value!r}; bitcast or pack it first")


def _exchange(value: Value, lane: Value, mode: str) -> Value:
    _exchangeable(value)
    op = emit("fly.shuffle", [value.ir, lane.ir], [value.type], {"mode": string_attribute(mode)})
    return Value(op.results[0], value.dtype)


def shuffle(value: Value, lane: Any) -> Value:
    """The value that lane number `lane` (static or traced i32, below the wave size) of the wave holds.

    Raises:
        DTypeError: the value has not 32 bits, or the lane is no scalar i32.
        ShapeError: a static lane that the wave does not have.
    """
    size = current().target.wave_size
    if isinstance(lane, int):
        if not 0 <= lane < size:
            raise ShapeError(f"shuffle lane {lane} is out of range; expected 0 to {size - 1}")
        lane = i32(lane)
    if not isinstance(lane, Value) or lane.dtype is not i32 or lane.length is not None:
        raise DTypeError(f"shuffle lane {lane!r} is no scalar i32")
    return _exchange(value, lane, "idx")


def shuffle_xor(value: Value, mask: int) -> Value:
    """The value of the lane whose index differs in the bits of the static `mask`.

    Raises:
        ShapeError: the mask is not in 1 .. wave size - 1.
    """
    size = current().target.wave_size
    if not isinstance(mask, int) or not 0 < mask < size:
        raise ShapeError(f"shuffle_xor mask {mask!r} is out of range; expected 1 to {size - 1}")
    return _exchange(value, i32(mask), "xor")


def reduce_lanes(value: Value, combine: Callable[[Value, Value], Value], masks: Sequence[int] | None = None) -> Value:
    """Combine a value over lanes by xor exchanges; every lane gets the result.

    `masks` are the lane bits to reduce over; by default all of the wave. `combine` is commutative.

    Raises:
        DTypeError: the value is no 32-bit scalar.
    """
    _exchangeable(value)
    if masks is None:
        masks = [1 << bit for bit in range((current().target.wave_size - 1).bit_length())]
    for mask in masks:
        value = combine(*_pair(value, mask))
    return value


def _pair(value: Value, mask: int) -> tuple[Value, Value]:
    """The values of this lane and of its partner, in an order that the target chooses."""
    op = emit("fly.pair", [value.ir], [value.type, value.type], {"mask": i64_attribute(mask)})
    return Value(op.results[0], value.dtype), Value(op.results[1], value.dtype)


def swap_lanes(first: Value, second: Value, mask: int) -> tuple[Value, Value]:
    """(first, the partner's first) in lanes without the bit `mask`, (the partner's second, second) in the others.

    The bit is of the lane's index, in which the partner's differs. One instruction on the targets that have it
    (`Target.lane_swaps`).

    Raises:
        TargetError: the target has none for this mask.
        DTypeError: the values are no 32-bit scalars of one type.
    """
    target = current().target
    if mask not in target.lane_swaps:
        raise TargetError(f"{target.arch} does not swap lanes by mask {mask}; it has {target.lane_swaps or 'none'}")
    for value in (first, second):
        _exchangeable(value)
    if first.dtype is not second.dtype:
        raise DTypeError(f"lanes swap values of one type, not {first!r} and {second!r}")
    op = emit("fly.swap", [first.ir, second.ir], [first.type, first.type], {"mask": i64_attribute(mask)})
    return Value(op.results[0], first.dtype), Value(op.results[1], first.dtype)


def any_lane(condition: Value) -> Value:
    """Whether an i1 holds in any lane of the wave: the same in every lane, so a branch on it does not diverge."""
    if not isinstance(condition, Value) or condition.dtype is not i1 or condition.length is not None:
        raise DTypeError(f"any_lane needs a scalar i1 condition, not {condition!r}")
    return Value(emit("fly.any_lane", [condition.ir], [i1.mlir]).results[0], i1)


def lane_sum(value: Value) -> Value:
    """The sum over the wave's lanes, in every lane."""
    return reduce_lanes(value, lambda a, b: a + b)


def lane_max(value: Value) -> Value:
    """The maximum over the wave's lanes, in every lane."""
    return reduce_lanes(value, maximum)
