"""What both backends' lowerings share: the walk over `fly` operations and LLVM-dialect building blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import overload

from mlir import ir

from fly.backends.target import Target
from fly.errors import CompileError
from fly.passes.walk import build, kernel_function, operations


class Builder:
    """Builds operations before the one that is being lowered."""

    def __init__(self, op: ir.Operation, target: Target):
        self.op = op
        self.target = target

    def __call__(
        self,
        name: str,
        operands: list[ir.Value],
        results: list[ir.Type],
        attributes: dict[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> ir.Operation:
        return build(self.op, name, operands, results, attributes, regions)

    def value(
        self,
        name: str,
        operands: list[ir.Value],
        result: ir.Type,
        attributes: dict[str, ir.Attribute] | None = None,
    ) -> ir.Value:
        """An operation's single result."""
        return self(name, operands, [result], attributes).results[0]

    @overload
    def intrinsic(self, name: str, operands: list[ir.Value], result: None) -> None: ...

    @overload
    def intrinsic(self, name: str, operands: list[ir.Value], result: ir.Type) -> ir.Value: ...

    def intrinsic(self, name: str, operands: list[ir.Value], result: ir.Type | None) -> ir.Value | None:
        """Call an LLVM intrinsic by its full name."""
        attributes = {
            "intrin": ir.StringAttr.get(name),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(operands), 0]),
        }
        op = self("llvm.call_intrinsic", operands, [] if result is None else [result], attributes)
        return None if result is None else op.results[0]

    def constant(self, value: int, bits: int = 32) -> ir.Value:
        type_ = ir.IntegerType.get_signless(bits)
        return self.value("llvm.mlir.constant", [], type_, {"value": ir.IntegerAttr.get(type_, value)})

    def zero(self, type_: ir.Type) -> ir.Value:
        """All bits zero."""
        return self.value("llvm.mlir.zero", [], type_)

    def bitcast(self, value: ir.Value, type_: ir.Type) -> ir.Value:
        return value if value.type == type_ else self.value("llvm.bitcast", [value], type_)

    def slices(self, vector: ir.Value, parts: int) -> list[ir.Value]:
        """A vector cut into equal vectors."""
        if parts == 1:
            return [vector]
        type_ = ir.VectorType(vector.type)
        length = type_.shape[0] // parts
        result = ir.VectorType.get([length], type_.element_type)
        return [
            self.value(
                "llvm.shufflevector",
                [vector, vector],
                result,
                {"mask": ir.DenseI32ArrayAttr.get(list(range(i * length, (i + 1) * length)))},
            )
            for i in range(parts)
        ]

    def elements(self, vector: ir.Value) -> list[ir.Value]:
        """A vector's elements."""
        type_ = ir.VectorType(vector.type)
        return [
            self.value("llvm.extractelement", [vector, self.constant(i)], type_.element_type)
            for i in range(type_.shape[0])
        ]

    def vector(self, elements: list[ir.Value], type_: ir.Type) -> ir.Value:
        """A vector of elements."""
        result = self.value("llvm.mlir.poison", [], type_)
        for i, element in enumerate(elements):
            result = self.value("llvm.insertelement", [result, element, self.constant(i)], type_)
        return result

    def registers(self, vector: ir.Value, register: str) -> list[ir.Value]:
        """A vector's bits as a list of registers of the LLVM type `register`."""
        type_ = ir.Type.parse(register)
        count = bits(vector.type) // bits(type_)
        if count == 1:
            return [self.bitcast(vector, type_)]
        if isinstance(type_, ir.VectorType):
            return [self.bitcast(part, type_) for part in self.slices(vector, count)]
        return self.elements(self.bitcast(vector, ir.VectorType.get([count], type_)))


_ULT = 6  # unsigned less than, in LLVM's comparison numbering


def within(b: Builder, offset: ir.Value, bound: ir.Value) -> ir.Value:
    """Whether an unsigned offset is below a bound."""
    i1 = ir.IntegerType.get_signless(1)
    predicate = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _ULT)
    return b.value("llvm.icmp", [offset, bound], i1, {"predicate": predicate})


def address_of(b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
    """The address of an unsigned offset of 32 bits, in bytes."""
    return displaced(b, base, b.value("llvm.zext", [offset], ir.IntegerType.get_signless(64)))


def displaced(b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
    """An address so many bytes further on."""
    return b.value(
        "llvm.getelementptr",
        [base, offset],
        base.type,
        {
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([-(2**31)]),
            "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(8)),
        },
    )


def where_within(
    op: ir.Operation, b: Builder, offset: ir.Value, bound: ir.Value, body: Callable[[Builder], None]
) -> None:
    """What `body` builds, for the lanes whose offset is below the bound."""
    branch = b("scf.if", [within(b, offset, bound)], [], regions=2)
    inside = branch.regions[0].blocks.append()
    with ir.InsertionPoint(inside):
        end = ir.Operation.create("scf.yield", loc=op.location)
    body(Builder(end, b.target))


_ADD, _FADD, _UINC_WRAP = 1, 11, 15  # llvm.atomicrmw's numbering, and of orders LLVM's
_FETCHES = {"add": _ADD, "inc": _UINC_WRAP}
_ORDERS = {"relaxed": 2, "acquire": 4, "release": 5, "acq_rel": 6}


def atomic(b: Builder, kind: int, address: ir.Value, value: ir.Value, scope: str, order: str = "relaxed") -> ir.Value:
    """`llvm.atomicrmw` of 4 bytes; what was there before."""
    i64 = ir.IntegerType.get_signless(64)
    attributes = {
        "bin_op": ir.IntegerAttr.get(i64, kind),
        "ordering": ir.IntegerAttr.get(i64, _ORDERS[order]),
        "syncscope": ir.StringAttr.get(scope),
        "alignment": ir.IntegerAttr.get(i64, 4),
    }
    return b.value("llvm.atomicrmw", [address, value], value.type, attributes)


def addition(b: Builder, address: ir.Value, value: ir.Value, scope: str, order: str = "relaxed") -> None:
    """Add one word: an i32, an f32 or a pair of 16-bit floats."""
    atomic(b, _ADD if isinstance(value.type, ir.IntegerType) else _FADD, address, value, scope, order)


def fetch(b: Builder, operation: str, address: ir.Value, value: ir.Value, scope: str, order: str) -> ir.Value:
    """ "add" or "inc" of `fly.atomic_fetch`."""
    return atomic(b, _FETCHES[operation], address, value, scope, order)


def load_acquire(b: Builder, op: ir.Operation, scope: str) -> ir.Value:
    """`fly.load_acquire` as LLVM's."""
    i64 = ir.IntegerType.get_signless(64)
    attributes = {
        "alignment": ir.IntegerAttr.get(i64, 4),
        "ordering": ir.IntegerAttr.get(i64, _ORDERS["acquire"]),
        "syncscope": ir.StringAttr.get(scope),
    }
    return b.value("llvm.load", [op.operands[0]], op.results[0].type, attributes)


def words(b: Builder, value: ir.Value) -> list[ir.Value]:
    """What atomics add at once, 4 bytes each: an element, or a pair of 16-bit floats as a vector."""
    if not isinstance(value.type, ir.VectorType):
        return [value]
    element = ir.VectorType(value.type).element_type
    return b.elements(value) if bits(element) == 32 else b.registers(value, f"vector<2x{element}>")


def bits(type_: ir.Type) -> int:
    """Size of an integer, float or vector type."""
    if isinstance(type_, ir.VectorType):
        length: int = type_.shape[0]
        return length * bits(type_.element_type)
    width: int = type_.width
    return width


OURS = ("fly", "hopper")  # the dialects that nothing but a lowering takes away

Rule = Callable[[ir.Operation, Builder], "ir.Value | tuple[ir.Value, ...] | ir.Operation | None"]


@dataclass(frozen=True)
class Lower:
    """Replace every operation named in `rules` by what its rule builds.

    A rule returns the value (or values) that stand for the operation's results, None if it has none, or the operation
    itself where it is to stay.
    Postcondition: no operation of this project's dialects is left.

    Raises:
        CompileError: an operation of theirs that no rule is for.
    """

    name: str
    target: Target
    rules: Mapping[str, Rule]

    def run(self, module: ir.Module) -> None:
        for op in operations(kernel_function(module).regions[0].blocks[0]):
            rule = self.rules.get(op.name)
            if rule is None:
                if op.name.partition(".")[0] in OURS:
                    raise CompileError(f"{self.name}: no rule for {op.name}")
                continue
            result = rule(op, Builder(op, self.target))
            if result is op:
                continue
            results = result if isinstance(result, tuple) else () if result is None else (result,)
            for old, new in zip(op.results, results, strict=False):
                old.replace_all_uses_with(new)
            op.erase()


def per_element(intrinsic: str) -> Rule:
    """Apply a scalar intrinsic to each element of a float or vector."""
    return each_element(lambda b, x: b.intrinsic(intrinsic, [x], x.type))


def each_element(apply: Callable[[Builder, ir.Value], ir.Value]) -> Rule:
    """`apply` to each element of a float or vector; the results have its type."""

    def rule(op: ir.Operation, b: Builder) -> ir.Value:
        value = op.operands[0]
        if not isinstance(value.type, ir.VectorType):
            return apply(b, value)
        return b.vector([apply(b, x) for x in b.elements(value)], value.type)

    return rule


def passthrough(flags: Mapping[str, str]) -> ir.Attribute:
    """LLVM function attributes, as the llvm dialect hands them through."""
    pairs = [ir.ArrayAttr.get([ir.StringAttr.get(k), ir.StringAttr.get(v)]) for k, v in flags.items()]
    return ir.ArrayAttr.get(pairs)


def denormals(function: ir.Operation) -> dict[str, str]:
    """The function attribute for `fly.flush_denormals()`, if the author asked for it."""
    asked = "fly.daz" in function.attributes
    return {"denormal-fp-math-f32": "preserve-sign,preserve-sign"} if asked else {}


def to_llvm() -> str:
    """The upstream pipeline from scf, arith, math, vector and func to the llvm dialect."""
    return (
        "convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,convert-arith-to-llvm,"
        "convert-cf-to-llvm,convert-func-to-llvm,canonicalize,cse,reconcile-unrealized-casts"
    )
