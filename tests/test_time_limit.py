"""A test that hangs is named, in a process of its own and in those of pytest-xdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANGING = """
import time

def test_that_ends():
    pass

def test_that_hangs():
    while True:
        time.sleep(0.1)
"""


def test_every_test_has_a_limit(pytestconfig):
    assert 60 <= float(pytestconfig.getini("timeout")) <= 600


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "workers"])
def test_a_test_that_hangs_fails_by_name(workers, tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-o", "timeout=2", *workers]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "test_that_hangs" in done.stdout and "Timeout" in done.stdout
