"""The documents do not lie: what they name exists, and what they show runs."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fly
from fly.__main__ import main
from kernels import prebuild

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
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", path.read_text(), re.M)) <= targets


def test_make_lists_its_targets():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "bench", "hub-kernel", "clean"):
        assert re.search(rf"^make {target} +\w", shown, re.M), shown


@pytest.mark.parametrize("name", [name for name in fly.__all__ if not name.startswith("_")])
def test_every_name_has_its_place_in_the_guide(name):
    guide = (ROOT / "docs" / "writing-kernels.md").read_text()
    assert re.search(rf"[`.(]{name}\b", guide)


@pytest.fixture(scope="module")
def hopper_matmul(tmp_path_factory) -> ModuleType:
    """The module that the guide shows for Hopper."""
    code, _ = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "writing-kernels.md").read_text(), re.M | re.S)
    path = tmp_path_factory.mktemp("guide") / "hopper_matmul.py"
    path.write_text(code)
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tuned_kernel_of_the_guide_runs(tmp_path, monkeypatch):
    _, code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "writing-kernels.md").read_text(), re.M | re.S)
    program = tmp_path / "tuned.py"
    program.write_text(code)
    monkeypatch.setenv("FLY_CACHE_DIR", str(tmp_path))
    runpy.run_path(str(program), run_name="tuned_example")
    assert "halve" in next((tmp_path / "tuned").glob("*.json")).read_text()


def test_the_spec_of_the_guide_is_one(tmp_path):
    text = (ROOT / "docs" / "prebuilding.md").read_text()
    lines = re.search(r"^    targets = .*?(?=^    \[\[kernel)", text, re.M | re.S)[0]
    path = tmp_path / "spec.toml"
    path.write_text(re.sub("^    ", "", lines, flags=re.M))
    assert len(prebuild.plan(prebuild.read_spec(path)).builds) > 2


def test_the_pipeline_of_the_guide_compiles(hopper_matmul):
    maps = [
        fly.TensorMapSpec("bf16", (t.rows, t.panel_columns), t.swizzle) for t in (hopper_matmul.A, hopper_matmul.B)
    ]
    specs = (*maps, fly.TensorSpec("bf16", 2, 16, True), fly.ScalarSpec("i32"))
    isa = fly.compile(hopper_matmul.matmul, *specs, block=256, target="sm_90a").isa
    assert isa.count("wgmma.mma_async") == 4
    assert isa.count("cp.async.bulk.tensor") == 2


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no NVIDIA GPU of 9.0"
)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 64), (200, 256, 1000), (1024, 1024, 4096)])
def test_the_pipeline_of_the_guide_multiplies(hopper_matmul, m, n, k):
    a, b = (torch.randint(-3, 4, (rows, k), device="cuda").bfloat16() for rows in (m, n))
    c = torch.zeros(m, n, dtype=torch.bfloat16, device="cuda")
    maps = [
        fly.tensor_map(x, (t.rows, t.panel_columns), swizzle=t.swizzle)
        for x, t in ((a, hopper_matmul.A), (b, hopper_matmul.B))
    ]
    hopper_matmul.matmul[(-(-m // 64), n // 128), 256](*maps, c, k)
    assert torch.equal(c, (a.double() @ b.double().T).bfloat16())


@pytest.mark.parametrize("command", re.findall(r"^ +python -m fly ([^#\n]+)", README, re.M))
def test_commands_of_the_readme_run(command, capsys):
    assert main(shlex.split(command)) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.skipif(find_spec("fly.emulator") is None, reason="needs the emulator (fly.emulator)")
@pytest.mark.parametrize(
    ("name", "count"),
    [("README.md", 5), ("docs/index.md", 1), ("docs/features.md", 7), ("docs/training.md", 3)],
)
def test_code_of_a_document_runs(name, count, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    assert len(blocks) == count
    program = tmp_path / "tour.py"
    program.write_text("\n".join(blocks))
    runpy.run_path(str(program), run_name="__main__")


NOTEBOOK = (ROOT / "docs" / "notebook.md").read_text()
ENTRIES = re.findall(r"^### (.+)\n\n(.*)", NOTEBOOK, re.M)  # heading, and the line of its date and state
STATES = re.findall(r"^\| ((?:Kept|Not kept|Measured|Counted|Predicted|Superseded)[\w ]*) \|", NOTEBOOK, re.M)


def test_the_notebook_explains_its_states():
    assert len(STATES) == len(set(STATES)) == 7


@pytest.mark.parametrize(("heading", "line"), ENTRIES, ids=[heading for heading, _ in ENTRIES])
def test_an_entry_of_the_notebook_has_a_date_and_a_state(heading, line):
    found = re.fullmatch(r"\*20\d\d-\d\d-\d\d\. (.+)\*", line)
    assert found is not None and found[1].startswith(tuple(STATES)), line
    headings = {other for other, _ in ENTRIES} - {heading}
    assert set(re.findall(r'"([^"]+)"', found[1])) <= headings
    assert ("Superseded" in line) == bool(re.search(r'Superseded by "', line))


def test_headings_of_the_notebook_are_unique():
    headings = [heading for heading, _ in ENTRIES]
    assert len(headings) > 60 and len(headings) == len(set(headings))
