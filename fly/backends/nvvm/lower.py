"""`lower-to-nvvm`: the `fly` dialect as NVPTX intrinsics, and the `hopper` dialect as inline PTX.

Instruction behaviour: PTX ISA; intrinsics: LLVM's NVPTX usage guide.
"""

from __future__ import annotations

from mlir import ir

from fly.backends.lowering import Builder, Lower, each_element, per_element
from fly.backends.nvvm import lower_hopper
from fly.backends.target import Target
from fly.passes.walk import integer, string

_IDS = {"thread_id": "tid", "block_id": "ctaid", "grid_dim": "nctaid"}
_ULT = 6  # unsigned less than, in LLVM's comparison numbering


def _id(op: ir.Operation, b: Builder) -> ir.Value:
    kind, axis = string(op, "name").split(".")
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


def _within(b: Builder, offset: ir.Value, bound: ir.Value) -> ir.Value:
    i1 = ir.IntegerType.get_signless(1)
    predicate = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _ULT)
    return b.value("llvm.icmp", [offset, bound], i1, {"predicate": predicate})


def _address(b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
    # offsets are unsigned 32-bit bytes
    wide = b.value("llvm.zext", [offset], ir.IntegerType.get_signless(64))
    return b.value(
        "llvm.getelementptr",
        [base, wide],
        base.type,
        {
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([-(2**31)]),
            "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(8)),
        },
    )


def _access(align: int) -> dict[str, ir.Attribute]:
    i64 = ir.IntegerType.get_signless(64)
    return {"alignment": ir.IntegerAttr.get(i64, align), "ordering": ir.IntegerAttr.get(i64, 0)}


def _load_bounded(op: ir.Operation, b: Builder) -> ir.Value:
    base, offset, bound = op.operands
    result = op.results[0].type
    branch = b("scf.if", [_within(b, offset, bound)], [result], regions=2)
    inside, outside = (region.blocks.append() for region in branch.regions)
    with ir.InsertionPoint(inside):
        end = ir.Operation.create("scf.yield", operands=[base], loc=op.location)
    loader = Builder(end, b.target)
    loaded = loader.value("llvm.load", [_address(loader, base, offset)], result, _access(integer(op, "align")))
    loader("scf.yield", [loaded], [])
    end.erase()
    with ir.InsertionPoint(outside):
        zero = ir.Operation.create("llvm.mlir.zero", results=[result], loc=op.location).results[0]
        ir.Operation.create("scf.yield", operands=[zero], loc=op.location)
    return branch.results[0]


def _store_bounded(op: ir.Operation, b: Builder) -> None:
    value, base, offset, bound = op.operands
    branch = b("scf.if", [_within(b, offset, bound)], [], regions=2)
    inside = branch.regions[0].blocks.append()
    with ir.InsertionPoint(inside):
        end = ir.Operation.create("scf.yield", loc=op.location)
    storer = Builder(end, b.target)
    storer("llvm.store", [value, _address(storer, base, offset)], [], _access(integer(op, "align")))


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
    "fly.barrier": _barrier,
    "fly.shuffle": _shuffle,
    "fly.pair": _pair,
    "fly.any_lane": _any_lane,
    "fly.mma": _mma,
    "fly.load_matrix": _load_matrix,
    "fly.load_bounded": _load_bounded,
    "fly.store_bounded": _store_bounded,
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
