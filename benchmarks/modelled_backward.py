"""The backward pass on the timing model: what each of its launches takes on a chip, and what that makes altogether.

    python benchmarks/modelled_backward.py gfx942              # B=1, H=64, S=8192, D=128
    python benchmarks/modelled_backward.py gfx942 --kernel generic --causal
    python benchmarks/modelled_backward.py gfx950 --head-dim 64 --figure atomic_rate=8
    python benchmarks/modelled_backward.py gfx950 --kv-heads 8 --causal
    python benchmarks/modelled_backward.py gfx950 --dq-accumulate 16bit
    python benchmarks/modelled_backward.py gfx942 --step       # cycles of a block for another tile of queries

Products count as in FlashAttention's figures, 2.5 times the forward's, half of them with causality. Some workgroups
of each launch are recorded and replayed; heads share memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fly import config
from fly.emulator.timing import Launch, Parameters, Session, whole_launch
from fly.emulator.timing.launch import Places
from fly.errors import ArgumentError
from fly.runtime.device import CPU, device_for
from fly.runtime.emulated import EmulatedDevice
from kernels.dispatch import BACKWARD, serve
from kernels.problem.contract import DQ_SUMS, Request
from kernels.profiled import placed

FUSED = ("flash_attn_gfx942_bwd", "flash_attn_gfx950_bwd")  # their grids' blocks go heads first


def launches(arch: str, kernel: str | None, request: Request) -> list[Launch]:
    """What a backward pass launches, in order; nothing is executed.

    Raises:
        FlyError: the kernel cannot serve the request.
    """
    generator = torch.Generator().manual_seed(0)

    def tensor(length: int, heads: int) -> torch.Tensor:
        one = torch.rand(1, length, 1, request.head_dim, generator=generator) * 2 - 1
        return one.to(torch.bfloat16).expand(request.batch, -1, heads, -1)

    of_queries, of_keys = (request.seq_len, request.num_heads), (request.seq_len_kv, request.num_kv_heads)
    of = dict.fromkeys(("q", "out", "dout", "dq"), of_queries) | dict.fromkeys(("k", "v", "dk", "dv"), of_keys)
    tensors = {name: tensor(*sizes) for name, sizes in of.items()}
    rows = request.batch, request.num_heads, request.seq_len
    tensors["lse"] = torch.full(rows, math.log(request.seq_len_kv))
    found: list[Launch] = []
    with config.ARCH.set_to(arch), config.BACKWARD_KERNEL.set_to(kernel):
        device = device_for(CPU)
        assert isinstance(device, EmulatedDevice)
        prepare = serve(arch, request, BACKWARD)
        device.intercept = found.append
        try:
            launch = prepare(tensors, request)
            if launch.workspace_bytes:
                tensors["workspace"] = torch.empty(launch.workspace_bytes, dtype=torch.uint8)
            launch.run(tensors, None)
        finally:
            device.intercept = None
    return [_placed(replace(x, keep=(tensors,)), request) for x in found]


def _placed(launch: Launch, request: Request) -> Launch:
    """With the places of blocks: a fused kernel's are dealt out to heads first."""
    blocks, heads, _ = launch.grid
    if "generic_dq" in launch.kernel:
        return placed(launch, seq=request.seq_len, heads=request.num_heads, causal=request.causal)
    if not any(name in launch.kernel for name in FUSED):
        return launch
    return replace(launch, places=Places(blocks, lambda n: n % (blocks * heads) // heads, blocks))


def request_of(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, causal: bool, dq_accumulate: str = DQ_SUMS[0]
) -> Request:
    """A plain call's."""
    return Request(
        head_dim, "bf16", causal, False, False, batch, length, length, heads, kv_heads, head_dim**-0.5, 1,
        q_pitch=2 * head_dim, kv_pitch=2 * head_dim, dq_accumulate=dq_accumulate,
    )  # fmt: skip


def step_cycles(arch: str, kernel: str | None, request: Request, parameters: Parameters) -> tuple[float, Session]:
    """Cycles of a fused kernel's first block for another 32 queries, from two lengths; the longer one's session."""
    taken, lengths, session = [], (512, 1024), None
    for length in lengths:
        (launch,) = (
            x for x in launches(arch, kernel, replace(request, seq_len=length, seq_len_kv=length, num_heads=8,
            num_kv_heads=8)) if any(name in x.kernel for name in FUSED)
        )  # fmt: skip
        session = Session(launch, parameters, [0])
        taken.append(session.replay(keep=False).cycles)
    assert session is not None
    return (taken[1] - taken[0]) / ((lengths[1] - lengths[0]) / 32), session


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=("gfx942", "gfx950"))
    parser.add_argument("--kernel", help="as FLY_BACKWARD_KERNEL")
    parser.add_argument("--shape", type=int, nargs=3, default=(1, 8192, 64), metavar=("B", "S", "H"))
    parser.add_argument("--kv-heads", type=int, help="H by default")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dq-accumulate", choices=DQ_SUMS, default=DQ_SUMS[0])
    parser.add_argument("--step", action="store_true", help="of a fused kernel's loop alone")
    parser.add_argument("--figure", nargs="+", default=[], metavar="NAME=VALUE", help="another value of the model's")
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for given in options.figure:
        name, _, value = given.partition("=")
        try:
            figures[name] = float(value)
        except ValueError:
            raise ArgumentError(f"--figure {given!r}; expected NAME=NUMBER") from None
    parameters = Parameters.of(options.arch, **figures)
    batch, length, heads = options.shape
    of = heads, options.kv_heads or heads, options.head_dim, options.causal, options.dq_accumulate
    request = request_of(batch, length, *of)
    if options.step:
        cycles, session = step_cycles(options.arch, options.kernel, request, parameters)
        machine = session.machine
        print(f"{cycles:,.0f} cycles a tile; {machine.rows} registers, {machine.lds_bytes} bytes of LDS")
        return
    total = 0.0
    for launch in launches(options.arch, options.kernel, request):
        session = whole_launch(launch, parameters)
        time = session.time()
        total += time.microseconds
        print(
            f"{launch.kernel:<28} {time.microseconds:>9,.0f} us, slots occupied {time.occupied:6.1%}, matrix "
            f"{time.matrix:6.1%}, {session.machine.rows} registers, {session.machine.lds_bytes} bytes of LDS",
            flush=True,
        )
    work = 10 * batch * heads * length**2 * options.head_dim / (2 if options.causal else 1)
    print(f"{total:,.0f} us: {work / total / 1e6:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
