"""Builds of the attention kernels on the timing model: what a chip would be asked, without the chip.

    python benchmarks/modelled_builds.py gfx942          # the generic kernel: tile shapes, waves
    python benchmarks/modelled_builds.py gfx950 --head-dim 64 --causal
    python benchmarks/modelled_builds.py gfx950 --block-masks    # calls that a block mask and a plain call say alike

One workgroup is recorded for each place and replayed; B=4, H=64, S=8192 unless said otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fly import config
from fly.emulator.timing import Launch, Parameters, Session, whole_launch
from fly.errors import EmulatorError, FlyError
from fly.runtime.profile_cli import captured
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.generic.tiles import TILES
from kernels.gfx950.options import BLOCK_M, BLOCK_N, WAVES, DualWaveOptions
from kernels.problem.block_mask import create_block_mask
from kernels.problem.contract import Request
from kernels.profiled import placed
from kernels.work.launch import bind_forward

Shape = tuple[int, int, int, int]  # batch, length, heads, head dimension
LARGE: Shape = (4, 8192, 64, 128)


def generic_options(head_dim: int, causal: bool, **changes: Any) -> GenericOptions:
    """The generic kernel's AMD build for a head dimension, with some fields changed."""
    tiles: Mapping[str, Any] = TILES["rocdl", head_dim]
    return GenericOptions(head_dim, causal, **{**tiles, **changes})


def build(
    arch: str, options: GenericOptions | DualWaveOptions, shape: Shape, splits: int = 1, seq_kv: int | None = None
) -> Launch:
    """A launch of one build; heads and batches share memory, since few workgroups are executed.

    Raises:
        FlyError: options that do not go together, or do not compile.
    """
    batch, length, heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    seq_kv = seq_kv or length

    def tensor(count: int) -> torch.Tensor:
        one = torch.rand(1, count, 1, head_dim, generator=generator) * 2 - 1
        return one.to(torch.bfloat16).expand(batch, -1, heads, -1)

    def call() -> Any:
        q, k, v = tensor(length), tensor(seq_kv), tensor(seq_kv)
        out = torch.empty(1, length, 1, head_dim, dtype=torch.bfloat16).expand(batch, -1, heads, -1)
        tensors = {"q": q, "k": k, "v": v, "out": out}
        request = Request(
            head_dim, "bf16", options.causal, seq_kv != length, False, batch, length, seq_kv, heads, heads,
            head_dim**-0.5, splits, q_pitch=2 * head_dim, kv_pitch=2 * head_dim,
        )  # fmt: skip
        if isinstance(options, GenericOptions):
            kernel, rows, keys, waves = flash_attn_generic, options.block_m, options.block_n, options.waves
        else:
            kernel, rows, keys, waves = flash_attn_gfx950, BLOCK_M, BLOCK_N, WAVES
        launch = bind_forward(
            kernel, tensors, request, block_m=rows, block_n=keys, threads=64 * waves, statics={"options": options},
            splits=splits,
        )  # fmt: skip
        if launch.workspace_bytes:
            tensors["workspace"] = torch.empty(launch.workspace_bytes, dtype=torch.uint8)
        launch.run(tensors, None)
        return tensors

    return placed(captured(arch, call), seq=length, heads=heads, causal=options.causal)


def generic_builds(shape: Shape, causal: bool) -> Iterator[tuple[str, GenericOptions]]:
    """What to try of the generic kernel: each differs from the table's build in what its name says."""
    yield "as in the table", generic_options(shape[3], causal)
    yield "no lazy rescale", generic_options(shape[3], causal, lazy=False)
    for rows, keys, waves in ((64, 64, 4), (64, 64, 2), (128, 32, 4), (128, 128, 4), (256, 64, 8), (256, 64, 4)):
        changes = {"block_m": rows, "block_n": keys, "waves": waves}
        yield f"{rows} x {keys}, {waves} waves", generic_options(shape[3], causal, **changes)
    yield "one wave a SIMD", generic_options(shape[3], causal, waves_per_eu=1)
    yield "256 x 64, 8 waves, one a SIMD", generic_options(shape[3], causal, block_m=256, waves=8, waves_per_eu=1)


def dual_wave_builds(shape: Shape, causal: bool) -> Iterator[tuple[str, DualWaveOptions]]:
    """The same of the gfx950 kernel, whose tiles are fixed."""
    whole = DualWaveOptions(shape[3], causal)
    yield "as it is", whole
    yield "no stagger", replace(whole, stagger=False)
    yield "no priorities", replace(whole, setprio=False)
    yield "neither", replace(whole, stagger=False, setprio=False)
    yield "no lazy rescale", replace(whole, lazy_rescale=False)
    yield "nothing ahead", replace(whole, ahead=False)


WINDOW = 1024


def causal_mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """As `causal`."""
    return key <= query


def window_mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """As `causal` with a window of `WINDOW` keys."""
    return (key <= query) & (key > query - WINDOW)


def block_mask_calls(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """Attention under two masks: as options of a call, and as block masks, which the generic kernel takes too."""
    batch, length, heads, head_dim = shape
    q = torch.rand(1, length, 1, head_dim).sub(0.5).to(torch.bfloat16).expand(batch, -1, heads, -1)

    def launch(kernel: str, **options: Any) -> Launch:
        def call() -> Any:
            with config.KERNEL.set_to(kernel):
                return q, options, flydsl_flash_attn_func(q, q, q, **options)

        return placed(captured("gfx950", call), seq=length, heads=heads, causal=True)

    for mask, window in ((causal_mask, (-1, -1)), (window_mask, (WINDOW - 1, 0))):
        yield f"{mask.__name__}: no list", launch("gfx950", causal=True, window_size=window)
        for size in (256, 128):
            lists = create_block_mask(mask, None, None, length, length, "cpu", size)
            for kernel in ("gfx950", "generic"):
                name = f"{mask.__name__}: {size}, {kernel}"
                yield name, launch(kernel, causal=False, block_mask=lists)


def line(name: str, session: Session) -> str:
    """A row of the table."""
    time, row, machine = session.time(), session.row(), session.machine
    issued = sum(len(w.code) for w in next(iter(session.trace.workgroups.values())))
    return (
        f"{name:<32} {machine.rows:>9} {machine.lds_bytes:>7} {session.resident:>8} {issued:>10,} "
        f"{max(c.cycles for c in row):>10,.0f} {100 * time.matrix:>7.1f}% {100 * time.occupied:>8.1f}% "
        f"{time.microseconds:>8,.0f}"
    )


HEADER = f"{'build':<32} registers     LDS resident     issued     cycles   matrix occupied       µs"


def print_block_masks(shape: Shape) -> None:
    """Every call of `block_mask_calls`."""
    print(f"gfx950, (B, S, H, D) = {shape}, bf16\n{HEADER}")
    for name, launch in block_mask_calls(shape):
        print(line(name, whole_launch(launch, Parameters.of("gfx950"))), flush=True)


def print_builds(arch: str, shape: Shape, causal: bool) -> None:
    """Every build of the kernel that serves `arch`, slowest replay a second or two each."""
    print(f"{arch}, (B, S, H, D) = {shape}, {'causal' if causal else 'full'}, bf16")
    print(HEADER)
    for kind in (dual_wave_builds, generic_builds) if arch == "gfx950" and shape[3] <= 128 else (generic_builds,):
        for name, options in kind(shape, causal):
            try:
                session = whole_launch(build(arch, options, shape), Parameters.of(arch))
            except EmulatorError:
                raise
            except FlyError as error:
                print(f"{name:<32} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                continue
            print(line(name, session), flush=True)
    print()


def main() -> None:
    """Print the table asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gfx942", "gfx950"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--block-masks", action="store_true", help="block masks next to plain calls, on gfx950")
    options = parser.parse_args()
    shape = (4, options.seq, 64, options.head_dim)
    with torch.no_grad():
        if options.block_masks:
            print_block_masks(shape)
        else:
            print_builds(options.what, shape, options.causal)


if __name__ == "__main__":
    main()
