"""`python -m fly inspect` without a kernel: the call that flags describe, what serves it, and its build."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch

from fly.__main__ import main
from fly.errors import ArgumentError
from fly.runtime.launch import bindings
from kernels import commands, described
from kernels.dispatch import KERNELS
from kernels.flash_attn_interface import _OPTIONS, flydsl_flash_attn_func
from kernels.problem.catalogue import BY_NAME
from kernels.sm90.builds import build_for

UNITS = 132  # multiprocessors of the simulated GPU
# the arguments of a call with each feature
CALLS = {
    "packed": "--packed",
    "split_kv": "--num-kv-splits 4",
    "debug_counts": "--debug-counts",
    "descale": "--dtype f8e4m3 --feature descale --head-dim 128",
    "fp8_accumulate": "--dtype f8e4m3 --feature fp8_accumulate --head-dim 128",
}
CALLS |= {name: f"--feature {name}" for name in BY_NAME if name not in CALLS}


def request_of(flags: str):
    """The request that flags of `inspect` and `paths` describe."""
    parser = argparse.ArgumentParser()
    commands.add_call_flags(parser)
    return commands.request_of(parser.parse_args(shlex.split(flags)))


def build_of(arch: str, flags: str):
    """What a described call binds first."""
    return described.attention_first(described.bindings_of(arch, *described.call_of(request_of(flags))))[0]


def test_every_feature_can_be_described():
    assert set(described.ASKING) == set(BY_NAME)
    assert set(described._DEFAULTS) == set(_OPTIONS)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_described_call_has_its_feature_and_the_kernel_that_dispatch_takes(name):
    request, tensors = described.call_of(request_of(f"--seq-len 512 {CALLS[name]}"))
    assert name in request.features
    arch = "gfx950" if name in ("debug_counts", "kv_cache_layout") else "sm_90a"
    chosen = commands.choose(arch, request)
    (first, *_) = described.attention_first(described.bindings_of(arch, request, tensors))
    assert first.kernel.name == f"flash_{chosen.module.removeprefix('.flash_')}"


@pytest.mark.parametrize(
    "flags",
    [
        "--seq-len 4096 --batch 4",
        "--seq-len 512 --no-causal --head-dim 64",
        "--seq-len 1 --seq-len-kv 16384 --num-heads 64 --num-kv-heads 8 --num-kv-splits 0",
        "--head-dim 192 --head-dim-v 128 --seq-len 2048",
    ],
)
def test_the_build_is_the_one_that_such_a_call_gets(flags):
    options, splits = build_for(request_of(flags), UNITS)
    binding = build_of("sm_90a", flags)
    assert binding.statics == {"options": options}
    assert binding.block == (options.threads, 1, 1)
    assert (binding.specs[4] is None) == (splits == 1)  # no lse was asked for


def test_the_arguments_are_described_as_those_of_a_call_that_is_made(monkeypatch):
    """The same specifications and static parameters as a real call's, on the simulated GPU."""
    monkeypatch.setenv("FLY_ARCH", "sm_90a")
    monkeypatch.setenv("FLY_KERNEL", "generic")
    q, k, v = (torch.randn(1, 16, 2, 40, dtype=torch.bfloat16) for _ in range(3))
    with bindings() as made:
        flydsl_flash_attn_func(q, k, v, causal=True, softcap=30.0, softmax_scale=0.173)
    described_one = build_of("sm_90a", "--seq-len 16 --num-heads 2 --head-dim 40 --feature softcap")
    assert [made[0].specs, made[0].statics] == [described_one.specs, described_one.statics]


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_tensors_are_as_aligned_as_the_call_says(alignment):
    request, _ = described.call_of(request_of(f"--head-dim 64 --alignment {alignment}"))
    assert request.alignment == alignment


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--alignment 1", "alignment 1; accepted for bf16: multiples of 2"),
        ("--tuning speed", "--tuning speed; accepted: daz, dualwave_swp"),
        ("--batch 2000000 --seq-len 2000000", "do not fit this machine"),
        ("--packed --feature kv_batch_idx", "kv_batch_idx"),
    ],
)
def test_a_call_that_is_none_says_why(flags, message):
    with pytest.raises(ArgumentError, match=message):
        described.call_of(request_of(flags))


def test_every_tuning_option_can_be_described():
    for kernel in KERNELS:
        for name in kernel.tuning:
            request, _ = described.call_of(request_of(f"--tuning {name}"))
            assert name in request.tuning


def test_only_what_is_bound_meanwhile_is_collected():
    with bindings() as outer:
        build_of("sm_90a", "--head-dim 64")
        with bindings() as inner:
            pass
    build_of("sm_90a", "--head-dim 64")
    assert inner == []
    assert outer == []  # those of a described call are its own


def inspect(capsys, flags: str) -> tuple[int, str, str]:
    code = main(["inspect", *shlex.split(flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_says_which_kernel_serves_a_call_and_shows_the_stage(capsys):
    code, out, _ = inspect(capsys, "--arch gfx942 --head-dim 72 --stage isa")
    verdict, _, isa = out.partition("\n\n")
    assert code == 0
    assert "gfx942    no: it takes head_dim 64, 128, not 72" in verdict
    assert "generic   chosen" in verdict
    assert "flash_attn_generic, grid 8 x 16 x 1\n    head_dim=72, causal=True" in isa
    assert "flash_attn_generic.kd" in isa and 'amdhsa--gfx942"' in isa


def test_inspect_of_split_keys_names_every_kernel_of_the_call(capsys):
    code, out, _ = inspect(capsys, "--arch sm_80 --packed --num-kv-splits 4 --head-dim 64 --stage trace")
    assert code == 0
    assert "\nflash_attn_generic, grid" in out and "\nand split_combine, grid" in out
    assert "func @flash_attn_generic" in out


def test_inspect_without_anything_is_of_the_default_call(capsys):
    code, out, _ = inspect(capsys, "")
    assert code == 0 and "gfx950    gfx950    chosen" in out and "spills                 0" in out


def test_a_forced_kernel_is_the_one_that_is_shown(capsys, monkeypatch):
    monkeypatch.setenv("FLY_KERNEL", "generic")
    code, out, _ = inspect(capsys, "--arch sm_90a --head-dim 64 --stage trace")
    assert code == 0 and "flash_attn_generic, grid" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("flash_attn --causal --head-dim 64", "--head-dim, --causal with a kernel; accepted: --set"),
        ("--args f32 --block 64 --set a=1", "--args, --block, --set without a kernel; accepted: flags"),
        ("--dtype f8e5m2", "no flash-attention kernel serves this call on target gfx950"),
        ("--num-heads 7 --num-kv-heads 2", "accepted: a multiple of it"),
        ("--arch sm_70", "sm_70"),
    ],
)
def test_mistakes_of_a_described_call(flags, message, capsys):
    code, _, err = inspect(capsys, flags)
    assert code == 2 and message in err
