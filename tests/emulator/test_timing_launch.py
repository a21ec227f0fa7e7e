"""Whole launches, tables and traces of the timing model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from fly.emulator.timing import report, whole_launch
from fly.emulator.timing.analysis import hot_instructions, idle_matrix, matrix_flop, regions
from fly.emulator.timing.figures import Parameters
from fly.emulator.timing.launch import Cost, LaunchTime, Places, interpolated, residency, sample_points, schedule
from fly.emulator.timing.plot import write_plot
from fly.emulator.timing.report import chrome_trace, window, write_trace
from fly.errors import ArgumentError, LaunchError, UnsupportedError
from tests.emulator.timed import session

CHIP = Parameters.of("gfx950", compute_units=16, dies=8, sustained_clock=1.0, launch_microseconds=5)


@pytest.mark.parametrize(
    "options, count",
    [
        ({"registers": 256, "waves": 4}, 2),  # two waves a SIMD
        ({"registers": 256, "waves": 8}, 1),
        ({"registers": 128, "waves": 4}, 4),
        ({"registers": 64, "waves": 4}, 8),  # eight wave slots
        ({"registers": 32, "waves": 4}, 8),
        ({"registers": 64, "waves": 4, "lds": 81920}, 2),
        ({"registers": 64, "waves": 4, "lds": 81921}, 1),
        ({"registers": 64, "waves": 4, "lds": 65536, "arch": "gfx942"}, 1),
        ({"registers": 64, "waves": 4, "lds": 32768, "arch": "gfx942"}, 2),
    ],
)
def test_residency(options, count):
    assert session("s_nop 0", **options).resident == count


def test_a_workgroup_that_does_not_fit():
    subject = session("s_nop 0", registers=256, waves=8)
    with pytest.raises(
        LaunchError, match=r"k: a workgroup of 8 waves with 256 registers and 0 bytes of LDS does not"
    ):
        residency(subject.machine, Parameters.of("gfx950", registers=256))


def scheduled(cycles: list[float], resident: int = 1) -> LaunchTime:
    """Workgroups that take these cycles, half of them one SIMD's matrix pipe."""
    return schedule([Cost(n, n / 2) for n in cycles], resident, CHIP)


def test_workgroups_wait_for_a_slot_on_their_die():
    """Two compute units on each of eight dies: 16 slots, workgroups go to the dies in turn."""
    full = scheduled([1000.0] * 32)
    assert (full.cycles, full.occupied, full.microseconds, full.matrix) == (2000, 1.0, 7.0, 0.125)
    one_more = scheduled([1000.0] * 33)
    assert one_more.cycles == 3000 and one_more.occupied == pytest.approx(33 / 48)
    assert one_more.matrix == pytest.approx(33 / 48 / 8)
    two = scheduled([1000.0] * 64, 2)
    assert two.cycles == 2000 and two.occupied == 1 and two.matrix == 0.25
    # every eighth is long, and all of those are on one die
    uneven = scheduled([3000.0 if i % 8 == 0 else 1000.0 for i in range(64)])
    assert uneven.cycles == 8 / 2 * 3000 and scheduled([1000.0] * 56).cycles == 4000
    # longest first ends sooner than longest last
    lengths = [1000.0, 1000.0, 2000.0]
    assert scheduled([x for x in reversed(lengths) for _ in range(8)]).cycles == 2000
    assert scheduled([x for x in lengths for _ in range(8)]).cycles == 3000


def test_costs_between_samples_are_interpolated():
    assert sample_points(64) == [0, 16, 32, 47, 63] and sample_points(3) == [0, 1, 2] and sample_points(1) == [0]
    found = interpolated({0: Cost(100.0, 0.0), 4: Cost(300.0, 80.0)}, 5)
    assert found == [Cost(100 + 50 * i, 20 * i) for i in range(5)]


COUNTED = """
s_add_u32 s4, s2, 1
again:
v_mfma_f32_32x32x16_bf16 v[16:31], v[4:7], v[8:11], 0
s_sub_u32 s4, s4, 1
s_cmp_lg_u32 s4, 0
s_cbranch_scc1 again"""


def test_a_launch_whose_workgroups_differ():
    """Workgroup x makes x + 1 turns of a loop, each a 32-cycle matrix instruction for the four waves of a SIMD."""
    single = session(COUNTED, grid=(40, 2, 1), workgroups=(0, 3))
    subject = whole_launch(single.launch, single.parameters)
    row = subject.row()
    steps = np.diff([cost.cycles for cost in row])
    assert len(row) == 40 and steps.min() > 100 and steps.max() == 128
    assert [cost.matrix for cost in row] == [32 * (x + 1) for x in range(40)]
    time, longest = subject.time(), row[-1].cycles
    assert longest <= time.cycles <= 2 * longest and time == schedule(row * 2, 16, single.parameters)
    assert list(single.trace.workgroups) == [0, 3] and single.trace.executed == 1 + 4 + 1 + 1 + 4 * 4 + 1


def test_a_launch_whose_rows_differ():
    """The loop's turns are the workgroup's place in the whole grid: the system registers hold only its first axis, so
    a kernel that mixes its places in is made by hand.
    """
    body = COUNTED.replace("s_add_u32 s4, s2, 1", "s_mul_i32 s4, s3, 3\ns_add_u32 s4, s4, 1")
    subject = session(body, grid=(4, 2, 1), axes=2)
    every = whole_launch(subject.launch, subject.parameters)
    assert sorted(every.trace.workgroups) == list(range(8))
    executed = [sum(len(w.code) for w in every.trace.workgroups[n]) for n in range(8)]
    assert executed == [2 + 4 + 1] * 4 + [2 + 16 + 1] * 4
    assert every.time().cycles > max(cost.cycles for cost in every.row())
    many = session(body, grid=(200, 2, 1), axes=2)
    with pytest.raises(UnsupportedError, match=r"k: workgroups at one place .* 400 are too many .* at most 256"):
        whole_launch(many.launch, many.parameters)


def test_a_launch_with_places_of_its_own():
    """Workgroups in the reversed order of the whole grid: 400 different ones, which only `places` tells."""
    body = COUNTED.replace("s_add_u32 s4, s2, 1", "s_mul_i32 s4, s3, 100\ns_add_u32 s4, s4, s2\ns_add_u32 s4, s4, 1")
    subject = session(body, grid=(100, 4, 1), axes=2)
    places = Places(400, lambda workgroup: 399 - workgroup, 40)
    placed = whole_launch(replace(subject.launch, places=places), subject.parameters)
    assert sorted(placed.trace.workgroups) == [0, 100, 199, 299, 399] and placed.cold == 40
    row = placed.row()
    assert [cost.matrix for cost in row] == [32 * (400 - place) for place in range(400)]
    assert placed.time() == schedule(row[::-1], placed.resident, placed.parameters)


def test_resident_workgroups_share_the_compute_unit():
    alone = session(COUNTED, registers=128)
    assert alone.replay(resident=1).matrix_utilisation < alone.replay().matrix_utilisation
    assert alone.resident == 16 and len(alone.replay().workgroups) == 16


def test_lines_that_workgroups_share():
    assert session("s_nop 0", grid=(256, 1, 1), cold=None, registers=256, waves=8).cold == 32
    assert session("s_nop 0", grid=(16, 1, 1), cold=None).cold == 2
    assert session("s_nop 0", grid=(1, 9, 1), cold=None).cold == 1
    with pytest.raises(ArgumentError, match=r"workgroup 3; the grid \(2, 1, 1\) has 0 to 1"):
        session("s_nop 0", grid=(2, 1, 1), workgroups=(3,))


# ---- tables ----

PHASES = f"""
v_and_b32 v1, 63, v0
v_lshlrev_b32 v2, 4, v1
s_barrier
ds_read_b128 v[4:7], v2
s_waitcnt lgkmcnt(0)
s_barrier
{"v_mfma_f32_32x32x16_bf16 v[16:31], v[4:7], v[8:11], v[16:31]" + chr(10)}
v_exp_f32 v40, v41
s_barrier"""


def test_regions_between_barriers():
    subject = session(PHASES, waves=4, lds=1024)
    result, operations = subject.replay(resident=1), subject.operations()
    found = regions(subject.machine, operations, result.events, 4)
    assert [(r.first, r.last, r.passes) for r in found] == [(0, 2, 4), (3, 5, 4), (6, 8, 4), (9, 9, 4)]
    read, compute = found[1:3]
    assert read.issued == {"lds": 4, "wait": 4, "barrier": 4} and read.waited.keys() == {"lgkmcnt"}
    assert compute.issued == {"mfma": 4, "exp": 4, "barrier": 4}
    waits = sum(sum(r.waited.values()) + r.at_barrier for r in found)
    assert sum(r.cycles + r.at_barrier for r in found) == sum(result.lifetimes) == 4 * result.issued + waits


def test_matrix_work_and_what_happens_without_it():
    subject = session(PHASES, waves=5, lds=1024)
    result, operations = subject.replay(resident=1), subject.operations()
    assert matrix_flop(subject.machine, result.events) == 5 * 2 * 32 * 32 * 16
    assert result.matrix == [64, 32, 32, 32]
    idle = idle_matrix(result, operations)
    assert idle["lgkmcnt", "lgkmcnt"] >= 40 and idle["lgkmcnt",] > 120
    assert all(len(states) in (1, 2) for states in idle)


def test_hot_instructions():
    subject = session(PHASES, waves=4, lds=1024)
    hot = hot_instructions(subject.replay(resident=1).events)
    assert hot[0].index == 4 and hot[0].reason == "lgkmcnt" and hot[0].count == 4
    assert hot[0].waited == max(h.waited for h in hot)


def test_report():
    subject = session(PHASES, waves=4, lds=1024)
    text = report(subject.machine, subject.operations(), subject.replay(resident=1))
    assert "k on gfx950: 1 workgroup(s) of 4 waves, 40 wave-instructions in " in text
    assert "between barriers" in text and "1 mfma, 1 exp, 1 barrier" in text
    assert "matrix pipe idle" in text and "s_waitcnt lgkmcnt(0)" in text


# ---- pictures ----


def test_chrome_trace(tmp_path):
    subject = session(PHASES, waves=5, lds=1024)
    result = subject.replay(resident=1)
    trace = chrome_trace(subject.machine, subject.operations(), result, (0, result.cycles))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    issued = [e for e in slices if e.get("args") and e["tid"]]
    assert len(issued) == result.issued and sum(e["dur"] for e in slices if e["tid"] == 0) == 5 * 32
    assert {e["pid"] for e in slices} == {0, 1, 2, 3}
    (wave,) = {e["tid"] for e in slices if e["pid"] == 1 and e["tid"]}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["pid"] == 1]
    assert names == ["SIMD 1", "matrix pipe", f"wave {wave - 1}"]
    # slices of one row do not overlap
    for row in {(e["pid"], e["tid"]) for e in slices}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == row)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), row  # noqa: RUF007
    path = tmp_path / "k.json"
    assert "slices; open it in ui.perfetto.dev" in write_trace(str(path), trace)
    assert json.loads(path.read_text())["displayTimeUnit"] == "ns"
    with pytest.raises(ArgumentError, match=r"--trace '.*missing.*': No such file"):
        write_trace(str(tmp_path / "missing" / "k.json"), trace)


def test_window():
    result = session("s_nop 15\n" * 1000).replay(resident=1)
    assert window(result, None) == (result.cycles // 2 - 6000, result.cycles // 2 + 6000)
    assert window(result, (5, 10)) == (5, 10)
    with pytest.raises(ArgumentError, match=r"cycles 10:5; expected FROM:TO with 0 <= FROM < TO"):
        window(result, (10, 5))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib (pip install fly-attention[bench])")
def test_plot(tmp_path):
    subject = session(PHASES, waves=5, lds=1024)
    path = tmp_path / "k.png"
    assert write_plot(str(path), "k", subject.operations(), subject.replay(resident=1)).startswith("wrote ")
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ArgumentError, match=r"--plot '.*missing.*': No such file"):
        write_plot(str(tmp_path / "missing" / "k.png"), "k", subject.operations(), subject.replay(resident=1))


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    subject = session("s_nop 0")
    with pytest.raises(
        UnsupportedError, match=r"--plot needs matplotlib: pip install 'fly-attention\[bench\]'; --trace"
    ):
        write_plot(str(tmp_path / "k.png"), "k", subject.operations(), subject.replay(resident=1))
