"""Who am I: indices of the block, the wave and the lane, all i32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fly.errors import TraceError
from fly.ir.context import current, emit
from fly.ir.dtypes import i32
from fly.ir.memory import string_attribute
from fly.ir.mlir import func, ir
from fly.ir.pytree import leaves, unflatten
from fly.ir.value import Value
from fly.lang.tensor import Tensor

if TYPE_CHECKING:
    from fly.backends.target import Target


@contextmanager
def reread_ids(lanes: bool = False) -> Iterator[None]:
    """Block and thread ids are read anew here: nothing made of them is kept in registers from before for it.

    For what a long loop does not need and what comes after it does, or for rare branches. AMD's compiler is told so
    of block ids alone, which are scalar: others are cheap to keep there. With `lanes`, a thread's index in its wave
    (`lane_id`) is counted anew too, by two vector instructions on AMD, where a loop takes all vector registers.
    """
    trace = current()
    before = trace.rereads_ids, trace.rereads_lanes
    trace.rereads_ids, trace.rereads_lanes = True, lanes
    try:
        yield
    finally:
        trace.rereads_ids, trace.rereads_lanes = before


def reread(given: Any) -> Any:
    """A tensor or number that is a parameter of the kernel, or None, read anew: nothing of it is kept for here.

    For what a long loop does not need and what comes after it does. AMD's compiler alone is told so, which has
    parameters in scalar registers; elsewhere they are not in registers.

    Raises:
        TraceError: it was computed.
    """
    if isinstance(given, Tensor):
        pointer = given.pointer.with_ir(_reread(given.pointer))
        shape, stride = (tuple(map(reread, numbers)) for numbers in (given.shape, given.stride))
        return Tensor(pointer, given.dtype, shape, stride, given.alignment)
    return given.with_ir(_reread(given)) if isinstance(given, Value) else given


def remade(given: Value) -> Value:
    """The same i32, which is the same in every lane of a wave: what was made of it before is made again from here on.

    For numbers in a long loop that take an instruction each to make and a scalar register each to keep. One that
    vector instructions make (a division, a float's integer) is read from the wave's first lane each time:
    `fly.first_lane` where it is made spares that. AMD's compiler alone is told so.
    """
    return given.with_ir(emit("fly.reread", [given.ir], [given.ir.type]).results[0])


def early(tree: Any) -> Any:
    """The same values, computed where this is said at the latest, and not where they are needed first.

    For what can be done while a wave waits. Takes what a loop may carry: of its leaves, integers and pointers are the
    same in every lane of a wave. AMD's compiler alone is told so.
    """
    return unflatten(tree, [emit("fly.reread", [leaf.ir], [leaf.ir.type]).results[0] for leaf in leaves(tree)])


def _reread(given: Any) -> Any:
    block = given.ir.owner
    if not isinstance(block, ir.Block) or not isinstance(block.owner, func.FuncOp):
        raise TraceError(f"{given!r} was computed; reread takes parameters of the kernel")
    return emit("fly.reread", [given.ir], [given.ir.type]).results[0]


def _id(name: str) -> Value:
    if current().rereads_ids:
        name += ".anew"
    return Value(emit("fly.id", [], [i32.mlir], {"name": string_attribute(name)}).results[0], i32)


class Dim3:
    """Three run-time i32 values, one per dimension: `.x`, `.y`, `.z`."""

    def __init__(self, prefix: str):
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"fly.{self._prefix}"

    @property
    def x(self) -> Value:
        return _id(self._prefix + ".x")

    @property
    def y(self) -> Value:
        return _id(self._prefix + ".y")

    @property
    def z(self) -> Value:
        return _id(self._prefix + ".z")


block_id = Dim3("block_id")
thread_id = Dim3("thread_id")
grid_dim = Dim3("grid_dim")


def block_dim() -> tuple[int, int, int]:
    """Threads in the block along x, y and z; static, known from the launch."""
    return current().block


def wave_size() -> int:
    """Lanes of a wave on the target: 64 on CDNA, 32 on NVIDIA; static."""
    lanes: int = current().target.wave_size
    return lanes


def lane_id() -> Value:
    """The thread's index in its wave. Needs a one-dimensional block."""
    return lane_of(wave_size())


def lane_of(lanes: int) -> Value:
    """The thread's index among the `lanes` threads (a wave, or a warpgroup) that execute one instruction together."""
    thread = linear_thread()
    return _id("lane_id.x") if current().rereads_lanes and lanes == wave_size() else thread % lanes


def wave_id() -> Value:
    """The wave's index in its block, the same value in every lane. Needs a one-dimensional block."""
    return first_lane(linear_thread() // wave_size())


def first_lane(value: Value) -> Value:
    """The value in the wave's first lane; tells the compiler that an i32 is the same in every lane."""
    from fly.lang.sync import shuffle

    return shuffle(value, 0)


def linear_thread() -> Value:
    """The thread's index in its block. Needs a one-dimensional block."""
    _, y, z = current().block
    if y != 1 or z != 1:
        raise TraceError(f"lane and wave ids need a one-dimensional block, not {current().block}")
    return thread_id.x


def target() -> Target:
    """The target that the kernel is being traced for."""
    traced_for: Target = current().target
    return traced_for
