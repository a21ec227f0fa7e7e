"""Lanes that part and meet again: loops, branches and what they carry, held against Python that runs one thread."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest

import fly
from fly.backends.target import target
from tests.simulated import Machine, Program, flat
from tests.simulating.portable import in_every_schedule
from tests.tracing import matrix, trace

ARCHS = ("sm_90a", "gfx942")


def numbers(rows: int, threads: int, low: int, high: int) -> np.ndarray:
    """Random input, which differs from lane to lane; a failing test prints its seed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed).integers(low, high, (rows, threads), np.int32)


@pytest.mark.parametrize("arch", ARCHS)
def test_loops_of_any_length_keep_the_values_of_lanes_that_have_left(arch):
    """Euclid's algorithm: each lane takes its own number of turns, and swaps what it carries in each."""

    def kernel(x: fly.Tensor, out: fly.Tensor):
        given = tuple(x.load(row, fly.thread_id.x) for row in range(2))
        for (a, b), turns in (loop := fly.while_((given, fly.i32(0)), lambda state: state[0][1] != 0)):
            loop.next((b, a % b), turns + 1)
        (a, b), turns = loop.results
        for row, value in enumerate((a, b, turns)):
            out.store(value, row, fly.thread_id.x)

    def euclid(a: int, b: int) -> tuple[int, int, int]:
        turns = 0
        while b:
            a, b, turns = b, a % b, turns + 1
        return a, b, turns

    x, out = numbers(2, 256, 0, 5000), np.zeros((3, 256), np.int32)
    in_every_schedule(kernel, x, out, arch=arch, block=256)
    np.testing.assert_array_equal(out.T, [euclid(*map(int, pair)) for pair in x.T])
    np.testing.assert_array_equal(out[0], [math.gcd(*map(int, pair)) for pair in x.T])


@pytest.mark.parametrize("arch", ARCHS)
def test_loops_and_branches_inside_of_each_other(arch):
    """Bounds, conditions and carries of three levels, each of which parts the lanes that the one around it left."""

    def inner(total: fly.Value, i: fly.Value, limit: fly.Value) -> fly.Value:
        state = (total, i)
        for total, left in (loop := fly.while_(state, lambda s: (s[1] > 0) & (s[0] < limit))):
            loop.next(total + left * left, left - 1)
        return loop.results[0]

    def turn(total: fly.Value, i: fly.Value, limit: fly.Value, odd: fly.Value) -> fly.Value:
        def even() -> fly.Value:
            return fly.cond(total > limit, lambda: total - limit, lambda: total * 3)

        return fly.cond(odd, lambda: inner(total, i, limit), even)

    def kernel(x: fly.Tensor, out: fly.Tensor):
        first, stop, step, limit = (x.load(row, fly.thread_id.x) for row in range(4))
        for i, (total, seen) in (loop := fly.range(first, stop, step, carry=(fly.i32(1), fly.i32(0)))):
            odd = (i ^ fly.thread_id.x) % 2 == 1
            loop.next(turn(total, i, limit, odd), seen + odd.to(fly.i32))
        total, seen = loop.results
        with fly.when(total % 3 != 0):
            with fly.when(seen > 2):
                out.store(total, 0, fly.thread_id.x)
            out.store(seen, 1, fly.thread_id.x)

    def of_one(thread: int, first: int, stop: int, step: int, limit: int) -> tuple[int, int]:
        total, seen = 1, 0
        for i in range(first, stop, step):
            odd = (i ^ thread) % 2 == 1
            if odd:
                left = i
                while left > 0 and total < limit:
                    total, left = total + left * left, left - 1
            else:
                total = total - limit if total > limit else total * 3
            seen += odd
        return (total if total % 3 and seen > 2 else -1), (seen if total % 3 else -1)

    x, out = numbers(4, 256, 1, 30), np.full((2, 256), -1, np.int32)
    x[1] += 20
    x[3] *= 10
    x[:, ::16] = x[:, :1]  # some lanes go the same way
    in_every_schedule(kernel, x, out, arch=arch, block=256)
    np.testing.assert_array_equal(out.T, [of_one(t, *map(int, given)) for t, given in enumerate(x.T)])


@pytest.mark.parametrize("arch", ARCHS)
def test_loops_rotate_what_they_carry(arch):
    """Five values change places in every turn, scalars and vectors, in lanes that leave at different times."""

    def kernel(x: fly.Tensor, out: fly.Tensor):
        me = fly.thread_id.x
        pair = fly.from_elements([me, me + 1])
        state = me, fly.i32(7), x.load(0, me), pair, pair * 2
        for i, (a, b, c, p, q) in (loop := fly.range(x.load(1, me), carry=state)):
            loop.next(b, c, a + i, q, p + 1)
        a, b, c, p, q = loop.results
        for row, value in enumerate((a, b, c, *p, *q)):
            out.store(value, row, me)

    def of_one(me: int, given: int, turns: int) -> list[int]:
        a, b, c, p, q = me, 7, given, (me, me + 1), (2 * me, 2 * me + 2)
        for i in range(turns):
            a, b, c, p, q = b, c, a + i, q, (p[0] + 1, p[1] + 1)
        return [a, b, c, *p, *q]

    x, out = numbers(2, 128, 0, 9), np.zeros((7, 128), np.int32)
    in_every_schedule(kernel, x, out, arch=arch, block=128)
    np.testing.assert_array_equal(out.T, [of_one(me, *map(int, given)) for me, given in enumerate(x.T)])


def test_loops_that_nobody_enters():
    """They hand on what they were given, and nothing in them happens."""

    def kernel(x: fly.Tensor, out: fly.Tensor):
        me = fly.thread_id.x
        value = x.load(0, me)
        for _, total in (loop := fly.range(5, 5, carry=value)):
            out.store(-1, 1, me)
            loop.next(total + 1)
        for total in (again := fly.while_(loop.results, lambda total: total > 1000)):
            out.store(-2, 1, me)
            again.next(total - 1)
        with fly.when(again.results < 0):
            out.store(-3, 1, me)
        out.store(again.results, 0, me)

    x, out = numbers(1, 64, 0, 1000), np.zeros((2, 64), np.int32)
    in_every_schedule(kernel, x, out, arch="sm_90a", block=64)
    np.testing.assert_array_equal(out, [x[0], np.zeros(64)])


def test_an_expression_has_a_value_only_where_it_was_computed():
    """The same one in branches that nobody takes, in a loop that nobody enters, in each turn and after them."""

    def kernel(x: fly.Tensor, out: fly.Tensor):
        me = fly.thread_id.x
        a = x.load(0, me)
        for _ in fly.range(x.shape[0] - 1):
            out.store(a * 3, 6, me)
        for i, b in (loop := fly.range(3, carry=a)):
            out.store(b * b + 1, i, me)
            with fly.when(i == 1):
                out.store(b * b + 2, 3 + i, me)
            with fly.when(i != 1):
                out.store(b * b + 2, 3 + i, me)
            loop.next(b + 1)
        last = loop.results
        out.store(last * last + 1 + a * 3, 6, me)

    x, out = numbers(1, 64, -50, 50), np.zeros((7, 64), np.int32)
    in_every_schedule(kernel, x, out, arch="sm_90a", block=64)
    a = x[0]
    for i in range(3):
        np.testing.assert_array_equal(out[i], (a + i) ** 2 + 1)
        np.testing.assert_array_equal(out[3 + i], (a + i) ** 2 + 2)
    np.testing.assert_array_equal(out[6], (a + 3) ** 2 + 1 + a * 3)


def test_blocks_and_threads_of_three_dimensions_have_their_own_places():
    def kernel(out: fly.Tensor):
        x, y, z = (fly.block_id.x, fly.block_id.y, fly.block_id.z)
        columns, rows, planes = fly.grid_dim.x, fly.grid_dim.y, fly.grid_dim.z
        inside = (fly.thread_id.z * 3 + fly.thread_id.y) * 4 + fly.thread_id.x
        at = ((z * rows + y) * columns + x) * 24 + inside
        out.store(at + columns * rows * planes * 1000, at)

    out = np.zeros(2 * 3 * 5 * 24, np.int32)
    read = Program.of(trace(kernel, matrix("i32"), arch="sm_80", block=(4, 3, 2)), target("sm_80"))
    Machine(read)(flat(out), (5, 3, 2))
    np.testing.assert_array_equal(out, np.arange(720) + 30_000)


def test_one_vector_that_two_names_have_is_joined_with_itself():
    """What a loop without turns gives back is what it was given, twice the same here."""

    def kernel(x: fly.Tensor, out: fly.Tensor):
        one = fly.broadcast(fly.i32(3), 4)
        for _, (a, b) in (loop := fly.range(x.load(0), carry=(one, one))):
            loop.next(a + 1, b + 2)
        joined = fly.concat(list(loop.results))
        for i in range(8):
            out.store(joined[i], i)

    x, out = np.zeros(1, np.int32), np.zeros(8, np.int32)
    in_every_schedule(kernel, x, out, arch="sm_90a", block=32)
    assert out.tolist() == [3] * 8
