"""Every mistake that a kernel author can make: the class, the whole message, and the line that it names.

Each mistake is a kernel; the line at fault ends in `# <-`. Mistakes of callers are tested with the runtime.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import pytest

import fly
from fly.errors import (
    AtomError,
    AuthorError,
    CarryError,
    ControlFlowError,
    DTypeError,
    KernelDefinitionError,
    LayoutError,
    MessageError,
    ShapeError,
    StaticValueError,
    TraceError,
)
from tests.tracing import matrix, trace

MISTAKES: list[tuple[Callable, type[AuthorError], str]] = []


def mistake(error: type[AuthorError], message: str) -> Callable[[Callable], Callable]:
    """Register a kernel that must fail with exactly this message (a regular expression)."""

    def register(function: Callable) -> Callable:
        MISTAKES.append((function, error, message))
        return function

    return register


# run-time values where Python needs static ones

RUN_TIME = r" of <{}>, which is only known at run time; "
TRUTH = (
    r"Python needs the truth value \(if, while, and, or, not\)" + RUN_TIME.format("i1") + r"use fly\.when\(c\), "
    r"fly\.cond\(c, f, g\) or fly\.select\(c, a, b\), & \| ~ between conditions, fly\.maximum for max, "
    r"fly\.minimum for min"
)


@mistake(StaticValueError, TRUTH)
def python_if(x: fly.Tensor, n: fly.i32, f: fly.f32):
    if n > 3:  # <-
        x.store(f, 0)


@mistake(StaticValueError, TRUTH)
def python_and(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.select(n > 3 and n < 5, f, 0.0)  # <-


@mistake(StaticValueError, TRUTH)
def python_not(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.select(not (n > 3), f, 0.0)  # <-


@mistake(StaticValueError, TRUTH)
def chained_comparison(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.select(0 < n < 5, f, 0.0)  # <-


@mistake(StaticValueError, TRUTH)
def python_max(x: fly.Tensor, n: fly.i32, f: fly.f32):
    max(n, 3)  # <-


@mistake(
    StaticValueError,
    r"Python needs the integer value" + RUN_TIME.format("i32") + r"use fly\.range for loops, or a static parameter",
)
def python_range(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for i in range(n):  # <-
        x.store(f, i)


@mistake(StaticValueError, r"int\(\)" + RUN_TIME.format("f32") + r"use \.to\(fly\.i32\), or a static parameter")
def python_int(x: fly.Tensor, n: fly.i32, f: fly.f32):
    int(f)  # <-


@mistake(
    StaticValueError,
    r"float\(\)" + RUN_TIME.format("f32") + r"use \.to\(fly\.f32\), and fly\.exp where Python has math\.exp",
)
def python_math(x: fly.Tensor, n: fly.i32, f: fly.f32):
    math.exp(f)  # <-


@mistake(
    StaticValueError,
    r"indexing a vector with the value" + RUN_TIME.format("i32") + r"vectors are indexed at compile time",
)
def run_time_index(x: fly.Tensor, n: fly.i32, f: fly.f32):
    x.load(0, length=4)[n]  # <-


@mistake(StaticValueError, r"shared buffer 'b' has size <i32>; expected a static number of bytes")
def run_time_shared_size(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.SharedMemory("b", "f32", n)  # <-


# dtypes


@mistake(DTypeError, r"<f32> and <i32> do not mix; convert one with \.to\(\.\.\.\)")
def mixed_kinds(x: fly.Tensor, n: fly.i32, f: fly.f32):
    f + n  # <-


@mistake(DTypeError, r"<f16> and <bf16> do not mix; convert one with \.to\(\.\.\.\)")
def mixed_halves(x: fly.Tensor, n: fly.i32, f: fly.f32):
    f.to(fly.f16) * f.to(fly.bf16)  # <-


@mistake(DTypeError, r"1\.5 is not an integer and its partner is i32; convert with \.to\(fly\.f32\)")
def fraction_and_integer(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n * 1.5  # <-


@mistake(DTypeError, r"/ takes floats, not <i32>; use // for integers")
def true_division(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n / 2  # <-


@mistake(DTypeError, r"// takes integers, not <f32>")
def floor_division_of_floats(x: fly.Tensor, n: fly.i32, f: fly.f32):
    f // 2.0  # <-


@mistake(DTypeError, r"division by zero")
def division_by_zero(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n % 0  # <-


@mistake(DTypeError, r"bitwise operators take integers, not <f32>; use \.bitcast\(fly\.i32\)")
def bits_of_a_float(x: fly.Tensor, n: fly.i32, f: fly.f32):
    f & 1  # <-


@mistake(DTypeError, r"cannot shift <i32> by 32; expected 0 to 31")
def shift_too_far(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n << 32  # <-


@mistake(DTypeError, r"4294967296 does not fit i32")
def literal_too_large(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n + (1 << 32)  # <-


@mistake(DTypeError, r"3000000000 does not fit <i32> in a signed comparison; widen the value with \.to\(\.\.\.\)")
def comparison_with_a_bit_pattern(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.select(n < 3_000_000_000, f, 0.0)  # <-


@mistake(DTypeError, r"exp2 takes floats, not <i32>; convert with \.to\(fly\.f32\)")
def function_of_an_integer(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.exp2(n)  # <-


@mistake(DTypeError, r"sin takes f16, bf16 and f32, not <f64>; convert with \.to\(fly\.f32\)")
def sine_of_f64(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.sin(f.to(fly.f64))  # <-


@mistake(DTypeError, r"erf takes floats, not <f8e4m3>; convert with \.to\(fly\.f32\)")
def function_of_a_byte(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.erf(fly.i8(3).bitcast(fly.f8e4m3))  # <-


@mistake(DTypeError, r"the argument of log is 'x'; expected a traced value or a number")
def function_of_a_string(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.log("x")  # <-


@mistake(
    DTypeError,
    r"<i32> \*\* -1: an integer's exponent is a static integer from 0 on; convert with \.to\(fly\.f32\)",
)
def negative_power_of_an_integer(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n**-1  # <-


@mistake(
    DTypeError,
    r"2 \*\* <i32>: an integer's exponent is a static integer from 0 on; convert with \.to\(fly\.f32\), or "
    r"shift 1 for powers of two",
)
def power_with_a_traced_exponent(x: fly.Tensor, n: fly.i32, f: fly.f32):
    2**n  # <-


@mistake(DTypeError, r"unknown dtype 'float'; expected one of i1, i8, i16, i32, i64, f16, bf16, f32, .*")
def unknown_dtype(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n.to("float")  # <-


@mistake(DTypeError, r"select needs an i1 condition, not <i32>")
def select_by_a_number(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.select(n, f, 0.0)  # <-


@mistake(DTypeError, r"cannot store <i32> into <tensor of rank 1, f32>; convert with \.to\(fly\.f32\)")
def store_of_another_dtype(x: fly.Tensor, n: fly.i32, f: fly.f32):
    x.store(n, 0)  # <-


@mistake(DTypeError, r"'text' is no traced value or number")
def operand_of_another_kind(x: fly.Tensor, n: fly.i32, f: fly.f32):
    n + "text"  # <-


# shapes


@mistake(ShapeError, r"<tensor of rank 1, f32> takes 1 coordinates, not 2")
def too_many_coordinates(x: fly.Tensor, n: fly.i32, f: fly.f32):
    x.load(n, 0)  # <-


@mistake(ShapeError, r"<4 x f32> and <2 x f32> have different lengths")
def lengths_differ(x: fly.Tensor, n: fly.i32, f: fly.f32):
    x.load(0, length=4) + x.load(0, length=2)  # <-


@mistake(ShapeError, r"index 4 is out of range for <4 x f32>")
def index_out_of_range(x: fly.Tensor, n: fly.i32, f: fly.f32):
    x.load(0, length=4)[4]  # <-


@mistake(ShapeError, r"cannot bitcast <f32> to i64: 32 bits are not a multiple")
def bitcast_of_another_size(x: fly.Tensor, n: fly.i32, f: fly.f32):
    f.bitcast(fly.i64)  # <-


@mistake(ShapeError, r"layout \(32,4\):\(4,1\) does not cover a tile of 256 elements")
def share_of_another_size(x: fly.Tensor, n: fly.i32, f: fly.f32):
    x.tile(256, 0).share(fly.Layout((32, 4), (4, 1)), n)  # <-


@mistake(ShapeError, r"a shared buffer named 'b' exists already; names are unique in a kernel")
def shared_name_taken(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.SharedMemory("b", "f32", 4)
    fly.SharedMemory("b", "f32", 4)  # <-


@mistake(ShapeError, r"shuffle_xor mask 64 is out of range; expected 1 to 63")
def mask_out_of_range(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.shuffle_xor(f, 64)  # <-


@mistake(ShapeError, r"occupancy: waves_per_eu is 0; expected 1 to 8")
def occupancy_out_of_range(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.occupancy(waves_per_eu=0)  # <-


# layouts and instructions


@mistake(LayoutError, r"lane 3 maps to 4, which is not linear in the lane's bits")
def table_not_linear(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.lane_map([0, 1, 2, 4], n)  # <-


@mistake(LayoutError, r"rows of a swizzled tile is 44; expected a multiple of 8")
def tile_rows_not_a_multiple_of_8(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.SwizzledTile(44, 64)  # <-


@mistake(AtomError, r"gfx950 has no matrix instruction for i8; it has 32x32x16 bf16, .*")
def no_such_instruction(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.target().mma("i8")  # <-


@mistake(AtomError, r"operand a of mfma_32x32x16_bf16 is <8 x f32>; expected <8 x bf16>")
def operand_of_another_dtype(x: fly.Tensor, n: fly.i32, f: fly.f32):
    a = fly.broadcast(f, 8)
    fly.mma(fly.target().mma("bf16"), a, a, fly.broadcast(f, 16))  # <-


# loops and branches


@mistake(ControlFlowError, r"this fly\.range loop has a carry but its body did not call loop\.next\(\.\.\.\)")
def no_next(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in fly.range(n, carry=f):  # <-
        s + 1.0


@mistake(ControlFlowError, r"loop\.next\(\.\.\.\) was called twice in one loop body")
def next_twice(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in (loop := fly.range(n, carry=f)):
        loop.next(s)
        loop.next(s)  # <-


@mistake(ControlFlowError, r"loop\.next\(\.\.\.\) in a fly\.range loop without a carry; pass carry=\.\.\. to range")
def next_without_carry(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for j in (loop := fly.range(n)):
        loop.next(j)  # <-


@mistake(
    ControlFlowError,
    r"loop\.next\(\.\.\.\) inside fly\.when; call it at the loop body's own level, with the results of an inner "
    r"loop, fly\.cond or fly\.select",
)
def next_inside_when(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in (loop := fly.range(n, carry=f)):
        with fly.when(s > 0.0):
            loop.next(s)  # <-


@mistake(ControlFlowError, r"the fly\.range loop was left by break or return; it runs to its end")
def break_in_a_loop(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for j in fly.range(n):  # <-
        x.store(f, j)
        break


@mistake(ControlFlowError, r"loop\.results is only known after the loop")
def results_in_the_loop(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in (loop := fly.range(n, carry=f)):
        loop.next(s + loop.results)  # <-


@mistake(
    ControlFlowError,
    r"return at line \d+ leaves the body of fly\.when at compile time, in every thread; put what follows under the "
    r"opposite condition",
)
def return_in_when(x: fly.Tensor, n: fly.i32, f: fly.f32):
    with fly.when(n > 3):  # <-
        return
    x.store(f, 0)


@mistake(ControlFlowError, r"continue at line \d+ leaves the body of fly\.when at compile time, in every thread; .*")
def continue_in_when(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for j in fly.range(n):
        with fly.when(  # <-
            j == 3
        ):
            if f is not None:
                continue
        x.store(f, j)


OUTSIDE = (
    r"a value made inside a fly\.range, fly\.when or fly\.cond body is used outside of it; use loop\.results, or "
    r"what fly\.cond returns"
)


@mistake(ControlFlowError, OUTSIDE)
def value_used_after_when(x: fly.Tensor, n: fly.i32, f: fly.f32):
    with fly.when(n > 3):
        f = f + 1.0
    x.store(f, 0)  # <-


@mistake(ControlFlowError, OUTSIDE)
def value_used_after_a_loop(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _ in fly.range(n):
        f = f * 2.0
    x.store(f, 0)  # <-


@mistake(ControlFlowError, r"fly\.range needs a positive step, not -1")
def step_backwards(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.range(n, 0, -1)  # <-


@mistake(DTypeError, r"fly\.range bound <f32> is no scalar integer")
def float_bound(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.range(f)  # <-


@mistake(DTypeError, r"fly\.when needs a scalar run-time i1 condition, not True; a static condition is a Python if")
def static_condition(x: fly.Tensor, n: fly.i32, f: fly.f32):
    with fly.when(True):  # <-
        x.store(f, 0)


@mistake(CarryError, r"carry 0 holds no traced value; start from one, for example fly\.f32\(0\.0\)")
def static_carry(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in (loop := fly.range(n, carry=0)):  # <-
        loop.next(s)


@mistake(
    CarryError,
    r"carry\[1\] was the static value 0\.0 and becomes <f32>; carry a traced value from the start, for example "
    r"fly\.f32\(0\.0\)",
)
def literal_in_a_carry(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, (a, b) in (loop := fly.range(n, carry=(f, 0.0))):
        loop.next(a, b + a)  # <-


@mistake(
    CarryError,
    r"carry was <i32> and becomes <i64>; a carried value keeps its type: convert with \.to\(\.\.\.\)",
)
def carry_changes_its_type(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in (loop := fly.range(n, carry=n)):
        loop.next(s.to(fly.i64) + 1)  # <-


@mistake(CarryError, r"carry had 2 parts and has 1")
def carry_loses_a_part(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, (a, _b) in (loop := fly.range(n, carry=(n, f))):
        loop.next((a,))  # <-


@mistake(CarryError, r"loop\.next takes 1 value for this carry, not 2")
def next_with_too_many(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _j, s in (loop := fly.range(n, carry=f)):
        loop.next(s, s)  # <-


@mistake(CarryError, r"the else branch's result was <f32> and becomes <i32>; a carried value keeps its type: .*")
def branches_differ(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.cond(n > 0, lambda: f, lambda: n)  # <-


# printing and checking


@mistake(
    DTypeError, r"fly\.print shows traced values and Python's, not <tensor of rank 1, f32>; load an element of it"
)
def print_of_a_tensor(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.print("x is {}", x)  # <-


@mistake(
    DTypeError, r"when of fly\.print is True; expected a scalar run-time i1 \(a static condition is a Python if\)"
)
def print_under_a_static_condition(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.print(n, when=True)  # <-


@mistake(
    DTypeError,
    r"fly\.check needs a run-time i1 condition, not <i32>; a static condition is a Python assert",
)
def check_of_a_number(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.check(n, "n is 0")  # <-


@mistake(MessageError, r"the text '\{\} \{\}' of fly\.check does not fit its values: IndexError: .*")
def check_with_too_few_values(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.check(n > 0, "{} {}", n)  # <-


@mistake(ShapeError, r"fly\.print has 261 words to log; expected at most 256")
def print_of_too_much(x: fly.Tensor, n: fly.i32, f: fly.f32):
    fly.print(fly.broadcast(f, 256))  # <-


# loops of unknown length


@mistake(ControlFlowError, r"this fly\.while_ loop has a carry but its body did not call loop\.next\(\.\.\.\)")
def while_without_next(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _ in fly.while_(n, lambda n: n > 0):  # <-
        x.store(f, 0)


@mistake(ControlFlowError, r"loop\.next\(\.\.\.\) was called twice in one loop body")
def while_with_two_nexts(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for i in (loop := fly.while_(n, lambda n: n > 0)):
        loop.next(i - 1)
        loop.next(i - 2)  # <-


@mistake(ControlFlowError, r"the fly\.while_ loop was left by break or return; it runs to its end")
def while_with_break(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for i in (loop := fly.while_(n, lambda n: n > 0)):  # <-
        loop.next(i - 1)
        break


@mistake(ControlFlowError, r"loop\.results is only known after the loop")
def while_results_inside(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for i in (loop := fly.while_(n, lambda n: n > 0)):
        loop.next(i - loop.results)  # <-


@mistake(CarryError, r"carry 3 holds no traced value; start from one, for example fly\.f32\(0\.0\)")
def while_without_values(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for i in (loop := fly.while_(3, lambda n: n > 0)):  # <-
        loop.next(i)


@mistake(CarryError, r"carry was <i32> and becomes <f32>; a carried value keeps its type: convert with .*")
def while_that_changes_its_carry(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for _ in (loop := fly.while_(n, lambda n: n > 0)):
        loop.next(f)  # <-


@mistake(
    DTypeError,
    r"fly\.while_ needs a scalar run-time i1 condition, not <i32>; a static condition is a Python if",
)
def while_an_integer(x: fly.Tensor, n: fly.i32, f: fly.f32):
    for i in (loop := fly.while_(n, lambda n: n)):  # <-
        loop.next(i - 1)


# kernels


@mistake(KernelDefinitionError, r"kernel returns_something returned <f32>; kernels return nothing, they store")
def returns_something(x: fly.Tensor, n: fly.i32, f: fly.f32):  # <-
    return f


def kernel_id(entry: tuple) -> str:
    return entry[0].__name__


@pytest.mark.parametrize("entry", MISTAKES, ids=kernel_id)
def test_mistake(entry):
    function, error, message = entry
    lines, first = inspect.getsourcelines(function)
    (at,) = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# <-")]
    if error is KernelDefinitionError:
        at = first  # where the decorators start
    with pytest.raises(error) as caught:
        trace(function, matrix(), "i32", "f32")
    assert type(caught.value) is error
    assert re.fullmatch(f"{re.escape(__file__)}:{at}: {message}", str(caught.value)), str(caught.value)


def helper(value: fly.Value) -> fly.Value:
    return value + "text"


def test_the_line_is_the_innermost_one_outside_of_the_compiler():
    def kernel(n: fly.i32):
        helper(n)

    with pytest.raises(DTypeError) as caught:
        trace(kernel, "i32")
    assert str(caught.value).startswith(f"{__file__}:{inspect.getsourcelines(helper)[1] + 1}: ")


def test_outside_of_a_kernel():
    with pytest.raises(TraceError) as caught:
        fly.barrier()
    line = inspect.currentframe().f_lineno - 1
    wanted = f"{__file__}:{line}: fly operations can only be used inside a function decorated with @fly.kernel"
    assert str(caught.value) == wanted


def test_lane_ids_in_a_block_of_two_dimensions():
    def kernel(n: fly.i32):
        fly.lane_id()

    with pytest.raises(TraceError) as caught:
        trace(kernel, "i32", block=(32, 2, 1))
    line = inspect.getsourcelines(kernel)[1] + 1
    assert str(caught.value) == f"{__file__}:{line}: lane and wave ids need a one-dimensional block, not (32, 2, 1)"


def test_errors_are_also_the_builtin_classes_that_python_would_raise():
    assert issubclass(DTypeError, TypeError) and issubclass(StaticValueError, TypeError)
    assert issubclass(ShapeError, ValueError) and issubclass(LayoutError, ValueError)
    assert issubclass(TraceError, RuntimeError) and issubclass(CarryError, ControlFlowError)


def test_there_are_many():
    names = [function.__name__ for function, _, _ in MISTAKES]
    assert len(names) == len(set(names)) >= 30
