"""What is run under compute-sanitizer, on a stub of a Hopper GPU: it covers what there is, in few enough builds."""

from __future__ import annotations

import pytest

from fly import config
from kernels.generic.backward import BackwardOptions
from kernels.problem.catalogue import OPERANDS
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels import sanitizer_set
from tests.kernels.sm90 import hopper_stub
from tests.runtime.fakes import Compiler

MOST_BUILDS = 249  # a sanitizer makes loading and running one take seconds
MOST_BACKWARD_BUILDS = 28


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Variables that the set changes are put back."""
    monkeypatch.setenv(config.KERNEL.name, "")
    monkeypatch.setenv(config.CHECK_INPUTS.name, "0")  # some lengths reach past their cache


def test_the_set_covers_kernels_features_and_forms_in_few_builds(monkeypatch):
    compiler = Compiler()
    stub = hopper_stub.install(monkeypatch, compiler)
    sanitizer_set.run("cpu")
    assert {launch["function"] for launch in stub.driver.launches} == {
        *("flash_attn_generic", "flash_attn_sm90", "flash_attn_sm90_fp8"),
        *("split_combine", "transpose_values", "rotate_and_append"),
        *("row_statistics", "sink_gradients", "flash_attn_generic_dkdv", "flash_attn_generic_dq"),
        "flash_attn_generic_probabilities",
        *("flash_attn_sm90_bwd", "round_dq", "clear_unseen"),
    }
    options = [statics["options"] for _, statics, _, _ in compiler.calls if "options" in statics]
    backward = [build for build in options if isinstance(build, BackwardOptions)]
    fused = [build for build in options if isinstance(build, Sm90BackwardOptions)]
    builds = [build for build in options if not isinstance(build, BackwardOptions | Sm90BackwardOptions)]
    assert {build.paired for build in fused} == {False, True}
    assert {name for build in builds for name in build.features.operands} == set(OPERANDS)
    assert any(build.features.score_mod for build in builds) and any(build.features.mask_mod for build in builds)
    assert {build.page_size for build in builds} == {None, *sanitizer_set.PAGE_SIZES}
    assert {getattr(build, "pack_gqa", 1) for build in builds} >= {1, 8}
    assert {getattr(build, "blocks", 1) for build in builds} == {1, 2}
    assert {build.head_dim for build in builds if getattr(build, "ahead", False)} == {64, 128, 256}
    assert {build.results for build in backward} == {("dk", "dv"), ("dk",), ("dv",)}
    assert {build.adds_bias for build in backward} == {True, False} and any(build.aux_gradients for build in backward)
    assert any(build.features.drops for build in backward) and any(build.features.block_size for build in backward)
    assert {(build.head_dim, build.ordered) for build in fused} == {
        (64, False),
        (64, True),
        (128, False),
        (128, True),
        (192, False),
        (192, True),
        (256, False),
        (256, True),
    }
    assert any(build.head_dim_v != build.head_dim for build in fused)
    assert {build.clears for build in fused} == {True, False} == {build.alternates for build in fused}
    assert {build.batched for build in fused} == {True, False}
    assert any(build.features.block_size for build in fused) and any(build.packed for build in fused)
    assert len(stub.loaded) <= MOST_BUILDS


def test_parts_are_run_alone(monkeypatch):
    compiler = Compiler()
    hopper_stub.install(monkeypatch, compiler)
    sanitizer_set.run("cpu", ["backward"])
    builds = [statics["options"] for _, statics, _, _ in compiler.calls if "options" in statics]
    assert builds and all(isinstance(build, BackwardOptions) for build in builds)
    assert len(compiler.calls) <= MOST_BACKWARD_BUILDS


@pytest.mark.exhaustive
def test_every_build_of_the_set_compiles(monkeypatch):
    stub = hopper_stub.install(monkeypatch)
    sanitizer_set.run("cpu")
    assert all(artefact.isa for artefact in stub.loaded)
