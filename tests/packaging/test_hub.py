"""The folder for Hugging Face's hub: its package stands alone, and their loader loads it."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from fly.backends.artefact import Artefact
from hub import build
from hub.vendor import relative, vendor
from tests.packaging.environments import Environment, peers
from tests.packaging.test_wheel import ATTEND

SPEC = """
targets = ["gfx950"]
[[call]]
head_dim = 64
seq_len = 32
num_heads = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("hub")
    (base / "spec.toml").write_text(SPEC)
    assert (
        build.main(["--backend", "cpu", "--spec", str(base / "spec.toml"), "--into", str(base), "--jobs", "1"]) == 0
    )
    return base


def loaded_with(path: Path, top: Path) -> list[Path]:
    """What modules a file of the package in `top` loads as it is loaded itself: each as a path without a suffix.

    Imports from elsewhere that are not torch's, NumPy's or the standard library's fail.
    """
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            above = path.parents[node.level - 1]
            assert above == top or top in above.parents, path
            module = above.joinpath(*(node.module or "").split("."))
            found += [module / a.name for a in node.names] if (module / "__init__.py").exists() else [module]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            named = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in named:
                known = sys.stdlib_module_names | {"torch", "numpy", "llvmlite", "tinygrad"}
                assert name.partition(".")[0] in known, (path, name)
    return found


def missing(top: Path) -> list[tuple[Path, Path]]:
    """(module, what it loads and is not there), of all that is in a package."""
    missed = []
    for path in top.rglob("*.py"):
        for module in loaded_with(path, top):
            there = module.with_suffix(".py").exists() or (module / "__init__.py").exists()
            named = (module.parent / "__init__.py").exists() and re.search(
                rf"\b{module.name}\b", (module.parent / "__init__.py").read_text()
            )
            if not there and not named:
                missed.append((path.relative_to(top), module.relative_to(top)))
    return missed


def test_modules_of_the_folder_import_each_other_and_none_that_was_left_out(folder):
    variant = folder / "build" / "torch-cpu"
    assert missing(variant) == []
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cpu"} and metadata["name"] == "fly-attention"
    operations = (variant / "fly_attention" / "api" / "torch_ops.py").read_text()
    assert f'"{metadata["id"][1:]}::flash_attn"' in operations and '"fly::' not in operations
    assert "1 builds" in (folder / "README.md").read_text()


@pytest.mark.timeout(1800)  # the first time, packages are downloaded
def test_hugging_faces_loader_loads_it_beside_an_installed_library(folder, tmp_path, pytestconfig):
    """Without the compiler; a second folder of other builds is another package."""
    kept = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    others, linked, kernels = peers(pytestconfig.cache.mkdir("hugging-face") if kept else tmp_path)
    here = Environment.make(tmp_path / "env", others, linked)
    here.install(kernels)
    program = f"""
import sys
for name in ("mlir", "ziglang", "cuda", "fly", "fly_attention"):
    sys.modules[name] = None  # as if not installed
from pathlib import Path
from kernels import get_local_kernel
hub = get_local_kernel(Path({str(folder)!r}))
assert get_local_kernel(Path({str(folder)!r})) is hub and "flash_attn_varlen_func" in dir(hub)
flash_attn_func = hub.flash_attn_func
{ATTEND.replace("from fly_attention import flash_attn_func", "")}
compiled = torch.compile(lambda *qkv: flash_attn_func(*qkv, causal=True), backend="eager", fullgraph=True)
assert torch.equal(compiled(q, k, v), out)
try:
    flash_attn_func(q, k, v, softcap=2.0)
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    said = here.python(program, FLY_ARCH="gfx950", FLY_PREBUILT="/nonexistent", FLY_CACHE="0")
    assert said.startswith("MissingBuildError") and str(folder) in said and "unset" not in said


def test_a_folder_for_a_gpu_has_no_emulator_and_says_which_gpus(tmp_path, monkeypatch):
    def prebuilt(command, **_):
        made = Path(command[command.index("--into") + 1])
        (made / "add-1").mkdir(parents=True)
        Artefact("add", "sm_90a", b"PTX", "", (), (1, 1, 1)).save(made / "add-1" / "2.fly")
        (made / "manifest.json").write_text(json.dumps({"sources": {}}))
        assert command[command.index("--arch=sm_90a") + 1] == "--receipt=pytorch"

    monkeypatch.setattr(build.subprocess, "run", prebuilt)
    assert build.main(["--into", str(tmp_path), "--head-dim", "64"]) == 0
    variant = tmp_path / "build" / "torch-cuda"
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert set(json.loads((variant / "builds" / "manifest.json").read_text())["sources"]) == {"fly", "fly_attention"}
    assert missing(variant) == []
    (variant / "fly" / "ir" / "dialect.py").unlink()
    assert (Path("fly/backends/nvvm/dialect.py"), Path("fly/ir/dialect")) in missing(variant)
    assert not (variant / "fly" / "emulator").exists() and (variant / "fly" / "runtime" / "cuda_driver.py").exists()


def test_targets_of_another_backend_are_refused(capsys):
    with pytest.raises(SystemExit):
        build.main(["--backend", "rocm", "--arch", "sm_90a"])
    assert "--arch sm_90a with --backend rocm; accepted: gfx942, gfx950" in capsys.readouterr().err


def test_imports_become_relative_at_any_depth():
    text = "import fly\nfrom fly import config\nif 1:\n    from fly.ir import x as y\nimport torch, numpy\n"
    deep = relative(text, ("fly",), Path("fly/lang/a.py")).splitlines()
    assert deep == [
        "from ... import fly",
        "from ...fly import config",
        "if 1:",
        "    from ...fly.ir import x as y",
        "import torch, numpy",
    ]
    for line in ("import fly.ir", "import fly, torch", "import_module('fly.ir')", "a.import_module('fly')"):
        with pytest.raises(ValueError, match=r"a\.py:1: .* has no relative form"):
            relative(line, ("fly",), Path("a.py"))


def test_operations_have_a_namespace_of_their_own(tmp_path):
    (tmp_path / "from").mkdir()
    text = 'define("fly::add"); torch.ops.fly.add(x)  # of torch.ops.fly, fly::\n'
    (tmp_path / "from" / "a.py").write_text(text)
    vendor({"fly": tmp_path / "from"}, tmp_path / "to", lambda place: place == "fly/a.py", "ours")
    assert (tmp_path / "to" / "fly" / "a.py").read_text() == (
        'define("ours::add"); torch.ops.ours.add(x)  # of torch.ops.fly, fly::\n'
    )
