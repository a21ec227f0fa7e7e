"""The instruction set that tests compile their references for the host's CPU for."""

from __future__ import annotations

import os

from fly.emulator.host import available


def host_level() -> str:
    """The lowest level, so that results do not depend on the CPU, or the level in FLY_TEST_HOST."""
    level = os.environ.get("FLY_TEST_HOST", "baseline")
    if level not in available():
        raise ValueError(f"FLY_TEST_HOST={level!r}: this CPU can run {', '.join(available())}")
    return level
