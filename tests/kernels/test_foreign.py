"""The table of foreign kernels' cycles from stubbed measurements, and what it says of projects that are missing."""

from __future__ import annotations

import csv
import json
import struct
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import results
from benchmarks.foreign import __main__ as foreign
from benchmarks.foreign import published
from benchmarks.foreign.aiter import Aiter, Gradients, Mode
from benchmarks.foreign.objects import Compilers, ForeignError, Shape, binary_of
from benchmarks.run_record import modelled_record
from fly.backends.rocdl.assemble import assemble, kernel_source

SHAPE = Shape(256, 64, True, heads=1)


def peer(cycles: float, tiles: str, error: float = 0.0) -> SimpleNamespace:
    """A build whose launch writes the exact result but for an error, in so many cycles."""

    def launch(shape, tensors):
        if shape.length > foreign.TUNED:
            return cycles  # not compared
        q, k, v = (tensors[name].transpose(1, 2).double() for name in "qkv")
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
        tensors["out"].copy_(result.transpose(1, 2) + error)
        return cycles

    return SimpleNamespace(launch=launch, tiles=tiles, kernel="theirs")


@pytest.fixture
def stubbed(monkeypatch):
    """Launches that are their cycles; ours takes 20,000."""
    monkeypatch.setattr(foreign, "ours", lambda arch, shape: SimpleNamespace(kernel="ours"))
    monkeypatch.setattr(foreign, "cycles", lambda launch, shape: launch if isinstance(launch, float) else 20e3)


def test_the_fastest_build_of_a_peer_counts(stubbed, capsys):
    made = SimpleNamespace(triton=lambda arch, shape: [peer(30e3, "128 x 64"), peer(25e3, "64 x 64")])
    ours, theirs = foreign.table(["gfx950"], [SHAPE], made, ["triton"])
    assert (ours.provider, ours.cycles, theirs.cycles, theirs.build) == ("fly", 20e3, 25e3, "64 x 64")
    assert foreign.reasons([ours, theirs]) == ""
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


def compiled_for(heads: int, why: str, cycles: float):
    """A compiler that knows only so many heads."""

    def maker(arch, shape):
        if shape.heads != heads:
            raise ForeignError(why)
        return [peer(cycles, "128 rows")]

    return maker


def test_a_kernel_of_fewer_heads_stands_in_and_says_so(stubbed):
    shape = Shape(256, 64, False)
    found = foreign.peers("flydsl", compiled_for(16, "too large", 30e3), "gfx942", shape)
    assert (found.cycles, found.build, found.missing) == (30e3, "128 rows, 16 heads", "too large")
    assert foreign.reasons([found, found]) == "16 heads of flydsl on gfx942: too large"
    none = foreign.peers("flydsl", compiled_for(8, "too large", 30e3), "gfx942", shape)
    assert none.cycles is None and foreign.reasons([none]) == "no flydsl on gfx942: too large"


def test_long_sequences_take_the_build_of_the_length_before(stubbed):
    """Others are not measured there: what they take would be minutes."""
    builds = [peer(30e3, "slow at 2048"), peer(25e3, "fast at 2048")]
    long = Shape(8192, 64, False)
    assert foreign.measured(builds, long, "slow at 2048") == (30e3, "slow at 2048")
    assert foreign.measured(builds, long) == foreign.measured(builds, long, "unknown") == (25e3, "fast at 2048")
    assert foreign.measured(builds, Shape(256, 64, False), "slow at 2048") == (25e3, "fast at 2048")


def test_the_file_becomes_a_section_of_the_results(tmp_path):
    shape = Shape(512, 128, True)
    rows = [
        foreign.Measured("gfx950", shape, "fly", 20e3, "ours"),
        foreign.Measured("gfx950", shape, "flydsl", 25e3, "dual-wave"),
        foreign.Measured("gfx950", shape, "triton", None, "", "it is not here"),
    ]
    path = tmp_path / "foreign.csv"
    foreign.write_csv(path, rows, modelled_record(foreign.PRESET, "flydsl=1.2"))
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["over_fly"] for line in lines] == ["", "1.25", ""]
    assert (lines[0]["best_peer"], lines[0]["best_ratio"]) == ("flydsl", "1.25")
    text = results.page([results.Run.read(path)])
    assert "by the timing model; flydsl 1.2; commit " in text and "Not recorded" not in text
    assert "| gfx950 | D=128 causal | 512 | 20.0 | ours | 25.0 | 1.250 | dual-wave | – [1] | – | – |" in text
    assert "| flydsl / fly | gfx950 | 1 | 1.250 | 1.250 |" in text and "\n[1] it is not here\n" in text


TABLE = "dtype,hdim_q,hdim_v,mask,atomic32,pssk,pddv,mode,bf16_cvt,ts_qo,ts,knl_name,co_name"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout of aiter whose kernels do nothing."""
    root = tmp_path_factory.mktemp("aiter")
    rows = {
        "odo": ["bf16,128,128,0,0,0,0,0,3,0,128,k,one.co"],
        "dqdkdv": [
            *("bf16,128,128,0,0,0,0,0,0,16,192,k,wrong.co", "bf16,128,128,0,0,0,0,0,1,16,192,k,one.co"),
            *("bf16,128,128,1,1,0,0,0,1,16,192,k,wrong.co", "bf16,128,128,1,1,1,1,0,1,16,192,k,one.co"),
        ],
        "dq_convert": ["bf16,128,128,0,0,0,0,0,1,0,64,k,one.co"],
    }
    folder = root / "hsa" / "gfx942" / "fmha_v3_bwd"
    folder.mkdir(parents=True)
    (folder / "one.co").write_bytes(assemble(kernel_source("s_endpgm"), "gfx942"))
    for name, lines in rows.items():
        (folder / f"fmha_bwd_{name}.csv").write_text("\n".join([TABLE, *lines]) + "\n")
    return Aiter(root)


def test_launches_of_a_backward_call(checkout):
    """gfx942 adds 16-bit sums to dQ itself; 64 keys are then its unit, so that 512 needs no kernel that masks."""
    tensors = Gradients.of(512, 128, Mode(wide=False))
    before, main = checkout.launches("gfx942", tensors, False, Mode(wide=False))
    assert [(what, launch.grid) for what, launch in (before, main)] == [("dO·O", (4, 1, 1)), ("gradients", (3, 1, 1))]
    words = struct.unpack("<88Q", main[1].kernarg)[::2]
    assert words[:4] == tuple(t.data_ptr() for t in (tensors.dq, tensors.dk, tensors.dv, tensors.q))
    assert words[11:16] == (512, 192 * 256, 256, 512 * 256, 256)  # length, bytes of a block, q's strides


def test_a_masked_length_and_wide_sums(checkout):
    """512 keys are no multiple of 192, and pairs of blocks make two workgroups; sums are converted afterwards."""
    tensors = Gradients.of(512, 128, Mode(wide=True))
    grids = [(what, launch.grid[0]) for what, launch in checkout.launches("gfx942", tensors, True, Mode(wide=True))]
    assert grids == [("dO·O", 4), ("gradients", 2), ("dQ", 8)]


def test_no_checkout_of_aiter_and_no_kernel(checkout, tmp_path):
    mode = Mode(wide=True)
    with pytest.raises(ForeignError, match=r"fmha_bwd_odo.csv does not exist; expected a checkout of aiter"):
        next(Aiter(tmp_path).launches("gfx942", Gradients.of(256, 128, mode), False, mode))
    with pytest.raises(ForeignError, match=r"fmha_bwd_odo.csv has no row with .*'64'"):
        next(checkout.launches("gfx942", Gradients.of(256, 64, mode), False, mode))


def test_one_clock_is_fitted_for_each_chip(monkeypatch, capsys, tmp_path):
    """To its first figure; others are predictions, with the time of every launch in them."""
    shape = (1, 1024, 16, 128)
    figures = [
        published.Published("a", "gfx950", shape, False, 1000),
        published.Published("b", "gfx950", shape, False, 500, Mode(wide=True)),
    ]
    monkeypatch.setattr(published, "FIGURES", figures)
    cycles = figures[0].flop / 1000 / 1e6 - 4  # at 1 GHz, thousands of them
    monkeypatch.setattr(published, "forward", lambda figure, kernel: published.Time((cycles * 1e3,), 1, 0))
    monkeypatch.setattr(published, "backward", lambda figure, aiter: published.Time((cycles * 5e3, 0.0), 1, 2))
    monkeypatch.setattr(Compilers, "flydsl", lambda self, arch, call: [None])
    path = tmp_path / "x.json"
    assert published.main(["--flydsl", str(tmp_path), "--aiter", str(tmp_path), "--json", str(path)]) == 0
    first, second = json.loads(path.read_text())
    assert first["clock_ghz"] == second["clock_ghz"] == pytest.approx(1.0) and first["error"] == pytest.approx(0)
    assert second["model_tflops"] == pytest.approx(figures[1].flop / (5 * cycles + 2 * 4 + 2) / 1e6)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "1.00GHz",
        f"{100 * second['error']:+.0f}%",
    ]
