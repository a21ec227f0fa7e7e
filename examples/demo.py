"""What `make demo` runs: the flash-attention kernel, compiled for AMD and NVIDIA, checked, and run where it can be.

Exits with 1 if a check fails: spilled registers, a matrix instruction too many or too few in a loop, loads of single
elements, PTX that ptxas rejects, or (where something can run it) a result that is off.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace

import _device
import torch

import fly
from fly.backends.artefact import Artefact
from fly.backends.nvvm.codegen import resources as ptxas_report
from fly.backends.target import Target, target
from fly.errors import CompileError
from fly.runtime.inspect import loops
from fly_attention.flash_attn_generic import GenericOptions, flash_attn_generic, options_for
from fly_attention.flash_attn_interface import flydsl_flash_attn_func

HEAD_DIMS = (64, 128)
EMULATED = ("gfx950", "gfx942")
NARROW_LOADS = ("buffer_load_ushort", "global_load_ushort", "buffer_load_short", "ld.global.b16", "ld.global.nc.b16")
TENSOR = fly.TensorSpec("bf16", rank=4, alignment=16, unit_stride=True)
FAILURES: list[str] = []


@dataclass(frozen=True)
class Build:
    """One compiled variant, and the seconds that it took in all."""

    target: Target
    options: GenericOptions
    artefact: Artefact
    seconds: float


def require(condition: bool, complaint: str) -> None:
    """Note a failed check; the demo goes on, and exits with 1."""
    if not condition:
        FAILURES.append(complaint)
        print(f"WRONG: {complaint}")


def table(head: list[str], rows: list[list[object]]) -> None:
    """Print columns, the first one aligned left."""
    text = [head, *([str("–" if cell is None else cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    for row in text:
        print("  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))))
    print()


def build(arch: str, head_dim: int) -> Build:
    """The causal bf16 kernel for one target and head dimension."""
    description = target(arch)
    options = options_for(description, head_dim, causal=True, alignment=16)
    block = options.waves * description.wave_size
    start = time.perf_counter()
    arguments = (*[TENSOR] * 4, None, fly.ScalarSpec("f32"), None, None)
    artefact = fly.compile(flash_attn_generic, *arguments, block=block, target=arch, options=options)
    seconds = time.perf_counter() - start
    if description.backend == "nvvm":
        try:
            report = ptxas_report(artefact.isa, arch, artefact.dynamic_shared)
            artefact = replace(artefact, resources=report)
        except CompileError as error:
            require(False, f"{arch} D{head_dim}: {error}")
    return Build(description, options, artefact, seconds)


def matrix_instructions(b: Build) -> int:
    """What one wave must issue per key tile: two products of block_m x block_n x head_dim, and nothing more."""
    atom, o = b.target.mma("bf16"), b.options
    multiplications = 2 * o.block_m * o.block_n * o.head_dim // o.waves
    return multiplications // (atom.m * atom.n * atom.k) * atom.issues


def check_build(b: Build) -> list[object]:
    """Check one build; its row of the table."""
    name = f"{b.target.arch} D{b.options.head_dim}"
    r, isa, wanted = b.artefact.resources, b.artefact.isa, matrix_instructions(b)
    main_loops = [loop for loop in loops(isa) if "matrix" in loop.mix]
    require(len(main_loops) == 2, f"{name}: {len(main_loops)} loops with matrix instructions instead of 2")
    for loop in main_loops:
        found = loop.mix["matrix"]
        require(found == wanted, f"{name}: {found} matrix instructions a key tile instead of {wanted}")
    for load in NARROW_LOADS:
        require(load not in isa, f"{name}: {load} loads single elements")
    require(not r.spills and not r.scratch_bytes, f"{name}: {r.spills} spills, {r.scratch_bytes} bytes of scratch")
    size = len(main_loops[0].opcodes) if main_loops else None
    shared = None if r.shared_bytes is None else f"{r.shared_bytes / 1024:g} KiB"
    return [name, r.registers, r.scalar_registers, shared, r.spills, size, wanted]


def time_of(b: Build) -> list[object]:
    """Where a build's time went, in milliseconds: its row of the table."""
    stages = {
        name.removeprefix("seconds: "): float(value)
        for name, value in b.artefact.metadata.items()
        if name.startswith("seconds: ")
    }
    translate, generate = stages.pop("translate"), stages.pop("code generation")
    passes = sum(stages.values())
    slowest = max(stages, key=stages.__getitem__)
    trace = b.seconds - translate - generate - passes
    name = f"{b.target.arch} D{b.options.head_dim}"
    parts = [f"{1e3 * s:.0f}" for s in (trace, passes, translate, generate, b.seconds)]
    return [name, *parts, f"{slowest} {1e3 * stages[slowest]:.0f}"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call with a single sequence."""

    seq_len: int
    seq_len_kv: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.seq_len} queries, {self.seq_len_kv} keys, D{self.head_dim}"


def run(device: str, where: str, shape: Shape) -> tuple[float, float, float]:
    """Flash attention on fresh random input, held against the same mathematics in float32.

    Returns:
        The largest error, the largest that is allowed, and the seconds that the call took with compiling.
    """
    from tests.kernels.reference import check, reference

    q = torch.rand(1, shape.seq_len, shape.heads, shape.head_dim, device=device).mul(2).sub(1).bfloat16()
    sizes = (1, shape.seq_len_kv, shape.kv_heads, shape.head_dim)
    k, v = (torch.rand(sizes, device=device).mul(2).sub(1).bfloat16() for _ in range(2))
    start = time.perf_counter()
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    report = check(out, reference(q, k, v, causal=True), lse)
    require(report.ok, f"{where}, {shape}: {report}")
    return report.error, report.bound, seconds


def emulate(shape: Shape) -> None:
    """Run the machine code of every emulated target on the CPU, and show what it executed."""
    from fly.emulator.scheduler import describe_mix
    from fly.runtime.device import CPU, device_for

    print(f"On the CPU, the machine code emulated instruction by instruction, with all checks on ({shape}):\n")
    rows, mixes = [], {}
    for arch in EMULATED:
        os.environ["FLY_ARCH"] = arch
        error, bound, seconds = run("cpu", arch, shape)
        done = device_for(CPU).last
        times = f"{seconds:.1f} s", f"{done.seconds:.1f} s"
        rows.append([arch, f"{error:.1e}", f"{bound:.1e}", *times, f"{done.executed:,}", f"{done.rate / 1e6:.2f} M"])
        mixes[arch] = describe_mix(done.mix)
    table(["target", "error", "allowed", "call", "of it running", "wave-instructions", "a second"], rows)
    kinds = sorted(
        {kind for mix in mixes.values() for kind in mix}, key=lambda kind: -mixes[EMULATED[0]].get(kind, 0)
    )
    shares = [
        [arch, *(f"{100 * mix.get(k, 0) / sum(mix.values()):.1f}%" for k in kinds)] for arch, mix in mixes.items()
    ]
    table(["executed", *kinds], shares)


def simulate(shape: Shape) -> None:
    """Run the Hopper kernel's operations in several schedules, and show what they were."""
    from fly.runtime.device import CPU, device_for

    print(f"On the CPU, a simulated Hopper GPU: TMA, mbarriers, WGMMA, with all checks on ({shape}):\n")
    os.environ["FLY_ARCH"] = "sm_90a"
    rows = []
    for seed in range(3):
        os.environ["FLY_SIMULATOR_SEED"] = str(seed)
        error, bound, seconds = run("cpu", "sm_90a", shape)
        done = device_for(CPU).last
        counts = (
            f"{done['blocks']}",
            f"{done['bulk copies']:,}",
            f"{done['bytes'] >> 10:,} KiB",
            f"{done['products']:,}",
        )
        rows.append([f"sm_90a, schedule {seed}", f"{error:.1e}", f"{bound:.1e}", f"{seconds:.1f} s", *counts])
    table(["target", "error", "allowed", "call", "blocks", "bulk copies", "of", "WGMMA"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Flash attention: compiled, checked, and run where something can.")
    parser.add_argument("--length", type=int, default=512, help="queries and keys of the calls on the CPU")
    length = parser.parse_args().length
    os.environ["FLY_CACHE"] = "0"  # the times shown are of this run
    print("Flash attention, causal, bf16: one kernel source, compiled for four targets\n")
    builds = [build(arch, head_dim) for arch in _device.ARCHS for head_dim in HEAD_DIMS]
    rows = [check_build(b) for b in builds]
    table(["target", "registers", "scalar", "shared", "spills", "main loop", "of it matrix"], rows)
    ptxas = "ptxas accepts the PTX" if shutil.which("ptxas") else "ptxas is not installed: no registers for NVIDIA"
    print(f"  instructions of one wave per key tile; {ptxas}\n")
    print("Where the time went, milliseconds (the first build also loads MLIR and LLVM)\n")
    table(["target", "trace", "passes", "to LLVM IR", "LLVM", "in all", "slowest pass"], [time_of(b) for b in builds])

    place = _device.place()
    if _device.has_emulator():
        emulate(Shape(length, length, 4, 4, 128))
    simulate(Shape(length, length, 4, 4, 128))
    if place == "cuda":
        print(f"On {torch.cuda.get_device_name()}:")
        for head_dim in HEAD_DIMS:
            shape = Shape(1000, 1500, 8, 1, head_dim)
            error, bound, seconds = run("cuda", "GPU", shape)
            print(f"  {shape}: error {error:.1e}, allowed {bound:.1e} ({seconds:.1f} s with compiling)")
    if place is None:
        print("Nothing here runs machine code: that needs a GPU, or fly's emulator.")
    print(f"\n{len(FAILURES)} checks failed" if FAILURES else "\nAll checks passed.")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
