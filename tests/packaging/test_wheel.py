"""The wheel, as users get it: built from the source distribution, installed outside of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fly
from tests.packaging.environments import ROOT, Environment, link_packages, peers, requirements_of

pytestmark = pytest.mark.timeout(1800)  # packages come over a network

ATTEND = """
import torch
from fly_attention import flash_attn_func
seed = torch.seed()
q, k, v = (torch.randn(1, 32, 2, 64, dtype=torch.bfloat16) for _ in range(3))
out = flash_attn_func(q, k, v, causal=True)
heads_first = [x.float().transpose(1, 2) for x in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
assert (out.float() - expected).abs().max() < 0.03, f"seed {seed}"
"""
GET_KERNEL = """
from kernels import get_kernel
assert callable(get_kernel)
"""
USERS = """
import diffusers, transformers
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available() and diffusers.utils.is_kernels_available()
from fly.__main__ import main
assert main(["paths"]) == 0
from fly_attention.integrations import transformers as ours
ours.register()
assert transformers.AttentionInterface()["fly"] is ours.attention_forward
"""


def build(command: str, directory: Path, output: Path) -> Path:
    """Run a function of the build backend's, in a project's directory; returns what it made."""
    output.mkdir()
    program = f"import sys; from setuptools import build_meta; print(build_meta.{command}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(output)], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return output / done.stdout.split()[-1]


def project(directory: Path) -> Path:
    """A copy of the checkout, since builds leave files behind."""
    directory.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, directory)
    for name in ("fly", "kernels", "fly_attention", "benchmarks", "docs", "examples", "tests"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    archive = build("build_sdist", project(base / "project"), base / "sdist")
    shutil.unpack_archive(archive, base / "unpacked")
    (unpacked,) = (base / "unpacked").iterdir()
    return build("build_wheel", unpacked, base / "dist")


def test_the_wheel_has_both_packages_whole_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"fly_attention-{fly.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"fly", "fly_attention", info}
    for directory, package in (("fly", "fly"), ("kernels", "fly_attention")):
        files = (ROOT / directory).rglob("*.py*")
        sources = (path.relative_to(ROOT / directory) for path in files if path.suffix in (".py", ".pyi"))
        expected = {f"{package}/{source.as_posix()}" for source in sources}
        assert {name for name in names if name.startswith(package + "/")} == {*expected, f"{package}/py.typed"}
    assert f"{info}/licenses/LICENSE" in names


def test_what_is_not_installed_is_named_with_its_extra(wheel, tmp_path):
    """The base's dependencies and torch: enough for NVIDIA GPUs."""
    here = Environment.make(tmp_path / "env", link_packages(tmp_path / "linked", ["torch", *requirements_of()]))
    here.install(wheel)
    program = """
import importlib.util
assert not any(map(importlib.util.find_spec, ("tinygrad", "ziglang", "tqdm", "kernels")))
import torch, fly
from fly.errors import MissingPackageError

@fly.kernel
def fill(x: fly.Tensor):
    x.store(fly.f32(1.0), fly.thread_id.x)

def message(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except MissingPackageError as error:
        return str(error)
    raise AssertionError("nothing is missing")

vector = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)
assert ".entry" in fly.compile(fill, vector, block=64, target="sm_90a").isa
assert "fly-attention[amd]" in message(fly.compile, fill, vector, block=64, target="gfx950")
assert "fly-attention[emulator]" in message(fill[1, 64], torch.zeros(64))
from fly_attention import flash_attn_func
q = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
assert "fly-attention[emulator]" in message(flash_attn_func, q, q, q)
from fly.backends.rocdl.assemble import assemble
assert "fly-attention[amd]" in message(assemble, "", "gfx950")
"""
    here.python(program, PATH="", ROCM_PATH="/nonexistent", FLY_CACHE="0")


def test_an_exported_kernel_is_loaded_without_any_dependency(wheel, tmp_path):
    @fly.kernel
    def fill(x: fly.Tensor):
        x.store(fly.f32(1.0), fly.thread_id.x)

    path = tmp_path / "fill.fly"
    vector = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)
    fly.compile(fill, vector, block=64, target="sm_90a").save(path)
    here = Environment.make(tmp_path / "env")
    here.install(wheel)
    program = f"""
import fly, fly_attention
from fly.errors import MissingPackageError
print(fly.load({str(path)!r}).artefact.target)
for package, name in ((fly, "kernel"), (fly_attention, "flash_attn_func")):
    try:
        getattr(package, name)
    except MissingPackageError as error:
        print(error)
"""
    target, compiler, attention = here.python(program).splitlines()
    assert target == "sm_90a"
    assert compiler == "fly.kernel needs the package xtc-mlir-python-bindings: pip install fly-attention"
    assert attention == "flash attention needs the package torch: pip install 'fly-attention[torch]'"


def test_an_exported_kernel_is_launched_without_mlir_torch_and_a_linker(wheel, tmp_path):
    """In the emulator, which needs llvmlite of its own."""

    @fly.kernel
    def fill(x: fly.Tensor):
        x.store(fly.f32(1.0), fly.thread_id.x)

    path = tmp_path / "fill.fly"
    vector = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)
    fly.compile(fill, vector, block=64, target="gfx950").save(path)
    needed = ("numpy", "llvmlite", "tinygrad", "tqdm")
    here = Environment.make(tmp_path / "env", link_packages(tmp_path / "linked", needed))
    here.install(wheel)
    program = f"""
import importlib.util
assert not any(map(importlib.util.find_spec, ("mlir", "torch", "ziglang")))
import fly, numpy
x = numpy.zeros(64, numpy.float32)
fly.load({str(path)!r})[1, 64](x)
assert (x == 1).all()
"""
    here.python(program, FLY_ARCH="gfx950")


def test_an_editable_install_has_the_name_kernels_inside_the_checkout_only(tmp_path):
    checkout = project(tmp_path / "checkout")
    here = Environment.make(tmp_path / "env")
    here.install(build("build_editable", checkout, tmp_path / "dist"))
    outside = """
import importlib.util, fly_attention.integrations
assert importlib.util.find_spec("kernels") is None
print(fly_attention.integrations.__file__)
"""
    assert here.python(outside).strip() == str(checkout / "kernels" / "integrations" / "__init__.py")
    inside = """
import fly_attention.integrations, kernels.integrations
assert kernels.integrations is fly_attention.integrations
"""
    here.python(f"import os; os.chdir({str(checkout)!r}){inside}")
    # after the install's own was loaded
    here.python(f"import fly_attention.integrations, sys; sys.path.insert(0, {str(checkout)!r}){inside}")


@pytest.mark.timeout(900)  # the first time, they are downloaded
def test_the_wheel_and_hugging_faces_packages_leave_each_other_whole(wheel, tmp_path, pytestconfig):
    """Either may be installed first, and either uninstalled first."""
    kept = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    others, linked, kernels = peers(pytestconfig.cache.mkdir("hugging-face") if kept else tmp_path)
    here = Environment.make(tmp_path / "env", others, linked)

    here.install(kernels)
    here.install(wheel)
    assert here.damage("kernels") == here.damage("fly-attention") == []
    here.python(GET_KERNEL + ATTEND + USERS)

    here.uninstall("fly-attention")
    assert here.damage("kernels") == []
    assert list(here.packages.glob("fly*")) == []
    here.python(GET_KERNEL)

    here.install(wheel)
    here.uninstall("kernels")
    assert here.damage("fly-attention") == []
    here.python(ATTEND)

    here.install(kernels)
    assert here.damage("kernels") == here.damage("fly-attention") == []
