"""`lower-to-rocdl`: the `fly` dialect as AMDGPU intrinsics.

Instruction behaviour: CDNA3 and CDNA4 ISA manuals; intrinsics: LLVM's AMDGPU usage guide.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.backends.lowering import (
    Builder,
    Lower,
    addition,
    address_of,
    bits,
    displaced,
    fetch,
    load_acquire,
    per_element,
    where_within,
    words,
)
from fly.backends.target import Target
from fly.passes.walk import integer, string

# Buffer descriptor word 3: data format 32 bits, numeric format float; no swizzle, range checked by bytes.
_DESCRIPTOR_FLAGS = 0x00027000

_IDS = {"thread_id": "llvm.amdgcn.workitem.id.", "block_id": "llvm.amdgcn.workgroup.id."}


def _id(op: ir.Operation, b: Builder) -> ir.Value:
    kind, axis, *anew = string(op, "name").split(".")
    i32 = op.results[0].type
    if kind in _IDS:
        found = b.intrinsic(_IDS[kind] + axis, [], i32)
        return _opaque(b, found) if anew and kind == "block_id" else found
    if kind == "lane_id":
        return _own_lane(b, _opaque(b, b.constant(-1)) if anew else b.constant(-1))
    # grid_dim: the dispatch packet holds the grid in threads (HSA specification, offsets 12, 16, 20)
    packet = b.intrinsic("llvm.amdgcn.dispatch.ptr", [], ir.Type.parse("!llvm.ptr<4>"))
    offset = b.constant(12 + 4 * "xyz".index(axis))
    address = b.value(
        "llvm.getelementptr",
        [packet, offset],
        packet.type,
        {
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([-(2**31)]),
            "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(8)),
        },
    )
    i64 = ir.IntegerType.get_signless(64)
    threads = b.value(
        "llvm.load",
        [address],
        i32,
        {"alignment": ir.IntegerAttr.get(i64, 4), "ordering": ir.IntegerAttr.get(i64, 0)},
    )
    block = ir.DenseI32ArrayAttr(_function(op).attributes["fly.block"])["xyz".index(axis)]
    return b.value("llvm.udiv", [threads, b.constant(block)], i32)


def _opaque(b: Builder, value: ir.Value) -> ir.Value:
    """A value, as the compiler cannot know it to be the same every time: floats in vector registers, others, which
    all lanes of a wave share, in scalar ones.
    """
    element = ir.VectorType(value.type).element_type if isinstance(value.type, ir.VectorType) else value.type
    text = {
        "asm_string": ir.StringAttr.get(""),
        "constraints": ir.StringAttr.get("=v,0" if isinstance(element, ir.FloatType) else "=s,0"),
        "has_side_effects": ir.UnitAttr.get(),
    }
    return b.value("llvm.inline_asm", [value], value.type, text)


def _reread(op: ir.Operation, b: Builder) -> ir.Value:
    """A parameter, loaded from where the launch put it; a computed number, from where it is."""
    given = op.operands[0]
    if not isinstance(given.owner, ir.Block) or given.owner.owner != _function(op):
        return _opaque(b, given)
    parameter = ir.BlockArgument(given)
    sizes = [_bytes(argument.type) for argument in list(parameter.owner.arguments)[: parameter.arg_number + 1]]
    at = 0
    for size in sizes:
        start = at + -at % size
        at = start + size
    address = ir.Type.parse("!llvm.ptr<4>")
    segment = _opaque(b, b.intrinsic("llvm.amdgcn.kernarg.segment.ptr", [], address))
    i64 = ir.IntegerType.get_signless(64)
    alignment = {"alignment": ir.IntegerAttr.get(i64, sizes[-1]), "ordering": ir.IntegerAttr.get(i64, 0)}
    return b.value("llvm.load", [displaced(b, segment, b.constant(start))], op.results[0].type, alignment)


def _bytes(type_: ir.Type) -> int:
    """Of a parameter."""
    if str(type_).startswith("!llvm.ptr"):
        return 8
    width: int = ir.IntegerType(type_).width if isinstance(type_, ir.IntegerType) else ir.FloatType(type_).width
    return width // 8


def _function(op: ir.Operation) -> ir.Operation:
    while op.name != "func.func":
        op = op.parent.operation
    return op


def _barrier(op: ir.Operation, b: Builder) -> None:
    # only shared memory is ordered: global loads stay in flight across the barrier
    local = ir.Attribute.parse('#llvm.mmra_tag<"amdgpu-synchronize-as":"local">')
    for ordering in (5, 4):  # release before, acquire after
        fence = {
            "ordering": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), ordering),
            "syncscope": ir.StringAttr.get("workgroup"),
            "llvm.mmra": local,
        }
        b("llvm.fence", [], [], fence)
        if ordering == 5:
            b.intrinsic("llvm.amdgcn.s.barrier", [], None)


def _shuffle(op: ir.Operation, b: Builder) -> ir.Value:
    value, lane = op.operands
    static = _constant(lane)
    if string(op, "mode") == "xor":
        assert static is not None
        return _xor(b, value, static)
    i32 = ir.IntegerType.get_signless(32)
    word = b.bitcast(value, i32)
    if static == 0:
        return b.bitcast(b.intrinsic("llvm.amdgcn.readfirstlane.i32", [word], i32), value.type)
    address = b.value("llvm.shl", [lane, b.constant(2)], i32)
    return b.bitcast(b.intrinsic("llvm.amdgcn.ds.bpermute", [address, word], i32), value.type)


def _own_lane(b: Builder, every: ir.Value) -> ir.Value:
    """The lane's index: how many there are before it of `every` lane, all bits of a number."""
    i32 = ir.IntegerType.get_signless(32)
    low = b.intrinsic("llvm.amdgcn.mbcnt.lo", [every, b.constant(0)], i32)
    return b.intrinsic("llvm.amdgcn.mbcnt.hi", [every, low], i32)


def _xor(b: Builder, value: ir.Value, mask: int) -> ir.Value:
    """The value of the lane whose index differs in the bits of `mask`."""
    i32 = ir.IntegerType.get_signless(32)
    word = b.bitcast(value, i32)
    if mask < 32:  # swizzle within 32 lanes: and 0x1f, or 0, xor mask
        pattern = b.constant(mask << 10 | 0x1F)
        return b.bitcast(b.intrinsic("llvm.amdgcn.ds.swizzle", [word, pattern], i32), value.type)
    own = b.value("llvm.xor", [_own_lane(b, b.constant(-1)), b.constant(mask)], i32)
    address = b.value("llvm.shl", [own, b.constant(2)], i32)
    return b.bitcast(b.intrinsic("llvm.amdgcn.ds.bpermute", [address, word], i32), value.type)


# gfx950 swaps halves (or odd and even rows) of two registers; of one with itself, that is a lane and its partner
_SWAPS = {32: "llvm.amdgcn.permlane32.swap", 16: "llvm.amdgcn.permlane16.swap"}


def _pair(op: ir.Operation, b: Builder) -> tuple[ir.Value, ir.Value]:
    value, mask = op.operands[0], integer(op, "mask")
    if mask not in b.target.lane_swaps:
        return value, _xor(b, value, mask)
    word = b.bitcast(value, ir.IntegerType.get_signless(32))
    return _swapped(b, word, word, mask, value.type)


def _swap(op: ir.Operation, b: Builder) -> tuple[ir.Value, ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    first, second = (b.bitcast(value, i32) for value in op.operands)
    return _swapped(b, first, second, integer(op, "mask"), op.results[0].type)


def _swapped(b: Builder, first: ir.Value, second: ir.Value, mask: int, type_: ir.Type) -> tuple[ir.Value, ir.Value]:
    """Two words after the second half (or odd rows) of the first has changed places with the second's first half."""
    i32, no = ir.IntegerType.get_signless(32), b.constant(0, 1)
    both = b.intrinsic(_SWAPS[mask], [first, second, no, no], ir.Type.parse("!llvm.struct<(i32, i32)>"))
    halves = [b.value("llvm.extractvalue", [both], i32, {"position": ir.DenseI64ArrayAttr.get([i])}) for i in (0, 1)]
    return b.bitcast(halves[0], type_), b.bitcast(halves[1], type_)


def _any_lane(op: ir.Operation, b: Builder) -> ir.Value:
    i1, i64 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(64)
    lanes = b.intrinsic("llvm.amdgcn.ballot.i64", [op.operands[0]], i64)
    not_equal = ir.IntegerAttr.get(i64, 1)
    return b.value("llvm.icmp", [lanes, b.constant(0, 64)], i1, {"predicate": not_equal})


def _constant(value: ir.Value) -> int | None:
    owner = value.owner
    if not hasattr(owner, "operation") or owner.operation.name != "arith.constant":
        return None
    number: int = ir.IntegerAttr(owner.operation.attributes["value"]).value
    return number


def _mma(op: ir.Operation, b: Builder) -> ir.Value:
    atom = b.target.atom(string(op, "atom"))
    a, b_, accumulator = op.operands
    # cbsz, abid, blgp: no broadcast; or cbsz, blgp: e4m3, and for each operand which byte of which scales
    controls = [b.constant(0)] * (6 if ".scale." in atom.intrinsic else 3)
    for part_a, part_b in zip(b.slices(a, atom.issues), b.slices(b_, atom.issues), strict=True):
        (register_a,) = b.registers(part_a, atom.register)
        (register_b,) = b.registers(part_b, atom.register)
        accumulator = b.intrinsic(atom.intrinsic, [register_a, register_b, accumulator, *controls], accumulator.type)
    return accumulator


def _load_matrix(op: ir.Operation, b: Builder) -> ir.Value:
    load = b.target.matrix_load(string(op, "atom"))
    result = ir.VectorType(op.results[0].type)
    if load.bits == 8:  # the intrinsic gives words
        words = ir.VectorType.get([bits(result) // 32], ir.IntegerType.get_signless(32))
        return b.bitcast(b.intrinsic(f"{load.intrinsic}.v{words.shape[0]}i32", [op.operands[0]], words), result)
    suffix = f".v{result.shape[0]}{result.element_type}"
    return b.intrinsic(load.intrinsic + suffix, [op.operands[0]], result)


def _descriptor(b: Builder, base: ir.Value, bound: ir.Value) -> ir.Value:
    i16, i64 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(64)
    records = b.value("llvm.zext", [bound], i64)
    stride = b.value("llvm.mlir.constant", [], i16, {"value": ir.IntegerAttr.get(i16, 0)})
    return b.intrinsic(
        "llvm.amdgcn.make.buffer.rsrc.p8.p1",
        [base, stride, records, b.constant(_DESCRIPTOR_FLAGS)],
        ir.Type.parse("!llvm.ptr<8>"),
    )


@dataclass(frozen=True)
class _Pieces:
    """How buffer instructions access a value: as words of a type, `counts` of them in each instruction."""

    word: ir.Type
    counts: tuple[int, ...]

    @classmethod
    def of(cls, type_: ir.Type, align: int) -> _Pieces:
        size = bits(type_) // 8
        word = min(4, align, size & -size)
        words, most = size // word, 4 if word == 4 else 1
        counts = [most] * (words // most) + [words % most] * (words % most > 0)
        return cls(ir.IntegerType.get_signless(8 * word), tuple(counts))

    def type(self, count: int) -> ir.Type:
        return self.word if count == 1 else ir.VectorType.get([count], self.word)

    def suffix(self, count: int) -> str:
        return str(self.word) if count == 1 else f"v{count}{self.word}"

    def offsets(self, b: Builder, first: ir.Value) -> list[ir.Value]:
        at, result = 0, []
        for count in self.counts:
            result.append(b.value("llvm.add", [first, b.constant(at)], first.type) if at else first)
            at += count * self.word.width // 8
        return result


def _load_bounded(op: ir.Operation, b: Builder) -> ir.Value:
    base, offset, bound = op.operands
    result = op.results[0].type
    pieces = _Pieces.of(result, integer(op, "align"))
    descriptor = _descriptor(b, base, bound)
    zero = b.constant(0)
    parts = [
        b.intrinsic(
            f"llvm.amdgcn.raw.ptr.buffer.load.{pieces.suffix(count)}",
            [descriptor, at, zero, zero],
            pieces.type(count),
        )
        for count, at in zip(pieces.counts, pieces.offsets(b, offset), strict=True)
    ]
    if len(parts) == 1:
        return b.bitcast(parts[0], result)
    words = [word for part in parts for word in b.registers(part, str(pieces.word))]
    return b.bitcast(b.vector(words, ir.VectorType.get([len(words)], pieces.word)), result)


def _store_bounded(op: ir.Operation, b: Builder) -> None:
    value, base, offset, bound = op.operands
    pieces = _Pieces.of(value.type, integer(op, "align"))
    descriptor = _descriptor(b, base, bound)
    zero = b.constant(0)
    words = [value] if len(pieces.counts) == 1 else b.registers(value, str(pieces.word))
    for count, at in zip(pieces.counts, pieces.offsets(b, offset), strict=True):
        part, words = words[:count], words[count:]
        whole = b.bitcast(part[0], pieces.type(count)) if len(part) == 1 else b.vector(part, pieces.type(count))
        b.intrinsic(
            f"llvm.amdgcn.raw.ptr.buffer.store.{pieces.suffix(count)}", [whole, descriptor, at, zero, zero], None
        )


_SCOPE = "agent"  # LLVM's name for all waves of the device


def _global_adds(b: Builder, address: ir.Value, value: ir.Value, order: str) -> None:
    """GLOBAL_ATOMIC_ADD, _ADD_F32, _PK_ADD_F16 and _PK_ADD_BF16."""
    _function(b.op).attributes["fly.float_atomics"] = ir.UnitAttr.get()
    for i, word in enumerate(words(b, value)):
        addition(b, displaced(b, address, b.constant(4 * i, 64)) if i else address, word, _SCOPE, order)


def _atomic_add(op: ir.Operation, b: Builder) -> None:
    value, address = op.operands
    _global_adds(b, address, value, string(op, "order"))


def _atomic_add_bounded(op: ir.Operation, b: Builder) -> None:
    """BUFFER_ATOMIC, whose descriptor does the check; of i32, and on gfx942 of pairs of bf16, a branch does."""
    value, base, offset, bound = op.operands
    type_ = str(ir.VectorType(value.type).element_type if isinstance(value.type, ir.VectorType) else value.type)
    if type_ == "i32" or (type_ == "bf16" and b.target.arch == "gfx942"):
        where_within(
            op,
            b,
            offset,
            bound,
            lambda inside: _global_adds(inside, address_of(inside, base, offset), value, "relaxed"),
        )
        return
    descriptor, zero = _descriptor(b, base, bound), b.constant(0)
    for i, word in enumerate(words(b, value)):
        at = b.value("llvm.add", [offset, b.constant(4 * i)], offset.type) if i else offset
        name = f"llvm.amdgcn.raw.ptr.buffer.atomic.fadd.{type_ if type_ == 'f32' else f'v2{type_}'}"
        b.intrinsic(name, [word, descriptor, at, zero, zero], word.type)


def _atomic_fetch(op: ir.Operation, b: Builder) -> ir.Value:
    address, operand = op.operands
    return fetch(b, string(op, "operation"), address, operand, _SCOPE, string(op, "order"))


def _load_acquire(op: ir.Operation, b: Builder) -> ir.Value:
    return load_acquire(b, op, _SCOPE)


def _publish(op: ir.Operation, b: Builder) -> None:
    # a release waits for the stores of its own wave alone: each wave's must have arrived before the barrier
    release = {
        "ordering": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 5),
        "syncscope": ir.StringAttr.get(_SCOPE),
    }
    b("llvm.fence", [], [], release)


def _copy_direct(op: ir.Operation, b: Builder) -> None:
    destination, base, offset, bound = op.operands
    zero = b.constant(0)
    # words of the descriptor, not a pointer to it: the address then stays where a loop advances it
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    address = b.bitcast(b.value("llvm.ptrtoint", [base], i64), ir.VectorType.get([2], i32))
    words = [*b.elements(address), bound, b.constant(_DESCRIPTOR_FLAGS)]
    operands = [
        b.vector(words, ir.VectorType.get([4], i32)),
        destination,
        b.constant(integer(op, "bytes")),
        offset,
        zero,
        b.constant(integer(op, "shift")),
        zero,
    ]
    b.intrinsic("llvm.amdgcn.raw.buffer.load.lds", operands, None)


def _wait_count(op: ir.Operation, b: Builder) -> None:
    # gfx9 encoding (ISA manual, S_WAITCNT): vmcnt in bits 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8; all ones: no wait
    newer = min(integer(op, "newer"), 63)
    b.intrinsic("llvm.amdgcn.s.waitcnt", [b.constant(newer & 15 | 7 << 4 | 15 << 8 | (newer >> 4) << 14)], None)


def _narrow(op: ir.Operation, b: Builder) -> ir.Value:
    value, result = op.operands[0], ir.VectorType(op.results[0].type)
    # pairs are packed; an odd one out would gain nothing
    if b.target.arch != "gfx942" or str(result.element_type) != "bf16" or result.shape[0] % 2:
        return b.value("llvm.fptrunc", [value], result)
    # no conversion instruction: add half a unit to the upper 16 bits, then pack the upper halves of pairs
    i32 = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get(result.shape, i32)
    half = b.value(
        "llvm.mlir.constant",
        [],
        words,
        {"value": ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(i32, 0x8000))},
    )
    rounded = b.elements(b.value("llvm.add", [b.bitcast(value, words), half], words))
    packed = [
        b.intrinsic("llvm.amdgcn.perm", [high, low, b.constant(0x07060302)], i32)
        for low, high in zip(rounded[::2], rounded[1::2], strict=True)
    ]
    return b.bitcast(b.vector(packed, ir.VectorType.get([len(packed)], i32)), result)


# "fp8" of instructions is f8e4m3 on gfx950, and f8e4m3fnuz on gfx942; see `Target.float8_to_f32`
_BYTE_FLOATS = {"f8e4m3": "fp8", "f8e5m2": "bf8", "f8e4m3fnuz": "fp8"}


def _narrow_pairs(op: ir.Operation, b: Builder) -> ir.Value:
    """V_CVT_PK_FP8_F32, which writes half a register: to nearest even, and NaN of what is too large."""
    i32, values = ir.IntegerType.get_signless(32), b.elements(op.operands[0])
    name = f"llvm.amdgcn.cvt.pk.{_BYTE_FLOATS[string(op, 'to')]}.f32"
    words = []
    for i in range(0, len(values), 4):
        word = b.value("llvm.mlir.poison", [], i32)
        for half, first in enumerate(range(i, min(i + 4, len(values)), 2)):
            word = b.intrinsic(name, [*values[first : first + 2], word, b.constant(half, 1)], i32)
        words.append(word)
    result = ir.VectorType(op.results[0].type)
    packed = b.vector(words, ir.VectorType.get([len(words)], i32))
    if len(values) % 4 == 0:
        return b.bitcast(packed, result)
    every = b.bitcast(packed, ir.VectorType.get([4 * len(words)], result.element_type))
    return b.vector(b.elements(every)[: len(values)], result)


def _widen_pairs(op: ir.Operation, b: Builder) -> ir.Value:
    """V_CVT_PK_F32_FP8 and its like, which read half a register."""
    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    result = ir.VectorType(op.results[0].type)
    name, two = (
        f"llvm.amdgcn.cvt.pk.f32.{_BYTE_FLOATS[string(op, 'from')]}",
        ir.VectorType.get([2], result.element_type),
    )
    if result.shape[0] % 4 == 0:
        halves = [(word, half) for word in b.registers(op.operands[0], str(i32)) for half in (0, 1)]
    else:
        halves = [(b.value("llvm.zext", [pair], i32), 0) for pair in b.registers(op.operands[0], str(i16))]
    pairs = [b.intrinsic(name, [word, b.constant(half, 1)], two) for word, half in halves]
    return b.vector([element for pair in pairs for element in b.elements(pair)], result)


def _sched(op: ir.Operation, b: Builder) -> None:
    if string(op, "kind") == "barrier":
        b.intrinsic("llvm.amdgcn.sched.barrier", [b.constant(integer(op, "value"))], None)
    else:
        i16 = ir.IntegerType.get_signless(16)
        level = b.value("llvm.mlir.constant", [], i16, {"value": ir.IntegerAttr.get(i16, integer(op, "value"))})
        b.intrinsic("llvm.amdgcn.s.setprio", [level], None)


_RULES = {
    "fly.id": _id,
    "fly.reread": _reread,
    "fly.barrier": _barrier,
    "fly.shuffle": _shuffle,
    "fly.pair": _pair,
    "fly.swap": _swap,
    "fly.any_lane": _any_lane,
    "fly.copy_direct": _copy_direct,
    "fly.wait_count": _wait_count,
    "fly.mma": _mma,
    "fly.load_matrix": _load_matrix,
    "fly.load_bounded": _load_bounded,
    "fly.store_bounded": _store_bounded,
    "fly.atomic_add": _atomic_add,
    "fly.atomic_add_bounded": _atomic_add_bounded,
    "fly.atomic_fetch": _atomic_fetch,
    "fly.load_acquire": _load_acquire,
    "fly.publish": _publish,
    "fly.narrow": _narrow,
    "fly.sched": _sched,
    "fly.narrow_pairs": _narrow_pairs,
    "fly.widen_pairs": _widen_pairs,
    "fly.rcp": per_element("llvm.amdgcn.rcp.f32"),
    "math.rsqrt": per_element("llvm.amdgcn.rsq.f32"),
    "math.exp2": per_element("llvm.amdgcn.exp2.f32"),
    "math.log2": per_element("llvm.amdgcn.log.f32"),
}


def lower(target: Target) -> Lower:
    """The lowering pass for a target."""
    return Lower("lower-to-rocdl", target, _RULES)
