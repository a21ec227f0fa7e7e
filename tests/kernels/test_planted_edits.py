"""Every planted bug's edit is still one of the function it names: tests of what it does may be left out of a run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.kernels.sm90.planting import Bug

ROOT = Path(__file__).parents[2]


def _modules() -> list[str]:
    """Tests that name bugs."""
    paths = sorted({*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__)})
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if "Bug(" in path.read_text()]


def _bugs(module: str) -> list[Bug]:
    """Those of its names, and of its tables."""
    values = vars(importlib.import_module(module)).values()
    tables = [value if isinstance(value, tuple | list) else (value,) for value in values]
    return [bug for table in tables for bug in table if isinstance(bug, Bug)]


@pytest.mark.parametrize("module", _modules())
def test_bugs_can_be_planted(module):
    bugs = _bugs(module)
    assert bugs
    for bug in bugs:
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
