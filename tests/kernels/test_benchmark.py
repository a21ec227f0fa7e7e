"""The forward benchmark's figures, table, file and plot, with stand-ins for providers."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    cascade,
    clocks,
    cold_compiles,
    compare_trees,
    dropout,
    fit_costs,
    flash_attn_decode,
    gradient_host,
    llama,
    registers,
    report,
    run_record,
    shapes,
    training,
    tune,
)
from benchmarks import comparison as benchmark
from benchmarks.foreign import __main__ as foreign
from benchmarks.foreign import published
from benchmarks.providers import BACKWARD, FORWARD, Provider
from benchmarks.report import Figure
from benchmarks.timing import Timing
from benchmarks.workload import Workload
from fly import config
from tests.kernels import harness
from tests.scripts import with_help

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]
WORKLOADS = [Workload(1, 8, 8, 2, 2, 16, "bf16", causal) for causal in (True, False)]
CAUSAL, FULL = WORKLOADS


def idle(name, unsupported=lambda workload: None):
    """A provider that computes nothing; `timed` says how long it takes."""
    return Provider(name, lambda device: None, unsupported, lambda workload, *tensors: lambda: None)


@pytest.fixture
def timed(monkeypatch):
    """Have calls take as many milliseconds as their provider's name has letters; gives what `measure` was told."""
    told = []

    def measure(calls, **options):
        told.append(options)
        return {name: Timing(float(len(name)), 0.0, 99.0) for name in calls}

    monkeypatch.setattr(benchmark, "measure", measure)
    return told


def broken(name):
    def bind(workload, *tensors):
        raise RuntimeError("no kernel\nmore")

    return Provider(name, lambda device: None, lambda workload: None, bind)


def figure(provider, milliseconds, workload=CAUSAL):
    return Figure(workload, provider, Timing(milliseconds, milliseconds / 2, milliseconds * 2))


def test_table(capsys, timed):
    providers = [
        idle("fly"),
        idle("slower"),
        idle("full only", lambda workload: "no mask" if workload.causal else None),
        broken("broken"),
    ]
    figures = benchmark.run(WORKLOADS, providers, device="cpu", iters=3, cold=False)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["TFLOP/s", "fly", "slower", "full", "only", "broken", "fly/best"]
    causal = printed[1].removeprefix("B1 H2 S8 D16 bf16 causal").split()
    assert causal[2:] == ["-", "-", "2.000"]
    assert "  full only: no mask" in printed
    assert printed.count("  broken: RuntimeError: no kernel") == 1
    assert [(f.workload.causal, f.provider, f.timing.median) for f in figures] == [
        (True, "fly", 3),
        (True, "slower", 6),
        (False, "fly", 3),
        (False, "slower", 6),
        (False, "full only", 9),
    ]
    assert timed == [{"device": "cpu", "iters": 3, "warmup": 3, "flushes": 0}] * 2


def test_a_workload_that_nobody_does():
    figures, reasons = benchmark.compare(CAUSAL, [broken("broken")], device="cpu", iters=1)
    assert figures == [] and reasons == {"broken": "RuntimeError: no kernel"}
    assert report.table_row(CAUSAL, figures, ["broken"]).split()[-2:] == ["-", "-"]


def test_file(tmp_path):
    figures = [figure("fly", 2.0), figure("slow", 3.0), figure("slow", 3.0, FULL)]
    path = tmp_path / "figures.csv"
    report.write_csv(
        path, figures, {"ceiling_tflops": 700.0, "l2": "cold", "device": "x", "versions": "torch=1"}, lambda _: "sm90"
    )
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == report.CSV_COLUMNS
    assert [(row["kernel"], row["best_peer"], row["best_ratio"]) for row in rows] == [
        ("sm90", "slow", "1.5"),
        ("", "", ""),
        ("", "", ""),
    ]
    assert [(row["causal"], row["provider"], row["fly_ratio"]) for row in rows] == [
        ("True", "fly", "1.0"),
        ("True", "slow", "1.5"),
        ("False", "slow", ""),
    ]
    assert (rows[0]["milliseconds"], rows[0]["low_ms"], rows[0]["high_ms"]) == ("2.0", "1.0", "4.0")
    assert float(rows[0]["tflops"]) == CAUSAL.flops / 2e9 and rows[0]["ceiling_tflops"] == "700.0"


def test_ratios_are_to_each_peer_and_to_the_fastest():
    figures = [figure("fly", 2.0), figure("slow", 4.0), figure("fly generic", 3.0), figure("fast", 1.0)]
    found = {(ratio.ours, ratio.peer): (ratio.other, ratio.value) for ratio in report.ratios(figures)}
    assert found == {
        ("fly", "slow"): ("slow", 2.0),
        ("fly", "fast"): ("fast", 0.5),
        ("fly", "best peer"): ("fast", 0.5),
        ("fly generic", "slow"): ("slow", 4 / 3),
        ("fly generic", "fast"): ("fast", 1 / 3),
        ("fly generic", "best peer"): ("fast", 1 / 3),
    }
    assert report.ratios([figure("fly", 1.0)]) == report.ratios([figure("slow", 1.0)]) == []


def test_summary():
    figures = [figure("fly", 2.0), figure("slow", 8.0), figure("fly", 4.0, FULL), figure("slow", 2.0, FULL)]
    lines = report.summary(figures, 0.9)
    assert lines[1:3] == [
        "fly: 1 of 2 cells under 0.9 of the best peer",
        "  0.500 of slow         B1 H2 S8 D16 bf16 full",
    ]
    assert lines[3].split() == ["fly", "/", "peer,", "geomean", "all", "D16", "causal", "D16", "full"]
    assert lines[4].split() == ["slow", "1.414", "4.000", "0.500"]
    assert lines[5].split() == ["best", "peer", "1.414", "4.000", "0.500"] and len(lines) == 6
    assert report.summary(figures, 0.4)[1] == "fly: 0 of 2 cells under 0.4 of the best peer"
    assert report.summary(figures[1:2], 1.0) == ["no ratios: that takes fly and a peer"]


def test_means_are_apart_for_each_size_of_pages():
    pages = [replace(FULL, page_size=size) for size in (0, 64, 16)]
    figures = [figure(name, ms, of) for of in pages for name, ms in (("fly", 1.0), ("FA4", 2.0 + of.page_size))]
    *_, header, _, best = report.summary(figures, 1.0)
    assert header.endswith("   D16 full  D16 full pages=64  D16 full pages=16")
    assert best.split()[-3:] == ["2.000", "66.000", "18.000"]


def test_curves_are_of_dense_squares():
    dense = [shapes.Kind(64, "bf16", True).dense(1, length, 4) for length in (512, 256)]
    shared, packed = (
        shapes.Kind(64, "bf16", True).dense(1, 512, 4, 2),
        shapes.Kind(64, "bf16", True).packed([(9, 9)], 4),
    )
    pages = replace(dense[0], page_size=16)
    figures = [figure("fly", 1.0, workload) for workload in (*dense, shared, packed, pages)]
    speeds = [(256, figures[1].tflops), (512, figures[0].tflops)]
    assert report.curves(figures) == {"D64 causal": {"fly": speeds}}


class Recorder:
    """Stands in for a plotting library's figure and axes; keeps what it is told."""

    def __init__(self, **_):
        self.axes, self.calls = [], []

    def subplots(self, rows, columns, **_):
        grid = [[Recorder() for _ in range(columns)] for _ in range(rows)]
        self.axes = [axis for row in grid for axis in row]
        return grid

    def __getattr__(self, name):
        return lambda *args, **options: self.calls.append((name, args, options))


def test_plot(tmp_path):
    made = []
    report.plot(
        tmp_path / "x.png",
        [figure("fly", 1.0), figure("slow", 2.0), figure("fly", 1.0, FULL)],
        700.0,
        "Title",
        lambda **options: made.append(Recorder(**options)) or made[-1],
    )
    (picture,) = made
    first, second = picture.axes
    drawn = [options["label"] for name, _, options in first.calls if name == "plot"]
    assert drawn == ["fly", "slow"] and [name for name, _, _ in second.calls].count("plot") == 1
    assert ("axhline", (700.0,)) in [(name, args) for name, args, _ in first.calls]
    assert picture.calls[-1][:2] == ("savefig", (tmp_path / "x.png",))
    with pytest.raises(ValueError, match="nothing to plot"):
        report.plot(tmp_path / "x.png", [], 1.0, "")


def test_plot_with_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "x.png", [figure("fly", 1.0)], 1.0, "Title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_run_does_not_start(monkeypatch, capsys):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        benchmark.main(["--plot", "x.png"])
    assert "--plot: matplotlib is not installed: pip install fly-attention[bench]" in capsys.readouterr().err


def test_sweep_keeps_tokens_and_channels():
    workloads = shapes.PRESETS["h200"].workloads("f16", (True, False))
    assert len(workloads) == len(set(workloads)) == 36
    assert {w.head_dim for w in workloads} == {64, 128, 256}
    for workload in workloads:
        assert workload.batch * workload.seq_len == 16384 and workload.num_heads * workload.head_dim == 2048
        assert workload.dtype == "f16" and workload.seq_len_kv == workload.seq_len
    assert len(shapes.PRESETS["generic"].workloads("bf16", (True,), head_dims=[32], seq_lens=[100, 200])) == 2


def test_short_cells():
    cells = shapes.PRESETS["short"].workloads("bf16", (True, False))
    assert len(cells) == len(set(cells))
    assert any(w.batch == 1 and w.seq_len == 64 for w in cells)
    assert any(w.lengths and w.num_heads == 8 * w.num_kv_heads for w in cells)


def test_chunked_cells():
    cells = shapes.PRESETS["chunked"].workloads("bf16", (True,))
    assert len(cells) == len(set(cells)) == 54
    assert all(w.seq_len < w.seq_len_kv and not w.num_kv_splits for w in cells)
    assert {w.num_heads // w.num_kv_heads for w in cells} == {4, 8}
    assert [w.page_size for w in cells] == [0] * 18 + [64] * 18 + [16] * 18


def test_pages_hold_the_same_keys():
    """Of two sequences, the last page of each in part; forced kernels get pages too, and most peers none."""
    whole = Workload(2, 3, 40, 4, 2, 64, "bf16", True)
    workload = replace(whole, page_size=16)
    q, k, v = whole.tensors(0, "cpu")
    plain, forced = FORWARD.named(["fly", "fly generic"])
    with config.ARCH.set_to("sm_90a"):
        calls = plain.bind(whole, q, k, v), plain.bind(workload, q, k, v), forced.bind(workload, q, k, v)
        expected, *others = (call() for call in calls)
    for out in others:
        torch.testing.assert_close(out, expected)
    assert calls[1].keywords["block_table"].shape == (2, 3)
    assert [p.name for p in (*FORWARD.ours, *FORWARD.peers) if p.refuses(workload) is None] == [
        *("fly", "fly generic", "fly gfx950", "fly sm90", "FA4")
    ]
    assert FORWARD.named(["SDPA flash"])[0].refuses(workload) == "not called on keys in pages"
    assert plain.refuses(whole) is None and all(p.refuses(workload) for p in (*BACKWARD.ours, *BACKWARD.peers))


def test_pages_are_dealt_out_and_end_in_zeros():
    workload = Workload(2, 3, 40, 4, 2, 64, "bf16", True, page_size=16)
    _, k, v = workload.tensors(0, "cpu")
    pool, _, table, lengths = workload.pages(k, v)
    assert pool.shape == (6, 16, 2, 64) and lengths.tolist() == [40, 40]
    assert sorted(table.flatten().tolist()) == list(range(6)) != table.flatten().tolist()
    for entry in range(2):
        keys = pool[table[entry].long()].flatten(0, 1)
        assert torch.equal(keys[:40], k[entry]) and not keys[40:].any()


def test_cells_of_8_bits():
    """Products as long as those of 16-bit cells, for those who take 8 bits; fly in both ways."""
    preset = shapes.PRESETS["fp8"]
    cells = preset.workloads(preset.dtype, (True, False))
    assert len(cells) == len(set(cells)) == 18 and {w.dtype for w in cells} == {"f8e4m3"}
    assert {(w.head_dim, w.seq_len) for w in cells} == {(d, s) for d in (64, 128, 256) for s in (2048, 4096, 16384)}
    assert all(p.refuses(cells[0]) is None for p in FORWARD.named(preset.providers))
    (flash, fast) = FORWARD.named(["SDPA flash", "fly fast"])
    assert flash.refuses(cells[0]) == "not called on 8 bits"
    assert fast.refuses(replace(cells[0], dtype="bf16")) == "8 bits only"


@pytest.mark.parametrize("page_size", [0, 16])
def test_8_bits_are_added_up_in_either_way(page_size):
    workload = Workload(1, 5, 40, 2, 1, 64, "f8e4m3", True, page_size=page_size)
    q, k, v = workload.tensors(0, "cpu")
    assert {t.dtype for t in (q, k, v)} == {torch.float8_e4m3fn}
    calls = [p.bind(workload, q, k, v) for p in FORWARD.named(["fly", "fly fast"])]
    assert [call.keywords.get("fp8_accumulate") for call in calls] == [None, "fast"]
    with config.ARCH.set_to("sm_90a"):
        exact, fast = (call() for call in calls)
    assert exact.dtype is torch.bfloat16
    torch.testing.assert_close(fast, exact, atol=2e-2, rtol=0)


def test_presets_name_providers():
    for of in (FORWARD, BACKWARD):
        for preset in shapes.PRESETS_OF[of.name].values():
            assert [provider.name for provider in of.named(preset.providers)] == list(preset.providers)


def test_cells_of_gradients():
    """Lengths 1024 to 16384 at 64, 128 and 256, causal and full, with the same tokens and channels."""
    cells = shapes.BACKWARD_PRESETS["backward"].workloads("bf16", (True, False))
    assert len(cells) == len(set(cells)) == 30
    lengths = [1024 << i for i in range(5)]
    assert {(w.head_dim, w.seq_len) for w in cells} == {(d, s) for d in (64, 128, 256) for s in lengths}
    assert {(w.batch * w.seq_len, w.num_heads * w.head_dim) for w in cells} == {(16384, 2048)}
    assert len(shapes.BACKWARD_PRESETS["backward"].workloads("bf16", (True,), seq_lens=[64], head_dims=[64])) == 1


def test_cells_of_gradients_with_shared_heads():
    """Squares and packed mixtures of 16384 tokens, or one sequence; four query heads to a key head."""
    cells = shapes.BACKWARD_PRESETS["backward_gqa"].workloads("bf16", (True, False))
    assert len(cells) == len(set(cells)) == 12 and sum(bool(w.lengths) for w in cells) == 6
    assert {(w.num_heads, w.num_kv_heads, w.head_dim) for w in cells} == {(32, 8, 128)}
    assert {sum(q for q, _ in w.lengths) for w in cells if w.lengths} == {16384}


def test_host_times(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "host_microseconds", lambda call, device: 12.34)
    benchmark.print_host_times([idle("fly"), broken("broken")], "cpu")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "fly              12.3 µs",
        "broken       RuntimeError: no kernel",
    ]


def test_ceiling():
    for dtype in ("bf16", "f8e4m3"):
        assert benchmark.ceiling(dtype, "cpu", size=64, iters=2) > 0


def pretended(of):
    """The pass with providers of the same names that compute nothing."""

    def idling(providers):
        return tuple(idle(provider.name) for provider in providers)

    (fly,) = idling([of.fly])
    return replace(of, fly=fly, forced=idling(of.forced), peers=idling(of.peers))


@pytest.fixture
def gpu(monkeypatch):
    """There seems to be one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended GPU")
    monkeypatch.setattr(benchmark, "ceiling", lambda dtype, device: 700.0)
    monkeypatch.setattr(benchmark, "device_of", lambda place: SimpleNamespace(target="sm_90a"))
    monkeypatch.setattr(Workload, "tensors", lambda workload, seed, device: (torch.empty(1),) * 3)
    monkeypatch.setattr(torch, "Generator", lambda device: torch.default_generator)
    monkeypatch.setattr(torch, "randn", lambda *size, generator, device: torch.empty(size[0]))


def test_a_run(gpu, capsys, tmp_path, timed):
    """The command line from flags to the last line, on a pretended GPU."""
    path = tmp_path / "figures.csv"
    cells = ["--seq_len", "64", "--head_dim", "64", "--causal"]
    flags = ["--preset=generic", "--kernel=sm90", "--iters=2", "--warm", f"--csv={path}", "--commit=v1"]
    assert benchmark.main([*flags, *cells], pretended(FORWARD)) == 0
    assert timed[0]["device"] == "cuda" and not timed[0]["flushes"]
    printed = capsys.readouterr().out
    assert "pretended GPU, torch=" in printed
    assert "matrix product 8192³ bf16: 700 TFLOP/s before, 700 after" in printed
    assert "fly generic: 1 of 1 cells under 1 of the best peer" in printed
    assert "fly sm90: 0 of 1 cells under 1 of the best peer" in printed
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["provider"], row["l2"], row["kernel"], row["best_peer"]) for row in rows] == [
        ("fly generic", "warm", "generic", "SDPA flash"),
        ("SDPA flash", "warm", "", ""),
        ("fly sm90", "warm", "sm90", "SDPA flash"),
    ]
    assert {(row["preset"], row["commit"], row["rounds"]) for row in rows} == {("generic", "v1", "2")}


def test_a_run_of_gradients(gpu, capsys, tmp_path, timed):
    """Arithmetic is counted as five products, and the geometric means come last."""
    path = tmp_path / "figures.csv"
    flags = ["--seq_len=64", "--head_dim=64", "--causal", "--iters=2", "--kernel=generic", f"--csv={path}"]
    assert benchmark.main([*flags, "--peers", "SDPA flash, fa4"], pretended(BACKWARD)) == 0
    assert timed[0]["flushes"] == BACKWARD.flushes > 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4].split()[:5] == ["fly", "generic", "/", "peer,", "geomean"]
    assert printed[-1].split() == ["best", "peer", "0.273", "0.273"]  # FA4 has 3 letters, fly generic 11
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["provider"], row["preset"], row["kernel"]) for row in rows] == [
        ("fly", "backward", "sm90"),
        ("SDPA flash", "backward", ""),
        ("FA4", "backward", ""),
        ("fly generic", "backward", "generic"),
    ]
    (cell,) = shapes.BACKWARD_PRESETS["backward"].workloads("bf16", (True,), seq_lens=[64], head_dims=[64])
    assert float(rows[0]["tflops"]) == pytest.approx(2.5 * cell.flops / len("fly") / 1e9)


def test_peers_are_named_by_one_flag(gpu, capsys):
    for flags, message in (
        (["--peers", "FA4", "--provider", "fly"], "--peers and --provider: name the peers with one of them"),
        (
            ["--peers", "nobody"],
            "no provider is called 'nobody'; providers: 'fly', 'fly gfx942', 'fly gfx950', 'fly sm90', "
            "'fly sm90_wide', 'fly generic', 'SDPA",
        ),
        (["--kernel", "gfx90a"], "invalid choice: 'gfx90a'"),
    ):
        with pytest.raises(SystemExit):
            benchmark.main(flags, pretended(BACKWARD))
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workload", "arch", "kernel"),
    [
        (Workload(1, 128, 128, 2, 2, 64, "bf16", True), "sm_90a", "sm90"),
        (Workload(1, 128, 128, 2, 2, 40, "bf16", True), "sm_90a", "sm90"),
        (Workload(1, 128, 128, 2, 2, 64, "bf16", True), "sm_80", "generic"),
        (Workload.packed([(5, 9), (0, 3)], 4, 2, 128, "f16", False), "gfx950", "gfx950"),
        (Workload(1, 128, 128, 2, 2, 64, "bf16", True, page_size=16), "sm_90a", "sm90"),
        (Workload(1, 128, 128, 2, 2, 64, "f8e4m3", True), "sm_90a", "sm90_fp8"),
    ],
)
def test_a_figure_names_the_kernel_that_dispatch_chose(workload, arch, kernel):
    assert benchmark.kernel_of(figure("fly", 1.0, workload), arch) == kernel
    assert benchmark.kernel_of(figure("fly generic", 1.0, workload), arch) == "generic"


def test_versions_of_what_is_there(monkeypatch):
    def version(package):
        if package != "triton":
            raise run_record.PackageNotFoundError
        return "3.6"

    monkeypatch.setattr(run_record, "version", version)
    found = run_record.versions()
    assert found.startswith(f"torch={torch.__version__}") and found.endswith("triton=3.6")


def test_no_gpu_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--iters", "0"], "--iters must be at least 1, got 0"),
        (["--provider", "nobody"], "no provider is called 'nobody'"),
        (["--kernel", "nothing"], "invalid choice: 'nothing'"),
        (["--preset", "nothing"], "invalid choice: 'nothing'"),
        (["--seq_len", "-5"], "seq_len must be at least 1, got -5"),
        (["--head_dim", "4096"], "num_heads must be at least 1, got 0"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(flags)
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_page_on_benchmarks_names_what_there_is():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    accepted = {"--exhaustive", "--help"}  # the first is pytest's
    timed = (harness, benchmark, flash_attn_decode, tune, compare_trees, fit_costs, registers, llama, cascade)
    timed += (clocks, cold_compiles, gradient_host, training)
    for module in (*timed, foreign, published):
        accepted |= {flag for action in module._parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"--[a-z]\w*", page)) <= accepted
    for name in (*shapes.SETS, *shapes.PRESETS, *shapes.BACKWARD_PRESETS, *harness.CSV_COLUMNS, *report.CSV_COLUMNS):
        assert re.search(rf"`(--)?{name}`", page), name


def test_dropout_is_timed_against_the_same_call_without(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(dropout, "flydsl_flash_attn_func", lambda q, k, v, causal, **options: given.append(options))
    dropout.main(["--device", "cpu", "--kernel", "generic", "--seq_len", "32"])
    header, columns, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("emulated") and columns.split()[-4:] == ["with", "dropout", "in", "turn"]
    assert [line.split()[:4] for line in lines] == [["generic", "64", "32", form] for form in ("full", "causal")]
    assert {options.get("dropout_p") for options in given} == {None, dropout.PROBABILITY}


def test_gradients_are_timed_with_dropout_and_in_turn(monkeypatch, capsys):
    given = []

    def attend(q, k, v, causal, **options):
        given.append(options)
        return q * 1.0

    monkeypatch.setattr(dropout, "flydsl_flash_attn_func", attend)
    monkeypatch.setattr(dropout.torch.autograd, "grad", lambda out, leaves, dout, retain_graph: ())
    dropout.main(["--device", "cpu", "--kernel", "backward", "--seq_len", "32"])
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()[2:]] == [9, 9]
    assert [options.get("deterministic") for options in given] == [None, None, True] * 2


def test_every_provider_trains_the_same_model(monkeypatch, capsys):
    """A line for each of two that are the same, whose losses agree, by kind of step."""
    flash = replace(FORWARD.named(["SDPA flash"])[0], missing=lambda device: None)
    found = replace(flash, name="fly"), flash, replace(flash, name="other", missing=lambda device: "not here")
    monkeypatch.setattr(type(FORWARD), "named", lambda self, names: found)
    training.main(["--device", "cpu", "--rounds", "1", "--times", "1", "--length", "32", "--head_dim", "16"])
    missing, size, *lines = capsys.readouterr().out.splitlines()
    assert missing == "without other: not here" and size == "2 layers, B4 H4 S32 D16 bf16 causal"
    assert [line.split("  ")[0] for line in lines] == [kind for kind in training.KINDS for _ in found[:2]]
    assert all("times as fast" in line for line in lines)
    train = training.example()
    model = training.Training.of(train, train.TOY, "cpu")
    before = model.step(flash, training.KINDS[0])
    assert model.step(flash, training.KINDS[1]) == before > model.step(flash, training.KINDS[0])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--times", "0"], "--times must be at least 1, got 0"),
        (["--head_dim", "3"], "--head_dim must divide 64, got 3"),
        (["--length", "100"], "--length must divide 128, got 100"),
    ],
)
def test_bad_flags_of_training(flags, message, capsys):
    with pytest.raises(SystemExit):
        training.main(["--device", "cpu", *flags])
    assert message in capsys.readouterr().err


def test_the_host_time_of_each_function_stands_beside_sdpas(monkeypatch, capsys):
    """Of stand-ins, which take turns; the ratio is a median of rounds."""
    monkeypatch.setattr(gradient_host, "ATTENDS", dict.fromkeys(gradient_host.ATTENDS, gradient_host.sdpa))
    gradient_host.main(["--device", "cpu", "--seq_len", "8", "--num_kv_heads", "2", "--rounds", "2", "--calls", "1"])
    header, columns, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("emulated") and columns.split()[0] == "kind"
    assert [[line[:8].strip(), line[9:31].strip()] for line in lines] == [
        [kind, name] for kind in gradient_host.KINDS for name in gradient_host.ATTENDS
    ]
    samples = {(kind, name): [2.0, 4.0, 9.0] for kind in gradient_host.KINDS for name in gradient_host.ATTENDS}
    samples["grad", gradient_host.PEER] = [4.0, 4.0, 3.0]
    assert gradient_host.table(samples)[4].split()[-5:] == ["2.0", "1.000", "0.750", "to", "2.000"]
    with pytest.raises(SystemExit):
        gradient_host.main(["--rounds", "0"])
    assert "--rounds and --calls must be at least 1, got 0 and 40" in capsys.readouterr().err


@pytest.mark.parametrize(("most", "status"), [("3", 0), ("2.9", 1)])
def test_a_pass_that_compiles_longer_than_it_may_is_told(most, status, monkeypatch, capsys):
    seconds = {"plain": (1.0, 2.0), "dropout": (3.0, 0.5)}

    def in_a_process(case, device):
        return dict(zip(("loading", "forward", "backward"), (9.0, *seconds[case[1]])))

    monkeypatch.setattr(cold_compiles, "in_a_process", in_a_process)
    given = ["--device", "cpu", "--head_dim", "64", "--form", "plain", "dropout", "--jobs", "2", "--most", most]
    assert cold_compiles.main(given) == status
    _, *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["64", "plain", "9.00", "1.00", "2.00"],
        ["64", "dropout", "9.00", "3.00", "0.50"],
    ]
    assert last == "the slowest pass: 3.00 s"


def test_a_process_that_fails_to_compile_says_why(monkeypatch):
    ended = SimpleNamespace(returncode=1, stdout="", stderr="KeyError: 'no form'\n")
    monkeypatch.setattr(cold_compiles.subprocess, "run", lambda *_, **options: ended)
    with pytest.raises(RuntimeError, match=r"no form.*KeyError"):
        cold_compiles.in_a_process((64, "no form", True), "cpu")


def test_decoding_needs_whole_pages_and_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        flash_attn_decode.main(["--page_size", "100"])
    assert "must be multiples of --page_size 100" in capsys.readouterr().err
    assert flash_attn_decode.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_cell_of_decoding_counts_keys_and_values():
    assert flash_attn_decode.Cell(1, 131072, 64, 8, 128, "bf16").bytes == 2 * 131072 * 8 * 128 * 2
    assert flash_attn_decode.Cell(1, 131072, 64, 8, 128, "f8e4m3").bytes == 2 * 131072 * 8 * 128


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs_as_a_script_from_anywhere(script):
    ended = with_help(*SCRIPTS)[script]
    assert ended.status == 0, ended.errors
    assert ended.output.startswith("usage: " + script.name)
