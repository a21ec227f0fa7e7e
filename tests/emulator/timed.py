"""Micro-kernels in assembly, and when the timing model issues their instructions."""

from __future__ import annotations

import numpy as np

from fly.emulator import Program, Region
from fly.emulator.timing import Launch, Parameters, Session
from fly.emulator.timing.compute_unit import Result
from tests.emulator.assembly import assemble


def session(
    body: str, arch: str = "gfx950", waves: int = 1, lds: int = 0, registers: int = 128, array: int = 0,
    cold: int = 0, grid: tuple[int, int, int] = (1, 1, 1), workgroups: tuple[int, ...] = (0,), axes: int = 1,
    **figures: float,
) -> Session:  # fmt: skip
    """A recorded workgroup of `waves` waves that execute `body` (s_endpgm is added).

    The kernel's first argument points to `array` bytes of zeros; s2, s3 and s4 hold the workgroup's place along the
    first `axes` axes. `figures` replace the model's; code is fetched
    without delay unless `straddle` says otherwise, so that cycles do not depend on where instructions lie.
    """
    memory = np.zeros(array + 256, np.uint8)
    start = -memory.ctypes.data % 256
    data = memory[start : start + array]
    kernarg = int(data.ctypes.data if array else 0).to_bytes(8, "little")
    regions = [Region(data.ctypes.data, array, "array")] if array else []
    program = Program(assemble(f"{body}\ns_endpgm", arch, lds, registers, axes))
    launch = Launch(program, "k", grid, (64 * waves, 1, 1), kernarg, regions, keep=(memory,))
    return Session(launch, Parameters.of(arch, **{"straddle": 0, **figures}), workgroups, cold)


def replayed(body: str, **options) -> Result:
    """One workgroup of `body` on a compute unit, with its events."""
    return session(body, **options).replay(resident=1)


def issues(body: str, wave: int = 0, skip: int = 0, **options) -> list[int]:
    """Cycles at which a wave issues its instructions, s_endpgm included, from the one behind `skip` others on, which
    issues at 0.
    """
    cycles = [event.cycle for event in replayed(body, **options).events if event.wave == wave][skip:]
    return [cycle - cycles[0] for cycle in cycles]


def nothing() -> None:
    """Launch no kernel."""
