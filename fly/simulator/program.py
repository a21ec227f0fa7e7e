"""A traced module as data: operations with numbered values, element types and source lines; read once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from mlir import ir

from fly.backends.nvvm import dialect
from fly.backends.target import Target
from fly.errors import SimulatorError
from fly.ir.context import LOCK, context
from fly.passes.walk import integer, kernel_function

if TYPE_CHECKING:
    from fly.simulator.translate import Translated

STRUCTURED = ("scf.if", "scf.for", "scf.while")  # operations with regions
ROLE_WARPS = 4  # warps that go through a kernel together: a warpgroup of Hopper's
DTYPES = {
    "i1": np.dtype(np.bool_),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Type:
    """An element type (None of pointers and tokens), a vector's length, and whether it points to shared memory."""

    dtype: np.dtype | Any  # instead of None: who reads it knows by the operation that there is one
    length: int | None = None
    shared: bool = False

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * (self.length or 1)


@dataclass(frozen=True)
class Node:
    """One operation: its values as numbers, and its place in `Program.locations`."""

    name: str
    place: int
    operands: tuple[int, ...]
    operand_types: tuple[Type, ...]
    results: tuple[int, ...]
    types: tuple[Type, ...]
    attributes: dict[str, Any]
    regions: tuple[tuple[tuple[int, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class Program:
    """A kernel: its operations, and as many arguments of its function as there are flat ones.

    `locations`: the author's file and line of each operation, "" where there is none. `cluster`: blocks of one.
    """

    name: str
    target: Target
    block: tuple[int, int, int]
    arguments: tuple[int, ...]
    argument_types: tuple[Type, ...]
    nodes: tuple[Node, ...]
    locations: tuple[str, ...]
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // self.target.wave_size)

    @property
    def roles(self) -> int:
        """Roles of a block."""
        return -(-self.warps // ROLE_WARPS)

    @functools.cached_property
    def allocations(self) -> tuple[tuple[int, int], ...]:
        """(bytes, alignment) of every buffer of shared memory."""
        nodes = [node for node in _walk(self.nodes) if node.name == "fly.alloc_shared"]
        return tuple((node.attributes["bytes"], node.attributes["align"]) for node in nodes)

    @staticmethod
    def of(module: ir.Module, target: Target) -> Program:
        """Read a traced module.

        Raises:
            SimulatorError: a type that the simulator does not know.
        """
        with LOCK, context():
            return _Reader().program(module, target)

    @staticmethod
    def parse(bytecode: bytes, target: Target) -> Program:
        """The same of a module's bytecode."""
        dialect.load()
        with LOCK, context():
            return Program.of(ir.Module.parse(bytecode), target)

    @functools.cached_property
    def translated(self) -> Translated:
        """The kernel as a Python function."""
        from fly.simulator.translate import translate

        return translate(self)


def _walk(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for _, inner in node.regions:
            yield from _walk(inner)


class _Reader:
    """Numbers the values of one module."""

    def __init__(self) -> None:
        self.numbers: dict[ir.Value, int] = {}
        self.types: list[Type] = []
        self.locations: list[str] = []
        self.known_types: dict[ir.Type, Type] = {}
        self.known_attributes: dict[ir.Attribute, Any] = {}
        self.known_locations: dict[ir.Location, str] = {}

    def program(self, module: ir.Module, target: Target) -> Program:
        function = kernel_function(module)
        body = function.regions[0].blocks[0]
        arguments = self.of_all(body.arguments)
        nodes = self.nodes(body)
        return Program(
            name=ir.StringAttr(function.attributes["sym_name"]).value,
            target=target,
            block=tuple(ir.DenseI32ArrayAttr(function.attributes["fly.block"])),
            arguments=arguments,
            argument_types=self.types_of(arguments),
            nodes=nodes,
            locations=tuple(self.locations),
            cluster=integer(function, "fly.cluster") if "fly.cluster" in function.attributes else 1,
        )

    def number(self, value: ir.Value) -> int:
        number = self.numbers.setdefault(value, len(self.numbers))
        if number == len(self.types):
            self.types.append(self.type(value.type))
        return number

    def type(self, type_: ir.Type) -> Type:
        if type_ not in self.known_types:
            self.known_types[type_] = _type(type_)
        return self.known_types[type_]

    def attribute(self, attribute: ir.Attribute) -> Any:
        if attribute not in self.known_attributes:
            self.known_attributes[attribute] = _attribute(attribute)
        return self.known_attributes[attribute]

    def of_all(self, values: Any) -> tuple[int, ...]:
        return tuple(self.number(value) for value in values)

    def types_of(self, numbers: tuple[int, ...]) -> tuple[Type, ...]:
        return tuple(self.types[number] for number in numbers)

    def nodes(self, block: ir.Block) -> tuple[Node, ...]:
        return tuple(self.node(op.operation) for op in block.operations)

    def node(self, op: ir.Operation) -> Node:
        place = len(self.locations)
        self.locations.append(self.location(op.location))
        name = op.name
        regions = op.regions if name in STRUCTURED else ()  # the question takes as long as the rest
        inner = tuple((self.of_all(b.arguments), self.nodes(b)) for r in regions for b in list(r.blocks)[:1])
        operands, results = self.of_all(op.operands), self.of_all(op.results)
        found = op.attributes
        attributes = {name: self.attribute(found[name]) for name in found} if len(found) else {}
        types = self.types_of(operands), self.types_of(results)
        return Node(name, place, operands, types[0], results, types[1], attributes, inner)

    def location(self, location: ir.Location) -> str:
        if location not in self.known_locations:
            file = location.is_a_file()
            self.known_locations[location] = f"{location.filename}:{location.start_line}" if file else ""
        return self.known_locations[location]


@functools.cache
def _named_type(text: str) -> Type:
    if text in DTYPES:
        return Type(DTYPES[text])
    if text.startswith("!llvm.ptr"):
        return Type(None, None, text == "!llvm.ptr<3>")
    if text == "!fly.token":
        return Type(None)
    raise SimulatorError(f"the simulator does not know values of type {text}")


def _type(type_: ir.Type) -> Type:
    if isinstance(type_, ir.VectorType):
        return Type(_named_type(str(type_.element_type)).dtype, type_.shape[0])
    return _named_type(str(type_))


def _attribute(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        return list(attribute)
    if isinstance(attribute, ir.DenseElementsAttr):
        if attribute.is_splat:
            return attribute.get_splat_value().value
        integers = isinstance(attribute.type.element_type, ir.IntegerType)
        return list((ir.DenseIntElementsAttr if integers else ir.DenseFPElementsAttr)(attribute))
    return getattr(attribute, "value", None)
