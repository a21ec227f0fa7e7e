"""The page of results: it is what its files give, and says what they do not have."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest

from benchmarks import flash_attn_decode, report, results, run_record, shapes
from benchmarks.foreign import __main__ as foreign
from benchmarks.report import Figure, geomean
from benchmarks.timing import Timing
from benchmarks.workload import Workload

SQUARE = Workload(4, 512, 512, 8, 8, 64, "bf16", True)
SHARED = Workload(1, 1024, 1024, 64, 8, 64, "bf16", False)
PACKED = Workload.packed(((5, 5), (700, 700)), 4, 4, 128, "bf16", True)
RUN = {
    "preset": "short",
    "date": "2026-01-02 03:04",
    "device": "pretended GPU",
    "driver": "570.1",
    "versions": "torch=2.11 CUDA=12.8",
    "commit": "abcdef0123",
    "note": "",
    "ceiling_tflops": 700.0,
    "l2": "cold",
    "rounds": 30,
}


def figure(workload, provider, milliseconds):
    return Figure(workload, provider, Timing(milliseconds, milliseconds * 0.9, milliseconds * 1.1))


def written(path, figures, **of_run):
    report.write_csv(path, figures, RUN | of_run, lambda figure: "sm90")
    return results.Run.read(path)


def test_the_page_is_what_the_committed_files_give():
    text = results.page(results.committed())
    assert results.PAGE.read_text() == text, "run make results"
    assert results.main(["--check"]) == 0


def test_a_page_that_differs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    assert results.main(["--check"]) == 1 and "python -m benchmarks.results" in capsys.readouterr().err
    assert results.main([]) == 0 and results.main(["--check"]) == 0
    results.PAGE.write_text("edited by hand")
    assert results.main(["--check"]) == 1


def test_every_preset_of_the_benchmarks_has_a_section():
    assert set(results.SECTIONS) == {
        *shapes.PRESETS,
        *shapes.BACKWARD_PRESETS,
        flash_attn_decode.PRESET,
        foreign.PRESET,
    }


def test_without_a_file_a_section_says_so():
    text = results.page([])
    for preset in results.SECTIONS:
        assert f"No run of `{preset}` is committed yet." in text


def test_a_run_becomes_tables_with_its_circumstances(tmp_path):
    figures = [
        *(figure(SQUARE, "fly", 2.0), figure(SQUARE, "FA4", 3.0), figure(SQUARE, "SDPA cuDNN", 2.5)),
        *(figure(SHARED, "fly", 4.0), figure(SHARED, "FA4", 2.0), figure(PACKED, "fly", 1.0)),
    ]
    text = results.page([written(tmp_path / "a.csv", figures)])
    assert (
        "Measured on 2026-01-02 03:04 (UTC) on one pretended GPU; driver 570.1; torch 2.11, CUDA 12.8; "
        "commit abcdef0123." in text
    )
    assert "Not recorded" not in text and "reached 700 TFLOP/s" in text
    lines = text.splitlines()
    speed = f"{SQUARE.flops / 2e9:.0f} (2.0000; 1.8000 to 2.2000)"
    peers = f"{SQUARE.flops / 3e9:.0f} | {SQUARE.flops / 2.5e9:.0f}"
    assert f"| D=64 causal | 4 × 512, 8 heads | {speed} | sm90 | {peers} | 1.250 | SDPA cuDNN |" in lines
    (shared,) = (line for line in lines if "1 × 1024, 64:8 heads" in line)
    assert shared.endswith("| – | 0.500 | FA4 |")
    (packed,) = (line for line in lines if "2 packed, 5 to 700, 4 heads" in line)
    assert packed.endswith("| – | – | – | – |")
    assert "| best peer | 2 | 0.791 | 0.500 | 1.250 | 0.500 | – |" in lines
    assert "| FA4 | 2 | 0.866 | 0.500 | 1.500 | 0.500 | – |" in lines


def test_cells_in_pages_say_so_and_older_files_have_none(tmp_path):
    pages = replace(SHARED, page_size=16)
    figures = [figure(of, name, ms) for of in (SHARED, pages) for name, ms in (("fly", 2.0), ("FA4", 3.0))]
    run = written(tmp_path / "a.csv", figures)
    lines = results.page([run]).splitlines()
    assert any(line.startswith("| D=64 full, pages of 16 | 1 × 1024, 64:8 heads |") for line in lines)
    assert any(line.startswith("| D=64 full | 1 × 1024, 64:8 heads |") for line in lines)
    with (tmp_path / "a.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.pop("page_size") == "0"]
    with (tmp_path / "older.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert results.Run.read(tmp_path / "older.csv").rows == run.rows[:2]


def test_fast_sums_have_means_of_their_own(tmp_path):
    bytes_ = replace(SQUARE, dtype="f8e4m3")
    figures = [figure(bytes_, name, ms) for name, ms in (("fly", 2.0), ("fly fast", 1.0), ("FA3", 3.0))]
    lines = results.page([written(tmp_path / "a.csv", figures)]).splitlines()
    assert "| fly over | cells | geometric mean | least | D=64 causal |" in lines
    start = lines.index("| fly fast over | cells | geometric mean | least | D=64 causal |")
    assert lines[start + 2 : start + 4] == ["| best peer | 1 | 3.000 | 3.000 | 3.000 |", ""]


def test_what_a_file_does_not_say_is_named(tmp_path):
    run = written(tmp_path / "a.csv", [figure(SQUARE, "fly", 2.0)], driver="", commit="", note="Transcribed")
    assert "Not recorded: driver, commit. Transcribed." in results.page([run])


def test_the_latest_run_is_shown_and_earlier_ones_have_a_line(tmp_path):
    runs = [
        written(tmp_path / f"{name}.csv", [figure(SQUARE, "fly", 2.0), figure(SQUARE, "FA4", ms)], date=date)
        for name, ms, date in (("new", 4.0, "2026-01-03 00:00"), ("old", 3.0, "2026-01-02 00:00"))
    ]
    text = results.page(runs)
    assert "| best peer | 1 | 2.000 |" in text and "| best peer | 1 | 1.500 |" not in text
    earlier = text[text.index("## Earlier runs") :]
    line = "| short | 2026-01-02 00:00 | pretended GPU | 1 | 1.500 | 1.500 | `benchmarks/results/old.csv` |"
    assert line in earlier and "new.csv" not in earlier


def test_decoding_shows_the_floor_in_percent_of_the_time(tmp_path):
    same = dict.fromkeys(flash_attn_decode.CSV_COLUMNS, "") | RUN | {"preset": "decode", "copy_tb_s": "4.28"}
    same = {name: same[name] for name in flash_attn_decode.CSV_COLUMNS}
    same |= {"batch": 4, "seq_len_kv": 65536, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "dtype": "bf16"}
    ours = {"provider": "fly", "microseconds": 2000.0, "low_us": 1900.0, "high_us": 2100.0}
    path = tmp_path / "decode.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, flash_attn_decode.CSV_COLUMNS)
        writer.writeheader()
        writer.writerow(same | ours | {"floor_us": 1000.0, "best_peer": "FA4", "best_ratio": 1.25})
        writer.writerow(same | {"provider": "FA4", "microseconds": 2500.0, "floor_us": 1000.0})
    lines = results.page([results.Run.read(path)]).splitlines()
    assert "| 4 | 65536 | 1000 | 2000 (1900 to 2100), 50% | 2500, 40% | 1.250 | FA4 |" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("preset,date\n", "has no rows"),
        (
            "preset,date\nfast,2026\n",
            "preset is 'fast'; expected one of h200, short, chunked, head_dims, fp8, generic, backward, "
            "backward_gqa, decode, foreign",
        ),
        ("preset,date\nh200,2026\n", "has no column batch"),
    ],
)
def test_a_file_that_is_none_of_a_benchmark(text, message, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        results.Run.read(path)


def test_a_run_records_its_circumstances(monkeypatch):
    monkeypatch.setattr(run_record.torch.cuda, "get_device_name", lambda: "pretended GPU")
    monkeypatch.setattr(run_record, "said", lambda command: "said " + command[0])
    made = run_record.run_record("h200")
    assert tuple(made) == run_record.RUN_COLUMNS
    assert made["driver"] == "said nvidia-smi" and made["commit"] == "said git+" and "torch=" in made["versions"]
    assert run_record.run_record("h200", "v1")["commit"] == "v1"


def test_a_command_that_is_missing_or_fails_says_nothing():
    assert run_record.said(["no-such-command"]) == run_record.said(["git", "no-such-subcommand"]) == ""


@pytest.mark.parametrize("document", ["README.md", "docs/targets.md"])
def test_what_documents_say_of_the_speed_is_what_the_page_says(document):
    latest = {run["preset"]: run for run in sorted(results.committed(), key=lambda run: run["date"])}
    text = (results.ROOT / document).read_text()
    ratios = latest["h200"].best_ratios
    (said,) = re.findall(r"at (\d\.\d\d) of the best of cuDNN, FlashAttention-3 and FlashAttention-4", text)
    assert said == f"{geomean(ratios):.2f}"
    for least, most in re.findall(r"single cells (\d\.\d\d) to (\d\.\d\d)", text):
        assert (least, most) == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")
    for generic in re.findall(r"generic is at (\d\.\d\d) of FlashAttention-2", text):
        assert generic == f"{geomean(latest['generic'].best_ratios):.2f}"


def test_what_the_readme_says_of_the_gradients_speed_is_what_the_page_says():
    latest = {run["preset"]: run for run in sorted(results.committed(), key=lambda run: run["date"])}["backward"]
    text = " ".join((results.ROOT / "README.md").read_text().split())
    said = re.search(
        r"over 30 shapes at (\d\.\d\d) of cuDNN's speed and at (\d\.\d\d) of FlashAttention-4's "
        r"\((\d\.\d\d) at head dimension 64, (\d\.\d\d) at 128, (\d\.\d\d) at 256\)",
        text,
    )
    assert said is not None

    def over(peer: str, *head_dims: int) -> str:
        rows = [row for row in latest.rows if row["provider"] == peer and int(row["head_dim"]) in head_dims]
        return f"{geomean([float(row['fly_ratio']) for row in rows]):.2f}"

    every = (64, 128, 256)
    assert said.groups() == (over("SDPA cuDNN", *every), over("FA4", *every), *(over("FA4", dim) for dim in every))
