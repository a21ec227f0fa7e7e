"""Where an example can run: on a GPU, an emulated or simulated one, or nowhere, and then its code is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed will do

import torch

import fly
from fly import config
from fly.backends.nvvm.codegen import resources as ptxas_report
from fly.backends.target import target, targets

ARCHS = ("gfx942", "gfx950", "sm_80", "sm_90a")


def has_emulator() -> bool:
    """Whether AMD's machine code can be run."""
    return find_spec("tinygrad") is not None


def simulated() -> bool:
    """Whether CPU tensors run on a simulated NVIDIA GPU, which needs no other package."""
    return any(t.arch == config.ARCH.get() and t.backend == "nvvm" for t in targets())


def place() -> str | None:
    """The torch device to run on: "cuda", "cpu" (`FLY_ARCH`), or None if there is neither; or what --device says."""
    if "--device" in sys.argv:
        return sys.argv[sys.argv.index("--device") + 1]
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if has_emulator() or simulated() else None


def show(kernel: Any, *specs: Any, block: int, **statics: Any) -> None:
    """Compile for every kind of target, and print what each build uses and its first instructions."""
    for arch in ARCHS:
        built = fly.compile(kernel, *specs, block=block, target=arch, **statics)
        r = built.resources
        if target(arch).backend == "nvvm":
            r = ptxas_report(built.isa, arch, built.dynamic_shared)  # unknown where ptxas is not installed
        known = {"registers": r.registers, "shared bytes": r.shared_bytes, "spills": r.spills}
        print(f"{arch}: " + ", ".join(f"{v if v is not None else 'unknown'} {k}" for k, v in known.items()))
        code = built.isa.split(f"\n{kernel.name}", 1)[-1]
        lines = [line.split(";")[0].strip() if arch.startswith("gfx") else line.strip() for line in code.splitlines()]
        for line in [x for x in lines if x and x[0].isalpha() and not x.endswith(":")][:4]:
            print("    " + line)
    print("Nothing here can run it: that needs a GPU, or fly's emulator.")


def check(what: str, got: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    """Print the largest error; exit with 1 when it is above `bound`, or when something is not a number."""
    error = (got.double() - wanted.double()).abs().max().item()
    print(f"{what}: largest error {error:.2e}, allowed {bound:.2e}")
    if not error <= bound:
        sys.exit(f"{what} is wrong")


def race(ours: Callable[[], Any], theirs: Callable[[], Any], work: float, unit: str) -> None:
    """Time both on the GPU, taking turns; `work` is in `unit`s per call, such as bytes."""
    from benchmarks.timing import measure

    times = measure({"fly": ours, "torch": theirs}, device="cuda", iters=50, warmup=10)
    fly_, torch_ = (times[name].median for name in ("fly", "torch"))
    rates = f"{work / fly_ / 1e9:.2f} and {work / torch_ / 1e9:.2f} T{unit}/s"
    print(f"fly {fly_ * 1e3:.1f} µs, torch {torch_ * 1e3:.1f} µs: {rates}, {torch_ / fly_:.2f} times torch's speed")
