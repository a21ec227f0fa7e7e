"""The forward benchmark's table and file, with stand-ins for providers."""

from __future__ import annotations

import csv
import time

import pytest
import torch

from benchmarks import flash_attn_fwd as benchmark
from benchmarks.providers import Provider
from benchmarks.workload import Workload

WORKLOADS = [Workload(1, 8, 8, 2, 2, 16, "bf16", causal) for causal in (True, False)]


def sleeping(name, milliseconds, unsupported=lambda workload: None):
    return Provider(
        name,
        lambda device: None,
        unsupported,
        lambda workload, q, k, v: lambda: time.sleep(milliseconds / 1e3),
    )


def broken(name):
    def bind(workload, q, k, v):
        raise RuntimeError("no kernel\nmore")

    return Provider(name, lambda device: None, lambda workload: None, bind)


def test_table_and_file(tmp_path, capsys):
    path = tmp_path / "figures.csv"
    peers = [
        sleeping("fly", 2),
        sleeping("slow", 8),
        sleeping("full only", 1, lambda workload: "no mask" if workload.causal else None),
        broken("broken"),
    ]
    benchmark.run(WORKLOADS, peers, device="cpu", iters=3, csv_path=path)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["TFLOP/s", "fly", "slow"]
    assert printed[0].split("|")[1].split() == ["fly/slow", "fly/full", "only", "fly/broken"]
    assert printed[1].startswith("B1 H2 S8 D16 bf16 causal") and printed[1].split("|")[1].split()[1:] == [
        "-",
        "-",
    ]
    assert "  full only: no mask" in printed
    assert printed.count("  broken: RuntimeError: no kernel") == 1
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["causal"], row["provider"]) for row in rows] == [
        ("True", "fly"),
        ("True", "slow"),
        ("False", "fly"),
        ("False", "slow"),
        ("False", "full only"),
    ]
    for row in rows:
        assert float(row["tflops"]) > 0
    assert float(rows[0]["fly_ratio"]) == 1 and float(rows[1]["fly_ratio"]) > 1.5


def test_without_fly_there_are_no_ratios():
    figures, _ = benchmark.compare(WORKLOADS[0], [sleeping("peer", 1)], device="cpu", iters=1)
    assert [figure.fly_ratio for figure in figures] == [None]


def test_sweep_keeps_tokens_and_channels():
    workloads = benchmark.sweep(benchmark.SEQ_LENS, benchmark.HEAD_DIMS, "f16", (True, False))
    assert len(workloads) == 24
    for workload in workloads:
        assert workload.batch * workload.seq_len == 16384 and workload.num_heads * workload.head_dim == 2048
        assert workload.dtype == "f16" and workload.seq_len_kv == workload.seq_len


def test_host_times(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "host_microseconds", lambda call, device: 12.34)
    benchmark.print_host_times([sleeping("fly", 0), broken("broken")], "cpu")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "fly              12.3 µs",
        "broken       RuntimeError: no kernel",
    ]


def test_no_gpu_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--iters", "0"], "--iters must be at least 1, got 0"),
        (["--provider", "nobody"], "no provider is called 'nobody'"),
        (["--seq_len", "-5"], "seq_len must be at least 1, got -5"),
        (["--head_dim", "4096"], "num_heads must be at least 1, got 0"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(flags)
    assert exit_.value.code == 2 and message in capsys.readouterr().err
