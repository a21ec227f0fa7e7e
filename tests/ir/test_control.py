"""Run-time loops and branches: what they compute, what they can carry, and the IR they become."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.errors import CarryError, ControlFlowError, DTypeError
from fly.ir.dialect import token_type
from fly.lang.fragment import AccumulatorLayout
from tests.filecheck import filecheck
from tests.host import HostFunction
from tests.tracing import matrix, trace

EXAMPLES = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class State:
    total: fly.Value
    largest: fly.Value
    name: str = "state"


Sums = namedtuple("Sums", "low high")


def every_carry(bounds: fly.Tensor, out: fly.Tensor):
    """One loop that carries a dataclass, a named tuple, a vector, a dict, a list and static values."""
    start, stop, step = (bounds.load(i) for i in range(3))
    zero = fly.i32(0)
    first = (State(zero, fly.i32(-1000)), Sums(zero, zero), fly.broadcast(zero, 4), {"n": zero}, [zero], 7)
    for j, carry in (loop := fly.range(start, stop, step, carry=first)):
        state, sums, vector, named, listed, seven = carry
        assert state.name == "state" and seven == 7
        loop.next(
            State(state.total + j, fly.maximum(state.largest, j)),
            Sums(sums.low + 1, sums.high + j * j),
            vector + fly.from_elements([j, j * 2, zero, zero]),
            {"n": named["n"] + seven},
            [j],
            seven,
        )
    state, sums, vector, named, listed, _ = loop.results
    assert isinstance(state, State) and isinstance(sums, Sums)
    for i, value in enumerate([state.total, state.largest, sums.low, sums.high, vector[0], vector[1], named["n"]]):
        out.store(value, i)
    out.store(listed[0], 7)


@EXAMPLES
@given(st.integers(-5, 5), st.integers(-5, 9), st.integers(1, 4))
def test_a_loop_computes_what_pythons_does(start, stop, step):
    run = compiled(every_carry, matrix("i32"), matrix("i32"))
    out = np.zeros(8, np.int32)
    run(np.array([start, stop, step], np.int32), out)
    js = list(range(start, stop, step))
    wanted = [sum(js), max([-1000, *js]), len(js), sum(j * j for j in js), sum(js), 2 * sum(js), 7 * len(js)]
    assert list(out) == [*wanted, js[-1] if js else 0]


_compiled: dict = {}


def compiled(function, *specs) -> HostFunction:
    if function not in _compiled:
        _compiled[function] = HostFunction(trace(function, *specs), function.__name__)
    return _compiled[function]


def nested(sizes: fly.Tensor, out: fly.Tensor):
    """A triangle of loops with a branch inside; the inner one starts from the outer one's carry."""
    rows, limit = sizes.load(0), sizes.load(1)
    for i, total in (outer := fly.range(rows, carry=fly.i64(0))):
        for j, inner_total in (inner := fly.range(i, carry=total)):
            product, less = inner_total + i * j, inner_total - 1
            inner.next(fly.cond(i + j < limit, lambda x=product: x, lambda x=less: x))
        outer.next(inner.results)
    out.store(outer.results, 0)


@EXAMPLES
@given(st.integers(0, 8), st.integers(0, 16))
def test_nested_loops_and_branches(rows, limit):
    out = np.zeros(1, np.int64)
    compiled(nested, matrix("i32"), matrix("i64"))(np.array([rows, limit], np.int32), out)
    assert out[0] == sum(i * j if i + j < limit else -1 for i in range(rows) for j in range(i))


def collatz(starts: fly.Tensor, out: fly.Tensor):
    """out[i] = (steps to 1, largest number on the way): a loop in a loop, of unknown length, with a branch inside."""
    for i in fly.range(starts.shape[0]):
        first = State(fly.i32(0), starts.load(i))
        carry = (first, {"number": starts.load(i)})
        for state, named in (loop := fly.while_(carry, lambda c: c[1]["number"] > 1)):
            number = named["number"]
            following = fly.cond(number % 2 == 0, lambda n=number: n // 2, lambda n=number: 3 * n + 1)
            loop.next(State(state.total + 1, fly.maximum(state.largest, following)), {"number": following})
        state, named = loop.results
        for j, value in enumerate((state.total, state.largest, named["number"])):
            out.store(value, 3 * i + j)


@EXAMPLES
@given(st.lists(st.integers(-3, 60), max_size=6))
def test_a_while_loop_computes_what_pythons_does(starts):
    out = np.zeros(max(1, 3 * len(starts)), np.int32)
    compiled(collatz, matrix("i32"), matrix("i32"))(np.array(starts, np.int32), out)
    for i, number in enumerate(starts):
        path = [number]
        while path[-1] > 1:
            path.append(path[-1] // 2 if path[-1] % 2 == 0 else 3 * path[-1] + 1)
        assert list(out[3 * i : 3 * i + 3]) == [len(path) - 1, max(path), path[-1]]


def test_a_while_loop_in_mlir():
    def kernel(n: fly.i32, x: fly.f32):
        for _, value in (loop := fly.while_((n, x), lambda c: c[0] > 3)):
            loop.next(_ - 1, value + 1.0)

    filecheck(
        trace(kernel, "i32", "f32"),
        """
        CHECK: scf.while (%[[A:.*]] = %arg0, %[[B:.*]] = %arg1) : (i32, f32) -> (i32, f32) {
        CHECK: %[[GOING:.*]] = arith.cmpi sgt, %[[A]], %{{.*}} : i32
        CHECK: scf.condition(%[[GOING]]) %[[A]], %[[B]] : i32, f32
        CHECK: } do {
        CHECK: ^bb0(%[[C:.*]]: i32, %[[D:.*]]: f32):
        CHECK: %[[X:.*]] = arith.subi %[[C]],
        CHECK: %[[Y:.*]] = arith.addf %[[D]],
        CHECK: scf.yield %[[X]], %[[Y]] : i32, f32
        """,
    )


def effects(values: fly.Tensor, out: fly.Tensor):
    """Loops without a carry, and bodies that only store."""
    for j in fly.range(values.shape[0]):
        value = values.load(j)
        with fly.when(value > 0):
            out.store(value, j)
            with fly.when(value > 10):
                out.store(fly.i32(-1), j)


@EXAMPLES
@given(st.lists(st.integers(-20, 20), max_size=12))
def test_when_stores_only_where_the_condition_holds(values):
    out = np.zeros(max(1, len(values)), np.int32)
    compiled(effects, matrix("i32"), matrix("i32"))(np.array(values, np.int32), out)
    assert list(out[: len(values)]) == [-1 if v > 10 else max(v, 0) for v in values]


def branches(values: fly.Tensor, out: fly.Tensor):
    """A branch's result may be a tree; literals take the first branch's dtype."""
    a, b = values.load(0), values.load(1)
    picked = fly.cond(a < b, lambda: {"x": a, "y": [b, fly.f32(1.0)]}, lambda: {"x": b, "y": [7, 2]})
    for i, value in enumerate([picked["x"], picked["y"][0], picked["y"][1].to(fly.i32)]):
        out.store(value, i)


@EXAMPLES
@given(st.integers(-9, 9), st.integers(-9, 9))
def test_cond_gives_trees(a, b):
    out = np.zeros(3, np.int32)
    compiled(branches, matrix("i32"), matrix("i32"))(np.array([a, b], np.int32), out)
    assert list(out) == ([a, b, 1] if a < b else [b, 7, 2])


@pytest.mark.parametrize("wide", ["start", "stop", "step"])
def test_bounds_of_different_width_meet(wide):
    def kernel(n: fly.i32):
        bounds = {"start": n, "stop": n, "step": n} | {wide: n.to(fly.i64)}
        for j in fly.range(bounds["start"], bounds["stop"], bounds["step"]):
            assert j.dtype is fly.i64

    trace(kernel, "i32")


def test_a_loop_in_mlir():
    def kernel(n: fly.i32, x: fly.f32):
        for j, (a, b) in (loop := fly.range(n, carry=(x, fly.i32(3)))):
            loop.next(a * 2.0, b + j)
        loop.results[0] + 1.0

    filecheck(
        trace(kernel, "i32", "f32"),
        """
        CHECK: func.func @kernel([[N:%.+]]: i32, [[X:%.+]]: f32)
        CHECK: [[INIT:%.+]] = arith.constant 3 : i32
        CHECK: [[R:%.+]]:2 = scf.for [[J:%.+]] = %{{.+}} to [[N]] step %{{[a-z0-9_]+}}
        CHECK-SAME: iter_args([[A:%.+]] = [[X]], [[B:%.+]] = [[INIT]]) -> (f32, i32) : i32
        CHECK: [[A2:%.+]] = arith.mulf [[A]]
        CHECK: [[B2:%.+]] = arith.addi [[B]], [[J]]
        CHECK: scf.yield [[A2]], [[B2]] : f32, i32
        CHECK: arith.addf [[R]]#0
        """,
    )


def test_branches_in_mlir():
    def kernel(n: fly.i32):
        with fly.when(n > 0):
            fly.barrier()
        fly.cond(n > 1, lambda: n + 5, lambda: n)

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: scf.if
        CHECK-NEXT: fly.barrier
        CHECK-NEXT: }
        CHECK: scf.if {{.+}} -> (i32) {
        CHECK: [[SUM:%.+]] = arith.addi
        CHECK-NEXT: scf.yield [[SUM]] : i32
        CHECK-NEXT: } else {
        CHECK-NEXT: scf.yield %arg0 : i32
        CHECK-NOT: scf.execute_region
        """,
    )


def test_fragments_and_tokens_are_carried():
    def kernel(n: fly.i32):
        layout = AccumulatorLayout(fly.target().mma("bf16"), "m")
        fragment = fly.Fragment.zeros(layout, 2, 3)
        token = fly.Token(fly.ir.context.emit("fly.join", [], [token_type()]).results[0])
        for _, (f, t) in (loop := fly.range(n, carry=(fragment, token))):
            fly.wait(t)
            loop.next(f.map(lambda tile, r, c: tile + 1.0), t)
        f, t = loop.results
        assert isinstance(f, fly.Fragment) and f.layout is layout and len(f.tiles) == 2 and len(f.tiles[0]) == 3
        assert isinstance(t, fly.Token)

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: scf.for
        CHECK-SAME: -> (vector<16xf32>, vector<16xf32>, vector<16xf32>,
        CHECK-SAME: vector<16xf32>, vector<16xf32>, vector<16xf32>, !fly.token)
        """,
    )


def test_results_before_and_outside_of_a_loop():
    def kernel(n: fly.i32):
        loop = fly.range(n, carry=n)
        with pytest.raises(ControlFlowError, match=r"loop\.results is only known after the loop"):
            _ = loop.results
        with pytest.raises(ControlFlowError, match=r"loop\.results of a fly\.range loop without a carry"):
            _ = fly.range(n).results
        with pytest.raises(ControlFlowError, match=r"loop\.next\(\.\.\.\) in a fly\.range loop without a carry"):
            fly.range(n).next(1)

    trace(kernel, "i32")


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ((), ControlFlowError, r"takes 1 to 3 bounds, not 0"),
        ((1, 2, 3, 4), ControlFlowError, r"takes 1 to 3 bounds, not 4"),
        ((0, 8, 0), ControlFlowError, r"needs a positive step, not 0"),
        ((1.5,), DTypeError, r"fly.range bound 1.5 is no scalar integer"),
        (("x",), DTypeError, r"fly.range bound <f32> is no scalar integer"),
    ],
)
def test_bad_bounds(bounds, error, message):
    def kernel(x: fly.f32):
        with pytest.raises(error, match=message):
            fly.range(*(x if b == "x" else b for b in bounds))

    trace(kernel, "f32")


def test_a_condition_is_a_scalar_run_time_bool():
    def kernel(n: fly.i32):
        for bad in (True, n, fly.broadcast(n, 4) > 0, 1):
            with pytest.raises(DTypeError, match=r"fly\.cond needs a scalar run-time i1 condition"):
                fly.cond(bad, lambda: n, lambda: n)

    trace(kernel, "i32")


def test_branches_must_agree():
    def kernel(n: fly.i32):
        with pytest.raises(CarryError, match=r"the else branch's result was <i32> and becomes <f32>"):
            fly.cond(n > 0, lambda: n, lambda: n.to(fly.f32))
        with pytest.raises(CarryError, match=r"the else branch's result was <i32> and becomes None"):
            fly.cond(n > 0, lambda: n, lambda: None)

    # a failed branch leaves its operations behind: the kernel is not finished
    with pytest.raises(ControlFlowError, match=r"the else branch of fly\.cond"):
        trace(kernel, "i32")


def test_static_jumps_within_a_when_body_are_fine():
    def kernel(n: fly.i32):
        with fly.when(n > 0):
            for i in range(4):
                if i == 2:
                    break

            def helper():
                return 3

            assert helper() == 3

    trace(kernel, "i32")


@fly.kernel
def literal_first(x: fly.Tensor, y: fly.Tensor):
    i = fly.thread_id.x
    y.store(fly.cond(i > 3, lambda: 1, lambda: x.load(i)), i)


def test_a_literal_may_come_from_either_branch():
    x, y = np.full(64, 0.5, np.float32), np.zeros(64, np.float32)
    literal_first[1, 64](x, y)
    np.testing.assert_array_equal(y, np.where(np.arange(64) > 3, 1, 0.5))
