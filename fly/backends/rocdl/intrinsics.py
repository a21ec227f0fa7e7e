"""What kernels written for CDNA call beyond `fly.*`: barriers without fences, waits, and scheduling hints.

Instructions: CDNA3 and CDNA4 ISA manuals; hints: LLVM's AMDGPU usage guide.
"""

from __future__ import annotations

from enum import IntFlag

from fly.errors import DTypeError, ShapeError
from fly.ir.context import current, emit
from fly.ir.dtypes import DType, f8e4m3, f8e4m3fnuz, f32, i1, i16, i32
from fly.ir.mlir import ir
from fly.ir.value import Value, from_elements


class Group(IntFlag):
    """Instruction classes of `sched_barrier` and `sched_group_barrier`."""

    NONE = 0
    ALU = 0x1
    VALU = 0x2
    SALU = 0x4
    MFMA = 0x8
    VMEM = 0x10
    VMEM_READ = 0x20
    VMEM_WRITE = 0x40
    DS = 0x80
    DS_READ = 0x100
    DS_WRITE = 0x200
    TRANS = 0x400


def _call(name: str, *operands: ir.Value, result: ir.Type | None = None) -> ir.Value | None:
    attributes = {
        "intrin": ir.StringAttr.get(name),
        "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(operands), 0]),
    }
    op = emit("llvm.call_intrinsic", list(operands), [] if result is None else [result], attributes)
    return None if result is None else op.results[0]


def cvt_pk_fp8(values: Value, to: DType = f8e4m3) -> Value:
    """A vector of f32 as e4m3, to the nearest even: V_CVT_PK_FP8_F32, which makes NaN of what is too large.

    `to`: the format that the target's instruction makes, f8e4m3 up to 448 (gfx950) or f8e4m3fnuz up to 240 (gfx942).

    Raises:
        DTypeError: not a vector of f32 whose length is a multiple of 4, or `to` is not that format.
    """
    made = f8e4m3fnuz if "f8e4m3fnuz" in current().target.float8_to_f32 else f8e4m3
    if to is not made:
        raise DTypeError(f"cvt_pk_fp8 to {to}; on {current().target.arch} it makes {made}")
    if not isinstance(values, Value) or values.dtype is not f32 or values.length is None or values.length % 4:
        raise DTypeError(f"cvt_pk_fp8 takes a vector of f32 whose length is a multiple of 4, not {values!r}")
    words = []
    for i in range(0, values.length, 4):
        word = emit("llvm.mlir.poison", [], [i32.mlir]).results[0]
        for half in range(2):
            low, high = (values[i + 2 * half + j].ir for j in range(2))
            word = _call("llvm.amdgcn.cvt.pk.fp8.f32", low, high, word, i1(half).ir, result=i32.mlir)
        words.append(Value(word, i32))
    return from_elements(words).bitcast(to)


def perm_bytes(low: Value, high: Value, selectors: int) -> Value:
    """V_PERM_B32: an i32 of four bytes of two, by a byte of `selectors` each: 0-3 of `low`, 4-7 of `high`."""
    return Value(_call("llvm.amdgcn.perm", high.ir, low.ir, i32(selectors).ir, result=i32.mlir), i32)


def permute_bytes(low: Value, high: Value, selector: int) -> Value:
    """A word of any four of the eight bytes of two words (i32): V_PERM_B32. The selector's byte i names byte i.

    Of 0 to 7, `low` has the first four; 8 to 11 are bits 15 and 31 of `low` and of `high`, in all bits of a byte.

    Raises:
        DTypeError: a word that is no scalar i32.
        ShapeError: the selector has bytes above 11.
    """
    for word in (low, high):
        if not isinstance(word, Value) or word.dtype is not i32 or word.length is not None:
            raise DTypeError(f"permute_bytes takes scalars of i32, not {word!r}")
    if not isinstance(selector, int) or selector >> 32 or any(selector >> 8 * i & 255 > 11 for i in range(4)):
        raise ShapeError(f"selector {selector!r} is out of range; expected four bytes of 0 to 11")
    return Value(_call("llvm.amdgcn.perm", high.ir, low.ir, i32(selector).ir, result=i32.mlir), i32)


def s_barrier() -> None:
    """S_BARRIER alone: waves meet, nothing is waited for. Order memory with `wait` and `s_waitcnt_lds`."""
    _call("llvm.amdgcn.s.barrier")


def s_waitcnt_lds() -> None:
    """Until this wave's shared-memory loads have arrived: S_WAITCNT lgkmcnt(0). LLVM merges it with a `fly.wait`."""
    _call("llvm.amdgcn.s.waitcnt", i32(0xC07F).ir)


def s_setprio(level: int) -> None:
    """The wave's issue priority on its SIMD, 0 to 3.

    Raises:
        ShapeError: out of range.
    """
    if not 0 <= level <= 3:
        raise ShapeError(f"priority {level} is out of range; expected 0 to 3")
    _call("llvm.amdgcn.s.setprio", i16(level).ir)


def s_nop(states: int = 1) -> None:
    """Wait states, 1 to 16, and 4 bytes of code: all of a kernel that follows lies so much further on.

    Raises:
        ShapeError: out of range.
    """
    if not 1 <= states <= 16:
        raise ShapeError(f"{states} wait states are out of range; expected 1 to 16")
    _call("llvm.amdgcn.s.nop", i16(states - 1).ir)


def settle_products() -> None:
    """The wait states that the vector unit needs behind a matrix instruction of 16 passes (gfx950: 20), all of them.

    For places where vector instructions may follow closely: LLVM 22 looks back 19, and adds nothing where there are
    exactly 19 (llvm/llvm-project#222040). With fewer it would fill up to 20.
    """
    for states in (16, 4):
        s_nop(states)
    sched_barrier()


def unlikely(condition: Value) -> Value:
    """The same i1, which LLVM takes for nearly always false: what a branch on it leads to is out of the way."""
    expected = _call("llvm.expect", condition.ir, i1(0).ir, result=i1.mlir)
    assert expected is not None
    return Value(expected, i1)


def sched_barrier(may_cross: Group = Group.NONE) -> None:
    """A line in the schedule that only instructions of the given classes may cross."""
    _call("llvm.amdgcn.sched.barrier", i32(int(may_cross)).ir)


def sched_group_barrier(group: Group, size: int, pipeline: int = 0) -> None:
    """Next in this region's schedule: `size` instructions of a class. Hints of one `pipeline` form a sequence."""
    _call("llvm.amdgcn.sched.group.barrier", i32(int(group)).ir, i32(size).ir, i32(pipeline).ir)


def sched_groups(*groups: tuple[Group, int], repeat: int = 1, pipeline: int = 0) -> None:
    """The next part of this region's schedule: a row of (class, number of instructions), `repeat` times.

    `sched_groups((Group.MFMA, 1), (Group.TRANS, 2), (Group.VALU, 1), repeat=8)` puts two transcendentals and another
    vector instruction behind each of eight MFMA. Rows of one `pipeline` follow each other.

    Raises:
        ShapeError: a number is not positive.
    """
    for group, size in groups:
        if size <= 0 or repeat <= 0:
            raise ShapeError(f"sched_groups: {size} of {group.name}, {repeat} times; expected positive numbers")
    for _ in range(repeat):
        for group, size in groups:
            sched_group_barrier(group, size, pipeline)
