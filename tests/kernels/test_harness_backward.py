"""The harness and the providers of gradients, with providers that compute on the CPU or misbehave."""

from __future__ import annotations

import csv
import os
from dataclasses import replace

import pytest
import torch

from benchmarks import providers
from benchmarks.providers import BACKWARD, Provider
from benchmarks.workload import Workload
from fly import config
from kernels import dispatch, flash_attn_interface
from tests.kernels import harness
from tests.kernels.feature_reference import feature_attention
from tests.kernels.gradient_reference import Gradients, gradients_by_parts

WORKLOAD = Workload(1, 8, 12, 4, 2, 16, "bf16", True)


def right(workload, q, k, v):
    """Attention as a user writes it, in float32."""
    return lambda: feature_attention(q, k, v, workload.causal)[0].to(q.dtype)


def wrong(workload, q, k, v):
    """Right forwards: the gradients of another mask."""
    out, other = right(workload, q, k, v), right(replace(workload, causal=not workload.causal), q, k, v)
    return lambda: out().detach() + other() - other().detach()


def provider(name, forward, missing=None):
    return Provider(name, lambda device: missing, lambda w: None, lambda w, *t: providers._gradients(forward, w, *t))


@pytest.fixture
def sweep(tmp_path, capsys):
    """Run the command line of gradients with these providers, the first as ours."""

    def run(fakes, *flags):
        path = tmp_path / "rows.csv"
        small = "--device cpu --seq_len 8 --seq_len_kv 12 --num_heads 4 --num_kv_heads 2 --head_dim 16 --dtype bf16"
        ours, *peers = fakes
        suite = replace(harness.BACKWARD_SUITE, of=replace(BACKWARD, fly=ours, peers=tuple(peers)))
        code = harness.main([*small.split(), "--compare", "--csv", str(path), *flags], suite)
        with path.open(newline="") as file:
            return code, capsys.readouterr().out, list(csv.DictReader(file))

    return run


def test_gradients_are_checked_timed_and_compared(sweep):
    code, printed, rows = sweep([provider("right", right), provider("too", right)], "--causal", "--iters", "2")
    assert code == 0 and printed.rstrip().endswith("2 ok")
    assert [(row["provider"], row["status"], bool(row["fly_ratio"])) for row in rows] == [
        ("right", "ok", False),
        ("too", "ok", True),
    ]
    for row in rows:
        assert float(row["max_error"]) <= float(row["error_bound"]) and float(row["row_cosine"]) > 0.99
        speed = 2.5 * WORKLOAD.flops / float(row["milliseconds"]) / 1e9
        assert float(row["tflops"]) == pytest.approx(speed)
    ratio = float(rows[1]["milliseconds"]) / float(rows[0]["milliseconds"])
    assert float(rows[1]["fly_ratio"]) == pytest.approx(ratio) and f"fly is {ratio:.3f} of it" in printed


def test_wrong_gradients_exit_with_1_though_the_result_is_right(sweep):
    code, printed, rows = sweep([provider("right", right), provider("bad", wrong)], "--no-causal")
    assert code == 1 and "1 ok, 1 WRONG" in printed
    assert [(row["provider"], row["status"], row["tflops"]) for row in rows] == [
        ("right", "ok", ""),
        ("bad", "WRONG", ""),
    ]


def gradients_of(workload: Workload) -> tuple[tuple[torch.Tensor, ...], Gradients]:
    tensors = BACKWARD.tensors(workload, 3, "cpu")
    return tensors, harness.BACKWARD_SUITE.reference(workload, tensors)


def test_the_worst_gradient_decides():
    _, expected = gradients_of(WORKLOAD)
    exact = [g.float() for g in expected.exact]
    assert harness.check_gradients(exact, expected).ok
    for place, bad in enumerate(exact):
        for value in (torch.nan, 100.0):
            found = [*exact]
            found[place] = bad.clone()
            found[place].view(-1)[0] = value
            assert not harness.check_gradients(found, expected).ok
    with pytest.raises(ValueError, match="a gradient has shape"):
        harness.check_gradients([exact[0][:, :1], *exact[1:]], expected)


def test_no_gradient_at_all_is_right_where_there_is_none():
    _, expected = gradients_of(Workload.packed([(3, 0), (0, 2)], 2, 2, 16, "bf16", True))
    report = harness.check_gradients([torch.zeros_like(g) for g in expected.exact], expected)
    assert report.ok and report.cosine == 1.0


def test_the_reference_in_parts_is_the_whole_ones():
    q, k, v, dout = BACKWARD.tensors(WORKLOAD, 3, "cpu")
    dlse = torch.zeros(1, 4, 8)
    whole, parts = (gradients_by_parts(q, k, v, True, dout, dlse, max_scores=most) for most in (1 << 26, 100))
    for one, other in zip(whole.exact, parts.exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "workload",
    [
        Workload(1, 8, 12, 4, 2, 16, "bf16", False),
        Workload.packed([(3, 5), (0, 2), (4, 0), (6, 4)], 4, 2, 16, "bf16", False),
        Workload.packed([(0, 2), (3, 0)], 4, 2, 16, "bf16", False),
    ],
    ids=str,
)
def test_gradients_of_a_peer_are_autograds(workload):
    tensors, expected = gradients_of(workload)
    found = providers._gradients(lambda w, *t: providers._sdpa("MATH", w, *t), workload, *tensors)()
    assert harness.check_gradients(found, expected).ok


def test_the_forward_pass_runs_once():
    made = []

    def forward(workload, q, k, v):
        return lambda: made.append(1) or right(workload, q, k, v)()

    call = providers._gradients(forward, WORKLOAD, *BACKWARD.tensors(WORKLOAD, 3, "cpu"))
    first, second = call(), call()
    assert len(made) == 1 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_forced_backward_kernel_is_forced_for_its_calls_only(monkeypatch):
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, *_):
            seen.append(os.environ.get(config.BACKWARD_KERNEL.name))
            return q.clone()

        @staticmethod
        def backward(ctx, dout):
            seen.append(os.environ.get(config.BACKWARD_KERNEL.name))
            return dout, None, None, None

    monkeypatch.setattr(flash_attn_interface, "flydsl_flash_attn_func", Seen.apply)
    monkeypatch.delenv(config.BACKWARD_KERNEL.name, raising=False)
    for name in ("fly generic", "fly"):
        BACKWARD.named([name])[0].bind(WORKLOAD, *BACKWARD.tensors(WORKLOAD, 1, "cpu"))()
    assert seen == ["generic", "generic", None, None]
    assert config.BACKWARD_KERNEL.name not in os.environ


def test_every_backward_kernel_can_be_forced_and_peers_say_what_is_missing(monkeypatch):
    assert [p.name for p in BACKWARD.forced] == [f"fly {kernel.name}" for kernel in dispatch.BACKWARD_KERNELS]
    assert {p.missing("cpu") for p in BACKWARD.peers} == {"needs a GPU"}
    monkeypatch.setattr(providers, "_installed", lambda module: False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert {p.name: p.missing("cuda") for p in BACKWARD.peers} == {
        "SDPA flash": None,
        "SDPA cuDNN": None,
        "torch varlen": None,
        "FA2": "not installed (no module flash_attn_2_cuda)",
        "FA4": "not installed (no module flash_attn.cute)",
        "Triton": "not installed (no module triton)",
    }
    with pytest.raises(
        ValueError,
        match="no provider is called 'aiter CK'; providers: 'fly', 'fly gfx942', 'fly gfx950', 'fly sm90', "
        "'fly sm90_wide', 'fly generic', 'SDPA",
    ):
        BACKWARD.named(["aiter CK"])


def test_reduced_gradients_run_in_the_emulator(emulate, monkeypatch, capsys):
    """Nothing is timed there."""
    emulate("gfx950", "generic")
    monkeypatch.setattr(harness, "workloads_of", lambda args, suite: [Workload(1, 8, 12, 2, 1, 32, "bf16", True)])
    assert harness.main(["--device", "cpu", "--reduced"], harness.BACKWARD_SUITE) == 0
    printed = capsys.readouterr().out
    assert "fly          ok" in printed and "TFLOP/s" not in printed and printed.rstrip().endswith("1 ok")


def test_reduced_gradients_are_shorter_than_reduced_results():
    args = harness._parser(harness.BACKWARD_SUITE).parse_args(["--all", "--reduced", "--dtype", "f16", "--causal"])
    longest = max(max(w.seq_len, w.seq_len_kv) for w in harness.workloads_of(args, harness.BACKWARD_SUITE))
    assert longest == 64 < harness.FORWARD_SUITE.reduced_length
