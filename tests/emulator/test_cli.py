"""`python -m fly emulate`, as a function."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from fly.emulator import cli
from fly.errors import ArgumentError
from tests.emulator.kernels import REVERSE, Patch
from tests.emulator.toolchain import build


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def reverse(tmp_path: Path) -> str:
    path = tmp_path / "reverse.hsaco"
    path.write_bytes(build(REVERSE, "gfx950"))
    return str(path)


def test_runs_a_kernel_and_saves_its_buffers(reverse: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--grid", "2", "--block", "256", "--args", "f32[512]=random f32[512] i32=512", "--save", str(tmp_path)]
    assert cli.run(options(reverse, *words)) == 0
    source, out = np.load(tmp_path / "arg0.npy"), np.load(tmp_path / "arg1.npy")
    assert np.array_equal(out.reshape(2, 256), source.reshape(2, 256)[:, ::-1])
    assert "wave-instructions" in capsys.readouterr().out


def test_trace_prints_one_wave_with_values(reverse: str, capsys: pytest.CaptureFixture) -> None:
    words = ["--grid", "2", "--block", "256", "--args", "f32[512]=arange f32[512] i32=512", "--trace", "1:2"]
    assert cli.run(options(reverse, *words)) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if " lanes]" in x]
    load = next(x for x in lines if "global_load_dword" in x)
    first = np.float32(256 + 128).view(np.uint32)  # workgroup 1, wave 2, lane 0 loads element 384
    assert f"={int(first):#x}," in load
    assert sum("ds_write_b32" in x for x in lines) == 2


def test_findings_give_status_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    patch = Patch(build(REVERSE, "gfx950"), "reverse")
    patch.drop(*patch.find("s_barrier"))
    path = tmp_path / "broken.hsaco"
    path.write_bytes(patch.code)
    words = ["--grid", "2", "--block", "256", "--args", "f32[512]=random f32[512] i32=512"]
    assert cli.run(options(str(path), *words)) == 1
    assert "lds-race" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--args", "f32[8]=what"], ["--args", "x=1"], ["--grid", "0"], ["--trace", "x"]])
def test_bad_options_are_named(reverse: str, words: list[str]) -> None:
    with pytest.raises(ArgumentError, match=r"expected"):
        cli.run(options(reverse, *words))
