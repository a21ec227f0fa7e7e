"""`lower-to-nvvm`: the `fly` dialect as NVPTX intrinsics, and the `hopper` dialect as inline PTX.

Instruction behaviour: PTX ISA; intrinsics: LLVM's NVPTX usage guide.
"""

from __future__ import annotations

from mlir import ir

from fly.backends.lowering import (
    Builder,
    Lower,
    addition,
    address_of,
    displaced,
    each_element,
    load_acquire,
    per_element,
    where_within,
    within,
    words,
)
from fly.backends.nvvm import lower_hopper
from fly.backends.nvvm.inline import assembly
from fly.backends.target import Target
from fly.passes.walk import integer, string

_IDS = {"thread_id": "tid", "block_id": "ctaid", "grid_dim": "nctaid"}


def _id(op: ir.Operation, b: Builder) -> ir.Value:
    kind, axis, *anew = string(op, "name").split(".")
    if anew:
        register = "laneid" if kind == "lane_id" else f"{_IDS[kind]}.{axis}"
        text = {
            "asm_string": ir.StringAttr.get(f"mov.u32 $0, %{register};"),
            "constraints": ir.StringAttr.get("=r"),
            "has_side_effects": ir.UnitAttr.get(),
        }
        return b.value("llvm.inline_asm", [], op.results[0].type, text)
    return b.intrinsic(f"llvm.nvvm.read.ptx.sreg.{_IDS[kind]}.{axis}", [], op.results[0].type)


def _barrier(op: ir.Operation, b: Builder) -> None:
    b.intrinsic("llvm.nvvm.barrier.cta.sync.aligned.all", [b.constant(0)], None)


def _shuffle(op: ir.Operation, b: Builder) -> ir.Value:
    value, lane = op.operands
    i32 = ir.IntegerType.get_signless(32)
    mode = {"xor": "bfly", "idx": "idx"}[string(op, "mode")]
    operands = [b.constant(-1), b.bitcast(value, i32), lane, b.constant(31)]
    return b.bitcast(b.intrinsic(f"llvm.nvvm.shfl.sync.{mode}.i32", operands, i32), value.type)


def _pair(op: ir.Operation, b: Builder) -> tuple[ir.Value, ir.Value]:
    value = op.operands[0]
    i32 = ir.IntegerType.get_signless(32)
    operands = [b.constant(-1), b.bitcast(value, i32), b.constant(integer(op, "mask")), b.constant(31)]
    return value, b.bitcast(b.intrinsic("llvm.nvvm.shfl.sync.bfly.i32", operands, i32), value.type)


def _any_lane(op: ir.Operation, b: Builder) -> ir.Value:
    return b.intrinsic("llvm.nvvm.vote.any.sync", [b.constant(-1), op.operands[0]], op.results[0].type)


def _struct(element: str, count: int) -> ir.Type:
    return ir.Type.parse(f"!llvm.struct<({', '.join([element] * count)})>")


def _fields(b: Builder, struct: ir.Value, element: ir.Type, count: int) -> list[ir.Value]:
    return [
        b.value("llvm.extractvalue", [struct], element, {"position": ir.DenseI64ArrayAttr.get([i])})
        for i in range(count)
    ]


def _mma(op: ir.Operation, b: Builder) -> ir.Value:
    atom = b.target.atom(string(op, "atom"))
    a, b_, accumulator = op.operands
    operands = [
        *b.registers(a, atom.register),
        *b.registers(b_, atom.register),
        *b.elements(accumulator),
    ]
    type_ = ir.VectorType(accumulator.type)
    count = type_.shape[0]
    result = b.intrinsic(atom.intrinsic, operands, _struct("f32", count))
    return b.vector(_fields(b, result, type_.element_type, count), type_)


def _load_matrix(op: ir.Operation, b: Builder) -> ir.Value:
    load = b.target.matrix_load(string(op, "atom"))
    i32 = ir.IntegerType.get_signless(32)
    count = load.values // 2
    result = b.intrinsic(load.intrinsic + ".p3", [op.operands[0]], _struct("i32", count))
    words = b.vector(_fields(b, result, i32, count), ir.VectorType.get([count], i32))
    return b.bitcast(words, op.results[0].type)


def _access(align: int) -> dict[str, ir.Attribute]:
    i64 = ir.IntegerType.get_signless(64)
    return {"alignment": ir.IntegerAttr.get(i64, align), "ordering": ir.IntegerAttr.get(i64, 0)}


def _load_bounded(op: ir.Operation, b: Builder) -> ir.Value:
    base, offset, bound = op.operands
    result = op.results[0].type
    branch = b("scf.if", [within(b, offset, bound)], [result], regions=2)
    inside, outside = (region.blocks.append() for region in branch.regions)
    with ir.InsertionPoint(inside):
        end = ir.Operation.create("scf.yield", operands=[base], loc=op.location)
    loader = Builder(end, b.target)
    loaded = loader.value("llvm.load", [address_of(loader, base, offset)], result, _access(integer(op, "align")))
    loader("scf.yield", [loaded], [])
    end.erase()
    with ir.InsertionPoint(outside):
        zero = ir.Operation.create("llvm.mlir.zero", results=[result], loc=op.location).results[0]
        ir.Operation.create("scf.yield", operands=[zero], loc=op.location)
    return branch.results[0]


def _store_bounded(op: ir.Operation, b: Builder) -> None:
    value, base, offset, bound = op.operands

    def store(inside: Builder) -> None:
        inside("llvm.store", [value, address_of(inside, base, offset)], [], _access(integer(op, "align")))

    where_within(op, b, offset, bound, store)


_SCOPE = "device"  # LLVM's name for all threads of the GPU


def _add(b: Builder, address: ir.Value, value: ir.Value, align: int, order: str) -> None:
    """RED, which gives nothing back, of up to 16 bytes at once on Hopper.

    Assembly: LLVM's NVPTX makes relaxed ATOM of any order, and loops of pairs.
    """
    element = ir.VectorType(value.type).element_type if isinstance(value.type, ir.VectorType) else value.type
    type_ = {"i32": "u32", "f32": "f32", "f16": "noftz.f16x2", "bf16": "noftz.bf16x2"}[str(element)]
    left, at = words(b, value), 0
    if type_ == "noftz.bf16x2" and not b.target.hopper:
        for i, word in enumerate(left):  # no instruction: LLVM makes a loop that compares and swaps
            addition(b, displaced(b, address, b.constant(4 * i, 64)), word, _SCOPE)
        return
    most = align // 4 if b.target.hopper else 1
    ftz, _, number = type_.rpartition(".")
    register = ("r" if number != "f32" else "f", "i32" if number != "f32" else "f32")
    while at < len(left):
        count = next(n for n in (4, 2, 1) if n <= most and at + n <= len(left))
        kinds = [part for part in ("red", order, "gpu.global.add", ftz, f"v{count}" * (count > 1), number) if part]
        places = ", ".join(f"${i + 1}" for i in range(count))
        text = f"{'.'.join(kinds)} [$0], {places if count == 1 else '{' + places + '}'};"
        operands = [b.bitcast(word, ir.Type.parse(register[1])) for word in left[at : at + count]]
        place = displaced(b, address, b.constant(4 * at, 64)) if at else address
        assembly(b, text, ",".join(["l", *[register[0]] * count]), [place, *operands])
        at += count


def _atomic_add(op: ir.Operation, b: Builder) -> None:
    value, address = op.operands
    _add(b, address, value, integer(op, "align"), string(op, "order"))


def _atomic_add_bounded(op: ir.Operation, b: Builder) -> None:
    value, base, offset, bound = op.operands

    def add(inside: Builder) -> None:
        _add(inside, address_of(inside, base, offset), value, integer(op, "align"), "relaxed")

    where_within(op, b, offset, bound, add)


def _atomic_fetch(op: ir.Operation, b: Builder) -> ir.Value:
    text = f"atom.{string(op, 'order')}.gpu.global.{string(op, 'operation')}.u32 $0, [$1], $2;"
    (before,) = assembly(b, text, "=r,l,r", list(op.operands), [op.results[0].type])
    return before


def _load_acquire(op: ir.Operation, b: Builder) -> ir.Value:
    return load_acquire(b, op, _SCOPE)


def _publish(op: ir.Operation, b: Builder) -> None:
    """A release also hands on what a barrier of the block made known: causality order, PTX ISA."""


def _copy_async(op: ir.Operation, b: Builder) -> None:
    destination, source, inside = op.operands
    size = integer(op, "bytes")
    # bytes not read from the source are filled with zeros
    given = b.value("llvm.select", [inside, b.constant(size), b.constant(0)], ir.IntegerType.get_signless(32))
    # 16-byte copies go around the first-level cache, which has no use for data that is read from shared memory
    kind = "cg" if size == 16 else "ca"
    b.intrinsic(
        f"llvm.nvvm.cp.async.{kind}.shared.global.{size}.s",
        [destination, source, given],
        None,
    )


def _commit(op: ir.Operation, b: Builder) -> None:
    b.intrinsic("llvm.nvvm.cp.async.commit.group", [], None)


def _wait_count(op: ir.Operation, b: Builder) -> None:
    b.intrinsic("llvm.nvvm.cp.async.wait.group", [b.constant(integer(op, "newer"))], None)


def _narrow(op: ir.Operation, b: Builder) -> ir.Value:
    return b.value("llvm.fptrunc", [op.operands[0]], op.results[0].type)


_PAIRS = {"f8e4m3": "e4m3x2", "f8e5m2": "e5m2x2"}


def _narrow_pairs(op: ir.Operation, b: Builder) -> ir.Value:
    values, i16 = b.elements(op.operands[0]), ir.IntegerType.get_signless(16)
    name = f"llvm.nvvm.ff.to.{_PAIRS[string(op, 'to')]}.rn"
    # the first operand becomes the upper byte
    pairs = [b.intrinsic(name, [high, low], i16) for low, high in zip(values[::2], values[1::2], strict=True)]
    return b.bitcast(b.vector(pairs, ir.VectorType.get([len(pairs)], i16)), op.results[0].type)


def _widen_pairs(op: ir.Operation, b: Builder) -> ir.Value:
    i16, half = ir.IntegerType.get_signless(16), ir.F16Type.get()
    result = ir.VectorType(op.results[0].type)
    name, two = f"llvm.nvvm.{_PAIRS[string(op, 'from')]}.to.f16x2.rn", ir.VectorType.get([2], half)
    pairs = [b.intrinsic(name, [pair], two) for pair in b.registers(op.operands[0], str(i16))]
    halves = [element for pair in pairs for element in b.elements(pair)]
    return b.value("llvm.fpext", [b.vector(halves, ir.VectorType.get([len(halves)], half))], result)


def _bitcast(op: ir.Operation, b: Builder) -> ir.Value | ir.Operation:
    """f64 as words by an instruction of its own.

    Without it LLVM stores the low word as `st.b32` of the 64-bit register, which ptxas (13.0) takes for a number that
    is to be converted to an integer.
    """
    source, i32 = ir.VectorType(op.operands[0].type), ir.IntegerType.get_signless(32)
    result = ir.VectorType(op.results[0].type)
    if not isinstance(source.element_type, ir.F64Type) or result.element_type != i32:
        return op
    halves = ("llvm.nvvm.d2i.lo", "llvm.nvvm.d2i.hi")
    words = [b.intrinsic(name, [number], i32) for number in b.elements(op.operands[0]) for name in halves]
    return b.vector(words, result)


def _sched(op: ir.Operation, b: Builder) -> None:
    """NVIDIA's assembler schedules by itself: there is nothing to say to it."""


def _tanh(b: Builder, x: ir.Value) -> ir.Value:
    """The hardware's instruction: MLIR's translation knows no intrinsic for it."""
    text = {"asm_string": ir.StringAttr.get("tanh.approx.f32 $0, $1;"), "constraints": ir.StringAttr.get("=f,f")}
    return b.value("llvm.inline_asm", [x], x.type, text)


_RULES = {
    "fly.id": _id,
    "fly.reread": lambda op, b: op.operands[0],
    "fly.barrier": _barrier,
    "fly.shuffle": _shuffle,
    "fly.pair": _pair,
    "fly.any_lane": _any_lane,
    "fly.mma": _mma,
    "fly.load_matrix": _load_matrix,
    "fly.load_bounded": _load_bounded,
    "fly.store_bounded": _store_bounded,
    "fly.atomic_add": _atomic_add,
    "fly.atomic_add_bounded": _atomic_add_bounded,
    "fly.atomic_fetch": _atomic_fetch,
    "fly.load_acquire": _load_acquire,
    "fly.publish": _publish,
    "fly.copy_async": _copy_async,
    "fly.commit": _commit,
    "fly.wait_count": _wait_count,
    "fly.narrow": _narrow,
    "fly.narrow_pairs": _narrow_pairs,
    "fly.widen_pairs": _widen_pairs,
    "fly.sched": _sched,
    "vector.bitcast": _bitcast,
    "fly.rcp": per_element("llvm.nvvm.rcp.approx.ftz.f"),
    "math.exp2": per_element("llvm.nvvm.ex2.approx.ftz.f"),
    "math.log2": per_element("llvm.nvvm.lg2.approx.ftz.f"),
    "math.rsqrt": per_element("llvm.nvvm.rsqrt.approx.f"),
    "math.tanh": each_element(_tanh),
    **lower_hopper.RULES,
}


def lower(target: Target) -> Lower:
    """The lowering pass for a target."""
    return Lower("lower-to-nvvm", target, _RULES)
