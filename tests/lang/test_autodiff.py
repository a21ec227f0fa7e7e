"""Derivatives of traced functions: of every operation alone and at its edges, and of random expressions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fly
from fly.backends.target import target
from fly.errors import DerivativeError, DTypeError, TraceError
from tests.backends.builds import build
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

THREADS, VECTOR = 64, 4
COUNT = 1024
PLACES = pytest.mark.parametrize("place", ["gfx942", "gfx950", "sm_90a"])


@fly.kernel
def differentiate(x: fly.Tensor, out: fly.Tensor, *, function: Any, inputs: int):
    """out[0] = function(*rows of x), out[1 + i] = its derivative with respect to row i."""
    first = (fly.block_id.x * THREADS + fly.thread_id.x) * VECTOR
    rows = [x.load(row, first, length=VECTOR) for row in range(inputs)]
    with fly.Tape() as tape:
        value = function(*rows)
    for i, result in enumerate((value, *tape.gradients(value, rows).inputs)):
        out.store(result, i, first)


def run(place: str, function: Callable, x: np.ndarray) -> np.ndarray:
    """The function's value and derivatives, in the emulator of AMD's GPUs or the simulator of NVIDIA's."""
    inputs, count = x.shape
    assert count % (THREADS * VECTOR) == 0
    out = np.full((1 + inputs, count), np.nan, np.float32)
    statics, blocks = {"function": function, "inputs": inputs}, count // (THREADS * VECTOR)
    if place.startswith("sm"):
        module = trace(differentiate, *[matrix("f32", 2)] * 2, arch=place, block=THREADS, **statics)
        with np.errstate(all="ignore"):
            Machine(Program.of(module, target(place)))(flat(x, out), (blocks, 1, 1))
        return out
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLY_ARCH", place)
        differentiate[blocks, THREADS](x, out, **statics)
    return out


# what torch calls the same
NAMES = (
    "exp2",
    "exp",
    "log",
    "log2",
    "tanh",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "erf",
    "maximum",
    "minimum",
    "pow",
    "floor",
)
FLY = SimpleNamespace(
    **{name: getattr(fly, name) for name in (*NAMES, "rcp", "fma", "select")},
    absolute=fly.absolute,
    less=operator.lt,
    half=lambda x: x.to(fly.f16).to(fly.f32),
    brain=lambda x: x.to(fly.bf16, rounding="nearest_any").to(fly.f32),
    turned=lambda x: fly.concat([x[2:], x[:2]]),
    mirrored=lambda x: fly.from_elements([x[3], x[2], x[1], x[0]]),
    mean=lambda x: fly.broadcast(fly.reduce_sum(x) * 0.25, 4),
)
TORCH = SimpleNamespace(
    **{name: getattr(torch, name) for name in NAMES},
    absolute=torch.abs,
    less=torch.lt,
    rcp=torch.reciprocal,
    fma=lambda a, b, c: a * b + c,
    select=torch.where,
    half=lambda x: x,
    brain=lambda x: x,
    turned=lambda x: torch.roll(x.view(-1, 4), 2, 1).reshape(-1),
    mirrored=lambda x: x.view(-1, 4).flip(1).reshape(-1),
    mean=lambda x: x.view(-1, 4).mean(1, keepdim=True).expand(-1, 4).reshape(-1),
)


@dataclass(frozen=True)
class Of:
    """A function of a name space of operations and of inputs, as one of inputs."""

    operations: str
    function: Callable

    def __call__(self, *inputs: Any) -> Any:
        return self.function({"fly": FLY, "torch": TORCH}[self.operations], *inputs)


def by_torch(function: Callable, x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The function's value and derivatives by torch's autograd."""
    rows = [torch.from_numpy(row).to(dtype).requires_grad_() for row in x]
    value = Of("torch", function)(*rows)
    found = torch.autograd.grad(value.sum(), rows, allow_unused=True)
    grads = [torch.zeros_like(row) if grad is None else grad for row, grad in zip(rows, found, strict=True)]
    return torch.stack([value, *grads]).detach().double().numpy()


def by_differences(function: Callable, x: np.ndarray) -> np.ndarray:
    """Derivatives of an elementwise function by central differences in f64."""
    step, wide, found = 1e-6, torch.from_numpy(x.astype(np.float64)), []
    for i in range(len(x)):
        moved = [torch.stack([row + (i == j) * sign * step for j, row in enumerate(wide)]) for sign in (1, -1)]
        up, down = (Of("torch", function)(*rows) for rows in moved)
        found.append(((up - down) / (2 * step)).numpy())
    return np.stack(found)


# each operation with where its inputs are drawn from
ANY, POSITIVE, SMALL = (-4.0, 4.0), (0.05, 8.0), (-1.0, 1.0)
OPERATIONS: dict[str, tuple[Callable, tuple[tuple[float, float], ...]]] = {
    "add": (lambda m, a, b: a + b, (ANY, ANY)),
    "subtract": (lambda m, a, b: a - b, (ANY, ANY)),
    "subtract from a number": (lambda m, a: 3.0 - a, (ANY,)),
    "multiply": (lambda m, a, b: a * b, (ANY, ANY)),
    "square": (lambda m, a: a * a, (ANY,)),
    "divide": (lambda m, a, b: a / b, (ANY, POSITIVE)),
    "divide a number": (lambda m, a: 2.0 / a, (POSITIVE,)),
    "negate": (lambda m, a: -a, (ANY,)),
    "fma": (lambda m, a, b, c: m.fma(a, b, c), (ANY, ANY, ANY)),
    "fma of one": (lambda m, a: m.fma(a, a, a), (ANY,)),
    "maximum": (lambda m, a, b: m.maximum(a, b), (ANY, ANY)),
    "minimum": (lambda m, a, b: m.minimum(a, b), (ANY, ANY)),
    "select": (lambda m, a, b: m.select(a < b, a * a, b * 3.0), (ANY, ANY)),
    "absolute": (lambda m, a: m.absolute(a), (ANY,)),
    "exp2": (lambda m, a: m.exp2(a), (ANY,)),
    "exp": (lambda m, a: m.exp(a), (ANY,)),
    "log2": (lambda m, a: m.log2(a), (POSITIVE,)),
    "log": (lambda m, a: m.log(a), (POSITIVE,)),
    "rcp": (lambda m, a: m.rcp(a), (POSITIVE,)),
    "sqrt": (lambda m, a: m.sqrt(a), (POSITIVE,)),
    "rsqrt": (lambda m, a: m.rsqrt(a), (POSITIVE,)),
    "tanh": (lambda m, a: m.tanh(a), (ANY,)),
    "sin": (lambda m, a: m.sin(a), (ANY,)),
    "cos": (lambda m, a: m.cos(a), (ANY,)),
    "erf": (lambda m, a: m.erf(a), (ANY,)),
    "pow": (lambda m, a, b: m.pow(a, b), (POSITIVE, ANY)),
    "a product": (lambda m, a: a**3, (ANY,)),
    "a static power": (lambda m, a: a**2.5, (POSITIVE,)),
    "a power of a number": (lambda m, a: 2.0**a, (ANY,)),
    "floor": (lambda m, a: m.floor(a) * a, (ANY,)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@PLACES
def test_every_operation_has_the_derivative_of_differences(place, name):
    function, ranges = OPERATIONS[name]
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    x = np.stack([random.uniform(*ends, COUNT) for ends in ranges]).astype(np.float32)
    found = run(place, Of("fly", function), x)[1:]
    wanted = by_differences(function, x)
    kinks = np.abs(by_differences(function, x + np.float32(3e-6)) - wanted) > 1e-2 * (1 + np.abs(wanted))
    assert kinks.mean() < 0.02
    bound = 1e-5 * (1 + np.abs(wanted))  # of differences in f64, whose values are up to 1e5, and of fast instructions
    assert (kinks | (np.abs(found - wanted) <= bound)).all(), (seed, np.abs(found - wanted).max())


def test_vectors_are_made_and_taken_apart():
    seed = np.random.SeedSequence().entropy
    x = np.random.default_rng(seed).uniform(-2, 2, (2, COUNT)).astype(np.float32)

    def function(m, a, b):
        return m.turned(a * b) * m.mirrored(b) + m.mean(a * a) * b + m.turned(m.mirrored(a))

    for place in ("gfx950", "sm_90a"):
        np.testing.assert_allclose(
            run(place, Of("fly", function), x), by_torch(function, x, torch.float64), 1e-5, 1e-5, err_msg=str(seed)
        )


@PLACES
def test_cotangents_pass_through_narrow_floats_unrounded(place):
    x = np.random.default_rng(0).uniform(-2, 2, (2, 256)).astype(np.float32)
    found = run(place, lambda a, b: FLY.half(a) * 1.2345678 + FLY.brain(b) * 3.1415927, x)
    np.testing.assert_array_equal(found[1], np.float32(1.2345678))
    np.testing.assert_array_equal(found[2], np.float32(3.1415927))


def test_cotangents_are_f32_or_f64():
    def kernel(n: fly.f32, m: fly.f64):
        for x, cotangents in ((n.to(fly.bf16), fly.f32), (n.to(fly.f16), fly.f32), (n, fly.f32), (m, fly.f64)):
            with fly.Tape() as tape:
                value = x * x + 1.0
            for of in (value, x):
                found = tape.gradients(of, [x, n, m]).inputs
                assert [g.dtype for g in found] == [cotangents, fly.f32, fly.f64]

    trace(kernel, "f32", "f64")


@fly.kernel
def differentiate_doubles(x: fly.Tensor, out: fly.Tensor):
    """out = the derivatives of two functions of x, f64."""
    i = fly.thread_id.x
    n = x.load(i)
    with fly.Tape() as tape:
        values = fly.exp2(n) * fly.sqrt(n) / (n + 1.0), fly.rsqrt(n) - fly.absolute(fly.maximum(n, 2.0) - n * n)
    for row, value in enumerate(values):
        out.store(tape.gradients(value, [n]).inputs[0], row, i)


def test_derivatives_of_doubles_are_doubles(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    x = np.random.default_rng().uniform(0.1, 9.0, 64)
    out = np.zeros((2, 64))
    differentiate_doubles[1, 64](x, out)
    n = torch.from_numpy(x).requires_grad_()
    values = torch.exp2(n) * n.sqrt() / (n + 1), n.rsqrt() - (n.clamp(min=2) - n * n).abs()
    wanted = [torch.autograd.grad(value.sum(), n)[0].numpy() for value in values]
    np.testing.assert_allclose(out, wanted, 1e-13)


INF, NAN = math.inf, math.nan
LARGE = 3e38
# name, function, inputs, derivatives with respect to each of them
EDGES: dict[str, tuple[Callable, tuple[float, ...], tuple[float, ...]]] = {
    "tanh, large": (fly.tanh, (50.0,), (0.0,)),
    "tanh, negative and large": (fly.tanh, (-LARGE,), (0.0,)),
    "tanh, infinite": (fly.tanh, (INF,), (0.0,)),
    "tanh, 0": (fly.tanh, (0.0,), (1.0,)),
    "maximum of equal ones": (fly.maximum, (2.0, 2.0), (0.5, 0.5)),
    "minimum of equal ones": (fly.minimum, (-1.0, -1.0), (0.5, 0.5)),
    "maximum of one with itself": (lambda a: fly.maximum(a, a), (7.0,), (1.0,)),
    "maximum with NaN": (fly.maximum, (NAN, 2.0), (0.0, 1.0)),
    "maximum with infinity": (fly.maximum, (-INF, INF), (0.0, 1.0)),
    "absolute, 0": (fly.absolute, (0.0,), (0.0,)),
    "sqrt, 0": (fly.sqrt, (0.0,), (INF,)),
    "log, 0": (fly.log, (0.0,), (INF,)),
    "log2, 0": (fly.log2, (0.0,), (INF,)),
    "exp2, overflow": (fly.exp2, (200.0,), (INF,)),
    "exp2, underflow": (fly.exp2, (-200.0,), (0.0,)),
    "exp2, -infinite": (fly.exp2, (-INF,), (0.0,)),
    "rcp, infinite": (fly.rcp, (INF,), (0.0,)),
    "divide 0": (lambda a, b: a / b, (0.0, 2.0), (0.5, 0.0)),
    "pow of 0": (fly.pow, (0.0, 2.0), (0.0, 0.0)),
    "pow to 0": (fly.pow, (0.0, 0.0), (0.0, 0.0)),
    "select leaves sqrt at 0 out": (lambda a: fly.select(a > 0.0, fly.sqrt(a), a * 2.0), (0.0,), (2.0,)),
    "select leaves log2 at 0 out": (lambda a: fly.select(a > 0.0, fly.log2(a), 0.0), (0.0,), (0.0,)),
    "select leaves log out": (lambda a: fly.select(a > 0.0, fly.log(a), 0.0), (-1.0,), (0.0,)),
    "select leaves a quotient out": (lambda a, b: fly.select(b != 0.0, a / b, a), (3.0, 0.0), (1.0, 0.0)),
    "select leaves rsqrt out": (lambda a: fly.select(a > 0.0, fly.rsqrt(a), a), (0.0,), (1.0,)),
    "select leaves an overflow out": (lambda a: fly.select(a < 99.0, fly.exp2(a), 99.0), (500.0,), (0.0,)),
    "by way of an integer": (lambda a: a.to(fly.i32).to(fly.f32) + a, (2.5,), (1.0,)),
    "by way of its bits": (lambda a: (a.bitcast(fly.i32) & -65536).bitcast(fly.f32), (2.5,), (0.0,)),
    "constant": (lambda a: fly.broadcast(fly.f32(3.0), len(a)), (2.5,), (0.0,)),
    "itself": (lambda a: a, (2.5,), (1.0,)),
}


@pytest.mark.parametrize("name", EDGES)
@PLACES
def test_edges(place, name):
    function, inputs, wanted = EDGES[name]
    x = np.repeat(np.array(inputs, np.float32)[:, None], 256, axis=1)
    found = run(place, function, x)
    np.testing.assert_array_equal(found[1:], np.repeat(np.array(wanted, np.float32)[:, None], 256, axis=1))


CLOSE = 1e-5  # of numbers that single precision may have in the other order
# random expressions: (name, number of operands); each is safe for any operands below about 1e3
SAFE: dict[str, tuple[int, Callable]] = {
    "add": (2, lambda m, a, b: a + b),
    "sub": (2, lambda m, a, b: a - b),
    "mul": (2, lambda m, a, b: m.tanh(a) * b),
    "div": (2, lambda m, a, b: a / (m.absolute(b) + 0.5)),
    "neg": (1, lambda m, a: -a),
    "fma": (3, lambda m, a, b, c: m.fma(m.tanh(a), b, c)),
    "max": (2, lambda m, a, b: m.maximum(a, b)),
    "min": (2, lambda m, a, b: m.minimum(a, b)),
    "select": (3, lambda m, a, b, c: m.select(m.less(a, b), b, c)),
    "abs": (1, lambda m, a: m.absolute(a)),
    "tanh": (1, lambda m, a: m.tanh(a)),
    "exp2": (1, lambda m, a: m.exp2(m.tanh(a) * 2.0)),
    "log2": (1, lambda m, a: m.log2(m.absolute(a) + 0.5)),
    "log": (1, lambda m, a: m.log(m.absolute(a) + 0.5)),
    "rcp": (1, lambda m, a: m.rcp(m.absolute(a) + 0.5)),
    "sqrt": (1, lambda m, a: m.sqrt(a * a + 0.5)),
    "rsqrt": (1, lambda m, a: m.rsqrt(a * a + 0.5)),
    "sin": (1, lambda m, a: m.sin(a)),
    "turned": (1, lambda m, a: m.turned(a)),
    "mean": (1, lambda m, a: m.mean(a)),
}


@dataclass(frozen=True)
class Node:
    """An operation of the results of others, or input number `name`."""

    name: str | int
    operands: tuple[Node, ...] = ()

    def __call__(self, m: Any, *inputs: Any) -> Any:
        if isinstance(self.name, int):
            return inputs[self.name]
        return SAFE[self.name][1](m, *(operand(m, *inputs) for operand in self.operands))


def expression(random: np.random.Generator, inputs: int, operations: int) -> Node:
    """Operations of inputs and of earlier operations, whose results are used more than once."""
    nodes = [Node(i) for i in range(inputs)]
    for _ in range(operations):
        name = random.choice(list(SAFE))
        picked = random.integers(max(0, len(nodes) - 4), len(nodes), SAFE[name][0])
        nodes.append(Node(str(name), tuple(nodes[i] for i in picked)))
    return nodes[-1]


def undecided(function: Node, x: np.ndarray) -> np.ndarray:
    """Where numbers that an expression compares are so close that rounding decides which is the greater one.

    Derivatives of all that a thread has are the wrong ones then.
    """
    found = np.zeros(COUNT, bool)

    def compared(result: Callable) -> Callable:
        def of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            found[(torch.abs(a - b) < CLOSE * (1 + torch.abs(a))).numpy()] = True
            return result(a, b)

        return of

    names = "less", "maximum", "minimum"
    noting = {name: compared(getattr(TORCH, name)) for name in names}
    noting["absolute"] = lambda a: noting["maximum"](a, -a)
    function(SimpleNamespace(**{**vars(TORCH), **noting}), *torch.from_numpy(x).double())
    return np.repeat(found.reshape(-1, VECTOR).any(axis=1), VECTOR)


@pytest.mark.parametrize("number", range(6))
@PLACES
def test_random_expressions(place, number):
    """At most twice torch's error in f32, where rounding does not decide between two sides of a kink."""
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed)
    x = random.uniform(-2, 2, (3, COUNT)).astype(np.float32)
    drawn = (expression(random, 3, 9) for _ in range(100))
    # others compare a number with itself, or with its tanh
    function, kinks = next((f, kinks) for f in drawn if (kinks := undecided(f, x)).mean() < 0.05)
    found = run(place, Of("fly", function), x)
    exact, single = (by_torch(function, x, dtype) for dtype in (torch.float64, torch.float32))
    size = 1 + np.abs(exact).max(axis=1, keepdims=True)
    error, allowed = (np.abs(result - exact)[:, ~kinks] / size for result in (found, single))
    assert error.max() <= 2e-5 + 2 * allowed.max(), seed


@fly.kernel
def gather(x: fly.Tensor, table: fly.Tensor, number: fly.Tensor, out: fly.Tensor, found: fly.Tensor):
    """out = x * table[i % 8] + table[0]; found[slot, i] = (coordinate, cotangent) of each load."""
    i = fly.thread_id.x
    score = x.load(i)
    with fly.Tape() as tape:
        number.load(i % 8)
        weight, first = table.load(i % 8).to(fly.f32), table.load(0).to(fly.f32)
        value = score * weight + first
    gradients = tape.gradients(value, [score], 2.0, loads=True)
    assert len(gradients.inputs) == 1 and all(load.source is table for load in gradients.loads)
    out.store(gradients.inputs[0], i)
    for slot, load in enumerate(gradients.loads):
        (coordinate,) = load.coordinates
        found.store(
            (coordinate if isinstance(coordinate, fly.Value) else fly.i32(coordinate)).to(fly.f32), 2 * slot, i
        )
        found.store(load.cotangent, 2 * slot + 1, i)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_loads_have_cotangents_and_coordinates(arch, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    random = np.random.default_rng()
    x, table = random.uniform(-2, 2, 64).astype(np.float32), random.uniform(-2, 2, 8).astype(np.float16)
    out, found = np.zeros(64, np.float32), np.zeros((4, 64), np.float32)
    gather[1, 64](x, table, np.arange(8, dtype=np.int32), out, found)
    at = np.arange(64) % 8
    np.testing.assert_array_equal(out, 2 * table[at].astype(np.float32))
    np.testing.assert_array_equal(found, [at, 2 * x, 0 * at, 2 + 0 * x])


def test_loads_are_left_out_unless_asked_for():
    def kernel(x: fly.Tensor, n: fly.f32):
        with fly.Tape() as tape:
            value = n * x.load(0)
        assert tape.gradients(value, [n]).loads == ()
        assert len(tape.gradients(value, [n], loads=True).loads) == 1
        assert len(tape.gradients(n + 1.0, [n], loads=True).loads) == 0

    trace(kernel, matrix(), "f32")


def test_tapes_may_be_nested():
    @fly.kernel
    def kernel(x: fly.Tensor):
        n = x.load(0)
        with fly.Tape() as outer:
            with fly.Tape() as inner:
                cube = n * n * n
            (first,) = inner.gradients(cube, [n]).inputs
        (second,) = outer.gradients(first, [n]).inputs
        fly.check(second == 6.0 * n, "second derivative {} at {}", second, n)

    kernel[1, 64](np.array([1.5], np.float32))


def test_an_intermediate_value_can_be_an_input():
    @fly.kernel
    def kernel(x: fly.Tensor):
        n = x.load(0)
        with fly.Tape() as tape:
            middle = n * 3.0
            value = middle * middle
        by_middle, by_n = tape.gradients(value, [middle, n]).inputs
        fly.check((by_middle == 6.0 * n) & (by_n == 18.0 * n), "{} {}", by_middle, by_n)

    kernel[1, 64](np.array([1.25], np.float32))


def softcap(score: fly.Tensor, out: fly.Tensor):
    thread = fly.thread_id.x
    x = score.load(thread)
    with fly.Tape() as tape:
        value = 30.0 * fly.tanh(x * (1 / 30.0))
    (slope,) = tape.gradients(value, [x]).inputs
    out.store(value * slope, thread)


@pytest.mark.parametrize(
    ("arch", "instruction"), [("gfx942", "v_exp_f32"), ("gfx950", "v_exp_f32"), ("sm_90a", r"tanh\.approx")]
)
def test_a_derivative_uses_the_values_of_its_function(arch, instruction):
    isa = build(fly.kernel(softcap), arch, specs=(matrix(), matrix()), block=64).isa
    assert len(re.findall(instruction, isa)) == 1


def test_a_derivative_is_plain_arithmetic():
    def kernel(n: fly.f32, c: fly.f32):
        with fly.Tape() as tape:
            value = fly.fma(n, n, c)
        tape.gradients(value, [n])

    filecheck(
        trace(kernel, "f32", "f32"),
        """
        CHECK: func.func @kernel(%[[N:.*]]: f32, %{{.*}}: f32)
        CHECK: math.fma %[[N]], %[[N]]
        CHECK: %[[ONE:.*]] = arith.constant 1.0
        CHECK: %[[A:.*]] = arith.mulf %[[ONE]], %[[N]]
        CHECK: %[[B:.*]] = arith.mulf %[[ONE]], %[[N]]
        CHECK: arith.addf %[[A]], %[[B]]
        """,
    )


def test_code_on_a_tape_is_the_code_without_it():
    def kernel(n: fly.f32, *, taped: bool):
        def body() -> None:
            fly.select(n > 0.0, fly.log(n), fly.tanh(n))

        if taped:
            with fly.Tape():
                body()
        else:
            body()

    with_tape, without = (str(trace(kernel, "f32", taped=taped)) for taped in (True, False))
    assert with_tape == without


def branch(n: fly.Value) -> fly.Value:
    return fly.cond(n > 0.0, lambda: n * 2.0, lambda: n)


def loop(n: fly.Value) -> fly.Value:
    for _, x in (steps := fly.range(4, carry=fly.f32(0.0))):
        steps.next(x + n)
    return steps.results


def power_of_two_loop(n: fly.Value) -> fly.Value:
    for x, _ in (steps := fly.while_((n, fly.i32(0)), lambda c: c[0] > 1.0)):
        steps.next(x * 0.5, fly.i32(1))
    return steps.results[0]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (branch, r"a branch or a loop at run time \(fly\.cond, "),
        (loop, r"a branch or a loop at run time"),
        (power_of_two_loop, r"a branch or a loop at run time"),
        (lambda n: fly.shuffle_xor(n, 1), r"fly\.shuffle"),
    ],
)
def test_what_has_no_derivative_is_named_at_its_line(function, what):
    def kernel(n: fly.f32):
        with fly.Tape() as tape:
            value = function(n) * 3.0
        with pytest.raises(
            DerivativeError, match=rf"test_autodiff\.py:\d+: {what}.* has no derivative.*score_mod_bwd"
        ):
            tape.gradients(value, [n])

    trace(kernel, "f32")


def test_branches_and_loops_that_do_not_depend_on_an_input_are_constants():
    def kernel(n: fly.f32, other: fly.f32):
        with fly.Tape() as tape:
            value = n * branch(other) + loop(other)
        tape.gradients(value, [n])
        with pytest.raises(DerivativeError):
            tape.gradients(value, [other])

    trace(kernel, "f32", "f32")


def test_a_tape_leaves_nothing_behind():
    def kernel(n: fly.f32):
        with pytest.raises(ZeroDivisionError), fly.Tape():
            operator.truediv(1, 0)
        with fly.Tape() as tape:
            value = n * n
        assert len(tape._entries) == 1
        value * n
        assert len(tape._entries) == 1

    trace(kernel, "f32")


def test_mistakes():
    def kernel(n: fly.f32, k: fly.i32):
        with fly.Tape() as tape:
            value = n * 2.0
            with pytest.raises(TraceError, match="a tape that is still open"):
                tape.gradients(value, [n])
        with pytest.raises(DTypeError, match="an input of a gradient is <i32>; expected a traced float"):
            tape.gradients(value, [k])
        with pytest.raises(DTypeError, match="the value of a gradient is <i1>"):
            tape.gradients(value > 0.0, [n])

    trace(kernel, "f32", "i32")
