"""The command line and the sweep around providers, with providers that compute on the CPU or misbehave."""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import providers, shapes, timing
from benchmarks.providers import FLY, Provider
from benchmarks.workload import COLUMNS, Workload
from kernels import flash_attn_interface
from tests.kernels import harness
from tests.kernels.reference import attention
from tests.scripts import with_help

SCRIPTS = [Path(__file__).with_name(f"test_flash_attn_{name}.py") for name in ("fwd", "bwd")]
SUITE = harness.FORWARD_SUITE
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
def sweep(tmp_path, capsys):
    """Run the command line with these providers, the first as ours; gives exit code, what was printed, the rows."""

    def run(fakes, *flags):
        path = tmp_path / "rows.csv"
        small = "--device cpu --seq_len 8 --seq_len_kv 12 --num_heads 4 --num_kv_heads 2 --head_dim 16"
        ours, *peers = fakes
        suite = replace(SUITE, of=replace(SUITE.of, fly=ours, peers=tuple(peers)))
        code = harness.main([*small.split(), "--iters", "3", "--compare", "--csv", str(path), *flags], suite)
        with path.open(newline="") as file:
            return code, capsys.readouterr().out, list(csv.DictReader(file))

    return run


@pytest.mark.parametrize(("flags", "calls"), [((), 1), (("--iters", "2", "--warmup", "1"), 4)])
def test_on_the_cpu_nothing_is_timed_unless_asked_for(flags, calls, capsys):
    made = []
    counted = provider("counted", lambda *given: made.append(given) or right(*given))
    suite = replace(SUITE, of=replace(SUITE.of, fly=counted))
    small = "--device cpu --seq_len 8 --num_heads 1 --head_dim 16 --dtype f16 --causal"
    assert harness.main([*small.split(), *flags], suite) == 0
    assert len(made) == calls
    assert ("TFLOP/s" in capsys.readouterr().out) == bool(flags)


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


def test_our_own_failure_exits_with_1(sweep):
    ours = provider("fly", raising(RuntimeError("broken")))
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


def selected(*flags):
    return harness.workloads_of(harness._parser().parse_args(flags))


def test_default_shapes():
    workloads = selected()
    shapes = {(w.batch, w.seq_len, w.num_heads, w.num_kv_heads) for w in workloads}
    assert len(shapes) == 27 and len(workloads) == len(set(workloads)) == 108
    assert (16, 8192, 64, 8) in shapes and (1, 384, 64, 64) in shapes and (32, 8192, 8, 8) in shapes
    assert all(w.seq_len == w.seq_len_kv and w.head_dim == 128 for w in workloads)
    of_one_kind = selected("--dtype", "f16", "--no-causal", "--head_dim", "64")
    assert len(of_one_kind) == 27 and {(w.dtype, w.causal, w.head_dim) for w in of_one_kind} == {("f16", False, 64)}


ONE_KIND = ("--dtype", "bf16", "--causal", "--head_dim", "64")


def test_packed_sequences_by_flag():
    same, other = (
        selected(*ONE_KIND, "--seqlens", "5,0,3", *more)[0]
        for more in ((), ("--seqlens_kv", "1,2,0", "--num_heads", "4"))
    )
    assert same == Workload.packed([(5, 5), (0, 0), (3, 3)], 16, 16, 64, "bf16", True)
    assert other == Workload.packed([(5, 1), (0, 2), (3, 0)], 4, 4, 64, "bf16", True)


def test_sets_by_flag():
    every = {name: selected(*ONE_KIND, f"--{name}") for name in shapes.SETS}
    assert selected(*ONE_KIND, "--cross", "--varlen") == every["cross"] + every["varlen"]
    assert len(selected(*ONE_KIND, "--all")) == len({w for workloads in every.values() for w in workloads})
    assert {w.seq_len for w in every["small"]} == {1, 31, 33, 63, 64, 65, 127, 129, 255, 257, 511, 513}
    assert {(31, 65), (63, 33), (1024, 8192)} <= {(w.seq_len, w.seq_len_kv) for w in every["cross"]}
    assert any((0, 64) in w.lengths for w in every["varlen"]) and all(w.lengths for w in every["varlen"])
    assert {w.num_kv_splits for w in every["split"]} == {0, 2, 3, 4, 5}
    assert {(w.num_heads, w.num_kv_heads) for w in every["shared"]} >= {(8, 1), (7, 1)}
    assert max(w.seq_len for w in every["long"]) == 294912


def test_splits_by_flag():
    assert {w.num_kv_splits for w in selected("--cross", "--num_kv_splits", "3")} == {3}
    assert selected(*ONE_KIND, "--seq_len", "64", "--num_kv_splits", "0")[0].num_kv_splits == 0


def test_reduced_sets_keep_their_forms():
    for workload in selected("--all", "--reduced"):
        assert max(workload.seq_len, workload.seq_len_kv) <= harness.FORWARD_SUITE.reduced_length
        assert workload.num_heads <= 8 and (workload.lengths or workload.batch <= 2)
    kind = shapes.Kind(64, "bf16", True)
    assert kind.dense(1, 1024, 64, 8, 8192, splits=3).reduced(512) == kind.dense(1, 64, 8, 1, 512, splits=3)
    assert kind.dense(4, 300, 8, 4).reduced(200) == kind.dense(2, 200, 4, 2)
    packed = kind.packed([(1024, 8192), (3, 7), (0, 5000)], 7, 1)
    assert packed.reduced(256) == kind.packed([(32, 256), (3, 7), (0, 256)], 7, 1)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--provider", "flash"], "no provider is called 'flash'; providers: 'fly', 'fly fast', 'fly generic', "),
        (["--seq_len", "0"], "seq_len must be at least 1, got 0"),
        (["--num_heads", "6", "--num_kv_heads", "4"], "num_heads (6) must be a multiple of 4 KV heads"),
        (["--dtype", "f32"], "invalid choice: 'f32'"),
        (["--iters", "-1"], "--iters and --warmup must not be negative"),
        (["--device", "cpu"], "the default shapes and sets need a GPU; on the CPU choose a small shape or --reduced"),
        (["--device", "cpu", "--varlen"], "on the CPU choose a small shape or --reduced"),
        (["--seqlens", "3,4", "--seq_len", "5"], "--seqlens packs sequences: leave --seq_len out"),
        (["--seqlens", "3,4", "--seqlens_kv", "5"], "--seqlens has 2 lengths and --seqlens_kv 1"),
        (["--seqlens", "3,-4"], "packed lengths must be at least 0, got ((3, 3), (-4, -4))"),
        (["--seqlens", "3,x"], "argument --seqlens: expected lengths such as 1024,8192,3, got '3,x'"),
        (["--seqlens_kv", "5"], "--seqlens_kv needs --seqlens"),
        (["--varlen", "--seq_len", "5"], "one shape or sets, not both"),
        (["--num_kv_splits", "-1"], "num_kv_splits must be at least 0, got -1"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        harness.main(flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs_from_anywhere_and_shows_its_flags(script):
    ended = with_help(*SCRIPTS)[script]
    assert ended.status == 0, ended.errors
    flags = "batch seq_len seq_len_kv num_heads num_kv_heads head_dim dtype causal no-causal iters warmup seed"
    flags += " seqlens seqlens_kv num_kv_splits reduced all"
    for flag in [*flags.split(), "compare", "csv", "provider", *shapes.SETS]:
        assert f"--{flag}" in ended.output


@pytest.mark.parametrize(
    "seq_len, seq_len_kv, causal, pairs",
    [(8, 8, False, 64), (8, 8, True, 32), (4, 8, True, 24), (8, 4, True, 8), (1, 8, True, 7.5)],
)
def test_flops(seq_len, seq_len_kv, causal, pairs):
    assert Workload(2, seq_len, seq_len_kv, 3, 3, 16, "f16", causal).flops == 4 * 2 * 3 * 16 * pairs
    packed = Workload.packed([(seq_len, seq_len_kv), (0, 9), (8, 8)], 3, 3, 16, "f16", causal)
    assert packed.flops == 4 * 3 * 16 * (pairs + (32 if causal else 64))


def test_packed_inputs():
    packed = Workload.packed([(3, 5), (0, 2), (4, 0)], 4, 2, 16, "f16", True, 2)
    q, k, v = packed.tensors(1, "cpu")
    assert q.shape == (7, 4, 16) and k.shape == v.shape == (7, 2, 16)
    keywords = packed.keywords("cpu")
    assert keywords.pop("cu_seqlens_q").tolist() == [0, 3, 3, 7]
    assert (offsets := keywords.pop("cu_seqlens_kv")).tolist() == [0, 5, 7, 7] and offsets.dtype == torch.int32
    assert keywords == {"max_seqlen_q": 4, "max_seqlen_kv": 5, "num_kv_splits": 2}
    assert WORKLOAD.keywords("cpu") == {}
    assert str(packed) == "packed H4/2 S3/5,0/2,4/0 D16 f16 causal splits=2"
    record = packed.record()
    assert tuple(record) == COLUMNS and (record["seqlens"], record["seqlens_kv"]) == ("3 0 4", "5 2 0")
    assert (record["batch"], record["seq_len"], record["seq_len_kv"]) == (3, 4, 5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch": 2}, r"batch, seq_len and seq_len_kv must be \(1, 3, 5\)"),
        ({"lengths": ((3, -1),)}, "packed lengths must be at least 0"),
        ({"dtype": "f64"}, "dtype must be one of bf16, f16, f8e4m3, got 'f64'"),
        ({"page_size": 16}, "page_size must be 0 for packed sequences, got 16"),
    ],
)
def test_bad_packed_workloads(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Workload.packed([(3, 5)], 4, 2, 16, "f16", True), **change)
    with pytest.raises(ValueError, match="at least one length"):
        Workload.packed([], 4, 2, 16, "f16", True)
    with pytest.raises(ValueError, match="page_size must be at least 0, got -1"):
        replace(WORKLOAD, page_size=-1)


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
        "torch varlen": None,
        "FA2": "not installed (no module flash_attn_2_cuda)",
        "FA3": "not installed (no module fa3_fwd_interface)",
        "FA4": "not installed (no module flash_attn.cute)",
        "Triton": "not installed (no module triton)",
    }
    assert FLY.missing("cpu").startswith("CPU tensors need the emulator")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert providers.FORWARD.named(["sdpa cudnn"])[0].missing("cuda") == "needs an NVIDIA GPU"
    assert providers.FORWARD.named(["aiter ck"])[0].missing("cuda") == "not installed (no module aiter)"


def test_modules_are_found_without_importing_what_is_not_there():
    assert providers._installed("torch.nn") and not providers._installed("no_such_package.part")


def test_sdpa_is_called_with_the_right_layout_and_heads(monkeypatch):
    q, k, v = WORKLOAD.tensors(3, "cpu")
    call = providers._sdpa("MATH", Workload(1, 8, 12, 4, 2, 16, "bf16", False), q, k, v)
    torch.testing.assert_close(call(), right(q, k, v, False), atol=0.02, rtol=0.02)
    assert providers._sdpa_unsupported(WORKLOAD) == "its causal mask is aligned top-left"


def test_sdpa_runs_packed_sequences_one_by_one():
    packed = Workload.packed([(3, 5), (0, 2), (4, 0), (6, 4)], 4, 2, 16, "bf16", False)
    q, k, v = packed.tensors(3, "cpu")
    expected, _ = attention(q, k, v, causal=False, lengths=packed.lengths)
    torch.testing.assert_close(providers._sdpa("MATH", packed, q, k, v)().float(), expected, atol=0.02, rtol=0.02)
    same = Workload.packed([(3, 3), (4, 4)], 4, 2, 16, "bf16", True)
    assert providers._sdpa_unsupported(replace(packed, causal=True)) == "its causal mask is aligned top-left"
    assert providers._sdpa_unsupported(same) is None
    assert providers._dense_only(same) == "not called on packed sequences" and providers._dense_only(WORKLOAD) is None
    assert providers._torch_varlen_unsupported(same) is None
    assert providers._torch_varlen_unsupported(replace(WORKLOAD, causal=False)) == "SDPA flash is the same kernel"


def test_varlen_peers_get_their_arguments(monkeypatch):
    packed = Workload.packed([(3, 5), (4, 2)], 4, 2, 16, "bf16", True)
    tensors = packed.tensors(3, "cpu")
    calls = []
    fake = SimpleNamespace(
        flash_attn_func=lambda *args, **options: calls.append((args[3:], options)),
        flash_attn_varlen_func=lambda *args, **options: calls.append((args[3:], options)),
    )
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    for bind in (providers._fa2, providers._fa4):
        bind(packed, *tensors)()
        bind(WORKLOAD, *WORKLOAD.tensors(3, "cpu"))()
    (positional, causal), dense, (none, by_name), dense_too = calls
    assert dense == dense_too == ((), {"causal": True}) and causal == {"causal": True} and none == ()
    assert [x if isinstance(x, int) else x.tolist() for x in positional] == [[0, 3, 7], [0, 5, 7], 4, 5]
    assert by_name["cu_seqlens_k"].tolist() == [0, 5, 7] and by_name["max_seqlen_k"] == 5 and by_name["causal"]


def test_a_forced_kernel_is_forced_for_its_calls_only(monkeypatch):
    seen = []
    monkeypatch.setattr(
        flash_attn_interface, "flydsl_flash_attn_func", lambda *_, **__: seen.append(os.environ.get("FLY_KERNEL"))
    )
    tensors = WORKLOAD.tensors(1, "cpu")
    for before in (None, "gfx950"):
        monkeypatch.delenv("FLY_KERNEL", raising=False) if before is None else monkeypatch.setenv(
            "FLY_KERNEL", before
        )
        for name in ("fly generic", "fly sm90", "fly"):
            providers.FORWARD.named([name])[0].bind(WORKLOAD, *tensors)()
        assert os.environ.get("FLY_KERNEL") == before
    assert seen == ["generic", "sm90", None, "generic", "sm90", "gfx950"]


def test_every_call_has_a_turn_in_each_round_and_orders_differ():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = timing.samples(calls, device="cpu", iters=20, warmup=2)
    rounds = ["".join(order[i : i + 3]) for i in range(6, len(order), 3)]
    assert "".join(order[:6]) == "aabbcc" and len(rounds) == 20
    assert {"".join(sorted(turn)) for turn in rounds} == {"abc"} and len(set(rounds)) > 3
    assert {name: len(times) for name, times in taken.items()} == {"a": 20, "b": 20, "c": 20}
    timings = timing.measure(calls, device="cpu", iters=3, warmup=0)
    assert set(timings) == set(calls) and all(t.low <= t.median <= t.high for t in timings.values())


def test_timing_sums_up():
    assert timing.Timing.of([5.0]) == timing.Timing(5.0, 5.0, 5.0)
    assert timing.Timing.of([4.0, 1.0, 3.0, 2.0, 100.0]) == timing.Timing(3.0, 2.0, 4.0)


def test_host_time_of_a_call():
    assert timing.host_microseconds(lambda: None, device="cpu", calls=10, repeats=2) >= 0
