"""The site: it builds without a warning, and its reference has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fly
import fly_attention
from fly.ir.dtypes import DType

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 10
    for page in pages:
        assert (site / ("" if page.name == "index" else page) / "index.html").is_file(), page


def test_the_reference_of_fly_is_complete(site):
    page = (site / "reference" / "fly" / "index.html").read_text()
    for name in fly.__all__:
        text = f"fly.{name}"
        if isinstance(getattr(fly, name), DType):
            assert f"<code>{text}</code>" in page
        elif name != "__version__":
            assert re.search(rf"\b{re.escape(text)}\b", re.sub(r"<[^>]*>", "", page)), text


def test_the_reference_of_fly_attention_is_complete(site):
    page = re.sub(r"<[^>]*>", "", (site / "reference" / "attention" / "index.html").read_text())
    for name in fly_attention.__all__:
        assert name == "__version__" or f"fly_attention.{name}" in page
    assert "window_size" in page and "UnsupportedError" in page


def test_the_reference_lists_no_other_names():
    for page, name, package in (("fly", "fly", fly), ("attention", "fly_attention", fly_attention)):
        text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
        listed = re.findall(rf'heading: "{name}\.(\w+)"', text)
        assert listed and set(listed) <= set(package.__all__)
        assert len(listed) == len(set(listed))


def test_a_broken_link_is_an_error(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nothing.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "nothing.md" in done.stdout + done.stderr
