"""Functions written with torch, as kernels trace them: every operation's numbers, and what is refused by name."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F

import fly
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels.flex.operations import OPERATIONS
from kernels.flex.program import Program
from kernels.flex.translation import translated
from kernels.problem.mods import Aux

CPU = torch.device("cpu")
COUNT = 64


# of a float x, of y = |x| + 0.25, and of integers from 1 on
FLOATS = (
    lambda x, y, b, h, q, k: x + q,
    lambda x, y, b, h, q, k: torch.add(x, y, alpha=3),
    lambda x, y, b, h, q, k: x - 2,
    lambda x, y, b, h, q, k: torch.sub(x, y, alpha=0.5),
    lambda x, y, b, h, q, k: 2 - x,
    lambda x, y, b, h, q, k: torch.rsub(x, y),
    lambda x, y, b, h, q, k: x * y,
    lambda x, y, b, h, q, k: x / y,
    lambda x, y, b, h, q, k: torch.div(x, y, rounding_mode="floor"),
    lambda x, y, b, h, q, k: torch.div(x, 0.7, rounding_mode="trunc"),
    lambda x, y, b, h, q, k: x // y,
    lambda x, y, b, h, q, k: x % y,
    lambda x, y, b, h, q, k: x % -0.7,
    lambda x, y, b, h, q, k: torch.fmod(x, y),
    lambda x, y, b, h, q, k: x**2,
    lambda x, y, b, h, q, k: x**3,
    lambda x, y, b, h, q, k: y**-1,
    lambda x, y, b, h, q, k: 2.0**x,
    lambda x, y, b, h, q, k: torch.pow(y, x),
    lambda x, y, b, h, q, k: -x,
    lambda x, y, b, h, q, k: abs(x),
    lambda x, y, b, h, q, k: torch.sign(x),
    lambda x, y, b, h, q, k: torch.square(x),
    lambda x, y, b, h, q, k: 1 / y,
    lambda x, y, b, h, q, k: torch.reciprocal(y),
    lambda x, y, b, h, q, k: y.sqrt(),
    lambda x, y, b, h, q, k: y.rsqrt(),
    lambda x, y, b, h, q, k: x.exp(),
    lambda x, y, b, h, q, k: torch.exp2(x),
    lambda x, y, b, h, q, k: x.expm1(),
    lambda x, y, b, h, q, k: torch.expm1(x * 1e-4),
    lambda x, y, b, h, q, k: y.log(),
    lambda x, y, b, h, q, k: torch.log2(y),
    lambda x, y, b, h, q, k: torch.log10(y),
    lambda x, y, b, h, q, k: torch.log1p(y),
    lambda x, y, b, h, q, k: torch.log1p(y * 1e-6),
    lambda x, y, b, h, q, k: x.sin(),
    lambda x, y, b, h, q, k: x.cos(),
    lambda x, y, b, h, q, k: torch.erf(x),
    lambda x, y, b, h, q, k: torch.tanh(x),
    lambda x, y, b, h, q, k: torch.tanh(x * 1e-3),
    lambda x, y, b, h, q, k: torch.sigmoid(x),
    lambda x, y, b, h, q, k: torch.relu(x),
    lambda x, y, b, h, q, k: x.floor(),
    lambda x, y, b, h, q, k: x.ceil(),
    lambda x, y, b, h, q, k: x.trunc(),
    lambda x, y, b, h, q, k: (x * 2).round(),
    lambda x, y, b, h, q, k: torch.maximum(x, -y),
    lambda x, y, b, h, q, k: torch.minimum(x, y * 0.5),
    lambda x, y, b, h, q, k: torch.fmax(x, y),
    lambda x, y, b, h, q, k: torch.fmin(x, 0.5 * y),
    lambda x, y, b, h, q, k: x.clamp(-0.5, 0.5),
    lambda x, y, b, h, q, k: x.clamp(max=0.1),
    lambda x, y, b, h, q, k: torch.clamp_min(x, 0.2),
    lambda x, y, b, h, q, k: torch.clamp_max(x, 0.3),
    lambda x, y, b, h, q, k: torch.where(x > 0, x, -1.0),
    lambda x, y, b, h, q, k: torch.where(q > k, 1.5, x),
    lambda x, y, b, h, q, k: torch.where(q > k, 2.0, 3.0),
    lambda x, y, b, h, q, k: F.silu(x),
    lambda x, y, b, h, q, k: F.gelu(x),
    lambda x, y, b, h, q, k: F.softplus(x),
    lambda x, y, b, h, q, k: F.leaky_relu(x),
    lambda x, y, b, h, q, k: x.to(torch.int32),
    lambda x, y, b, h, q, k: (x > 0).float() + (x > 0),
    lambda x, y, b, h, q, k: torch.tensor(3.0) * x,
    lambda x, y, b, h, q, k: torch.full_like(x, 2.5) + x,
    lambda x, y, b, h, q, k: torch.zeros_like(x) + x,
    lambda x, y, b, h, q, k: x.new_ones(()) + x,
    lambda x, y, b, h, q, k: x.clone().detach() + 1,
    lambda x, y, b, h, q, k: torch.isnan(x / (x - x)),
    lambda x, y, b, h, q, k: torch.isinf(x / 0.0),
    lambda x, y, b, h, q, k: q / k,
    lambda x, y, b, h, q, k: q * 0.5,
    lambda x, y, b, h, q, k: x == x.round(),
    lambda x, y, b, h, q, k: x * float("inf"),
)
INTEGERS = (
    lambda x, y, b, h, q, k: q + k,
    lambda x, y, b, h, q, k: q - k,
    lambda x, y, b, h, q, k: 3 - q,
    lambda x, y, b, h, q, k: q * k,
    lambda x, y, b, h, q, k: q // k,
    lambda x, y, b, h, q, k: (q - 9) // 4,
    lambda x, y, b, h, q, k: (q - 9) % k,
    lambda x, y, b, h, q, k: torch.div(q - 9, k, rounding_mode="trunc"),
    lambda x, y, b, h, q, k: torch.fmod(q - 9, k),
    lambda x, y, b, h, q, k: q**2,
    lambda x, y, b, h, q, k: -q,
    lambda x, y, b, h, q, k: abs(q - 9),
    lambda x, y, b, h, q, k: torch.sign(q - 9),
    lambda x, y, b, h, q, k: torch.maximum(q, k),
    lambda x, y, b, h, q, k: q.clamp(2, 5),
    lambda x, y, b, h, q, k: q & k,
    lambda x, y, b, h, q, k: q | 8,
    lambda x, y, b, h, q, k: q ^ k,
    lambda x, y, b, h, q, k: ~q,
    lambda x, y, b, h, q, k: q << 2,
    lambda x, y, b, h, q, k: q >> 1,
    lambda x, y, b, h, q, k: q.bitwise_and(3),
    lambda x, y, b, h, q, k: q.long() * 3_000_000_000,
    lambda x, y, b, h, q, k: q.long() + k,
    lambda x, y, b, h, q, k: q.to(torch.int64),
    lambda x, y, b, h, q, k: q == k,
    lambda x, y, b, h, q, k: q != 4,
    lambda x, y, b, h, q, k: q < k,
    lambda x, y, b, h, q, k: q <= k,
    lambda x, y, b, h, q, k: q > k,
    lambda x, y, b, h, q, k: q >= k,
    lambda x, y, b, h, q, k: x == q,
    lambda x, y, b, h, q, k: (q > 3) & (k < 3),
    lambda x, y, b, h, q, k: (q > 3) | (k < 3),
    lambda x, y, b, h, q, k: (q > 3) ^ (k < 3),
    lambda x, y, b, h, q, k: ~(q > 3),
    lambda x, y, b, h, q, k: torch.logical_and(q, k - 2),
    lambda x, y, b, h, q, k: torch.logical_or(q, k < 0),
    lambda x, y, b, h, q, k: torch.logical_xor(q, k),
    lambda x, y, b, h, q, k: torch.logical_not(q),
    lambda x, y, b, h, q, k: (q > 3) * (k < 3),
    lambda x, y, b, h, q, k: (q > 3) + (k < 3),
    lambda x, y, b, h, q, k: (q > 3).int(),
    lambda x, y, b, h, q, k: q.bool(),
    lambda x, y, b, h, q, k: torch.where(q > 3, q, k),
    lambda x, y, b, h, q, k: q.floor(),
    lambda x, y, b, h, q, k: b + h * 0,
)


def with_positive(function):
    return lambda x, b, h, q, k: function(x, x.abs() + 0.25, b, h, q, k)


@fly.kernel
def evaluated(
    scores: fly.Tensor, places: fly.Tensor, out: fly.Tensor, *aux: fly.Operand, programs: tuple[Program, ...]
) -> None:
    """out[n, i]: the result of program n of number i."""
    i = fly.thread_id.x
    given = (scores.load(i), *(places.load(n, i) for n in range(4)))
    for number, program in enumerate(programs):
        out.store(program(*given, *map(Aux, aux)), number, i)


@pytest.mark.parametrize("functions", [FLOATS, INTEGERS], ids=["floats", "integers"])
def test_operations_give_torchs_numbers(emulate, seed, functions):
    emulate("gfx950", "generic")
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(COUNT, generator=generator)
    places = torch.randint(1, 20, (4, COUNT), generator=generator, dtype=torch.int32)
    programs = tuple(translated(with_positive(f), False, "score_mod", CPU).program for f in functions)
    out = torch.empty(len(functions), COUNT)
    evaluated[1, COUNT](scores, places, out, programs=programs)
    for number, (function, found) in enumerate(zip(functions, out)):
        right = with_positive(function)(scores, *places).float()
        close = torch.isclose(found, right, rtol=1e-5, atol=2e-6, equal_nan=True)
        assert close.all(), f"seed {seed}, number {number}: {found[~close]} for {right[~close]}"


def test_every_operation_is_tried():
    used = {
        step.operation.split(".")[1].strip("_")
        for function in (*FLOATS, *INTEGERS)
        for step in translated(with_positive(function), False, "score_mod", CPU).program.steps
    }
    # other names of what is tried, and what passes a number on
    other = "sgn alias lift_fresh_copy contiguous unsafe_view view reshape expand squeeze to and or xor lshift rshift"
    shifts = {"bitwise_left_shift", "bitwise_right_shift"}
    assert {name.split(".")[1].strip("_") for name in OPERATIONS} <= used | shifts | {*other.split()}


TABLE, VECTOR = torch.arange(36.0).view(4, 9), torch.arange(9)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda s, b, h, q, k: TABLE[h, q - k], [TABLE]),
        (lambda s, b, h, q, k: TABLE[h][q] + TABLE[2, k] + TABLE[h, 3], [TABLE, TABLE[2], TABLE[:, 3]]),
        (lambda s, b, h, q, k: TABLE[h][3], [TABLE]),
        (lambda s, b, h, q, k: s + (TABLE * 2).exp()[VECTOR[h], k], [VECTOR, (TABLE * 2).exp()]),
        (lambda s, b, h, q, k: s * TABLE[1, 2], [TABLE[1, 2].view(1)]),
        (lambda s, b, h, q, k: torch.where((VECTOR > 4)[q], s, 0.0), [(VECTOR > 4).to(torch.int8)]),
    ],
)
def test_what_is_captured_becomes_an_auxiliary_tensor(function, tensors):
    found = translated(function, False, "score_mod", CPU).aux_tensors("score_mod", CPU)
    assert len(found) == len(tensors)
    for x, right in zip(found, tensors):
        torch.testing.assert_close(x, right)


def test_one_function_is_one_program():
    """However often it is made, and with which tensors; another number is another one."""

    def made(factor, table):
        return lambda s, b, h, q, k: s * factor + table[k]

    first, second, third = (
        translated(made(factor, torch.ones(9)), False, "score_mod", CPU) for factor in (2.0, 2.0, math.nan)
    )
    again = translated(made(math.nan, torch.ones(9)), False, "score_mod", CPU)
    assert first.program == second.program != third.program == again.program
    assert hash(first.program) == hash(second.program)
    function = made(-1, torch.ones(9))
    assert translated(function, False, "score_mod", CPU) is translated(function, False, "score_mod", CPU)
    before = translated(function, False, "score_mod", CPU)
    function.__closure__[0].cell_contents = -2
    assert translated(function, False, "score_mod", CPU).program != before.program


def test_what_may_change_unseen_is_recorded_again():
    class Settings:
        factor = 2.0

    settings = Settings()

    def function(s, b, h, q, k):
        return s * settings.factor

    before = translated(function, False, "score_mod", CPU)
    settings.factor = 3.0
    assert translated(function, False, "score_mod", CPU).program != before.program


def test_functions_and_their_tensors_are_not_kept():
    table = torch.ones(9)
    left = weakref.ref(table)

    def function(s, b, h, q, k, table=table):
        return s + table[k]

    translated(function, False, "score_mod", CPU)
    del table, function
    gc.collect()
    assert left() is None


REFUSED = {
    "no function": (3, ArgumentTypeError, r"score_mod must be a function, got 3 \(int\)"),
    "a branch": (
        lambda s, b, h, q, k: s if s > 0 else -s,
        UnsupportedError,
        "score_mod reads a number .* torch.where",
    ),
    "a number of the host": (lambda s, b, h, q, k: s * q.item(), UnsupportedError, "score_mod reads a number"),
    "no tensor": (lambda s, b, h, q, k: "s", ArgumentTypeError, "score_mod must return a number"),
    "a tensor of many": (lambda s, b, h, q, k: TABLE[h], ArgumentTypeError, "score_mod must return a number"),
    "a sum over a row": (lambda s, b, h, q, k: s + TABLE[h].sum(), UnsupportedError, "uses aten.sum.default"),
    "all of a tensor": (lambda s, b, h, q, k: (s + TABLE).sum(), UnsupportedError, r"result of shape \(4, 9\)"),
    "an unknown operation": (lambda s, b, h, q, k: torch.special.i0(s), UnsupportedError, "uses aten.i0.default"),
    "doubles": (
        lambda s, b, h, q, k: s.double(),
        UnsupportedError,
        "computes with torch.float64; accepted: torch.bool",
    ),
    "a slice": (lambda s, b, h, q, k: s + TABLE[h, :2].sum(), UnsupportedError, "an index slice.* beside a place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_translated_is_refused_by_name(name):
    function, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^flex_attention: .*{message}"):
        translated(function, False, "score_mod", CPU)


@pytest.mark.parametrize("function", [lambda *_: -math.inf, lambda *_: 3, lambda *_: TABLE[1, 2], lambda s, *_: s])
def test_results_may_depend_on_little(emulate, function):
    emulate("gfx950", "generic")
    found, places = translated(function, False, "score_mod", CPU), torch.ones(4, COUNT, dtype=torch.int32)
    aux = found.aux_tensors("score_mod", CPU)
    scores, out = torch.randn(COUNT), torch.empty(1, COUNT)
    evaluated[1, COUNT](scores, places, out, *aux, programs=(found.program,))
    assert torch.equal(out[0], torch.as_tensor(function(scores)).float().expand(COUNT))


def test_a_mask_returns_a_bool():
    with pytest.raises(ArgumentTypeError, match=r"mask_mod must return a bool, got torch.int32"):
        translated(lambda b, h, q, k: q - k, True, "mask_mod", CPU)
    assert translated(lambda b, h, q, k: True, True, "mask_mod", CPU).program.result.value is True


def test_captured_tensors_are_on_the_device():
    found = translated(lambda s, b, h, q, k: TABLE[h, k], False, "score_mod", CPU)
    with pytest.raises(ArgumentError, match=r"score_mod loads from a tensor on cpu: move it to query's device meta"):
        found.aux_tensors("score_mod", torch.device("meta"))
