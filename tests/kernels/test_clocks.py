"""Clocks in a kernel's PTX (`benchmarks/clocks.py`): where they are written, and what is made of them."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import clocks
from kernels import flash_attn_sm90_bwd as bwd
from tests.backends.builds import needs_ptxas, run_ptxas
from tests.kernels.backward import builds
from tests.kernels.feature_cases import Inputs

ADDRESS, BLOCK = 0x7F0012345600, (1, 2, 3)


@pytest.fixture(scope="module")
def ptx() -> str:
    """The fused backward kernel's."""
    found = builds.bindings_of("sm_90a", Inputs([256], [256], 1, 1, 64), True, module=bwd)
    (kernel,) = (x for x in found if x.kernel.name == "flash_attn_sm90_bwd")
    return builds.compiled("sm_90a", kernel).isa


def test_every_wait_and_start_has_a_place(ptx):
    traced, places = clocks.with_clocks(ptx, ADDRESS, BLOCK)
    counts = {name: len(re.findall(name + r"\b", ptx)) for name in clocks.BEHIND}
    assert len([x for x in places if x.startswith("wait")]) == counts["wgmma.wait_group"] > 5
    assert places.count("start") == counts["wgmma.commit_group"] > 10
    assert places.count("mbarrier") == len(re.findall(r"^done:", ptx, re.MULTILINE)) > 5
    assert {"wait0", "wait1"} <= {*places}
    assert [int(x) for x in re.findall(r"mov\.u32 %td, (\d+);", traced)] == list(range(len(places)))
    assert all(f"%ctaid.{axis}; setp.eq.and.u32 %tp, %tc, {i}" in traced for axis, i in zip("xyz", BLOCK))
    assert f"mov.u64 %tb, {ADDRESS};" in traced
    added = [line for line in traced.splitlines() if "%t" in line and line not in ptx]
    kept = [line for line in traced.splitlines() if line not in added]
    assert kept == ptx.splitlines()


@needs_ptxas
def test_ptxas_takes_it(ptx, tmp_path):
    run_ptxas(clocks.with_clocks(ptx, ADDRESS, BLOCK)[0], "sm_90a", tmp_path)


def test_the_loop_with_the_most_passes_is_shown():
    begin = 2**32 - 150  # clocks begin again at 0 between the first pass and the second
    first = [(begin - 10, 0)] + [
        ((begin + 100 * i + at) % 2**32, place) for i in range(5) for place, at in ((1, 0), (2, 30))
    ]
    second = [((clock + 40) % 2**32, place) for clock, place in first]
    memory = torch.full((clocks.WARPGROUPS, clocks.PASSES, 2), -1, dtype=torch.int64)
    for i, rows in ((0, first[:1]), (1, first), (2, second)):
        memory[i, : len(rows)] = torch.tensor(rows)
    passes = clocks.passes_of(memory)
    assert [*passes] == [0, 1, 2] and passes[1] == first
    period, head, *lines = clocks.table(passes, ["mbarrier", "wait0", "start"])
    assert period == "5 passes, 100 cycles each" and head.split() == ["place", "1", "2"]
    assert [line.split() for line in lines] == [["wait0", "0", "40"], ["start", "30", "70"]]


def test_other_machines_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        clocks.main([])
    assert "a Hopper GPU is needed" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)
def test_consumers_pass_every_tile(capsys):
    clocks.main(["--head_dim", "64", "--seq_len", "2048"])
    period, head, *lines = capsys.readouterr().out.splitlines()
    assert period.startswith("31 passes") and head.split() == ["place", "1", "2"] and len(lines) > 8
    with pytest.raises(SystemExit):
        clocks.main(["--head_dim", "64", "--seq_len", "2048", "--block", "0", "999", "0"])
    assert "--block 0 999 0: no such block" in capsys.readouterr().err
