"""Launches in all schedules that tests look at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fly import config
from fly.errors import SimulatorReportError
from fly.simulator import Report

SEEDS = range(5)


def in_every_schedule(launch: Callable[[], None], *outputs: torch.Tensor) -> None:
    """Run a launch in each schedule, from the same outputs: it leaves the same bits in them."""
    before, first = [out.clone() for out in outputs], []
    for seed in SEEDS:
        for out, given in zip(outputs, before, strict=True):
            out.copy_(given)
        with config.SIMULATOR_SEED.set_to(str(seed)):
            launch()
        found = [out.clone() for out in outputs]
        first = first or found
        for a, b in zip(first, found, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"schedule {seed} differs from schedule 0"


def reported(launch: Callable[[], None], seed: int) -> Report:
    """What the checks find in one schedule."""
    with config.SIMULATOR_SEED.set_to(str(seed)), pytest.raises(SimulatorReportError) as error:
        launch()
    (report,) = error.value.reports
    assert str(error.value) == report.text
    return report
