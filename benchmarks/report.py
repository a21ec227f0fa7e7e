"""What a benchmark's figures say: ratios to peers, their geometric means, the cells that fall behind, a plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.providers import OURS
from benchmarks.run_record import RUN_COLUMNS
from benchmarks.timing import Timing
from benchmarks.workload import COLUMNS, Workload

BEST = "best peer"
# of a CSV file; `kernel` serves one of ours, `fly_ratio` is fly's speed over the provider's and empty without fly,
# `best_ratio` one of ours over `best_peer`, `ceiling_tflops` what a matrix product reached in the same run
CSV_COLUMNS = (
    *COLUMNS,
    *("provider", "kernel", "milliseconds", "low_ms", "high_ms", "tflops", "fly_ratio", "best_peer", "best_ratio"),
    *("ceiling_tflops", "l2", "rounds", *RUN_COLUMNS),
)


@dataclass(frozen=True)
class Figure:
    """One provider's time on one workload; `work`: the arithmetic over that of the forward pass."""

    workload: Workload
    provider: str
    timing: Timing
    work: float = 1.0

    @property
    def tflops(self) -> float:
        """Its speed, TFLOP/s."""
        return self.work * self.workload.flops / self.timing.median / 1e9


@dataclass(frozen=True)
class Ratio:
    """Our speed over a peer's on one workload; `peer` is a provider's name or `BEST`, `other` always the provider."""

    workload: Workload
    ours: str
    peer: str
    other: str
    value: float


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _by_workload(figures: Sequence[Figure]) -> dict[Workload, dict[str, Figure]]:
    table: dict[Workload, dict[str, Figure]] = {}
    for figure in figures:
        table.setdefault(figure.workload, {})[figure.provider] = figure
    return table


def ratios(figures: Sequence[Figure]) -> list[Ratio]:
    """Every one of ours against every peer with a figure for the same workload, and against the fastest of them."""
    found = []
    for workload, row in _by_workload(figures).items():
        peers = [figure for name, figure in row.items() if name not in OURS]
        for ours in (figure for name, figure in row.items() if name in OURS):
            for peer in peers:
                value = peer.timing.median / ours.timing.median
                found.append(Ratio(workload, ours.provider, peer.provider, peer.provider, value))
            if peers:
                best = min(peers, key=lambda figure: figure.timing.median)
                value = best.timing.median / ours.timing.median
                found.append(Ratio(workload, ours.provider, BEST, best.provider, value))
    return found


def _group(workload: Workload) -> str:
    pages = f" pages={workload.page_size}" if workload.page_size else ""
    return f"D{workload.head_dim} {'causal' if workload.causal else 'full'}{pages}"


def _means(title: str, of: Sequence[Ratio], groups: Sequence[str]) -> list[str]:
    width = max(len(name) for name in (title, *(ratio.peer for ratio in of)))
    widths = [max(12, len(group) + 2) for group in groups]
    lines = [f"{title:{width}} {'all':>6}" + "".join(f"{g:>{n}}" for g, n in zip(groups, widths))]
    for peer in dict.fromkeys(ratio.peer for ratio in of):
        mine = [ratio for ratio in of if ratio.peer == peer]
        cells = [[r.value for r in mine if _group(r.workload) == group] for group in groups]
        texts = [f"{geomean(cell):.3f}" if cell else "-" for cell in cells]
        means = "".join(f"{text:>{n}}" for text, n in zip(texts, widths))
        lines.append(f"{peer:{width}} {geomean([r.value for r in mine]):6.3f}{means}")
    return lines


def summary(figures: Sequence[Figure], threshold: float) -> list[str]:
    """Lines: for each of ours, the cells in which it is below `threshold` of the best peer, and last, geometric means
    of its ratios by peer, head dimension and mask.
    """
    lines: list[str] = []
    every = ratios(figures)
    groups = list(dict.fromkeys(_group(ratio.workload) for ratio in every))
    for ours in dict.fromkeys(ratio.ours for ratio in every):
        mine = [ratio for ratio in every if ratio.ours == ours]
        cells = [ratio for ratio in mine if ratio.peer == BEST]
        under = sorted((ratio for ratio in cells if ratio.value < threshold), key=lambda ratio: ratio.value)
        lines += ["", f"{ours}: {len(under)} of {len(cells)} cells under {threshold:g} of the best peer"]
        lines += [f"  {ratio.value:.3f} of {ratio.other:12} {ratio.workload}" for ratio in under]
        lines += _means(f"{ours} / peer, geomean", mine, groups)
    return lines or ["no ratios: that takes fly and a peer"]


def table_header(names: Sequence[str]) -> str:
    """The line above `table_row`s."""
    return f"{'TFLOP/s':40}" + "".join(f"{name:>13}" for name in names) + f"{'fly/best':>10}"


def table_row(workload: Workload, figures: Sequence[Figure], names: Sequence[str]) -> str:
    """One workload's speeds, and the ratio of the first of ours to the best peer."""
    speeds = {figure.provider: figure.tflops for figure in figures}
    cells = [f"{speeds[name]:13.1f}" if name in speeds else f"{'-':>13}" for name in names]
    best = [ratio.value for ratio in ratios(figures) if ratio.peer == BEST]
    text = str(workload)
    text = text if len(text) <= 39 else text[:18] + "…" + text[-20:]
    return f"{text:40}" + "".join(cells) + (f"{best[0]:10.3f}" if best else f"{'-':>10}")


def write_csv(
    path: Path,
    figures: Sequence[Figure],
    of_run: Mapping[str, object],
    kernel_of: Callable[[Figure], str] = lambda figure: "",
) -> None:
    """Every figure, with `CSV_COLUMNS`.

    `of_run` holds those that are the same for all; `kernel_of` says which kernel a figure of ours is of.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        best = {(ratio.workload, ratio.ours): ratio for ratio in ratios(figures) if ratio.peer == BEST}
        for workload, row in _by_workload(figures).items():
            ours = next((figure for name, figure in row.items() if name in OURS), None)
            for figure in row.values():
                timing = figure.timing
                times = {"milliseconds": timing.median, "low_ms": timing.low, "high_ms": timing.high}
                ratio = None if ours is None else timing.median / ours.timing.median
                own = {"provider": figure.provider, "tflops": figure.tflops, "fly_ratio": ratio}
                if figure.provider in OURS:
                    own["kernel"] = kernel_of(figure)
                if (found := best.get((workload, figure.provider))) is not None:
                    own |= {"best_peer": found.other, "best_ratio": found.value}
                writer.writerow({**workload.record(), **times, **own, **of_run})


def plot_missing() -> str | None:
    """Why nothing can be plotted here, or None."""
    return None if find_spec("matplotlib") else "matplotlib is not installed: pip install fly-attention[bench]"


def plottable(workload: Workload) -> bool:
    """Whether a plot shows it: dense, without pages, square, with as many key heads as query heads."""
    return (
        not workload.lengths
        and not workload.page_size
        and workload.seq_len == workload.seq_len_kv
        and workload.num_heads == workload.num_kv_heads
    )


def curves(figures: Sequence[Figure]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """What a plot shows: for each head dimension and mask, each provider's (length, TFLOP/s) by length.

    Of what is `plottable`, the first of each length.
    """
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for figure in figures:
        w = figure.workload
        if plottable(w):
            panels.setdefault(_group(w), {}).setdefault(figure.provider, {}).setdefault(w.seq_len, figure.tflops)
    return {panel: {name: sorted(line.items()) for name, line in lines.items()} for panel, lines in panels.items()}


def plot(
    path: Path, figures: Sequence[Figure], ceiling: float, title: str, new: Callable[..., Any] | None = None
) -> None:
    """Write a picture of speed against sequence length, a panel for each head dimension and mask.

    `ceiling` (TFLOP/s) is drawn as a line; `new` makes the figure, matplotlib's by default.

    Raises:
        ValueError: nothing in `figures` is `plottable`.
    """
    panels = curves(figures)
    if not panels:
        raise ValueError("nothing to plot: no figure of a dense workload with equal lengths and heads")
    if new is None:
        from matplotlib.figure import Figure as new
    columns = min(len(panels), 3) if len(panels) % 2 else len(panels) // 2
    rows = -(-len(panels) // columns)
    picture = new(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    axes = picture.subplots(rows, columns, sharey=True, squeeze=False)
    for place, (panel, lines) in enumerate(panels.items()):
        axis = axes[place % rows][place // rows]
        for name, line in lines.items():
            width = 2.2 if name in OURS else 1.2
            axis.plot(*zip(*line), marker="o", markersize=4, linewidth=width, label=name)
        lengths = sorted({length for line in lines.values() for length, _ in line})
        axis.axhline(ceiling, color="black", linestyle=":", linewidth=1, label=f"matrix product, {ceiling:.0f}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_ylim(bottom=0)
        axis.set(title=panel, xlabel="sequence length", ylabel="TFLOP/s")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    picture.suptitle(title)
    picture.savefig(path, dpi=120)
