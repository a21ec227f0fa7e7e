"""Builds that were made ahead: what finds them, what refuses them, and that many processes make each of them once."""

from __future__ import annotations

import enum
import functools
import json
import math
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fly
from fly import config
from fly.backends.artefact import Artefact
from fly.errors import ArgumentError, ArtefactError, CompileError, ConfigError, DeviceError, MissingBuildError
from fly.lang.signature import Field
from fly.runtime import prebuilt
from fly.runtime.cache import try_lock
from fly.runtime.identity import identity_of, place_of
from fly.runtime.launch import bindings
from fly.runtime.planned import planning
from fly.runtime.prebuild import compiled, fill, progress_bar
from fly.runtime.prebuilt import Build, Folder, source_digest
from fly.runtime.prepared import bind
from tests.runtime.prebuilt_builds import VECTOR, Options, build, code, fill_with, shifted

ROOT = Path(__file__).resolve().parents[2]


def begun(path: Path, toolchain: str = "of today") -> Folder:
    folder = Folder(path)
    folder.begin({name: source_digest(name) for name in ("fly", "tests")}, toolchain, "python -m fly prebuild --x")
    return folder


@pytest.fixture
def folder(tmp_path) -> Folder:
    return begun(tmp_path / "builds")


def test_a_build_is_found_by_its_kernel_parameters_target_and_arguments(folder):
    fill(folder, [build(1.0), build(2.0), build(1.0, arch="gfx942")], code)
    assert folder.find(build(2.0)) == code(build(2.0))
    assert folder.find(build(1.0, arch="gfx942")).target == "gfx942"
    for missing in (build(3.0), build(spec=replace(VECTOR, dtype="bf16")), replace(build(), block=(128, 1, 1))):
        with pytest.raises(
            MissingBuildError, match=r"has none of fill_with for gfx950.*python -m fly prebuild --spec"
        ):
            folder.find(missing)


def test_a_build_is_told_by_what_is_its_own():
    parameters = {"options": Options((3, 4)), "plain": Options()}
    specs = (VECTOR, None, fly.ScalarSpec("f32"), fly.TensorSpec("i32", 2, 4, False), fly.TensorMapSpec("bf16", (8,)))
    assert str(Build(fill_with, specs, parameters, "sm_90a", (64, 1, 1))) == (
        "fill_with for sm_90a, block (64, 1, 1), (options=Options(tile=(3, 4)), plain=Options()), arguments "
        "(f32[1] aligned to 16, none, f32, i32[2] aligned to 4, strided, map of bf16 (8,), swizzle 0)"
    )


def test_a_build_that_assumes_less_serves_too(folder):
    fill(folder, [build(spec=replace(VECTOR, alignment=4)), build(spec=replace(VECTOR, alignment=8))], code)
    assert json.loads(folder.find(build()).metadata["arguments"])[0][1]["alignment"] == 8
    with pytest.raises(MissingBuildError):
        folder.find(build(spec=replace(VECTOR, alignment=2)))


def test_a_launch_takes_its_code_from_the_folder_and_compiles_nothing(folder, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    fill(folder, [build(7.0)], compiled)
    monkeypatch.setenv("FLY_PREBUILT", str(folder.path))
    monkeypatch.setattr(type(fill_with), "trace", lambda *_: pytest.fail("traced"))
    x = torch.zeros(64)
    fill_with[1, 64](x, value=7.0)
    assert (x == 7).all()
    with pytest.raises(MissingBuildError, match=r"value=8\.0.*unset FLY_PREBUILT"):
        fill_with[1, 64](x, value=8.0)


def test_a_simulated_gpu_traces_whatever_was_built(folder, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "sm_80")
    monkeypatch.setenv("FLY_PREBUILT", str(folder.path))
    x = torch.zeros(64)
    fill_with[1, 64](x, value=9.0)
    assert (x == 9).all()


def test_other_sources_and_no_folder_are_refused(folder, tmp_path, monkeypatch):
    fill(folder, [build()], code)
    manifest = folder.path / "manifest.json"
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(whole | {"sources": whole["sources"] | {"tests": "another"}}))
    with pytest.raises(ConfigError, match=r"other sources of tests.*make it again.*python -m fly prebuild --x"):
        Folder(folder.path).find(build())
    with pytest.raises(ConfigError, match=r"no manifest\.json in it; accepted: a folder made by"):
        Folder(tmp_path / "nothing").find(build())
    for wrong in ("{", json.dumps(whole | {"schema": 99}), json.dumps(whole | {"sources": 3})):
        manifest.write_text(wrong)
        with pytest.raises(ConfigError, match="manifest"):
            Folder(folder.path)


def test_a_folder_made_of_other_sources_is_emptied_and_made_again(folder):
    fill(folder, [build()], code)
    assert begun(folder.path).has(build())
    assert not begun(folder.path, "of tomorrow").has(build())


def test_a_damaged_file_is_named(folder):
    fill(folder, [build()], code)
    path = folder.path / f"{build().key}.fly"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtefactError, match=str(path)):
        folder.find(build())
    path.write_bytes(replace(code(build()), kernel="another").to_bytes())
    with pytest.raises(ArtefactError, match="holds a build of another"):
        folder.find(build())


MAKER = """
import sys, time
from pathlib import Path
from fly.runtime.prebuild import fill, progress_bar, unique
from fly.runtime.prebuilt import Folder
from tests.runtime.prebuilt_builds import build, code
builds = unique([build(float(i)) for i in range(6)])
def make(one):
    with open({log!r}, "a") as log:
        log.write(f"{{one.statics['value']}}\\n")
    time.sleep(0.05)
    return code(one)
folder = Folder({path!r})
with progress_bar(folder, builds) as advance:
    time.sleep(0.3)
    assert fill(folder, builds, make, advance) == []
print("done")
"""


def test_many_processes_make_each_build_once_and_one_shows_progress(folder, tmp_path):
    log = tmp_path / "log"
    program = MAKER.format(log=str(log), path=str(folder.path))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **pipes) for _ in range(4)]
    said = [process.communicate(timeout=120) for process in running]
    assert [out.strip() for out, _ in said] == ["done"] * 4, said
    assert Counter(log.read_text().split()) == {str(float(i)): 1 for i in range(6)}
    assert len([errors for _, errors in said if "6 of 6 builds" in errors]) == 1


def test_a_lock_goes_with_a_process_that_is_killed(tmp_path):
    path = tmp_path / "lock"
    program = f"""
from pathlib import Path
from fly.runtime.cache import try_lock
import time
with try_lock(Path({str(path)!r})) as held:
    print(held, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline().strip() == "True"
        with try_lock(path) as held:
            assert not held
        holder.send_signal(signal.SIGKILL)
    with try_lock(path) as held:
        assert held
    assert not path.exists()


def test_builds_that_fail_are_reported_and_the_others_made(folder):
    def make(one: Build) -> Artefact:
        if one.statics["value"] == 1.0:
            raise CompileError("no such instruction")
        return code(one)

    done: list[int] = []
    failed = fill(folder, [build(0.0), build(1.0), build(2.0)], make, done.append, start=1)
    assert [(failure.build.statics["value"], str(failure.error)) for failure in failed] == [
        (1.0, "no such instruction")
    ]
    assert done == [1, 2, 3] and folder.has(build(2.0)) and not folder.has(build(1.0))


def test_a_folder_that_has_all_builds_shows_no_progress(folder, capsys):
    fill(folder, [build()], code)
    with progress_bar(folder, [build()]) as advance:
        fill(folder, [build()], code, advance)
    assert capsys.readouterr().err == ""


def test_ptx_becomes_a_cubin_on_request(monkeypatch, tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf "machine code" > "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    made = build(arch="sm_80")
    assert b".entry" in compiled(made).binary
    assert compiled(made, cubin=True).binary == b"machine code"
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DeviceError, match="ptxas, which is not on the PATH"):
        compiled(made, cubin=True)


class Colour(enum.Enum):
    RED = 1


ALIKE = [
    (1, True, 1.0, "1", b"1", None, Colour.RED, Colour, (1,), frozenset({1, 2})),
    (Options(), Options((1, 3)), Options),
    (0.0, -0.0, math.inf),
    (shifted(1), shifted(2), functools.partial(shifted, 1), math.exp, Path.exists),
    (fly.f32, fly.bf16),
]


@pytest.mark.parametrize("values", ALIKE, ids=lambda values: type(values[0]).__name__)
def test_values_have_an_identity_of_their_own(values):
    texts = [identity_of(value, "x") for value in values]
    assert len(set(texts)) == len(values)


def test_identities_are_the_same_for_what_is_made_again():
    assert identity_of(shifted(1), "x") == identity_of(shifted(1), "x")
    assert identity_of(Options(made=3), "x") == identity_of(Options(made=4), "x")
    program = """
from fly.runtime.identity import identity_of
from tests.runtime.prebuilt_builds import build, shifted
print(build().key, identity_of(shifted(1), "x"))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == f"{build().key} {identity_of(shifted(1), 'x')}"


def test_an_identity_is_not_of_a_process():
    with pytest.raises(ArgumentError, match=r"static parameter 'value' of kernel fill_with holds \[1\], a list"):
        _ = replace(build(), statics={"value": [1]}).key


def test_the_library_has_one_name_for_its_modules():
    from kernels import flash_attn_generic

    assert place_of(flash_attn_generic.flash_attn_generic.function) == (
        "fly_attention.flash_attn_generic.flash_attn_generic"
    )


def test_a_planned_launch_is_bound_without_a_device_and_never_made():
    x = torch.zeros(64)
    with planning("sm_90a", 78), bindings() as found:
        from fly.runtime.compile import compile_to_launch
        from fly.runtime.device import CPU, device_for

        assert device_for(CPU).compute_units == 78 and config.ARCH.get() == "sm_90a"
        prepared = bind(fill_with, 1, 64, (x,), {"value": 5.0}, compile_to_launch)
        prepared(x.data_ptr(), stream=0)
        log = device_for(CPU).log_memory(64)
        assert log.address % 8 == 0 and not device_for(CPU).is_capturing(0)
        fill_with[1, 64](x, value=6.0)
        fill_with[1, 64](x, value=6.0)
    assert (x == 0).all()
    assert [Build.of(one, "sm_90a").statics["value"] for one in found] == [5.0, 6.0, 6.0]
    with pytest.raises(DeviceError, match="fill_with: its launch was planned"):
        prepared(x.data_ptr(), stream=0)
    assert prepared.entry.fields[0] == Field("x", "ptr")


def test_a_package_may_bring_its_own_folder(folder, monkeypatch):
    monkeypatch.setattr(prebuilt, "own_folder", folder.path)
    monkeypatch.setenv("FLY_PREBUILT", "/nonexistent")
    assert prebuilt.folder_in_use().path == folder.path
    with pytest.raises(MissingBuildError) as error:
        prebuilt.folder_in_use().find(build(4.0))
    assert "unset" not in str(error.value)
