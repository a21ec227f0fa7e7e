"""Builds of the attention kernels on the timing model, and where their blocks do what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.modelled_builds import block_mask_calls, build, generic_options, line
from fly.emulator.timing import Parameters, Session, whole_launch
from kernels.gfx950.options import DualWaveOptions

SHAPE = (2, 768, 8, 64)  # three query blocks of 256 rows, six of 128


def executed(session: Session, workgroup: int) -> int:
    return sum(len(wave.code) for wave in session.trace.workgroups[workgroup])


@pytest.mark.parametrize(
    "arch, options, blocks",
    [("gfx950", DualWaveOptions(64, True), 3), ("gfx942", generic_options(64, True), 6)],
    ids=["gfx950", "generic"],
)
def test_places_are_query_blocks(arch, options, blocks):
    """Blocks are placed by die in one kernel and not in the other; either way later rows see more keys."""
    launch = build(arch, options, SHAPE)
    places = [launch.place(n) for n in range(launch.workgroups)]
    assert sorted(places) == sorted(list(range(blocks)) * 16)
    assert places[0] == blocks - 1  # longest first
    chosen = [places.index(place) for place in range(blocks)]
    session = Session(launch, Parameters.of(arch), chosen)
    work = [executed(session, n) for n in chosen]
    assert work == sorted(work) and work[-1] > 1.5 * work[0]


def test_a_build_that_is_asked_for():
    alike = DualWaveOptions(128, False)
    first, other = (
        whole_launch(build("gfx950", options, (1, 512, 8, 128)), Parameters.of("gfx950"))
        for options in (alike, replace(alike, stagger=False))
    )
    assert 0.2 < other.replay().matrix_utilisation < first.replay().matrix_utilisation < 1
    assert other.time().matrix == pytest.approx(
        other.time().occupied * other.row()[0].matrix / 4 / other.row()[0].cycles
    )
    assert line("no stagger", other).startswith("no stagger  ") and "133632" in line("", other)


def test_block_masks_run_longest_first_on_the_kernel_asked_for():
    calls = dict(block_mask_calls((1, 512, 8, 64)))
    assert [name.partition(": ")[2] for name in calls][:5] == [
        "no list", "256, gfx950", "256, generic", "128, gfx950", "128, generic",
    ]  # fmt: skip
    assert len(calls) == 10
    for size, blocks, waves in ((256, 2, 8), (128, 4, 4)):
        launch = calls[f"causal_mask: {size}, gfx950"]
        assert launch.grid[0] == blocks
        places = [launch.place(n) for n in range(launch.workgroups)]
        assert places[0] == blocks - 1
        session = Session(launch, Parameters.of("gfx950"), [0, places.index(0)])
        assert {len(group) for group in session.trace.workgroups.values()} == {waves}
        longest, shortest = (executed(session, n) for n in (0, places.index(0)))
        assert longest > 1.2 * shortest
    assert calls["causal_mask: 128, generic"].kernel != calls["causal_mask: 128, gfx950"].kernel
