"""The kernel library has two names in a checkout and one set of modules, and both packages are light to import."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fly
import fly_attention
import kernels
from fly.__main__ import main
from fly.errors import DeviceError, FlyError, MissingPackageError, needs_packages
from fly.runtime import cli

ROOT = Path(__file__).resolve().parents[2]
MODULES = [found.name for found in pkgutil.walk_packages(kernels.__path__, "kernels.")]
HEAVY = {"mlir", "llvmlite", "torch", "numpy", "tinygrad", "cuda"}


def python(program: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_both_names_have_the_same_modules(name):
    first = importlib.import_module(name)
    assert importlib.import_module(name.replace("kernels", "fly_attention", 1)) is first
    assert sys.modules[first.__spec__.name] is first


def test_all_modules_were_found():
    assert {"kernels.flash_attn_interface", "kernels.integrations.vllm", "kernels.second_name"} <= set(MODULES)


@pytest.mark.parametrize(
    "order",
    [
        ("kernels.api.torch_ops", "fly_attention.api.torch_ops"),
        ("fly_attention.problem.block_mask", "kernels.problem.block_mask", "kernels.problem.mask"),
    ],
)
def test_the_order_of_imports_does_not_matter(order):
    """Loaded twice, torch_ops would fail: its operations can be registered once."""
    program = f"import {', '.join(order)}, kernels.api.torch_ops, fly_attention.api.torch_ops\n"
    program += "from kernels.problem import block_mask, mask\n"
    program += "from fly_attention import BlockMask\n"
    program += "from fly_attention.problem import mask as same\n"
    program += "assert kernels is fly_attention and block_mask.BlockMask is BlockMask and mask is same"
    python(program)


def test_a_module_that_is_not_there_is_reported_by_the_name_that_was_asked_for():
    with pytest.raises(ModuleNotFoundError, match=r"'fly_attention\.nothing'"):
        importlib.import_module("fly_attention.nothing")


def test_a_package_loaded_by_its_other_name_first_is_not_loaded_again():
    """As where an editable install was imported before the checkout came onto the path."""
    program = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
directory = {str(ROOT / "kernels")!r}
spec = spec_from_file_location("fly_attention", directory + "/__init__.py", submodule_search_locations=[directory])
sys.modules["fly_attention"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["fly_attention"])
import fly_attention.problem.block_mask, kernels.problem.block_mask
import fly_attention.api.torch_ops, kernels.api.torch_ops
assert kernels is fly_attention and kernels.problem.block_mask is fly_attention.problem.block_mask
print(kernels.problem.block_mask.__name__)
"""
    assert python(program).strip() == "fly_attention.problem.block_mask"


def test_another_package_called_kernels_is_left_alone(tmp_path):
    """As where the checkout is on the path behind Hugging Face's."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("get_kernel = 1")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import fly_attention.problem.block_mask
from kernels import get_kernel
print(fly_attention.BlockMask.__module__, len([name for name in sys.modules if name.startswith("kernels.")]))
"""
    assert python(program).split() == ["fly_attention.problem.block_mask", "0"]


@pytest.mark.parametrize("package", ["fly", "fly_attention", "kernels"])
def test_importing_a_package_is_light(package):
    loaded = python(f"import sys, {package}; {package}.__version__; print(*sys.modules)").split()
    assert package in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY


@pytest.mark.parametrize("name", fly_attention.__all__)
def test_public_names_are_there(name):
    assert getattr(fly_attention, name) is not None
    assert name in dir(fly_attention)


def test_no_other_names_are_public():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fly_attention.nothing


def test_there_is_one_version():
    assert fly_attention.__version__ == fly.__version__
    assert 'version = { attr = "fly.__version__" }' in (ROOT / "pyproject.toml").read_text()
    assert f"({fly.__version__})" in (ROOT / "CHANGELOG.md").read_text()


def test_a_missing_package_is_reported_with_its_extra():
    with (
        pytest.raises(
            MissingPackageError, match=r"^X needs the package ziglang: pip install 'fly-attention\[amd\]'$"
        ),
        needs_packages("X"),
    ):
        raise ModuleNotFoundError(name="ziglang")
    with pytest.raises(MissingPackageError, match=r"xtc-mlir-python-bindings: pip install fly-attention$"):
        raise MissingPackageError("X", "mlir")
    assert {FlyError, DeviceError, ImportError} <= set(MissingPackageError.__mro__)


def test_commands_report_missing_packages(monkeypatch, capsys):
    def profile(_):
        raise ModuleNotFoundError(name="torch.nn")

    monkeypatch.setattr(cli, "_env", profile)
    assert main(["env"]) == 1
    assert (
        capsys.readouterr().err == "error: this command needs the package torch: pip install 'fly-attention[torch]'\n"
    )


def test_a_missing_module_of_somebody_elses_stays_what_it_is():
    with pytest.raises(ModuleNotFoundError, match="their own"), needs_packages("X"):
        raise ModuleNotFoundError("their own", name="theirs")
