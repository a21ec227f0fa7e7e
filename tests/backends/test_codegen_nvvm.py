"""PTX: what is in it, and what ptxas makes of it where it is installed."""

from __future__ import annotations

import re

import pytest

from fly.backends.nvvm import codegen
from fly.backends.target import targets
from fly.errors import CompileError
from tests.backends.builds import build, cached, needs_ptxas, reversed_block, run_ptxas, scaled

NVIDIA = [t.arch for t in targets() if t.backend == "nvvm"]


@pytest.mark.parametrize("arch", NVIDIA)
def test_entry_point_and_its_arguments(arch):
    artefact = cached(scaled, arch)
    assert artefact.binary.decode() == artefact.isa
    assert re.search(r"^\.version 8\.3$", artefact.isa, re.M)
    assert re.search(rf"^\.target {arch}$", artefact.isa, re.M)
    head = re.search(r"\.visible \.entry scaled\((.*?)\)", artefact.isa, re.S).group(1)
    kinds = {"ptr": "u64", "i32": "u32", "f32": "f32"}
    assert re.findall(r"\.param \.(\w+)", head) == [kinds[f.kind] for f in artefact.fields]


def test_shared_memory_is_dynamic():
    artefact = cached(reversed_block, "sm_80")
    assert re.search(r"^\.extern \.shared \.align 16 \.b8 fly_shared\[\];$", artefact.isa, re.M)
    assert artefact.dynamic_shared == artefact.resources.shared_bytes == 1024
    assert "bar.sync" in artefact.isa or "barrier.sync" in artefact.isa
    assert cached(scaled, "sm_80").dynamic_shared == 0


def test_author_limits_reach_the_code():
    ptx = build(scaled, "sm_90a", waves=2, registers=64, blocks=3).isa
    assert re.search(r"^\.reqntid 256", ptx, re.M)
    assert re.search(r"^\.maxnreg 64$", ptx, re.M)
    assert re.search(r"^\.minnctapersm 3$", ptx, re.M)
    plain = cached(scaled, "sm_90a").isa
    assert ".maxnreg" not in plain
    assert ".minnctapersm" not in plain


def test_denormals_are_kept_unless_flushed():
    kept, flushed = (build(reversed_block, "sm_80", flush=flush).isa for flush in (False, True))
    assert "mul.f32" in kept
    assert "mul.ftz.f32" in flushed


@needs_ptxas
@pytest.mark.parametrize("arch", NVIDIA)
@pytest.mark.parametrize("kernel", [scaled, reversed_block], ids=lambda k: k.name)
def test_ptxas_accepts_it(kernel, arch, tmp_path):
    report = run_ptxas(cached(kernel, arch).isa, arch, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report


@needs_ptxas
def test_resources_are_ptxas_report():
    resources = codegen.resources(cached(reversed_block, "sm_80").isa, "sm_80", 1024)
    assert 8 <= resources.registers <= 64
    assert (resources.spills, resources.scratch_bytes, resources.shared_bytes) == (0, 0, 1024)


@needs_ptxas
def test_what_ptxas_rejects_is_an_error():
    ptx = cached(scaled, "sm_80").isa.replace("ret;", "return;")
    with pytest.raises(CompileError, match=r"(?s)ptxas rejected the kernel for sm_80: .*return"):
        codegen.resources(ptx, "sm_80", 0)


def test_without_ptxas_registers_are_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    resources = codegen.resources("", "sm_80", 512)
    assert (resources.registers, resources.spills, resources.shared_bytes) == (None, None, 512)
