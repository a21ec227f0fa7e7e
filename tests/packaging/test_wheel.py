"""The wheel, as users get it: built from the source distribution, installed outside of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fly
from fly.__main__ import main
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
HOOK = """
import torch
import fly_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
seed = torch.seed()
q, k, v = (torch.randn(1, 32, 2, 64, dtype=torch.bfloat16) for _ in range(3))
own = fly_attention.flash_attn_func(q, k, v, causal=True)

def attend():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

before = attend()
fly_attention.activate("cpu")
on = attend()
fly_attention.deactivate()
assert torch.equal(on, own) and torch.equal(attend(), before) and not torch.equal(before, own), f"seed {seed}"
"""
# of tests/kernels/api/test_hugging_face.py, those that a fresh environment runs: each model and each cache once
MODELS = (
    "test_models_of_transformers[Llama-plain]",
    "test_models_of_transformers[Qwen3, with a window-packed]",
    "test_models_of_transformers[Gemma 3, with windows-packed]",
    "test_models_of_transformers[gpt-oss, with sinks-padded]",
    "test_tokens_of_generate[Llama-dynamic]",
    "test_tokens_of_generate[Gemma 3, with windows-static]",
    "test_tokens_of_continuous_batching[gpt-oss, with sinks]",
    "test_a_model_of_diffusers",
)


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

@fly.kernel
def nothing(x: fly.Tensor):
    pass

def compile():
    fly.compile(nothing, fly.TensorSpec("f32", 1, 16, True), block=64, target="sm_90a")

for act in (compile, lambda: fly_attention.flash_attn_func):
    try:
        act()
    except MissingPackageError as error:
        print(error)
"""
    target, compiler, attention = here.python(program).splitlines()
    assert target == "sm_90a"
    assert compiler == "compiling a kernel needs the package xtc-mlir-python-bindings: pip install fly-attention"
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


def test_builds_made_ahead_run_with_the_compiler_uninstalled(wheel, tmp_path):
    """In the emulator, which needs llvmlite of its own; MLIR and the linker are gone."""
    spec, builds = tmp_path / "spec.toml", tmp_path / "builds"
    spec.write_text('targets = ["gfx950"]\n[[call]]\nhead_dim = 64\nseq_len = 32\nnum_heads = 2\n')
    assert main(["prebuild", "--spec", str(spec), "--into", str(builds), "--jobs", "1"]) == 0
    needed = ("torch", "numpy", "llvmlite", "tinygrad", "tqdm")
    here = Environment.make(tmp_path / "env", link_packages(tmp_path / "linked", needed))
    here.install(wheel)
    program = f"""
import importlib.util
assert not any(map(importlib.util.find_spec, ("mlir", "ziglang", "cuda")))
{ATTEND}
from fly.errors import MissingBuildError, MissingPackageError
import os
for error, folder in ((MissingBuildError, {str(builds)!r}), (MissingPackageError, "")):
    os.environ["FLY_PREBUILT"] = folder
    try:
        flash_attn_func(q, k, v, softcap=2.0)
    except error as raised:
        print(str(raised).splitlines()[0])
"""
    missing, package = here.python(program, FLY_ARCH="gfx950", FLY_PREBUILT=str(builds), FLY_CACHE="0").splitlines()
    assert "flash_attn_gfx950 for gfx950" in missing and "python -m fly prebuild" in missing
    assert package == "compiling a kernel needs the package xtc-mlir-python-bindings: pip install fly-attention"


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


@pytest.mark.timeout(900)
def test_models_run_in_a_fresh_environment(wheel, tmp_path, pytestconfig):
    """torch's hook on and off, and tiny models of transformers and diffusers, on an installed wheel."""
    kept = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    others, linked, _ = peers(pytestconfig.cache.mkdir("hugging-face") if kept else tmp_path)
    here = Environment.make(tmp_path / "env", others, linked, link_packages(tmp_path / "linked", ["pytest"]))
    here.install(wheel)
    here.python(HOOK)
    for path in ("tests/kernels/conftest.py", "tests/kernels/api/test_hugging_face.py"):
        shutil.copy(ROOT / path, here.home)
    chosen = [f"test_hugging_face.py::{name}" for name in MODELS]
    options = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    told = here.python(f"import pytest; raise SystemExit(pytest.main({[*options, *chosen]!r}))")
    assert f"{len(MODELS)} passed" in told, told
