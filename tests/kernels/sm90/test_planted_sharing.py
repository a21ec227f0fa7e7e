"""Bugs that blocks of a cluster could have which load key tiles for each other, planted one at a time."""

from __future__ import annotations

import pytest

from fly.backends.nvvm.mbarrier import Ring
from fly.errors import SimulatorReportError
from kernels.sm90 import producer as sm90_producer
from kernels.sm90.schedule import Schedule
from tests.kernels.simulated import simulated  # noqa: F401
from tests.kernels.sm90.planting import Bug
from tests.kernels.sm90.test_planted_bugs import TWO, force, tensors, wrong  # noqa: F401

KERNEL = ""
BUGS = (
    Bug(
        "a block fills its neighbour's slot before it is free",
        Ring,
        "release",
        "self.empty.arrive_at(at.index, lane) => self.empty.arrive(at.index)",
        "",
        "shared-race mbarrier-count deadlock",
    ),
    Bug(
        "a slot is free when one block has read it",
        Ring,
        "allocate",
        "consumer_warps * blocks => consumer_warps",
        "",
        "shared-race mbarrier-count deadlock",
    ),
    Bug(
        "both blocks load the first half of a key tile",
        sm90_producer,
        "copy_part",
        "row + rank * rows, head => row, head",
        "",
        "wrong",
    ),
    Bug(
        "halves of a key tile are in one place",
        sm90_producer,
        "copy_part",
        "+ rank * (rows * tile.swizzle) => + 0 * (rows * tile.swizzle)",
        "",
        "shared-race uninitialised",
    ),
    Bug(
        "blocks of a cluster go through the keys that each sees",
        Schedule,
        "work",
        "self.together > 1 => False",
        "",
        "deadlock mbarrier-bytes mbarrier-count shared-race",
    ),
    Bug(
        "blocks of a cluster have tiles of different heads",
        Schedule,
        "_dense",
        "number // self.together, number % self.together => number, fly.i32(0)",
        "",
        "wrong deadlock out-of-bounds",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, force, monkeypatch, seed):  # noqa: F811
    """More tiles of queries than blocks at a time, and two consumers in each."""
    force(**{**TWO, "blocks": 2})
    bug.plant(monkeypatch)
    try:
        found = "wrong" if wrong(*tensors(390, 200, dim=72), True) else None
    except SimulatorReportError as error:
        found = error.reports[0].kind
    assert found in bug.found.split(), f"seed {seed}"
