"""What programs are told: `python -m fly paths --json`, rows of other packages, and plans."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from fly.__main__ import main
from fly.errors import ArgumentError, ConfigError, UnsupportedError
from fly_attention import flash_attn_func, flydsl_flash_attn_plan
from kernels import dispatch, inspection
from kernels.call.plan import Plans

ROW = {"name", "package", "module", "targets", "head_dims", "mixed_head_dims", "dtypes", "features", "tuning"}
ROW |= {"features_on", "needs", "leaves", "reason"}
CALL = {"head_dim", "dtype", "causal", "batch", "seq_len", "seq_len_kv", "num_heads", "num_kv_heads"}
CALL |= {"num_kv_splits", "alignment", "page_size", "dq_accumulate", "head_dim_v", "features", "tuning"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for variable in ("FLY_KERNEL", "FLY_BACKWARD_KERNEL", "FLYDSL_DISABLE_DUALWAVE_SWP"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("FLY_ARCH", "gfx950")


def printed(capsys, *arguments: str) -> dict:
    assert main(["paths", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_a_stable_schema(capsys):
    found = printed(capsys)
    assert found["schema"] == inspection.SCHEMA == 1
    assert {*found} == {"schema", "pass", "forced", "kernels", "call", "targets"}
    assert (found["pass"], found["forced"], found["call"], found["targets"]) == ("forward", None, None, {})
    assert [row["name"] for row in found["kernels"]] == [kernel.name for kernel in dispatch.KERNELS]
    assert all({*row} == ROW for row in found["kernels"])
    generic = found["kernels"][-1]
    assert generic["package"] == "fly_attention" and generic["module"] == "fly_attention.flash_attn_generic"
    assert generic["mixed_head_dims"] is True and generic["head_dims"][:2] == [8, 16]
    assert {row["name"]: row["mixed_head_dims"] for row in found["kernels"]}["sm90_fp8"] is False
    assert printed(capsys, "--backward")["pass"] == "backward"


def test_a_call_on_each_target(capsys):
    found = printed(capsys, "--head-dim", "72", "--packed", "--tuning", "waves_per_eu")
    assert {*found["call"]} == CALL
    assert (found["call"]["head_dim"], found["call"]["features"]) == (72, ["packed"])
    assert {*found["targets"]} == {*dispatch.AMD, *dispatch.NVIDIA}
    amd, nvidia = found["targets"]["gfx950"], found["targets"]["sm_80"]
    assert (amd["chosen"], amd["error"], amd["refusals"]["generic"]) == ("gfx950", None, None)
    assert amd["refusals"]["gfx950_fp8"].startswith("takes q of f8e4m3, not bf16")
    assert nvidia["chosen"] is None and "no tuning option waves_per_eu on sm_80" in nvidia["error"]
    # tuning is the forward kernel's alone
    assert printed(capsys, "--backward", "--tuning", "waves_per_eu")["targets"]["sm_80"]["chosen"] == "generic"


def test_one_target_and_a_forced_kernel(capsys, monkeypatch):
    monkeypatch.setenv("FLY_KERNEL", "sm90")
    found = printed(capsys, "--arch", "gfx942", "--causal")
    assert found["forced"] == "sm90" and [row["name"] for row in found["kernels"]] == [
        "gfx942",
        "gfx942_fp8",
        "generic",
    ]
    verdict = found["targets"]["gfx942"]
    assert verdict["chosen"] is None and "runs on sm_90a, not on gfx942" in verdict["error"]


def test_what_is_left_to_a_later_row_is_told(capsys, monkeypatch):
    sizes = {"--head-dim": 64, "--batch": 32, "--num-heads": 32, "--seq-len": 512}
    call = ["--arch", "gfx942", "--causal", *(str(part) for size in sizes.items() for part in size)]
    found = printed(capsys, *call)
    rows, verdict = {row["name"]: row["leaves"] for row in found["kernels"]}, found["targets"]["gfx942"]
    assert rows["generic"] is None and "head_dim 64" in rows["gfx942"]
    assert (verdict["chosen"], verdict["yields"]) == ("generic", ["gfx942"])
    refused = verdict["refusals"].pop("gfx942_fp8")
    assert refused.startswith("takes q of f8e4m3fnuz (torch.float8_e4m3fnuz), not bf16")
    assert verdict["refusals"] == {"gfx942": None, "generic": None}
    monkeypatch.setenv("FLY_KERNEL", "gfx942")
    assert printed(capsys, *call)["targets"]["gfx942"]["chosen"] == "gfx942"


def test_plans():
    q, k, v = (torch.zeros(2, s, 2, 64, dtype=torch.bfloat16) for s in (20, 900, 900))
    plan = flydsl_flash_attn_plan(q, k, v, False, num_kv_splits=3, window_size=(100, -1))
    assert json.loads(json.dumps(plan)) == plan
    assert {*plan} == {"schema", "target", "call", "chosen", "refusals", "workspace_bytes", "launches"}
    assert (plan["target"], plan["chosen"]) == ("gfx950", "gfx950")
    assert {*plan["call"]} == CALL and plan["call"]["features"] == ["split_kv", "window"]
    assert plan["refusals"]["generic"] is None and "takes q of f8e4m3" in plan["refusals"]["gfx950_fp8"]
    attention, combination = plan["launches"]
    assert attention["kernel"] == "flash_attn_gfx950" and attention["statics"]["options.causal"] == "False"
    assert (combination["kernel"], combination["block"]) == ("split_combine", [256, 1, 1])
    assert combination["statics"]["head_dim"] == "64"
    keys = [launch["build"] for launch in plan["launches"]]
    assert keys[0].startswith("flash_attn_gfx950-") and keys[1].startswith("split_combine-")
    other = flydsl_flash_attn_plan(q, k, v, True, num_kv_splits=3, window_size=(100, -1))
    assert [launch["build"] == key for launch, key in zip(other["launches"], keys)] == [False, True]
    assert plan["workspace_bytes"] > 4 * 3 * q.numel()
    with pytest.raises(ArgumentError, match="num_kv_splits must be from 0 to 64, got 65"):
        flydsl_flash_attn_plan(q, k, v, num_kv_splits=65)
    with pytest.raises(UnsupportedError, match="the generic kernel has no tuning option dualwave_swp_setprio on gfx"):
        flydsl_flash_attn_plan(*(x[..., 1:41] for x in (q, k, v)), dualwave_swp_setprio=True)


PACKAGE = """
import dataclasses
from fly_attention import dispatch, flash_attn_generic

taken = []


def prepare(tensors, request):
    taken.append(request)
    return flash_attn_generic.prepare(tensors, request)


generic = next(kernel for kernel in dispatch.KERNELS if kernel.name == "generic")
row = dataclasses.replace(
    generic, name="theirs", module="their_package", archs=("gfx950",), features=("window",), reason="a test"
)
rows = [row, dataclasses.replace(row, name="theirs_too")]
twice = [row, row]
nothing = 7
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(entry)`: a package that registers it for the forward pass."""
    (tmp_path / "their_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_package", raising=False)
    monkeypatch.setattr("kernels.flash_attn_interface._plans", Plans())

    def write(entry: str) -> None:
        info = tmp_path / "their_package-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fly_attention.kernels]\ntheirs = {entry}\n")
        dispatch.registered.cache_clear()

    yield write
    dispatch.registered.cache_clear()


def test_rows_of_other_packages_come_first(install, capsys):
    install("their_package:rows")
    rows = printed(capsys, "--arch", "gfx950")["kernels"]
    assert [row["name"] for row in rows] == ["theirs", "theirs_too", "gfx950", "gfx950_fp8", "generic"]
    assert (rows[0]["package"], rows[0]["module"]) == ("their_package", "their_package")
    q, k, v = (torch.randn(1, 9, 2, 32).bfloat16() for _ in range(3))
    flash_attn_func(q, k, v, window_size=(3, 3))
    flash_attn_func(q, k, v, softcap=2.0)  # which theirs does not do
    (request,) = sys.modules["their_package"].taken
    assert request.features == ("window",)
    assert main(["paths", "--arch", "gfx950", "--head-dim", "40"]) == 0
    assert "gfx950    theirs    chosen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "their_package:nothing",
            "entry point 'theirs' of fly_attention.kernels .* is a int; accepted: fly_attention",
        ),
        ("their_package:twice", "has a kernel 'theirs', which there is already: give it another name"),
        ("their_package:missing", "cannot be loaded: .*missing.*; repair or uninstall its package"),
        ("no_such_package:row", "cannot be loaded: No module named 'no_such_package'"),
    ],
)
def test_rows_that_are_none(install, entry, message):
    install(entry)
    with pytest.raises(ConfigError, match=message):
        dispatch.FORWARD.table()
