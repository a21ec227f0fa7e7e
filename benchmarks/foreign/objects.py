"""Foreign code objects: compiled in a process of their own, and launched on the emulator with our inputs.

Neither project is imported here. Each needs only the linker that our own kernels need; FlyDSL looks for one below
ROCM_PATH, where a stand-in is put.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.run_record import said
from fly import config
from fly.backends.rocdl.codegen import _find_lld
from fly.backends.target import target
from fly.emulator import Program, Region
from fly.emulator.timing import Launch
from fly.emulator.timing.launch import Places
from fly.errors import FlyError

ROOT = Path(__file__).resolve().parents[2]
# tokens of the call that a dispatch is asked about, FlyDSL's and ours: with few they take kernels for an empty chip
FULL_CHIP = 32768
# From 64 query blocks on FlyDSL deals workgroups to dies in another order, for which it calls a function of ROCm's
# device library. What a block does is the same, so that longer calls are served by the build for this length.
_LONGEST = 8192
_FORMATS = {"i32": "<i", "f32": "<f"}


class ForeignError(FlyError):
    """Another project's compiler is not installed, failed, or gave something unexpected."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one forward call, bf16; keys are as many as queries."""

    length: int
    head_dim: int
    causal: bool
    batch: int = 1
    heads: int = 32

    def inputs(self) -> dict[str, torch.Tensor]:
        """q, k, v, uniform in [-1, 1), and an output of NaN."""
        generator = torch.Generator().manual_seed(0)
        size = self.batch, self.length, self.heads, self.head_dim
        made = {name: (torch.rand(size, generator=generator) * 2 - 1).to(torch.bfloat16) for name in "qkv"}
        return {**made, "out": torch.full(size, float("nan"), dtype=torch.bfloat16)}


@dataclass(frozen=True)
class Foreign:
    """A compiled kernel and what a launch of it needs.

    Attributes:
        rows: queries of a workgroup; threads: of a workgroup.
        tiles: what it is, in words. heads_first: whether heads are the fastest axis of the grid, or query blocks.
        longest_first: whether the first query block of the grid is the last of the sequence.
        arguments: (kind, value) in the kernel's order: a tensor's name, or ("i32" | "f32", number).
    """

    program: Program
    kernel: str
    rows: int
    threads: int
    tiles: str
    grid: tuple[int, int, int]
    heads_first: bool
    longest_first: bool
    arguments: Sequence[tuple[str, Any]]
    dynamic_lds: int = 0

    def launch(self, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> Launch:
        """Bound to tensors, with the query block as each workgroup's place.

        Raises:
            ForeignError: the kernel has other arguments than these.
        """
        blocks = -(-shape.length // self.rows)
        # what a die starts one after another: a head's blocks where heads are dealt to dies, else a part of them
        dies = target(self.program.arch).xcds
        sharing = blocks if self.heads_first else -(-blocks // dies)

        def place(workgroup: int) -> int:
            block = workgroup // shape.heads % blocks if self.heads_first else workgroup % blocks
            return blocks - 1 - block if self.longest_first else block

        regions = [
            Region(t.data_ptr(), t.numel() * t.element_size(), name, name != "out") for name, t in tensors.items()
        ]
        return Launch(
            self.program, self.kernel, self.grid, (self.threads, 1, 1), self._packed(tensors), regions,
            self.dynamic_lds, (tensors,), Places(blocks, place, sharing),
        )  # fmt: skip

    def _packed(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        slots = self.program.code.kernels[self.kernel].explicit
        words: list[bytes] = []
        for kind, value in self.arguments:
            if kind in _FORMATS:
                words.append(struct.pack(_FORMATS[kind], value))
                continue
            tensor = tensors[value]
            words.append(struct.pack("<Q", tensor.data_ptr()))
            if kind == "described":  # FlyDSL's: sizes, and strides but for the last
                words.append(struct.pack("<4i3q", *tensor.shape, *tensor.stride()[:3]))
        words += [bytes(slot[".size"]) for slot in slots[len(words) :]]  # scratch pointers that nothing uses
        packed = bytearray(max(slot[".offset"] + slot[".size"] for slot in slots))
        for slot, word in zip(slots, words, strict=True):
            if slot[".size"] != len(word):
                raise ForeignError(f"{self.kernel}: an argument of {slot['.size']} bytes; expected {len(word)}")
            packed[slot[".offset"] : slot[".offset"] + len(word)] = word
        return bytes(packed)


@dataclass(frozen=True)
class Compilers:
    """Where the other projects are: a Python that has them, a checkout of FlyDSL, a folder for what comes out."""

    python: str
    checkout: Path | None
    folder: Path
    made: dict[Any, Any] = field(default_factory=dict)

    def _run(self, name: str, command: list[str], environment: Mapping[str, str]) -> Any:
        """The last line that a compiling process prints, as JSON.

        Raises:
            ForeignError: it failed.
        """
        done = subprocess.run(
            [self.python, *command],
            capture_output=True, text=True, check=False, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise ForeignError(f"{name} compiled nothing: {lines[-1] if lines else f'status {done.returncode}'}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def versions(self, names: Sequence[str]) -> str:
        """Of the other projects' packages in that Python, and the checkout's commit, on one line."""
        script = (
            "import sys, json\nfrom importlib.metadata import PackageNotFoundError, version\nfound = {}\n"
            "for name in sys.argv[1:]:\n    try: found[name] = version(name)\n    except PackageNotFoundError: pass\n"
            "print(json.dumps(found))"
        )
        found = self._run("Python", ["-c", script, *names], {})
        if self.checkout is not None and "flydsl" in found:
            commit = said(["git", "-C", str(self.checkout), "rev-parse", "--short=10", "HEAD"])
            found["flydsl"] += f"+kernels.of.{commit}" if commit else ""
        return " ".join(f"{name}={value}" for name, value in found.items())

    def triton(self, arch: str, shape: Shape) -> list[Foreign]:
        """Our Triton kernel, one for each configuration that fits the chip's LDS.

        Raises:
            ForeignError: Triton is not installed, or failed.
        """
        key = "triton", arch, shape.head_dim, shape.causal
        if key not in self.made:
            folder = self.folder / "-".join(map(str, key))
            folder.mkdir(parents=True, exist_ok=True)
            chosen = {"arch": arch, "head_dim": shape.head_dim, "causal": shape.causal, "directory": str(folder)}
            command = ["-m", "benchmarks.foreign.compile_triton", json.dumps(chosen)]
            found = self._run("Triton", command, {"TRITON_CACHE_DIR": str(self.folder / "triton-cache")})
            self.made[key] = [(Program(Path(one["path"]).read_bytes(), arch), one) for one in found]
        tensors = shape.inputs()
        values = {
            "scale": ("f32", shape.head_dim**-0.5 * 1.4426950408889634),
            "heads": ("i32", shape.heads), "seq_len": ("i32", shape.length), "seq_len_kv": ("i32", shape.length),
            **{name: ("pointer", name) for name in tensors},
            **{
                f"{name[0]}{axis}": ("i32", stride)
                for name, tensor in tensors.items()
                for axis, stride in zip("bsh", tensor.stride())
            },
        }  # fmt: skip
        return [
            Foreign(
                program, program.kernels[0], one["rows"], one["threads"], one["tiles"],
                (-(-shape.length // one["rows"]), shape.batch * shape.heads, 1), False, shape.causal,
                [values[name] for name in one["arguments"]], one["lds"],
            )
            for program, one in self.made[key]
            if one["lds"] <= target(arch).shared_bytes
        ]  # fmt: skip

    def flydsl(self, arch: str, shape: Shape) -> list[Foreign]:
        """The forward kernel that FlyDSL's dispatch takes for a shape, in a batch of `FULL_CHIP` tokens.

        Raises:
            ForeignError: FlyDSL is not installed, no checkout of it was given, or it failed.
        """
        if self.checkout is None:
            raise ForeignError("FlyDSL's kernels are not in its wheel; --flydsl names a checkout of the project")
        chosen = {
            "arch": arch, "head_dim": shape.head_dim, "causal": shape.causal, "heads": shape.heads,
            "batch": max(shape.batch, FULL_CHIP // shape.length), "length": min(shape.length, _LONGEST),
        }  # fmt: skip
        key = ("flydsl", *chosen.values())
        if key not in self.made:
            folder = self.folder / "-".join(map(str, key))
            environment = {
                "ARCH": arch, "FLYDSL_GPU_ARCH": arch, "COMPILE_ONLY": "1", "FLYDSL_DUMP_IR": "1",
                "FLYDSL_DUMP_DIR": str(folder), "FLYDSL_RUNTIME_CACHE_DIR": str(self.folder / "flydsl-cache"),
                "ROCM_PATH": str(self._rocm()),
            }  # fmt: skip
            script = str(Path(__file__).with_name("compile_flydsl.py"))
            found = self._run("FlyDSL", [script, str(self.checkout), json.dumps(chosen)], environment)
            modules = sorted(folder.glob("*/*_gpu_module_to_binary.mlir"))
            if len(modules) != 1:
                raise ForeignError(f"FlyDSL left {len(modules)} compiled modules in {folder}; expected one")
            self.made[key] = Program(binary_of(modules[0].read_text()), arch), found
        program, found = self.made[key]
        blocks, heads, batch = -(-shape.length // found["rows"]), shape.heads, shape.batch
        tensors, lengths = [("described", name) for name in ("q", "k", "v", "out")], [("i32", shape.length)] * 2
        unused = ("described", "out")
        if found["dual_wave"]:
            pitch = ("i32", heads * shape.head_dim)
            arguments = [*tensors, *[unused] * 8, *lengths, pitch, pitch, ("i32", shape.head_dim), *[("i32", 0)] * 3]
            grid = heads, blocks, batch
        else:
            arguments = [*tensors, unused, *lengths, *[unused] * 3, ("i32", 0)]
            grid = batch * blocks * heads, 1, 1
        kind = "dual-wave" if found["dual_wave"] else "generic"
        tiles = f"{kind}, {found['rows']} rows, {found['threads'] // 64} waves"
        kernel = program.kernels[0]
        return [Foreign(program, kernel, found["rows"], found["threads"], tiles, grid, True, False, arguments)]

    def _rocm(self) -> Path:
        """A folder that has an ld.lld where ROCm has it."""
        folder = self.folder / "rocm"
        program = folder / "llvm" / "bin" / "ld.lld"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {shlex.join(_find_lld(config.LLD.get()))} "$@"\n')
        program.chmod(0o755)
        return folder


def binary_of(module: str) -> bytes:
    """The code object in the text of a module with one `gpu.binary`.

    Raises:
        ForeignError: there is none.
    """
    found = re.search(r'\bbin = "((?:[^"\\]|\\.)*)"', module)
    if found is None:
        raise ForeignError("FlyDSL's module has no code object")
    text = found[1].encode("latin-1")
    return re.sub(rb"\\([0-9A-Fa-f]{2}|.)", lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1], text)
