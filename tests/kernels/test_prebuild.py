"""`python -m fly prebuild`: specs, receipts, and the folder that a call then runs from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest
import torch

from fly.__main__ import main
from fly.errors import ArgumentError, MissingBuildError, UnsupportedError
from kernels import flash_attn_func, flash_attn_with_kvcache, prebuild
from kernels.call.plan import entry_of
from kernels.call_flags import FLAGS
from kernels.receipts import RECEIPTS
from tests.runtime.prebuilt_builds import fill_with

CALL = {"head_dim": 64, "seq_len": 512, "num_heads": 2}


def names(planned: prebuild.Planned) -> list[str]:
    return [build.kernel.name for build in planned.builds]


def test_a_list_stands_for_each_of_its_values_and_builds_are_made_once():
    calls = ({**CALL, "causal": (False, True), "dtype": ["bf16", "f16"], "batch": [1, 2, 3]}, CALL)
    planned = prebuild.plan({"targets": ["gfx950"], "call": calls})
    assert names(planned) == ["flash_attn_gfx950"] * 4
    assert {build.target for build in planned.builds} == {"gfx950"}
    assert len({build.key for build in planned.builds}) == 4


def test_targets_of_the_command_line_come_before_an_entrys_and_the_specs():
    spec = {"targets": ["gfx942"], "call": [CALL | {"targets": ["sm_80"]}, CALL | {"head_dim": 72}]}
    assert [build.target for build in prebuild.plan(spec).builds] == ["sm_80", "gfx942"]
    assert {build.target for build in prebuild.plan(spec, ["sm_90a"]).builds} == {"sm_90a"}
    (kept,) = prebuild.plan(spec, only={"head_dim": [72]}).builds
    assert kept.target == "gfx942"
    with pytest.raises(ArgumentError, match="nothing to build"):
        prebuild.plan({"targets": ["sm_80"], "call": [{"seq_len": 512}]}, only={"head_dim": [72]})


def test_gradients_and_a_log_sum_exp_are_built_on_request():
    spec = {"targets": ["sm_90a"], "call": [CALL]}
    (plain,) = prebuild.plan(spec).builds
    (with_lse,) = prebuild.plan(spec | {"call": [CALL | {"lse": True}]}).builds
    assert plain.specs[3:] != with_lse.specs[3:]
    planned = prebuild.plan(spec | {"call": [CALL | {"backward": True}]})
    assert [build.key for build in planned.builds[:2]] == [plain.key, with_lse.key]
    assert "flash_attn_sm90_bwd" in names(planned)


def test_sums_of_dq_are_those_that_are_asked_for():
    """Also by the entry that a call without its build carries."""
    spec = {"targets": ["gfx950"], "call": [CALL | {"backward": True, "dq_accumulate": ["float32", "16bit"]}]}
    planned = prebuild.plan(spec)
    assert names(planned).count("flash_attn_gfx950_bwd") == 2 and {"round_dq", "order_dq"} <= {*names(planned)}
    for sums, last in (("float32", "round_dq"), ("16bit", "order_dq")):
        request = prebuild.call(CALL | {"dq_accumulate": sums})
        (entry,) = tomllib.loads(entry_of(request, backward=True))["call"]
        assert ("dq_accumulate" in entry) == (sums == "16bit")
        assert names(prebuild.plan({"targets": ["gfx950"], "call": [entry]}))[-1] == last


def test_every_feature_can_be_asked_for():
    narrow, amd = ("descale", "fp8_accumulate"), ("kv_cache_layout",)  # of 8-bit inputs; of AMD's targets
    calls = [
        CALL | {"feature": [[name] for name in FLAGS if name not in (*narrow, *amd)], "alignment": 16},
        CALL | {"feature": [[name] for name in narrow], "dtype": "f8e4m3", "alignment": 16},
    ]
    planned = prebuild.plan({"targets": ["sm_90a"], "call": calls})
    assert len(planned.builds) >= len(FLAGS) - 2 and not planned.unserved
    planned = prebuild.plan({"targets": ["gfx950"], "call": [CALL | {"feature": [[name] for name in amd]}]})
    assert len(planned.builds) == len(amd) and not planned.unserved


def test_calls_that_no_kernel_serves_are_listed_and_an_entry_without_others_is_an_error():
    one = CALL | {"tuning": ["waves_per_eu"]}
    with pytest.raises(UnsupportedError, match=r"call 1 \(head_dim=64.* on sm_90a, flash attention: no"):
        prebuild.plan({"targets": ["sm_90a"], "call": [one]})
    planned = prebuild.plan({"targets": ["sm_90a", "gfx950"], "call": [one]})
    assert len(planned.builds) == 1 == len(planned.unserved)


def test_other_kernels_are_described_as_inspect_takes_them():
    entry = {
        "kernel": "tests.runtime.prebuilt_builds:fill_with",
        "arguments": "f32[1]",
        "block": [32, 2],
        "set": {"value": 2.0},
    }
    (build,) = prebuild.plan({"targets": ["sm_80"], "kernel": [entry]}).builds
    assert (build.kernel.name, build.block, build.statics, build.package) == (
        "fill_with",
        (32, 2, 1),
        {"value": 2.0},
        "tests",
    )


def service():
    """A step of decoding, as a server takes it: new keys, pages, rotary embeddings; and a kernel of its own."""
    q, k, v = (torch.empty(2, 1, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    pages = torch.empty(2, 8, 16, 2, 64, dtype=torch.bfloat16)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 10**6, dtype=torch.int32)
    angles = torch.empty(2, 64, 32, dtype=torch.bfloat16)
    flash_attn_with_kvcache(
        q, *pages, k, v, *angles, cache_seqlens=lengths, block_table=table, causal=True, rotary_interleaved=False
    )
    x = torch.zeros(64)
    fill_with[1, 64](x, value=11.0)
    assert (x == 0).all()


def test_a_program_is_whatever_it_launches():
    spec = {"targets": ["sm_90a", "gfx942"], "program": [{"function": f"{__name__}:service"}]}
    planned = prebuild.plan(spec)
    for arch, attention in (("sm_90a", "flash_attn_sm90"), ("gfx942", "flash_attn_generic")):
        of_arch = [build.kernel.name for build in planned.builds if build.target == arch]
        assert {"rotate_and_append", attention, "fill_with"} <= set(of_arch)


def nothing():
    """Launches nothing."""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"targets": ["sm_80"], "program": [{}]}, "program 1: function is None; accepted: 'module:function'"),
        ({"targets": ["sm_80"], "program": [{"function": "math:pie"}]}, "math has no function 'pie'"),
        ({"targets": ["sm_80"], "program": [{"function": f"{__name__}:nothing"}]}, "nothing launches nothing on CPU"),
        ({}, r"describes nothing to build; accepted: \[\[call\]\]"),
        ({"calls": []}, "the spec has 'calls'; accepted: targets, call, kernel"),
        ({"call": {}}, r"call is \{\}; accepted: a list of tables"),
        ({"call": [3]}, "call 1 is 3; accepted: a table"),
        ({"call": [CALL]}, "call 1 has no targets; accepted: some of gfx942, .*, or --arch"),
        ({"targets": ["sm_10"], "call": [CALL]}, r"targets is \['sm_10'\]; accepted: a list of gfx942"),
        ({"targets": ["sm_80"], "call": [{"heads": 3}]}, "call 1 has 'heads'; accepted: head_dim,"),
        (
            {"targets": ["sm_80"], "call": [{"head_dim": "64"}]},
            "call 1: head_dim is '64'; accepted: a whole number from",
        ),
        ({"targets": ["sm_80"], "call": [{"head_dim": True}]}, "head_dim is True"),
        ({"targets": ["sm_80"], "call": [{"causal": 1}]}, "causal is 1; accepted: true or false"),
        ({"targets": ["sm_80"], "call": [{"dtype": "f64"}]}, "dtype is 'f64'; accepted: bf16,"),
        (
            {"targets": ["sm_80"], "call": [{"dq_accumulate": "f16"}]},
            "dq_accumulate is 'f16'; accepted: float32, 16bit",
        ),
        ({"targets": ["sm_80"], "call": [{"feature": "window"}]}, "feature is 'window'; accepted: a list of"),
        ({"targets": ["sm_80"], "call": [{"feature": ["windows"]}]}, r"feature is \('windows',\); accepted"),
        ({"targets": ["sm_80"], "call": [{"tuning": [3]}]}, r"tuning is \(3,\); accepted"),
        (
            {"targets": ["sm_80"], "call": [{"compute_units": 0}]},
            "compute_units is 0; accepted: a whole number from 1",
        ),
        ({"targets": ["sm_80"], "call": [{"num_heads": 3, "num_kv_heads": 2}]}, r"call 1 \(.*\): --num-heads 3"),
        ({"targets": ["sm_80"], "kernel": [{}]}, "kernel 1: kernel is None"),
        ({"targets": ["sm_80"], "kernel": [{"kernel": "a:b", "set": 3}]}, "kernel 1: set is 3"),
        ({"targets": ["sm_80"], "kernel": [{"kernel": "math:exp"}]}, "math has no kernel 'exp'"),
    ],
)
def test_mistakes_in_a_spec_are_named(spec, message):
    with pytest.raises(ArgumentError, match=message):
        prebuild.plan(spec)


def test_files_that_are_no_specs_are_named(tmp_path):
    for name, text, message in (
        ("a.yaml", "", r"ends in \.toml or \.json"),
        ("a.toml", "[", "a.toml: "),
        ("a.json", "[]", "holds a list; accepted: a table"),
        ("b.json", "{", "b.json: "),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ArgumentError, match=message):
            prebuild.read_spec(tmp_path / name)
    with pytest.raises(ArgumentError, match="cannot be read: No such file"):
        prebuild.read_spec(tmp_path / "none.toml")


@pytest.mark.parametrize("name", RECEIPTS)
def test_receipts_can_be_planned(name, capsys):
    """One head dimension and dtype of each; what a target does not serve is said."""
    command = ["prebuild", "--receipt", name, "--arch", "gfx942", "--head-dim", "64", "--dtype", "bf16", "--list"]
    assert main(command) == 0
    said = capsys.readouterr()
    builds = json.loads(said.out)
    assert builds and {build["target"] for build in builds} == {"gfx942"} and said.err == ""
    assert len({build["file"] for build in builds}) == len(builds)


def test_a_call_runs_from_the_folder_and_another_says_how_it_is_described(tmp_path, monkeypatch, capsys):
    spec, folder = tmp_path / "spec.toml", tmp_path / "builds"
    spec.write_text('targets = ["gfx950"]\n[[call]]\nhead_dim = 64\nseq_len = 32\nnum_heads = 2\n')
    command = ["prebuild", "--spec", str(spec), "--into", str(folder), "--jobs", "1"]
    assert main(command) == 0
    assert f"1 builds in {folder}, 1 of them were missing" in capsys.readouterr().out
    assert main(command) == 0
    assert "0 of them were missing" in capsys.readouterr().out
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_PREBUILT", str(folder))
    seed = torch.seed()
    q, k, v = (torch.randn(1, 32, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    heads_first = [x.float().transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    assert (out.float() - expected).abs().max() < 0.03, f"seed {seed}"
    with pytest.raises(MissingBuildError) as error:
        flash_attn_func(q, k, v, softcap=2.0)
    (note,) = error.value.__notes__
    assert note.startswith("[[call]]\nhead_dim = 64") and 'feature = ["softcap"]' in note and "causal = false" in note
    spec.write_text(f'targets = ["gfx950"]\n{note}\n')
    assert prebuild.plan(prebuild.read_spec(spec)).builds[0].kernel.name.startswith("flash_attn")


def test_a_build_that_fails_is_an_error_of_the_command(tmp_path, capsys):
    spec = tmp_path / "spec.json"
    entry = {"kernel": "tests.runtime.prebuilt_builds:fill_with", "arguments": "f32[1]", "block": 64}
    spec.write_text(json.dumps({"targets": ["sm_80"], "kernel": [entry | {"set": {"value": "one"}}]}))
    assert main(["prebuild", "--spec", str(spec), "--into", str(tmp_path / "builds"), "--jobs", "1"]) == 1
    assert "fill_with for sm_80, block (64, 1, 1), (value='one')" in capsys.readouterr().err


ON_A_GPU = """
import sys
import tomllib
sys.modules |= dict.fromkeys(("mlir", "llvmlite", "ziglang", "cuda"))  # as if not installed
import torch
from fly_attention import flash_attn_func
torch.manual_seed({seed})
q, k, v = (torch.randn(2, 300, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
dout = torch.randn_like(q)
with torch.no_grad():
    assert torch.equal(flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True))
for _ in range(12):  # later backward passes are graphs
    out = flash_attn_func(q, k, v, causal=True)
    found = out, *torch.autograd.grad(out, (q, k, v), dout)
exact = [x.detach().float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
expected = expected, *torch.autograd.grad(expected, exact, dout.float().transpose(1, 2))
for x, y in zip(found, expected):
    y = y.transpose(1, 2)
    assert (x.float() - y).abs().max() < 0.02 * y.abs().max(), "seed {seed}"
print("mlir" in sys.modules and sys.modules["mlir"], "done")
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no NVIDIA GPU of 9.0"
)
def test_a_gpu_runs_forward_and_backward_without_compiler_and_bindings(tmp_path):
    spec, folder = tmp_path / "spec.json", tmp_path / "builds"
    call = {"head_dim": 64, "batch": 2, "seq_len": 300, "num_heads": 4, "num_kv_heads": 2, "backward": True}
    units = torch.cuda.get_device_properties().multi_processor_count
    spec.write_text(json.dumps({"targets": ["sm_90a"], "call": [call | {"compute_units": units}]}))
    assert main(["prebuild", "--spec", str(spec), "--into", str(folder), "--jobs", "1"]) == 0
    environment = os.environ | {
        "FLY_PREBUILT": str(folder),
        "FLY_CACHE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", ON_A_GPU.format(seed=torch.seed() % 2**31)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None", "done"], done.stderr
