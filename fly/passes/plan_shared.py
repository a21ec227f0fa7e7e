"""`plan-shared-memory`: gives every shared buffer its place in the block's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from fly.errors import SharedMemoryError
from fly.passes.insert_waits import COPIES
from fly.passes.walk import build, integer, kernel_function, operations, string

SYMBOL = "fly_shared"
INITIALISED = "hopper.mbarrier_init"


@dataclass(frozen=True)
class Buffer:
    """A shared buffer: its size and the top-level operations between which it is used."""

    name: str
    bytes: int
    align: int
    first: int
    last: int


@dataclass(frozen=True)
class PlanSharedMemory:
    """Replace `fly.alloc_shared` by offsets into globals.

    Precondition: allocations are in the kernel's top-level block. Postcondition: no `fly.alloc_shared` is left;
    the function has `fly.shared_bytes`; buffers overlap only if a `fly.barrier` at top level separates all uses
    of one from all uses of the other. A buffer with copies that nobody waits for is in use to the end, and so are
    mbarriers: nothing ends them, and hardware may write them back where a context is switched.
    `dynamic` makes one external global of unknown size (CUDA's dynamic shared memory); otherwise buffers that
    share no bytes get globals of their own, which tells LLVM that they do not alias. LLVM places those, and it
    ends the process if it finds no room: there is one global, placed as planned, where that could happen.
    """

    limit: int
    arch: str
    dynamic: bool
    name: str = "plan-shared-memory"

    def run(self, module: ir.Module) -> None:
        function = kernel_function(module)
        block = function.regions[0].blocks[0]
        allocations = [op for op in operations(block) if op.name == "fly.alloc_shared"]
        i64 = ir.IntegerType.get_signless(64)
        function.attributes["fly.shared_bytes"] = ir.IntegerAttr.get(i64, 0)
        if not allocations:
            return
        buffers, barriers = _lifetimes([op.operation for op in block.operations], allocations)
        offsets = place(buffers, barriers)
        total = max(offset + buffer.bytes for offset, buffer in zip(offsets, buffers, strict=True))
        if total > self.limit:
            raise SharedMemoryError(self._table(function, buffers, offsets, total))
        function.attributes["fly.shared_bytes"] = ir.IntegerAttr.get(i64, total)
        parts = [_part(buffers, offsets, group) for group in _overlapping(buffers, offsets)]
        if self.dynamic or _bound(parts) > self.limit:
            parts = [_part(buffers, offsets, list(range(len(buffers))))]
        for number, part in enumerate(parts):
            symbol = SYMBOL if len(parts) == 1 else f"{SYMBOL}_{number}"
            self._global(module, symbol, part.bytes, part.align)
            for i in part.buffers:
                _replace(allocations[i], symbol, offsets[i] - part.start)

    def _global(self, module: ir.Module, symbol: str, size: int, align: int) -> None:
        type_ = f"!llvm.array<{0 if self.dynamic else size} x i8>"
        linkage, value = "external", ""
        if not self.dynamic:
            linkage, value = "internal", f"{{ %u = llvm.mlir.undef : {type_} llvm.return %u : {type_} }}"
        attributes = f"{{addr_space = 3 : i32, alignment = {align} : i64}}"
        parsed = ir.Module.parse(f"llvm.mlir.global {linkage} @{symbol}() {attributes} : {type_} {value}")
        parsed.body.operations[0].operation.move_before(module.body.operations[0].operation)

    def _table(self, function: ir.Operation, buffers: list[Buffer], offsets: list[int], total: int) -> str:
        rows = "\n".join(
            f"  {offset:>8} .. {offset + buffer.bytes:<8} {buffer.bytes:>8} bytes  {buffer.name}"
            for offset, buffer in sorted(zip(offsets, buffers, strict=True), key=lambda pair: pair[0])
        )
        return (
            f"kernel {string(function, 'sym_name')} needs {total} bytes of shared memory; "
            f"{self.arch} offers {self.limit}. Allocations:\n{rows}"
        )


def _replace(allocation: ir.Operation, symbol: str, offset: int) -> None:
    """Let `offset` bytes into a global stand for an allocation."""
    pointer = allocation.results[0]
    base = build(
        allocation, "llvm.mlir.addressof", [], [pointer.type], {"global_name": ir.FlatSymbolRefAttr.get(symbol)}
    )
    place = build(
        allocation,
        "llvm.getelementptr",
        [base.results[0]],
        [pointer.type],
        {
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([offset]),
            "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(8)),
        },
    )
    pointer.replace_all_uses_with(place.results[0])
    allocation.erase()


@dataclass(frozen=True)
class _Part:
    """A stretch of the planned memory that becomes one global; `start` is aligned as the global is."""

    buffers: list[int]
    start: int
    bytes: int
    align: int


def _part(buffers: list[Buffer], offsets: list[int], members: list[int]) -> _Part:
    align = max(buffers[i].align for i in members)
    start = min(offsets[i] for i in members) // align * align
    return _Part(members, start, max(offsets[i] + buffers[i].bytes for i in members) - start, align)


def _bound(parts: list[_Part]) -> int:
    """The most bytes that LLVM needs for these globals: it orders them as it likes, each aligned to 16 or more."""
    align = max(16, *(part.align for part in parts))
    return sum(-(-part.bytes // align) * align for part in parts)


def _overlapping(buffers: list[Buffer], offsets: list[int]) -> list[list[int]]:
    """Buffers grouped so that two that share bytes are in one group, by address."""
    groups: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(buffers)), key=lambda i: offsets[i]):
        end = offsets[i] + buffers[i].bytes
        if groups and offsets[i] < groups[-1][0]:
            reach, members = groups[-1]
            groups[-1] = (max(reach, end), [*members, i])
        else:
            groups.append((end, [i]))
    return [members for _, members in groups]


def _lifetimes(body: list[ir.Operation], allocations: list[ir.Operation]) -> tuple[list[Buffer], list[int]]:
    """Buffers with the range of top-level operations that use them, and where top-level barriers are."""
    top_level = {operation: index for index, operation in enumerate(body)}
    barriers = [index for index, operation in enumerate(body) if operation.name == "fly.barrier"]

    def position(operation: ir.Operation) -> int:
        """Operations are compared by the position of their ancestor in the kernel's own block."""
        while operation not in top_level:
            operation = operation.parent.operation
        return top_level[operation]

    buffers = []
    for op in allocations:
        uses: list[int] = []
        pending = [op.results[0]]
        seen: set[ir.Operation] = set()
        while pending:
            value = pending.pop()
            for use in value.uses:
                user = use.owner.operation
                if user in seen:
                    continue
                seen.add(user)
                uses.append(position(user))
                name = user.name
                if name in COPIES and not _waited_for(user.results[0], frozenset()):
                    # it may land at any time: nobody else gets the place
                    uses.append(len(body))
                if name == INITIALISED:
                    uses.append(len(body))
                # derived addresses (and tokens of copies into the buffer) keep it alive
                pending.extend(user.results)
                if name == "scf.yield":
                    pending.extend(user.parent.operation.results)
                if name == "scf.for":
                    pending.extend(user.regions[0].blocks[0].arguments)
        here = position(op)
        buffers.append(
            Buffer(
                string(op, "name"),
                integer(op, "bytes"),
                integer(op, "align"),
                min(uses, default=here),
                max(uses, default=here),
            )
        )
    return buffers, barriers


def _waited_for(token: ir.Value, assumed: frozenset[ir.Value]) -> bool:
    """Whether each way that a token of copies can take ends in a wait; taken to be so of those in `assumed`.

    Only uses in the token's own block count: a wait in a branch may not happen.
    """
    if token in assumed:
        return True
    assumed |= {token}
    home = token.owner if isinstance(token, ir.BlockArgument) else token.owner.operation.block
    for use in token.uses:
        user = use.owner.operation
        if user.block != home:
            continue
        if user.name == "fly.wait":
            return True
        if all(_waited_for(value, assumed) for value in _becomes(user, use.operand_number)):
            return True
    return False


def _becomes(user: ir.Operation, operand: int) -> list[ir.Value]:
    """The tokens that stand for an operand of a join, a yield or a loop from there on."""
    if user.name == "fly.join":
        return [user.results[0]]
    if user.name == "scf.for":
        return [user.regions[0].blocks[0].arguments[operand - 2], user.results[operand - 3]]
    parent = user.parent.operation
    if parent.name == "scf.for":
        return [parent.regions[0].blocks[0].arguments[operand + 1], parent.results[operand]]
    return [parent.results[operand]]


def place(buffers: list[Buffer], barriers: list[int]) -> list[int]:
    """Offsets, first fit in order of decreasing size; see the pass for which buffers may overlap."""

    def apart(a: Buffer, b: Buffer) -> bool:
        earlier, later = (a, b) if a.last < b.first else (b, a)
        return earlier.last < later.first and any(earlier.last < x < later.first for x in barriers)

    offsets: dict[int, int] = {}
    for index in sorted(range(len(buffers)), key=lambda i: (-buffers[i].bytes, i)):
        buffer = buffers[index]
        conflicts = sorted(
            (offsets[i], offsets[i] + buffers[i].bytes) for i in offsets if not apart(buffer, buffers[i])
        )
        offset = 0
        for start, end in conflicts:
            if offset + buffer.bytes <= start:
                break
            offset = max(offset, -(-end // buffer.align) * buffer.align)
        offsets[index] = offset
    return [offsets[i] for i in range(len(buffers))]
