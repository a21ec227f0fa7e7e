"""docs/results.md, made from the CSV files in benchmarks/results.

    python -m benchmarks.results            # writes the page
    python -m benchmarks.results --check    # says whether the page is what the files give

A file is what a benchmark wrote with --csv; its column `preset` says which section it belongs to. Of several files
of a preset the latest is shown, and the others are a line each under "Earlier runs".
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import flash_attn_decode, report
from benchmarks.foreign import __main__ as foreign
from benchmarks.providers import FAST
from benchmarks.report import geomean
from benchmarks.run_record import MODEL
from benchmarks.shapes import PRESETS_OF
from benchmarks.workload import COLUMNS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
OURS = "fly"  # names of providers of ours begin so
UNKNOWN = "–"  # a figure that a file does not have
BEFORE = {"page_size": "0"}  # what files mean that were written before they had these columns

Row = Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One file: its name and its rows, which all have the same circumstances."""

    name: str
    rows: tuple[Row, ...]

    @staticmethod
    def read(path: Path) -> Run:
        """The run of a file.

        Raises:
            ValueError: a file without rows, or without a column that its section shows.
        """
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = tuple(BEFORE | row for row in reader)
        if not rows:
            raise ValueError(f"{path} has no rows; expected what a benchmark wrote with --csv")
        preset = rows[0].get("preset")
        if preset not in SECTIONS:
            raise ValueError(f"{path}: preset is {preset!r}; expected one of {', '.join(SECTIONS)}")
        missing = [name for name in SECTIONS[preset].columns if name not in rows[0]]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; write it again with --csv")
        return Run(path.name, rows)

    def __getitem__(self, name: str) -> str:
        """What a column says that is the same for all rows."""
        return self.rows[0][name]

    @property
    def providers(self) -> list[str]:
        """In the order in which the file has them."""
        return list(dict.fromkeys(row["provider"] for row in self.rows))

    @property
    def best_ratios(self) -> list[float]:
        """Of the first of ours over the best peer, cell by cell."""
        first = next((name for name in self.providers if name.startswith(OURS)), "")
        return [float(row["best_ratio"]) for row in self.rows if row["provider"] == first and row["best_ratio"]]

    def cells(self, columns: Sequence[str]) -> list[dict[str, Row]]:
        """The rows of each cell by provider; `columns` tell cells apart."""
        found: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in self.rows:
            found.setdefault(tuple(row[name] for name in columns), {})[row["provider"]] = row
        return list(found.values())


def _number(text: str, places: int) -> str:
    return f"{float(text):.{places}f}" if text else UNKNOWN


def _microseconds(text: str) -> str:
    """Four digits at least."""
    return UNKNOWN if not text else f"{float(text):.1f}" if float(text) < 1000 else f"{float(text):.0f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _circumstances(run: Run) -> str:
    """When and on what a run was made, in sentences; what its file does not say is named too."""
    if run["device"] == MODEL:
        commits = ", ".join(dict.fromkeys(row["commit"] for row in run.rows))
        text = f"Predicted on {run['date']} (UTC) by the {MODEL}; {_versions(run['versions'])}; commit {commits}."
        return f"{text} {run['note']}." if run["note"] else text
    said = {"driver": run["driver"], "versions": _versions(run["versions"]), "commit": run["commit"]}
    known = [value if name == "versions" else f"{name} {value}" for name, value in said.items() if value]
    unknown = [name for name, value in said.items() if not value]
    text = "; ".join([f"Measured on {run['date']} (UTC) on one {run['device']}", *known]) + "."
    if unknown:
        text += f" Not recorded: {', '.join(unknown)}."
    return f"{text} {run['note']}." if run["note"] else text


def _versions(text: str) -> str:
    return ", ".join(part.replace("=", " ", 1) for part in text.split())


def _lengths(row: Row) -> str:
    """The shape of a cell in words."""
    heads = (
        row["num_heads"] if row["num_heads"] == row["num_kv_heads"] else f"{row['num_heads']}:{row['num_kv_heads']}"
    )
    splits = "" if row["num_kv_splits"] == "1" else f", {row['num_kv_splits']} splits"
    if not row["seqlens"]:
        pair = row["seq_len"] if row["seq_len"] == row["seq_len_kv"] else f"{row['seq_len']} on {row['seq_len_kv']}"
        return f"{row['batch']} × {pair}, {heads} heads{splits}"
    lengths = [int(length) for length in row["seqlens"].split()]
    return f"{row['batch']} packed, {min(lengths)} to {max(lengths)}, {heads} heads{splits}"


def _group(row: Row) -> str:
    pages = f", pages of {row['page_size']}" if row["page_size"] != "0" else ""
    return f"D={row['head_dim']} {'causal' if row['causal'] == 'True' else 'full'}{pages}"


def _means(run: Run, ours: str, first: str) -> list[str]:
    """Geometric means of the ratios of one of ours over the best peer, and of the first of ours by peer and group."""
    groups = list(dict.fromkeys(map(_group, run.rows)))
    ratios: dict[str, list[tuple[str, float]]] = {}
    for row in run.rows:
        if row["provider"] == ours and row["best_ratio"]:
            ratios.setdefault(report.BEST, []).append((_group(row), float(row["best_ratio"])))
        elif ours == first and not row["provider"].startswith(OURS) and row["fly_ratio"]:
            ratios.setdefault(row["provider"], []).append((_group(row), float(row["fly_ratio"])))

    def mean(values: Sequence[float]) -> str:
        return f"{geomean(values):.3f}" if values else UNKNOWN

    rows = [
        [name, str(len(of)), mean([v for _, v in of]), f"{min(v for _, v in of):.3f}"]
        + [mean([v for where, v in of if where == group]) for group in groups]
        for name, of in sorted(ratios.items(), key=lambda item: item[0] != report.BEST)
    ]
    return _table([f"{ours} over", "cells", "geometric mean", "least", *groups], rows)


def _speeds(run: Run) -> list[str]:
    ours = [name for name in run.providers if name.startswith(OURS)]
    peers = [name for name in run.providers if not name.startswith(OURS)]
    lines = []
    if run["ceiling_tflops"]:
        reached = float(run["ceiling_tflops"])
        lines = [f"A square matrix product reached {reached:.0f} TFLOP/s in the same run.", ""]
    for name in ours:
        if name in (ours[0], FAST.name):
            lines += [*_means(run, name, ours[0]), ""]
    lines += ["Speeds are TFLOP/s; in brackets the median time in ms and its quartiles.", ""]
    rows = []
    for cell in run.cells(_FORWARD_CELL):
        row = next(iter(cell.values()))
        texts = [_group(row), _lengths(row)]
        for name in ours:
            mine = cell.get(name)
            texts += [UNKNOWN] * 2 if mine is None else [_speed(mine), mine["kernel"] or UNKNOWN]
        texts += [_number(cell[name]["tflops"], 0) if name in cell else UNKNOWN for name in peers]
        texts += _best(next((cell[name] for name in ours if name in cell), None))
        rows.append(texts)
    titles = [title for name in ours for title in (name, "kernel")]
    return [*lines, *_table(["", "shape", *titles, *peers, "over the best peer", "best peer"], rows)]


def _speed(row: Row) -> str:
    if not row["milliseconds"]:
        return _number(row["tflops"], 0)
    times = [_number(row[name], 4) for name in ("milliseconds", "low_ms", "high_ms")]
    return f"{_number(row['tflops'], 0)} ({times[0]}; {times[1]} to {times[2]})"


def _best(row: Row | None) -> list[str]:
    return [UNKNOWN] * 2 if row is None else [_number(row["best_ratio"], 3), row["best_peer"] or UNKNOWN]


def _decode(run: Run) -> list[str]:
    row = run.rows[0]
    what = (
        f"One query a sequence, {row['num_heads']} query heads on {row['num_kv_heads']} key heads, "
        f"D={row['head_dim']}, {row['dtype']}; pages of {row['page_size']} keys where a column says so. The floor is "
        f"the time in which a copy, which reached {_number(row['copy_tb_s'], 2)} TB/s in this run, moves as many "
        "bytes as K and V have. Figures are microseconds, in brackets the quartiles, and the floor in percent of the "
        "median."
    )
    rows = []
    for cell in run.cells(_DECODE_CELL):
        first = next(iter(cell.values()))
        texts = [first["batch"], first["seq_len_kv"], _microseconds(first["floor_us"])]
        texts += [_time(cell[name], name) if name in cell else UNKNOWN for name in run.providers]
        ours = next((cell[name] for name in run.providers if name in cell and name.startswith(OURS)), None)
        rows.append([*texts, *_best(ours)])
    header = ["sequences", "keys", "floor", *run.providers, "over the best peer", "best peer"]
    return [what, "", *_table(header, rows)]


def _time(row: Row, name: str) -> str:
    text = _microseconds(row["microseconds"])
    if row["low_us"] and name.startswith(OURS):
        text += f" ({_microseconds(row['low_us'])} to {_microseconds(row['high_us'])})"
    return f"{text}, {float(row['floor_us']) / float(row['microseconds']):.0%}"


_FOREIGN_CELL = ("arch", "head_dim", "causal", "seq_len")


def _foreign(run: Run) -> list[str]:
    what = (
        "Thousands of cycles of one compute unit for all queries of one head of 32; a ratio is a peer's cycles over "
        "ours: above 1, ours is faster. Of Triton the fastest of its configurations, of FlyDSL and of us the kernel "
        "that the dispatch takes for 32768 tokens. A footnote says why a figure is of another kernel, or missing."
    )
    peers = [name for name in run.providers if name != foreign.OURS]
    notes = {
        reason: n + 1 for n, reason in enumerate(dict.fromkeys(row["missing"] for row in run.rows if row["missing"]))
    }
    rows: list[list[str]] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for cell in run.cells(_FOREIGN_CELL):
        ours = cell[foreign.OURS]
        texts = [ours["arch"], _group(ours), ours["seq_len"], _thousands(ours["cycles"]), ours["build"] or UNKNOWN]
        for name in peers:
            row = cell[name]
            if row["over_fly"]:
                ratios.setdefault((name, ours["arch"]), []).append(float(row["over_fly"]))
            note = f" [{notes[row['missing']]}]" if row["missing"] else ""
            texts += [_thousands(row["cycles"]) + note, _number(row["over_fly"], 3), row["build"] or UNKNOWN]
        rows.append(texts)
    header = ["chip", "", "length", "fly", "kernel"]
    header += [title for name in peers for title in (name, f"{name} / fly", "kernel")]
    means = [
        [f"{name} / fly", arch, str(len(of)), f"{geomean(of):.3f}", f"{min(of):.3f}"]
        for (name, arch), of in ratios.items()
    ]
    lines = [what, "", *_table(["", "chip", "cells", "geometric mean", "least"], means), "", *_table(header, rows)]
    return lines + [line for reason, n in notes.items() for line in ("", f"[{n}] {reason}")]


def _thousands(cycles: str) -> str:
    return f"{float(cycles) / 1e3:.1f}" if cycles else UNKNOWN


@dataclass(frozen=True)
class Section:
    """What a preset's files become: a title, what was run, the columns that a file must have, and the tables."""

    title: str
    meaning: str
    command: str
    columns: tuple[str, ...]
    tables: Callable[[Run], list[str]]
    picture: str = ""  # of the same run, drawn with --plot


_FORWARD_CELL = COLUMNS
_DECODE_CELL = ("batch", "seq_len_kv", "num_heads", "num_kv_heads", "head_dim", "dtype", "page_size")


def _preset(name: str, title: str, picture: str = "", of: str = "forward") -> Section:
    script = {"forward": "flash_attn_fwd", "backward": "flash_attn_bwd"}[of]
    command = f"python benchmarks/{script}.py --preset {name}"
    return Section(title, PRESETS_OF[of][name].meaning, command, report.CSV_COLUMNS, _speeds, picture)


SECTIONS: Mapping[str, Section] = {
    "h200": _preset("h200", "Prefill", "images/flash_attn_fwd_h200.png"),
    "short": _preset("short", "Short and ragged"),
    "chunked": _preset("chunked", "Chunked prefill"),
    "head_dims": _preset("head_dims", "Other head dimensions"),
    "fp8": _preset("fp8", "8-bit floats"),
    "generic": _preset("generic", "The generic kernel against FlashAttention-2"),
    "backward": _preset("backward", "Gradients", of="backward"),
    "backward_gqa": _preset("backward_gqa", "Gradients with four query heads to a key head", of="backward"),
    flash_attn_decode.PRESET: Section(
        "Decoding",
        "one query a sequence, over keys as one tensor and in pages dealt out at random",
        "python benchmarks/flash_attn_decode.py",
        flash_attn_decode.CSV_COLUMNS,
        _decode,
    ),
    foreign.PRESET: Section(
        "Other projects' kernels on AMD GPUs: predicted, not measured",
        "FlyDSL's and Triton's forward kernels next to ours on the timing model, bf16",
        "python -m benchmarks.foreign",
        foreign.CSV_COLUMNS,
        _foreign,
    ),
}

_INTRODUCTION = """\
# Results

This page is made by `python -m benchmarks.results` from the CSV files in `benchmarks/results`; do not edit it.
[Benchmarks](benchmarks.md) says how the files are made, and [the notebook](notebook.md) what was tried on the way.

Every figure but those that are called predicted is a median over rounds in which all providers take turns in one
process, with the second-level cache emptied before each call. A ratio is the speed of fly over that of a peer in the
same run: above 1, fly is faster. One card's clocks differ from hour to hour, so speeds of different runs do not
compare; ratios do.
"""


def page(runs: Iterable[Run]) -> str:
    """The text of docs/results.md."""
    by_preset: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run["date"], run.name)):
        by_preset.setdefault(run["preset"], []).append(run)
    lines = [_INTRODUCTION]
    for preset, section in SECTIONS.items():
        lines += [f"## {section.title}", "", f"`{section.command}`: {section.meaning}.", ""]
        if preset not in by_preset:
            lines += [f"No run of `{preset}` is committed yet.", ""]
            continue
        run = by_preset[preset][-1]
        lines += [_circumstances(run), "", *section.tables(run), ""]
        if section.picture:
            lines += [f"![{section.title}: TFLOP/s against sequence length]({section.picture})", ""]
    earlier = [run for preset in SECTIONS for run in by_preset.get(preset, [])[:-1]]
    if earlier:
        lines += ["## Earlier runs", "", *_table(_EARLIER, map(_summary, earlier)), ""]
    return "\n".join(lines).rstrip() + "\n"


_EARLIER = ("preset", "date", "card", "cells", "over the best peer: geometric mean", "least", "file")


def _summary(run: Run) -> list[str]:
    ratios = run.best_ratios
    values = [f"{geomean(ratios):.3f}", f"{min(ratios):.3f}"] if ratios else [UNKNOWN] * 2
    return [run["preset"], run["date"], run["device"], str(len(ratios)), *values, f"`benchmarks/results/{run.name}`"]


def committed() -> list[Run]:
    """The runs of every file in benchmarks/results."""
    return [Run.read(path) for path in sorted(FOLDER.glob("*.csv"))]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description="Make docs/results.md from benchmarks/results/*.csv.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = parser.parse_args(argv)
    text = page(committed())
    if not args.check:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the files give: run python -m benchmarks.results", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
