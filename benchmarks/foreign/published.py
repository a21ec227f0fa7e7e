"""What the timing model predicts of published speeds, from the kernels' own code objects.

    python -m benchmarks.foreign.published --flydsl ../FlyDSL --aiter ../aiter --python PYTHON --json FILE

`benchmarks.calibrate_timing` sets kernels of ours against these figures, this what their authors compile: FlyDSL's
forward kernels, and aiter's backward kernels, whose objects are in its repository. One number is fitted for each
chip, the clock, to FlyDSL's first figure on it; gradients have no part in the fit. aiter's kernels with 16-bit sums
also stand in for HipKittens', whose blocks have 256 keys and 16 queries a step too. A backward call is all of its
launches; clearing the sums is taken to run at the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.foreign.aiter import Aiter, Gradients, Mode
from benchmarks.foreign.objects import Compilers, Foreign
from benchmarks.foreign.objects import Shape as Call
from fly.emulator.timing import Parameters, Session
from fly.emulator.timing.launch import sample_points, schedule

_WIDE, _NARROW = Mode(wide=True), Mode(wide=False)


@dataclass(frozen=True)
class Published:
    """A published speed, TFLOP/s, of (B, S, H, D) in bf16; `mode` of a backward kernel, None for a forward one."""

    who: str
    arch: str
    shape: tuple[int, int, int, int]
    causal: bool
    tflops: float
    mode: Mode | None = None

    @property
    def flop(self) -> float:
        """As these projects count: a causal call has half of a full one's, a backward pass 2.5 of a forward's."""
        batch, length, heads, head_dim = self.shape
        forward = 4.0 * batch * heads * length**2 * head_dim / (2 if self.causal else 1)
        return forward * (1 if self.mode is None else 2.5)


def _backward(who: str, arch: str, shape: tuple[int, int, int, int], mode: Mode, *tflops: float) -> list[Published]:
    return [Published(who, arch, shape, causal, one, mode) for causal, one in zip((False, True), tflops)]


_H64, _H16 = (1, 8192, 64, 128), (16, 8192, 16, 128)
FIGURES = (
    Published("FlyDSL", "gfx950", (1, 16384, 64, 128), False, 1318),
    Published("FlyDSL", "gfx950", (4, 8192, 64, 128), True, 1168),
    Published("FlyDSL", "gfx950", _H16, True, 1172),
    Published("FlyDSL", "gfx942", (4, 8192, 64, 128), True, 347),
    Published("FlyDSL", "gfx942", _H16, True, 268),
    *_backward("aiter, 16-bit sums", "gfx950", _H64, _NARROW, 1159, 1065),
    *_backward("aiter, 32-bit sums", "gfx950", _H64, _WIDE, 823, 765),
    *_backward("aiter, 16-bit sums", "gfx942", _H64, _NARROW, 473, 482),
    *_backward("aiter, 32-bit sums", "gfx942", _H64, _WIDE, 442, 433),
    *_backward("HipKittens", "gfx950", _H16, _NARROW, 1104, 941),
    *_backward("HipKittens", "gfx950", _H64, _NARROW, 1155, 933),
)


@dataclass(frozen=True)
class Time:
    """Of a call: cycles of its launches in order, those of matrix pipes in percent of the longest, other µs."""

    cycles: tuple[float, ...]
    matrix: float
    others: float

    def microseconds(self, clock: float, parameters: Parameters) -> float:
        """At a clock in GHz."""
        return sum(n / clock / 1e3 + parameters.launch_microseconds for n in self.cycles) + self.others


def forward(figure: Published, peer: Foreign) -> Time:
    """Of one launch over all heads; query blocks start in the order of the grid, heads fastest."""
    batch, length, heads, head_dim = figure.shape
    # heads hold the same values, and a sequence is that of every batch
    one = (torch.rand(1, length, 1, head_dim, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(torch.bfloat16)
    tensors = {name: one.expand(1, -1, heads, -1).contiguous() for name in ("q", "k", "v", "out")}
    launch = peer.launch(Call(length, head_dim, figure.causal, heads=heads), tensors)
    assert launch.places is not None
    at = {launch.place(n): n for n in reversed(range(launch.workgroups))}
    places = sample_points(launch.places.count) if figure.causal else [0]
    parameters = Parameters.of(figure.arch)
    session = Session(launch, parameters, [at[place] for place in places])
    costs = [one for one in session.row(parameters) for _ in range(heads)] * batch
    time = schedule(costs, session.resident, parameters)
    return Time((time.cycles,), time.matrix, 0.0)


def backward(figure: Published, aiter: Aiter) -> Time:
    """Of all launches over all heads; blocks of a head start one after another."""
    assert figure.mode is not None
    batch, length, heads, head_dim = figure.shape
    parameters = Parameters.of(figure.arch)
    tensors = Gradients.of(length, head_dim, figure.mode)
    cycles, matrix = [], 0.0
    for what, launch in aiter.launches(figure.arch, tensors, figure.causal, figure.mode):
        # blocks do the same work, under a causal mask in pairs; the last may have no partner
        count = launch.grid[0]
        session = Session(launch, parameters, sorted({0, count - 1}))
        row = session.row(parameters)
        time = schedule((row[:1] * (count - 1) + row[-1:]) * heads * batch, session.resident, parameters)
        cycles.append(time.cycles)
        matrix = time.matrix if what == "gradients" else matrix
    cleared = tensors.sums.nbytes * heads * batch
    others = parameters.launch_microseconds + cleared / parameters.memory_bandwidth / 1e3
    return Time(tuple(cycles), matrix, others)


def predictions(compilers: Compilers, aiter: Aiter, archs: Sequence[str]) -> Iterator[dict[str, object]]:
    """Print a line for every figure; yields what it says."""
    print(f"{'TFLOP/s':<20}chip    (B, S, H, D)           of                published  model  error")
    clocks: dict[str, float] = {}
    for figure in FIGURES:
        if figure.arch not in archs:
            continue
        parameters = Parameters.of(figure.arch)
        if figure.mode is None:
            _, length, heads, head_dim = figure.shape
            call = Call(length, head_dim, figure.causal, heads=heads)
            time = forward(figure, compilers.flydsl(figure.arch, call)[0])
        else:
            time = backward(figure, aiter)
        fitted = figure.arch not in clocks
        if fitted:
            target = figure.flop / figure.tflops / 1e6 - parameters.launch_microseconds
            clocks[figure.arch] = time.cycles[0] / target / 1e3
        clock = clocks[figure.arch]
        tflops = figure.flop / time.microseconds(clock, parameters) / 1e6
        error = tflops / figure.tflops - 1
        said = f"{clock:.2f}GHz" if fitted else f"{100 * error:+.0f}%"
        of = f"{'forward' if figure.mode is None else 'backward'} {'causal' if figure.causal else 'full'}"
        print(
            f"{figure.who:<20}{figure.arch:<8}{figure.shape!s:<23}{of:<17}{figure.tflops:>10.0f}{tflops:>7.0f}{said:>9}",
            flush=True,
        )
        yield {**asdict(figure), "model_tflops": tflops, "error": error, "clock_ghz": clock, **asdict(time)}


def _parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foreign.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", nargs="+", choices=("gfx950", "gfx942"), default=("gfx950", "gfx942"))
    parser.add_argument("--flydsl", type=Path, required=True, metavar="FOLDER", help="a checkout of FlyDSL")
    parser.add_argument("--aiter", type=Path, required=True, metavar="FOLDER", help="a checkout of aiter")
    parser.add_argument("--python", default=sys.executable, help="the Python that has flydsl")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure with its cycles")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    chosen = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        compilers = Compilers(chosen.python, chosen.flydsl.resolve(), Path(temporary).resolve())
        found = list(predictions(compilers, Aiter(chosen.aiter.resolve()), chosen.arch))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
