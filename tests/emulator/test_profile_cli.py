"""`python -m fly profile`: files, calls, comparisons, figures, mistakes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import fly
from fly.__main__ import main
from fly.backends.rocdl.assemble import assemble, kernel_source
from fly.errors import CompileError
from tests.emulator.assembly import assemble as built

BODY = """
v_mfma_f32_32x32x16_bf16 v[16:31], v[4:7], v[8:11], 0
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v2, 4, v0
s_waitcnt lgkmcnt(0)
global_load_dwordx4 v[4:7], v2, s[4:5]
s_waitcnt vmcnt(0)
s_endpgm
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """k.hsaco, its source with and without another MFMA, and an array; the directory is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    (tmp_path / "k.hsaco").write_bytes(built(BODY, "gfx950"))
    target = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n'
    (tmp_path / "k.s").write_text(target + kernel_source(BODY))
    twice = BODY.replace("s_load", "v_mfma_f32_32x32x16_bf16 v[32:47], v[4:7], v[8:11], 0\ns_load", 1)
    (tmp_path / "more.s").write_text(target + kernel_source(twice))
    np.save("a.npy", np.zeros(4096, np.float32))
    return tmp_path


def profile(*arguments: str) -> int:
    return main(["profile", *arguments])


def pointer_run(name: str, *arguments: str) -> int:
    return profile(name, "--block", "256", "--grid", "2", *arguments, "--args", "a.npy")


def cycles(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r" in ([\d,]+) cycles of one compute unit", text)]


def test_a_code_object(files, capsys):
    assert pointer_run("k.hsaco", "--trace", "k.json", "--launch") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("k.hsaco\nk on gfx950: ") and "workgroup(s) of 4 waves" in printed
    assert "v_mfma_f32_32x32x16_bf16" in printed or "global_load_dwordx4" in printed or "s_waitcnt" in printed
    assert "  transcendental = 16: " in printed and "  read_port = 64: " in printed
    assert "whole launch: 2 workgroups, " in printed
    assert json.loads((files / "k.json").read_text())["traceEvents"]


def test_another_object_in_the_same_run(files, capsys):
    assert pointer_run("k.s", "--compare", "more.s", "--resident", "1", "--trace", "k.json") == 0
    printed = capsys.readouterr().out
    first, second = cycles(printed)
    assert first < second and "\nmore.s\n" in printed
    assert (files / "k.json").exists() and (files / "k.other.json").exists()
    assert pointer_run("k.hsaco", "--resident", "1") == 0
    assert cycles(capsys.readouterr().out) == [first]


def test_other_figures(files, capsys):
    assert pointer_run("k.hsaco", "--resident", "1") == 0
    (plain,) = cycles(capsys.readouterr().out)
    assert pointer_run("k.hsaco", "--resident", "1", "--cold", "1", "--figure", "memory_latency=1700") == 0
    (slow,) = cycles(capsys.readouterr().out)
    assert slow - plain >= 1000
    assert pointer_run("k.hsaco", "--alternatives") == 0
    assert "branch_taken = 32" in capsys.readouterr().out
    assert profile("x", "--figures", "--arch", "gfx942") == 0
    printed = capsys.readouterr().out
    assert "transcendental = 16  cycles of the port\n    pyhip" in printed and "    or 8: as on gfx950" in printed


@fly.kernel
def fill(x: fly.Tensor, *, value: float = 1.0):
    """x = value."""
    x.store(fly.f32(value), fly.block_id.x * 64 + fly.thread_id.x)


def call(size: int = 128) -> object:
    """Launch a kernel on CPU tensors."""
    import torch

    x = torch.zeros(size)
    fill[size // 64, 64](x)
    assert not x.any()  # nothing was executed
    return x


def test_a_python_function(capsys, monkeypatch):
    assert profile("tests.emulator.test_profile_cli:call", "--set", "size=256", "--workgroup", "3") == 0
    assert "fill on gfx950: " in capsys.readouterr().out
    assert profile("tests.emulator.test_profile_cli:call", "--arch", "gfx942") == 0
    assert "fill on gfx942: " in capsys.readouterr().out


def test_flash_attention(capsys):
    settings = ("seq=256", "heads=2", "head_dim=64", "causal=True", "kernel=generic")
    assert profile("flash_attn", "--arch", "gfx942", "--set", *settings) == 0
    printed = capsys.readouterr().out
    assert "flash_attn_generic on gfx942: " in printed and "mfma" in printed


def test_flash_attention_from_pages(capsys):
    """Four tiles more take 19.5 instructions more of each wave and tile: numbers of pages, and bases from them."""
    grown = []
    for more in ((), ("page_size=16",)):
        executed = []
        for keys in (100, 100 + 4 * 64):
            settings = ("seq=256", f"seq_kv={keys}", "heads=2", "head_dim=64", *more)
            assert profile("flash_attn", "--arch", "gfx950", "--set", *settings) == 0
            found = re.search(
                r"flash_attn_gfx950 on gfx950: .* 8 waves, ([\d,]+) wave-instructions", capsys.readouterr().out
            )
            executed.append(int(found[1].replace(",", "")))
        grown.append(executed[1] - executed[0])
    assert grown[0] + 8 * 4 * 18 < grown[1] < 1.2 * grown[0], grown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("missing.hsaco",), r"FILE 'missing.hsaco': No such file"),
        (("a.npy",), r"FILE 'a.npy' is neither a code object \(ELF\), nor assembly \(.s\), nor an artefact"),
        (("k.hsaco", "--set", "seq=1"), r"--set 'seq=1': a file has no settings; --args gives its arguments"),
        (("k.hsaco", "--figure", "exp"), r"--figure 'exp'; expected NAME=VALUE"),
        (("k.hsaco", "--figure", "valu=x"), r"--figure 'valu=x'; expected NAME=NUMBER"),
        (("k.hsaco", "--figure", "exp=16"), r"the timing model has no figure 'exp'; accepted: compute_units"),
        (("k.hsaco", "--cycles", "5"), r"--cycles ''; expected whole numbers"),
        (("k.hsaco", "--workgroup", "7"), r"workgroup 7; the grid \(1, 1, 1\) has 0 to 0"),
        (("k.hsaco", "--workgroup", "7", "--launch"), r"--workgroup 7: --launch chooses workgroups itself"),
        (("k.hsaco", "--resident", "0"), r"--resident 0; expected at least 1"),
        (("k.hsaco", "--cold", "-1"), r"--cold -1; expected 0 or more"),
        (("flash_attn", "--set", "length=1"), r"--set: flash_attn has no setting 'length'; accepted: batch, seq"),
        (("flash_attn", "--set", "dtype=f32"), r"--set dtype='f32'; accepted: bf16, f16, f8e4m3"),
        (("flash_attn", "--set", "seq=abc"), r"--set seq='abc'; accepted: a whole number from 1"),
        (("flash_attn", "--set", "batch=65536"), r"--set batch=65536; accepted: 1 to 65535"),
        (
            ("flash_attn", "--set", "seq=1000000000", "heads=9000"),
            r"--set: these sizes need about \d+ bytes; this mach",
        ),
        (("math:cos", "--arch", "sm_90a"), r"--arch 'sm_90a'; the timing model has gfx942, gfx950"),
        (("nowhere:call",), r"KERNEL 'nowhere:call': No module named 'nowhere'"),
        (("math:nothing",), r"KERNEL 'math:nothing': math has no function 'nothing'"),
        (
            ("tests.emulator.test_profile_cli:call", "--set", "length=1"),
            r"--set: tests.* has no setting 'length'; acc",
        ),
        (("tests.emulator.timed:nothing",), r"KERNEL launches nothing on CPU tensors"),
    ],
)
def test_mistakes(files, capsys, arguments, message):
    assert profile(*arguments) == 2
    assert re.search(f"error: {message}", capsys.readouterr().err)


def test_assembly_that_does_not_assemble():
    with pytest.raises(CompileError, match=r"no \.amdgcn_target directive: name the architecture"):
        assemble(kernel_source("s_endpgm"))
    with pytest.raises(CompileError, match=r"assembling for gfx950 failed: (.|\n)*s_nothing"):
        assemble(kernel_source("s_nothing"), "gfx950")
    with pytest.raises(CompileError, match=r"linking with .* failed"):
        assemble(kernel_source("s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, missing@rel32@lo+4\ns_endpgm"), "gfx950")
