"""Blocks that transpose V for each other on the simulated GPU: results, counters, when they do, and planted bugs."""

from __future__ import annotations

import pytest
import torch

from fly.errors import SimulatorReportError
from kernels import flash_attn_sm90_fp8
from kernels.problem.contract import Request
from kernels.sm90 import counters, values_ahead
from kernels.sm90.builds import options_of
from kernels.sm90.fp8_builds import FAST_TILES, TILES, Fp8Options, transposing
from kernels.sm90.values_ahead import ValuesAhead, is_ahead
from kernels.sm90.values_ahead import _Workers as Workers
from tests.kernels.simulated import simulated  # noqa: F401
from tests.kernels.sm90.planting import Bug
from tests.kernels.sm90.test_sm90_fp8_simulated import random, scales_of, wrong

KERNEL = "sm90_fp8"


@pytest.fixture(autouse=True)
def builds(monkeypatch):
    """Options of the kernels that calls bind; few heads are enough."""
    found: list[Fp8Options] = []
    bind = flash_attn_sm90_fp8.bind_build

    def bound(kernel, tensors, request, options, splits):
        found.append(options)
        return bind(kernel, tensors, request, options, splits)

    monkeypatch.setattr(flash_attn_sm90_fp8, "bind_build", bound)
    monkeypatch.setattr(values_ahead, "HEADS_PER_WAVE", 0)
    return found


CASES = {
    "full": ((2, 200, 4, 64), (300, 2), False, {}),
    "causal, several tiles": ((1, 300, 2, 128), (500, 1), True, {}),
    "wide heads": ((2, 150, 2, 256), (270, 2), False, {}),
    "wide heads, causal": ((1, 270, 2, 256), (140, 1), True, {}),
    "fast sums, tiles of 192 keys": ((2, 200, 2, 128), (400, 1), True, {"fp8_accumulate": "fast"}),
    "fast sums": ((1, 200, 2, 64), (130, 2), False, {"fp8_accumulate": "fast"}),
    "few keys": ((3, 200, 2, 128), (5, 1), True, {}),
    "scales": ((2, 200, 2, 256), (200, 2), True, scales_of(2, 2)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_references_and_counters_are_zero_again(name, builds, seed):
    q, (keys, kv_heads), causal, options = CASES[name]
    k, v = (random(q[0], keys, kv_heads, q[-1]) for _ in range(2))
    assert wrong(random(*q), k, v, causal, **options) is None, f"seed {seed}"
    assert builds and all(options.ahead for options in builds)
    of_launches = counters.counters_of(torch.device("cpu"), counters.MANY_ARRIVALS)
    assert not of_launches._memory.any()


def request(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Request:
    lengths = length, length
    return Request(dim, "f8e4m3", True, False, False, batch, *lengths, heads, kv_heads, dim**-0.5)


def options_for(dim: int, table=TILES) -> Fp8Options:
    key = dim, dim, True, 3 if dim == 64 else 2, None
    return options_of(key, table[key], Fp8Options)


def test_heads_that_begin_together_are_few(monkeypatch):
    """As measured: enough heads, not too long, and not of builds that are slower so."""
    monkeypatch.undo()
    wide, fast = options_for(256), options_for(64, FAST_TILES)
    assert is_ahead(request(8, 2048, 8, 8, 256), wide, 132) and is_ahead(request(8, 2048, 32, 32, 64), fast, 132)
    assert not is_ahead(request(8, 2048, 32, 32, 64), options_for(64), 132)
    assert not is_ahead(request(1, 16384, 8, 8, 256), wide, 132)
    assert not is_ahead(request(1, 512, 8, 8, 256), wide, 132)
    assert not is_ahead(request(64, 2048, 32, 32, 64), fast, 132)
    assert not is_ahead(request(8, 2048, 8, 8, 256), transposing(wide), 132)


MEET = "barrier_sync(self.barrier, WORKERS)"
WAITED = "spin(lambda: fly.load_acquire(count), self.tiles(schedule, step))"
BUGS = tuple(
    Bug(what, owner, name, edit, "", found)
    for what, owner, name, edit, found in (
        ("nobody waits for values", ValuesAhead, "wait", f"{WAITED} => pass", "wrong global-race proxy-fence"),
        ("the wait has no fence", ValuesAhead, "wait", "fence_async_global() => pass", "proxy-fence"),
        (
            "all but one tile are enough",
            ValuesAhead,
            "wait",
            "self.tiles(schedule, step)) => self.tiles(schedule, step) - 1)",
            "deadlock wrong global-race proxy-fence",
        ),
        (
            "another head's values are waited for",
            ValuesAhead,
            "wait",
            " + step // self.group => ",
            "wrong global-race proxy-fence",
        ),
        (
            "a tile is counted before it is written",
            Workers,
            "_transpose",
            "tma.wait() => tma.wait_read()",
            "global-race proxy-fence",
        ),
        (
            "the count says nothing of what was written",
            Workers,
            "run",
            'order="release" => order="relaxed"',
            "global-race proxy-fence",
        ),
        (
            "a tile is stored before all warps have transposed",
            Workers,
            "_transpose",
            f"{MEET} => pass",
            "shared-race proxy-fence uninitialised",
        ),
        ("transposed tiles have no fence", Workers, "_transpose", "fence_async_shared() => pass", "proxy-fence"),
        (
            "the first tile's arrival is every tile's",
            Workers,
            "run",
            "phase ^ 1 => phase",
            "shared-race deadlock mbarrier-bytes wrong",
        ),
        ("workers do not wait for the number", Workers, "_claimed", f"{MEET} => pass", "shared-race"),
        (
            "counters are reset when one role has ended",
            ValuesAhead,
            "finish",
            "ROLES * fly.grid_dim.x - 1 => 0 * fly.grid_dim.x",
            "deadlock wrong global-race counters",
        ),
        (
            "the count of claims is left as it is",
            ValuesAhead,
            "finish",
            "schedule.counters.store(fly.i32(0), CLAIMED) => pass",
            "counters deadlock",
        ),
    )
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_are_found(bug, monkeypatch, seed):
    """More tiles of queries than blocks at a time."""
    bug.plant(monkeypatch)
    q, k, v = random(2, 300, 4, 64), random(2, 400, 2, 64), random(2, 400, 2, 64)
    try:
        found = "wrong" if wrong(q, k, v, False) else ""
        of_launches = counters.counters_of(torch.device("cpu"), counters.MANY_ARRIVALS)
        found = found or ("counters" if of_launches._memory.any() else "")
    except SimulatorReportError as error:
        found = error.reports[0].kind
    assert found in bug.found.split(), f"seed {seed}: {found}"
