"""Small modules for tests of passes, with a short notation for the `fly` operations.

| notation | operation |
|---|---|
| `%b = alloc NAME BYTES ALIGN` | `fly.alloc_shared` |
| `touch %p` | a store through a shared pointer |
| `%q = gep %p` | a derived shared pointer |
| `barrier` | `fly.barrier` |
| `%t = copy` or `%t = copy %p` | `fly.copy_async` into `%dst` or `%p` |
| `%t = join %a, %b` | `fly.join` |
| `wait %t` | `fly.wait` |
| `mark N` | an operation that the passes leave alone (`fly.sched`) |

In scope: `%src` (global pointer), `%dst` (shared pointer), `%i` (i32), `%n`, `%c0`, `%c1` (index), `%c` (i1).
"""

from __future__ import annotations

import re

from mlir import ir

from fly.ir.context import LOCK, context

SHARED = "!llvm.ptr<3>"
_ARGUMENTS = f"%src: !llvm.ptr<1>, %dst: {SHARED}, %i: i32, %n: index, %c: i1"
_V = r"(%\w+(?:#\d+)?)"
_NOTATION = (
    (
        rf"{_V} = alloc (\S+) (\d+) (\d+)$",
        rf'\1 = "fly.alloc_shared"() {{name = "\2", bytes = \3, align = \4}} : () -> {SHARED}',
    ),
    (rf"touch {_V}$", rf"llvm.store %i, \1 : i32, {SHARED}"),
    (rf"{_V} = gep {_V}$", rf"\1 = llvm.getelementptr \2[%i] : ({SHARED}, i32) -> {SHARED}, i8"),
    (r"barrier$", '"fly.barrier"() : () -> ()'),
    (rf"{_V} = copy$", r"\1 = copy %dst"),
    (
        rf"{_V} = copy {_V}$",
        r'\1 = "fly.copy_async"(\2, %src, %c) {bytes = 16} : '
        rf"({SHARED}, !llvm.ptr<1>, i1) -> !fly.token",
    ),
    (rf"wait {_V}$", r'"fly.wait"(\1) : (!fly.token) -> ()'),
    (r"mark (\d+)$", r'"fly.sched"() {kind = "mark", value = \1} : () -> ()'),
)


def expand(line: str) -> str:
    """One line of the short notation as MLIR; other lines unchanged."""
    stripped = line.strip()
    if match := re.fullmatch(rf"{_V} = join ?(.*)", stripped):
        operands = match.group(2)
        types = ", ".join(["!fly.token"] * operands.count("%"))
        return f'{match.group(1)} = "fly.join"({operands}) : ({types}) -> !fly.token'
    for pattern, replacement in _NOTATION:
        stripped = re.sub("^" + pattern, replacement, stripped)
    return stripped


def parse(body: str, attributes: str = "") -> ir.Module:
    """A module with one kernel, `@kernel`, whose body is given in the notation above."""
    lines = "\n".join(expand(line) for line in body.splitlines())
    text = (
        f"func.func @kernel({_ARGUMENTS}) attributes {{fly.block = array<i32: 64, 1, 1>{attributes}}} {{\n"
        f"%c0 = arith.constant 0 : index\n%c1 = arith.constant 1 : index\n{lines}\nreturn\n}}"
    )
    with LOCK, context():
        return ir.Module.parse(text)


def apply(pass_, module: ir.Module) -> str:
    """Run one pass, verify what it leaves, and print it."""
    with LOCK, context(), ir.Location.unknown():
        pass_.run(module)
        module.operation.verify()
        return str(module)
