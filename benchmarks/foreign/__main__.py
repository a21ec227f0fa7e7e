"""Cycles of other projects' attention kernels and of ours, in the same emulator and timing model.

    python -m benchmarks.foreign --flydsl ../FlyDSL                     # the whole table, some minutes
    python -m benchmarks.foreign --arch gfx950 --seq 512 1024 --head-dim 128 --peers triton
    python -m benchmarks.foreign --python /path/of/a/venv/bin/python    # which has flydsl and triton

A figure is the time of one compute unit for all queries of one head, in thousands of cycles: each block's cost
with as many workgroups resident as fit, summed. The start of a launch, and how blocks fill a chip, are not in it.
Next to a peer's cycles is peer / ours: above 1 our kernel is faster. Inputs are the same, and the rows that a peer's
workgroups wrote are compared with the exact result. Of Triton's configurations the fastest at a shape counts, as its
autotuner would choose. What FlyDSL's wheel compiles is the forward kernels of a checkout of that project.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.foreign.objects import Compilers, Foreign, ForeignError, Shape
from fly.emulator.timing import Launch, Parameters, Session
from fly.emulator.timing.launch import sample_points
from fly.runtime.profile_cli import captured
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.profiled import placed

LENGTHS, HEAD_DIMS, ARCHS = (512, 1024, 2048, 8192), (64, 128), ("gfx950", "gfx942")
_LARGEST_ERROR = 0.05  # of the largest output: FlyDSL rounds scaled queries to 16 bits


def ours(arch: str, shape: Shape) -> Launch:
    """The launch of the kernel that serves a call of this shape."""
    tensors = shape.inputs()

    def call() -> object:
        q, k, v = (tensors[name] for name in "qkv")
        return tensors, flydsl_flash_attn_func(q, k, v, causal=shape.causal)

    sizes = {"batch": shape.batch, "seq": shape.length, "heads": shape.heads, "head_dim": shape.head_dim}
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


def measured(peers: Sequence[Foreign], shape: Shape) -> tuple[float, str]:
    """Cycles of the fastest of some builds, and which it is."""
    found = []
    for peer in peers:
        tensors = shape.inputs()
        found.append((cycles(peer.launch(shape, tensors), shape), peer.tiles))
        if shape.length <= LENGTHS[2]:  # the reference has length**2 scores
            check(peer, shape, tensors["out"])
    return min(found)


def table(archs: Sequence[str], shapes: Sequence[Shape], compilers: Compilers, names: Sequence[str]) -> str:
    """Print rows as they are ready, then why peers are missing; returns that as text."""
    makers: dict[str, Callable[[str, Shape], list[Foreign]]] = {n: getattr(compilers, n) for n in names}
    missing: dict[str, str] = {}
    print(f"{'':<32}{'ours':>10}" + "".join(f"{name:>12}  / ours  {'':<32}" for name in names))
    for arch in archs:
        for shape in shapes:
            mine = cycles(ours(arch, shape), shape)
            row = f"{arch} D={shape.head_dim:<4}{'causal' if shape.causal else 'full':<7} S={shape.length:<9}"
            row = f"{row:<32}{mine / 1e3:>10.1f}"
            for name, maker in makers.items():
                try:
                    theirs, tiles = measured(maker(arch, shape), shape)
                    row += f"{theirs / 1e3:>12.1f}{theirs / mine:>8.3f}  {tiles:<32}"
                except ForeignError as error:
                    missing.setdefault(f"{name} on {arch}", str(error))
                    row += f"{'-':>12}{'':<42}"
            print(row.rstrip(), flush=True)
    return "\n".join(f"no {what}: {why}" for what, why in missing.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the status is 1 if a peer is missing in it."""
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
        missing = table(chosen.arch, shapes, Compilers(chosen.python, checkout, folder), chosen.peers)
    print(missing, end="\n" if missing else "")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
