"""A replay as a picture: one row for each SIMD's matrix pipe and for each wave."""

from __future__ import annotations

from pathlib import Path

from fly.emulator.timing.compute_unit import BARRIER, LGKMCNT, SIMDS, VMCNT, Result
from fly.emulator.timing.instructions import Operation
from fly.emulator.timing.report import duration, window, within
from fly.errors import ArgumentError, UnsupportedError

_KINDS = {
    "mfma": "#1f5fa8", "exp": "#d1495b", "packed": "#edae49", "valu": "#66a182", "lds": "#8d6cab",
    "memory": "#2e4057",
}  # fmt: skip
_OTHER = "#b0b0b0"
_WAITS = {VMCNT: "#c9d6df", LGKMCNT: "#ded3e8", BARRIER: "#eeeeee"}


def write_plot(
    path: str, title: str, operations: list[Operation], result: Result, cycles: tuple[int, int] | None = None
) -> str:
    """Save a timeline; returns a line that tells so.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: the file cannot be written, or an empty range of cycles.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UnsupportedError(
            "--plot needs matplotlib: pip install 'fly-attention[bench]'; --trace FILE.json needs nothing"
        ) from None
    chosen, turn = window(result, cycles), result.parameters.turn
    rows = [("matrix", simd) for simd in range(SIMDS) if simd in result.simd_of]
    order = []
    for _, simd in rows:
        order += [("matrix", simd), *(("wave", w) for w, s in enumerate(result.simd_of) if s == simd)]
    place = {row: len(order) - 1 - i for i, row in enumerate(order)}
    bars: dict[tuple[int, str], list[tuple[int, int]]] = {}

    def add(row: int, colour: str, start: int, length: int) -> None:
        bars.setdefault((row, colour), []).append((start, length))

    for event in within(result.events, chosen):
        op = operations[event.index]
        row = place["wave", event.wave]
        if event.waited and event.reason in _WAITS:
            add(row, _WAITS[event.reason], event.cycle - event.waited, event.waited)
        add(row, _KINDS.get(op.kind, _OTHER), event.cycle, duration(op, turn))
        if op.matrix:
            add(place["matrix", result.simd_of[event.wave]], _KINDS["mfma"], event.cycle, op.matrix)
    figure = Figure(figsize=(22, 0.45 * len(order) + 1.6))
    axes = figure.add_subplot()
    for (row, colour), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(
        list(place.values()), [f"SIMD {n} matrix" if kind == "matrix" else f"wave {n}" for kind, n in place]
    )
    axes.set_xlim(chosen)
    axes.set_xlabel("cycles")
    axes.set_title(title)
    legend = {**_KINDS, "other": _OTHER, "wait vmcnt": _WAITS[VMCNT], "wait lgkmcnt": _WAITS[LGKMCNT],
              "wait barrier": _WAITS[BARRIER]}  # fmt: skip
    patches = [Patch(color=colour, label=name) for name, colour in legend.items()]
    axes.legend(handles=patches, ncols=len(patches), loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    figure.tight_layout()
    try:
        with Path(path).open("wb") as file:
            FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]  # matplotlib's
    except OSError as error:
        raise ArgumentError(f"--plot {path!r}: {error.strerror}") from None
    return f"wrote {path}: cycles {chosen[0]} to {chosen[1]}"
