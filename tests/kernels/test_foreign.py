"""The table of foreign kernels' cycles from stubbed measurements, and what it says of projects that are missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.foreign import __main__ as foreign
from benchmarks.foreign.objects import Compilers, ForeignError, Shape, binary_of

SHAPE = Shape(256, 64, True, heads=1)


def peer(cycles: float, tiles: str, error: float = 0.0) -> SimpleNamespace:
    """A build whose launch writes the exact result but for an error, in so many cycles."""

    def launch(shape, tensors):
        q, k, v = (tensors[name].transpose(1, 2).double() for name in "qkv")
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
        tensors["out"].copy_(result.transpose(1, 2) + error)
        return cycles

    return SimpleNamespace(launch=launch, tiles=tiles, kernel="theirs")


@pytest.fixture
def stubbed(monkeypatch):
    """Launches that are their cycles; ours takes 20,000."""
    monkeypatch.setattr(foreign, "ours", lambda arch, shape: 20e3)
    monkeypatch.setattr(foreign, "cycles", lambda launch, shape: launch)


def test_the_fastest_build_of_a_peer_counts(stubbed, capsys):
    made = SimpleNamespace(triton=lambda arch, shape: [peer(30e3, "128 x 64"), peer(25e3, "64 x 64")])
    assert foreign.table(["gfx950"], [SHAPE], made, ["triton"]) == ""
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["ours", "triton", "/", "ours"]
    assert row.split() == ["gfx950", "D=64", "causal", "S=256", "20.0", "25.0", "1.250", "64", "x", "64"]


def test_a_peer_that_is_missing_leaves_a_dash_and_its_reason(stubbed, capsys, monkeypatch):
    """Once for all of its rows; others' figures stand, and the status is 1."""
    monkeypatch.setattr(Compilers, "triton", lambda self, arch, shape: [peer(10e3, "64 x 64")])
    assert foreign.main(["--arch", "gfx950", "--seq", "256", "512", "--head-dim", "64", "--mask", "full"]) == 1
    _, *rows, missing = capsys.readouterr().out.splitlines()
    assert [row.split()[3:] for row in rows] == [
        [f"S={n}", "20.0", "-", "10.0", "0.500", "64", "x", "64"] for n in (256, 512)
    ]
    assert missing == (
        "no flydsl on gfx950: FlyDSL's kernels are not in its wheel; --flydsl names a checkout of the project"
    )


def test_results_are_looked_at(stubbed):
    with pytest.raises(ForeignError, match=r"theirs: error \d\.\d+ of the largest output; is it launched"):
        foreign.measured([peer(1.0, "wrong", error=0.5)], SHAPE)
    with pytest.raises(ForeignError, match="theirs wrote no row of the first head"):
        foreign.check(peer(1.0, ""), SHAPE, SHAPE.inputs()["out"])


def python(folder, script: str) -> str:
    """A stand-in for the Python that has the other projects."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(("name", "called"), [("flydsl", "FlyDSL"), ("triton", "Triton")])
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo Traceback >&2; echo 'ModuleNotFoundError: it is not here' >&2; exit 1",
            "ModuleNotFoundError: it is not here",
        ),
        ("exit 3", "status 3"),
    ],
    ids=["not installed", "no word"],
)
def test_a_project_that_is_not_installed(name, called, script, why, tmp_path):
    compilers = Compilers(python(tmp_path, script), tmp_path, tmp_path)
    with pytest.raises(ForeignError, match=f"{called} compiled nothing: {why}"):
        getattr(compilers, name)("gfx950", SHAPE)


def test_a_compiler_that_leaves_nothing(tmp_path):
    compilers = Compilers(python(tmp_path, "echo '{}'"), tmp_path, tmp_path)
    with pytest.raises(ForeignError, match=r"FlyDSL left 0 compiled modules in .*; expected one"):
        compilers.flydsl("gfx950", SHAPE)


def test_the_code_object_in_a_module():
    assert binary_of(r'gpu.binary @m [#gpu.object<#target, bin = "\7FELF\"\\\00">]') == b'\x7fELF"\\\0'
    with pytest.raises(ForeignError, match="FlyDSL's module has no code object"):
        binary_of("module {}")


def test_lengths_that_blocks_do_not_divide(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["foreign"])
    with pytest.raises(SystemExit):
        foreign.main(["--seq", "300"])
    assert "--seq [300]: expected multiples of 256" in capsys.readouterr().err
