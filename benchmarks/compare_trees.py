"""Checkouts of this project against each other on one GPU: kernel times, host time of a warm call, cold compiles.

    python benchmarks/compare_trees.py OLD NEW                       # folders with `fly` and `kernels` in them
    python benchmarks/compare_trees.py OLD NEW OTHER                 # candidates next to each other
    python benchmarks/compare_trees.py OLD NEW --rounds 15 --only fp8 decode --kernels_only

Every checkout has a process of its own, and they take turns, call by call, in every round, so that clocks and heat
are the same for all. What is printed is old / new, above 1 where the new checkout is faster, with the quartiles of
the rounds' ratios. A checkout against itself shows how much of that is noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BURST = 5  # calls between two events
HOST_CALLS, HOST_REPEATS = 300, 7
READY = "ready"


@dataclass(frozen=True)
class Cell:
    """One call of `flydsl_flash_attn_func`: sizes, and keyword arguments that JSON holds.

    `packed`: sequences of `queries` and `keys` one after the other. `gradients`: only those of q, k and v are timed.
    """

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    dtype: str = "bf16"
    head_dim_v: int | None = None
    packed: bool = False
    gradients: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def cells() -> Iterator[Cell]:
    """What is compared: training and prefill, decoding, 8 bits and features on Hopper, and the generic kernel."""
    for head_dim in (64, 96, 128, 256):
        heads = 2048 // head_dim
        for length in (512, 2048, 8192):
            for causal in (False, True):
                name = f"D{head_dim} S{length} {'causal' if causal else 'full'}"
                yield Cell(name, 16384 // length, length, length, heads, heads, head_dim, causal)
    yield Cell("D64 S16384 causal", 1, 16384, 16384, 32, 32, 64, True)
    yield Cell("GQA 32:8 S4096 causal", 4, 4096, 4096, 32, 8, 128, True)
    for causal in (False, True):
        kind = "causal" if causal else "full"
        yield Cell(f"D192x128 S4096 {kind}", 4, 4096, 4096, 16, 16, 192, causal, head_dim_v=128)
        for length in (4096, 8192):
            batch = 16384 // length
            yield Cell(f"packed S{length} {kind}", batch, length, length, 16, 16, 128, causal, packed=True)
    yield Cell("f16 S4096 causal", 4, 4096, 4096, 16, 16, 128, True, "f16")
    for batch, keys in ((1, 65536), (16, 8192), (64, 8192)):
        yield Cell(f"decode {batch}x{keys}", batch, 1, keys, 64, 8, 128, options={"num_kv_splits": 0})
    for head_dim in (64, 128, 256):
        for length in (2048, 8192):
            name = f"fp8 D{head_dim} S{length} causal"
            heads = 2048 // head_dim
            yield Cell(name, 16384 // length, length, length, heads, heads, head_dim, True, "f8")
    yield Cell("softcap S4096", 4, 4096, 4096, 16, 16, 128, True, options={"softcap": 50.0})
    yield Cell("window S4096", 4, 4096, 4096, 16, 16, 128, True, options={"window_size": (1023, 0)})
    for head_dim in (64, 72, 80, 128):
        yield Cell(
            f"generic D{head_dim} S2048 causal", 4, 2048, 2048, 16, 16, head_dim, True, options={"generic": True}
        )
    forms = {"": {}, " dropout": {"dropout_p": 0.1, "rng_state": (1, 2)}, " in turn": {"deterministic": True}}
    for head_dim, (form, options) in itertools.product((64, 96, 128, 192, 256), forms.items()):
        for length, causal in itertools.product((1024, 4096, 16384), (True, False)):
            name, heads = f"gradients{form} D{head_dim} S{length} {'causal' if causal else 'full'}", 2048 // head_dim
            sizes = 16384 // length, length, length, heads, heads, head_dim
            yield Cell(name, *sizes, causal, gradients=True, options=options)


def call_of(cell: Cell) -> Any:
    """A function that makes the call on random tensors."""
    import torch

    from kernels.flash_attn_interface import flydsl_flash_attn_func

    options = dict(cell.options)
    os.environ["FLY_KERNEL"] = "generic" if options.pop("generic", False) else ""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f8": torch.float8_e4m3fn}[cell.dtype]
    made = torch.Generator("cuda").manual_seed(1)

    def tensor(length: int, heads: int, dim: int = cell.head_dim) -> torch.Tensor:
        dense = torch.randn(cell.batch, length, heads, dim, device="cuda", generator=made).to(dtype)
        return dense.flatten(0, 1) if cell.packed else dense

    q, k = tensor(cell.queries, cell.heads), tensor(cell.keys, cell.kv_heads)
    v = tensor(cell.keys, cell.kv_heads, cell.head_dim_v or cell.head_dim)
    if cell.packed:
        for name, length in (("q", cell.queries), ("kv", cell.keys)):
            ends = torch.arange(cell.batch + 1, device="cuda", dtype=torch.int32) * length
            options |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": length}
    if "window_size" in options:
        options["window_size"] = tuple(options["window_size"])
    if "rng_state" in options:
        options["rng_state"] = torch.tensor(options["rng_state"], device="cuda")
    if not cell.gradients:
        return lambda: flydsl_flash_attn_func(q, k, v, cell.causal, **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flydsl_flash_attn_func(*leaves, cell.causal, **options)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def work() -> None:
    """A checkout's process: lines of JSON in, a time in ms for each out."""
    import torch

    call, name = None, None
    print(READY, flush=True)
    for line in sys.stdin:
        cell, what = Cell(**(asked := json.loads(line))["cell"]), asked["what"]
        if name != cell.name:
            call, name = call_of(cell), cell.name
            for _ in range(3):
                call()
            torch.cuda.synchronize()
        if what == "host":
            best = float("inf")
            for _ in range(HOST_REPEATS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                best = min(best, (time.perf_counter() - start) / HOST_CALLS * 1e3)
            torch.cuda.synchronize()
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record()
            for _ in range(BURST):
                call()
            end.record()
            end.synchronize()
            best = start.elapsed_time(end) / BURST
        print(best, flush=True)


class Tree:
    """A checkout, and its process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(Path(__file__).resolve()), "--work"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=self.environment, **pipes)
        self._line()

    def _line(self) -> str:
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"the process of {self.folder} ended with code {self.process.wait()}")
        return line

    def ask(self, cell: Cell, what: str) -> None:
        """Start a timing; `answer` has it."""
        self.process.stdin.write(json.dumps({"cell": asdict(cell), "what": what}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> float:
        """Milliseconds of one call."""
        return float(self._line())

    def time(self, cell: Cell, what: str) -> float:
        """`ask` and `answer`."""
        self.ask(cell, what)
        return self.answer()

    def cold(self, cell: Cell) -> float:
        """Milliseconds of a first call in a new process, without the disk cache, after torch is there."""
        program = (
            "import json, sys, time, torch; sys.path.insert(0, sys.argv[2]); torch.zeros(1, device='cuda')\n"
            "from compare_trees import Cell, call_of; start = time.perf_counter()\n"
            "call_of(Cell(**json.loads(sys.argv[1])))(); torch.cuda.synchronize()\n"
            "print((time.perf_counter() - start) * 1e3)"
        )
        command = [sys.executable, "-c", program, json.dumps(asdict(cell)), str(Path(__file__).resolve().parent)]
        environment = {**self.environment, "FLY_CACHE": "0"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])


def report(name: str, ratios: Sequence[list[float]]) -> list[float]:
    """Print a line, `ratios` of each new checkout, and give the medians."""
    quartiles = [statistics.quantiles(of_tree, n=4, method="inclusive") for of_tree in ratios]
    shown = (f"{median:8.4f}   {low:.4f} to {high:.4f}" for low, median, high in quartiles)
    print(f"{name:34}", *shown, flush=True)
    return [median for _, median, _ in quartiles]


def compare(trees: Sequence[Tree], cell: Cell, what: str, rounds: int) -> list[list[float]]:
    """Old / new of every round, for each new checkout."""
    for tree in trees:
        tree.ask(cell, what)  # all of them compile at a time
    for tree in trees:
        tree.answer()
    old, *new = zip(*([tree.time(cell, what) for tree in trees] for _ in range(rounds)), strict=True)
    return [[a / b for a, b in zip(old, of_tree, strict=True)] for of_tree in new]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="OLD NEW ...")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each checkout and cell")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name contains one of these")
    parser.add_argument("--kernels_only", action="store_true", help="no host times, and no cold compiles")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Compare."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    if len(arguments.trees) < 2:
        parser.error("pass two checkouts or more, the old one first")
    trees = [Tree(folder.resolve()) for folder in arguments.trees]
    chosen = [cell for cell in cells() if any(text in cell.name for text in arguments.only)]
    if not chosen:
        parser.error(f"no cell's name contains any of {', '.join(arguments.only)}")
    rounds = arguments.rounds
    print(f"{'old / new':34}", *(f"{tree.folder.name[-27:]:>27}" for tree in trees[1:]))
    print(f"{'':34} medians, and quartiles of {rounds} rounds")
    medians = [report(cell.name, compare(trees, cell, "kernel", rounds)) for cell in chosen]
    means = (f"{statistics.geometric_mean(of_tree):8.4f}" for of_tree in zip(*medians, strict=True))
    print(f"{'geometric mean':34}", "                    ".join(means))
    if arguments.kernels_only:
        return
    short = Cell("short", 1, 64, 64, 4, 4, 128)
    report("host time of a warm call", compare(trees, short, "host", rounds))
    colds = [[tree.cold(short) for tree in trees] for _ in range(min(rounds, 7))]
    report("cold compile and first call", [[cold[0] / cold[i] for cold in colds] for i in range(1, len(trees))])


if __name__ == "__main__":
    main()
