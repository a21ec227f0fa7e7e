"""Cycles of other projects' attention kernels and of ours, in the same emulator and timing model.

    python -m benchmarks.foreign --flydsl ../FlyDSL --csv FILE          # the whole table
    python -m benchmarks.foreign --arch gfx950 --seq 512 1024 --head-dim 128 --peers triton
    python -m benchmarks.foreign --python /path/of/a/venv/bin/python    # which has flydsl and triton

A figure is the time of one compute unit for all queries of one head of 32, in thousands of cycles: each block's
cost with as many workgroups resident as fit, summed. Without a mask blocks cost the same and one is executed; under a
causal mask five along the sequence are, and the cost of those between is interpolated. The start of a launch, and how
blocks fill a chip, are not in it. Next to a peer's cycles is peer / ours: above 1 our kernel is faster. Inputs are
the same, and the rows that a peer's workgroups wrote are compared with the exact result, up to 2048 tokens. Of
Triton's configurations the fastest at a shape counts, as its autotuner would choose, beyond 2048 tokens that of the
length before. FlyDSL's and ours are those that their dispatch takes for 32768 tokens, which fill a chip. What
FlyDSL's wheel compiles is the forward kernels of a checkout of that project.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.foreign.objects import FULL_CHIP, Compilers, Foreign, ForeignError, Shape
from benchmarks.run_record import RUN_COLUMNS, modelled_record
from fly.emulator.timing import Launch, Parameters, Session
from fly.emulator.timing.launch import sample_points
from fly.runtime.profile_cli import captured
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.profiled import placed

PRESET, OURS = "foreign", "fly"
# of a CSV file; `over_fly`: a peer's cycles over ours, `best_ratio` of ours: the fastest peer's
CSV_COLUMNS = (
    *("arch", "seq_len", "num_heads", "head_dim", "causal", "provider", "build", "cycles", "over_fly", "missing"),
    *("best_peer", "best_ratio", *RUN_COLUMNS),
)
LENGTHS, HEAD_DIMS, ARCHS = (512, 1024, 2048, 8192), (64, 128), ("gfx950", "gfx942")
FEWER_HEADS = 16  # FlyDSL's kernels for 32 and more have larger blocks
TUNED = 2048  # tokens; above, the configuration that was fastest at the length before
_LARGEST_ERROR = 0.05  # of the largest output: FlyDSL rounds scaled queries to 16 bits


def ours(arch: str, shape: Shape) -> Launch:
    """The launch of the kernel that serves sequences of this shape when they fill a chip."""
    full = replace(shape, batch=FULL_CHIP // shape.length)
    tensors = {name: x.expand(full.batch, -1, -1, -1) for name, x in shape.inputs().items()}

    def call() -> object:
        q, k, v = (tensors[name] for name in "qkv")
        return tensors, flydsl_flash_attn_func(q, k, v, causal=shape.causal)

    sizes = {"batch": full.batch, "seq": shape.length, "heads": shape.heads, "head_dim": shape.head_dim}
    return placed(captured(arch, call), **sizes, causal=shape.causal)


def cycles(launch: Launch, shape: Shape) -> float:
    """Of one compute unit, for all query blocks of one head."""
    assert launch.places is not None
    count = launch.places.count
    at = {launch.place(n): n for n in reversed(range(launch.workgroups))}
    # without a mask all blocks do the same work
    numbers = [at[place] for place in (sample_points(count) if shape.causal else [0])]
    session = Session(launch, Parameters.of(launch.program.arch), numbers)
    return sum(cost.cycles for cost in session.row()) / session.resident


def check(peer: Foreign, shape: Shape, out: torch.Tensor) -> None:
    """Compare what was written of a head with the exact result.

    Raises:
        ForeignError: nothing was written, or something else.
    """
    tensors = shape.inputs()
    q, k, v = (tensors[name][0, :, 0].double() for name in "qkv")
    scores = q @ k.T * shape.head_dim**-0.5
    if shape.causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    wanted, got = scores.softmax(1) @ v, out[0, :, 0].double()
    written = ~got.isnan().any(1)
    if not written.any():
        raise ForeignError(f"{peer.kernel} wrote no row of the first head")
    error = (got - wanted)[written].abs().max() / wanted[written].abs().max()
    if not error < _LARGEST_ERROR:
        raise ForeignError(f"{peer.kernel}: error {error:.3f} of the largest output; is it launched as it expects?")


def measured(peers: Sequence[Foreign], shape: Shape, tuned: str = "") -> tuple[float, str]:
    """Cycles of the fastest of some builds, and which it is; above `TUNED` of the one called `tuned`."""
    found = []
    chosen = [peer for peer in peers if peer.tiles == tuned] if shape.length > TUNED else []
    for peer in chosen or peers:
        tensors = shape.inputs()
        found.append((cycles(peer.launch(shape, tensors), shape), peer.tiles))
        if shape.length <= TUNED:  # the reference has length**2 scores
            check(peer, shape, tensors["out"])
    return min(found)


@dataclass(frozen=True)
class Measured:
    """One kernel at one shape: cycles with the build that took them, or none; `missing`: why it is not as wanted."""

    arch: str
    shape: Shape
    provider: str
    cycles: float | None
    build: str
    missing: str = ""


def peers(
    name: str, maker: Callable[[str, Shape], list[Foreign]], arch: str, shape: Shape, tuned: str = ""
) -> Measured:
    """A peer's cycles at a shape: with fewer heads where its kernel for these does not compile, since others may."""
    why = ""
    for of in (shape, replace(shape, heads=FEWER_HEADS)):
        try:
            theirs, tiles = measured(maker(arch, of), of, tuned)
            return Measured(arch, shape, name, theirs, f"{tiles}, {of.heads} heads" if why else tiles, why)
        except ForeignError as error:
            why = why or str(error)
    return Measured(arch, shape, name, None, "", why)


def table(
    archs: Sequence[str], shapes: Sequence[Shape], compilers: Compilers, names: Sequence[str]
) -> Iterator[Measured]:
    """Print rows as they are ready; yields ours and every peer's of each."""
    makers: dict[str, Callable[[str, Shape], list[Foreign]]] = {n: getattr(compilers, n) for n in names}
    tuned: dict[tuple[str, str, int, bool], str] = {}
    print(f"{'':<32}{'ours':>10}" + "".join(f"{name:>12}  / ours  {'':<32}" for name in names))
    for arch in archs:
        for shape in shapes:
            launch = ours(arch, shape)
            mine = cycles(launch, shape)
            yield Measured(arch, shape, OURS, mine, launch.kernel)
            row = f"{arch} D={shape.head_dim:<4}{'causal' if shape.causal else 'full':<7} S={shape.length:<9}"
            row = f"{row:<32}{mine / 1e3:>10.1f}"
            for name, maker in makers.items():
                key = name, arch, shape.head_dim, shape.causal
                found = peers(name, maker, arch, shape, tuned.get(key, ""))
                tuned[key] = found.build
                if found.cycles is None:
                    row += f"{'-':>12}{'':<42}"
                else:
                    row += f"{found.cycles / 1e3:>12.1f}{found.cycles / mine:>8.3f}  {found.build:<32}"
                yield found
            print(row.rstrip(), flush=True)


def reasons(rows: Iterable[Measured]) -> str:
    """Why peers are missing, each reason once for a chip."""
    found: dict[str, str] = {}
    for row in rows:
        if row.missing:
            what = "no" if row.cycles is None else f"{FEWER_HEADS} heads of"
            found.setdefault(f"{what} {row.provider} on {row.arch}", row.missing)
    return "\n".join(f"{what}: {why}" for what, why in found.items())


def write_csv(path: Path, rows: Sequence[Measured], of_run: Mapping[str, str]) -> None:
    """A line for every kernel of every row, with `CSV_COLUMNS`."""
    mine = {(row.arch, row.shape): row.cycles for row in rows if row.provider == OURS}
    ratios: dict[tuple[str, Shape], list[tuple[float, str]]] = {cell: [] for cell in mine}
    for row in rows:
        base = mine[row.arch, row.shape]
        if row.provider != OURS and row.cycles is not None and base is not None:
            ratios[row.arch, row.shape].append((row.cycles / base, row.provider))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            found = sorted(ratios[row.arch, row.shape])
            own = {name: ratio for ratio, name in found}.get(row.provider, "")
            best = found[0] if row.provider == OURS and found else ("", "")
            shape = row.shape
            writer.writerow({
                "arch": row.arch, "seq_len": shape.length, "num_heads": shape.heads, "head_dim": shape.head_dim,
                "causal": shape.causal, "provider": row.provider, "build": row.build,
                "cycles": "" if row.cycles is None else row.cycles, "over_fly": own, "missing": row.missing,
                "best_ratio": best[0], "best_peer": best[1], **of_run,
            })  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foreign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--seq", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--peers", nargs="*", choices=("flydsl", "triton"), default=("flydsl", "triton"))
    parser.add_argument("--flydsl", type=Path, metavar="FOLDER", help="a checkout of FlyDSL, for its kernels")
    parser.add_argument("--python", default=sys.executable, help="the Python that has flydsl and triton")
    parser.add_argument("--folder", type=Path, help="where compiled objects stay (default: a temporary folder)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="every figure, as benchmarks/results has them")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the status is 1 if a peer's kernel is missing in it."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if any(length < 256 or length % 256 for length in chosen.seq):
        parser.error(f"--seq {chosen.seq}: expected multiples of 256, which every kernel's blocks divide")
    shapes = [
        Shape(length, head_dim, mask == "causal")
        for head_dim in chosen.head_dim
        for mask in chosen.mask
        for length in chosen.seq
    ]
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = (chosen.folder or Path(temporary)).resolve()
        checkout = None if chosen.flydsl is None else chosen.flydsl.resolve()
        compilers = Compilers(chosen.python, checkout, folder)
        of_run = None if chosen.csv is None else modelled_record(PRESET, compilers.versions(chosen.peers))
        rows = list(table(chosen.arch, shapes, compilers, chosen.peers))
        if of_run is not None:
            write_csv(chosen.csv, rows, of_run)
    missing = reasons(rows)
    print(missing, end="\n" if missing else "")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
