"""`insert-waits` on random programs, against hardware that completes copies in order, as late as it may."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlir import ir

from fly.ir.context import LOCK, context
from fly.passes.insert_waits import InsertWaits
from tests.passes.modules import apply, parse


@dataclass
class Writer:
    """Draws a program in the notation of `modules`; a `mark` stands before every wait."""

    draw: st.DrawFn
    nested: bool
    left: int = 14
    names: int = 0

    def name(self) -> str:
        self.names += 1
        return f"%v{self.names}"

    def tokens(self, scope: list[str], low: int, high: int) -> list[str]:
        return self.draw(st.lists(st.sampled_from(scope), min_size=low, max_size=high))

    def block(self, scope: list[str], depth: int) -> tuple[list[str], list[str]]:
        """Lines of a block, and the tokens that are in scope at its end."""
        lines, scope = [], list(scope)
        kinds = ["copy", "copy", "join", "wait"] + ["for", "if"] * (self.nested and depth < 2)
        for _ in range(self.draw(st.integers(1, 5 if self.nested else 14))):
            if self.left == 0:
                break
            self.left -= 1
            kind = self.draw(st.sampled_from(kinds)) if scope else "copy"
            lines += getattr(self, "_" + kind)(scope, depth)
        return lines, scope

    def _copy(self, scope: list[str], _: int) -> list[str]:
        scope.append(self.name())
        return [f"{scope[-1]} = copy"]

    def _join(self, scope: list[str], _: int) -> list[str]:
        line = f"{self.name()} = join {', '.join(self.tokens(scope, 0, 3))}"
        scope.append(f"%v{self.names}")
        return [line]

    def _wait(self, scope: list[str], _: int) -> list[str]:
        return ["mark 0", f"wait {self.draw(st.sampled_from(scope))}"]

    def _results(self, count: int, scope: list[str]) -> str:
        result = self.name()
        scope += [f"{result}#{i}" for i in range(count)]
        return f"{result}:{count}"

    def _yield(self, count: int, inner: list[str]) -> str:
        return f"scf.yield {', '.join(self.tokens(inner, count, count))} : {_types(count)}"

    def _for(self, scope: list[str], depth: int) -> list[str]:
        initial = self.tokens(scope, 1, 3)
        arguments = [self.name() for _ in initial]
        index, stop = self.name(), self.name()
        body, inner = self.block([*scope, *arguments], depth + 1)
        carried = ", ".join(f"{a} = {i}" for a, i in zip(arguments, initial, strict=True))
        count = len(initial)
        end = self._yield(count, inner)
        head = f"{self._results(count, scope)} = scf.for {index} = %c0 to {stop} step %c1"
        return [
            f"{stop} = arith.constant {self.draw(st.integers(0, 3))} : index",
            f"{head} iter_args({carried}) -> ({_types(count)}) {{",
            *body,
            end,
            "}",
        ]

    def _if(self, scope: list[str], depth: int) -> list[str]:
        count = self.draw(st.integers(1, 2))
        branches = []
        for _ in range(2):
            body, inner = self.block(scope, depth + 1)
            branches.append([*body, self._yield(count, inner)])
        head = f"{self._results(count, scope)} = scf.if %c -> ({_types(count)}) {{"
        return [head, *branches[0], "} else {", *branches[1], "}"]


def _types(count: int) -> str:
    return ", ".join(["!fly.token"] * count)


@st.composite
def programs(draw: st.DrawFn, nested: bool) -> str:
    return "\n".join(Writer(draw, nested).block([], 0)[0])


@dataclass
class Machine:
    """Runs a kernel. Units of copies complete only when a `fly.wait_count` says that they must have."""

    groups: bool
    branches: random.Random
    values: dict[ir.Value, object] = field(default_factory=dict)
    copies: int = 0
    open: set[int] = field(default_factory=set)
    units: list[set[int]] = field(default_factory=list)
    done: int = 0
    # per mark: the copies that a `fly.wait` after it is for; and (n of the `fly.wait_count`, units, done before)
    required: list[frozenset[int]] = field(default_factory=list)
    allowed: list[tuple[int | None, list[set[int]], int]] = field(default_factory=list)

    def run(self, block: ir.Block) -> list[object]:
        for op in block.operations:
            operation = op.operation
            name = operation.name.removeprefix("fly.").replace(".", "_")
            if name in ("scf_yield", "func_return"):
                return [self.values.get(v) for v in operation.operands]
            handler = getattr(self, f"_{name}", None)
            results = handler(operation) if handler else []
            for result, value in zip(operation.results, results, strict=False):
                self.values[result] = value
        return []

    def _arith_constant(self, op: ir.Operation) -> list[object]:
        return [ir.IntegerAttr(op.attributes["value"]).value]

    def _copy_async(self, _: ir.Operation) -> list[object]:
        self.copies += 1
        if self.groups:
            self.open.add(self.copies)
        else:
            self.units.append({self.copies})
        return [frozenset({self.copies})]

    def _commit(self, _: ir.Operation) -> list[object]:
        self.units.append(self.open)
        self.open = set()
        return []

    def _join(self, op: ir.Operation) -> list[object]:
        return [frozenset().union(*(self.values[v] for v in op.operands))]

    def _wait(self, op: ir.Operation) -> list[object]:
        self.required.append(self.values[op.operands[0]])
        return []

    def _sched(self, _: ir.Operation) -> list[object]:
        self.allowed.append((None, list(self.units), self.done))
        return []

    def _wait_count(self, op: ir.Operation) -> list[object]:
        newer = ir.IntegerAttr(op.attributes["newer"]).value
        assert newer >= 0
        self.allowed[-1] = (newer, *self.allowed[-1][1:])
        self.done = max(self.done, len(self.units) - newer)
        return []

    def _scf_for(self, op: ir.Operation) -> list[object]:
        body = op.regions[0].blocks[0]
        carried = [self.values.get(v) for v in list(op.operands)[3:]]
        for _ in range(self.values[op.operands[1]]):
            self.values.update(zip(list(body.arguments)[1:], carried, strict=True))
            carried = self.run(body)
        return carried

    def _scf_if(self, op: ir.Operation) -> list[object]:
        return self.run(op.regions[0 if self.branches.random() < 0.5 else 1].blocks[0])


def simulate(text: str, seed: int, groups: bool) -> tuple[Machine, Machine]:
    """The program with its tokens, and what the pass makes of it, run along the same path."""
    machines = []
    for rewrite in (False, True):
        module = parse(text)
        if rewrite:
            apply(InsertWaits(groups=groups), module)
        machine = Machine(groups, random.Random(seed))
        with LOCK, context():
            machine.run(module.body.operations[0].regions[0].blocks[0])
        machines.append(machine)
    assert machines[0].copies == machines[1].copies
    assert len(machines[0].required) == len(machines[1].allowed)
    return machines[0], machines[1]


@pytest.mark.parametrize("groups", [False, True])
@settings(max_examples=80, deadline=None)
@given(text=programs(nested=True), seed=st.integers(0, 1 << 16))
def test_every_wait_is_sufficient(groups, text, seed):
    tokens, counted = simulate(text, seed, groups)
    for required, (newer, units, done) in zip(tokens.required, counted.allowed, strict=True):
        complete = units[: max(done, 0 if newer is None else len(units) - newer)]
        assert required <= set().union(*complete), text


@pytest.mark.parametrize("groups", [False, True])
@settings(max_examples=80, deadline=None)
@given(text=programs(nested=False))
def test_waits_are_exact_in_straight_line_code(groups, text):
    tokens, counted = simulate(text, 0, groups)
    for required, (newer, units, done) in zip(tokens.required, counted.allowed, strict=True):
        assert required <= set().union(*units), text
        last = max((i for i, unit in enumerate(units) if unit & required), default=-1)
        assert newer == (None if last < done else len(units) - 1 - last), text
