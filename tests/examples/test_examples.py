"""Every example and the demo run: emulated where the emulator is there, and always as far as code."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAINING = EXAMPLES / "04_train.py"  # calls attention, and has no kernel of its own
NUMBERED = sorted(set(EXAMPLES.glob("[0-9]*.py")) - {TRAINING})
needs_emulator = pytest.mark.skipif(find_spec("fly.emulator") is None, reason="needs the emulator (fly.emulator)")
_FAILED = r"07_print_and_check\.py:\d+: fly\.check failed in gather, block"
# what an example says besides its errors
SAID = {
    "07_print_and_check": (
        r"^block 0, thread 50: y\[50\] = table\[\d+\] = 0\.\d{3}$",
        rf"{_FAILED} 0, thread 7: index\[7\] is 1000, the table has 1000 rows$",
        rf"{_FAILED} 1, thread 35: index\[99\] is -3, the table has 1000 rows$",
    )
}
examples = pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)


@pytest.fixture
def run(monkeypatch, capfd):
    """`run(path, *flags)`: the output of an example as a script, but in this process, which has torch already."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def script(path: Path, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        runpy.run_path(str(path), run_name="__main__")
        return capfd.readouterr().out

    before = set(sys.modules)
    yield script
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) in {str(path) for path in EXAMPLES.glob("*.py")}:
            del sys.modules[name]


def run_alone(path: Path, *flags: str) -> str:
    """A script's output; it must succeed."""
    done = subprocess.run([sys.executable, str(path), *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_examples():
    assert [path.name[:3] for path in NUMBERED] == [f"0{i}_" for i in range(1, 8)]


@examples
def test_compiles_for_every_target(path, run):
    shown = run(path, "--compile")
    for arch in ("gfx942", "gfx950"):
        assert re.search(rf"^{arch}: \d+ registers, \d+ shared bytes, 0 spills\n +s_load", shown, re.M), shown
    for arch in ("sm_80", "sm_90a"):
        assert re.search(
            rf"^{arch}: .* registers, \d+ shared bytes, \w+ spills\n +(ld\.param|mov\.u32)", shown, re.M
        ), shown


@examples
@needs_emulator
def test_is_right(path, run):
    check(run(path, "--device", "cpu"), path)


def check(shown: str, path: Path) -> None:
    assert len(re.findall(r"largest error", shown)) >= 4, shown
    for line in SAID.get(path.stem, ()):
        assert re.search(line, shown, re.M), (line, shown)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@examples
def test_is_right_on_a_gpu(path):
    check(run_alone(path, "--device", "cuda"), path)


@examples
def test_is_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= 150


@needs_emulator
def test_a_script_needs_nothing_around_it():
    assert "largest error" in run_alone(NUMBERED[0], "--device", "cpu")


def test_demo(run, monkeypatch, capfd):
    for variable in ("FLY_CACHE", "FLY_ARCH", "FLY_SIMULATOR_SEED"):  # which it sets
        monkeypatch.setenv(variable, "0")
    with pytest.raises(SystemExit) as end:
        run(EXAMPLES / "demo.py", "--length", "140")
    shown = capfd.readouterr().out
    assert end.value.code == 0 and shown.endswith("All checks passed.\n"), shown
    for arch in ("gfx942", "gfx950", "sm_80", "sm_90a"):
        for head_dim in (64, 128):
            assert len(re.findall(rf"^  {arch} D{head_dim} ", shown, re.M)) == 2, shown


def _first(pattern: str, replacement: str):
    return lambda isa: re.sub(pattern, replacement, isa, count=1, flags=re.M)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_first(r"^\s+v_mfma.*\n", ""), "31 matrix instructions a key tile instead of 32"),
        (lambda isa: re.sub(r"s_c?branch\w*", "s_nop", isa), "0 loops with matrix instructions instead of 2"),
        (_first(r"buffer_load_dwordx4", "buffer_load_ushort"), "buffer_load_ushort loads single elements"),
    ],
)
def test_demo_notices_bad_code(damage, complaint, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    monkeypatch.setattr(demo, "FAILURES", [])
    built = demo.build("gfx950", 128)
    demo.check_build(built)
    assert demo.FAILURES == []
    isa = built.artefact.isa
    assert damage(isa) != isa
    demo.check_build(replace(built, artefact=replace(built.artefact, isa=damage(isa))))
    assert any(complaint in failure for failure in demo.FAILURES), demo.FAILURES
    capsys.readouterr()


def test_demo_notices_spills(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    monkeypatch.setattr(demo, "FAILURES", [])
    built = demo.build("gfx942", 64)
    spilled = replace(built.artefact, resources=replace(built.artefact.resources, spills=3))
    demo.check_build(replace(built, artefact=spilled))
    assert demo.FAILURES == ["gfx942 D64: 3 spills, 0 bytes of scratch"]
