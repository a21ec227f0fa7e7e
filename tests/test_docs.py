"""The documents do not lie: what they name exists, and what they show runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fly
from fly.runtime.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
README = (ROOT / "README.md").read_text()
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def named_files(text: str) -> set[str]:
    """Paths in backticks or links that are meant to be in the repository."""
    quoted = re.findall(r"`((?:fly|kernels|tests|benchmarks|examples|docs|\.ci)/[\w./-]*)`", text)
    return {*quoted, *re.findall(r"\]\(([\w./-]+)\)", text)}


@documents
def test_named_files_exist(path):
    missing = {
        name for name in named_files(path.read_text()) if not any((at / name).exists() for at in (ROOT, path.parent))
    }
    assert missing == set()


def test_named_files_are_found():
    assert named_files("see `fly/layout.py`, [x](docs/y.md) and `fly.Layout`") == {"fly/layout.py", "docs/y.md"}


@documents
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^    )make ([a-z]+)", path.read_text(), re.M)) <= targets


def test_make_lists_its_targets():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "bench", "clean"):
        assert re.search(rf"^make {target} +\w", shown, re.M), shown


@pytest.mark.parametrize("name", [name for name in fly.__all__ if not name.startswith("_")])
def test_every_name_has_its_place_in_the_guide(name):
    guide = (ROOT / "docs" / "writing-kernels.md").read_text()
    assert re.search(rf"[`.(]{name}\b", guide)


@pytest.mark.parametrize("command", re.findall(r"^ +python -m fly ([^#\n]+)", README, re.M))
def test_commands_of_the_readme_run(command, capsys):
    assert main(shlex.split(command)) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.skipif(find_spec("fly.emulator") is None, reason="needs the emulator (fly.emulator)")
def test_code_of_the_readme_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) == 3
    program = tmp_path / "tour.py"
    program.write_text("\n".join(blocks))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
