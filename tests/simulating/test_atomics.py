"""Atomics on the simulated GPU: no race with each other, but with plain accesses, which releases order."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target
from fly.errors import SimulatorReportError
from tests.simulated import Machine, Program, flat
from tests.simulating.portable import in_every_schedule
from tests.simulating.schedules import SEEDS
from tests.tracing import matrix, trace

ARCHS = pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90a"])


@ARCHS
def test_all_blocks_add_to_one_line_in_any_order(arch):
    def kernel(x: fly.Tensor, out: fly.Tensor):
        thread = fly.thread_id.x
        out.atomic_add(x.load(thread), thread % 32)
        fly.atomic_add_bounded(x.load(thread), out.at(0), thread * 4, 32)

    x, out = np.arange(256, dtype=np.float32), np.zeros(32, np.float32)
    in_every_schedule(kernel, x, out, arch=arch, block=256, grid=4)
    expected = 4 * x.reshape(8, 32).sum(axis=0)
    expected[:8] += 4 * x[:8]
    np.testing.assert_array_equal(out, expected)


def run(kernel, arch: str, seed: int, blocks: int = 2, **statics) -> np.ndarray:
    count, out = np.zeros(1, np.int32), np.zeros(1, np.float32)
    module = trace(kernel, matrix("i32", alignment=4), matrix("f32", alignment=4), arch=arch, block=128, **statics)
    Machine(Program.of(module, target(arch)), seed=seed)(flat(count, out), (blocks, 1, 1))
    return out


def summed(count: fly.Tensor, out: fly.Tensor, *, order: str, then: str):
    """Both blocks add, and the one that comes last loads or stores the sum."""
    first = fly.thread_id.x == 0
    with fly.when(first):
        out.atomic_add(1.0, 0)
        last = fly.fetch_add(1, count.at(0), order=order) == 1
        with fly.when(last):
            total = out.load(0) if then == "load" else fly.f32(7.0)
            out.store(total * 2.0, 0)


@ARCHS
@pytest.mark.parametrize("then", ["load", "store"])
def test_plain_accesses_need_an_order_after_additions(arch, then):
    for seed in SEEDS:
        assert run(summed, arch, seed, order="acq_rel", then=then) == [4.0 if then == "load" else 14.0]
        with pytest.raises(
            SimulatorReportError, match=r"global-race: summed at .*an atomic, with nothing that orders"
        ):
            run(summed, arch, seed, order="relaxed", then=then)


def stored_first(count: fly.Tensor, out: fly.Tensor, *, order: str):
    """Block 0 stores, and then block 1 adds."""
    with fly.when((fly.block_id.x == 0) & (fly.thread_id.x == 0)):
        out.store(3.0, 0)
        fly.atomic_add(fly.i32(1), count.at(0), order=order)
    with fly.when((fly.block_id.x == 1) & (fly.thread_id.x == 0)):
        for _ in (spin := fly.while_((fly.load_acquire(count.at(0)),), lambda c: c[0] == 0)):
            spin.next(fly.load_acquire(count.at(0)))
        out.atomic_add(0.5, 0)


@ARCHS
def test_additions_need_an_order_after_plain_stores(arch):
    for seed in SEEDS:
        assert run(stored_first, arch, seed, order="release") == [3.5]
        with pytest.raises(SimulatorReportError, match=r"global-race: .*adds to byte 0 of argument 2"):
            run(stored_first, arch, seed, order="relaxed")


def test_a_wait_for_a_count_that_nobody_makes_is_a_deadlock():
    def kernel(count: fly.Tensor, out: fly.Tensor):
        for _ in (spin := fly.while_((fly.load_acquire(count.at(0)),), lambda c: c[0] == 0)):
            spin.next(fly.load_acquire(count.at(0)))

    for seed in SEEDS:
        with pytest.raises(SimulatorReportError, match=r"deadlock: .*waits for a counter in global memory to change"):
            run(kernel, "sm_90a", seed)
