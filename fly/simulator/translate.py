"""From a program to a Python generator function that runs it for the lanes of one role.

One function for the whole kernel: each operation is a statement, run-time loops and branches are Python's, and `m` is
the mask of the lanes that are where the statement is (None: all of the role). Lanes that leave a loop or take the
other branch wait for the rest. Where a role may have to wait for others it yields. What has been computed in a region
or around it is not computed again there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fly.errors import SimulatorError
from fly.simulator import arithmetic
from fly.simulator.program import Node, Program

# operations that a method of the role executes, and how their attributes are passed on; `WAITING` ones may yield
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fly.alloc_shared": ("alloc_shared", ("name", "bytes", "align")),
    "fly.shuffle": ("shuffle", ("mode",)),
    "fly.pair": ("pair", ("mask",)),
    "fly.swap": ("swap", ("mask",)),
    "fly.any_lane": ("any_lane", ()),
    "fly.mma": ("mma", ("atom",)),
    "fly.load_matrix": ("load_matrix", ("atom",)),
    "fly.load_bounded": ("load_bounded", ("align",)),
    "fly.store_bounded": ("store_bounded", ("align",)),
    "fly.copy_async": ("copy_async", ("bytes",)),
    "fly.copy_direct": ("copy_direct", ("bytes", "shift")),
    "fly.join": ("join", ()),
    "fly.wait": ("wait_copies", ()),
    "llvm.load": ("load", ("alignment",)),
    "llvm.store": ("store", ("alignment",)),
    "llvm.atomicrmw": ("atomic_add", ("bin_op",)),
    "hopper.elect": ("elect", ()),
    "fly.atomic_add": ("accumulate", ("align", "order")),
    "fly.atomic_add_bounded": ("accumulate_bounded", ("align",)),
    "fly.atomic_fetch": ("atomic", ("order", "operation")),
    "hopper.ldmatrix_turned": ("ldmatrix_turned", ()),
    "hopper.stmatrix": ("stmatrix", ()),
    "hopper.prmt": ("prmt", ()),
    "hopper.sync_warp": ("sync_warp", ()),
    "hopper.fence_async_shared": ("fence_async_shared", ()),
    "hopper.fence_async_global": ("fence_async_global", ()),
    "hopper.fence_mbarrier_init": ("fence_mbarrier_init", ()),
    "hopper.mbarrier_init": ("mbarrier_init", ()),
    "hopper.tma_prefetch": ("tma_prefetch", ()),
    "hopper.tma_commit": ("tma_commit", ()),
    "hopper.computed": ("computed", ()),
    "hopper.wgmma": (
        "wgmma",
        ("n", "dtype", "accumulates", "a_registers", "a_transposed", "b_transposed", "a_steps", "b_steps"),
    ),
    "hopper.wgmma_wait": ("wgmma_wait", ("newer", "accumulators")),
}
WAITING: dict[str, tuple[str, tuple[str, ...]]] = {
    "fly.barrier": ("barrier", ()),
    "fly.load_acquire": ("load_acquire", ()),
    "llvm.amdgcn.s.barrier": ("meet", ()),
    "hopper.barrier_sync": ("barrier_sync", ()),
    "hopper.barrier_arrive": ("barrier_arrive", ()),
    "hopper.barrier_any": ("barrier_any", ()),
    "hopper.setmaxnreg": ("setmaxnreg", ("action", "registers")),
    "hopper.mbarrier_arrive": ("mbarrier_arrive", ()),
    "hopper.mbarrier_arrive_expect": ("mbarrier_arrive_expect", ()),
    "hopper.mbarrier_wait": ("mbarrier_wait", ()),
    "hopper.mbarrier_arrive_at": ("mbarrier_arrive", ()),
    "hopper.mbarrier_arrive_expect_at": ("mbarrier_arrive_expect", ()),
    "hopper.cluster_sync": ("cluster_sync", ()),
    "hopper.copy_at": ("copy_at", ()),
    "hopper.tma_load": ("tma_load", ()),
    "hopper.tma_load_to_all": ("tma_load_to_all", ("blocks",)),
    "hopper.tma_store": ("tma_store", ()),
    "hopper.tma_wait": ("tma_wait", ("newer",)),
    "hopper.tma_wait_read": ("tma_wait_read", ("newer",)),
}
_PACE = ("s.setprio", "s.nop", "s.waitcnt", "sched.barrier", "sched.group.barrier")
_IGNORED = {
    "fly.sched",
    "fly.publish",
    *(f"llvm.amdgcn.{name}" for name in _PACE),
}  # they order nothing that is told apart here
_PROCEED = ("scf.yield", "scf.condition", "func.return")


_HEADER = 3  # lines before the first statement


@dataclass(frozen=True)
class Translated:
    """A program's generator function, of a role and the flat arguments, and the author's line of each of its own."""

    run: Callable[..., Any]
    lines: tuple[str, ...]

    def location(self, line: int) -> str:
        """Where line `line` of the function comes from."""
        return self.lines[line - 1 - _HEADER] if _HEADER < line <= _HEADER + len(self.lines) else ""

    def raised_at(self, error: BaseException) -> str:
        """Where an error came from that a call of the function raised."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.run.__code__:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.location(line)


def translate(program: Program) -> Translated:
    """The program as a Python function.

    Raises:
        SimulatorError: an operation that the simulator does not know.
    """
    translator = _Translator(program)
    text = translator.text()
    scope: dict[str, Any] = {**translator.names, **arithmetic.NAMES, "np": np}
    exec(compile(text, f"<{program.name}, simulated>", "exec"), scope)
    return Translated(scope["kernel"], tuple(program.locations[place] for place in translator.places))


class _Translator:
    """The text of one program, and what it names."""

    def __init__(self, program: Program):
        self.program = program
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[str, Any] = {}
        self.numbers: dict[Any, str] = {}
        self.texts: dict[int, str] = {}  # of values without a statement: constants, and what was computed before
        self.computed: dict[str, str] = {}  # expression -> its value, in this region and those around it
        self.masks = 0
        self.place = 0
        self.places: list[int] = []  # of lines

    def text(self) -> str:
        arguments = "".join(f", v{n}" for n in self.program.arguments)
        self.nodes(self.program.nodes)
        body = "\n".join(self.lines)
        # the yield makes it a generator also where nothing waits
        return f"def kernel(r{arguments}):\n m = None\n if False: yield\n{body}\n"

    def line(self, text: str) -> None:
        self.lines.append(" " * self.depth + text)
        self.places.append(self.place)

    def name(self, value: Any, key: Any = None) -> str:
        """A global that holds a value; equal keys share it."""
        key = key if key is not None else ("of", len(self.names))
        if key not in self.numbers:
            self.numbers[key] = f"c{len(self.names)}"
            self.names[self.numbers[key]] = value
        return self.numbers[key]

    def fresh_mask(self) -> str:
        self.masks += 1
        return f"m{self.masks}"

    def nodes(self, nodes: tuple[Node, ...]) -> list[str]:
        """Statements of a region; gives what its last operation hands on."""
        outer, self.computed = self.computed, dict(self.computed)
        handed: list[str] = []
        for node in nodes:
            if node.name in _PROCEED:
                handed = self.values(node)
                break
            self.node(node)
        self.computed = outer
        return handed

    def node(self, node: Node) -> None:
        self.place = node.place
        operands = self.values(node)
        if node.name == "arith.constant":
            self.texts[node.results[0]] = self.constant(node)
        elif node.name in arithmetic.EXPRESSIONS:
            self.compute(node.results[0], self.expression(node, operands))
        elif node.name == "vector.shuffle":
            length = node.operand_types[0].length
            assert length is not None
            key = tuple(node.attributes["mask"]), length, operands[0] == operands[1]
            mask = self.name(arithmetic.indices_of(*key), key)
            self.compute(node.results[0], f"shuffle({', '.join(operands)}, {mask})")
        elif _called(node) in ("fly.reread", "hopper.anew", "llvm.expect"):
            self.texts[node.results[0]] = operands[0]
        elif node.name == "fly.id":
            self.compute(node.results[0], f"r.id({node.attributes['name']!r})")
        elif node.name in _STRUCTURED:
            _STRUCTURED[node.name](self, node, operands)
        elif _called(node) not in _IGNORED:
            self.call(node, operands)

    def values(self, node: Node) -> list[str]:
        """The text of each operand."""
        return [self.texts.get(n) or f"v{n}" for n in node.operands]

    def compute(self, result: int, expression: str) -> None:
        """A statement, unless the same expression has a value already: much of an address is computed again."""
        if expression in self.computed:
            self.texts[result] = self.computed[expression]
        else:
            self.computed[expression] = f"v{result}"
            self.line(f"v{result} = {expression}")

    def constant(self, node: Node) -> str:
        type_, value = node.types[0], node.attributes["value"]
        if type_.length is None:
            return self.name(type_.dtype.type(value), (type_.dtype, repr(value)))
        values = np.broadcast_to(np.array(value).astype(type_.dtype), (1, type_.length))
        return self.name(values, (type_, repr(value)))

    def expression(self, node: Node, operands: list[str]) -> str:
        template = arithmetic.EXPRESSIONS[node.name]
        text = template if isinstance(template, str) else template(node)
        places = {}
        if "{type0}" in text or "{dtype0}" in text:
            type_ = node.types[0]
            places = {"type0": self.name(type_, type_), "dtype0": self.name(type_.dtype, str(type_.dtype))}
        return text.format(*operands, **places)

    def call(self, node: Node, operands: list[str]) -> None:
        called = _called(node)
        waits = called in WAITING
        method = (WAITING if waits else METHODS).get(called)
        if method is None:
            location = self.program.locations[node.place]
            raise SimulatorError(f"the simulator does not know {called}{location and ' at '}{location}")
        name, attributes = method
        extra = [f"{a}={self.name(node.attributes[a])}" for a in attributes]
        arguments = ", ".join([self.name(node, ("node", node.place)), "m", *operands, *extra])
        results = ", ".join(f"v{n}" for n in node.results)
        if len(node.results) == 1 and node.name == "hopper.wgmma_wait":
            results += ","
        self.line(f"{results}{' = ' if results else ''}{'yield from ' if waits else ''}r.{name}({arguments})")

    # control flow

    def if_(self, node: Node, operands: list[str]) -> None:
        outer, then, otherwise = (self.fresh_mask() for _ in range(3))
        results = [f"v{n}" for n in node.results]
        self.line(f"{outer} = m")
        self.line(f"{then}, {otherwise} = r.split(m, {operands[0]})")
        branches = []
        for mask, (_, nodes) in zip((then, otherwise), node.regions, strict=False):
            self.line(f"if {mask} is not False:")
            self.depth += 1
            self.line(f"m = {mask}")
            handed = self.nodes(nodes)
            self.depth -= 1
            branches.append(handed)
        self.line(f"m = {outer}")
        if not results:
            return
        a, b = branches
        self.line(f"if {otherwise} is False:")
        self.line(" " + "; ".join(f"{r} = {x}" for r, x in zip(results, a, strict=True)))
        self.line(f"elif {then} is False:")
        self.line(" " + "; ".join(f"{r} = {y}" for r, y in zip(results, b, strict=True)))
        self.line("else:")
        for r, x, y in zip(results, a, b, strict=True):
            self.line(f" {r} = merge({operands[0]}, {x}, {y})")

    def for_(self, node: Node, operands: list[str]) -> None:
        start, stop, step, *carry = operands
        ((index, *carried), nodes) = node.regions[0]
        outer, active = self.fresh_mask(), self.fresh_mask()
        arguments = [f"v{n}" for n in carried]
        results = [f"v{n}" for n in node.results]
        self.line(f"{outer} = m; v{index} = {start}")
        self.assign(results, carry)
        self.line("while True:")
        self.depth += 1
        self.line(f"{active} = r.active(m, v{index} < {stop})")
        self.line(f"if {active} is False: break")
        self.line(f"m = {active}")
        self.assign(arguments, results)
        handed = self.nodes(nodes)
        self.keep(results, handed, outer)
        self.line(f"v{index} = v{index} + {step}")
        self.depth -= 1
        self.line(f"m = {outer}")

    def while_(self, node: Node, carry: list[str]) -> None:
        (tested, condition), (carried, nodes) = node.regions
        outer, active = self.fresh_mask(), self.fresh_mask()
        before, after = [f"v{n}" for n in tested], [f"v{n}" for n in carried]
        results = [f"v{n}" for n in node.results]
        self.line(f"{outer} = m")
        self.assign(before, carry)
        for result in results:
            self.line(f"{result} = None")
        self.line("while True:")
        self.depth += 1
        going, *passed = self.nodes(condition)
        self.keep(results, passed, outer)
        self.line(f"{active} = r.active(m, {going})")
        self.line(f"if {active} is False: break")
        self.line(f"m = {active}")
        self.assign(after, passed)
        handed = self.nodes(nodes)
        self.keep(before, handed, outer)
        self.depth -= 1
        self.line(f"m = {outer}")

    def assign(self, names: list[str], values: list[str]) -> None:
        """All at once: a loop may swap what it carries."""
        if names:
            self.line(f"{', '.join(names)}, = {', '.join(values)},")

    def keep(self, names: list[str], values: list[str], outer: str) -> None:
        """New values of the lanes that are still here; those that have left keep theirs."""
        if not names:
            return
        self.line(f"if m is {outer}:")
        self.depth += 1
        self.assign(names, values)
        self.depth -= 1
        self.line("else:")
        merged = [f"merge(m, {new}, {old})" for new, old in zip(values, names, strict=True)]
        self.depth += 1
        self.assign(names, merged)
        self.depth -= 1


def _called(node: Node) -> str:
    """The operation's name, or that of the intrinsic that it calls."""
    return node.attributes["intrin"] if node.name == "llvm.call_intrinsic" else node.name


_STRUCTURED = {"scf.if": _Translator.if_, "scf.for": _Translator.for_, "scf.while": _Translator.while_}
