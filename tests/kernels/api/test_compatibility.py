"""docs/compatibility.md: every line of its tables names tests that exist, and what it cites is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "compatibility.md").read_text()
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests" / "kernels").rglob("*.py")))
# lines of tables that are neither headings nor the rules under them
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| behaviour |")
]


def test_there_are_lines():
    assert len(LINES) > 40


@pytest.mark.parametrize("cells", LINES, ids=lambda cells: cells[0])
def test_every_line_names_its_tests(cells):
    named = re.findall(r"`(test_\w+)(?:\[([^\]]+)\])?`", cells[-1])
    assert named
    for function, case in named:
        assert f"def {function}(" in TESTS, function
        assert not case or f'"{case}": (' in TESTS, case


@pytest.mark.parametrize("cells", LINES, ids=lambda cells: cells[0])
def test_every_source_is_listed(cells):
    cited = {mark for cell in cells[1:-1] for mark in re.findall(r"\[(\d?[a-z]?)\]", cell)}
    assert cited <= set(re.findall(r"^\[(\w+)\]: https://github\.com/", TEXT, re.M))
