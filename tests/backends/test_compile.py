"""From a traced module to an artefact: stages, dumps and errors."""

from __future__ import annotations

import pytest

from fly.backends.artefact import Artefact
from fly.backends.compile import passes
from fly.backends.target import target
from fly.errors import CompileError, SharedMemoryError
from fly.lang.signature import ScalarSpec
from fly.runtime.compile import compile_kernel, compile_to_launch
from tests.backends.builds import VECTOR, build, cached, reversed_block, scaled, several_buffers

SHARED = ["plan-shared-memory", "insert-waits", "fast-math"]
PASSES = {
    "gfx942": [*SHARED, "narrow-splats", "vector-rereads", "lower-to-rocdl", "to-llvm", "rocdl-kernel-attributes"],
    "sm_80": [*SHARED, "lower-to-nvvm", "to-llvm", "nvvm-kernel-attributes"],
}


@pytest.fixture(autouse=True)
def dumps(monkeypatch, tmp_path):
    for name in ("FLY_DUMP", "FLYDSL_DUMP_IR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLY_DUMP_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("arch", PASSES)
def test_observer_sees_every_stage(arch):
    assert [p.name for p in passes(target(arch))] == PASSES[arch]
    seen = {}
    artefact = build(reversed_block, arch, observe=seen.__setitem__)
    assert list(seen) == ["trace", *PASSES[arch], "llvm", "llvm-optimised", "isa"]
    assert '"fly.alloc_shared"' in seen["trace"]
    assert "fly." not in seen["to-llvm"].replace("fly.block", "").replace("fly.shared_bytes", "")
    assert "fly." not in seen[PASSES[arch][-1]]
    assert "@reversed_block" in seen["llvm-optimised"]
    assert seen["isa"] == artefact.isa
    stages = {key.removeprefix("seconds: ") for key in artefact.metadata}
    assert stages == {*PASSES[arch], "translate", "code generation"}


def test_compiling_twice_gives_the_same_code():
    assert build(scaled, "gfx950").binary == cached(scaled, "gfx950").binary
    assert build(scaled, "sm_80").isa == cached(scaled, "sm_80").isa


@pytest.mark.parametrize("arch", PASSES)
def test_artefacts_survive_their_file_format(arch):
    artefact = cached(reversed_block, arch)
    assert Artefact.from_bytes(artefact.to_bytes()) == artefact


@pytest.mark.parametrize(("stage", "suffix"), [("llvm", "ll"), ("llvm-optimised", "ll"), ("isa", "s")])
def test_one_late_stage_is_dumped(monkeypatch, dumps, stage, suffix):
    monkeypatch.setenv("FLY_DUMP", stage)
    artefact = build(scaled, "gfx942")
    (path,) = dumps.iterdir()
    assert path.name == f"scaled.gfx942.{stage}.{suffix}"
    assert "scaled" in path.read_text()
    assert artefact.kernel == "scaled"


def test_everything_is_dumped(monkeypatch, dumps):
    monkeypatch.setenv("FLYDSL_DUMP_IR", "1")
    build(scaled, "sm_80")
    stages = ["trace", *PASSES["sm_80"]]
    expected = {f"scaled.sm_80.{index:02}.{stage}.mlir" for index, stage in enumerate(stages)}
    expected |= {"scaled.sm_80.llvm.ll", "scaled.sm_80.llvm-optimised.ll", "scaled.sm_80.isa.s"}
    assert {p.name for p in dumps.iterdir()} == expected


def test_unknown_stage_is_an_error(monkeypatch):
    monkeypatch.setenv("FLY_DUMP", "assembly")
    with pytest.raises(CompileError, match="FLY_DUMP='assembly' names no stage; expected 'all' or one of trace"):
        build(scaled, "gfx942")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80", "sm_89", "sm_90a"])
def test_shared_memory_is_limited_by_the_target(arch):
    limit = target(arch).shared_bytes
    assert build(reversed_block, arch, elements=limit // 4).resources.shared_bytes == limit
    with pytest.raises(
        SharedMemoryError, match=f"reversed_block needs {limit + 4} bytes .* {arch} offers {limit}"
    ) as error:
        build(reversed_block, arch, elements=limit // 4 + 1)
    assert f"{limit + 4} bytes  line" in str(error.value)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80"])
def test_several_buffers_may_fill_the_memory(arch):
    """LLVM would pad each of them to 16 bytes if they were globals of their own, and end the process."""
    limit = target(arch).shared_bytes
    odd = limit // 12 // 4 * 4 + 1
    elements = (odd, odd, limit // 4 - 2 * odd)
    assert build(several_buffers, arch, elements=elements).resources.shared_bytes == limit


def test_buffers_with_room_are_told_apart():
    seen = {}
    build(several_buffers, "gfx950", elements=(256, 300), observe=seen.__setitem__)
    assert "@fly_shared_0" in seen["llvm"]
    assert "@fly_shared_1" in seen["llvm"]


def test_launches_leave_out_the_assembly_and_whoever_asks_later_gets_it(monkeypatch, tmp_path):
    monkeypatch.setenv("FLY_CACHE_DIR", str(tmp_path))
    configuration = scaled, (VECTOR, VECTOR, ScalarSpec("f32")), scaled.bind_statics({}), "gfx942", (256, 1, 1)
    bare = compile_to_launch(*configuration)
    whole = compile_kernel(*configuration)
    assert bare.isa == "" and "s_endpgm" in whole.isa
    assert (bare.binary, bare.resources) == (whole.binary, whole.resources)
    assert compile_to_launch(*configuration) == whole  # the cache's entry is the one with the assembly now
