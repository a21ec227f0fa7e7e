"""`insert-waits`: turns waits on tokens into waits that count newer copies."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlir import ir

from fly.errors import CompileError
from fly.ir.dialect import token_type
from fly.passes.walk import build, kernel_function, operations

# Age of a token whose copies have landed, or that stands for none.
DONE = 1 << 20
COPIES = ("fly.copy_async", "fly.copy_direct")
_ENDS = ("scf.yield", "func.return")
# what starts copies, and what has, takes, hands on or gives tokens
_CONCERNED = frozenset((*COPIES, *_ENDS, "fly.commit", "fly.join", "fly.wait", "scf.for", "scf.if", "scf.while"))


@dataclass(frozen=True)
class InsertWaits:
    """Replace `fly.wait` by `fly.wait_count {newer = n}`: n units started after the token's, at least.

    Hardware completes copies in order and waits until at most n are outstanding. The unit is a closed group of
    copies (`groups`: a `fly.commit` is added after each join and each lone copy) or a single copy.

    Precondition: tokens flow only through `fly.join`, `scf.for` and `scf.if`. Postcondition: no `fly.wait` and
    no `fly.join` is left; values of token type have become i32 that nobody reads. Where paths differ in how many
    copies they start, the smallest number counts, so the wait may be stricter than needed but never too weak.
    """

    groups: bool
    name: str = "insert-waits"

    def run(self, module: ir.Module) -> None:
        function = kernel_function(module)
        body = function.regions[0].blocks[0]
        found = [(op.name, op) for op in operations(body)]
        if not {name for name, _ in found} & {*COPIES, "fly.wait", "fly.join"}:
            return
        ours = [(name, op) for name, op in found if name in _CONCERNED]
        _refuse_unknown_length([op for name, op in ours if name == "scf.while"])
        if self.groups:
            _insert_commits(ours)
        analysis = _Analysis(self.groups)
        analysis.block(body, _State())
        for name, op in ours:
            if name == "fly.wait":
                newer = analysis.waits[op]
                if newer < DONE:
                    attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), newer)
                    build(op, "fly.wait_count", [], [], {"newer": attribute})
                op.erase()
        _erase_tokens(body, [(name, op) for name, op in ours if name != "fly.wait"])


Named = list[tuple[str, ir.Operation]]  # operations with their names, which take as long to ask for as to find them


def _refuse_unknown_length(loops: list[ir.Operation]) -> None:
    """Loops whose iterations are not counted can neither start copies nor hand tokens on."""
    for loop in loops:
        inside = {op.name for region in loop.regions for block in region.blocks for op in operations(block)}
        if inside & {*COPIES, "fly.wait"} or token_type() in [operand.type for operand in loop.operands]:
            raise CompileError("asynchronous copies and waits inside fly.while_ cannot be counted; use fly.range")


@dataclass
class _State:
    """For each token, how many units have been started since; lower bounds."""

    ages: dict[ir.Value, int] = field(default_factory=dict)
    started: int = 0

    def copy(self) -> _State:
        return _State(dict(self.ages), self.started)


def _is_token(value: ir.Value) -> bool:
    is_token: bool = value.type == token_type()
    return is_token


@dataclass
class _Analysis:
    groups: bool
    waits: dict[ir.Operation, int] = field(default_factory=dict)
    concerned: dict[ir.Block, Named] = field(default_factory=dict)

    def block(self, block: ir.Block, state: _State) -> list[ir.Value]:
        """Walk a block, ageing tokens; returns the operands of its terminator."""
        if block not in self.concerned:
            named = [(op.operation.name, op.operation) for op in block.operations]
            self.concerned[block] = [(name, op) for name, op in named if name in _CONCERNED]
        for name, operation in self.concerned[block]:
            if name in COPIES:
                state.ages[operation.results[0]] = -1 if self.groups else 0
                if not self.groups:
                    self._age(state, operation.results[0])
            elif name == "fly.commit":
                self._age(state, None)
            elif name == "fly.join":
                state.ages[operation.results[0]] = min(
                    (state.ages[token] for token in operation.operands), default=DONE
                )
            elif name == "fly.wait":
                age = state.ages[operation.operands[0]]
                self.waits[operation] = min(age, self.waits.get(operation, DONE))
                for token, other in state.ages.items():
                    if other >= age:
                        state.ages[token] = DONE
            elif name == "scf.for":
                self._loop(operation, state)
            elif name == "scf.if":
                self._branch(operation, state)
            elif name in _ENDS:
                return list(operation.operands)
        return []

    def _age(self, state: _State, new: ir.Value | None) -> None:
        for token, age in state.ages.items():
            if (new is None or token != new) and age < DONE:
                state.ages[token] = age + 1
        state.started += 1

    def _loop(self, op: ir.Operation, state: _State) -> None:
        body = op.regions[0].blocks[0]
        carried = list(zip(list(op.operands)[3:], list(body.arguments)[1:], op.results, strict=True))
        tokens = [(i, init, arg, result) for i, (init, arg, result) in enumerate(carried) if _is_token(init)]
        entry = {arg: state.ages[init] for _, init, arg, _ in tokens}
        outside = dict(state.ages)
        while True:  # ages at the loop's start only ever fall, and are bounded below
            inner = _State({**outside, **entry})
            yielded = self.block(body, inner)
            new_entry = {arg: min(entry[arg], inner.ages[yielded[i]]) for i, _, arg, _ in tokens}
            # a token from outside may be any number of iterations old inside; its age on entry bounds it below
            if new_entry == entry:
                break
            entry = new_entry
        for i, init, _, result in tokens:
            state.ages[result] = min(state.ages[init], inner.ages[yielded[i]])

    def _branch(self, op: ir.Operation, state: _State) -> None:
        results = []
        for region in op.regions:
            inner = state.copy()
            yielded = self.block(region.blocks[0], inner) if len(region.blocks) else []
            results.append((inner, yielded))
        for token in list(state.ages):
            state.ages[token] = min(inner.ages[token] for inner, _ in results)
        for i, result in enumerate(op.results):
            if _is_token(result):
                state.ages[result] = min(inner.ages[yielded[i]] for inner, yielded in results)


def _insert_commits(ours: Named) -> None:
    """Close a group after each join of copies, and after each copy that is used otherwise than by joins."""
    for name, op in ours:
        if name == "fly.join":
            direct = any(_owner_name(token) in COPIES for token in op.operands)
        elif name in COPIES:
            users = [use.owner.operation.name for use in op.results[0].uses]
            direct = not users or any(user != "fly.join" for user in users)
        else:
            continue
        if direct:
            commit = build(op, "fly.commit", [], [])
            commit.move_after(op)


def _owner_name(value: ir.Value) -> str:
    owner = value.owner
    return owner.operation.name if hasattr(owner, "operation") else getattr(owner, "name", "")


def _erase_tokens(body: ir.Block, ours: Named) -> None:
    """Give carried tokens an integer type and a constant value; drop joins."""
    i32 = ir.IntegerType.get_signless(32)
    zero = None
    for name, op in ours:
        for region in op.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    if _is_token(argument):
                        argument.set_type(i32)
        for result in op.results:
            if not _is_token(result):
                continue
            if name in ("fly.join", *COPIES):
                if zero is None:
                    first = body.operations[0].operation
                    zero = build(first, "arith.constant", [], [i32], {"value": ir.IntegerAttr.get(i32, 0)}).results[0]
                result.replace_all_uses_with(zero)
            else:
                result.set_type(i32)
        if name == "fly.join":
            op.erase()
