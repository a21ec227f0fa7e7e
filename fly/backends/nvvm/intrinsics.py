"""What kernels written for Hopper call beyond `fly.*`: barriers of some warps, register reallocation, fences.

Instructions: PTX ISA 8.3, sections "Parallel Synchronization and Communication" and "Miscellaneous Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fly.backends.nvvm.emit import as_i32, operation, shared_address
from fly.errors import ShapeError
from fly.ir.context import current
from fly.ir.dtypes import i32
from fly.ir.memory import Pointer
from fly.ir.value import Value, select
from fly.lang.ids import first_lane, linear_thread

WARPGROUP = 128
MAX_NAMED_BARRIERS = 16


def _barrier_id(barrier: Any) -> Value:
    if isinstance(barrier, int) and not 0 < barrier < MAX_NAMED_BARRIERS:
        raise ShapeError(f"named barrier {barrier} is out of range; expected 1 to 15 (0 is fly.barrier's)")
    return as_i32(barrier, "named barrier")


def _threads(threads: int) -> Value:
    if threads <= 0 or threads % 32:
        raise ShapeError(f"a named barrier of {threads} threads; expected a positive multiple of 32")
    count: Value = i32(threads)
    return count


def barrier_sync(barrier: Any, threads: int) -> None:
    """Wait at named barrier 1 to 15 (static or traced i32) until `threads` threads have arrived, these included."""
    operation("barrier_sync", [_barrier_id(barrier), _threads(threads)])


def barrier_arrive(barrier: Any, threads: int) -> None:
    """Count towards `barrier_sync` of the same barrier, and go on."""
    operation("barrier_arrive", [_barrier_id(barrier), _threads(threads)])


def barrier_any(barrier: Any, threads: int, condition: Value) -> Value:
    """`barrier_sync`, and whether the condition (i1) holds in any of the threads, in all of them."""
    operands = [_barrier_id(barrier), _threads(threads), select(condition, 1, 0)]
    (held,) = operation("barrier_any", operands, [i32.mlir])
    return Value(held, i32) != 0


def setmaxnreg_inc(registers: int) -> None:
    """Raise the warpgroup's registers a thread to 24 ... 256 (a multiple of 8), waiting until they are free."""
    _setmaxnreg("inc", registers)


def setmaxnreg_dec(registers: int) -> None:
    """Give up registers: the warpgroup keeps 24 ... 256 (a multiple of 8) a thread."""
    _setmaxnreg("dec", registers)


def _setmaxnreg(action: str, registers: int) -> None:
    if not 24 <= registers <= 256 or registers % 8:
        raise ShapeError(f"setmaxnreg of {registers} registers; expected a multiple of 8 from 24 to 256")
    operation("setmaxnreg", attributes={"action": action, "registers": registers})


def elect_one() -> Value:
    """True (i1) in one thread of the warp, the same one each time."""
    (chosen,) = operation("elect", results=[i32.mlir])
    return Value(chosen, i32) != 0


def warpgroup_id() -> Value:
    """The thread's warpgroup in its block, i32, the same value in every lane of a warp."""
    if current().block[0] % WARPGROUP:
        raise ShapeError(f"a block of {current().block[0]} threads does not divide into warpgroups of {WARPGROUP}")
    return first_lane(linear_thread() // WARPGROUP)


def load_matrices_transposed(pointer: Pointer) -> tuple[Value, Value, Value, Value]:
    """Four 8 by 8 matrices of 16-bit elements from shared memory, turned, by all lanes of a warp: a word (i32) each.

    Lane 8 i + r gives the address of row r of matrix i, 16 bytes. A word of lane 4 c + t is column c of rows 2 t (its
    low half) and 2 t + 1.
    """
    words = operation("ldmatrix_turned", [shared_address(pointer)], [i32.mlir] * 4)
    first, second, third, fourth = (Value(word, i32) for word in words)
    return first, second, third, fourth


def store_matrices(pointer: Pointer, words: Sequence[Value]) -> None:
    """Four 8 by 8 matrices of 16-bit elements to shared memory, by all lanes of a warp, from a word (i32) each.

    Lane 8 i + r gives the address of row r of matrix i, 16 bytes. A word of lane 4 r + t is columns 2 t (its low
    half) and 2 t + 1 of row r.

    Raises:
        ShapeError: not four words.
    """
    if len(words) != 4:
        raise ShapeError(f"{len(words)} words of matrices to store; expected 4")
    operation("stmatrix", [shared_address(pointer), *words])


def permute_bytes(low: Value, high: Value, selector: Any) -> Value:
    """A word of any four of the eight bytes of two (i32): byte i is the one that the selector's hex digit i names.

    A digit of 8 to 15 is the highest bit of byte 0 to 7, in all bits.
    """
    operands = [low, high, as_i32(selector, "selector of bytes")]
    (word,) = operation("prmt", operands, [i32.mlir])
    return Value(word, i32)


def anew(value: Value, step: Value) -> Value:
    """The same i32, which is made again wherever `step` (i32) is.

    So nothing that follows from it is kept over a loop in which `step` changes; `fly.reread_ids` is stronger, as its
    reads are in order with products. Once it is PTX, nothing is left of it but a place.
    """
    (made,) = operation("anew", [value, step], [i32.mlir])
    return Value(made, i32)


def sync_warp() -> None:
    """All lanes of a warp arrive before any goes on; memory accesses are ordered across it."""
    operation("sync_warp")


def fence_async_shared() -> None:
    """This thread's shared-memory stores become visible to TMA and WGMMA reads that follow a barrier."""
    operation("fence_async_shared")


def fence_async_global() -> None:
    """Bulk copies that this thread starts from here on read global memory as the thread itself would.

    Needed behind an acquire, where others have written what is copied, by stores or by bulk stores that were waited
    for.
    """
    operation("fence_async_global")


def fence_mbarrier_init() -> None:
    """Initialised mbarriers become visible to TMA and to the cluster."""
    operation("fence_mbarrier_init")
