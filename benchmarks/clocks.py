"""Where the warpgroups of a block are: clocks behind each wait and each start of products of a Hopper kernel.

    python benchmarks/clocks.py --head_dim 64 --seq_len 16384 --causal --dropout_p 0.1
    python benchmarks/clocks.py --kernel flash_attn_sm90 --head_dim 128 --block 3 2 0

The kernel's PTX gets a few instructions behind every `wgmma.wait_group`, `wgmma.commit_group` and wait for an
mbarrier: the first warp of each warpgroup of one block writes the clock and the number of the place to memory. That
takes about 5 % of a tile's time, and moves little. Of the loop with the most passes a line is one place, and how many
cycles behind the first warpgroup's pass of the loop's first place each warpgroup is there (medians); the period is
from one such pass to the next. Warpgroups that are at the same places at the same time want the same units.

For the fused backward kernel (`flash_attn_sm90_bwd`) or the forward one (`flash_attn_sm90`), on a Hopper GPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.dropout import COLUMNS, TOKENS
from fly import config
from fly.backends.artefact import Artefact
from fly.runtime.cuda import CudaDevice, CudaKernel
from kernels.flash_attn_interface import flydsl_flash_attn_func

KERNELS = ("flash_attn_sm90_bwd", "flash_attn_sm90")
WARPGROUPS, PASSES = 4, 1 << 16  # most of a block's, and of a warpgroup
BEHIND = {"wgmma.wait_group": "wait", "wgmma.commit_group": "start", "done:": "mbarrier"}

Passes = Mapping[int, Sequence[tuple[int, int]]]  # by warpgroup: (clock, place) of each


def with_clocks(ptx: str, address: int, block: Sequence[int]) -> tuple[str, list[str]]:
    """A kernel's PTX that writes clocks to WARPGROUPS x PASSES x (clock, place) u32 at an address; its places' names.

    block: the grid's place of the block whose first warps do.
    """
    tests = [f"mov.u32 %tc, %ctaid.{axis}; setp.eq.and.u32 %tp, %tc, {i}, %tp;" for axis, i in zip("xyz", block)]
    head = [
        ".reg .pred %tp; .reg .b64 %ta, %tb; .reg .b32 %tc, %td;",
        "mov.u32 %td, %tid.x; and.b32 %tc, %td, 127; setp.eq.u32 %tp, %tc, 0;",
        *tests,
        f"shr.u32 %td, %td, 7; mul.wide.u32 %ta, %td, {8 * PASSES}; mov.u64 %tb, {address}; add.u64 %ta, %ta, %tb;",
    ]
    lines, found, places = iter(ptx.splitlines()), [], []
    for line in lines:
        if head and re.match(r"\s*ld\.param", line):
            found.extend(head)
            head = []
        found.append(line)
        name = next((name for text, name in BEHIND.items() if text in line), None)
        if name is None:
            continue
        if "wait_group" in line:
            name += line.split()[-1].rstrip(";")
        for rest in lines:  # not inside of what has names of its own
            found.append(rest)
            if "end inline asm" in rest:
                break
        store = "@%tp st.global.v2.u32 [%ta], {%tc, %td}; @%tp add.u64 %ta, %ta, 8;"
        found.append(f"mov.u32 %tc, %clock; mov.u32 %td, {len(places)}; {store}")
        places.append(name)
    return "\n".join(found) + "\n", places


@contextmanager
def tracing(kernel: str, memory: torch.Tensor, block: Sequence[int]) -> Iterator[list[str]]:
    """What is loaded as `kernel` writes clocks to `memory`; the list gets the names of its places."""
    load, places = CudaDevice.load, list[str]()

    def load_with_clocks(device: CudaDevice, artefact: Artefact) -> CudaKernel:
        if artefact.kernel == kernel:
            ptx, places[:] = with_clocks(artefact.binary.decode(), memory.data_ptr(), block)
            artefact = replace(artefact, binary=ptx.encode())
        return load(device, artefact)

    CudaDevice.load = load_with_clocks  # type: ignore[method-assign]
    try:
        yield places
    finally:
        CudaDevice.load = load  # type: ignore[method-assign]


def passes_of(memory: torch.Tensor) -> Passes:
    """What was written: those of warpgroups that passed anything."""
    rows = memory.view(WARPGROUPS, PASSES, 2).tolist()
    found = ([(clock % 2**32, place) for clock, place in row if place >= 0] for row in rows)
    return {i: row for i, row in enumerate(found) if row}


def table(passes: Passes, places: Sequence[str]) -> list[str]:
    """Lines: the period, and a place each, of the loop that warpgroups of consumers pass most often."""
    consumers = [i for i in passes if i > 0]
    counts = Counter(place for _, place in passes[consumers[0]])
    most = max(counts.values())
    loop = sorted(place for place, count in counts.items() if count == most)
    by_place = {i: {place: [clock for clock, at in passes[i] if at == place] for place in loop} for i in consumers}
    starts = by_place[consumers[0]][loop[0]]
    period = statistics.median((b - a) % 2**32 for a, b in pairwise(starts))
    found = [f"{most} passes, {period:.0f} cycles each", f"{'place':>12}" + "".join(f"{i:>10}" for i in consumers)]
    for place in loop:
        offsets = [_median_offset(starts, by_place[i][place]) for i in consumers]
        found.append(f"{places[place]:>12}" + "".join(f"{offset:10.0f}" for offset in offsets))
    return found


def _median_offset(starts: Sequence[int], clocks: Sequence[int]) -> float:
    """Of clocks of 32 bits."""
    return statistics.median((clock - start + 2**31) % 2**32 - 2**31 for start, clock in zip(starts, clocks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, default=KERNELS[0])
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dropout_p", type=float, default=0.0)
    parser.add_argument("--block", type=int, nargs=3, default=(0, 3, 0), help="of the grid, x y z")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("a Hopper GPU is needed, of compute capability 9.0")
    shape = max(1, TOKENS // options.seq_len), options.seq_len, max(1, COLUMNS // options.head_dim), options.head_dim
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dropped = {"dropout_p": options.dropout_p, "rng_state": torch.tensor([1, 2], device="cuda")}
    memory = torch.full((WARPGROUPS * PASSES * 2,), -1, dtype=torch.int32, device="cuda")
    with tracing(options.kernel, memory, options.block) as places, config.CACHE.set_to("0"):
        out = flydsl_flash_attn_func(*leaves, options.causal, **(dropped if options.dropout_p else {}))
        torch.autograd.grad(out, leaves, dout)
    passes = passes_of(memory)
    if len(passes) < 2:
        parser.error(f"--block {' '.join(map(str, options.block))}: no such block, or {options.kernel} did not run")
    print("\n".join(table(passes, places)))


if __name__ == "__main__":
    main()
