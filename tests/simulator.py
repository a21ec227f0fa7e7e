"""Runs a traced module in numpy: all threads of a block at once, one operation after the other.

It says what `fly` operations mean, independently of every backend: matrix instructions and loads work from their
atoms' layouts. It also checks what hardware may not: every access lies within an argument's memory and is aligned
as claimed, bounded accesses do not straddle their bound, and barriers and wave-wide operations are reached by all.

A copy lands when it is issued or, with `late_copies`, only when its token is waited for: a kernel that is right in
both is right in between.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from mlir import ir

from fly.backends.target import Target
from fly.ir.context import LOCK, context
from fly.layout import Layout
from fly.passes.walk import kernel_function
from tests import ptx

_DTYPES = {
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
_GAP = 1 << 12  # unreadable bytes around every argument


@dataclass(frozen=True)
class Type:
    """An element type (None for pointers and tokens) and a vector's length."""

    dtype: np.dtype | None
    length: int | None
    shared: bool = False

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * (self.length or 1)


SHARED = Type(None, None, True)


@dataclass
class Node:
    """One operation, with values as numbers."""

    name: str
    operands: list[int]
    operand_types: list[Type]
    results: list[int]
    types: list[Type]
    attributes: dict[str, Any]
    regions: list[tuple[list[int], list[Node]]]


@dataclass(frozen=True)
class SharedAccess:
    """One wave-wide access to shared memory: a byte address a lane, and how many bytes each moves."""

    kind: str  # "load", "store", or the name of a matrix load
    bytes: int
    addresses: tuple[int, ...]


class Program:
    """A module read once, so that many blocks can run."""

    def __init__(self, module: ir.Module, target: Target):
        self.target = target
        self._numbers: dict[Any, int] = {}
        self._types: list[Type] = []  # by number
        self.pointers: dict[int, Any] = {}
        with LOCK, context():
            function = kernel_function(module)
            self.block = tuple(ir.DenseI32ArrayAttr(function.attributes["fly.block"]))
            body = function.regions[0].blocks[0]
            self.arguments = [self._number(a) for a in body.arguments]
            self.argument_types = self._types_of(self.arguments)
            self.nodes = self._nodes(body)

    def _number(self, value: ir.Value) -> int:
        number = self._numbers.setdefault(value, len(self._numbers))
        if number == len(self._types):
            self._types.append(_type(value.type))
        return number

    def _types_of(self, numbers: list[int]) -> list[Type]:
        return [self._types[number] for number in numbers]

    def _nodes(self, block: ir.Block) -> list[Node]:
        return [self._node(op.operation) for op in block.operations]

    def _node(self, op: ir.Operation) -> Node:
        regions = [
            ([self._number(a) for a in b.arguments], self._nodes(b)) for r in op.regions for b in list(r.blocks)[:1]
        ]
        operands, results = ([self._number(v) for v in values] for values in (op.operands, op.results))
        return Node(
            op.name,
            operands,
            self._types_of(operands),
            results,
            self._types_of(results),
            {name: _attribute(op.attributes[name]) for name in op.attributes},
            regions,
        )


def _type(type_: ir.Type) -> Type:
    if isinstance(type_, ir.VectorType):
        return Type(_DTYPES[str(type_.element_type)], type_.shape[0])
    text = str(type_)
    return Type(_DTYPES.get(text), None, text == "!llvm.ptr<3>")


def _attribute(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        return list(attribute)
    if isinstance(attribute, ir.DenseElementsAttr):
        if attribute.is_splat:
            return attribute.get_splat_value().value
        integers = isinstance(attribute.type.element_type, ir.IntegerType)
        return list((ir.DenseIntElementsAttr if integers else ir.DenseFPElementsAttr)(attribute))
    return getattr(attribute, "value", None)


@dataclass
class Machine:
    """One launch: global memory with the arguments, and what was observed.

    `arguments` are numpy arrays (changed in place) and numbers, as the flat kernel arguments want them: use
    `flat` to make them.
    """

    program: Program
    late_copies: bool = False
    observe_shared: bool = False
    shared_accesses: list[SharedAccess] = field(default_factory=list)

    def __call__(self, arguments: Sequence[Any], grid: tuple[int, int, int] = (1, 1, 1)) -> None:
        memory, ranges, flat = bytearray(), [], []
        arrays = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                memory += b"\xff" * _GAP
                ranges.append((len(memory), len(memory) + argument.nbytes))
                arrays.append((argument, len(memory)))
                flat.append(len(memory))
                memory += argument.tobytes() + b"\xff" * (-argument.nbytes % 256)
            else:
                flat.append(argument)
        memory += b"\xff" * _GAP
        self.memory = np.frombuffer(memory, np.uint8).copy()
        self.valid = np.zeros(len(self.memory), bool)
        for first, last in ranges:
            self.valid[first:last] = True
        for z, y, x in itertools.product(*(range(n) for n in reversed(grid))):
            _Block(self, (x, y, z), grid).run(flat)
        for array, at in arrays:
            array[...] = self.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)


class _Block:
    """The state of one block's threads."""

    def __init__(self, machine: Machine, block_id: tuple[int, int, int], grid: tuple[int, int, int]):
        self.machine = machine
        self.target = machine.program.target
        x, y, z = machine.program.block
        self.threads = x * y * z
        self.ids = {"block_id": block_id, "grid_dim": grid}
        number = np.arange(self.threads, dtype=np.int32)
        self.ids["thread_id"] = (number % x, number // x % y, number // (x * y))
        self.values: dict[int, Any] = {}
        self.mask = np.ones(self.threads, bool)
        # never written: NaN as a float, so that a read before the write shows
        self.shared = np.full(self.target.shared_bytes, 0xFF, np.uint8)
        self.allocated = 0
        self.copies: dict[int, Callable[[], None]] = {}

    def run(self, arguments: Sequence[Any]) -> None:
        program = self.machine.program
        for number, type_, value in zip(program.arguments, program.argument_types, arguments, strict=True):
            self.values[number] = np.full(self.threads, value, np.int64 if type_.dtype is None else type_.dtype)
        with np.errstate(all="ignore"):
            self.body(program.nodes)

    def body(self, nodes: list[Node]) -> list[Any]:
        """Run a block of operations; gives the operands of its terminator."""
        for node in nodes:
            operands = [self.values[n] for n in node.operands]
            if node.name in ("scf.yield", "scf.condition", "func.return"):
                return operands
            results = _RULES[node.name](self, node, *operands)
            if node.results:
                results = results if isinstance(results, list) else [results]
                self.values.update(zip(node.results, results, strict=True))
        return []

    def whole_waves(self, name: str) -> None:
        waves = self.mask.reshape(-1, self.target.wave_size)
        assert (waves.all(axis=1) | ~waves.any(axis=1)).all(), f"{name} in part of a wave"

    def space(self, type_: Type) -> tuple[np.ndarray, np.ndarray | None]:
        return (self.shared, None) if type_.shared else (self.machine.memory, self.machine.valid)

    def observe(self, kind: str, type_: Type, size: int, address: np.ndarray) -> None:
        if type_.shared and self.machine.observe_shared:
            for wave in address.reshape(-1, self.target.wave_size):
                self.machine.shared_accesses.append(SharedAccess(kind, size, tuple(map(int, wave))))

    def matrix_rows(self, name: str, address: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray | None:
        """The 16 bytes of shared memory at each thread's address, (threads, 16), or `rows` stored there, by waves."""
        self.whole_waves(name)
        self.observe(name, SHARED, 16, address)
        if rows is None:
            return self.read(SHARED, address, Type(np.dtype(np.uint8), 16), self.mask, 16)
        return self.write(SHARED, address, rows, self.mask, 16)

    def bytes_at(self, type_: Type, address: np.ndarray, size: int, active: np.ndarray, align: int) -> np.ndarray:
        """Indices (threads, size) of the bytes at an address; those of inactive threads are zero."""
        memory, valid = self.space(type_)
        index = np.where(active, address, 0)[:, None] + np.arange(size)
        assert (address[active] % align == 0).all(), f"an address is not aligned to {align} bytes"
        assert (index < len(memory)).all() and (index >= 0).all(), "access outside of memory"
        assert valid is None or valid[index[active]].all(), "access outside of the arguments"
        return index

    def read(self, pointer: Type, address: np.ndarray, type_: Type, active: np.ndarray, align: int) -> np.ndarray:
        index = self.bytes_at(pointer, address, type_.bytes, active, align)
        data = self.space(pointer)[0][index]
        data[~active] = 0
        return _shaped(np.ascontiguousarray(data).view(type_.dtype), type_)

    def write(self, pointer: Type, address: np.ndarray, value: np.ndarray, active: np.ndarray, align: int) -> None:
        data = np.ascontiguousarray(value).view(np.uint8).reshape(self.threads, -1)
        index = self.bytes_at(pointer, address, data.shape[1], active, align)
        self.space(pointer)[0][index[active]] = data[active]


def _shaped(array: np.ndarray, type_: Type) -> np.ndarray:
    return array.reshape(array.shape[0], type_.length) if type_.length else array.reshape(array.shape[0])


# what operations mean


def _id(b: _Block, node: Node) -> np.ndarray:
    kind, axis = node.attributes["name"].split(".")
    return np.broadcast_to(np.int32(b.ids[kind]["xyz".index(axis)]), b.threads).astype(np.int32)


def _alloc(b: _Block, node: Node) -> np.ndarray:
    align = node.attributes["align"]
    at = -(-b.allocated // align) * align
    b.allocated = at + node.attributes["bytes"]
    assert b.allocated <= b.target.shared_bytes, "more shared memory than the target has"
    return np.full(b.threads, at, np.int64)


def _barrier(b: _Block, node: Node) -> None:
    assert b.mask.all(), "a barrier that not every thread reaches"


def _intrinsic(b: _Block, node: Node) -> None:
    """Waves go in lock-step: what only orders or paces them has nothing to do."""
    name = node.attributes["intrin"]
    assert name in _PACE, f"the simulator does not know {name}"


_PACE = {
    f"llvm.amdgcn.{name}" for name in ("s.barrier", "s.setprio", "s.waitcnt", "sched.barrier", "sched.group.barrier")
}


def _hopper(rule: Callable[..., Any], b: _Block, node: Node, *operands: np.ndarray) -> Any:
    return rule(b, *operands)


def _shuffle(b: _Block, node: Node, value: np.ndarray, lane: np.ndarray) -> np.ndarray:
    b.whole_waves("shuffle")
    size = b.target.wave_size
    own = np.arange(b.threads)
    other = lane if node.attributes["mode"] == "idx" else own % size ^ lane
    assert ((other >= 0) & (other < size)).all(), "a lane outside of the wave"
    return value[own // size * size + other]


@functools.cache
def _indices(layout: Layout) -> np.ndarray:
    """A (lane, value) layout as an array."""
    lanes, values = (mode.size for mode in layout)
    return np.array([[layout((lane, v)) for v in range(values)] for lane in range(lanes)])


def _mma(b: _Block, node: Node, a: np.ndarray, other: np.ndarray, c: np.ndarray) -> np.ndarray:
    b.whole_waves("mma")
    atom = b.target.atom(node.attributes["atom"])
    size = b.target.wave_size
    ia, ib, ic = _indices(atom.a), _indices(atom.b), _indices(atom.c)
    result = np.empty_like(c)
    for wave in range(b.threads // size):
        lanes = slice(wave * size, (wave + 1) * size)
        left, right = np.zeros((atom.k, atom.m)), np.zeros((atom.k, atom.n))
        left.flat[ia] = a[lanes].astype(np.float64)
        right.flat[ib] = other[lanes].astype(np.float64)
        product = right.T @ left  # (n, m): the index of C is row + m * column
        result[lanes] = c[lanes] + product.flat[ic].astype(np.float32)
    return result


def _load_matrix(b: _Block, node: Node, address: np.ndarray) -> np.ndarray:
    b.whole_waves("load_matrix")
    load, type_ = b.target.matrix_load(node.attributes["atom"]), node.types[0]
    run = Type(type_.dtype, load.run)
    b.observe(load.name, node.operand_types[0], run.bytes, address)
    runs = b.read(node.operand_types[0], address, run, b.mask, run.bytes)
    waves = runs.reshape(-1, load.lanes * load.run)
    return waves[:, _indices(load.table)].reshape(b.threads, load.values)


def _load(b: _Block, node: Node, address: np.ndarray) -> np.ndarray:
    type_ = node.types[0]
    b.observe("load", node.operand_types[0], type_.bytes, address)
    return b.read(node.operand_types[0], address, type_, b.mask, node.attributes["alignment"])


def _store(b: _Block, node: Node, value: np.ndarray, address: np.ndarray) -> None:
    b.observe("store", node.operand_types[1], node.operand_types[0].bytes, address)
    b.write(node.operand_types[1], address, value, b.mask, node.attributes["alignment"])


def _inside(b: _Block, base: np.ndarray, offset: np.ndarray, bound: np.ndarray, size: int) -> tuple[np.ndarray, Any]:
    offset, bound = offset.view(np.uint32).astype(np.int64), bound.view(np.uint32).astype(np.int64)
    for wave in (base.reshape(-1, b.target.wave_size), bound.reshape(-1, b.target.wave_size)):
        assert (wave == wave[:, :1]).all(), "base or bound of a bounded access differ in a wave"
    inside = b.mask & (offset < bound)
    assert (offset[inside] + size <= bound[inside]).all(), "a bounded access straddles its bound"
    return inside, base + offset


def _load_bounded(b: _Block, node: Node, base: Any, offset: Any, bound: Any) -> np.ndarray:
    type_ = node.types[0]
    inside, address = _inside(b, base, offset, bound, type_.bytes)
    return b.read(node.operand_types[0], address, type_, inside, node.attributes["align"])


def _store_bounded(b: _Block, node: Node, value: Any, base: Any, offset: Any, bound: Any) -> None:
    inside, address = _inside(b, base, offset, bound, node.operand_types[0].bytes)
    b.write(node.operand_types[1], address, value, inside, node.attributes["align"])


def _pair(b: _Block, node: Node, value: np.ndarray) -> list[np.ndarray]:
    """The lower lane's value first: a reduction may not depend on the order."""
    b.whole_waves("pair")
    lane, mask = np.arange(b.threads), node.attributes["mask"]
    assert 0 < mask < b.target.wave_size
    return [value[np.minimum(lane, lane ^ mask)], value[np.maximum(lane, lane ^ mask)]]


def _any_lane(b: _Block, node: Node, condition: np.ndarray) -> np.ndarray:
    votes = (condition & b.mask).reshape(-1, b.target.wave_size)
    return votes.any(axis=1).repeat(b.target.wave_size)


def _copy_direct(b: _Block, node: Node, destination: Any, base: Any, offset: Any, bound: Any) -> Any:
    b.whole_waves("copy_direct")
    size, shift = b.target.wave_size, node.attributes["shift"]
    waves = destination.reshape(-1, size)
    assert (waves == waves[:, :1]).all(), "destination of a direct copy differs in a wave"
    lane = np.arange(b.threads) % size
    inside, address = _inside(b, base, offset + shift, bound, node.attributes["bytes"])
    return _copy(b, node, destination + shift + lane * node.attributes["bytes"], address, inside)


def _copy_async(b: _Block, node: Node, destination: Any, source: Any, inside: Any) -> frozenset[int]:
    assert node.attributes["bytes"] in b.target.async_copy_bytes
    return _copy(b, node, destination, source, b.mask & inside)


def _copy(b: _Block, node: Node, destination: Any, address: Any, inside: Any) -> frozenset[int]:
    size = node.attributes["bytes"]
    mask = b.mask.copy()
    bytes_ = Type(np.dtype(np.uint8), size)

    def land() -> None:
        data = b.read(node.operand_types[1], address, bytes_, inside, size)
        b.write(node.operand_types[0], destination, data, mask, size)

    number = len(b.copies)
    b.copies[number] = land
    if not b.machine.late_copies:
        land()
    return frozenset([number])


def _wait(b: _Block, node: Node, token: frozenset[int]) -> None:
    for number in sorted(token):
        if b.machine.late_copies and b.copies[number] is not None:
            b.copies[number]()
        b.copies[number] = None


def _if(b: _Block, node: Node, condition: np.ndarray) -> list[Any]:
    outer, results = b.mask, []
    for chosen, (_, nodes) in zip((condition, ~condition), node.regions, strict=False):
        b.mask = outer & chosen
        # tokens and uniform values of a branch that nobody takes do not exist
        results.append(b.body(nodes) if b.mask.any() else None)
    b.mask = outer
    if not node.results:
        return []
    then, otherwise = (r if r is not None else next(x for x in results if x is not None) for r in results)
    return [np.where(condition if x.ndim == 1 else condition[:, None], x, y) for x, y in zip(then, otherwise)]


def _for(b: _Block, node: Node, start: Any, stop: Any, step: Any, *carry: Any) -> list[Any]:
    (index, *arguments), nodes = node.regions[0]
    outer, j, carry = b.mask, start.copy(), list(carry)
    while (b.mask & (j < stop)).any():
        b.mask = outer & (j < stop)
        b.values[index] = j
        b.values.update(zip(arguments, carry, strict=True))
        carry = [_merged(b.mask, new, old) for new, old in zip(b.body(nodes), carry, strict=True)]
        j = j + step
        b.mask = outer & (j < stop)
    b.mask = outer
    return carry


def _while(b: _Block, node: Node, *carry: Any) -> list[Any]:
    (before, condition), (after, nodes) = node.regions
    outer, carry = b.mask, list(carry)
    while True:
        b.values.update(zip(before, carry, strict=True))
        more, *passed = b.body(condition)
        carry = [_merged(b.mask, new, old) for new, old in zip(passed, carry, strict=True)]
        b.mask = b.mask & more
        if not b.mask.any():
            break
        b.values.update(zip(after, carry, strict=True))
        carry = [_merged(b.mask, new, old) for new, old in zip(b.body(nodes), carry, strict=True)]
    b.mask = outer
    return carry


def _merged(mask: np.ndarray, new: Any, old: Any) -> Any:
    if isinstance(new, frozenset):
        assert mask.all(), "a token in a loop that threads leave apart"
        return new
    return np.where(mask if new.ndim == 1 else mask[:, None], new, old)


def _constant(b: _Block, node: Node) -> np.ndarray:
    type_ = node.types[0]
    shape = (b.threads,) if type_.length is None else (b.threads, type_.length)
    return np.broadcast_to(np.array(node.attributes["value"]).astype(type_.dtype), shape)


def _truncated(a: np.ndarray, other: np.ndarray) -> np.ndarray:
    safe = np.where(other == 0, 1, other)
    quotient = a // safe
    return quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))


def _cast(b: _Block, node: Node, value: np.ndarray) -> np.ndarray:
    return value.astype(node.types[0].dtype)


def _narrow_pairs(b: _Block, node: Node, value: np.ndarray) -> np.ndarray:
    kind = {"f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2}[node.attributes["to"]]
    largest = float(ml_dtypes.finfo(kind).max)
    return np.clip(value, -largest, largest).astype(kind).view(np.int8)


def _widen_pairs(b: _Block, node: Node, value: np.ndarray) -> np.ndarray:
    kind = {"f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2}[node.attributes["from"]]
    return value.view(kind).astype(np.float32)


def _bitcast(b: _Block, node: Node, value: np.ndarray) -> np.ndarray:
    return _shaped(np.ascontiguousarray(value).view(node.types[0].dtype), node.types[0])


def _compare(table: Sequence[Callable | None]) -> Callable:
    return lambda b, node, x, y: table[node.attributes["predicate"]](x, y)


def _unsigned(compare: Callable) -> Callable:
    return lambda x, y: compare(x.view(f"u{x.dtype.itemsize}"), y.view(f"u{y.dtype.itemsize}"))


def _same(function: Callable) -> Callable:
    """An elementwise function whose result has its operands' dtype."""
    return lambda b, node, *operands: function(*operands).astype(node.types[0].dtype, copy=False)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def _select(b: _Block, node: Node, condition: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(condition[:, None] if condition.ndim < x.ndim else condition, x, y)


_SIGNED = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
_INTS = (*_SIGNED, *(_unsigned(c) for c in _SIGNED[2:]))
_ORDERED = [None, np.equal, np.greater, np.greater_equal, np.less, np.less_equal, *[None] * 7, np.not_equal]

_RULES: dict[str, Callable[..., Any]] = {
    "fly.id": _id,
    "fly.alloc_shared": _alloc,
    "fly.barrier": _barrier,
    "fly.shuffle": _shuffle,
    "fly.mma": _mma,
    "fly.load_matrix": _load_matrix,
    "fly.load_bounded": _load_bounded,
    "fly.store_bounded": _store_bounded,
    "fly.copy_async": _copy_async,
    "fly.copy_direct": _copy_direct,
    "fly.pair": _pair,
    "fly.any_lane": _any_lane,
    "fly.join": lambda b, node, *tokens: frozenset().union(*tokens),
    "fly.wait": _wait,
    "fly.narrow": _cast,
    "fly.narrow_pairs": _narrow_pairs,
    "fly.widen_pairs": _widen_pairs,
    "fly.rcp": _same(lambda x: 1 / x),
    "fly.sched": lambda b, node: None,
    "llvm.ptrtoint": _cast,
    **{name: functools.partial(_hopper, rule) for name, rule in ptx.RULES.items()},
    "llvm.call_intrinsic": lambda b, node, *operands: _intrinsic(b, node),
    "llvm.load": _load,
    "llvm.store": _store,
    "llvm.getelementptr": lambda b, node, base, offset: base + offset.astype(np.int64),
    "scf.if": _if,
    "scf.for": _for,
    "scf.while": _while,
    "arith.constant": _constant,
    "arith.cmpi": _compare(_INTS),
    "arith.cmpf": _compare(_ORDERED),
    "arith.select": _select,
    "arith.divsi": _same(_truncated),
    "arith.negf": _same(np.negative),
    "arith.bitcast": _bitcast,
    "vector.bitcast": _bitcast,
    "vector.broadcast": lambda b, node, x: np.repeat(x[:, None], node.types[0].length, axis=1),
    "vector.shuffle": lambda b, node, x, y: np.concatenate([x, y], axis=1)[:, node.attributes["mask"]],
    "vector.extract": lambda b, node, x: x[:, node.attributes["static_position"][0]],
    "vector.from_elements": lambda b, node, *elements: np.stack(elements, axis=1),
    "math.fma": _same(_fma),
    "math.exp2": _same(np.exp2),
    "math.tanh": _same(np.tanh),
    "math.log2": _same(np.log2),
    "math.rsqrt": _same(lambda x: 1 / np.sqrt(x)),
    **{f"math.{name}": _same(f) for name, f in (("sqrt", np.sqrt), ("absf", np.abs), ("floor", np.floor))},
    **{f"math.{name}": _same(f) for name, f in (("ceil", np.ceil), ("trunc", np.trunc), ("roundeven", np.rint))},
    **{f"arith.{name}": _same(f) for name, f in (("addi", np.add), ("subi", np.subtract), ("muli", np.multiply))},
    **{f"arith.{name}": _same(f) for name, f in (("addf", np.add), ("subf", np.subtract), ("mulf", np.multiply))},
    **{f"arith.{name}": _same(f) for name, f in (("andi", np.bitwise_and), ("ori", np.bitwise_or))},
    **{f"arith.{name}": _same(f) for name, f in (("xori", np.bitwise_xor), ("shli", np.left_shift))},
    **{f"arith.{name}": _same(f) for name, f in (("shrsi", np.right_shift), ("divf", np.divide))},
    **{f"arith.{name}": _same(f) for name, f in (("maxnumf", np.fmax), ("minnumf", np.fmin))},
    **{f"arith.{name}": _same(f) for name, f in (("maxsi", np.maximum), ("minsi", np.minimum))},
    **{f"arith.{n}": _cast for n in ("extsi", "extui", "trunci", "sitofp", "uitofp", "fptosi", "extf", "truncf")},
}


def flat(*arguments: Any) -> list[Any]:
    """The flat kernel arguments of arrays with unit last stride (whole buffers, so that they can be written back),
    scalars, and None for an optional argument that is not given."""
    result: list[Any] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            strides = [s // argument.itemsize for s in argument.strides]
            assert not argument.ndim or strides[-1] == 1
            result += [argument, *argument.shape, *strides[:-1]]
        elif argument is not None:
            result.append(argument)
    return result
