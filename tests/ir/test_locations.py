"""Every operation is located at the author's line, whatever path through the compiler it took."""

from __future__ import annotations

import inspect

import fly
from fly.passes.walk import operations
from tests.tracing import matrix, trace


def helper(x: fly.Value) -> fly.Value:
    return x * 3  # helper


def marked(x: fly.Tensor, n: fly.i32):
    y = n + 1  # add
    with fly.when(y > 2):  # when
        fly.barrier()  # barrier
    for j, s in (loop := fly.range(n, carry=y)):  # loop
        loop.next(s + j)  # body
    z = fly.cond(n > 5, lambda: n ^ y, lambda: n & y)  # cond
    v = helper(z)
    x.store(fly.exp2(v.to(fly.f32)), z)  # store
    fly.lane_sum(z)  # sum
    fly.SharedMemory("buffer", "f32", 4)  # buffer


def test_operations_are_at_the_authors_line():
    lines, first = inspect.getsourcelines(marked)
    tags = {line.split("# ")[1].strip(): first + i for i, line in enumerate(lines) if "# " in line}
    tags["helper"] = inspect.getsourcelines(helper)[1] + 1
    module = trace(marked, matrix(), "i32")
    function = next(iter(module.body.operations)).operation
    found: dict[str, set[int]] = {}
    for op in operations(function.regions[0].blocks[0]):
        assert op.location.filename == __file__, op
        found.setdefault(op.name, set()).add(op.location.start_line)
    expected = {
        "arith.addi": {tags["add"], tags["body"], tags["sum"]},
        "arith.muli": {tags["helper"], tags["store"]},
        "arith.xori": {tags["cond"]},
        "arith.andi": {tags["cond"]},
        "scf.if": {tags["when"], tags["cond"]},
        "scf.for": {tags["loop"]},
        "fly.barrier": {tags["barrier"]},
        "math.exp2": {tags["store"]},
        "llvm.store": {tags["store"]},
        "fly.pair": {tags["sum"]},
        "fly.alloc_shared": {tags["buffer"]},
    }
    assert {name: found[name] for name in expected} == expected
    assert function.location.start_line == first
