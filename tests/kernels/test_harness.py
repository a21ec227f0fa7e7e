"""The command line and the sweep around providers, with providers that compute on the CPU or misbehave."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import providers, timing
from benchmarks.providers import FLY, Provider
from benchmarks.workload import Workload
from tests.kernels import harness
from tests.kernels.reference import attention

SCRIPT = Path(__file__).with_name("test_flash_attn_fwd.py")
WORKLOAD = Workload(1, 8, 12, 4, 2, 16, "bf16", True)


def provider(name, call, missing=None, unsupported=None):
    return Provider(
        name,
        lambda device: missing,
        lambda workload: unsupported,
        lambda workload, q, k, v: lambda: call(q, k, v, workload.causal),
    )


def right(q, k, v, causal):
    return attention(q, k, v, causal=causal)[0].to(q.dtype)


def wrong(q, k, v, causal):
    return right(q, k, v, not causal)


def raising(error):
    def call(q, k, v, causal):
        raise error

    return call


RIGHT = provider("right", right)


@pytest.fixture
def sweep(monkeypatch, tmp_path, capsys):
    """Run the command line with these providers; gives exit code, what was printed, and the CSV's rows."""

    def run(fakes, *flags):
        monkeypatch.setattr(harness, "PROVIDERS", tuple(fakes))
        path = tmp_path / "rows.csv"
        small = "--device cpu --seq_len 8 --seq_len_kv 12 --num_heads 4 --num_kv_heads 2 --head_dim 16"
        code = harness.main([*small.split(), "--iters", "3", "--compare", "--csv", str(path), *flags])
        with path.open(newline="") as file:
            return code, capsys.readouterr().out, list(csv.DictReader(file))

    return run


def test_right_results_are_checked_timed_and_written(sweep):
    code, printed, rows = sweep([RIGHT], "--seed", "7")
    assert code == 0
    assert "seed 7, cpu, torch" in printed and "4 configurations" in printed
    assert printed.rstrip().endswith("4 ok")
    kinds = [(row["dtype"], row["causal"]) for row in rows]
    assert kinds == [("bf16", "True"), ("bf16", "False"), ("f16", "True"), ("f16", "False")]
    for row in rows:
        assert (row["provider"], row["status"], row["seed"], row["device"]) == ("right", "ok", "7", "cpu")
        assert (row["seq_len"], row["seq_len_kv"], row["num_kv_heads"]) == ("8", "12", "2")
        assert float(row["max_error"]) <= float(row["error_bound"]) and float(row["row_cosine"]) > 0.99
        assert float(row["milliseconds"]) > 0 and float(row["tflops"]) > 0
    assert "B1 H4/2 S8/12 D16 bf16 causal" in printed and "TFLOP/s" in printed


def test_a_wrong_result_exits_with_1_and_is_not_timed(sweep):
    code, printed, rows = sweep([RIGHT, provider("bad", wrong)], "--causal", "--dtype", "f16")
    assert code == 1
    assert [(row["provider"], row["status"], bool(row["tflops"])) for row in rows] == [
        ("right", "ok", True),
        ("bad", "WRONG", False),
    ]
    assert "1 ok, 1 WRONG" in printed


def test_what_cannot_run_is_listed_with_its_reason(sweep):
    fakes = [
        provider("absent", right, missing="not installed (no module absent)"),
        provider("narrow", right, unsupported="causal only"),
        provider("lacking", raising(NotImplementedError("not on this target"))),
        provider("crashing", raising(RuntimeError("no kernel image\nsecond line"))),
        RIGHT,
    ]
    code, printed, rows = sweep(fakes, "--causal", "--dtype", "bf16")
    assert code == 0
    assert "absent: not installed (no module absent)" in printed
    assert [(row["provider"], row["status"], row["reason"]) for row in rows] == [
        ("narrow", "skipped", "causal only"),
        ("lacking", "skipped", "NotImplementedError: not on this target"),
        ("crashing", "skipped", "RuntimeError: no kernel image"),
        ("right", "ok", ""),
    ]


def test_our_own_failure_exits_with_1(sweep, monkeypatch):
    ours = provider("fly", raising(RuntimeError("broken")))
    monkeypatch.setattr(harness, "FLY", ours)
    code, _, rows = sweep([ours, RIGHT], "--causal", "--dtype", "bf16")
    assert code == 1
    assert (rows[0]["status"], rows[0]["reason"]) == ("FAILED", "RuntimeError: broken")


@pytest.mark.parametrize(
    "fake",
    [
        provider("absent", right, missing="no"),
        provider("narrow", right, unsupported="no"),
        provider("hungry", raising(torch.OutOfMemoryError("no memory"))),
    ],
    ids=lambda fake: fake.name,
)
def test_checking_nothing_is_not_success(sweep, fake):
    assert sweep([fake])[0] == 2


def test_inputs_repeat_with_the_seed_and_only_then():
    q, k, v = WORKLOAD.tensors(5, "cpu")
    assert q.shape == (1, 8, 4, 16) and k.shape == v.shape == (1, 12, 2, 16) and q.dtype == torch.bfloat16
    assert q.min() >= -1 and q.max() <= 1 and q.std() > 0.4
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), WORKLOAD.tensors(5, "cpu")))
    assert not torch.equal(q, WORKLOAD.tensors(6, "cpu")[0])
    assert not torch.equal(k, v)


def test_a_fresh_seed_every_run(sweep):
    seeds = {sweep([RIGHT], "--iters", "0")[2][0]["seed"] for _ in range(2)}
    assert len(seeds) == 2


def test_the_reference_is_computed_once_for_all_providers(sweep, monkeypatch):
    computed = []
    original = harness.reference
    monkeypatch.setattr(harness, "reference", lambda *a, **o: computed.append(1) or original(*a, **o))
    sweep([RIGHT, provider("too", right)], "--dtype", "bf16")
    assert len(computed) == 2


def test_no_iterations_no_timing(sweep):
    _, printed, rows = sweep([RIGHT], "--iters", "0")
    assert "TFLOP/s" not in printed and rows[0]["tflops"] == ""


def test_default_shapes():
    workloads = harness.default_workloads()
    shapes = {(w.batch, w.seq_len, w.num_heads, w.num_kv_heads) for w in workloads}
    assert len(shapes) == 27 and len(workloads) == len(set(workloads)) == 108
    assert (16, 8192, 64, 8) in shapes and (1, 384, 64, 64) in shapes and (32, 8192, 8, 8) in shapes
    assert all(w.seq_len == w.seq_len_kv and w.head_dim == 128 for w in workloads)
    args = harness._parser().parse_args(["--dtype", "f16", "--no-causal", "--head_dim", "64"])
    selected = harness.workloads_of(args)
    assert len(selected) == 27 and {(w.dtype, w.causal, w.head_dim) for w in selected} == {("f16", False, 64)}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--provider", "flash"], "no provider is called 'flash'; providers: 'fly', 'aiter CK'"),
        (["--seq_len", "0"], "seq_len must be at least 1, got 0"),
        (["--num_heads", "6", "--num_kv_heads", "4"], "num_heads (6) must be a multiple of 4 KV heads"),
        (["--dtype", "f32"], "invalid choice: 'f32'"),
        (["--iters", "-1"], "--iters and --warmup must not be negative"),
        (["--device", "cpu"], "the default shapes need a GPU; on the CPU choose a small one"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        harness.main(flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_script_runs_from_anywhere_and_shows_its_flags():
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True, cwd="/", env=env
    ).stdout
    flags = "batch seq_len seq_len_kv num_heads num_kv_heads head_dim dtype causal no-causal iters warmup seed"
    for flag in [*flags.split(), "compare", "csv", "provider"]:
        assert f"--{flag}" in shown


@pytest.mark.parametrize(
    "seq_len, seq_len_kv, causal, pairs",
    [(8, 8, False, 64), (8, 8, True, 32), (4, 8, True, 24), (8, 4, True, 8), (1, 8, True, 7.5)],
)
def test_flops(seq_len, seq_len_kv, causal, pairs):
    assert Workload(2, seq_len, seq_len_kv, 3, 3, 16, "f16", causal).flops == 4 * 2 * 3 * 16 * pairs


def test_providers_that_need_what_is_not_here(monkeypatch):
    assert {p.name: p.missing("cpu") for p in providers.PEERS} == {p.name: "needs a GPU" for p in providers.PEERS}
    monkeypatch.setattr(providers, "_installed", lambda module: False)
    monkeypatch.setattr(torch.version, "hip", None)
    reasons = {p.name: p.missing("cuda") for p in (FLY, *providers.PEERS)}
    assert reasons == {
        "fly": None,
        "aiter CK": "needs an AMD GPU",
        "aiter asm": "needs an AMD GPU",
        "SDPA flash": None,
        "SDPA cuDNN": None,
        "FA2": "not installed (no module flash_attn_2_cuda)",
        "FA4": "not installed (no module flash_attn.cute)",
        "Triton": "not installed (no module triton)",
    }
    assert FLY.missing("cpu").startswith("CPU tensors need the emulator")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert providers.named(["sdpa cudnn"])[0].missing("cuda") == "needs an NVIDIA GPU"
    assert providers.named(["aiter ck"])[0].missing("cuda") == "not installed (no module aiter)"


def test_modules_are_found_without_importing_what_is_not_there():
    assert providers._installed("torch.nn") and not providers._installed("no_such_package.part")


def test_sdpa_is_called_with_the_right_layout_and_heads(monkeypatch):
    q, k, v = WORKLOAD.tensors(3, "cpu")
    call = providers._sdpa("MATH", Workload(1, 8, 12, 4, 2, 16, "bf16", False), q, k, v)
    torch.testing.assert_close(call(), right(q, k, v, False), atol=0.02, rtol=0.02)
    assert providers._sdpa_unsupported(WORKLOAD) == "its causal mask is aligned top-left"


def test_calls_take_turns_and_each_goes_first():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = timing.measure(calls, device="cpu", iters=3, warmup=2)
    assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab"
    assert set(timings) == set(calls) and all(t.low <= t.median <= t.high for t in timings.values())


def test_timing_sums_up():
    assert timing.Timing.of([5.0]) == timing.Timing(5.0, 5.0, 5.0)
    assert timing.Timing.of([4.0, 1.0, 3.0, 2.0, 100.0]) == timing.Timing(3.0, 2.0, 4.0)


def test_host_time_of_a_call():
    assert timing.host_microseconds(lambda: None, device="cpu", calls=10, repeats=2) >= 0
